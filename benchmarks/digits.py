"""Encoders on images: scikit-learn's 8 x 8 digits as 16 patches; softmax, sigmoid and relu, linear and nonlinear
queries.

    pip install scikit-learn && python benchmarks/digits.py

Each patch of 2 x 2 pixels is one token: a linear layer makes its embedding, and the encoder gets `inputs_embeds`. The
classifier reads the mean of all tokens. In six-fold cross-validation, the fold after the test is for validation, by
which each model chooses its learning rate. The models of a fold share the seed and the order of the images.
`docs/encoders.md` has the results.
"""

import itertools
import tempfile
from statistics import mean

import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

from modeling_nlq import NLQConfig, NLQForSequenceClassification
from modeling_nlq.training.comparison.inference import analyse
from modeling_nlq.training.comparison.lr_search import Rates
from modeling_nlq.training.comparison.tables import p_value, with_interval


FOLDS = 6
RATES = Rates(start=4e-3, factor=2)


class DigitClassifier(nn.Module):
    """Embeds patches of pixels, and classifies their sequence by an NLQ encoder."""

    def __init__(self, activation: str, queries: str):
        super().__init__()
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16}
        switches = {"is_causal": False, "attention_activation": activation, "query_projection": queries}
        config = NLQConfig(vocab_size=1, num_labels=10, **sizes, **switches)
        self.patches, self.encoder = nn.Linear(4, config.hidden_size), NLQForSequenceClassification(config)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None):
        """`(batch, 8, 8)` grey values from 0 to 16 -> the loss and logits `(batch, 10)`."""
        patches = nn.functional.unfold(pixels[:, None] / 16, kernel_size=2, stride=2).transpose(1, 2)
        return self.encoder(inputs_embeds=self.patches(patches), labels=labels)


def train(fold: int, rate: float, activation: str, queries: str) -> tuple[float, float, float]:
    """Trains on four folds, and returns the loss on the next one, and the loss and accuracy on `fold` itself."""
    digits = load_digits()
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(digits.images, digits.target)
    test, validation, *others = (
        part for _, part in itertools.islice(itertools.cycle(list(folds)), fold, fold + FOLDS)
    )
    images = Dataset.from_dict({"pixels": digits.images.astype("float32"), "labels": digits.target}).with_format(
        "torch"
    )
    set_seed(fold)
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    schedule = {"learning_rate": rate, "lr_scheduler_type": "cosine", "warmup_steps": 50, "num_train_epochs": 30}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, per_device_train_batch_size=32, seed=fold, **schedule, **quiet)
        model = DigitClassifier(activation, queries)
        trainer = Trainer(model, arguments, train_dataset=images.select(itertools.chain(*others)))
        trainer.train()
        held_out, tested = (trainer.predict(images.select(part)) for part in (validation, test))
    accuracy = (tested.predictions.argmax(-1) == tested.label_ids).mean()
    return held_out.metrics["test_loss"], tested.metrics["test_loss"], float(accuracy)


def main() -> None:
    """Prints a row for each model, with a verdict over the folds."""
    found, at_boundary = {}, set()
    for names in itertools.product(("softmax", "sigmoid", "relu"), ("linear", "nonlinear")):
        found[names] = []
        for fold in range(FOLDS):
            runs, losses = {}, {}
            while missing := RATES.next(losses):
                runs |= {rate: train(fold, rate, *names) for rate in missing}
                losses = {rate: run[0] for rate, run in runs.items()}
            at_boundary |= {names} if RATES.boundary(losses) else set()
            found[names].append((RATES.best(losses), *runs[RATES.best(losses)][1:]))
    test_losses = {names: {fold: run[1] for fold, run in enumerate(runs)} for names, runs in found.items()}
    effects = analyse(test_losses, ("softmax", "linear"), at_boundary=at_boundary).effects
    print(
        "| activation, queries | rates | test loss | accuracy (%) | improvement of the loss (%) | Holm p | verdict |"
    )
    print("|---|---|---|---|---|---|---|")
    for names, runs in found.items():
        rates, losses, accuracies = map(sorted, zip(*runs))
        cells = (", ".join(names), f"{rates[0]:g} to {rates[-1]:g}", f"{mean(losses):.4f}")
        row = f"| {' | '.join(cells)} | {100 * mean(accuracies):.2f} |"
        if effect := effects.get(names):
            improvement = with_interval(effect.loss_improvement, effect.loss_improvement_interval, "+.1f")
            row += f" {improvement} | {p_value(effect.holm_p)} | {effect.verdict} |"
        else:
            row += " | | baseline |"
        print(row)


if __name__ == "__main__":
    main()

"""Encoders on images: scikit-learn's 8 x 8 digits as 16 patches; softmax, sigmoid and relu, linear and nonlinear queries.

    pip install scikit-learn && python benchmarks/digits.py

Each patch of 2 x 2 pixels is one token: a linear layer makes its embedding, and the encoder gets `inputs_embeds`. The
classifier reads the mean of all tokens. The models of a seed share the split and the order of the images.
`docs/encoders.md` has the table that this prints.
"""

import argparse
import itertools
import math
import statistics
import tempfile

import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

from modeling_nlq import NLQConfig, NLQForSequenceClassification
from modeling_nlq.training.comparison.inference import analyse


class DigitClassifier(nn.Module):
    """Embeds patches of pixels, and classifies their sequence by an NLQ encoder."""

    def __init__(self, **switches):
        super().__init__()
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16}
        config = NLQConfig(is_causal=False, vocab_size=1, num_labels=10, **sizes, **switches)
        self.patches, self.encoder = nn.Linear(4, config.hidden_size), NLQForSequenceClassification(config)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None):
        """`(batch, 8, 8)` grey values from 0 to 16 -> the loss and logits `(batch, 10)`."""
        patches = nn.functional.unfold(pixels[:, None] / 16, kernel_size=2, stride=2).transpose(1, 2)
        return self.encoder(inputs_embeds=self.patches(patches), labels=labels)


def losses(seed: int, rate: float, epochs: int, **switches) -> tuple[float, float, float]:
    """Trains on 60 % of the images; returns the losses on 20 % for validation and 20 % for test, and the test accuracy."""
    digits = load_digits()
    images, labels = digits.images.astype("float32"), digits.target
    train, rest = train_test_split(range(len(labels)), test_size=0.4, random_state=seed, stratify=labels)
    validation, test = train_test_split(rest, test_size=0.5, random_state=seed, stratify=labels[rest])
    parts = [
        Dataset.from_dict({"pixels": images[part], "labels": labels[part]}).with_format("torch")
        for part in (train, validation, test)
    ]
    set_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=512,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=50,
            seed=seed,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = Trainer(DigitClassifier(**switches), arguments, train_dataset=parts[0])
        trainer.train()
        predictions = [trainer.predict(part) for part in parts[1:]]
    right = predictions[1].predictions.argmax(-1) == predictions[1].label_ids
    return *(done.metrics["test_loss"] for done in predictions), float(right.mean())


def main() -> None:
    """Prints a row for each model, at its rate of the lowest mean validation loss, and a verdict over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 9e-3])
    given = parser.parse_args()
    found, best = {}, {}
    for names in itertools.product(("softmax", "sigmoid", "relu"), ("linear", "nonlinear")):
        switches = dict(zip(("attention_activation", "query_projection"), names))
        runs = {rate: [losses(seed, rate, given.epochs, **switches) for seed in range(given.seeds)] for rate in given.rates}
        best[names] = min(runs, key=lambda rate: statistics.mean(run[0] for run in runs[rate]))
        found[names] = runs[best[names]]
    baseline = next(iter(found))
    edges = {names for names, rate in best.items() if rate in (min(given.rates), max(given.rates))}
    test_losses = {names: {seed: run[1] for seed, run in enumerate(runs)} for names, runs in found.items()}
    effects = analyse(test_losses, baseline, at_boundary=edges).effects
    print("| activation | queries | rate | test loss | test accuracy (%) | improvement of loss (%) | Holm p | verdict |")
    print("|---|---|---|---|---|---|---|---|")
    for names, runs in found.items():
        loss, accuracy = (statistics.mean(run[index] for run in runs) for index in (1, 2))
        cells = [*names, f"{best[names]:g}", f"{loss:.4f}", f"{100 * accuracy:.2f}"]
        if names != baseline:
            effect = effects[names]
            interval = "" if effect.holm_p is None else "[{:+.1f}, {:+.1f}]".format(*effect.loss_improvement_interval)
            cells += [f"{effect.loss_improvement:+.1f} {interval}", f"{effect.holm_p or math.nan:.2g}", effect.verdict]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

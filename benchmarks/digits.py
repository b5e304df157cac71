"""Encoders on images: scikit-learn's 8 x 8 digits as 16 patches, softmax and sigmoid, linear and nonlinear queries.

    pip install scikit-learn && python benchmarks/digits.py

Each patch of 2 x 2 pixels is one token: a linear layer makes its embedding, and the encoder gets `inputs_embeds`. The
classifier reads the mean of all tokens. The models of a seed share the split and the order of the images.
`docs/encoders.md` has the means that this prints.
"""

import argparse
import itertools
import statistics
import tempfile

import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

from modeling_nlq import NLQConfig, NLQForSequenceClassification


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


def accuracy(seed: int, epochs: int, **switches) -> float:
    """Trains a model on 70 % of the images, and returns its share of right answers on the others."""
    digits = load_digits()
    images, labels = digits.images.astype("float32"), digits.target
    split = train_test_split(images, labels, test_size=0.3, random_state=seed, stratify=labels)
    train, test = (Dataset.from_dict({"pixels": x, "labels": y}).with_format("torch") for x, y in zip(split[:2], split[2:]))
    set_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=50,
            seed=seed,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = Trainer(DigitClassifier(**switches), arguments, train_dataset=train)
        trainer.train()
        predicted = trainer.predict(test)
    return float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())


def main() -> None:
    """Prints a row for each activation and query projection: the mean and the standard deviation over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    given = parser.parse_args()
    print("| activation | queries | parameters | test accuracy (%) | of each seed |\n|---|---|---|---|---|")
    for activation, query in itertools.product(("softmax", "sigmoid"), ("linear", "nonlinear")):
        switches = {"attention_activation": activation, "query_projection": query}
        found = [100 * accuracy(seed, given.epochs, **switches) for seed in range(given.seeds)]
        size = sum(parameter.numel() for parameter in DigitClassifier(**switches).parameters())
        each = " ".join(f"{value:.1f}" for value in found)
        print(f"| {activation} | {query} | {size:,} | {statistics.mean(found):.2f} ± {statistics.stdev(found):.2f} | {each} |")


if __name__ == "__main__":
    main()

"""Evaluation inside `Trainer`, through the `evaluate` metric that ships here."""

from pathlib import Path

import evaluate
import torch
from transformers import EvalPrediction


METRIC = Path(__file__).parent / "metrics" / "language_modeling" / "language_modeling.py"


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduces logits to two numbers a token, so that an evaluation fits in memory (`preprocess_logits_for_metrics`).

    Args:
        logits: `(batch, length, vocabulary)`; a tuple that begins with them is read as Transformers' models return it.
        labels: `(batch, length)`; -100 is ignored.

    Returns:
        `(batch, length - 1)` each: negative log-likelihood in nats (0 where ignored), and whether the token was the likeliest.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    logits, targets = logits[:, :-1], labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), targets, ignore_index=-100, reduction="none")
    return losses, logits.argmax(dim=-1) == targets


class LanguageModelingMetrics:
    """Trainer's `compute_metrics` with `batch_eval_metrics=True`: sums batch after batch, computes at the end.

    Args:
        bytes_per_token: of the evaluated text, for bits per byte; `None` leaves those out.
    """

    def __init__(self, bytes_per_token: float | None = None):
        self.bytes_per_token = bytes_per_token
        self.metric = evaluate.load(str(METRIC), keep_in_memory=True)

    def __call__(self, prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        losses, correct = prediction.predictions
        self.metric.add(
            negative_log_likelihood=losses.double().sum().item(),
            correct=correct.sum().item(),
            tokens=(prediction.label_ids[:, 1:] != -100).sum().item(),
        )
        return self.metric.compute(bytes_per_token=self.bytes_per_token) if compute_result else {}

"""The result of a run: one typed value, which `metrics.json` holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .disk import write_text
from .files import METRICS_FILE, read_json
from .size import Size
from .values import Value, from_json, to_json


VERSION = 1


@dataclass(frozen=True)
class Evaluation(Value):
    """What an evaluation measured on a split; `None` for what does not apply, or is infinite or NaN.

    The loss is in nats per token or masked token, and the mean of `loss_parts`, on parts of the text. `runtime` is in
    seconds.
    """

    loss: float | None = None
    perplexity: float | None = None
    pseudo_perplexity: float | None = None
    bits_per_byte: float | None = None
    token_accuracy: float | None = None
    chrf: float | None = None
    loss_parts: list[float] | None = None
    runtime: float | None = None
    samples_per_second: float | None = None
    steps_per_second: float | None = None

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float], prefix: str, **more: Any) -> "Evaluation":
        """Takes the metrics with a prefix from those that `Trainer.evaluate` returns."""
        named = {item.name: metrics.get(f"{prefix}_{item.name}", math.nan) for item in fields(cls)}
        return cls(**{name: value for name, value in named.items() if math.isfinite(value)} | more)


@dataclass(frozen=True)
class Losses(Value):
    """The last finite training loss, in nats per token, and the evaluations at the end.

    Attributes:
        diverged: whether the validation loss is worse than that of an untrained model.
        diverged_at: the step after which an infinite or NaN loss ended the run.
    """

    diverged: bool
    diverged_at: int | None = None
    train: float | None = None
    validation: Evaluation = Evaluation()
    test: Evaluation = Evaluation()


@dataclass(frozen=True)
class Data(Value):
    """What the model was trained on.

    Attributes:
        tokens_seen, token_stream: see `RunRecord`.
        trained_on: see `read_trained_on`; this run's data are the last.
        is_fine_tuned: whether the run began with saved weights.
        base_model: the model on the Hub from which they come.
    """

    steps: int
    tokens_seen: int
    token_stream: str
    train_tokens: int | None = None
    validation_tokens: int | None = None
    test_tokens: int | None = None
    fingerprint: str | None = None
    trained_on: list[dict[str, Any]] = field(default_factory=list)
    is_fine_tuned: bool = False
    base_model: str | None = None


@dataclass(frozen=True)
class Machine(Value):
    """Where and by what the model was trained, and the time of the training steps in `seconds`.

    `threads` are PyTorch's in each process, and `code` is the fingerprint of this package's files. `mfu` is the model
    FLOPs utilisation (Chowdhery et al. 2022, arXiv 2204.02311): the share of the devices' peak that the model takes.
    It is `None` in float32, and on a device that `PEAK_TFLOPS` lacks.
    """

    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory: int | None = None
    processes: int = 1
    device: str = ""
    threads: int | None = None
    code: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    mfu: float | None = None


@dataclass(frozen=True)
class Attention(Value):
    """The attention backend, and its kernels in one line."""

    attn_implementation: str = ""
    kernels: str = ""


@dataclass(frozen=True)
class RunResult(Value):
    """What a run measured, and where. A run that has this file is finished."""

    losses: Losses
    data: Data
    size: Size = field(default_factory=lambda: Size(0, 0, 0, 0))
    machine: Machine = Machine()
    attention: Attention = Attention()
    version: int = VERSION

    @property
    def test_loss(self) -> float | None:
        """The loss on the test split; `None` for a model that diverged."""
        return None if self.losses.diverged else self.losses.test.loss

    def save(self, folder: Path) -> None:
        write_text(folder / METRICS_FILE, to_json(self, indent=2))

    @classmethod
    def load(cls, folder: Path) -> "RunResult":
        """Reads `metrics.json`; raises `ValueError` for a wrong or missing field."""
        file = folder / METRICS_FILE
        return from_json(cls, read_json(file), f"{file}: ")

    @staticmethod
    def fields_in(content: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields in groups, which files without a version lack."""
        if "version" in content:
            return content
        nested: dict[str, Any] = {}
        for name, path in _FLAT.items():
            if name in content:
                *groups, last = path.split(".")
                group = nested
                for part in groups:
                    group = group.setdefault(part, {})
                group[last] = content[name]
        return nested


# Fields of files without a version: `metrics.json`, and a run in `results.json`
_FLAT = {
    f"{prefix}_{item.name}": f"losses.{split}.{item.name}"
    for prefix, split in (("eval", "validation"), ("test", "test"))
    for item in fields(Evaluation)
}
_FLAT |= {
    item.name: f"{group}.{item.name}"
    for group, kind in (("losses", Losses), ("data", Data), ("machine", Machine), ("attention", Attention))
    for item in fields(kind)
}
_FLAT |= {
    "train_loss": "losses.train",
    "validation_loss": "losses.validation.loss",
    "chrf": "losses.validation.chrf",
    "bits_per_byte": "losses.test.bits_per_byte",
    "token_accuracy": "losses.test.token_accuracy",
    "dataset_fingerprint": "data.fingerprint",
    "parameters": "size.total",
    "non_embedding_parameters": "size.non_embedding",
    "trained_parameters": "size.trained",
    "flops_per_token": "size.flops_per_token",
    "train_seconds": "machine.seconds",
}

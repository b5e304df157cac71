"""The finished runs in the folder of a comparison."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..files import METRICS_FILE, read_json
from ..values import from_json
from .comparison import Run
from .config import SINGLE


# The types of the fields of `metrics.json`
_FIELDS: dict[str, Any] = {"diverged": bool, "versions": dict[str, str], "test_loss_parts": list[float] | None}
_FIELDS |= dict.fromkeys(("steps", "tokens_seen", "trained_parameters"), int)
_FIELDS |= dict.fromkeys(("token_stream", "attn_implementation", "device", "kernels"), str)
_FIELDS |= dict.fromkeys(
    ("diverged_at", "peak_memory", "train_tokens", "validation_tokens", "test_tokens"), int | None
)
_FIELDS |= dict.fromkeys(("train_loss", "train_seconds", "tokens_per_second"), float | None)
_FIELDS |= dict.fromkeys(("dataset_fingerprint", "base_model"), str | None)
_REQUIRED = _FIELDS.keys() - {"test_loss_parts", "trained_parameters", "kernels", "base_model"} | {"test_loss"}


def check_metrics(file: Path, metrics: dict[str, Any], required: Collection[str] = _REQUIRED) -> None:
    """Raises `ValueError` for the content of a `metrics.json` of which a field is missing or of another type."""
    kinds = {name: float | None for name in metrics if name.startswith(("eval_", "test_"))} | _FIELDS
    kinds |= {} if metrics.get("diverged") else {"eval_loss": float, "test_loss": float | None}
    for name, kind in kinds.items():
        if name in metrics:
            from_json(kind, metrics[name], f"{file}: {name}.")
        elif name in required:
            raise ValueError(f"{file}: {name} is missing")


def scale_folder(folder: Path, name: str) -> Path:
    """Returns the folder of a scale in that of its comparison, which is the same for a single scale."""
    return folder if name == SINGLE else folder / "scales" / name


def run_folder(folder: Path, run: Run) -> Path:
    """The folder of a run in that of its scale."""
    return folder / "runs" / run.name


class RunStore(Mapping[str, dict[str, Any]]):
    """The metrics of the finished runs in the folder of a scale, by the names of the runs.

    Args:
        folder: the folder of the scale.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._metrics: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._metrics:
            file = self.folder / "runs" / name / METRICS_FILE
            if not file.is_file():
                raise KeyError(name)
            check_metrics(file, metrics := read_json(file))
            self._metrics[name] = metrics
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        files = self.folder.glob(f"runs/*/*/{METRICS_FILE}")
        return iter({*self._metrics, *(f"{file.parent.parent.name}/{file.parent.name}" for file in files)})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, run: str, metrics: dict[str, Any]) -> None:
        """Adds the metrics of a run that was finished just now, which a shared folder may show later."""
        self._metrics[run] = metrics

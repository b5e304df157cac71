"""Trains, evaluates, compares, shows, converts and publishes models: `from modeling_nlq.training import train, ...`.

The functions do what the command line does. They are imported on first use, so that importing this package is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .api import compare, publish, train
    from .conversion.converting import convert
    from .explorer.exploring import explore
    from .run.evaluation import evaluate
    from .run.tasks import evaluate_tasks

_MODULES = {
    "compare": "api",
    "convert": "conversion.converting",
    "evaluate": "run.evaluation",
    "explore": "explorer.exploring",
    "evaluate_tasks": "run.tasks",
    "publish": "api",
    "train": "api",
}

__all__ = ["compare", "convert", "evaluate", "evaluate_tasks", "explore", "publish", "train"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

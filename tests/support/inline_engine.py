"""An engine that makes runs in the process of the tests, where everything is imported already."""

from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from modeling_nlq.training.comparison.local import LocalEngine
from modeling_nlq.training.run import train
from modeling_nlq.training.run.recipe import Recipe


def finished_future(result) -> Future:
    """Returns a future that has its result."""
    future = Future()
    future.set_result(result)
    return future


class InlineEngine(LocalEngine):
    """Makes the same runs as `LocalEngine`, without logs and progress.

    Nor are losses drawn unless it `draws_losses`: that takes a third of the time.
    """

    draws_losses = False

    def submit(self, name: str, recipe: Recipe, data: Path) -> Future:
        with nullcontext() if self.draws_losses else patch.object(train, "plot_losses"):
            return finished_future(train.train_recipe(recipe, data))

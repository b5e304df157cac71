"""An engine that makes runs in the process of the tests, where everything is imported already."""

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from modeling_nlq.training.comparison.local import LocalEngine
from modeling_nlq.training.comparison.plan import Scale
from modeling_nlq.training.comparison.results import RunStore, next_runs, run_folder
from modeling_nlq.training.run import trainer


class InlineEngine(LocalEngine):
    """Makes the same runs as `LocalEngine`, without logs and progress.

    Nor are losses drawn unless it `draws_losses`: that takes a third of the time.
    """

    draws_losses = False

    def make_runs(self, scale: Scale, folder: Path, data: Path, finished: RunStore) -> None:
        while ready := next_runs(scale, finished)[0]:
            for run in ready:
                with nullcontext() if self.draws_losses else patch.object(trainer, "plot_losses"):
                    trainer.train_recipe(scale.recipe_of(run, run_folder(folder, run)), data)

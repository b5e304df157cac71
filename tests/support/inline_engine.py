"""An engine that makes runs in the process of the tests, where everything is imported already."""

from pathlib import Path

from modeling_nlq.training.comparison.local import LocalEngine
from modeling_nlq.training.comparison.plan import Scale
from modeling_nlq.training.comparison.results import RunStore, next_runs, run_folder
from modeling_nlq.training.run.trainer import train_recipe


class InlineEngine(LocalEngine):
    """Makes the same runs as `LocalEngine`, without logs and progress."""

    def make_runs(self, scale: Scale, folder: Path, data: Path, finished: RunStore) -> None:
        while ready := next_runs(scale, finished)[0]:
            for run in ready:
                train_recipe(scale.resolve(run, run_folder(folder, run)), data)

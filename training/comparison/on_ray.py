"""Makes the runs of a comparison on a cluster of Ray, as many at once as fit into it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ..run.ray_jobs import RayWorkers, share_data
from ..run.run_folder import RunFolder
from .comparison import Run, Scale


# Subfolder of the results with tokenizer and tokenised data. The driver holds its lock
_DATA = ".data"


class RayEngine(RayWorkers):
    """Makes runs on the cluster of `RAY_ADDRESS`, or on one of this machine; its options are those of `RayWorkers`."""

    def connected(self, scales: Sequence[Scale]) -> AbstractContextManager[None]:
        """Connects to the cluster; raises as `at_work`."""
        return self.at_work(variant.recipe for scale in scales for variant in scale.variants.values())

    def alone_in(self, folder: Path) -> AbstractContextManager[None]:
        """Refuses a second driver of the folder."""
        return RunFolder(folder / _DATA, plan=None).held()

    def choose_threads(self, folder: Path) -> None:
        """Leaves the number that the run reserves."""

    def prepare_data(self, scale: Scale, folder: Path) -> tuple[Path, str | None]:
        """Saves tokenizer and tokenised data in the folder."""
        return share_data(scale.recipe_of(Run(scale.baseline, 1.0, 0), folder), folder / _DATA)

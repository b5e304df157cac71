"""The engine of a cluster: the runs of a comparison on Ray, as many at once as there is room for."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..run.ray_jobs import RayWorkers, Resources, share_data
from ..run.run_folder import RunFolder
from .plan import Run, Scale


# The folder of what nodes read, in that of the results. The driver at work holds it
_DATA = ".data"


class RayEngine(RayWorkers):
    """Makes runs on the cluster that Ray finds: that of `RAY_ADDRESS`, else one of this machine.

    Args:
        options: those of `Resources`.
    """

    def __init__(self, **options: Any):
        super().__init__(Resources(**options))

    def connected(self, scales: Sequence[Scale]) -> AbstractContextManager[None]:
        """Connects to the cluster; raises as `at_work`."""
        return self.at_work(variant.recipe for scale in scales for variant in scale.variants.values())

    def alone_in(self, folder: Path) -> AbstractContextManager[None]:
        """Refuses a second driver of the folder."""
        return RunFolder(folder / _DATA, plan=None).held()

    def prepare_data(self, scale: Scale, folder: Path) -> tuple[Path, str | None]:
        """Saves tokenizer and tokenised data in the folder."""
        return share_data(scale.recipe_of(Run(scale.baseline, 1.0, 0), folder), folder / _DATA)

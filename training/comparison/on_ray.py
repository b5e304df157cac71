"""The engine of a cluster: the runs of a comparison on Ray, as many at once as there is room for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..run.ray_jobs import RayWorkers, Resources, connected_to_ray, share_batch, share_data
from ..run.run_folder import RunFolder
from ..storage import origin, publish
from .comparison import Run, Scale


# Folders in that of the results: what nodes read, and the lock of the driver at work
_DATA, _DRIVER = ".data", ".driver"


class RayEngine(RayWorkers):
    """Makes runs on the cluster that Ray finds: that of `RAY_ADDRESS`, else one of this machine.

    Args:
        options: those of `Resources`.
    """

    def __init__(self, **options: Any):
        self.resources = Resources(**options)

    @contextmanager
    def connected(self, scales: Sequence[Scale], folder: Path) -> Iterator[None]:
        """Connects to the cluster.

        Raises:
            ValueError: if the workers cannot share the batches, or the cluster does not answer or has no room for a
                run.
        """
        for scale in scales:
            for variant in scale.variants.values():
                share_batch(variant.recipe, self.resources.workers_per_run)
        with connected_to_ray():
            self.resources.check_room()
            super().__init__(origin(folder), self.resources, folder)
            try:
                yield
            finally:
                self.close()

    @contextmanager
    def alone_in(self, folder: Path) -> Iterator[None]:
        """Refuses a second driver of the folder, and keeps an address as its folder is here."""
        with RunFolder(folder / _DRIVER, plan=None).held():
            publish(folder)
            try:
                yield
            finally:
                publish(folder)

    def prepare_data(self, scale: Scale, folder: Path) -> tuple[Path, str | None]:
        """Saves tokenizer and tokenised data in the folder."""
        recipe = scale.recipe_of(Run(scale.baseline, 1.0, 0), folder)
        models = {variant.recipe.model for variant in scale.variants.values()}
        name, fingerprint = share_data(recipe, models, origin(folder), _DATA)
        return folder / name, fingerprint

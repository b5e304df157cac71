"""The engine of a cluster: the runs of a comparison on Ray, as many at once as there is room for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from ..run.ray_jobs import Resources, connected_to_ray, make_runs, share_batch, share_data
from ..run.run_folder import RunFolder
from ..run.unattended import RunSpec
from ..storage import fetch, origin, publish
from ..text import bar_options
from .plan import Run, Scale
from .results import RunStore, next_runs, run_folder


# Folders in that of the results: what nodes read, and the lock of the driver at work
_DATA, _DRIVER = ".data", ".driver"


@dataclass(frozen=True)
class RayEngine(Resources):
    """Makes runs on the cluster that Ray finds: that of `RAY_ADDRESS`, else one of this machine."""

    @contextmanager
    def connected(self, scales: Sequence[Scale], folder: Path) -> Iterator[None]:
        """Connects to the cluster.

        Raises:
            ValueError: if the workers cannot share the batches, or the cluster does not answer or has no room for a
                run.
        """
        for scale in scales:
            for variant in scale.variants.values():
                share_batch(variant.recipe, self.workers_per_run)
        with connected_to_ray():
            self.check_room()
            yield

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

    def make_runs(self, scale: Scale, folder: Path, data: Path, finished: RunStore) -> None:
        """Makes the runs that are not finished. A search goes on as soon as its own runs are finished.

        Raises:
            ChildProcessError: naming the runs that failed; all others are finished.
        """
        place, steps = data.parents[1], scale.steps_per_run
        runs: dict[str, Run] = {}

        def ready() -> list[RunSpec]:
            # Of each model the next rates of its search; of all open models the next seed, after a look of
            # `stop: early`
            found, count = next_runs(scale, finished)
            progress.total = (count + len(found)) * steps
            runs.update((run.name, run) for run in found)
            return [
                RunSpec(
                    run.name,
                    scale.recipe_of(run, run_folder(folder, run).relative_to(place)),
                    data.relative_to(place).as_posix(),
                )
                for run in found
            ]

        done = next_runs(scale, finished)[1] * steps
        with tqdm(desc=scale.name, initial=done, unit="step", **bar_options()) as progress:
            for spec, metrics in make_runs(origin(place), self, ready, progress, steps):
                finished.add(runs[spec.name], metrics)
                fetch(place / spec.recipe.output_dir, has_large=False)

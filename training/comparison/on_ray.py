"""The engine of a cluster: the runs of a comparison on Ray, as many at once as there is room for."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from ..run.lease import driver_lock
from ..run.ray_jobs import (
    RayJobs,
    Resources,
    connected_to_ray,
    default_cpus,
    order_for_ray,
    require_ray,
    share_batch,
)
from ..run.shared_files import share_data, share_model
from ..storage import check_writable
from ..text import bar_options
from .plan import Run, Scale
from .results import RunStore, next_runs, run_folder


_LEASE_FILE = "at-work.json"


@dataclass(frozen=True)
class RayEngine:
    """Makes runs on the cluster that Ray finds: that of `RAY_ADDRESS`, else one of this machine.

    Attributes:
        cpus_per_run: CPUs that a run reserves, and its number of threads. By default as many as PyTorch takes on this machine,
            so that both engines give equal numbers; one for each worker if there are GPUs or several workers.
        gpus_per_run: GPUs that a run reserves; a fraction lets several runs share one.
        workers_per_run: processes that train a run together, at its global batch size.
        max_retries: how often a run is retried that lost its node or its process, or ran out of memory.
    """

    cpus_per_run: int | None = None
    gpus_per_run: float = 0
    workers_per_run: int = 1
    max_retries: int = 3

    def __post_init__(self):
        require_ray()
        if self.max_retries < 0:
            raise ValueError(f"max_retries={self.max_retries} must be at least 0")
        _ = self.resources

    @property
    def resources(self) -> Resources:
        """What a run takes."""
        cpus = self.cpus_per_run
        cpus = default_cpus(self.workers_per_run, self.gpus_per_run) if cpus is None else cpus
        return Resources(cpus, self.gpus_per_run, self.workers_per_run)

    @contextmanager
    def connected(self, comparisons: Sequence[Scale], folder: Path) -> Iterator[None]:
        """Connects to the cluster.

        Raises:
            ValueError: if the workers cannot share the batches, the cluster does not answer or has too little room for a run,
                or the folder cannot be written.
        """
        for comparison in comparisons:
            for variant in comparison.variants.values():
                share_batch(variant.content, self.workers_per_run)
        check_writable(folder)
        with connected_to_ray():
            self.resources.check()
            yield

    def alone_in(self, folder: Path) -> AbstractContextManager[None]:
        """Waits until no other process makes the comparison, and shows that this one does.

        No address has locks. The process at work changes a file every few seconds; one that was killed does so no more.
        """
        return driver_lock(folder / _LEASE_FILE)

    def prepare_data(self, comparison: Scale, folder: Path) -> tuple[Path, str | None]:
        """Saves tokenizer and tokenised data in the folder."""
        recipe = comparison.resolve(Run(comparison.baseline, 1.0, 0), folder).recipe
        return share_data(recipe, (folder.absolute() if isinstance(folder, Path) else folder) / "data")

    def make_runs(self, comparison: Scale, folder: Path, data: Path, finished: RunStore) -> None:
        """Makes the runs that are not finished. A search goes on as soon as its own runs are finished.

        Raises:
            ChildProcessError: naming the runs that failed; all others are finished.
        """
        place = folder.absolute() if isinstance(folder, Path) else folder
        names = {variant.content["model"] for variant in comparison.variants.values()}
        models = {name: share_model(name, folder / "models") for name in names}
        ready, done = next_runs(comparison, finished)
        steps = comparison.steps_per_run
        with (
            tqdm(
                desc=comparison.name,
                total=(done + len(ready)) * steps,
                initial=done * steps,
                unit="step",
                **bar_options(),
            ) as progress,
            RayJobs(self.resources, self.max_retries, progress, steps) as jobs,
        ):
            begun: dict[str, Run] = {}

            def submit(runs: list[Run]) -> None:
                for run in comparison.in_order(runs):
                    begun[run.name] = run
                    path = run_folder(place, run)
                    content = comparison.resolve(run, path).given
                    model = models[comparison.variants[run.model].content["model"]]
                    jobs.submit(order_for_ray(run.name, content, path, data, self.resources, model=model))

            submit(ready)
            for order, metrics in jobs.finished():
                run = begun[order.name]
                finished.add(run, metrics)
                # Of this model the next rates of a search; of all open models the next seed, after a look of `stop: early`
                submit([run for run in next_runs(comparison, finished)[0] if run.name not in begun])
                progress.total = max(progress.total, (done + len(begun)) * steps)  # a search may go on
        if jobs.failures:
            count = f"{len(jobs.failures)} runs failed: " if len(jobs.failures) > 1 else ""
            raise ChildProcessError(f"{count}{'; '.join(jobs.failures)}")

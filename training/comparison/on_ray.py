"""The engine of a cluster: the runs of a comparison on Ray, as many at once as there is room for."""

import json
import math
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from modeling_nlq.training.comparison.plan import Comparison, Run
from modeling_nlq.training.comparison.results import FinishedRuns, run_folder
from modeling_nlq.training.files import write_text
from modeling_nlq.training.run.ray_jobs import RayJobs, Resources, connected_to_ray, order_for_ray
from modeling_nlq.training.run.shared_files import share_data, share_model
from modeling_nlq.training.storage import check_writable
from modeling_nlq.training.text import bar_options


_DATA = "data"
_LEASE_FILE = "at-work.json"
# Seconds between two signs of life, and without one until another process may take over
_LEASE_PACE, _LEASE_PATIENCE = 10.0, 30.0


@dataclass(frozen=True)
class RayEngine:
    """Makes runs on the cluster that Ray finds: that of `RAY_ADDRESS`, else one of this machine.

    Attributes:
        cpus_per_run: CPUs that a run reserves, and its number of threads. By default as many as PyTorch takes on this machine,
            so that both engines give equal numbers; one for each worker if there are GPUs or several workers.
        gpus_per_run: GPUs that a run reserves; a fraction lets several runs share one.
        workers_per_run: processes that train a run together, at its global batch size.
        max_retries: how often a run is begun again that lost its node or its memory.
    """

    cpus_per_run: int | None = None
    gpus_per_run: float = 0
    workers_per_run: int = 1
    max_retries: int = 3

    def __post_init__(self):
        if self.max_retries < 0:
            raise ValueError(f"max_retries={self.max_retries} must be at least 0")
        _ = self.resources

    @property
    def resources(self) -> Resources:
        """What a run takes."""
        cpus = self.cpus_per_run
        if cpus is None:
            is_plain = self.workers_per_run == 1 and not self.gpus_per_run
            cpus = torch.get_num_threads() if is_plain else max(self.workers_per_run, math.ceil(self.gpus_per_run))
        return Resources(cpus, self.gpus_per_run, self.workers_per_run)

    @contextmanager
    def connected(self, folder: Path) -> Iterator[None]:
        """Connects to the cluster.

        Raises:
            ValueError: if the cluster does not answer or has too little room for a run, or the folder cannot be written.
        """
        check_writable(folder)
        with connected_to_ray():
            self.resources.check()
            yield

    def alone_in(self, folder: Path) -> AbstractContextManager[None]:
        """Waits until no other process makes the comparison, and shows that this one does.

        No address has locks. The process at work changes a file every few seconds; one that was killed does so no more.
        """
        return _lease(folder)

    def prepare_data(self, comparison: Comparison, folder: Path) -> str | None:
        """Saves tokenizer and tokenised data in the folder."""
        recipe = comparison.resolve(Run(comparison.baseline, 1.0, 0, False), folder).recipe
        return share_data(recipe, folder / _DATA)

    def make_runs(self, comparison: Comparison, folder: Path, finished: FinishedRuns) -> None:
        """Makes the runs that are not finished. A model's seeds begin as soon as its own sweep is finished.

        Raises:
            ChildProcessError: naming the runs that failed; all others are finished.
        """
        models = {
            model: share_model(variant.content["model"], folder / "models") for model, variant in comparison.variants.items()
        }
        place = folder.absolute() if isinstance(folder, Path) else folder
        state = {model: finished.unfinished(comparison, model) for model in comparison.variants}
        steps = comparison.steps_per_run
        total = sum(comparison.runs_of(model) for model in comparison.variants)
        done = total - sum(left for _, left in state.values())
        with tqdm(total=total * steps, initial=done * steps, unit="step", **bar_options()) as progress:
            jobs = RayJobs(self.resources, self.max_retries, progress, steps)
            begun: dict[str, Run] = {}

            def submit(runs: list[Run]) -> None:
                for run in comparison.in_order([run for run in runs if run.name not in begun]):
                    begun[run.name] = run
                    path = run_folder(place, run)
                    content = comparison.resolve(run, path).given
                    jobs.submit(order_for_ray(run.name, content, path, place / _DATA, self.resources, model=models[run.model]))

            submit([run for ready, _ in state.values() for run in ready])
            for order in jobs.finished():
                submit(finished.unfinished(comparison, begun[order.name].model)[0])
        if jobs.failures:
            count = f"{len(jobs.failures)} runs failed: " if len(jobs.failures) > 1 else ""
            raise ChildProcessError(f"{count}{'; '.join(jobs.failures)}")


@contextmanager
def _lease(folder: Path) -> Iterator[None]:
    file = folder / _LEASE_FILE
    holder, unchanged_since = _read_lease(file), time.monotonic()
    if holder is not None:
        where = f"process {holder.get('pid')} on {holder.get('host')}"
        print(f"{where} was making this comparison: waiting until it is gone or finished", file=sys.stderr, flush=True)
    while holder is not None and time.monotonic() - unchanged_since < _LEASE_PATIENCE:
        time.sleep(1.0)
        if (now := _read_lease(file)) != holder:
            holder, unchanged_since = now, time.monotonic()
    content: dict[str, Any] = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
    is_over = threading.Event()

    def show() -> None:
        count = 0
        while True:
            count += 1
            try:
                write_text(file, json.dumps({**content, "count": count}))
            except Exception as error:  # the next time may work
                print(f"{file} was not written: {error}", file=sys.stderr)
            if is_over.wait(_LEASE_PACE):
                return

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        file.unlink(missing_ok=True)


def _read_lease(file) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None

"""Runs on Ray: a task for each run, or a job of Ray Train if a run takes several workers.

Ray knows the nodes, reserves CPUs and GPUs, and tells which runs were lost with their node or ran out of memory. A lost run is
retried, from its last checkpoint.
"""

import os
import shutil
import socket
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..files import METRICS_FILE, read_json, read_section
from ..storage import open_folder, scratch_folder
from ..text import first_line, one_line
from .mirror import log_file
from .run_folder import FolderIsLocked
from .unattended import RunFailed, RunSpec, progress_file, run_in_subprocess


try:
    import ray
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    ray = None  # `require_ray` says so


_SECONDS_TO_ANSWER = 5.0
# Seconds between two reports of a run: to a folder, and to an address, where each costs a request
_PACE, _PACE_AT_ADDRESS = 2.0, 15.0

# In the errors of workers whose neighbour died
_LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "DistBackendError",
    "DistNetworkError",
)


def require_ray() -> None:
    """Raises `ImportError` if Ray is not installed."""
    if ray is None:
        raise ImportError("the engine 'ray' needs Ray: pip install modeling-nlq[ray]")


@dataclass(frozen=True)
class Resources:
    """What a run takes.

    Attributes:
        cpus: reserved CPUs of a run, which are the threads of its workers.
        gpus: reserved GPUs of a run; a fraction if several runs share one. Without any, it trains on the CPU.
        workers: processes that train the run together. Each takes its share of CPUs and GPUs, on any node, and at most one GPU.

    Raises:
        ValueError: for a number that is not allowed.
    """

    cpus: int = 1
    gpus: float = 0
    workers: int = 1

    def __post_init__(self):
        for name, lowest in (("workers", 1), ("cpus", 1), ("gpus", 0)):
            if not getattr(self, name) >= lowest:  # true for NaN
                raise ValueError(f"{name} of a run: {getattr(self, name)} must be at least {lowest}")
        if self.cpus % self.workers:
            raise ValueError(f"{self.cpus} CPUs of a run must be a multiple of its {self.workers} workers")
        if self.gpus > self.workers:
            raise ValueError(
                f"{self.gpus:g} GPUs of a run need as many workers: a worker trains on one GPU; it has {self.workers}"
            )
        if self.workers > 1 and self.gpus not in (0, self.workers):
            raise ValueError(f"{self.gpus:g} GPUs of a run must be as many as its {self.workers} workers, or 0")

    def of_a_worker(self) -> dict[str, float]:
        """What a worker takes, as Ray names it."""
        needs = {"CPU": self.cpus / self.workers, "GPU": self.gpus / self.workers}
        return {name: amount for name, amount in needs.items() if amount}

    def check(self) -> None:
        """Raises `ValueError` if no node has as much, or the cluster too few nodes that have."""
        fit = self._workers_that_fit()
        if fit == 0:
            each = "run" if self.workers == 1 else "worker"
            needs = " and ".join(f"{amount:g} {name}s" for name, amount in self.of_a_worker().items())
            have = ", ".join(sorted({f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in _nodes()}))
            raise ValueError(f"a {each} takes {needs}, and no node has that: they have {have}; set how many it takes")
        if fit < self.workers:
            raise ValueError(f"a run takes {self.workers} workers, and the nodes have room for {fit}")

    def capacity(self) -> int:
        """The number of runs that fit the cluster at once."""
        return self._workers_that_fit() // self.workers

    def _workers_that_fit(self) -> int:
        needs = self.of_a_worker()
        return sum(min(int(node.get(name, 0) / amount) for name, amount in needs.items()) for node in _nodes())


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@contextmanager
def connected_to_ray() -> Iterator[None]:
    """Connects to the cluster of `RAY_ADDRESS`, else to the one that runs on this machine, else starts one and stops it.

    Raises:
        ValueError: if the cluster does not answer.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("the engine 'ray' starts processes itself: run this command without a launcher")
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    _check_answers(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # What runs print is in their logs
    options = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"RAY_ADDRESS={address}" if address else "Ray on this machine"
        raise ValueError(f"{where} does not answer: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str | None) -> None:
    """Raises `ValueError` if nobody listens at the address; Ray itself would wait for a minute."""
    host, separator, port = (address or "").removeprefix("ray://").rpartition(":")
    if not separator:  # none, `auto` or `local`
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS_TO_ANSWER).close()
    except (OSError, ValueError) as error:
        raise ValueError(f"RAY_ADDRESS={address} does not answer: {error}") from error


def default_cpus(workers: int, gpus: float) -> int:
    """The CPUs of a run: as many as PyTorch takes in this process, for equal numbers; with workers or GPUs one for each."""
    return torch.get_num_threads() if workers == 1 and not gpus else workers


def order_for_ray(name: str, content: dict[str, Any], folder, data, resources: Resources, **fields: Any) -> RunSpec:
    """The order of a run on Ray, at the global batch size of its recipe.

    Args:
        name, content, folder, data, fields: as those of `RunSpec`; folders are absolute.
        resources: the resources of the run.

    Raises:
        ValueError: if the workers cannot share the batches.
    """
    dataset = Path(content.get("dataset", ""))
    return RunSpec(
        name=name,
        dataset=os.fspath(dataset.absolute()) if content.get("streaming") and dataset.exists() else None,
        content=share_batch(content, resources.workers),
        folder=str(folder),
        data=str(data),
        threads=resources.cpus // resources.workers,
        pace=_PACE if isinstance(folder, Path) else _PACE_AT_ADDRESS,
        patience=120.0,  # the processes of a lost run may live for a moment
        **fields,
    )


def share_batch(content: dict[str, Any], workers: int) -> dict[str, Any]:
    """Divides the gradient accumulation of a recipe by the number of workers, or else its batch size.

    Raises:
        ValueError: if neither is a multiple of that number.
    """
    if workers == 1:
        return content
    training = read_section(content.get("training"), "training")
    for name, default in (("gradient_accumulation_steps", 1), ("per_device_train_batch_size", 8)):
        if (value := training.get(name, default)) % workers == 0:
            return {**content, "training": {**training, name: value // workers}}
    raise ValueError(
        f"{workers} workers cannot share the batches of this recipe: neither gradient_accumulation_steps nor "
        "per_device_train_batch_size is a multiple of their number"
    )


class RayJobs:
    """Makes runs, as many at once as the cluster has room for, and retries those that were lost.

    At the end of a `with` block, it ends those that still run.

    Args:
        resources: the resources of each run.
        max_retries: how often a run is retried at most.
        progress: a bar over the steps of all runs; its present count is that of the runs that were finished before.
        steps: the number of steps of each run.
    """

    def __init__(self, resources: Resources, max_retries: int, progress: tqdm, steps: int):
        self._resources, self._max_retries = resources, max_retries
        self._progress, self._steps, self._finished = progress, steps, progress.n
        self._waiting: list[RunSpec] = []
        self._running: dict[ray.ObjectRef, RunSpec] = {}
        self._losses: Counter[str] = Counter()
        self.failures: list[str] = []
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._board = ray.remote(_Board).options(num_cpus=0, scheduling_strategy=here).remote()
        # `max_calls`: each run has a fresh process
        task = ray.remote(max_calls=1, max_retries=0)(_make_run)
        if resources.workers == 1:
            self._task = task.options(num_cpus=resources.cpus, num_gpus=resources.gpus)
        else:  # its workers take the resources
            self._task = task.options(num_cpus=0)

    def __enter__(self) -> "RayJobs":
        return self

    def __exit__(self, *_) -> None:
        for reference, order in self._running.items():
            with suppress(Exception):
                ray.cancel(reference, force=True)
                progress_file(open_folder(order.folder)).unlink(missing_ok=True)  # it does not run any more
        with suppress(RayError):
            ray.kill(self._board)

    def submit(self, order: RunSpec) -> None:
        """Makes a run as soon as there is room for it, after those that were submitted before."""
        self._waiting.append(order)
        self._begin_waiting()

    def finished(self) -> Iterator[tuple[RunSpec, dict[str, Any]]]:
        """Yields each run with its metrics as it is finished, until none is left; meanwhile more may be submitted.

        A run that failed, or was lost too often, is not yielded: `failures` says why, in a line for each.
        """
        while self._running:
            done, _ = ray.wait(list(self._running), num_returns=1, timeout=1.0)
            for reference in done:
                order = self._running.pop(reference)
                self._board.remove.remote(order.name)
                outcome = _outcome(reference)
                if isinstance(outcome, _Failure):
                    self._handle(order, outcome)
                    self._begin_waiting()
                else:
                    self._finished += self._steps
                    self._begin_waiting()
                    yield order, outcome
            self._show(is_printed=bool(done))

    def _begin_waiting(self) -> None:
        # Ray queues tasks by itself. Jobs of Ray Train would all take a process at once, so only one of them waits
        most = len(self._waiting) if self._resources.workers == 1 else self._resources.capacity() + 1 - len(self._running)
        begun, self._waiting = self._waiting[: max(0, most)], self._waiting[max(0, most) :]
        for order in begun:
            self._running[self._task.remote(order, self._resources, self._board)] = order

    def _handle(self, order: RunSpec, failure: "_Failure") -> None:
        log, reason = log_file(open_folder(order.folder)), failure.reason
        if not failure.is_lost:
            self.failures.append(f"run {order.name} {reason}; see {log}")
        elif self._losses[order.name] >= self._max_retries:
            times = f"{self._losses[order.name] + 1} times, " if self._max_retries else ""
            self.failures.append(f"run {order.name} was lost {times}because {reason}; see {log}")
        else:
            self._losses[order.name] += 1
            count = f"retry {self._losses[order.name]} of {self._max_retries}"
            self._say(f"run {order.name} was lost because {reason}; it goes on from its last checkpoint ({count})")
            self._waiting.append(order)
            return
        self._say(self.failures[-1])

    def _say(self, text: str) -> None:
        self._progress.write(text, file=sys.stderr)

    def _show(self, is_printed: bool) -> None:
        try:
            running = ray.get(self._board.read.remote())
        except RayError:  # there is no bar without it, and all the same there are runs
            running = {}
        # The last word of a run may reach the board after the driver knows that it is finished
        names = {order.name for order in self._running.values()}
        running = {name: content for name, content in running.items() if name in names}
        done = self._finished + sum(content["step"] for content in running.values())
        self._progress.set_postfix_str(f"{len(_nodes())} nodes, {len(running)} runs at work", refresh=False)
        self._progress.update(done - self._progress.n)
        if is_printed:  # also into a log file, which the bar itself spares
            self._progress.refresh()


class _Board:
    """An actor that knows how far each run is: runs write, the driver reads."""

    def __init__(self):
        self._progress: dict[str, dict[str, Any]] = {}

    def write(self, name: str, progress: dict[str, Any]) -> None:
        self._progress[name] = progress

    def remove(self, name: str) -> None:
        self._progress.pop(name, None)

    def read(self) -> dict[str, dict[str, Any]]:
        return self._progress


@dataclass(frozen=True)
class _Failure:
    """Why a run was not finished, and whether it was lost: then another attempt may end well."""

    reason: str
    is_lost: bool


def _outcome(reference) -> dict[str, Any] | _Failure:
    """The metrics of a finished run, or why it is not finished."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, RayError):
            return _Failure(_reason(error.cause), is_lost=True)
        # Not by the run itself, which returns its failure: the node lacks a package
        return _Failure(f"failed: {one_line(error.cause)}", is_lost=False)
    except RayError as error:
        return _Failure(_reason(error), is_lost=True)


def _reason(error: Exception) -> str:
    """Why a process was lost, in a few words: the messages of Ray have paragraphs."""
    text = str(error)
    if isinstance(error, OutOfMemoryError) or "out of memory" in text or "memory pressure" in text:
        return "its node ran out of memory"
    if isinstance(error, NodeDiedError) or ("node" in text.casefold() and "died" in text.casefold()):
        return "its node died"
    if isinstance(error, WorkerCrashedError | RayActorError) or "health check" in text:
        return "its process or its node died"
    return f"Ray says: {first_line(error)}"


def _make_run(order: RunSpec, resources: Resources, board) -> dict[str, Any] | _Failure:
    """The task of a run; returns what `_outcome` does."""
    if resources.workers > 1:
        return _train_with_workers(order, resources, board)
    try:
        return _train_here(order, resources.gpus, board)
    except (RunFailed, FolderIsLocked) as error:
        return _failure(error)


def _train_here(order: RunSpec, gpus: float, board) -> dict[str, Any]:
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all GPUs of the node visible
    return run_in_subprocess(order, lambda progress: board.write.remote(order.name, progress))


def _failure(error: RunFailed | FolderIsLocked) -> _Failure:
    if isinstance(error, FolderIsLocked):
        return _Failure(str(error), is_lost=True)
    return _Failure(str(error), is_lost=False)


def _train_with_workers(order: RunSpec, resources: Resources, board) -> dict[str, Any] | _Failure:
    """Makes a run as a job of Ray Train, whose workers find each other as those of `torchrun` do."""
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

    note = scratch_folder(f"ray-train-{uuid.uuid4().hex}")
    trainer = TorchTrainer(
        _work,
        train_loop_config={"order": order, "gpus": resources.gpus, "board": board},
        scaling_config=ScalingConfig(
            num_workers=resources.workers, use_gpu=resources.gpus > 0, resources_per_worker=resources.of_a_worker()
        ),
        # Checkpoints lie in the run folder. Ray Train keeps nothing here but a note
        run_config=RunConfig(name=note.name, storage_path=os.fspath(note.parent)),
    )
    try:
        trainer.fit()
    except WorkerGroupError as error:
        return _first_failure(error.worker_failures)
    except TrainingFailedError as error:
        return _Failure(f"failed: {one_line(error)}", is_lost=False)
    finally:
        shutil.rmtree(note, ignore_errors=True)
    return read_json(open_folder(order.folder) / METRICS_FILE)


def _first_failure(failures: dict[int, Exception]) -> _Failure:
    """The failure that caused the others: if a worker dies, those that wait for it fail too."""
    errors = list(failures.values())
    # A run that fails raises nothing else; the rest is Ray's
    if lost := [error for error in errors if not isinstance(error, RunFailed | FolderIsLocked)]:
        return _Failure(_reason(lost[0]), is_lost=True)
    if own := [error for error in errors if not any(text in str(error) for text in _LOST_CONNECTION)]:
        return _failure(own[0])
    return _Failure("a worker lost the others", is_lost=True)


def _work(config: dict[str, Any]) -> None:
    """What each worker of Ray Train does."""
    _train_here(config["order"], config["gpus"], config["board"])

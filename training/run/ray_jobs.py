"""Makes runs on Ray: each as a task, or by a `TorchTrainer` of Ray Train if it takes several workers.

All nodes see the folder of results. A run writes its files and checkpoints there, as on a single machine. If its node
is lost, Ray starts it again on another node, where it resumes from the last checkpoint.
"""

import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets.fingerprint import Hasher

import modeling_nlq

from ..disk import atomic_dir, make_folder, read_bytes, resolve_user_path
from ..files import PROGRESS, TOKENIZER, read_json
from ..result import RunResult
from ..text import check_number, first_line
from ..values import from_json
from .data import prepare_data, save_blocks
from .documents import load_documents
from .recipe import Recipe
from .run_folder import RunProgress
from .subprocess_run import RunFailed, beside, describe_failure, run_in_subprocess


try:
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    ray = None  # `require_ray` says so


# The last file of the shared data that is written
_LAST_FILE = "tokenizer.json"
# Seconds between two reports of progress
_PACE = 5.0
# Seconds to wait for the lock of a run, which a process that Ray is killing may still hold
_PATIENCE = 10.0


def require_ray() -> None:
    """Raises `ImportError` if Ray is not installed."""
    if ray is None:
        raise ImportError("the engine 'ray' needs Ray: pip install modeling-nlq[ray]")


# The cluster


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@contextmanager
def connected_to_ray() -> Iterator[None]:
    """Connects to the cluster of `RAY_ADDRESS`, or to one on this machine, which is started and stopped if necessary.

    Raises:
        ValueError: if the cluster does not answer.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this, Ray retries a run that ran out of memory without end
    os.environ.setdefault("RAY_task_oom_retries", "0")
    with tempfile.TemporaryDirectory() as empty:  # Ray's processes import from the directory where it starts
        try:
            # Runs print into their logs
            with chdir(empty):
                ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"no cluster of Ray answers: {first_line(error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


# What the driver prepares


def share_data(recipe: Recipe, folder: Path) -> tuple[Path, str | None]:
    """Saves tokenizer and tokenised data once for all nodes, unless they exist. Each node reads a stream itself.

    Args:
        recipe: names the data.
        folder: a folder that all nodes see. Different data get different subfolders.

    Returns:
        The subfolder, and the fingerprint of the documents.
    """
    fingerprint = load_documents(recipe).fingerprint
    # The files of a saved tokenizer may change under the same name
    tokenizer = resolve_user_path(recipe.tokenizer_name)
    files = [path for pattern in TOKENIZER for path in sorted(tokenizer.glob(pattern))]
    parts = [fingerprint, recipe.digest("data"), recipe.tokenizer_name, *map(read_bytes, files)]
    shared = folder / Hasher.hash(parts)
    if not (shared / _LAST_FILE).is_file():
        make_folder(shared)
        with atomic_dir(shared, last=_LAST_FILE) as unfinished:
            _, blocks, _ = prepare_data(recipe, unfinished)
            if not recipe.streaming:
                save_blocks(blocks, fingerprint, unfinished)
    return shared, fingerprint


def share_batch(recipe: Recipe, workers: int) -> Recipe:
    """Divides the gradient accumulation of a recipe by the number of workers, or else its batch size.

    Raises:
        ValueError: if neither is a multiple of that number.
    """
    for name, default in (("gradient_accumulation_steps", 1), ("per_device_train_batch_size", 8)):
        if (value := recipe.training.get(name, default)) % workers == 0:
            return recipe if workers == 1 else recipe.replace(training={name: value // workers})
    raise ValueError(
        f"{workers} workers cannot share the batches of this recipe: neither gradient_accumulation_steps nor "
        "per_device_train_batch_size is a multiple of their number"
    )


# On a node


def _make_run(job: dict[str, Any]) -> RunResult:
    """Makes a run, in the process of a task or in each worker of a `TorchTrainer`, and returns its result."""
    host = socket.gethostname()
    if job["version"] != modeling_nlq.__version__:
        raise RunFailed(f"failed: {host} has another version of modeling-nlq than {job['version']}")
    if not (job["data"] / _LAST_FILE).is_file():
        raise RunFailed(f"failed: {host} does not see {job['data']}; --output_dir must be a folder that all nodes see")
    if not job["gpus"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all GPUs of the node visible
    os.environ["PYTHONSAFEPATH"] = "1"  # its processes import nothing from the directory that follows
    with suppress(OSError):
        os.chdir(job["cwd"])  # relative paths in a recipe lead to the same files
    return run_in_subprocess(job["recipe"], job["data"], job["threads"], pace=_PACE, patience=_PATIENCE)


def _train(job: dict[str, Any]) -> RunResult:
    """Makes a run by Ray Train, which sets the environment variables of `torchrun` in each worker."""
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        _make_run,
        train_loop_config=job,
        scaling_config=ScalingConfig(
            num_workers=job["workers"], use_gpu=job["gpus"] > 0, resources_per_worker=job["resources"]
        ),
        run_config=RunConfig(
            name=job["name"].replace("/", "-"),
            storage_path=str(job["data"]),
            failure_config=FailureConfig(max_failures=job["max_retries"]),
        ),
    ).fit()
    return RunResult.load(Path(job["recipe"].output_dir))


# The driver


@dataclass
class RayWorkers:
    """Makes runs on the cluster, each as a task, or by a `TorchTrainer` if it takes several workers.

    A `TorchTrainer` starts five processes besides its workers, which take more CPU time than a small run.

    Attributes:
        cpus_per_run: CPUs that a run reserves, and its number of threads. Defaults to PyTorch's number of threads in
            this process, so that both engines give equal numbers. With GPUs or several workers it is one per worker.
        gpus_per_run: GPUs that a run reserves; a fraction lets several runs share one. With 0, it trains on the CPU.
        workers_per_run: processes that train a run together, at its global batch size. Each takes its share of CPUs
            and GPUs, on any node, and at most one GPU.
        max_retries: how often Ray retries a run that lost its node or its process, or ran out of memory.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: for a number that is too small.
    """

    cpus_per_run: int | None = None
    gpus_per_run: float = 0
    workers_per_run: int = 1
    max_retries: int = 3

    def __post_init__(self):
        require_ray()
        workers = self.workers_per_run
        check_number("workers_per_run", workers, 1)
        check_number("cpus_per_run", self.cpus_per_run, workers)
        check_number("gpus_per_run", self.gpus_per_run, 0)
        check_number("max_retries", self.max_retries, 0)
        if self.cpus_per_run is None:
            self.cpus_per_run = torch.get_num_threads() if workers == 1 and not self.gpus_per_run else workers
        # Of each worker, by their names in Ray
        amounts = {"CPU": self.cpus_per_run / workers, "GPU": self.gpus_per_run / workers}
        self._resources = {name: amount for name, amount in amounts.items() if amount}
        self._references: dict[str, Any] = {}
        self._folders: dict[str, Path] = {}

    @contextmanager
    def at_work(self, recipes: Iterable[Recipe]) -> Iterator[None]:
        """Connects to the cluster.

        Raises:
            ValueError: if the workers cannot share the batches of a recipe, the cluster does not answer, or no run
                fits into it.
        """
        for recipe in recipes:
            share_batch(recipe, self.workers_per_run)
        with connected_to_ray():
            self._check_room()
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            # `max_calls=1` gives each run a fresh process
            if self.workers_per_run > 1:  # the workers reserve the resources, not the task
                self._task = ray.remote(num_cpus=0, max_calls=1, max_retries=0, scheduling_strategy=here)(_train)
            else:
                self._task = ray.remote(
                    max_calls=1,
                    num_cpus=self.cpus_per_run,
                    num_gpus=self.gpus_per_run,
                    max_retries=self.max_retries,
                )(_make_run)
            yield

    def room(self, running: int) -> int:
        """Returns the number of runs that may be submitted now. Ray queues tasks itself.

        A waiting `TorchTrainer` is a process, so at most one waits.
        """
        workers = self.workers_per_run
        return self._workers_that_fit() // workers + 1 - running if workers > 1 else 1

    def submit(self, name: str, recipe: Recipe, data: Path) -> Future[RunResult]:
        """Queues a run."""
        self._folders[name] = Path(recipe.output_dir).absolute()
        shared = share_batch(recipe.without_tokens(), self.workers_per_run)
        job = {
            "name": name,
            "recipe": shared.replace(training={"output_dir": str(self._folders[name])}),
            "data": data.absolute(),
            "threads": self.cpus_per_run // self.workers_per_run,
            "gpus": self.gpus_per_run,
            "workers": self.workers_per_run,
            "resources": self._resources,
            "max_retries": self.max_retries,
            "cwd": os.getcwd(),
            "version": modeling_nlq.__version__,
        }
        self._references[name] = self._task.remote(job)
        future = self._references[name].future()
        future.add_done_callback(lambda _: self._folders.pop(name, None))
        return future

    def progress(self) -> dict[str, RunProgress]:
        """Returns the progress of the runs at work, by name."""
        found = {}
        for name, folder in [*self._folders.items()]:
            file = beside(folder, PROGRESS)
            with suppress(OSError, ValueError):  # the run is queued or finished
                found[name] = from_json(RunProgress, read_json(file), f"{file}: ")
        return found

    def describe_error(self, error: BaseException) -> str:
        """Says in a line why a run is not finished. Ray's own messages have paragraphs."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        failures = list(getattr(cause, "worker_failures", {}).values()) or [cause]
        # If a worker dies, the others fail too, because they wait for it
        cause = next((failure for failure in failures if not isinstance(failure, RunFailed)), failures[0])
        cause = getattr(cause, "health_check_failure", cause)
        return f"was lost: {first_line(cause)}" if isinstance(cause, RayError) else describe_failure(cause)

    def cancel(self, names: list[str]) -> None:
        """Ends runs. They can resume from their last checkpoints."""
        for name in names:
            with suppress(RayError):
                ray.cancel(self._references[name], force=True)

    def _workers_that_fit(self) -> int:
        needs = self._resources.items()
        return sum(min(int(node.get(name, 0) / amount) for name, amount in needs) for node in _nodes())

    def _check_room(self) -> None:
        """Raises `ValueError` if no run fits into the cluster. Ray would wait without end."""
        workers = self.workers_per_run
        if self._workers_that_fit() < workers:
            needs = " and ".join(f"{amount:g} {name}s" for name, amount in self._resources.items())
            have = {f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in _nodes()}
            nodes = ", ".join(sorted(have))
            raise ValueError(f"{workers} workers of a run take {needs} each, and the nodes have {nodes}")

"""Makes runs on Ray: each as a task, or by a `TorchTrainer` of Ray Train if it takes several workers.

All nodes see the folder of results. If a node is lost, Ray starts its run again elsewhere, from the last checkpoint.
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
from tqdm.auto import tqdm

import modeling_nlq

from ..disk import atomic_dir, make_folder, read_bytes, resolve_user_path
from ..files import PROGRESS, TOKENIZER, read_json
from ..result import RunResult
from ..text import bar_options, check_number, first_line
from ..values import from_json
from .conflicts import check_recipe
from .data import prepare_data, save_blocks
from .documents import load_documents
from .jobs import make_runs
from .recipe import Recipe
from .run_folder import RunFolder, RunProgress
from .subprocess_run import RunFailed, beside, describe_failure, run_in_subprocess


try:
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    ray = None  # `require_ray` says so


# The last file of the shared data
_LAST_FILE = "tokenizer.json"
# Seconds between two reports of progress
_PACE = 5.0
# Seconds to wait for the lock of a run, which a dying process may still hold
_PATIENCE = 10.0


def require_ray() -> None:
    if ray is None:
        raise ImportError("the engine 'ray' needs Ray: pip install modeling-nlq[ray]")


@contextmanager
def connected_to_ray() -> Iterator[None]:
    """Connects to the cluster of `RAY_ADDRESS`, or to one on this machine; raises `ValueError` if none answers."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this, Ray retries a run that ran out of memory without end
    os.environ.setdefault("RAY_task_oom_retries", "0")
    with tempfile.TemporaryDirectory() as empty:  # its processes import from here
        try:
            with chdir(empty):
                ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"no cluster of Ray answers: {first_line(error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


def share_data(recipe: Recipe, folder: Path) -> tuple[Path, str | None]:
    """Saves tokenizer and tokenised data once for all nodes, unless they exist. Each node reads a stream itself.

    Returns the subfolder of `folder`, which all nodes see, for these data, and the fingerprint of the documents.
    """
    fingerprint = load_documents(recipe).fingerprint
    # The files of a saved tokenizer may change under the same name
    tokenizer = resolve_user_path(recipe.tokenizer_name)
    files = [read_bytes(path) for pattern in TOKENIZER for path in sorted(tokenizer.glob(pattern))]
    shared = folder / Hasher.hash([fingerprint, recipe.digest("data"), recipe.tokenizer_name, *files])
    if not (shared / _LAST_FILE).is_file():
        make_folder(shared)
        with atomic_dir(shared, last=_LAST_FILE) as unfinished:
            _, blocks, _ = prepare_data(recipe, unfinished)
            if not recipe.streaming:
                save_blocks(blocks, fingerprint, unfinished)
    return shared, fingerprint


def share_batch(recipe: Recipe, workers: int) -> Recipe:
    """Divides the gradient accumulation of a recipe by the number of workers, or else its batch size.

    Raises `ValueError` if neither is a multiple.
    """
    for name, default in (("gradient_accumulation_steps", 1), ("per_device_train_batch_size", 8)):
        if (value := recipe.training.get(name, default)) % workers == 0:
            return recipe if workers == 1 else recipe.replace(training={name: value // workers})
    raise ValueError(
        f"{workers} workers cannot share a batch: neither gradient_accumulation_steps nor per_device_train_batch_size "
        "is a multiple of their number"
    )


def _make_run(job: dict[str, Any]) -> RunResult:
    host, data = socket.gethostname(), job["data"]
    if job["version"] != modeling_nlq.__version__:
        raise RunFailed(f"failed: {host} has another version of modeling-nlq than {job['version']}")
    if not (data / _LAST_FILE).is_file():
        raise RunFailed(f"failed: {host} does not see {data}; all nodes must see --output_dir")
    if not job["gpus"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all GPUs of the node visible
    os.environ["PYTHONSAFEPATH"] = "1"
    with suppress(OSError):
        os.chdir(job["cwd"])  # relative paths in a recipe lead to the same files
    return run_in_subprocess(job["recipe"], data, job["threads"], pace=_PACE, patience=_PATIENCE)


def _train(job: dict[str, Any]) -> RunResult:
    """Makes a run by Ray Train, which sets the environment variables of `torchrun`."""
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    workers = {"num_workers": job["workers"], "use_gpu": job["gpus"] > 0, "resources_per_worker": job["resources"]}
    config = RunConfig(
        name=job["name"].replace("/", "-"),
        storage_path=str(job["data"]),
        failure_config=FailureConfig(max_failures=job["max_retries"]),
    )
    TorchTrainer(_make_run, train_loop_config=job, scaling_config=ScalingConfig(**workers), run_config=config).fit()
    return RunResult.load(Path(job["recipe"].output_dir))


@dataclass
class RayWorkers:
    """Makes runs on the cluster, each as a task, or by a `TorchTrainer` if it takes several workers.

    A `TorchTrainer` starts five processes besides its workers, which take more CPU time than a small run. Raises
    `ImportError` without Ray, and `ValueError` for a number that is too small.

    Attributes:
        cpus_per_run: CPUs that a run reserves, and its threads; by default PyTorch's number of threads, so that both
            engines give equal numbers, and with GPUs or several workers one per worker.
        gpus_per_run: GPUs that a run reserves; a fraction lets several runs share one. With 0, it trains on the CPU.
        workers_per_run: processes that train a run together, at its global batch size, with at most one GPU each.
        max_retries: how often Ray retries a run that lost its node or its process, or ran out of memory.
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
        """Connects to the cluster; raises `ValueError` if workers cannot share a recipe's batches, or no run fits."""
        workers = self.workers_per_run
        for recipe in recipes:
            share_batch(recipe, workers)
        with connected_to_ray():
            if self._workers_that_fit() < workers:  # Ray would wait without end
                needs = " and ".join(f"{amount:g} {name}s" for name, amount in self._resources.items())
                nodes = {f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in self._nodes()}
                have = ", ".join(sorted(nodes))
                raise ValueError(f"{workers} workers of a run take {needs} each, and the nodes have {have}")
            # `max_calls=1` gives each run a fresh process
            task = _make_run
            options = {"num_cpus": self.cpus_per_run, "num_gpus": self.gpus_per_run, "max_retries": self.max_retries}
            if workers > 1:  # which reserve the resources themselves
                task = _train
                here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
                options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": here}
            self._task = ray.remote(max_calls=1, **options)(task)
            yield

    def room(self, running: int) -> int:
        """Ray queues tasks itself; at most one `TorchTrainer` waits."""
        workers = self.workers_per_run
        return self._workers_that_fit() // workers + 1 - running if workers > 1 else 1

    def submit(self, name: str, recipe: Recipe, data: Path) -> Future[RunResult]:
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
        reports = {}
        for name, folder in [*self._folders.items()]:
            file = beside(folder, PROGRESS)
            with suppress(OSError, ValueError):  # the run is queued or finished
                reports[name] = from_json(RunProgress, read_json(file), f"{file}: ")
        return reports

    def describe_error(self, error: BaseException) -> str:
        cause = error.cause if isinstance(error, RayTaskError) else error
        failures = list(getattr(cause, "worker_failures", {}).values()) or [cause]
        # If a worker dies, the others fail too, because they wait for it
        failures.sort(key=lambda failure: isinstance(failure, RunFailed))
        cause = getattr(failures[0], "health_check_failure", failures[0])
        return f"was lost: {first_line(cause)}" if isinstance(cause, RayError) else describe_failure(cause)

    def cancel(self, names: list[str]) -> None:
        for name in names:
            with suppress(RayError):
                ray.cancel(self._references[name], force=True)

    @staticmethod
    def _nodes() -> list[dict[str, float]]:
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def _workers_that_fit(self) -> int:
        needs = self._resources.items()
        return sum(min(int(node.get(name, 0) / amount) for name, amount in needs) for node in self._nodes())


def train_on_ray(
    recipe: Recipe,
    workers: int = 1,
    cpus_per_worker: int | None = None,
    gpus_per_worker: float = 0,
    max_retries: int = 3,
) -> RunResult:
    """Trains a recipe on Ray, at the same global batch size for any number of workers; a second call resumes the run.

    Its log and `NAME.data`, with tokenizer and tokenised data, are beside its folder, which all nodes see. A single
    worker without GPU has as many CPUs and threads as PyTorch here, others 1. A single worker may have a fraction of a
    GPU. Raises as `train`.
    """
    check_number("workers", workers, 1)
    check_number("cpus_per_worker", cpus_per_worker, 1)
    cpus = None if cpus_per_worker is None else cpus_per_worker * workers
    cluster = RayWorkers(cpus, gpus_per_worker * workers, workers, max_retries)
    check_recipe(recipe)
    folder, steps = Path(recipe.output_dir).absolute(), max(recipe.arguments.max_steps, 0)
    with RunFolder(folder).held():  # raises if it holds something else
        pass
    beside = folder.with_name(f"{folder.name}.data")
    with (
        cluster.at_work([recipe]),
        RunFolder(beside, plan=None).held(),
        tqdm(total=steps or None, unit="step", **bar_options()) as bar,
    ):
        data, _ = share_data(recipe, beside)
        [(_, result)] = make_runs(cluster, lambda: ({folder.name: recipe}, 0), data, bar, steps)
    return result

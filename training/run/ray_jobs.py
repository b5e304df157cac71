"""Runs on Ray: a task for each run, or a `TorchTrainer` of Ray Train if a run takes several workers.

Ray knows the nodes, reserves CPUs and GPUs, and retries what is lost. A node makes a run in a temporary folder, sends
each checkpoint and at last the results to the folder of results, and goes on from the checkpoints that lie there.
"""

import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets.fingerprint import Hasher
from transformers import TrainerCallback

import modeling_nlq

from ..disk import delete, resolve_user_path
from ..files import CHECKPOINT, LOG, METRICS_FILE, PROGRESS, TOKENIZER
from ..models import weights_fingerprint
from ..storage import WorkingCopy, is_address
from ..text import first_line, one_line
from .data import prepare_data, save_blocks
from .documents import load_documents
from .recipe import Recipe
from .result import RunResult
from .run_folder import FolderIsLocked, RunProgress
from .unattended import RunFailed, RunSpec, run_in_subprocess


try:
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    ray = None  # `require_ray` says so


_TOKENIZER, _MODELS = "tokenizer.json", "models"


def require_ray() -> None:
    """Raises `ImportError` if Ray is not installed."""
    if ray is None:
        raise ImportError("the engine 'ray' needs Ray: pip install modeling-nlq[ray]")


# The cluster


@dataclass(frozen=True)
class Resources:
    """What a run takes.

    Attributes:
        cpus_per_run: CPUs that a run reserves, and its number of threads. By default as many as PyTorch takes in this
            process, so that both engines give equal numbers; one for each worker if there are GPUs or several workers.
        gpus_per_run: GPUs that a run reserves; a fraction lets several runs share one. Without any, it trains on the
            CPU.
        workers_per_run: processes that train a run together, at its global batch size. Each takes its share of CPUs
            and GPUs, on any node, and at most one GPU.
        max_retries: how often a run is retried that lost its node or its process, or ran out of memory.

    Raises:
        ImportError: if Ray is not installed.
    """

    cpus_per_run: int | None = None
    gpus_per_run: float = 0
    workers_per_run: int = 1
    max_retries: int = 3

    def __post_init__(self):
        require_ray()
        workers, gpus = self.workers_per_run, self.gpus_per_run
        if self.cpus_per_run is None:
            object.__setattr__(self, "cpus_per_run", torch.get_num_threads() if workers == 1 and not gpus else workers)

    def of_a_worker(self) -> dict[str, float]:
        """What a worker takes, as Ray names it."""
        needs = {"CPU": self.cpus_per_run / self.workers_per_run, "GPU": self.gpus_per_run / self.workers_per_run}
        return {name: amount for name, amount in needs.items() if amount}

    def workers_that_fit(self) -> int:
        """The number of workers for which the cluster has room."""
        needs = self.of_a_worker()
        return sum(min(int(node.get(name, 0) / amount) for name, amount in needs.items()) for node in _nodes())

    def check_room(self) -> None:
        """Raises `ValueError` if the cluster has no room for a run, for which Ray would wait for ever."""
        if self.workers_that_fit() < self.workers_per_run:
            needs = " and ".join(f"{amount:g} {name}s" for name, amount in self.of_a_worker().items())
            have = ", ".join(
                sorted({f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in _nodes()})
            )
            raise ValueError(f"{self.workers_per_run} workers of a run take {needs} each, and the nodes have {have}")


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@contextmanager
def connected_to_ray() -> Iterator[None]:
    """Connects to the cluster of `RAY_ADDRESS`, else to the one that runs on this machine, else starts one and stops
    it.

    Raises:
        ValueError: if the cluster does not answer.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A run that ran out of memory is retried like others, not for ever
    os.environ.setdefault("RAY_task_oom_retries", "0")
    try:
        # What runs print is in their logs
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"no cluster of Ray answers: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


# What the driver prepares


def share_data(recipe: Recipe, models: set[str], location: str, below: str) -> tuple[str, str | None]:
    """Saves what all nodes read, once: tokenizer, tokenised data, and at an address also models that are files of this
    machine.

    The data of a stream are read by each node.

    Args:
        recipe: names the data.
        models: the models of the runs.
        location: the folder of results, or its address.
        below: the folder in it for what nodes read.

    Returns:
        The name of the folder with all that, and the fingerprint of the documents.
    """
    fingerprint = load_documents(recipe).fingerprint
    sources = [Path(model) for model in sorted(models) if is_address(location) and Path(model).exists()]
    parts = [fingerprint, recipe.digest("data"), recipe.tokenizer_name]
    # The files of a saved tokenizer, which may change under the same name
    parts += [path.read_bytes() for pattern in TOKENIZER for path in sorted(Path(recipe.tokenizer_name).glob(pattern))]
    parts += [source.read_bytes() if source.is_file() else weights_fingerprint(str(source)) for source in sources]
    name = f"{below}/{Hasher.hash(parts)}"
    with tempfile.TemporaryDirectory() as scratch:
        copy, folder = WorkingCopy(location, Path(scratch)), Path(scratch, name)
        if not copy.files(f"{name}/{_TOKENIZER}"):
            _, blocks, _ = prepare_data(recipe, folder)
            if not recipe.streaming:
                save_blocks(blocks, fingerprint, folder)
            for source in sources:
                target = folder / _MODELS / Hasher.hash(str(source))
                target.parent.mkdir(exist_ok=True)
                (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
            copy.push()
    return name, fingerprint


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


class _CheckpointSender(TrainerCallback):
    """Keeps the checkpoints of a run in the folder of results as they are on this node."""

    def __init__(self, copy: WorkingCopy, folder: str):
        self._copy, self._folder = copy, folder

    def on_save(self, args, state, control, **kwargs):
        """Sends a checkpoint: each node has the files of its own processes, and the first process the state."""
        for is_turn_of_first in (False, True):
            if args.local_process_index == 0 and (args.process_index == 0) == is_turn_of_first:
                self.send()
            _wait_for_all()

    def send(self) -> None:
        """Sends what is new in the run folder, and deletes the checkpoints that this node has no more."""
        self._copy.push(self._folder)
        there = [name for name in self._copy.files(self._folder) if f"/{CHECKPOINT}" in name]
        here = self._copy.folder / self._folder
        self._copy.delete(
            name for name in there if not (here / Path(name).relative_to(self._folder).parts[0]).is_dir()
        )


def _wait_for_all() -> None:
    """Waits for the processes that train together."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _make_run(job: dict[str, Any]) -> RunResult:
    """Makes a run, in the process of a task or in each worker of a `TorchTrainer`, and returns its result."""
    spec, name = job["spec"], job["spec"].recipe.output_dir
    if job["version"] != modeling_nlq.__version__:
        raise RunFailed(f"failed: {socket.gethostname()} has another version of modeling-nlq than {job['version']}")
    if not job["gpus"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all GPUs of the node visible
    with suppress(OSError):
        # On a file system that the nodes share, relative paths in a recipe lead to the same files
        os.chdir(job["cwd"])
    is_first_here = int(os.environ.get("LOCAL_RANK", 0)) == 0
    scratch = resolve_user_path(tempfile.gettempdir()) / f"nlq-{job['id']}"  # the same on all nodes
    copy = WorkingCopy(job["place"], scratch)

    def report(content: RunProgress) -> None:
        job["board"].write.remote(spec.name, content)
        copy.push(f"{name}{LOG}")
        copy.push(f"{name}{PROGRESS}")

    try:
        if is_first_here:
            delete(scratch)  # of an attempt that was killed
            scratch.mkdir(mode=0o700)
            for wanted in (name, f"{name}{LOG}", *([spec.data] if is_address(copy.location) else [])):
                copy.pull(wanted)
        _wait_for_all()
        data = scratch / spec.data if is_address(copy.location) else Path(copy.path, spec.data)
        if not data.is_dir():
            raise RunFailed(
                f"failed: --output_dir must be an address, or a folder that {socket.gethostname()} has too"
            )
        model = data / _MODELS / Hasher.hash(spec.recipe.model)
        sender = _CheckpointSender(copy, name)
        recipe = spec.recipe.replace(training={"output_dir": str(scratch / name)})
        spec = replace(spec, recipe=recipe, data=str(data), model=str(model) if model.exists() else None)
        result = run_in_subprocess(spec, report, [sender])
        if is_first_here:
            sender.send()
            copy.push(f"{name}{LOG}")
            copy.push(f"{name}{PROGRESS}")  # which is deleted
        _wait_for_all()
        return result
    finally:
        if is_first_here:
            delete(scratch)


def _train(job: dict[str, Any], resources: Resources) -> RunResult:
    """Makes a run by Ray Train, whose workers find each other as those of `torchrun` do."""
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    from pyarrow.fs import FSSpecHandler, PyFileSystem
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as scratch:
        copy = WorkingCopy(job["place"], Path(scratch))
        parent, _, name = f"{copy.path}/{job['spec'].data}".rpartition("/")
        workers, has_gpus = resources.workers_per_run, resources.gpus_per_run > 0
        TorchTrainer(
            _make_run,
            train_loop_config=job,
            scaling_config=ScalingConfig(
                num_workers=workers, use_gpu=has_gpus, resources_per_worker=resources.of_a_worker()
            ),
            run_config=RunConfig(
                name=name,
                storage_path=parent,
                storage_filesystem=PyFileSystem(FSSpecHandler(copy.system)),
                failure_config=FailureConfig(max_failures=resources.max_retries),
            ),
        ).fit()
        folder = job["spec"].recipe.output_dir
        copy.pull(f"{folder}/{METRICS_FILE}")
        return RunResult.load(Path(scratch, folder))


# The driver


class _Board:
    """An actor that knows how far each run is: runs write, the driver reads. Its name is that of the folder of
    results.
    """

    def __init__(self):
        self._progress: dict[str, RunProgress] = {}

    def write(self, name: str, progress: RunProgress) -> None:
        self._progress[name] = progress

    def read(self) -> dict[str, RunProgress]:
        return self._progress


class RayWorkers:
    """Makes runs on the cluster, each as a task, or by a `TorchTrainer` if it takes several workers.

    Args:
        location: the folder of results, or its address.
        resources: what each run takes.
        folder: that folder on this machine, in which the folders of runs and their data lie.

    Raises:
        FolderIsLocked: if another driver of the cluster makes runs in this folder.
    """

    def __init__(self, location: str, resources: Resources, folder: Path):
        self._resources, self._folder = resources, folder
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        if resources.workers_per_run > 1:  # they take the resources. `max_calls`: each run has a fresh process
            self._task = ray.remote(num_cpus=0, max_calls=1, max_retries=0, scheduling_strategy=here)(_train)
        else:
            self._task = ray.remote(
                max_calls=1,
                num_cpus=resources.cpus_per_run,
                num_gpus=resources.gpus_per_run,
                max_retries=resources.max_retries,
            )(_make_run)
        try:
            options = {"name": location, "namespace": "nlq", "num_cpus": 0, "scheduling_strategy": here}
            self._board = ray.remote(_Board).options(**options).remote()
        except ValueError:
            raise FolderIsLocked(f"{location} is in use by another driver of this cluster; wait for its end") from None
        self._job = {"place": location, "board": self._board, "gpus": resources.gpus_per_run, "cwd": os.getcwd()}
        self._job["version"] = modeling_nlq.__version__
        self._references: dict[str, Any] = {}

    def room(self, running: int) -> int:
        """Returns the number of runs that may be submitted now. Ray queues tasks by itself.

        A `TorchTrainer` takes a process before it has room, so only one of them waits.
        """
        workers = self._resources.workers_per_run
        return self._resources.workers_that_fit() // workers + 1 - running if workers > 1 else 1

    def submit(self, spec: RunSpec) -> Future[RunResult]:
        """Queues a run."""
        workers = self._resources.workers_per_run
        recipe, threads = share_batch(spec.recipe, workers), self._resources.cpus_per_run // workers
        output_dir, data = (Path(path).relative_to(self._folder).as_posix() for path in (recipe.output_dir, spec.data))
        recipe = recipe.replace(training={"output_dir": output_dir})
        spec = replace(spec, recipe=recipe, data=data, threads=threads, pace=5.0)
        job = {**self._job, "spec": spec, "id": uuid.uuid4().hex}
        reference = self._task.remote(job, *([self._resources] if workers > 1 else []))
        self._references[spec.name] = reference
        return reference.future()

    def progress(self) -> dict[str, RunProgress]:
        """Returns the progress of the runs at work, by name."""
        with suppress(RayError):  # the runs go on without the board
            return ray.get(self._board.read.remote())
        return {}

    def describe_error(self, error: BaseException) -> str:
        """Says in a line why a run is not finished."""
        return _reason(error)

    def cancel(self, specs: list[RunSpec]) -> None:
        """Ends runs, which go on from their last checkpoints another time."""
        for spec in specs:
            with suppress(Exception):
                ray.cancel(self._references[spec.name], force=True)
                name = Path(spec.recipe.output_dir).relative_to(self._folder).as_posix()
                WorkingCopy(self._job["place"], Path()).delete([f"{name}{PROGRESS}"])

    def close(self) -> None:
        """Ends the actor that knows the progress of runs."""
        with suppress(RayError):
            ray.kill(self._board)


def _reason(error: Exception) -> str:
    """Why a run is not finished, in a line: the messages of Ray have paragraphs."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    failures = list(getattr(cause, "worker_failures", {}).values()) or [cause]
    # If a worker dies, those that wait for it fail too
    cause = next((failure for failure in failures if not isinstance(failure, RunFailed)), failures[0])
    if isinstance(cause, RunFailed):
        return str(cause)
    return f"was lost: {first_line(cause)}" if isinstance(cause, RayError) else f"failed: {one_line(cause)}"

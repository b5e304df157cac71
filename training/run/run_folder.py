"""A folder of results: who writes there, and what it was made from."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from ..disk import (
    UNFINISHED,
    add_to_manifest,
    check_no_symlinks,
    check_not_taken,
    delete,
    make_folder,
    paths_below,
    read_manifest,
    read_text,
)
from ..files import (
    CARD_FILE,
    CHECKPOINT,
    CHECKSUMS_FILE,
    COMPARISON_FILE,
    LOCK_FILE,
    METRICS_FILE,
    MODELS_FILE,
    PAGE_FILE,
    PROGRESS,
    RECIPE_FILE,
    RECORDS,
    RESULTS_FILE,
    SETTINGS,
    STATE_FILE,
    TASKS_FILE,
    THREADS_FILE,
    TOKENIZER,
    WEIGHTS,
    code_files,
    differences,
    is_nonempty,
    read_yaml,
    write_yaml,
    yaml_text,
)
from ..result import RunResult
from ..text import count
from .recipe import without_defaults


# Seconds to wait for processes that claim the folder of a comparison at the same moment
CLAIM_PATIENCE = 10.0

# Error texts for a folder without a plan and with another one, and fields in files of folders older than manifests
_KINDS = {
    RECIPE_FILE: (
        "is not a run of `nlq train`",
        "a run of another recipe",
        {METRICS_FILE: "tokens_seen", f"{CHECKPOINT}*/{STATE_FILE}": "RunRecord"},
    ),
    COMPARISON_FILE: (
        "holds no comparison",
        "another comparison",
        {MODELS_FILE: "weights", f"*/{MODELS_FILE}": "weights", RESULTS_FILE: "dataset_fingerprint"},
    ),
}
# Files that this package writes into a folder
_NAMES = (*WEIGHTS, *SETTINGS, *TOKENIZER, *RECORDS, CARD_FILE, STATE_FILE, PAGE_FILE, TASKS_FILE, "training_args.bin")
_NAMES += (
    f"{CHECKPOINT}*",
    COMPARISON_FILE,
    MODELS_FILE,
    RESULTS_FILE,
    THREADS_FILE,
    "added_seeds.json",
    "dataset_fingerprint.txt",
)
_NAMES += ("results.md", "report.html", "figures/*.png", "tokenizer/*", f"runs/*/*{PROGRESS}")


@dataclass
class RunProgress:
    """The content of a run's `.progress.json`: `running` or `failed`, and `updated` in seconds since 1970.

    Before training begins, `steps`, the number of all optimizer steps, is `None`.
    """

    host: str
    pid: int
    state: str = "running"
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    updated: float = 0.0
    error: str | None = None


class FolderIsLocked(ValueError):
    """Another process writes into the folder."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, a comparison or a conversion. The file `plan`, if any, says what it was made from."""

    path: Path
    plan: str | None = RECIPE_FILE

    @contextmanager
    def held(self, patience: float = 0.0) -> Iterator[None]:
        """Lets no other process hold the folder as long as a `with` block lasts, and waits `patience` seconds for it.

        The lock's file stays, because another process may have just opened it. Only a new, empty folder is removed.
        Raises `FolderIsLocked` if another process holds it, and `ValueError`, before anything is written, if it holds
        something else.
        """
        if self.plan is not None:
            self.made_from()
        is_new = not self.path.exists()
        make_folder(self.path)
        check_no_symlinks(paths_below(self.path))  # the lock, Trainer and TensorBoard open files by their paths
        lock = FileLock(self.path / LOCK_FILE)
        try:
            lock.acquire(timeout=patience)
        except (Timeout, FileNotFoundError):  # its holder has just removed the empty folder
            raise FolderIsLocked(
                f"{self.path} is in use by another process; wait for its end, or choose another folder"
            ) from None
        try:
            for path in filter(_is_left_behind, paths_below(self.path)):
                delete(path, force=True)
            # An older folder gets a manifest when it is claimed
            if self.plan is not None and not (read_manifest(self.path) is None and is_nonempty(self.path)):
                self.begin_manifest()
            yield
        finally:
            if is_new and not is_nonempty(self.path):
                delete(self.path, force=True)
            lock.release()

    def begin_manifest(self) -> None:
        """Creates the manifest if there is none; raises `ValueError` if another file would be replaced."""
        there = {path for pattern in _NAMES for path in self.path.glob(pattern)} | code_files(self.path)
        names = sorted(path.relative_to(self.path).as_posix() for path in there if path.exists())
        if read_manifest(self.path) is None:
            add_to_manifest(self.path, names if self._is_older() else ())
        check_not_taken(self.path, names)

    def _is_older(self) -> bool:
        for pattern, field in _KINDS[self.plan][2].items():
            if any(f'"{field}"' in read_text(file) for file in self.path.glob(pattern)):
                return True
        # Killed before its first checkpoint: nothing is lost if its recipe is written again
        recipe = self.path / RECIPE_FILE
        is_begun = self.plan == RECIPE_FILE and (self.path / LOCK_FILE).exists() and recipe.exists()
        return is_begun and read_text(recipe) == yaml_text(read_yaml(recipe))

    def is_held(self) -> bool:
        try:
            if (self.path / LOCK_FILE).is_file():
                with FileLock(self.path / LOCK_FILE, timeout=0):
                    pass
        except Timeout:
            return True
        return False

    def made_from(self) -> dict[str, Any] | None:
        """Returns what a folder was made from, `None` if new; raises `ValueError` if it holds something else."""
        is_taken = is_nonempty(self.path)  # asked first: another process may write the plan
        if (self.path / self.plan).is_file():
            if self.plan not in (read_manifest(self.path) or ()) and not self._is_older():
                raise ValueError(f"{self.path / self.plan} was not written by nlq; choose another --output_dir")
            return read_yaml(self.path / self.plan)
        if is_taken:
            raise ValueError(f"{self.path} exists and {_KINDS[self.plan][0]}; choose another --output_dir")
        return None

    def claim(self, given: dict[str, Any], read: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> None:
        """Writes what the folder is made from; raises `ValueError` if it was made from something else.

        `read` brings what an older version wrote into the form of `given`.
        """
        before = self.made_from()
        if before is None:
            self.write(given)
        elif changes := differences(read(before), given):
            self.refuse(changes)
        self.begin_manifest()

    def is_finished(self) -> bool:
        """Tells whether the run has metrics, which are written last."""
        return (self.path / METRICS_FILE).is_file()

    def result(self) -> RunResult:
        return RunResult.load(self.path)

    def checkpoints(self) -> list[Path]:
        """Returns the checkpoints of a run, newest first, also incomplete ones."""
        steps = {path: path.name.removeprefix(CHECKPOINT) for path in self.path.glob(f"{CHECKPOINT}*")}
        return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: -int(steps[path]))

    def claim_run(self, given: dict[str, Any], processes: int, is_main_process: bool) -> None:
        """Writes the recipe of a run, or checks that it is that of the folder, for any number of processes.

        Raises `ValueError` if the folder holds something else; nothing in it is touched.
        """
        before = self.made_from()
        made_by = processes
        if self.is_finished():
            made_by = self.result().machine.processes
        elif self.checkpoints():  # which tell the global batch size
            made_by = processes = None
        elif not any(self.path.glob("*.safetensors")):  # nothing is lost by beginning anew
            if is_main_process:
                self.begin_manifest()
                delete(self.path / "tokenizer.json")
                self.write(given)
            return
        before, now = _with_global_batch(without_defaults(before), made_by), _with_global_batch(given, processes)
        if changes := differences(before, now):
            self.refuse(changes)
        if is_main_process:
            self.begin_manifest()

    def write(self, given: dict[str, Any]) -> None:
        self.begin_manifest()
        write_yaml(self.path / self.plan, given)

    def refuse(self, changes: str) -> NoReturn:
        hint = f", and add --from {self.path} to go on from its weights" if self.is_finished() else ""
        raise ValueError(f"{self.path} holds {_KINDS[self.plan][1]} ({changes}); choose another --output_dir{hint}")


def describe_interrupted(folder: Path) -> str:
    """Says what the same command would do with a run or a comparison that was interrupted."""
    if (folder / METRICS_FILE).is_file():
        return "the run itself is finished"
    if (folder / COMPARISON_FILE).is_file():
        finished = count(sum(1 for _ in folder.rglob(METRICS_FILE)), "finished run")
        where = "last checkpoints" if any(folder.rglob(f"{CHECKPOINT}*/{CHECKSUMS_FILE}")) else "first steps"
        return f"the same command keeps {finished}, and makes the others from their {where}"
    for checkpoint in RunFolder(folder).checkpoints():
        if (checkpoint / CHECKSUMS_FILE).is_file():
            return f"the same command goes on from {checkpoint.name}"
    return "no checkpoint was saved, so the same command begins anew"


def _is_left_behind(path: Path) -> bool:
    """Tells whether a path is a temporary folder of `atomic_dir`, whose process was killed."""
    names = rf"{re.escape(path.parent.name)}|figures|tokenizer|{CHECKPOINT}.*"
    if not re.fullmatch(rf"\.({names})\.[a-z0-9_]{{8}}{re.escape(UNFINISHED)}", path.name) or not path.is_dir():
        return False
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > 3600.0
    return False


def _with_global_batch(given: dict[str, Any], processes: int | None) -> dict[str, Any]:
    training = dict(given.get("training", {}))
    share = training.pop("per_device_train_batch_size", 8) * training.pop("gradient_accumulation_steps", 1)
    return {**given, "training": training, "global_batch_size": processes and share * processes}

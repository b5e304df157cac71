"""A run folder at an address of object storage, and the folder of this machine in which the run is trained."""

import shutil
from pathlib import Path

import torch
from transformers import TrainerCallback

from ..files import LOCK_FILE, METRICS_FILE, RECIPE_FILE, STATE_FILE
from ..storage import copy_file, files_below, remove_folder
from .run_folder import RunFolder


# The names of a run's checkpoints begin so, and those of its log and of its progress end so
CHECKPOINT, LOG, PROGRESS = "checkpoint-", ".log", ".progress.json"


def log_file(folder):
    """The log of a run, beside its folder."""
    return folder.with_name(folder.name + LOG)


def wait_for_all() -> None:
    """Waits for the processes that train together."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


class Mirror(TrainerCallback):
    """Keeps the folder of a run at an address: takes what is there, sends each checkpoint, and the results at the end.

    Args:
        folder: the folder on this machine.
        address: a `upath.UPath`.
    """

    def __init__(self, folder: Path, address):
        self.folder, self.address = folder, address

    def fetch_log(self) -> None:
        """Takes the log of an earlier attempt, which goes on."""
        if log_file(self.address).exists():
            copy_file(log_file(self.address), log_file(self.folder))
        else:
            log_file(self.folder).unlink(missing_ok=True)

    def fetch(self) -> None:
        """Takes the recipe and the complete checkpoints, or the metrics of a run that is finished."""
        RunFolder(self.folder).clear()
        names = files_below(self.address)
        complete = {name.partition("/")[0] for name in names if name.startswith(CHECKPOINT) and name.endswith(f"/{STATE_FILE}")}
        for name in names:
            if name in (RECIPE_FILE, METRICS_FILE) or name.partition("/")[0] in complete:
                copy_file(self.address / name, self.folder / name)

    def on_save(self, args, state, control, **kwargs):
        """Sends a checkpoint. The state is sent last, so that a checkpoint that has one is complete."""
        name = f"{CHECKPOINT}{state.global_step}"
        if args.process_index == 0:
            (self.address / name / STATE_FILE).unlink(missing_ok=True)  # of an attempt that was thought lost
        wait_for_all()  # all processes have written their files
        if args.local_process_index == 0:  # each machine has files of its own processes
            for file in files_below(self.folder / name):
                if file != STATE_FILE:
                    copy_file(self.folder / name / file, self.address / name / file)
            if args.process_index != 0:  # Trainer removes those of the first process
                for path in self.folder.glob(f"{CHECKPOINT}*"):
                    if path.name not in (name, Path(state.best_model_checkpoint or "").name):
                        shutil.rmtree(path, ignore_errors=True)
        wait_for_all()
        if args.process_index == 0:
            copy_file(self.folder / RECIPE_FILE, self.address / RECIPE_FILE)
            copy_file(self.folder / name / STATE_FILE, self.address / name / STATE_FILE)
            self._remove_old_checkpoints()

    def send_results(self) -> None:
        """Sends what a finished run has written, the metrics last."""
        names = [name for name in files_below(self.folder) if not name.startswith((CHECKPOINT, LOCK_FILE))]
        for name in sorted(names, key=lambda name: name == METRICS_FILE):
            copy_file(self.folder / name, self.address / name)
        self._remove_old_checkpoints()

    def remove_local(self) -> None:
        """Removes what the folder holds, and the logs of this machine."""
        RunFolder(self.folder).clear()
        for log in self.folder.parent.glob(f"*{LOG}"):
            log.unlink(missing_ok=True)

    def _remove_old_checkpoints(self) -> None:
        there = {name.partition("/")[0] for name in files_below(self.address) if name.startswith(CHECKPOINT)}
        for name in there - {path.name for path in self.folder.glob(f"{CHECKPOINT}*")}:
            remove_folder(self.address / name)

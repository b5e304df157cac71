"""Checkpoints: which of them are complete and as they were written, and whether a run may resume from one."""

import hashlib
import json
from collections.abc import Callable
from logging import LogRecord
from pathlib import Path
from typing import Any

import xxhash
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from accelerate.utils.constants import FSDP_MODEL_NAME
from transformers import PreTrainedConfig, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState
from transformers.utils import logging

from ..disk import files_below, open_file, safe_join, write_text
from ..files import CHECKPOINT, CHECKSUMS_FILE, STATE_FILE, read_json
from ..loading import config_differences
from .run_folder import RunFolder
from .trainer import RunRecord, best_checkpoint


logger = logging.get_logger(__name__)


class ChecksumCallback(TrainerCallback):
    """Writes the hashes of a checkpoint's files beside them, after all processes have written it."""

    def on_save(self, args, state, control, **kwargs):
        PartialState().wait_for_everyone()
        if args.process_index == 0:
            folder = Path(args.output_dir) / f"{CHECKPOINT}{state.global_step}"
            sums = {name: _checksum(folder / name) for name in files_below(folder)}
            write_text(folder / CHECKSUMS_FILE, json.dumps(sums))


def _checksum(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def fault_of(checkpoint: Path) -> str | None:
    """Says what is wrong with a checkpoint; `None` if it is as it was written."""
    file = checkpoint / CHECKSUMS_FILE
    if not file.is_file():
        return "is incomplete"
    try:
        written = read_json(file)
        if STATE_FILE not in written:
            return "is incomplete"
        for name, before in written.items():
            if name != CHECKSUMS_FILE and _checksum(safe_join(checkpoint, name)) != before:
                return f"is damaged ({name} is not as it was written)"
    except (OSError, ValueError) as error:
        return f"is damaged ({error})"
    return None


def last_complete_checkpoint(run_folder: Path) -> Path | None:
    """Returns the newest checkpoint of a run without a fault, and warns of newer ones."""
    for folder in RunFolder(run_folder).checkpoints():
        if (fault := fault_of(folder)) is None:
            return folder
        logger.warning(f"{folder} {fault}: passing over it")
    return None


def _on_main_process(function: Callable[[Path], Any], path: Path) -> Any:
    return broadcast_object_list([function(path) if PartialState().is_main_process else None])[0]


def checkpoint_to_resume(
    arguments: TrainingArguments, config: PreTrainedConfig, record: RunRecord, is_fsdp: bool = False
) -> tuple[Path, TrainerState] | None:
    """Returns the checkpoint that a run resumes from, with its state, and restores the `record`.

    Raises `ValueError` if it is of another model or other data, or stored in another way.
    """
    checkpoint = _on_main_process(last_complete_checkpoint, Path(arguments.output_dir))
    if checkpoint is None:
        return None
    if changes := config_differences(type(config).from_pretrained(str(checkpoint)).to_dict(), config.to_dict()):
        raise ValueError(f"{checkpoint} holds another model ({changes}); choose another --output_dir")
    if any(checkpoint.glob(f"{FSDP_MODEL_NAME}*")) != is_fsdp:  # the optimizer would begin anew without a word
        raise ValueError(f"{checkpoint} was made {'without' if is_fsdp else 'with'} FSDP; choose what it was")
    state = TrainerState.load_from_json(str(checkpoint / STATE_FILE))
    record.restore(state, checkpoint)
    best = state.best_model_checkpoint = best_checkpoint(state, arguments.output_dir)
    if arguments.load_best_model_at_end and best is not None and _on_main_process(fault_of, Path(best)) is not None:
        raise ValueError(f"{best}, the best checkpoint so far, is missing or damaged; load_best_model_at_end needs it")
    logging.get_logger("transformers.trainer_utils").addFilter(_drop_argument_warning)
    logger.warning(f"Going on from {checkpoint}")
    return checkpoint, state


def _drop_argument_warning(record: LogRecord) -> bool:
    """Drops Trainer's warning of changed arguments: it takes a share of all steps for another number."""
    return "do not match the ones in the `trainer_state.json`" not in record.getMessage()

"""What a run writes down of itself beside its losses: which tokens it saw, how fast it went, and whether it diverged."""

import hashlib
import math
import os
import sys
import time

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState


# Tokens that wait to be hashed, where nothing is logged, evaluated or saved for long
_BATCHES_TO_KEEP = 256


class RunRecord(TrainerCallback, ExportableState):
    """Keeps the record of a run, through checkpoints as well, and stops a run whose loss is infinite or not a number.

    Args:
        processes: how many train together, on batches of the same size.
        global_batch_size: samples of an optimizer step, of all processes together.
        dataset_fingerprint: of the training documents, or `None` if it is unknown (a stream from the Hub).

    Attributes:
        conditions: these three; a checkpoint keeps them, and a run goes on in the same order of data only under the same ones.
        tokens_seen: how many tokens all processes trained on so far, with those that Accelerate repeats to fill a last batch.
        token_stream: a hash of all tokens that this process trained on so far, row by row in their order. Two runs with the
            same one saw the same data.
        seconds: spent on training steps, data loading included, evaluation and saving not.
        diverged_at: the step after which the loss was infinite or not a number, or `None`.
    """

    def __init__(self, processes: int = 1, global_batch_size: int | None = None, dataset_fingerprint: str | None = None):
        self.conditions = {
            "processes": processes,
            "global_batch_size": global_batch_size,
            "dataset_fingerprint": dataset_fingerprint,
        }
        self._reset()

    def _reset(self) -> None:
        self.tokens_seen = 0
        self.token_stream = ""
        self.seconds = 0.0
        self.diverged_at: int | None = None
        self._batches: list[torch.Tensor] = []
        self._started_at: float | None = None

    def add_batch(self, input_ids: torch.Tensor) -> None:
        """Notes a batch; it is hashed later, for reading it now would make an accelerator wait."""
        self.tokens_seen += input_ids.numel() * self.conditions["processes"]
        self._batches.append(input_ids.detach())
        if len(self._batches) >= _BATCHES_TO_KEEP:
            self._hash_batches()

    def _hash_batches(self) -> None:
        for batch in self._batches:
            for row in batch.cpu().to(torch.int32).numpy():  # the same hash, however many rows go at a time
                self.token_stream = hashlib.sha256(self.token_stream.encode() + row.tobytes()).hexdigest()
        self._batches.clear()

    def state(self) -> dict:
        """What a checkpoint keeps (`ExportableState`)."""
        self._hash_batches()
        names = ("conditions", "tokens_seen", "token_stream", "seconds", "diverged_at")
        return {"args": {}, "attributes": {name: getattr(self, name) for name in names}}

    def conditions_of(self, state: TrainerState) -> dict | None:
        """The conditions that a checkpoint kept, those that are known both there and here; `None` if it kept none."""
        before = self._kept(state).get("conditions")
        if before is None:
            return None
        return {name: before[name] for name, now in self.conditions.items() if now is not None and before.get(name) is not None}

    def restore(self, state: TrainerState) -> None:
        """Goes on from what a checkpoint kept."""
        for name, value in self._kept(state).items():
            if name != "conditions":
                setattr(self, name, value)

    def _kept(self, state: TrainerState) -> dict:
        return state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:  # also where `auto_find_batch_size` begins anew
            self._reset()
        else:
            self.restore(state)
            state.best_model_checkpoint = best_checkpoint(state, args.output_dir)

    def on_step_begin(self, args, state, control, **kwargs):
        if self._started_at is None:
            self._started_at = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_log or control.should_evaluate or control.should_save or state.global_step >= state.max_steps:
            # An accelerator may still be at work on the steps so far
            if torch.accelerator.is_available() and args.device.type != "cpu":
                torch.accelerator.synchronize()
            self.seconds += time.perf_counter() - self._started_at
            self._started_at = None
            self._hash_batches()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}) and not math.isfinite(logs["loss"]):
            self.diverged_at = state.global_step
            control.should_training_stop = True


def best_checkpoint(state: TrainerState, run_folder: str) -> str | None:
    """The path of the best checkpoint so far, also where the run folder has moved since; `None` if there is none yet."""
    best = state.best_model_checkpoint
    return best if best is None else os.path.join(run_folder, os.path.basename(best))


class RecordingTrainer(Trainer):
    """A `Trainer` whose `record` sees every batch.

    Args:
        record: also one of the callbacks.
    """

    def __init__(self, *args, record: RunRecord, **kwargs):
        super().__init__(*args, callbacks=[record], **kwargs)
        self.record = record

    def training_step(self, model, inputs, *args, **kwargs):
        self.record.add_batch(inputs["input_ids"])
        return super().training_step(model, inputs, *args, **kwargs)

    def _issue_warnings_after_load(self, load_result):
        # A checkpoint holds tied weights once, which Trainer (Transformers 5.23) takes for missing ones
        tied = self.model.all_tied_weights_keys
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))


def peak_memory(device: torch.device) -> int | None:
    """The most memory this process has held so far, in bytes: on the accelerator if it trains there, else of the machine.

    Windows does not tell: `None`.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    kibibyte = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kibibyte


def has_diverged(loss: float, vocab_size: int) -> bool:
    """Whether a model ended worse than it began.

    Args:
        loss: on the validation split, in nats per token.
        vocab_size: an untrained model guesses evenly among so many tokens; half a nat of room is left for one that has hardly
            begun to learn.
    """
    return not loss <= math.log(vocab_size) + 0.5  # true for NaN

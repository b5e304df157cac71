"""The `Trainer` of every run, and what it records beside the losses: tokens, speed, divergence."""

import hashlib
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.utils import CONFIG_NAME, logging

from ..disk import atomic_dir, make_empty_folder
from ..files import CHECKPOINT, differences
from .mlm import MaskingTrainer
from .muon import make_muon
from .parametrization import Factors, split_groups


logger = logging.get_logger(__name__)

# Batches that wait to be hashed at most
_BATCHES_TO_KEEP = 256
# Dense products of bfloat16 or float16, summed in float32, in TFLOP/s, by PyTorch's name of the device: from NVIDIA's
# data sheets, and for GeForce from the white papers of GA102, Ada and RTX Blackwell
PEAK_TFLOPS = {
    "NVIDIA A10": 125.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H200": 989.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
}


class RunRecord(TrainerCallback, ExportableState):
    """Keeps the record of a run, in its checkpoints too, and stops a run whose loss is infinite or NaN.

    Attributes:
        conditions: batch size and fingerprint of the documents, which fix the order of the data.
        tokens_seen: of all processes, with those that repeat to fill a last batch, without padding of pairs.
        token_stream: a hash of these tokens, row by row in the order of the data.
        seconds: time of the training steps, without evaluation and saving.
        diverged_at: the step after which the loss was infinite or NaN.
    """

    def __init__(self, global_batch_size: int | None = None, dataset_fingerprint: str | None = None):
        self.conditions = {"global_batch_size": global_batch_size, "dataset_fingerprint": dataset_fingerprint}
        self._reset()

    def _reset(self) -> None:
        self.tokens_seen = 0
        self.token_stream = ""
        self.seconds = 0.0
        self.diverged_at: int | None = None
        self._batches: list[torch.Tensor] = []
        self._started_at: float | None = None

    def add_batch(self, input_ids: torch.Tensor) -> None:
        """Keeps a batch to be hashed later: reading it now would make an accelerator wait."""
        self._batches.append(input_ids.detach())
        if len(self._batches) >= _BATCHES_TO_KEEP:
            self.hash_batches()

    def hash_batches(self) -> None:
        """Hashes the batches since the last call, on all processes together."""
        by_process = gather_object([[batch.cpu().to(torch.int32).numpy() for batch in self._batches]])
        # Row by row, neither the number of processes nor the batch size changes the hash within an epoch
        for row in (row for batches in zip(*by_process, strict=True) for batch in batches for row in batch):
            row = row[row != -100]  # the padding of pairs
            self.tokens_seen += len(row)
            self.token_stream = hashlib.sha256(self.token_stream.encode() + row.tobytes()).hexdigest()
        self._batches.clear()

    def state(self) -> dict:
        """The state that a checkpoint keeps, after `hash_batches`."""
        names = ("conditions", "tokens_seen", "token_stream", "seconds", "diverged_at")
        attributes = {name: getattr(self, name) for name in names}
        return {"args": {}, "attributes": attributes | {"threads": torch.get_num_threads()}}

    def restore(self, state: TrainerState, source: Path | str = "the checkpoint") -> None:
        """Takes over the state of a checkpoint; raises `ValueError` for one of other data or batches."""
        kept = state.stateful_callbacks[type(self).__name__]["attributes"]
        now = {name: value for name, value in self.conditions.items() if value is not None}
        if changes := differences({name: kept["conditions"][name] for name in now}, now):
            raise ValueError(
                f"{source} was made with another dataset or global batch size ({changes}); restore what it was, or "
                "choose another --output_dir"
            )
        vars(self).update({name: value for name, value in kept.items() if name not in ("conditions", "threads")})
        threads = kept.get("threads")  # older checkpoints lack it
        if threads is not None and threads != torch.get_num_threads() and not torch.accelerator.is_available():
            logger.warning(f"threads: {threads}, with which {source} was made, instead of {torch.get_num_threads()}")
            torch.set_num_threads(threads)

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:  # also when `auto_find_batch_size` begins anew
            self._reset()
        else:
            self.restore(state)
            # Trainer (Transformers 5.23) takes them from the checkpoint, perhaps of a longer run
            state.compute_steps(args, state.max_steps)
            state.best_model_checkpoint = best_checkpoint(state, args.output_dir)

    def on_step_begin(self, args, state, control, **kwargs):
        if self._started_at is None:
            self._started_at = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        is_last = state.global_step >= state.max_steps
        if control.should_log or control.should_evaluate or control.should_save or is_last:
            # An accelerator may still compute earlier steps
            if torch.accelerator.is_available() and args.device.type != "cpu":
                torch.accelerator.synchronize()
            self.seconds += time.perf_counter() - self._started_at
            self._started_at = None
            self.hash_batches()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}) and not math.isfinite(logs["loss"]):
            self.diverged_at = state.global_step
            control.should_training_stop = True


def best_checkpoint(state: TrainerState, run_folder: str) -> str | None:
    """Returns the best checkpoint so far, also in a folder that has moved."""
    best = state.best_model_checkpoint
    return best if best is None else os.path.join(run_folder, os.path.basename(best))


class RecordingTrainer(MaskingTrainer):
    """A `Trainer` whose `record` sees every batch, with an `optimizer` of `Recipe`.

    `factors` scale the settings of parameters.
    """

    def __init__(
        self,
        *args,
        record: RunRecord,
        optimizer: str = "adamw",
        factors: Mapping[str, Factors] | None = None,
        **kwargs,
    ):
        super().__init__(*args, callbacks=[record], **kwargs)
        self.record = record
        self.optimizer_name = optimizer
        self.factors = factors

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        if is_new and self.optimizer_name == "muon":
            whole = self.model if model is None else model
            self.optimizer = make_muon(whole, self.args, self.get_decay_parameter_names(whole))
        optimizer = super().create_optimizer(model)
        if is_new and self.factors is not None:
            split_groups(optimizer, self.model if model is None else model, self.factors)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        """Makes the scheduler as `Trainer` does; `num_decay_steps` may be a share of all steps, as `warmup_steps`."""
        options = self.args.lr_scheduler_kwargs or {}
        share = options.get("num_decay_steps", 0)
        steps = {"num_decay_steps": math.ceil(share * num_training_steps)} if 0 < share < 1 else {}
        with patch.dict(options, steps):
            return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, model, inputs, *args, **kwargs):
        tokens = inputs["input_ids"]
        if "decoder_input_ids" in inputs:
            tokens = torch.cat([tokens.masked_fill(inputs["attention_mask"] == 0, -100), inputs["labels"]], dim=1)
        self.record.add_batch(tokens)
        return super().training_step(model, inputs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves as `Trainer` does, with a configuration in every checkpoint, and the model whole."""
        self.record.hash_batches()
        output_dir = output_dir or self.args.output_dir
        if not _internal_call and self.args.should_save:  # the model at the end; checkpoints have new folders
            with atomic_dir(Path(output_dir), last=CONFIG_NAME) as folder:
                self._save_model(str(folder), _internal_call)
        else:
            self._save_model(output_dir, _internal_call)

    def _save_model(self, folder: str, _internal_call: bool) -> None:
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        if plugin is not None and not _internal_call:
            plugin.set_state_dict_type("FULL_STATE_DICT")
        super().save_model(folder, _internal_call)
        if self.args.should_save and (plugin is not None or not os.path.isfile(os.path.join(folder, CONFIG_NAME))):
            self.model.config.save_pretrained(folder)

    def _save_checkpoint(self, model, trial) -> None:
        if self.args.should_save:
            make_empty_folder(Path(self.args.output_dir, f"{CHECKPOINT}{self.state.global_step}"))
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def _issue_warnings_after_load(self, load_result):
        # Trainer (Transformers 5.23) reports the second name of tied weights as missing
        tied = self.model.all_tied_weights_keys
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))


def peak_memory(device: torch.device) -> int | None:
    """Returns the peak memory of this process in bytes; `None` on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    kibibyte = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kibibyte


def utilization(tokens_per_second: float, flops_per_token: int, device: str, processes: int = 1) -> float | None:
    """Returns the model FLOPs utilisation in half precision; `None` for a device whose peak is not known."""
    peak = PEAK_TFLOPS.get(device)
    return None if peak is None else tokens_per_second * flops_per_token / (1e12 * peak * processes)


def has_diverged(loss: float, vocab_size: int) -> bool:
    """Tells whether a loss, in nats per token, is 0.5 worse than that of an untrained model, `log(vocab_size)`."""
    return not loss <= math.log(vocab_size) + 0.5  # true for NaN

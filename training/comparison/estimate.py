"""Estimates the time of a comparison from its models' throughput, and the smallest difference it can find."""

import contextlib
import copy
import io
import json
import logging
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, default_data_collator
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from ..parameters import auto_class_of, vocabulary_of
from ..run.documents import files_by_split
from ..run.recipe import emulated_bf16
from ..text import check_number, duration, first_line
from .inference import alpha_of_last, smallest_difference
from .local import environment_of_one_run
from .plan import Comparison, Scale, Variant


# The throughput of a model is that of so many steps after the first two, which warm up; slow steps are fewer
_STEPS, _SECONDS = 10, 5.0
# The largest batch of these steps on a CPU, in tokens; a larger one is hardly faster per token
_CPU_TOKENS = 8192
# What a run takes beside its steps: its process, its data, saving, the figure and the card; measured on an EPYC (Zen
# 5)
_SECONDS_OF_A_RUN = 3.0
# Forward passes are a third of a training step, which has two such passes more in backward
_SHARE_OF_EVALUATION = 1 / 3
# Python code with a vocabulary of 8,192 tokens: in docs/results, 4.24 nats per token equal 2.72 bits per byte
_BYTES_PER_TOKEN = 4.24 / math.log(2) / 2.72
_POWER = 0.8


def describe_estimate(
    plan: Comparison,
    threads: int | None = None,
    noise_floor: float | None = None,
    has_verdicts: bool = True,
) -> Iterator[str]:
    """Describes how long a plan takes on this machine and which difference it can find, line by line.

    Measuring a model takes some seconds. If it fails, there is a warning.

    Args:
        threads: the number of threads of a run; by default that of PyTorch.
        noise_floor: that of earlier runs, in percent of the loss.
        has_verdicts: whether the models are compared with the baseline one by one; those of a screening are not.

    Raises:
        ValueError: if the noise floor is negative.
    """
    check_number("--noise-floor", noise_floor, 0)
    if warning := machine_warning(plan):
        yield f"warning: {warning}"
    for name, scale in plan.scales.items() if has_verdicts else ():
        where = f", scale {name}" if name else ""
        difference = _describe_difference(scale, noise_floor)
        yield f"smallest difference found with probability {100 * _POWER:.0f} %{where}: {difference}"
    # The server of the runs imports what this process has imported, and so does the command
    start = 2 * time.process_time()
    total, measured = start, {}
    for name, scale in plan.scales.items():
        where = f", scale {name}" if name else ""
        evaluated = _evaluated_tokens(scale.variants[scale.baseline])
        try:
            runs = {
                model: _seconds_of_run(variant, evaluated, threads, measured)
                for model, variant in scale.variants.items()
            }
        except Exception as error:  # whatever the machine or a package lacks; the plan holds
            yield f"warning: time on this machine{where} unknown: {type(error).__name__}: {first_line(error)}"
            return
        of_scale = sum(scale.runs_of(model) * each for model, each in runs.items())
        total += of_scale
        yield (
            f"time on this machine{where}: about {duration(runs[scale.baseline])} a run of {scale.baseline}, "
            f"{duration(of_scale)} in all{', more if a search goes on' * scale.is_open}"
        )
    if len(plan.scales) > 1:
        yield f"time on this machine, all scales: about {duration(total)}"
    yield (
        "times are for one run at a time, by the throughput of a few steps of each model, without the preparation of "
        "data, "
        "compilation, and evaluation on text that is not here"
    )


def _evaluated_tokens(variant: Variant) -> float:
    """Estimates how many tokens a run evaluates from the size of its text; 0 if it is not here, as one on the Hub."""
    recipe, arguments = variant.recipe, variant.recipe.arguments
    size = sum(path.stat().st_size for paths in files_by_split(recipe).values() for path in paths)
    passes = 1
    if arguments.eval_strategy == "steps":
        interval = arguments.eval_steps if arguments.eval_steps >= 1 else arguments.eval_steps * variant.steps
        passes = math.ceil(variant.steps / interval)
    # That is little text
    validation = 0.0 if recipe.max_validation_documents is not None else recipe.validation_fraction
    return (passes * validation + recipe.test_fraction) * size / _BYTES_PER_TOKEN


def machine_warning(plan: Comparison) -> str | None:
    """A warning if a model is to be trained in bfloat16 on a CPU that emulates it."""
    variants = (variant for scale in plan.scales.values() for variant in scale.variants.values())
    return next(filter(None, (emulated_bf16(variant.recipe.training) for variant in variants)), None)


def _describe_difference(scale: Scale, floor: float | None) -> str:
    seeds = len(scale.seeds)
    if seeds < 2:
        return "none, for a test needs two seeds or more"
    times = smallest_difference(
        seeds, len(scale.variants) - 1, 1.0, alpha_of_last(seeds, scale.stop is not None), _POWER
    )
    if floor is None:
        return f"{times:.2g} times the noise floor"
    return f"{times * floor:.2g} % of the loss, if the noise floor is {floor:.2g} %"


def _seconds_of_run(variant: Variant, evaluated: float, threads: int | None, measured: dict[str, float]) -> float:
    """The seconds of a run that evaluates so many tokens; models whose steps are alike are `measured` once."""
    training = {name: value for name, value in variant.recipe.training.items() if "rate" not in name}
    key = json.dumps([variant.config, training], sort_keys=True, default=str)
    if key not in measured:
        measured[key] = seconds_of_step(variant, threads)
    evaluation = _SHARE_OF_EVALUATION * evaluated * variant.steps / variant.tokens
    return _SECONDS_OF_A_RUN + measured[key] * (variant.steps + evaluation)


def seconds_of_step(variant: Variant, threads: int | None = None) -> float:
    """Returns the median seconds of an optimizer step by `Trainer`, on random tokens; of a large batch, from a part of
    it.
    """
    before, watch = torch.get_num_threads(), _Stopwatch()
    with tempfile.TemporaryDirectory() as folder, _quiet(), environment_of_one_run():
        training = {
            "save_strategy": "no",
            "eval_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        training |= {"log_level": "passive", "torch_compile": False, "load_best_model_at_end": False}
        recipe = variant.recipe.replace(training={**training, "output_dir": folder})
        arguments = recipe.arguments
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # as a run has; Trainer would spread the batch over all of them
        whole = arguments.train_batch_size * arguments.gradient_accumulation_steps
        arguments.gradient_accumulation_steps = 1
        if arguments.device.type == "cpu":
            most = max(1, _CPU_TOKENS // sum(recipe.sample_lengths))
            arguments.per_device_train_batch_size = min(arguments.per_device_train_batch_size, most)
        config = copy.deepcopy(recipe.config)
        model = auto_class_of(config).from_config(config, attn_implementation=recipe.attn_implementation)
        rows, size = arguments.train_batch_size * (_STEPS + 2), vocabulary_of(config)
        lengths = dict.fromkeys(("input_ids", "labels"), recipe.block_size)
        if recipe.objective == "seq2seq":  # as if every pair were as long as the longest
            lengths = {"input_ids": recipe.max_source_length, "labels": recipe.max_target_length}
            lengths["decoder_input_ids"] = lengths["labels"]
        data = Dataset.from_dict({name: torch.randint(size, (rows, length)) for name, length in lengths.items()})
        try:
            torch.set_num_threads(threads or before)
            Trainer(model, arguments, default_data_collator, data, callbacks=[watch]).train()
        finally:
            torch.set_num_threads(before)
    return statistics.median(watch.steps[2:] or watch.steps[-1:]) * whole / arguments.train_batch_size


class _Stopwatch(TrainerCallback):
    """Measures the seconds of each step, with the loading of its data, and stops when they are enough."""

    def __init__(self):
        self.steps = []

    def on_train_begin(self, args, state, control, **kwargs):
        self._last = _now(args)

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(_now(args) - self._last)
        self._last += self.steps[-1]
        control.should_training_stop = len(self.steps) >= _STEPS + 2 or (
            len(self.steps) > 1 and sum(self.steps) > _SECONDS
        )


def _now(args) -> float:
    """The time in seconds, after the accelerator has finished its work."""
    if args.device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        enable_progress_bar()

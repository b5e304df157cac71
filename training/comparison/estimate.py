"""Estimates the time of a comparison from the throughput of its models here, and the smallest difference it can find."""

import contextlib
import copy
import dataclasses
import io
import itertools
import json
import logging
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, default_data_collator
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from ..files import BUILT_IN_CORPORA, RESULTS_FILE, read_json
from ..run.documents import files_by_split, load_documents
from ..run.recipe import Recipe, emulated_bf16, resolve_recipe
from ..storage import open_folder
from ..text import duration, first_line
from .inference import alpha_spent, smallest_difference
from .local import environment_of_one_run
from .outcome import read_outcome
from .plan import Comparison, Scale, Variant


# The throughput of a model is that of so many steps after the first two, which warm up; slow steps are fewer
_STEPS, _SECONDS = 10, 5.0
# The largest batch of these steps on a CPU, in tokens; a larger one is hardly faster per token
_CPU_TOKENS = 8192
# What a run takes beside its steps: its process, its data, saving, the figure and the card; measured on an EPYC (Zen 5)
_SECONDS_OF_A_RUN = 3.0
# Forward passes are a third of a training step, which has two such passes more in backward
_SHARE_OF_EVALUATION = 1 / 3
# Python code with a vocabulary of 8,192 tokens: in docs/results, 4.24 nats per token equal 2.72 bits per byte
_BYTES_PER_TOKEN = 4.24 / math.log(2) / 2.72
_POWER = 0.8


def describe_estimate(
    plan: Comparison,
    threads: int | None = None,
    noise_floors: Mapping[str, float] | None = None,
    has_verdicts: bool = True,
) -> Iterator[str]:
    """Describes how long a plan takes on this machine and which difference it can find, line by line.

    Measuring a model takes some seconds. If it fails, there is a warning.

    Args:
        plan: the comparison.
        threads: the number of threads of a run; by default that of PyTorch.
        noise_floors: the noise floor of each scale in percent of the loss (see `read_noise_floors`).
        has_verdicts: whether the models are compared with the baseline one by one; those of a screening are not.
    """
    if warning := machine_warning(plan):
        yield f"warning: {warning}"
    # The server of the runs imports what this process has imported, and so does the command
    start = 2 * time.process_time()
    scales, totals, is_evaluated, measured = plan.scales, [], True, {}
    for name, scale in scales.items():
        where = f", scale {name}" if name else ""
        evaluated = _evaluated_tokens(scale.variants[scale.baseline])
        is_evaluated = is_evaluated and evaluated is not None
        try:
            runs = {
                model: seconds_of_run(variant, evaluated or 0.0, threads, measured) for model, variant in scale.variants.items()
            }
        except Exception as error:  # whatever the machine or a package lacks; the rest of the plan holds
            yield f"warning: time on this machine{where} unknown: {type(error).__name__}: {first_line(error)}"
            continue
        totals.append(sum(scale.runs_of(model) * each for model, each in runs.items()))
        total = totals[-1] + (start if len(scales) == 1 else 0.0)
        yield (
            f"time on this machine{where}: about {duration(runs[scale.baseline])} a run of {scale.baseline}, "
            f"{duration(total)} in all{', more if a search goes on' * scale.is_open}"
            + (", one run at a time" if len(scales) == 1 else "")
        )
    if len(totals) == len(scales) > 1:
        yield f"time on this machine, all scales: about {duration(start + sum(totals))}, one run at a time"
    if totals:
        yield (
            "times follow from the throughput of a few steps of each model now, with start-up "
            + ("and evaluation by the size of the text" if is_evaluated else "but without evaluation, for the text is not here")
            + "; neither the preparation of data nor compilation is included"
        )
    for name, scale in scales.items() if has_verdicts else ():
        where = f", scale {name}" if name else ""
        difference = _describe_difference(scale, (noise_floors or {}).get(name))
        yield f"smallest difference found with probability {100 * _POWER:.0f} %{where}: {difference}"
    if has_verdicts and not noise_floors and any(len(scale.seeds) > 1 for scale in scales.values()):
        yield "--noise-floor PERCENT gives the smallest difference in percent of the loss"


def _evaluated_tokens(variant: Variant) -> float | None:
    """Estimates how many tokens a run evaluates from the size of its text; `None` if the size is unknown, as on the Hub."""
    resolved = resolve_recipe(variant.content, {"output_dir": "unused"})
    recipe, arguments = resolved.recipe, resolved.training_arguments
    files = files_by_split(recipe)
    if "train" not in files:
        return None
    sizes = {split: sum(path.stat().st_size for path in paths) for split, paths in files.items()}
    most = math.inf
    if recipe.max_validation_documents is not None:
        most = recipe.max_validation_documents * _document_size(recipe, files["train"])
    validation, test = (
        min(most, sizes.get(split, fraction * sizes["train"]))
        for split, fraction in (("validation", recipe.validation_fraction), ("test", recipe.test_fraction))
    )
    passes = 1
    if arguments.eval_strategy == "steps":
        interval = arguments.eval_steps if arguments.eval_steps >= 1 else arguments.eval_steps * variant.steps
        passes = math.ceil(variant.steps / interval)
    return (passes * validation + test) / _BYTES_PER_TOKEN


def _document_size(recipe: Recipe, files: list[Path]) -> float:
    """The mean size in bytes of all documents of a built-in corpus, or of the first 100 documents in the first file."""
    if recipe.dataset in BUILT_IN_CORPORA:  # a document is a file
        return sum(path.stat().st_size for path in files) / len(files)
    first = dataclasses.replace(recipe, dataset=str(files[0]), streaming=True)
    rows = itertools.islice(load_documents(first)["train"], 100)
    sizes = [len(row[recipe.text_column].encode()) for row in rows]
    return statistics.fmean(sizes or [files[0].stat().st_size])


def machine_warning(plan: Comparison) -> str | None:
    """A warning if a model is to be trained in bfloat16 on a CPU that emulates it."""
    variants = (variant for scale in plan.scales.values() for variant in scale.variants.values())
    return next(filter(None, (emulated_bf16(variant.content["training"]) for variant in variants)), None)


def _describe_difference(scale: Scale, floor: float | None) -> str:
    seeds = len(scale.seeds)
    if seeds < 2:
        return "none, for a test needs two seeds or more"
    alpha = 0.05 if scale.stop is None else 0.05 * alpha_spent(seeds, seeds)  # of the last interim analysis
    times = smallest_difference(seeds, len(scale.variants) - 1, 1.0, alpha, _POWER)
    if floor is None:
        return f"{times:.2g} times the noise floor"
    return f"{times * floor:.2g} % of the loss, if the noise floor is {floor:.2g} %"


def read_noise_floors(given: str, plan: Comparison) -> dict[str, float]:
    """The noise floor of each scale of a plan, in percent of the baseline's loss.

    Args:
        given: a number, or the results of an earlier comparison: their folder, or the file. Of a ladder's results, a scale
            takes the noise floor of the scale of the same name, else that of the largest.
        plan: the comparison to plan.

    Raises:
        ValueError: if it is neither, or a noise floor is not above 0.
    """
    try:
        percents = dict.fromkeys(plan.scales, float(given))
    except ValueError:
        found = _measured(given)
        percents = {name: found.get(name, list(found.values())[-1]) for name in plan.scales}
    for percent in percents.values():
        if percent is None or not 0 < percent < math.inf:
            raise ValueError(f"--noise-floor={given}: the noise floor, in percent, must be a number above 0, not {percent}")
    return percents


def _measured(given: str) -> dict[str, float | None]:
    """The noise floors of an earlier comparison, by scale."""
    folder = open_folder(given)
    file = folder / RESULTS_FILE if folder.is_dir() else folder
    if not file.is_file():
        raise ValueError(f"--noise-floor={given} must be a number above 0, in percent, or the results of a comparison")
    content = read_json(file)
    try:
        scales = read_outcome(content).scales
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"--noise-floor={given}: {file} holds no results of a comparison") from None
    return {name: found.statistics.noise_floor_percent for name, found in scales.items()}


# Throughput


def seconds_of_run(variant: Variant, evaluated: float, threads: int | None = None, measured: dict | None = None) -> float:
    """Returns the seconds that a run takes which evaluates so many tokens, from the throughput of a few of its steps.

    The seconds of a step go into `measured`, so that models whose steps are alike are measured once.
    """
    measured = {} if measured is None else measured
    training = {name: value for name, value in variant.content["training"].items() if "rate" not in name}
    key = json.dumps([variant.config, training], sort_keys=True, default=str)
    if key not in measured:
        measured[key] = seconds_of_step(variant, threads)
    evaluation = _SHARE_OF_EVALUATION * evaluated * variant.steps / variant.tokens
    return _SECONDS_OF_A_RUN + measured[key] * (variant.steps + evaluation)


def seconds_of_step(variant: Variant, threads: int | None = None) -> float:
    """Returns the median seconds of an optimizer step by `Trainer`, on random tokens; of a large batch, from a part of it."""
    before, watch = torch.get_num_threads(), _Stopwatch()
    with tempfile.TemporaryDirectory() as folder, _quiet(), environment_of_one_run():
        content = copy.deepcopy(variant.content)
        content["training"] |= {"save_strategy": "no", "eval_strategy": "no", "report_to": "none", "disable_tqdm": True}
        content["training"] |= {"log_level": "passive", "torch_compile": False, "load_best_model_at_end": False}
        resolved = resolve_recipe(content, {"output_dir": folder})
        recipe, arguments = resolved.recipe, resolved.training_arguments
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # as a run has; Trainer would spread the batch over all of them
        whole = arguments.train_batch_size * arguments.gradient_accumulation_steps
        arguments.gradient_accumulation_steps = 1
        if arguments.device.type == "cpu":
            most = max(1, _CPU_TOKENS // recipe.block_size)
            arguments.per_device_train_batch_size = min(arguments.per_device_train_batch_size, most)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(resolved.config), attn_implementation=recipe.attn_implementation)
        shape = (arguments.train_batch_size * (_STEPS + 2), recipe.block_size)
        tokens = torch.randint(model.config.vocab_size, shape)
        data = Dataset.from_dict({"input_ids": tokens, "labels": tokens})
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
        control.should_training_stop = len(self.steps) >= _STEPS + 2 or (len(self.steps) > 1 and sum(self.steps) > _SECONDS)


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

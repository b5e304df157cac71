"""Estimates the time of a comparison on this machine from a short trial run, and the smallest difference it can find."""

import contextlib
import copy
import dataclasses
import gc
import io
import itertools
import logging
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import torch
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from ..files import BUILT_IN_CORPORA, RESULTS_FILE, read_json
from ..run.data import Blocks, save_blocks, train_byte_pair_encoding
from ..run.documents import files_by_split, load_documents
from ..run.recipe import Recipe, emulated_bf16, resolve_recipe
from ..run.trainer import train_recipe
from ..storage import open_folder
from ..text import duration, first_line
from .local import environment_of_one_run
from .plan import Comparison, Ladder, Variant, scales_of
from .statistics import share_of_look, smallest_difference
from .tables import scales_in


# A trial ends when it has taken `_SECONDS` and `_STEPS`, or `_SLOW_SECONDS` with fewer steps
_SECONDS, _STEPS, _SLOW_SECONDS = 2.0, 4, 10.0
# The estimated time and its range use these quantiles of the times of the trial's steps
_QUANTILES = (0.1, 0.5, 0.9)
# The largest batch of a trial on a CPU, in tokens and in floating-point operations. A larger one is hardly faster per token
_CPU_TOKENS, _CPU_FLOPS = 8192, 1e12
# Python code with a vocabulary of 8,192 tokens: in docs/results, 4.24 nats per token equal 2.72 bits per byte
_BYTES_PER_TOKEN = 4.24 / math.log(2) / 2.72
# The training arguments of a trial that differ from those of its run. A trial has no gradient accumulation
_ARGUMENTS = {
    "gradient_accumulation_steps": 1,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "log_level": "passive",
    "report_to": "none",
    "disable_tqdm": True,
}
_POWER = 0.8


def describe_estimate(
    plan: Comparison | Ladder,
    threads: int | None = None,
    noise_floors: Mapping[str, float] | None = None,
    has_verdicts: bool = True,
) -> Iterator[str]:
    """Describes how long a plan takes on this machine and which difference it can find, line by line.

    The trial of a scale takes some seconds, or one step of the baseline if that takes longer. If it fails, there is a warning.

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
    scales, totals, is_evaluated = scales_of(plan), [], True
    for name, comparison in scales.items():
        where = f", scale {name}" if name else ""
        base = comparison.variants[comparison.baseline]
        try:
            trial = try_run(comparison, threads)
        except Exception as error:  # whatever the machine or a package lacks; the rest of the plan holds
            yield f"warning: time on this machine{where} unknown, the trial failed: {type(error).__name__}: {first_line(error)}"
            continue
        evaluated = _evaluated_tokens(base)
        is_evaluated = is_evaluated and evaluated is not None
        runs = {model: trial.seconds_of_run(variant, base, evaluated or 0.0) for model, variant in comparison.variants.items()}
        totals.append(sum(comparison.runs_of(model) * each for model, each in runs.items()))
        total = totals[-1] + (start if len(scales) == 1 else 0.0)
        is_open = any(variant.rates.is_search for variant in comparison.variants.values())
        yield (
            f"time on this machine{where}: about {duration(runs[comparison.baseline][1])} a run of "
            f"{comparison.baseline}, {_with_range(total)} in all{', more if a search goes on' * is_open}"
            + (", one run at a time" if len(scales) == 1 else "")
        )
    if len(totals) == len(scales) > 1:
        yield f"time on this machine, all scales: about {_with_range(start + sum(totals))}, one run at a time"
    if totals:
        is_compiled = any(
            base.content["training"].get("torch_compile") for base in (item.variants[item.baseline] for item in scales.values())
        )
        yield (
            "times are those of a short run of the baseline, and of the other models by their FLOPs, which is too short where "
            "a part has no fast kernel, with start-up "
            + ("and evaluation by the size of the text" if is_evaluated else "but without evaluation, for the text is not here")
            + "; the range is that of the steps of this run"
            + f"; the preparation of data is not included{'; the runs are compiled, and the trial is not' * is_compiled}"
        )
    for name, comparison in scales.items():
        where = f", scale {name}" if name else ""
        if not has_verdicts:
            continue
        difference = _describe_difference(comparison, (noise_floors or {}).get(name))
        yield f"smallest difference found with probability {100 * _POWER:.0f} %{where}: {difference}"
    if has_verdicts and not noise_floors and any(len(comparison.seeds) > 1 for comparison in scales.values()):
        yield "--noise-floor PERCENT gives the smallest difference in percent of the loss"


def _with_range(seconds: np.ndarray) -> str:
    """Formats a duration and its range from its `_QUANTILES`, without the range if both ends read the same."""
    low, middle, high = map(duration, seconds)
    return middle if low == high else f"{middle} ({low} to {high})"


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


def machine_warning(plan: Comparison | Ladder) -> str | None:
    """A warning if a model is to be trained in bfloat16 on a CPU that emulates it."""
    variants = (variant for comparison in scales_of(plan).values() for variant in comparison.variants.values())
    return next(filter(None, (emulated_bf16(variant.content["training"]) for variant in variants)), None)


def _describe_difference(comparison: Comparison, floor: float | None) -> str:
    seeds = len(comparison.seeds)
    if seeds < 2:
        return "none, for a test needs two seeds or more"
    alpha = 0.05 if comparison.stop is None else 0.05 * share_of_look(seeds, seeds)  # of the last look
    times = smallest_difference(seeds, len(comparison.variants) - 1, 1.0, alpha, _POWER)
    if floor is None:
        return f"{times:.2g} times the noise floor"
    return f"{times * floor:.2g} % of the loss, if the noise floor is {floor:.2g} %"


def read_noise_floors(given: str, plan: Comparison | Ladder) -> dict[str, float]:
    """The noise floor of each scale of a plan, in percent of the baseline's loss; a comparison has the one scale "".

    Args:
        given: a number, or the results of an earlier comparison: their folder, or the file. Of a ladder's results, a scale
            takes the noise floor of the scale of the same name, else that of the largest.
        plan: the comparison to plan.

    Raises:
        ValueError: if it is neither, or a noise floor is not above 0.
    """
    try:
        percents = dict.fromkeys(scales_of(plan), float(given))
    except ValueError:
        percents = _measured(given, plan)
    for percent in percents.values():
        if percent is None or not 0 < percent < math.inf:
            raise ValueError(f"--noise-floor={given}: the noise floor, in percent, must be a number above 0, not {percent}")
    return percents


def _measured(given: str, plan: Comparison | Ladder) -> dict[str, float | None]:
    folder = open_folder(given)
    file = folder / RESULTS_FILE if folder.is_dir() else folder
    if not file.is_file():
        raise ValueError(f"--noise-floor={given} must be a number above 0, in percent, or the results of a comparison")
    results = read_json(file)
    try:
        floors = {name: scale["statistics"]["noise_floor_percent"] for name, scale in scales_in(results).items()}
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"--noise-floor={given}: {file} holds no results of a comparison") from None
    largest = list(floors)[-1]
    return {name: floors.get(name, floors[largest]) for name in scales_of(plan)}


# The trial


@dataclass(frozen=True)
class Trial:
    """The times of a short run of the baseline.

    Attributes:
        step: seconds per training token, at each of `_QUANTILES`.
        evaluation: seconds per evaluated token.
        others: seconds for everything else: building the model, saving it, the figure and the card.
    """

    step: np.ndarray
    evaluation: float
    others: float

    def seconds_of_run(self, variant: Variant, base: Variant, evaluated: float) -> np.ndarray:
        """The seconds that a run takes, at each of `_QUANTILES`.

        Args:
            variant: the model of the run.
            base: the baseline.
            evaluated: the number of tokens that the run evaluates.
        """
        share = variant.size.flops_per_token / base.size.flops_per_token
        return self.others + share * (self.step * variant.tokens + self.evaluation * evaluated)


def try_run(comparison: Comparison, threads: int | None = None) -> Trial:
    """Makes a run of the baseline as the comparison would, on random tokens, and ends it after a few steps.

    The run is evaluated and saved in a folder that is then removed. It is not compiled and has no gradient accumulation. On a
    CPU, its batch has at most 8,192 tokens.

    Args:
        comparison: a comparison at one scale.
        threads: the number of threads; by default that of PyTorch.
    """
    before = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder, _quiet(), environment_of_one_run():
            torch.set_num_threads(threads or before)
            return _try(comparison.variants[comparison.baseline], Path(folder))
    finally:
        torch.set_num_threads(before)
        gc.collect()  # the next trial may need the accelerator's memory


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        enable_progress_bar()
        datasets.enable_progress_bars()


def _try(variant: Variant, folder: Path) -> Trial:
    content = copy.deepcopy(variant.content)
    content["training"].update(_ARGUMENTS)
    content["record_stability"] = False  # which a run does so seldom that it takes hardly any time
    resolved = resolve_recipe(content, {"output_dir": str(folder / "run")})
    recipe, arguments = resolved.recipe, resolved.training_arguments
    if arguments.device.type == "cpu":
        most = max(1, int(min(_CPU_TOKENS, _CPU_FLOPS / variant.size.flops_per_token)) // recipe.block_size)
        arguments.per_device_train_batch_size = min(arguments.per_device_train_batch_size, most)
        arguments.per_device_eval_batch_size = min(arguments.per_device_eval_batch_size, most)
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # as a run has; Trainer would spread the batch over all of them
    batch_size = arguments.train_batch_size
    _save_random_blocks(folder / "data", recipe.block_size, 100 * batch_size, arguments.eval_batch_size)
    stopwatch = _Stopwatch()
    began = time.perf_counter()
    metrics = train_recipe(resolved, folder / "data", [stopwatch])
    others = time.perf_counter() - began - sum(stopwatch.steps) - sum(stopwatch.evaluations)
    evaluated = len(stopwatch.evaluations) * metrics["validation_tokens"]
    return Trial(
        np.quantile(stopwatch.steps[1:] or stopwatch.steps, _QUANTILES) / (batch_size * recipe.block_size),
        sum(stopwatch.evaluations) / evaluated if evaluated else 0.0,
        others,
    )


def _save_random_blocks(folder: Path, block_size: int, train: int, held_out: int) -> None:
    """Saves a tokenizer and random blocks where a run looks for those that are prepared.

    Args:
        folder: the folder of the data.
        block_size: the size of a block in tokens.
        train: number of blocks to train on.
        held_out: number of blocks of the validation and of the test split.
    """
    tokenizer, random = train_byte_pair_encoding(iter(()), 0), np.random.default_rng(0)
    tokenizer.save_pretrained(folder)
    blocks = {}
    for split, count in (("train", train), ("validation", held_out), ("test", held_out)):
        tokens = random.integers(len(tokenizer), size=(count, block_size), dtype=np.int32)
        blocks[split] = Blocks(datasets.Dataset.from_dict({"input_ids": tokens}), count * block_size, 1.0)
    save_blocks(blocks, None, folder)


class _Stopwatch(TrainerCallback):
    """Measures a trial and stops it when it is long enough. The first step is a warm-up.

    Attributes:
        steps: the seconds that each step took, with the loading of its data.
        evaluations: the seconds that each evaluation took.
    """

    def __init__(self):
        self.steps, self.evaluations = [], []

    def on_train_begin(self, args, state, control, **kwargs):
        self._last = _now(args)

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(_now(args) - self._last)
        self._last += self.steps[-1]
        elapsed = sum(self.steps)
        if elapsed > _SLOW_SECONDS or (state.global_step >= _STEPS and elapsed > _SECONDS):
            control.should_training_stop = True

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.evaluations += [value for name, value in metrics.items() if name.endswith("_runtime")]
        self._last = _now(args)  # the next step begins after it


def _now(args) -> float:
    """The time in seconds, after the accelerator has finished its work."""
    if args.device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()

"""What a plan takes on the machine at hand, by a short trial, and the smallest difference that it can find."""

import copy
import gc
import math
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback
from transformers.utils import logging

from ..files import BUILT_IN_CORPORA, RESULTS_FILE, read_json
from ..models import is_saved_model, load_config
from ..run.data import BlockCollator
from ..run.documents import python_files
from ..run.recipe import emulated_bf16, resolve_recipe
from ..storage import open_folder
from ..text import duration, first_line
from .local import environment_of_one_run
from .plan import Comparison, Ladder, Variant
from .statistics import smallest_difference


# A trial ends after so many seconds, but not before so many steps, unless it is slow
_SECONDS, _STEPS, _SLOW_SECONDS = 2.0, 3, 10.0
# The largest batch of a trial on a CPU, in tokens and in floating-point operations. There a larger batch is hardly faster
_CPU_TOKENS, _CPU_FLOPS = 8192, 1e12
# A forward pass has a third of the FLOPs of a training step
_EVALUATION = 1 / 3
# Of Python code with 8,192 tokens: in docs/results, 4.24 nats a token are 2.72 bits a byte
_BYTES_PER_TOKEN = 4.24 / math.log(2) / 2.72
# What a run takes beside its steps: data from the cache, model, weights, figure and card; on two cores (AMD EPYC)
_SECONDS_PER_RUN = 2.0
# The training arguments in which a trial differs from its run
_ARGUMENTS = {
    "gradient_accumulation_steps": 1,
    "auto_find_batch_size": False,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "logging_strategy": "no",
    "logging_first_step": False,
    "log_level": "passive",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
}
_POWER = 0.8


def describe_estimate(
    plan: Comparison | Ladder, threads: int | None = None, noise_floors: Mapping[str, float] | None = None
) -> Iterator[str]:
    """How long a plan takes on this machine, and the smallest difference that it finds, line by line.

    The trial of a scale takes a few seconds, or one step of the baseline if that takes longer. One that fails gives a warning.

    Args:
        plan: the comparison.
        threads: of a run; by default as many as PyTorch takes.
        noise_floors: by scale, in percent of the loss (see `read_noise_floors`).
    """
    if warning := machine_warning(plan):
        yield f"warning: {warning}"
    # The server of the runs imports what this process has imported, and so does the command
    start = 2 * time.process_time()
    scales, totals, is_evaluated = _scales(plan), [], True
    for name, comparison in scales.items():
        where = f", scale {name}" if name else ""
        base = comparison.variants[comparison.baseline]
        try:
            seconds = seconds_per_token(comparison, threads)
        except Exception as error:  # whatever the machine or a package lacks; the rest of the plan holds
            yield f"warning: time on this machine{where} unknown, the trial failed: {type(error).__name__}: {first_line(error)}"
            continue
        evaluated = _evaluated_tokens(base)
        is_evaluated = is_evaluated and evaluated is not None
        runs = {
            model: _seconds_of_run(variant, base, seconds, evaluated or 0.0) for model, variant in comparison.variants.items()
        }
        totals.append(sum(comparison.runs_of(model) * each for model, each in runs.items()))
        total = totals[-1] + (start if len(scales) == 1 else 0.0)
        is_open = any(variant.rates.is_search for variant in comparison.variants.values())
        yield (
            f"time on this machine{where}: about {duration(runs[comparison.baseline])} a run of "
            f"{comparison.baseline}, {duration(total)} in all{', more if a search goes on' * is_open}"
            + (", one run at a time" if len(scales) == 1 else "")
        )
    if len(totals) == len(scales) > 1:
        yield f"time on this machine, all scales: about {duration(start + sum(totals))}, one run at a time"
    if totals:
        is_compiled = any(
            base.content["training"].get("torch_compile") for base in (item.variants[item.baseline] for item in scales.values())
        )
        yield (
            "times are those of a few training steps of the baseline, and of the other models by their FLOPs, with start-up "
            + ("and evaluation by the size of the text" if is_evaluated else "but without evaluation, for the text is not here")
            + f"; the preparation of data is not included{'; the runs are compiled, and the trial is not' * is_compiled}"
        )
    for name, comparison in scales.items():
        where = f", scale {name}" if name else ""
        difference = _describe_difference(comparison, (noise_floors or {}).get(name))
        yield f"smallest difference found with probability {100 * _POWER:.0f} %{where}: {difference}"
    if not noise_floors and any(len(comparison.seeds) > 1 for comparison in scales.values()):
        yield "--noise-floor PERCENT gives the smallest difference in percent of the loss"


def _seconds_of_run(variant: Variant, base: Variant, seconds: float, evaluated: float) -> float:
    """What a run takes.

    Args:
        variant: its model.
        base: the baseline.
        seconds: what a token takes that the baseline is trained on.
        evaluated: the tokens that the run evaluates.
    """
    share = variant.size.flops_per_token / base.size.flops_per_token
    return _SECONDS_PER_RUN + seconds * share * (variant.tokens + _EVALUATION * evaluated)


def _evaluated_tokens(variant: Variant) -> float | None:
    """About how many tokens a run evaluates, by the size of its text; `None` for a dataset that is no file and not built in."""
    resolved = resolve_recipe(variant.content, {"output_dir": "unused"})
    recipe, arguments = resolved.recipe, resolved.training_arguments
    if recipe.dataset in BUILT_IN_CORPORA:
        size = sum(path.stat().st_size for path in python_files(recipe.dataset))
    elif Path(recipe.dataset).is_file():
        size = Path(recipe.dataset).stat().st_size
    else:
        return None
    passes = 1
    if arguments.eval_strategy == "steps":
        interval = arguments.eval_steps if arguments.eval_steps >= 1 else arguments.eval_steps * variant.steps
        passes = math.ceil(variant.steps / interval)
    return size / _BYTES_PER_TOKEN * (passes * recipe.validation_fraction + recipe.test_fraction)


def machine_warning(plan: Comparison | Ladder) -> str | None:
    """A warning if a model is to be trained in bfloat16 on a CPU that emulates it."""
    variants = (variant for comparison in _scales(plan).values() for variant in comparison.variants.values())
    return next(filter(None, (emulated_bf16(variant.content["training"]) for variant in variants)), None)


def _describe_difference(comparison: Comparison, floor: float | None) -> str:
    seeds = len(comparison.seeds)
    if seeds < 2:
        return "none, for a test needs two seeds or more"
    times = smallest_difference(seeds, len(comparison.variants) - 1, 1.0, power=_POWER)
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
        percents = dict.fromkeys(_scales(plan), float(given))
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
        found = results.get("scales") or {"": results}  # from the smallest to the largest
        floors = {name: scale["statistics"]["noise_floor_percent"] for name, scale in found.items()}
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"--noise-floor={given}: {file} holds no results of a comparison") from None
    largest = list(floors)[-1]
    return {name: floors.get(name, floors[largest]) for name in _scales(plan)}


def _scales(plan: Comparison | Ladder) -> dict[str, Comparison]:
    return plan.scales if isinstance(plan, Ladder) else {"": plan}


# The trial


def seconds_per_token(comparison: Comparison, threads: int | None = None) -> float:
    """Trains the baseline for a few steps on random tokens, as its runs would, and returns the seconds a token takes.

    Nothing is evaluated, logged or saved, and nothing is compiled. The batch is that of a device, not of an optimizer step, and
    on a CPU it has at most 8,192 tokens.

    Args:
        comparison: at one scale.
        threads: by default as many as PyTorch takes.
    """
    before = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder, _quiet(), environment_of_one_run():
            torch.set_num_threads(threads or before)
            return _try(comparison.variants[comparison.baseline], folder)
    finally:
        torch.set_num_threads(before)
        gc.collect()  # the next trial may need the accelerator's memory


@contextmanager
def _quiet() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def _try(variant: Variant, folder: str) -> float:
    content = copy.deepcopy(variant.content)
    content["training"].update(_ARGUMENTS)
    resolved = resolve_recipe(content, {"output_dir": folder})
    recipe, arguments = resolved.recipe, resolved.training_arguments
    if arguments.device.type == "cpu":
        most = int(min(_CPU_TOKENS, _CPU_FLOPS / variant.size.flops_per_token)) // recipe.block_size
        arguments.per_device_train_batch_size = max(1, min(arguments.per_device_train_batch_size, most))
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # as a run has; Trainer would spread the batch over all of them
    config = load_config(recipe.model, resolved.switches)
    # New weights do as well as saved ones, which a run loads in float32
    dtype = {"dtype": torch.float32} if is_saved_model(recipe.model) else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation=recipe.attn_implementation, **dtype)
    batch_size = arguments.train_batch_size
    tokens = torch.randint(config.vocab_size, (batch_size, recipe.block_size))
    stopwatch = _Stopwatch()
    trainer = Trainer(
        model=recipe.choose_trained(model),
        args=arguments,
        train_dataset=[{"input_ids": row} for row in tokens.numpy()] * 256,
        data_collator=BlockCollator(end_of_text=0, restart=recipe.packing == "documents"),
        callbacks=[stopwatch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return stopwatch.seconds / (batch_size * recipe.block_size)


class _Stopwatch(TrainerCallback):
    """Stops a trial when it is long enough.

    Attributes:
        seconds: of a step, on average. The first step warms up, and counts only if there is no other.
    """

    seconds = math.nan

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = _now(args)

    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        if step == 1:
            self._warm = _now(args)
            self.seconds = self._warm - self._began
        elapsed = time.perf_counter() - self._began
        is_long = elapsed > _SLOW_SECONDS or (step >= _STEPS and elapsed > _SECONDS)
        if is_long or step >= state.max_steps:
            control.should_training_stop = True
            if step > 1:
                self.seconds = (_now(args) - self._warm) / (step - 1)


def _now(args) -> float:
    """Seconds, when the accelerator has computed all that it was given."""
    if args.device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()

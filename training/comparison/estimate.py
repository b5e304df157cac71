"""Estimates the time of a comparison from a few steps of each model, and the smallest difference it can detect."""

import copy
import statistics
import time
from collections.abc import Iterator
from functools import singledispatch

import torch

from ..run.muon import make_muon
from ..run.objectives import objective_of
from ..run.threads import choose_threads
from ..size import auto_class_of, vocabulary_of
from ..text import check_number, duration, first_line
from .comparison import Comparison, Variant, heights_of
from .conditions import FEW_SEEDS, plan_primary, planned_noise
from .inference import ALPHA, alpha_of_last, noise_range, smallest_difference
from .local import environment_of_one_run


# Steps of a model that are timed, after two that warm up; fewer if they take longer than `_SECONDS`
_STEPS, _SECONDS = 10, 5.0
# Most tokens of a timed batch on a CPU
_CPU_TOKENS = 8192
# Seconds of a run beside its steps: process, data, saving, figure and card, measured on an EPYC (Zen 5)
_SECONDS_OF_A_RUN = 3.0
_POWER = 0.8
_INDEPENDENT = (
    "this takes the runs of a seed for independent and leaves out the choice of the test data: the noise of pairs was "
    "0.5 to 1.5 times this in published comparisons, less from trained weights; each report prints its own"
)


@singledispatch
def describe_estimate(
    plan: Comparison, threads: int | None = None, noise_floor: float | None = None, has_verdicts: bool = True
) -> Iterator[str]:
    """Yields lines about the time of a plan on this machine and the smallest difference it can detect.

    The `noise_floor` of earlier runs is in percent of the loss. The runs of a screening have no verdicts.
    """
    check_number("--noise-floor", noise_floor, 0)
    if warning := plan.machine_warning:
        yield f"warning: {warning}"
    where = {name: f", {plan.config.axis.one} {name}" if plan.config.axis else "" for name in plan.scales}
    for name, scale in plan.scales.items() if has_verdicts else ():
        seeds, difference = len(scale.seeds), "none, for a test needs two seeds or more"
        if seeds > 1:
            alpha = alpha_of_last(seeds, scale.config.stop is not None)
            times = smallest_difference(seeds, scale.family, 1.0, alpha, _POWER)
            difference = _in_floors(times, noise_floor, seeds)
        yield f"smallest difference found with probability {100 * _POWER:.0f} %{where[name]}: {difference}"
    if has_verdicts:
        yield _INDEPENDENT
    if plan.config.primary is not None:
        yield from _describe_primary(plan, noise_floor)
    total, threads = 0.0, threads or choose_threads()
    for name, scale in plan.scales.items():
        try:
            runs = {
                model: _SECONDS_OF_A_RUN + variant.steps * seconds_of_step(variant, threads)
                for model, variant in scale.variants.items()
            }
        except Exception as error:  # a missing package or memory; the plan is still valid
            yield f"warning: time on this machine{where[name]} unknown: {type(error).__name__}: {first_line(error)}"
            return
        seconds = sum(scale.runs_of(model) * each for model, each in runs.items())
        total += seconds
        yield (
            f"time on this machine{where[name]}: about {duration(runs[scale.baseline])} a run of {scale.baseline}, "
            f"{duration(seconds)} in all{scale.or_more}"
        )
    if len(plan.scales) > 1:
        yield f"time on this machine, all {plan.config.axis}: about {duration(total)}"
    yield (
        "times are for one run at a time, by the throughput of a few steps of each model, without the preparation of "
        "data, compilation and evaluation"
    )


def _describe_primary(plan: Comparison, noise_floor: float | None) -> Iterator[str]:
    planned, margin = plan_primary(plan.config, heights_of(plan.scales)), plan.config.primary.margin
    tests, correction = len(planned), "without a correction"
    if tests > 1:
        correction = f"corrected for {tests} primary tests by Holm's method"
    for primary in planned:
        title = f"primary test {primary.name}".strip()
        yield f"{title}: {primary.about}; first, at 5 % {correction}"
        seeds = {name: set(plan.scales[name].seeds) for name in primary.weights}
        if primary.is_paired:
            seeds = dict.fromkeys(seeds, set.intersection(*seeds.values()))
        runs = {name: len(each) for name, each in seeds.items()}
        if (fewest := min(runs.values())) < 2:
            yield f"{title}: it will not be tested: {FEW_SEEDS}"
            continue
        noise, alpha = planned_noise(primary, runs), ALPHA / tests  # as if it had the smallest p
        value = _in_floors(noise.smallest(alpha, _POWER), noise_floor, fewest)
        yield f"{title}: smallest value found with probability {100 * _POWER:.0f} %: {value}"
        if margin is not None:
            # The usual approximation: 80 to 83 % for 2 seeds or more
            most = margin / (noise.margin(2 * alpha) + noise.margin(1 - _POWER))
            yield (
                f"{title}: if the true value is 0, equivalence within {margin:g} % is found in "
                f"{100 * _POWER:.0f} % of cases where the noise floor is at most {most:.2g} %"
                + ("" if noise_floor is None else "; it is" if noise_floor <= most else "; it is not")
            )


def _in_floors(times: float, floor: float | None, seeds: int) -> str:
    if floor is None:
        return f"{times:.2g} times the noise floor"
    low, high = (f"{times * floor * end:.2g}" for end in noise_range(seeds - 1))
    known = f"{times * floor:.2g} % of the loss, if the noise floor is {floor:.2g} %"
    return f"{known}; {low} to {high} % by its 95 % range, if it comes from {seeds} runs"


@environment_of_one_run()
def seconds_of_step(variant: Variant, threads: int | None = None) -> float:
    """Returns the median seconds of a training step, timed on random tokens."""
    recipe, arguments = variant.recipe, variant.recipe.arguments
    config = copy.deepcopy(recipe.config)
    device, rows = arguments.device, arguments.per_device_train_batch_size
    if device.type == "cpu":
        rows = min(rows, max(1, _CPU_TOKENS // sum(recipe.sample_lengths)))
    lengths = objective_of(recipe).input_lengths
    batch = {name: torch.randint(vocabulary_of(config), (rows, length)).to(device) for name, length in lengths.items()}
    model = auto_class_of(config).from_config(config, attn_implementation=recipe.attn_implementation)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # as Trainer's default
    if recipe.optimizer == "muon":
        optimizer = make_muon(model, arguments, decayed=())
    dtype = torch.bfloat16 if arguments.bf16 else torch.float16
    threads_before, seconds = torch.get_num_threads(), []
    torch.set_num_threads(threads or threads_before)
    try:
        while len(seconds) < _STEPS + 2 and (len(seconds) < 2 or sum(seconds) < _SECONDS):
            start = time.perf_counter()
            with torch.autocast(device.type, dtype, enabled=arguments.bf16 or arguments.fp16):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads_before)
    batches = arguments.per_device_train_batch_size / rows * arguments.gradient_accumulation_steps
    return statistics.median(seconds[2:] or seconds[-1:]) * batches

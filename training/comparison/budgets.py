"""Several token budgets from one run: the longest run of a scale, the trunk, keeps checkpoints with which shorter runs begin.

The trunk trains at a constant rate after its warm-up and decays at its end (`warmup_stable_decay`). A smaller budget has the
same warm-up, and its own decay. So its run equals the trunk up to the step where this decay begins, and trains only the rest.
"""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ..files import STATE_FILE
from ..run.checkpoints import kept_checkpoint
from ..run.recipe import resolve_recipe
from .plan import Comparison, Run, Variant
from .rates import Rates
from .results import FinishedRuns, run_folder


_SCHEDULE = "warmup_stable_decay"
# How much longer or shorter than its share a decay may be, so that it begins at a step that is logged
_LARGEST_SHIFT = 0.25
# Of TrainingArguments. With them a run needs checkpoints that the trunk does not keep, or sees other data
_REFUSED = ("load_best_model_at_end", "metric_for_best_model", "save_only_model", "ignore_data_skip")


def budget_name(trunk: str, share: float) -> str:
    """The name of the scale that a budget makes."""
    return f"{trunk} at {share:g}"


def check_budgets(source: str, shares: Any) -> None:
    """Raises `ValueError` unless `budgets` is a list of different shares between 0 and 1."""
    if not isinstance(shares, list) or not shares:
        raise ValueError(f"{source}: budgets={shares!r} must be a list of shares of the scale's tokens, such as [0.25, 0.5]")
    for share in shares:
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < 1:
            raise ValueError(f"{source}: budgets={shares!r}: {share!r} must be a number above 0 and below 1")
    if len({f"{share:g}" for share in shares}) < len(shares):
        raise ValueError(f"{source}: budgets={shares!r} holds a share twice")


def with_whole_decay(comparison: Comparison) -> Comparison:
    """A comparison whose `num_decay_steps`, where it is a share of the steps of a run, is the number of these steps."""
    variants = {}
    for model, variant in comparison.variants.items():
        arguments = _arguments(variant)
        decay = (arguments.lr_scheduler_kwargs or {}).get("num_decay_steps")
        if arguments.lr_scheduler_type == _SCHEDULE and isinstance(decay, float) and 0 < decay < 1:
            variant = _with_training(variant, lr_scheduler_kwargs=_with_decay(arguments, _decay_steps(decay, variant.steps)))
        variants[model] = variant
    return dataclasses.replace(comparison, variants=variants)


def split_into_budgets(source: str, name: str, comparison: Comparison, shares: list[float]) -> dict[str, Comparison]:
    """Makes the scales of a trunk and of its smaller budgets, by name.

    Args:
        source: for messages.
        name: of the scale.
        comparison: at that scale, with `num_decay_steps` as given.
        shares: of the trunk's tokens, for each smaller budget.

    Raises:
        ValueError: if the schedule has no constant part that the budgets could share.
    """
    trunk, made = with_whole_decay(comparison), {}
    for share in sorted(shares):
        variants = {
            model: _read_budget(f"{source}: model {model!r}", variant, share) for model, variant in comparison.variants.items()
        }
        made[budget_name(name, share)] = dataclasses.replace(
            trunk,
            name=budget_name(trunk.name, share),
            trunk=name,
            variants=variants,
            tokens_per_run=variants[trunk.baseline].tokens,
            given={**trunk.given, "trunk": name, "budget": share},
        )
    kept = {
        model: dataclasses.replace(variant, keep=tuple(sorted({one.variants[model].begins_at for one in made.values()})))
        for model, variant in trunk.variants.items()
    }
    return {name: dataclasses.replace(trunk, variants=kept), **made}


def _read_budget(source: str, trunk: Variant, share: float) -> Variant:
    """A model with a smaller budget. Its decay begins at the nearest step that is logged: no mean of losses spans it."""
    arguments = _arguments(trunk)
    _check_schedule(source, arguments)
    if arguments.logging_strategy != "steps":
        raise ValueError(
            f"{source}: budgets: logging_strategy={arguments.logging_strategy.value} must be steps, or the runs of a budget "
            "would report another training loss"
        )
    decay, steps = arguments.lr_scheduler_kwargs["num_decay_steps"], max(1, round(share * trunk.steps))
    # Shares of the steps, which Trainer would read as those of the budget
    whole = {name: _whole(getattr(arguments, name), trunk.steps) for name in ("logging_steps", "save_steps", "eval_steps")}
    every, wanted = whole["logging_steps"], _decay_steps(decay, steps)
    begins_at = every * round((steps - wanted) / every)
    if abs(steps - begins_at - wanted) > max(1, _LARGEST_SHIFT * wanted):
        raise ValueError(
            f"{source}: budgets: the budget {share:g} would decay for {steps - begins_at} of its {steps} steps and not for "
            f"{wanted}, as a decay begins at a multiple of logging_steps={every}; choose a smaller logging_steps"
        )
    warmup, end = arguments.get_warmup_steps(trunk.steps), trunk.steps - _decay_steps(decay, trunk.steps)
    if not max(warmup, 1) <= begins_at <= end:
        raise ValueError(
            f"{source}: budgets: the decay of the budget {share:g} would begin at step {begins_at} of {steps}; it must begin "
            f"between the end of the warm-up, step {max(warmup, 1)}, and the decay of the longest run, step {end}, at a "
            f"multiple of logging_steps={every}"
        )
    variant = _with_training(
        trunk,
        max_steps=steps,
        warmup_steps=warmup,
        lr_scheduler_kwargs=_with_decay(arguments, steps - begins_at),
        **{name: value for name, value in whole.items() if value != getattr(arguments, name)},
    )
    tokens = trunk.tokens // trunk.steps * steps
    return dataclasses.replace(variant, steps=steps, tokens=tokens, begins_at=begins_at)


def _check_schedule(source: str, arguments: TrainingArguments) -> None:
    if arguments.lr_scheduler_type != _SCHEDULE:
        raise ValueError(
            f"{source}: budgets: lr_scheduler_type={arguments.lr_scheduler_type.value!r} must be {_SCHEDULE}, at whose "
            "constant rate runs of all lengths begin alike"
        )
    given = arguments.lr_scheduler_kwargs or {}
    decay = given.get("num_decay_steps")
    is_number = isinstance(decay, int | float) and not isinstance(decay, bool) and decay > 0
    if not is_number or (decay >= 1 and decay != int(decay)):
        raise ValueError(
            f"{source}: budgets: lr_scheduler_kwargs: num_decay_steps={decay!r} must be a share of the steps below 1, such as "
            "0.2, or a whole number of steps"
        )
    if "num_stable_steps" in given:
        raise ValueError(
            f"{source}: budgets: lr_scheduler_kwargs: num_stable_steps={given['num_stable_steps']!r} cannot hold for all "
            "budgets; remove it"
        )
    for name in _REFUSED:
        if value := getattr(arguments, name):
            raise ValueError(f"{source}: budgets: {name}={value!r} cannot be combined with them; remove it")


def _arguments(variant: Variant) -> TrainingArguments:
    return resolve_recipe(variant.content).training_arguments


def _with_training(variant: Variant, **fields: Any) -> Variant:
    content = copy.deepcopy(variant.content)
    content["training"].update(fields)
    return dataclasses.replace(variant, content=content)


def _with_decay(arguments: TrainingArguments, steps: int) -> dict[str, Any]:
    return {**arguments.lr_scheduler_kwargs, "num_decay_steps": steps}


def _decay_steps(decay: float, steps: int) -> int:
    return int(decay) if decay >= 1 else max(1, round(decay * steps))


def _whole(given: float | None, steps: int) -> int | None:
    return math.ceil(given * steps) if given is not None and given < 1 else given


def with_rates_of_trunk(budget: Comparison, trunk: Comparison, finished: FinishedRuns) -> Comparison:
    """A comparison with a smaller budget in which each seed chooses among the rates that the trunk tried for it.

    Args:
        budget: the comparison.
        trunk: that of the trunk, with the rates at which its searches began.
        finished: the runs of the trunk.
    """
    variants = {}
    for model, variant in budget.variants.items():
        tried = {
            tuning.seeds[0]: Rates(listed=tuple(sorted(tuning.losses)))
            for tuning in finished.tunings(trunk, model)
            if tuning.losses
        }
        variants[model] = dataclasses.replace(variant, rates=trunk.variants[model].rates, rates_by_seed=tried)
    return dataclasses.replace(budget, variants=variants)


def trunk_checkpoint(comparison: Comparison, run: Run, folder: Path) -> Path | None:
    """Finds the checkpoint with which a run begins.

    Args:
        comparison: at the scale of the run.
        run: the run.
        folder: of that scale; the folder of the trunk lies beside it.

    Returns:
        `None` for a run that begins at the start. With a smaller budget that is one whose trunk was not made (at a rate that
        only a sweep of this budget chose) or diverged before that step. Its result is the same.
    """
    if comparison.trunk is None:
        return None
    step = comparison.variants[run.model].begins_at
    checkpoint = kept_checkpoint(run_folder(folder.with_name(comparison.trunk), run), step)
    return checkpoint if (checkpoint / STATE_FILE).is_file() else None

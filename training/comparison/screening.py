"""A screening from its file to its results: many changes in one design, and then those that survive against the baseline."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..files import COMPARISON_FILE, RESULTS_FILE, write_text
from ..parameters import Size
from ..run.run_folder import CLAIM_PATIENCE, RunFolder
from ..scrub import without_folders
from .factors import ALPHA, RATE, Design, analyse_effects, merged_change, runs_one_at_a_time
from .plan import Comparison, Variant


Run = Callable[[Comparison, Path], dict[str, Any]]

OFF, BEST = "off", "best"
SCREENING, CONFIRMATION = "screening", "confirmation"


@dataclass
class Screening:
    """The plan of a screening.

    Attributes:
        name, command, given: as in `Comparison`.
        factors: the changes by name.
        design: the design.
        rates: the low and the high learning rate.
        runs: the runs of the design, as a comparison whose models are its rows, in order.
        sizes: the size of the model with one factor on, by its name, and of the baseline, by `OFF`.
        confirm: function from the factors that survive to the comparison that confirms them.
        confirmation: that comparison for the first factor alone, whose number of runs is that of any other.
    """

    name: str
    command: str
    given: dict[str, Any]
    factors: dict[str, dict[str, Any]]
    design: Design
    rates: tuple[float, float]
    runs: Comparison
    sizes: dict[str, Size]
    confirm: Callable[[Sequence[str]], Comparison]
    confirmation: Comparison

    @property
    def baseline(self) -> str:
        """The row with all factors off and the low rate."""
        return self.runs.baseline

    def describe(self) -> Iterator[str]:
        """The plan, line by line."""
        rows, seeds = len(self.design.rows), len(self.runs.seeds)
        for name in self.factors:
            others = [option for options in self.design.choices if name in options for option in options if option != name]
            more = self.sizes[name].total - self.sizes[OFF].total
            excludes = f"; never together with {', '.join(others)}" if others else ""
            yield f"{name}: {json.dumps(self.factors[name])}, {more:+,} parameters{excludes}"
        low, high = self.rates
        yield f"{RATE}: {low:g} or {high:g}"
        yield (
            f"screening: {rows} models with {seeds} seeds each, {rows * seeds} runs of {self.runs.tokens_per_run:,} tokens, "
            f"{self.runs.flops:.3g} FLOPs; one factor at a time, the same intervals take "
            f"{runs_one_at_a_time(self.design, seeds)} runs"
        )
        yield from alias_sentences(self.design)
        confirmation = self.confirmation
        runs = sum(confirmation.runs_of(name) for name in confirmation.variants)
        is_open = any(variant.rates.is_search for variant in confirmation.variants.values())
        yield (
            "then the factors that survive, together, against the baseline, each model at its own learning rate: "
            f"{'at most ' * bool(confirmation.stop)}{runs} runs{', more if a search goes on' * is_open}"
        )


def alias_sentences(design: Design) -> list[str]:
    """The interactions that cannot be told from each other, a sentence for each group."""
    return [
        f"cannot be told apart: {', '.join(' x '.join(pair) for pair in group)}" for group in design.aliases() if len(group) > 1
    ]


def row_name(factors: list[str], rate: float) -> str:
    """The name of a row, which also names its folder."""
    return f"{'+'.join(factors) or OFF}, rate {rate:g}"


def check_factors(
    factors: Mapping[str, Mapping[str, Any]], choices: Sequence[Sequence[str]], build: Callable[[str, dict[str, Any]], Variant]
) -> dict[str, Size]:
    """Builds the baseline, each factor alone, and each pair, before anything is trained.

    Args:
        factors: the changes by name.
        choices: groups of factors that are never on together.
        build: function from a name and a change to a `Variant`.

    Returns:
        The sizes of the baseline and of the single factors.

    Raises:
        ValueError: for a factor or a pair that no model can have, one that changes nothing, and two that are the same.
    """
    built = {OFF: build(OFF, {})}
    for name in factors:
        try:
            built[name] = build(f"factor {name!r}", merged_change(factors, [name]))
        except ValueError as error:
            raise ValueError(f"factor {name!r}: {error}") from error
    for first, second in itertools.combinations(built, 2):
        one, other = built[first], built[second]
        if one.config == other.config and one.content["training"] == other.content["training"]:
            what = f"changes nothing: {OFF!r} has it" if first == OFF else f"is the same as {first!r}"
            raise ValueError(f"factor {second!r} {what}; remove it")
    for first, second in itertools.combinations(factors, 2):
        if any(first in options and second in options for options in choices):
            continue
        change = merged_change(factors, [first, second])
        try:
            build(f"factors {first!r} and {second!r}", change)
        except ValueError as error:
            raise ValueError(f"factors {first!r} and {second!r} exclude each other: {error}") from error
    return {name: variant.size for name, variant in built.items()}


def run_screening(screening: Screening, folder: Path, run: Run, confirm: Run) -> dict[str, Any]:
    """Makes the runs of the design, and those that confirm what survives, and writes `results.json`.

    Args:
        screening: the plan.
        folder: the results folder.
        run, confirm: functions from a comparison and its folder to its results: for the runs of the design, and for those that
            confirm.

    Returns:
        `name`, `command`, `comparison`, `factors` (with the parameters that each adds), `design`, `runs` (the results of the
        screening's runs), `effects` (see `analyse_effects`; `None` if a run diverged), `diverged` (the rows that did), and
        `confirmation`, the results of the comparison of `best` with `off`; `None` if no factor survived.
    """
    place = RunFolder(folder, COMPARISON_FILE)
    with place.held(CLAIM_PATIENCE):
        place.claim(screening.given)
    found = run(screening.runs, folder / SCREENING)
    names = list(screening.runs.variants)
    losses = [[run["test_loss"] for run in found["models"][name]["runs"]] for name in names]
    diverged = [name for name, own in zip(names, losses) if None in own]
    effects = None if diverged else analyse_effects(screening.design, np.array(losses))
    confirmation = None
    if effects is not None and effects["survivors"]:
        confirmation = confirm(screening.confirm(effects["survivors"]), folder / CONFIRMATION)
    results = {
        "name": screening.name,
        "command": screening.command,
        "comparison": without_folders(screening.given),
        "factors": {
            name: {"change": without_folders(change), "parameters": screening.sizes[name].total - screening.sizes[OFF].total}
            for name, change in screening.factors.items()
        },
        "design": {
            "factors": screening.design.factors,
            "rows": screening.design.rows.tolist(),
            "choices": [list(options) for options in screening.design.choices],
        },
        "rates": list(screening.rates),
        "runs_one_at_a_time": runs_one_at_a_time(screening.design, len(screening.runs.seeds)),
        "alpha": ALPHA,
        "effects": effects,
        "diverged": diverged,
        "runs": found,
        "confirmation": confirmation,
    }
    write_text(folder / RESULTS_FILE, json.dumps(results, allow_nan=False) + "\n")
    return results

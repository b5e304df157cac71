"""A comparison at several scales: where its parts lie, and its results."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..scrub import without_folders
from .plan import Comparison, Ladder, scales_of, with_starts
from .results import RunStore, chosen_rates, losses_by_seed, unsettled_models
from .trend import Scale, analyse_trend


def scale_folder(folder: Path, name: str) -> Path:
    """The folder of a scale in that of its comparison, which is the same if there is only one, without a name."""
    return folder / "scales" / name if name else folder


def in_turn(plan: Comparison | Ladder, folder: Path) -> Iterator[tuple[str, Comparison, RunStore]]:
    """Goes through the scales in the order in which they are made, the smallest first.

    The rates of a scale are known when the scale before it is finished: each seed begins its search at the rate that it chose
    at the last scale that it has. One start for all seeds would be an accident of the scale before that they share, and their
    choices would not be independent.

    Yields:
        Name, comparison and finished runs of a scale. The runs may be made before the next scale is asked for.
    """
    starts: dict[str, dict[int, float]] = {}
    for name, planned in scales_of(plan).items():
        scale, finished = with_starts(planned, starts), RunStore(scale_folder(folder, name))
        yield name, scale, finished
        for model, rates in chosen_rates(scale, finished).items():
            starts[model] = {**starts.get(model, {}), **rates}


def gather_ladder(ladder: Ladder, gathered: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Gathers the content of a ladder's `results.json` from the results of its scales.

    * `scales`: by name, from the smallest to the largest, the results as `gather` returns them.
    * `trend`: the result of `analyse_trend` for the test losses.
    """
    scales = [
        Scale(
            name,
            flops_of_runs(results),
            losses_by_seed(results["models"]),
            unsettled_models(results["models"]),
        )
        for name, results in gathered.items()
    ]
    return {
        "name": ladder.name,
        "baseline": ladder.baseline,
        "command": ladder.command,
        "comparison": without_folders(ladder.given),
        "scales": gathered,
        "trend": dataclasses.asdict(analyse_trend(scales, ladder.baseline)),
    }


def flops_of_runs(results: dict[str, Any]) -> dict[str, int]:
    """The FLOPs of a run of each model at one scale."""
    return {name: model["flops_per_token"] * results["tokens_per_run"] for name, model in results["models"].items()}

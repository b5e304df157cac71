"""A comparison at several scales: where its parts lie, and its results."""

import dataclasses
from pathlib import Path
from typing import Any

from modeling_nlq.training.comparison.plan import Ladder
from modeling_nlq.training.comparison.results import losses_by_seed
from modeling_nlq.training.comparison.trend import Scale, analyse_trend
from modeling_nlq.training.traces import without_folders


def scale_folder(folder: Path, name: str) -> Path:
    """The folder of a scale in that of its ladder: like that of a comparison."""
    return folder / "scales" / name


def gather_ladder(ladder: Ladder, gathered: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Gathers the content of a ladder's `results.json` from the results of its scales.

    * `scales`: by name, from the smallest to the largest, the results as `gather` returns them.
    * `trend`: the result of `analyse_trend` for the test losses.
    """
    scales = [
        Scale(name, flops_of_runs(results), losses_by_seed(results["models"], results["seeds"]))
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

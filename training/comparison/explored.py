"""The page of `nlq explore` of a comparison: its best model beside the baseline, on the test split."""

import statistics
from pathlib import Path
from typing import Any

from ..explore.of_runs import explore_runs
from .ladder import scale_folder
from .plan import Comparison, Ladder, Run, scales_of
from .tables import scales_in


def explore_best(comparison: Comparison | Ladder, results: dict[str, Any], folder: Path, target: Path) -> None:
    """Writes the page of the model with the lowest mean test loss, at the largest scale, beside the baseline.

    There is none if the recipe wants none, or every run diverged.

    Args:
        comparison: the comparison.
        results: its results.
        folder: the folder of its runs, or an address.
        target: the folder of the page.
    """
    (name, scale), found = list(scales_of(comparison).items())[-1], list(scales_in(results).values())[-1]
    recipe = scale.resolve(Run(scale.baseline, 1.0, scale.seeds[0]), Path(target)).recipe
    finished = {
        model: [run for run in content["runs"] if run["test_loss"] is not None] for model, content in found["models"].items()
    }
    means = {model: statistics.mean(run["test_loss"] for run in runs) for model, runs in finished.items() if runs}
    if means and recipe.explore:
        shown = dict.fromkeys((scale.baseline, min(means, key=means.get)))
        runs = {model: scale_folder(folder, name) / finished[model][0]["folder"] for model in shown if model in means}
        explore_runs(recipe, runs, "test", target)

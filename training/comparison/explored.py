"""The page of `nlq explore` of a comparison: its best model beside the baseline, on the test split."""

from pathlib import Path
from typing import Any

from ..explorer.of_runs import explore_runs
from ..files import PAGE_FILE
from .ladder import scale_folder
from .plan import Comparison, Ladder, Run, scales_of
from .tables import scales_in


def explore_best(comparison: Comparison | Ladder, results: dict[str, Any], folder: Path, target: Path) -> bool:
    """Writes the page of the model that is best on the seeds it shares with the baseline, at the largest scale, beside it.

    One run of each is shown. There is no page if the recipe wants none, or a run of the baseline diverged.

    Args:
        comparison: the comparison.
        results: its results.
        folder: the folder of its runs, or an address.
        target: the folder of the page. An old one there is removed.

    Returns:
        Whether there is a page.
    """
    (target / PAGE_FILE).unlink(missing_ok=True)
    (name, scale), found = list(scales_of(comparison).items())[-1], list(scales_in(results).values())[-1]
    recipe = scale.resolve(Run(scale.baseline, 1.0, scale.seeds[0]), Path(target)).recipe
    finished = {model: content["runs"] for model, content in found["models"].items() if content["runs"]}
    finished = {model: runs for model, runs in finished.items() if all(run["test_loss"] is not None for run in runs)}
    if scale.baseline not in finished or not recipe.explore:
        return False
    effects = found["statistics"]["effects"]
    known = {model: effects[model]["mean_difference"] for model in finished if model != scale.baseline}
    difference = {scale.baseline: 0.0, **{model: value for model, value in known.items() if value is not None}}
    best = min(difference, key=difference.get)
    shown = {model: finished[model][0] for model in dict.fromkeys((scale.baseline, best))}
    runs = {model: scale_folder(folder, name) / run["folder"] for model, run in shown.items()}
    seeds = " and ".join(f"{model} of seed {run['seed']}" for model, run in shown.items())
    return explore_runs(recipe, runs, "test", target, [f"One run of each model: {seeds}. The report compares all seeds."])

"""The page of `nlq explore` of a comparison: its best model beside the baseline, on the test split."""

import contextlib
import statistics
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..explore.of_runs import explore_blocks
from ..run.data import make_blocks
from ..run.documents import load_documents
from ..storage import local_copy
from .ladder import scale_folder
from .plan import Comparison, Ladder, Run, scales_of
from .tables import scales_in


def explore_best(comparison: Comparison | Ladder, results: dict[str, Any], folder: Path, target: Path) -> Path | None:
    """Writes the page of the model with the lowest mean test loss, at the largest scale, beside the baseline.

    Args:
        comparison: the comparison.
        results: its results.
        folder: the folder of its runs, or an address.
        target: the folder of the page.

    Returns:
        The page, or `None` if the recipe wants none, every run diverged, or it could not be made.
    """
    (name, scale), found = list(scales_of(comparison).items())[-1], list(scales_in(results).values())[-1]
    if not scale.variants[scale.baseline].content.get("explore", True):
        return None
    losses = {
        model: [run["test_loss"] for run in content["runs"] if run["test_loss"] is not None]
        for model, content in found["models"].items()
    }
    means = {model: statistics.mean(values) for model, values in losses.items() if values}
    if not means:
        return None
    shown = dict.fromkeys((scale.baseline, min(means, key=means.get)))
    with contextlib.ExitStack() as stack:
        folders = {}
        for model in shown.keys() & means.keys():
            first = next(run for run in found["models"][model]["runs"] if run["test_loss"] is not None)
            folders[model] = stack.enter_context(local_copy(scale_folder(folder, name) / first["folder"]))
        first_run = Run(scale.baseline, 1.0, scale.seeds[0])
        recipe = scale.resolve(first_run, Path(target)).recipe
        tokenizer = AutoTokenizer.from_pretrained(next(iter(folders.values())))
        blocks = make_blocks(load_documents(recipe)["test"], tokenizer, recipe).dataset
        models = {model: folders[model] for model in shown if model in folders}
        return explore_blocks(models, blocks, recipe.packing == "documents", target)

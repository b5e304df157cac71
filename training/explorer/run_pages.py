"""Writes `explore.html` for finished runs, from text that they were not trained on."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers.utils import logging

from ..disk import write_text
from ..files import PAGE_FILE
from ..loading import load_model
from ..run.documents import load_documents
from ..run.objectives import objective_of
from ..run.recipe import Recipe
from ..text import one_line
from .exploring import explore_tokens, prepare


logger = logging.get_logger(__name__)


def explore_runs(
    recipe: Recipe, runs: Mapping[str, Path], split: str, target: Path, notes: Sequence[str] = ()
) -> bool:
    """Writes the page of one or two runs into `target`, and returns whether it did; a failure is a warning.

    It shows the first block or pair of a split; with `packing: documents`, the longest document in the first block.
    `runs` are folders of models, by the names on the page.
    """
    try:
        loaded = {name: load_model(str(folder)) for name, folder in runs.items()}
        model, tokenizer = next(iter(loaded.values()))
        subjects = {name: prepare(each) for name, (each, _) in loaded.items()}
        objective = objective_of(recipe)
        row = next(iter(objective.make_rows(load_documents(recipe)[split], tokenizer).dataset))
        shown, source = objective.tokens_to_explore(row, tokenizer, model.config)
        write_text(target / PAGE_FILE, explore_tokens(subjects, tokenizer, shown, notes=notes, source=source).page)
        return True
    except Exception as error:  # the runs are finished, so no error of a library may end the command
        logger.warning(f"no page of attention was made: {type(error).__name__}: {one_line(error)}")
        return False

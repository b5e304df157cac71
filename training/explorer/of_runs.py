"""The pages of finished runs and comparisons, on text that was held out."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from transformers.utils import logging

from ..files import PAGE_FILE, write_text
from ..models import load_model
from ..run.data import make_blocks
from ..run.documents import load_documents
from ..run.recipe import Recipe
from ..storage import fetch
from ..text import one_line
from .exploring import explore_tokens, prepare


logger = logging.get_logger(__name__)

# Blocks that two models are compared on
_BLOCKS = 50


def explore_runs(recipe: Recipe, runs: Mapping[str, Path], split: str, target: Path, notes: Sequence[str] = ()) -> bool:
    """Writes the page of one or two trained models; a failure is a warning, for the models themselves are finished.

    Args:
        recipe: names the text. Its first block is shown; with `packing: documents`, the longest document of its blocks.
        runs: the folders of the models, or addresses, by the names that the page gives them.
        split: the split of the text, which the models were not trained on.
        target: the folder of the page, or an address.
        notes: what the page should say besides.

    Returns:
        Whether there is a page.
    """
    try:
        loaded = {name: load_model(str(fetch(folder))) for name, folder in runs.items()}
        tokenizer = next(iter(loaded.values()))[1]
        blocks = make_blocks(load_documents(recipe)[split], tokenizer, recipe).dataset
        documents = [list(map(int, block["input_ids"])) for block in itertools.islice(blocks, _BLOCKS)]
        if recipe.packing == "documents":
            documents = sorted(_split(documents, tokenizer.eos_token_id), key=len, reverse=True)
        subjects = {name: prepare(model) for name, (model, _) in loaded.items()}
        unit = "document" if recipe.packing == "documents" else "block"
        done = explore_tokens(subjects, tokenizer, documents[0], documents, unit=unit, notes=notes)
        write_text(target / PAGE_FILE, done.page)
        return True
    except Exception as error:  # of a library, for a model of another family
        logger.warning(f"no page of attention was made: {type(error).__name__}: {one_line(error)}")
        return False


def _split(blocks: Iterable[list[int]], end: int) -> list[list[int]]:
    """Cuts blocks after each end of text; what is shorter than two tokens is left out."""
    documents = []
    for block in blocks:
        start = 0
        for place in [*(index + 1 for index, token in enumerate(block) if token == end), len(block)]:
            if place - start > 1:
                documents.append(block[start:place])
            start = place
    return documents

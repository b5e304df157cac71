"""The pages of finished runs and comparisons, on text that was held out."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

from transformers.utils import logging

from ..files import PAGE_FILE, write_text
from ..models import load_model
from ..text import one_line
from .exploring import explore_tokens, prepare


logger = logging.get_logger(__name__)

# Blocks that two models are compared on
_BLOCKS = 50


def explore_blocks(models: Mapping[str, Path], blocks: Iterable[Mapping], restart: bool, folder: Path) -> Path | None:
    """Writes the page of one or two trained models; a failure is a warning, for the models themselves are finished.

    Args:
        models: the folders of the models, by the names that the page gives them.
        blocks: rows with `input_ids`, which the models were not trained on. The first is shown.
        restart: whether attention restarts at each document of a block; then the longest document of the blocks is shown.
        folder: where the page is written.

    Returns:
        The page, or `None` if there is none.
    """
    try:
        loaded = {name: load_model(str(path)) for name, path in models.items()}
        tokenizer = next(iter(loaded.values()))[1]
        documents = [list(map(int, block["input_ids"])) for block in itertools.islice(blocks, _BLOCKS)]
        if restart:
            documents = sorted(_split(documents, tokenizer.eos_token_id), key=len, reverse=True)
        subjects = {name: prepare(model) for name, (model, _) in loaded.items()}
        done = explore_tokens(subjects, tokenizer, documents[0], documents)
        write_text(folder / PAGE_FILE, done.page)
    except Exception as error:  # of a library, for a model of another family
        logger.warning(f"no page of attention was made: {type(error).__name__}: {one_line(error)}")
        return None
    return folder / PAGE_FILE


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

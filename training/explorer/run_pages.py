"""The pages of finished runs and comparisons, on text that was held out."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers.utils import logging

from ..disk import write_text
from ..files import PAGE_FILE
from ..models import load_model
from ..run.data import make_blocks
from ..run.documents import load_documents
from ..run.recipe import Recipe
from ..storage import fetch
from ..text import one_line
from .exploring import explore_tokens, prepare


logger = logging.get_logger(__name__)


def explore_runs(
    recipe: Recipe, runs: Mapping[str, Path], split: str, target: Path, notes: Sequence[str] = ()
) -> bool:
    """Writes the page of one or two trained models; a failure is a warning, for the models themselves are finished.

    Args:
        recipe: names the text, of which the first block or pair is shown; with `packing: documents`, the longest
            document in it.
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
        row = {
            name: list(map(int, ids)) for name, ids in next(iter(blocks)).items() if name in ("input_ids", "labels")
        }
        subjects, shown, source = {name: prepare(model) for name, (model, _) in loaded.items()}, row["input_ids"], None
        if recipe.objective == "seq2seq":
            start = next(iter(subjects.values())).pair.config.decoder_start_token_id
            shown, source = [start, *row["labels"]], shown
        elif recipe.packing == "documents":
            ends = [index + 1 for index, token in enumerate(shown) if token == tokenizer.eos_token_id]
            shown = max((shown[start:end] for start, end in zip([0, *ends], [*ends, len(shown)])), key=len)
        write_text(target / PAGE_FILE, explore_tokens(subjects, tokenizer, shown, notes=notes, source=source).page)
        return True
    except Exception as error:  # of a library, for a model of another family
        logger.warning(f"no page of attention was made: {type(error).__name__}: {one_line(error)}")
        return False

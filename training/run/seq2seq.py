"""Pairs of a source and a target text, for an encoder with a decoder: their tokens, and chrF of generated text."""

import importlib.util
from typing import TYPE_CHECKING

import torch
from datasets import Dataset
from datasets.fingerprint import Hasher
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .blocks import Blocks
from .documents import check_text


if TYPE_CHECKING:
    from .recipe import Recipe


logger = logging.get_logger(__name__)

GENERATED_ROWS = 256  # for chrF


def make_pairs(documents: Dataset, tokenizer: PreTrainedTokenizerBase, recipe: "Recipe") -> Blocks:
    """Encodes each pair to `input_ids` and `labels` that end in end-of-text, and warns how many are cut."""
    columns = list(recipe.text_columns.values())
    lengths = recipe.sample_lengths

    def ids_of(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    def encode(batch: dict) -> dict:
        rows = {"is_cut": [False] * len(batch[columns[0]])}
        for name, column, length in zip(("input_ids", "labels"), columns, lengths):
            texts = [check_text(text, recipe) for text in batch[column]]
            ids = ids_of(texts)
            rows[name] = [[*text[: length - 1], tokenizer.eos_token_id] for text in ids]
            rows["is_cut"] = [before or len(text) >= length for before, text in zip(rows["is_cut"], ids)]
            # At the end those of the target, whole, so that cutting does not change them
            rows |= {"bytes": [len(text.encode()) for text in texts], "length": [len(text) + 1 for text in ids]}
        return rows

    identity = Hasher.hash((documents._fingerprint, tokenizer.backend_tokenizer.to_str(), columns, lengths, "pairs"))
    options = {"num_proc": recipe.num_proc, "remove_columns": documents.column_names, "new_fingerprint": identity}
    rows = documents.map(encode, batched=True, desc="Tokenizing", **options)
    if cut := sum(rows["is_cut"]):
        logger.warning_once(
            f"{cut} of {len(rows)} pairs are longer than max_source_length={lengths[0]} or "
            f"max_target_length={lengths[1]} tokens, and are cut"
        )
    bytes_per_token = sum(rows["bytes"]) / sum(rows["length"]) or None
    # As a model that writes the whole target is decoded
    targets = ids_of(documents.select(range(min(len(documents), GENERATED_ROWS)))[columns[1]][:])
    references = _decode(tokenizer, [[*target, tokenizer.eos_token_id] for target in targets])
    return Blocks(
        rows.select_columns(["input_ids", "labels"]), sum(map(len, rows["labels"])), bytes_per_token, references
    )


def _decode(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]] | torch.Tensor) -> list[str]:
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


@torch.no_grad()
def chrf_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Blocks, recipe: "Recipe"
) -> dict[str, float]:
    """Returns chrF (Popovic 2015), 0 to 100, of the likeliest text for the first pairs, if `sacrebleu` is installed.

    It compares with whole targets, though the model generates at most `max_target_length` tokens.
    """
    if importlib.util.find_spec("sacrebleu") is None:
        logger.warning("chrF of generated text needs sacrebleu: pip install modeling-nlq[seq2seq]")
        return {}
    import sacrebleu

    model.eval()
    texts = []
    for batch in pairs.dataset.select(range(len(pairs.references))).iter(batch_size=32):
        inputs = tokenizer.pad({"input_ids": batch["input_ids"]}, return_tensors="pt").to(model.device)
        written = model.generate(**inputs, max_new_tokens=recipe.max_target_length, do_sample=False, num_beams=1)
        texts += _decode(tokenizer, written)
    return {"eval_chrf": sacrebleu.corpus_chrf(texts, [pairs.references]).score}

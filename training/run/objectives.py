"""Training objectives: what a model predicts, and everything that depends on it.

To add one, write a subclass of `Objective` and its row in `OBJECTIVES`.
"""

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..files import is_synthetic
from ..size import ModelKind


if TYPE_CHECKING:
    from .recipe import Recipe

# Methods import `datasets` and `Trainer`, which take seconds and which a recipe alone does not need


class Objective:
    """The objective of a recipe.

    Attributes:
        columns: the fields of a recipe that name its columns of text.
        lengths: the fields with the lengths of a full sample, and the half of the model that reads each.
        label_shift: 1 where a token's logits stand one position before it, else 0.
        loss_type: Transformers' loss for model classes that name none.
        loss_unit, loss_name, loss_note: what the loss is per, in nats, and is called, and what explains it.
        has_bits_per_byte: whether the losses of a text add up to its log-likelihood.
        has_parts: whether the test split is a text, of whose choice parts tell.
    """

    kind: ClassVar[ModelKind]
    columns: ClassVar[tuple[str, ...]]
    lengths: ClassVar[Mapping[str, str]]
    label_shift = 0
    loss_type = "ForMaskedLM"
    loss_unit = "token"
    loss_name = "loss"
    loss_note = ""
    perplexity = "perplexity"
    has_bits_per_byte = True
    has_parts = True

    def __init__(self, recipe: "Recipe"):
        self.recipe = recipe

    @property
    def input_lengths(self) -> dict[str, int]:
        """The length of each input of the model in a full sample."""
        return {"input_ids": self.recipe.sample_lengths[0], "labels": self.recipe.sample_lengths[-1]}

    def check_tokenizer(self, tokenizer, name: str) -> None:
        """Raises `ValueError` if a tokenizer lacks a special token that the objective needs."""

    def make_rows(self, documents, tokenizer, keep_remainder: bool = False):
        """Makes `Blocks` from documents. `make_blocks` explains `keep_remainder`."""
        raise NotImplementedError

    def make_collator(self, tokenizer, model):
        """Returns the function that makes a batch of rows."""
        raise NotImplementedError

    def make_masking(self, tokenizer, seed: int):
        """Returns the `Masking` of batches, or `None`."""

    def evaluate_generation(self, model, tokenizer, rows) -> dict[str, float]:
        """Returns metrics of generated text for `Blocks` of the validation split."""
        return {}

    def tokens_to_explore(self, row: dict[str, Any], tokenizer, config) -> tuple[list[int], list[int] | None]:
        """Returns the tokens of a row to show, and the source of a pair."""
        raise NotImplementedError


class PackedText(Objective):
    """An objective on blocks of documents that are joined."""

    columns = ("text_column",)
    lengths = {"block_size": "decoder"}

    def make_rows(self, documents, tokenizer, keep_remainder=False):
        from .blocks import make_blocks

        return make_blocks(documents, tokenizer, self.recipe, keep_remainder)

    def make_collator(self, tokenizer, model):
        from .blocks import BlockCollator

        restart = self.recipe.packing == "documents"
        return BlockCollator(tokenizer.eos_token_id, restart, is_causal=self.kind is ModelKind.DECODER)

    def tokens_to_explore(self, row, tokenizer, config):
        tokens = [int(token) for token in row["input_ids"]]
        if self.recipe.packing == "documents":
            ends = [index + 1 for index, token in enumerate(tokens) if token == tokenizer.eos_token_id]
            bounds = [0, *ends, len(tokens)]
            tokens = max((tokens[start:end] for start, end in itertools.pairwise(bounds)), key=len)
        return tokens, None


class Causal(PackedText):
    """Predicts each next token, with a decoder."""

    kind = ModelKind.DECODER
    label_shift = 1
    loss_type = "ForCausalLM"


class Masked(PackedText):
    """Predicts hidden tokens, with an encoder, hence a pseudo-perplexity (Salazar et al. 2020, arXiv 1910.14659)."""

    kind = ModelKind.ENCODER
    loss_unit = "masked token"
    loss_name = "loss of masked tokens"
    loss_note = "Losses are of masked tokens, the same ones for all models; perplexities are pseudo-perplexities."
    perplexity = "pseudo_perplexity"
    has_bits_per_byte = False

    def check_tokenizer(self, tokenizer, name):
        if tokenizer.mask_token_id is None:
            raise ValueError(
                f"tokenizer {name!r} has no mask token, which an encoder needs; add one by "
                "tokenizer.add_special_tokens({'mask_token': '<|mask|>'}), or train one by tokenizer: bpe:SIZE"
            )

    def make_masking(self, tokenizer, seed):
        from .mlm import Masking

        return Masking(tokenizer, self.recipe.mask_probability, seed)


class Pairs(Objective):
    """Predicts a target from a source, with an encoder and decoder."""

    kind = ModelKind.ENCODER_DECODER

    @property
    def input_lengths(self):
        return super().input_lengths | {"decoder_input_ids": self.recipe.sample_lengths[-1]}

    def make_collator(self, tokenizer, model):
        from transformers import DataCollatorForSeq2Seq

        return DataCollatorForSeq2Seq(tokenizer, model)

    def tokens_to_explore(self, row, tokenizer, config):
        return [config.decoder_start_token_id, *map(int, row["labels"])], [int(token) for token in row["input_ids"]]


class Seq2Seq(Pairs):
    """Predicts a target text from a source text."""

    columns = ("source_column", "target_column")
    lengths = {"max_source_length": "encoder", "max_target_length": "decoder"}

    def make_rows(self, documents, tokenizer, keep_remainder=False):
        from .seq2seq import make_pairs

        return make_pairs(documents, tokenizer, self.recipe)

    def evaluate_generation(self, model, tokenizer, rows):
        from .seq2seq import chrf_of

        return chrf_of(model, tokenizer, rows, self.recipe)


class OfTask(Objective):
    """An objective on the rows of a synthetic task."""

    columns = ()
    loss_unit = "answer"
    loss_note = "Losses and accuracies are of answers only."
    has_bits_per_byte = False
    has_parts = False

    def make_rows(self, documents, tokenizer, keep_remainder=False):
        from .blocks import Blocks

        tokens = self.recipe.synthetic.tokens
        if tokenizer.convert_ids_to_tokens([*range(len(tokens))]) != tokens:
            raise ValueError(f"task={self.recipe.task!r}: its words are not those of the tokenizer")
        return Blocks(documents, sum(map(len, documents["input_ids"])))


class Answers(OfTask):
    """Predicts the answers, with a decoder."""

    kind = ModelKind.DECODER
    lengths = {"task: length": "decoder"}
    label_shift = 1
    loss_type = "ForCausalLM"

    def make_collator(self, tokenizer, model):
        from transformers import default_data_collator

        return default_data_collator

    def tokens_to_explore(self, row, tokenizer, config):
        return [int(token) for token in row["input_ids"]], None


class AnswersOfPairs(Pairs, OfTask):
    """Predicts the target, with an encoder and decoder."""

    lengths = {"task: source length": "encoder", "task: target length": "decoder"}


OBJECTIVES: dict[str, type[Objective]] = {"causal": Causal, "masked": Masked, "seq2seq": Seq2Seq}
# The same on synthetic tasks
_OF_TASKS: dict[str, type[Objective]] = {"causal": Answers, "seq2seq": AnswersOfPairs}


def objective_of(recipe: "Recipe") -> Objective:
    return objective_in(vars(recipe))(recipe)


def objective_in(content: Mapping[str, Any]) -> type[Objective]:
    """Returns the objective in a recipe's file; `Causal` for an unknown name."""
    name = content.get("objective")
    known = OBJECTIVES | (_OF_TASKS if is_synthetic(content.get("dataset")) else {})
    return known[name] if isinstance(name, str) and name in known else known["causal"]


def name_for(kind: ModelKind) -> str:
    """Returns the first objective that trains models of a kind."""
    return next(name for name, objective in OBJECTIVES.items() if objective.kind is kind)

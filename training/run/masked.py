"""Masked language modelling: which tokens of a batch are hidden from an encoder, which it must predict.

The masks follow from the data's seed, the optimizer step and the tokens of a row alone. So all models of a comparison, a
resumed run, and any number of processes see the same ones, and an evaluation always the same.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, Trainer


EVALUATION = "evaluation"  # stands for the step where masks are fixed


class Masking(DataCollatorForLanguageModeling):
    """Chooses tokens with a probability, replaces 80 % of them by the mask token and 10 % by random ones, and leaves the rest.

    This is BERT's rule (Devlin et al. 2019, arXiv 1810.04805), by Transformers' own code. Special tokens are never chosen.

    Args:
        tokenizer: it has a mask token.
        probability: of a token to be chosen.
        seed: that of the data.

    Raises:
        ValueError: if the tokenizer has no mask token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, probability: float, seed: int):
        if tokenizer.mask_token_id is None:
            raise ValueError(
                "objective='masked' needs a tokenizer with a mask token; add one by "
                "tokenizer.add_special_tokens({'mask_token': '<|mask|>'}) and save it, or train one by tokenizer: bpe:SIZE"
            )
        super().__init__(tokenizer, mlm_probability=probability)
        self.data_seed, self.special = seed, torch.tensor(tokenizer.all_special_ids)

    def mask(self, batch: dict[str, Any], step: int | str) -> dict[str, Any]:
        """Returns a batch with masked `input_ids`, `(batch, length)`, and `labels`, which are -100 but for the chosen tokens.

        Args:
            batch: a batch of `BlockCollator`.
            step: the number of optimizer steps before it, or `EVALUATION`.
        """
        rows, labels = [], []
        for row in batch["input_ids"]:
            tokens = row.cpu()
            moment = EVALUATION if step == EVALUATION else f"{self.data_seed} {step}"
            key = moment.encode() + tokens.numpy().tobytes()
            self.generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1)
            chosen = self.torch_mask_tokens(tokens[None].clone(), torch.isin(tokens, self.special)[None])
            for found, part in zip((rows, labels), chosen):
                found.append(part.to(row.device))
        return {**batch, "input_ids": torch.cat(rows), "labels": torch.cat(labels)}


class MaskingTrainer(Trainer):
    """A `Trainer` that masks its batches, unless its `masking` is `None`."""

    masking: Masking | None = None

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        """Masks before Trainer counts labels, and not where batches are made, which may be some steps earlier."""
        if self.masking is not None:
            step = self.state.global_step
            epoch_iterator = (self.masking.mask(batch, step) for batch in epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def prediction_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args, **kwargs) -> tuple:
        """Masks the batches of an evaluation."""
        if self.masking is not None:
            inputs = self.masking.mask(inputs, EVALUATION)
        return super().prediction_step(model, inputs, *args, **kwargs)

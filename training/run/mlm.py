"""Masked language modelling: which tokens of a batch an encoder must predict.

Masks depend only on the data's seed, the step and the tokens of a row, so they are the same for all models of a
comparison, after a resume, and for any number of processes.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, Trainer


EVALUATION = "evaluation"  # used as the step of fixed masks


class Masking(DataCollatorForLanguageModeling):
    """Chooses tokens as BERT does: 80 % become the mask token, 10 % random (Devlin et al. 2019, arXiv 1810.04805).

    Special tokens are never chosen. A row in which nothing is chosen gets one mask, because it needs a loss.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, probability: float, seed: int):
        super().__init__(tokenizer, mlm_probability=probability)
        self.data_seed = seed
        self.special = torch.tensor(tokenizer.all_special_ids)

    def mask(self, batch: dict[str, Any], step: int | str) -> dict[str, Any]:
        """Returns a batch with masked `input_ids`, `(batch, length)`, and `labels`: -100 except for chosen tokens.

        Padding has no label before. `step` is the optimizer step, or `EVALUATION`.
        """
        rows, labels = [], []
        for row, own in zip(batch["input_ids"], batch["labels"] != -100):
            length = int(own.sum())
            tokens = row[:length].cpu()  # the padding depends on the other rows
            moment = EVALUATION if step == EVALUATION else f"{self.data_seed} {step}"
            key = moment.encode() + tokens.numpy().tobytes()
            self.generator = torch.Generator().manual_seed(
                int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1
            )
            is_text = ~torch.isin(tokens, self.special)
            chosen = self.torch_mask_tokens(tokens[None].clone(), ~is_text[None])
            if is_text.any() and (chosen[1] == -100).all():
                place = is_text.nonzero()[torch.randint(int(is_text.sum()), (1,), generator=self.generator)].item()
                chosen[0][0, place] = self.tokenizer.mask_token_id
                chosen[1][0, place] = tokens[place]
            masked = row.clone()
            masked[:length] = chosen[0][0]
            rows.append(masked)
            labels.append(nn.functional.pad(chosen[1][0], (0, len(row) - length), value=-100).to(row.device))
        return {**batch, "input_ids": torch.stack(rows), "labels": torch.stack(labels)}


class MaskingTrainer(Trainer):
    """A `Trainer` that masks its batches, unless its `masking` is `None`."""

    masking: Masking | None = None

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        """Masks before Trainer counts labels."""
        if self.masking is not None:
            step = self.state.global_step
            epoch_iterator = (self.masking.mask(batch, step) for batch in epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def prediction_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args, **kwargs) -> tuple:
        if self.masking is not None:
            inputs = self.masking.mask(inputs, EVALUATION)
        return super().prediction_step(model, inputs, *args, **kwargs)

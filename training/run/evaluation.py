"""Evaluation of language models: inside `Trainer`, and of saved models. The `evaluate` metric ships here."""

import math
import tempfile
from pathlib import Path
from typing import Literal

import torch
from evaluate import load as load_metric
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

from modeling_nlq.training.models import load_model, read_recipe_of
from modeling_nlq.training.run.data import BlockCollator, make_blocks
from modeling_nlq.training.run.documents import load_documents
from modeling_nlq.training.run.recipe import Recipe


METRIC = Path(__file__).parent / "metrics" / "language_modeling" / "language_modeling.py"


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduces logits to two numbers per token, so that an evaluation fits in memory (`preprocess_logits_for_metrics`).

    Args:
        logits: `(batch, length, vocabulary)`, or a tuple that begins with them.
        labels: `(batch, length)`; -100 is ignored.

    Returns:
        `(batch, length - 1)` each: negative log-likelihood in nats (0 where ignored), and whether the token was the likeliest.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    # In float32 and side by side, which a CPU reads several times as fast
    logits, targets = logits[:, :-1].float().flatten(0, 1), labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="none")
    return losses.view(targets.shape), logits.argmax(dim=-1).view(targets.shape) == targets


class LanguageModelingMetrics:
    """Trainer's `compute_metrics` with `batch_eval_metrics=True`: adds up batch after batch, and computes at the end.

    Args:
        bytes_per_token: bytes per token of the evaluated text, for bits per byte; `None` leaves those out.
    """

    def __init__(self, bytes_per_token: float | None = None):
        self.bytes_per_token = bytes_per_token
        self.metric = load_metric(str(METRIC), keep_in_memory=True)
        self._rows: list[tuple[float, int]] = []  # of one evaluation
        self._is_over = False

    def __call__(self, prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        if self._is_over:
            self._rows.clear()
        self._is_over = compute_result
        losses, correct = prediction.predictions
        tokens = (prediction.label_ids[:, 1:] != -100).sum(dim=1)
        self._rows += zip(losses.double().sum(dim=1).tolist(), tokens.tolist())
        self.metric.add(
            negative_log_likelihood=losses.double().sum().item(),
            correct=correct.sum().item(),
            tokens=tokens.sum().item(),
        )
        return self.metric.compute(bytes_per_token=self.bytes_per_token) if compute_result else {}

    def loss_parts(self, count: int = 50) -> list[float] | None:
        """The loss of each of several equal parts of the evaluated text, in order, in nats per token.

        Their spread tells how much of the noise of a loss is due to the choice of the text. `None` if the text has fewer
        blocks than parts, or a loss is infinite or not a number.
        """
        if len(self._rows) < count:
            return None
        parts = [self._rows[len(self._rows) * part // count : len(self._rows) * (part + 1) // count] for part in range(count)]
        losses = [sum(loss for loss, _ in part) / max(sum(tokens for _, tokens in part), 1) for part in parts]
        return losses if all(map(math.isfinite, losses)) else None


def evaluate(
    model: str | Path,
    dataset: str | Path = "python-stdlib",
    *,
    dataset_config: str | None = None,
    text_column: str = "text",
    validation_fraction: float | None = None,
    max_validation_documents: int | None = None,
    block_size: int | None = None,
    packing: Literal["stream", "documents"] | None = None,
    batch_size: int = 8,
) -> dict[str, float]:
    """Evaluates a saved model on text that it was not trained on.

    If the recipe beside the model names the same dataset, its `validation_fraction`, `max_validation_documents` and `packing`
    are the defaults. A local file is evaluated whole, whatever the model was trained on.

    Args:
        model: folder or Hub name of a saved model with its tokenizer.
        dataset: as in a recipe; its validation split is evaluated.
        dataset_config: the configuration of a Hub dataset.
        text_column: the dataset's column of text.
        validation_fraction: as in a recipe; else 0.02.
        max_validation_documents: evaluate at most this many documents.
        block_size: in tokens; by default the model's context.
        packing: as in a recipe; else "stream".
        batch_size: blocks per device.

    Returns:
        `eval_loss` (nats per token), `eval_perplexity`, `eval_bits_per_byte`, `eval_token_accuracy`, and the speed.

    Raises:
        ValueError: for a model or a dataset that cannot be loaded, and a share of the dataset that the model was trained on.
    """
    name, dataset = str(model), str(dataset)
    loaded, tokenizer = load_model(name)
    is_whole = validation_fraction is None and Path(dataset).is_file()
    own = read_recipe_of(name) or {}
    if is_whole or own.get("dataset", Recipe.dataset) != dataset:
        own = {}
    held_out = own.get("validation_fraction", Recipe.validation_fraction) + own.get("test_fraction", Recipe.test_fraction)
    if own and validation_fraction is not None and validation_fraction > held_out + 1e-9:
        raise ValueError(
            f"validation_fraction={validation_fraction}: model {name!r} was trained on {dataset} but for a share of "
            f"{held_out:g}"
        )
    recipe = Recipe(
        model=name,
        tokenizer=name,
        dataset=dataset,
        dataset_config=dataset_config,
        text_column=text_column,
        validation_fraction=own.get("validation_fraction", 0.02) if validation_fraction is None else validation_fraction,
        max_validation_documents=max_validation_documents or own.get("max_validation_documents"),
        block_size=block_size or loaded.config.max_position_embeddings,
        packing=packing or own.get("packing", "stream"),
    )
    return evaluate_model(loaded, tokenizer, recipe, batch_size, is_whole)


def evaluate_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, batch_size: int, is_whole: bool = False
) -> dict[str, float]:
    """Evaluates a model on the validation split of a recipe's dataset.

    Args:
        model: any causal language model.
        tokenizer: the tokenizer of the model.
        recipe: names the dataset, block size and packing.
        batch_size: blocks per device.
        is_whole: evaluate on all documents instead.
    """
    validation = make_blocks(load_documents(recipe, is_whole)["validation"], tokenizer, recipe)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                per_device_eval_batch_size=batch_size,
                batch_eval_metrics=True,
                dataloader_pin_memory=torch.cuda.is_available(),
                report_to="none",
            ),
            data_collator=BlockCollator(tokenizer.eos_token_id, restart=recipe.packing == "documents"),
            compute_metrics=LanguageModelingMetrics(validation.bytes_per_token),
            preprocess_logits_for_metrics=token_losses,
        )
        return trainer.evaluate(validation.dataset)

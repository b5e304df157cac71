"""Evaluation of language models: inside `Trainer`, and of saved models. The `evaluate` metric ships here."""

import functools
import itertools
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from evaluate import load as load_metric
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging

from ..files import check_keys, is_built_in
from ..loading import load_model
from ..size import context_of, kind_of, positions_of
from ..text import check_number
from .documents import is_format, load_documents
from .mlm import MaskingTrainer
from .objectives import Causal, Objective, name_for, objective_in, objective_of
from .provenance import RECORDED, SHAPES, names_of_dataset, read_trained_on
from .recipe import Recipe


logger = logging.get_logger(__name__)

# The fields of a recipe that an evaluation takes
EVALUATED = [name for name in RECORDED if name not in ("dataset", "streaming", "test_fraction")]
METRIC = Path(__file__).parent / "language_modeling.py"


def token_losses(logits: torch.Tensor, labels: torch.Tensor, shift: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduces logits to two numbers per token, so that an evaluation fits in memory (`preprocess_logits_for_metrics`).

    Takes `(batch, length, vocabulary)`, or a tuple that begins with them, and the objective's `label_shift`. Returns
    `(batch, length - shift)` each: negative log-likelihood in nats, and whether the token was the likeliest.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    # A CPU reads float32 side by side several times as fast
    logits = logits[:, : logits.shape[1] - shift].float().flatten(0, 1)
    targets = labels[:, shift:]
    losses = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="none")
    return losses.view(targets.shape), logits.argmax(dim=-1).view(targets.shape) == targets


class LanguageModelingMetrics:
    """Trainer's `compute_metrics` with `batch_eval_metrics=True`; bits per byte needs the text's `bytes_per_token`."""

    def __init__(self, bytes_per_token: float | None = None, objective: Objective | type[Objective] = Causal):
        self.objective = objective
        self.bytes_per_token = bytes_per_token if objective.has_bits_per_byte else None
        self.metric = load_metric(str(METRIC), keep_in_memory=True)
        self._rows: list[tuple[float, int]] = []  # of one evaluation
        self._is_over = False

    def __call__(self, prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        if self._is_over:
            self._rows.clear()
        self._is_over = compute_result
        losses, correct = prediction.predictions
        tokens = (prediction.label_ids[:, self.objective.label_shift :] != -100).sum(dim=1)
        self._rows += zip(losses.double().sum(dim=1).tolist(), tokens.tolist())
        self.metric.add(
            negative_log_likelihood=losses.double().sum().item(),
            correct=correct.sum().item(),
            tokens=tokens.sum().item(),
        )
        if not compute_result:
            return {}
        metrics = self.metric.compute(bytes_per_token=self.bytes_per_token)
        names = {"perplexity": self.objective.perplexity}
        return {names.get(name, name): value for name, value in metrics.items()}

    def loss_parts(self, count: int = 50) -> list[float] | None:
        """Returns the losses of parts of the text, in nats per token, whose mean is the loss.

        Returns `None` for fewer blocks than parts, a synthetic task, or an infinite or NaN loss.
        """
        if len(self._rows) < count or not self.objective.has_parts:
            return None
        tokens = max(sum(tokens for _, tokens in self._rows), 1)
        bounds = [len(self._rows) * part // count for part in range(count + 1)]
        losses = []
        for start, end in itertools.pairwise(bounds):
            losses.append(count * sum(loss for loss, _ in self._rows[start:end]) / tokens)
        return losses if all(map(math.isfinite, losses)) else None


def evaluate(
    model: str | Path,
    dataset: str | Path | None = None,
    *,
    batch_size: int = 8,
    trust_remote_code: bool = False,
    **fields: Any,
) -> dict[str, float]:
    """Evaluates a saved model on text that it was not trained on.

    If the records beside the model say that it was trained on this dataset, its recipe sets the defaults. A local file
    is evaluated whole unless `validation_fraction` is set. The last block may be shorter, except when the settings
    repeat the run's own evaluation.

    Args:
        model: folder or Hub name of a saved model with its tokenizer.
        dataset: as in a recipe, for its validation split. Defaults to the last dataset that the model was trained on,
            unless this is a local file or folder, or else to `python-stdlib`.
        batch_size: blocks per device.
        fields: the fields of a recipe in `EVALUATED`. Default to the run's own settings; without a run, to those of a
            recipe, with the model's context as `block_size`.

    Returns:
        `eval_loss` (nats per token), `eval_perplexity`, `eval_bits_per_byte`, `eval_token_accuracy`, and the speed. An
        encoder's are means over masked tokens, with `eval_pseudo_perplexity` and without bits per byte.

    Raises `ValueError` for a model or a dataset that cannot be loaded, an argument that such a model does not read, or
    a share of the dataset that the model was trained on.
    """
    check_keys("evaluate", fields, EVALUATED)
    check_number("batch_size", batch_size, 1)
    given = {field: value for field, value in fields.items() if value is not None}
    check_number("block_size", given.get("block_size"), 2)
    name = str(model)
    loaded, tokenizer = load_model(name, trust_remote_code)
    objective = name_for(kind_of(loaded.config))
    trained_on = read_trained_on(name)
    given["dataset"] = _last_dataset(name, trained_on) if dataset is None else str(dataset)
    for field in given.keys() - Recipe.read_by(objective_in({**given, "objective": objective})):
        raise ValueError(f"{field}={given[field]!r} does not go with a model of objective={objective!r}")
    positions = positions_of(loaded.config)
    if positions is not None and given.get("block_size", 0) > positions:
        raise ValueError(f"block_size={given['block_size']} exceeds the {positions} positions of model {name!r}")
    own = [record for record in trained_on if record["dataset"] in names_of_dataset(given["dataset"])]
    # The least share that a run was not trained on
    held_out = min((record["validation_fraction"] + record["test_fraction"] for record in own), default=1.0)
    seen = f"model {name!r} was trained on {given['dataset']} but for a share of {held_out:g}"
    if given.get("validation_fraction", 0.0) > held_out + 1e-9:
        raise ValueError(f"validation_fraction={given['validation_fraction']}: {seen}")
    is_whole = dataset is not None and "validation_fraction" not in given and Path(dataset).is_file()
    defaults = {"validation_fraction": 0.02, "block_size": positions or context_of(loaded.config) or Recipe.block_size}
    if trained_on:  # longer blocks would have positions that were never trained
        defaults |= {field: trained_on[-1][field] for field in SHAPES if field in trained_on[-1]}
    if own and is_whole:
        logger.warning(f"{seen}, and all is evaluated")
        defaults |= {field: own[-1].get(field, getattr(Recipe, field)) for field in ("text_column", "text_template")}
    elif own:
        defaults |= {field: own[-1][field] for field in RECORDED if field in own[-1]}
        defaults |= {"test_fraction": 0.0, "validation_fraction": min(own[-1]["validation_fraction"], held_out)}
    recipe = Recipe(**{**defaults, "model": name, "tokenizer": name, "objective": objective, **given})
    changes = [field for field in given if field != "dataset" and defaults.get(field) != given[field]]
    keep_remainder = is_whole or not own or bool(changes)
    return evaluate_model(loaded, tokenizer, recipe, batch_size, is_whole, keep_remainder)


def _last_dataset(model: str, trained_on: list[dict[str, Any]]) -> str:
    """Returns the dataset that a model was trained on last; raises `ValueError` for a local file."""
    dataset = trained_on[-1]["dataset"] if trained_on else Recipe.dataset
    part = r"[\w-]+(\.[\w-]+)*"
    is_name = re.fullmatch(f"{part}(/{part})?", dataset, re.ASCII) and not Path(dataset).exists()
    if is_built_in(dataset) or (is_name and "/" in dataset):
        return dataset
    such = f", such as --dataset {dataset}" if is_name and not is_format(dataset) else ""
    raise ValueError(f"model {model!r} was trained on {dataset}; name the text to evaluate by --dataset{such}")


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    batch_size: int,
    is_whole: bool = False,
    keep_remainder: bool = False,
) -> dict[str, float]:
    """Evaluates a model on the validation split of a recipe's dataset, or on all documents if `is_whole`."""
    objective = objective_of(recipe)
    objective.check_tokenizer(tokenizer, tokenizer.name_or_path)
    validation = objective.make_rows(load_documents(recipe, is_whole)["validation"], tokenizer, keep_remainder)
    options = {"per_device_eval_batch_size": batch_size, "batch_eval_metrics": True, "report_to": "none"}
    options["dataloader_pin_memory"] = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        trainer = MaskingTrainer(
            model=model,
            args=TrainingArguments(folder, **options),
            data_collator=objective.make_collator(tokenizer, model),
            compute_metrics=LanguageModelingMetrics(validation.bytes_per_token, objective),
            preprocess_logits_for_metrics=functools.partial(token_losses, shift=objective.label_shift),
        )
        trainer.masking = objective.make_masking(tokenizer, seed=0)
        metrics = trainer.evaluate(validation.dataset)
    return metrics | objective.evaluate_generation(model, tokenizer, validation)

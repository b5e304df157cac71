"""The model card of a run."""

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from modeling_nlq.configuration_nlq import MINIMUM_TRANSFORMERS, PER_LAYER_SWITCHES


TEMPLATE = Path(__file__).parent.parent / "model_card.md"

_MEASURES = {
    "eval_loss": "loss (nats per token)",
    "eval_perplexity": "perplexity",
    "eval_bits_per_byte": "bits per byte",
    "eval_token_accuracy": "token accuracy",
    "unigram_perplexity": "perplexity of the unigram baseline",
}
_SWITCHES = ("norm_position", "sublayer_activation", "residual_activation", "position_embedding", *PER_LAYER_SWITCHES)


def render(name: str, config: PreTrainedConfig, given: dict[str, Any], metrics: dict[str, Any]) -> ModelCard:
    """The card of a finished run, from the template `model_card.md`.

    Args:
        name: of the model, the last part of its folder.
        config: of the model.
        given: the recipe, as it was given.
        metrics: what `metrics.json` holds.
    """
    given = without_folders(given)
    measured = {key: metrics[key] for key in _MEASURES if metrics.get(key) is not None}
    data = ModelCardData(
        model_name=name,
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["nlq", "custom_code", "attention"],
        datasets=None if _is_local(given) else [given["dataset"]],
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=given.get("dataset", "python-stdlib"),
                dataset_name=given.get("dataset", "python-stdlib"),
                dataset_split="validation",
                metric_type=key.removeprefix("eval_"),
                metric_value=value,
            )
            for key, value in measured.items()
            if key.startswith("eval_")
        ],
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        model_name=name,
        location=name,
        prompt="import " if given.get("dataset", "python-stdlib") == "python-stdlib" else "The",
        minimum_transformers=MINIMUM_TRANSFORMERS,
        switches=_switches(config),
        parameters=metrics["parameters"],
        non_embedding_parameters=metrics["non_embedding_parameters"],
        context=config.max_position_embeddings,
        dataset=given.get("dataset", "python-stdlib"),
        dataset_fingerprint=metrics.get("dataset_fingerprint"),
        tokens_seen=metrics["tokens_seen"],
        steps=metrics["steps"],
        recipe=yaml.safe_dump(given, sort_keys=False),
        validation_tokens=metrics.get("validation_tokens"),
        results={_MEASURES[key]: f"{value:.4f}" for key, value in measured.items()},
    )


def without_folders(value: Any) -> Any:
    """A recipe without local paths: they say nothing to a reader elsewhere, and may say too much; the last part is enough."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _is_local(given: dict[str, Any]) -> bool:
    dataset = given.get("dataset", "python-stdlib")
    return dataset == "python-stdlib" or Path(dataset).suffix != ""


def _switches(config: PreTrainedConfig) -> dict[str, Any]:
    """The switches that are set to something; of layers that differ, their own values."""
    values = config.to_dict()
    switches = {name: values[name] for name in _SWITCHES if values.get(name) not in (None, False)}
    if layers := values.get("per_layer_config"):
        switches["per_layer_config"] = layers
    return switches

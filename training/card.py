"""The model card: the origin of a model, how to load it, and its results."""

import json
import shlex
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from modeling_nlq.configuration_nlq import MINIMUM_TRANSFORMERS, PER_LAYER_SWITCHES, is_derived

from .files import BUILT_IN_CORPORA, CARD_FILE, data_format
from .parameters import Size, context_of, parts_in, positions_of
from .scrub import without_folders
from .text import code, plain, printable


TEMPLATE = Path(__file__).parent.parent / "model_card.md"

_SPLITS = {"eval": "validation", "test": "test"}
_METRICS = {
    "loss": "loss (nats per token)",
    "perplexity": "perplexity",
    "pseudo_perplexity": "pseudo-perplexity of masked tokens",
    "bits_per_byte": "bits per byte",
    "token_accuracy": "token accuracy",
    "chrf": "chrF of generated text",
}
_MEASURES = {f"{split}_{key}": f"{name} {text}" for split, name in _SPLITS.items() for key, text in _METRICS.items()}
_PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSeq2SeqLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}
_SWITCHES = (
    "is_causal",
    "norm_type",
    "norm_position",
    "parallel_residual",
    "mlp_type",
    "sublayer_activation",
    "residual_activation",
    *PER_LAYER_SWITCHES,
)


def render(
    location: str,
    config: PreTrainedConfig,
    size: Size,
    given: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    conversion: dict[str, Any] | None = None,
    comparison: str | None = None,
    license: str | None = None,
    has_plot: bool = False,
    has_tokenizer: bool = True,
    is_adapter: bool = False,
) -> ModelCard:
    """Renders the card of a model from the template `model_card.md`.

    Args:
        location: the name to load the model by, of its folder or of its repository.
        config: configuration of the model.
        size: size of the model.
        given: the recipe it was trained with, as it was given.
        metrics: the content of `metrics.json`, if it was trained.
        conversion: the content of `conversion.json`, if it was converted.
        comparison: verdicts of the comparison it took part in, as `Markdown`.
        license: license of the weights; by default Apache-2.0 if they were trained from scratch, and none if they may
            belong to others.
        has_plot: whether `loss.png` lies beside the card.
        has_tokenizer: whether a tokenizer lies beside the card.
        is_adapter: whether an adapter lies beside the card, in place of the model: what the conversion added.
    """
    given, metrics, conversion = (without_folders(record or {}) for record in (given, metrics, conversion))
    dataset = given.get("dataset", "python-stdlib")
    measured = {key: metrics[key] for key in _MEASURES if metrics.get(key) is not None}
    base_model = metrics.get("base_model") or conversion.get("base_model")
    auto_class = _auto_class(config)
    is_nlq = config.model_type in ("nlq", "nlq_seq2seq")
    is_local = dataset in BUILT_IN_CORPORA or data_format(dataset) is not None or Path(dataset).exists()
    name = location.split("/")[-1]
    pipeline, measures = _PIPELINES[auto_class], _MEASURES
    if auto_class == "AutoModelForMaskedLM":
        measures = {
            key: text.replace("per token", "per masked token").replace("token accuracy", "accuracy of masked tokens")
            for key, text in _MEASURES.items()
        }
    common = {"task_type": pipeline, "task_name": pipeline.replace("-", " ").title()}
    common |= {"dataset_type": dataset, "dataset_name": dataset}
    results = [
        EvalResult(**common, dataset_split=_SPLITS[split], metric_type=metric, metric_value=value)
        for split, metric, value in ((*key.split("_", 1), value) for key, value in measured.items())
        if split in _SPLITS
    ]
    data = ModelCardData(
        model_name=name if results else None,
        license=license or ("apache-2.0" if metrics and not metrics.get("is_fine_tuned") else None),
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=pipeline,
        tags=[*(["nlq"] if is_nlq else []), *(["custom_code"] if is_nlq and not is_adapter else []), "attention"],
        base_model=base_model,
        datasets=None if not given or is_local else [dataset],
        eval_results=results or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        code=code,
        plain=plain,
        quoted=lambda text: printable(json.dumps(text, ensure_ascii=False)),
        model_name=plain(name),
        location=location,
        is_nlq=is_nlq,
        is_derived=any(map(is_derived, (getattr(config, "auto_map", None) or {}).values())),
        is_adapter=is_adapter,
        base=converted_base(given, metrics),
        commands=code("\n".join(_conversion_commands(conversion)) + "\n", "sh") if is_adapter else None,
        model_type=config.model_type,
        auto_class=auto_class,
        is_masked=auto_class == "AutoModelForMaskedLM",
        kind={"AutoModelForMaskedLM": "an encoder", "AutoModelForSeq2SeqLM": "an encoder and decoder"}.get(
            auto_class, "a GPT-style language model"
        ),
        prompt="import " if given and dataset in BUILT_IN_CORPORA else "The",
        minimum_transformers=MINIMUM_TRANSFORMERS,
        switches=_switches(config) if is_nlq else {},
        parts=parts_in(config),
        size=size,
        trained_parameters=metrics.get("trained_parameters", size.total),
        has_lora=given.get("lora") is not None,
        context=positions_of(config) or context_of(config),
        has_tokenizer=has_tokenizer,
        conversion=conversion,
        origin=_origin(conversion) if conversion else None,
        base_model=base_model,
        dataset=dataset,
        metrics=metrics,
        recipe=code(yaml.safe_dump(given, sort_keys=False), "yaml") if given and metrics else None,
        results={measures[key]: f"{value:.4f}" for key, value in measured.items()},
        has_plot=has_plot,
        comparison=comparison and plain(comparison),
    )


def base_model_of(model: str | Path) -> str | None:
    """The model on the Hub that given weights come from: the model itself, or the one that the card in its folder
    names.
    """
    if not Path(model).exists():
        return str(model)
    card = Path(model) / CARD_FILE
    if not card.is_file():
        return None
    base_model = ModelCard.load(card, ignore_metadata_errors=True).data.get("base_model")
    return base_model if isinstance(base_model, str) else None


def converted_base(given: dict[str, Any], metrics: dict[str, Any]) -> str | None:
    """The Hub name of the model that a run began with; `None` if that is no model on the Hub.

    Args:
        given: the recipe, as it was given.
        metrics: the content of `metrics.json`.
    """
    # A run names its model as `base_model` only if that was no folder
    return metrics.get("base_model") if metrics.get("base_model") == given.get("model") else None


def _conversion_commands(conversion: dict[str, Any], target: str = "base") -> list[str]:
    """Returns the commands that make a conversion's model in the folder `target`, from the last trained model."""
    words = ["nlq", "convert", conversion["source"], target]
    for name, value in conversion["switches"].items():
        is_upcycling = (name, value) == ("query_projection", "upcycled")
        setting = f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        words += ["--upcycle"] if is_upcycling else ["--set", setting]
    words += ["--allow-lossy"] if conversion["lost"] else []
    before = conversion.get("before")
    return [*(_conversion_commands(before, conversion["source"]) if before else []), shlex.join(words)]


def _auto_class(config: PreTrainedConfig) -> str:
    """The Auto class that loads the model with the head it was saved with."""
    name = (config.architectures or ["NLQForCausalLM"])[0].removeprefix("FSDP")
    head = name.partition("For")[2]
    if name.endswith("LMHeadModel"):
        head = "CausalLM"
    head = "Seq2SeqLM" if head == "ConditionalGeneration" else head
    auto_class = f"AutoModelFor{head}" if head else "AutoModel"
    return auto_class if auto_class in _PIPELINES else "AutoModelForCausalLM"


def _origin(conversion: dict[str, Any]) -> str:
    if conversion["source_class"] == "checkpoint":
        return "a checkpoint of the code of arXiv 2603.13381, or of nanoGPT"
    quantised = f", weights of type {code(conversion['dequantised'])}" if conversion.get("dequantised") else ""
    return f"{code(conversion['base_model'] or conversion['source'])} ({code(conversion['source_class'])}{quantised})"


def _switches(config: PreTrainedConfig) -> dict[str, Any]:
    """The switches that are set, with the values of layers that differ."""
    if config.sub_configs:
        halves = {half: _switches(getattr(config, half)) for half in config.sub_configs}
        return {f"{half}: {name}": value for half, switches in halves.items() for name, value in switches.items()}
    values = config.to_dict()
    # Of these, only `is_causal` is `True` by default
    switches = {name: values[name] for name in _SWITCHES if values.get(name) not in (None, name == "is_causal")}
    if layers := values.get("per_layer_config"):
        switches["per_layer_config"] = layers
    return switches

"""Renders the model card: how to load a model, its origin, its training and its results."""

import json
import re
import shlex
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from modeling_nlq.configuration_nlq import MINIMUM_TRANSFORMERS, PER_LAYER_SWITCHES
from modeling_nlq.parts_user_nlq import is_derived

from ..files import BUILT_IN_CORPORA, CARD_FILE, data_format, is_built_in, is_repository_name
from ..result import RunResult
from ..size import ModelKind, Size, context_of, kind_of, parts_in, positions_of
from ..text import Markdown, code, plain, printable
from .scrub import without_folders


TEMPLATE = Path(__file__).parents[2] / "model_card.md"

_METRICS = {
    "loss": "loss (nats per token)",
    "perplexity": "perplexity",
    "pseudo_perplexity": "pseudo-perplexity of masked tokens",
    "bits_per_byte": "bits per byte",
    "token_accuracy": "token accuracy",
    "chrf": "chrF of generated text",
}
_MASKED_METRICS = {"loss": "loss (nats per masked token)", "token_accuracy": "accuracy of masked tokens"}
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
    recipe: dict[str, Any] | None = None,
    result: RunResult | None = None,
    conversion: dict[str, Any] | None = None,
    comparison: str | None = None,
    license: str | None = None,
    has_plot: bool = False,
    has_tokenizer: bool = True,
    is_adapter: bool = False,
) -> ModelCard:
    """Renders the card of a model, to be loaded from `location`.

    The license is by default Apache-2.0 for weights trained from scratch on a built-in corpus, otherwise none: the
    owner of a text or of the first weights may not allow it.
    """
    hub_data = hub_dataset(recipe or {}, result)
    corpus = (recipe or {}).get("dataset", "python-stdlib")  # with its folder, whose last component may name another
    has_own_license = result is not None and not result.data.is_fine_tuned and is_built_in(corpus)
    recipe = without_folders(recipe or {})
    conversion = without_folders(conversion or {})
    auto_class = _auto_class(config)
    kind = kind_of(config)
    is_nlq = config.model_type in ("nlq", "nlq_seq2seq")
    name = location.split("/")[-1]
    dataset = recipe.get("dataset", "python-stdlib")
    trained_base = without_folders(result.data.base_model) if result else None
    base_model = trained_base or conversion.get("base_model")
    measured = {
        (split, metric): value
        for split in (("validation", "test") if result else ())
        for metric, value in measured_on(result, split).items()
    }
    texts = metric_names(config)
    pipeline = _PIPELINES[auto_class]
    results = [
        EvalResult(
            task_type=pipeline,
            task_name=pipeline.replace("-", " ").title(),
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_split=split,
            metric_type=metric,
            metric_value=value,
        )
        for (split, metric), value in measured.items()
    ]
    data = ModelCardData(
        model_name=name if results else None,
        license=license or ("apache-2.0" if has_own_license else None),
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=pipeline,
        tags=["nlq", *([] if is_adapter else ["custom_code"]), "attention"] if is_nlq else ["attention"],
        base_model=base_model,
        datasets=[hub_data] if hub_data else None,
        eval_results=results or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        code=code,
        plain=plain,
        link_papers=link_papers,
        quoted=lambda text: printable(json.dumps(text, ensure_ascii=False)),
        model_name=plain(name),
        location=location,
        is_nlq=is_nlq,
        is_derived=any(map(is_derived, (getattr(config, "auto_map", None) or {}).values())),
        is_adapter=is_adapter,
        base=converted_base(recipe, trained_base),
        commands=code("\n".join(_conversion_commands(conversion)) + "\n", "sh") if is_adapter else None,
        model_type=config.model_type,
        auto_class=auto_class,
        kind="a GPT-style language model" if kind is ModelKind.DECODER else kind.description,
        prompt="import " if recipe and corpus in BUILT_IN_CORPORA else "The",
        minimum_transformers=MINIMUM_TRANSFORMERS,
        switches=_switches(config) if is_nlq else {},
        parts=parts_in(config),
        size=size,
        trained_parameters=result.size.trained if result else size.total,
        has_lora=recipe.get("lora") is not None,
        context=positions_of(config) or context_of(config),
        has_tokenizer=has_tokenizer,
        conversion=conversion,
        base_model=base_model,
        dataset=dataset,
        result=result,
        recipe=code(yaml.safe_dump(recipe, sort_keys=False), "yaml") if recipe and result else None,
        results={f"{split} {texts[metric]}": f"{value:.4f}" for (split, metric), value in measured.items()},
        has_plot=has_plot,
        comparison=comparison,
    )


def hub_dataset(recipe: dict[str, Any], result: RunResult | None) -> str | None:
    """Returns the dataset that a run read from the Hub; `None` for one of this package or of a machine."""
    dataset = recipe.get("dataset", "python-stdlib")
    is_local = data_format(dataset) is not None or Path(dataset).exists()
    if is_local or is_built_in(dataset) or not is_repository_name(dataset):
        return None
    # For a folder, the run recorded only its last component
    trained_on = result.data.trained_on if result else []
    return dataset if not trained_on or trained_on[-1].get("dataset") == dataset else None


def measured_on(result: RunResult, split: Literal["validation", "test"]) -> dict[str, float]:
    """Returns the metrics of a split that were measured."""
    values = {metric: getattr(getattr(result.losses, split), metric) for metric in _METRICS}
    return {metric: value for metric, value in values.items() if value is not None}


def metric_names(config: PreTrainedConfig) -> dict[str, str]:
    """Returns the metrics of a model and their names in words."""
    return _METRICS | (_MASKED_METRICS if _auto_class(config) == "AutoModelForMaskedLM" else {})


def link_papers(text: str) -> Markdown:
    """Returns Markdown that links every arXiv ID; the Hub finds papers by these links alone."""
    return Markdown(re.sub(r"\barXiv (\d{4}\.\d{4,5})\b", r"[\g<0>](https://arxiv.org/abs/\1)", plain(text)))


def base_model_of(model: str | Path) -> str | None:
    """Returns a model on the Hub, or for a folder the base in its card."""
    if not Path(model).exists():
        return str(model)
    card = Path(model) / CARD_FILE
    if not card.is_file():
        return None
    base_model = ModelCard.load(card, ignore_metadata_errors=True).data.get("base_model")
    return base_model if isinstance(base_model, str) else None


def converted_base(recipe: dict[str, Any], base_model: str | None) -> str | None:
    """Returns the Hub name of the model that a run started from, or `None` if it was a folder."""
    # For a folder, `base_model` is the model in its card
    return base_model if base_model == recipe.get("model") else None


def _conversion_commands(conversion: dict[str, Any], target: str = "base") -> list[str]:
    """Returns the commands that repeat a conversion and earlier ones."""
    words = ["nlq", "convert", conversion["source"], target]
    for name, value in conversion["switches"].items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    words += ["--allow-lossy"] if conversion["lost"] else []
    before = conversion.get("before")
    return [*(_conversion_commands(before, conversion["source"]) if before else []), shlex.join(words)]


def _auto_class(config: PreTrainedConfig) -> str:
    name = (config.architectures or ["NLQForCausalLM"])[0].removeprefix("FSDP")
    head = "CausalLM" if name.endswith("LMHeadModel") else name.partition("For")[2]
    head = "Seq2SeqLM" if head == "ConditionalGeneration" else head
    auto_class = f"AutoModelFor{head}" if head else "AutoModel"
    return auto_class if auto_class in _PIPELINES else "AutoModelForCausalLM"


def _switches(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns switches that differ from their defaults, and settings of single layers."""
    if config.sub_configs:
        halves = {half: _switches(getattr(config, half)) for half in config.sub_configs}
        return {f"{half}: {name}": value for half, switches in halves.items() for name, value in switches.items()}
    values = config.to_dict()
    # `is_causal` alone is `True` by default
    switches = {name: values[name] for name in _SWITCHES if values.get(name) not in (None, name == "is_causal")}
    if layers := values.get("per_layer_config"):
        switches["per_layer_config"] = layers
    return switches

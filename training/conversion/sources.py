"""Reads models of Transformers to convert."""

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from modeling_nlq.configuration_nlq import check_kernels

from ..loading import source_named
from ..size import check_names
from .draft import classes_of
from .families import FAMILIES


def read_source(source: str, **options: str) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Returns the configuration and class of a saved model; raises `ValueError` if it cannot be converted."""
    with source_named(source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    check_kernels(config, source)
    if config.model_type not in (known := sorted([*FAMILIES, "nlq"])):
        raise ValueError(f"it is a model of type {config.model_type!r}; only {', '.join(known)} can be converted")
    classes = classes_of(config)
    name = (config.architectures or [next(iter(classes))])[0].removeprefix("FSDP")
    if name not in classes:
        raise ValueError(f"architectures names {name!r}, which is none of {', '.join(classes)}")
    return config, classes[name]


def load_model(
    source: str, config: PreTrainedConfig, model_class: type[PreTrainedModel], **options
) -> PreTrainedModel:
    """Loads a saved model in its precision; raises `ValueError` for parameters that do not fit."""
    with source_named(source):
        model, info = model_class.from_pretrained(
            source, config=config, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    if info["mismatched_keys"]:
        name, shape, expected = min(info["mismatched_keys"])
        raise ValueError(f"{name} has the shape {tuple(shape)}, which must be {tuple(expected)}")
    # Transformers saved the value of masked scores, which is not a parameter, until 4.27
    unexpected = {name for name in info["unexpected_keys"] if not name.endswith(".attn.masked_bias")}
    check_names(set(info["missing_keys"]), unexpected)
    return model.eval()

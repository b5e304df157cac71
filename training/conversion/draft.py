"""Converts between NLQ models and models of `FAMILIES`: parameters are renamed, split, joined or added."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto

from modeling_nlq import NLQConfig, NLQModel, NLQPreTrainedModel
from modeling_nlq.parts_user_nlq import check_kernels

from ..loading import check_model_exists, source_named
from ..size import check_names, check_parameters, empty_model
from ..text import one_line
from .families import FAMILIES, Family
from .streaming import Load, Weights, saved_state
from .upcycling import changed, check_change, only_adds, restructure


# The classes of each head by configuration; the first head is the default
_HEADS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    modeling_auto.MODEL_MAPPING,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
)


class LossyConversion(ValueError):
    """Raised if a conversion would lose something, which the message names."""


def read_source(source: str, **options: str) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Returns the configuration and class of a saved model; raises `ValueError` if it cannot be converted."""
    if not options:  # a GGUF file has no config.json beside it
        check_model_exists(source)
    with source_named(source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    check_kernels(config, source)
    if config.model_type not in (known := sorted([*FAMILIES, "nlq"])):
        raise ValueError(f"it is a model of type {config.model_type!r}; only {', '.join(known)} can be converted")
    classes = {head[type(config)].__name__: head[type(config)] for head in _HEADS if type(config) in head}
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


def class_with_same_head(
    model_class: type[PreTrainedModel], config_class: type[PreTrainedConfig]
) -> type[PreTrainedModel]:
    """Returns a configuration's class with the same head; raises `ValueError` without one."""
    known = model_class.config_class
    for head in _HEADS:
        if known in head and config_class in head and issubclass(model_class, head[known]):
            return head[config_class]
    raise ValueError(f"{config_class.model_type} has no model with the head of {model_class.__name__}")


def nearest_in_family(family: str, config: NLQConfig) -> tuple[PreTrainedConfig, NLQConfig]:
    """Returns the nearest configuration of a family, and its equal of NLQ; raises `ValueError` for another shape."""
    try:
        theirs = FAMILIES[family].write(config)
        plain = FAMILIES[family].read(theirs)
        check_change(config, plain)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{family} has no model of this shape: {one_line(error)}") from error
    return theirs, plain


@dataclass(frozen=True)
class Draft:
    """A model before its weights are made: it changes in steps, and is then built, or written shard by shard.

    `model` has class and configuration, but other parameters; `lost` are differences from the source, in words.
    """

    model: PreTrainedModel
    weights: Weights
    lost: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: PreTrainedModel, lost: Collection[str] = ()) -> "Draft":
        """Wraps a model in memory."""
        return cls(model, Weights.of(saved_state(model)), [*lost])

    def check_exact(self, allow_lossy: bool) -> "Draft":
        """Returns the draft; raises `LossyConversion` if something is lost, unless that is allowed."""
        if self.lost and not allow_lossy:
            raise LossyConversion(f"{'; '.join(self.lost)}; --allow-lossy goes on without")
        return self

    def build(self) -> PreTrainedModel:
        """Makes the model in evaluation mode. It may share parameters with the source."""
        state = {name: load().detach().contiguous() for name, load in self.weights.tensors.items()}
        with no_init_weights():  # buffers get their values
            model = type(self.model)(copy.deepcopy(self.model.config))
        check_parameters(model, {name: value.shape for name, value in state.items()})
        model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        model.config.dtype = model.dtype
        _take_generation_config(model, self.model)
        return model.eval()

    def to_nlq(self) -> "Draft":
        old = self.model
        family = FAMILIES[old.config.model_type]
        new = empty_model(family.read(old.config), model_class=class_with_same_head(type(old), NLQConfig))
        _check_counterparts(old, names_of(family, old, new))
        tensors = to_nlq_tensors(family, old, new, self.weights.tensors)
        return self._changed(new, tensors, family.not_read(old.config))

    def with_switches(self, switches: dict[str, Any]) -> "Draft":
        config = changed(self.model.config, switches)
        if self.weights.are_in_memory or not only_adds(self.model.config, config):
            model, lost = restructure(self.build(), config)
            if lost:
                raise ValueError("; ".join(lost))
            return Draft.of(model, self.lost)
        new = empty_model(config, model_class=type(self.model))
        initial = {name: partial(_initial_value, new, name, self.weights.dtype) for name in saved_state(new)}
        return self._changed(new, {**initial, **self.weights.tensors})

    def from_nlq(self, family: str) -> "Draft":
        their_class = class_with_same_head(type(self.model), FAMILIES[family].config_class)
        config, plain = nearest_in_family(family, self.model.config)
        draft = self
        if not only_adds(self.model.config, plain):
            model, lost = restructure(self.build(), plain)
            draft = Draft.of(model, [*self.lost, *lost])
        new = empty_model(config, model_class=their_class)

        def write(their_name: str, our_names: list[str]) -> torch.Tensor:
            layout = FAMILIES[family].layout(their_name)
            return layout.write([draft.weights.tensors[name]() for name in our_names], config)

        names = names_of(FAMILIES[family], new, draft.model)
        _check_counterparts(new, names)
        return draft._changed(new, {name: partial(write, name, ours) for name, ours in names.items()})

    def _changed(self, model: PreTrainedModel, tensors: dict[str, Load], lost: Collection[str] = ()) -> "Draft":
        _take_generation_config(model, self.model)
        return Draft(model, replace(self.weights, tensors=tensors), [*self.lost, *lost])


@torch.no_grad()
def _initial_value(model: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns the initial value of a parameter of a new bottleneck."""
    path, _, kind = name.rpartition(".")
    module = copy.deepcopy(model.get_submodule(path)).to_empty(device="cpu")
    model._init_weights(module)
    return getattr(module, kind).detach().to(dtype)


def _check_counterparts(theirs: PreTrainedModel, converted: Collection[str]) -> None:
    if further := [name for name in saved_state(theirs) if name not in converted]:
        raise ValueError(f"NLQ models have no counterpart of {', '.join(further)} of {type(theirs).__name__}")


def _take_generation_config(model: PreTrainedModel, source: PreTrainedModel) -> None:
    if getattr(source, "generation_config", None) is not None:
        model.generation_config = copy.deepcopy(source.generation_config)


def to_nlq_tensors(
    family: Family, theirs: PreTrainedModel, ours: NLQPreTrainedModel, tensors: Mapping[str, Load]
) -> dict[str, Load]:
    """Converts the parameters of a family's model to NLQ. The models may be on the meta device."""

    def read(their_name: str, index: int) -> torch.Tensor:
        return family.layout(their_name).read(tensors[their_name](), theirs.config)[index]

    return {
        name: partial(read, their_name, index)
        for their_name, our_names in names_of(family, theirs, ours).items()
        for index, name in enumerate(our_names)
    }


def names_of(family: Family, theirs: PreTrainedModel, ours: NLQPreTrainedModel) -> dict[str, list[str]]:
    """Maps each parameter of a family's model to the parameters of an NLQ model that it consists of."""
    names: dict[str, list[str]] = {}
    for name in saved_state(ours):
        module, _, kind = name.rpartition(".")
        body = module.removeprefix(f"{ours.base_model_prefix}.")
        if isinstance(ours, NLQModel):
            renamed = family.module_name(module)
        elif body == module:
            renamed = module if hasattr(theirs, module) else family.classifier
        else:
            renamed = f"{theirs.base_model_prefix}.{family.module_name(body)}"
        names.setdefault(f"{renamed}.{kind}", []).append(name)
    return names


def to_nlq(model: PreTrainedModel) -> NLQPreTrainedModel:
    """Makes an NLQ model that computes the same as a model of one of `FAMILIES`, and may share its parameters.

    Raises `ValueError` for another family or an unsupported value, and `LossyConversion` for fields that NLQ does not
    have.
    """
    if model.config.model_type not in FAMILIES:
        raise ValueError(f"a model of type {model.config.model_type!r} is none of {', '.join(sorted(FAMILIES))}")
    return Draft.of(model).to_nlq().check_exact(allow_lossy=False).build()

"""Moves weights between NLQ models and the models of `FAMILIES`: the same numbers under other names, and fused or
split.

A `Draft` is a model whose weights are not made yet. It changes in steps, and is then built in memory or written shard
by shard.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from modeling_nlq import NLQConfig, NLQModel, NLQPreTrainedModel

from ..size import check_parameters
from ..text import one_line
from .families import FAMILIES, Family
from .streaming import ParameterSource, Weights, empty_model, parameter_shapes
from .upcycling import changed, only_adds, problems, restructure, upcycle


# A table for each head, with the class of NLQ and that of each family; the first is the default
_HEADS = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
)


class LossyConversion(ValueError):
    """A conversion would lose something, which the message names."""

    def __init__(self, lost: list[str]):
        super().__init__(f"the model cannot be converted exactly: {'; '.join(lost)}; --allow-lossy goes on without")
        self.lost = lost


def classes_of(config: PreTrainedConfig) -> dict[str, type[PreTrainedModel]]:
    """The classes of a configuration that can be converted, by name; the first is the default."""
    found = [head[type(config)] for head in _HEADS if type(config) in head]
    return {found_class.__name__: found_class for found_class in found}


def class_with_same_head(
    model_class: type[PreTrainedModel], config_class: type[PreTrainedConfig]
) -> type[PreTrainedModel] | None:
    """The class of another configuration with the same head as a class; `None` if there is none."""
    own = (model_class.config_class, NLQConfig)  # the second of a derived class that is not registered
    heads = (head for head in _HEADS if any(issubclass(model_class, head[each]) for each in own if each in head))
    found = next(heads, None)
    return None if found is None else found.get(config_class, None)


def nlq_config(config: PreTrainedConfig) -> NLQConfig:
    """The configuration of the NLQ model that computes the same; that of an NLQ model stays as it is."""
    return FAMILIES[config.model_type].read(config) if config.model_type in FAMILIES else config


def nearest_in_family(family: str, config: NLQConfig) -> tuple[PreTrainedConfig, NLQConfig]:
    """The configuration of a family that is nearest to that of an NLQ model, and what that is in NLQ.

    Raises:
        ValueError: if there is none.
    """
    try:
        theirs = FAMILIES[family].write(config)
        plain = FAMILIES[family].read(theirs)
        if found := problems(config, plain):
            raise ValueError("; ".join(found))
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{family} has no model of this shape: {one_line(error)}") from error
    return theirs, plain


@dataclass(frozen=True)
class Draft:
    """A model whose weights are not made yet.

    Attributes:
        model: the model, whose weights are not read.
        weights: those of the source.
        origins: what each parameter of the model is made from.
        lost: what the source has and the model has not, in words.
    """

    model: PreTrainedModel
    weights: Weights
    origins: dict[str, ParameterSource]
    lost: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: PreTrainedModel, weights: Weights | None = None, lost: Sequence[str] = ()) -> "Draft":
        """The draft of a model as it is, with its own weights or those given."""
        origins = {name: ParameterSource((name,)) for name in parameter_shapes(model)}
        return cls(model, Weights.of(model) if weights is None else weights, origins, [*lost])

    def build(self, copied: bool = True) -> PreTrainedModel:
        """Makes the model in memory, in evaluation mode. Without a copy, its parameters may be those of the source.

        Raises:
            ValueError: naming parameters that are missing, unknown, or of another shape.
        """
        loaded = self.weights.load(list(self.weights.stored))
        state = {
            name: origin.make([loaded[source] for source in origin.sources]).detach()
            for name, origin in self.origins.items()
        }
        if copied:
            state = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
        with no_init_weights():  # and yet with the buffers that follow from the configuration
            model = type(self.model)(copy.deepcopy(self.model.config))
        check_parameters(model, {name: value.shape for name, value in state.items()})
        model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        model.config.dtype = model.dtype
        _take_generation_config(model, self.model)
        return model.eval()

    def to_nlq(self, allow_lossy: bool = False) -> "Draft":
        """Makes an NLQ model of a model of a family; raises as the function `to_nlq` does."""
        old, family = self.model, FAMILIES[self.model.config.model_type]
        lost = family.not_read(old.config)
        if lost and not allow_lossy:
            raise LossyConversion(lost)
        if (our_class := class_with_same_head(type(old), NLQConfig)) is None:
            raise ValueError(f"NLQ has no model with the head of {type(old).__name__}")
        new = empty_model(our_class, family.read(old.config))
        origins = to_nlq_origins(family, old, new)
        _check_counterparts(old, {name for origin in origins.values() for name in origin.sources})
        return self._next(new, origins, lost)

    def with_switches(self, switches: dict[str, Any]) -> "Draft":
        """Changes switches of an NLQ model; raises `ValueError` as `upcycle` does."""
        config = changed(self.model.config, switches)
        if self.weights.are_in_memory or not only_adds(self.model.config, config):
            return Draft.of(upcycle(self.build(copied=False), switches), lost=self.lost)
        new = empty_model(type(self.model), config)

        def initial(name: str) -> torch.Tensor:
            """The value that the model gives a parameter at first."""
            module_name, _, kind = name.rpartition(".")
            # With the part around it, which may set values of the modules inside
            path, inside, rest = module_name.partition(".parts.")
            owner_name = path + inside + rest.partition(".")[0]
            owner = copy.deepcopy(new.get_submodule(owner_name)).to_empty(device="cpu")
            module = owner.get_submodule(module_name[len(owner_name) + 1 :])
            with torch.no_grad():
                new._init_weights(module)
                if module is not owner:
                    new._init_weights(owner)
            return getattr(module, kind).detach().to(self.weights.dtype)

        first = {name: ParameterSource((), lambda _, name=name: initial(name)) for name in parameter_shapes(new)}
        kept = {name: ParameterSource((name,)) for name in self.origins}
        return self._next(new, {**first, **kept})

    def from_nlq(self, family: str, allow_lossy: bool = False) -> "Draft":
        """Makes a model of a family of an NLQ model; raises as the function `from_nlq` does."""
        draft, their_class = self, class_with_same_head(type(self.model), FAMILIES[family].config_class)
        if their_class is None:
            raise ValueError(f"{family} has no model with the head of {type(self.model).__name__}")
        config, plain = nearest_in_family(family, self.model.config)
        if not only_adds(self.model.config, plain):
            model, lost = restructure(self.build(copied=False), plain)
            if lost and not allow_lossy:
                raise LossyConversion(lost)
            draft = Draft.of(model, lost=[*self.lost, *lost])
        new = empty_model(their_class, config)
        origins = from_nlq_origins(FAMILIES[family], new, draft.model)
        _check_counterparts(new, origins.keys())
        return draft._next(new, origins)

    def _next(self, model: PreTrainedModel, origins: dict[str, ParameterSource], lost: Sequence[str] = ()) -> "Draft":
        """The draft of another model, whose parameters are made from those of this one."""
        _take_generation_config(model, self.model)
        return Draft(model, self.weights, chain(self.origins, origins), [*self.lost, *lost])


def _check_counterparts(theirs: PreTrainedModel, converted: Collection[str]) -> None:
    if further := [name for name in parameter_shapes(theirs) if name not in converted]:
        raise ValueError(f"NLQ models have no counterpart of {', '.join(further)} of {type(theirs).__name__}")


def _take_generation_config(model: PreTrainedModel, source: PreTrainedModel) -> None:
    if getattr(source, "generation_config", None) is not None:
        model.generation_config = copy.deepcopy(source.generation_config)


def chain(first: Mapping[str, ParameterSource], second: Mapping[str, ParameterSource]) -> dict[str, ParameterSource]:
    """The origins of parameters that are made in two steps, in terms of the parameters before the first."""

    def joined(name: str) -> ParameterSource:
        steps = [first[source] for source in second[name].sources]

        def make(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            rest = iter(tensors)
            return second[name].make([step.make([next(rest) for _ in step.sources]) for step in steps])

        return ParameterSource(tuple(source for step in steps for source in step.sources), make)

    return {name: joined(name) for name in second}


def to_nlq_origins(family: Family, theirs: PreTrainedModel, ours: NLQPreTrainedModel) -> dict[str, ParameterSource]:
    """Maps each parameter of an NLQ model to its origin in a model of a family. Both may be on the meta device."""
    origins = {}
    for their_name, our_names in _names(family, theirs, ours).items():
        for index, name in enumerate(our_names):
            read = family.layout(their_name).read
            make = lambda tensors, read=read, index=index: read(tensors[0], theirs.config)[index]  # noqa: E731
            origins[name] = ParameterSource((their_name,), make)
    return origins


def from_nlq_origins(family: Family, theirs: PreTrainedModel, ours: NLQPreTrainedModel) -> dict[str, ParameterSource]:
    """The inverse of `to_nlq_origins`."""
    origins = {}
    for their_name, our_names in _names(family, theirs, ours).items():
        write = family.layout(their_name).write
        origins[their_name] = ParameterSource(
            tuple(our_names), lambda tensors, write=write: write(tensors, theirs.config)
        )
    weight, bias = (f"{family.classifier}.{kind}" for kind in ("weight", "bias"))
    if bias in parameter_shapes(theirs) and bias not in origins:  # `token_classification_bias=False`
        origins[bias] = ParameterSource(origins[weight].sources, lambda tensors: torch.zeros_like(tensors[0][:, 0]))
    return origins


def to_nlq(model: PreTrainedModel, allow_lossy: bool = False) -> NLQPreTrainedModel:
    """Makes an NLQ model that computes the same as a model of one of `FAMILIES`, with the same head.

    Args:
        model: any model of the family; it stays unchanged.
        allow_lossy: leave out the parts that an NLQ model does not have.

    Raises:
        ValueError: for another family, or a value of the configuration that an NLQ model cannot have.
        LossyConversion: if it has fields without a counterpart.
    """
    if model.config.model_type not in FAMILIES:
        raise ValueError(f"a model of type {model.config.model_type!r} is none of {', '.join(sorted(FAMILIES))}")
    return Draft.of(model).to_nlq(allow_lossy).build()


def from_nlq(model: NLQPreTrainedModel, family: str, allow_lossy: bool = False) -> PreTrainedModel:
    """Makes a model of one of `FAMILIES` that computes the same as an NLQ model, with the same head.

    What the family writes in another way is rewritten: for GPT-2, for example, grouped queries are expanded, and
    `"residual"` projections become matrices.

    Args:
        model: an NLQ model; it stays unchanged.
        allow_lossy: convert even if the family cannot compute the same.

    Raises:
        ValueError: if the family has no model of its shape, naming the fields.
        LossyConversion: if the family lacks something it uses.
    """
    return Draft.of(model).from_nlq(family, allow_lossy).build()


def _names(family: Family, theirs: PreTrainedModel, ours: NLQPreTrainedModel) -> dict[str, list[str]]:
    """Name of each parameter of a model of a family -> names of the parameters of an NLQ model that it consists of."""
    has_head = not isinstance(ours, NLQModel)
    names: dict[str, list[str]] = {}
    for name in parameter_shapes(ours):
        module, _, kind = name.rpartition(".")
        body = module.removeprefix(f"{ours.base_model_prefix}.") if has_head else module
        if has_head and body == module:
            renamed = module if hasattr(theirs, module) else family.classifier
        else:
            renamed = family.module_name(body)
            renamed = f"{theirs.base_model_prefix}.{renamed}" if has_head else renamed
        names.setdefault(f"{renamed}.{kind}", []).append(name)
    return names

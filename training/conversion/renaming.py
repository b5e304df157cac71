"""Moves weights between NLQ models and the models of `FAMILIES`: the same numbers under other names, and fused or split."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    GPT2DoubleHeadsModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging

from modeling_nlq import (
    NLQConfig,
    NLQForCausalLM,
    NLQForQuestionAnswering,
    NLQForSequenceClassification,
    NLQForTokenClassification,
    NLQModel,
    NLQPreTrainedModel,
)

from ..parameters import check_parameters
from ..text import one_line
from .families import FAMILIES, Family
from .upcycling import problems, restructure


logger = logging.get_logger(__name__)

# The class of each NLQ model, and the table with the class of each family; the first is the default
_CLASSES = (
    (NLQForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    (NLQModel, MODEL_MAPPING),
    (NLQForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    (NLQForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING),
    (NLQForQuestionAnswering, MODEL_FOR_QUESTION_ANSWERING_MAPPING),
)
# Classes with a second head, which would be lost, and its name
_WITHOUT_SECOND_HEAD = {GPT2DoubleHeadsModel: "multiple_choice_head"}


class LossyConversion(ValueError):
    """A conversion would lose something, which the message names."""

    def __init__(self, lost: list[str]):
        super().__init__(f"the model cannot be converted exactly: {'; '.join(lost)}")
        self.lost = lost


@dataclass(frozen=True)
class ParameterSource:
    """What a parameter is made from.

    Attributes:
        sources: names of other parameters.
        make: function from their tensors to the tensor of this parameter.
    """

    sources: tuple[str, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor] = lambda tensors: tensors[0]


def classes_of(config: PreTrainedConfig) -> dict[str, type[PreTrainedModel]]:
    """The classes of a configuration that can be converted, by name; the first is the default."""
    if isinstance(config, NLQConfig):
        found = [nlq_class for nlq_class, _ in _CLASSES]
    else:
        found = [mapping[type(config)] for _, mapping in _CLASSES if type(config) in mapping]
        found += [two_heads for two_heads in _WITHOUT_SECOND_HEAD if two_heads.config_class is type(config)]
    return {found_class.__name__: found_class for found_class in found}


def nlq_class_of(model_class: type[PreTrainedModel]) -> type[NLQPreTrainedModel]:
    """The class of the NLQ model with the same head as a class of a family."""
    config_class = model_class.config_class
    rows = ((nlq_class, mapping) for nlq_class, mapping in _CLASSES if config_class in mapping)
    return next((nlq_class for nlq_class, mapping in rows if issubclass(model_class, mapping[config_class])), NLQForCausalLM)


def class_in_family(family: str, model_class: type[NLQPreTrainedModel]) -> type[PreTrainedModel]:
    """The class of a family with the same head as a class of NLQ models.

    Raises:
        ValueError: if the family has none.
    """
    name, mapping = next((nlq_class.__name__, rows) for nlq_class, rows in _CLASSES if issubclass(model_class, nlq_class))
    config_class = FAMILIES[family].config_class
    if config_class not in mapping:
        raise ValueError(f"{family} has no model with the head of {name}")
    return mapping[config_class]


def nearest_in_family(family: str, config: NLQConfig) -> tuple[PreTrainedConfig, NLQConfig]:
    """The configuration of a family that is nearest to that of an NLQ model, and what that is in NLQ.

    Raises:
        ValueError: if there is none.
    """
    try:
        theirs = FAMILIES[family].write(config)
        plain = FAMILIES[family].read(theirs)
        found = problems(config, plain)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{family} has no model of this shape: {one_line(error)}") from error
    if found:
        raise ValueError(f"{family} has no model of this shape: {'; '.join(found)}")
    for name in ("attention_dropout", "embedding_dropout", "residual_dropout"):
        if (value := getattr(config, name)) != (kept := getattr(plain, name)):
            logger.warning(f"{name}={value}: a {family} model trains with {kept} there; what it computes is the same")
    return theirs, plain


def empty_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Makes a model on the meta device, with a copy of the configuration."""
    with torch.device("meta"):
        return model_class(copy.deepcopy(config))


def parameter_shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Names and shapes of the parameters that a file of the model holds: those that are tied to another are left out."""
    return {name: value.shape for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}


def lost_by(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> list[str]:
    """Lists what an NLQ model made from a model of this class would lack, in words."""
    lost = FAMILIES[config.model_type].not_read(config)
    if model_class in _WITHOUT_SECOND_HEAD:
        lost.append(f"{_WITHOUT_SECOND_HEAD[model_class]}: NLQ models have one head, the language-modelling head is kept")
    return lost


def to_nlq_origins(theirs: PreTrainedModel, ours: NLQPreTrainedModel) -> dict[str, ParameterSource]:
    """The origin of each parameter of an NLQ model among those of a model of a family. Both may be on the meta device."""
    family, origins = FAMILIES[theirs.config.model_type], {}

    def part(name: str, index: int) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
        return lambda tensors: family.read_tensors(name, tensors, theirs.config)[index]

    for their_name, our_names in _names(family, theirs, ours).items():
        origins.update({name: ParameterSource((their_name,), part(their_name, index)) for index, name in enumerate(our_names)})
    return origins


def from_nlq_origins(theirs: PreTrainedModel, ours: NLQPreTrainedModel) -> dict[str, ParameterSource]:
    """The inverse of `to_nlq_origins`."""
    family, origins = FAMILIES[theirs.config.model_type], {}

    def whole(name: str) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
        return lambda tensors: family.write_tensors(name, tensors, theirs.config)[0]

    for their_name, our_names in _names(family, theirs, ours).items():
        origins[their_name] = ParameterSource(tuple(our_names), whole(their_name))
    weight, bias = (f"{family.classifier}.{kind}" for kind in ("weight", "bias"))
    if bias in parameter_shapes(theirs) and bias not in origins:  # `token_classification_bias=False`
        origins[bias] = ParameterSource(origins[weight].sources, lambda tensors: torch.zeros_like(tensors[0][:, 0]))
    return origins


def chain(first: Mapping[str, ParameterSource], second: Mapping[str, ParameterSource]) -> dict[str, ParameterSource]:
    """The origins of parameters that are made in two steps, in terms of the parameters before the first."""

    def joined(name: str) -> ParameterSource:
        steps = [first[source] for source in second[name].sources]

        def make(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            rest = iter(tensors)
            return second[name].make([step.make([next(rest) for _ in step.sources]) for step in steps])

        return ParameterSource(tuple(source for step in steps for source in step.sources), make)

    return {name: joined(name) for name in second}


def to_nlq(model: PreTrainedModel, allow_lossy: bool = False) -> NLQPreTrainedModel:
    """Makes an NLQ model that computes the same as a model of one of `FAMILIES`, with the same head.

    Args:
        model: any model of the family; it stays unchanged.
        allow_lossy: leave out the parts that an NLQ model does not have.

    Raises:
        ValueError: for another family, or a value of the configuration that an NLQ model cannot have.
        LossyConversion: if it has fields, or a second head, without a counterpart.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        raise ValueError(f"a model of type {config.model_type!r} is none of {', '.join(sorted(FAMILIES))}")
    lost = lost_by(type(model), config)
    if lost and not allow_lossy:
        raise LossyConversion(lost)
    new = empty_model(nlq_class_of(type(model)), FAMILIES[config.model_type].read(config))
    return _filled(new, to_nlq_origins(model, new), model)


def from_nlq(model: NLQPreTrainedModel, family: str, allow_lossy: bool = False) -> PreTrainedModel:
    """Makes a model of one of `FAMILIES` that computes the same as an NLQ model, with the same head.

    What the family writes in another way is rewritten: for GPT-2, for example, grouped queries are expanded, and `"residual"`
    projections become matrices.

    Args:
        model: an NLQ model; it stays unchanged.
        family: its name.
        allow_lossy: convert even if the family cannot compute the same.

    Raises:
        ValueError: if the family has no model of its shape, naming the fields.
        LossyConversion: if the family lacks something it uses.
    """
    if not isinstance(model.config, NLQConfig):
        raise ValueError(f"a model of type {model.config.model_type!r} is no NLQ model")
    their_class = class_in_family(family, type(model))
    config, plain = nearest_in_family(family, model.config)
    model, lost = restructure(model, plain)
    if lost and not allow_lossy:
        raise LossyConversion(lost)
    new = empty_model(their_class, config)
    return _filled(new, from_nlq_origins(new, model), model)


def build(
    target: type[PreTrainedModel],
    config: PreTrainedConfig,
    state: dict[str, torch.Tensor],
) -> PreTrainedModel:
    """Makes a model from all its weights, in evaluation mode.

    Args:
        target: class of the model.
        config: configuration of the model.
        state: parameters by name; they are copied.

    Raises:
        ValueError: naming parameters that are missing, unknown, or of another shape.
    """
    with no_init_weights():  # and yet with the buffers that follow from the configuration
        model = target(copy.deepcopy(config))
    check_parameters(model, {name: value.shape for name, value in state.items()})
    copied = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    model.load_state_dict(copied, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = model.dtype
    return model.eval()


def _filled(new: PreTrainedModel, origins: Mapping[str, ParameterSource], source: PreTrainedModel) -> PreTrainedModel:
    """Makes the model of an empty one, with weights and generation settings of another."""
    weights = source.state_dict()
    state = {name: origin.make([weights[source] for source in origin.sources]) for name, origin in origins.items()}
    model = build(type(new), new.config, state)
    if getattr(source, "generation_config", None) is not None:
        model.generation_config = copy.deepcopy(source.generation_config)
    return model


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

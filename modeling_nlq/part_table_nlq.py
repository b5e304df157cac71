"""The table of attention parts, in the order in which their hooks run, and the parts of one layer."""

from typing import TYPE_CHECKING

from .attention_parts_nlq import AttentionPart, is_on
from .canon_nlq import Canon
from .differential_attention_nlq import DifferentialAttention
from .exclusive_attention_nlq import ExclusiveAttention
from .forget_gate_nlq import ForgetGate
from .layer_parts_nlq import AttentionGate, AttentionSink, HeadProjection, OutputActivation, OutputScaling, QKNorm
from .length_scaling_nlq import LengthScaling
from .own_parts_nlq import find_part
from .parallax_nlq import Parallax
from .selective_attention_nlq import SelectiveAttention
from .value_residual_nlq import ValueResidual


if TYPE_CHECKING:
    from .configuration_nlq import NLQConfig


ATTENTION_PARTS: dict[str, type[AttentionPart]] = {
    part.name: part
    for part in (
        Canon,
        QKNorm,
        LengthScaling,
        Parallax,
        ValueResidual,
        SelectiveAttention,
        ForgetGate,
        AttentionSink,
        DifferentialAttention,
        ExclusiveAttention,
        HeadProjection,
        OutputScaling,
        OutputActivation,
        AttentionGate,
    )
}


def parts_of(config: "NLQConfig") -> list[type[AttentionPart]]:
    """Returns the parts of a layer: those of the table whose field is set, then the user's own.

    Args:
        config: the configuration of the layer.

    Raises:
        ValueError: for a name in `attention_parts` that no part has.
    """
    parts = [part for name, part in ATTENTION_PARTS.items() if is_on(getattr(config, name))]
    codes = config.attention_parts_code or {}
    for name in config.attention_parts or ():
        if name in ATTENTION_PARTS:
            raise ValueError(f"attention_parts: {name!r} is a field of its own; choose another name for your part")
    return parts + [find_part(name, codes.get(name)) for name in config.attention_parts or ()]


def check_distribution(config: "NLQConfig", tp_size: int, pp_size: int) -> None:
    """Checks that the parts of a model can be distributed.

    Raises:
        ValueError: if not.
    """
    for index, layer in enumerate(config.per_layer_config):
        for part in parts_of(layer):
            if tp_size > 1 and (reason := part.refuse_split(layer)):
                raise ValueError(f"tp_size={tp_size}: {part.name} (layer {index}) cannot be split: {reason}")
            if pp_size > 1 and part.needs_first_values:
                reason = "a later pipeline stage does not have the values of the first layer"
                raise ValueError(f"pp_size={pp_size}: {part.name} (layer {index}) cannot be distributed: {reason}; use tp_size")

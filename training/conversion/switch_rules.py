"""Rules for changing a switch of a trained model: each keeps the outputs by new parameters, or says why it cannot."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from modeling_nlq import PROJECTIONS, NLQConfig
from modeling_nlq.configuration_nlq import GATE_OPTIONS, Projection
from modeling_nlq.modeling_nlq import NLQAttention, NLQBottleneck
from modeling_nlq.parts_builtin_nlq import ATTENTION_PARTS, GATE_ACTIVATIONS


BIASED_PARTS = ("query_key_value", "attention_output", "mlp")
# The fields of `carry_model`; `check_change` refuses smaller sizes
MODEL_FIELDS = (
    *("num_key_value_heads", "max_position_embeddings", "intermediate_size"),
    *("tie_word_embeddings", "use_bias", *(f"{part}_bias" for part in BIASED_PARTS)),
)
# Fields of a layer whose change no other weights could make up for
FUNCTIONS = (
    "attention_activation",
    "attention_output_activation",
    "classifier_pooling",
    "final_logit_softcapping",
    "hidden_act",
    "layer_norm_eps",
    "linear_attention_beta",
    "linear_attention_decay",
    "linear_attention_update",
    "qk_norm",
    "residual_activation",
    "sliding_window",
    "sublayer_activation",
)
OTHER_OUTPUTS = "the outputs would change"
_KINDS = ("query", "key", "value")
# Parameters of linear attention with a row for each key and value head
_RATES = ("decay_bias", "b_proj.weight", "a_proj.weight", "a_log_bias", "dt_bias")
# The matrices before and after the inner units of an MLP
_MLP_LAYERS = {"plain": (("fc1",), "fc2"), "gated": (("gate_proj", "up_proj"), "down_proj")}


@dataclass(frozen=True)
class LayerChange:
    """A layer before and after the change: `target` already has the parameters of `source` with equal shapes."""

    before: NLQConfig
    after: NLQConfig
    source: NLQAttention
    target: NLQAttention

    def differs(self, field: str) -> bool:
        return getattr(self.before, field) != getattr(self.after, field)

    def projections(self, kind: str) -> list[Projection]:
        return [PROJECTIONS[getattr(side, f"{_origin(side, kind)}_projection")] for side in (self.before, self.after)]

    def more_heads(self, rows: torch.Tensor, kind: str) -> torch.Tensor:
        """Repeats the rows of each head as often as the change repeats the head."""
        field = "num_query_heads" if kind == "query" else "num_key_value_heads"
        before, after = getattr(self.before, field), getattr(self.after, field)
        return rows.unflatten(0, (before, -1)).repeat_interleave(after // before, dim=0).flatten(0, 1)


def _origin(config: NLQConfig, kind: str) -> str:
    """Returns the projection that computes queries, keys or values: that of the keys may compute values."""
    return "key" if kind == "value" and config.value_projection == "key" else kind


def refusal(field: str, before: Any, after: Any, reason: str) -> str:
    return f"{field}={before!r} cannot {'stay' if before == after else f'become {after!r}'}: {reason}"


def refusals(before: NLQConfig, after: NLQConfig, reasons: dict[str, str]) -> list[str]:
    """Refuses to change fields, each for its reason."""
    values = {field: (getattr(before, field), getattr(after, field)) for field in reasons}
    return [refusal(field, old, new, reasons[field]) for field, (old, new) in values.items() if old != new]


def carry_model(model: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    """Sets the parameters of a new model outside attention, and returns what is lost."""
    before, after = model.config, new.config
    if (positions := model.base_model.embed_positions) is not None:
        new.base_model.embed_positions.weight[: len(positions.weight)] = positions.weight
    for old_layer, new_layer in zip(model.base_model.layers, new.base_model.layers):
        _widen(old_layer.mlp, new_layer.mlp, *_MLP_LAYERS[after.mlp_type])
    biases = {name for name, _ in model.named_parameters() if name.endswith(".bias")}
    if biases <= new.state_dict().keys():
        return []
    fields = [f"{part}_bias" for part in BIASED_PARTS if before.has_bias(part) and not after.has_bias(part)]
    fields = ["use_bias"] if before.use_bias and not after.use_bias else fields
    return [refusal(field, True, False, "the biases would be lost") for field in fields]


def _widen(source: nn.Module, target: nn.Module, inner: tuple[str, ...] = ("fc1",), outer: str = "fc2") -> None:
    """Widens the matrices `inner`, `d x r`, and `outer`, `r x d`, to a larger r.

    The outputs of new inner units are multiplied by 0 (Chen et al. 2016).
    """
    for name in inner:
        old, new = getattr(source, name), getattr(target, name)
        width = min(old.out_features, new.out_features)
        new.weight[:width] = old.weight[:width]
        if old.bias is not None and new.bias is not None:
            new.bias[:width] = old.bias[:width]
    new = getattr(target, outer).weight.zero_()
    new[:, :width] = getattr(source, outer).weight[:, :width]


def carry_layer(change: LayerChange) -> list[str]:
    """Sets the parameters of attention that have no equal in the old layer, and returns what is lost."""
    reasons = {field: OTHER_OUTPUTS if change.differs(field) else None for field in FUNCTIONS}
    reasons.update({field: rule(change) or reasons.get(field) for field, rule in LAYER_RULES.items()})
    for name in dict.fromkeys([*change.source.parts, *change.target.parts]):
        if name not in reasons:
            field = name if name in ATTENTION_PARTS else "attention_parts"
            reasons[field] = reasons.get(field) or _carry_part(change, name)
    values = {field: (getattr(change.before, field), getattr(change.after, field)) for field in reasons}
    return [refusal(field, *values[field], reason) for field, reason in reasons.items() if reason]


def _carry_projection(kind: str, change: LayerChange) -> str | None:
    if _origin(change.after, kind) != kind:
        return OTHER_OUTPUTS if change.differs("value_projection") else None
    old, new = change.projections(kind)
    source, source_bottleneck = _terms(change.source, _origin(change.before, kind))
    target, target_bottleneck = _terms(change.target, kind)
    if new.linear:
        # In float64: X + X W is X (I + W) up to one rounding
        size = target.weight.shape[1]
        identity = torch.eye(size, dtype=torch.float64, device=target.weight.device)
        if source is None:
            weight = torch.zeros_like(target.weight, dtype=torch.float64)
        else:
            weight = change.more_heads(source.weight.double(), kind)
            if source.bias is not None and target.bias is not None:
                target.bias.copy_(change.more_heads(source.bias, kind))
        if old.identity != new.identity:
            weight = weight + (change.more_heads(identity, kind) if old.identity else -identity)
        target.weight.copy_(weight)
    if new.bottleneck and old.bottleneck:
        source_bottleneck = copy.deepcopy(source_bottleneck)
        for layer in (source_bottleneck.fc2, source_bottleneck.output_norm):
            for parameter in layer.parameters():
                parameter.data = change.more_heads(parameter.data, kind)
        _widen(source_bottleneck, target_bottleneck)
        trained = source_bottleneck.state_dict()
        for name, parameter in target_bottleneck.named_parameters():
            if name in trained and trained[name].shape == parameter.shape:
                parameter.copy_(trained[name])
    elif new.bottleneck:
        # The gain has a gradient at once, and the parameters before it after the first step
        for parameter in target_bottleneck.output_norm.parameters():
            parameter.zero_()
    if not new.linear and (old.linear or old.identity != new.identity):
        return "it has no matrix for X W, or X"
    return "f(X) would be lost" if old.bottleneck and not new.bottleneck else None


def _terms(attention: NLQAttention, kind: str) -> tuple[nn.Linear | None, NLQBottleneck | None]:
    return getattr(attention, f"{kind[0]}_proj"), getattr(attention, f"{kind[0]}_bottleneck")


def _check_bottlenecks(field: str, change: LayerChange) -> str | None:
    before, after = getattr(change.before, field), getattr(change.after, field)
    if before == after or (field == "projection_bottleneck_size" and before < after):
        return None
    for kind in _KINDS:
        if all(projection.bottleneck for projection in change.projections(kind)):
            return "the bottlenecks would compute something else"
    return None


def _attention_scaling(change: LayerChange) -> str | None:
    before, after = change.before.score_scaling, change.after.score_scaling
    if before == after:
        return None
    if after == 0.0:
        return "all scores would be 0"
    norm = getattr(change.target, "q_norm", None)
    is_delta = change.after.linear_attention_update == "delta"
    if change.after.activation.kind == "linear" and (norm is None or is_delta):
        return "linear attention does not multiply keys by a factor of its queries"
    modules = [norm]
    if norm is None and not PROJECTIONS[change.after.key_projection].identity:
        linear, bottleneck = _terms(change.target, "key")
        modules = [linear, bottleneck and bottleneck.output_norm]
    parameters = [parameter for module in filter(None, modules) for parameter in module.parameters()]
    if not parameters:
        return "no weights of the layer could take over the factor"
    if norm is None and change.after.value_projection == "key":
        return "the weights that could take over the factor make the values too"
    for parameter in parameters:
        parameter.mul_(before / after)
    if norm is None:
        for part in change.target.parts.values():
            part.scale_keys(before / after)
    return None


def _num_key_value_heads(change: LayerChange) -> str | None:
    trained = dict(change.source.named_parameters())
    for name, new in change.target.named_parameters():
        if name in _RATES and name in trained:
            new.copy_(change.more_heads(trained[name], "key_value"))
    if change.differs("num_key_value_heads") and change.after.linear_attention_decay == "fixed":
        return "the fixed rates depend on it; use linear_attention_decay='learned'"
    return None


def _attention_gate(change: LayerChange) -> str | None:
    if not change.differs("attention_gate"):
        return None
    if change.before.attention_gate is not None:
        return "the gate would be lost"
    gate = change.target.value_gate_proj if change.after.attention_gate == "value" else change.target.gate_proj
    gate.weight.zero_()
    first_gate = GATE_ACTIVATIONS[change.after.gate_activation](torch.zeros((), dtype=torch.float64))
    change.target.o_proj.weight.div_(first_gate.item())
    return None


def _gate_option(field: str, change: LayerChange) -> str | None:
    return OTHER_OUTPUTS if change.differs(field) and change.before.attention_gate is not None else None


def _attention_output_scaling(change: LayerChange) -> str | None:
    if not change.differs("attention_output_scaling"):
        return None
    scalings = (change.source.output_scaling, change.target.output_scaling)
    before, after = (1.0 if scaling is None else scaling for scaling in scalings)
    if after == 0.0:
        return "attention would contribute nothing"
    if change.before.attention_output_activation is not None or change.before.gate_source == "output":
        return "an activation, or what a gate reads, comes before the weights that could take over the factor"
    change.target.o_proj.weight.mul_(before / after)
    return None


def _head_projection(change: LayerChange) -> str | None:
    before = change.before
    if not before.head_projection or change.after.head_projection:
        return None  # new ones start at the identity
    has_gates = before.attention_gate in ("elementwise", "value") or before.gate_source == "output"
    if before.attention_output_activation is not None or has_gates:
        return "an activation or gate comes between the learned matrices and the output projection"
    # A head's output x passes (x W_h) W_o
    heads = change.target.o_proj.weight.unflatten(1, (-1, change.target.head_dim))
    change.target.o_proj.weight.copy_(torch.einsum("ohe,hde->ohd", heads, change.source.head_proj.weight).flatten(1))
    return None


def _attention_sink(change: LayerChange) -> str | None:
    before, after = change.before.attention_sink, change.after.attention_sink
    if before == after == "learned":
        change.target.sink_bias.copy_(change.more_heads(change.source.sink_bias, "query"))
    if before == after or (before, after) == ("zero", "learned"):  # a learned sink starts at 0
        return None
    return OTHER_OUTPUTS


def _attention_normalization(change: LayerChange) -> str | None:
    if change.differs("attention_activation"):
        return None
    sides = (change.before, change.after)
    before, after = (side.attention_normalization or side.activation.normalization for side in sides)
    return OTHER_OUTPUTS if before != after else None


def _qk_norm(change: LayerChange) -> str | None:
    if change.differs("qk_norm") or change.after.qk_norm is None:
        return None
    for kind in ("query", "key"):
        norms = (getattr(side, f"{kind[0]}_norm") for side in (change.source, change.target))
        for old, new in zip(*(norm.parameters() for norm in norms)):
            if old.shape != new.shape:  # copies of all heads have the mean square of the heads
                new.copy_(change.more_heads(old, kind))
    return None


def _carry_part(change: LayerChange, name: str) -> str | None:
    if name not in change.target.parts:
        return "what the part does would be lost"
    part = change.target.parts[name]
    if name not in change.source.parts:
        return part.start_without_effect(change.target)
    if name in ATTENTION_PARTS and change.differs(name):
        return "the part would compute something else"
    trained = dict(change.source.parts[name].named_parameters())
    for key, new in part.named_parameters():
        old = trained.get(key, new)
        kind = part.shard_dim(key)
        if old.shape != new.shape and kind == "inner":
            new[: len(old)] = old  # the weights that read the others are 0
        elif old.shape != new.shape:
            new.copy_(change.more_heads(old, kind))
    return part.refuse_change(change.before, change.after)


# They set parameters, and return a reason if the outputs change. The order is that of factors in the weights
LAYER_RULES: dict[str, Callable[[LayerChange], str | None]] = {
    **{f"{kind}_projection": partial(_carry_projection, kind) for kind in _KINDS},
    "projection_bottleneck_size": partial(_check_bottlenecks, "projection_bottleneck_size"),
    "projection_activation": partial(_check_bottlenecks, "projection_activation"),
    "qk_norm": _qk_norm,
    "num_key_value_heads": _num_key_value_heads,
    "attention_scaling": _attention_scaling,
    "attention_normalization": _attention_normalization,
    "attention_sink": _attention_sink,
    "head_projection": _head_projection,
    "attention_output_scaling": _attention_output_scaling,
    "attention_gate": _attention_gate,
    **{field: partial(_gate_option, field) for field in GATE_OPTIONS},
}

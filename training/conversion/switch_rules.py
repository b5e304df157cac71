"""Rules for changing a switch of a trained model: each keeps the outputs by new parameters, or says why it cannot."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from modeling_nlq import PROJECTIONS, NLQConfig
from modeling_nlq.modeling_nlq import NLQAttention, NLQBottleneck
from modeling_nlq.parts_builtin_nlq import ATTENTION_PARTS


# Parts of a model that have a field for their biases
BIASED_PARTS = ("query_key_value", "attention_output", "mlp")
# Names of the matrices before and after the inner units of an MLP
_MLP_LAYERS = {"plain": (("fc1",), "fc2"), "gated": (("gate_proj", "up_proj"), "down_proj")}


@dataclass(frozen=True)
class LayerChange:
    """A layer before and after the change.

    The attention `source` stays unchanged. The attention `target` already has its parameters of the same name and
    shape.
    """

    before: NLQConfig
    after: NLQConfig
    source: NLQAttention
    target: NLQAttention

    def differs(self, field: str) -> bool:
        """Tells whether a field changes its value."""
        return getattr(self.before, field) != getattr(self.after, field)

    def heads(self, kind: str) -> tuple[int, int]:
        """Returns the numbers of heads of queries, keys or values before and after."""
        field = "num_query_heads" if kind == "query" else "num_key_value_heads"
        return getattr(self.before, field), getattr(self.after, field)


def refusal(field: str, before: Any, after: Any, reason: str) -> str:
    """Says in words why a field cannot change."""
    return f"{field}={before!r} cannot {'stay' if before == after else f'become {after!r}'}: {reason}"


def refusals(before: NLQConfig, after: NLQConfig, reasons: dict[str, str]) -> list[str]:
    """Refuses to change fields, each for its reason."""
    values = {field: (getattr(before, field), getattr(after, field)) for field in reasons}
    return [refusal(field, old, new, reasons[field]) for field, (old, new) in values.items() if old != new]


def lost_queries(before: NLQConfig, after: NLQConfig) -> list[str]:
    """Refuses the parts that take query heads away from a layer."""
    if after.num_query_heads >= before.num_query_heads:
        return []
    reason = "heads of queries that the model has learned would be lost"
    return refusals(before, after, dict.fromkeys(ATTENTION_PARTS, reason))


# Rules for the whole model: they take the old and the new model, and return what is lost


def _num_key_value_heads(model: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    before, after = model.config.num_key_value_heads, new.config.num_key_value_heads
    if after % before:
        reason = "only a multiple gives every group of query heads the keys it had"
        raise ValueError(refusal("num_key_value_heads", before, after, reason))
    return []  # the projections do the rest


def _biases(model: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    """Refuses to drop learned biases; new ones start at 0."""
    before, after, modules = model.config, new.config, dict(new.named_modules())
    is_lost = any(
        getattr(module, "bias", None) is not None and name in modules and getattr(modules[name], "bias", None) is None
        for name, module in model.named_modules()
    )
    if not is_lost:
        return []
    parts = [f"{part}_bias" for part in BIASED_PARTS if before.has_bias(part) and not after.has_bias(part)]
    names = ["use_bias"] if before.use_bias and not after.use_bias else parts
    return [refusal(name, True, False, "the biases would be lost") for name in names]


def _tie_word_embeddings(model: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not new.config.tie_word_embeddings or model.config.tie_word_embeddings:
        return []
    if torch.equal(head.weight, embedding.weight):
        return []
    raise ValueError(refusal("tie_word_embeddings", False, True, "the LM head differs from the token embeddings"))


def _max_position_embeddings(model: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    before, after = model.base_model.embed_positions, new.base_model.embed_positions
    if before is None:
        return []
    if len(after.weight) < len(before.weight):
        text = "positions that the model has learned would be lost"
        raise ValueError(refusal("max_position_embeddings", len(before.weight), len(after.weight), text))
    after.weight[: len(before.weight)] = before.weight
    return []


def _intermediate_size(model: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    before, after = model.config.intermediate_size, new.config.intermediate_size
    if after < before:
        raise ValueError(refusal("intermediate_size", before, after, "inner units of the MLPs would be lost"))
    inner, outer = _MLP_LAYERS[new.config.mlp_type]
    for old_layer, new_layer in zip(model.base_model.layers, new.base_model.layers):
        _widen(old_layer.mlp, new_layer.mlp, inner, outer)
    return []


MODEL_RULES = {
    "num_key_value_heads": _num_key_value_heads,
    **dict.fromkeys(("use_bias", *(f"{part}_bias" for part in BIASED_PARTS)), _biases),
    "tie_word_embeddings": _tie_word_embeddings,
    "max_position_embeddings": _max_position_embeddings,
    "intermediate_size": _intermediate_size,
}


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
    old, new = getattr(source, outer), getattr(target, outer)
    new.weight.zero_()
    new.weight[:, :width] = old.weight[:, :width]


# Rules for a layer: they set the other parameters, and return a reason if the outputs change


def _rule_of_projection(kind: str) -> Callable[[LayerChange], str | None]:
    """Returns the rule of the projection to queries, keys or values."""

    def carry(change: LayerChange) -> str | None:
        old, new = (PROJECTIONS[getattr(side, f"{kind}_projection")] for side in (change.before, change.after))
        heads = change.heads(kind)
        source, source_bottleneck = (
            _with_more_heads(module, *heads) for module in _modules_of_projection(change.source, kind)
        )
        target, target_bottleneck = _modules_of_projection(change.target, kind)
        if new.linear:
            _carry_matrix(source, target, heads, old.identity, new.identity)
        if new.bottleneck and old.bottleneck:
            _carry_bottleneck(source_bottleneck, target_bottleneck)
        elif new.bottleneck:
            # The gain has a gradient at once, and the parameters before it after the first step
            for parameter in target_bottleneck.output_norm.parameters():
                parameter.zero_()
        if not new.linear and (old.linear or old.identity != new.identity):
            return "it has no matrix that could hold X W, or X"
        return "the bottleneck f(X) would be lost" if old.bottleneck and not new.bottleneck else None

    return carry


def _modules_of_projection(attention: NLQAttention, kind: str) -> tuple[nn.Linear | None, NLQBottleneck | None]:
    return getattr(attention, f"{kind[0]}_proj"), getattr(attention, f"{kind[0]}_bottleneck")


def _with_more_heads(module: nn.Module | None, before: int, after: int) -> nn.Module | None:
    """Repeats each head of a matrix or a bottleneck, in a copy."""
    if module is None or before == after:
        return module
    module = copy.deepcopy(module)
    for layer in (module.fc2, module.output_norm) if isinstance(module, NLQBottleneck) else (module,):
        for parameter in layer.parameters(recurse=False):
            parameter.data = _copy_heads(parameter.data, before, after)
    return module


def _carry_matrix(
    source: nn.Linear | None, target: nn.Linear, heads: tuple[int, int], had_identity: bool, has_identity: bool
) -> None:
    """Copies a matrix, to which the identity is added that the projection had before, or has now."""
    # In float64: X + X W is X (I + W) up to one rounding
    weight = torch.zeros_like(target.weight, dtype=torch.float64) if source is None else source.weight.double()
    if had_identity != has_identity:
        identity = torch.eye(weight.shape[1], dtype=torch.float64, device=weight.device)
        weight = weight + (_copy_heads(identity, *heads) if had_identity else -identity)
    target.weight.copy_(weight)
    if source is not None and source.bias is not None and target.bias is not None:
        target.bias.copy_(source.bias)


def _carry_bottleneck(source: NLQBottleneck, target: NLQBottleneck) -> None:
    """Copies a bottleneck into one that may be wider."""
    target.input_norm.load_state_dict(source.input_norm.state_dict())
    _widen(source, target)
    trained, parameters = dict(source.named_parameters()), dict(target.named_parameters())
    for name in ("fc2.bias", "output_norm.weight", "output_norm.bias"):
        if name in trained and name in parameters:
            parameters[name].copy_(trained[name])


def _has_bottlenecks(change: LayerChange) -> bool:
    """Tells whether some projection has a bottleneck before and after."""
    fields = ("query_projection", "key_projection", "value_projection")
    return any(
        all(PROJECTIONS[getattr(side, field)].bottleneck for side in (change.before, change.after)) for field in fields
    )


def _projection_bottleneck_size(change: LayerChange) -> str | None:
    is_narrower = change.after.projection_bottleneck_size < change.before.projection_bottleneck_size
    return "inner units that the model has learned would be lost" if is_narrower and _has_bottlenecks(change) else None


def _projection_activation(change: LayerChange) -> str | None:
    is_other = change.differs("projection_activation") and _has_bottlenecks(change)
    return "the bottlenecks that the model has learned would compute something else" if is_other else None


def _copy_heads(rows: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """Repeats the rows of each head."""
    return rows.unflatten(0, (before, -1)).repeat_interleave(after // before, dim=0).flatten(0, 1)


def _attention_scaling(change: LayerChange) -> str | None:
    before, after = change.before.score_scaling, change.after.score_scaling
    if before == after:
        return None
    if after == 0.0:
        return "all scores would be 0"
    if getattr(change.target, "q_norm", None) is not None:
        gain = next(change.target.q_norm.parameters(), None)
        if gain is None:
            field = f"qk_norm={change.after.qk_norm!r} with norm_gain=False"
            return f"{field} has no weights that could take over the factor"
        gain.mul_(before / after)
        return None
    if PROJECTIONS[change.after.key_projection].identity:
        return f"key_projection={change.after.key_projection!r} has no weights that could take over the factor"
    linear, bottleneck = _modules_of_projection(change.target, "key")
    for module in filter(None, (linear, bottleneck and bottleneck.output_norm)):
        for parameter in module.parameters():
            parameter.mul_(before / after)
    for part in change.target.parts.values():
        part.scale_keys(before / after)
    return None


def _attention_gate(change: LayerChange) -> str | None:
    if not change.differs("attention_gate"):
        return None
    if change.before.attention_gate is not None:
        return "the gate that the model has learned would be lost"
    gate = change.target.value_gate_proj if change.after.attention_gate == "value" else change.target.gate_proj
    gate.weight.zero_()
    change.target.o_proj.weight.mul_(2.0)  # sigmoid(0) = 1/2
    return None


def _attention_output_scaling(change: LayerChange) -> str | None:
    if not change.differs("attention_output_scaling"):
        return None
    before, after = (
        1.0 if side.output_scaling is None else side.output_scaling for side in (change.source, change.target)
    )
    if after == 0.0:
        return "attention would contribute nothing"
    if change.before.attention_output_activation is not None:
        return "the attention_output_activation comes between it and the weights that could take over the factor"
    change.target.o_proj.weight.mul_(before / after)
    return None


def _head_projection(change: LayerChange) -> str | None:
    if not change.before.head_projection or change.after.head_projection:
        return None  # new ones start at the identity
    has_activation = change.before.attention_output_activation is not None
    if has_activation or change.before.attention_gate in ("elementwise", "value"):
        return "an activation or gate after the learned matrices prevents moving them into the output projection"
    # A head's output x passes (x W_h) W_o
    heads = change.target.o_proj.weight.unflatten(1, (-1, change.target.head_dim))
    change.target.o_proj.weight.copy_(torch.einsum("ohe,hde->ohd", heads, change.source.head_proj.weight).flatten(1))
    return None


def _attention_sink(change: LayerChange) -> str | None:
    before, after = change.before.attention_sink, change.after.attention_sink
    if before == after == "learned":
        change.target.sink_bias.copy_(_copy_heads(change.source.sink_bias, *change.heads("query")))
    if before == after or (before, after) == ("zero", "learned"):  # a learned sink starts at 0
        return None
    if before is None:
        return "a new sink changes the weights unless it starts at minus infinity, where its gradient is 0"
    return "the weights would sum to another number"


def _attention_normalization(change: LayerChange) -> str | None:
    before, after = (
        side.attention_normalization or side.activation.normalization for side in (change.before, change.after)
    )
    if change.before.activation.name == change.after.activation.name and before != after:
        return "the attention weights would change"
    return None


def _qk_norm(change: LayerChange) -> str | None:
    if change.differs("qk_norm"):
        return "the scores would depend on the lengths of queries and keys, or depend on them no more"
    if change.after.qk_norm is None:
        return None
    # Copies of all heads have the mean square of the heads
    for kind in ("query", "key"):
        for old, new in zip(
            *(getattr(side, f"{kind[0]}_norm").parameters() for side in (change.source, change.target))
        ):
            if old.shape != new.shape:
                new.copy_(_copy_heads(old, *change.heads(kind)))
    return None


def _rule_of_part(field: str) -> Callable[[LayerChange], str | None]:
    """Returns the rule of a field that adds a part, or several by name; the part itself says how it starts."""

    def carry(change: LayerChange) -> str | None:
        names = [field]
        if field not in ATTENTION_PARTS:
            names = dict.fromkeys([*(getattr(change.before, field) or ()), *(getattr(change.after, field) or ())])
        return next(filter(None, (_start_of_part(change, name) for name in names)), None)

    return carry


def _start_of_part(change: LayerChange, name: str) -> str | None:
    """Starts a new part of a layer without effect, or copies the parameters of an old one."""
    if name not in change.target.parts:
        return "what the part does would be lost" if name in change.source.parts else None
    part = change.target.parts[name]
    if name not in change.source.parts:
        return part.start_without_effect(change.target)
    if name in ATTENTION_PARTS and change.differs(name):
        return "the part that the model has learned would compute something else"
    trained = dict(change.source.parts[name].named_parameters())
    for key, new in part.named_parameters():
        old = trained.get(key, new)
        kind = part.shard_dim(key)
        if old.shape != new.shape and kind == "inner":
            new[: len(old)] = old  # the weights that read the others are 0
        elif old.shape != new.shape:
            new.copy_(_copy_heads(old, *change.heads(kind)))
    return part.refuse_change(change.before, change.after)


def _unchanged(name: str, reason: str) -> Callable[[LayerChange], str | None]:
    value = attrgetter(name)
    return lambda change: reason if value(change.before) != value(change.after) else None


# A rule for each switch of a layer, in the order in which factors are multiplied into the weights
LAYER_RULES: dict[str, Callable[[LayerChange], str | None]] = {
    "sliding_window": _unchanged("sliding_window", "queries would see other keys"),
    "query_projection": _rule_of_projection("query"),
    "key_projection": _rule_of_projection("key"),
    "value_projection": _rule_of_projection("value"),
    "projection_bottleneck_size": _projection_bottleneck_size,
    "projection_activation": _projection_activation,
    "qk_norm": _qk_norm,
    "attention_scaling": _attention_scaling,
    "attention_activation": _unchanged("activation.name", "the attention weights would change"),
    "attention_normalization": _attention_normalization,
    "linear_attention_decay": _unchanged("linear_attention_decay", "earlier tokens would count more, or less"),
    "attention_sink": _attention_sink,
    "head_projection": _head_projection,
    "attention_output_scaling": _attention_output_scaling,
    "attention_output_activation": _unchanged("attention_output_activation", "what passes the heads would change"),
    "attention_gate": _attention_gate,
}
for _field in (*ATTENTION_PARTS, "attention_parts"):
    LAYER_RULES.setdefault(_field, _rule_of_part(_field))

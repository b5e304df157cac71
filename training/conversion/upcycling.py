"""Changes the switches of a trained model without changing its outputs, so that fine-tuning goes on from there.

New parameters start where they have no effect and yet have a gradient: `f` of an upcycled query after a gain of 0, a gate at
1/2 with the output projection doubled, a fourth matrix at the identity. A switch without such a start is refused.

Letters of shapes: d is `hidden_size`, r is an inner width, h the heads.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from modeling_nlq import NLQConfig, NLQForSequenceClassification
from modeling_nlq.attention_projections_nlq import NLQAttentionProjections
from modeling_nlq.projections_nlq import PROJECTIONS, NLQBottleneck
from modeling_nlq.training.files import check_keys


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Training or generation reads these fields; a forward pass in evaluation mode does not
_WITHOUT_EFFECT = {
    "attention_dropout",
    "embedding_dropout",
    "initializer_range",
    "residual_dropout",
    "use_cache",
    *_TOKEN_IDS,  # a rule below has an exception
}
# Fields of the whole model that cannot change
_FIXED = {
    "head_dim": "it is the width of the weights of every head",
    "hidden_size": "it is the width of all weights",
    "num_attention_heads": "the weights are those of this number of heads",
    "num_hidden_layers": "the weights are those of this number of layers",
    "vocab_size": "a new token would take probability from the existing tokens",
    "norm_position": "the norms of the trained model are in other places",
    "position_embedding": "the weights were trained with other position embeddings",
    "rope_parameters": "the weights were trained with other angles",
}
_OTHER_FUNCTION = {
    "hidden_act": "the MLPs would compute something else",
    "layer_norm_eps": "every norm would compute something else",
    "residual_activation": "the residual stream would change",
    "sublayer_activation": "the inputs of the sub-layers would change",
}


@dataclass(frozen=True)
class LayerChange:
    """One layer before and after.

    Attributes:
        before, after: configuration of the layer.
        source: its attention, which stays unchanged.
        target: the new attention, which has every parameter of the same name and shape.
    """

    before: NLQConfig
    after: NLQConfig
    source: NLQAttentionProjections
    target: NLQAttentionProjections

    def differs(self, field: str) -> bool:
        """Tells whether a field changes its value."""
        return getattr(self.before, field) != getattr(self.after, field)


def upcycle(model: PreTrainedModel, switches: dict[str, Any] | None = None) -> PreTrainedModel:
    """Makes a new model with the same outputs and other switches; by default `upcycled` queries, `X W + f(X)` with `f = 0`.

    Args:
        model: an NLQ model; it stays unchanged.
        switches: fields of `NLQConfig` and their new values.

    Raises:
        ValueError: for an unknown field, or a value that would change the outputs.
    """
    switches = {"query_projection": "upcycled"} if switches is None else switches
    if not isinstance(model.config, NLQConfig):
        raise ValueError(f"a model of type {model.config.model_type!r} is no NLQ model; convert it first")
    values = model.config.to_dict()
    check_keys("model", switches, {*NLQConfig.__annotations__, "per_layer_config"})
    if "per_layer_config" not in switches and values.get("per_layer_config"):
        # A switch is set in all layers, also in those with a value of their own
        layers = values["per_layer_config"].items()
        kept = {index: {name: value for name, value in own.items() if name not in switches} for index, own in layers}
        values["per_layer_config"] = {index: own for index, own in kept.items() if own} or None
    new, lost = restructure(model, NLQConfig(**{**values, **switches}))
    if lost:
        raise ValueError(f"the model would not compute the same any more: {'; '.join(lost)}")
    return new


def restructure(model: PreTrainedModel, config: NLQConfig) -> tuple[PreTrainedModel, list[str]]:
    """Makes a new model of another configuration that computes the same as far as possible.

    Args:
        model: an NLQ model; it stays unchanged.
        config: a configuration of the same shape.

    Returns:
        The new model, in evaluation mode, and a list of the differences, in words.

    Raises:
        ValueError: if the weights do not fit the new configuration.
    """
    before = model.config
    for field, reason in _FIXED.items():
        if getattr(before, field) != getattr(config, field) and not (
            field == "rope_parameters" and config.position_embedding != "rope"
        ):
            raise ValueError(_refusal(field, getattr(before, field), getattr(config, field), reason))
    for field in NLQConfig.__annotations__.keys() - _known_fields():
        if getattr(before, field) != getattr(config, field):
            raise ValueError(
                _refusal(field, getattr(before, field), getattr(config, field), "no rule says how to keep the function")
            )
    new = type(model)(config).to(model.device, model.dtype).eval()
    if getattr(model, "generation_config", None) is not None:
        new.generation_config = copy.deepcopy(model.generation_config)
        for field in _TOKEN_IDS:
            if getattr(before, field) != getattr(config, field):
                setattr(new.generation_config, field, getattr(config, field))
    lost = [
        _refusal(field, getattr(before, field), getattr(config, field), reason)
        for field, reason in _OTHER_FUNCTION.items()
        if getattr(before, field) != getattr(config, field)
    ]
    with torch.no_grad():
        state = model.state_dict()
        for name, value in new.state_dict().items():
            if name in state and state[name].shape == value.shape:
                value.copy_(state[name])
        for rule in _MODEL_RULES.values():
            lost += rule(model, new)
        # A configuration for each layer, whether they differ or not
        before_layers, after_layers = list(before.per_layer_config), list(config.per_layer_config)
        for index, (old_layer, new_layer) in enumerate(zip(model.base_model.layers, new.base_model.layers)):
            change = LayerChange(before_layers[index], after_layers[index], old_layer.self_attn, new_layer.self_attn)
            for field, rule in _LAYER_RULES.items():
                if reason := rule(change):
                    text = _refusal(field, getattr(change.before, field), getattr(change.after, field), reason)
                    lost.append(f"layer {index}: {text}" if before.is_heterogeneous or config.is_heterogeneous else text)
    return new, list(dict.fromkeys(lost))


def _known_fields() -> set[str]:
    return {*_WITHOUT_EFFECT, *_FIXED, *_OTHER_FUNCTION, *_MODEL_RULES, *_LAYER_RULES}


def _refusal(field: str, before: Any, after: Any, reason: str) -> str:
    return f"{field}={before!r} cannot become {after!r}: {reason}"


# Rules of the whole model: they take the old model and the new one, and return what is lost


def _pad_token_id(model: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    before, after = model.config.pad_token_id, new.config.pad_token_id
    if before == after or not isinstance(model, NLQForSequenceClassification):
        return []
    return [
        _refusal("pad_token_id", before, after, "a sequence classifier reads its answer at the last token that is not padding")
    ]


def _num_key_value_heads(model: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    before, after = model.config.num_key_value_heads, new.config.num_key_value_heads
    if after % before:
        reason = "only a multiple gives every group of query heads the keys it had"
        raise ValueError(_refusal("num_key_value_heads", before, after, reason))
    return []  # the projections do the rest


def _use_bias(model: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    if model.config.use_bias and not new.config.use_bias:
        return [_refusal("use_bias", True, False, "the biases would be lost")]
    return []  # new biases start at 0


def _tie_word_embeddings(model: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not new.config.tie_word_embeddings or model.config.tie_word_embeddings:
        return []
    if torch.equal(head.weight, embedding.weight):
        return []
    raise ValueError(_refusal("tie_word_embeddings", False, True, "the LM head differs from the token embeddings"))


def _max_position_embeddings(model: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    before, after = model.base_model.embed_positions, new.base_model.embed_positions
    if before is None:
        return []
    if len(after.weight) < len(before.weight):
        text = "positions that the model has learned would be lost"
        raise ValueError(_refusal("max_position_embeddings", len(before.weight), len(after.weight), text))
    after.weight[: len(before.weight)] = before.weight
    return []


def _intermediate_size(model: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    before, after = model.config.intermediate_size, new.config.intermediate_size
    if after < before:
        raise ValueError(_refusal("intermediate_size", before, after, "inner units of the MLPs would be lost"))
    for old_layer, new_layer in zip(model.base_model.layers, new.base_model.layers):
        _widen(old_layer.mlp, new_layer.mlp)
    return []


_MODEL_RULES = {
    "pad_token_id": _pad_token_id,
    "num_key_value_heads": _num_key_value_heads,
    "use_bias": _use_bias,
    "tie_word_embeddings": _tie_word_embeddings,
    "max_position_embeddings": _max_position_embeddings,
    "intermediate_size": _intermediate_size,
}


def _widen(source: nn.Module, target: nn.Module) -> None:
    """Widens `W1: d x r`, `W2: r x d` to a larger r. The outputs of new inner units are multiplied by 0 (Chen et al. 2016)."""
    width = min(source.fc1.out_features, target.fc1.out_features)
    target.fc1.weight[:width] = source.fc1.weight[:width]
    target.fc2.weight.zero_()
    target.fc2.weight[:, :width] = source.fc2.weight[:, :width]
    if source.fc1.bias is not None and target.fc1.bias is not None:
        target.fc1.bias[:width] = source.fc1.bias[:width]


# Rules of a layer: they set the other parameters, and return the reason if the outputs change


def _rule_of_projection(kind: str) -> Callable[[LayerChange], str | None]:
    field = f"{kind}_projection"

    def carry(change: LayerChange) -> str | None:
        source, target = _projection_of(change.source, kind), _projection_of(change.target, kind)
        if kind != "query" and change.differs("num_key_value_heads"):
            source = copy.deepcopy(source)
            _expand_heads(source, change.before.num_key_value_heads, change.after.num_key_value_heads)
        return _carry_projection(source, target, getattr(change.before, field), getattr(change.after, field))

    return carry


class _Terms(NamedTuple):
    """The terms of one projection that have weights."""

    linear: nn.Linear | None
    bottleneck: NLQBottleneck | None


def _projection_of(attention: nn.Module, kind: str) -> _Terms:
    return _Terms(getattr(attention, f"{kind[0]}_proj"), getattr(attention, f"{kind[0]}_bottleneck"))


def _carry_projection(source: _Terms, target: _Terms, before: str, after: str) -> str | None:
    old, new = PROJECTIONS[before], PROJECTIONS[after]
    reason = None
    if old.bottleneck and not new.bottleneck:
        reason = "the bottleneck f(X) would be lost"
    if not new.linear and (old.linear or old.identity != new.identity):
        reason = "it has no matrix that could hold X W, or X"

    if new.linear:
        from_, into = source.linear, target.linear
        # In float64: X + X W is X (I + W) up to one rounding
        weight = torch.zeros_like(into.weight, dtype=torch.float64) if from_ is None else from_.weight.double()
        if old.identity != new.identity:
            weight = weight + (1 if old.identity else -1) * torch.eye(len(weight), dtype=torch.float64, device=weight.device)
        into.weight.copy_(weight)
        if from_ is not None and from_.bias is not None and into.bias is not None:
            into.bias.copy_(from_.bias)
    if new.bottleneck and old.bottleneck:
        from_, into = source.bottleneck, target.bottleneck
        into.input_norm.load_state_dict(from_.input_norm.state_dict())
        _widen(from_, into)
        for old_module, new_module in ((from_.fc2, into.fc2), (from_.output_norm, into.output_norm)):
            for name, parameter in old_module.named_parameters():
                if getattr(new_module, name) is not None and (old_module, name) != (from_.fc2, "weight"):
                    getattr(new_module, name).copy_(parameter)
    elif new.bottleneck:
        # The gain has a gradient at once, the parameters before it from the first step on
        output_norm = target.bottleneck.output_norm
        output_norm.weight.zero_()
        if output_norm.bias is not None:
            output_norm.bias.zero_()
    return reason


def _has_bottlenecks(change: LayerChange) -> bool:
    """Tells whether some projection has a bottleneck before and after."""
    fields = ("query_projection", "key_projection", "value_projection")
    return any(all(PROJECTIONS[getattr(side, field)].bottleneck for side in (change.before, change.after)) for field in fields)


def _projection_bottleneck_size(change: LayerChange) -> str | None:
    is_narrower = change.after.projection_bottleneck_size < change.before.projection_bottleneck_size
    return "inner units that the model has learned would be lost" if is_narrower and _has_bottlenecks(change) else None


def _projection_activation(change: LayerChange) -> str | None:
    is_other = change.differs("projection_activation") and _has_bottlenecks(change)
    return "the bottlenecks that the model has learned would compute something else" if is_other else None


def _expand_heads(terms: _Terms, before: int, after: int) -> None:
    """Gives each group of query heads that shared a key or value head copies of it, in place."""
    modules = [terms.linear]
    if terms.bottleneck is not None:
        modules += [terms.bottleneck.fc2, terms.bottleneck.output_norm]
    for module in filter(None, modules):
        for parameter in module.parameters(recurse=False):
            heads = parameter.data.unflatten(0, (before, -1))
            parameter.data = heads.repeat_interleave(after // before, dim=0).flatten(0, 1)


def _attention_scaling(change: LayerChange) -> str | None:
    before, after = change.before.score_scaling, change.after.score_scaling
    if before == after:
        return None
    if after == 0.0:
        return "all scores would be 0"
    if change.target.q_norm is not None:
        scaled = [next(change.target.q_norm.parameters())]
    else:
        if PROJECTIONS[change.after.key_projection].identity:
            return f"key_projection={change.after.key_projection!r} has no weights that could take over the factor"
        key = _projection_of(change.target, "key")
        modules = [key.linear, None if key.bottleneck is None else key.bottleneck.output_norm]
        scaled = [parameter for module in filter(None, modules) for parameter in module.parameters()]
    for parameter in scaled:
        parameter.mul_(before / after)
    return None


def _attention_gate(change: LayerChange) -> str | None:
    if not change.differs("attention_gate"):
        return None
    if change.before.attention_gate is not None:
        return "the gate that the model has learned would be lost"
    change.target.gate_proj.weight.zero_()
    change.target.o_proj.weight.mul_(2.0)  # sigmoid(0) = 1/2
    return None


def _attention_output_scaling(change: LayerChange) -> str | None:
    if not change.differs("attention_output_scaling"):
        return None
    before, after = (
        1.0 if scaling is None else scaling for scaling in (change.source.output_scaling, change.target.output_scaling)
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
    if change.before.attention_output_activation is not None or change.before.attention_gate == "elementwise":
        return "an activation or gate after the learned matrices prevents moving them into the output projection"
    # A head's output x passes (x W_h) W_o
    heads = change.target.o_proj.weight.unflatten(1, (-1, change.target.head_dim))
    change.target.o_proj.weight.copy_(torch.einsum("ohe,hde->ohd", heads, change.source.head_proj.weight).flatten(1))
    return None


def _attention_sink(change: LayerChange) -> str | None:
    before, after = change.before.attention_sink, change.after.attention_sink
    if before == after or (before, after) == ("zero", "learned"):  # a learned sink starts at 0
        return None
    if before is None:
        return "a new sink changes the weights unless it starts at minus infinity, where its gradient is 0"
    return "the weights would sum to another number"


def _attention_activation(change: LayerChange) -> str | None:
    return "the attention weights would change" if change.source.activation.name != change.target.activation.name else None


def _attention_normalization(change: LayerChange) -> str | None:
    before, after = (side.attention_normalization or side.activation.normalization for side in (change.before, change.after))
    if change.before.activation.name == change.after.activation.name and before != after:
        return "the attention weights would change"
    return None


def _unchanged(field: str, reason: str) -> Callable[[LayerChange], str | None]:
    return lambda change: reason if change.differs(field) else None


# A rule for each switch of a layer, in the order in which their factors are multiplied into the weights
_LAYER_RULES: dict[str, Callable[[LayerChange], str | None]] = {
    "query_projection": _rule_of_projection("query"),
    "key_projection": _rule_of_projection("key"),
    "value_projection": _rule_of_projection("value"),
    "projection_bottleneck_size": _projection_bottleneck_size,
    "projection_activation": _projection_activation,
    "qk_norm": _unchanged("qk_norm", "queries and keys would lose or regain their lengths"),
    "attention_scaling": _attention_scaling,
    "attention_activation": _attention_activation,
    "attention_normalization": _attention_normalization,
    "linear_attention_decay": _unchanged("linear_attention_decay", "earlier tokens would count more, or less"),
    "attention_sink": _attention_sink,
    "head_projection": _head_projection,
    "attention_output_scaling": _attention_output_scaling,
    "attention_output_activation": _unchanged("attention_output_activation", "what passes the heads would change"),
    "attention_gate": _attention_gate,
}


def largest_difference(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """The largest difference between the outputs of two models on random tokens, in float32, relative to the largest output.

    Args:
        model: the reference.
        other: a model with the same vocabulary and kind of head.
    """
    config = model.config
    length = min(32, config.max_position_embeddings)
    tokens = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, second = (_in_float32(each)(input_ids=tokens, use_cache=False)[0] for each in (model, other))
    return float((first - second).abs().max() / first.abs().max().clamp(min=torch.finfo(first.dtype).tiny))


def _in_float32(model: PreTrainedModel) -> PreTrainedModel:
    return model if model.dtype == torch.float32 else copy.deepcopy(model).float()

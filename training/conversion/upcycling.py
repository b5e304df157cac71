"""Changes the switches of a trained model without changing its outputs, so that fine-tuning continues from there.

New parameters start at values without effect but with a gradient, such as a gain of 0 after `f` of an upcycled query.
"""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

from modeling_nlq import NLQConfig
from modeling_nlq.parts_builtin_nlq import ATTENTION_PARTS

from ..files import check_keys
from .switch_rules import (
    BIASED_PARTS,
    FUNCTIONS,
    LAYER_RULES,
    MODEL_FIELDS,
    LayerChange,
    carry_layer,
    carry_model,
    refusals,
)


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# A forward pass in evaluation mode does not read these fields
_TRAINING_FIELDS = {"attention_dropout", "embedding_dropout", "initializer_range", "residual_dropout", "use_cache"}
# A part's field has the name of its row
_FIELDS = NLQConfig.__annotations__.keys() | ATTENTION_PARTS.keys()
_CHANGEABLE = {
    *(*_TRAINING_FIELDS, *_TOKEN_IDS, *MODEL_FIELDS, *FUNCTIONS, *LAYER_RULES, *ATTENTION_PARTS),
    *("attention_parts", "attention_parts_code", "rope_parameters"),
}


def changed(config: NLQConfig, switches: dict[str, Any]) -> NLQConfig:
    """Makes a configuration with other switches in all layers; raises `ValueError` for an unknown field."""
    check_keys("model", switches, {*_FIELDS, "per_layer_config"})
    values = config.to_dict()
    layers = {}
    for index, fields in (values.get("per_layer_config") or {}).items():
        if kept := {name: value for name, value in fields.items() if name not in switches}:
            layers[index] = kept
    return NLQConfig(**{**values, "per_layer_config": layers or None, **switches})


def only_adds(before: NLQConfig, after: NLQConfig) -> bool:
    """Tells whether every parameter keeps its value: at most, `linear` projections become `upcycled`."""
    if before.num_hidden_layers != after.num_hidden_layers or not _have_same_angles(before, after):
        return False
    if any(before.has_bias(part) != after.has_bias(part) for part in BIASED_PARTS):
        return False
    fields = _FIELDS - _TRAINING_FIELDS - {"rope_parameters", *(f"{part}_bias" for part in BIASED_PARTS)}
    for layers in zip(before.per_layer_config, after.per_layer_config):
        for field in fields:
            old, new = (getattr(layer, field) for layer in layers)
            if old != new and not (field.endswith("_projection") and (old, new) == ("linear", "upcycled")):
                return False
    return True


def restructure(model: PreTrainedModel, config: NLQConfig) -> tuple[PreTrainedModel, list[str]]:
    """Makes a model of another configuration in evaluation mode, and lists its differences in words.

    Raises `ValueError` as `check_change`.
    """
    before = model.config
    check_change(before, config)
    # Not `.to(dtype)`, which would round the angles of rotary positions too
    new = type(model)._from_config(config, dtype=model.dtype).to(model.device).eval()
    if getattr(model, "generation_config", None) is not None:
        new.generation_config = copy.deepcopy(model.generation_config)
        for field in _TOKEN_IDS:
            if getattr(before, field) != getattr(config, field):
                setattr(new.generation_config, field, getattr(config, field))
    with torch.no_grad():
        state = model.state_dict()
        for name, value in new.state_dict().items():
            if name in state and state[name].shape == value.shape:
                value.copy_(state[name])
        lost = carry_model(model, new)
        configs = zip(before.per_layer_config, config.per_layer_config)
        layers = zip(model.base_model.layers, new.base_model.layers)
        changes = [LayerChange(*pair, old.self_attn, new.self_attn) for pair, (old, new) in zip(configs, layers)]
        lost += _by_layer(list(map(carry_layer, changes)))
    return new, lost


def check_change(before: NLQConfig, after: NLQConfig) -> None:
    """Raises `ValueError` for fields that change without a rule for it."""
    reasons = {}
    if not _have_same_angles(before, after):
        name = "rope_parameters" if before.rope_parameters != after.rope_parameters else "max_position_embeddings"
        reasons[name] = "the weights were trained with other angles"
    if before.has_learned_positions and after.max_position_embeddings < before.max_position_embeddings:
        reasons["max_position_embeddings"] = "learned positions would be lost"
    if after.tie_word_embeddings:
        reasons["tie_word_embeddings"] = "the LM head would be lost"
    if after.intermediate_size < before.intermediate_size:
        reasons["intermediate_size"] = "inner units would be lost"
    if after.num_key_value_heads % before.num_key_value_heads:
        reasons["num_key_value_heads"] = "only a multiple gives every group of query heads the keys it had"
    fixed = sorted(_FIELDS - _CHANGEABLE)
    of_layers = []
    for layers in zip(before.per_layer_config, after.per_layer_config):
        texts = dict.fromkeys(fixed, "the weights were trained with the former")
        if layers[1].num_query_heads < layers[0].num_query_heads:
            texts |= dict.fromkeys(ATTENTION_PARTS, "heads of queries would be lost")
        of_layers.append(refusals(*layers, texts))
    if refused := [*refusals(before, after, reasons), *_by_layer(of_layers)]:
        raise ValueError("; ".join(refused))


def _by_layer(reasons: list[list[str]]) -> list[str]:
    """Joins equal reasons, with the layers' numbers unless that is all."""
    joined = []
    for text in dict.fromkeys(text for of_layer in reasons for text in of_layer):
        layers = [str(index) for index, of_layer in enumerate(reasons) if text in of_layer]
        prefix = f"layer{'s' if len(layers) > 1 else ''} {', '.join(layers)}: " if len(layers) < len(reasons) else ""
        joined.append(prefix + text)
    return joined


def _have_same_angles(before: NLQConfig, after: NLQConfig) -> bool:
    """Tells whether the second model rotates queries and keys as the first, or not at all."""
    if not after.has_rotary_positions or not before.has_rotary_positions:
        return not after.has_rotary_positions
    first, second = (GPTNeoXRotaryEmbedding(config) for config in (before, after))
    return first.attention_scaling == second.attention_scaling and torch.equal(first.inv_freq, second.inv_freq)


def largest_difference(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """Returns the largest difference of two models' outputs in float32 on random tokens, relative to the largest."""
    config = model.config
    length = min(32, config.max_position_embeddings)
    tokens = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, second = (copy.deepcopy(each).float()(input_ids=tokens, use_cache=False)[0] for each in (model, other))
    return float((first - second).abs().max() / first.abs().max().clamp(min=torch.finfo(first.dtype).tiny))

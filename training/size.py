"""Counts the parameters and FLOPs of a model, and checks weights against it, on the meta device."""

import contextlib
import copy
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import get_layer_types_and_kwargs

from modeling_nlq import NLQConfig, NLQSeq2SeqConfig
from modeling_nlq.cache_nlq import LAYER_TYPE
from modeling_nlq.parts_base_nlq import AttentionPart
from modeling_nlq.parts_builtin_nlq import parts_of

from .text import check_number, one_line


@dataclass
class Size:
    """The number of a model's parameters, tied ones once, and their cost.

    Attributes:
        non_embedding: without token embeddings, learned positions, and LM head.
        flops_per_token: of forward and backward for a token, of source or target, of a full context.
        trained: parameters that are not frozen.
    """

    total: int
    non_embedding: int
    flops_per_token: int
    trained: int


class ModelKind(Enum):
    """Kinds of language models, each with its Auto class."""

    DECODER = "a decoder", AutoModelForCausalLM
    ENCODER = "an encoder", AutoModelForMaskedLM
    ENCODER_DECODER = "an encoder and decoder", AutoModelForSeq2SeqLM

    def __init__(self, description: str, auto_class: type):
        self.description = description
        self.auto_class = auto_class


def auto_class_of(config: PreTrainedConfig) -> type:
    return kind_of(config).auto_class


def kind_of(config: PreTrainedConfig) -> ModelKind:
    if config.is_encoder_decoder and type(config) in AutoModelForSeq2SeqLM._model_mapping:
        return ModelKind.ENCODER_DECODER
    if not getattr(config, "is_causal", True):
        return ModelKind.ENCODER
    if type(config) not in AutoModelForMaskedLM._model_mapping:
        return ModelKind.DECODER
    # BERT is in both mappings; it is an encoder unless `is_decoder` is set
    is_plain = getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder
    is_encoder = is_plain or type(config) not in AutoModelForCausalLM._model_mapping
    return ModelKind.ENCODER if is_encoder else ModelKind.DECODER


def text_config_of(config: PreTrainedConfig, half: str = "decoder") -> PreTrainedConfig:
    part = getattr(config, half) if half in config.sub_configs else config
    return part.get_text_config(decoder=True) if part.sub_configs else part


def context_of(config: PreTrainedConfig, half: str = "decoder") -> int | None:
    """Returns the context length of a model or a half; `None` without one (T5, Mamba)."""
    part = text_config_of(config, half)
    for name in ("max_position_embeddings", f"max_{half}_position_embeddings", "max_seq_len", "max_target_positions"):
        if (length := getattr(part, name, None)) is not None:
            return length if length > 0 else None  # XLNet has -1, any length
    return None


def vocabulary_of(config: PreTrainedConfig) -> int:
    """Returns the smaller vocabulary size of the halves."""
    return min(text_config_of(config, half).vocab_size or 0 for half in ("encoder", "decoder"))


def positions_of(config: PreTrainedConfig, half: str = "decoder") -> int | None:
    """Returns the most tokens that the positions of a model or a half allow; `None` without a limit."""
    part, positions = text_config_of(config, half), context_of(config, half)
    if isinstance(part, NLQConfig):
        return positions if part.has_learned_positions else None
    if positions is None or getattr(part, "rope_parameters", None):
        return None
    is_encoder = type(part) in AutoModelForMaskedLM._model_mapping and not part.is_encoder_decoder
    if not is_encoder or getattr(part, "pad_token_id", None) is None:
        return positions
    # RoBERTa and similar models start to count positions after the id of the pad token
    for name, module in empty_model(part).named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return positions - module.padding_idx - 1
    return positions


def empty_model(
    config: PreTrainedConfig,
    attn_implementation: str | None = "eager",
    model_class: type[PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """Makes a (language) model on the meta device; raises `ValueError` if Transformers cannot."""
    config = copy.deepcopy(config)  # it may belong to a model in use
    try:
        with torch.device("meta"):
            if model_class is not None:
                return model_class(config)
            return auto_class_of(config).from_config(config, attn_implementation=attn_implementation)
    except (AssertionError, AttributeError, NotImplementedError) as error:
        if isinstance(config, NLQConfig | NLQSeq2SeqConfig):
            raise
        name = type(config).__name__
        raise ValueError(f"Transformers makes no language model of this {name}: {one_line(error)}") from error


def measure(
    config: PreTrainedConfig,
    context: int | Sequence[int] | None = None,
    attn_implementation: str | None = "eager",
    prepare: Callable[[PreTrainedModel], PreTrainedModel] | None = None,
) -> Size:
    """Counts the parameters, and the FLOPs per token of a full context.

    A weight of a matrix costs 2 operations per token forward and 4 backward, or 2 backward if it is frozen. Each
    product with a key or value costs 6 for each of the `head_dim` elements, without discount for causality (Chowdhery
    et al. 2022, appendix B). Linear attention has `head_dim` such products per head, to read its state and to write
    it; the delta rule also to read what a key replaces. Norms, activations and the softmax are not counted. All
    experts of a mixture count.

    `context` is in tokens, of source and target for a pair, and by default `context_of` the model. `prepare` changes
    the model first. Raises `ValueError` or `ImportError` if the model cannot be made, or does not say its context
    length.
    """
    for length in context if isinstance(context, Sequence) else [context]:
        check_number("context", length, 1)
    if (context or context_of(config)) is None and hasattr(text_config_of(config), "num_attention_heads"):
        name = type(config).__name__
        raise ValueError(f"context=None: a {name} does not say how long a text is; give --context, in tokens")
    model = empty_model(config, attn_implementation)
    if prepare is not None:
        with torch.device("meta"):
            model = prepare(model)
    return size_of(model, context)


def shapes_of(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in empty_model(config).named_parameters()}


def parts_in(config: PreTrainedConfig) -> list[type[AttentionPart]]:
    """Returns the attention parts of all layers, in order."""
    found = {}
    for half in [getattr(config, name) for name in config.sub_configs] or [config]:
        for layer in half.attention_configs if isinstance(half, NLQConfig) else ():
            found |= dict.fromkeys(parts_of(layer))
    return list(found)


def freeze_all_but(model: PreTrainedModel, names: Collection[str]) -> None:
    """Freezes all other parameters; raises `ValueError` if the model lacks a name."""
    parameters = dict(model.named_parameters())
    if unknown := sorted(set(names) - parameters.keys()):
        raise ValueError(f"{type(model).__name__} has no parameter {unknown[0]!r} that could be trained")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in names)


def size_of(model: PreTrainedModel, context: int | Sequence[int] | None = None) -> Size:
    """Measures as `measure`, but attention only with a context length."""
    config, head = model.config, model.get_output_embeddings()
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    if head is not None:
        embeddings.add(id(head.weight))
    body = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in embeddings}

    halves = _halves(config)
    lengths = context if isinstance(context, Sequence) else [context] * len(halves)
    lengths = [length or context_of(config, half or "decoder") for length, half in zip(lengths, halves, strict=True)]
    source, target = lengths[0] or 1, lengths[-1] or 1
    calls = {}  # where a token is multiplied by a matrix more than once
    for half, half_config in halves.items():
        earlier = 1  # outputs on the residual stream, with the embeddings
        for index, layer in enumerate(half_config.per_layer_config if isinstance(half_config, NLQConfig) else ()):
            for part in parts_of(layer):
                for name, count in part.calls_per_token(layer, index, earlier).items():
                    calls[f"{half and '.' + half}.layers.{index}.self_attn.{name}."] = count
            earlier += layer.number_of_sublayers
    operations = 0 if head is None else target * _operations(head.weight)
    for name, parameter in body.items():
        if parameter.ndim >= 2:
            cost = _operations(parameter)
            for layer, count in calls.items():
                if layer in f".{name}":
                    cost = round(count * cost)
            operations += cost * (source if _OF_SOURCE.search(f".{name}") else target)
    if None not in lengths:
        for (half, half_config), length in zip(halves.items(), lengths):
            operations += 6 * _attention_products(half, half_config, length, source)
    return Size(
        total=model.num_parameters(),
        non_embedding=sum(parameter.numel() for parameter in body.values()),
        flops_per_token=round(operations / (target if len(halves) == 1 else source + target)),
        trained=model.num_parameters(only_trainable=True),
    )


# Matrices that multiply tokens of the source: the encoder, and keys and values in cross-attention, as NLQ, T5Gemma,
# BERT, Bart and T5 name them
_OF_SOURCE = re.compile(
    r"^(?!.*\.decoder\.).*\.encoder\."
    r"|\.(cross_attn|crossattention|encoder_attn|EncDecAttention)\.(self\.)?(k|v|key|value)(_proj|_bottleneck)?\."
)


def _halves(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """Returns the configurations of the halves by name, or one by an empty name."""
    if not config.is_encoder_decoder:
        return {"": text_config_of(config)}
    halves = {
        name: text_config_of(config, name) if name in config.sub_configs else config.get_text_config(**{name: True})
        for name in ("encoder", "decoder")
    }
    if hasattr(config, "num_decoder_layers"):  # T5
        with contextlib.suppress(NotImplementedError):  # raised by ProphetNet
            halves["decoder"].num_hidden_layers = config.num_decoder_layers
    return halves


def _attention_products(half: str, config: PreTrainedConfig, length: int, source: int) -> int:
    layers = config.per_layer_config if hasattr(config, "num_hidden_layers") else []
    if not any(getattr(layer, "num_attention_heads", None) for layer in layers):
        return 0  # Mamba does not have attention
    # A window of an encoder has this many tokens on each side
    sides = 2 if half == "encoder" or kind_of(config) is ModelKind.ENCODER else 1
    width = _width(layers[0])  # of all cross-attention
    total = 0
    for layer, kind, sizes in zip(layers, *get_layer_types_and_kwargs(config)):
        products = length * min(length, sides * sizes.get("sliding_window", length) + sides - 1) * 2 * _width(layer)
        if kind == LAYER_TYPE:
            products = _products_with_state(layer, length, length)
        if not isinstance(config, NLQConfig):
            total += products + (length * source * 2 * _width(layer) if half == "decoder" else 0)
            continue
        total += products * _part_cost(layer)
        if (cross := layer.cross_attention_config) is not None:
            is_linear = cross.activation.kind == "linear"
            products = _products_with_state(cross, length, source) if is_linear else length * source * 2 * width
            total += products * _part_cost(cross)
    return round(total)


def _width(layer: PreTrainedConfig) -> int:
    heads = layer.num_attention_heads
    return heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)


def _products_with_state(layer: NLQConfig, queries: int, keys: int) -> int:
    # Heads of queries read the state of linear attention. Heads of keys write it, and by the delta rule first read it
    writes = (2 if layer.linear_attention_update == "delta" else 1) * keys
    return layer.head_dim**2 * (layer.num_attention_heads * queries + layer.num_key_value_heads * writes)


def _part_cost(layer: NLQConfig) -> float:
    # Parts may compute more heads, or wider values
    return math.prod(part.product_cost(layer) for part in parts_of(layer))


def _operations(matrix: torch.nn.Parameter) -> int:
    return (6 if matrix.requires_grad else 4) * matrix.numel()


def matching_intermediate_size(
    config: PreTrainedConfig,
    budget: Size,
    match: Literal["parameters", "flops"] = "parameters",
    context: int | None = None,
) -> int:
    """Returns the MLP width that brings a model nearest to a budget; raises `ValueError` without one."""
    if not getattr(config, "intermediate_size", None):
        name = type(config).__name__
        raise ValueError(f"match={match!r} widens intermediate_size, and {name} has none; leave match out")
    wider = copy.deepcopy(config)
    wider.intermediate_size += 1
    name = "non_embedding" if match == "parameters" else "flops_per_token"
    wanted, current, more = (
        getattr(size, name) for size in (budget, measure(config, context), measure(wider, context))
    )
    width = config.intermediate_size + round((wanted - current) / (more - current))
    if width < 1:
        raise ValueError(f"no MLP width brings the model down to {wanted:,} {name}")
    return width


def check_parameters(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises as `check_shapes`; tied parameters may be left out."""
    missing = model.all_tied_weights_keys.keys() - shapes.keys()
    check_shapes({name: tensor.shape for name, tensor in model.state_dict().items() if name not in missing}, shapes)


def check_shapes(expected: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises `ValueError` if parameters are missing, unknown, or have another shape."""
    check_names(expected.keys(), shapes.keys())
    for name, shape in expected.items():
        if tuple(shapes[name]) != tuple(shape):
            raise ValueError(f"{name} has the shape {tuple(shapes[name])}, and {tuple(shape)} is needed")


def check_names(expected: Set[str], names: Set[str]) -> None:
    wrong = {"missing": expected - names, "not known": names - expected}
    if problems := [f"{problem}: {listed(sorted(group))}" for problem, group in wrong.items() if group]:
        raise ValueError(f"the weights do not fit the configuration; {'; '.join(problems)}")


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(names[:8])}{more}"

"""Parameters of a model: how many there are, what they cost, and whether given weights fit. Nothing is allocated."""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from modeling_nlq import NLQConfig, NLQSeq2SeqConfig
from modeling_nlq.cache_nlq import LAYER_TYPE
from modeling_nlq.parts_base_nlq import AttentionPart
from modeling_nlq.parts_builtin_nlq import parts_of

from .text import check_number


@dataclass
class Size:
    """The size of a model, and its cost.

    Attributes:
        total: number of parameters; tied ones count once.
        non_embedding: the same without token embeddings, learned positions, and LM head.
        flops_per_token: floating-point operations of forward and backward for one token of a full context.
        trained: number of parameters that are not frozen.
    """

    total: int
    non_embedding: int
    flops_per_token: int
    trained: int


# What the models of an objective are, and their Auto classes
KINDS = {"causal": "a decoder", "masked": "an encoder", "seq2seq": "an encoder and decoder"}
AUTO_CLASSES = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM, "seq2seq": AutoModelForSeq2SeqLM}


def auto_class_of(config: PreTrainedConfig) -> type:
    """The Auto class of a configuration's language models."""
    return AUTO_CLASSES[objective_of(config)]


def objective_of(config: PreTrainedConfig) -> str:
    """What the language models of a configuration are trained for, an `objective` of recipes."""
    if config.is_encoder_decoder and type(config) in AutoModelForSeq2SeqLM._model_mapping:
        return "seq2seq"
    classes = AutoModelForCausalLM, AutoModelForMaskedLM
    is_of_decoders, is_of_encoders = (type(config) in each._model_mapping for each in classes)
    # BERT and its like are both: encoders, unless `is_decoder` says otherwise
    is_plain = getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder
    is_encoder = not getattr(config, "is_causal", True) or (is_of_encoders and (is_plain or not is_of_decoders))
    return "masked" if is_encoder else "causal"


def measure(
    config: PreTrainedConfig,
    context: int | None = None,
    attn_implementation: str | None = "eager",
    prepare: Callable[[PreTrainedModel], PreTrainedModel] | None = None,
) -> Size:
    """Counts the parameters, and the FLOPs per token of a full context.

    A weight of a matrix costs 2 operations a token forward and 4 backward, or 2 if it is frozen; each of the `2 * context`
    products of a head with keys and values per element of `head_dim` costs 6 (Chowdhery et al. 2022, appendix B: no discount
    for causality), as does, of linear attention, each of the `head_dim` products of a head that reads its state, and of one of
    keys that writes it. Norms, activations and the softmax are not counted. Of a mixture of experts, all count.

    Args:
        config: configuration of the model.
        context: the context length in tokens; by default `max_position_embeddings`.
        attn_implementation: any backend that the model can use; `None` is the model's own choice.
        prepare: applied to the model before it is measured, as `ResolvedRecipe.choose_trained`.

    Raises:
        ValueError, ImportError: if the model cannot be made with this backend.
    """
    check_number("context", context, 1)
    with torch.device("meta"):
        # `from_config` writes the backend into the configuration, which may belong to a model in use
        auto_class = auto_class_of(config)
        model = auto_class.from_config(copy.deepcopy(config), attn_implementation=attn_implementation)
        if prepare is not None:
            model = prepare(model)
    return size_of(model, context)


def shapes_of(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of a language model, by name."""
    with torch.device("meta"):
        model = auto_class_of(config).from_config(copy.deepcopy(config), attn_implementation="eager")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def parts_in(config: PreTrainedConfig) -> list[type[AttentionPart]]:
    """The attention parts that some layer of a model has, in the order in which they are applied."""
    halves = [getattr(config, name) for name in config.sub_configs] or [config]
    layers = [layer for half in halves if isinstance(half, NLQConfig) for layer in half.attention_configs]
    return list(dict.fromkeys(part for layer in layers for part in parts_of(layer)))


def freeze_all_but(model: PreTrainedModel, names: Collection[str]) -> None:
    """Freezes every parameter of a model but those of the given names; raises `ValueError` if it has none of a name."""
    parameters = dict(model.named_parameters())
    if unknown := sorted(set(names) - parameters.keys()):
        raise ValueError(f"{type(model).__name__} has no parameter {unknown[0]!r} that could be trained")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in names)


def size_of(model: PreTrainedModel, context: int | None = None) -> Size:
    """Measures a model with any head; it may be on the meta device."""
    config, head = model.config, model.get_output_embeddings()
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    if head is not None:
        embeddings.add(id(head.weight))
    parameters = list(model.parameters())
    body = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in embeddings}

    halves = [getattr(config, name) for name in config.sub_configs] if isinstance(config, NLQSeq2SeqConfig) else [config]
    calls = {
        f".{index}.self_attn.{name}.": count
        for half in halves
        for index, layer in enumerate(half.per_layer_config if isinstance(half, NLQConfig) else ())
        for part in parts_of(layer)
        for name, count in part.calls_per_token(layer).items()
    }
    matrix_operations = 0 if head is None else _operations(head.weight)
    for name, parameter in body.items():
        if parameter.ndim >= 2:
            share = next((count for layer, count in calls.items() if layer in name), 1)
            matrix_operations += round(share * _operations(parameter))
    return Size(
        total=sum(parameter.numel() for parameter in parameters),
        non_embedding=sum(parameter.numel() for parameter in body.values()),
        flops_per_token=matrix_operations + sum(6 * _products(half, context) for half in halves),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    )


def _products(config: PreTrainedConfig, context: int | None) -> int:
    """The products with keys and values per token of a decoder, with its cross-attention, or of an encoder."""
    layers = config.per_layer_config if isinstance(config, NLQConfig) else []
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    context = context or config.max_position_embeddings
    heads, key_value_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    products = [
        # The heads of queries read the state of linear attention, and those of keys write it
        head_dim * head_dim * (heads + key_value_heads)
        if kind == LAYER_TYPE
        else min(context, sizes.get("sliding_window", context)) * 2 * heads * head_dim
        for kind, sizes in zip(*get_layer_types_and_kwargs(config))
    ]
    # A layer's parts may compute more heads, or wider values
    costs = [math.prod(part.product_cost(layer) for part in parts_of(layer)) for layer in layers] or [1.0] * len(products)
    for cross in filter(None, (layer.cross_attention_config for layer in layers)):
        is_linear = cross.activation.kind == "linear"
        products.append(head_dim * head_dim * (heads + key_value_heads) if is_linear else context * 2 * heads * head_dim)
        costs.append(math.prod(part.product_cost(cross) for part in parts_of(cross)))
    return round(sum(cost * product for cost, product in zip(costs, products, strict=True)))


def _operations(matrix: torch.nn.Parameter) -> int:
    return (6 if matrix.requires_grad else 4) * matrix.numel()


def matching_intermediate_size(
    config: PreTrainedConfig, budget: Size, match: Literal["parameters", "flops"] = "parameters", context: int | None = None
) -> int:
    """Finds the MLP width that brings a model nearest to a budget.

    Args:
        config: configuration of the model.
        budget: the size to match.
        match: match the non-embedding parameters or the FLOPs per token.
        context: as in `measure`, for FLOPs.

    Raises:
        ValueError: if even a width of 1 exceeds it.
    """
    if config.sub_configs:
        raise ValueError(f"match={match!r} widens one MLP, and an encoder and decoder has two; leave match out")
    wider = copy.deepcopy(config)
    wider.intermediate_size += 1
    name = {"parameters": "non_embedding", "flops": "flops_per_token"}[match]
    wanted, own, own_wider = (getattr(size, name) for size in (budget, measure(config, context), measure(wider, context)))
    width = config.intermediate_size + round((wanted - own) / (own_wider - own))
    if width < 1:
        raise ValueError(f"no MLP width brings the model down to {wanted:,} {name}")
    return width


def check_parameters(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises `ValueError` that names the parameters that are missing, unknown, or of another shape than the model's.

    The model may be on the meta device, and `shapes` may leave out what is tied to another parameter.
    """
    expected = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    for name in model.all_tied_weights_keys.keys() - shapes.keys():
        expected.pop(name, None)
    check_shapes(expected, shapes)


def check_shapes(expected: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]]) -> None:
    """Raises `ValueError` that names the parameters that are missing, unknown, or of another shape."""
    check_names(expected.keys(), given.keys())
    for name, shape in expected.items():
        if tuple(given[name]) != tuple(shape):
            raise ValueError(f"{name} has the shape {tuple(given[name])}, and {tuple(shape)} is needed")


def check_names(expected: Set[str], given: Set[str]) -> None:
    """Raises `ValueError` that names the parameters that are missing and those that nothing needs."""
    found = {"missing": expected - given, "not known": given - expected}
    if problems := [f"{what}: {listed(sorted(names))}" for what, names in found.items() if names]:
        raise ValueError(f"the weights do not fit the configuration; {'; '.join(problems)}")


def listed(names: Sequence[str]) -> str:
    """The first eight names, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

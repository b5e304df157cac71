"""Sizes and costs of a configuration, without allocating it."""

import copy
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig


@dataclass
class Size:
    """What a model weighs.

    Attributes:
        total: number of parameters; tied ones count once.
        non_embedding: without token embeddings, learned positions, and LM head.
        flops_per_token: floating-point operations of forward and backward for one token of a full context.
    """

    total: int
    non_embedding: int
    flops_per_token: int


def measure(config: PreTrainedConfig, context: int | None = None) -> Size:
    """Parameters, and FLOPs per token in a context of `context` tokens (by default `max_position_embeddings`).

    A weight of a matrix costs 2 operations a token forward and 4 backward; so does each of the `2 * context` products of a
    head with keys and values per element of `head_dim` (Chowdhery et al. 2022, appendix B: no discount for causality).
    Norms, activations and the softmax are not counted.
    """
    with torch.device("meta"):
        # A copy, for the backend named here is written into the configuration, which may be that of a model in use
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    embeddings.add(id(model.get_output_embeddings().weight))
    parameters = list(model.parameters())
    body = [parameter for parameter in parameters if id(parameter) not in embeddings]

    matrix_weights = sum(parameter.numel() for parameter in body if parameter.ndim >= 2)
    matrix_weights += config.hidden_size * config.vocab_size
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head_elements = config.num_hidden_layers * config.num_attention_heads * head_dim
    products = 2 * (context or config.max_position_embeddings) * head_elements
    return Size(
        total=sum(parameter.numel() for parameter in parameters),
        non_embedding=sum(parameter.numel() for parameter in body),
        flops_per_token=6 * (matrix_weights + products),
    )


def matching_intermediate_size(config: PreTrainedConfig, non_embedding: int) -> int:
    """The MLP width that brings the model's non-embedding parameters nearest to a budget.

    Raises:
        ValueError: if even a width of 1 exceeds it.
    """
    per_unit = config.num_hidden_layers * (2 * config.hidden_size + int(config.use_bias))
    surplus = non_embedding - measure(config).non_embedding
    width = config.intermediate_size + round(surplus / per_unit)
    if width < 1:
        raise ValueError(f"no MLP width brings the model down to {non_embedding:,} non-embedding parameters")
    return width

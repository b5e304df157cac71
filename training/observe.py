"""Passes the call of each attention layer to a function while an NLQ model runs."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from modeling_nlq.backends_nlq import layer_mask
from modeling_nlq.configuration_nlq import AUTOMATIC
from modeling_nlq.masking_nlq import Visibility, make_visibility
from modeling_nlq.modeling_nlq import NLQAttention
from modeling_nlq.parts_base_nlq import AttentionCall


# The cosines and sines of rotary positions, if there are any
Positions = tuple[torch.Tensor, torch.Tensor] | None
Receive = Callable[[NLQAttention, AttentionCall, Positions], None]


def attention_layers(model: nn.Module) -> list[NLQAttention]:
    """Returns the attention layers; raises `ValueError` for a model that is not NLQ."""
    layers = [module for module in model.modules() if isinstance(module, NLQAttention)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no NLQ attention layers that could be shown or recorded")
    return layers


@torch.no_grad()
def observe_calls(model: PreTrainedModel, receive: Receive, input_ids: torch.Tensor, **inputs) -> ModelOutput:
    """Runs a model in evaluation mode, calls `receive` before each layer, and restores the model's state.

    `input_ids` are `(batch, length)`, without padding. Raises `ValueError` without NLQ attention layers.
    """
    layers = attention_layers(model)

    def before(layer: NLQAttention, positional: tuple, keywords: dict) -> None:
        *_, token_context = layer_mask(layer, keywords["attention_mask"], *positional)
        positions = keywords.get("position_embeddings") if layer.has_rotary_positions else None
        inputs = (*positional, token_context, keywords.get("first_values"), None, keywords.get("source"))
        receive(layer, layer.make_call(*inputs), positions)

    # The layers read the backend from their own configuration
    config = layers[0].config
    implementation = config._attn_implementation
    modes = [(module, module.training) for module in model.modules()]
    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    try:
        model.eval()
        # The automatic backend supports every activation and dtype, and does not compile
        config._attn_implementation = AUTOMATIC
        return model(input_ids=input_ids.to(model.device), use_cache=False, **inputs)
    finally:
        config._attn_implementation = implementation
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode


def visibility_of(
    layer: NLQAttention, query: torch.Tensor, key: torch.Tensor, segments: torch.Tensor | None = None
) -> Visibility:
    """Returns which keys each query of a layer, other than linear attention, sees in texts without padding.

    `query` and `key` are `(batch, heads, length, head_dim)`; `segments`, `(batch, length)`, marks packed documents.
    """
    window, sees_own_key = layer.visible_keys
    options = {"segments": segments, "sliding_window": window, "is_causal": layer.is_causal}
    visibility = make_visibility(query.shape[2], key.shape[2], 0, query.device, **options)
    return visibility if sees_own_key else visibility.excluding_self()

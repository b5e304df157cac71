"""The table of backends, and the choice of the backend that computes a layer.

`attention_activation` defines the weights, `attn_implementation` the way to compute them. A backend that cannot compute the
activation of a layer is an error. It never computes softmax instead.

This file decides which backend computes a layer: `choose_implementation` when a model is built or its backend is set,
`find_backend` for each layer and call, `make_mask` and `create_masks_for_generate` for the masks that a backend takes. A
backend itself refuses tensors that it cannot take, such as a dtype or a device. `choose_paged_implementation` chooses for
continuous batching.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    BlockMask,
    create_causal_mask,
    create_sliding_window_causal_mask,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import repeat_kv
from transformers.utils.generic import is_flash_attention_requested

from .activations_nlq import AttentionActivation
from .arguments_nlq import CACHE_NAME, choose_cache
from .attention_nlq import eager_attention_forward
from .configuration_nlq import AUTOMATIC, NLQConfig
from .cpp_nlq import is_plain_call
from .flex_nlq import FlexMask, flex_attention_with_log_forward
from .masking_nlq import Sequences, Visibility, boolean_mask
from .operators_nlq import autocast_dtype
from .tiled_cpp_nlq import has_kernels
from .tiled_nlq import softmax_attention_forward, tiled_attention_forward
from .triton_activations_nlq import triton_body
from .triton_nlq import triton_attention_forward


try:
    import adasplash
except ImportError:
    adasplash = None


def sdpa_with_sink_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Computes softmax by PyTorch's fused kernels, with the layer's sink if it has one.

    The sink is another key before all others, whose value is 0. A learned logit `b` needs another column: 1 in the sink's key,
    0 in the other keys, `b` in every query. More columns of 0 keep the width of the head a multiple of 8, which CUDA's kernels
    need. This adds only the term `exp(b)` to the denominator, so it is exact.

    Args:
        module: the attention layer.
        query: `(batch, heads, query, head_dim)`.
        key, value: `(batch, key_value_heads, key, head_dim)`.
        attention_mask: booleans `(batch, 1 or heads, query, key)`, or `None`. Without a mask, several queries see the keys up
            to their own index, counted from the first key, and a single query sees all keys.
        scaling: factor of the scores.
        dropout: probability of dropping a weight.

    Returns:
        The output `(batch, query, heads, head_dim)`, and no weights.
    """
    if query.shape[0] == 0:  # Transformers' function cannot infer a size there
        return eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout)[0], None
    if scaling <= 0.0:
        query, scaling = query * scaling, 1.0  # PyTorch's causal kernel scales after it hides keys: 0 times infinity is NaN
    if module.attention_sink is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    head_dim = query.shape[-1]
    pad = nn.functional.pad
    is_learned = module.attention_sink == "learned"
    columns = 8 - head_dim % 8 if is_learned else 0
    key, value = pad(key, (0, columns, 1, 0)), pad(value, (0, columns, 1, 0))
    if is_learned:
        # The query is scaled here, because the logit must not be
        logit = module.sink.to(query.dtype)[None, :, None, None].expand(*query.shape[:-1], 1)
        query, scaling = pad(torch.cat([query * scaling, logit], dim=-1), (0, columns - 1)), 1.0
        key[:, :, 0, head_dim] = 1.0
    is_aligned = attention_mask is None and query.shape[2] > 1
    if is_aligned:
        query = pad(query, (0, 0, 1, 0))  # a query at the index of the sink: each query still sees the keys up to its own
    elif attention_mask is not None:
        attention_mask = pad(attention_mask, (1, 0), value=True)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    return output[:, int(is_aligned) :, :, :head_dim].contiguous(), None


def sparse_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Visibility | torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Computes projections onto the simplex: entmax15 by the kernel of `adasplash` where it can, the rest as `eager` does.

    The kernel needs CUDA, no padding, packing or cache, a length that is a power of 2 and at least 64, and certain widths of
    the head. Its memory is linear in the length. Arguments and output are those of `eager_attention_forward`; there are no
    weights.
    """
    is_plain = attention_mask is None or (
        isinstance(attention_mask, Visibility) and attention_mask.key_is_valid is None and attention_mask.first_key is None
    )
    length, head_dim = query.shape[2:]
    fits = length == key.shape[2] >= 64 and length.bit_count() == 1 and head_dim in (16, 32, 64, 128, 256)
    is_entmax15 = module.activation.name == "entmax15" and dropout == 0.0
    if adasplash is not None and query.is_cuda and is_entmax15 and is_plain and fits:
        # It scales by 1 / sqrt(head_dim)
        inputs = [query * (scaling * math.sqrt(head_dim))]
        inputs += [repeat_kv(states, module.num_key_value_groups) for states in (key, value)]
        output = adasplash.adasplash(*(states.contiguous() for states in inputs), is_causal=True)
        return output.transpose(1, 2).contiguous(), None
    output, _ = eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    return output, None


@dataclass(frozen=True)
class AttentionBackend:
    """One row of the table of backends.

    Attributes:
        function: the attention function, with the arguments of Transformers' attention functions.
        computes: whether it computes an activation with an `attention_sink`.
        has_dropout: whether it drops weights in training.
        weights: the effect of `output_attentions=True`. `"returned"`: it returns the weights. `"omitted"`: it returns `None`
            instead, with a warning, as everywhere in Transformers. `"refused"`: an error.
        mask: the mask that it takes: a `"visibility"`, or one that Transformers makes, `"dense"`, `"block"` (a `FlexMask`) or
            `"padding"`.
        is_paged: whether it takes the paged cache of continuous batching, and then Transformers' own mask.
        is_portable: false if it calls operators or kernels that other runtimes lack. An exporting model uses another backend.
    """

    function: Callable
    computes: Callable[[AttentionActivation, str | None], bool]
    has_dropout: bool = True
    weights: Literal["returned", "omitted", "refused"] = "refused"
    mask: Literal["visibility", "dense", "block", "padding"] = "visibility"
    is_paged: bool = False
    is_portable: bool = True

    def can(self, activation: AttentionActivation, sink: str | None, dropout: float, needs_weights: bool) -> bool:
        """True if it can do everything that a layer needs in one call."""
        if not self.computes(activation, sink) or (needs_weights and self.weights == "refused"):
            return False
        return self.has_dropout or dropout == 0.0


def _softmax_without_sink(activation: AttentionActivation, sink: str | None) -> bool:
    return activation.name == "softmax" and sink is None


_flash_attention = AttentionBackend(
    flash_attention_forward,
    _softmax_without_sink,
    weights="omitted",
    mask="padding",
    is_paged=True,
    is_portable=False,
)
# Stands for functions that are not in the table, such as kernels of the Hub. Transformers' table has the function.
_other = _flash_attention
# Transformers' name for `eager` in continuous batching, which sets it while it runs. Messages do not offer it
PAGED_EAGER = "paged|eager"
ATTENTION_BACKENDS = {
    "eager": AttentionBackend(eager_attention_forward, lambda activation, sink: True, weights="returned"),
    PAGED_EAGER: AttentionBackend(eager_attention_forward, lambda activation, sink: True, weights="returned", is_paged=True),
    "sdpa": AttentionBackend(
        sdpa_with_sink_forward,
        lambda activation, sink: activation.name == "softmax",
        weights="omitted",
        mask="dense",
        is_paged=True,
    ),
    "flash_attention_2": _flash_attention,
    "flash_attention_3": _flash_attention,
    "flash_attention_4": _flash_attention,
    "flex_attention": AttentionBackend(
        flex_attention_with_log_forward,
        lambda activation, sink: activation.non_negative and activation.kind in ("softmax", "elementwise"),
        has_dropout=False,
        mask="block",
        is_portable=False,
    ),
    "nlq_tiled": AttentionBackend(
        tiled_attention_forward, lambda activation, sink: activation.is_elementwise, is_portable=False
    ),
    "nlq_softmax": AttentionBackend(
        softmax_attention_forward,
        lambda activation, sink: activation.name == "softmax" and sink is None,
        has_dropout=False,
        is_portable=False,
    ),
    "nlq_triton": AttentionBackend(
        triton_attention_forward,
        lambda activation, sink: activation.is_elementwise and triton_body(activation) is not None,
        is_portable=False,
    ),
    "nlq_sparse": AttentionBackend(
        sparse_attention_forward, lambda activation, sink: activation.kind == "simplex", is_portable=False
    ),
}
# The backends that the automatic choice tries, in this order. The last one computes everything. `nlq_triton` is not among them
# until its tests have passed on a GPU. `nlq_softmax` comes first where C++ code can compute.
PREFERENCE = ("sdpa", "nlq_tiled", "nlq_sparse", "eager")
# The same for continuous batching
PAGED_PREFERENCE = ("sdpa", PAGED_EAGER)
# Stands for `linear_attention`, which layers of that activation call themselves, whatever `attn_implementation` is.
LINEAR_ATTENTION = "linear_attention"


def choose_implementation(config: NLQConfig, requested: str | None) -> str | None:
    """Returns the value of `attn_implementation` for a model; `None` leaves the choice to Transformers.

    Args:
        config: the model's configuration.
        requested: the value that the user asked for, or `None`.

    Raises:
        ValueError: if the user asked for a backend that does not exist or that cannot compute the activation of some layer.
    """
    layers = _attention_layers(config)
    if requested is None:
        if config.output_attentions or any(activation.name != "softmax" for activation, _ in layers):
            return AUTOMATIC
        return None
    known = (*ATTENTION_BACKENDS, *ALL_ATTENTION_FUNCTIONS.valid_keys())
    if requested not in known:
        raise ValueError(
            f'Specified `attn_implementation="{requested}"` is not supported; use one of {_choices(ATTENTION_BACKENDS)}'
        )
    for layer in layers:
        if layer[0].kind != "linear":
            find_backend(requested, [index for index, other in enumerate(layers) if other == layer], *layer)
    return requested


def choose_paged_implementation(config: NLQConfig) -> str:
    """Returns the value of `attn_implementation` for continuous batching, from the value that is set.

    Raises:
        ValueError: if a layer is linear, if windows differ, or if the backend that is set takes no paged cache or cannot
            compute some layer.
    """
    layers = _attention_layers(config)
    if linear := [index for index, (activation, _) in enumerate(layers) if activation.kind == "linear"]:
        raise ValueError(
            f"attention_activation='linear_attention' (layer {', '.join(map(str, linear))}) has no continuous batching: the "
            "paged cache stores keys and values, and such a layer keeps a state instead; use generate"
        )
    windows = [layer.sliding_window for layer in config.per_layer_config]
    if len(set(windows)) > 1:
        raise ValueError(
            f"sliding_window={windows}: continuous batching of Transformers has one window for all layers; use generate, or "
            "the same window in each layer"
        )
    name = config._attn_implementation
    possible = [paged for paged in PAGED_PREFERENCE if all(ATTENTION_BACKENDS[paged].computes(*layer) for layer in layers)]
    if name == AUTOMATIC:
        return possible[0]
    paged = PAGED_EAGER if name == "eager" else name
    if not ATTENTION_BACKENDS.get(paged, _other).is_paged:
        choices = _choices("eager" if other == PAGED_EAGER else other for other in possible)
        raise ValueError(f"attn_implementation={name!r} has no continuous batching; use one of {choices}")
    return choose_implementation(config, paged)


def supports_flash_attention(config: NLQConfig) -> bool:
    """True if flash attention computes every layer, linear ones apart, which need no backend."""
    layers = [layer for layer in _attention_layers(config) if layer[0].kind != "linear"]
    return all(_flash_attention.computes(*layer) for layer in layers)


def _choices(backends: Iterable[str]) -> str:
    """Returns the names that a message offers, the automatic choice first."""
    return ", ".join((AUTOMATIC, *(name for name in backends if name != PAGED_EAGER)))


def _attention_layers(config: NLQConfig) -> list[tuple[AttentionActivation, str | None]]:
    """Returns the activation and the sink of each layer."""
    return [(layer.activation, layer.attention_sink) for layer in config.per_layer_config]


def find_backend(
    implementation: str | None,
    layers: Sequence[int],
    activation: AttentionActivation,
    sink: str | None,
    dropout: float = 0.0,
    needs_weights: bool = False,
    cpp_heads: tuple[torch.dtype, int] | None = None,
) -> str:
    """Returns the name of the backend that computes layers in one call.

    A name that is not in the table, such as that of a kernel on the Hub, counts as softmax without sinks, because such
    functions compute nothing else. An exporting model gets a portable backend, which computes the same weights with PyTorch's
    own operators.

    Args:
        implementation: the value of `attn_implementation`; `None` stands for `"eager"`.
        layers: the layers' numbers, for the message.
        activation: the layers' activation.
        sink: the layers' `attention_sink`.
        dropout: their dropout probability in this call.
        needs_weights: whether this call returns the weights.
        cpp_heads: the type and size of the call's heads if C++ code may compute with them.

    Raises:
        ValueError: if the implementation cannot do this. The message names those that can.
    """
    asked = (activation, sink, dropout, needs_weights)
    name = implementation or "eager"
    backend = ATTENTION_BACKENDS.get(name, _other)
    is_exporting = torch.compiler.is_exporting()
    if name == AUTOMATIC:
        preference = PREFERENCE
        # In this order, because only what is used is to be compiled
        if cpp_heads is not None and ATTENTION_BACKENDS["nlq_softmax"].can(*asked) and has_kernels(*cpp_heads):
            preference = ("nlq_softmax", *PREFERENCE)
        names = [name for name in preference if not needs_weights or ATTENTION_BACKENDS[name].weights == "returned"]
        names = [name for name in names if not is_exporting or ATTENTION_BACKENDS[name].is_portable]
        return next(name for name in names if ATTENTION_BACKENDS[name].can(*asked))
    if backend.can(*asked):
        return "eager" if is_exporting and not backend.is_portable else name
    if not backend.computes(activation, sink):
        refused = f"attention_activation={activation.name!r}" + (f" with attention_sink={sink!r}" if sink else "")
    elif needs_weights and backend.weights == "refused":
        refused = "the weights that output_attentions=True asks for"
    else:
        refused = f"attention_dropout={dropout}"
    choices = _choices(other for other, backend in ATTENTION_BACKENDS.items() if backend.can(*asked))
    raise ValueError(
        f"attn_implementation={name!r} cannot compute {refused} (layer {', '.join(map(str, layers))}); use one of {choices}"
    )


class BackendRequest(NamedTuple):
    """What a call of the model asks of the backends: arguments of `find_backend`."""

    implementation: str | None
    needs_weights: bool
    cpp_heads: tuple[torch.dtype, int] | None


def backend_request(
    config: NLQConfig, hidden_states: torch.Tensor, output_attentions: bool | None = None, **kwargs
) -> BackendRequest:
    """Returns what a call of the model asks of the backends.

    Args:
        config: the model's configuration.
        hidden_states: `(batch, query, hidden)`, the input of the first layer.
        output_attentions: an argument of the call; by default the configuration's value.
        kwargs: other arguments of the call.
    """
    needs_weights = config.output_attentions if output_attentions is None else output_attentions
    # PyTorch's own kernel is as fast for a single query
    may_use_cpp = hidden_states.shape[1] > 1 and hidden_states.numel() > 0 and is_plain_call(hidden_states)
    cpp_heads = (autocast_dtype(hidden_states), config.head_dim) if may_use_cpp else None
    return BackendRequest(config._attn_implementation, needs_weights, cpp_heads)


def make_mask(
    backend: str,
    config: NLQConfig,
    sequences: Sequences,
    inputs_embeds: torch.Tensor,
    cache: Cache | None,
    layer_idx: int = 0,
    sliding_window: int | None = None,
) -> Any:
    """Makes the mask that a backend takes for a layer, and for every other layer with the same backend and window.

    Args:
        backend: a result of `find_backend`, or `LINEAR_ATTENTION`.
        config: the model's configuration.
        sequences: padding, packed documents and positions of this call.
        inputs_embeds: `(batch, query, hidden)`.
        cache: the cache, before the tokens of this call.
        layer_idx: the number of the layer.
        sliding_window: the window of the layer.

    Raises:
        ValueError: if the backend cannot use the caller's mask, the cache or a batch of packed documents.
    """
    mask = sequences.mask_of(sliding_window)
    if sequences.is_paged:
        if backend == LINEAR_ATTENTION or not ATTENTION_BACKENDS.get(backend, _other).is_paged:
            raise ValueError(
                f"attn_implementation={config._attn_implementation!r} takes no paged cache; start continuous batching by "
                "generate_batch or init_continuous_batching, which choose one that does"
            )
        # 0 where a query sees a key, and the dtype's lowest number elsewhere; flash attention takes none
        return None if mask is None else mask == 0
    _check_export(cache, layer_idx)
    kind = "visibility" if backend == LINEAR_ATTENTION else ATTENTION_BACKENDS.get(backend, _other).mask
    if kind in ("visibility", "dense") and mask is None and sequences.sees_all_keys(cache, layer_idx, sliding_window):
        return None
    make_visibility = functools.partial(sequences.visibility, cache, layer_idx, sliding_window)
    is_dense = isinstance(mask, torch.Tensor) and mask.ndim == 4
    if backend == LINEAR_ATTENTION:
        if is_dense or isinstance(mask, BlockMask):
            raise ValueError(
                "attention_activation='linear_attention' takes no 4-D attention_mask and no BlockMask, because it computes no "
                "weights to hide; give a padding mask (batch, key), or use another activation"
            )
        return make_visibility()
    if is_dense:
        if kind not in ("visibility", "dense"):
            raise ValueError(f"attn_implementation={backend!r} takes no 4-D attention_mask; use 'nlq', 'sdpa' or 'eager'")
        mask = boolean_mask(mask)
        if sliding_window is None:
            return mask
        key_length, key_offset = sequences.key_range(cache, layer_idx)
        if mask.shape[-1] != key_length:  # it covers what the cache of the window has forgotten too
            tokens = sequences.query_offset + inputs_embeds.shape[1]
            if isinstance(tokens, int) and mask.shape[-1] < tokens:
                widths = " or ".join(map(str, dict.fromkeys((tokens, key_length))))
                raise ValueError(
                    f"attention_mask={tuple(mask.shape)} must have {widths} keys (sliding_window={sliding_window})"
                )
            mask = mask[..., key_offset : key_offset + key_length]
        # A static cache that is not full yet is longer
        return nn.functional.pad(mask, (0, key_length - mask.shape[-1])) & make_visibility().dense()
    if isinstance(mask, BlockMask) and (kind != "block" or sliding_window is not None):
        choice = "use 'flex_attention'" if sliding_window is None else "the window would be lost"
        raise ValueError(f"attn_implementation={backend!r} (layer {layer_idx}) takes no BlockMask; {choice}")
    if kind == "visibility":
        return make_visibility()
    positions = sequences.packed_position_ids
    if positions is not None and positions.shape[0] > 1 and is_flash_attention_requested(config):
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} takes packed documents in a batch of 1, not "
            f"{positions.shape[0]}; flatten the batch (DataCollatorWithFlattening), or use 'sdpa'"
        )
    _check_cache(backend, cache)
    if sliding_window is not None:
        config = config.per_layer_config[layer_idx]  # from which Transformers reads the window
    make = create_causal_mask if sliding_window is None else create_sliding_window_causal_mask
    causal_mask = make(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=mask,
        **{CACHE_NAME: cache},
        position_ids=positions,
        layer_idx=layer_idx,
    )
    if kind == "block":
        return FlexMask(causal_mask, None if isinstance(mask, BlockMask) else make_visibility().visible_count)
    return causal_mask


def create_masks_for_generate(
    config: NLQConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None = None,
    position_ids: torch.Tensor | None = None,
    *,
    layers: Sequence[nn.Module],
    past_key_values: Cache | None = None,
    **kwargs,
) -> Any:
    """Makes the mask that `generate` passes to the model, in place of Transformers' function of this name.

    `layers` are the attention layers of the model; a pipeline stage does not have all of them. Only where all take the same
    dense mask, it is made here. Else the model makes the masks from the padding mask. It is as long as a static cache, so its
    shape stays the same from token to token.
    """
    cache, implementation = choose_cache(cache, past_key_values), config._attn_implementation
    is_linear = [layer.activation.kind == "linear" for layer in layers]
    if not all(is_linear):
        _check_cache(implementation, cache)
    takes_padding = implementation == AUTOMATIC or ATTENTION_BACKENDS.get(implementation, _other).mask == "visibility"
    has_windows = any(layer.sliding_window is not None for layer in layers)
    if not takes_padding and not any(is_linear) and not has_windows:
        layer_idx = layers[0].layer_idx
        given = {CACHE_NAME: cache, "position_ids": position_ids, "layer_idx": layer_idx}
        return create_causal_mask(config, inputs_embeds, attention_mask, **given)
    if attention_mask is None:
        return None
    indices = {layer.sliding_window: layer.layer_idx for layer in layers}.values()
    length = max(cache.get_mask_sizes(inputs_embeds.shape[1], index)[0] for index in indices)
    if length <= attention_mask.shape[-1]:
        return attention_mask
    return nn.functional.pad(attention_mask, (0, length - attention_mask.shape[-1]))


def _check_export(cache: Cache | None, layer_idx: int) -> None:
    if not torch.compiler.is_exporting() or cache is None or layer_idx >= len(cache.layers):
        return
    if cache.is_sliding[layer_idx] and cache.get_seq_length(layer_idx):
        # A program would keep the sample's number of tokens, which this layer of the cache counts by a plain number
        raise ValueError(
            f"sliding_window (layer {layer_idx}): an exported program keeps the sample's number of tokens in a window's cache; "
            "export with use_cache=False, or with a DynamicCache() made without a config, which keeps all tokens"
        )


def _check_cache(backend: str, cache: Cache | None) -> None:
    if backend == "flex_attention" and getattr(cache, "is_compileable", False):
        # The block mask would read the length of the cache when the kernel runs, after the cache has grown
        raise ValueError("attn_implementation='flex_attention' takes no static cache; use a dynamic one, or 'nlq'")


def _of_nlq_models_only(*args, **kwargs):
    raise ValueError("the attention implementations 'nlq' and 'nlq_...' work in NLQ models only")


# Transformers accepts names that are in these two tables. The tables belong to the whole process, where several revisions of
# this code may be loaded, so NLQ's layers never read them: they use the table above.
for _name in (AUTOMATIC, *(name for name in ATTENTION_BACKENDS if name.startswith(AUTOMATIC))):
    ALL_ATTENTION_FUNCTIONS.register(_name, _of_nlq_models_only)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, sdpa_mask)  # for layers of softmax, which "nlq" hands to SDPA

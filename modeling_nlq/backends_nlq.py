"""The table of backends, and the choice of the backend that computes a layer.

`attention_activation` defines the weights, `attn_implementation` the way to compute them. A backend that cannot
compute an activation is an error; it never computes softmax instead.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .activations_nlq import AttentionActivation, at_least_float32
from .attention_nlq import chunked_attention_forward, eager_attention_forward, flex_attention_with_log_forward
from .configuration_nlq import AUTOMATIC, NLQConfig
from .linear_nlq import linear_attention
from .masking_nlq import LayerMasks, Sequences, TokenContext, make_mask, read_sequences, read_visible
from .ops_nlq import autocast_dtype, record_use
from .parts_base_nlq import materialized_by
from .parts_builtin_nlq import parts_of
from .tiled_nlq import tiled_attention_forward


def sdpa_with_sink_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, score_bias=None, **kwargs
) -> tuple[Tensor, None]:
    """Computes softmax by PyTorch's fused kernels, with the layer's sink if it has one.

    The sink is another key before all others, with the value 0. A learned logit `b` needs another column: 1 in the
    sink's key, 0 in the other keys, `b` in every query. More columns of 0 keep the width of the head a multiple of 8,
    which CUDA's kernels need.
    """
    # Transformers' function infers no size of an empty batch, and its copies of padded keys fix an exported length
    has_fixed_length = torch.compiler.is_exporting() and module.sink is not None and module.num_key_value_groups > 1
    if query.shape[0] == 0 or has_fixed_length:
        inputs = (module, query, key, value, attention_mask, scaling, dropout, score_bias)
        return eager_attention_forward(*inputs)[0], None
    if score_bias is not None:
        visible, _ = read_visible(attention_mask, query, key, module.is_causal)
        # Half precision would round it too much
        bias = score_bias.dense(at_least_float32(query))
        attention_mask = bias if visible is None else bias.masked_fill(~visible, -torch.inf)
    if scaling <= 0.0:
        # PyTorch's causal kernel scales after it hides keys: 0 times infinity is NaN
        query, scaling = query * scaling, 1.0
    if module.attention_sink is None:
        inputs = (module, query, key, value, attention_mask)
        return sdpa_attention_forward(*inputs, scaling=scaling, dropout=dropout, **kwargs)
    pad, head_dim = F.pad, query.shape[-1]
    is_learned = module.attention_sink == "learned"
    columns = 8 - head_dim % 8 if is_learned else 0
    key, value = pad(key, (0, columns, 1, 0)), pad(value, (0, columns, 1, 0))
    if is_learned:
        # The query is scaled here, because the logit must not be
        logit = module.sink.to(query.dtype)[None, :, None, None].expand(*query.shape[:-1], 1)
        query, scaling = pad(torch.cat([query * scaling, logit], dim=-1), (0, columns - 1)), 1.0
        key[:, :, 0, head_dim] = 1.0
    is_aligned = attention_mask is None and query.shape[2] > 1 and module.is_causal
    if is_aligned:
        # A query for the sink's index, so that each one still sees the keys up to its own
        query = pad(query, (0, 0, 1, 0))
    elif attention_mask is not None:
        # An additive mask adds 0 there
        attention_mask = pad(attention_mask, (1, 0), value=attention_mask.dtype == torch.bool)
    inputs = (module, query, key, value, attention_mask)
    output, _ = sdpa_attention_forward(*inputs, scaling=scaling, dropout=dropout, **kwargs)
    return output[:, int(is_aligned) :, :, :head_dim].contiguous(), None


@dataclass(frozen=True)
class AttentionRequest:
    """What a layer needs from a backend, and the tensors of a call where they are known."""

    activation: AttentionActivation
    sink: str | None = None  # `attention_sink`
    bias: bool = False  # whether a part adds a `score_bias`
    materializes: Literal["rows", "all"] | None = None  # see `materialized_by`; the function then gets the `call`
    dropout: float = 0.0
    weights: bool = False  # whether this call returns the weights
    device: torch.device | None = None  # `None` asks about the layer alone
    dtype: torch.dtype | None = None  # after autocast
    queries: int = 0  # of each row
    head_dim: int = 0


@dataclass(frozen=True)
class AttentionBackend:
    function: Callable  # with the arguments of Transformers' attention functions
    # Whether it computes the activation and the sink, for these tensors if they are known
    computes: Callable[[AttentionRequest], bool] = lambda request: True
    has_bias: bool = False  # whether it takes a `score_bias`
    materializes: Literal["rows", "all"] | None = None  # what it holds in memory
    has_dropout: bool = True
    # Of `output_attentions=True`; omitted with a warning, as in Transformers
    weights: Literal["returned", "omitted", "refused"] = "refused"
    mask: Literal["visibility", "state", "dense", "block", "padding"] = "visibility"  # its maker in `MASK_MAKERS`
    is_paged: bool = False  # whether it takes the cache and the mask of continuous batching
    has_float32: bool = True
    is_portable: bool = True  # false if it calls operators that other runtimes lack

    def supports_layer(self, request: AttentionRequest) -> bool:
        """True if it computes the weights of a layer."""
        is_materialized = request.materializes is None or self.materializes in (request.materializes, "all")
        return is_materialized and (self.has_bias or not request.bias) and self.computes(request)

    def supports_call(self, request: AttentionRequest) -> bool:
        """True if it can do everything that a layer needs in a call."""
        if not self.supports_layer(request) or (request.weights and self.weights == "refused"):
            return False
        return self.has_dropout or request.dropout == 0.0


def _is_softmax(request) -> bool:
    return request.activation.name == "softmax"


def _suits_sdpa(request) -> bool:
    # It takes a bias as a matrix
    return _is_softmax(request) and not (request.bias and request.queries > 1)


def _is_softmax_without_sink(request) -> bool:
    return _is_softmax(request) and request.sink is None


def _has_logarithm(request) -> bool:
    return request.activation.non_negative and request.activation.kind in ("softmax", "elementwise")


def _has_tiles(request) -> bool:
    # Of softmax only what PyTorch's kernels lack
    return request.activation.is_elementwise or (request.bias and _is_softmax_without_sink(request))


_flash_attention = AttentionBackend(
    flash_attention_forward,
    _is_softmax_without_sink,
    weights="omitted",
    mask="padding",
    is_paged=True,
    has_float32=False,
    is_portable=False,
)
# Attention functions that we do not know, such as kernels from the Hub, count as flash attention
_UNKNOWN_BACKEND = _flash_attention
# Transformers' name for `eager` while continuous batching runs. Messages do not offer it
PAGED_EAGER = "paged|eager"
_eager = AttentionBackend(eager_attention_forward, has_bias=True, materializes="all", weights="returned")
# The installed package adds others
ATTENTION_BACKENDS = {
    "eager": _eager,
    PAGED_EAGER: replace(_eager, has_bias=False, is_paged=True),
    "sdpa": AttentionBackend(
        sdpa_with_sink_forward, _suits_sdpa, has_bias=True, weights="omitted", mask="dense", is_paged=True
    ),
    **{f"flash_attention_{version}": _flash_attention for version in (2, 3, 4)},
    "flex_attention": AttentionBackend(
        flex_attention_with_log_forward,
        _has_logarithm,
        has_bias=True,
        has_dropout=False,
        mask="block",
        is_portable=False,
    ),
    "nlq_tiled": AttentionBackend(tiled_attention_forward, _has_tiles, has_bias=True, is_portable=False),
    "nlq_rows": AttentionBackend(chunked_attention_forward, has_bias=True, materializes="rows", is_portable=False),
}
# What the automatic choice tries, in this order. The last one computes everything
PREFERENCE = ["sdpa", "nlq_tiled", "nlq_rows", "eager"]
PAGED_PREFERENCE = ("sdpa", PAGED_EAGER)
# In place of a backend's name: such layers call `linear_nlq.py`, whatever `attn_implementation` is
LINEAR_ATTENTION = "linear_attention"
_STATE = AttentionBackend(linear_attention, mask="state")


def choose_implementation(config: NLQConfig, requested: str | None) -> str | None:
    """Returns the value of `attn_implementation` for a model; `None` leaves the choice to Transformers.

    Raises `ValueError` for a backend that is unknown or cannot compute a layer.
    """
    layers = _requests(config)
    requests = list(itertools.chain(*layers))
    if requested is None:
        is_plain = all(_is_softmax(request) and not request.bias and not request.materializes for request in requests)
        return None if is_plain else AUTOMATIC
    # Not rows that the installed package added, which remote code lacks
    others = (name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if not name.startswith(f"{AUTOMATIC}_"))
    if requested not in (*ATTENTION_BACKENDS, *others):
        choices = _choices(ATTENTION_BACKENDS)
        raise ValueError(f'Specified `attn_implementation="{requested}"` is not supported; use one of {choices}')
    for request in requests:
        numbers = [index for index, layer_requests in enumerate(layers) if request in layer_requests]
        find_backend(requested, numbers, request)
    return requested


def choose_paged_implementation(config: NLQConfig) -> str:
    """Returns the value of `attn_implementation` for continuous batching.

    Raises `ValueError` if a layer, or the backend that is set, cannot have a paged cache, or if windows differ.
    """
    if config.add_cross_attention:
        raise ValueError("add_cross_attention=True has no continuous batching; use generate")
    for index, layer in enumerate(config.per_layer_config):
        # The paged cache cannot hold a state, and its masks do not say which key is the query's own
        if layer.activation.kind == "linear" or not layer.activation.sees_own_key:
            name = layer.attention_activation
            raise ValueError(f"attention_activation={name!r} (layer {index}) has no continuous batching; use generate")
        for part in parts_of(layer):
            if reason := part.refuse_paged(layer):
                raise ValueError(f"{part.name} (layer {index}) has no continuous batching: {reason}; use generate")
    windows = [layer.sliding_window for layer in config.per_layer_config]
    if len(set(windows)) > 1:
        raise ValueError(f"sliding_window={windows}: continuous batching has one window for all layers; use generate")
    name = config._attn_implementation
    requests = list(itertools.chain(*_requests(config)))
    possible = [paged for paged in PAGED_PREFERENCE if all(map(ATTENTION_BACKENDS[paged].supports_layer, requests))]
    if name == AUTOMATIC:
        return possible[0]
    paged = PAGED_EAGER if name == "eager" else name
    if not ATTENTION_BACKENDS.get(paged, _UNKNOWN_BACKEND).is_paged:
        choices = _choices("eager" if other == PAGED_EAGER else other for other in possible)
        raise ValueError(f"attn_implementation={name!r} has no continuous batching; use one of {choices}")
    return choose_implementation(config, paged)


def supports_flash_attention(config: NLQConfig) -> bool:
    """Tells whether flash attention computes every layer but linear ones, which call no backend."""
    requests = itertools.chain(*_requests(config))
    return all(_flash_attention.supports_layer(request) for request in requests if request.activation.kind != "linear")


def _choices(backends) -> str:
    return ", ".join((AUTOMATIC, *(name for name in backends if name != PAGED_EAGER)))


def _requests(config) -> list[list[AttentionRequest]]:
    layers = [filter(None, (layer, layer.cross_attention_config)) for layer in config.distinct_layers]
    requests = [list(map(request_of, layer)) for layer in layers]
    return requests if config.is_heterogeneous else requests * config.num_hidden_layers


def request_of(layer: NLQConfig) -> AttentionRequest:
    """Returns what a layer with this configuration requests in any call."""
    parts = parts_of(layer)
    has_bias = any(part.has_hook("score_bias") for part in parts)
    return AttentionRequest(layer.activation, layer.attention_sink, has_bias, materialized_by(parts))


def find_backend(implementation: str | None, layers: Sequence[int], request: AttentionRequest) -> str:
    """Returns the name of the backend that computes layers in one call, or `LINEAR_ATTENTION`.

    A model that is exported or traced gets a portable backend. Raises `ValueError` if the backend cannot compute the
    layers; tensors it refuses itself.
    """
    numbers = ", ".join(map(str, layers))
    if request.activation.kind == "linear":
        if request.weights:
            name = f"attention_activation={request.activation.name!r}"
            raise ValueError(f"output_attentions=True: {name} (layer {numbers}) computes no weights")
        return LINEAR_ATTENTION
    name = implementation or "eager"
    needs_portable = torch.compiler.is_exporting() or torch.jit.is_tracing()
    if name == AUTOMATIC:
        for name in PREFERENCE:
            backend = ATTENTION_BACKENDS[name]
            has_weights = not request.weights or backend.weights == "returned"
            if has_weights and (backend.is_portable or not needs_portable) and backend.supports_call(request):
                return name
    request = replace(request, device=None, queries=0)
    backend = ATTENTION_BACKENDS.get(name, _UNKNOWN_BACKEND)
    if backend.supports_call(request):
        return "eager" if needs_portable and not backend.is_portable else name
    if not backend.supports_layer(request):
        refused = f"attention_activation={request.activation.name!r}"
        refused += " with a bias of the scores" if request.bias else ""
        refused += " with a part that changes its scores or weights" if request.materializes else ""
        refused += f" with attention_sink={request.sink!r}" if request.sink else ""
    elif request.weights and backend.weights == "refused":
        refused = "the weights that output_attentions=True asks for"
    else:
        refused = f"attention_dropout={request.dropout}"
    choices = _choices(other for other, backend in ATTENTION_BACKENDS.items() if backend.supports_call(request))
    raise ValueError(f"attn_implementation={name!r} cannot compute {refused} (layer {numbers}); use one of {choices}")


def make_layer_masks(
    layers: Sequence[nn.Module], hidden_states: Tensor, sequences: Sequences, cache: Cache | None = None, **kwargs
) -> LayerMasks:
    """Chooses backends and makes one mask for each kind of layer, before a layer advances the cache.

    Passes over modules that hide an attention layer, which calls `layer_mask` itself.
    """
    masks = LayerMasks(sequences)
    for layer in layers:
        if hasattr(layer, "attention_request"):
            layer_mask(layer, masks, hidden_states, cache, **kwargs)
    return masks


def layer_mask(
    layer: nn.Module,
    masks: LayerMasks | Tensor | None,
    hidden_states: Tensor,
    cache: Cache | None = None,
    source: Tensor | None = None,
    **kwargs,
) -> tuple[str, Any, TokenContext | None]:
    """Returns backend, mask and token context of an attention layer, before it advances the cache.

    `masks` are the model's, or the mask of a caller of this layer alone; `source` are an encoder's tokens.
    """
    if not isinstance(masks, LayerMasks):
        options = {"layer_idx": layer.layer_idx, "is_causal": layer.is_causal, "cache": cache, "source": source}
        masks = LayerMasks(read_sequences(hidden_states, masks, **{**options, **kwargs}))
    sequences = masks.sequences
    made = masks.made
    if (kind := masks.kinds.get(layer.layer_idx)) is None:
        cache = cache if sequences.source_length is None else None
        weights = kwargs.get("output_attentions")
        weights = layer.config.output_attentions if weights is None else weights
        tensors = (hidden_states.device, autocast_dtype(hidden_states), hidden_states.shape[1], layer.head_dim)
        request = layer.attention_request(weights, *tensors)
        backend = find_backend(layer.config._attn_implementation, [layer.layer_idx], request)
        kind = masks.kinds[layer.layer_idx] = (backend, *layer.visible_keys)
        if kind not in made:
            record_use("attention", backend)
            row = _STATE if backend == LINEAR_ATTENTION else ATTENTION_BACKENDS.get(backend, _UNKNOWN_BACKEND)
            made[kind] = (make_mask(backend, row, layer, sequences, hidden_states, cache), None)
        mask, context = made[kind]
        if context is None and layer.needs_token_context:
            made[kind] = (mask, sequences.token_context(layer, cache, mask))
    return kind[0], *made[kind]


def _of_nlq_models_only(*args, **kwargs):
    raise ValueError("the attention implementations 'nlq' and 'nlq_...' work in NLQ models only")


def accept_backend(name: str) -> None:
    """Makes Transformers accept the name, whose table belongs to all revisions of this code."""
    ALL_ATTENTION_FUNCTIONS.register(name, _of_nlq_models_only)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)  # for layers of softmax, which "nlq" hands to SDPA


for _name in (AUTOMATIC, "nlq_tiled", "nlq_rows"):
    accept_backend(_name)

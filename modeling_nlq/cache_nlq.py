"""The cache layer of linear attention, which stores a state, and the cache of an encoder's keys and values."""

import hashlib
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast


# Transformers 5.24 renamed `past_key_values` to `cache` in outputs, mask functions and `generate`
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"

# The name of the cache layer in Transformers' table, with a hash of this file: the process may have loaded others
LAYER_TYPE = f"nlq_linear_attention_{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}"
CROP_ADVICE = "generate without assistant_model and prompt_lookup_num_tokens"
MOST_CONVOLUTIONS = 7  # of canon at every site, with a gated MLP


class LinearState(NamedTuple):
    """The sums over earlier tokens that later ones need, in at least float32, decayed up to the last token."""

    numerator: Tensor  # (batch, key_value_heads, head_dim, head_dim), of keys times values
    denominator: Tensor  # (batch, key_value_heads, head_dim), of keys; of width 0 with the delta rule


class NLQLinearAttentionCacheLayer(LinearAttentionLayer, CacheLayerMixin):
    """The state of a linear attention layer in the cache; Transformers' own layer for that counts no tokens.

    `max_cache_len` is the length of a static cache's masks.
    """

    _layer_type = LAYER_TYPE

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        LinearAttentionLayer.__init__(self, number_of_states=len(LinearState._fields) + MOST_CONVOLUTIONS)
        CacheLayerMixin.__init__(self)
        self.max_cache_len = max_cache_len
        # In a dynamic cache an empty tensor, `(tokens, 0)`: reading its length neither waits for a device nor makes it
        # a constant of `torch.export`
        self.seen_tokens: Tensor | None = None
        self.cumulative_length: Tensor | None = None  # `(1,)`, the number of tokens in a static cache

    @property
    def is_compileable(self):
        """True for a static cache, which counts its tokens by a tensor."""
        return self.max_cache_len is not None

    @property
    def is_croppable(self):
        return False

    def lazy_initialization(self, *args, recurrent_states=None, **kwargs):
        super().lazy_initialization(recurrent_states=recurrent_states, **kwargs)
        if recurrent_states is None:
            return
        self.device, self.dtype = recurrent_states.device, recurrent_states.dtype
        if self.max_cache_len is not None and self.cumulative_length is None:
            self.cumulative_length = torch.zeros(1, dtype=torch.long, device=self.device)
        self.is_initialized = True

    def get_state(self) -> LinearState | None:
        """Returns the state of the tokens so far, `None` before the first."""
        if not self.has_previous_state[0]:
            return None
        return LinearState(*(self.recurrent_states[index] for index in range(len(LinearState._fields))))

    def set_state(self, state: LinearState, length: int) -> None:
        """Stores the state after `length` more tokens."""
        for index, part in enumerate(state):
            if not self.is_recurrent_states_initialized[index]:
                self.lazy_initialization(recurrent_states=part, state_idx=index)
            if self.max_cache_len is None:
                self.recurrent_states[index] = part  # not in place: a gradient may need the old state
            else:
                self.update_recurrent_state(part, index)
            self.has_previous_state[index] = True
        if self.max_cache_len is None:
            self.seen_tokens = state.denominator.new_empty(self.get_seq_length() + length, 0)
        else:
            self.cumulative_length += length

    def update(self, key_states, value_states, *args, **kwargs):
        raise RuntimeError("attention_activation='linear_attention' keeps a state, and neither keys nor values")

    def get_seq_length(self):
        if self.cumulative_length is not None:
            return self.cumulative_length
        return 0 if self.seen_tokens is None else self.seen_tokens.shape[0]

    def get_mask_sizes(self, query_length):
        return (self.get_seq_length() + query_length if self.max_cache_len is None else self.max_cache_len), 0

    def get_max_length(self):
        return -1 if self.max_cache_len is None else self.max_cache_len

    def activate_past_recording(self):
        self.crop(-1)  # called before tokens that may be taken back

    def crop(self, tokens_to_remove):
        """Raises `RuntimeError`, unless nothing is to be removed."""
        if tokens_to_remove != 0:
            raise RuntimeError(f"attention_activation='linear_attention': a state cannot be cropped; {CROP_ADVICE}")

    def reset(self):
        if self.max_cache_len is None:
            self._map(torch.zeros_like)  # not in place: a gradient may need the old state
        LinearAttentionLayer.reset(self)
        self.seen_tokens = None
        if self.cumulative_length is not None:
            self.cumulative_length.zero_()

    def batch_repeat_interleave(self, repeats):
        self._map(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        self._map(lambda part: part[indices])

    def _map(self, function):
        if self.is_initialized:
            states = self.recurrent_states
            self.recurrent_states = {index: function(part) for index, part in states.items() if part is not None}
            _map_convolutions(self, function)


def _map_convolutions(layer, function):
    states = layer.conv_states
    states.update({index: function(state) for index, state in states.items() if state is not None})


def _repeat_rows(layer, repeats):
    DynamicLayer.batch_repeat_interleave(layer, repeats)
    _map_convolutions(layer, lambda state: state.repeat_interleave(repeats, dim=0))


def _select_rows(layer, indices):
    DynamicLayer.batch_select_indices(layer, indices)
    _map_convolutions(layer, lambda state: state[indices])


class _FullLayer(LinearAttentionAndFullAttentionLayer):
    batch_repeat_interleave, batch_select_indices = _repeat_rows, _select_rows


class _SlidingLayer(LinearAttentionAndSlidingWindowAttentionLayer):
    batch_repeat_interleave, batch_select_indices = _repeat_rows, _select_rows


def keep_rows_together(layer: CacheLayerMixin) -> None:
    """Makes a dynamic cache layer repeat and select the rows of convolutions with those of keys and values.

    Transformers' layers leave out the convolutions, and its cache chooses their class.
    """
    for replacement in (_FullLayer, _SlidingLayer):
        if type(layer) is replacement.__bases__[0]:
            layer.__class__ = replacement


def cache_layer_with(method: str, cache: Cache, index: int, name: str) -> CacheLayerMixin:
    """Returns a layer of a cache. Raises `ValueError` if it lacks the method that `name` needs."""
    layer = cache.layers[index] if index < len(cache.layers) else None
    if not hasattr(layer, method):
        raise ValueError(f"{name} (layer {index}) needs a cache made by DynamicCache(config=model.config)")
    return layer


def refuse_offloading(cache: Cache, name: str) -> None:
    """Raises `ValueError` if the cache moves what `name` keeps in it to another device."""
    if cache.offloading:
        raise ValueError(f"{name} needs a cache without offloading")


def check_key_width(cache: Cache, index: int, key: Tensor) -> None:
    """Raises `ValueError` for cached keys that lack states of parts."""
    for layer in getattr(cache, "layers", [])[index : index + 1]:
        if layer.is_initialized and layer.keys.numel() and layer.keys.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"layer {index}: cached keys lack states of parts; use neither prefix tuning nor quantized caches"
            )


def cache_of_both(cache: Cache) -> EncoderDecoderCache:
    """Returns a cache of the decoder's tokens and, in its other half, of an encoder's keys and values.

    `generate` may have given the other half windows, states or a static length; then it is replaced.
    """
    if not isinstance(cache, EncoderDecoderCache):
        return EncoderDecoderCache(cache, DynamicCache())
    half = cache.cross_attention_cache
    is_other = half.offloading or any(type(layer) is not DynamicLayer for layer in half.layers)
    if is_other and not any(cache.is_updated.values()):
        cache.cross_attention_cache = DynamicCache()
    return cache


STATIC_LAYER_TYPE_MAPPING[LAYER_TYPE] = NLQLinearAttentionCacheLayer

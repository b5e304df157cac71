"""Masks: which keys each query sees, what a backend takes to say so, and how a backend reads it.

The number `n` of keys that a query sees never depends on the padded, cached or total length, so cached decoding,
padding and packing are exact for every activation.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.masking_utils import (
    BlockMask,
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing

from .cache_nlq import CACHE_NAME


class LayerArgument:
    """A dataclass among the arguments of a layer, which other programs move to its device."""

    def to(self, *args, **kwargs) -> Self:
        def move(leaf) -> Any:
            return leaf.to(*args, **kwargs) if hasattr(leaf, "to") else leaf

        return replace(self, **{entry.name: tree_map(move, getattr(self, entry.name)) for entry in fields(self)})


@dataclass
class Visibility(LayerArgument):
    """The keys that each query sees, in O(length) memory: those from `first_key` to `last_key` that are valid.

    Both never fall from query to query. They are `None` if no key is too early, or too late.
    """

    last_key: Tensor | None  # (batch or 1, query)
    key_length: int  # with what is still empty in a static cache
    visible_count: Tensor  # (batch or 1, query)
    key_is_valid: Tensor | None = None  # (batch, key) booleans, false for padding
    first_key: Tensor | None = None  # (batch or 1, query)
    # `first_key` and `last_key` less the query's index, before clamping; `None` if only tensors say
    first_offset: int | None = None
    last_offset: int | None = None

    def check(self, query_length: int, key_length: int) -> None:
        sizes = (self.visible_count.shape[-1], self.key_length)
        if sizes != (query_length, key_length):
            raise ValueError(f"the mask is for (query, key)={sizes}, and this call has {(query_length, key_length)}")

    def excluding_self(self) -> "Visibility":
        """Returns the causal visibility without each query's own token."""
        self_count = 1 if self.key_is_valid is None else self.key_is_valid[:, self.last_key[0]].long()
        last_offset = None if self.last_offset is None else self.last_offset - 1
        count = self.visible_count - self_count
        return replace(self, last_key=self.last_key - 1, last_offset=last_offset, visible_count=count)

    def rows(self, start: int, end: int, key_length: int) -> "Visibility":
        """Returns the visibility of some queries, which see at most `key_length` keys."""
        key_is_valid = None if self.key_is_valid is None else self.key_is_valid[:, :key_length]
        first_key, last_key = (None if key is None else key[:, start:end] for key in (self.first_key, self.last_key))
        return Visibility(last_key, key_length, self.visible_count[:, start:end], key_is_valid, first_key)

    def dense(self) -> Tensor:
        """Returns booleans `(batch or 1, 1, query, key)`."""
        key_index = torch.arange(self.key_length, device=self.visible_count.device)
        if self.last_key is None:
            visible = torch.ones_like(self.visible_count[:1, None, :, None].bool()).expand(-1, -1, -1, self.key_length)
        else:
            visible = key_index <= self.last_key[:, None, :, None]
        if self.key_is_valid is not None:
            visible = visible & self.key_is_valid[:, None, None, :]
        if self.first_key is not None:
            visible = visible & (key_index >= self.first_key[:, None, :, None])
        return visible


def make_visibility(
    query_length: int,
    key_length: int,
    query_offset: int | Tensor,
    device: torch.device,
    attention_mask: Tensor | None = None,
    segments: Tensor | None = None,
    sliding_window: int | None = None,
    key_offset: int = 0,
    is_causal: bool = True,
) -> Visibility:
    """Makes the visibility of the last `query_length` positions, with padding, packing or a window.

    Args:
        query_offset: number of tokens before the first query; a tensor if a static cache counts them.
        attention_mask: `(batch, tokens)`, 0 for padding, as is all beyond it.
        segments: `(batch or 1, key)`, each token's packed document, without `attention_mask` and cache.
        sliding_window: how many tokens a query sees, itself and those before it, or on each side of itself.
        key_offset: number of tokens before the first key, which a cache of the window has forgotten.
    """
    offset = query_offset - key_offset
    query_index = torch.arange(query_length, device=device) + offset
    first_key, last_key = None, query_index[None] if is_causal else None
    first_offset, last_offset = None, offset if is_causal else None
    if sliding_window is not None:
        first_offset = offset - (sliding_window - is_causal)
        first_key = (query_index - (sliding_window - is_causal)).clamp(min=0)[None]
        if not is_causal:
            last_offset = offset + sliding_window
            last_key = (query_index + sliding_window).clamp(max=key_length - 1)[None]
    if isinstance(offset, Tensor):
        first_offset = last_offset = None
    if segments is not None:
        first_offset = None
        last_offset = last_offset if is_causal else None
        document_start = _document_starts(segments, query_index)
        first_key = document_start if first_key is None else torch.maximum(document_start, first_key)
        if not is_causal:
            document_end = key_length - 1 - _document_starts(segments.flip(-1), query_index).flip(-1)
            last_key = document_end if last_key is None else torch.minimum(document_end, last_key)
    if attention_mask is not None:
        end = key_offset + key_length
        key_is_valid = F.pad(attention_mask.bool(), (0, end))[:, key_offset:end]
        seen = key_is_valid.long().cumsum(dim=-1)  # OpenVINO would keep booleans
        count = seen[:, -1:].expand(-1, query_length) if last_key is None else seen[:, last_key[0]]
        if first_key is not None:
            count = count - (seen - key_is_valid.long())[:, first_key[0]]
        return Visibility(last_key, key_length, count, key_is_valid, first_key, first_offset, last_offset)
    if last_key is None:
        end = torch.full_like(query_index, key_length)[None]
    else:
        end = last_key.clamp(max=key_length - 1) + 1
    count = end if first_key is None else end - first_key
    return Visibility(last_key, key_length, count, None, first_key, first_offset, last_offset)


def _document_starts(segments, query_index) -> Tensor:
    """Returns `(batch or 1, query)`, the first token of each token's packed document."""
    if torch.compiler.is_exporting():
        # ONNX lacks a cumulative maximum
        is_other = segments[:, None, :] != segments[:, :, None]
        return (is_other & (query_index < query_index[:, None])).sum(dim=-1)
    starts_here = torch.ones_like(segments, dtype=torch.bool)
    starts_here[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return torch.where(starts_here, query_index, 0).cummax(dim=-1).values


def count_tokens(padding_mask: Tensor) -> Tensor:
    """Returns the number of tokens before each one in its row, without padding."""
    return (padding_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


@dataclass
class TokenContext(LayerArgument):
    """The tokens of one call (queries) and those with the cached ones (keys), for attention parts.

    In cross-attention there are `visible_count` and `key_is_valid` alone, in continuous batching the first two.
    """

    visible_count: Tensor  # (batch or 1, 1 or heads, query), the number `n` of keys that each query sees
    # (batch or 1, query), the number of tokens before each in its document, without padding
    query_position: Tensor | None = None
    key_position: Tensor | None = None  # (batch or 1, key)
    query_index: Tensor | None = None  # (query,), each token's index among the keys of the layer
    is_valid: Tensor | None = None  # (batch, query), false for padding; `None` without padding
    key_is_valid: Tensor | None = None  # (batch, key)
    document: Tensor | None = None  # (batch, key), each key's packed document
    has_own_mask: bool = False  # whether the caller gave a mask of queries and keys
    position_ids: Tensor | None = None  # (batch or 1, query), what rotary positions are made of


class FlexMask(NamedTuple):
    """The mask of `flex_attention`, and the visible keys `(batch or 1, query)` if they can be counted."""

    block_mask: BlockMask | None
    visible_count: Tensor | None = None


@dataclass
class Sequences(LayerArgument):
    """The arguments of a call, from which each layer makes its `Visibility` and `TokenContext`."""

    position_ids: Tensor  # (batch or 1, query)
    # The caller's if it hides something. In continuous batching Transformers', `None` for flash attention
    attention_mask: Tensor | BlockMask | None = None
    query_offset: int | Tensor = 0  # as in `make_visibility`
    padding_mask: Tensor | None = None  # (batch, tokens), false for padding
    segments: Tensor | None = None  # (batch, query), each token's packed document
    last_position: int | None = None  # if it is known without reading `position_ids`
    is_paged: bool = False  # in continuous batching
    is_causal: bool = True
    source_length: int | None = None  # of the encoder, in cross-attention

    @property
    def packed_position_ids(self) -> Tensor | None:
        """`position_ids` if documents are packed, for Transformers' masks and flash attention."""
        return None if self.segments is None else self.position_ids

    def visibility(self, layer, cache) -> Visibility:
        """Makes the visibility of a layer before it caches the tokens of this call, without a 4-D mask."""
        sliding_window, sees_own_key = layer.visible_keys
        key_length, key_offset = self.key_range(layer, cache)
        options = (self.padding_mask, self.segments, sliding_window, key_offset, self.is_causal)
        query_length, device = self.position_ids.shape[-1], self.position_ids.device
        visibility = make_visibility(query_length, key_length, self.query_offset, device, *options)
        return visibility if sees_own_key else visibility.excluding_self()

    def token_context(self, layer, cache, mask) -> TokenContext:
        if self.is_paged:  # each request is one text without padding
            count = self.position_ids[:, None] + 1
            sliding_window, _ = layer.visible_keys
            count = count if sliding_window is None else count.clamp(max=sliding_window)
            return TokenContext(count, self.position_ids)
        visibility = self.visibility(layer, cache)
        count = visibility.visible_count[:, None]
        key_is_valid = visibility.key_is_valid
        has_own_mask = is_dense(self.attention_mask) or isinstance(self.attention_mask, BlockMask)
        if has_own_mask and isinstance(mask, Tensor):  # it alone says what is visible
            count = mask[..., : visibility.key_length].sum(dim=-1)
        if self.source_length is not None:
            return TokenContext(count, key_is_valid=key_is_valid, has_own_mask=has_own_mask)
        device = self.position_ids.device
        _, start = self.key_range(layer, cache)
        end = start + visibility.key_length
        query_index = torch.arange(self.position_ids.shape[-1], device=device) + (self.query_offset - start)
        if self.segments is not None:  # without a cache, so the keys are the queries
            key_position = query_index - _document_starts(self.segments, query_index)
        elif self.padding_mask is None:
            key_position = torch.arange(start, end, device=device)[None]
        else:
            key_position = count_tokens(F.pad(self.padding_mask.long(), (0, end)))[:, start:end]
        is_valid = None if key_is_valid is None else key_is_valid[:, query_index]
        positions = (key_position[:, query_index], key_position, query_index)
        return TokenContext(count, *positions, is_valid, key_is_valid, self.segments, has_own_mask, self.position_ids)

    def sees_all_keys(self, layer, cache) -> bool:
        sliding_window, sees_own_key = layer.visible_keys
        if not sees_own_key or self.attention_mask is not None:
            return False
        if not self.is_causal:
            return self.padding_mask is None and self.segments is None and sliding_window is None
        if self.position_ids.shape[-1] > 1 or self.padding_mask is not None or not isinstance(self.query_offset, int):
            return False
        if is_tracing(self.position_ids):  # it would become a constant of the program
            return False
        key_length, key_offset = self.key_range(layer, cache)
        is_within = sliding_window is None or key_length <= sliding_window
        return key_length + key_offset == self.query_offset + 1 and is_within

    def key_range(self, layer, cache) -> tuple[int, int]:
        """Returns the number of a layer's keys, and of forgotten tokens before them."""
        query_length = self.position_ids.shape[-1]
        if self.source_length is not None:
            return self.source_length, 0
        return (query_length, 0) if cache is None else cache.get_mask_sizes(query_length, layer.layer_idx)


@dataclass
class LayerMasks(LayerArgument):
    """The backend, the mask and the token context of every layer in one call of the model.

    All layers get the same object as their `attention_mask`, because layer-wise quantizers call them one by one with
    the arguments of the first.
    """

    sequences: Sequences
    kinds: dict[int, tuple] = field(default_factory=dict)  # backend and `visible_keys` of each layer
    # By these: the mask, and the context if a layer needs it
    made: dict[tuple, tuple[Any, TokenContext | None]] = field(default_factory=dict)


def read_sequences(
    inputs_embeds: Tensor,
    attention_mask: Tensor | BlockMask | None = None,
    position_ids: Tensor | None = None,
    cache: Cache | PagedAttentionCache | None = None,
    use_cache: bool | None = None,
    layer_idx: int = 0,
    is_causal: bool = True,
    source: Tensor | None = None,
    **kwargs,
) -> Sequences:
    """Reads padding, packed documents and positions from the arguments of one call of `NLQModel`.

    `layer_idx` is a layer that is called alone. In cross-attention the mask is that of the encoder's tokens `source`,
    `(batch, key, hidden)`. `ValueError` for wrong shapes, for a contradiction, and for packed documents with a cache.
    """
    (batch, query_length), device = inputs_embeds.shape[:2], inputs_embeds.device
    if source is not None:
        length = source.shape[1]
        padding_mask = _check_mask(attention_mask, len(source), length, 0, False, name="encoder_attention_mask")
        if _hides_nothing(padding_mask):
            attention_mask = padding_mask = None
        positions = torch.arange(query_length, device=device)[None]
        return Sequences(positions, attention_mask, padding_mask=padding_mask, is_causal=False, source_length=length)
    if isinstance(cache, PagedAttentionCache):
        return Sequences(position_ids, attention_mask, is_paged=True)
    if position_ids is not None:
        position_ids = position_ids.expand(batch, query_length)
    query_offset = 0 if cache is None else cache.get_seq_length(layer_idx)
    padding_mask = _check_mask(attention_mask, batch, query_length, query_offset, is_causal)
    if isinstance(query_offset, Tensor):
        query_offset = query_offset.to(device)

    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        if kwargs.get(name) is not None and position_ids is None:
            raise ValueError(f"{name}: packed documents are found by their position_ids; give these too")
    segments = None
    # As in Transformers, because `generate` leaves out a mask of ones
    if attention_mask is None and cache is None:
        segments = find_packed_documents(position_ids)
        if use_cache:
            refuse_packed(segments, "cannot be cached; set use_cache=False, or give a mask if each row is one text")
    if _hides_nothing(padding_mask):
        attention_mask = padding_mask = None  # a mask costs time

    last_position = None
    if position_ids is None and padding_mask is None and isinstance(query_offset, int):
        last_position = query_offset + query_length - 1
    if position_ids is None:
        query_index = torch.arange(query_length, device=device) + query_offset
        position_ids = query_index[None] if padding_mask is None else count_tokens(padding_mask)[:, query_index]
    options = (query_offset, padding_mask, segments, last_position)
    return Sequences(position_ids, attention_mask, *options, is_causal=is_causal)


def can_be_read(tensor: Tensor) -> bool:
    """Tells whether to read a tensor's numbers: CUDA would first finish all that waits for it."""
    is_cuda = tensor.is_cuda and torch.version.hip is None
    return not (is_cuda or tensor.is_meta or is_tracing(tensor))


def is_dense(attention_mask: Any) -> bool:
    return isinstance(attention_mask, Tensor) and attention_mask.ndim == 4


def _hides_nothing(padding_mask) -> bool:
    return padding_mask is not None and not is_tracing(padding_mask) and bool(padding_mask.all())


def _check_mask(attention_mask, batch, query_length, query_offset, is_causal, name="attention_mask") -> Tensor | None:
    """Returns the mask if it is one of padding, `(batch, key)`, else `None`."""
    if attention_mask is None or isinstance(attention_mask, BlockMask):
        return None
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"{name} must be a tensor, not a {type(attention_mask).__name__}")
    shape = tuple(attention_mask.shape)
    if attention_mask.ndim not in (2, 4):
        raise ValueError(f"{name}={shape} must be (batch, key) or (batch, 1 or heads, query, key)")
    if attention_mask.ndim == 4:
        return None
    # A static cache counts by a tensor, an export by a symbol
    is_read = isinstance(query_offset, int) or (isinstance(query_offset, Tensor) and can_be_read(query_offset))
    if not is_read and (is_tracing(attention_mask) or shape[0] == batch):
        return attention_mask
    seen = int(query_offset) + query_length
    # A static cache has a longer mask
    if shape[0] != batch or shape[1] < seen or (shape[1] > seen and not is_causal):
        cached = ", cached positions included" if is_causal else ""
        raise ValueError(f"{name}={shape} must be (batch, key)={(batch, seen)}{cached}")
    return attention_mask


def find_packed_documents(position_ids: Tensor | None) -> Tensor | None:
    """Returns the number `(batch, query)` of each token's packed document, if there are some."""
    has_order = position_ids is not None and position_ids.shape[-1] > 1
    return find_packed_sequence_indices(position_ids) if has_order else None


def refuse_packed(segments: Tensor | None, reason: str) -> None:
    """Raises `ValueError` for packed documents."""
    if segments is not None and not is_tracing(segments):
        raise ValueError(f"packed documents (position_ids that restart, without an attention_mask) {reason}")


def make_mask(
    name: str, backend: Any, layer: nn.Module, sequences: Sequences, inputs_embeds: Tensor, cache: Cache | None
) -> Visibility | FlexMask | Tensor | None:
    """Makes the mask that a backend takes for a layer, before the cache has the tokens, or raises `ValueError`."""
    if sequences.is_paged:
        if not backend.is_paged:
            raise ValueError(f"attn_implementation={layer.config._attn_implementation!r} takes no paged cache")
        # 0 where a query sees a key; flash attention gets none
        return None if sequences.attention_mask is None else sequences.attention_mask == 0
    _check_backend(f"attn_implementation={name!r}", backend.mask, layer, sequences, cache)
    return MASK_MAKERS[backend.mask](layer, sequences, inputs_embeds, cache)


def _check_backend(backend, kind, layer, sequences, cache):
    mask, index = sequences.attention_mask, layer.layer_idx
    is_exported = torch.compiler.is_exporting() and cache is not None and index < len(cache.layers)
    if is_exported and cache.is_sliding[index] and cache.get_seq_length(index):
        # This layer of the cache counts tokens by a plain number, which would become a constant
        raise ValueError(
            f"sliding_window (layer {index}): export without cache, or with DynamicCache() without config"
        )
    if is_dense(mask) and kind not in ("visibility", "dense"):
        raise ValueError(f"attention_mask: {backend} (layer {index}) takes no 4-D mask")
    # A block mask would replace the window
    if isinstance(mask, BlockMask) and (kind != "block" or layer.sliding_window):
        raise ValueError(f"attention_mask: {backend} (layer {index}) takes no BlockMask")
    # Flash attention reads one padding for queries and keys
    if kind == "padding" and sequences.source_length is not None and mask is not None:
        raise ValueError(f"encoder_attention_mask: {backend} takes no padded source; use 'sdpa' or 'nlq'")
    if kind == "padding" and sequences.segments is not None and is_flash_attention_requested(layer.config):
        rows = len(sequences.position_ids)
        if rows > 1:
            raise ValueError(f"{backend} takes packed documents in a batch of 1, not {rows}: flatten it")
    # The kernel would read the length of the cache after it has grown
    if kind == "block" and getattr(cache, "is_compileable", False):
        raise ValueError(f"{backend} takes no static cache; use a dynamic one, or 'nlq'")


def _make_visibility_mask(layer, sequences, inputs_embeds, cache) -> Visibility | Tensor | None:
    if sequences.sees_all_keys(layer, cache):
        return None
    if not is_dense(sequences.attention_mask):
        return sequences.visibility(layer, cache)
    mask = _as_booleans(sequences.attention_mask)
    if layer.visible_keys == (None, True):
        return mask
    visibility = sequences.visibility(layer, cache)
    key_length, key_offset = sequences.key_range(layer, cache)
    if mask.shape[-1] != key_length:  # with what the cache of the window has forgotten
        tokens = sequences.query_offset + inputs_embeds.shape[1]
        if isinstance(tokens, int) and mask.shape[-1] < tokens:
            raise ValueError(f"attention_mask={tuple(mask.shape)} must have {tokens} keys, those before a window too")
        mask = mask[..., key_offset : key_offset + key_length]
    # A static cache that is not full yet is longer
    return F.pad(mask, (0, key_length - mask.shape[-1])) & visibility.dense()


def _make_dense_mask(layer, sequences, inputs_embeds, cache) -> Tensor | None:
    """Returns booleans, or `None` for an order of keys that PyTorch's kernels know."""
    # Transformers packs documents in causal order only
    is_known = layer.is_causal or (sequences.source_length is None and sequences.segments is None)
    if is_known and not is_dense(sequences.attention_mask) and not sequences.sees_all_keys(layer, cache):
        return _make_transformers_mask(layer, sequences, inputs_embeds, cache)
    mask = _make_visibility_mask(layer, sequences, inputs_embeds, cache)
    return mask.dense() if isinstance(mask, Visibility) else mask


def _make_block_mask(layer, sequences, inputs_embeds, cache) -> FlexMask:
    options = {}
    if not layer.is_causal and sequences.segments is not None:
        options["and_mask_function"] = packed_sequence_mask_function(sequences.segments)
    block_mask = _make_transformers_mask(layer, sequences, inputs_embeds, cache, **options)
    if isinstance(sequences.attention_mask, BlockMask):
        return FlexMask(block_mask)
    return FlexMask(block_mask, sequences.visibility(layer, cache).visible_count)


def _make_transformers_mask(layer, sequences, inputs_embeds, cache, **options) -> Tensor | BlockMask | None:
    config, mask = layer.config, sequences.attention_mask
    if sequences.source_length is not None:
        source = inputs_embeds.new_empty(len(inputs_embeds), sequences.source_length, 0)  # its shape is read
        return create_bidirectional_mask(config, inputs_embeds, mask, encoder_hidden_states=source)
    make = create_causal_mask
    if layer.sliding_window is not None:
        make, config = create_sliding_window_causal_mask, config.per_layer_config[layer.layer_idx]
    options |= {CACHE_NAME: cache, "position_ids": sequences.packed_position_ids, "layer_idx": layer.layer_idx}
    return make(config, inputs_embeds, mask, **options)


# By what a backend takes
MASK_MAKERS = {
    "visibility": _make_visibility_mask,
    "state": _make_visibility_mask,
    "dense": _make_dense_mask,
    "block": _make_block_mask,
    "padding": _make_transformers_mask,
}


def _as_booleans(attention_mask) -> Tensor:
    """Converts a caller's 4-D mask to booleans. Most activations give a bias no meaning."""
    if not attention_mask.is_floating_point():
        return attention_mask.bool()
    hidden = attention_mask <= -1e4  # float16 ends at -65504
    if not is_tracing(attention_mask) and not (hidden | (attention_mask == 0)).all():
        raise ValueError(
            "attention_mask: a 4-D floating-point mask must hold 0 (visible) or the dtype's lowest number; additive "
            "biases are not supported"
        )
    return ~hidden


def read_mask(
    attention_mask: Visibility | Tensor | None, query: Tensor, key: Tensor, is_causal: bool = True
) -> tuple[Visibility | Tensor, Tensor]:
    """Returns a backend's mask as a `Visibility` or as booleans `(batch or 1, 1 or heads, query, key)`.

    Also returns how many keys each query sees, `(batch or 1, 1 or heads, query)`. Without a mask, several queries see
    the keys up to their own index; a single query, and a query of an encoder, sees all keys.
    """
    (batch, heads, query_length, _), key_length = query.shape, key.shape[2]
    if attention_mask is None:
        offset = 0 if query_length > 1 else key_length - 1
        attention_mask = make_visibility(query_length, key_length, offset, query.device, is_causal=is_causal)
    if isinstance(attention_mask, Visibility):
        attention_mask.check(query_length, key_length)
        return attention_mask, attention_mask.visible_count[:, None]
    shape = tuple(attention_mask.shape)
    if shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2] != query_length or shape[3] < key_length:
        expected = f"({batch}, 1 or {heads}, {query_length}, {key_length})"
        raise ValueError(f"attention_mask={shape} must be (batch, 1 or heads, query, key)={expected}")
    visible = _as_booleans(attention_mask)[..., :key_length]
    return visible, visible.sum(dim=-1)


def read_visible(
    attention_mask: Visibility | Tensor | None, query: Tensor, key: Tensor, is_causal: bool = True
) -> tuple[Tensor | None, Tensor | int]:
    """Returns booleans and counts as `read_mask` does, or `None` and one number if every query sees all keys."""
    if attention_mask is None and (query.shape[2] == 1 or not is_causal) and not is_tracing(query):
        return None, key.shape[2]
    visible, visible_count = read_mask(attention_mask, query, key, is_causal)
    return visible.dense() if isinstance(visible, Visibility) else visible, visible_count

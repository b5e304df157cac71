"""Masks: which keys each query sees, what a backend takes to say so, and how a backend reads it.

Shapes: batch, heads, query (positions of this call), key (cached positions plus those of this call).

The number `n` of keys that a query sees depends on that query alone, never on the padded, cached or total length. That
makes cached decoding, padding and packing exact for every activation.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import nn
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


# What masks are made of


class LayerArgument:
    """A dataclass among the arguments of a layer. A named tuple would become a plain one in programs that walk
    through the arguments.
    """

    def to(self, *args, **kwargs) -> Self:
        """Moves all tensors, for programs that move the arguments of a layer to its device."""

        def move(leaf: Any) -> Any:
            return leaf.to(*args, **kwargs) if hasattr(leaf, "to") else leaf

        return replace(self, **{entry.name: tree_map(move, getattr(self, entry.name)) for entry in fields(self)})


@dataclass
class Visibility(LayerArgument):
    """The keys that each query sees, in O(length) memory: those from `first_key` to `last_key` that are valid.

    The first and the last key never fall from query to query. They are `None` if no key is too early, or too late.
    """

    last_key: torch.Tensor | None  # (batch or 1, query)
    key_length: int  # including keys of a static cache that are still empty
    visible_count: torch.Tensor  # (batch or 1, query), the number `n` of keys each query sees
    key_is_valid: torch.Tensor | None = None  # (batch, key) booleans, false for padding
    first_key: torch.Tensor | None = None  # (batch or 1, query)

    def check(self, query_length: int, key_length: int) -> None:
        """Raises `ValueError` if it was made for another number of queries or keys."""
        if (made_for := (self.visible_count.shape[-1], self.key_length)) != (query_length, key_length):
            raise ValueError(
                f"the mask is for (query, key)={made_for}, and this call has {(query_length, key_length)}"
            )

    def excluding_self(self) -> "Visibility":
        """Returns the visibility, in causal order, without each query's own token."""
        self_count = 1 if self.key_is_valid is None else self.key_is_valid[:, self.last_key[0]].long()
        return replace(self, last_key=self.last_key - 1, visible_count=self.visible_count - self_count)

    def rows(self, start: int, end: int, key_length: int) -> "Visibility":
        """Returns the visibility of some queries, which see at most the first `key_length` keys."""
        key_is_valid = None if self.key_is_valid is None else self.key_is_valid[:, :key_length]
        first_key, last_key = (None if key is None else key[:, start:end] for key in (self.first_key, self.last_key))
        return Visibility(last_key, key_length, self.visible_count[:, start:end], key_is_valid, first_key)

    def dense(self) -> torch.Tensor:
        """Returns the boolean mask `(batch or 1, 1, query, key)`, true where the query sees the key."""
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
    query_offset: int | torch.Tensor,
    device: torch.device,
    attention_mask: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
    sliding_window: int | None = None,
    key_offset: int = 0,
    is_causal: bool = True,
) -> Visibility:
    """Makes the visibility of the last `query_length` positions, with padding, packing or a window.

    Args:
        query_offset: number of tokens before the first query; a tensor if a static cache counts them.
        attention_mask: `(batch, tokens)` booleans, false for padding; tokens beyond it are padding.
        segments: `(batch or 1, key)`, the number of each token's packed document. Not together with `attention_mask`
            or a cache.
        sliding_window: how many tokens a query sees at most, itself and those before it; without causal order that
            many on each side of itself.
        key_offset: number of tokens before the first key, which a cache of the window has forgotten.
    """
    query_index = torch.arange(query_length, device=device) + (query_offset - key_offset)
    first_key, last_key = None, query_index[None] if is_causal else None
    if sliding_window is not None:
        first_key = (query_index - (sliding_window - is_causal)).clamp(min=0)[None]
        last_key = last_key if is_causal else (query_index + sliding_window).clamp(max=key_length - 1)[None]
    if segments is not None:
        document_start = _document_starts(segments, query_index)
        first_key = document_start if first_key is None else torch.maximum(document_start, first_key)
        if not is_causal:
            document_end = key_length - 1 - _document_starts(segments.flip(-1), query_index).flip(-1)
            last_key = document_end if last_key is None else torch.minimum(document_end, last_key)
    if attention_mask is not None:
        end = key_offset + key_length
        key_is_valid = nn.functional.pad(attention_mask.bool(), (0, end))[:, key_offset:end]
        seen = key_is_valid.long().cumsum(dim=-1)  # OpenVINO would keep booleans
        count = seen[:, -1:].expand(-1, query_length) if last_key is None else seen[:, last_key[0]]
        if first_key is not None:
            count = count - (seen - key_is_valid.long())[:, first_key[0]]
        return Visibility(last_key, key_length, count, key_is_valid, first_key)
    if last_key is None:
        end = torch.full_like(query_index, key_length)[None]
    else:
        end = last_key.clamp(max=key_length - 1) + 1
    return Visibility(last_key, key_length, end if first_key is None else end - first_key, first_key=first_key)


def _document_starts(segments: torch.Tensor, query_index: torch.Tensor) -> torch.Tensor:
    """Returns `(batch or 1, query)`, the first token of each token's packed document."""
    if torch.compiler.is_exporting():
        # Counts the tokens before the document, because ONNX lacks a cumulative maximum
        is_other = segments[:, None, :] != segments[:, :, None]
        return (is_other & (query_index < query_index[:, None])).sum(dim=-1)
    starts_here = torch.ones_like(segments, dtype=torch.bool)
    starts_here[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return torch.where(starts_here, query_index, 0).cummax(dim=-1).values


@dataclass
class TokenContext(LayerArgument):
    """The tokens of one forward call as one layer sees them, for attention parts.

    Queries are the tokens of this call. Keys are these and the cached ones; a static cache also has keys that are
    still empty. Fields that compare the order of queries and keys are `None` in cross-attention. In continuous
    batching all but the first two are.

    Attributes:
        visible_count: `(batch or 1, 1 or heads, query)`, the number `n` of keys that each query sees.
        query_position: `(batch or 1, query)`, the number of tokens before each in its text or packed document. It
            counts neither padding nor positions that the caller gives.
        key_position: `(batch or 1, key)`, the same for keys, also those in the cache.
        query_index: `(query,)`, each token's own index among the keys of the layer.
        is_valid: `(batch, query)`, false for padding; `None` without padding.
        key_is_valid: `(batch, key)`, the same for keys.
        document: `(batch, key)`, the number of each key's packed document; `None` without packed documents.
        has_own_mask: whether the caller gave a mask of queries and keys, which alone says what is visible.
    """

    visible_count: torch.Tensor
    query_position: torch.Tensor | None = None
    key_position: torch.Tensor | None = None
    query_index: torch.Tensor | None = None
    is_valid: torch.Tensor | None = None
    key_is_valid: torch.Tensor | None = None
    document: torch.Tensor | None = None
    has_own_mask: bool = False


class FlexMask(NamedTuple):
    """The mask of `flex_attention`, and how many keys each query sees, `(batch or 1, query)`, where that is known."""

    block_mask: BlockMask | None
    visible_count: torch.Tensor | None = None


@dataclass
class Sequences(LayerArgument):
    """What the arguments of a call say. Each layer makes its `Visibility` and `TokenContext` from it."""

    position_ids: torch.Tensor  # (batch or 1, query)
    # The caller's, or `None` if it hides nothing. In continuous batching Transformers' own, `None` for flash attention
    attention_mask: torch.Tensor | BlockMask | None = None
    query_offset: int | torch.Tensor = 0  # tokens before the first query; a tensor if a static cache counts them
    padding_mask: torch.Tensor | None = None  # (batch, tokens), false for padding
    segments: torch.Tensor | None = None  # (batch, query), the number of each token's packed document
    last_position: int | None = None  # the largest, if it is known without reading `position_ids`
    is_paged: bool = False  # in continuous batching, where `attention_mask` alone says what a query sees
    is_causal: bool = True
    source_length: int | None = None  # in cross-attention, the number of the encoder's tokens

    @property
    def packed_position_ids(self) -> torch.Tensor | None:
        """`position_ids` if documents are packed, else `None`. Transformers' masks and flash attention read them."""
        return None if self.segments is None else self.position_ids

    def visibility(self, layer: nn.Module, cache: Cache | None) -> Visibility:
        """Makes the visibility of an attention layer before it caches the tokens of this call, without a 4-D mask."""
        sliding_window, sees_own_key = layer.visible_keys
        key_length, key_offset = self.key_range(layer, cache)
        query_length, device = self.position_ids.shape[-1], self.position_ids.device
        options = (self.padding_mask, self.segments, sliding_window, key_offset, self.is_causal)
        visibility = make_visibility(query_length, key_length, self.query_offset, device, *options)
        return visibility if sees_own_key else visibility.excluding_self()

    def token_context(self, layer: nn.Module, cache: Cache | None, mask: Any) -> TokenContext:
        """Returns the context of this call's tokens in an attention layer, whose backend takes `mask`."""
        if self.is_paged:  # each request is one text without padding
            count, sliding_window = self.position_ids[:, None] + 1, layer.visible_keys[0]
            count = count if sliding_window is None else count.clamp(max=sliding_window)
            return TokenContext(count, self.position_ids)
        visibility = self.visibility(layer, cache)
        of_keys = (None, None, None, None, visibility.key_is_valid)
        if self.source_length is None:
            of_keys = self._positions(visibility, self.key_range(layer, cache)[1])
        has_own_mask = is_dense(self.attention_mask) or isinstance(self.attention_mask, BlockMask)
        count = visibility.visible_count[:, None]
        if has_own_mask and isinstance(mask, torch.Tensor):  # it alone says what is visible
            count = mask[..., : visibility.key_length].sum(dim=-1)
        return TokenContext(count, *of_keys, self.segments, has_own_mask)

    def _positions(self, visibility: Visibility, key_offset: int) -> tuple[torch.Tensor | None, ...]:
        """Returns the fields of a `TokenContext` from `query_position` to `key_is_valid`."""
        device, key_length, key_is_valid = self.position_ids.device, visibility.key_length, visibility.key_is_valid
        query_index = torch.arange(self.position_ids.shape[-1], device=device) + (self.query_offset - key_offset)
        if self.segments is not None:  # without a cache, so the keys are the queries
            key_position = query_index - _document_starts(self.segments, query_index)
        elif self.padding_mask is None:
            key_position = torch.arange(key_offset, key_offset + key_length, device=device)[None]
        else:
            end = key_offset + key_length
            mask = nn.functional.pad(self.padding_mask.long(), (0, end))
            key_position = (mask.cumsum(dim=-1) - 1).clamp(min=0)[:, key_offset:end]
        is_valid = None if key_is_valid is None else key_is_valid[:, query_index]
        return key_position[:, query_index], key_position, query_index, is_valid, key_is_valid

    def sees_all_keys(self, layer: nn.Module, cache: Cache | None) -> bool:
        """Tells whether every query sees all keys of an attention layer."""
        sliding_window, sees_own_key = layer.visible_keys
        if not sees_own_key or self.attention_mask is not None:
            return False
        if not self.is_causal:
            return self.padding_mask is None and self.segments is None and sliding_window is None
        if self.position_ids.shape[-1] > 1 or self.padding_mask is not None or not isinstance(self.query_offset, int):
            return False
        if is_tracing(self.position_ids):  # the number of keys would become a constant of the program
            return False
        key_length, key_offset = self.key_range(layer, cache)
        is_within = sliding_window is None or key_length <= sliding_window
        return key_length + key_offset == self.query_offset + 1 and is_within

    def key_range(self, layer: nn.Module, cache: Cache | None) -> tuple[int, int]:
        """Returns the number of keys of a layer, and of tokens before them that a window has forgotten."""
        query_length = self.position_ids.shape[-1]
        if self.source_length is not None:
            return self.source_length, 0
        return (query_length, 0) if cache is None else cache.get_mask_sizes(query_length, layer.layer_idx)


@dataclass
class LayerMasks(LayerArgument):
    """The backend, the mask and the token context of every layer in one call of the model.

    All layers get the same object as their `attention_mask`, and each reads its own entry. So programs that call the
    layers one by one with the arguments of the first, such as layer-wise quantizers, compute what the model computes.
    A layer that another program has wrapped, and so hidden from the model, adds its own entry.
    """

    sequences: Sequences
    kinds: dict[int, tuple] = field(default_factory=dict)  # backend and `visible_keys` of each layer, by its number
    # By such a kind: the mask that the backend takes, and the context if a layer needs it
    made: dict[tuple, tuple[Any, TokenContext | None]] = field(default_factory=dict)


def read_sequences(
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None = None,
    position_ids: torch.Tensor | None = None,
    cache: Cache | PagedAttentionCache | None = None,
    use_cache: bool | None = None,
    layer_idx: int = 0,
    is_causal: bool = True,
    source: torch.Tensor | None = None,
    **kwargs,
) -> Sequences:
    """Reads padding, packed documents and positions from the arguments of one call of `NLQModel`.

    `layer_idx` is a layer that is called alone. In cross-attention the mask is that of the encoder's tokens `source`,
    `(batch, key, hidden)`, and other arguments are not read.

    Raises:
        ValueError: if an argument has a wrong shape, arguments contradict each other, or packed documents are cached.
    """
    (batch, query_length), device = inputs_embeds.shape[:2], inputs_embeds.device
    if source is not None:
        sizes = {"batch": len(source), "query_length": source.shape[1], "query_offset": 0, "is_causal": False}
        padding_mask = _check_mask(attention_mask, **sizes, name="encoder_attention_mask")
        if _hides_nothing(padding_mask):
            attention_mask = padding_mask = None
        positions, length = torch.arange(query_length, device=device)[None], source.shape[1]
        return Sequences(positions, attention_mask, padding_mask=padding_mask, is_causal=False, source_length=length)
    if isinstance(cache, PagedAttentionCache):
        return Sequences(position_ids, attention_mask, is_paged=True)
    if position_ids is not None:
        position_ids = position_ids.expand(batch, query_length)
    query_offset = 0 if cache is None else cache.get_seq_length(layer_idx)
    padding_mask = _check_mask(attention_mask, batch, query_length, query_offset, is_causal)
    if isinstance(query_offset, torch.Tensor):  # a static cache counts on its device
        query_offset = query_offset.to(device)

    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        if kwargs.get(name) is not None and position_ids is None:
            raise ValueError(f"{name}: packed documents are found by their position_ids; give these too")
    segments = None
    # Transformers too reads one document per row with a mask or a cache: `generate` leaves out a mask of ones
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
        position_ids = query_index[None]
        if padding_mask is not None:
            position_ids = (padding_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, query_index]
    options = (query_offset, padding_mask, segments, last_position)
    return Sequences(position_ids, attention_mask, *options, is_causal=is_causal)


def is_dense(attention_mask: Any) -> bool:
    """Tells whether a caller's mask is one of queries and keys, `(batch, 1 or heads, query, key)`."""
    return isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4


def _hides_nothing(padding_mask: torch.Tensor | None) -> bool:
    return padding_mask is not None and not is_tracing(padding_mask) and bool(padding_mask.all())


def _check_mask(
    attention_mask, batch, query_length, query_offset, is_causal, name="attention_mask"
) -> torch.Tensor | None:
    """Returns the attention mask if it is a padding mask `(batch, key)`, else `None`."""
    if attention_mask is None or isinstance(attention_mask, BlockMask):
        return None
    if not isinstance(attention_mask, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, not a {type(attention_mask).__name__}")
    shape = tuple(attention_mask.shape)
    if attention_mask.ndim not in (2, 4):
        raise ValueError(f"{name}={shape} must be (batch, key) or (batch, 1 or heads, query, key)")
    if attention_mask.ndim == 4:
        return None
    seen = query_offset + query_length
    # A static cache has a longer mask
    if isinstance(query_offset, int) and (shape[0] != batch or shape[1] < seen or (shape[1] > seen and not is_causal)):
        raise ValueError(f"{name}={shape} must be (batch, key)={(batch, seen)}, cached positions included")
    return attention_mask


def find_packed_documents(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the number `(batch, query)` of each token's packed document, or `None` if each row is one text."""
    if position_ids is None or position_ids.shape[-1] <= 1:
        return None
    return find_packed_sequence_indices(position_ids)


def refuse_packed(segments: torch.Tensor | None, reason: str) -> None:
    """Raises `ValueError` for packed documents, which a traced program cannot tell from others."""
    if segments is not None and not is_tracing(segments):
        raise ValueError(f"packed documents (position_ids that restart, without an attention_mask) {reason}")


def make_mask(
    name: str, backend: Any, layer: nn.Module, sequences: Sequences, inputs_embeds: torch.Tensor, cache: Cache | None
) -> Visibility | FlexMask | torch.Tensor | None:
    """Makes the mask that a backend takes for a layer, before the tokens of this call are in the cache.

    Raises:
        ValueError: if the backend cannot use the caller's mask, the cache or a batch of packed documents.
    """
    _check_backend(name, backend, layer, sequences, cache)
    if sequences.is_paged:
        # 0 where a query sees a key, and the dtype's lowest number elsewhere; flash attention gets none
        return None if sequences.attention_mask is None else sequences.attention_mask == 0
    return MASK_MAKERS[backend.mask](layer, sequences, inputs_embeds, cache)


def _check_backend(name: str, backend: Any, layer: nn.Module, sequences: Sequences, cache: Cache | None) -> None:
    """Raises `ValueError` for a mask, a cache or packed documents that the backend of a layer cannot use."""
    index, mask, kind = layer.layer_idx, sequences.attention_mask, backend.mask
    asked = layer.config._attn_implementation
    if sequences.is_paged:
        if not backend.is_paged:
            raise ValueError(f"attn_implementation={asked!r} takes no paged cache")
        return
    is_exported = torch.compiler.is_exporting() and cache is not None and index < len(cache.layers)
    if is_exported and cache.is_sliding[index] and cache.get_seq_length(index):
        # A program would keep the sample's number of tokens, which this layer of the cache counts by a plain number
        raise ValueError(
            f"sliding_window (layer {index}): export without cache, or with a DynamicCache() without a config"
        )
    if is_dense(mask) and kind not in ("visibility", "dense"):
        raise ValueError(f"attention_mask: attn_implementation={name!r} (layer {index}) takes no 4-D mask")
    # A block mask would replace the window
    if isinstance(mask, BlockMask) and (kind != "block" or layer.sliding_window):
        raise ValueError(f"attention_mask: attn_implementation={name!r} (layer {index}) takes no BlockMask")
    if kind == "padding" and sequences.source_length is not None and mask is not None:
        # Flash attention reads one padding for queries and keys
        raise ValueError(
            f"encoder_attention_mask: attn_implementation={name!r} takes no padded source; use 'sdpa' or 'nlq'"
        )
    rows = 1 if sequences.segments is None else len(sequences.position_ids)
    if kind == "padding" and rows > 1 and is_flash_attention_requested(layer.config):
        raise ValueError(
            f"attn_implementation={asked!r} takes packed documents in a batch of 1, not {rows}; flatten the batch "
            "(DataCollatorWithFlattening), or use 'sdpa'"
        )
    if kind == "block" and getattr(cache, "is_compileable", False):
        # The block mask would read the length of the cache when the kernel runs, after the cache has grown
        raise ValueError(f"attn_implementation={name!r} takes no static cache; use a dynamic one, or 'nlq'")


def _make_visibility_mask(layer, sequences, inputs_embeds, cache) -> Visibility | torch.Tensor | None:
    """Returns the mask of NLQ's backends, `None` if every query sees all keys."""
    if sequences.sees_all_keys(layer, cache):
        return None
    mask = _as_booleans(sequences.attention_mask) if is_dense(sequences.attention_mask) else None
    if mask is not None and layer.visible_keys == (None, True):
        return mask
    visibility = sequences.visibility(layer, cache)
    if mask is None:
        return visibility
    key_length, key_offset = sequences.key_range(layer, cache)
    if mask.shape[-1] != key_length:  # it covers what the cache of the window has forgotten too
        tokens = sequences.query_offset + inputs_embeds.shape[1]
        if isinstance(tokens, int) and mask.shape[-1] < tokens:
            raise ValueError(
                f"attention_mask={tuple(mask.shape)} must have {tokens} keys, sliding_window={layer.sliding_window}"
            )
        mask = mask[..., key_offset : key_offset + key_length]
    # A static cache that is not full yet is longer
    return nn.functional.pad(mask, (0, key_length - mask.shape[-1])) & visibility.dense()


def _make_dense_mask(layer, sequences, inputs_embeds, cache) -> torch.Tensor | None:
    """Returns the booleans that PyTorch's kernels take, or `None` for an order of keys that they know."""
    # Transformers packs documents in causal order only
    is_known = layer.is_causal or (sequences.source_length is None and sequences.segments is None)
    if is_known and not is_dense(sequences.attention_mask) and not sequences.sees_all_keys(layer, cache):
        return _make_transformers_mask(layer, sequences, inputs_embeds, cache)
    mask = _make_visibility_mask(layer, sequences, inputs_embeds, cache)
    return mask.dense() if isinstance(mask, Visibility) else mask


def _make_block_mask(layer, sequences, inputs_embeds, cache) -> FlexMask:
    """Returns the mask of `flex_attention`, with the number of keys that each query sees."""
    options = {}
    if not layer.is_causal and sequences.segments is not None:
        options["and_mask_function"] = packed_sequence_mask_function(sequences.segments)
    block_mask = _make_transformers_mask(layer, sequences, inputs_embeds, cache, **options)
    if isinstance(sequences.attention_mask, BlockMask):
        return FlexMask(block_mask)
    return FlexMask(block_mask, sequences.visibility(layer, cache).visible_count)


def _make_transformers_mask(layer, sequences, inputs_embeds, cache, **options) -> torch.Tensor | BlockMask | None:
    """Returns what Transformers makes for the attention implementation of the configuration."""
    config, mask = layer.config, sequences.attention_mask
    if sequences.source_length is not None:
        source = inputs_embeds.new_empty(len(inputs_embeds), sequences.source_length, 0)  # its shape is read
        return create_bidirectional_mask(config, inputs_embeds, mask, encoder_hidden_states=source)
    # Both make a mask without causal order for an encoder
    make = create_causal_mask
    if layer.sliding_window is not None:
        make, config = create_sliding_window_causal_mask, config.per_layer_config[layer.layer_idx]
    options |= {CACHE_NAME: cache, "position_ids": sequences.packed_position_ids, "layer_idx": layer.layer_idx}
    return make(config, inputs_embeds, mask, **options)


# By what a backend takes, with arguments of `make_mask`. Linear attention reads which keys enter its state
MASK_MAKERS = {
    "visibility": _make_visibility_mask,
    "state": _make_visibility_mask,
    "dense": _make_dense_mask,
    "block": _make_block_mask,
    "padding": _make_transformers_mask,
}


def _as_booleans(attention_mask: torch.Tensor) -> torch.Tensor:
    """Converts a caller's 4-D mask to booleans, true where a query sees a key.

    An additive mask may contain 0 (visible) and large negative numbers (hidden) only, because most activations give a
    bias no meaning.
    """
    if not attention_mask.is_floating_point():
        return attention_mask.bool()
    hidden = attention_mask <= -1e4  # the lowest float16 number is -65504
    if not is_tracing(attention_mask) and not (hidden | (attention_mask == 0)).all():
        raise ValueError(
            "attention_mask: a 4-D floating-point mask must hold only 0 (visible) and the dtype's lowest number "
            "(hidden); additive biases are not supported"
        )
    return ~hidden


def read_mask(
    attention_mask: Visibility | torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, is_causal: bool = True
) -> tuple[Visibility | torch.Tensor, torch.Tensor]:
    """Checks the mask argument of a backend, and makes one if it is `None`.

    Without a mask, several queries see the keys up to their own index, counted from the first key; a single query, and
    a query of an encoder, sees all keys.

    Args:
        attention_mask: a `Visibility`, a 4-D mask, or `None`.
        query, key: `(batch, heads or key_value_heads, query or key, head_dim)`.

    Returns:
        A `Visibility` or a boolean mask `(batch or 1, 1 or heads, query, key)`, and how many keys each query sees,
        `(batch or 1, 1 or heads, query)`.
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
    attention_mask: Visibility | torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, is_causal: bool = True
) -> tuple[torch.Tensor | None, torch.Tensor | int]:
    """As `read_mask`, with a boolean mask in place of a `Visibility`, or `None` and one number if every query sees all
    keys.
    """
    if attention_mask is None and (query.shape[2] == 1 or not is_causal) and not is_tracing(query):
        return None, key.shape[2]
    visible, visible_count = read_mask(attention_mask, query, key, is_causal)
    return visible.dense() if isinstance(visible, Visibility) else visible, visible_count

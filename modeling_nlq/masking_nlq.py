"""The keys that each query sees: causal order or none, windows, padding, packed documents, cached tokens, a caller's
4-D mask.

Shapes: batch, heads, query (positions of this call), key (cached positions plus those of this call).

The number `n` of keys that a query sees depends on that query alone, never on the padded, cached or total length. That
makes cached decoding, padding and packing exact for every activation.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.masking_utils import BlockMask, find_packed_sequence_indices
from transformers.utils.import_utils import is_tracing


class LayerArgument:
    """A dataclass among the arguments of a layer. A named tuple would become a plain one in programs that walk through
    them.
    """

    def to(self, *args, **kwargs) -> Self:
        """Moves all tensors, for programs that move the arguments of a layer to its device."""

        def move(leaf: Any) -> Any:
            return leaf.to(*args, **kwargs) if hasattr(leaf, "to") else leaf

        return replace(self, **{own.name: tree_map(move, getattr(self, own.name)) for own in fields(self)})


@dataclass
class Visibility(LayerArgument):
    """The keys that each query sees, in O(length) memory: those from `first_key` to `last_key` that are valid.

    Attributes:
        last_key: `(batch or 1, query)`, the last key that each query may see: in causal order its own token, else the
            last one of its packed document or its window. It never falls from query to query. `None` if no key is too
            late.
        key_length: number of keys, including those of a static cache that are still empty.
        visible_count: `(batch or 1, query)`, the number `n` of keys each query sees.
        key_is_valid: `(batch, key)` booleans, false for padding; `None` if every key is valid.
        first_key: `(batch or 1, query)`, the first key that each query may see, because its packed document or its
            window begins there. It never falls from query to query. `None` if no key is too early.
    """

    last_key: torch.Tensor | None
    key_length: int
    visible_count: torch.Tensor
    key_is_valid: torch.Tensor | None = None
    first_key: torch.Tensor | None = None

    def check(self, query_length: int, key_length: int) -> None:
        """Raises `ValueError` if it was made for another number of queries or keys."""
        if (made_for := (self.visible_count.shape[-1], self.key_length)) != (query_length, key_length):
            raise ValueError(
                f"the mask is for (query, key)={made_for}, and this call has {(query_length, key_length)}"
            )

    def excluding_self(self) -> "Visibility":
        """Returns the visibility, in causal order, without the last key of each query, its own token."""
        own = 1 if self.key_is_valid is None else self.key_is_valid[:, self.last_key[0]].long()
        return replace(self, last_key=self.last_key - 1, visible_count=self.visible_count - own)

    def rows(self, start: int, end: int, key_length: int) -> "Visibility":
        """Returns the visibility of some queries, of which none sees a key after the first `key_length`."""
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


@dataclass
class TokenContext(LayerArgument):
    """What an attention part may ask about the tokens of one forward call, as one layer sees them.

    Queries are the tokens of this call. Keys are these and the cached ones, in a static cache also places that are
    still empty. What depends on an order of both is `None` in cross-attention, and all but the first two in continuous
    batching.

    Attributes:
        visible_count: `(batch or 1, 1 or heads, query)`, the number `n` of keys that each query sees.
        query_position: `(batch or 1, query)`, the number of tokens before each in its text or packed document. Padding
            is not counted, nor are positions that the caller gives.
        key_position: `(batch or 1, key)`, the same for keys, also those in the cache.
        query_index: `(query,)`, each token's own index among the keys of the layer.
        is_valid: `(batch, query)`, false for padding; `None` if there is none.
        key_is_valid: `(batch, key)`, the same for keys.
        document: `(batch, key)`, the number of each key's packed document; `None` if there are no packed documents.
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
        query_length: number of queries in this call.
        key_length: number of keys, including those of a static cache that are still empty.
        query_offset: number of tokens before the first query; a tensor if a static cache counts them.
        attention_mask: `(batch, tokens)` booleans, false for padding; tokens beyond it are padding.
        segments: `(batch or 1, key)`, the number of each token's packed document. Not together with `attention_mask`
            or a cache.
        sliding_window: how many tokens a query sees at most, itself and those before it; without causal order that
            many on each side of itself; `None` for all.
        key_offset: number of tokens before the first key, which a cache of the window has forgotten.
        is_causal: whether no query sees a later token.
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
    end = (
        torch.full_like(query_index, key_length)[None] if last_key is None else last_key.clamp(max=key_length - 1) + 1
    )
    return Visibility(last_key, key_length, end if first_key is None else end - first_key, first_key=first_key)


def _document_starts(segments: torch.Tensor, query_index: torch.Tensor) -> torch.Tensor:
    """Returns `(batch or 1, query)`, the first token of each token's packed document."""
    if torch.compiler.is_exporting():
        # Counts the tokens before the document, because ONNX has no cumulative maximum
        is_other = segments[:, None, :] != segments[:, :, None]
        return (is_other & (query_index < query_index[:, None])).sum(dim=-1)
    starts_here = torch.ones_like(segments, dtype=torch.bool)
    starts_here[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return torch.where(starts_here, query_index, 0).cummax(dim=-1).values


def boolean_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Converts a caller's 4-D mask `(batch, 1 or heads, query, key)` to booleans, true where a query sees a key.

    An additive mask may contain 0 (visible) and large negative numbers (hidden) only. Most activations give a bias no
    meaning.

    Raises:
        ValueError: if a floating-point mask contains other numbers.
    """
    if not attention_mask.is_floating_point():
        return attention_mask.bool()
    hidden = attention_mask <= -1e4  # the lowest float16 number is -65504
    if not is_tracing(attention_mask) and not (hidden | (attention_mask == 0)).all():
        raise ValueError(
            "attention_mask: a 4-D floating-point mask must hold only 0 (visible) and the dtype's lowest number "
            "(hidden); "
            "additive biases are not supported"
        )
    return ~hidden


def read_mask(
    attention_mask: Visibility | torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, is_causal: bool = True
) -> tuple[Visibility | torch.Tensor, torch.Tensor]:
    """Checks the mask argument of a backend, and makes one if there is none.

    Args:
        attention_mask: a `Visibility`, a 4-D mask, or `None`. Without a mask, several queries see the keys up to their
            own index, counted from the first key, and a single query sees all keys.
        query: `(batch, heads, query, head_dim)`.
        key: `(batch, key_value_heads, key, head_dim)`.
        is_causal: false for an encoder, whose queries see all keys without a mask.

    Returns:
        A `Visibility` or a boolean mask `(batch or 1, 1 or heads, query, key)`, and how many keys each query sees,
        `(batch or 1, 1 or heads, query)`.

    Raises:
        ValueError: if the mask does not fit the queries and keys, or contains numbers other than `boolean_mask`
            allows.
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
    visible = boolean_mask(attention_mask)[..., :key_length]
    return visible, visible.sum(dim=-1)


def read_visible(
    attention_mask: Visibility | torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, is_causal: bool = True
) -> tuple[torch.Tensor | None, torch.Tensor | int]:
    """Reads the mask argument of a backend that takes booleans.

    The arguments are those of `read_mask`.

    Returns:
        A boolean mask, or `None` if every query sees all keys; and how many keys each query sees, as in `read_mask` or
        as one number.
    """
    if attention_mask is None and (query.shape[2] == 1 or not is_causal) and not is_tracing(query):
        return None, key.shape[2]
    visible, visible_count = read_mask(attention_mask, query, key, is_causal)
    return visible.dense() if isinstance(visible, Visibility) else visible, visible_count


@dataclass
class Sequences(LayerArgument):
    """The sequences of one call of the model, from which each layer gets its `Visibility` and `TokenContext`.

    Attributes:
        position_ids: `(batch or 1, query)`, the position of each token in its text.
        attention_mask: the caller's mask, or `None` if it hides nothing. In continuous batching Transformers' own, or
            for flash attention `None`.
        query_offset: number of tokens before the first query; a tensor if a static cache counts them.
        padding_mask: `(batch, tokens)`, false for padding, or `None`.
        segments: `(batch, query)`, the number of each token's packed document, or `None`.
        last_position: the largest position where it is known without reading `position_ids`, else `None`.
        is_paged: whether this is a call of continuous batching, where `attention_mask` alone says what a query sees,
            or for flash attention the arguments that Transformers passes to it.
        is_causal: whether no token sees a later one.
        source_length: in cross-attention the number of the encoder's tokens, which are the keys; else `None`.
    """

    position_ids: torch.Tensor
    attention_mask: torch.Tensor | BlockMask | None = None
    query_offset: int | torch.Tensor = 0
    padding_mask: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    last_position: int | None = None
    is_paged: bool = False
    is_causal: bool = True
    source_length: int | None = None

    @property
    def packed_position_ids(self) -> torch.Tensor | None:
        """`position_ids` if documents are packed, which Transformers' masks and flash attention find by them, else
        `None`.
        """
        return None if self.segments is None else self.position_ids

    def visibility(
        self, cache: Cache | None, layer_idx: int, sliding_window: int | None = None, sees_own_key: bool = True
    ) -> Visibility:
        """Makes the visibility of a layer, apart from a 4-D or block mask of the caller.

        Args:
            cache: the cache, before the tokens of this call.
            layer_idx: the number of the layer. A cache of a window has forgotten the tokens before it.
            sliding_window: the window of the layer.
            sees_own_key: whether a query sees the key of its own token.
        """
        key_length, key_offset = self.key_range(cache, layer_idx)
        query_length, device = self.position_ids.shape[-1], self.position_ids.device
        options = (self.padding_mask, self.segments, sliding_window, key_offset, self.is_causal)
        visibility = make_visibility(query_length, key_length, self.query_offset, device, *options)
        return visibility if sees_own_key else visibility.excluding_self()

    def token_context(
        self, cache: Cache | None, layer_idx: int, sliding_window: int | None, sees_own_key: bool, mask: Any
    ) -> TokenContext:
        """Returns the context of this call's tokens in a layer.

        Args:
            cache, layer_idx, sliding_window, sees_own_key: as in `visibility`.
            mask: the mask that the layer's backend takes. A caller's own 4-D mask decides what is visible.
        """
        if self.is_paged:  # each request is one text without padding
            count = self.position_ids[:, None] + 1
            return TokenContext(
                count if sliding_window is None else count.clamp(max=sliding_window), self.position_ids
            )
        visibility = self.visibility(cache, layer_idx, sliding_window)
        of_keys = (None, None, None, None, visibility.key_is_valid)
        if self.source_length is None:
            of_keys = self._positions(visibility, self.key_range(cache, layer_idx)[1])
        caller_mask = self.attention_mask
        has_own_mask = caller_mask is not None and not (
            isinstance(caller_mask, torch.Tensor) and caller_mask.ndim == 2
        )
        if has_own_mask and isinstance(mask, torch.Tensor):
            count = mask[..., : visibility.key_length].sum(dim=-1)
        else:
            count = (visibility if sees_own_key else visibility.excluding_self()).visible_count[:, None]
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

    def sees_all_keys(self, cache: Cache | None, layer_idx: int, sliding_window: int | None) -> bool:
        """Tells whether every query sees all keys of a layer; the arguments are those of `visibility`."""
        if not self.is_causal:
            return self.padding_mask is None and self.segments is None and sliding_window is None
        if self.position_ids.shape[-1] > 1 or self.padding_mask is not None or not isinstance(self.query_offset, int):
            return False
        if is_tracing(self.position_ids):  # the number of keys would become a constant of the program
            return False
        key_length, key_offset = self.key_range(cache, layer_idx)
        return key_length + key_offset == self.query_offset + 1 and (
            sliding_window is None or key_length <= sliding_window
        )

    def key_range(self, cache: Cache | None, layer_idx: int) -> tuple[int, int]:
        """Returns the number of keys of a layer, and the number of tokens before the first key."""
        query_length = self.position_ids.shape[-1]
        if self.source_length is not None:
            return self.source_length, 0
        return (query_length, 0) if cache is None else cache.get_mask_sizes(query_length, layer_idx)


@dataclass
class LayerMasks(LayerArgument):
    """The backend, the mask and the token context of every layer in one call of the model.

    All layers get the same object as their `attention_mask`, and each takes what is its own. So a program that calls
    the layers one by one with the arguments of the first, as layer-wise quantizers do, computes what the model
    computes. A layer that the model could not ask, because a program has wrapped it, adds its own.

    Attributes:
        sequences: padding, packed documents and positions of the call.
        kinds: the backend of each layer and its `visible_keys`, by its number.
        made: the mask that the backend takes, and the context if a layer needs it, by such a kind.
    """

    sequences: Sequences
    kinds: dict[int, tuple] = field(default_factory=dict)
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
    """Reads padding, packed documents and positions from the arguments of one call of the model.

    Args:
        inputs_embeds: `(batch, query, hidden)`.
        attention_mask: `(batch, key)`, 0 for padding; or `(batch, 1 or heads, query, key)`; or a block mask.
        position_ids: `(batch or 1, query)`. Where they do not rise by one, a new packed document begins, unless there
            is a mask or a cache.
        cache: the cache, before the tokens of this call. With the paged one of continuous batching, the other
            arguments are Transformers' own.
        use_cache: whether the caller asked for a cache.
        layer_idx: the layer that is called, if it is called alone.
        is_causal: whether no token sees a later one.
        source: in cross-attention the encoder's tokens, `(batch, key, hidden)`. Then `attention_mask` is theirs, and
            `inputs_embeds` alone is read beside it.
        kwargs: others of the call. `cu_seq_lens_q`, `cu_seq_lens_k` and `seq_idx` need `position_ids`, and are not
            read.

    Raises:
        ValueError: if an argument has a wrong shape, the arguments contradict each other, or packed documents are to
            be cached.
    """
    (batch, query_length), device = inputs_embeds.shape[:2], inputs_embeds.device
    if source is not None:
        key_length = source.shape[1]
        padding_mask = _check_mask(attention_mask, *source.shape[:2], 0, False, name="encoder_attention_mask")
        if _hides_nothing(padding_mask):
            attention_mask = padding_mask = None
        positions = torch.arange(query_length, device=device)[None]
        return Sequences(
            positions, attention_mask, padding_mask=padding_mask, is_causal=False, source_length=key_length
        )
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
    # As in Transformers, a mask or a cache means one document per row: `generate` leaves out a mask of ones
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
    return Sequences(
        position_ids, attention_mask, query_offset, padding_mask, segments, last_position, is_causal=is_causal
    )


def _hides_nothing(padding_mask: torch.Tensor | None) -> bool:
    return padding_mask is not None and not is_tracing(padding_mask) and bool(padding_mask.all())


def _check_mask(
    attention_mask: torch.Tensor | BlockMask | None,
    batch: int,
    query_length: int,
    query_offset: int | torch.Tensor,
    is_causal: bool,
    name: str = "attention_mask",
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
    # Of a static cache the mask is longer
    if isinstance(query_offset, int) and (shape[0] != batch or shape[1] < seen or (shape[1] > seen and not is_causal)):
        raise ValueError(f"{name}={shape} must be (batch, key)={(batch, seen)}, cached positions included")
    return attention_mask


def find_packed_documents(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the number `(batch, query)` of each token's document, or `None` if each row is one document."""
    if position_ids is None or position_ids.shape[-1] <= 1:
        return None
    return find_packed_sequence_indices(position_ids)


def refuse_packed(segments: torch.Tensor | None, reason: str) -> None:
    """Raises `ValueError` for packed documents, which a traced program cannot tell from others."""
    if segments is not None and not is_tracing(segments):
        raise ValueError(f"packed documents (position_ids that restart, without an attention_mask) {reason}")

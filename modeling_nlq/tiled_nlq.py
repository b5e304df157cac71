"""`nlq_tiled`: every elementwise activation, and softmax with a bias, in memory linear in the length.

Forward and backward visit pairs of a tile of queries and a tile of keys that the mask does not hide, compute their
scores and keep only sums over these. Only softmax is rescaled between tiles (Dao et al. 2022, arXiv 2205.14135).

With `P = phi(S)`, normaliser `Z` and `O = P V / Z`, the gradients are, for `G = dO / Z`,

    dV = P^T G,    dP = G V^T,    dS = phi'(S) * dP,    dQ = scaling * dS K,    dK = scaling * dS^T Q,

where under the normaliser `"sum"`, which depends on every weight, `dP = G V^T - rowsum(G * O)`. A bias `query_i -
key_j` has the sums of `dS` over rows and columns as its gradients. For softmax `P` includes `1 / Z`.

Letters of shapes: b batch, g key and value heads, r query heads for each of them, q and k queries and keys of a tile.
"""

import bisect
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations_nlq import at_least_float32, counts_as_zero, exp_, get_attention_activation, zero_limit
from .attention_nlq import one_query_attention, one_query_by_pytorch
from .masking_nlq import can_be_read
from .ops_nlq import SCHEMA, AttentionInputs, DifferentiableAttention, define_operator, in_autocast_precision


# Queries and keys of a tile, whose scores should fit into a CPU's cache
LARGE_TILE, SMALL_TILE, MANY_HEADS = 256, 128, 32
# On CUDA few tiles need few launches: the most bytes of a tile's scores, of which backward holds five
MOST_BYTES, SHARE_OF_MEMORY = 2**28, 1 / 64


def _tile_size(query, memory: int | None = None) -> int:
    """Returns the side of a square tile, the same in backward; `memory` is that of a GPU, in bytes."""
    heads = query.shape[0] * query.shape[1]
    if query.device.type == "cuda":
        memory = torch.cuda.get_device_properties(query.device).total_memory
    if memory is None:
        return SMALL_TILE if heads > MANY_HEADS else LARGE_TILE
    scores = min(MOST_BYTES, int(memory * SHARE_OF_MEMORY)) // at_least_float32(query).itemsize
    return max(math.isqrt(scores // max(heads, 1)) // SMALL_TILE, 1) * SMALL_TILE


def _cut(length, size) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


class _TiledCall:
    """The tiles of one call, and its tensors with the key-value heads folded into the batch.

    Methods take a query tile `i`, a key tile `j`, or a pair of them.
    """

    def __init__(self, inputs):
        batch, heads, query_length, _ = inputs.query.shape
        _, key_value_heads, key_length, _ = inputs.key.shape
        self.shape = (batch, key_value_heads, heads // key_value_heads)
        tile = _tile_size(inputs.query)
        query_tile = max(min(tile, query_length), 1)
        self.query_tiles = _cut(query_length, query_tile)
        self.key_tiles = _cut(key_length, tile * tile // query_tile)  # few tiles for one query
        self.last_key, self.first_key = inputs.last_key, inputs.first_key
        self.key_is_valid, self.visible = inputs.key_is_valid, inputs.visible
        if self.visible is None:
            self.key_index = torch.arange(key_length, device=inputs.key.device)
        self.is_read = can_be_read(inputs.key) and len(self.query_tiles) + len(self.key_tiles) > 2

        def reduce_tiles(tensor, tiles, reduce, unknown) -> list:
            if not self.is_read:  # then every pair is masked that may have to be
                return [unknown] * len(tiles)
            return torch.stack([reduce(tensor[:, start:end]) for start, end in tiles]).tolist()

        def bound(keys, offset, reduce, unknown) -> list:  # keys of the first or last query of each tile
            if offset is None:
                return reduce_tiles(keys, self.query_tiles, reduce, unknown)
            return [offset + (start if reduce is torch.min else end - 1) for start, end in self.query_tiles]

        if self.last_key is not None:
            self.first_end = bound(self.last_key, inputs.last_offset, torch.min, -1)
            self.last_end = bound(self.last_key, inputs.last_offset, torch.max, key_length)
        if self.key_is_valid is not None:
            self.is_any_valid = reduce_tiles(self.key_is_valid, self.key_tiles, torch.any, True)
            self.are_all_valid = reduce_tiles(self.key_is_valid, self.key_tiles, torch.all, False)
        if self.first_key is not None:
            self.first_start = bound(self.first_key, inputs.first_offset, torch.min, 0)
            self.last_start = bound(self.first_key, inputs.first_offset, torch.max, key_length)
        self.activation = get_attention_activation(inputs.activation)
        self.is_softmax = self.activation.name == "softmax"
        self.scaling, self.dropout = inputs.scaling, inputs.dropout
        self.seed = None if inputs.seed is None else int(inputs.seed)
        # Float16 has no room for weights that are not normalised yet
        self.sum_dtype = at_least_float32(inputs.query)
        self.dtype = self.sum_dtype if inputs.query.dtype == torch.float16 else inputs.query.dtype
        self.query = self.by_group(inputs.query).to(self.dtype).contiguous()
        self.key, self.value = (
            states.to(self.dtype).flatten(0, 1).contiguous() for states in (inputs.key, inputs.value)
        )

        # (batch or 1, key_value_heads or 1, group or 1, query)
        self.count = self._by_head(inputs.visible_count).clamp(min=1).to(self.sum_dtype)
        has_bias = self.activation.subtract_log_count and inputs.normalization == "none"
        self.log_count = self.count.log() if has_bias else None
        self.query_bias, self.key_bias = inputs.query_bias, inputs.key_bias
        self.log_normalizer: Tensor | None = None  # of softmax in the backward pass, `(batch, heads, query)`

    def key_tiles_of(self, i) -> list[int]:
        """Returns the key tiles that some query of a tile may see."""
        first, last = 0, len(self.key_tiles)
        if self.last_key is not None:
            last = bisect.bisect_right(self.key_tiles, self.last_end[i], key=lambda tile: tile[0])
        if self.first_key is not None:
            first = bisect.bisect_right(self.key_tiles, self.first_start[i], key=lambda tile: tile[1])
        return [j for j in range(first, last) if not self._is_hidden(i, j)]

    def query_tiles_of(self, j) -> list[int]:
        """Returns the query tiles that may see some key of a tile."""
        first, last = 0, len(self.query_tiles)
        if self.last_key is not None:
            first = bisect.bisect_left(self.last_end, self.key_tiles[j][0])
        if self.first_key is not None:
            last = bisect.bisect_left(self.first_start, self.key_tiles[j][1])
        return [i for i in range(first, last) if not self._is_hidden(i, j)]

    def _is_hidden(self, i, j) -> bool:
        if self.visible is not None:
            (start, end), (key_start, key_end) = self.query_tiles[i], self.key_tiles[j]
            return self.is_read and not self.visible[:, :, start:end, key_start:key_end].any()
        return self.key_is_valid is not None and not self.is_any_valid[j]

    def hidden(self, i, j) -> Tensor | None:
        """Returns `(b or 1, 1 or heads, q, k)`, true for hidden keys, or `None`."""
        (start, end), (key_start, key_end) = self.query_tiles[i], self.key_tiles[j]
        if self.visible is not None:
            return ~self.visible[:, :, start:end, key_start:key_end]
        parts = []
        if self.last_key is not None and key_end - 1 > self.first_end[i]:
            parts.append(self.key_index[key_start:key_end] > self.last_key[:, start:end, None])
        if self.key_is_valid is not None and not self.are_all_valid[j]:
            parts.append(~self.key_is_valid[:, None, key_start:key_end])
        if self.first_key is not None and key_start < self.last_start[i]:
            parts.append(self.key_index[key_start:key_end] < self.first_key[:, start:end, None])
        return functools.reduce(torch.logical_or, parts)[:, None] if parts else None

    def _by_head(self, tensor) -> Tensor:
        """`(b, 1 or heads, ...)` -> `(b, 1 or g, 1 or r, ...)`."""
        return tensor.unflatten(1, (1, 1) if tensor.shape[1] == 1 else self.shape[1:])

    def by_group(self, tensor) -> Tensor:
        """`(b, heads, query, ...)` -> `(b g, r, query, ...)`."""
        return tensor.unflatten(1, self.shape[1:]).flatten(0, 1)

    def rows(self, tensor, i) -> Tensor:
        """Returns the rows of a query tile, `(b g, r q, ...)`."""
        start, end = self.query_tiles[i]
        return tensor[:, :, start:end].flatten(1, 2)

    def columns(self, tensor, j) -> Tensor:
        """Returns the keys or values of a key tile, `(b g, k, head_dim)`."""
        start, end = self.key_tiles[j]
        return tensor[:, start:end]

    def hide(self, i, j, *tiles, value=0.0) -> list[Tensor]:
        """Returns tiles `(b g, r q, k)` with `value` for hidden keys."""
        hidden = self.hidden(i, j)
        if hidden is None:
            return list(tiles)
        start, end = self.query_tiles[i]
        by_head = (tile.view(*self.shape, end - start, tile.shape[-1]) for tile in tiles)
        return [tile.masked_fill(self._by_head(hidden), value).flatten(0, 1).flatten(1, 2) for tile in by_head]

    def scores(self, i, j) -> Tensor:
        """Returns a pair's scores, `(b g, r q, k)`, in the sums' dtype."""
        rows, keys = self.rows(self.query, i), self.columns(self.key, j).transpose(1, 2)
        (start, end), (key_start, key_end) = self.query_tiles[i], self.key_tiles[j]
        bias = None if self.log_count is None else -self.log_count[..., start:end, None]
        if self.query_bias is not None:
            # Counted from the tile's first query, float32 is exact enough
            first = self.query_bias[..., start : start + 1]
            by_query = self._by_head((self.query_bias[..., start:end] - first).to(self.sum_dtype))
            by_key = self._by_head((self.key_bias[..., key_start:key_end] - first).to(self.sum_dtype))
            if self.log_normalizer is not None:
                by_query = by_query - self._by_head(self.log_normalizer[..., start:end])
            bias = (by_query[..., None] if bias is None else bias + by_query[..., None]) - by_key[..., None, :]
        shape = (*self.shape, end - start, key_end - key_start)
        if self.dtype == self.sum_dtype:
            # The product adds the bias and scales
            scores = rows.new_empty(shape) if bias is None else bias.expand(shape).contiguous()
            scores = scores.flatten(0, 1).flatten(1, 2)
            scores.baddbmm_(rows, keys, beta=float(bias is not None), alpha=self.scaling)
        else:
            scores = torch.bmm(rows, keys).to(self.sum_dtype).mul_(self.scaling)
            if bias is not None:
                scores.view(shape).add_(bias)
        if self.query_bias is not None and self.activation.name in ("sigmoid", "softplus"):
            # Denormal weights are slow
            F.threshold_(scores, math.log(zero_limit(scores.dtype)), -torch.inf)
        return scores

    def weights(self, i, j) -> Tensor:
        """Returns `P` of a pair."""
        if self.is_softmax:
            return exp_(self.hide(i, j, self.scores(i, j), value=-torch.inf)[0])
        return self.hide(i, j, self.activation.function(self.scores(i, j)))[0]

    def weights_and_gradient(self, i, j, gradient) -> list[Tensor]:
        """Returns `P` and `dS` of a pair, given `dP`."""
        if self.is_softmax:
            weights = self.weights(i, j)
            return [weights, weights * gradient]
        return self.hide(i, j, *self.activation.weights_and_gradient(self.scores(i, j), gradient))

    def weights_gradient(self, rows, j, factors) -> Tensor:
        """Returns `G V^T` of a pair, 0 where dropout drops the weight."""
        gradient = torch.bmm(rows, self.columns(self.value, j).transpose(1, 2)).to(self.sum_dtype)
        return gradient if factors is None else gradient.mul_(factors)

    def dropout_factors(self, i, j) -> Tensor | None:
        """Returns dropout's factors of a pair, from its own seed, so that backward draws them again."""
        if self.dropout == 0.0:
            return None
        (start, end), (key_start, key_end) = self.query_tiles[i], self.key_tiles[j]
        shape = (self.key.shape[0], self.shape[2] * (end - start), key_end - key_start)
        generator = torch.Generator(self.key.device).manual_seed(self.seed + i * len(self.key_tiles) + j)
        factors = torch.empty(shape, dtype=self.sum_dtype, device=self.key.device)
        return factors.bernoulli_(1.0 - self.dropout, generator=generator).div_(1.0 - self.dropout)

    def delta(self, scaled, output, inverse_normalizer) -> Tensor:
        """Returns `rowsum(G * O)`, FlashAttention's delta, `(b g, r, query, 1)`."""
        if output.dtype == self.sum_dtype:
            return (scaled * self.by_group(output.transpose(1, 2))).sum(dim=-1, keepdim=True)
        # `phi' / Z`, the next factor, is unbounded, so this is the mean of the same rounded numbers
        delta = torch.zeros_like(scaled[..., :1], dtype=self.sum_dtype)
        for i, (start, end) in enumerate(self.query_tiles):
            rows = self.rows(scaled, i)
            for j in self.key_tiles_of(i):
                total = (self.weights(i, j) * self.weights_gradient(rows, j, self.dropout_factors(i, j))).sum(dim=-1)
                delta[:, :, start:end, 0] += total.view(*delta.shape[:2], end - start)
        return delta * self.by_group(inverse_normalizer[..., None])

    def add_product(self, total, left, right):
        """Adds `left @ right`, multiplied in the inputs' precision, to a sum in float32 or more."""
        if self.dtype == self.sum_dtype:
            total.baddbmm_(left, right)
        else:
            total.add_(torch.bmm(left.to(self.dtype), right))


def _tiled_attention(inputs) -> tuple[Tensor, Tensor]:
    """Returns the output and `1 / Z`, for softmax `log Z`."""
    normalization = inputs.normalization
    output, inverse_normalizer = _new_results(*inputs)
    with torch.autocast(inputs.query.device.type, enabled=False):
        call = _TiledCall(inputs)
        for i, (start, end) in enumerate(call.query_tiles):
            if call.is_softmax:
                weighted, log_normalizer = _softmax_of_tile(call, i)
                inverse_normalizer[..., start:end] = log_normalizer.view(*call.shape, end - start).flatten(1, 2)
                output[:, start:end] = weighted.view(*call.shape, end - start, -1).flatten(1, 2).transpose(1, 2)
                continue
            weighted = torch.zeros_like(call.rows(call.query, i), dtype=call.sum_dtype)
            total = torch.zeros_like(weighted[..., 0])
            for j in call.key_tiles_of(i):
                weights = call.weights(i, j)
                if normalization == "sum":
                    total += weights.sum(dim=-1)
                if (factors := call.dropout_factors(i, j)) is not None:
                    weights = weights * factors
                call.add_product(weighted, weights, call.columns(call.value, j))
            total = total.view(*call.shape, end - start)
            if normalization == "sum":
                tile_inverse = torch.where(counts_as_zero(total), 0.0, 1.0 / total)
            elif normalization == "length":
                tile_inverse = (1.0 / call.count[..., start:end]).expand_as(total)
            else:
                tile_inverse = torch.ones_like(total)
            inverse_normalizer[..., start:end] = tile_inverse.flatten(1, 2)
            weighted = weighted.view(*total.shape, weighted.shape[-1]) * tile_inverse[..., None]
            output[:, start:end] = weighted.flatten(1, 2).transpose(1, 2)
    return output, inverse_normalizer


def _softmax_of_tile(call, i) -> tuple[Tensor, Tensor]:
    """Returns the output `(b g, r q, head_dim)` and `log Z` of a query tile; both are 0 for a query without keys."""
    weighted = torch.zeros_like(call.rows(call.query, i), dtype=call.sum_dtype)
    total = torch.zeros_like(weighted[..., 0])
    largest = torch.full_like(total, torch.finfo(total.dtype).min)
    for j in call.key_tiles_of(i):
        scores = call.hide(i, j, call.scores(i, j), value=-torch.inf)[0]
        before, largest = largest, torch.maximum(largest, scores.amax(dim=-1))
        weights, factor = exp_(scores - largest[..., None]), torch.exp(before - largest)
        total = total * factor + weights.sum(dim=-1)
        if (factors := call.dropout_factors(i, j)) is not None:
            weights = weights * factors
        weighted *= factor[..., None]
        call.add_product(weighted, weights, call.columns(call.value, j))
    is_empty = total == 0.0
    total = total.masked_fill(is_empty, 1.0)
    return weighted / total[..., None], (largest + total.log()).masked_fill(is_empty, 0.0)


def _tiled_attention_backward(gradient, inputs, results) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key, value and biases; empty tensors without a bias."""
    output, inverse_normalizer = results
    query, key, value, *biases = inputs[:5]
    with torch.autocast(query.device.type, enabled=False):
        call = _TiledCall(inputs)
        if call.is_softmax:
            call.log_normalizer, inverse_normalizer = inverse_normalizer, torch.ones_like(inverse_normalizer)
        scaled = gradient.transpose(1, 2).to(call.sum_dtype) * inverse_normalizer[..., None]
        scaled = call.by_group(scaled).to(call.dtype)
        delta = call.delta(scaled, output, inverse_normalizer) if inputs.normalization == "sum" else None

        query_gradient = torch.zeros_like(call.query, dtype=call.sum_dtype)
        key_gradient, value_gradient = (torch.empty_like(states, dtype=key.dtype) for states in (call.key, call.value))
        bias_gradients = tuple(torch.empty(0) if bias is None else torch.zeros_like(bias) for bias in biases)
        for j, (key_start, key_end) in enumerate(call.key_tiles):
            keys = call.columns(call.key, j)
            key_sum, value_sum = (torch.zeros_like(keys, dtype=call.sum_dtype) for _ in range(2))
            for i in call.query_tiles_of(j):
                start, end = call.query_tiles[i]
                rows, factors = call.rows(scaled, i), call.dropout_factors(i, j)
                weights_gradient = call.weights_gradient(rows, j, factors)
                if delta is not None:
                    weights_gradient -= call.rows(delta, i)
                weights, scores_gradient = call.weights_and_gradient(i, j, weights_gradient)
                if factors is not None:
                    weights = weights * factors
                if call.query_bias is not None:
                    by_head = scores_gradient.view(*call.shape, end - start, key_end - key_start)
                    if not call.is_softmax:  # where these sums are 0
                        bias_gradients[0][..., start:end] += by_head.sum(dim=-1).flatten(1, 2)
                    bias_gradients[1][..., key_start:key_end] -= by_head.sum(dim=-2).flatten(1, 2)
                call.add_product(value_sum, weights.transpose(1, 2), rows)
                call.add_product(key_sum, scores_gradient.transpose(1, 2), call.rows(call.query, i))
                query_sum = torch.zeros_like(rows, dtype=call.sum_dtype)
                call.add_product(query_sum, scores_gradient, keys)
                shape = (*query_gradient.shape[:2], end - start, query_sum.shape[-1])
                query_gradient[:, :, start:end] += query_sum.view(shape)
            key_gradient[:, key_start:key_end] = key_sum * call.scaling
            value_gradient[:, key_start:key_end] = value_sum
        query_gradient = (query_gradient * call.scaling).to(query.dtype)
    gradients = query_gradient.view(query.shape), key_gradient.view(key.shape), value_gradient.view(value.shape)
    return (*gradients, *bias_gradients)


def _new_results(query, *others) -> tuple[Tensor, Tensor]:
    """Makes the empty output `(batch, query, heads, head_dim)` and `1 / Z`, `(batch, heads, query)`."""
    batch, heads, query_length, head_dim = query.shape
    dtype = at_least_float32(query)
    inverse_normalizer = query.new_empty(batch, heads, query_length, dtype=dtype)
    return query.new_empty(batch, query_length, heads, head_dim), inverse_normalizer


def _new_gradients(gradient, *inputs) -> tuple[Tensor, ...]:
    return tuple(torch.empty(0) if states is None else states.new_empty(states.shape) for states in inputs[:5])


FORWARD = define_operator(
    "tiled_attention",
    f"({SCHEMA}) -> (Tensor, Tensor)",
    lambda *inputs: _tiled_attention(AttentionInputs(*inputs)),
    _new_results,
)
BACKWARD = define_operator(
    "tiled_attention_backward",
    f"(Tensor gradient, {SCHEMA}, Tensor output, Tensor inverse_normalizer) -> (Tensor, Tensor, Tensor, Tensor, "
    "Tensor)",
    lambda gradient, *inputs: _tiled_attention_backward(gradient, AttentionInputs(*inputs[:-2]), inputs[-2:]),
    _new_gradients,
)
_attention = DifferentiableAttention(
    lambda inputs: FORWARD(*inputs),
    lambda gradient, inputs, results: BACKWARD(gradient, *inputs, *results),
    seed_device="cpu",
)


def tiled_attention_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, score_bias=None, **kwargs
) -> tuple[Tensor, None]:
    """Computes every elementwise activation, and softmax without a sink."""
    inputs = (module, query, key, value, attention_mask, scaling, dropout, score_bias)
    return attend_in_tiles(_attention, *inputs), None


def attend_in_tiles(attention, module, query, key, value, attention_mask, scaling, dropout, score_bias=None) -> Tensor:
    """Computes a single query by its own operation and several by `attention`, in the precision of autocast."""
    query, key, value = in_autocast_precision(query, key, value)
    inputs = (module, query, key, value, attention_mask, scaling)
    if query.shape[2] != 1 or (dropout and module.training):
        return attention.attend(*inputs, dropout, score_bias)
    return one_query_attention(*inputs) if score_bias is None else one_query_by_pytorch(*inputs, score_bias)

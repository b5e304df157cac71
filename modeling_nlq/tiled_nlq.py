"""`nlq_tiled`: attention for every elementwise activation in memory linear in the length, in plain PyTorch.

Forward and backward visit pairs of a tile of queries and a tile of keys, compute the scores of the pair, and keep only sums
over it; backward computes the scores again. Pairs that the mask hides altogether are skipped, those above the causal diagonal
and those of other packed documents among them. Unlike softmax, an elementwise `phi` needs no maximum over the row, so nothing
has to be rescaled between tiles (compare Dao et al. 2022, arXiv 2205.14135).

With `P = phi(S)`, normaliser `Z` and `O = P V / Z`, the gradients are, for `G = dO / Z`,

    dV = P^T G,    dP = G V^T,    dS = phi'(S) * dP,    dQ = scaling * dS K,    dK = scaling * dS^T Q,

where under the normaliser `"sum"`, which depends on every weight, `dP = G V^T - rowsum(G * O)`.

Shapes: batch, heads, query, key, head_dim; heads are key_value_heads x group, and the queries of a group share its keys.
"""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from .attention_nlq import AttentionActivation, Visibility, counts_as_zero, get_attention_activation, read_mask


# Queries and keys of a tile. Its scores should stay in a CPU's cache: smaller tiles where many heads share it.
LARGE_TILE, SMALL_TILE, MANY_HEADS = 256, 128, 32


class _Problem:
    """One call: its tiles, what is hidden in them, and its tensors with key-value heads folded into the batch.

    The forward and the backward pass build the same one, so that they agree on the tiles and on the dropped weights.
    """

    def __init__(self, query, key, value, visible_count, masks, activation, normalization, scaling, dropout, seed):
        batch, heads, self.query_length, self.head_dim = query.shape
        key_value_heads, self.key_length = key.shape[1:3]
        self.shape = (batch, key_value_heads, heads // key_value_heads)
        # Sums are taken in at least float32. Float16 has no room for weights that are not normalised yet.
        self.sum_dtype = torch.promote_types(query.dtype, torch.float32)
        self.dtype = self.sum_dtype if query.dtype == torch.float16 else query.dtype
        self.activation: AttentionActivation = get_attention_activation(activation)
        self.normalization = normalization
        self.scaling = scaling
        self.dropout, self.seed = dropout, seed
        self.query = self._by_group(query).to(self.dtype).contiguous()
        self.key, self.value = (states.to(self.dtype).flatten(0, 1).contiguous() for states in (key, value))

        # (batch or 1, key_value_heads or 1, group or 1, query)
        self.count = self._by_head(visible_count).clamp(min=1).to(self.sum_dtype)
        self.log_count = None
        if self.activation.subtract_log_count and normalization == "none":
            self.log_count = self.count.log()

        tile = SMALL_TILE if batch * heads > MANY_HEADS else LARGE_TILE
        query_tile = max(min(tile, self.query_length), 1)
        self.query_tiles = _cut(self.query_length, query_tile)
        self.key_tiles = _cut(self.key_length, tile * tile // query_tile)  # one query against a long cache takes few tiles
        query_index, key_is_valid, document_start, self.visible = masks
        self.key_is_valid, self.document_start = key_is_valid, document_start
        self.key_index = torch.arange(self.key_length, device=query.device)
        self.query_index = query_index
        # Read once: asking the tensors tile by tile would make a GPU wait each time
        self.first_query = None if query_index is None else int(query_index[0])
        if key_is_valid is not None:
            self.valid_keys = [key_is_valid[:, start:end] for start, end in self.key_tiles]
            self.valid_keys = [(bool(tile.any()), bool(tile.all())) for tile in self.valid_keys]
        if document_start is not None:
            self.document_starts = [document_start[:, start:end] for start, end in self.query_tiles]
            self.document_starts = [(int(tile.min()), int(tile.max())) for tile in self.document_starts]

    def _by_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """`(batch, 1 or heads, ...)` -> `(batch, 1 or key_value_heads, 1 or group, ...)`."""
        return tensor.unflatten(1, (1, 1) if tensor.shape[1] == 1 else self.shape[1:])

    def _by_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """`(batch, heads, query, head_dim)` -> `(batch * key_value_heads, group, query, head_dim)`."""
        return tensor.unflatten(1, self.shape[1:]).flatten(0, 1)

    def rows(self, tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """The rows of a query tile, the group's under each other: `(batch * key_value_heads, group * tile, ...)`."""
        return tensor[:, :, start:end].flatten(1, 2)

    def is_hidden(self, query_tile: int, key_tile: int) -> bool:
        """Whether no query of a tile sees any key of another."""
        (start, end), (key_start, key_end) = self.query_tiles[query_tile], self.key_tiles[key_tile]
        if self.visible is not None:
            return not self.visible[:, :, start:end, key_start:key_end].any()
        if key_start > self.first_query + end - 1:
            return True
        if self.key_is_valid is not None and not self.valid_keys[key_tile][0]:
            return True
        return self.document_start is not None and key_end <= self.document_starts[query_tile][0]

    def hidden(self, query_tile: int, key_tile: int) -> torch.Tensor | None:
        """Booleans that broadcast to `(batch, key_value_heads, group, query tile, key tile)`; `None` if all is visible."""
        (start, end), (key_start, key_end) = self.query_tiles[query_tile], self.key_tiles[key_tile]
        if self.visible is not None:
            return ~self._by_head(self.visible[:, :, start:end, key_start:key_end])
        parts = []
        key_index = self.key_index[key_start:key_end]
        if key_end - 1 > self.first_query + start:
            parts.append((key_index > self.query_index[start:end, None])[None])
        if self.key_is_valid is not None and not self.valid_keys[key_tile][1]:
            parts.append(~self.key_is_valid[:, None, key_start:key_end])
        if self.document_start is not None and key_start < self.document_starts[query_tile][1]:
            parts.append(key_index < self.document_start[:, start:end, None])
        if not parts:
            return None
        hidden = parts[0]
        for part in parts[1:]:
            hidden = hidden | part
        return hidden[:, None, None]

    def hide(self, tile: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """A tile `(batch * key_value_heads, group * query tile, key tile)` with 0 where nothing is seen."""
        if hidden is None:
            return tile
        by_head = tile.view(*self.shape, tile.shape[1] // self.shape[2], tile.shape[2])
        return by_head.masked_fill(hidden, 0.0).view_as(tile)

    def scores(self, query_tile: int, key_tile: int) -> torch.Tensor:
        """The scores of a pair of tiles, `(batch * key_value_heads, group * query tile, key tile)`, in the sums' dtype."""
        (start, end), (key_start, key_end) = self.query_tiles[query_tile], self.key_tiles[key_tile]
        keys = self.key[:, key_start:key_end].transpose(1, 2)
        scores = torch.bmm(self.rows(self.query, start, end), keys).to(self.sum_dtype).mul_(self.scaling)
        if self.log_count is not None:
            by_head = scores.view(*self.shape, end - start, key_end - key_start)
            by_head -= self.log_count[..., start:end, None]
        return scores

    def weights_gradient(self, rows: torch.Tensor, key_tile: int, kept: torch.Tensor | None) -> torch.Tensor:
        """`G V^T` of a pair of tiles, 0 where dropout drops the weight."""
        key_start, key_end = self.key_tiles[key_tile]
        gradient = torch.bmm(rows, self.value[:, key_start:key_end].transpose(1, 2)).to(self.sum_dtype)
        return gradient if kept is None else gradient.mul_(kept)

    def kept(self, query_tile: int, key_tile: int) -> torch.Tensor | None:
        """What dropout multiplies the weights of a pair of tiles with: each pair has a seed, so every pass draws the same."""
        if self.dropout == 0.0:
            return None
        (start, end), (key_start, key_end) = self.query_tiles[query_tile], self.key_tiles[key_tile]
        shape = (self.key.shape[0], self.shape[2] * (end - start), key_end - key_start)
        generator = torch.Generator(self.key.device).manual_seed(self.seed + query_tile * len(self.key_tiles) + key_tile)
        kept = torch.empty(shape, dtype=self.sum_dtype, device=self.key.device)
        return kept.bernoulli_(1.0 - self.dropout, generator=generator).div_(1.0 - self.dropout)

    def mean_gradient(self, scaled: torch.Tensor, output: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """`rowsum(G * O)`, which is the mean of `G V^T` weighted with `P / Z`: `(batch * key_value_heads, group, query, 1)`.

        Args:
            scaled: `G`, `(batch * key_value_heads, group, query, head_dim)`.
            output: `O`, `(batch, query, heads, head_dim)`.
            scale: `1 / Z`, `(batch, heads, query)`.
        """
        if output.dtype == self.sum_dtype:
            return (scaled * self._by_group(output.transpose(1, 2))).sum(dim=-1, keepdim=True)
        # The rounding of `G V^T` must cancel, or what is left of it is multiplied with `phi' / Z`, which has no bound: so the
        # mean is taken of the very numbers it is subtracted from
        mean = torch.zeros_like(scaled[..., :1], dtype=self.sum_dtype)
        for i, (start, end) in enumerate(self.query_tiles):
            rows = self.rows(scaled, start, end)
            for j in range(len(self.key_tiles)):
                if not self.is_hidden(i, j):
                    weights = self.hide(self.activation.function(self.scores(i, j)), self.hidden(i, j))
                    total = (weights * self.weights_gradient(rows, j, self.kept(i, j))).sum(dim=-1)
                    mean[:, :, start:end, 0] += total.view(mean.shape[0], mean.shape[1], end - start)
        return mean * self._by_group(scale[..., None])

    def add_product(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds `left @ right`, multiplied in the inputs' precision, to a sum in float32 or more."""
        if self.dtype == self.sum_dtype:
            total.baddbmm_(left, right)
        else:
            total.add_(torch.bmm(left.to(self.dtype), right))


def _cut(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _tiled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible_count: torch.Tensor,
    query_index: torch.Tensor | None,
    key_is_valid: torch.Tensor | None,
    document_start: torch.Tensor | None,
    visible: torch.Tensor | None,
    seed: torch.Tensor | None,
    activation: str,
    normalization: str,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output `(batch, query, heads, head_dim)` and `1 / Z`, `(batch, heads, query)`."""
    masks = (query_index, key_is_valid, document_start, visible)
    seed = None if seed is None else int(seed)
    with torch.autocast(query.device.type, enabled=False):
        problem = _Problem(query, key, value, visible_count, masks, activation, normalization, scaling, dropout, seed)
        batch, heads, query_length, head_dim = query.shape
        output = query.new_empty(batch, query_length, heads, head_dim)
        scale = query.new_empty(batch, heads, query_length, dtype=problem.sum_dtype)
        for i, (start, end) in enumerate(problem.query_tiles):
            rows = problem.rows(problem.query, start, end)
            weighted, total = torch.zeros_like(rows, dtype=problem.sum_dtype), rows.new_zeros(rows.shape[:2], dtype=scale.dtype)
            for j, (key_start, key_end) in enumerate(problem.key_tiles):
                if problem.is_hidden(i, j):
                    continue
                weights = problem.hide(problem.activation.function(problem.scores(i, j)), problem.hidden(i, j))
                if normalization == "sum":
                    total += weights.sum(dim=-1)
                if (kept := problem.kept(i, j)) is not None:
                    weights = weights * kept
                problem.add_product(weighted, weights, problem.value[:, key_start:key_end])
            if normalization == "sum":
                scale_rows = torch.where(counts_as_zero(total), 0.0, 1.0 / total).view(*problem.shape, end - start)
            elif normalization == "length":
                scale_rows = (1.0 / problem.count[..., start:end]).expand(*problem.shape, -1)
            else:
                scale_rows = torch.ones_like(total).view(*problem.shape, end - start)
            scale[..., start:end] = scale_rows.flatten(1, 2)
            weighted = weighted.view(*problem.shape, end - start, head_dim) * scale_rows[..., None]
            output[:, start:end] = weighted.flatten(1, 2).transpose(1, 2)
    return output, scale


def _tiled_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    scale: torch.Tensor,
    visible_count: torch.Tensor,
    query_index: torch.Tensor | None,
    key_is_valid: torch.Tensor | None,
    document_start: torch.Tensor | None,
    visible: torch.Tensor | None,
    seed: torch.Tensor | None,
    activation: str,
    normalization: str,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, in their shapes, given that of the output."""
    masks = (query_index, key_is_valid, document_start, visible)
    seed = None if seed is None else int(seed)
    with torch.autocast(query.device.type, enabled=False):
        problem = _Problem(query, key, value, visible_count, masks, activation, normalization, scaling, dropout, seed)
        scaled = problem._by_group(gradient.transpose(1, 2).to(problem.sum_dtype) * scale[..., None]).to(problem.dtype)
        mean = problem.mean_gradient(scaled, output, scale) if normalization == "sum" else None

        query_gradient = torch.zeros_like(problem.query, dtype=problem.sum_dtype)
        key_gradient, value_gradient = (torch.empty_like(states, dtype=key.dtype) for states in (problem.key, problem.value))
        for j, (key_start, key_end) in enumerate(problem.key_tiles):
            keys = problem.key[:, key_start:key_end]
            key_sum, value_sum = (torch.zeros_like(keys, dtype=problem.sum_dtype) for _ in range(2))
            for i, (start, end) in enumerate(problem.query_tiles):
                if problem.is_hidden(i, j):
                    continue
                rows, kept = problem.rows(scaled, start, end), problem.kept(i, j)
                weights_gradient = problem.weights_gradient(rows, j, kept)
                if mean is not None:
                    weights_gradient -= problem.rows(mean, start, end)
                weights, scores_gradient = problem.activation.weights_and_gradient(problem.scores(i, j), weights_gradient)
                hidden = problem.hidden(i, j)
                weights, scores_gradient = problem.hide(weights, hidden), problem.hide(scores_gradient, hidden)
                if kept is not None:
                    weights = weights * kept
                problem.add_product(value_sum, weights.transpose(1, 2), rows)
                problem.add_product(key_sum, scores_gradient.transpose(1, 2), problem.rows(problem.query, start, end))
                tile_gradient = torch.zeros_like(rows, dtype=problem.sum_dtype)
                problem.add_product(tile_gradient, scores_gradient, keys)
                query_gradient[:, :, start:end] += tile_gradient.view(*query_gradient.shape[:2], end - start, -1)
            key_gradient[:, key_start:key_end] = key_sum * scaling
            value_gradient[:, key_start:key_end] = value_sum
        query_gradient = (query_gradient * scaling).to(query.dtype)
    return query_gradient.view(query.shape), key_gradient.view(key.shape), value_gradient.view(value.shape)


def _define_operators() -> tuple[Callable, Callable]:
    """Registers both passes with PyTorch, so that `torch.compile` and export keep each as one node.

    The names are known to the whole process, where other revisions of this code may be loaded too: a hash of the code that
    the operators run tells them apart, and the same code shares them.
    """
    files = (Path(__file__), Path(sys.modules[AttentionActivation.__module__].__file__))
    namespace = f"nlq_{hashlib.sha256(b''.join(file.read_bytes() for file in files)).hexdigest()[:16]}"
    if hasattr(operators := getattr(torch.ops, namespace), "tiled_attention"):
        return operators.tiled_attention, operators.tiled_attention_backward

    forward = torch.library.custom_op(f"{namespace}::tiled_attention", _tiled_attention, mutates_args=())
    backward = torch.library.custom_op(f"{namespace}::tiled_attention_backward", _tiled_attention_backward, mutates_args=())

    @forward.register_fake
    def _(query, *inputs):
        batch, heads, query_length, head_dim = query.shape
        scale = query.new_empty(batch, heads, query_length, dtype=torch.promote_types(query.dtype, torch.float32))
        return query.new_empty(batch, query_length, heads, head_dim), scale

    @backward.register_fake
    def _(gradient, query, key, value, *inputs):
        return tuple(states.new_empty(states.shape) for states in (query, key, value))

    def save(ctx, inputs, output):
        tensors, ctx.options = inputs[:9], inputs[9:]
        ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])

    def differentiate(ctx, gradient, scale_gradient):
        return (*backward(gradient, *ctx.saved_tensors, *ctx.options), *[None] * 10)

    forward.register_autograd(differentiate, setup_context=save)
    return forward, backward


_forward_operator, _backward_operator = _define_operators()


def tiled_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Visibility | torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention for every elementwise activation, in memory linear in the length.

    Args:
        module: the attention layer, whose `activation` and `normalization` say what to compute.
        query: `(batch, heads, query, head_dim)`.
        key, value: `(batch, key_value_heads, key, head_dim)`.
        attention_mask: a `Visibility`, a 4-D mask, or `None`, as in `read_mask`.
        scaling: factor of the scores.
        dropout: probability of dropping a weight; which ones, PyTorch's random number generator decides.

    Returns:
        The output `(batch, query, heads, head_dim)`, and no weights.
    """
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        query, key, value = (states.to(torch.get_autocast_dtype(device_type)) for states in (query, key, value))
    mask, visible_count = read_mask(attention_mask, query.shape[2], key.shape[2], query.device)
    if isinstance(mask, Visibility):
        masks = (mask.query_index, mask.key_is_valid, mask.document_start, None)
    else:
        masks = (None, None, None, mask)
    dropout = dropout if module.training else 0.0
    seed = torch.randint(2**62, ()) if dropout > 0.0 else None
    options = (module.activation.name, module.normalization, float(scaling), float(dropout))
    output, _ = _forward_operator(query, key, value, visible_count, *masks, seed, *options)
    return output, None

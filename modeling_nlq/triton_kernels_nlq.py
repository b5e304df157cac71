"""The Triton kernels of `nlq_triton`: attention for every elementwise activation that has a body in Triton's language.

A program owns a tile of queries (or, for the gradients of keys and values, of keys) and walks along the other axis. With
`P = phi(S)`, normaliser `Z` and `O = P V / Z`, a kernel needs no running maximum and rescales nothing (compare Dao et al. 2022,
arXiv 2205.14135). It sums in float32 and multiplies with `1 / Z` at the end. Backward computes the scores again, once for the
queries and once for the keys and values. Every sum then has one owner and one order, so gradients are deterministic:

    dV = (P / Z)^T dO,    dP = dO V^T,    dS = phi'(S) * dP / Z,    dQ = scaling * dS K,    dK = scaling * dS^T Q,

where under the normaliser `"sum"`, which depends on every weight, `dP = dO V^T - rowsum(dO * O)`.

Four flags say what can hide a key. `index` is a query's own index among the keys:

    CAUSAL      key <= index, where index = query_index[0] + row
    PACKED      key >= document_start[batch, row], which never falls from row to row
    PADDED      key_is_valid[batch, key]; `valid_range[batch]` are the first valid key, the one after the last, and whether all
                between them are valid
    MASKED      visible[batch, head, row, key], a mask of the caller's own

A program skips tiles that are hidden completely, except tiles inside the holes of padding or of a caller's mask. It computes
tiles that are visible completely without a mask.

Shapes: query, key and value `(batch, heads, length, head_dim)` in any strides but a last one of 1; all else contiguous: the
output, its gradient and those of query, key and value `(batch, length, heads, head_dim)`; `inverse_normalizer`, which is `1 /
Z`, and `delta`, which is `rowsum(dO * O)`, `(batch, heads, query)`. WIDTH is head_dim rounded up to a power of 2.

`rowsum(dO * O)` must be the mean of exactly the numbers that it is subtracted from. Otherwise the rest of their rounding is
multiplied with `phi' / Z`, which has no bound. So under `"sum"` `Z` is the sum of the weights after rounding, and `remainder`
keeps the part of the output that rounding removes.
"""

import functools
from typing import NamedTuple

from .triton_activations_nlq import INTERPRETED, jit, tl, triton


# Numbers that change from call to call; specialising a kernel on them would not make it faster
CHANGING = ("query_length", "key_length", "keys_per_split", "splits", "scaling", "dropout")
kernel = jit if triton is None else functools.partial(triton.jit, do_not_specialize=CHANGING)


@jit
def _load_rows(
    pointer, start, length, stride,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, IN_RANGE: tl.constexpr,
):  # fmt: skip
    """Rows `start` to `start + SIZE` of queries, keys, values or gradients, `(SIZE, WIDTH)`; 0 outside of the tensor."""
    row = tl.arange(0, SIZE)
    column = tl.arange(0, WIDTH)
    pointers = pointer + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    if IN_RANGE and WIDTH == HEAD_DIM:
        states = tl.load(pointers)
    elif IN_RANGE:
        states = tl.load(pointers, mask=column[None, :] < HEAD_DIM, other=0.0)
    else:
        states = tl.load(pointers, mask=(start + row < length)[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    return states


@jit
def _store_rows(pointer, start, length, stride, states, SIZE: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Stores rows `start` to `start + SIZE`, the counterpart of `_load_rows`."""
    row = tl.arange(0, SIZE)
    column = tl.arange(0, WIDTH)
    pointers = pointer + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    mask = (start + row < length)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(pointers, states.to(pointer.dtype.element_ty), mask=mask)


@jit
def _remainder(states, pointer):
    """Returns the part of `states` that rounding to the precision of `pointer` removes."""
    return states - states.to(pointer.dtype.element_ty).to(states.dtype)


@jit
def _product(left, right, total, PRECISION: tl.constexpr):
    """`total + left @ right`."""
    if INTERPRETED and left.dtype == tl.bfloat16:
        # The interpreter (Triton 3.9) would multiply their bits as integers
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision=PRECISION)
    else:
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@jit
def _add_product(total, computed, states, PRECISION: tl.constexpr):
    """`total + computed @ states`: weights, or gradients of scores, times tensors in the precision they were given in.

    Float16 has no room for weights that are not normalised yet. TF32 has its precision and float32's range.
    """
    if states.dtype == tl.float16:
        total = _product(computed, states.to(tl.float32), total, "tf32")
    else:
        total = _product(computed.to(states.dtype), states, total, PRECISION)
    return total


@jit
def _dropout_factors(seed, row, key, key_length, dropout):
    """Returns dropout's factors of the weights. They depend on row and key, not on the tiles. `seed` is that of the head."""
    number = tl.rand(seed, row.to(tl.uint32) * key_length.to(tl.uint32) + key.to(tl.uint32))
    return tl.where(number >= dropout, 1.0 / (1.0 - dropout), 0.0)


@jit
def _head_seed(seed, batch_head):
    return tl.load(seed) + batch_head.to(tl.int64) * 0x5851F42D4C957F2D


@jit
def _is_visible(
    key, key_length, is_row, index, document, visible_row, key_is_valid,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """True where a query sees a key. `key` is `(1, key)` and the queries' arguments are `(query, 1)`, or all transposed.

    Args:
        key: indices of the keys.
        is_row, index, document: whether the query exists, its own index, the first key of its document.
        visible_row: pointers to the queries' rows of the caller's mask.
        key_is_valid: pointer to the row of this batch element.
    """
    is_visible = (key <= tl.minimum(index, key_length - 1)) if CAUSAL else (key < key_length) & (index >= 0)
    if PACKED:
        is_visible &= key >= document
    if PADDED:
        is_visible &= tl.load(key_is_valid + key, mask=key < key_length, other=0) != 0
    if MASKED:
        is_visible &= is_row
        is_visible &= tl.load(visible_row + key, mask=is_visible, other=0) != 0
    return is_visible


@jit
def _bounds(
    start, row, is_row, query_index, document_start, valid_range, query_length, key_length,
    TILE: tl.constexpr, STEP: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Finds the keys that a tile of `TILE` queries from `start` on sees, in steps of `STEP`.

    Returns:
        `first <= full_first <= full_last`, and `last`. Every query sees all keys from `full_first` to `full_last`; no query
        sees keys before `first` or from `last` on. Then the `index` and `document` of each query.
    """
    first = start * 0
    full_first = first
    last = key_length
    full_last = key_length // STEP * STEP
    index = row
    document = row
    if CAUSAL:
        offset = tl.load(query_index).to(tl.int32)
        index = row + offset
        last = tl.minimum(last, offset + tl.minimum(start + TILE, query_length))
        full_last = tl.minimum(full_last, (offset + start + 1) // STEP * STEP)
    if PACKED:
        document = tl.load(document_start + row, mask=is_row, other=0).to(tl.int32)
        first = tl.min(tl.where(is_row, document, key_length), 0) // STEP * STEP
        full_first = (tl.max(document, 0) + STEP - 1) // STEP * STEP
    if PADDED:
        first_valid = tl.load(valid_range)
        last_valid = tl.load(valid_range + 1)
        first = tl.maximum(first, first_valid // STEP * STEP)
        full_first = tl.maximum(full_first, (first_valid + STEP - 1) // STEP * STEP)
        last = tl.minimum(last, last_valid)
        full_last = tl.where(tl.load(valid_range + 2) != 0, tl.minimum(full_last, last_valid // STEP * STEP), 0)
    if MASKED:
        full_last = first  # any key may be hidden
    # A document that begins in its last tile has no tile that is visible completely
    full_first = tl.minimum(full_first, tl.maximum(last, first))
    full_last = tl.maximum(full_last, full_first)
    return first, full_first, full_last, last, index, document


@jit
def _attend(
    weighted, total, begin, end, queries, bias, row, is_row, index, document, visible_row,
    key, value, key_stride, value_stride, key_length, key_is_valid, scaling, seed, dropout,
    STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BODY: tl.constexpr, NORMALIZATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, IN_RANGE: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys from `begin` to `end` to `P V` and to the row sums of `P`. IN_RANGE: all queries see all of them."""
    for start in tl.range(begin, end, STEP):
        place = start + tl.arange(0, STEP)
        keys = _load_rows(key, start, key_length, key_stride, STEP, WIDTH, HEAD_DIM, IN_RANGE)
        nothing = tl.zeros((queries.shape[0], STEP), weighted.dtype)
        scores = _product(queries, tl.trans(keys), nothing, PRECISION) * scaling
        if HAS_BIAS:
            scores -= bias[:, None]
        weights, _ = BODY(scores)
        if not IN_RANGE:
            is_visible = _is_visible(
                place[None, :], key_length, is_row[:, None], index[:, None], document[:, None], visible_row[:, None],
                key_is_valid, CAUSAL, PACKED, PADDED, MASKED,
            )  # fmt: skip
            weights = tl.where(is_visible, weights, 0.0)
        if NORMALIZATION == "sum":
            if value.dtype.element_ty == tl.bfloat16:
                weights = weights.to(tl.bfloat16).to(tl.float32)
            total += tl.sum(weights, 1)
        if HAS_DROPOUT:
            weights *= _dropout_factors(seed, row[:, None], place[None, :], key_length, dropout)
        values = _load_rows(value, start, key_length, value_stride, STEP, WIDTH, HEAD_DIM, IN_RANGE)
        weighted = _add_product(weighted, weights, values, PRECISION)
    return weighted, total


@jit
def _inverse_normalizer(total, count, LIMIT: tl.constexpr, NORMALIZATION: tl.constexpr):
    """`1 / Z`; 0 where the sum is below LIMIT, which counts as 0."""
    if NORMALIZATION == "sum":
        is_zero = total < LIMIT
        inverse_normalizer = tl.where(is_zero, 0.0, 1.0 / tl.where(is_zero, 1.0, total))
    elif NORMALIZATION == "length":
        inverse_normalizer = 1.0 / count
    else:
        inverse_normalizer = count * 0.0 + 1.0
    return inverse_normalizer


@kernel
def forward_kernel(
    query, key, value, output, remainder, inverse_normalizer,
    query_index, visible_count, key_is_valid, valid_range, document_start, visible, seed,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    count_batch_stride, count_head_stride,
    visible_batch_stride, visible_head_stride, visible_stride,
    heads, group, query_length, key_length, scaling, dropout,
    TILE: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BODY: tl.constexpr, NORMALIZATION: tl.constexpr, LIMIT: tl.constexpr, SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_REMAINDER: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Computes `output` and `inverse_normalizer` of a tile of queries of one head. Tiles with the most keys start first."""
    tiles = tl.cdiv(query_length, TILE)
    batch_head = tl.program_id(0) // tiles
    start = (tiles - 1 - tl.program_id(0) % tiles) * TILE
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    row = start + tl.arange(0, TILE)
    is_row = row < query_length
    query += batch * query_batch_stride + head * query_head_stride
    key += batch * key_batch_stride + head // group * key_head_stride
    value += batch * value_batch_stride + head // group * value_head_stride
    key_is_valid += batch * key_length
    first, full_first, full_last, last, index, document = _bounds(
        start, row, is_row, query_index, document_start + batch * query_length, valid_range + 3 * batch,
        query_length, key_length, TILE, STEP, CAUSAL, PACKED, PADDED, MASKED,
    )  # fmt: skip
    visible_row = visible + batch * visible_batch_stride + head * visible_head_stride + row.to(tl.int64) * visible_stride
    head_seed = batch_head
    if HAS_DROPOUT:
        head_seed = _head_seed(seed, batch_head)

    counts = visible_count + batch * count_batch_stride + head * count_head_stride + row
    count = tl.maximum(tl.load(counts, mask=is_row, other=1), 1).to(SUM)
    bias = tl.log(count)
    queries = _load_rows(query, start, query_length, query_stride, TILE, WIDTH, HEAD_DIM, False)
    weighted = tl.zeros((TILE, WIDTH), SUM)
    total = tl.zeros((TILE,), SUM)
    if PACKED or PADDED:
        weighted, total = _attend(
            weighted, total, first, full_first, queries, bias, row, is_row, index, document, visible_row,
            key, value, key_stride, value_stride, key_length, key_is_valid, scaling, head_seed, dropout,
            STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, False,
            CAUSAL, PACKED, PADDED, MASKED,
        )  # fmt: skip
    if not MASKED:
        weighted, total = _attend(
            weighted, total, full_first, full_last, queries, bias, row, is_row, index, document, visible_row,
            key, value, key_stride, value_stride, key_length, key_is_valid, scaling, head_seed, dropout,
            STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, True,
            CAUSAL, PACKED, PADDED, MASKED,
        )  # fmt: skip
    weighted, total = _attend(
        weighted, total, full_last, last, queries, bias, row, is_row, index, document, visible_row,
        key, value, key_stride, value_stride, key_length, key_is_valid, scaling, head_seed, dropout,
        STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, False,
        CAUSAL, PACKED, PADDED, MASKED,
    )  # fmt: skip
    inverse_normalizers = _inverse_normalizer(total, count, LIMIT, NORMALIZATION)
    tl.store(inverse_normalizer + batch_head.to(tl.int64) * query_length + row, inverse_normalizers, mask=is_row)
    weighted *= inverse_normalizers[:, None]
    of_head = (batch * query_length * heads + head) * HEAD_DIM
    _store_rows(output + of_head, start, query_length, heads * HEAD_DIM, weighted, TILE, WIDTH, HEAD_DIM)
    if HAS_REMAINDER:
        rest = _remainder(weighted, output)
        _store_rows(remainder + of_head, start, query_length, heads * HEAD_DIM, rest, TILE, WIDTH, HEAD_DIM)


@kernel
def split_kernel(
    query, key, value, weighted_sums, totals,
    query_index, visible_count, key_is_valid, document_start, visible,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    count_batch_stride, count_head_stride,
    visible_batch_stride, visible_head_stride, visible_stride,
    heads, group, query_length, key_length, keys_per_split, splits, scaling,
    TILE: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BODY: tl.constexpr, NORMALIZATION: tl.constexpr, SUM: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Few queries against many keys: one program per key-value head and part of the keys, for all queries that share the head.

    Stores `P V` and the row sums of `P` over the part, `(split, batch, heads, query, ...)`, which `combine_kernel` adds up.
    """
    split = tl.program_id(0) % splits
    batch_head = tl.program_id(0) // splits
    key_value_heads = heads // group
    batch = (batch_head // key_value_heads).to(tl.int64)
    key_value_head = (batch_head % key_value_heads).to(tl.int64)
    place = tl.arange(0, TILE)
    is_row = place < group * query_length
    row = place % query_length
    head = tl.where(is_row, key_value_head * group + place // query_length, 0)
    query += batch * query_batch_stride
    key += batch * key_batch_stride + key_value_head * key_head_stride
    value += batch * value_batch_stride + key_value_head * value_head_stride
    key_is_valid += batch * key_length
    visible_row = visible + batch * visible_batch_stride + head * visible_head_stride + row.to(tl.int64) * visible_stride
    begin = split * keys_per_split
    end = tl.minimum(begin + keys_per_split, key_length)
    index = row
    document = row
    if CAUSAL:
        offset = tl.load(query_index).to(tl.int32)
        index = row + offset
        end = tl.minimum(end, offset + query_length)
    if PACKED:
        document = tl.load(document_start + batch * query_length + row, mask=is_row, other=0).to(tl.int32)

    counts = visible_count + batch * count_batch_stride + head * count_head_stride + row
    bias = tl.log(tl.maximum(tl.load(counts, mask=is_row, other=1), 1).to(SUM))
    column = tl.arange(0, WIDTH)
    is_state = is_row[:, None] & (column < HEAD_DIM)[None, :]
    pointers = query + (head * query_head_stride + row * query_stride)[:, None] + column[None, :]
    queries = tl.load(pointers, mask=is_state, other=0.0)
    weighted, total = _attend(
        tl.zeros((TILE, WIDTH), SUM), tl.zeros((TILE,), SUM), begin, end, queries, bias,
        row, is_row, index, document, visible_row,
        key, value, key_stride, value_stride, key_length, key_is_valid, scaling, batch_head, 0.0,
        STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, False, PRECISION, False,
        CAUSAL, PACKED, PADDED, MASKED,
    )  # fmt: skip
    batches = tl.num_programs(0) // (splits * key_value_heads)
    part = ((split * batches + batch) * heads + head) * query_length + row
    tl.store(totals + part, total, mask=is_row)
    tl.store(weighted_sums + part[:, None] * HEAD_DIM + column[None, :], weighted, mask=is_state)


@kernel
def combine_kernel(
    weighted_sums, totals, output, remainder, inverse_normalizer, visible_count, count_batch_stride, count_head_stride,
    heads, query_length, splits,
    WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, NORMALIZATION: tl.constexpr, LIMIT: tl.constexpr, SUM: tl.constexpr,
    HAS_REMAINDER: tl.constexpr,
):  # fmt: skip
    """`output` and `inverse_normalizer` of one query of one head from the parts that `split_kernel` stored."""
    part = tl.program_id(0).to(tl.int64)
    parts = tl.num_programs(0).to(tl.int64)
    row = part % query_length
    head = part // query_length % heads
    batch = part // query_length // heads
    column = tl.arange(0, WIDTH)
    weighted = tl.zeros((WIDTH,), SUM)
    total = tl.zeros((), SUM)
    for split in range(splits):
        place = split * parts + part
        total += tl.load(totals + place)
        weighted += tl.load(weighted_sums + place * HEAD_DIM + column, mask=column < HEAD_DIM, other=0.0)
    count = tl.load(visible_count + batch * count_batch_stride + head * count_head_stride + row)
    inverse_normalizers = _inverse_normalizer(total, tl.maximum(count, 1).to(SUM), LIMIT, NORMALIZATION)
    tl.store(inverse_normalizer + part, inverse_normalizers)
    weighted *= inverse_normalizers
    place = ((batch * query_length + row) * heads + head) * HEAD_DIM + column
    tl.store(output + place, weighted.to(output.dtype.element_ty), mask=column < HEAD_DIM)
    if HAS_REMAINDER:
        rest = _remainder(weighted, output)
        tl.store(remainder + place, rest.to(remainder.dtype.element_ty), mask=column < HEAD_DIM)


@kernel
def valid_range_kernel(key_is_valid, valid_range, key_length, STEP: tl.constexpr):
    """The first valid key of one row of the batch, the one after the last, `(key_length, 0)` if there is none, and whether all
    between them are valid."""
    batch = tl.program_id(0).to(tl.int64)
    key_is_valid += batch * key_length
    first = key_length
    last = key_length * 0
    count = key_length * 0
    for start in range(0, key_length, STEP):
        place = start + tl.arange(0, STEP)
        is_valid = tl.load(key_is_valid + place, mask=place < key_length, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(is_valid, place, key_length), 0))
        last = tl.maximum(last, tl.max(tl.where(is_valid, place + 1, 0), 0))
        count += tl.sum(is_valid.to(tl.int32), 0)
    tl.store(valid_range + 3 * batch, first)
    tl.store(valid_range + 3 * batch + 1, last)
    tl.store(valid_range + 3 * batch + 2, (count == last - first).to(tl.int32))


@jit
def _query_gradient(
    gradient_sum, begin, end, queries, gradients, bias, mean, row, is_row, index, document, visible_row,
    key, value, key_stride, value_stride, key_length, key_is_valid, scaling, seed, dropout,
    STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BODY: tl.constexpr, NORMALIZATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, IN_RANGE: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds what the keys from `begin` to `end` contribute to `dS K`, but for the factor `1 / Z`."""
    for start in tl.range(begin, end, STEP):
        place = start + tl.arange(0, STEP)
        keys = _load_rows(key, start, key_length, key_stride, STEP, WIDTH, HEAD_DIM, IN_RANGE)
        nothing = tl.zeros((queries.shape[0], STEP), gradient_sum.dtype)
        scores = _product(queries, tl.trans(keys), nothing, PRECISION) * scaling
        values = _load_rows(value, start, key_length, value_stride, STEP, WIDTH, HEAD_DIM, IN_RANGE)
        slope = _product(gradients, tl.trans(values), nothing, PRECISION)
        if HAS_BIAS:
            scores -= bias[:, None]
        if HAS_DROPOUT:
            slope *= _dropout_factors(seed, row[:, None], place[None, :], key_length, dropout)
        if NORMALIZATION == "sum":
            slope -= mean[:, None]
        _, derivative = BODY(scores)
        slope *= derivative
        if not IN_RANGE:
            is_visible = _is_visible(
                place[None, :], key_length, is_row[:, None], index[:, None], document[:, None], visible_row[:, None],
                key_is_valid, CAUSAL, PACKED, PADDED, MASKED,
            )  # fmt: skip
            slope = tl.where(is_visible, slope, 0.0)
        gradient_sum = _add_product(gradient_sum, slope, keys, PRECISION)
    return gradient_sum


@kernel
def query_gradient_kernel(
    gradient, query, key, value, output, remainder, inverse_normalizer, delta, log_count, query_gradient,
    query_index, visible_count, key_is_valid, valid_range, document_start, visible, seed,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    count_batch_stride, count_head_stride,
    visible_batch_stride, visible_head_stride, visible_stride,
    heads, group, query_length, key_length, scaling, dropout,
    TILE: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BODY: tl.constexpr, NORMALIZATION: tl.constexpr, SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_REMAINDER: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`dQ` of a tile of queries of one head; and `delta` and `log_count`, for `key_value_gradient_kernel`."""
    tiles = tl.cdiv(query_length, TILE)
    batch_head = tl.program_id(0) // tiles
    start = (tiles - 1 - tl.program_id(0) % tiles) * TILE
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    row = start + tl.arange(0, TILE)
    is_row = row < query_length
    query += batch * query_batch_stride + head * query_head_stride
    key += batch * key_batch_stride + head // group * key_head_stride
    value += batch * value_batch_stride + head // group * value_head_stride
    key_is_valid += batch * key_length
    first, full_first, full_last, last, index, document = _bounds(
        start, row, is_row, query_index, document_start + batch * query_length, valid_range + 3 * batch,
        query_length, key_length, TILE, STEP, CAUSAL, PACKED, PADDED, MASKED,
    )  # fmt: skip
    visible_row = visible + batch * visible_batch_stride + head * visible_head_stride + row.to(tl.int64) * visible_stride
    head_seed = batch_head
    if HAS_DROPOUT:
        head_seed = _head_seed(seed, batch_head)

    of_head = (batch * query_length * heads + head) * HEAD_DIM
    stride = heads * HEAD_DIM
    queries = _load_rows(query, start, query_length, query_stride, TILE, WIDTH, HEAD_DIM, False)
    gradients = _load_rows(gradient + of_head, start, query_length, stride, TILE, WIDTH, HEAD_DIM, False)
    rows_of_head = batch_head.to(tl.int64) * query_length + row
    mean = tl.zeros((TILE,), SUM)
    if NORMALIZATION == "sum":
        outputs = _load_rows(output + of_head, start, query_length, stride, TILE, WIDTH, HEAD_DIM, False)
        outputs = outputs.to(SUM)
        if HAS_REMAINDER:
            outputs += _load_rows(remainder + of_head, start, query_length, stride, TILE, WIDTH, HEAD_DIM, False).to(SUM)
        mean = tl.sum(gradients.to(SUM) * outputs, 1)
        tl.store(delta + rows_of_head, mean, mask=is_row)
    counts = visible_count + batch * count_batch_stride + head * count_head_stride + row
    bias = tl.log(tl.maximum(tl.load(counts, mask=is_row, other=1), 1).to(SUM))
    if HAS_BIAS:
        tl.store(log_count + rows_of_head, bias, mask=is_row)
    gradient_sum = tl.zeros((TILE, WIDTH), SUM)
    if PACKED or PADDED:
        gradient_sum = _query_gradient(
            gradient_sum, first, full_first, queries, gradients, bias, mean, row, is_row, index, document, visible_row,
            key, value, key_stride, value_stride, key_length, key_is_valid, scaling, head_seed, dropout,
            STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, False,
            CAUSAL, PACKED, PADDED, MASKED,
        )  # fmt: skip
    if not MASKED:
        gradient_sum = _query_gradient(
            gradient_sum, full_first, full_last, queries, gradients, bias, mean, row, is_row, index, document, visible_row,
            key, value, key_stride, value_stride, key_length, key_is_valid, scaling, head_seed, dropout,
            STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, True,
            CAUSAL, PACKED, PADDED, MASKED,
        )  # fmt: skip
    gradient_sum = _query_gradient(
        gradient_sum, full_last, last, queries, gradients, bias, mean, row, is_row, index, document, visible_row,
        key, value, key_stride, value_stride, key_length, key_is_valid, scaling, head_seed, dropout,
        STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, False,
        CAUSAL, PACKED, PADDED, MASKED,
    )  # fmt: skip
    inverse_normalizers = tl.load(inverse_normalizer + rows_of_head, mask=is_row, other=0.0)
    _store_rows(
        query_gradient + of_head,
        start,
        query_length,
        stride,
        gradient_sum * (inverse_normalizers * scaling)[:, None],
        TILE,
        WIDTH,
        HEAD_DIM,
    )


@jit
def _key_value_gradients(
    key_sum, value_sum, begin, end, keys, values, place,
    query, gradient, query_stride, gradient_stride, inverse_normalizer, delta, log_count, query_index, document_start, visible,
    visible_stride, query_length, key_length, scaling, seed, dropout,
    STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BODY: tl.constexpr, NORMALIZATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ALL_SEEN: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the queries from `begin` to `end` to `dS^T Q` and `(P / Z)^T dO`. ALL_SEEN: they all see all keys of the tile.

    Queries after the last are 0, as are their gradients, so they add nothing.
    """
    for start in tl.range(begin, end, STEP):
        row = start + tl.arange(0, STEP)
        is_row = row < query_length
        queries = _load_rows(query, start, query_length, query_stride, STEP, WIDTH, HEAD_DIM, False)
        gradients = _load_rows(gradient, start, query_length, gradient_stride, STEP, WIDTH, HEAD_DIM, False)
        # (key, query), so that no product needs it turned
        nothing = tl.zeros((keys.shape[0], STEP), key_sum.dtype)
        scores = _product(keys, tl.trans(queries), nothing, PRECISION) * scaling
        slope = _product(values, tl.trans(gradients), nothing, PRECISION)
        if HAS_BIAS:
            scores -= tl.load(log_count + row, mask=is_row, other=0.0)[None, :]
        weights, derivative = BODY(scores)
        if HAS_DROPOUT:
            factors = _dropout_factors(seed, row[None, :], place[:, None], key_length, dropout)
            weights *= factors
            slope *= factors
        if NORMALIZATION == "sum":
            slope -= tl.load(delta + row, mask=is_row, other=0.0)[None, :]
        slope *= derivative
        if NORMALIZATION != "none":
            inverse_normalizers = tl.load(inverse_normalizer + row, mask=is_row, other=0.0)[None, :]
            weights *= inverse_normalizers
            slope *= inverse_normalizers
        if not ALL_SEEN:
            index = row
            document = row
            if CAUSAL:
                index = row + tl.load(query_index).to(tl.int32)
            if PACKED:
                document = tl.load(document_start + row, mask=is_row, other=0).to(tl.int32)
            visible_row = visible + row.to(tl.int64) * visible_stride
            is_visible = _is_visible(
                place[:, None], key_length, is_row[None, :], index[None, :], document[None, :], visible_row[None, :],
                visible, CAUSAL, PACKED, False, MASKED,
            )  # fmt: skip
            weights = tl.where(is_visible, weights, 0.0)
            slope = tl.where(is_visible, slope, 0.0)
        value_sum = _add_product(value_sum, weights, gradients, PRECISION)
        key_sum = _add_product(key_sum, slope, queries, PRECISION)
    return key_sum, value_sum


@kernel
def key_value_gradient_kernel(
    gradient, query, key, value, inverse_normalizer, delta, log_count, key_gradient, value_gradient,
    query_index, key_is_valid, document_start, document_end, visible, seed,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    visible_batch_stride, visible_head_stride, visible_stride,
    heads, group, query_length, key_length, scaling, dropout,
    TILE: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BODY: tl.constexpr, NORMALIZATION: tl.constexpr, SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`dK` and `dV` of a tile of keys of one key-value head, summed over the query heads that share it.

    `document_end[batch, key]` is the first query whose document begins after the key.
    """
    tiles = tl.cdiv(key_length, TILE)
    batch_head = tl.program_id(0) // tiles
    start = tl.program_id(0) % tiles * TILE  # the first keys have the most queries
    key_value_heads = heads // group
    batch = (batch_head // key_value_heads).to(tl.int64)
    key_value_head = (batch_head % key_value_heads).to(tl.int64)
    place = start + tl.arange(0, TILE)
    last_key = tl.minimum(start + TILE, key_length) - 1
    key += batch * key_batch_stride + key_value_head * key_head_stride
    value += batch * value_batch_stride + key_value_head * value_head_stride
    key_is_valid += batch * key_length
    document_start += batch * query_length

    # All queries from `full_first` to `full_last` see all keys of the tile; none before `first` or from `last` on sees any
    first = start * 0
    full_first = first
    last = query_length
    full_last = query_length
    if CAUSAL:
        offset = tl.load(query_index).to(tl.int32)
        first = tl.maximum(start - offset, 0) // STEP * STEP
        full_first = (tl.maximum(last_key - offset, 0) + STEP - 1) // STEP * STEP
    if PACKED:
        last = tl.load(document_end + batch * key_length + last_key).to(tl.int32)
        full_last = tl.minimum(full_last, tl.load(document_end + batch * key_length + start).to(tl.int32) // STEP * STEP)
    if PADDED:
        # The gradients of invalid keys are set to 0 at the end; a tile of invalid keys only is skipped
        is_valid = tl.load(key_is_valid + place, mask=place < key_length, other=0) != 0
        last = tl.where(tl.max(is_valid.to(tl.int32), 0) != 0, last, first)
    if MASKED:
        full_last = first
    full_first = tl.minimum(full_first, tl.maximum(last, first))
    full_last = tl.maximum(tl.minimum(full_last, last), full_first)

    keys = _load_rows(key, start, key_length, key_stride, TILE, WIDTH, HEAD_DIM, False)
    values = _load_rows(value, start, key_length, value_stride, TILE, WIDTH, HEAD_DIM, False)
    key_sum = tl.zeros((TILE, WIDTH), SUM)
    value_sum = tl.zeros((TILE, WIDTH), SUM)
    for member in range(group):
        head = key_value_head * group + member
        of_head = batch * heads + head
        head_query = query + batch * query_batch_stride + head * query_head_stride
        head_gradient = gradient + (batch * query_length * heads + head) * HEAD_DIM
        head_log_count = log_count + of_head * query_length
        head_visible = visible + batch * visible_batch_stride + head * visible_head_stride
        head_inverse_normalizer = inverse_normalizer + of_head * query_length
        head_delta = delta + of_head * query_length
        head_seed = of_head
        if HAS_DROPOUT:
            head_seed = _head_seed(seed, of_head)
        if CAUSAL:
            key_sum, value_sum = _key_value_gradients(
                key_sum, value_sum, first, full_first, keys, values, place,
                head_query, head_gradient, query_stride, heads * HEAD_DIM, head_inverse_normalizer, head_delta, head_log_count,
                query_index, document_start, head_visible, visible_stride,
                query_length, key_length, scaling, head_seed, dropout,
                STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, False,
                CAUSAL, PACKED, MASKED,
            )  # fmt: skip
        if not MASKED:
            key_sum, value_sum = _key_value_gradients(
                key_sum, value_sum, full_first, full_last, keys, values, place,
                head_query, head_gradient, query_stride, heads * HEAD_DIM, head_inverse_normalizer, head_delta, head_log_count,
                query_index, document_start, head_visible, visible_stride,
                query_length, key_length, scaling, head_seed, dropout,
                STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, True,
                CAUSAL, PACKED, MASKED,
            )  # fmt: skip
        if PACKED or MASKED:
            key_sum, value_sum = _key_value_gradients(
                key_sum, value_sum, full_last, last, keys, values, place,
                head_query, head_gradient, query_stride, heads * HEAD_DIM, head_inverse_normalizer, head_delta, head_log_count,
                query_index, document_start, head_visible, visible_stride,
                query_length, key_length, scaling, head_seed, dropout,
                STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, False,
                CAUSAL, PACKED, MASKED,
            )  # fmt: skip
    if PADDED:
        key_sum = tl.where(is_valid[:, None], key_sum, 0.0)
        value_sum = tl.where(is_valid[:, None], value_sum, 0.0)
    key_gradient += (batch * key_length * key_value_heads + key_value_head) * HEAD_DIM
    value_gradient += (batch * key_length * key_value_heads + key_value_head) * HEAD_DIM
    stride = key_value_heads * HEAD_DIM
    _store_rows(key_gradient, start, key_length, stride, key_sum * scaling, TILE, WIDTH, HEAD_DIM)
    _store_rows(value_gradient, start, key_length, stride, value_sum, TILE, WIDTH, HEAD_DIM)


@kernel
def body_kernel(scores, weights, derivatives, BODY: tl.constexpr, SIZE: tl.constexpr):
    """`phi` and its derivative of `SIZE` scores, by an activation's body alone."""
    place = tl.arange(0, SIZE)
    weight, derivative = BODY(tl.load(scores + place))
    tl.store(weights + place, weight)
    tl.store(derivatives + place, derivative)


class Tiles(NamedTuple):
    """The sizes of a launch: rows of a program's tile, rows of a step along the other axis, warps, stages of the pipeline."""

    tile: int
    step: int
    warps: int
    stages: int


MIN_TILE = 16  # the least that tensor cores multiply
# By kernel, bytes of the multiplied numbers (2 for bfloat16, else 4) and width of the head. Chosen by what a Hopper GPU's
# registers hold, not yet by timing. Where a GPU has too little shared memory for a line, the next line is tried.
TILES = {
    forward_kernel: {
        2: {64: Tiles(128, 128, 8, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(128, 32, 8, 3)},
        4: {64: Tiles(128, 64, 8, 3), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 16, 8, 1)},
    },
    query_gradient_kernel: {
        2: {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 2), 256: Tiles(128, 32, 8, 2)},
        4: {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 8, 2), 256: Tiles(16, 16, 4, 1)},
    },
    key_value_gradient_kernel: {
        2: {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 8, 2)},
        4: {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 8, 2), 256: Tiles(16, 16, 4, 1)},
    },
    # Its own tile takes all queries that share a key-value head
    split_kernel: {
        2: {64: Tiles(MIN_TILE, 128, 4, 3), 128: Tiles(MIN_TILE, 64, 4, 3), 256: Tiles(MIN_TILE, 32, 4, 3)},
        4: {64: Tiles(MIN_TILE, 64, 4, 3), 128: Tiles(MIN_TILE, 32, 4, 3), 256: Tiles(MIN_TILE, 16, 4, 2)},
    },
}
# Small enough for every GPU
LAST_TILES = Tiles(MIN_TILE, MIN_TILE, 4, 1)

"""The Triton kernels of the forward pass of `nlq_triton`, and the functions that the backward pass shares with them.

A program owns a tile of queries (or, for the gradients of keys and values, of keys) and walks along the other axis. With
`P = phi(S)`, normaliser `Z` and `O = P V / Z`, a kernel needs no running maximum and rescales nothing (compare Dao et al. 2022,
arXiv 2205.14135). It sums in float32 and multiplies with `1 / Z` at the end. Backward computes the scores again, once for the
queries and once for the keys and values. Every sum then has one owner and one order, so gradients are deterministic:

    dV = (P / Z)^T dO,    dP = dO V^T,    dS = phi'(S) * dP / Z,    dQ = scaling * dS K,    dK = scaling * dS^T Q,

where under the normaliser `"sum"`, which depends on every weight, `dP = dO V^T - rowsum(dO * O)`.

Four flags say what can hide a key. `index` is a query's own index among the keys:

    CAUSAL      key <= index, where index = query_index[0] + row
    BOUNDED     key >= first_key[batch, row], which never falls from row to row
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

from .activations import INTERPRETED, jit, tl, triton


# Numbers that change from call to call; specialising a kernel on them would not make it faster
CHANGING = ("query_length", "key_length", "keys_per_split", "splits", "scaling", "dropout")
kernel = jit if triton is None else functools.partial(triton.jit, do_not_specialize=CHANGING)


@jit
def load_rows(
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
def store_rows(pointer, start, length, stride, states, SIZE: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Stores rows `start` to `start + SIZE`, the counterpart of `load_rows`."""
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
def multiply(left, right, total, PRECISION: tl.constexpr):
    """`total + left @ right`."""
    if INTERPRETED and left.dtype == tl.bfloat16:
        # The interpreter (Triton 3.9) would multiply their bits as integers
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision=PRECISION)
    else:
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@jit
def multiply_add(total, computed, states, PRECISION: tl.constexpr):
    """`total + computed @ states`: weights, or gradients of scores, times tensors in the precision they were given in.

    Float16 has no room for weights that are not normalised yet. TF32 has its precision and float32's range.
    """
    if states.dtype == tl.float16:
        total = multiply(computed, states.to(tl.float32), total, "tf32")
    else:
        total = multiply(computed.to(states.dtype), states, total, PRECISION)
    return total


@jit
def dropout_factors(seed, row, key, key_length, dropout):
    """Returns dropout's factors of the weights. They depend on row and key, not on the tiles. `seed` is that of the head."""
    number = tl.rand(seed, row.to(tl.uint32) * key_length.to(tl.uint32) + key.to(tl.uint32))
    return tl.where(number >= dropout, 1.0 / (1.0 - dropout), 0.0)


@jit
def seed_of_head(seed, batch_head):
    return tl.load(seed) + batch_head.to(tl.int64) * 0x5851F42D4C957F2D


@jit
def find_visible(
    key, key_length, is_row, index, bound, visible_row, key_is_valid,
    CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """True where a query sees a key. `key` is `(1, key)` and the queries' arguments are `(query, 1)`, or all transposed.

    Args:
        key: indices of the keys.
        is_row, index, bound: whether the query exists, its own index, the first key that it may see.
        visible_row: pointers to the queries' rows of the caller's mask.
        key_is_valid: pointer to the row of this batch element.
    """
    is_visible = (key <= tl.minimum(index, key_length - 1)) if CAUSAL else (key < key_length) & (index >= 0)
    if BOUNDED:
        is_visible &= key >= bound
    if PADDED:
        is_visible &= tl.load(key_is_valid + key, mask=key < key_length, other=0) != 0
    if MASKED:
        is_visible &= is_row
        is_visible &= tl.load(visible_row + key, mask=is_visible, other=0) != 0
    return is_visible


@jit
def find_bounds(
    start, row, is_row, query_index, first_key, valid_range, query_length, key_length,
    TILE: tl.constexpr, STEP: tl.constexpr,
    CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Finds the keys that a tile of `TILE` queries from `start` on sees, in steps of `STEP`.

    Returns:
        `first <= full_first <= full_last`, and `last`. Every query sees all keys from `full_first` to `full_last`; no query
        sees keys before `first` or from `last` on. Then the `index` and `bound` of each query.
    """
    first = start * 0
    full_first = first
    last = key_length
    full_last = key_length // STEP * STEP
    index = row
    bound = row
    if CAUSAL:
        offset = tl.load(query_index).to(tl.int32)
        index = row + offset
        last = tl.minimum(last, offset + tl.minimum(start + TILE, query_length))
        full_last = tl.minimum(full_last, (offset + start + 1) // STEP * STEP)
    if BOUNDED:
        bound = tl.load(first_key + row, mask=is_row, other=0).to(tl.int32)
        first = tl.min(tl.where(is_row, bound, key_length), 0) // STEP * STEP
        full_first = (tl.max(bound, 0) + STEP - 1) // STEP * STEP
    if PADDED:
        first_valid = tl.load(valid_range)
        last_valid = tl.load(valid_range + 1)
        first = tl.maximum(first, first_valid // STEP * STEP)
        full_first = tl.maximum(full_first, (first_valid + STEP - 1) // STEP * STEP)
        last = tl.minimum(last, last_valid)
        full_last = tl.where(tl.load(valid_range + 2) != 0, tl.minimum(full_last, last_valid // STEP * STEP), 0)
    if MASKED:
        full_last = first  # any key may be hidden
    # Queries that see less than a tile have no tile that is visible completely
    full_first = tl.minimum(full_first, tl.maximum(last, first))
    full_last = tl.maximum(full_last, full_first)
    return first, full_first, full_last, last, index, bound


@jit
def _attend(
    weighted, total, begin, end, queries, bias, row, is_row, index, bound, visible_row,
    key, value, key_stride, value_stride, key_length, key_is_valid, scaling, seed, dropout,
    STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BODY: tl.constexpr, NORMALIZATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, IN_RANGE: tl.constexpr,
    CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys from `begin` to `end` to `P V` and to the row sums of `P`. IN_RANGE: all queries see all of them."""
    for start in tl.range(begin, end, STEP):
        place = start + tl.arange(0, STEP)
        keys = load_rows(key, start, key_length, key_stride, STEP, WIDTH, HEAD_DIM, IN_RANGE)
        nothing = tl.zeros((queries.shape[0], STEP), weighted.dtype)
        scores = multiply(queries, tl.trans(keys), nothing, PRECISION) * scaling
        if HAS_BIAS:
            scores -= bias[:, None]
        weights, _ = BODY(scores)
        if not IN_RANGE:
            is_visible = find_visible(
                place[None, :], key_length, is_row[:, None], index[:, None], bound[:, None], visible_row[:, None],
                key_is_valid, CAUSAL, BOUNDED, PADDED, MASKED,
            )  # fmt: skip
            weights = tl.where(is_visible, weights, 0.0)
        if NORMALIZATION == "sum":
            if value.dtype.element_ty == tl.bfloat16:
                weights = weights.to(tl.bfloat16).to(tl.float32)
            total += tl.sum(weights, 1)
        if HAS_DROPOUT:
            weights *= dropout_factors(seed, row[:, None], place[None, :], key_length, dropout)
        values = load_rows(value, start, key_length, value_stride, STEP, WIDTH, HEAD_DIM, IN_RANGE)
        weighted = multiply_add(weighted, weights, values, PRECISION)
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
    query_index, visible_count, key_is_valid, valid_range, first_key, visible, seed,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    count_batch_stride, count_head_stride,
    visible_batch_stride, visible_head_stride, visible_stride,
    heads, group, query_length, key_length, scaling, dropout,
    TILE: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BODY: tl.constexpr, NORMALIZATION: tl.constexpr, LIMIT: tl.constexpr, SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_REMAINDER: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
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
    first, full_first, full_last, last, index, bound = find_bounds(
        start, row, is_row, query_index, first_key + batch * query_length, valid_range + 3 * batch,
        query_length, key_length, TILE, STEP, CAUSAL, BOUNDED, PADDED, MASKED,
    )  # fmt: skip
    visible_row = visible + batch * visible_batch_stride + head * visible_head_stride + row.to(tl.int64) * visible_stride
    head_seed = batch_head
    if HAS_DROPOUT:
        head_seed = seed_of_head(seed, batch_head)

    counts = visible_count + batch * count_batch_stride + head * count_head_stride + row
    count = tl.maximum(tl.load(counts, mask=is_row, other=1), 1).to(SUM)
    bias = tl.log(count)
    queries = load_rows(query, start, query_length, query_stride, TILE, WIDTH, HEAD_DIM, False)
    weighted = tl.zeros((TILE, WIDTH), SUM)
    total = tl.zeros((TILE,), SUM)
    if BOUNDED or PADDED:
        weighted, total = _attend(
            weighted, total, first, full_first, queries, bias, row, is_row, index, bound, visible_row,
            key, value, key_stride, value_stride, key_length, key_is_valid, scaling, head_seed, dropout,
            STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, False,
            CAUSAL, BOUNDED, PADDED, MASKED,
        )  # fmt: skip
    if not MASKED:
        weighted, total = _attend(
            weighted, total, full_first, full_last, queries, bias, row, is_row, index, bound, visible_row,
            key, value, key_stride, value_stride, key_length, key_is_valid, scaling, head_seed, dropout,
            STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, True,
            CAUSAL, BOUNDED, PADDED, MASKED,
        )  # fmt: skip
    weighted, total = _attend(
        weighted, total, full_last, last, queries, bias, row, is_row, index, bound, visible_row,
        key, value, key_stride, value_stride, key_length, key_is_valid, scaling, head_seed, dropout,
        STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, False,
        CAUSAL, BOUNDED, PADDED, MASKED,
    )  # fmt: skip
    inverse_normalizers = _inverse_normalizer(total, count, LIMIT, NORMALIZATION)
    tl.store(inverse_normalizer + batch_head.to(tl.int64) * query_length + row, inverse_normalizers, mask=is_row)
    weighted *= inverse_normalizers[:, None]
    of_head = (batch * query_length * heads + head) * HEAD_DIM
    store_rows(output + of_head, start, query_length, heads * HEAD_DIM, weighted, TILE, WIDTH, HEAD_DIM)
    if HAS_REMAINDER:
        rest = _remainder(weighted, output)
        store_rows(remainder + of_head, start, query_length, heads * HEAD_DIM, rest, TILE, WIDTH, HEAD_DIM)


@kernel
def split_kernel(
    query, key, value, weighted_sums, totals,
    query_index, visible_count, key_is_valid, first_key, visible,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    count_batch_stride, count_head_stride,
    visible_batch_stride, visible_head_stride, visible_stride,
    heads, group, query_length, key_length, keys_per_split, splits, scaling,
    TILE: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BODY: tl.constexpr, NORMALIZATION: tl.constexpr, SUM: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
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
    bound = row
    if CAUSAL:
        offset = tl.load(query_index).to(tl.int32)
        index = row + offset
        end = tl.minimum(end, offset + query_length)
    if BOUNDED:
        bound = tl.load(first_key + batch * query_length + row, mask=is_row, other=0).to(tl.int32)

    counts = visible_count + batch * count_batch_stride + head * count_head_stride + row
    bias = tl.log(tl.maximum(tl.load(counts, mask=is_row, other=1), 1).to(SUM))
    column = tl.arange(0, WIDTH)
    is_state = is_row[:, None] & (column < HEAD_DIM)[None, :]
    pointers = query + (head * query_head_stride + row * query_stride)[:, None] + column[None, :]
    queries = tl.load(pointers, mask=is_state, other=0.0)
    weighted, total = _attend(
        tl.zeros((TILE, WIDTH), SUM), tl.zeros((TILE,), SUM), begin, end, queries, bias,
        row, is_row, index, bound, visible_row,
        key, value, key_stride, value_stride, key_length, key_is_valid, scaling, batch_head, 0.0,
        STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, False, PRECISION, False,
        CAUSAL, BOUNDED, PADDED, MASKED,
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


@kernel
def body_kernel(scores, weights, derivatives, BODY: tl.constexpr, SIZE: tl.constexpr):
    """`phi` and its derivative of `SIZE` scores, by an activation's body alone."""
    place = tl.arange(0, SIZE)
    weight, derivative = BODY(tl.load(scores + place))
    tl.store(weights + place, weight)
    tl.store(derivatives + place, derivative)

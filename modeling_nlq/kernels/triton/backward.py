"""The Triton kernels of the backward pass of `nlq_triton`; `forward` explains the mathematics and the flags."""

from .activations import jit, tl
from .forward import (
    dropout_factors,
    find_bounds,
    find_visible,
    kernel,
    load_rows,
    multiply,
    multiply_add,
    seed_of_head,
    store_rows,
)


@jit
def _query_gradient(
    gradient_sum, begin, end, queries, gradients, bias, row_delta, row, is_row, index, bound, visible_row,
    key, value, key_stride, value_stride, key_length, key_is_valid, scaling, seed, dropout,
    STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BODY: tl.constexpr, NORMALIZATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, IN_RANGE: tl.constexpr,
    CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the keys from `begin` to `end` to `dS K`, without the factor `1 / Z`."""
    for start in tl.range(begin, end, STEP):
        place = start + tl.arange(0, STEP)
        keys = load_rows(key, start, key_length, key_stride, STEP, WIDTH, HEAD_DIM, IN_RANGE)
        nothing = tl.zeros((queries.shape[0], STEP), gradient_sum.dtype)
        scores = multiply(queries, tl.trans(keys), nothing, PRECISION) * scaling
        values = load_rows(value, start, key_length, value_stride, STEP, WIDTH, HEAD_DIM, IN_RANGE)
        slope = multiply(gradients, tl.trans(values), nothing, PRECISION)
        if HAS_BIAS:
            scores -= bias[:, None]
        if HAS_DROPOUT:
            slope *= dropout_factors(seed, row[:, None], place[None, :], key_length, dropout)
        if NORMALIZATION == "sum":
            slope -= row_delta[:, None]
        _, derivative = BODY(scores)
        slope *= derivative
        if not IN_RANGE:
            is_visible = find_visible(
                place[None, :], key_length, is_row[:, None], index[:, None], bound[:, None], visible_row[:, None],
                key_is_valid, CAUSAL, BOUNDED, PADDED, MASKED,
            )  # fmt: skip
            slope = tl.where(is_visible, slope, 0.0)
        gradient_sum = multiply_add(gradient_sum, slope, keys, PRECISION)
    return gradient_sum


@kernel
def query_gradient_kernel(
    gradient, query, key, value, output, remainder, inverse_normalizer, delta, log_count, query_gradient,
    query_index, visible_count, key_is_valid, valid_range, first_key, visible, seed,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    count_batch_stride, count_head_stride,
    visible_batch_stride, visible_head_stride, visible_stride,
    heads, group, query_length, key_length, scaling, dropout,
    TILE: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BODY: tl.constexpr, NORMALIZATION: tl.constexpr, SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_REMAINDER: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
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
    first, full_first, full_last, last, index, bound = find_bounds(
        start, row, is_row, query_index, first_key + batch * query_length, valid_range + 3 * batch,
        query_length, key_length, TILE, STEP, CAUSAL, BOUNDED, PADDED, MASKED,
    )  # fmt: skip
    visible_row = visible + batch * visible_batch_stride + head * visible_head_stride + row.to(tl.int64) * visible_stride
    head_seed = batch_head
    if HAS_DROPOUT:
        head_seed = seed_of_head(seed, batch_head)

    of_head = (batch * query_length * heads + head) * HEAD_DIM
    stride = heads * HEAD_DIM
    queries = load_rows(query, start, query_length, query_stride, TILE, WIDTH, HEAD_DIM, False)
    gradients = load_rows(gradient + of_head, start, query_length, stride, TILE, WIDTH, HEAD_DIM, False)
    rows_of_head = batch_head.to(tl.int64) * query_length + row
    row_delta = tl.zeros((TILE,), SUM)
    if NORMALIZATION == "sum":
        outputs = load_rows(output + of_head, start, query_length, stride, TILE, WIDTH, HEAD_DIM, False)
        outputs = outputs.to(SUM)
        if HAS_REMAINDER:
            outputs += load_rows(remainder + of_head, start, query_length, stride, TILE, WIDTH, HEAD_DIM, False).to(SUM)
        row_delta = tl.sum(gradients.to(SUM) * outputs, 1)
        tl.store(delta + rows_of_head, row_delta, mask=is_row)
    counts = visible_count + batch * count_batch_stride + head * count_head_stride + row
    bias = tl.log(tl.maximum(tl.load(counts, mask=is_row, other=1), 1).to(SUM))
    if HAS_BIAS:
        tl.store(log_count + rows_of_head, bias, mask=is_row)
    gradient_sum = tl.zeros((TILE, WIDTH), SUM)
    if BOUNDED or PADDED:
        gradient_sum = _query_gradient(
            gradient_sum, first, full_first, queries, gradients, bias, row_delta, row, is_row, index, bound, visible_row,
            key, value, key_stride, value_stride, key_length, key_is_valid, scaling, head_seed, dropout,
            STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, False,
            CAUSAL, BOUNDED, PADDED, MASKED,
        )  # fmt: skip
    if not MASKED:
        gradient_sum = _query_gradient(
            gradient_sum, full_first, full_last, queries, gradients, bias, row_delta, row, is_row, index, bound, visible_row,
            key, value, key_stride, value_stride, key_length, key_is_valid, scaling, head_seed, dropout,
            STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, True,
            CAUSAL, BOUNDED, PADDED, MASKED,
        )  # fmt: skip
    gradient_sum = _query_gradient(
        gradient_sum, full_last, last, queries, gradients, bias, row_delta, row, is_row, index, bound, visible_row,
        key, value, key_stride, value_stride, key_length, key_is_valid, scaling, head_seed, dropout,
        STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, False,
        CAUSAL, BOUNDED, PADDED, MASKED,
    )  # fmt: skip
    inverse_normalizers = tl.load(inverse_normalizer + rows_of_head, mask=is_row, other=0.0)
    store_rows(
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
    query, gradient, query_stride, gradient_stride, inverse_normalizer, delta, log_count, query_index, first_key, visible,
    visible_stride, query_length, key_length, scaling, seed, dropout,
    STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BODY: tl.constexpr, NORMALIZATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ALL_SEEN: tl.constexpr,
    CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the queries from `begin` to `end` to `dS^T Q` and `(P / Z)^T dO`. ALL_SEEN: they all see all keys of the tile.

    Queries after the last are 0, as are their gradients, so they add nothing.
    """
    for start in tl.range(begin, end, STEP):
        row = start + tl.arange(0, STEP)
        is_row = row < query_length
        queries = load_rows(query, start, query_length, query_stride, STEP, WIDTH, HEAD_DIM, False)
        gradients = load_rows(gradient, start, query_length, gradient_stride, STEP, WIDTH, HEAD_DIM, False)
        # (key, query), so that no product needs it turned
        nothing = tl.zeros((keys.shape[0], STEP), key_sum.dtype)
        scores = multiply(keys, tl.trans(queries), nothing, PRECISION) * scaling
        slope = multiply(values, tl.trans(gradients), nothing, PRECISION)
        if HAS_BIAS:
            scores -= tl.load(log_count + row, mask=is_row, other=0.0)[None, :]
        weights, derivative = BODY(scores)
        if HAS_DROPOUT:
            factors = dropout_factors(seed, row[None, :], place[:, None], key_length, dropout)
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
            bound = row
            if CAUSAL:
                index = row + tl.load(query_index).to(tl.int32)
            if BOUNDED:
                bound = tl.load(first_key + row, mask=is_row, other=0).to(tl.int32)
            visible_row = visible + row.to(tl.int64) * visible_stride
            is_visible = find_visible(
                place[:, None], key_length, is_row[None, :], index[None, :], bound[None, :], visible_row[None, :],
                visible, CAUSAL, BOUNDED, False, MASKED,
            )  # fmt: skip
            weights = tl.where(is_visible, weights, 0.0)
            slope = tl.where(is_visible, slope, 0.0)
        value_sum = multiply_add(value_sum, weights, gradients, PRECISION)
        key_sum = multiply_add(key_sum, slope, queries, PRECISION)
    return key_sum, value_sum


@kernel
def key_value_gradient_kernel(
    gradient, query, key, value, inverse_normalizer, delta, log_count, key_gradient, value_gradient,
    query_index, key_is_valid, first_key, query_end, visible, seed,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    visible_batch_stride, visible_head_stride, visible_stride,
    heads, group, query_length, key_length, scaling, dropout,
    TILE: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BODY: tl.constexpr, NORMALIZATION: tl.constexpr, SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`dK` and `dV` of a tile of keys of one key-value head, summed over the query heads that share it.

    `query_end[batch, key]` is the first query whose `first_key` is after the key.
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
    first_key += batch * query_length

    # All queries from `full_first` to `full_last` see all keys of the tile; none before `first` or from `last` on sees any
    first = start * 0
    full_first = first
    last = query_length
    full_last = query_length
    if CAUSAL:
        offset = tl.load(query_index).to(tl.int32)
        first = tl.maximum(start - offset, 0) // STEP * STEP
        full_first = (tl.maximum(last_key - offset, 0) + STEP - 1) // STEP * STEP
    if BOUNDED:
        last = tl.load(query_end + batch * key_length + last_key).to(tl.int32)
        full_last = tl.minimum(full_last, tl.load(query_end + batch * key_length + start).to(tl.int32) // STEP * STEP)
    if PADDED:
        # The gradients of invalid keys are set to 0 at the end; a tile of invalid keys only is skipped
        is_valid = tl.load(key_is_valid + place, mask=place < key_length, other=0) != 0
        last = tl.where(tl.max(is_valid.to(tl.int32), 0) != 0, last, first)
    if MASKED:
        full_last = first
    full_first = tl.minimum(full_first, tl.maximum(last, first))
    full_last = tl.maximum(tl.minimum(full_last, last), full_first)

    keys = load_rows(key, start, key_length, key_stride, TILE, WIDTH, HEAD_DIM, False)
    values = load_rows(value, start, key_length, value_stride, TILE, WIDTH, HEAD_DIM, False)
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
            head_seed = seed_of_head(seed, of_head)
        if CAUSAL:
            key_sum, value_sum = _key_value_gradients(
                key_sum, value_sum, first, full_first, keys, values, place,
                head_query, head_gradient, query_stride, heads * HEAD_DIM, head_inverse_normalizer, head_delta, head_log_count,
                query_index, first_key, head_visible, visible_stride,
                query_length, key_length, scaling, head_seed, dropout,
                STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, False,
                CAUSAL, BOUNDED, MASKED,
            )  # fmt: skip
        if not MASKED:
            key_sum, value_sum = _key_value_gradients(
                key_sum, value_sum, full_first, full_last, keys, values, place,
                head_query, head_gradient, query_stride, heads * HEAD_DIM, head_inverse_normalizer, head_delta, head_log_count,
                query_index, first_key, head_visible, visible_stride,
                query_length, key_length, scaling, head_seed, dropout,
                STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, True,
                CAUSAL, BOUNDED, MASKED,
            )  # fmt: skip
        if BOUNDED or MASKED:
            key_sum, value_sum = _key_value_gradients(
                key_sum, value_sum, full_last, last, keys, values, place,
                head_query, head_gradient, query_stride, heads * HEAD_DIM, head_inverse_normalizer, head_delta, head_log_count,
                query_index, first_key, head_visible, visible_stride,
                query_length, key_length, scaling, head_seed, dropout,
                STEP, WIDTH, HEAD_DIM, BODY, NORMALIZATION, HAS_BIAS, HAS_DROPOUT, PRECISION, False,
                CAUSAL, BOUNDED, MASKED,
            )  # fmt: skip
    if PADDED:
        key_sum = tl.where(is_valid[:, None], key_sum, 0.0)
        value_sum = tl.where(is_valid[:, None], value_sum, 0.0)
    key_gradient += (batch * key_length * key_value_heads + key_value_head) * HEAD_DIM
    value_gradient += (batch * key_length * key_value_heads + key_value_head) * HEAD_DIM
    stride = key_value_heads * HEAD_DIM
    store_rows(key_gradient, start, key_length, stride, key_sum * scaling, TILE, WIDTH, HEAD_DIM)
    store_rows(value_gradient, start, key_length, stride, value_sum, TILE, WIDTH, HEAD_DIM)

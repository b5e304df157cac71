"""Elementwise attention in Triton, forward and backward, on NVIDIA GPUs from compute capability 8.0 on.

It is FlashAttention (Dao et al. 2022, arXiv 2205.14135) without the running maximum; `tiled_nlq.py` has the formulas.
A program computes a tile of queries, or the gradients of a tile of keys, and walks along the other axis. Backward
computes the scores twice, for queries and for keys: each sum has one program and one order, so the same inputs give
the same bits. Under `TRITON_INTERPRET=1`, set before the import, Triton's interpreter runs the kernels on the CPU.

Shapes: query, key and value `(batch, heads, length, head_dim)` in any strides but a last one of 1; output and its
gradient `(batch, query, heads, head_dim)`; a number for each query `(batch, heads, query)`. WIDTH is head_dim rounded
up to a power of 2. TILE are the rows of a program, STEP those along the other axis in a step of its loop.
"""

import math

import torch
import triton
import triton.language as tl
from torch.utils.flop_counter import register_flop_formula
from triton.runtime.errors import OutOfResources

from ... import ops_nlq as ops
from ...activations_nlq import get_attention_activation, zero_limit
from ...tiled_nlq import attend_in_tiles, tiled_attention_forward


@triton.jit
def sigmoid(scores):
    return 1.0 / (1.0 + tl.exp2(scores * -1.4426950408889634))


INTERPRETED = tl.constexpr(not isinstance(sigmoid, triton.JITFunction))


@triton.jit
def activate(scores, ACTIVATION: tl.constexpr):
    """Returns `phi(scores)` and `phi'(scores)` in float32. The compiler removes what a caller ignores."""
    if ACTIVATION == "identity":
        weights, slopes = scores, tl.full(scores.shape, 1.0, scores.dtype)
    elif ACTIVATION == "relu":
        weights, slopes = tl.maximum(scores, 0.0), tl.where(scores > 0, 1.0, 0.0)
    elif ACTIVATION == "relu_squared":
        slopes = 2.0 * tl.maximum(scores, 0.0)
        weights = 0.25 * slopes * slopes
    elif ACTIVATION == "squared":
        weights, slopes = scores * scores, 2.0 * scores
    elif ACTIVATION == "sigmoid":
        weights = sigmoid(scores)
        slopes = weights - weights * weights
    elif ACTIVATION == "tanh":
        # 2 sigmoid(2 s) - 1, and up to 1/2, where it would cancel, a series of tanh(s) / s (relative error 1.3e-8)
        gate, square = sigmoid(2.0 * scores), scores * scores
        series = 0.1332477932 + square * (-0.05298607529 + square * 0.01713500663)
        series = 0.9999999869 + square * (-0.3333306939 + square * series)
        weights, slopes = tl.where(square < 0.25, scores * series, 2.0 * gate - 1.0), 4.0 * (gate - gate * gate)
    elif ACTIVATION == "softplus":
        # max(s, 0) + log(1 + x) for x = exp(-|s|), with a series of log(1 + x) / x (relative error 4.7e-9)
        x = tl.exp2(tl.abs(scores) * -1.4426950408889634)
        series = -0.05695953427 + x * (0.01985146236 - x * 0.003244025177)
        series = 0.1967593926 + x * (-0.1530559257 + x * (0.1060365489 + x * series))
        series = -0.4999990242 + x * (0.3332996242 + x * (-0.2495413366 + x * series))
        weights = tl.maximum(scores, 0.0) + x * (0.9999999953 + x * series)
        slopes = tl.where(scores < 0, x, 1.0) / (1.0 + x)
    return weights, slopes


@triton.jit
def pointers_to(states, start, length, stride, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Returns pointers `(ROWS, WIDTH)` to the rows from `start` on, and which of them lie in the tensor."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    pointers = states + tl.cast(start, tl.int64) * stride + row * stride + column
    return pointers, (start + row < length) & (column < HEAD_DIM)


@triton.jit
def load_rows(states, start, length, stride, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    pointers, is_inside = pointers_to(states, start, length, stride, ROWS, HEAD_DIM, WIDTH)
    return tl.load(pointers, mask=is_inside, other=0.0)


@triton.jit
def store_rows(states, start, length, stride, rows, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    pointers, is_inside = pointers_to(states, start, length, stride, ROWS, HEAD_DIM, WIDTH)
    tl.store(pointers, rows.to(states.dtype.element_ty), mask=is_inside)


@triton.jit
def multiply(left, right, total, PRECISION: tl.constexpr):
    """Returns `total + left @ right`, with `left` in the precision of `right`."""
    if INTERPRETED or (right.dtype == tl.float16 and left.dtype != tl.float16):
        # Float16 has no room for weights that are not normalised yet, TF32 has its precision and float32's range. The
        # interpreter would multiply the bits of bfloat16 as integers
        left = left.to(right.dtype) if right.dtype == tl.bfloat16 else left
        right = right.to(tl.float32)
    return tl.dot(left.to(right.dtype), right, total, input_precision=PRECISION)


@triton.jit
def keys_of(row, last_key, first_key, query_length, key_length):
    """Returns the first key that queries see but for padding, and the one after the last."""
    first = row * 0
    end = first + key_length
    if last_key is not None:
        end = tl.minimum(tl.load(last_key + row, mask=row < query_length, other=-1).to(tl.int32) + 1, end)
    if first_key is not None:
        first = tl.load(first_key + row, mask=row < query_length, other=0).to(tl.int32)
    return first, end


@triton.jit
def count_below(numbers, length, limit):
    """Returns how many of numbers that never fall are below a limit."""
    low, high = length * 0, length
    while low < high:
        middle = (low + high) // 2
        is_below = tl.load(numbers + middle) < limit
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit
def plan(begin, full_begin, full_end, end, IS_MASKED: tl.constexpr, STEP: tl.constexpr):
    """Plans a loop over the steps without a mask, which lie in the full range, or over those before and after them.

    Returns where it starts, its number of steps, after how many it jumps, and how far.
    """
    begin = begin // STEP * STEP
    full_begin = tl.cdiv(full_begin, STEP) * STEP
    full_steps = tl.maximum(full_end // STEP - full_begin // STEP, 0)
    if not IS_MASKED:
        return full_begin, full_steps, 0, 0
    before = tl.where(full_steps > 0, (full_begin - begin) // STEP, 0)
    return begin, tl.cdiv(tl.maximum(end - begin, 0), STEP) - full_steps, before, full_steps * STEP


@triton.jit
def tile_of(length, heads, TILE: tl.constexpr):
    """Returns the batch element, the head and the first row of a program's tile."""
    tiles = tl.cdiv(length, TILE)
    batch_head = tl.program_id(0) // tiles
    return (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64), tl.program_id(0) % tiles * TILE


@triton.jit(do_not_specialize=["query_length", "key_length"])  # which change from batch to batch
def query_kernel(
    query, key, value, visible_count, last_key, is_valid, first_key,
    output, inverse_normalizer, gradient, delta, query_gradient,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    count_batch, last_batch, valid_batch, first_batch, heads, group, query_length, key_length, scaling,
    ACTIVATION: tl.constexpr, NORMALIZATION: tl.constexpr, SUBTRACTS_LOG: tl.constexpr, PRECISION: tl.constexpr,
    LIMIT: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Computes a tile of queries: without `gradient` the output and `1 / Z`, with it their gradient and `delta`.

    `delta` is `rowsum(dO * O)`. It must be the mean of the numbers that it is subtracted from, because the next
    factor, `phi' / Z`, is unbounded: so under `"sum"` the output is not rounded.
    """
    batch, head, start = tile_of(query_length, heads, TILE)
    start = (tl.cdiv(query_length, TILE) - 1) * TILE - start  # the last queries have the most keys
    row = start + tl.arange(0, TILE)
    is_row = row < query_length
    row_of_head = (batch * heads + head) * query_length + row
    offset, stride = (batch * query_length * heads + head) * HEAD_DIM, heads * HEAD_DIM
    query += batch * query_batch + head * query_head
    key += batch * key_batch + head // group * key_head
    value += batch * value_batch + head // group * value_head
    if last_key is not None:
        last_key += batch * last_batch
    if first_key is not None:
        first_key += batch * first_batch
    first, end = keys_of(row, last_key, first_key, query_length, key_length)
    begin_all, end_full = keys_of(start, last_key, first_key, query_length, key_length)
    begin_full, end_all = keys_of(
        tl.minimum(start + TILE, query_length) - 1, last_key, first_key, query_length, key_length
    )
    if is_valid is not None:
        end_full = begin_all
    count = tl.maximum(tl.load(visible_count + batch * count_batch + row, mask=is_row, other=1), 1).to(tl.float32)
    queries = load_rows(query, start, query_length, query_row, TILE, HEAD_DIM, WIDTH)
    row_delta = tl.zeros((TILE,), tl.float32)
    if gradient is not None:
        gradients = load_rows(gradient + offset, start, query_length, stride, TILE, HEAD_DIM, WIDTH)
        if NORMALIZATION == "sum":
            outputs = load_rows(output + offset, start, query_length, stride, TILE, HEAD_DIM, WIDTH)
            row_delta = tl.sum(gradients.to(tl.float32) * outputs, 1)
            tl.store(delta + row_of_head, row_delta, mask=is_row)
    total = tl.zeros((TILE,), tl.float32)
    weighted = tl.zeros((TILE, WIDTH), tl.float32)
    for is_masked in tl.static_range(2):
        position, steps, before, jump = plan(begin_all, begin_full, end_full, end_all, is_masked, STEP)
        for step in tl.range(0, steps):
            key_start = position + step * STEP + tl.where(step < before, 0, jump)
            keys = load_rows(key, key_start, key_length, key_row, STEP, HEAD_DIM, WIDTH)
            values = load_rows(value, key_start, key_length, value_row, STEP, HEAD_DIM, WIDTH)
            nothing = tl.zeros((TILE, STEP), tl.float32)
            scores = multiply(queries, tl.trans(keys), nothing, PRECISION) * scaling
            if SUBTRACTS_LOG:
                scores -= tl.log(count)[:, None]
            weights, slopes = activate(scores, ACTIVATION)
            if gradient is not None:
                weights = slopes * (multiply(gradients, tl.trans(values), nothing, PRECISION) - row_delta[:, None])
            if is_masked:
                index = key_start + tl.arange(0, STEP)
                is_seen = (index[None, :] < end[:, None]) & (index[None, :] >= first[:, None])
                if is_valid is not None:
                    valid = tl.load(is_valid + batch * valid_batch + index, mask=index < key_length, other=0)
                    is_seen &= (valid != 0)[None, :]
                weights = tl.where(is_seen, weights, 0.0)
            if gradient is not None:  # these weights are the gradients of the scores
                weighted = multiply(weights, keys, weighted, PRECISION)
            else:
                if NORMALIZATION == "sum":
                    if value.dtype.element_ty == tl.bfloat16:
                        weights = weights.to(tl.bfloat16).to(tl.float32)  # sums the numbers that are multiplied
                    total += tl.sum(weights, 1)
                weighted = multiply(weights, values, weighted, PRECISION)
    if gradient is not None:
        inverse = tl.load(inverse_normalizer + row_of_head, mask=is_row, other=0.0)
        weighted *= (inverse * scaling)[:, None]
        store_rows(query_gradient + offset, start, query_length, stride, weighted, TILE, HEAD_DIM, WIDTH)
    else:
        inverse = 1.0 / count if NORMALIZATION == "length" else tl.full((TILE,), 1.0, tl.float32)
        if NORMALIZATION == "sum":
            inverse = tl.where(total < LIMIT, 0.0, 1.0 / tl.maximum(total, LIMIT))
        tl.store(inverse_normalizer + row_of_head, inverse, mask=is_row)
        weighted *= inverse[:, None]
        store_rows(output + offset, start, query_length, stride, weighted, TILE, HEAD_DIM, WIDTH)


@triton.jit(do_not_specialize=["query_length", "key_length"])  # which change from batch to batch
def key_kernel(
    query, key, value, visible_count, last_key, is_valid, first_key,
    inverse_normalizer, gradient, delta, key_gradient, value_gradient,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    count_batch, last_batch, valid_batch, first_batch, heads, group, query_length, key_length, scaling,
    ACTIVATION: tl.constexpr, NORMALIZATION: tl.constexpr, SUBTRACTS_LOG: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of a tile of keys and of their values, from all heads that share them.

    Products are transposed, `(key, query)`, so that none needs its weights turned.
    """
    batch, key_value_head, start = tile_of(key_length, heads // group, TILE)
    index = start + tl.arange(0, TILE)
    begin_all, begin_full = start * 0, start * 0
    end_all, end_full = query_length, query_length
    if last_key is not None:
        last_key += batch * last_batch
        begin_all = count_below(last_key, query_length, start)
        begin_full = count_below(last_key, query_length, tl.minimum(start + TILE, key_length) - 1)
    if first_key is not None:
        first_key += batch * first_batch
        end_full = count_below(first_key, query_length, start + 1)
        end_all = count_below(first_key, query_length, start + TILE)
    key += batch * key_batch + key_value_head * key_head
    value += batch * value_batch + key_value_head * value_head
    keys = load_rows(key, start, key_length, key_row, TILE, HEAD_DIM, WIDTH)
    values = load_rows(value, start, key_length, value_row, TILE, HEAD_DIM, WIDTH)
    key_total = tl.zeros((TILE, WIDTH), tl.float32)
    value_total = tl.zeros((TILE, WIDTH), tl.float32)
    for member in range(group):
        head = key_value_head * group + member
        of_head = (batch * heads + head) * query_length
        head_query = query + batch * query_batch + head * query_head
        head_gradient = gradient + (batch * query_length * heads + head) * HEAD_DIM
        for is_masked in tl.static_range(2):
            position, steps, before, jump = plan(begin_all, begin_full, end_full, end_all, is_masked, STEP)
            for step in tl.range(0, steps):
                row_start = position + step * STEP + tl.where(step < before, 0, jump)
                row = row_start + tl.arange(0, STEP)
                is_row = row < query_length
                queries = load_rows(head_query, row_start, query_length, query_row, STEP, HEAD_DIM, WIDTH)
                gradients = load_rows(head_gradient, row_start, query_length, heads * HEAD_DIM, STEP, HEAD_DIM, WIDTH)
                nothing = tl.zeros((TILE, STEP), tl.float32)
                scores = multiply(keys, tl.trans(queries), nothing, PRECISION) * scaling
                if SUBTRACTS_LOG:
                    count = tl.load(visible_count + batch * count_batch + row, mask=is_row, other=1)
                    scores -= tl.log(tl.maximum(count, 1).to(tl.float32))[None, :]
                weights, slopes = activate(scores, ACTIVATION)
                products = multiply(values, tl.trans(gradients), nothing, PRECISION)
                if NORMALIZATION == "sum":
                    products -= tl.load(delta + of_head + row, mask=is_row, other=0.0)[None, :]
                slopes *= products
                if NORMALIZATION != "none":
                    inverse = tl.load(inverse_normalizer + of_head + row, mask=is_row, other=0.0)[None, :]
                    weights *= inverse
                    slopes *= inverse
                if is_masked:
                    first, end = keys_of(row, last_key, first_key, query_length, key_length)
                    is_seen = (index[:, None] < end[None, :]) & (index[:, None] >= first[None, :])
                    weights = tl.where(is_seen, weights, 0.0)
                    slopes = tl.where(is_seen, slopes, 0.0)
                value_total = multiply(weights, gradients, value_total, PRECISION)
                key_total = multiply(slopes, queries, key_total, PRECISION)
    if is_valid is not None:
        valid = tl.load(is_valid + batch * valid_batch + index, mask=index < key_length, other=0) != 0
        key_total = tl.where(valid[:, None], key_total, 0.0)
        value_total = tl.where(valid[:, None], value_total, 0.0)
    stride = heads // group * HEAD_DIM
    offset = batch * key_length * stride + key_value_head * HEAD_DIM
    store_rows(key_gradient + offset, start, key_length, stride, key_total * scaling, TILE, HEAD_DIM, WIDTH)
    store_rows(value_gradient + offset, start, key_length, stride, value_total, TILE, HEAD_DIM, WIDTH)


# TILE, STEP, warps and stages to try, by `is_forward`, bytes of a number (of float16 TF32) and WIDTH. The first is for
# GPUs of capability 9.0 and later only
SHAPES = {
    (True, 2, 64): [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2)],
    (True, 2, 128): [(128, 64, 8, 2), (128, 32, 8, 2)],
    (True, 2, 256): [(128, 32, 8, 2), (64, 32, 8, 1), (32, 32, 4, 1)],
    (True, 4, 64): [(64, 32, 4, 2), (64, 32, 8, 1)],
    (True, 4, 128): [(32, 32, 8, 1), (32, 32, 8, 1)],
    (True, 4, 256): [(32, 16, 8, 1), (16, 16, 8, 1)],
    (False, 2, 64): [(128, 64, 8, 2), (128, 32, 8, 1), (64, 32, 8, 2)],
    (False, 2, 128): [(64, 32, 8, 2), (64, 32, 8, 2)],
    (False, 2, 256): [(64, 32, 8, 1), (32, 32, 8, 1)],
    (False, 4, 64): [(32, 32, 8, 1), (32, 32, 8, 1)],
    (False, 4, 128): [(16, 16, 8, 1), (16, 16, 8, 1)],
    (False, 4, 256): [(16, 16, 8, 1), (16, 16, 8, 1)],
}
# The fastest shape of each kernel, by device, kind of call and number of rows
_fastest: dict[tuple, tuple[int, int, int, int]] = {}


def _launch(kernel, states: torch.Tensor, arguments: dict) -> None:
    """Launches a program for each tile of rows of `states`, in the fastest shape."""
    batch, heads, length, _ = states.shape
    is_forward, size = "gradient" not in arguments, 2 if states.dtype == torch.bfloat16 else 4
    is_older = states.is_cuda and torch.cuda.get_device_capability(states.device) < (9, 0)
    shapes = SHAPES[is_forward, size, max(arguments["WIDTH"], 64)][int(is_older) :]
    arguments = {name: arguments.get(name) for name in kernel.arg_names if name not in ("TILE", "STEP")}

    def launch(tile: int, step: int, warps: int, stages: int) -> None:
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        kernel[(triton.cdiv(length, tile) * batch * heads,)](**arguments, TILE=tile, STEP=step, **options)

    def milliseconds(shape: tuple[int, int, int, int]) -> float:
        try:
            return triton.testing.do_bench(lambda: launch(*shape), warmup=5, rep=20)
        except OutOfResources:
            return math.inf

    if length * batch * heads > 0:
        call = (kernel, is_forward, states.device, states.dtype, *shapes, min(length.bit_length(), 13))
        with torch.cuda.device_of(states):
            if call not in _fastest:
                _fastest[call] = shapes[0] if INTERPRETED else min(dict.fromkeys(shapes), key=milliseconds)
            launch(*_fastest[call])


def arguments_of(inputs: ops.AttentionInputs) -> dict:
    """Returns the arguments that the kernels share, by name."""
    arguments = {}
    for name, states in zip(("query", "key", "value"), inputs):
        states = states if states.stride(-1) == 1 else states.contiguous()
        arguments |= {name: states, **dict(zip((f"{name}_batch", f"{name}_head", f"{name}_row"), states.stride()))}
    masks = (inputs.visible_count[:, 0], inputs.last_key, inputs.key_is_valid, inputs.first_key)
    for name, mask in zip(("visible_count", "last_key", "is_valid", "first_key"), masks):
        arguments[name] = mask = None if mask is None else mask.contiguous().expand(len(inputs.query), -1)
        word = name.replace("visible_", "").replace("is_", "").replace("_key", "")
        arguments[f"{word}_batch"] = 0 if mask is None else mask.stride(0)
    has_tf32 = inputs.query.dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest"
    is_shifted = get_attention_activation(inputs.activation).subtract_log_count and inputs.normalization == "none"
    (_, heads, query_length, head_dim), (_, key_value_heads, key_length, _) = inputs.query.shape, inputs.key.shape
    arguments |= {"heads": heads, "group": heads // key_value_heads, "scaling": inputs.scaling}
    arguments |= {"query_length": query_length, "key_length": key_length, "HEAD_DIM": head_dim}
    arguments |= {"WIDTH": max(triton.next_power_of_2(head_dim), 16), "LIMIT": zero_limit(torch.float32)}
    arguments |= {"ACTIVATION": inputs.activation, "NORMALIZATION": inputs.normalization, "SUBTRACTS_LOG": is_shifted}
    return arguments | {"PRECISION": "tf32" if has_tf32 else "tf32x3"}


def _attention(inputs: ops.AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output, in float32 under `"sum"`, and `1 / Z`."""
    results = _new_results(*inputs)
    tensors = dict(zip(("output", "inverse_normalizer"), results))
    _launch(query_kernel, inputs.query, arguments_of(inputs) | tensors)
    return results


def _attention_backward(gradient: torch.Tensor, inputs: ops.AttentionInputs, results: tuple) -> tuple:
    """Returns the gradients of query, key and value."""
    gradients = _new_gradients(gradient, *inputs)
    names = ("query_gradient", "key_gradient", "value_gradient", "output", "inverse_normalizer")
    tensors = dict(zip(names, (*gradients, *results)))
    tensors |= {"gradient": gradient.to(inputs.query.dtype).contiguous(), "delta": torch.empty_like(results[1])}
    for kernel, states in ((query_kernel, inputs.query), (key_kernel, inputs.key)):  # the first writes `delta`
        _launch(kernel, states, arguments_of(inputs) | tensors)
    return gradients


def _new_results(query: torch.Tensor, *others) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, head_dim = query.shape
    dtype = torch.float32 if ops.AttentionInputs(query, *others).normalization == "sum" else query.dtype
    output = query.new_empty(batch, length, heads, head_dim, dtype=dtype)
    return output, query.new_empty(batch, heads, length, dtype=torch.float32)


def _new_gradients(gradient: torch.Tensor, *inputs) -> tuple[torch.Tensor, ...]:
    return tuple(states.new_empty(states.transpose(1, 2).shape).transpose(1, 2) for states in inputs[:3])


FORWARD = ops.define_operator(
    "triton_attention",
    f"({ops.SCHEMA}) -> (Tensor, Tensor)",
    lambda *inputs: _attention(ops.AttentionInputs(*inputs)),
    _new_results,
)
BACKWARD = ops.define_operator(
    "triton_attention_backward",
    f"(Tensor gradient, {ops.SCHEMA}, Tensor output, Tensor inverse_normalizer) -> (Tensor, Tensor, Tensor)",
    lambda gradient, *inputs: _attention_backward(gradient, ops.AttentionInputs(*inputs[:-2]), inputs[-2:]),
    _new_gradients,
)
attention = ops.DifferentiableAttention(
    lambda inputs: FORWARD(*inputs), lambda gradient, inputs, results: BACKWARD(gradient, *inputs, *results)
)
operators = getattr(torch.ops, ops.NAMESPACE)
# Two and five products of all queries and keys, as PyTorch counts for SDPA
register_flop_formula(operators.triton_attention)(lambda query, key, *_, **options: 4 * math.prod(query) * key[2])
register_flop_formula(operators.triton_attention_backward)(
    lambda gradient, query, key, *_, **options: 10 * math.prod(query) * key[2]
)


@torch.compiler.assume_constant_result
def _runs_on(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(INTERPRETED) and device.type == "cpu"


def attention_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, score_bias=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Computes what `tiled_attention_forward` computes, from the same arguments; that takes a caller's own mask.

    Raises:
        ValueError: if the device, the dtype or the size of the heads is not supported.
    """
    query, key, value = ops.in_autocast_precision(query, key, value)
    inputs = (module, query, key, value, attention_mask, scaling, dropout, score_bias)
    if isinstance(attention_mask, torch.Tensor):
        return tiled_attention_forward(*inputs)
    is_right = query.dtype in (torch.float32, torch.bfloat16, torch.float16) and query.shape[-1] <= 256
    if not (is_right and query.dtype == key.dtype == value.dtype and _runs_on(query.device)):
        raise ValueError(
            f"attn_implementation='nlq_triton' (layer {module.layer_idx}) computes float32, bfloat16 and float16, "
            "heads of at most 256, on an NVIDIA GPU of compute capability 8.0 or more; use 'nlq' or 'nlq_tiled'"
        )
    return attend_in_tiles(attention, *inputs).to(query.dtype), None

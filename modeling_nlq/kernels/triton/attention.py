"""`nlq_triton`: attention for every elementwise activation by fused Triton kernels, forward and backward, on CUDA.

The kernels are in `forward`, the activations' bodies in `activations`. This file checks the arguments,
launches the kernels, and makes PyTorch operators of both passes. With the environment variable TRITON_INTERPRET=1 set before
the first import, Triton's interpreter runs the same kernels on the CPU, slowly, for tests.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ...activations_nlq import AttentionActivation, get_attention_activation, is_registered, zero_limit
from ...attention_nlq import keep_from_overflow
from ...masking_nlq import Visibility
from ...operators_nlq import AttentionOperators, in_autocast_precision, operator_namespace
from .activations import IS_INTERPRETED, tl, triton, triton_body
from .backward import key_value_gradient_kernel, query_gradient_kernel
from .forward import body_kernel, combine_kernel, forward_kernel, split_kernel, valid_range_kernel


MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_CAPABILITY = (8, 0)  # NVIDIA's first GPUs with bfloat16


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


# The keys are split among programs from this number of keys on, up to this number of queries per key-value head
MAX_SPLIT_ROWS, MIN_SPLIT_KEYS = 64, 512
SPLIT_STEP = 128  # a part is a multiple of it, and it of every step


@torch.compiler.assume_constant_result
def _capability(device_index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def refusal(activation: AttentionActivation, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns the reason why `nlq_triton` cannot compute something, as the end of a sentence, or `None` if it can."""
    if triton is None:
        return "needs the package triton: pip install triton"
    if device.type != "cuda" and not (IS_INTERPRETED and device.type == "cpu"):
        return f"needs a CUDA device, not device={str(device)!r}"
    if device.type == "cuda" and torch.version.hip is None and _capability(device.index) < MIN_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (MIN_CAPABILITY, _capability(device.index)))
        return f"needs a GPU of compute capability {needed} or more, not {found}"
    if triton_body(activation) is None:
        return f"needs a Triton body of attention_activation={activation.name!r}"
    if head_dim > MAX_HEAD_DIM:
        return f"takes head_dim up to {MAX_HEAD_DIM}, not {head_dim}"
    if dtype not in DTYPES and not (IS_INTERPRETED and dtype == torch.float64):
        return f"takes {', '.join(str(dtype) for dtype in DTYPES)}, not {dtype}"
    return None


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Checks that the tensors fit together. Kernels do not know where a tensor ends and would read other memory.

    Raises:
        ValueError: if shapes, precisions or devices do not fit.
    """
    fit = query.ndim == key.ndim == 4 and key.shape == value.shape and key.shape[1] > 0
    if not fit or (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]) or query.shape[1] % key.shape[1]:
        names = ("query", "key", "value")
        shapes = ", ".join(f"{name}={tuple(states.shape)}" for name, states in zip(names, (query, key, value)))
        raise ValueError(
            f"nlq_triton: {shapes} must be (batch, heads, query, head_dim) and twice (batch, key_value_heads, key, head_dim), "
            "with heads a multiple of key_value_heads"
        )
    for name in ("dtype", "device"):
        if not getattr(query, name) == getattr(key, name) == getattr(value, name):
            found = ", ".join(str(getattr(states, name)) for states in (query, key, value))
            raise ValueError(f"nlq_triton: the {name}s of query, key and value, {found}, must be the same")


def _new_results(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible_count: torch.Tensor,
    query_index: torch.Tensor | None,
    key_is_valid: torch.Tensor | None,
    first_key: torch.Tensor | None,
    visible: torch.Tensor | None,
    seed: torch.Tensor | None,
    activation: str,
    normalization: str,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes the results, empty: the output `(batch, query, heads, head_dim)`; the remainder that rounding removes from it, of
    the same shape, or `(0,)` where backward needs none; and `1 / Z`, `(batch, heads, query)`.
    """
    batch, heads, query_length, head_dim = query.shape
    inverse_normalizer = query.new_empty(batch, heads, query_length, dtype=torch.promote_types(query.dtype, torch.float32))
    output = query.new_empty(batch, query_length, heads, head_dim)
    has_remainder = normalization == "sum" and inverse_normalizer.dtype != output.dtype
    return output, torch.empty_like(output) if has_remainder else output.new_empty(0), inverse_normalizer


def _new_gradient(states: torch.Tensor) -> torch.Tensor:
    """`(batch, heads, length, head_dim)`, laid out as `(batch, length, heads, head_dim)`, which projections make and take."""
    batch, heads, length, head_dim = states.shape
    return states.new_empty(batch, length, heads, head_dim).transpose(1, 2)


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes `device` the current one: kernels are launched there, not where their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _check_body(activation: AttentionActivation, body: Callable, device: torch.device) -> None:
    """Compares the Triton body of a user's activation with its function, once on each device.

    Raises:
        ValueError: if it does not compute the activation's function and derivative.
    """
    generator = torch.Generator().manual_seed(0)
    scores = (torch.rand(256, generator=generator) - 0.5) * 20.123
    weights, derivatives = torch.empty_like(scores, device=device), torch.empty_like(scores, device=device)
    with _on(device):
        body_kernel[(1,)](scores.to(device), weights, derivatives, BODY=body, SIZE=len(scores))
    expected = replace(activation, derivative=None).weights_and_gradient(scores.double(), torch.ones(256).double())
    for what, one, other in zip(("weights", "derivative"), (weights, derivatives), expected):
        if not torch.allclose(one.cpu().double(), other, rtol=1e-3, atol=1e-5):
            raise ValueError(f"triton_body of {activation.name!r} computes other {what} than its function")


def _float32_precision() -> str:
    """Returns how tensor cores multiply float32: as PyTorch's setting says, or as exactly as they can by default."""
    setting = torch.backends.cuda.matmul
    is_tf32 = setting.fp32_precision == "tf32" if hasattr(setting, "fp32_precision") else setting.allow_tf32  # before torch 2.9
    # AMD's backend has no tf32x3
    return "tf32" if is_tf32 else "ieee" if torch.version.hip is not None else "tf32x3"


def tile_of(size: int) -> int:
    """The smallest side of a tile that holds so many rows or columns."""
    return max(1 << (size - 1).bit_length(), MIN_TILE)


class _KernelCall:
    """One call of attention: the arguments of all kernels, by name."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible_count: torch.Tensor,
        query_index: torch.Tensor | None,
        key_is_valid: torch.Tensor | None,
        first_key: torch.Tensor | None,
        visible: torch.Tensor | None,
        seed: torch.Tensor | None,
        activation: str,
        normalization: str,
        scaling: float,
        dropout: float,
    ):
        self.batch, self.heads, self.query_length, self.head_dim = query.shape
        self.key_value_heads, self.key_length = key.shape[1:3]
        self.group = self.heads // self.key_value_heads
        self.device = query.device
        self.sum_dtype = torch.promote_types(query.dtype, torch.float32)
        row = get_attention_activation(activation)
        if is_registered(activation):
            _check_body(row, triton_body(row), query.device)
        # Kernels do not broadcast, so tensors that broadcast are expanded here
        query, key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value))
        per_head = (self.batch, self.heads, self.query_length)
        count = visible_count.contiguous().expand(per_head)
        if query_index is not None:
            query_index = query_index.expand(self.query_length).contiguous()
        if first_key is not None:
            first_key = first_key.expand(self.batch, self.query_length).contiguous()
        if key_is_valid is not None:
            key_is_valid = key_is_valid.expand(self.batch, self.key_length).contiguous().view(torch.uint8)
        if visible is not None:
            visible = visible.contiguous().view(torch.uint8).expand(*per_head, self.key_length)
        self.arguments = {
            "query": query,
            "key": key,
            "value": value,
            "visible_count": count,
            "heads": self.heads,
            "group": self.group,
            "query_length": self.query_length,
            "key_length": self.key_length,
            "scaling": scaling,
            "dropout": dropout,
            "count_batch_stride": count.stride(0),
            "count_head_stride": count.stride(1),
            # Arguments that a kernel does not read must still be tensors
            "query_index": count if query_index is None else query_index,
            "first_key": count if first_key is None else first_key,
            "seed": count if seed is None else seed,
            "key_is_valid": count if key_is_valid is None else key_is_valid,
            "valid_range": count,
            "visible": count if visible is None else visible,
            "visible_batch_stride": 0 if visible is None else visible.stride(0),
            "visible_head_stride": 0 if visible is None else visible.stride(1),
            "visible_stride": 0 if visible is None else visible.stride(2),
        }
        for name in ("query", "key", "value"):
            strides = self.arguments[name].stride()
            suffixes = ("_batch_stride", "_head_stride", "_stride")
            self.arguments |= {name + suffix: stride for suffix, stride in zip(suffixes, strides)}
        self.arguments |= {
            "WIDTH": tile_of(self.head_dim),
            "HEAD_DIM": self.head_dim,
            "BODY": triton_body(row),
            "NORMALIZATION": normalization,
            "LIMIT": zero_limit(self.sum_dtype),
            "SUM": tl.float64 if self.sum_dtype == torch.float64 else tl.float32,
            "HAS_BIAS": row.subtract_log_count and normalization == "none",
            "HAS_DROPOUT": dropout > 0.0,
            "HAS_REMAINDER": normalization == "sum" and self.sum_dtype != query.dtype,
            "PRECISION": _float32_precision() if query.dtype == torch.float32 else "ieee",
            "CAUSAL": query_index is not None,
            "BOUNDED": first_key is not None,
            "PADDED": key_is_valid is not None,
            "MASKED": visible is not None,
        }

    def find_valid_range(self) -> None:
        """Finds the first and last valid key of each row, where kernels start and end."""
        if self.arguments["PADDED"]:
            valid_range = torch.empty(self.batch, 3, dtype=torch.int32, device=self.device)
            self.run(valid_range_kernel, self.batch, valid_range=valid_range, STEP=1024)
            self.arguments["valid_range"] = valid_range

    def run(self, kernel, programs: int, options: dict | None = None, **arguments) -> None:
        """Launches `programs` programs of a kernel with the arguments it has, taken from `arguments` and from the call."""
        if programs > 0:
            given = {**self.arguments, **arguments}
            with _on(self.device):
                kernel[(programs,)](**{name: given[name] for name in kernel.arg_names}, **(options or {}))

    def run_tiled(self, kernel, programs: Callable[[int], int], **arguments) -> None:
        """Launches a kernel with the best tiles that fit into the device's memory.

        Args:
            kernel: one of `TILES`.
            programs: number of programs for a given size of the kernel's own tile.
            arguments: as in `run`.
        """
        # Float16 is multiplied as TF32, which takes as much room as float32
        lines = TILES[kernel][2 if self.arguments["query"].dtype == torch.bfloat16 else 4]
        choices = [*(tiles for width, tiles in lines.items() if self.arguments["WIDTH"] <= width), LAST_TILES]
        place = (kernel, *choices, self.device)
        for index in range(_FITTING.get(place, 0), len(choices)):
            tiles = choices[index]
            options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}
            sizes = {"TILE": tiles.tile, "STEP": tiles.step}
            try:
                self.run(kernel, programs(tiles.tile), options, **{**sizes, **arguments})
            except triton.runtime.OutOfResources:
                if index + 1 == len(choices):
                    raise
            else:
                _FITTING[place] = index
                return


# The first line of `TILES` that fits on a device
_FITTING: dict[tuple, int] = {}


def _triton_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible_count: torch.Tensor,
    query_index: torch.Tensor | None,
    key_is_valid: torch.Tensor | None,
    first_key: torch.Tensor | None,
    visible: torch.Tensor | None,
    seed: torch.Tensor | None,
    activation: str,
    normalization: str,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, its remainder and `1 / Z`, as `_new_results` makes them."""
    inputs = (query, key, value, visible_count, query_index, key_is_valid, first_key, visible, seed)
    inputs += (activation, normalization, scaling, dropout)
    call = _KernelCall(*inputs)
    results = dict(zip(("output", "remainder", "inverse_normalizer"), _new_results(*inputs)))
    rows = call.group * call.query_length
    if rows <= MAX_SPLIT_ROWS and call.key_length >= MIN_SPLIT_KEYS and dropout == 0.0:
        _attend_in_parts(call, **results)
    else:
        call.find_valid_range()
        heads = call.batch * call.heads
        call.run_tiled(forward_kernel, lambda tile: heads * math.ceil(call.query_length / tile), **results)
    return tuple(results.values())


def _attend_in_parts(
    call: _KernelCall, output: torch.Tensor, remainder: torch.Tensor, inverse_normalizer: torch.Tensor
) -> None:
    """Splits the keys among programs where there are few queries, as in decoding, so that all processors have work."""
    is_cuda = call.device.type == "cuda"
    processors = torch.cuda.get_device_properties(call.device).multi_processor_count if is_cuda else 2
    heads = call.batch * call.key_value_heads
    wanted = math.ceil(2 * processors / max(heads, 1))
    keys_per_split = math.ceil(call.key_length / wanted / SPLIT_STEP) * SPLIT_STEP
    splits = math.ceil(call.key_length / keys_per_split)
    shape = (splits, call.batch, call.heads, call.query_length)
    parts = {
        "weighted_sums": inverse_normalizer.new_empty(*shape, call.head_dim),
        "totals": inverse_normalizer.new_empty(shape),
        "splits": splits,
    }
    tile = tile_of(call.group * call.query_length)
    call.run_tiled(split_kernel, lambda _: heads * splits, TILE=tile, keys_per_split=keys_per_split, **parts)
    queries = call.batch * call.heads * call.query_length
    call.run(combine_kernel, queries, output=output, remainder=remainder, inverse_normalizer=inverse_normalizer, **parts)


def _triton_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    remainder: torch.Tensor,
    inverse_normalizer: torch.Tensor,
    visible_count: torch.Tensor,
    query_index: torch.Tensor | None,
    key_is_valid: torch.Tensor | None,
    first_key: torch.Tensor | None,
    visible: torch.Tensor | None,
    seed: torch.Tensor | None,
    activation: str,
    normalization: str,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, in their shapes, given that of the output."""
    masks = (query_index, key_is_valid, first_key, visible)
    call = _KernelCall(query, key, value, visible_count, *masks, seed, activation, normalization, scaling, dropout)
    names = ("query_gradient", "key_gradient", "value_gradient")
    gradients = {name: _new_gradient(states) for name, states in zip(names, (query, key, value))}
    given = {
        "gradient": gradient.contiguous(),
        "output": output,
        "remainder": remainder,
        "inverse_normalizer": inverse_normalizer,
        "delta": torch.empty_like(inverse_normalizer) if normalization == "sum" else inverse_normalizer,
        "log_count": torch.empty_like(inverse_normalizer) if call.arguments["HAS_BIAS"] else inverse_normalizer,
        "query_end": call.arguments["first_key"],
    }
    call.find_valid_range()
    if first_key is not None:
        places = torch.arange(call.key_length, device=query.device).expand(call.batch, -1)
        starts = call.arguments["first_key"]
        given["query_end"] = torch.searchsorted(starts, places.contiguous(), right=True)
    heads, key_value_heads = call.batch * call.heads, call.batch * call.key_value_heads
    call.run_tiled(query_gradient_kernel, lambda tile: heads * math.ceil(call.query_length / tile), **given, **gradients)
    # It reads `delta` and `log_count`, which the first kernel wrote
    call.run_tiled(
        key_value_gradient_kernel, lambda tile: key_value_heads * math.ceil(call.key_length / tile), **given, **gradients
    )
    return tuple(gradients.values())


_FOLDER = Path(__file__).parent
operators = AttentionOperators(
    "triton_attention",
    _triton_attention,
    _triton_attention_backward,
    new_results=_new_results,
    new_gradient=_new_gradient,
    namespace=operator_namespace([*_FOLDER.glob("*.py"), *_FOLDER.parents[1].glob("*_nlq.py")]),
)


def triton_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Visibility | torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention for every elementwise activation that has a Triton body, in memory linear in the length.

    Args:
        module: the attention layer, whose `activation` and `normalization` say what to compute.
        query: `(batch, heads, query, head_dim)` in float16, bfloat16 or float32, with `head_dim` up to 256. Float32 is
            multiplied as TF32 if `torch.set_float32_matmul_precision` allows that, else as three products of TF32.
        key, value: `(batch, key_value_heads, key, head_dim)`.
        attention_mask: a `Visibility`, a 4-D mask, or `None`, as in `read_mask`.
        scaling: factor of the scores.
        dropout: probability of dropping a weight, by PyTorch's random number generator.

    Returns:
        The output `(batch, query, heads, head_dim)`, and no weights.

    Raises:
        ValueError: for a device, precision, head or activation that the kernels do not take, and for tensors that do not fit
            together.
    """
    query, key, value = in_autocast_precision(query, key, value)
    _check(query, key, value)
    reason = refusal(module.activation, query.device, query.dtype, query.shape[-1])
    if reason is not None:
        raise ValueError(
            f"attn_implementation='nlq_triton' (layer {module.layer_idx}) {reason}; use one of nlq, nlq_tiled, eager"
        )
    query = keep_from_overflow(query, key, scaling, module.activation, module.normalization)
    return operators.attend(module, query, key, value, attention_mask, scaling, dropout), None

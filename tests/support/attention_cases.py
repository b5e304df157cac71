"""Attention in float64, written from the formulas and from none of the backends, and the cases that backends are
tested on.

Shapes: query and key `(batch, heads, length, head_dim)`, outputs `(batch, query, heads, head_dim)`.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st
from support.reference import NON_NEGATIVE, PHI

from modeling_nlq import linear_nlq, tiled_nlq
from modeling_nlq.activations_nlq import get_attention_activation
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS
from modeling_nlq.kernels.cpu import build, cpu_ops
from modeling_nlq.masking_nlq import make_visibility


ALL_COMBINATIONS = [
    (name, normalization)
    for name in PHI
    for normalization in (*(["sum"] if name in NON_NEGATIVE else []), "length", "none")
]


def combinations(pairs):
    ids = [f"{name}-{normalization}" for name, normalization in pairs]
    return pytest.mark.parametrize("activation, normalization", pairs, ids=ids)


def reference(query, key, value, visible, activation, normalization, scaling, sink=None, kept=1.0):
    """The output `(batch, query, heads, head_dim)` in float64, by the formulas.

    `visible` is `(batch, heads, query, key)`; `kept` is what dropout multiplies the weights with.
    """
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = scaling * torch.einsum("bhid,bhjd->bhij", query, key)
    if activation == "softmax":
        logits = torch.where(visible, scores, -math.inf)
        if sink is not None:
            logits = torch.cat([logits, sink.double()[None, :, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
        phi = torch.exp(logits - logits.amax(dim=-1, keepdim=True).clamp(min=-1e300))
        phi, total = phi[..., : key.shape[2]], phi.sum(dim=-1, keepdim=True)
    else:
        count = visible.sum(dim=-1, keepdim=True).double()
        if activation == "sigmoid" and normalization == "none":
            scores = scores - torch.log(torch.where(count > 0, count, 1.0))
        phi = torch.where(visible, PHI[activation](scores), 0.0)
        total = {"sum": phi.sum(dim=-1, keepdim=True), "length": count, "none": torch.ones_like(count)}[normalization]
    weights = torch.where(total > 0, phi / torch.where(total > 0, total, 1.0), 0.0)
    return torch.einsum("bhij,bhjd->bihd", weights * kept, value)


def mask_of(*rows):
    """`mask_of("0111")` is the attention mask of one row with one padding token before three real ones."""
    return torch.tensor([[int(digit) for digit in row] for row in rows])


@dataclass(frozen=True)
class Layout:
    """Lengths, heads and a mask as backends take it; `sees(batch, head, query, key)` says the same of each pair."""

    sees: Callable
    mask: Callable = lambda: None
    query_length: int = 7
    key_length: int = 7
    batch: int = 2
    heads: int = 2
    key_value_heads: int = 2

    @functools.cached_property
    def visible(self):
        sizes = (self.batch, self.heads, self.query_length, self.key_length)
        return torch.tensor([bool(self.sees(*place)) for place in itertools.product(*map(range, sizes))]).view(sizes)

    def states(self, dtype=torch.float32, head_dim=4):
        """Query, key and value, strided as a layer makes them, rounded to `dtype`, with gradients.

        Queries are drawn again where their sum of weights nearly vanishes, for that amplifies every rounding.
        """
        generator = torch.Generator().manual_seed(0)

        def draw(length, heads):
            states = torch.randn(self.batch, length, heads, head_dim, generator=generator, dtype=torch.float64)
            return states.to(dtype).transpose(1, 2)

        key, value = (draw(self.key_length, self.key_value_heads) for _ in range(2))
        query = draw(self.query_length, self.heads)
        keys = key.double().repeat_interleave(self.heads // self.key_value_heads, dim=1)
        for _ in range(20):
            scores = query.double() @ keys.transpose(2, 3)
            largest = torch.where(self.visible, scores, -torch.inf).amax(dim=-1)
            magnitude = torch.where(self.visible, scores.abs(), 0.0).amax(dim=-1)
            is_small = ((largest > 0) & (largest < 0.3)) | (magnitude < 0.5)
            query[is_small] = draw(self.query_length, self.heads)[is_small]
        return [tensor.requires_grad_() for tensor in (query, key, value)]


def _layout(query_length, key_length, batch, sees_key, offset=0, window=None, mask=None, segments=None, **sizes):
    """A layout in causal order, after `offset` tokens; `sees_key(row, query, key)` says what a row hides."""

    def make_mask():
        device, options = torch.device("cpu"), {"segments": segments, "sliding_window": window}
        return make_visibility(query_length, key_length, offset, device, mask, **options)

    def sees(row, head, query, key):
        age = query + int(offset) - key
        return age >= 0 and (window is None or age < window) and sees_key(row, query, key)

    return Layout(sees, make_mask, query_length, key_length, batch, **sizes)


def padded(*rows, query_length=None, **options):
    def sees_key(row, query, key):
        return rows[row][key] == "1"

    length = len(rows[0])
    return _layout(query_length or length, length, len(rows), sees_key, mask=mask_of(*rows), **options)


def packed(*rows, **options):
    """`packed("aab")` is a document of two tokens and another of one."""

    def sees_key(row, query, key):
        return rows[row][query] == rows[row][key]

    segments, length = torch.tensor([[ord(letter) for letter in row] for row in rows]), len(rows[0])
    return _layout(length, length, len(rows), sees_key, segments=segments, **options)


def chunk(query_length, key_length, offset, batch=2, **options):
    return _layout(query_length, key_length, batch, lambda row, query, key: True, offset=offset, **options)


def dense(visible, mask=None, **sizes):
    """A caller's own mask; `mask` is what it is given as, if not as booleans."""

    def sees(b, h, i, j):
        return visible[b % len(visible), h % visible.shape[1], i, j]

    return Layout(sees, lambda: visible if mask is None else mask, visible.shape[2], visible.shape[3], **sizes)


def random_booleans(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6


def causal(batch, head, query, key):
    return key <= query


@st.composite
def drawn_layouts(draw, most=3, longest=12, is_linear=False):
    """Any lengths, groups, offsets, windows, paddings and packings; of linear attention no windows, and no cache."""
    key_value_heads = draw(st.integers(1, most))
    batch = draw(st.integers(1, most))
    sizes = {"heads": key_value_heads * draw(st.integers(1, most)), "key_value_heads": key_value_heads}
    query_length = draw(st.integers(1, longest))
    kind = draw(st.sampled_from(["none", "padding", "packed", *([] if is_linear else ["cache"])]))
    if kind == "none":
        key_length = query_length + (0 if is_linear else draw(st.integers(0, 4)))
        lengths = (query_length, key_length, batch)
        return Layout(lambda b, h, i, j: query_length == 1 or j <= i, lambda: None, *lengths, **sizes)
    sizes["window"] = None if is_linear else draw(st.sampled_from([None, None, 1, 3, 6]))
    if kind == "packed":
        begins = st.lists(st.booleans(), min_size=query_length, max_size=query_length)
        rows = [draw(begins) for _ in range(batch)]  # whether a document begins at a token
        letters = [[chr(97 + sum(row[: index + 1])) for index in range(query_length)] for row in rows]
        return packed(*map("".join, letters), **sizes)
    offset = 0 if is_linear else draw(st.integers(0, 9))
    key_length = query_length + (0 if is_linear else offset + draw(st.integers(0, 4)))
    given_offset = torch.tensor(offset) if draw(st.booleans()) else offset
    if kind == "cache":
        return chunk(query_length, key_length, given_offset, batch=batch, **sizes)
    rows = [draw(st.text("01", min_size=key_length, max_size=key_length)) for _ in range(batch)]
    return padded(*rows, query_length=query_length, offset=given_offset, **sizes)


LAYOUTS = {
    "causal": Layout(causal),
    "odd_length": chunk(13, 13, 0, batch=1, key_value_heads=1),
    "left_padding": padded("0011111", "0000001"),
    "holes": padded("1001101", "0100010"),
    "nothing_visible": padded("0000000", "0000110"),
    "packed": packed("aaabbbbbcc", "abbbbbcccc"),
    "packed_singles": packed("abcdefg"),
    "grouped_queries": Layout(causal, heads=4),
    "one_key_value_head": padded("1111111", "0110111", heads=3, key_value_heads=1),
    "packed_grouped_queries": packed("aaabbbb", "aabbccc", heads=4),
    "window": chunk(13, 13, 0, window=4, heads=4),
    "padded_window_after_cache": padded("0011111111111", "1" * 11 + "00", query_length=6, offset=7, window=5),
    "packed_window": packed("aaaaabbccc", "abbbbbbbbb", window=3),
    "one_query": Layout(lambda b, h, i, j: True, query_length=1, key_length=9, heads=4),
    "one_query_long_cache": padded("0" * 9 + "1" * 31, "1" * 17 + "0" + "1" * 22, query_length=1, offset=39),
    "chunk_in_static_cache": chunk(3, 16, torch.tensor(5)),
    "padded_chunk_in_static_cache": padded("0011111110000", "1" * 9 + "0" * 4, query_length=4, offset=torch.tensor(5)),
    "static_cache_without_mask": Layout(causal, query_length=5, key_length=9),
    "mask_per_batch": dense(random_booleans(2, 1, 7, 7), heads=4),
    "mask_per_head": dense(random_booleans(2, 4, 6, 9), heads=4),
    "mask_of_one_row": dense(random_booleans(1, 1, 7, 7)),
    "additive_mask": dense(
        random_booleans(2, 1, 7, 7), torch.where(random_booleans(2, 1, 7, 7), 0.0, torch.finfo(torch.float32).min)
    ),
}
# As long as several tiles that are as large as they are in use
LONG_LAYOUTS = {
    "causal": chunk(301, 301, 0, batch=1, key_value_heads=1),
    "padding": padded("0" * 270 + "1" * 43, "1" * 200 + "0" * 113, heads=1, key_value_heads=1),
    "packed": packed("a" * 100 + "b" * 170 + "c" * 31),
    "chunk_in_static_cache": chunk(290, 600, torch.tensor(300), batch=1, heads=1, key_value_heads=1),
    "one_query_long_cache": chunk(1, 600, 599, heads=4),
    "many_heads": chunk(141, 141, 0, batch=3, heads=11, key_value_heads=1),
}
# One of each normaliser; the first has a bias, the second a mean gradient
THREE = [("sigmoid", "none"), ("softplus", "sum"), ("gelu", "length")]
SCALING = 0.5  # a power of two: exact in every precision


def layer(
    activation, normalization=None, *, heads=1, key_value_heads=1, training=False, sink=None, attention_sink=None
):
    """A stand-in for an attention layer, with the attributes that the attention functions read."""
    row = get_attention_activation(activation)
    return SimpleNamespace(
        activation=row,
        normalization=normalization or row.normalization,
        num_key_value_groups=heads // key_value_heads,
        training=training,
        sink=sink,
        attention_sink=attention_sink,
        is_causal=True,
        layer_idx=0,
        config=SimpleNamespace(_attn_implementation="nlq"),  # for which C++ code hands over what it does not compute
    )


def layer_for(layout, activation, normalization=None, **options):
    return layer(activation, normalization, heads=layout.heads, key_value_heads=layout.key_value_heads, **options)


def random_factors(output):
    """A gradient of the output, the same in every precision and device."""
    generator = torch.Generator().manual_seed(100)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16).to(output)


def results(output, inputs):
    """The output and the gradients of the inputs."""
    return [output.detach(), *torch.autograd.grad(output, inputs, random_factors(output))]


def inputs_of(module, states):
    return [*states, module.sink] if module.attention_sink == "learned" else states


def attend(backend, module, *states, mask=None, scaling=SCALING, **options):
    """The output of a backend by name, `nlq_tiled` where there is no C++ code for the activation."""
    if backend == "nlq_cpp" and module.activation.name not in (*cpu_ops.ACTIVATIONS, "softmax"):
        backend = "nlq_tiled"
    return ATTENTION_BACKENDS[backend].function(module, *states, mask, scaling=scaling, **options)[0]


def run(backend, layout, module, states, scaling=SCALING, **options):
    """The output and gradients of a backend."""
    mask = layout.mask()
    if backend == "sdpa" and mask is not None:
        mask = layout.visible
    output = attend(backend, module, *states, mask=mask, scaling=scaling, **options)
    return results(output, inputs_of(module, states))


def expected_of(layout, activation, normalization, states, scaling=SCALING, sink=None, kept=1.0):
    output = reference(*states, layout.visible, activation, normalization, scaling, sink, kept)
    inputs = [*states, sink] if sink is not None and sink.requires_grad else states
    return [tensor.double() for tensor in results(output, inputs)]


def set_tiles(patch, large, small, many_heads):
    """Sizes of the tiles of `nlq_tiled` and of the C++ code, which are of an even number of queries or keys."""
    for name, value in {"LARGE_TILE": large, "SMALL_TILE": small, "MANY_HEADS": many_heads}.items():
        patch.setattr(tiled_nlq, name, value)
    tile = (large + 1) // 2 * 2
    patch.setattr(cpu_ops, "FORWARD_TILES", (tile, tile + 2))
    patch.setattr(cpu_ops, "BACKWARD_TILES", (tile + 2, tile))


def set_rows(patch, count):
    """The number of queries that `nlq_rows` computes at a time."""
    patch.setitem(ATTENTION_BACKENDS["nlq_rows"].function.__globals__, "ROWS", count)


def set_chunks(patch, function=linear_nlq.chunked_form, size=3, delta_form=linear_nlq.chunked_delta_form):
    """Makes segments of linear attention of 6 tokens, and chunks of `size`."""
    patch.setattr(linear_nlq, "SEGMENT_SIZE", 6)
    patch.setattr(linear_nlq, "chunked_form", functools.partial(function, chunk_size=size))
    patch.setattr(linear_nlq, "chunked_delta_form", functools.partial(delta_form, chunk_size=size))


def allow_cpp(patch):
    """Lets attention run in C++ here, and tells whether it does. Without AVX-512 its products are plain loops."""
    patch.delenv("NLQ_CPP", raising=False)
    if build.instructions() != "AVX512":
        patch.setattr(cpu_ops, "_multiplies", lambda is_half: cpu_ops.is_built())
    return cpu_ops._multiplies(False)


@contextlib.contextmanager
def poisoned_memory():
    """New memory is NaN, or the largest integer: PyTorch fills it under deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


NAMES = ("output", "query", "key", "value", "sink or decay")


def error(actual, expected, least=1e-6):
    """The largest difference, relative to the largest magnitude, or to 1 where that is at most `least`."""
    magnitude = expected.abs().max().item()
    return (actual.double() - expected.double()).abs().max().item() / (magnitude if magnitude > least else 1.0)


def check(actual, expected, tolerance, least=1e-6):
    for name, one, other in zip(NAMES, actual, expected, strict=False):
        assert one.shape == other.shape, name
        assert one.isfinite().all(), name
        assert error(one, other, least) <= tolerance, f"{name}: {error(one, other, least):.2e}"


def check_rounding(actual, eager, expected):
    """The error is at most twice that of eager in the same precision, which is a few roundings."""
    for name, one, other, exact in zip(NAMES, actual, eager, expected, strict=False):
        assert one.dtype == other.dtype, name
        rounding = torch.finfo(one.dtype).eps
        assert error(other, exact) <= 4 * rounding, name
        budget = max(2 * error(other, exact), 2 * rounding)
        assert error(one, exact) <= budget, f"{name}: {error(one, exact):.2e}, not {budget:.2e}"

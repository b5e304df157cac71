"""The attention functions of all backends but `flex_attention`: outputs and gradients of the formulas, and what they
refuse.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_cases import (
    ALL_COMBINATIONS,
    LAYOUTS,
    LONG_LAYOUTS,
    SCALING,
    THREE,
    allow_cpp,
    attend,
    check,
    check_rounding,
    chunk,
    combinations,
    drawn_layouts,
    error,
    expected_of,
    inputs_of,
    layer,
    layer_for,
    poisoned_memory,
    random_factors,
    reference,
    results,
    run,
    set_rows,
    set_tiles,
)
from support.grids import parametrize_grid
from support.properties import examples
from torch import nn

from modeling_nlq import ScoreBias
from modeling_nlq.kernels.cpu.cpu_ops import ACTIVATIONS as IN_CPP
from modeling_nlq.masking_nlq import make_visibility


pytestmark = [pytest.mark.usefixtures("small_tiles", "cpp_allowed"), pytest.mark.thin(3)]
SINKS = {"zero": [0.0] * 4, "learned": [-1.5, 0.4, 2.5, 0.0], "large": [60.0, -60.0, 0.0, 1.0]}
SOFTMAX = {"softmax": ("softmax", "sum", None)} | {f"softmax-{sink}": ("softmax", "sum", sink) for sink in SINKS}
CASES = SOFTMAX | {"-".join(pair): (*pair, None) for pair in ALL_COMBINATIONS}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def module_for(layout, case, dtype=torch.float32, **options):
    activation, normalization, kind = case
    sink = None if kind is None else torch.tensor(SINKS[kind][: layout.heads], dtype=dtype)
    attention_sink = "learned" if kind == "large" else kind
    if attention_sink == "learned":
        sink.requires_grad_()
    return layer_for(layout, activation, normalization, sink=sink, attention_sink=attention_sink, **options)


def computes(backend, case, dtype=torch.float32, **others):
    activation, normalization, sink = case
    if (backend == "nlq_tiled" and activation == "softmax") or (backend == "sdpa" and activation != "softmax"):
        return False
    if backend == "nlq_cpp" and (sink or activation not in (*IN_CPP, "softmax") or dtype == torch.float16):
        return False
    return dtype != torch.float16 or normalization == "sum"  # other weights may be larger than it holds


@parametrize_grid(
    {
        "backend": ("eager", "nlq_rows", "nlq_tiled", "nlq_cpp", "sdpa"),
        "case": CASES,
        "layout": LAYOUTS,
        "dtype": DTYPES,
    },
    allowed=computes,
)
def test_every_backend_computes_the_formulas(backend, case, layout, dtype):
    module, states = module_for(layout, case), layout.states(dtype)
    actual, expected = run(backend, layout, module, states), expected_of(layout, *case[:2], states, sink=module.sink)
    assert [tensor.dtype for tensor in actual[:4]] == [dtype] * 4
    if dtype == torch.float32:
        check(actual, expected, 1e-5)
    else:
        check_rounding(actual[:4], run("eager", layout, module, states), expected)
        # A sink, a parameter in float32 read in the precision of the scores
        for one, exact in zip(actual[4:], expected[4:]):
            assert one.dtype == torch.float32 and error(one, exact) <= 2 * 2**-7
    assert (actual[0][~layout.visible.any(dim=-1).transpose(1, 2)] == 0).all()


@parametrize_grid(
    {"backend": ("nlq_tiled", "nlq_cpp"), "pair": dict(enumerate(THREE)), "layout": LONG_LAYOUTS}, strength=1
)
def test_tiles_of_the_usual_size_compute_the_formulas(backend, pair, layout, monkeypatch):
    monkeypatch.undo()  # tiles as large as they are in use
    allow_cpp(monkeypatch)
    module, states = layer_for(layout, *pair), layout.states(head_dim=8)
    check(run(backend, layout, module, states), expected_of(layout, *pair, states), 1e-5)


@pytest.mark.parametrize("backend", ["nlq_tiled", "nlq_cpp", "eager"])
@examples(60)
@given(drawn_layouts(), st.sampled_from(ALL_COMBINATIONS), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
def test_any_layout_gives_the_formulas(backend, layout, pair, tile, rows, head_dim):
    """In float64, where nothing but a wrong tile, mask or head is left to differ; `nlq_rows` is `eager` in blocks."""
    is_cpp = backend == "nlq_cpp"
    states, tolerance = layout.states(torch.float32 if is_cpp else torch.float64, head_dim), 3e-5 if is_cpp else 1e-9
    module, expected = layer_for(layout, *pair), expected_of(layout, *pair, states)
    with pytest.MonkeyPatch.context() as patch:
        allow_cpp(patch)
        set_tiles(patch, tile, tile, 0)
        set_rows(patch, rows)
        for name in ("eager", "nlq_rows") if backend == "eager" else (backend,):
            check(run(name, layout, module, states), expected, tolerance)


@pytest.mark.parametrize("backend", ["nlq_tiled", "nlq_cpp"])
@pytest.mark.parametrize("query_length, key_length", [(1, 2000), (2000, 1)], ids=["one_query", "one_key"])
def test_sums_over_many_tiles_are_of_float32(backend, query_length, key_length):
    """In bfloat16, terms of one sign would soon be too small to change the sum."""
    lengths = (query_length, key_length, key_length)
    states = [torch.rand(1, 1, length, 4).to(torch.bfloat16).requires_grad_() for length in lengths]
    visible = torch.ones(1, 1, query_length, key_length).bool()
    for pair in (("softplus", "none"), ("relu", "length")):
        output = attend(backend, layer(*pair), *states, mask=visible)
        expected = reference(*states, visible, *pair, SCALING)
        gradients = [torch.autograd.grad(tensor.sum(), states) for tensor in (output, expected)]
        for one, other in zip((output, *gradients[0]), (expected, *gradients[1]), strict=True):
            assert error(one, other) <= 2 * 2**-7


@parametrize_grid({"scaling": (0.0, -0.5), "case": SOFTMAX, "name": ("causal", "left_padding", "one_query")})
def test_scaling_without_sign(scaling, case, name):
    """Equal scores, which leave only the sink to choose, and turned ones: PyTorch's causal kernel returns NaN for
    both.
    """
    layout = LAYOUTS[name]
    module, states = module_for(layout, case), layout.states()
    expected = expected_of(layout, *case[:2], states, scaling, module.sink)
    check(run("sdpa", layout, module, states, scaling=scaling), expected, 1e-5)


class TestGradients:
    @pytest.mark.parametrize("dims", [None, (1, 2), (0, 1), (2, 3)], ids=["expanded", "heads", "batch", "width"])
    def test_gradients_of_other_strides_give_the_same(self, dims):
        """`output.sum()` hands back a gradient of stride 0."""
        layout = LAYOUTS["grouped_queries"]
        states = layout.states()
        output = attend("nlq_tiled", layer_for(layout, "softplus"), *states)
        gradient = torch.ones(()).expand_as(output)
        if dims is not None:
            gradient = random_factors(output).transpose(*dims).contiguous().transpose(*dims)
        assert not gradient.is_contiguous()
        expected = reference(*states, layout.visible, "softplus", "sum", SCALING)
        expected = torch.autograd.grad(expected, states, gradient.double())
        with poisoned_memory():
            check(torch.autograd.grad(output, states, gradient), expected, 1e-5)

    @pytest.mark.parametrize("backend", ["nlq_tiled", "nlq_cpp"])
    def test_second_derivatives_and_forward_mode_are_refused(self, backend):
        states = LAYOUTS["causal"].states()
        output = attend(backend, layer("sigmoid"), *states)
        gradient = torch.autograd.grad(output.square().sum(), states[0], create_graph=True)[0]
        with pytest.raises(RuntimeError, match="no second derivative; set attn_implementation='eager'"):
            (gradient.square().sum() + output.sum()).backward()
        states = tuple(tensor.detach() for tensor in states)
        with pytest.raises(RuntimeError, match="jvp"):
            torch.func.jvp(lambda *states: attend(backend, layer("sigmoid"), *states), states, states)


@pytest.mark.parametrize("backend", ["eager", "nlq_tiled"])
class TestMasks:
    @pytest.mark.parametrize("shape", [(2, 1, 1, 300), (3, 1, 300, 300), (2, 3, 300, 300), (2, 1, 300, 257), None])
    def test_masks_of_another_shape_are_refused(self, shape, backend):
        """A short axis would be read as keys that are hidden, or as one mask for many queries."""
        states = [torch.randn(2, 2, 300, 4) for _ in range(3)]
        if shape is None:  # as if counted from a cache that does not exist
            mask = make_visibility(300, 305, 5, torch.device("cpu"))
            message = r"the mask is for \(query, key\)=\(300, 305\), and this call has \(300, 300\)"
        else:
            mask = torch.ones(shape, dtype=torch.bool)
            message = r"must be \(batch, 1 or heads, query, key\)=\(2, 1 or 2, 300, 300\)"
        with pytest.raises(ValueError, match=message):
            attend(backend, layer("sigmoid"), *states, mask=mask)


class TestScoreBias:
    @staticmethod
    def states(length):
        generator = torch.Generator().manual_seed(0)
        shapes = [(2, 4, length, 3), (2, 2, length, 3), (2, 2, length, 3)]
        states = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        total = -torch.rand(2, 4, length, generator=generator, dtype=torch.float64).cumsum(dim=-1)
        return [tensor.requires_grad_() for tensor in (*states, total.clone(), total.clone())]

    @pytest.mark.parametrize("backend", ["nlq_tiled", "nlq_rows"])
    @pytest.mark.parametrize(
        "pair", [("softmax", "sum"), ("sigmoid", "none"), ("relu_squared", "sum"), ("softplus", "length")]
    )
    @pytest.mark.parametrize("dropout", [0.0, 0.3])
    def test_gradients_are_finite_differences(self, backend, pair, dropout):
        """Also that forward and backward drop the same weights, tile by tile."""
        module = layer(*pair, heads=2, training=True)

        def function(*states, backend=backend, dropout=dropout):
            torch.manual_seed(1)
            return attend(
                backend, module, *states[:3], scaling=0.7, dropout=dropout, score_bias=ScoreBias(*states[3:])
            )

        states = self.states(6)
        assert torch.autograd.gradcheck(function, states, fast_mode=True)
        check([function(*states, dropout=0.0)], [function(*states, backend="eager", dropout=0.0)], 1e-12)

    def test_is_exact_over_32000_tokens(self):
        """The sums reach 22,000, where float32 is 0.002 apart; 16 queries at the end see the keys just before them."""
        keys, queries = 32000, 16
        generator = torch.Generator().manual_seed(0)
        total = -torch.rand(1, 1, keys, generator=generator, dtype=torch.float64).mul(1.4).cumsum(dim=-1)
        bias = ScoreBias(total[..., -queries:], total)
        states = [torch.randn(1, 1, length, 8, generator=generator) for length in (queries, keys, keys)]
        options = {"mask": torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries), "score_bias": bias}
        expected = attend("eager", layer("softmax"), *(tensor.double() for tensor in states), **options)
        with pytest.MonkeyPatch.context() as patch:
            set_tiles(patch, 512, 512, 0)
            for backend in ("eager", "nlq_tiled"):
                check([attend(backend, layer("softmax"), *states, **options)], [expected], 2e-6)


def dropped(backend, states, case=("softplus", "sum", None), dropout=0.25, seed=0, training=True):
    torch.manual_seed(seed)
    heads, key_value_heads = states[0].shape[1], states[1].shape[1]
    module = module_for(chunk(1, 1, 0, heads=heads, key_value_heads=key_value_heads), case, training=training)
    return attend(backend, module, *states, dropout=dropout)


def dropped_weights(backend, states, **options):
    """With one-hot values the outputs are the weights; `(batch, heads, query, key)`."""
    batch, heads, length, _ = states[1].shape
    one_hot = torch.eye(length, dtype=states[0].dtype).expand(batch, heads, -1, -1)
    query, key = (nn.functional.pad(tensor.detach(), (0, length - tensor.shape[-1])) for tensor in states[:2])
    return dropped(backend, [query, key, one_hot], **options).transpose(1, 2)


@pytest.mark.parametrize("backend", ["eager", "nlq_tiled", "nlq_rows"])
class TestDropout:
    def test_a_seed_tells_what_is_dropped(self, backend):
        """Where nothing is, no numbers are drawn: others would depend on the backend."""
        states = LAYOUTS["grouped_queries"].states()
        first, second, other = (dropped(backend, states, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(first, second) and not torch.allclose(first, other)
        assert torch.equal(dropped(backend, states, training=False), dropped(backend, states, dropout=0.0))
        assert torch.equal(torch.get_rng_state(), torch.manual_seed(0).get_state())

    def test_which_weights_are_dropped(self, backend):
        """Drops a quarter of the weights and divides the others by 3/4. Tiles and heads have different masks."""
        states = chunk(40, 40, 0, heads=4, key_value_heads=4).states(head_dim=4)
        kept = dropped_weights(backend, states) / dropped_weights(backend, states, dropout=0.0)
        lower = torch.ones(40, 40).tril().bool()
        is_kept = kept[..., lower] != 0
        torch.testing.assert_close(kept[..., lower][is_kept], torch.full((is_kept.sum(),), 1 / 0.75))
        assert abs(is_kept.float().mean() - 0.75) < 4 * math.sqrt(0.75 * 0.25 / is_kept.numel())
        patterns = torch.zeros(8, 40, 40).masked_scatter(lower.expand(8, -1, -1), is_kept.float())
        assert len(patterns.unique(dim=0)) == 8
        tiles = patterns.unfold(1, 4, 4).unfold(2, 4, 4)[:, *torch.tril_indices(10, 10, -1)].transpose(0, 1)
        assert len(tiles.unique(dim=0)) == len(tiles) == 45


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@combinations(ALL_COMBINATIONS)
def test_tiled_attention_on_a_gpu(activation, normalization):
    module = layer(activation, normalization)
    states = [torch.randn(2, 4, 300, 64, device="cuda", requires_grad=True) for _ in range(3)]
    actual, expected = (
        results(attend(name, module, *states), inputs_of(module, states)) for name in ("nlq_tiled", "eager")
    )
    check(actual, expected, 1e-4)

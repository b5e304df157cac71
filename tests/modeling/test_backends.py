"""Every attention function against the formulas: outputs and gradients, masks, precision, dropout, sinks, memory."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_cases import (
    ALL_COMBINATIONS,
    LAYOUTS,
    NON_NEGATIVE,
    PHI,
    SCALING,
    Layout,
    all_layouts,
    causal,
    check,
    check_rounding,
    chunk,
    combinations,
    dense,
    drawn_layouts,
    error,
    examples,
    expected_of,
    layer,
    layer_for,
    mask_of,
    packed,
    padded,
    random_factors,
    reference,
    results,
    run,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from modeling_nlq import activations_nlq, backends_nlq, flex_nlq, masking_nlq, tiled_nlq
from modeling_nlq.activations_nlq import LIBRARY_ACTIVATIONS, get_attention_activation
from modeling_nlq.attention_nlq import eager_attention_forward
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS, find_backend, sdpa_with_sink_forward
from modeling_nlq.flex_nlq import flex_attention_with_log_forward, log_function
from modeling_nlq.masking_nlq import make_visibility
from modeling_nlq.tiled_nlq import tiled_attention_forward


def set_tiles(patch, large, small, many_heads):
    patch.setattr(tiled_nlq, "LARGE_TILE", large)
    patch.setattr(tiled_nlq, "SMALL_TILE", small)
    patch.setattr(tiled_nlq, "MANY_HEADS", many_heads)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4, or 3 with more than 4 heads in the batch: short sequences then take several."""
    set_tiles(monkeypatch, 4, 3, 4)


@pytest.mark.usefixtures("small_tiles")
class TestAgreement:
    """Outputs and all gradients of `nlq_tiled` and `eager` are those of the formulas."""

    @all_layouts
    @combinations(ALL_COMBINATIONS)
    def test_float32(self, activation, normalization, layout):
        module, states = layer_for(layout, activation, normalization), layout.states()
        expected = expected_of(layout, activation, normalization, states)
        tiled = run(tiled_attention_forward, layout, module, states)
        eager = run(eager_attention_forward, layout, module, states)
        assert all(tensor.dtype == torch.float32 for tensor in tiled)
        check(tiled, expected, 1e-5)
        check(eager, expected, 1e-5)
        check(tiled, eager, 1e-5)

    @all_layouts
    @pytest.mark.parametrize(
        "dtype, activation, normalization",
        [
            *(pytest.param(torch.bfloat16, *pair, id="-".join(("bfloat16", *pair))) for pair in ALL_COMBINATIONS),
            *(pytest.param(torch.float16, name, "sum", id=f"float16-{name}-sum") for name in NON_NEGATIVE),
        ],
    )
    def test_half_precision(self, dtype, activation, normalization, layout):
        module, states = layer_for(layout, activation, normalization), layout.states(dtype)
        tiled = run(tiled_attention_forward, layout, module, states)
        eager = run(eager_attention_forward, layout, module, states)
        check_rounding(tiled, eager, expected_of(layout, activation, normalization, states))

    @pytest.mark.parametrize("name", LIBRARY_ACTIVATIONS)
    def test_functions_of_transformers(self, name):
        layout = LAYOUTS["one_key_value_head"]
        module, states = layer_for(layout, name), layout.states()
        tiled = run(tiled_attention_forward, layout, module, states)
        check(tiled, run(eager_attention_forward, layout, module, states), 1e-5)
        with torch.no_grad():
            scores = SCALING * states[0].double() @ states[1].double().transpose(2, 3)
            count = layout.visible.sum(dim=-1, keepdim=True).clamp(min=1)
            weights = torch.where(layout.visible, module.activation.function(scores), 0.0) / count
            check([tiled[0]], [(weights @ states[2].double()).transpose(1, 2)], 1e-5)

    @pytest.mark.parametrize("query_length, key_length", [(1, 2000), (2000, 1)], ids=["one_query", "one_key"])
    def test_sums_over_many_tiles(self, query_length, key_length):
        """They are taken in float32: in bfloat16, terms of one sign would soon be too small to change the sum."""
        lengths = (query_length, key_length, key_length)
        states = [torch.rand(1, 1, length, 4).to(torch.bfloat16).requires_grad_() for length in lengths]
        visible = torch.ones(1, 1, query_length, key_length).bool()
        for activation, normalization in (("softplus", "none"), ("relu", "length")):
            output, _ = tiled_attention_forward(layer(activation, normalization), *states, visible, scaling=SCALING)
            expected = reference(*states, visible, activation, normalization, SCALING)
            gradients = [torch.autograd.grad(tensor.sum(), states) for tensor in (output, expected)]
            for one, other in zip((output, *gradients[0]), (expected, *gradients[1]), strict=True):
                assert error(one, other) <= 2 * 2**-7


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(chunk(301, 301, 0, batch=1, key_value_heads=1), id="causal"),
        pytest.param(padded("0" * 270 + "1" * 43, "1" * 200 + "0" * 113, heads=1, key_value_heads=1), id="padding"),
        pytest.param(packed("a" * 100 + "b" * 170 + "c" * 31), id="packed"),
        pytest.param(chunk(290, 600, torch.tensor(300), batch=1, heads=1, key_value_heads=1), id="chunk_in_static_cache"),
        pytest.param(chunk(1, 600, 599, heads=4), id="one_query_long_cache"),
        pytest.param(chunk(141, 141, 0, batch=3, heads=11, key_value_heads=1), id="many_heads"),
    ],
)
class TestUsualTiles:
    """The same with tiles as large as they are in use."""

    @pytest.mark.parametrize("activation, normalization", [("sigmoid", "none"), ("squared", "sum"), ("gelu", "length")])
    def test_float32(self, activation, normalization, layout):
        module, states = layer_for(layout, activation, normalization), layout.states(head_dim=8)
        check(
            run(tiled_attention_forward, layout, module, states),
            expected_of(layout, activation, normalization, states),
            1e-5,
        )


@examples(250)
@given(drawn_layouts(), st.sampled_from(ALL_COMBINATIONS), st.integers(1, 6), st.integers(1, 5))
def test_any_layout(layout, combination, tile, head_dim):
    """In float64, where nothing but a wrong tile, mask or head is left to differ."""
    states = layout.states(torch.float64, head_dim)
    expected = expected_of(layout, *combination, states)
    module = layer_for(layout, *combination)
    with pytest.MonkeyPatch.context() as patch:
        set_tiles(patch, tile, tile, 0)
        check(run(tiled_attention_forward, layout, module, states), expected, 1e-9)
    check(run(eager_attention_forward, layout, module, states), expected, 1e-9)


@pytest.mark.usefixtures("small_tiles")
class TestGradients:
    @staticmethod
    def states_away_from_kinks():
        """Two heads that share keys; 5 queries and 6 keys, so that there are 2 x 2 tiles; no score near 0."""
        for seed in range(1000):
            generator = torch.Generator().manual_seed(seed)
            shapes = ((1, 2, 5, 2), (1, 1, 6, 2), (1, 1, 6, 2))
            states = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
            if (states[0] @ states[1].transpose(2, 3)).abs().min() > 0.02:
                return states
        raise AssertionError("no such states")

    @pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["", "dropout"])
    @combinations(ALL_COMBINATIONS)
    def test_finite_differences(self, activation, normalization, dropout):
        module = layer(activation, normalization, heads=2, training=True)
        visibility = make_visibility(5, 6, 0, torch.device("cpu"), mask_of("110111"))

        def function(*states):
            torch.manual_seed(5)  # the same weights are dropped each time
            return tiled_attention_forward(module, *states, visibility, scaling=SCALING, dropout=dropout)[0]

        assert torch.autograd.gradcheck(function, self.states_away_from_kinks())

    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=["query", "key", "value", "query_and_value"])
    def test_of_some_inputs(self, wanted):
        layout = LAYOUTS["grouped_queries"]
        module = layer_for(layout, "sigmoid")
        all_gradients = run(tiled_attention_forward, layout, module, layout.states())[1:]
        states = [tensor.detach() for tensor in layout.states()]
        inputs = [states[index].requires_grad_() for index in wanted]
        output, _ = tiled_attention_forward(module, *states, layout.mask(), scaling=SCALING)
        for actual, index in zip(results(output, inputs)[1:], wanted, strict=True):
            assert torch.equal(actual, all_gradients[index])

    def test_of_an_expanded_gradient(self):
        """`output.sum()` hands back a gradient of stride 0."""
        layout = LAYOUTS["grouped_queries"]
        states = layout.states()
        output, _ = tiled_attention_forward(layer_for(layout, "softplus"), *states, layout.mask(), scaling=SCALING)
        expected = reference(*states, layout.visible, "softplus", "sum", SCALING)
        for actual, other in zip(torch.autograd.grad(output.sum(), states), torch.autograd.grad(expected.sum(), states)):
            assert error(actual, other) <= 1e-5

    def test_no_second_derivatives_in_silence(self):
        states = LAYOUTS["causal"].states()
        output, _ = tiled_attention_forward(layer("sigmoid"), *states, None, scaling=SCALING)
        gradient = torch.autograd.grad(output.square().sum(), states[0], create_graph=True)[0]
        with pytest.raises(RuntimeError, match="no autograd formula"):
            gradient.square().sum().backward()

    def test_no_forward_mode_in_silence(self):
        states = [tensor.detach() for tensor in LAYOUTS["causal"].states()]

        def function(query):
            return tiled_attention_forward(layer("sigmoid"), query, *states[1:], None, scaling=SCALING)[0]

        with pytest.raises(RuntimeError, match="jvp"):
            torch.func.jvp(function, (states[0],), (torch.ones_like(states[0]),))

    @pytest.mark.parametrize("function", [eager_attention_forward, tiled_attention_forward], ids=["eager", "nlq_tiled"])
    def test_visibility_of_another_length(self, function):
        """A mask that was counted from a cache which is not there."""
        states = [torch.randn(2, 2, 9, 4) for _ in range(3)]
        mask = make_visibility(9, 14, 5, torch.device("cpu"))
        with pytest.raises(ValueError, match=r"the mask is for \(query, key\)=\(9, 14\), and this call has \(9, 9\)"):
            function(layer("sigmoid"), *states, mask, scaling=SCALING)

    @pytest.mark.parametrize("function", [eager_attention_forward, tiled_attention_forward], ids=["eager", "nlq_tiled"])
    @pytest.mark.parametrize("activation", ["relu", "relu_squared", "squared"])
    def test_gradients_of_large_scores(self, activation, function):
        """Also where the sum of weights is finite, but a small gradient divided by it is not above 0."""
        results = []
        for size in (1.0, 2.0**30, 2.0**80):
            states = [torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
            sizes = (size, size, 1.0)
            states = [(tensor * factor).requires_grad_() for tensor, factor in zip(states, sizes)]
            output, _ = function(layer(activation, "sum"), *states, None, scaling=SCALING)
            (output * 1e-6).sum().backward()
            results.append([output.detach(), *(tensor.grad * factor for tensor, factor in zip(states, sizes))])
        for large in results[1:]:
            for actual, expected in zip(large, results[0]):
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-10)

    @pytest.mark.parametrize("function", [eager_attention_forward, tiled_attention_forward], ids=["eager", "nlq_tiled"])
    def test_no_mask_and_more_queries_than_keys(self, function):
        """Queries after the last key see as many keys as there are."""
        query, key, value = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
        output, _ = function(layer("relu"), query, key, value, None, scaling=SCALING)
        last, _ = function(layer("relu"), query[:, :, 4:], key, value, None, scaling=SCALING)
        assert torch.allclose(output[:, 4:], last)

    @pytest.mark.parametrize("function", [eager_attention_forward, tiled_attention_forward], ids=["eager", "nlq_tiled"])
    @pytest.mark.parametrize("shape", [(2, 1, 1, 300), (3, 1, 300, 300), (2, 3, 300, 300), (2, 1, 300, 257)])
    def test_masks_of_another_shape(self, shape, function):
        """A short axis would be read as keys that are hidden, or as one mask for many queries."""
        states = [torch.randn(2, 2, 300, 4) for _ in range(3)]
        with pytest.raises(ValueError, match=r"must be \(batch, 1 or heads, query, key\)=\(2, 1 or 2, 300, 300\)"):
            function(layer("sigmoid"), *states, torch.ones(shape, dtype=torch.bool), scaling=SCALING)

    def test_shapes_without_data(self):
        states = [torch.randn(2, 4, 5, 8, device="meta") for _ in range(3)]
        output, _ = tiled_attention_forward(layer("sigmoid"), *states, None, scaling=SCALING)
        assert output.shape == (2, 5, 4, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@combinations(ALL_COMBINATIONS)
def test_tiled_attention_on_a_gpu(activation, normalization):
    module = layer(activation, normalization)
    shape, device = (2, 4, 300, 64), torch.device("cuda")
    states = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]
    expected = results(eager_attention_forward(module, *states, None, scaling=SCALING)[0], states)
    actual = results(tiled_attention_forward(module, *states, None, scaling=SCALING)[0], states)
    check(actual, expected, 1e-4)


class TestWork:
    """What is hidden altogether is not computed, and memory grows with the length only."""

    @pytest.mark.parametrize(
        "layout, pairs",
        [
            pytest.param(chunk(16, 16, 0, batch=1), 10, id="causal"),
            pytest.param(chunk(4, 16, 4, batch=1), 2, id="static_cache"),
            pytest.param(packed("aaaabbbbccccdddd"), 4, id="packed"),
            pytest.param(packed("aaaabbbbccccdddd", "aaaaaaaabbbbbbbb"), 6, id="packed_differently"),
            pytest.param(padded("0000000011111111", "0000111111111111"), 6, id="left_padding"),
            pytest.param(dense(torch.eye(16).bool()[None, None]), 4, id="dense_mask"),
        ],
    )
    def test_hidden_tiles_are_skipped(self, monkeypatch, layout, pairs):
        set_tiles(monkeypatch, 4, 4, 0)
        sizes = []

        def function(scores):
            sizes.append(tuple(scores.shape[1:]))
            return scores.tanh()

        monkeypatch.setattr(activations_nlq, "_REGISTERED", {})
        activations_nlq.register_attention_activation("counted", function)
        sizes.clear()
        module, states = layer_for(layout, "counted"), layout.states()
        output, _ = tiled_attention_forward(module, *states, layout.mask(), scaling=SCALING)
        assert sizes == [(4, 4)] * pairs
        output.sum().backward()
        assert sizes == [(4, 4)] * pairs * 2

    @pytest.mark.parametrize("activation, normalization", [("squared", "sum"), ("gelu", "length"), ("sigmoid", "none")])
    @pytest.mark.parametrize("mask", ["causal", "padding", "packed"])
    def test_memory_is_linear(self, monkeypatch, activation, normalization, mask):
        set_tiles(monkeypatch, 16, 16, 0)
        peaks = {length: self.measure(activation, normalization, mask, length, tiled=True) for length in (128, 256, 512)}
        eager = {length: self.measure(activation, normalization, mask, length, tiled=False) for length in (128, 256)}
        assert eager[256].largest == 4 * eager[128].largest  # it measures what it should
        for name in ("peak", "largest"):
            first, second, third = (getattr(peaks[length], name) for length in (128, 256, 512))
            assert second <= 2.05 * first
            assert third <= 2.05 * second
        assert peaks[512].largest <= 2 * 512 * 8 * 4  # (heads, length, head_dim) in float32: the inputs' size

    @staticmethod
    def measure(activation, normalization, mask, length, tiled):
        layout = {
            "causal": chunk(length, length, 0, batch=1),
            "padding": padded("0" * 5 + "1" * (length - 5)),
            "packed": packed("a" * 30 + "b" * (length - 30)),
        }[mask]
        query, key, value = (torch.randn(1, 2, length, 8) for _ in range(3))
        visibility = layout.mask()
        with LiveMemory() as memory:
            if tiled:
                # The operators' own code, for they are opaque to whoever watches from outside
                masks = (visibility.query_index, visibility.key_is_valid, visibility.document_start, None)
                rest = (visibility.visible_count[:, None], *masks, None, activation, normalization, SCALING, 0.0)
                output, scale = tiled_nlq._tiled_attention(query, key, value, *rest)
                tiled_nlq._tiled_attention_backward(torch.ones_like(output), query, key, value, output, scale, *rest)
            else:
                eager_attention_forward(layer(activation, normalization), query, key, value, visibility, scaling=SCALING)
        return memory


class LiveMemory(TorchDispatchMode):
    """The most bytes alive at a time of tensors made in this context, and the largest tensor's."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak, self.largest = {}, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


ELEMENTWISE = {"eager": eager_attention_forward, "nlq_tiled": tiled_attention_forward}
elementwise_functions = pytest.mark.parametrize("function", ELEMENTWISE.values(), ids=ELEMENTWISE)
EXTREME_CASES = [
    *((torch.float32, *pair) for pair in ALL_COMBINATIONS),
    *((torch.bfloat16, *pair) for pair in ALL_COMBINATIONS),
    *((torch.float16, name, "sum") for name in NON_NEGATIVE),
    *((torch.float32, name, "length") for name in LIBRARY_ACTIVATIONS if name not in PHI),
    *((torch.bfloat16, name, "none") for name in LIBRARY_ACTIVATIONS if name not in PHI),
    *((dtype, "softmax", "sum") for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]
almost_nothing = pytest.mark.parametrize(
    "activation, score", [("relu", 1e-40), ("relu_squared", 1e-21), ("squared", -1e-21), ("softplus", -95.0)]
)


@pytest.mark.usefixtures("small_tiles")
class TestNoNaN:
    """Nothing becomes infinite or NaN, whatever the scores and however little is visible."""

    all_cases = pytest.mark.parametrize(
        "dtype, activation, normalization",
        EXTREME_CASES,
        ids=["-".join((str(dtype).removeprefix("torch."), *pair)) for dtype, *pair in EXTREME_CASES],
    )

    @staticmethod
    def finite_results(activation, normalization, states, visible, sinks=(None,)):
        """The output and gradients of every function that computes the activation, softmax with each sink."""
        is_softmax = activation == "softmax"
        functions = {"eager": eager_attention_forward, "sdpa": sdpa_with_sink_forward} if is_softmax else ELEMENTWISE
        for sink in sinks if is_softmax else (None,):
            logit, attention_sink = None, None
            if sink is not None:
                logit, attention_sink = torch.full(states[0].shape[1:2], sink, requires_grad=True), "learned"
            module = layer(activation, normalization, sink=logit, attention_sink=attention_sink)
            for name, function in functions.items():
                output, _ = function(module, *states, visible, scaling=1.0)
                tensors = results(output, states if sink is None else [*states, logit])
                assert all(tensor.isfinite().all() for tensor in tensors), name
                yield tensors

    @all_cases
    def test_scores_of_ten_thousand(self, dtype, activation, normalization):
        """Rows of large scores of either sign, and of both."""
        signs = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]])
        key = (100 * signs[:, None, :, None] * torch.tensor([1.0, 0.0, 0.0])).to(dtype).requires_grad_()
        query = key[1:].detach().expand(2, -1, -1, -1).flip(2).clone().requires_grad_()
        scores = (query @ key.transpose(2, 3)).float()
        assert (scores.abs() - 1e4).abs().max() <= 1e4 * torch.finfo(dtype).eps
        assert scores.min() < 0 < scores.max()
        states = [query, key, torch.randn(2, 1, 6, 3).to(dtype).requires_grad_()]
        visible = torch.ones(2, 1, 6, 6).tril().bool()
        for output, *_ in self.finite_results(activation, normalization, states, visible, sinks=(None, 0.0, 9e3)):
            if activation in PHI:
                with torch.no_grad():
                    expected = reference(*states, visible, activation, normalization, 1.0)
                assert error(output, expected) <= 4 * torch.finfo(dtype).eps

    @all_cases
    def test_equal_scores(self, dtype, activation, normalization):
        """All scores 0, where several functions have a zero or a kink."""
        query = torch.zeros(1, 1, 6, 3, dtype=dtype, requires_grad=True)
        key, value = (torch.randn(1, 1, 6, 3).to(dtype).requires_grad_() for _ in range(2))
        visible = torch.ones(1, 1, 6, 6).tril().bool()
        for output, *_ in self.finite_results(activation, normalization, [query, key, value], visible, sinks=(None, 0.0)):
            if activation in ("relu", "relu_squared", "squared", "tanh", "identity", "gelu", "silu"):
                assert (output == 0).all()

    @all_cases
    def test_nothing_visible(self, dtype, activation, normalization):
        """Rows that see nothing, first, in the middle, and all of a batch; whole tiles of them too."""
        visible = torch.ones(2, 1, 9, 9).tril().bool()
        visible[0, 0, 0], visible[0, 0, 4:8], visible[1] = False, False, False
        nothing = ~visible.any(dim=-1)[:, 0]
        states = [torch.randn(2, 1, 9, 3).to(dtype).requires_grad_() for _ in range(3)]
        for output, *gradients in self.finite_results(activation, normalization, states, visible, sinks=(None, 0.0, 3.0)):
            assert (output[nothing] == 0).all()
            assert (output[~nothing] != 0).any()
            assert (gradients[0].transpose(1, 2)[nothing] == 0).all()
            assert all((gradient[1] == 0).all() for gradient in gradients[1:3])

    @pytest.mark.parametrize("activation", ["relu", "relu_squared"])
    @elementwise_functions
    def test_no_weight_is_positive(self, function, activation):
        """A row whose `phi` are all 0 gets 0 under every normaliser."""
        query = torch.rand(1, 1, 6, 3, requires_grad=True)
        key, value = (-torch.rand(1, 1, 6, 3) - 0.1).requires_grad_(), torch.randn(1, 1, 6, 3, requires_grad=True)
        for normalization in ("sum", "length", "none"):
            output, _ = function(layer(activation, normalization), query, key, value, None, scaling=1.0)
            for tensor in results(output, [query, key, value]):
                assert (tensor == 0).all()

    @almost_nothing
    @elementwise_functions
    def test_almost_no_weight(self, function, activation, score):
        """A sum too small to divide by counts as 0."""
        query, key = torch.full((1, 1, 6, 1), float(score), requires_grad=True), torch.ones(1, 1, 6, 1, requires_grad=True)
        value = torch.randn(1, 1, 6, 1, requires_grad=True)
        output, _ = function(layer(activation, "sum"), query, key, value, None, scaling=1.0)
        assert (output == 0).all()
        for tensor in results(output, [query, key, value]):
            assert tensor.isfinite().all()

    def test_nothing_is_left_uninitialised(self):
        """With deterministic algorithms PyTorch fills new memory with NaN."""
        layout = LAYOUTS["nothing_visible"]
        states = layout.states()
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.empty(3).isnan().all()
            actual = run(tiled_attention_forward, layout, layer("softplus"), states)
        finally:
            torch.use_deterministic_algorithms(False)
        check(actual, expected_of(layout, "softplus", "sum", states), 1e-5)


@pytest.mark.usefixtures("small_tiles")
@elementwise_functions
class TestDropout:
    @staticmethod
    def run(function, states, normalization="sum", dropout=0.25, seed=0, training=True):
        torch.manual_seed(seed)
        heads, key_value_heads = states[0].shape[1], states[1].shape[1]
        module = layer("softplus", normalization, heads=heads, key_value_heads=key_value_heads, training=training)
        return function(module, *states, None, scaling=SCALING, dropout=dropout)[0]

    def dropped_weights(self, function, states, **options):
        """With one-hot values the outputs are the weights; `(batch, heads, query, key)`."""
        batch, heads, length, _ = states[1].shape
        one_hot = torch.eye(length, dtype=states[0].dtype).expand(batch, heads, -1, -1)
        query, key = (nn.functional.pad(tensor.detach(), (0, length - tensor.shape[-1])) for tensor in states[:2])
        return self.run(function, [query, key, one_hot], **options).transpose(1, 2)

    def test_seed(self, function):
        states = LAYOUTS["grouped_queries"].states()
        first, second, other = (self.run(function, states, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(first, second)
        assert not torch.allclose(first, other)
        module = layer("softplus", heads=4, key_value_heads=2, training=True)
        again, _ = function(module, *states, None, scaling=SCALING, dropout=0.25)
        assert not torch.allclose(again, other)  # each call draws anew

    def test_evaluation_drops_nothing(self, function):
        states = LAYOUTS["grouped_queries"].states()
        assert torch.equal(self.run(function, states, training=False), self.run(function, states, dropout=0.0))

    def test_which_weights_are_dropped(self, function):
        """A quarter, everywhere; the others are divided by 3/4; no two tiles or heads alike."""
        states = chunk(40, 40, 0, heads=4, key_value_heads=4).states(head_dim=4)
        kept = self.dropped_weights(function, states) / self.dropped_weights(function, states, dropout=0.0)
        lower = torch.ones(40, 40).tril().bool()
        kept = kept[..., lower]
        is_kept = kept != 0
        torch.testing.assert_close(kept[is_kept], torch.full_like(kept[is_kept], 1 / 0.75))
        count = is_kept.numel()
        assert abs(is_kept.float().mean() - 0.75) < 4 * math.sqrt(0.75 * 0.25 / count)
        patterns = torch.zeros(8, 40, 40).masked_scatter(lower.expand(8, -1, -1), is_kept.float())
        assert len(patterns.unique(dim=0)) == 8
        tiles = patterns.unfold(1, 4, 4).unfold(2, 4, 4)[:, *torch.tril_indices(10, 10, -1)].transpose(0, 1)
        assert len(tiles.unique(dim=0)) == len(tiles) == 45

    @pytest.mark.parametrize("normalization", ["sum", "length", "none"])
    def test_mean_over_seeds(self, function, normalization):
        states = [tensor.detach() for tensor in LAYOUTS["grouped_queries"].states()]
        expected = self.run(function, states, normalization, dropout=0.0)
        samples = torch.stack([self.run(function, states, normalization, seed=seed) for seed in range(400)])
        deviation = samples.std(dim=0) / math.sqrt(len(samples))
        assert ((samples.mean(dim=0) - expected).abs() <= 5 * deviation + 1e-6).all()
        assert (deviation > 0).all()

    @pytest.mark.parametrize("normalization", ["sum", "length", "none"])
    def test_backward_drops_the_same(self, function, normalization):
        layout = chunk(11, 11, 0, heads=4, key_value_heads=4)
        states = layout.states(torch.float64)
        dropped = self.dropped_weights(function, states, normalization=normalization)
        full = self.dropped_weights(function, states, normalization=normalization, dropout=0.0)
        kept = torch.where(full == 0, 0.0, dropped / full)
        assert 0 < (kept[layout.visible] == 0).sum() < layout.visible.sum()
        actual = results(self.run(function, states, normalization), states)
        check(actual, expected_of(layout, "softplus", normalization, states, kept=kept), 1e-9)


class TestChoice:
    """Which backend computes what, and what the others say."""

    # By activation, "zero" being softmax with a sink
    CAN = {
        "softmax": {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"},
        "zero": {"eager", "sdpa", "flex_attention"},
        **{name: {"eager", "nlq_tiled", "nlq_triton", "flex_attention"} for name in NON_NEGATIVE},
        **{name: {"eager", "nlq_tiled", "nlq_triton"} for name in ("tanh", "identity", "gelu", "silu", "leaky_relu", "relu6")},
        "sparsemax": {"eager", "nlq_sparse"},
        "entmax15": {"eager", "nlq_sparse"},
        "linear_attention": {"eager", "nlq_linear"},
    }
    # The others: nlq_tiled
    AUTOMATIC = {
        "softmax": "sdpa",
        "zero": "sdpa",
        "sparsemax": "nlq_sparse",
        "entmax15": "nlq_sparse",
        "linear_attention": "nlq_linear",
    }

    @staticmethod
    def asked(name):
        return (get_attention_activation("softmax"), "zero") if name == "zero" else (get_attention_activation(name), None)

    @pytest.mark.parametrize("backend", [*ATTENTION_BACKENDS, "owner/kernel"])
    @pytest.mark.parametrize("name", CAN)
    def test_by_name(self, name, backend):
        can = self.CAN[name] | ({"owner/kernel"} if name == "softmax" else set())
        if backend in can:
            assert find_backend(backend, [0], *self.asked(name)) == backend
            return
        with pytest.raises(ValueError) as error:
            find_backend(backend, [0, 3], *self.asked(name))
        message, choices = str(error.value).split("; use one of ")
        activation = "'softmax' with attention_sink='zero'" if name == "zero" else repr(name)
        assert message == f"attn_implementation={backend!r} cannot compute attention_activation={activation} (layer 0, 3)"
        assert set(choices.split(", ")) == {"nlq", *self.CAN[name]}

    @pytest.mark.parametrize("name", CAN)
    def test_automatic(self, name):
        automatic = self.AUTOMATIC.get(name, "nlq_tiled")
        assert find_backend("nlq", [0], *self.asked(name)) == automatic
        assert find_backend(None, [0], *self.asked(name)) == "eager"
        if name == "linear_attention":  # has no weights, to drop or to show
            return
        assert find_backend("nlq", [0], *self.asked(name), dropout=0.1) == automatic
        assert find_backend("nlq", [0], *self.asked(name), needs_weights=True) == "eager"

    def test_flex_attention_refuses_dropout(self):
        with pytest.raises(ValueError) as error:
            find_backend("flex_attention", [0, 3], *self.asked("relu"), dropout=0.1)
        assert str(error.value) == (
            "attn_implementation='flex_attention' cannot compute attention_dropout=0.1 (layer 0, 3); "
            "use one of nlq, eager, nlq_tiled, nlq_triton"
        )

    @pytest.mark.parametrize("backend", ["nlq", None, *ATTENTION_BACKENDS])
    def test_no_weights_of_linear_attention(self, backend):
        with pytest.raises(ValueError) as error:
            find_backend(backend, [0, 3], *self.asked("linear_attention"), needs_weights=True)
        assert str(error.value) == (
            "output_attentions=True: attention_activation='linear_attention' (layer 0, 3) has no weights to show, for it "
            "never forms them; leave output_attentions out, or use another activation there"
        )

    @pytest.mark.parametrize("backend", ["nlq_tiled", "flex_attention"])
    def test_weights(self, backend):
        with pytest.raises(ValueError, match=r"the weights that output_attentions=True asks for .* use one of nlq, eager$"):
            find_backend(backend, [0], *self.asked("relu"), needs_weights=True)


class TestSinks:
    """Softmax on SDPA, with and without sinks."""

    KINDS = {"none": None, "zero": [0.0] * 4, "learned": [-1.5, 0.4, 2.5, 0.0], "large": [60.0, -60.0, 0.0, 1.0]}
    kinds = pytest.mark.parametrize("kind", KINDS)

    def module(self, kind, layout, dtype=torch.float32, **options):
        sink = None if kind == "none" else torch.tensor(self.KINDS[kind][: layout.heads], dtype=dtype)
        attention_sink = {"none": None, "zero": "zero"}.get(kind, "learned")
        if attention_sink == "learned":
            sink.requires_grad_()
        return layer_for(layout, "softmax", sink=sink, attention_sink=attention_sink, **options)

    def run(self, function, module, layout, states, scaling=SCALING, **options):
        mask = None if layout.mask() is None else layout.visible
        output, _ = function(module, *states, mask, scaling=scaling, **options)
        return results(output, self.inputs(module, states))

    @staticmethod
    def inputs(module, states):
        return [*states, module.sink] if module.attention_sink == "learned" else states

    @all_layouts
    @kinds
    def test_float32(self, kind, layout):
        module, states = self.module(kind, layout), layout.states()
        output = reference(*states, layout.visible, "softmax", "sum", SCALING, sink=module.sink)
        expected = results(output, self.inputs(module, states))
        sdpa = self.run(sdpa_with_sink_forward, module, layout, states)
        check(sdpa, expected, 1e-5)
        check(self.run(eager_attention_forward, module, layout, states), expected, 1e-5)
        nothing = ~layout.visible.any(dim=-1).transpose(1, 2)
        assert (sdpa[0][nothing] == 0).all()

    @pytest.mark.parametrize("name", ["causal", "left_padding", "grouped_queries", "one_query_long_cache"])
    @kinds
    def test_bfloat16(self, kind, name):
        layout = LAYOUTS[name]
        module, states = self.module(kind, layout), layout.states(torch.bfloat16)
        output = reference(*states, layout.visible, "softmax", "sum", SCALING, sink=module.sink)
        expected = results(output, self.inputs(module, states))
        sdpa = self.run(sdpa_with_sink_forward, module, layout, states)
        eager = self.run(eager_attention_forward, module, layout, states)
        check_rounding(sdpa[:4], eager, expected)
        if kind in ("learned", "large"):  # a parameter in float32, read in the precision of the scores
            assert sdpa[4].dtype == torch.float32
            assert error(sdpa[4], expected[4]) <= 2 * 2**-7

    @pytest.mark.parametrize("name", ["causal", "left_padding", "one_query"])
    @kinds
    @pytest.mark.parametrize("scaling", [0.0, -0.5])
    def test_scaling_without_sign(self, scaling, kind, name):
        """Equal scores, which leave only the sink to choose, and turned ones: PyTorch's causal kernel returns NaN for both."""
        layout = LAYOUTS[name]
        module, states = self.module(kind, layout), layout.states()
        output = reference(*states, layout.visible, "softmax", "sum", scaling, sink=module.sink)
        expected = results(output, self.inputs(module, states))
        check(self.run(sdpa_with_sink_forward, module, layout, states, scaling=scaling), expected, 1e-5)

    @kinds
    def test_finite_differences(self, kind):
        layout = Layout(causal, query_length=3, key_length=4, batch=1)
        module, states = self.module(kind, layout, torch.float64), layout.states(torch.float64, head_dim=2)

        def function(*inputs):
            if module.attention_sink == "learned":
                module.sink = inputs[3]
            return sdpa_with_sink_forward(module, *inputs[:3], None, scaling=SCALING)[0]

        assert torch.autograd.gradcheck(function, self.inputs(module, states))

    @kinds
    def test_dropout(self, kind):
        layout = LAYOUTS["grouped_queries"]
        module, states = self.module(kind, layout, training=True), layout.states()

        def run(seed, dropout=0.25):
            torch.manual_seed(seed)
            return sdpa_with_sink_forward(module, *states, None, scaling=SCALING, dropout=dropout)[0].detach()

        assert torch.equal(run(1), run(1))
        assert not torch.allclose(run(1), run(2))
        samples = torch.stack([run(seed) for seed in range(400)])
        deviation = samples.std(dim=0) / math.sqrt(len(samples))
        assert ((samples.mean(dim=0) - run(0, dropout=0.0)).abs() <= 5 * deviation + 1e-6).all()

    def test_inputs_stay_as_they_are(self):
        layout = LAYOUTS["grouped_queries"]
        states = layout.states()
        before = [tensor.detach().clone() for tensor in states]
        sdpa_with_sink_forward(self.module("learned", layout), *states, None, scaling=SCALING)
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(states, before))


def block_mask(layout):
    def mask_mod(batch, head, query, key):
        return layout.visible[batch, head, query, key]

    sizes = (layout.batch, layout.heads, layout.query_length, layout.key_length)
    return create_block_mask(mask_mod, *sizes, device="cpu")


def dense_flex_attention(query, key, value, training=False, *, score_mod, block_mask, enable_gqa, scale, return_aux=None):
    """What FlexAttention computes, with the scores in memory and with gradients."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = scale * query @ key.transpose(2, 3)
    places = torch.meshgrid(*[torch.arange(size) for size in scores.shape], indexing="ij")
    scores = torch.where(block_mask.mask_mod(*places), score_mod(scores, *places), -torch.inf)
    is_empty = (scores == -torch.inf).all(dim=-1)
    # As in PyTorch's kernels: a row of nothing gives 0, and minus infinity for the logarithm of its sum
    finite = torch.where(is_empty[..., None], 0.0, scores)
    log_sum = torch.where(is_empty, -torch.inf, finite.logsumexp(dim=-1))
    output = torch.where(is_empty[..., None], 0.0, finite.softmax(dim=-1)) @ value
    return output if return_aux is None else (output, SimpleNamespace(lse=log_sum))


FLEX_LAYOUTS = {name: layout for name, layout in LAYOUTS.items() if "mask" not in name or name == "static_cache_without_mask"}
flex_layouts = pytest.mark.parametrize("layout", FLEX_LAYOUTS.values(), ids=FLEX_LAYOUTS)
NON_NEGATIVE_COMBINATIONS = [pair for pair in ALL_COMBINATIONS if pair[0] in NON_NEGATIVE]


def run_flex(layout, module, states, scaling=SCALING):
    count = layout.visible[:, 0].sum(dim=-1)
    return flex_attention_with_log_forward(module, *states, block_mask(layout), scaling=scaling, visible_count=count)[0]


class TestFlexAttentionHere:
    """PyTorch's own function, as far as the CPU has it: without gradients."""

    @pytest.fixture(autouse=True)
    def uncompiled(self):
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            yield

    @flex_layouts
    @pytest.mark.parametrize("activation", [*NON_NEGATIVE, "softmax"])
    def test_sum(self, activation, layout):
        states = [tensor.detach() for tensor in layout.states()]
        expected = reference(*states, layout.visible, activation, "sum", SCALING)
        actual = run_flex(layout, layer_for(layout, activation, "sum"), states)
        check([actual], [expected], 1e-5)
        assert (actual[~layout.visible.any(dim=-1).transpose(1, 2)] == 0).all()

    @pytest.mark.parametrize("name", ["left_padding", "nothing_visible", "grouped_queries", "chunk_after_cache"])
    @combinations([pair for pair in NON_NEGATIVE_COMBINATIONS if pair[1] != "sum"])
    def test_other_normalisers(self, monkeypatch, activation, normalization, name):
        """The uncompiled function does return a log-sum-exp: the natural logarithm that the formula takes it for."""
        monkeypatch.setattr(flex_nlq, "_check_flex_attention_on_cpu", lambda *inputs: None)
        layout = FLEX_LAYOUTS[name]
        states = [tensor.detach() for tensor in layout.states()]
        expected = reference(*states, layout.visible, activation, normalization, SCALING)
        check([run_flex(layout, layer_for(layout, activation, normalization), states)], [expected], 1e-5)

    @pytest.mark.parametrize("activation", ["relu", "relu_squared"])
    def test_no_weight_is_positive(self, activation):
        layout = LAYOUTS["causal"]
        query, key, value = (tensor.detach() for tensor in layout.states())
        output = run_flex(layout, layer(activation, "sum"), [query.abs(), -key.abs(), value])
        assert (output == 0).all()

    @pytest.mark.parametrize("activation", NON_NEGATIVE)
    def test_model(self, make_model, activation):
        switches = {"attention_activation": activation, "attention_normalization": "sum", "num_key_value_heads": 2}
        switches["query_projection"] = "linear"
        input_ids = torch.randint(13, (2, 9))
        attention_mask = mask_of("111111111", "000111111")
        logits = [
            make_model(implementation=name, **switches)(input_ids, attention_mask=attention_mask).logits
            for name in ("flex_attention", "eager")
        ]
        torch.testing.assert_close(*[tensor[attention_mask.bool()] for tensor in logits], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        "module, refused, choice",
        [
            (layer("relu", "length"), "attention_activation='relu' normalised by 'length'", "nlq_tiled"),
            (layer("sigmoid", "none"), "attention_activation='sigmoid' normalised by 'none'", "nlq_tiled"),
            (layer("softmax", sink=torch.zeros(2), attention_sink="zero"), "attention_sink='zero'", "sdpa"),
            (layer("relu", "sum"), "gradients", "nlq_tiled"),
        ],
        ids=["length", "none", "sink", "gradients"],
    )
    def test_refusals(self, module, refused, choice):
        layout = LAYOUTS["causal"]
        with pytest.raises(ValueError) as error, torch.enable_grad():
            run_flex(layout, module, layout.states())
        assert str(error.value) == (
            f"attn_implementation='flex_attention' cannot compute {refused} on the CPU (layer 0); "
            f"use one of nlq, eager, {choice}"
        )


class TestFlexAttentionElsewhere:
    """What a GPU would get, on a dense stand-in for PyTorch's kernels: every normaliser and gradients."""

    @pytest.fixture(autouse=True)
    def stand_in(self, monkeypatch):
        monkeypatch.setattr(backends_nlq, "compile_friendly_flex_attention", dense_flex_attention)
        monkeypatch.setattr(flex_nlq, "_check_flex_attention_on_cpu", lambda *inputs: None)

    @flex_layouts
    @combinations(NON_NEGATIVE_COMBINATIONS)
    def test_float32(self, activation, normalization, layout):
        states = layout.states()
        actual = results(run_flex(layout, layer_for(layout, activation, normalization), states), states)
        check(actual, expected_of(layout, activation, normalization, states), 1e-5)

    @combinations(NON_NEGATIVE_COMBINATIONS)
    def test_scores_of_zero(self, activation, normalization):
        layout = LAYOUTS["causal"]
        query, key, value = layout.states()
        states = [torch.zeros_like(query, requires_grad=True), key, value]
        actual = results(run_flex(layout, layer(activation, normalization), states), states)
        eager = run(eager_attention_forward, layout, layer(activation, normalization), states)
        check(actual, eager, 1e-5)

    @pytest.mark.parametrize("normalization", ["sum", "length", "none"])
    @pytest.mark.parametrize("activation", ["relu", "relu_squared"])
    def test_no_weight_is_positive(self, activation, normalization):
        layout = LAYOUTS["causal"]
        query, key, value = (tensor.detach() for tensor in layout.states())
        states = [query.abs().requires_grad_(), (-key.abs()).requires_grad_(), value.requires_grad_()]
        for tensor in results(run_flex(layout, layer(activation, normalization), states), states):
            assert (tensor == 0).all()

    @pytest.mark.parametrize("score", [1e4, -1e4], ids=["1e4", "-1e4"])
    @combinations(NON_NEGATIVE_COMBINATIONS)
    def test_scores_of_ten_thousand(self, activation, normalization, score):
        layout = LAYOUTS["causal"]
        query, key, value = (tensor.detach() for tensor in layout.states())
        states = [torch.full_like(query, score), torch.full_like(key, 0.25), value]
        states = [tensor.requires_grad_() for tensor in states]
        actual = results(run_flex(layout, layer(activation, normalization), states, scaling=1.0), states)
        eager, _ = eager_attention_forward(layer(activation, normalization), *states, None, scaling=1.0)
        check(actual, results(eager, states), 1e-5)

    @almost_nothing
    @pytest.mark.parametrize("normalization", ["sum", "length", "none"])
    def test_almost_no_weight(self, activation, normalization, score):
        """As eager does, it takes a sum too small to divide by for 0."""
        layout = LAYOUTS["causal"]
        _, key, value = (tensor.detach() for tensor in layout.states())
        states = [torch.full_like(key, float(score)), torch.full_like(key, 0.25), value]
        states = [tensor.requires_grad_() for tensor in states]
        output = run_flex(layout, layer(activation, normalization), states, scaling=1.0)
        assert output.abs().max() < 1e-20
        assert all(tensor.isfinite().all() for tensor in results(output, states))

    @pytest.mark.parametrize("activation, normalization", [("relu", "length"), ("sigmoid", "none")])
    def test_block_mask_without_count(self, activation, normalization):
        layout = LAYOUTS["causal"]
        module = layer(activation, normalization)
        with pytest.raises(ValueError, match=f"cannot count the keys .*='{activation}' normalised by '{normalization}'"):
            flex_attention_with_log_forward(module, *layout.states(), block_mask(layout), scaling=SCALING)

    def test_no_count_is_needed(self):
        layout = LAYOUTS["causal"]
        states = layout.states()
        output, _ = flex_attention_with_log_forward(layer("relu", "none"), *states, block_mask(layout), scaling=SCALING)
        check(results(output, states), expected_of(layout, "relu", "none", states), 1e-5)

    @pytest.mark.parametrize("activation", NON_NEGATIVE)
    def test_log_function(self, activation):
        scores = torch.tensor([-50.0, -20.0, -1.0, 0.0, 0.5, 1e4], dtype=torch.float64, requires_grad=True)
        actual = log_function(get_attention_activation(activation), scores)
        phi = PHI[activation](scores)
        positive = phi > 0
        assert (actual[~positive] == -torch.inf).all()
        torch.testing.assert_close(actual[positive], phi[positive].log())
        gradient = torch.autograd.grad(actual[positive].sum(), scores, retain_graph=True)[0]
        torch.testing.assert_close(gradient, torch.autograd.grad(phi[positive].log().sum(), scores, retain_graph=True)[0])
        assert (torch.autograd.grad(actual.sum(), scores)[0][~positive] == 0).all()


@pytest.mark.usefixtures("small_tiles")
class TestWithPyTorch:
    """`nlq_tiled` under `torch.compile`, autocast, gradient checkpointing, and PyTorch's checks of operators."""

    @pytest.fixture
    def compile(self):
        torch._dynamo.reset()
        yield functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
        torch._dynamo.reset()

    @pytest.mark.parametrize("name", ["causal", "one_key_value_head", "packed", "mask_per_head"])
    def test_compile(self, compile, name):
        layout = LAYOUTS[name]
        module, mask = layer_for(layout, "sigmoid"), layout.mask()

        def function(query, key, value):
            return tiled_attention_forward(module, query, key, value, mask, scaling=SCALING)[0]

        states = layout.states()
        expected, actual = (results(call(*states), states) for call in (function, compile(function)))
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))

    def test_compile_where_nothing_wants_a_gradient(self, compile):
        """Frozen weights, outside of `no_grad`."""
        layout = LAYOUTS["causal"]
        states = [tensor.detach() for tensor in layout.states()]

        module = layer("relu")

        def function(query, key, value):
            return tiled_attention_forward(module, query, key, value, None, scaling=SCALING)[0]

        with torch.enable_grad():
            assert torch.equal(compile(function)(*states), function(*states))

    def test_compile_with_dropout(self, compile):
        layout = LAYOUTS["grouped_queries"]
        module = layer_for(layout, "gelu", training=True)

        def function(query, key, value):
            return tiled_attention_forward(module, query, key, value, None, scaling=SCALING, dropout=0.3)[0]

        compiled, states = compile(function), layout.states()
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(results(compiled(*states), states))
        assert all(torch.equal(one, other) for one, other in zip(runs[0], runs[1], strict=True))
        assert not torch.allclose(runs[0][0], runs[2][0])

    def test_autocast(self):
        layout = LAYOUTS["left_padding"]
        module, states = layer_for(layout, "softplus"), layout.states()
        with torch.autocast("cpu", torch.bfloat16):
            output, _ = tiled_attention_forward(module, *states, layout.mask(), scaling=SCALING)
        actual = results(output, states)
        assert output.dtype == torch.bfloat16
        assert all(gradient.dtype == torch.float32 for gradient in actual[1:])
        rounded = [tensor.detach().to(torch.bfloat16).requires_grad_() for tensor in states]
        for one, other in zip(actual, run(tiled_attention_forward, layout, module, rounded)):
            assert torch.equal(one, other.to(one.dtype))

    @pytest.mark.parametrize("use_reentrant", [False, True], ids=["not_reentrant", "reentrant"])
    def test_checkpointing(self, use_reentrant):
        layout = LAYOUTS["grouped_queries"]
        module, states = layer_for(layout, "relu", training=True), layout.states()

        def function(*states):
            return tiled_attention_forward(module, *states, None, scaling=SCALING, dropout=0.3)[0]

        torch.manual_seed(1)
        expected = results(function(*states), states)
        torch.manual_seed(1)
        output = checkpoint(function, *states, use_reentrant=use_reentrant)
        torch.rand(3)  # between the two passes others draw random numbers too
        output.backward(random_factors(output))
        actual = [output.detach(), *(tensor.grad for tensor in states)]
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))

    @pytest.mark.parametrize("name", ["causal", "one_key_value_head", "packed", "mask_per_head"])
    @pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["", "dropout"])
    def test_operators(self, dropout, name):
        layout = LAYOUTS[name]
        states, mask = layout.states(), layout.mask()
        states = [tensor.detach() for tensor in states]
        visibility, count = masking_nlq.read_mask(mask, *states[:2])
        masks = (None, None, None, visibility)
        if isinstance(visibility, masking_nlq.Visibility):
            masks = (visibility.query_index, visibility.key_is_valid, visibility.document_start, None)
        rest = (count, *masks, torch.tensor(5) if dropout else None, "softplus", "sum", SCALING, dropout)
        torch.library.opcheck(tiled_nlq._operators.forward, (*states, *rest))
        output, scale = tiled_nlq._operators.forward(*states, *rest)
        torch.library.opcheck(tiled_nlq._operators.backward, (torch.randn_like(output), *states, output, scale, *rest))

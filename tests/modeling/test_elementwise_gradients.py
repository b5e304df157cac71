"""Gradients of `nlq_tiled`, against finite differences and the formulas, and the masks that they refuse."""

import pytest
import torch
from support.attention_cases import (
    ALL_COMBINATIONS,
    LAYOUTS,
    SCALING,
    check,
    error,
    expected_of,
    layer,
    layer_for,
    mask_of,
    random_factors,
    reference,
    results,
)
from support.elementwise_backends import CPP, CPU, EAGER, TILED, parametrize_backends
from support.grids import parametrize_grid

from modeling_nlq.masking_nlq import make_visibility


pytestmark = pytest.mark.usefixtures("small_tiles")


def states_away_from_kinks():
    """Two heads that share keys; 5 queries and 6 keys, so that there are several tiles; no score near 0."""
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        shapes = ((1, 2, 5, 2), (1, 1, 6, 2), (1, 1, 6, 2))
        states = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
        if (states[0] @ states[1].transpose(2, 3)).abs().min() > 0.02:
            return states
    raise AssertionError("no such states")


class TestFiniteDifferences:
    DROPOUTS = {"": 0.0, "dropout": 0.3}

    @parametrize_grid({"activation, normalization": ALL_COMBINATIONS, "dropout": DROPOUTS}, strength=1)
    def test_tiled(self, activation, normalization, dropout):
        module = layer(activation, normalization, heads=2, training=True)
        visibility = make_visibility(5, 6, 0, CPU, mask_of("110111"))

        def function(*states):
            torch.manual_seed(5)  # the same weights are dropped each time
            return TILED(module, *states, mask=visibility, dropout=dropout)

        assert torch.autograd.gradcheck(function, states_away_from_kinks())


@parametrize_backends(TILED)
class TestGradients:
    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=["query", "key", "value", "query_and_value"])
    def test_of_some_inputs(self, backend, wanted):
        layout = LAYOUTS["grouped_queries"]
        module = layer_for(layout, "sigmoid")
        all_gradients = backend.run(layout, module, layout.states())[1:]
        states = [tensor.detach() for tensor in backend.place(layout.states())]
        inputs = [states[index].requires_grad_() for index in wanted]
        output = backend(module, *states, mask=layout.mask())
        for actual, index in zip(results(output, inputs)[1:], wanted, strict=True):
            assert torch.equal(actual, all_gradients[index])

    def test_of_an_expanded_gradient(self, backend):
        """`output.sum()` hands back a gradient of stride 0."""
        layout = LAYOUTS["grouped_queries"]
        states = layout.states()
        inputs = backend.place(states)
        output = backend(layer_for(layout, "softplus"), *inputs, mask=layout.mask())
        expected = reference(*states, layout.visible, "softplus", "sum", SCALING)
        for actual, other in zip(torch.autograd.grad(output.sum(), inputs), torch.autograd.grad(expected.sum(), states)):
            assert error(actual, other) <= backend.tolerance

    @pytest.mark.parametrize("dims", [(1, 2), (0, 1), (2, 3)], ids=["heads", "batch", "width"])
    def test_of_a_transposed_gradient(self, backend, dims):
        layout = LAYOUTS["grouped_queries"]
        states = layout.states()
        inputs = backend.place(states)
        output = backend(layer_for(layout, "softplus"), *inputs)
        gradient = random_factors(output).transpose(*dims).contiguous().transpose(*dims)
        assert not gradient.is_contiguous()
        actual = [output.detach(), *torch.autograd.grad(output, inputs, gradient)]
        check(actual, expected_of(layout, "softplus", "sum", states), backend.tolerance)

    def test_same_each_time(self, backend):
        for name in ("packed_grouped_queries", "odd_length"):
            layout = LAYOUTS[name]
            module, states = layer_for(layout, "softplus"), layout.states(torch.bfloat16)
            first, second = (backend.run(layout, module, states) for _ in range(2))
            assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))

    def test_no_second_derivatives_in_silence(self, backend):
        states = backend.place(LAYOUTS["causal"].states())
        output = backend(layer("sigmoid"), *states)
        gradient = torch.autograd.grad(output.square().sum(), states[0], create_graph=True)[0]
        with pytest.raises(RuntimeError, match="no second derivative; set attn_implementation='eager'"):
            gradient.square().sum().backward()

    def test_no_forward_mode_in_silence(self, backend):
        states = [tensor.detach() for tensor in backend.place(LAYOUTS["causal"].states())]

        def function(query):
            return backend(layer("sigmoid"), query, *states[1:])

        with pytest.raises(RuntimeError, match="jvp"):
            torch.func.jvp(function, (states[0],), (torch.ones_like(states[0]),))


@parametrize_backends(EAGER, TILED, CPP)
@pytest.mark.usefixtures("cpp_allowed")
class TestLargeScores:
    @pytest.mark.parametrize("activation", ["relu", "relu_squared", "squared"])
    def test_gradients(self, backend, activation):
        """The sum of weights is finite, but a small gradient divided by it would round to 0."""
        found = []
        for size in (1.0, 2.0**30, 2.0**80):
            states = [torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
            sizes = (size, size, 1.0)
            states = [(tensor * factor).requires_grad_() for tensor, factor in zip(states, sizes)]
            output = backend(layer(activation, "sum"), *states)
            (output * 1e-6).sum().backward()
            found.append([output.detach(), *(tensor.grad * factor for tensor, factor in zip(states, sizes))])
        for large in found[1:]:
            for actual, expected in zip(large, found[0]):
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-10)


class TestMasks:
    """Masks of other sizes than the queries and keys have."""

    @parametrize_backends(EAGER, TILED)
    def test_visibility_of_another_length(self, backend):
        """A mask that was counted from a cache which is not there."""
        states = [torch.randn(2, 2, 9, 4) for _ in range(3)]
        mask = make_visibility(9, 14, 5, CPU)
        with pytest.raises(ValueError, match=r"the mask is for \(query, key\)=\(9, 14\), and this call has \(9, 9\)"):
            backend(layer("sigmoid"), *states, mask=mask)

    @parametrize_backends(EAGER, TILED)
    @pytest.mark.parametrize("shape", [(2, 1, 1, 300), (3, 1, 300, 300), (2, 3, 300, 300), (2, 1, 300, 257)])
    def test_masks_of_another_shape(self, shape, backend):
        """A short axis would be read as keys that are hidden, or as one mask for many queries."""
        states = [torch.randn(2, 2, 300, 4) for _ in range(3)]
        with pytest.raises(ValueError, match=r"must be \(batch, 1 or heads, query, key\)=\(2, 1 or 2, 300, 300\)"):
            backend(layer("sigmoid"), *states, mask=torch.ones(shape, dtype=torch.bool))

    @parametrize_backends(EAGER, TILED)
    def test_no_mask_and_more_queries_than_keys(self, backend):
        """Queries after the last key see all keys."""
        query, key, value = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
        output = backend(layer("relu"), query, key, value)
        last = backend(layer("relu"), query[:, :, 4:], key, value)
        assert torch.allclose(output[:, 4:], last)


def test_shapes_without_data():
    states = [torch.randn(2, 4, 5, 8, device="meta") for _ in range(3)]
    assert TILED(layer("sigmoid"), *states).shape == (2, 5, 4, 8)

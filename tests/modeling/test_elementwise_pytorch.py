"""`nlq_tiled` and `nlq_triton` under `torch.compile`, autocast, gradient checkpointing, and PyTorch's checks of operators."""

import pytest
import torch
from support.attention_cases import LAYOUTS, SCALING, layer, layer_for, random_factors, results
from support.elementwise_backends import TILED, TRITON, ignore_overflow, parametrize_backends
from support.grids import parametrize_grid, slow_except
from torch.utils.checkpoint import checkpoint

from modeling_nlq import tiled_nlq
from modeling_nlq.kernels.triton import attention as triton_attention
from modeling_nlq.masking_nlq import Visibility, read_mask


pytestmark = [pytest.mark.usefixtures("small_tiles", "patched_once", "fresh_compiler"), ignore_overflow]
both = parametrize_backends(TILED, TRITON)


def compile(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def equal(actual, expected):
    return all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@both
@pytest.mark.parametrize(
    "name",
    slow_except(("causal", "one_key_value_head", "packed", "mask_of_one_row", "mask_per_head"), ("packed", "mask_of_one_row")),
)
def test_compile(backend, name):
    layout = LAYOUTS[name]
    module, mask = layer_for(layout, "sigmoid"), backend.mask(layout.mask())

    def function(query, key, value):
        return backend.function(module, query, key, value, mask, scaling=SCALING)[0]

    states = backend.place(layout.states())
    compiled = compile(function)
    expected, actual = (results(call(*states), states) for call in (function, compiled))
    assert equal(actual, expected)
    with torch.no_grad():
        assert torch.equal(compiled(*states), expected[0])


@both
def test_compile_in_bfloat16(backend):
    """Half precision keeps the remainder of each rounding beside the sum."""
    layout = LAYOUTS["causal"]
    module, states = layer_for(layout, "softplus"), backend.place(layout.states(torch.bfloat16))

    def function(query, key, value):
        return backend.function(module, query, key, value, None, scaling=SCALING)[0]

    expected, actual = (results(call(*states), states) for call in (function, compile(function)))
    assert equal(actual, expected)


@both
def test_compile_where_nothing_wants_a_gradient(backend):
    """Frozen weights, outside of `no_grad`."""
    states = [tensor.detach() for tensor in backend.place(LAYOUTS["causal"].states())]
    module = layer("relu")

    def function(query, key, value):
        return backend.function(module, query, key, value, None, scaling=SCALING)[0]

    with torch.enable_grad():
        assert torch.equal(compile(function)(*states), function(*states))


@pytest.mark.slow
@both
def test_compile_with_dropout(backend):
    layout = LAYOUTS["causal"]
    module = layer_for(layout, "gelu", training=True)

    def function(query, key, value):
        return backend.function(module, query, key, value, None, scaling=SCALING, dropout=0.3)[0]

    compiled, states = compile(function), backend.place(layout.states())
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(results(compiled(*states), states))
    assert equal(runs[0], runs[1])
    assert not torch.allclose(runs[0][0], runs[2][0])


@parametrize_backends(TRITON)
def test_compile_for_other_lengths(backend):
    """One graph serves all lengths, for the operator alone reads them."""
    module, graphs = layer("relu"), []

    def count_graphs(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def function(query, key, value):
        return backend.function(module, query, key, value, None, scaling=SCALING)[0]

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count_graphs)
    for length in (5, 9, 12):
        states = [torch.randn(1, 2, length, 4, device=backend.device) for _ in range(3)]
        assert torch.equal(compiled(*states), function(*states))
    assert len(graphs) == 1


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(backend, dtype):
    layout = LAYOUTS["left_padding"]
    module, states = layer_for(layout, "softplus"), backend.place(layout.states())
    with torch.autocast(backend.device.type, dtype):
        output = backend(module, *states, mask=layout.mask())
    actual = results(output, states)
    assert output.dtype == dtype
    assert all(gradient.dtype == torch.float32 for gradient in actual[1:])
    rounded = [tensor.detach().to(dtype) for tensor in states]
    for one, other in zip(actual, backend.run(layout, module, rounded), strict=True):
        assert torch.equal(one.cpu(), other.to(one.dtype))


@both
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not_reentrant", "reentrant"])
def test_checkpointing(backend, use_reentrant):
    layout = LAYOUTS["causal"]
    module, states = layer_for(layout, "relu", training=True), backend.place(layout.states())

    def function(*states):
        return backend(module, *states, dropout=0.3)

    torch.manual_seed(1)
    expected = results(function(*states), states)
    torch.manual_seed(1)
    output = checkpoint(function, *states, use_reentrant=use_reentrant)
    torch.rand(3, device=backend.device)  # between the two passes others draw random numbers too
    output.backward(random_factors(output))
    actual = [output.detach(), *(tensor.grad for tensor in states)]
    assert equal(actual, expected)


def operator_inputs(backend, layout, states, dropout):
    """The arguments of the operators besides query, key and value."""
    visibility, count = read_mask(backend.mask(layout.mask()), *states[:2])
    masks = (None, None, None, visibility)
    if isinstance(visibility, Visibility):
        masks = (visibility.query_index, visibility.key_is_valid, visibility.first_key, None)
    seed = torch.tensor(5, device=backend.device) if dropout else None
    return (count, *masks, seed, "softplus", "sum", SCALING, dropout)


@parametrize_grid(
    {
        "name": ("causal", "one_key_value_head", "packed", "mask_per_head"),
        "dropout": {"": 0.0, "dropout": 0.3},
        "dtype": ("float32", "bfloat16"),
    },
    strength=1,
)
def test_tiled_operators(name, dropout, dtype):
    layout = LAYOUTS[name]
    states = [tensor.detach() for tensor in layout.states(getattr(torch, dtype))]
    rest = operator_inputs(TILED, layout, states, dropout)
    biases = [torch.rand(*tensor.shape[:1], states[0].shape[1], tensor.shape[2]).double() for tensor in states[:2]]
    states += biases if name == "packed" else [None, None]
    torch.library.opcheck(tiled_nlq._operators.forward, (*states, *rest))
    results = tiled_nlq._operators.forward(*states, *rest)
    torch.library.opcheck(tiled_nlq._operators.backward, (torch.randn_like(results[0]), *states, *results, *rest))


@parametrize_backends(TRITON)
@pytest.mark.parametrize(
    "name, dropout, dtype",
    [
        pytest.param("causal", 0.0, torch.bfloat16, marks=pytest.mark.slow),
        ("one_key_value_head", 0.3, torch.float32),
        pytest.param("packed", 0.0, torch.float32, marks=pytest.mark.slow),
        pytest.param("mask_of_one_row", 0.3, torch.float32, marks=pytest.mark.slow),
    ],
    ids=["bfloat16", "dropout", "packed", "dense_mask"],
)
@pytest.mark.slow
def test_triton_operators(backend, name, dropout, dtype):
    layout = LAYOUTS[name]
    states = [tensor.detach() for tensor in backend.place(layout.states(dtype))]
    rest = operator_inputs(backend, layout, states, dropout)
    torch.library.opcheck(triton_attention.operators.forward, (*states, *rest))
    results = triton_attention.operators.forward(*states, *rest)
    torch.library.opcheck(triton_attention.operators.backward, (torch.randn_like(results[0]), *states, *results, *rest))

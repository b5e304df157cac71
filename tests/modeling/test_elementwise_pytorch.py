"""`nlq_tiled` under `torch.compile`, autocast, gradient checkpointing, and PyTorch's checks of operators."""

import pytest
import torch
from support.attention_cases import LAYOUTS, SCALING, layer, layer_for, random_factors, results
from support.elementwise_backends import TILED, parametrize_backends
from support.grids import parametrize_grid, slow_except
from torch.utils.checkpoint import checkpoint

from modeling_nlq import tiled_nlq
from modeling_nlq.masking_nlq import Visibility, read_mask


pytestmark = pytest.mark.usefixtures("small_tiles", "fresh_compiler")
tiled_backend = parametrize_backends(TILED)


def compile(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def equal(actual, expected):
    return all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@tiled_backend
@pytest.mark.parametrize(
    "name",
    slow_except(("causal", "one_key_value_head", "packed", "mask_of_one_row", "mask_per_head"), ("packed", "mask_of_one_row")),
)
def test_compile(backend, name):
    layout = LAYOUTS[name]
    module, mask = layer_for(layout, "sigmoid"), layout.mask()

    def function(query, key, value):
        return backend.function(module, query, key, value, mask, scaling=SCALING)[0]

    states = backend.place(layout.states())
    compiled = compile(function)
    expected, actual = (results(call(*states), states) for call in (function, compiled))
    assert equal(actual, expected)
    with torch.no_grad():
        assert torch.equal(compiled(*states), expected[0])


@tiled_backend
def test_compile_in_bfloat16(backend):
    """Half precision keeps the remainder of each rounding beside the sum."""
    layout = LAYOUTS["causal"]
    module, states = layer_for(layout, "softplus"), backend.place(layout.states(torch.bfloat16))

    def function(query, key, value):
        return backend.function(module, query, key, value, None, scaling=SCALING)[0]

    expected, actual = (results(call(*states), states) for call in (function, compile(function)))
    assert equal(actual, expected)


@tiled_backend
def test_compile_where_nothing_wants_a_gradient(backend):
    """Frozen weights, outside of `no_grad`."""
    states = [tensor.detach() for tensor in backend.place(LAYOUTS["causal"].states())]
    module = layer("relu")

    def function(query, key, value):
        return backend.function(module, query, key, value, None, scaling=SCALING)[0]

    with torch.enable_grad():
        assert torch.equal(compile(function)(*states), function(*states))


@pytest.mark.slow
@tiled_backend
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


@tiled_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(backend, dtype):
    layout = LAYOUTS["left_padding"]
    module, states = layer_for(layout, "softplus"), backend.place(layout.states())
    with torch.autocast("cpu", dtype):
        output = backend(module, *states, mask=layout.mask())
    actual = results(output, states)
    assert output.dtype == dtype
    assert all(gradient.dtype == torch.float32 for gradient in actual[1:])
    rounded = [tensor.detach().to(dtype) for tensor in states]
    for one, other in zip(actual, backend.run(layout, module, rounded), strict=True):
        assert torch.equal(one, other.to(one.dtype))


@tiled_backend
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
    torch.rand(3)  # between the two passes others draw random numbers too
    output.backward(random_factors(output))
    actual = [output.detach(), *(tensor.grad for tensor in states)]
    assert equal(actual, expected)


def operator_inputs(layout, states, dropout):
    """The arguments of the operators besides query, key and value."""
    visibility, count = read_mask(layout.mask(), *states[:2])
    masks = (None, None, None, visibility)
    if isinstance(visibility, Visibility):
        masks = (visibility.last_key, visibility.key_is_valid, visibility.first_key, None)
    seed = torch.tensor(5) if dropout else None
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
    rest = operator_inputs(layout, states, dropout)
    biases = [torch.rand(*tensor.shape[:1], states[0].shape[1], tensor.shape[2]).double() for tensor in states[:2]]
    states += biases if name == "packed" else [None, None]
    torch.library.opcheck(tiled_nlq.FORWARD, (*states, *rest))
    results = tiled_nlq.FORWARD(*states, *rest)
    torch.library.opcheck(tiled_nlq.BACKWARD, (torch.randn_like(results[0]), *states, *rest, *results))

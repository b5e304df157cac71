"""`nlq_rows`: blocks of queries compute what `eager` computes, in memory that grows linearly with the length."""

import pytest
import torch
from support.attention_cases import LAYOUTS, SCALING, chunk, layer, layer_for, results, run
from support.live_memory import LiveMemory
from support.model_cases import PART_SWITCHES, random_tokens

from modeling_nlq import attention_nlq
from modeling_nlq.attention_nlq import chunked_attention_forward, eager_attention_forward
from modeling_nlq.attention_parts_nlq import ScoreBias


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(attention_nlq, "ROWS", 4)


def equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_eager(monkeypatch, name):
    layout = LAYOUTS[name]
    monkeypatch.setattr(attention_nlq, "ROWS", max(4, layout.query_length // 5))
    activation = ("softpick", "stick_breaking", "entmax15", "squared")[list(LAYOUTS).index(name) % 4]
    module, states = layer_for(layout, activation), layout.states(torch.float64)
    equal(*(run(function, layout, module, states) for function in (chunked_attention_forward, eager_attention_forward)))


@pytest.mark.parametrize("activation", ["softpick", "stick_breaking"])
def test_gradients(activation):
    layout = chunk(6, 6, 0, batch=1)
    module, states = layer_for(layout, activation), layout.states(torch.float64)
    bias = torch.randn(2, 1, layout.heads, 6, dtype=torch.float64).requires_grad_()

    def attend(query, key, value, bias):
        return chunked_attention_forward(module, query, key, value, layout.mask(), SCALING, score_bias=ScoreBias(*bias))[0]

    assert torch.autograd.gradcheck(attend, (*states, bias))


def test_dropout_is_the_same_in_backward():
    layout = chunk(9, 9, 0, batch=1)
    module, states = layer_for(layout, "softpick", training=True), layout.states(torch.float64)

    def attend(*states):
        torch.manual_seed(1)
        return chunked_attention_forward(module, *states, layout.mask(), SCALING, dropout=0.3)[0]

    assert torch.autograd.gradcheck(attend, states)


def peak(function, activation, length):
    layout = chunk(length, length, 0, batch=1)
    states = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
    with LiveMemory() as memory:
        output, _ = function(layer(activation), *states, layout.mask(), scaling=SCALING)
        results(output, states)
    return memory


@pytest.mark.parametrize("activation", ["softpick", "stick_breaking", "sparsemax"])
def test_memory_is_linear(monkeypatch, activation):
    monkeypatch.setattr(attention_nlq, "ROWS", 16)
    first, second, third = (peak(chunked_attention_forward, activation, length).peak for length in (128, 256, 512))
    assert second <= 2.2 * first
    assert third <= 2.2 * second
    assert peak(eager_attention_forward, activation, 256).peak > 3 * peak(eager_attention_forward, activation, 128).peak


@pytest.mark.parametrize("name", ["softpick", pytest.param("parallax", marks=pytest.mark.slow)])
def test_model(make_model, name):
    """It is the choice for such layers, in training too, and compiles without a break."""
    model, tokens = make_model(torch.float64, implementation="nlq", **PART_SWITCHES[name]), random_tokens(2, 9)
    gradients = {}
    for name in ("nlq", "eager"):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        gradients[name] = [parameter.grad for parameter in model.parameters()]
    equal(gradients["nlq"], gradients["eager"])
    model.set_attn_implementation("nlq")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    equal([compiled(tokens, use_cache=False).logits], [model(tokens, use_cache=False).logits])

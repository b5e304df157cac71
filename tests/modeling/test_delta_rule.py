"""The delta rule of linear attention against its recurrence in float64 and the functions of Transformers."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import reference
from support.attention_cases import LAYOUTS, SCALING, check, drawn_layouts, results, set_chunks
from support.model_cases import DELTA, GATED_DELTA
from support.properties import examples
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from modeling_nlq import NLQConfig, NLQModel
from modeling_nlq.linear_nlq import linear_attention


def rates(layout, dtype=torch.float64):
    """Draws `beta` up to 2 and `log_decay`. Some tokens forget nearly all."""
    shape = (2, layout.batch, layout.key_value_heads, layout.query_length)
    beta, log_decay = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [states.to(dtype).requires_grad_() for states in (2 * beta, -30.0 * log_decay**8)]


def run(form, states, beta, log_decay, mask=None, state=None):
    """Runs the form `"parallel"`, which goes token by token, or the chunked one with a number of tokens in a chunk."""
    name = "parallel" if form == "parallel" else "chunked"
    with pytest.MonkeyPatch.context() as patch:
        set_chunks(patch, size=None if form == "parallel" else form)
        return linear_attention(*states, mask, SCALING, log_decay, state=state, form=name, beta=beta)


def formula(layout, states, beta, log_decay):
    """The output `(batch, query, heads, head_dim)` of the recurrence in float64, head by head."""
    query, key, value, beta, log_decay = (tensor.double() for tensor in (*states, beta, log_decay))
    output = torch.zeros_like(query).transpose(1, 2)
    for row, head in itertools.product(range(layout.batch), range(layout.heads)):
        group = head // (layout.heads // layout.key_value_heads)
        of_head = (query[row, head], key[row, group], value[row, group], layout.visible[row, head], SCALING)
        output[row, :, head] = reference.delta_rule(*of_head, beta[row, group], log_decay[row, group].exp())
    # Also what no query sees has a gradient, of 0
    return output + 0.0 * sum(tensor.sum() for tensor in (*states, beta, log_decay))


@examples(40)
@given(drawn_layouts(is_linear=True), st.sampled_from([1, 2, 3, 5, 64]))
def test_every_form_computes_the_recurrence(layout, chunk):
    """Outputs and gradients, for any lengths, groups, paddings and packings."""
    states, of_tokens = layout.states(torch.float64), rates(layout)
    inputs = [*states, *of_tokens]
    expected = results(formula(layout, states, *of_tokens), inputs)
    for form in (chunk, "parallel"):
        output, _ = run(form, states, *of_tokens, layout.mask())
        check(results(output, inputs), expected, 1e-12, 1.0)
        assert (output[~layout.visible.any(dim=-1).transpose(1, 2)] == 0).all()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)], ids=str)
@pytest.mark.parametrize("form", ["parallel", 3])
def test_half_precision_has_a_float32_state(form, dtype, tolerance):
    layout = LAYOUTS["packed_grouped_queries"]
    states, of_tokens = layout.states(dtype), rates(layout, torch.float32)
    inputs = [*states, *of_tokens]
    output, state = run(form, states, *of_tokens, layout.mask())
    assert output.dtype == dtype and all(part.dtype == torch.float32 for part in state or ())
    check(results(output, inputs), results(formula(layout, states, *of_tokens), inputs), tolerance, 1.0)


@pytest.mark.parametrize("least", [-1e6, -torch.inf])
def test_chunks_remember_after_forgetting(least):
    """In float32, the sum of logarithms keeps small ones beside one that forgets everything."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 1, 2, 12, 8, generator=generator).unbind()
    beta, forgotten = torch.rand(2, 1, 2, 12, generator=generator)
    log_decay = -0.1 * forgotten
    log_decay[..., 3] = least
    (chunked, _), (expected, _) = (run(form, states, beta, log_decay) for form in (64, "parallel"))
    torch.testing.assert_close(chunked, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_the_functions_of_qwen3_next(name):
    """Calls each twice. The second call starts from the state of the first."""
    function, generator = getattr(qwen3_next, name), torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 150, 16, generator=generator)
    beta, log_decay = 2 * torch.rand(2, 3, 150, generator=generator), -torch.rand(2, 3, 150, generator=generator)
    log_decay = log_decay * torch.tensor([0.01, 1.0, 20.0])[:, None]
    state = expected_state = None
    for part in (slice(0, 90), slice(90, 150)):
        inputs = [tensor[:, :, part] for tensor in (query, key, value, log_decay, beta)]
        output, state = linear_attention(*inputs[:3], None, 0.25, inputs[3], state=state, beta=inputs[4])
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        inputs = [tensor.transpose(1, 2) for tensor in inputs]
        expected, expected_state = function(*inputs, initial_state=expected_state, **options)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(state.numerator, expected_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("step", [1.0, -1e4], ids=["forgets", "keeps"])
def test_a_rate_that_would_overflow_has_finite_gradients(make_model, step):
    """Also where softplus is 0, and their product would be NaN."""
    logits, tokens = [], torch.arange(9)[None]
    for log_rate in (20.0, 1e4):
        model = make_model(**GATED_DELTA, implementation="nlq").train()
        for layer in model.model.layers:
            torch.nn.init.constant_(layer.self_attn.a_log_bias, log_rate)
            torch.nn.init.constant_(layer.self_attn.dt_bias, step)
            torch.nn.init.zeros_(layer.self_attn.a_proj.weight)
        logits.append(model(tokens).logits)
        logits[-1].square().mean().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert torch.equal(*logits)


def test_initial_values_are_those_of_qwen3_next():
    sizes = {"num_attention_heads": 128, "hidden_size": 256, "num_hidden_layers": 1, "query_projection": "linear"}
    layer, ungated = (NLQModel(NLQConfig(**sizes, **each)).layers[0].self_attn for each in (GATED_DELTA, DELTA))
    rate = layer.a_log_bias.exp()
    assert layer.dt_bias.eq(1).all() and 0.0099 < rate.min() < 1 and 15 < rate.max() < 16.01
    beta = layer.rates(torch.randn(1, 9, 256))["beta"]
    assert beta.shape == (1, 128, 9) and 1 < beta.max() < 2
    names = {name for name, parameter in layer.named_parameters() if parameter.ndim == 1}
    assert names == {"a_log_bias", "dt_bias"}  # which Trainer does not decay, because of `bias`
    assert ungated.a_proj is None and ungated.rates(torch.randn(1, 9, 256))["beta"].max() < 1

"""The forms of linear attention against the formula, their state, and their precision."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import reference
from support.attention_cases import LAYOUTS, check, drawn_layouts, results
from support.grids import parametrize_grid
from support.linear_cases import (
    DECAYS,
    FORMS,
    Rotary,
    causal_layout,
    decay_logits,
    formula,
    inputs_of,
    run_form,
)
from support.properties import examples
from torch.utils.flop_counter import FlopCounterMode

from modeling_nlq.linear_nlq import feature_map, linear_attention


pytestmark = pytest.mark.thin(4)


# Where nearly all is forgotten, the gradients of queries and rates are differences of nearly equal numbers
SMALL = 1.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@parametrize_grid({"decay": tuple(DECAYS), "dtype": DTYPES, "form": FORMS})
def test_half_precision_is_rounded_once(decay, dtype, form):
    """Sums and the state are of float32, whatever the inputs are; the output is rounded once, at the end."""
    layout = LAYOUTS["packed_grouped_queries"]
    states, logits = layout.states(dtype), decay_logits(decay, layout, torch.float32)
    inputs = inputs_of(states, logits)
    output, state = run_form(form, states, layout.mask(), logits)
    assert output.dtype == dtype and all(part.dtype == torch.float32 for part in state or ())
    expected = results(formula(layout, states, logits), inputs)
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    check(results(output, inputs), expected, tolerance, SMALL)


@examples(60)
@given(drawn_layouts(is_linear=True), st.sampled_from(sorted(DECAYS)), st.integers(1, 6), st.booleans())
def test_every_form_computes_the_formula(layout, decay, chunk, is_rotated):
    """Outputs and gradients, for any lengths, groups, paddings and packings."""
    states, logits = layout.states(torch.float64), decay_logits(decay, layout)
    rotary = Rotary(layout) if is_rotated else None
    expected = results(formula(layout, states, logits, rotary), inputs_of(states, logits))
    for form in (chunk, "parallel", "recurrent"):
        output, _ = run_form(form, states, layout.mask(), logits, rotary and rotary.embeddings)
        # Transformers computes rotary angles in float32
        check(results(output, inputs_of(states, logits)), expected, 1e-5 if is_rotated else 1e-10, SMALL)
        assert (output[~layout.visible.any(dim=-1).transpose(1, 2)] == 0).all()


def test_work_is_linear():
    """Twice the tokens are twice the multiplications."""
    flops = []
    for length in (256, 512, 1024):
        states = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
        with FlopCounterMode(display=False) as counter:
            linear_attention(*states, None, 0.5)[0].sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[1] == 2 * flops[0] and flops[2] == 2 * flops[1]


def test_feature_map_and_its_gradient_are_the_formula():
    """Exact in float32 too: `exp`, not `1 + (exp - 1)`, in which all that is below 1e-7 is rounded to 0."""
    states = torch.linspace(-80, 10, 901, dtype=torch.float64)
    torch.testing.assert_close(feature_map(states), reference.psi(states), rtol=1e-12, atol=0)
    torch.testing.assert_close(feature_map(states.float()).double(), reference.psi(states), rtol=2e-5, atol=0)
    gradient = torch.autograd.grad(feature_map(states.requires_grad_()).sum(), states)[0]
    torch.testing.assert_close(gradient, torch.where(states < 0, states.exp(), 1.0).detach())


@pytest.mark.parametrize("form", FORMS)
def test_a_single_value_is_its_own_mean(form):
    """However small its weight is."""
    layout = causal_layout(1)
    query, key, value = (tensor.detach() for tensor in layout.states())
    for magnitude in (-25.0, -10.0, 1e3):
        states = [torch.full_like(query, magnitude), torch.full_like(key, magnitude), value]
        output, _ = run_form(form, states, None, decay_logits("learned", layout, torch.float32), scaling=0.5)
        torch.testing.assert_close(output, value.transpose(1, 2), rtol=1e-5, atol=1e-5)


@parametrize_grid({"dtype": DTYPES, "decay": ("none", "learned"), "form": ("parallel", "recurrent", 3)})
def test_extreme_states_stay_finite(dtype, decay, form):
    layout = LAYOUTS["packed_grouped_queries"]
    for signs in itertools.product((1e3, -1e3), repeat=2):
        *states, value = layout.states(dtype)
        states = [(state.detach().abs() * sign).requires_grad_() for state, sign in zip(states, signs)]
        states, logits = [*states, value], decay_logits(decay, layout, torch.float32)
        for tensor in results(run_form(form, states, layout.mask(), logits)[0], inputs_of(states, logits)):
            assert tensor.isfinite().all()

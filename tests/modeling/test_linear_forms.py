"""The forms of linear attention against the formula, their state, and their precision."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import reference
from support.attention_cases import LAYOUTS, drawn_layouts, padded, results
from support.grids import parametrize_grid
from support.linear_cases import (
    DECAYS,
    FORMS,
    SELF_LAYOUTS,
    Rotary,
    all_decays,
    causal_layout,
    check,
    decay_logits,
    formula,
    inputs_of,
    run_form,
)
from support.properties import examples
from torch.utils.flop_counter import FlopCounterMode

from modeling_nlq.linear_nlq import feature_map, linear_attention
from modeling_nlq.masking_nlq import make_visibility


pytestmark = pytest.mark.thin(4)


class TestForms:
    """Outputs and gradients of the three forms are those of the formula."""

    @parametrize_grid({"decay": tuple(DECAYS), "layout": SELF_LAYOUTS, "positions": ("none", "rope")})
    def test_every_form_computes_the_formula(self, decay, layout, positions):
        states, logits = layout.states(torch.float64), decay_logits(decay, layout)
        rotary = Rotary(layout) if positions == "rope" else None
        inputs = inputs_of(states, logits)
        expected = results(formula(layout, states, logits, rotary), inputs)
        for form in FORMS:
            output, _ = run_form(form, states, layout.mask(), logits, None if rotary is None else rotary.embeddings)
            # Transformers computes rotary angles in float32
            check(results(output, inputs), expected, 1e-11 if rotary is None else 1e-5)
            assert (output[~layout.visible.any(dim=-1).transpose(1, 2)] == 0).all()

    @parametrize_grid(
        {
            "decay": tuple(DECAYS),
            "dtype": {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16},
            "form": FORMS,
        }
    )
    def test_half_precision_is_rounded_once(self, decay, dtype, form):
        """Computed in float32 whatever the inputs are, and rounded once, at the end."""
        layout = LAYOUTS["packed_grouped_queries"]
        states, logits = layout.states(dtype), decay_logits(decay, layout, torch.float32)
        inputs = inputs_of(states, logits)
        output, _ = run_form(form, states, layout.mask(), logits)
        assert output.dtype == dtype
        expected = results(formula(layout, states, logits), inputs)
        check(results(output, inputs), expected, 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


@examples(60)
@given(drawn_layouts(is_linear=True), st.sampled_from(sorted(DECAYS)), st.integers(1, 6), st.booleans())
def test_any_layout(layout, decay, chunk, is_rotated):
    states, logits = layout.states(torch.float64), decay_logits(decay, layout)
    rotary = Rotary(layout) if is_rotated else None
    expected = results(formula(layout, states, logits, rotary), inputs_of(states, logits))
    for form in (chunk, "parallel", "recurrent"):
        output, _ = run_form(form, states, layout.mask(), logits, rotary and rotary.embeddings)
        check(results(output, inputs_of(states, logits)), expected, 1e-5 if is_rotated else 1e-10)


def test_work_is_linear():
    """Twice the tokens are twice the multiplications."""
    flops = []
    for length in (256, 512, 1024):
        states = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
        with FlopCounterMode(display=False) as counter:
            linear_attention(*states, None, 0.5)[0].sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[1] == 2 * flops[0] and flops[2] == 2 * flops[1]


class TestState:
    """The state that one call hands to the next."""

    @examples(60)
    @given(st.data(), st.sampled_from(sorted(DECAYS)), st.booleans(), st.booleans())
    def test_split_anywhere(self, data, decay, is_padded, is_rotated):
        """Any cut of the text into calls gives the outputs, gradients and last state of one call, in every form."""
        length = data.draw(st.integers(1, 10))
        rows = [data.draw(st.text("01", min_size=length, max_size=length)) for _ in range(2)]
        sizes = {"heads": 4, "key_value_heads": 2}
        layout = padded(*rows, **sizes) if is_padded else causal_layout(length, **sizes)
        edges = sorted({0, length, *data.draw(st.sets(st.integers(1, length), max_size=4))})
        static_length = length + data.draw(st.sampled_from([0, 3]))
        states, logits = layout.states(torch.float64), decay_logits(decay, layout)
        rotary = Rotary(layout) if is_rotated else None
        inputs = inputs_of(states, logits)
        whole, last_state = run_form("recurrent", states, layout.mask(), logits, rotary and rotary.embeddings)

        outputs, state = [], None
        for start, end in itertools.pairwise(edges):
            form = data.draw(st.sampled_from(["recurrent", 1, 2, 3, 64]))
            given_mask = None
            if is_padded:
                given_mask = torch.tensor([[int(digit) for digit in row[:end]] for row in rows])
            mask = make_visibility(end - start, max(end, static_length), start, torch.device("cpu"), given_mask)
            part = [tensor[:, :, start:end] for tensor in states]
            embeddings = None if rotary is None else [embedding[:, start:end] for embedding in rotary.embeddings]
            output, state = run_form(form, part, mask, logits, embeddings, state)
            outputs.append(output)
        check(results(torch.cat(outputs, dim=1), inputs), results(whole, inputs), 1e-10)
        for one, other in zip(state, last_state, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)

    @all_decays
    def test_one_call_is_the_formula(self, decay):
        """The last state is the sum over the tokens, each decayed by as many as follow it."""
        layout = padded("0110111")
        query, key, value = layout.states(torch.float64)
        logits = decay_logits(decay, layout)
        rate = torch.ones(2, dtype=torch.float64) if logits is None else torch.sigmoid(logits)
        numerator, denominator = (
            torch.zeros(1, 2, 4, 4, dtype=torch.float64),
            torch.zeros(1, 2, 4, dtype=torch.float64),
        )
        for index in (1, 2, 4, 5, 6):
            feature = reference.psi(key[:, :, index])
            numerator = rate[:, None, None] * numerator + feature[..., None] * value[:, :, index, None, :]
            denominator = rate[:, None] * denominator + feature
        for form in FORMS[1:]:
            _, state = run_form(form, (query, key, value), layout.mask(), logits)
            torch.testing.assert_close(state.numerator, numerator)
            torch.testing.assert_close(state.denominator, denominator)

    @pytest.mark.parametrize("form", FORMS[1:])
    def test_is_of_float32(self, form):
        """A state in bfloat16 would soon be deaf to new tokens."""
        states = LAYOUTS["causal"].states(torch.bfloat16)
        _, state = run_form(form, states)
        assert {part.dtype for part in state} == {torch.float32}


class TestFeatureMap:
    def test_feature_map_is_the_formula(self):
        """Exact in float32 too: `exp`, not `1 + (exp - 1)`, in which all that is below 1e-7 is rounded to 0."""
        states = torch.linspace(-80, 10, 901, dtype=torch.float64)
        torch.testing.assert_close(feature_map(states), reference.psi(states), rtol=1e-12, atol=0)
        torch.testing.assert_close(feature_map(states.float()).double(), reference.psi(states), rtol=2e-5, atol=0)

    def test_gradient_of_the_feature_map_is_the_formula(self):
        states = torch.tensor([-90.0, -5.0, -1e-3, 1e-3, 5.0, 1e4], dtype=torch.float64, requires_grad=True)
        gradient = torch.autograd.grad(feature_map(states).sum(), states)[0]
        torch.testing.assert_close(gradient, torch.where(states < 0, states.exp(), 1.0).detach())


class TestNoNaN:
    @pytest.mark.parametrize("magnitude", [-25.0, -10.0, 1e3])
    def test_one_key(self, magnitude):
        """The mean of one value is that value, however small its weight."""
        layout = causal_layout(1)
        query, key, value = (tensor.detach() for tensor in layout.states())
        states = [torch.full_like(query, magnitude), torch.full_like(key, magnitude), value]
        for form in FORMS:
            output, _ = run_form(form, states, None, decay_logits("learned", layout, torch.float32), scaling=0.5)
            torch.testing.assert_close(output, value.transpose(1, 2), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("form", ["parallel", "recurrent", 3])
    @pytest.mark.parametrize("decay", ["none", "learned"])
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
    )
    def test_extreme_states_stay_finite(self, dtype, decay, form):
        layout = LAYOUTS["packed_grouped_queries"]
        for query_sign, key_sign in itertools.product((1e3, -1e3), repeat=2):
            query, key, value = layout.states(dtype)
            query, key = (
                (tensor.detach().abs() * sign).requires_grad_()
                for tensor, sign in ((query, query_sign), (key, key_sign))
            )
            states, logits = [query, key, value], decay_logits(decay, layout, torch.float32)
            for tensor in results(run_form(form, states, layout.mask(), logits)[0], inputs_of(states, logits)):
                assert tensor.isfinite().all()

"""The forms of linear attention against the formula, their state, and their precision."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import reference
from support.attention_cases import LAYOUTS, SCALING, error, packed, padded, random_factors, results
from support.grids import parametrize_grid
from support.linear_cases import (
    DECAYS,
    FORMS,
    SELF_LAYOUTS,
    Rotary,
    all_decays,
    all_forms,
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


class TestForms:
    """Outputs and gradients of the three forms are those of the formula."""

    @parametrize_grid({"decay": tuple(DECAYS), "layout": SELF_LAYOUTS, "positions": ("none", "rope")})
    def test_float64(self, decay, layout, positions):
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
    def test_precision(self, decay, dtype, form):
        """Computed in float32 whatever the inputs are, and rounded once, at the end."""
        layout = LAYOUTS["packed_grouped_queries"]
        states, logits = layout.states(dtype), decay_logits(decay, layout, torch.float32)
        inputs = inputs_of(states, logits)
        output, _ = run_form(form, states, layout.mask(), logits)
        assert output.dtype == dtype
        expected = results(formula(layout, states, logits), inputs)
        check(results(output, inputs), expected, 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)

    @pytest.mark.parametrize("chunk", [1, 2, 3, 5])
    @all_decays
    def test_lengths(self, decay, chunk):
        for length in sorted({1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 3} - {0}):
            layout = causal_layout(length, batch=1, heads=3, key_value_heads=1)
            states, logits = layout.states(torch.float64), decay_logits(decay, layout)
            expected = results(formula(layout, states, logits), inputs_of(states, logits))
            for form in (chunk, "parallel", "recurrent"):
                check(results(run_form(form, states, None, logits)[0], inputs_of(states, logits)), expected, 1e-11)

    @parametrize_grid({"form": FORMS, "decay": tuple(DECAYS), "kind": ("padding", "packed")}, strength=1)
    def test_finite_differences(self, form, decay, kind):
        layout = (
            packed("aabbb", heads=2, key_value_heads=1) if kind == "packed" else padded("01101", heads=2, key_value_heads=1)
        )
        states, logits = layout.states(torch.float64, head_dim=2), decay_logits(decay, layout)
        rotary = torch.randn(2, 1, 5, 2, dtype=torch.float64).unbind()

        def function(*inputs):
            return run_form(form, inputs[:3], layout.mask(), inputs[3] if len(inputs) > 3 else None, rotary)[0]

        assert torch.autograd.gradcheck(function, inputs_of(states, logits))

    def test_of_some_inputs(self):
        layout = LAYOUTS["left_padding"]
        states = layout.states()
        expected = results(run_form(3, states, layout.mask())[0], states)[1:]
        for index in range(3):
            alone = [tensor.detach() for tensor in states]
            alone[index].requires_grad_()
            actual = results(run_form(3, alone, layout.mask())[0], alone[index : index + 1])[1]
            torch.testing.assert_close(actual, expected[index])

    def test_inputs_stay_as_they_are(self):
        layout = LAYOUTS["left_padding"]
        states = [tensor.detach() for tensor in layout.states()]
        before = [tensor.clone() for tensor in states]
        for form in FORMS:
            run_form(form, states, layout.mask())
        assert all(map(torch.equal, states, before))


@st.composite
def drawn_layouts(draw):
    """Any lengths, groups, paddings and packings."""
    key_value_heads = draw(st.integers(1, 3))
    sizes = {"heads": key_value_heads * draw(st.integers(1, 2)), "key_value_heads": key_value_heads}
    length, batch = draw(st.integers(1, 11)), draw(st.integers(1, 2))
    kind = draw(st.sampled_from(["none", "padding", "packed"]))
    if kind == "none":
        return causal_layout(length, batch=batch, **sizes)
    if kind == "padding":
        return padded(*(draw(st.text("01", min_size=length, max_size=length)) for _ in range(batch)), **sizes)
    begins = st.lists(st.booleans(), min_size=length, max_size=length)
    rows = [draw(begins) for _ in range(batch)]  # whether a document begins at a token
    return packed(*("".join(chr(97 + sum(row[: index + 1])) for index in range(length)) for row in rows), **sizes)


@examples(60)
@given(drawn_layouts(), st.sampled_from(sorted(DECAYS)), st.integers(1, 6), st.booleans())
def test_any_layout(layout, decay, chunk, is_rotated):
    states, logits = layout.states(torch.float64), decay_logits(decay, layout)
    rotary = Rotary(layout) if is_rotated else None
    expected = results(formula(layout, states, logits, rotary), inputs_of(states, logits))
    for form in (chunk, "parallel", "recurrent"):
        output, _ = run_form(form, states, layout.mask(), logits, rotary and rotary.embeddings)
        check(results(output, inputs_of(states, logits)), expected, 1e-5 if is_rotated else 1e-10)


@all_forms
def test_shapes_without_data(form):
    """On the meta device, where sizes are estimated and operations counted."""
    states = [torch.randn(2, heads, 7, 4, device="meta") for heads in (4, 2, 2)]
    output, state = run_form(form, states, None, torch.zeros(2, device="meta"))
    assert output.shape == (2, 7, 4, 4) and output.device.type == "meta"
    if form != "parallel":
        assert [tuple(part.shape) for part in state] == [(2, 2, 4, 4), (2, 2, 4)]


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
        """Outputs, gradients and the last state are those of one call, wherever the text is cut and whatever the forms."""
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
        numerator, denominator = torch.zeros(1, 2, 4, 4, dtype=torch.float64), torch.zeros(1, 2, 4, dtype=torch.float64)
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

    def test_is_not_changed(self):
        """A call leaves its input state as it was, so that two texts may continue from one state."""
        states = LAYOUTS["causal"].states()
        _, state = run_form(3, states)
        before = [part.clone() for part in state]
        for form in FORMS[1:]:
            run_form(form, states, state=state)
            assert all(map(torch.equal, state, before))


class TestFeatureMap:
    def test_formula(self):
        states = torch.linspace(-30, 10, 401, dtype=torch.float64)
        torch.testing.assert_close(feature_map(states), reference.psi(states), rtol=1e-12, atol=0)

    def test_is_positive_and_exact_in_float32(self):
        """`exp`, not `1 + (exp - 1)`, in which all that is below 1e-7 is rounded to 0."""
        states = torch.linspace(-80, 10, 901)
        assert (feature_map(states) > 0).all()
        torch.testing.assert_close(feature_map(states).double(), reference.psi(states.double()), rtol=2e-5, atol=0)

    def test_gradient(self):
        states = torch.tensor([-90.0, -5.0, -1e-3, 1e-3, 5.0, 1e4], dtype=torch.float64, requires_grad=True)
        gradient = torch.autograd.grad(feature_map(states).sum(), states)[0]
        torch.testing.assert_close(gradient, torch.where(states < 0, states.exp(), 1.0).detach())

    def test_c_takes_the_width_out(self):
        """The constant `c` is 1 for `attention_scaling=1/sqrt(head_dim)`."""
        layout = LAYOUTS["causal"]
        query, key, value = layout.states(torch.float64)
        output, _ = run_form("parallel", (query, key, value), scaling=0.5)  # heads of 4
        weights = (reference.psi(query) @ reference.psi(key).transpose(2, 3)).tril()
        expected = weights / weights.sum(dim=-1, keepdim=True) @ value
        torch.testing.assert_close(output, expected.transpose(1, 2))


class TestNoNaN:
    @all_forms
    @all_decays
    def test_nothing_visible(self, decay, form):
        """Rows that see nothing give exactly 0 and have no gradient."""
        layout = padded("0000000", "0001100")
        states, logits = layout.states(), decay_logits(decay, layout, torch.float32)
        output, *gradients = results(run_form(form, states, layout.mask(), logits)[0], inputs_of(states, logits))
        assert (output[0] == 0).all() and (output[1, :3] == 0).all() and (output[1, 3:] != 0).all()
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert all((gradient[0] == 0).all() and (gradient[1, :, :3] == 0).all() for gradient in gradients[:3])

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
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
    def test_extremes(self, dtype, decay, form):
        layout = LAYOUTS["packed_grouped_queries"]
        signs = torch.tensor([1.0, -1.0])
        for query_sign in signs:
            for key_sign in signs:
                query, key, value = layout.states(dtype)
                states = [
                    (query.detach().abs() * query_sign * 1e3).requires_grad_(),
                    (key.detach().abs() * key_sign * 1e3).requires_grad_(),
                    value,
                ]
                logits = decay_logits(decay, layout, torch.float32)
                for tensor in results(run_form(form, states, layout.mask(), logits)[0], inputs_of(states, logits)):
                    assert tensor.isfinite().all()


class TestLong:
    """32768 tokens in bfloat16, at any rate of decay."""

    LENGTH = 32768
    # Nothing is forgotten, RetNet's rates, nearly nothing, nearly all
    RATES = {"none": 1.0, "fixed": 1 - 2**-5, "fixed_last": 1 - 2**-12, "near_1": 1 - 1e-6, "near_0": 1e-6}

    def test_bfloat16(self):
        generator = torch.Generator().manual_seed(0)
        count = len(self.RATES)
        draw = functools.partial(torch.randn, 1, count, self.LENGTH, 4, generator=generator)
        states = [draw().to(torch.bfloat16).requires_grad_() for _ in range(3)]
        with torch.no_grad():
            states[2].add_(1.0)  # sums that grow with the length
        logits = [math.log(rate / (1 - rate)) if rate < 1 else 40.0 for rate in self.RATES.values()]
        logits = torch.tensor(logits, requires_grad=True)
        log_decay = torch.nn.functional.logsigmoid(logits)
        output, state = linear_attention(*states, None, SCALING, log_decay=log_decay)
        assert output.dtype == torch.bfloat16

        expected = self.in_float64(*(tensor.detach().double()[0].numpy() for tensor in states))
        difference = np.abs(output.detach()[0].transpose(0, 1).double().numpy() - expected)
        scale = np.abs(expected).max(axis=(1, 2))
        rounding = torch.finfo(torch.bfloat16).eps
        assert (difference.max(axis=(1, 2)) <= rounding * scale).all(), dict(zip(self.RATES, difference.max(axis=(1, 2))))

        factors = random_factors(output)
        gradients = torch.autograd.grad(output, [*states, logits], factors)
        wide = [tensor.detach().double().requires_grad_() for tensor in [*states, logits]]
        log_decay = torch.nn.functional.logsigmoid(wide[3])
        exact, last_state = linear_attention(*wide[:3], None, SCALING, log_decay=log_decay)
        for one, other in zip(gradients, torch.autograd.grad(exact, wide, factors.double()), strict=True):
            assert one.isfinite().all()
            assert error(one, other) <= 2 * rounding
        for one, other in zip(state, last_state, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)

    def test_without_decay(self):
        """`None` is the rate 1."""
        states = [torch.randn(1, 1, 3000, 4).to(torch.bfloat16) for _ in range(3)]
        output, _ = linear_attention(*states, None, SCALING)
        other, _ = linear_attention(*states, None, SCALING, log_decay=torch.zeros(1))
        assert torch.equal(output, other)

    def in_float64(self, query, key, value):
        """`(heads, length, head_dim)`, token by token."""
        rate = np.array(list(self.RATES.values()))
        scaled = (SCALING * 2 * query, key)  # heads of 4
        query, key = (np.where(states > 0, states + 1, np.exp(np.minimum(states, 0))) for states in scaled)
        numerator, denominator = np.zeros((len(rate), 4, 4)), np.zeros((len(rate), 4))
        output = np.empty_like(value)
        for index in range(value.shape[1]):
            numerator = rate[:, None, None] * numerator + key[:, index, :, None] * value[:, index, None, :]
            denominator = rate[:, None] * denominator + key[:, index]
            total = (query[:, index] * denominator).sum(axis=-1)
            output[:, index] = np.einsum("hd,hde->he", query[:, index], numerator) / total[:, None]
        return output

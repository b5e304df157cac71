"""Linear attention: its forms against the formula, its state, its cache, its decay, and what it refuses.

Shapes as in `attention_cases`: query and key `(batch, heads, length, head_dim)`, outputs `(batch, query, heads, head_dim)`.
"""

import copy
import functools
import itertools
import math
from types import SimpleNamespace

import entmax
import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import reference
from support.attention_cases import LAYOUTS, SCALING, Layout, causal, error, packed, padded, random_factors, results
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, StaticCache, Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from modeling_nlq import (
    NLQConfig,
    NLQForCausalLM,
    NLQForSequenceClassification,
    attention_nlq,
    backends_nlq,
    cache_nlq,
    linear_nlq,
)
from modeling_nlq.cache_nlq import LinearState, NLQLinearAttentionCacheLayer
from modeling_nlq.linear_nlq import LinearInputs, chunked_form, feature_map, fixed_log_decay, linear_attention, recurrent_form
from modeling_nlq.masking_nlq import make_visibility


def examples(count):
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )


# The rate of each key and value head as a logit, as layers learn it.
DECAYS = {
    "none": None,
    "fixed": [math.log(2 ** (5 + head) - 1) for head in range(3)],
    "learned": [1.2, -0.7, 4.0],
    "forgets_at_once": [-12.0, 0.3, -200.0],
}
all_decays = pytest.mark.parametrize("decay", DECAYS)
# A form by name, or the chunked one by the number of tokens in a chunk.
FORMS = ("parallel", "recurrent", 1, 2, 3, 5, 64)
all_forms = pytest.mark.parametrize("form", FORMS)


def run_form(form, states, mask=None, logits=None, rotary=None, state=None, scaling=SCALING):
    """`linear_attention` by the given form."""
    log_decay = None if logits is None else torch.nn.functional.logsigmoid(logits)
    function = recurrent_form if form == "recurrent" else functools.partial(chunked_form, chunk_size=form)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("chunked_form", "recurrent_form"):  # a single token takes the latter
            patch.setattr(linear_nlq, name, function)
        patch.setattr(linear_nlq, "SEGMENT_SIZE", 6)
        options = {"log_decay": log_decay, "position_embeddings": rotary, "state": state}
        return linear_attention(*states, mask, scaling, form="parallel" if form == "parallel" else "chunked", **options)


def decay_logits(decay, layout, dtype=torch.float64):
    if DECAYS[decay] is None:
        return None
    return torch.tensor(DECAYS[decay][: layout.key_value_heads], dtype=dtype, requires_grad=True)


class Rotary:
    """Rotary positions of one batch, as a layer is given them, and one head's, by the formula."""

    config = NLQConfig(hidden_size=8, num_attention_heads=2, position_embedding="rope", query_projection="linear")

    def __init__(self, layout):
        # Any positions will do: that documents restart is said by the mask
        shift = 5 * torch.arange(layout.batch)[:, None]
        self.positions = torch.arange(layout.query_length) + shift
        self.embeddings = LlamaRotaryEmbedding(self.config)(torch.zeros(1, dtype=torch.float64), self.positions)

    def turn(self, row):
        return functools.partial(reference.rotate, positions=self.positions[row].double(), config=self.config)


def formula(layout, states, logits=None, rotary=None, scaling=SCALING):
    """The output `(batch, query, heads, head_dim)`, head by head from `reference.py`."""
    query, key, value = (tensor.double() for tensor in states)
    group = layout.heads // layout.key_value_heads
    rows = []
    for row in range(layout.batch):
        heads = []
        for head in range(layout.heads):
            decay = 1.0 if logits is None else reference.sigmoid(logits.double()[head // group])
            states_of_head = (query[row, head], key[row, head // group], value[row, head // group])
            turn = None if rotary is None else rotary.turn(row)
            heads.append(reference.linear_attention(*states_of_head, layout.visible[row, head], scaling, decay, turn)[0])
        rows.append(torch.stack(heads, dim=1))
    # Also what nothing is seen of has a gradient, of 0
    return torch.stack(rows) + 0.0 * sum(tensor.sum() for tensor in inputs_of(states, logits))


def inputs_of(states, logits):
    return states if logits is None else [*states, logits]


def check(actual, expected, tolerance):
    for name, one, other in zip(("output", "query", "key", "value", "decay"), actual, expected, strict=False):
        assert one.shape == other.shape, name
        assert one.isfinite().all(), name
        # Where nearly all is forgotten, the gradients of queries and rates are differences of nearly equal numbers
        difference = (one.double() - other.double()).abs().max().item() / max(1.0, other.abs().max().item())
        assert difference <= tolerance, f"{name}: {difference:.2e}"


def causal_layout(length, **sizes):
    return Layout(causal, query_length=length, key_length=length, **sizes)


# Those with as many keys as queries, and no mask of pairs.
SELF_LAYOUTS = {
    name: layout
    for name, layout in LAYOUTS.items()
    if layout.query_length == layout.key_length and not isinstance(layout.mask(), torch.Tensor)
} | {"documents_and_chunks_end_together": packed("aaabbb", "aaaaab"), "long_hole": padded("110000000011", "000000011111")}
self_layouts = pytest.mark.parametrize("layout", SELF_LAYOUTS.values(), ids=SELF_LAYOUTS)


class TestForms:
    """Outputs and gradients of the three forms are those of the formula."""

    @pytest.mark.parametrize("positions", ["none", "rope"])
    @self_layouts
    @all_decays
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

    @all_forms
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
    @all_decays
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

    @pytest.mark.parametrize("kind", ["padding", "packed"])
    @all_decays
    @all_forms
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
    """What is handed from call to call."""

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
        """Whoever keeps a state, for a second text with the same beginning, finds it as it was."""
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
        """With `attention_scaling=1/sqrt(head_dim)`, `c` is 1."""
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


VOCABULARY = 13
MODELS = {
    "linear": {"attention_activation": "linear_attention"},
    "fixed": {"attention_activation": "linear_attention", "linear_attention_decay": "fixed", "position_embedding": "rope"},
    "learned": {
        "attention_activation": "linear_attention",
        "linear_attention_decay": "learned",
        "num_key_value_heads": 2,
    },
    "linear_first": {
        "per_layer_config": {0: {"attention_activation": "linear_attention", "linear_attention_decay": "learned"}},
    },
    "linear_last": {
        "attention_activation": "sigmoid",
        "position_embedding": "rope",
        "per_layer_config": {1: {"attention_activation": "linear_attention", "linear_attention_decay": "fixed"}},
    },
}
all_models = pytest.mark.parametrize("switches", MODELS.values(), ids=MODELS)
BOTH_CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=24),
}
both_caches = pytest.mark.parametrize("make_cache", BOTH_CACHES.values(), ids=BOTH_CACHES)


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (2, 9))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(linear_nlq, "SEGMENT_SIZE", 6)
    monkeypatch.setattr(linear_nlq, "chunked_form", functools.partial(chunked_form, chunk_size=3))


class TestDecay:
    def test_fixed_rates_are_retnets(self):
        expected = [1 - 2.0 ** (-5 - head) for head in range(8)]
        assert fixed_log_decay(8).exp().tolist() == pytest.approx(expected, rel=1e-15)
        assert 1 - expected[0] == 1 / 32

    @pytest.mark.parametrize("heads", [1, 8, 64, 128])
    def test_learned_rates_begin_as_the_fixed_ones(self, heads):
        switches = {"attention_activation": "linear_attention", "linear_attention_decay": "learned"}
        sizes = {"vocab_size": 5, "num_hidden_layers": 1, "num_attention_heads": heads, "hidden_size": 2 * heads}
        model = NLQForCausalLM(NLQConfig(**sizes, **switches))
        bias = model.model.layers[0].self_attn.decay_bias
        # logit(1 - 2^-k) = log(2^k - 1)
        k = 5 + torch.arange(heads, dtype=torch.float64)
        torch.testing.assert_close(bias.double(), k * math.log(2) + torch.log1p(-torch.exp2(-k)), rtol=1e-6, atol=1e-6)
        assert (model.model.layers[0].self_attn.log_decay < 0).all()

    def test_missing_from_a_checkpoint(self, make_model, tmp_path, tokens):
        """A decay switched on while loading starts as in a new model."""
        make_model(attention_activation="linear_attention").save_pretrained(tmp_path)
        loaded = NLQForCausalLM.from_pretrained(tmp_path, linear_attention_decay="learned")
        fixed = NLQForCausalLM.from_pretrained(tmp_path, linear_attention_decay="fixed")
        torch.testing.assert_close(loaded(tokens).logits, fixed(tokens).logits)

    def test_parameters(self, make_model):
        shapes = {kind: self.biases(make_model(**MODELS[kind])) for kind in MODELS}
        assert shapes == {"linear": [], "fixed": [], "learned": [(2,), (2,)], "linear_first": [(4,)], "linear_last": []}

    @staticmethod
    def biases(model):
        return [tuple(tensor.shape) for name, tensor in model.named_parameters() if name.endswith("decay_bias")]

    def test_stock_trainer_does_not_decay_it(self, make_model, tmp_path):
        model = make_model(**MODELS["linear_first"])
        trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
        decayed = set(trainer.get_decay_parameter_names(model))
        assert decayed == {name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.ndim >= 2}
        assert "model.layers.0.self_attn.decay_bias" in dict(model.named_parameters())

    def test_is_learned(self, make_model, tokens):
        model = make_model(**MODELS["learned"]).train()
        before = [layer.self_attn.decay_bias.detach().clone() for layer in model.model.layers]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        for layer, bias in zip(model.model.layers, before):
            assert (layer.self_attn.decay_bias != bias).all()

    def test_a_layer_without_it_says_so(self, make_model, tokens):
        """Decay for all layers is that of the linear ones: the others say `None`, as with sinks."""
        layers = {0: {"attention_activation": "softmax", "linear_attention_decay": None}}
        switches = {"attention_activation": "linear_attention", "linear_attention_decay": "learned"}
        model = make_model(**switches, per_layer_config=layers)
        assert self.biases(model) == [(4,)]
        assert model(tokens).logits.isfinite().all()


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.usefixtures("small_chunks")
class TestTraining:
    @all_models
    @pytest.mark.parametrize("implementation", ["eager", "nlq"])
    def test_with_a_cache(self, make_model, switches, implementation, tokens):
        """A cache that nobody uses changes no gradient."""
        model = make_model(torch.float64, implementation, **switches).train()
        outputs = model(tokens, labels=tokens, use_cache=True)
        assert outputs.past_key_values.get_seq_length() == 9
        expected = model(tokens, labels=tokens, use_cache=False)
        assert expected.past_key_values is None
        torch.testing.assert_close(gradients(model, outputs.loss), gradients(model, expected.loss), rtol=1e-9, atol=1e-9)

    @all_models
    def test_over_two_calls(self, make_model, switches, tokens):
        """The second half's loss reaches the first half through the cache."""
        model = make_model(torch.float64, "nlq", **switches).train()
        full = model(tokens, use_cache=False).logits
        for lengths in ([5, 4], [8, 1], [1, 8], [3, 1, 5]):
            cache = DynamicCache(config=model.config)
            logits = [model(part, past_key_values=cache).logits for part in tokens.split(lengths, dim=1)]
            torch.testing.assert_close(torch.cat(logits, dim=1), full, rtol=1e-9, atol=1e-9)
            last = logits[-1].square().sum()
            expected = full[:, -lengths[-1] :].square().sum()
            torch.testing.assert_close(
                gradients(model, last),
                torch.autograd.grad(expected, list(model.parameters()), retain_graph=True),
                rtol=1e-9,
                atol=1e-9,
            )

    @all_models
    def test_autocast(self, make_model, switches, tokens):
        model = make_model(implementation="nlq", **switches).train()
        expected = model(tokens, labels=tokens)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(tokens, labels=tokens)
            heads = [torch.randn(2, 4, 9, 4).to(torch.bfloat16) for _ in range(3)]
            inside, *states = linear_attention(*heads, None, 0.5)
        outside, *other_states = linear_attention(*heads, None, 0.5)
        assert inside.dtype == torch.bfloat16 and torch.equal(inside, outside)
        assert all(map(torch.equal, *states, *other_states)), "sums in less than float32"
        assert (outputs.loss - expected.loss).abs() < 0.03 * expected.loss
        for one, other in zip(gradients(model, outputs.loss), gradients(model, expected.loss)):
            assert one.dtype == torch.float32
            assert one.isfinite().all()
            assert (one - other).norm() <= 0.1 * other.norm() + 1e-3

    @all_models
    def test_autocast_with_a_cache(self, make_model, switches, tokens):
        """The state stays in float32, and decoding agrees with one pass."""
        model = make_model(implementation="nlq", **switches)
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = model(tokens, use_cache=False).logits
            actual = torch.cat([model(part, past_key_values=cache).logits for part in tokens.split([4, 1, 4], 1)], dim=1)
        assert error(actual, expected) < 0.03
        for layer in linear_layers(cache):
            assert all(part.dtype == torch.float32 for part in layer.get_state())

    def test_model_in_bfloat16(self, make_model, tokens):
        model = make_model(implementation="nlq", **MODELS["learned"])
        expected = model(tokens).logits
        actual = model.to(torch.bfloat16)(tokens).logits
        assert actual.dtype == torch.bfloat16
        assert error(actual, expected) < 0.05


def linear_layers(cache):
    return [layer for layer in cache.layers if isinstance(layer, NLQLinearAttentionCacheLayer)]


def state_bytes(layer):
    return sum(part.untyped_storage().nbytes() for part in layer.get_state())


@pytest.mark.usefixtures("small_chunks")
class TestCache:
    @staticmethod
    @torch.no_grad()
    def fill(model, make_cache, tokens):
        cache = make_cache(model)
        model(tokens, past_key_values=cache)
        return cache

    @all_models
    @both_caches
    def test_counts_tokens(self, make_model, switches, make_cache, tokens):
        model = make_model(**switches)
        cache = make_cache(model)
        assert cache.get_seq_length() == 0
        with torch.no_grad():
            for seen, part in zip((4, 5, 9), tokens.split([4, 1, 4], dim=1)):
                model(part, past_key_values=cache)
                assert [int(cache.get_seq_length(index)) for index in range(2)] == [seen, seen]
        sizes = {tuple(map(int, cache.get_mask_sizes(3, index))) for index in range(2)}
        assert sizes == {(24, 0)} if make_cache is BOTH_CACHES["static"] else sizes == {(12, 0)}
        assert cache.is_compileable == (make_cache is BOTH_CACHES["static"])
        assert cache.get_max_length() == (24 if make_cache is BOTH_CACHES["static"] else -1)
        assert cache.is_croppable is False

    @pytest.mark.parametrize("kind, cache_name", [(kind, name) for kind in MODELS for name in BOTH_CACHES])
    @pytest.mark.parametrize("operation", ["reorder", "repeat", "select", "select_one", "select_by_mask"])
    def test_rows(self, make_model, kind, cache_name, operation, tokens):
        """Rows moved in the cache go on as those rows do."""
        make_cache = BOTH_CACHES[cache_name]
        if operation != "reorder" and cache_name == "static" and kind in ("linear_first", "linear_last"):
            pytest.skip("Transformers' static keys and values know no such operation")
        model = make_model(implementation="nlq", **MODELS[kind])
        cache = self.fill(model, make_cache, tokens[:, :5])
        rows = {
            "reorder": [1, 0],
            "repeat": [0, 0, 0, 1, 1, 1],
            "select": [1, 1, 0],
            "select_one": [1],
            "select_by_mask": [1],
        }[operation]
        if operation == "reorder":
            cache.reorder_cache(torch.tensor(rows))
        elif operation == "repeat":
            cache.batch_repeat_interleave(3)
        elif operation == "select_by_mask":
            cache.batch_select_indices(torch.tensor([False, True]))
        else:
            cache.batch_select_indices(torch.tensor(rows))
        with torch.no_grad():
            actual = [model(part, past_key_values=cache).logits for part in tokens[rows, 5:].split([3, 1], dim=1)]
            expected = model(tokens[rows], use_cache=False).logits[:, 5:]
        torch.testing.assert_close(torch.cat(actual, dim=1), expected, rtol=1e-4, atol=1e-4)

    @both_caches
    def test_operations_on_an_empty_cache(self, make_model, make_cache, tokens):
        """Generation does them before the first pass."""
        model = make_model(**MODELS["linear"])
        cache = make_cache(model)
        cache.reset()
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0]))
        cache.reorder_cache(torch.tensor([0]))
        cache.crop(0)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens, past_key_values=cache).logits, model(tokens, use_cache=False).logits)

    # Transformers' dynamic keys and values stay where they are after a reset, as zeros
    @pytest.mark.parametrize(
        "kind, cache_name", [*((kind, "static") for kind in MODELS), *((kind, "dynamic") for kind in ("linear", "learned"))]
    )
    def test_reset(self, make_model, kind, cache_name, tokens):
        model = make_model(implementation="nlq", **MODELS[kind])
        cache = self.fill(model, BOTH_CACHES[cache_name], tokens.flip(1))
        for _ in range(2):
            cache.reset()
            assert [int(cache.get_seq_length(index)) for index in range(2)] == [0, 0]
            with torch.no_grad():
                expected = model(tokens, use_cache=False).logits
                actual = [model(part, past_key_values=cache).logits for part in tokens.split([1, 8], dim=1)]
            torch.testing.assert_close(torch.cat(actual, dim=1), expected, rtol=1e-4, atol=1e-4)

    def test_reset_leaves_the_past_alone(self, make_model, tokens):
        """Gradients of what was computed before do not pass through what comes after."""
        model = make_model(**MODELS["learned"]).train()
        cache = DynamicCache(config=model.config)
        model(tokens[:, :8], past_key_values=cache)
        loss = model(tokens[:, 8:], past_key_values=cache).logits.square().sum()
        cache.reset()
        model(tokens, past_key_values=cache)
        assert all(gradient.isfinite().all() for gradient in gradients(model, loss))

    @all_models
    @both_caches
    def test_one_beginning_for_many(self, make_model, switches, make_cache, tokens):
        """A copied cache goes on by itself, and so does the original."""
        model = make_model(implementation="nlq", **switches)
        prefix = self.fill(model, make_cache, tokens[:, :5])
        for ending in (tokens[:, 5:], tokens[:, 5:].flip(1), tokens[:, 5:6]):
            cache = copy.deepcopy(prefix)
            with torch.no_grad():
                actual = model(ending, past_key_values=cache).logits
                expected = model(torch.cat([tokens[:, :5], ending], dim=1), use_cache=False).logits[:, 5:]
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            assert int(prefix.get_seq_length()) == 5

    @both_caches
    def test_memory_is_constant(self, make_model, make_cache):
        for switches in MODELS.values():
            model = make_model(implementation="nlq", **switches)
            cache, sizes = make_cache(model), []
            with torch.no_grad():
                for length in (1, 7, 1, 14):
                    model(torch.randint(VOCABULARY, (1, length)), past_key_values=cache)
                    sizes.append([state_bytes(layer) for layer in linear_layers(cache)])
            assert all(size == sizes[0] for size in sizes)
            heads = model.config.num_key_value_heads
            assert set(sizes[0]) == {heads * (4 * 4 + 4) * 4}  # a square and a row for each head, in float32
            assert all(layer.keys is None and layer.values is None for layer in linear_layers(cache))

    def test_keeps_nothing_else_alive(self, make_model):
        """No view of a longer tensor, and without gradients no graph."""
        model = make_model(**MODELS["learned"], max_position_embeddings=2000)
        with torch.no_grad():
            cache = model(torch.randint(VOCABULARY, (1, 2000))).past_key_values
        for layer in linear_layers(cache):
            assert state_bytes(layer) == 2 * (4 * 4 + 4) * 4
            assert all(part.grad_fn is None for part in layer.get_state())

    def test_takes_no_keys(self, make_model):
        cache = DynamicCache(config=make_model(**MODELS["linear"]).config)
        with pytest.raises(
            RuntimeError, match="attention_activation='linear_attention' keeps a state, and neither keys nor values"
        ):
            cache.update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), 0)

    def test_layers(self, make_model):
        """One kind of layer for each; a model without linear layers is what it was."""
        config = make_model(**MODELS["linear_first"]).config
        assert config.layer_types == [cache_nlq.LAYER_TYPE, "full_attention"]
        assert isinstance(DynamicCache(config=config).layers[0], NLQLinearAttentionCacheLayer)
        assert type(DynamicCache(config=config).layers[1]).__name__ == "DynamicLayer"
        # Absent, not `None`: Transformers asks whether a configuration has it
        assert not hasattr(make_model(attention_activation="sigmoid").config, "layer_types")
        assert "layer_types" not in config.to_dict()

    @all_models
    def test_conversation(self, make_model, switches):
        """`generate` goes on with the cache it returned, and takes a prompt in chunks."""
        model = make_model(implementation="nlq", vocab_size=31, attention_scaling=2.0, tie_word_embeddings=False, **switches)
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 4, "return_dict_in_generate": True}
        first = model.generate(torch.tensor([[3, 1, 4, 1, 5]]), **options)
        asked = torch.cat([first.sequences, torch.tensor([[9, 2, 6]])], dim=1)
        again = model.generate(asked, past_key_values=first.past_key_values, **options)
        expected = model.generate(asked, use_cache=False, **options)
        assert torch.equal(again.sequences, expected.sequences)
        chunks = model.generate(asked, prefill_chunk_size=4, **options)
        assert torch.equal(chunks.sequences, expected.sequences)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="Transformers offloads from CUDA only")
    @all_models
    def test_offloaded(self, make_model, switches, tokens):
        model = make_model(implementation="nlq", **switches).cuda()
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}
        expected = model.generate(tokens.cuda(), **options)
        assert torch.equal(model.generate(tokens.cuda(), cache_implementation="offloaded", **options), expected)


class TestMasks:
    """What generation with a static cache may pass: a mask for each type of layer."""

    @all_models
    def test_dictionary(self, make_model, switches, tokens):
        model = make_model(**switches)
        mask = torch.ones_like(tokens)
        mask[1, :4] = 0
        expected = model(tokens, attention_mask=mask).logits
        types = model.config.layer_types
        for masks in (dict.fromkeys(types, mask), {types[0]: mask}, {types[0]: None, types[1]: mask}):
            assert torch.equal(model(tokens, attention_mask=masks).logits, expected)
        for masks in (dict.fromkeys(types), {}):
            assert torch.equal(model(tokens, attention_mask=masks).logits, model(tokens).logits)

    @pytest.mark.parametrize("switches", [{}, {"attention_activation": "sigmoid"}], ids=["softmax", "sigmoid"])
    def test_dictionary_of_dense_masks(self, make_model, switches, tokens):
        model = make_model(**switches)
        visible = (torch.rand(2, 1, 9, 9) < 0.7).tril()
        expected = model(tokens, attention_mask=visible).logits
        assert torch.equal(model(tokens, attention_mask={"full_attention": visible}).logits, expected)

    def test_dense_mask_is_refused(self, make_model, tokens):
        visible = torch.ones(2, 1, 9, 9).tril().bool()
        message = (
            r"attention_activation='linear_attention' \(layer 1\) takes no 4-D attention_mask.*padding mask.*another activation"
        )
        for implementation in ("eager", "nlq"):
            model = make_model(implementation=implementation, **MODELS["linear_last"])
            for mask in (visible, {"full_attention": visible, cache_nlq.LAYER_TYPE: None}):
                with pytest.raises(ValueError, match=message):
                    model(tokens, attention_mask=mask)


class TestRefusals:
    NO_WEIGHTS = (
        r"output_attentions=True: attention_activation='linear_attention' \(layer {}\) has no weights .*leave output_attentions"
    )

    @pytest.mark.parametrize("implementation", ["eager", "nlq"])
    def test_output_attentions(self, make_model, implementation, tokens):
        for kind, layer in (("linear", 0), ("linear_first", 0), ("linear_last", 1)):
            model = make_model(implementation=implementation, **MODELS[kind])
            with pytest.raises(ValueError, match=self.NO_WEIGHTS.format(layer)):
                model(tokens, output_attentions=True)
            model.config.output_attentions = True
            with pytest.raises(ValueError, match=self.NO_WEIGHTS.format(layer)):
                model(tokens)
            with pytest.raises(ValueError, match=self.NO_WEIGHTS.format(layer)):
                model.generate(tokens, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
            assert model(tokens, output_attentions=False).logits.isfinite().all()

    @pytest.mark.parametrize("kind", ["linear", "linear_first"])
    def test_output_attentions_in_the_configuration(self, kind, tokens):
        """Said when the model is made, or at the latest when it runs."""
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        with pytest.raises((ValueError, StrictDataclassError), match=self.NO_WEIGHTS.format("0.*")):
            NLQForCausalLM(NLQConfig(**sizes, **MODELS[kind], output_attentions=True))(tokens)

    def test_other_layers_show_theirs(self, make_model, tokens):
        """Nothing is refused to a model without linear layers."""
        assert make_model(attention_activation="sigmoid")(tokens, output_attentions=True).attentions[0].shape == (2, 4, 9, 9)

    @pytest.mark.parametrize("kind", ["linear", "linear_first", "linear_last"])
    @pytest.mark.parametrize("how", ["prompt_lookup", "assistant", "linear_assistant"])
    def test_assisted_decoding(self, make_model, kind, how, tokens):
        linear, softmax = make_model(**MODELS[kind]), make_model(num_hidden_layers=1)
        prompt = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        with pytest.raises((ValueError, RuntimeError)) as caught:
            if how == "prompt_lookup":
                linear.generate(prompt, prompt_lookup_num_tokens=3, **options)
            elif how == "assistant":
                linear.generate(prompt, assistant_model=softmax, **options)
            else:
                softmax.generate(prompt, assistant_model=linear, **options)
        message = str(caught.value)
        assert "attention_activation='linear_attention'" in message
        assert "cannot go back" in message
        assert "generate without assistant_model and prompt_lookup_num_tokens" in message

    @both_caches
    def test_crop(self, make_model, make_cache, tokens):
        model = make_model(**MODELS["linear"])
        cache = make_cache(model)
        with torch.no_grad():
            model(tokens, past_key_values=cache)
            for count in (-1, 3):
                with pytest.raises(RuntimeError, match=r"attention_activation='linear_attention': the state .* cannot go back"):
                    cache.crop(count)
            cache.crop(0)
        assert int(cache.get_seq_length()) == 9

    @pytest.mark.parametrize("kind", MODELS)
    def test_cache_that_does_not_know_the_layer(self, make_model, kind, tokens):
        model = make_model(**MODELS[kind])
        layer = 1 if kind == "linear_last" else 0
        message = (
            rf"attention_activation='linear_attention' \(layer {layer}\) needs a cache that knows it"
            r".*DynamicCache\(config=model.config\)"
        )
        softmax = make_model()
        for cache in (
            DynamicCache(),
            DynamicCache(config=softmax.config),
            StaticCache(config=softmax.config, max_cache_len=12),
        ):
            with pytest.raises(ValueError, match=message):
                model(tokens, past_key_values=cache)

    def test_cache_of_a_linear_model_elsewhere(self, make_model, tokens):
        cache = DynamicCache(config=make_model(**MODELS["linear"]).config)
        with pytest.raises(RuntimeError, match="keeps a state, and neither keys nor values"):
            make_model()(tokens, past_key_values=cache)

    @pytest.mark.parametrize("kind", ["linear", "learned", "linear_first", "linear_last"])
    @pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flex_attention", "nlq_tiled"])
    def test_other_backends(self, make_model, kind, name, tokens):
        layers = {"linear_first": "0", "linear_last": "1"}.get(kind, "0(, 1)?")
        # Of a hybrid the first layer that a backend cannot compute is named, be it linear or not
        message = (
            rf"'{name}' cannot compute attention_activation='(linear' \(layer {layers}\)|sigmoid'|softmax').*use one of nlq"
        )
        with pytest.raises(ValueError, match=message):
            make_model(implementation=name, **MODELS[kind])
        model = make_model(**MODELS[kind])
        with pytest.raises(ValueError, match=message):
            model.set_attn_implementation(name)
        model.config._attn_implementation = name
        with pytest.raises(ValueError, match=message):
            model(tokens)

    def test_choices_can_do_it(self, make_model, tokens):
        """What the message proposes works."""
        expected = make_model(**MODELS["learned"])(tokens).logits
        for name in ("nlq", "eager", "nlq_linear"):
            model = make_model(implementation=name, **MODELS["learned"])
            torch.testing.assert_close(model(tokens).logits, expected)
        with pytest.raises(ValueError, match=r"'nlq_linear' cannot compute attention_activation='softmax' \(layer 1\)"):
            make_model(implementation="nlq_linear", **MODELS["linear_first"])

    def test_automatic(self, make_model):
        for switches in MODELS.values():
            assert make_model(implementation=None, **switches).config._attn_implementation == "nlq"


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("model_class", [NLQForCausalLM, NLQForSequenceClassification], ids=lambda made: made.__name__)
def test_save_and_load(kind, model_class, tmp_path, tokens):
    """The learned rates too, to the last bit."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    # Wide enough an input projection for fewer keys
    model = model_class(NLQConfig(**sizes, **MODELS[kind], pad_token_id=0)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("decay_bias"):
                parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(loaded(tokens)[0], model(tokens)[0])


class TestSparse:
    """Exact zeros, and the package that computes them."""

    @pytest.mark.parametrize("activation", ["sparsemax", "entmax15"])
    def test_exact_zeros(self, make_model, activation, tokens):
        model = make_model(attention_activation=activation, attention_scaling=2.0)
        for weights in model(tokens, output_attentions=True).attentions:
            seen = weights[..., torch.ones(9, 9).tril().bool()]
            assert 0.1 < (seen == 0).float().mean() < 0.95
            assert (weights[..., torch.ones(9, 9).triu(1).bool()] == 0).all()
            torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, 9))

    @pytest.mark.parametrize("activation", ["sparsemax", "entmax15"])
    def test_without_the_package(self, monkeypatch, activation, tokens):
        """The model can be made, loaded and saved; running it says what is missing."""
        monkeypatch.setattr(attention_nlq, "entmax", None)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
        model = NLQForCausalLM(NLQConfig(**sizes, attention_activation=activation))
        with pytest.raises(ImportError, match=f"attention_activation='{activation}' needs the package entmax: pip install"):
            model(tokens)
        assert NLQForCausalLM(NLQConfig(**sizes))(tokens).logits.isfinite().all()

    @pytest.mark.parametrize("activation", ["sparsemax", "entmax15"])
    @pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flex_attention", "nlq_tiled", "nlq_linear"])
    def test_other_backends(self, make_model, activation, name):
        with pytest.raises(
            ValueError, match=rf"'{name}' cannot compute .*'{activation}' \(layer 0, 1\); use one of nlq, eager, nlq_sparse$"
        ):
            make_model(implementation=name, attention_activation=activation)


def gated_linear_attention(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False):
    """What `fla.ops.simple_gla.chunk_simple_gla` computes, token by token: (batch, tokens, heads, width) in and out."""
    state = q.new_zeros(*q.shape[::2], q.shape[3], v.shape[3]) if initial_state is None else initial_state
    outputs = []
    for index in range(q.shape[1]):
        kept = 1.0 if g is None else g[:, index].exp()[..., None, None]
        state = kept * state + k[:, index, :, :, None] * v[:, index, :, None, :]
        outputs.append(scale * (q[:, index, :, None, :] @ state).squeeze(-2))
    return torch.stack(outputs, dim=1), state


class TestKernels:
    """Kernels need CUDA. What is handed to them is tested on functions that compute the same."""

    @pytest.mark.parametrize("rotated", [False, True], ids=["", "rotary"])
    @pytest.mark.parametrize("decay", [None, "learned"])
    def test_what_flash_linear_attention_is_given(self, decay, rotated, monkeypatch):
        monkeypatch.setattr(linear_nlq, "chunk_simple_gla", gated_linear_attention)
        query = torch.randn(2, 2, 3, 7, 4, dtype=torch.float64).exp().requires_grad_()
        key, value = (torch.randn(2, 2, 7, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
        is_valid = torch.ones(2, 7, dtype=torch.bool)
        is_valid[0, :3] = is_valid[1, 5] = False
        logits = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
        positive = key.exp() * is_valid[:, None, :, None]
        inputs = LinearInputs(
            query=query,
            key=positive,
            rotated_query=query.roll(1, -1) if rotated else query,
            rotated_key=positive.roll(1, -1) if rotated else positive,
            value=value,
            count=is_valid.cumsum(-1),
            is_valid=is_valid,
            document_start=None,
            log_decay=None if decay is None else torch.nn.functional.logsigmoid(logits),
        )
        state = LinearState(torch.randn(2, 2, 4, 4, dtype=torch.float64), torch.rand(2, 2, 4, dtype=torch.float64))
        leaves = [query, key, value] if decay is None else [query, key, value, logits]
        for before in (None, state):
            results = []
            for form in (chunked_form, linear_nlq.kernel_form):
                output, after = form(inputs, before)
                total = output.square().sum() + sum(part.square().sum() for part in after)
                results.append([output, *after, *torch.autograd.grad(total, leaves, retain_graph=True)])
            for expected, found in zip(*results):
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)

    @pytest.mark.gpu
    def test_flash_linear_attention(self):
        if linear_nlq.chunk_simple_gla is None:
            pytest.skip("flash-linear-attention is not installed")
        query, key, value = (torch.randn(2, 4, 200, 64, device="cuda") for _ in range(3))
        log_decay = linear_nlq.fixed_log_decay(4).float().cuda()
        expected, _ = linear_attention(*(states.cpu() for states in (query, key, value)), None, 0.125, log_decay.cpu())
        found, _ = linear_attention(query, key, value, None, 0.125, log_decay)
        torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-3)

    @pytest.mark.parametrize("length, is_taken", [(64, True), (128, True), (96, False), (32, False)])
    def test_what_adasplash_is_given(self, length, is_taken, make_model, monkeypatch):
        """Its own assertions, and the formula."""
        calls = []

        def adasplash(query, key, value, is_causal):
            assert is_causal and all(states.is_contiguous() for states in (query, key, value))
            assert query.shape == key.shape == value.shape and query.shape[2] & (query.shape[2] - 1) == 0
            calls.append(query.shape)
            scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(
                ~torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril(), -1e4
            )
            return entmax.entmax15(scores, dim=-1) @ value

        sizes = {"hidden_size": 64, "max_position_embeddings": 128, "num_key_value_heads": 2, "attention_scaling": 0.6}
        model = make_model(attention_activation="entmax15", query_projection="linear", implementation="nlq", **sizes)
        tokens = torch.randint(13, (2, length))
        expected = model(tokens, use_cache=False).logits
        monkeypatch.setattr(backends_nlq, "adasplash", SimpleNamespace(adasplash=adasplash))
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        found = model(tokens, use_cache=False).logits
        monkeypatch.undo()
        assert bool(calls) == is_taken
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.gpu
    def test_adasplash(self, make_model):
        pytest.importorskip("adasplash")
        sizes = {"hidden_size": 64, "max_position_embeddings": 128}
        model = make_model(attention_activation="entmax15", implementation="nlq", **sizes).cuda()
        tokens = torch.randint(13, (2, 128), device="cuda")
        found = model(tokens).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, model(tokens).logits, rtol=1e-2, atol=1e-3)

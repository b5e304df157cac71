"""Properties of every kind of layer and backend, on random models: the formulas, and the invariants of `nlq check`."""

import copy
import io
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import reference
from support.attention_cases import allow_cpp
from support.grids import parametrize_grid
from support.model_cases import KINDS, LINEAR_KINDS, PART_SWITCHES, VOCABULARY, parametrize_switches, random_tokens
from support.properties import examples
from support.random_models import BACKENDS, ROLES, batches, has_case, model_switches
from transformers import DynamicCache, StaticCache

from modeling_nlq.training.checking import INVARIANTS, TOLERANCE


pytestmark = [
    pytest.mark.thin(2),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:_compile flag"),
    pytest.mark.usefixtures("tiny_tiles", "uncompiled", "cpp"),
]

TOLERANCES = {"rtol": 1e-4, "atol": 1e-4}  # float32, logits of order 1 to 10
WITH_WEIGHTS = tuple(kind for kind in KINDS if kind not in LINEAR_KINDS)


@pytest.fixture(scope="module")
def cpp():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield allow_cpp(monkeypatch)


@pytest.fixture(scope="module")
def draw_model(make_model):
    """Returns a function that draws a model: its first layer, or every layer, has a certain kind of attention."""

    def draw(data, kind, implementation, dtype=torch.float64, **options):
        switches = data.draw(model_switches(kind, implementation, **options), label="switches")
        return make_model(dtype, implementation, **switches)

    return draw


def cases(implementations=BACKENDS, allowed=lambda **case: True, **axes):
    """Every kind with one backend at least, and every backend with one kind; the other cases are slow."""
    axes = {"kind": list(KINDS), "implementation": implementations, **axes}
    return parametrize_grid(axes, allowed=lambda **case: has_case(**case) and allowed(**case), strength=1)


def applies(invariant, implementation, **_):
    """Some invariants choose the backend, and `flex_attention` has neither gradients on the CPU nor static caches."""
    if implementation == "eager":
        return True
    of_gradients = (
        "a repeated call",
        "a row of padding alone",
        "training equals",
        "every parameter",
        "a static cache",
    )
    is_flex = implementation == "flex_attention" and invariant.startswith(of_gradients)
    return not is_flex and invariant not in ("every backend equals eager", "a model can be on another device")


class TestRandomModels:
    @pytest.mark.thin(1)  # each has an invariant of its own
    @cases(invariant=list(INVARIANTS), allowed=applies)
    @examples(3, shrinks=False)
    @given(data=st.data())
    def test_invariants_of_nlq_check_hold(self, draw_model, data, invariant, kind, implementation):
        roles = ["decoder"] if INVARIANTS[invariant].needs_decoder else ["decoder", "encoder"]
        model = draw_model(data, kind, implementation, roles=roles)
        length = data.draw(st.integers(max(2, INVARIANTS[invariant].lengths[0]), 7), label="length")
        with torch.no_grad():
            for case, difference in INVARIANTS[invariant].differences(model, length):
                assert difference <= TOLERANCE, case

    @cases()
    @examples(3, shrinks=False)
    @given(data=st.data())
    def test_logits_and_weights_are_those_of_the_formulas(self, draw_model, data, kind, implementation):
        """Inputs are padded or packed. A decoder also runs with a cache, in two calls."""
        model = draw_model(data, kind, implementation, roles=list(ROLES))
        inputs, is_token = data.draw(batches(model.config), label="inputs")
        # FlexAttention keeps sums of weights in float32
        has_float32 = model.config.has_rotary_positions or implementation == "flex_attention"
        reference.check(model, 1e-5 if has_float32 else 1e-8, **inputs)
        if model.config.is_causal and "position_ids" not in inputs:
            with torch.no_grad():
                expected = model(**inputs, use_cache=False).logits
                actual = decode(model, inputs, split(is_token.shape[1], data.draw(boundary_sets, label="boundaries")))
            torch.testing.assert_close(actual[is_token], expected[is_token], rtol=1e-8, atol=1e-8)

    @cases([name for name in (*BACKENDS, "nlq_cpp") if name != "eager"])
    @examples(3, shrinks=False)
    @given(data=st.data())
    def test_outputs_and_gradients_are_those_of_eager(self, draw_model, cpp, data, kind, implementation):
        """The outputs alone of `flex_attention`, which has no gradients on the CPU."""
        if implementation == "nlq_cpp" and not cpp:
            pytest.skip("needs a C++ compiler")
        dtype = torch.float32 if implementation == "nlq_cpp" else torch.float64
        model = draw_model(data, kind, implementation, dtype, roles=list(ROLES))
        inputs, is_token = data.draw(batches(model.config), label="inputs")
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        results = []
        for name in (implementation, "eager"):
            model.set_attn_implementation(name)
            with torch.set_grad_enabled(implementation != "flex_attention"):
                # With a cache, linear layers would take the same form under either name
                logits = model(**inputs, use_cache=False).logits[is_token]
            direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            results.append([logits.detach()])
            if logits.requires_grad:
                loss, parameters = (logits * direction).sum(), list(model.parameters())
                results[-1] += torch.autograd.grad(loss, parameters, materialize_grads=True)
        # FlexAttention has a score bias as two float32 numbers
        tolerance = {"nlq_cpp": 1e-3, "flex_attention": 1e-7}.get(implementation, 1e-8)
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


boundary_sets = st.sets(st.integers(1, 5), max_size=3)


def split(length, boundaries):
    return list(itertools.pairwise(sorted({0, length, *(place for place in boundaries if place < length)})))


def decode(model, inputs, chunks, cache=None):
    """The logits of sequences fed chunk by chunk, with a mask that ends where the chunk does."""
    logits, mask = [], inputs.get("attention_mask")
    for start, end in chunks:
        tokens = {"input_ids": inputs["input_ids"][:, start:end]}
        tokens["attention_mask"] = None if mask is None else mask[:, :end]
        output = model(**{**inputs, **tokens}, past_key_values=cache, use_cache=True)
        cache = output[1]
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


class TestPacking:
    @pytest.mark.parametrize("activation", ["softmax", "relu"])
    def test_packed_positions_with_a_cache_or_a_mask_are_one_text(self, make_model, activation):
        model = make_model(attention_activation=activation)
        input_ids, position_ids = torch.ones(1, 5).long(), torch.tensor([[0, 1, 0, 1, 2]])
        with pytest.raises(ValueError, match="use_cache"):
            model(input_ids, use_cache=True, position_ids=position_ids)
        # With a cache from the caller, each row is one text, because `generate` leaves out a mask of ones
        cached = model(input_ids, past_key_values=DynamicCache(config=model.config), position_ids=position_ids)
        masked = model(input_ids, attention_mask=torch.ones_like(input_ids), position_ids=position_ids)
        assert torch.equal(cached.logits, masked.logits)
        assert model(input_ids, use_cache=False, position_ids=position_ids).past_key_values is None
        # A single document may begin at another position than 0
        late = model(input_ids, position_ids=torch.arange(3, 8)[None], use_cache=True)
        assert late.past_key_values.get_seq_length() == 5

    def test_flash_attention_refuses_a_packed_batch(self, make_model):
        model = make_model()
        model.config._attn_implementation = "flash_attention_2"
        for positions in ([[0, 1, 0, 1], [0, 1, 2, 3]], [[0, 1, 0, 1]]):
            with pytest.raises(ValueError, match="batch"):
                model(torch.ones(2, 4).long(), position_ids=torch.tensor(positions), use_cache=False)


def additive(visible):
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)


def takes_masks(implementation, kind, **_):
    return implementation != "flex_attention" and kind in WITH_WEIGHTS


class TestMasks:
    """A caller's own 4-D masks, which linear layers (`test_linear.py`) and canon layers refuse."""

    @cases(allowed=takes_masks)
    @examples(2, shrinks=False)
    @given(data=st.data(), seed=st.integers(0, 100), mask_kind=st.sampled_from(["boolean", "additive", "integer"]))
    def test_logits_are_those_of_the_formulas(self, draw_model, data, seed, mask_kind, kind, implementation):
        """A mask of its own for each row, with queries that see nothing."""
        # After a ReLU nothing may be left of a head, and its direction is 0/0 in the formula
        fixed = {"canon": None, "sublayer_activation": None, "residual_activation": None}
        model = draw_model(data, kind, implementation, kinds=WITH_WEIGHTS, position_embedding="learned", **fixed)
        generator = torch.Generator().manual_seed(seed)
        input_ids = torch.randint(VOCABULARY, (2, 5), generator=generator)
        visible = (torch.rand(2, 1, 5, 5, generator=generator) < 0.6).tril()
        mask = {"boolean": visible, "integer": visible.long(), "additive": additive(visible)}[mask_kind]
        reference.check(model, 1e-8, input_ids=input_ids, attention_mask=mask, visible=visible)

    @pytest.mark.parametrize("mask_kind", ["boolean", "additive"])
    @cases(allowed=takes_masks)
    def test_mask_of_a_chunk_has_a_column_for_each_key_so_far(self, make_model, kind, implementation, mask_kind):
        model = make_model(implementation=implementation, **KINDS[kind])
        input_ids = torch.randint(VOCABULARY, (2, 6))
        visible = torch.ones(6, 6).tril().bool().repeat(2, 1, 1, 1)
        visible[1, :, 2:, 1] = False
        mask = additive(visible) if mask_kind == "additive" else visible
        with torch.no_grad():
            expected = model(input_ids, attention_mask=mask, use_cache=False).logits
            first = model(input_ids[:, :2], attention_mask=mask[:, :, :2, :2], use_cache=True)
            rest = model(input_ids[:, 2:], attention_mask=mask[:, :, 2:], past_key_values=first.past_key_values)
        torch.testing.assert_close(torch.cat([first.logits, rest.logits], dim=1), expected, **TOLERANCES)

    def test_masks_that_are_refused(self, make_model):
        causal = torch.ones(1, 1, 3, 3).tril().bool()
        biases = torch.full((1, 1, 3, 3), -1.5)
        window = make_model(implementation="nlq", sliding_window=4)
        with pytest.raises(ValueError, match="must have 9 keys"):  # all tokens, or those that are left of them
            window(torch.ones(1, 9).long(), attention_mask=torch.ones(1, 1, 9, 6).tril().bool())
        for activation, implementation, mask, message in (
            *(("softmax", name, biases, "additive biases") for name in ("eager", "sdpa", "nlq")),
            ("relu", "nlq_tiled", biases, "additive biases"),
            *(
                (name, "flex_attention", causal, "flex_attention.* takes no 4-D mask")
                for name in ("squared", "softmax")
            ),
        ):
            model = make_model(attention_activation=activation)
            model.config._attn_implementation = implementation
            with pytest.raises(ValueError, match=message):
                model(torch.ones(1, 3).long(), attention_mask=mask)


CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=12),
}
# A state and keys, whichever counts the tokens
MIXED = {"num_hidden_layers": 3, "per_layer_config": {0: LINEAR_KINDS["linear_learned"], 2: KINDS["sigmoid"]}}


class TestCaches:
    @pytest.mark.thin(4)
    @pytest.mark.parametrize("cache", CACHES)
    @parametrize_switches({**KINDS, **PART_SWITCHES, "mixed": MIXED})
    @torch.no_grad()
    def test_rows_moved_in_a_cache_go_on_as_their_texts_do(self, make_model, switches, cache):
        model, tokens = make_model(torch.float64, "nlq", **switches), random_tokens(3, 7)
        operations = {"reorder_cache": (torch.tensor([1, 2, 0]), [1, 2, 0])}
        if cache == "dynamic":  # Transformers' static keys and values know no other operation
            operations["batch_repeat_interleave"] = (2, [0, 0, 1, 1, 2, 2])
            operations["batch_select_indices"] = (torch.tensor([2, 0, 0]), [2, 0, 0])
        elif "canon" in switches:
            pytest.skip("Transformers' static layers of convolutions cannot be reordered")
        expected = model(tokens, use_cache=False).logits
        for name, (argument, rows) in operations.items():
            filled = CACHES[cache](model)
            model(tokens[:, :4], past_key_values=filled)
            getattr(filled, name)(argument)
            actual = [model(part, past_key_values=filled).logits for part in tokens[rows, 4:].split([2, 1], dim=1)]
            torch.testing.assert_close(torch.cat(actual, dim=1), expected[rows, 4:], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["softmax_sink_learned", "linear_learned", "sigmoid"])
def test_copies_have_parameters_of_their_own(make_model, kind):
    model, input_ids = make_model(implementation="nlq", **KINDS[kind]), random_tokens(2, 7)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    with torch.no_grad():
        expected = model(input_ids).logits
        for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):  # by pickle
            assert other.config._attn_implementation == "nlq"
            assert torch.equal(other(input_ids).logits, expected)
            other.lm_head.weight.zero_()
        assert torch.equal(model(input_ids).logits, expected)

"""Properties of every configuration and backend; hypothesis chooses switches, shapes, masks and chunks."""

import contextlib
import copy
import io
import itertools
import pickle
import tempfile

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from support import reference
from support.attention_cases import NON_NEGATIVE
from support.model_cases import (
    BLOCKS,
    ELEMENTWISE_KINDS,
    LINEAR_KINDS,
    PROJECTIONS,
    ROW_KINDS,
    SOFTMAX_KINDS,
    VOCABULARY,
)
from support.properties import examples
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from modeling_nlq import NLQConfig, NLQForCausalLM
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS, request_of


pytestmark = [
    pytest.mark.thin(6),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:_compile flag"),
    pytest.mark.usefixtures("tiny_tiles", "uncompiled"),
]

TOLERANCES = {"rtol": 1e-4, "atol": 1e-4}  # float32, logits of order 1 to 10

WITHOUT_IDENTITY = ("linear", "bottleneck", "upcycled")
KINDS = SOFTMAX_KINDS | ELEMENTWISE_KINDS | ROW_KINDS | LINEAR_KINDS
WITH_WEIGHTS = tuple(kind for kind in KINDS if kind not in LINEAR_KINDS)
# Which kinds each backend computes on the CPU, where flex_attention knows no sink and no normaliser but the sum.
BACKENDS = {
    "eager": tuple(KINDS),
    "nlq": tuple(KINDS),
    "sdpa": tuple(kind for kind in KINDS if kind.startswith("softmax")),
    "nlq_tiled": tuple(ELEMENTWISE_KINDS),
    "flex_attention": ("softmax", *NON_NEGATIVE),
}
CASES = [(kind, implementation) for implementation, kinds in BACKENDS.items() for kind in kinds]
# Every kind and every backend, most kinds with the backend that `nlq` chooses; the other cases are slow.
QUICK_CASES = {
    *((kind, "nlq") for kind in KINDS if kind not in ("relu_squared", "softplus", "gelu", "linear_fixed")),
    *((kind, "eager") for kind in ("softmax_sink_learned", "sigmoid", "relu_squared", "entmax15", "linear_learned")),
    *(("softmax", "sdpa"), ("softplus", "nlq_tiled"), ("gelu", "nlq_tiled"), ("linear_fixed", "nlq")),
    *(("softmax", "flex_attention"), ("squared", "flex_attention")),
}
# One of each way to compute weights, for properties that do not depend on the activation
FEW_CASES = {
    *((kind, "nlq") for kind in ("softmax_sink_learned", "sigmoid", "entmax15", "linear_learned")),
    *(("softmax", "sdpa"), ("relu", "eager"), ("squared", "flex_attention")),
}


def choose_cases(without=(), kinds=tuple(KINDS), quick=QUICK_CASES):
    """The cases without some backends or kinds; those that are not `quick` are slow."""
    chosen = [case for case in CASES if case[1] not in without and case[0] in kinds]
    return [pytest.param(case, id="-".join(case), marks=[] if case in quick else pytest.mark.slow) for case in chosen]


def cases(**options):
    """The parameters of `draw_model`, as `choose_cases` chooses them."""
    return pytest.mark.parametrize("draw_model", choose_cases(**options), indirect=True)


def model_cases(**options):
    """The same as parameters `kind` and `implementation`."""
    chosen = [pytest.param(*case.values[0], id=case.id, marks=case.marks) for case in choose_cases(**options)]
    return pytest.mark.parametrize("kind, implementation", chosen)


def switches_of(kind, implementation):
    """The switches of a kind, with a normaliser that the backend computes."""
    if implementation == "flex_attention" and kind in NON_NEGATIVE:
        return {**KINDS[kind], "attention_normalization": "sum"}
    return KINDS[kind]


@st.composite
def attention_switches(draw, kind, implementation, key_value_heads):
    """The switches of the scores, weights and heads' outputs of one layer."""
    switches = {
        "query_projection": draw(st.sampled_from(PROJECTIONS)),
        "qk_norm": draw(st.sampled_from([None, None, "rms", "rms_all_heads", "l2"])),
        "sliding_window": None if kind in LINEAR_KINDS else draw(st.sampled_from([None, 2, 3])),
        "attention_gate": draw(st.sampled_from([None, None, "headwise", "elementwise", "value"])),
        "attention_output_activation": draw(st.sampled_from([None, None, "gelu"])),
        "attention_output_scaling": draw(st.sampled_from([None, 0.5])),
        "head_projection": draw(st.booleans()),
        # An absent sink or decay would be inherited from the model.
        "attention_sink": None,
        "linear_attention_decay": None,
        **KINDS[kind],
    }
    if switches["attention_activation"] in ("softmax", "linear_attention", *ROW_KINDS):
        allowed = [None]
    elif implementation == "flex_attention":
        allowed = ["sum"]
    else:
        allowed = [None, "length", "none"] + (["sum"] if kind in NON_NEGATIVE else [])
    switches["attention_normalization"] = draw(st.sampled_from(allowed))
    return {**switches, **draw(attention_parts(switches, key_value_heads, implementation))}


PARTS = {
    # With "fixed", a query that sees itself alone has the output 0, and a norm after it enlarges what rounding leaves
    "exclusive_attention": ("learned",),
    "value_residual": ("fixed", "learned"),
    "attention_length_scaling": ("log",),
    "forget_gate": ("fixed", "learned"),
    "differential_attention": ("v1", "v2"),
    "canon": ("AC", "BD"),
    "selective_attention": (True,),
    "parallax": (True,),
}
ABSENT = {"selective_attention": False, "parallax": False}


@st.composite
def attention_parts(draw, switches, key_value_heads, implementation):
    """Parts that a layer with these switches may have; a third of the layers have none."""
    parts = dict.fromkeys(PARTS) | ABSENT  # an absent one would be inherited from the model
    for name in draw(st.lists(st.sampled_from(tuple(PARTS)), max_size=2)):
        chosen = {**parts, name: draw(st.sampled_from(PARTS[name]))}
        sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": key_value_heads}
        with contextlib.suppress(StrictDataclassError):  # not with these switches
            config = NLQConfig(**sizes, **{**switches, **chosen})
            if implementation == "nlq" or ATTENTION_BACKENDS[implementation].supports_layer(request_of(config)):
                parts = chosen
    return parts


@st.composite
def switch_combinations(draw, kind, implementation, others):
    """The switches of a whole model, whose other layer may be of another kind."""
    key_value_heads = draw(st.sampled_from([4, 2, 1]))
    projections = PROJECTIONS if key_value_heads == 4 else WITHOUT_IDENTITY
    switches = {
        **draw(attention_switches(kind, implementation, key_value_heads)),
        **BLOCKS[draw(st.sampled_from(["design_a", "design_b", "pre", "sandwich", "parallel_output", "llama"]))],
        "num_key_value_heads": key_value_heads,
        "key_projection": draw(st.sampled_from(projections)),
        "value_projection": draw(st.sampled_from(projections)),
        "position_embedding": draw(st.sampled_from(["learned", "rope", "none"])),
        "use_bias": draw(st.booleans()),
        **{
            f"{part}_bias": draw(st.sampled_from([None, True, False]))
            for part in ("query_key_value", "attention_output", "mlp")
        },
    }
    if switches["position_embedding"] == "rope":
        rotated = draw(st.sampled_from([1.0, 0.5]))
        switches["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": rotated}
    if draw(st.booleans()):
        other = draw(st.sampled_from([other for other in BACKENDS[implementation] if other in others]))
        other = draw(attention_switches(other, implementation, key_value_heads))
        if switches["position_embedding"] == "rope":
            other["position_embedding"] = draw(st.sampled_from(["rope", "none"]))
        switches["per_layer_config"] = {draw(st.sampled_from([0, 1])): other}
    return switches


@pytest.fixture(params=choose_cases(), scope="module")
def draw_model(request, make_model):
    """A function that lets hypothesis choose every switch but the activation and sink, and returns the model."""
    kind, implementation = request.param

    def draw(data, others=tuple(KINDS), **options):
        switches = {**data.draw(switch_combinations(kind, implementation, others), label="switches"), **options}
        for layer in switches.get("per_layer_config", {}).values():
            for name in options.keys() & layer.keys():
                del layer[name]
        return make_model(implementation=implementation, **switches)

    return draw


def token_rows(min_rows=1, max_rows=3, min_length=1, max_length=8):
    row = st.lists(st.integers(0, VOCABULARY - 1), min_size=min_length, max_size=max_length)
    return st.lists(row, min_size=min_rows, max_size=max_rows)


def pad(rows, left, extra=0):
    """Rows of tokens padded to the longest, plus `extra`; `left[i]` of row i's padding, at most, goes to its left.

    Returns:
        The tokens, the attention mask, and each row's slice of real tokens.
    """
    length = max(map(len, rows)) + extra
    input_ids, attention_mask, places = torch.full((len(rows), length), 7), torch.zeros(len(rows), length).long(), []
    for index, row in enumerate(rows):
        start = min(left[index % len(left)], length - len(row))
        place = slice(start, start + len(row))
        input_ids[index, place] = torch.tensor(row)
        attention_mask[index, place] = 1
        places.append(place)
    return input_ids, attention_mask, places


# How much of a row's padding goes to its left: none, all, or some.
padding_sides = st.lists(st.sampled_from([0, 100, 1, 2]), min_size=3, max_size=3)


def split(length, boundaries):
    """Chunks `(start, end)` of a sequence of this length."""
    edges = sorted({0, length, *(boundary for boundary in boundaries if boundary < length)})
    return list(itertools.pairwise(edges))


def make_cache(model, length, static):
    """A cache for `length` tokens, with room to spare if it is static; flex_attention takes no static one."""
    if static and model.config._attn_implementation != "flex_attention":
        return StaticCache(config=model.config, max_cache_len=length + 3)
    return DynamicCache(config=model.config)


boundary_sets = st.sets(st.integers(1, 10), max_size=5)


def decode(model, input_ids, chunks, cache, attention_mask=None):
    """The logits of a sequence fed chunk by chunk, with a mask that ends where the chunk does."""
    logits = []
    for start, end in chunks:
        mask = None if attention_mask is None else attention_mask[:, :end]
        output = model(input_ids[:, start:end], attention_mask=mask, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


class TestCachedDecoding:
    """Invariant 1: cached decoding equals the full forward pass."""

    @examples(6)
    @given(st.data(), token_rows(min_length=2), padding_sides, st.integers(0, 2), boundary_sets, st.booleans())
    def test_chunks(self, draw_model, data, rows, left, extra, boundaries, static):
        model = draw_model(data)
        input_ids, attention_mask, places = pad(rows, left, extra)
        length = input_ids.shape[1]
        cache = make_cache(model, length, static)
        with torch.no_grad():
            expected = model(input_ids, attention_mask=attention_mask, use_cache=False).logits
            actual = decode(model, input_ids, split(length, boundaries), cache, attention_mask)
        for index, place in enumerate(places):
            torch.testing.assert_close(actual[index, place], expected[index, place], **TOLERANCES)

    @cases(quick=FEW_CASES)
    @examples(3)
    @given(st.data(), st.integers(2, 10), boundary_sets, st.booleans())
    def test_chunks_without_mask(self, draw_model, data, length, boundaries, static):
        """One token at a time too."""
        boundaries = set(range(length)) if len(boundaries) == 1 else boundaries
        model = draw_model(data)
        input_ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
        cache = make_cache(model, length, static)
        with torch.no_grad():
            expected = model(input_ids, use_cache=False).logits
            actual = decode(model, input_ids, split(length, boundaries), cache)
        torch.testing.assert_close(actual, expected, **TOLERANCES)


class TestPadding:
    """Invariants 2 and 5: a padded row equals the row alone, and a row of padding only is finite."""

    @examples(6)
    @given(st.data(), token_rows(min_rows=2), padding_sides, st.integers(0, 2))
    def test_padded_batch(self, draw_model, data, rows, left, extra):
        model = draw_model(data)
        input_ids, attention_mask, places = pad(rows, left, extra)
        with torch.no_grad():
            padded = model(input_ids, attention_mask=attention_mask).logits
            for index, (row, place) in enumerate(zip(rows, places)):
                alone = model(torch.tensor([row])).logits[0]
                torch.testing.assert_close(padded[index, place], alone, **TOLERANCES)

    @examples(6)
    @given(st.data(), st.lists(st.integers(0, 1), min_size=2, max_size=9).filter(any))
    def test_holes(self, draw_model, data, mask):
        """Padding between tokens counts for as little as padding around them, but a window counts all places."""
        model = draw_model(data, sliding_window=None)
        attention_mask = torch.tensor([mask])
        is_real = attention_mask.bool()
        input_ids = torch.randint(VOCABULARY, is_real.shape, generator=torch.Generator().manual_seed(len(mask)))
        with torch.no_grad():
            padded = model(input_ids, attention_mask=attention_mask).logits[is_real]
            alone = model(input_ids[is_real][None]).logits[0]
        torch.testing.assert_close(padded, alone, **TOLERANCES)

    @examples(3)
    @given(st.data(), st.integers(1, 6))
    def test_row_of_padding_only(self, draw_model, data, length):
        model = draw_model(data)
        heads = []
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0]))
        input_ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
        attention_mask = torch.ones(2, length).long()
        attention_mask[1] = 0
        with torch.no_grad():
            logits = model(input_ids, attention_mask=attention_mask).logits
            assert all((output[1] == 0).all() for output in heads)
            alone = model(input_ids[:1]).logits
        assert len(heads) == 4  # two layers, in two calls
        assert logits.isfinite().all()
        torch.testing.assert_close(logits[:1], alone, **TOLERANCES)


@st.composite
def packed_batches(draw):
    """A batch of rows of documents: their tokens, and position ids that restart, all rows equally long."""
    length = draw(st.integers(2, 9))
    generator = torch.Generator().manual_seed(length)
    documents, position_ids = [], []
    for _ in range(draw(st.integers(1, 2))):
        lengths = [end - start for start, end in split(length, draw(boundary_sets))]
        documents.append([torch.randint(VOCABULARY, (1, size), generator=generator) for size in lengths])
        position_ids.append(torch.cat([torch.arange(size) for size in lengths]))
    return documents, torch.stack(position_ids)


class TestPacking:
    """Invariant 3: packed documents equal separate ones."""

    @examples(6)
    @given(st.data(), packed_batches())
    def test_packed_documents(self, draw_model, data, batch):
        documents, position_ids = batch
        model = draw_model(data)
        input_ids = torch.stack([torch.cat(row, dim=1)[0] for row in documents])
        with torch.no_grad():
            packed = model(input_ids, position_ids=position_ids)
            for logits, row in zip(packed.logits, documents):
                separate = torch.cat([model(document).logits[0] for document in row])
                torch.testing.assert_close(logits, separate, **TOLERANCES)
        is_packed = any(len(row) > 1 for row in documents)
        assert (packed.past_key_values is None) == is_packed

    @pytest.mark.parametrize("activation", ["softmax", "relu"])
    def test_refuses_a_cache(self, make_model, activation):
        model = make_model(attention_activation=activation)
        input_ids, position_ids = torch.ones(1, 5).long(), torch.tensor([[0, 1, 0, 1, 2]])
        with pytest.raises(ValueError, match="use_cache"):
            model(input_ids, use_cache=True, position_ids=position_ids)
        # A cache that is given says that each row is one text, as in Transformers, whose `generate` leaves out a mask
        # of ones
        cached = model(input_ids, past_key_values=DynamicCache(config=model.config), position_ids=position_ids)
        masked = model(input_ids, attention_mask=torch.ones_like(input_ids), position_ids=position_ids)
        assert torch.equal(cached.logits, masked.logits)
        assert model(input_ids, use_cache=False, position_ids=position_ids).past_key_values is None

    @cases(quick=FEW_CASES)
    @examples(3)
    @given(st.data(), packed_batches())
    def test_a_given_mask_means_one_text(self, draw_model, data, batch):
        """A mask of ones too: otherwise a row's result would depend on the padding of the rows beside it."""
        documents, position_ids = batch
        model = draw_model(data)
        row, positions = torch.cat(documents[0], dim=1), position_ids[:1]
        mask = torch.ones_like(row)
        padded = torch.cat([mask, mask])
        padded[1, 0] = 0
        with torch.no_grad():
            alone = model(row, attention_mask=mask, position_ids=positions)
            beside = model(torch.cat([row, row]), attention_mask=padded, position_ids=positions)
        assert alone.past_key_values.get_seq_length() == row.shape[1]
        torch.testing.assert_close(beside.logits[:1], alone.logits, **TOLERANCES)

    def test_positions_that_only_begin_late(self, make_model):
        """One document whose first position is not 0 is no packing, and is cached."""
        model = make_model()
        output = model(torch.ones(1, 4).long(), position_ids=torch.tensor([[3, 4, 5, 6]]), use_cache=True)
        assert output.past_key_values.get_seq_length() == 4

    def test_flash_attention_refuses_a_packed_batch(self, make_model):
        model = make_model()
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(ValueError, match="batch"):
            model(torch.ones(2, 4).long(), position_ids=torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]), use_cache=False)
        with pytest.raises(ValueError, match="batch"):
            model(torch.ones(2, 4).long(), position_ids=torch.tensor([[0, 1, 0, 1]]), use_cache=False)


@st.composite
def padded_or_packed(draw):
    """Inputs of a model, and which of their tokens are real."""
    if draw(st.booleans()):
        documents, position_ids = draw(packed_batches())
        input_ids = torch.stack([torch.cat(row, dim=1)[0] for row in documents])
        return {"input_ids": input_ids, "position_ids": position_ids}, torch.ones_like(input_ids).bool()
    input_ids, attention_mask, _ = pad(draw(token_rows()), draw(padding_sides))
    return {"input_ids": input_ids, "attention_mask": attention_mask}, attention_mask.bool()


class TestBackends:
    """Invariant 4: every backend equals eager, in outputs and gradients."""

    @cases(without=["eager", "flex_attention"])
    @examples(6)
    @given(st.data(), padded_or_packed())
    def test_gradients(self, draw_model, data, batch):
        inputs, is_real = batch
        model = draw_model(data, dtype=torch.float64)
        results = []
        for implementation in (model.config._attn_implementation, "eager"):
            model.set_attn_implementation(implementation)
            # With a cache, linear layers would take the same form under either name
            logits = model(**inputs, use_cache=False).logits[is_real]
            direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
            gradients = torch.autograd.grad(
                (logits * direction).sum(), list(model.parameters()), materialize_grads=True
            )
            results.append((logits.detach(), gradients))
        torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)

    @cases(without=["eager", "sdpa", "nlq", "nlq_tiled"])
    @examples(6)
    @given(st.data(), padded_or_packed())
    def test_outputs(self, draw_model, data, batch):
        """flex_attention has no gradients on the CPU."""
        inputs, is_real = batch
        model = draw_model(data)
        with torch.no_grad():
            actual = model(**inputs).logits
            model.set_attn_implementation("eager")
            expected = model(**inputs).logits
        torch.testing.assert_close(actual[is_real], expected[is_real], **TOLERANCES)


class TestCausality:
    """Invariant 6: changing a token changes no logit before it."""

    @examples(4)
    @given(st.data(), st.integers(2, 9))
    def test_future_is_invisible(self, draw_model, data, length):
        model = draw_model(data)
        changed_at = data.draw(st.integers(0, length - 1))
        input_ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
        changed_ids = input_ids.clone()
        changed_ids[0, changed_at] = (changed_ids[0, changed_at] + 1) % VOCABULARY
        with torch.no_grad():
            before, after = model(input_ids).logits[0], model(changed_ids).logits[0]
        torch.testing.assert_close(after[:changed_at], before[:changed_at], rtol=0, atol=0)
        assert not torch.equal(after[changed_at], before[changed_at])


class TestSaving:
    """Invariant 7: loading gives back the same bits."""

    @cases(quick=FEW_CASES)
    @examples(2)
    @given(st.data(), st.booleans())
    def test_save_and_load(self, draw_model, data, tied):
        model = draw_model(data, tie_word_embeddings=tied)
        input_ids = torch.arange(9)[None]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = [NLQForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)]
        with torch.no_grad():
            expected = model(input_ids).logits
        saving_adds = {"_name_or_path", "architectures", "dtype"}
        for other in loaded:
            assert type(other) is NLQForCausalLM
            before, after = model.config.to_dict(), other.config.to_dict()
            assert {name for name in before | after if before.get(name) != after.get(name)} <= saving_adds
            state = other.state_dict()
            assert state.keys() == model.state_dict().keys()
            for name, tensor in model.state_dict().items():
                assert torch.equal(state[name], tensor), name
            other.set_attn_implementation(model.config._attn_implementation)
            with torch.no_grad():
                assert torch.equal(other(input_ids).logits, expected)


def additive(visible):
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)


class TestMasks:
    """A caller's own 4-D masks, which linear layers (`test_linear.py`) and canon layers refuse."""

    @cases(without=["flex_attention"], kinds=WITH_WEIGHTS)
    @examples(4)
    @given(st.data(), st.integers(0, 100), st.sampled_from(["boolean", "additive", "integer"]))
    def test_equals_the_reference(self, draw_model, data, seed, kind):
        """A mask of its own for each row, with queries that see nothing."""
        # After a ReLU nothing may be left of a head, and its direction is 0/0 in the formula.
        options = {"position_embedding": "learned", "residual_activation": None, "sublayer_activation": None}
        model = draw_model(data, others=WITH_WEIGHTS, canon=None, dtype=torch.float64, **options)
        generator = torch.Generator().manual_seed(seed)
        input_ids = torch.randint(VOCABULARY, (2, 5), generator=generator)
        visible = (torch.rand(2, 1, 5, 5, generator=generator) < 0.6).tril()
        mask = {"boolean": visible, "integer": visible.long(), "additive": additive(visible)}[kind]
        with torch.no_grad():
            actual = model(input_ids, attention_mask=mask).logits
        expected, _ = reference.forward(model.config, model.state_dict(), input_ids, visible=visible)
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)

    @pytest.mark.parametrize(
        "activation, implementation",
        [("softmax", "eager"), ("softmax", "sdpa"), ("softmax", "nlq"), ("relu", "nlq_tiled")],
    )
    def test_refuses_a_bias(self, make_model, activation, implementation):
        model = make_model(implementation=implementation, attention_activation=activation)
        with pytest.raises(ValueError, match="additive biases"):
            model(torch.ones(1, 3).long(), attention_mask=torch.full((1, 1, 3, 3), -1.5))

    def test_refuses_too_few_keys(self, make_model):
        """With a window, the mask may cover all tokens, or the keys that are left of them."""
        model = make_model(implementation="nlq", sliding_window=4)
        with pytest.raises(ValueError, match="must have 9 keys"):
            model(torch.ones(1, 9).long(), attention_mask=torch.ones(1, 1, 9, 6).tril().bool())

    @pytest.mark.parametrize("kind", ["squared", "softmax", "softmax_sink_zero"])
    def test_flex_attention_refuses_a_tensor(self, make_model, kind):
        model = make_model(**KINDS[kind])
        model.config._attn_implementation = "flex_attention"
        with pytest.raises(ValueError, match=r"flex_attention.* takes no 4-D mask"):
            model(torch.ones(1, 3).long(), attention_mask=torch.ones(1, 1, 3, 3).tril().bool())

    @pytest.mark.parametrize("mask_kind", ["boolean", "additive"])
    @model_cases(without=["flex_attention"], kinds=WITH_WEIGHTS, quick=FEW_CASES)
    def test_with_a_cache(self, make_model, kind, implementation, mask_kind):
        """The mask of a chunk has a row for each of its queries and a column for each key so far."""
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


class TestHybrids:
    @pytest.mark.parametrize("implementation", ["eager", "nlq"])
    @pytest.mark.parametrize("kinds", itertools.permutations(["linear_learned", "softmax_sink_zero", "sigmoid"]))
    def test_any_order(self, make_model, kinds, implementation):
        """A state, and keys and values, in one cache; whichever counts the tokens."""
        absent = {"attention_sink": None, "linear_attention_decay": None}
        layers = {index: {**absent, **KINDS[kind]} for index, kind in enumerate(kinds)}
        self.check(make_model(torch.float64, implementation, num_hidden_layers=3, per_layer_config=layers))

    @staticmethod
    def check(model):
        input_ids, attention_mask, places = pad([[1, 2, 3, 4, 5, 6], [4, 2, 8]], left=[0, 2])
        expected, _ = reference.forward(model.config, model.state_dict(), input_ids, attention_mask)
        chunks = [(0, 2), (2, 3), (3, 6)]
        with torch.no_grad():
            at_once = model(input_ids, attention_mask=attention_mask).logits
            in_chunks = decode(model, input_ids, chunks, None, attention_mask)
            static = decode(model, input_ids, chunks, make_cache(model, 6, static=True), attention_mask)
        for logits in (at_once, in_chunks, static):
            for index, place in enumerate(places):
                torch.testing.assert_close(logits[index, place], expected[index, place], rtol=1e-10, atol=1e-10)


class TestAtRunTime:
    """Changes and requests after a model is made."""

    @model_cases()
    def test_weights(self, make_model, kind, implementation):
        """`output_attentions=True` gives eager's weights, an error, or nothing, as Transformers' SDPA does."""
        switches = switches_of(kind, implementation)
        model = make_model(implementation=implementation, **switches)
        input_ids, attention_mask, _ = pad([[1, 2, 3, 4, 5, 6], [4, 2, 8]], left=[0, 2])
        if kind in LINEAR_KINDS:
            with pytest.raises(ValueError, match=r"attention_activation='linear_attention' .* computes no weights"):
                model(input_ids, attention_mask=attention_mask, output_attentions=True)
            return
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "output_attentions": True}
        with torch.no_grad():
            expected = make_model(**switches)(**inputs)
            if implementation in ("nlq_tiled", "flex_attention"):
                with pytest.raises(
                    ValueError, match=f"{implementation}' cannot compute the weights .*use one of nlq, eager"
                ):
                    model(**inputs)
                return
            actual = model(**inputs)
        torch.testing.assert_close(actual.logits, expected.logits, **TOLERANCES)
        assert [tuple(weights.shape) for weights in expected.attentions] == [(2, 4, 6, 6)] * 2
        if implementation == "sdpa":
            assert not actual.attentions
        else:
            torch.testing.assert_close(actual.attentions, expected.attentions, **TOLERANCES)

    @model_cases(quick=FEW_CASES)
    def test_copies(self, make_model, kind, implementation):
        model = make_model(implementation=implementation, **switches_of(kind, implementation))
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
        input_ids = torch.randint(VOCABULARY, (2, 7))
        with torch.no_grad():
            expected = model(input_ids).logits
            for other in copies:
                assert other.config._attn_implementation == implementation
                assert torch.equal(other(input_ids).logits, expected)
            # A copy has parameters of its own.
            copies[0].lm_head.weight.zero_()
            assert torch.equal(model(input_ids).logits, expected)

"""`generate` against full forward passes without a cache, on every backend."""

import pytest
import torch
from support import model_cases
from support.grids import parametrize_grid, slow_except
from support.model_cases import LINEAR_KINDS, PART_SWITCHES
from support.random_models import BACKENDS, computes
from transformers import CompileConfig, DynamicCache


# Blocks and scores that make random models choose many different tokens, and others for every activation
SWITCHES = {"vocab_size": 31, "attention_scaling": 2.0, "norm_position": "post", "tie_word_embeddings": False}
SOFTMAX, SIGMOID, SQUARED = ({"attention_activation": name} for name in ("softmax", "sigmoid", "squared"))
LEARNED, FIXED = LINEAR_KINDS["linear_learned"], LINEAR_KINDS["linear_fixed"]


def three_layers(middle: dict, first: dict | None = None, last: dict | None = None) -> dict:
    others = {index: layer for index, layer in ((0, first), (2, last)) if layer is not None}
    return {**middle, "num_hidden_layers": 3, "per_layer_config": others}


# Layers that differ, some with a state in place of keys, and windows shorter or longer than the prompts
HYBRIDS = {
    "hybrid": three_layers(
        {"attention_activation": "tanh"}, {"attention_activation": "relu"}, {**SOFTMAX, "attention_sink": "learned"}
    ),
    "linear_first": three_layers(SIGMOID, LEARNED, SOFTMAX),
    "linear_last": three_layers({"attention_activation": "entmax15"}, SOFTMAX, FIXED),
    "window": {**SOFTMAX, "sliding_window": 3},
    "window_in_one_layer": {**SIGMOID, "sliding_window": 4, "per_layer_config": {1: {"sliding_window": None}}},
    "windows_differ": three_layers(
        {**SQUARED, "sliding_window": 7}, {**LEARNED, "sliding_window": None}, {"sliding_window": 2}
    ),
}
# Parts that keep something in the cache, count visible keys, or hand values from layer to layer
PARTS = {
    "forget_gate": {"forget_gate": "learned", "num_key_value_heads": 2, "query_projection": "linear"},
    "forget_gate_and_window": {"forget_gate": "learned", "sliding_window": 3, "attention_length_scaling": "log"},
    "forget_gate_of_sigmoid": {**SIGMOID, "forget_gate": "learned", "value_residual": "learned"},
    "differential_v1": {"differential_attention": "v1"},
    "canon_and_window": {"canon": "BC", "sliding_window": 3},
    "selective": {"selective_attention": True, "forget_gate": "fixed"},
    **{name: PART_SWITCHES[name] for name in ("all_parts", "more_parts", "keys_as_values_with_states")},
}
# `test_invariants.py` decodes every kind with both caches
SOME = ("softmax", "softmax_sink_learned", "sigmoid", "relu", "entmax15", "stick_breaking", "linear_learned")
KINDS = {**{name: model_cases.KINDS[name] for name in SOME}, **HYBRIDS, **PARTS}
COMPILED_KINDS = ("softmax_sink_learned", "sigmoid", "relu", "entmax15", "linear_learned", *HYBRIDS, *PARTS)
PROMPTS = ((3, 1, 4, 1, 5), (9, 2), (6,))
NEW_TOKENS = 8
OPTIONS = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
pytestmark = [
    pytest.mark.thin(6),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:_compile flag"),
    pytest.mark.usefixtures("tiny_tiles", "uncompiled"),
]


def one_of_each(**axes):
    """Every kind with one of its backends, and every backend with one of its kinds; the other cases are slow."""

    def is_computed(kind, implementation, **_):
        return computes(implementation, KINDS[kind])

    axes = {"kind": list(KINDS), "implementation": BACKENDS, **axes}
    return parametrize_grid(axes, allowed=is_computed, strength=1)


@pytest.fixture(scope="module")
def make_kind(make_model):

    def make(kind, implementation="eager", **switches):
        return make_model(implementation=implementation, **{**SWITCHES, **KINDS[kind], **switches})

    return make


@pytest.fixture(scope="module")
def expected_tokens(make_kind):
    """A function to the tokens of greedy decoding after each prompt: a full pass of `eager` for every token."""
    found = {}

    @torch.no_grad()
    def expected(kind, **switches):
        key = (kind, *sorted(switches.items()))
        if key not in found:
            model = make_kind(kind, **switches)
            found[key] = [follow(model, prompt) for prompt in PROMPTS]
        return found[key]

    return expected


def follow(model, prompt):
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        best, second = logits.topk(2).values
        assert best - second > 1e-4, "rounding might choose another token: take other parameters"
        tokens.append(logits.argmax().item())
    return tokens[-NEW_TOKENS:]


def padded_prompts():
    length = max(map(len, PROMPTS))
    input_ids, attention_mask = torch.full((len(PROMPTS), length), 7), torch.zeros(len(PROMPTS), length).long()
    for index, prompt in enumerate(PROMPTS):
        input_ids[index, length - len(prompt) :] = torch.tensor(prompt)
        attention_mask[index, length - len(prompt) :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def row(prompt):
    input_ids = torch.tensor([prompt])
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def new_tokens(generated):
    return generated[:, -NEW_TOKENS:].tolist()


class TestGreedy:
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @one_of_each(position_embedding=("learned", "rope"))
    def test_tokens_of_a_padded_batch(
        self, make_kind, expected_tokens, kind, implementation, position_embedding, cache
    ):
        if cache == "static" and implementation == "flex_attention":
            pytest.skip("flex_attention takes no static cache")
        model = make_kind(kind, implementation, position_embedding=position_embedding)
        options = {"cache_implementation": cache, "disable_compile": True, **OPTIONS}
        expected = expected_tokens(kind, position_embedding=position_embedding)
        assert new_tokens(model.generate(**padded_prompts(), **options)) == expected
        assert new_tokens(model.generate(**row(PROMPTS[1]), **options)) == expected[1:2]

    @pytest.mark.thin(4)
    @pytest.mark.parametrize(
        "kind, implementation",
        slow_except(
            [(kind, name) for kind in COMPILED_KINDS for name in ("nlq", "eager")],
            (("sigmoid", "nlq"), ("linear_last", "nlq"), ("all_parts", "nlq"), ("more_parts", "eager")),
        ),
    )
    def test_one_compiled_graph_decodes_the_same_tokens(self, make_kind, expected_tokens, kind, implementation):
        """One graph for all tokens after the prompt.

        Transformers' static layers of a window count tokens by a plain number until the window is full, so Mistral has
        up to three graphs too.
        """
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph

        compile_config = CompileConfig(backend=backend, fullgraph=True, mode=None)
        compile_config._compile_all_devices = True  # without it, Transformers compiles on accelerators only
        options = {"cache_implementation": "static", "compile_config": compile_config, **OPTIONS}
        torch.compiler.reset()
        with torch.compiler.set_stance("default"):
            generated = make_kind(kind, implementation).generate(**padded_prompts(), **options)
        assert new_tokens(generated) == expected_tokens(kind)
        assert len(graphs) <= (3 if "window" in kind else 1)


@one_of_each()
def test_beams_have_their_scores_and_are_those_without_a_cache(make_kind, kind, implementation):
    model, reference = make_kind(kind, implementation), make_kind(kind)
    options = {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True, **OPTIONS}
    generated = model.generate(**padded_prompts(), **options)
    # The score of a sequence is the mean log-probability of its new tokens
    for prompt, tokens, score in zip(PROMPTS, new_tokens(generated.sequences), generated.sequences_scores):
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -NEW_TOKENS - 1 : -1]
        chosen = logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens)[:, None])
        torch.testing.assert_close(score, chosen.mean(), rtol=1e-4, atol=1e-4)
    uncached = reference.generate(**padded_prompts(), use_cache=False, **options)
    assert torch.equal(generated.sequences, uncached.sequences)
    alone = model.generate(**row(PROMPTS[1]), **options)
    assert new_tokens(alone.sequences) == new_tokens(generated.sequences)[1:2]


@pytest.mark.parametrize("kind", ["canon_and_window", "more_parts"])
@pytest.mark.parametrize("masked", [None, 0, 10])
def test_drafted_tokens_are_those_of_greedy_decoding(make_model, kind, masked):
    """Convolutions take back rejected tokens, also after a prompt with masked tokens."""
    model = make_model(**{**SWITCHES, **KINDS[kind], "canon": "ABC"})
    tokens, mask = torch.tensor([[3, 1, 4, 1, 5, 9, 3, 1, 4, 1, 5, 9]]), torch.ones(1, 12).long()
    if masked is not None:
        mask[:, masked] = 0
    greedy = model.generate(tokens, attention_mask=mask, use_cache=False, **OPTIONS)
    drafted = model.generate(tokens, attention_mask=mask, prompt_lookup_num_tokens=3, **OPTIONS)
    assert torch.equal(drafted, greedy)


def test_padding_between_cached_and_drafted_tokens(make_model):
    model = make_model(**SWITCHES, canon="AB", query_projection="linear")
    tokens, mask = torch.tensor([[3, 1, 4, 0, 0, 1, 5, 9, 2, 6]]), torch.ones(1, 10).long()
    mask[:, 3:5] = 0
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    for start, end in ((0, 3), (3, 6), (6, 8)):
        model(tokens[:, start:end], attention_mask=mask[:, :end], cache=cache)
    cache.crop(-1)
    logits = model(tokens[:, 7:], attention_mask=mask, cache=cache).logits
    expected = model(tokens, attention_mask=mask, use_cache=False).logits[:, 7:]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


class OffloadedCache(DynamicCache):
    """Moves nothing, because Transformers' offloading needs a GPU."""

    def update(self, key, value, layer, *args, **kwargs):
        return self.layers[layer].update(key, value)


def test_caches_that_parts_cannot_keep_states_in(make_model):
    tokens = torch.tensor([[3, 1, 4, 3, 1, 4]])
    model = make_model(**SWITCHES, canon="A")
    with pytest.raises(ValueError, match=r"canon: a static cache cannot be cropped; .* prompt_lookup_num_tokens$"):
        model.generate(tokens, prompt_lookup_num_tokens=2, cache_implementation="static", **OPTIONS)
    for name, value in (("canon", "A"), ("selective_attention", True)):
        model = make_model(**SWITCHES, **{name: value})
        cache = OffloadedCache(config=model.config)
        cache.offloading = True
        with pytest.raises(ValueError, match=f"{name} needs a cache without offloading"):
            model(tokens, cache=cache)

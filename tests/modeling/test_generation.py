"""`generate` against full forward passes without a cache, for every activation and sink, on every backend."""

import itertools

import pytest
import torch
from support.grids import parametrize_grid, slow_except
from support.model_cases import ELEMENTWISE_KINDS, LINEAR_KINDS, PART_SWITCHES, ROW_KINDS, SOFTMAX_KINDS
from transformers import CompileConfig, DynamicCache


# Blocks and scores that make random models choose many different tokens, and others for every activation
SWITCHES = {"vocab_size": 31, "attention_scaling": 2.0, "norm_position": "post", "tie_word_embeddings": False}
BY_SUM = {
    f"{name}_sum": {"attention_activation": name, "attention_normalization": "sum"}
    for name in ("sigmoid", "relu", "relu_squared")
}
HYBRID = {
    "hybrid": {
        "attention_activation": "tanh",
        "num_hidden_layers": 3,
        "per_layer_config": {
            0: {"attention_activation": "relu"},
            2: {"attention_activation": "softmax", "attention_sink": "learned"},
        },
    }
}
# With a state in one layer's cache, and keys and values in the others'
LINEAR_HYBRID = {
    "linear_first": {
        "num_hidden_layers": 3,
        "per_layer_config": {0: LINEAR_KINDS["linear_learned"], 1: {"attention_activation": "sigmoid"}},
    },
    "linear_last": {
        "attention_activation": "entmax15",
        "num_hidden_layers": 3,
        "per_layer_config": {0: {"attention_activation": "softmax"}, 2: LINEAR_KINDS["linear_fixed"]},
    },
}
# Windows that are shorter than the text, and shorter or longer than the prompts
WINDOWS = {
    "window": {"attention_activation": "softmax", "sliding_window": 3},
    "window_in_one_layer": {
        "attention_activation": "sigmoid",
        "sliding_window": 4,
        "per_layer_config": {1: {"sliding_window": None}},
    },
    "windows_differ": {
        "attention_activation": "squared",
        "sliding_window": 7,
        "num_hidden_layers": 3,
        "per_layer_config": {0: {**LINEAR_KINDS["linear_learned"], "sliding_window": None}, 2: {"sliding_window": 2}},
    },
}
# Parts that keep something in the cache, count visible keys, or hand values from layer to layer
PARTS = {
    "forget_gate": {"forget_gate": "learned", "num_key_value_heads": 2, "query_projection": "linear"},
    "forget_gate_and_window": {"forget_gate": "learned", "sliding_window": 3, "attention_length_scaling": "log"},
    "forget_gate_of_sigmoid": {
        "forget_gate": "learned",
        "attention_activation": "sigmoid",
        "value_residual": "learned",
    },
    "differential_v1": {"differential_attention": "v1"},
    "all_parts": PART_SWITCHES["all_parts"],
    "more_parts": PART_SWITCHES["more_parts"],
    "canon_and_window": {"canon": "BC", "sliding_window": 3},
    "selective": {"selective_attention": True, "forget_gate": "fixed"},
}
ONE_WAY = {*LINEAR_KINDS, *LINEAR_HYBRID, "windows_differ", "selective"}  # no token can be taken back
KINDS = {
    **SOFTMAX_KINDS,
    **ELEMENTWISE_KINDS,
    **BY_SUM,
    **HYBRID,
    **ROW_KINDS,
    **LINEAR_KINDS,
    **LINEAR_HYBRID,
    **WINDOWS,
}
KINDS |= PARTS
BACKENDS = {
    "eager": tuple(KINDS),
    "nlq": tuple(KINDS),
    "sdpa": (
        *SOFTMAX_KINDS,
        "window",
        "forget_gate",
        "forget_gate_and_window",
        "differential_v1",
        "all_parts",
        "canon_and_window",
    ),
    "nlq_tiled": (*ELEMENTWISE_KINDS, *BY_SUM, "window_in_one_layer", "forget_gate", "forget_gate_of_sigmoid"),
    "flex_attention": (
        "softmax",
        "squared",
        "softplus",
        "window",
        "forget_gate",
        *BY_SUM,
    ),  # on the CPU: the sum only, and no sink
}
CASES = [(kind, implementation) for implementation, kinds in BACKENDS.items() for kind in kinds]
COMPILED_KINDS = (
    "softmax_sink_learned",
    "sigmoid",
    "relu",
    "hybrid",
    "entmax15",
    "linear_learned",
    *LINEAR_HYBRID,
    *WINDOWS,
    *PARTS,
)
CASES_WITH_STATIC_CACHE = [case for case in CASES if case[1] != "flex_attention"]
PROMPTS = ((3, 1, 4, 1, 5), (9, 2), (6,))
NEW_TOKENS = 8
OPTIONS = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
BEAMS = {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
pytestmark = [
    pytest.mark.thin(6),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:_compile flag"),
    pytest.mark.usefixtures("tiny_tiles", "uncompiled"),
]


def one_of_each(cases):
    """Every kind with one of its backends, and every backend with one of its kinds; the other cases are slow."""
    kinds, implementations = (list(dict.fromkeys(column)) for column in zip(*cases))
    axes = {"kind": kinds, "implementation": implementations}
    return parametrize_grid(axes, allowed=lambda **case: tuple(case.values()) in cases, strength=1)


@pytest.fixture(scope="module")
def make_kind(make_model):
    """A function from a kind and a backend to a small model, the same parameters for every backend."""

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
    """The prompts, padded on their left, and the attention mask."""
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


def test_kinds_differ(expected_tokens):
    """No test below would notice one activation in the place of another if both chose the same tokens."""
    assert len({tuple(map(tuple, expected_tokens(kind))) for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("make_cache", [DynamicCache, lambda config: DynamicCache()], ids=["windowed", "whole"])
@one_of_each([case for case in CASES if case[0] in WINDOWS])
@torch.no_grad()
def test_one_token_after_the_other(make_kind, expected_tokens, kind, implementation, make_cache):
    """A single query needs no mask, unless the cache holds more than its window."""
    if kind == "windows_differ" and make_cache is not DynamicCache:
        pytest.skip("linear attention needs the cache of the configuration")
    model = make_kind(kind, implementation)
    for prompt, expected in zip(PROMPTS, expected_tokens(kind)):
        cache = make_cache(config=model.config)
        tokens = [
            model(torch.tensor([[token]]), past_key_values=cache).logits.argmax().item()
            for token in (*prompt, *expected)
        ]
        assert tokens[len(prompt) - 1 : -1] == expected


class TestGreedy:
    @pytest.mark.thin(6)
    @parametrize_grid(
        {
            "kind, implementation": CASES,
            "use_cache": {"uncached": False, "cached": True},
            "position_embedding": ("learned", "rope"),
        },
        strength=1,
    )
    def test_padded_batch(self, make_kind, expected_tokens, kind, implementation, use_cache, position_embedding):
        model = make_kind(kind, implementation, position_embedding=position_embedding)
        generated = model.generate(**padded_prompts(), use_cache=use_cache, **OPTIONS)
        assert new_tokens(generated) == expected_tokens(kind, position_embedding=position_embedding)
        alone = model.generate(**row(PROMPTS[1]), use_cache=use_cache, **OPTIONS)
        assert new_tokens(alone) == new_tokens(generated)[1:2]

    @parametrize_grid(
        {"kind, implementation": CASES_WITH_STATIC_CACHE, "position_embedding": ("learned", "rope")}, strength=1
    )
    def test_static_cache(self, make_kind, expected_tokens, kind, implementation, position_embedding):
        model = make_kind(kind, implementation, position_embedding=position_embedding)
        options = {"cache_implementation": "static", "disable_compile": True, **OPTIONS}
        generated = model.generate(**padded_prompts(), **options)
        assert new_tokens(generated) == expected_tokens(kind, position_embedding=position_embedding)
        alone = model.generate(**row(PROMPTS[0]), **options)
        assert new_tokens(alone) == expected_tokens(kind, position_embedding=position_embedding)[:1]

    @pytest.mark.thin(4)
    @pytest.mark.parametrize(
        "kind, implementation",
        slow_except(
            tuple(itertools.product(COMPILED_KINDS, ("nlq", "eager"))),
            (("sigmoid", "nlq"), ("linear_last", "nlq"), ("all_parts", "nlq"), ("more_parts", "eager")),
        ),
    )
    def test_compiled_static_cache(self, make_kind, expected_tokens, kind, implementation):
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
        assert len(graphs) <= (3 if kind in WINDOWS or "window" in kind else 1)


class TestBeamSearch:
    @one_of_each(CASES)
    def test_scores_and_sequences(self, make_kind, kind, implementation):
        model, reference = make_kind(kind, implementation), make_kind(kind)
        generated = model.generate(**padded_prompts(), **BEAMS, **OPTIONS)
        # The score of a sequence is the mean log-probability of its new tokens: as full passes without a cache say ...
        for prompt, tokens, score in zip(PROMPTS, new_tokens(generated.sequences), generated.sequences_scores):
            with torch.no_grad():
                logits = reference(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -NEW_TOKENS - 1 : -1]
            chosen = logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens)[:, None])
            torch.testing.assert_close(score, chosen.mean(), rtol=1e-4, atol=1e-4)
        # ... and the sequences are those of a search without a cache, and those of each prompt alone.
        uncached = reference.generate(**padded_prompts(), use_cache=False, **BEAMS, **OPTIONS)
        assert torch.equal(generated.sequences, uncached.sequences)
        alone = model.generate(**row(PROMPTS[1]), **BEAMS, **OPTIONS)
        assert new_tokens(alone.sequences) == new_tokens(generated.sequences)[1:2]


class TestAssisted:
    """A smaller model proposes several tokens at a time; those that are not the model's own are taken back from the
    cache.

    A state cannot go back: models with linear layers refuse (`test_linear.py`).
    """

    @one_of_each([case for case in CASES if case[0] not in ONE_WAY])
    def test_model_of_one_layer(self, make_kind, expected_tokens, kind, implementation):
        # The model's own first layer, and tied embeddings: they agree about some tokens.
        switches = {"tie_word_embeddings": True}
        model = make_kind(kind, implementation, **switches)
        first = {"hybrid": "relu"}.get(kind, kind)
        assistant = make_kind(first, implementation, num_hidden_layers=1, per_layer_config=None, **switches)
        assistant.generation_config.update(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        lengths = []  # how many tokens each pass of the model takes
        model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: lengths.append(output.shape[1])
        )
        generated = [model.generate(**row(prompt), assistant_model=assistant, **OPTIONS) for prompt in PROMPTS]
        assert [new_tokens(tokens)[0] for tokens in generated] == expected_tokens(kind, **switches)
        assert len(lengths) < len(PROMPTS) * NEW_TOKENS, "no proposal was right"
        assert sum(lengths) > sum(len(prompt) + NEW_TOKENS - 1 for prompt in PROMPTS), "no proposal was wrong"

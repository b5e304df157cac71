"""Continuous batching: `generate_batch` against greedy decoding, and what is refused."""

import dataclasses

import pytest
import torch
from support.client_cases import greedy
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import PagedAttentionCache

from modeling_nlq import NLQConfig, NLQForCausalLM, backends_nlq
from modeling_nlq.backends_nlq import sdpa_with_sink_forward


pytestmark = pytest.mark.thin(3)


VOCABULARY = 60
POSITIONS = 64
# Several lengths; the last three share a prefix of several blocks
_GENERATOR = torch.Generator().manual_seed(0)  # the same prompts in every process
PROMPTS = [torch.randint(VOCABULARY, (length,), generator=_GENERATOR).tolist() for length in (3, 17, 1, 30, 8)]
PROMPTS += [PROMPTS[3][:22], PROMPTS[3]]


def make_model(**switches) -> NLQForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": POSITIONS}
    # Large weights: the greedy tokens vary, and differ by more than rounding
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    model = NLQForCausalLM(NLQConfig(**{**sizes, **switches})).eval()
    for layer in model.model.layers:
        if layer.self_attn.attention_sink == "learned":
            torch.nn.init.normal_(layer.self_attn.sink_bias)
    return model


def run(model, prompts=PROMPTS, batching=None, **generation) -> list[list[int]]:
    """The new tokens of `generate_batch`, with blocks of 4 tokens and prompts in chunks of at most 16 tokens."""
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **generation}
    sizes = {"num_blocks": 40, "max_batch_tokens": 16, "page_size": 4, **(batching or {})}
    paged = ContinuousBatchingConfig(**sizes)
    outputs = model.generate_batch(
        prompts, generation_config=GenerationConfig(**options), continuous_batching_config=paged
    )
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    return [output.generated_tokens for output in outputs.values()]


def expected_tokens(model, prompts=PROMPTS, new_tokens=6) -> list[list[int]]:
    tokens = [greedy(model, torch.tensor(prompt), new_tokens) for prompt in prompts]
    assert len({token for row in tokens for token in row}) > 5  # a model that repeats one token would hide errors
    return tokens


CASES = {name: {"attention_activation": name} for name in ("softmax", "squared", "tanh", "sparsemax")} | {
    "softmax_eager": {"attn_implementation": "eager"},
    "sink": {"attention_sink": "learned"},
    "sigmoid_rope": {"attention_activation": "sigmoid", "position_embedding": "rope"},
    "entmax15_no_positions": {"attention_activation": "entmax15", "position_embedding": "none"},
    "mixed": {"attention_activation": "relu", "per_layer_config": {1: {"attention_activation": "softmax"}}},
    "window": {"sliding_window": 6},
    "window_of_sigmoid": {"attention_activation": "sigmoid", "sliding_window": 6},
    # Parts that keep nothing in the cache: a request sees as many keys as its own tokens
    "parts": {
        "query_projection": "linear",
        "exclusive_attention": "learned",
        "value_residual": "learned",
        "attention_length_scaling": "log",
        "differential_attention": "v2",
    },
    "parts_of_weights": {"parallax": True, "attention_gate": "value", "attention_activation": "softpick"},
}


@pytest.mark.parametrize("switches", CASES.values(), ids=CASES)
def test_tokens_are_those_of_greedy_decoding(switches):
    model = make_model(**switches)
    prompt = torch.tensor(PROMPTS[3:4])
    implementation, logits = model.config._attn_implementation, model(prompt).logits
    assert run(model) == expected_tokens(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(prompt).logits, logits)


@pytest.fixture(scope="module")
def sigmoid():
    return make_model(attention_activation="sigmoid")


def flash_stand_in(module, query, key, value, attention_mask, scaling, **kwargs):
    """What flash attention computes from the lengths that Transformers gives it, where it is not installed."""
    if "cu_seq_lens_q" not in kwargs:
        return sdpa_with_sink_forward(module, query, key, value, attention_mask, scaling)
    assert attention_mask is None
    outputs = []
    starts = [kwargs[name].tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    for first, last, first_key, last_key in zip(starts[0], starts[0][1:], starts[1], starts[1][1:]):
        visible = torch.ones(last - first, last_key - first_key, dtype=torch.bool).tril(
            last_key - first_key - (last - first)
        )
        states = query[:, :, first:last], key[:, :, first_key:last_key], value[:, :, first_key:last_key]
        outputs.append(sdpa_with_sink_forward(module, *states, visible[None, None], scaling)[0])
    return torch.cat(outputs, dim=1), None


def test_flash_attention_gets_the_lengths_of_the_requests(monkeypatch):
    model = make_model()
    expected = expected_tokens(model)
    name = "flash_attention_2"
    row = dataclasses.replace(backends_nlq.ATTENTION_BACKENDS[name], function=flash_stand_in)
    monkeypatch.setitem(backends_nlq.ATTENTION_BACKENDS, name, row)
    monkeypatch.setattr(NLQForCausalLM, "set_attn_implementation", None)  # nothing has to be changed
    model.config._attn_implementation = name
    assert run(model) == expected


def test_padded_batches_after_a_warm_up_give_the_same_tokens(sigmoid):
    """Static shapes, as for CUDA graphs and compilation: the row is padded, and so is what it reads from the cache."""
    expected = expected_tokens(sigmoid)
    sizes = {"num_blocks": 40, "page_size": 4, "q_padding_interval_size": 8, "kv_padding_interval_size": 16}
    # A warm-up fills all of a batch by one request, which then has more tokens than there are learned positions
    batching = ContinuousBatchingConfig(max_batch_tokens=POSITIONS + 16, **sizes)
    generation = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    manager = sigmoid.init_continuous_batching(generation, batching)
    manager.warmup()
    runner = manager.batch_processor.model_runner
    runner.pad_inputs = True  # Transformers does so on accelerators
    with torch.no_grad():
        assert runner.run_one_warmup(sigmoid, POSITIONS + 16, 0) > 0.0  # 0.0 if it failed
    manager.batch_processor.cache.reset()
    finite = []
    hook = sigmoid.model.register_forward_hook(
        lambda module, _, output: finite.append(output[0].isfinite().all().item())
    )
    manager.start()
    ids = manager.add_requests(PROMPTS)
    tokens = {}
    while len(tokens) < len(ids):
        result = manager.get_result(timeout=60)
        tokens[result.request_id] = result.generated_tokens
    manager.stop()
    hook.remove()
    assert [tokens[name] for name in ids] == expected
    assert finite and all(finite)


def test_requests_end_at_the_last_learned_position(sigmoid):
    prompt = [index % VOCABULARY for index in range(POSITIONS - 3)]
    assert run(sigmoid, [prompt], max_new_tokens=20) == [greedy(sigmoid, torch.tensor(prompt), 4)]
    assert run(sigmoid, [prompt * 2][:0]) == []
    with pytest.raises(
        ValueError, match=f"a prompt of {POSITIONS + 1} tokens is longer than max_position_embeddings=64$"
    ):
        run(sigmoid, [[1], [1] * (POSITIONS + 1)])
    rope = make_model(attention_activation="sigmoid", position_embedding="rope")
    assert len(run(rope, [[1] * (POSITIONS + 1)])[0]) == 6


class TestRefused:
    LINEAR = {"attention_activation": "linear_attention"}
    REFUSED = {
        r"^attention_activation='linear_attention' \(layer 0\) has no continuous batching; use generate$": LINEAR,
        r"^attention_activation='linear_attention' \(layer 1\) has no": {"per_layer_config": {1: LINEAR}},
        r"sliding_window=\[6, None\].*one window for all layers": {
            "sliding_window": 6,
            "per_layer_config": {1: {"sliding_window": None}},
        },
        r"^attn_implementation='nlq_tiled' has no continuous batching; use one of nlq, eager$": {
            "attention_activation": "sigmoid",
            "attn_implementation": "nlq_tiled",
        },
        r"use one of nlq, sdpa, eager$": {"attn_implementation": "flex_attention"},
    }

    @pytest.mark.parametrize("message, switches", REFUSED.items())
    def test_models_are_refused_by_name(self, message, switches):
        model = make_model(**switches)
        before = model.config._attn_implementation
        for start in (lambda: model.generate_batch(PROMPTS), model.init_continuous_batching):
            with pytest.raises(ValueError, match=message):
                start()
        assert model.config._attn_implementation == before

    def test_a_paged_cache_is_refused_by_name(self):
        paged = {"position_ids": torch.tensor([[0]]), "cache": object.__new__(PagedAttentionCache), "use_cache": False}
        model = make_model(attention_activation="sigmoid", attn_implementation="nlq_tiled")
        with pytest.raises(ValueError, match=r"^attn_implementation='nlq_tiled' takes no paged cache"):
            model(torch.tensor([[1]]), **paged)

    def test_failure_before_the_start_leaves_the_model_as_it_was(self, sigmoid):
        implementation = sigmoid.config._attn_implementation
        with pytest.raises(ValueError, match="page_size must be at least"):
            run(sigmoid, batching={"page_size": 1})
        assert sigmoid.config._attn_implementation == implementation


def test_transformers_switches_to_flash_attention_where_it_computes_the_model(sigmoid):
    assert make_model()._supports_flash_attn
    assert not sigmoid._supports_flash_attn and not make_model(attention_sink="zero")._supports_flash_attn

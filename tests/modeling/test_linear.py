"""Models with linear attention: decay, the state in the cache and what Transformers does to it, training, and
refusals.
"""

import math

import pytest
import torch
from support.linear_cases import BOTH_CACHES, MODELS, all_models, both_caches, linear_layers
from support.model_cases import VOCABULARY
from transformers import DynamicCache, StaticCache

from modeling_nlq import NLQConfig, NLQForCausalLM


pytestmark = pytest.mark.usefixtures("small_chunks")


def gradients(model, loss, **options):
    return torch.autograd.grad(loss, list(model.parameters()), **options)


class TestDecay:
    @pytest.mark.parametrize("heads", [1, 128])
    def test_learned_rates_begin_as_the_fixed_ones(self, heads):
        sizes = {"vocab_size": 5, "num_hidden_layers": 1, "num_attention_heads": heads, "hidden_size": 2 * heads}
        attention = NLQForCausalLM(
            NLQConfig(**sizes, **MODELS["learned"] | {"num_key_value_heads": heads})
        ).model.layers[0]
        # logit(1 - 2^-k) = log(2^k - 1)
        k = 5 + torch.arange(heads, dtype=torch.float64)
        expected = k * math.log(2) + torch.log1p(-torch.exp2(-k))
        torch.testing.assert_close(attention.self_attn.decay_bias.double(), expected, rtol=1e-6, atol=1e-6)
        assert (attention.self_attn.log_decay < 0).all()


class TestCache:
    # Transformers' dynamic keys and values stay where they are after a reset, as zeros
    @pytest.mark.parametrize(
        "kind, cache_name",
        [*((kind, "static") for kind in MODELS), *((kind, "dynamic") for kind in ("linear", "learned"))],
    )
    @torch.no_grad()
    def test_a_cache_counts_its_tokens_and_a_reset_forgets_them(self, make_model, kind, cache_name, tokens):
        model, is_static = make_model(implementation="nlq", **MODELS[kind]), cache_name == "static"
        expected = model(tokens, use_cache=False).logits
        cache = BOTH_CACHES[cache_name](model)
        assert (cache.is_compileable, cache.get_max_length()) == (is_static, 24 if is_static else -1)
        assert cache.is_croppable is False
        for _ in range(3):
            parts = []
            for seen, part in zip((4, 5, 9), tokens.split([4, 1, 4], dim=1)):
                parts.append(model(part, past_key_values=cache).logits)
                assert [int(cache.get_seq_length(index)) for index in range(2)] == [seen, seen]
            torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
            assert {tuple(map(int, cache.get_mask_sizes(3, index))) for index in range(2)} == {
                (24 if is_static else 12, 0)
            }
            cache.reset()
            assert [int(cache.get_seq_length(index)) for index in range(2)] == [0, 0]

    @both_caches
    def test_memory_does_not_grow_with_the_length(self, make_model, make_cache):
        """A square and a row for each head in float32, for any length: no view of a longer tensor, and no graph."""
        for switches in MODELS.values():
            model = make_model(implementation="nlq", max_position_embeddings=500, **switches)
            cache = StaticCache(config=model.config, max_cache_len=500)
            cache = make_cache(model) if make_cache is BOTH_CACHES["dynamic"] else cache
            for length in (1, 7, 1, 300):
                with torch.no_grad():
                    model(torch.randint(VOCABULARY, (1, length)), past_key_values=cache)
                for layer in linear_layers(cache):
                    size = sum(part.untyped_storage().nbytes() for part in layer.get_state())
                    row = 0 if switches.get("linear_attention_update") == "delta" else 4
                    assert size == model.config.num_key_value_heads * (4 * 4 + row) * 4
                    assert layer.keys is None and layer.values is None
                    assert all(part.grad_fn is None for part in layer.get_state())


class TestTraining:
    @all_models
    def test_gradients_pass_through_the_cache(self, make_model, switches, tokens):
        """The last call's loss reaches the first through the cache; one that is filled but not read changes no
        gradient.
        """
        model = make_model(torch.float64, "nlq", **switches).train()
        full = model(tokens, use_cache=False).logits
        for lengths in ([9], [5, 4], [8, 1], [3, 1, 5]):
            cache = DynamicCache(config=model.config)
            logits = [model(part, past_key_values=cache).logits for part in tokens.split(lengths, dim=1)]
            torch.testing.assert_close(torch.cat(logits, dim=1), full, rtol=1e-9, atol=1e-9)
            actual = gradients(model, logits[-1].square().sum())
            expected = gradients(model, full[:, -lengths[-1] :].square().sum(), retain_graph=True)
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


class TestRefusals:
    def test_calls_are_refused_by_name(self, make_model, tokens):
        visible = torch.ones(2, 1, 9, 9).tril().bool()
        for implementation in ("eager", "nlq"):
            for kind, layer in (("linear", 0), ("linear_first", 0), ("linear_last", 1)):
                model = make_model(implementation=implementation, **MODELS[kind])
                where = rf"linear_attention.? \(layer {layer}.*\)"
                with pytest.raises(ValueError, match=f"attn_implementation=.{where} takes no 4-D mask"):
                    model(tokens, attention_mask=visible)
                with pytest.raises(ValueError, match=f"output_attentions=True: .*{where} computes no weights"):
                    model.generate(tokens, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
        cache = StaticCache(config=model.config, max_cache_len=12)
        mask = model.create_masks_for_generate(model.config, torch.zeros(2, 9, 16), torch.ones(2, 9).long(), cache)
        assert mask.shape == (2, 12)  # one that grows would be compiled anew for each token

    @pytest.mark.parametrize("kind", ["linear", "linear_first", "linear_last"])
    @pytest.mark.parametrize("how", ["prompt_lookup", "assistant", "linear_assistant"])
    def test_assisted_decoding_is_refused(self, make_model, kind, how):
        model, softmax = make_model(**MODELS[kind]), make_model(num_hidden_layers=1)
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        options |= {"prompt_lookup_num_tokens": 3} if how == "prompt_lookup" else {"assistant_model": softmax}
        if how == "linear_assistant":
            model, options["assistant_model"] = softmax, model
        with pytest.raises((ValueError, RuntimeError)) as caught:
            model.generate(torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]]), **options)
        advice = "generate without assistant_model and prompt_lookup_num_tokens"
        for words in ("attention_activation='linear_attention'", "cannot be cropped", advice):
            assert words in str(caught.value)

    @pytest.mark.parametrize("kind", MODELS)
    def test_caches_of_other_models_are_refused(self, make_model, kind, tokens):
        model, softmax = make_model(**MODELS[kind]), make_model()
        layer = int(kind == "linear_last")
        message = rf"'linear_attention' \(layer {layer}\) needs a cache made by .*\(config=model.config\)"
        caches = (
            DynamicCache(),
            DynamicCache(config=softmax.config),
            StaticCache(config=softmax.config, max_cache_len=12),
        )
        for cache in caches:
            with pytest.raises(ValueError, match=message):
                model(tokens, past_key_values=cache)
        message = "attention_activation='linear_attention' keeps a state, and neither keys nor values"
        with pytest.raises(RuntimeError, match=message):
            softmax(tokens, past_key_values=DynamicCache(config=model.config))

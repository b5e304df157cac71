"""Models with linear attention: decay, the state in the cache and what Transformers does to it, training, and
refusals.
"""

import math

import pytest
import torch
from support.attention_cases import error
from support.linear_cases import BOTH_CACHES, MODELS, all_models, both_caches, linear_layers
from support.model_cases import VOCABULARY
from transformers import DynamicCache, StaticCache

from modeling_nlq import NLQConfig, NLQForCausalLM, cache_nlq
from modeling_nlq.linear_nlq import fixed_log_decay, linear_attention


pytestmark = pytest.mark.usefixtures("small_chunks")
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def gradients(model, loss, **options):
    return torch.autograd.grad(loss, list(model.parameters()), **options)


@torch.no_grad()
def fill(model, make_cache, tokens):
    cache = make_cache(model)
    model(tokens, past_key_values=cache)
    return cache


@torch.no_grad()
def check_continuation(model, cache, tokens, seen, lengths):
    """The tokens after `seen` in the cache, in parts of these lengths, give the logits of one pass."""
    actual = [model(part, past_key_values=cache).logits for part in tokens[:, seen:].split(lengths, dim=1)]
    expected = model(tokens, use_cache=False).logits[:, seen:]
    torch.testing.assert_close(torch.cat(actual, dim=1), expected, rtol=1e-4, atol=1e-4)


class TestDecay:
    def test_fixed_rates_are_retnets(self):
        expected = [1 - 2.0 ** (-5 - head) for head in range(8)]
        assert fixed_log_decay(8).exp().tolist() == pytest.approx(expected, rel=1e-15)

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

    def test_only_learned_decay_has_parameters(self, make_model):
        models = {kind: make_model(implementation=None, **MODELS[kind]) for kind in MODELS}
        assert {model.config._attn_implementation for model in models.values()} == {"nlq"}
        shapes = {
            kind: [tuple(tensor.shape) for name, tensor in model.named_parameters() if name.endswith("decay_bias")]
            for kind, model in models.items()
        }
        assert shapes == {
            "linear": [],
            "fixed": [],
            "learned": [(2,), (2,)],
            "linear_first": [(4,)],
            "linear_last": [],
        }


class TestCache:
    @all_models
    @both_caches
    def test_a_cache_counts_tokens(self, make_model, switches, make_cache, tokens):
        model, is_static = make_model(**switches), make_cache is BOTH_CACHES["static"]
        cache = make_cache(model)
        assert cache.get_seq_length() == 0
        with torch.no_grad():
            for seen, part in zip((4, 5, 9), tokens.split([4, 1, 4], dim=1)):
                model(part, past_key_values=cache)
                assert [int(cache.get_seq_length(index)) for index in range(2)] == [seen, seen]
        assert {tuple(map(int, cache.get_mask_sizes(3, index))) for index in range(2)} == {
            (24 if is_static else 12, 0)
        }
        assert (cache.is_compileable, cache.get_max_length()) == (is_static, 24 if is_static else -1)
        assert cache.is_croppable is False

    # Transformers' dynamic keys and values stay where they are after a reset, as zeros
    @pytest.mark.parametrize(
        "kind, cache_name",
        [*((kind, "static") for kind in MODELS), *((kind, "dynamic") for kind in ("linear", "learned"))],
    )
    def test_a_reset_forgets_all_tokens(self, make_model, kind, cache_name, tokens):
        model = make_model(implementation="nlq", **MODELS[kind])
        cache = fill(model, BOTH_CACHES[cache_name], tokens.flip(1))
        for _ in range(2):
            cache.reset()
            assert [int(cache.get_seq_length(index)) for index in range(2)] == [0, 0]
            check_continuation(model, cache, tokens, 0, [1, 8])

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
                    assert size == model.config.num_key_value_heads * (4 * 4 + 4) * 4
                    assert layer.keys is None and layer.values is None
                    assert all(part.grad_fn is None for part in layer.get_state())

    def test_each_layer_has_the_cache_of_its_kind(self, make_model):
        """One kind of layer for each; a model without linear layers is what it was."""
        config = make_model(**MODELS["linear_first"]).config
        assert config.layer_types == [cache_nlq.LAYER_TYPE, "full_attention"]
        cache = DynamicCache(config=config)
        assert len(linear_layers(cache)) == 1 and type(cache.layers[1]).__name__ == "DynamicLayer"
        # Absent, not `None`: Transformers asks whether a configuration has it
        assert not hasattr(make_model(attention_activation="sigmoid").config, "layer_types")
        assert "layer_types" not in config.to_dict()


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

    @all_models
    def test_autocast_keeps_sums_in_float32(self, make_model, switches, tokens):
        """Sums and the state stay in float32, and decoding agrees with one pass."""
        model = make_model(implementation="nlq", **switches).train()
        expected, cache = model(tokens, labels=tokens), DynamicCache(config=model.config)
        heads = [torch.randn(2, 4, 9, 4).to(torch.bfloat16) for _ in range(3)]
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(tokens, labels=tokens)
            inside, *states = linear_attention(*heads, None, 0.5)
            with torch.no_grad():
                parts = torch.cat(
                    [model(part, past_key_values=cache).logits for part in tokens.split([4, 1, 4], 1)], dim=1
                )
        outside, *other_states = linear_attention(*heads, None, 0.5)
        assert inside.dtype == torch.bfloat16 and torch.equal(inside, outside)
        assert all(map(torch.equal, *states, *other_states)), "sums in less than float32"
        assert error(parts, outputs.logits) < 0.03
        assert all(part.dtype == torch.float32 for layer in linear_layers(cache) for part in layer.get_state())
        assert (outputs.loss - expected.loss).abs() < 0.03 * expected.loss
        for one, other in zip(gradients(model, outputs.loss), gradients(model, expected.loss)):
            assert one.dtype == torch.float32 and one.isfinite().all()
            assert (one - other).norm() <= 0.1 * other.norm() + 1e-3


class TestMasks:
    def test_a_dense_mask_is_refused(self, make_model, tokens):
        visible = torch.ones(2, 1, 9, 9).tril().bool()
        message = r"attn_implementation='linear_attention' \(layer 1\) takes no 4-D mask"
        for implementation in ("eager", "nlq"):
            model = make_model(implementation=implementation, **MODELS["linear_last"])
            for module, inputs in ((model, tokens), (model.model.layers[1].self_attn, torch.zeros(2, 9, 16))):
                with pytest.raises(ValueError, match=message):
                    module(inputs, attention_mask=visible)

    @pytest.mark.parametrize("name", ["nlq", "eager", "sdpa"])
    def test_mask_keeps_its_shape_with_a_static_cache(self, make_model, name):
        """A mask that grows would be compiled anew for each token."""
        model = make_model(implementation=name, **MODELS["linear_first"])
        cache = StaticCache(config=model.config, max_cache_len=12)
        mask = model.create_masks_for_generate(model.config, torch.zeros(2, 9, 16), torch.ones(2, 9).long(), cache)
        assert mask.shape == (2, 12)


class TestRefusals:
    def test_output_attentions_is_refused(self, make_model, tokens):
        for kind, layer in (("linear", 0), ("linear_first", 0), ("linear_last", 1)):
            model = make_model(implementation="nlq", **MODELS[kind])
            where = rf"attention_activation=.linear_attention. \(layer {layer}.*\)"
            message = f"output_attentions=True: {where} computes no weights"
            with pytest.raises(ValueError, match=message):
                model(tokens, output_attentions=True)
            with pytest.raises(ValueError, match=message):
                model.generate(tokens, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)

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
        for words in ("attention_activation='linear_attention'", "cannot go back", advice):
            assert words in str(caught.value)

    @pytest.mark.parametrize("kind", MODELS)
    def test_caches_of_other_models_are_refused(self, make_model, kind, tokens):
        model, softmax = make_model(**MODELS[kind]), make_model()
        layer = int(kind == "linear_last")
        message = rf"'linear_attention' \(layer {layer}\) needs a cache that stores its state.*\(config=model.config\)"
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

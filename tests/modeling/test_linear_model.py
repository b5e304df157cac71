"""Models with linear attention: decay, training, masks, and refusals."""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support.attention_cases import error
from support.linear_cases import MODELS, all_models, both_caches, gradients, linear_layers
from support.model_cases import VOCABULARY
from transformers import DynamicCache, StaticCache, Trainer, TrainingArguments

from modeling_nlq import (
    NLQConfig,
    NLQForCausalLM,
    NLQForSequenceClassification,
    cache_nlq,
)
from modeling_nlq.linear_nlq import fixed_log_decay, linear_attention


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


@pytest.mark.usefixtures("small_chunks")
class TestTraining:
    @all_models
    @pytest.mark.parametrize("implementation", ["eager", "nlq"])
    def test_with_a_cache(self, make_model, switches, implementation, tokens):
        """A cache that is filled but not read changes no gradient."""
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


class TestMasks:
    """Masks by type of layer, as generation with a static cache passes them."""

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
        with pytest.raises(ValueError, match="attention_mask holds masks for sliding_attention, and none for 'full_attention'"):
            model(tokens, attention_mask={"sliding_attention": visible})

    def test_dense_mask_is_refused(self, make_model, tokens):
        visible = torch.ones(2, 1, 9, 9).tril().bool()
        message = r"attention_activation='linear_attention' takes no 4-D attention_mask.*padding mask.*another activation"
        for implementation in ("eager", "nlq"):
            model = make_model(implementation=implementation, **MODELS["linear_last"])
            for mask in (visible, {"full_attention": visible, cache_nlq.LAYER_TYPE: None}):
                with pytest.raises(ValueError, match=message):
                    model(tokens, attention_mask=mask)


class TestRefusals:
    NO_WEIGHTS = r"output_attentions=True: attention_activation=.linear_attention. \(layer {}\) computes no weights"

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
        """The error comes when the model is made, or at the latest when it runs."""
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        with pytest.raises((ValueError, StrictDataclassError), match=self.NO_WEIGHTS.format("0.*")):
            NLQForCausalLM(NLQConfig(**sizes, **MODELS[kind], output_attentions=True))(tokens)

    def test_other_layers_show_theirs(self, make_model, tokens):
        """A model without linear layers shows its weights."""
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
            rf"attention_activation='linear_attention' \(layer {layer}\) needs a cache that stores its state"
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

    @pytest.mark.parametrize("name", ["eager", "sdpa", "nlq_tiled"])
    @pytest.mark.parametrize("kind", ["learned", "linear_first", "linear_last"])
    def test_backends_concern_other_layers_only(self, make_model, kind, name, tokens):
        """A linear layer computes itself, whatever `attn_implementation` says; the other layers may refuse it."""
        expected = make_model(implementation="nlq", **MODELS[kind])(tokens).logits
        other = {"learned": None, "linear_first": "softmax", "linear_last": "sigmoid"}[kind]
        if name == "eager" or other in (None, {"sdpa": "softmax", "nlq_tiled": "sigmoid"}[name]):
            model = make_model(implementation=name, **MODELS[kind])
            torch.testing.assert_close(model(tokens).logits, expected)
            return
        layer = 1 if kind == "linear_first" else 0
        message = rf"'{name}' cannot compute attention_activation='{other}' \(layer {layer}\); use one of nlq, eager"
        with pytest.raises(ValueError, match=message):
            make_model(implementation=name, **MODELS[kind])
        model = make_model(**MODELS[kind])
        with pytest.raises(ValueError, match=message):
            model.set_attn_implementation(name)
        model.config._attn_implementation = name
        with pytest.raises(ValueError, match=message):
            model(tokens)

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    def test_beside_flex_attention(self, make_model, uncompiled, tokens):
        mask = torch.ones_like(tokens)
        mask[0, :3] = 0
        logits = []
        for name in ("flex_attention", "eager"):
            model = make_model(implementation=name, **MODELS["linear_first"])
            with torch.no_grad():
                logits.append(model(tokens, attention_mask=mask).logits[mask.bool()])
        torch.testing.assert_close(*logits)

    def test_layer_takes_no_tensor(self, make_model):
        layer = make_model(**MODELS["linear"]).model.layers[0].self_attn
        with pytest.raises(ValueError, match="takes no 4-D attention_mask"):
            layer(torch.zeros(1, 3, 16), attention_mask=torch.ones(1, 1, 3, 3).tril().bool())

    @pytest.mark.parametrize("name", ["nlq", "eager", "sdpa"])
    def test_mask_keeps_its_shape_with_a_static_cache(self, make_model, name, tokens):
        """A mask that grows would be compiled anew for each token."""
        model = make_model(implementation=name, **MODELS["linear_first"])
        cache = StaticCache(config=model.config, max_cache_len=12)
        embeddings, padding = torch.zeros(2, 9, 16), torch.ones(2, 9).long()
        mask = model.create_masks_for_generate(model.config, embeddings, padding, cache)
        assert mask.shape == (2, 12)

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

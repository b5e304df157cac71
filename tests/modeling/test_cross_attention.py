"""Cross-attention, and encoders with decoders: generation, other models, heads and refusals.

`test_invariants.py` compares random decoders with the formulas, and their backends with eager.
"""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support.attention_cases import mask_of
from support.model_cases import SIZES, VOCABULARY, make_model, random_tokens
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    EncoderDecoderCache,
    EncoderDecoderModel,
    PegasusConfig,
    PegasusForConditionalGeneration,
    set_seed,
)

from modeling_nlq import (
    AttentionPart,
    NLQConfig,
    NLQModel,
    register_attention_part,
)


pytestmark = pytest.mark.thin(4)


SOURCE_MASK = mask_of("1111000", "0101111")


def source(width=16, dtype=torch.float64, length=7):
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(1), dtype=dtype)


TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def decoder(**switches):
    return make_model(torch.float64, None, **{"add_cross_attention": True, **switches})


def pair(dtype=torch.float64, encoder=None, tied=True, **switches):
    halves = {"encoder": encoder or {}, "decoder": {**TOKENS, **switches}}
    return make_model(dtype, None, **halves, tie_word_embeddings=tied)


LINEAR, SIGMOID = ({"attention_activation": name} for name in ("linear_attention", "sigmoid"))
GENERATED = {
    "softmax": {},
    "window": {"sliding_window": 3, "position_embedding": "rope"},
    "linear": LINEAR,
    "linear_to_source": {"cross_attention": LINEAR},
    "linear_and_sigmoid": {**LINEAR, "linear_attention_decay": "learned", "cross_attention": SIGMOID},
    "sinks": {"attention_sink": "learned", "num_key_value_heads": 2},
    "own_state": {"forget_gate": "learned", "canon": "ABCD", "cross_attention": SIGMOID},
    "layers_differ": {
        "per_layer_config": {
            0: {"cross_attention": False, "sliding_window": 3},
            1: {**LINEAR, "cross_attention": {"attention_activation": "entmax15"}},
        }
    },
}


class TestGeneration:
    @pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "do_sample": True}], ids=str)
    @pytest.mark.parametrize("name", GENERATED)
    def test_cached_tokens_are_those_without_a_cache(self, name, options):
        model, inputs = pair(**GENERATED[name]), {"input_ids": random_tokens(2, 7), "attention_mask": SOURCE_MASK}
        # Random models repeat one token
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "no_repeat_ngram_size": 1, "do_sample": False, **options}
        lengths = []
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))

        def generate(**more):
            set_seed(0)
            return model.generate(**inputs, **options, **more)

        expected = generate(use_cache=False)
        assert generate().equal(expected)
        if "own_state" not in name and not options["do_sample"]:  # canon takes no static cache with beams
            assert generate(cache_implementation="static", disable_compile=True).equal(expected)
        with torch.no_grad():
            assert generate(encoder_outputs=model.get_encoder()(**inputs)).equal(expected)
        assert 0 not in lengths  # quantized layers and some adapters fail without tokens

    def test_decoder_alone_keeps_the_source_once(self):
        model, inputs = decoder(), {"encoder_hidden_states": source(), "encoder_attention_mask": SOURCE_MASK}
        cache = DynamicCache(config=model.config)
        first = model(random_tokens(2, 3), past_key_values=cache, use_cache=True, **inputs)
        assert isinstance(first[1], EncoderDecoderCache) and first[1].self_attention_cache is cache
        projected = []
        model.model.layers[0].cross_attn.k_proj.register_forward_hook(
            lambda _, inputs, output: projected.append(output.shape[1])
        )
        model(random_tokens(2, 1), past_key_values=first[1], use_cache=True, **inputs)
        assert projected == []


class TestOtherModels:
    def test_equals_pegasus(self):
        set_seed(0)
        sizes = {"vocab_size": VOCABULARY, "d_model": 16, "max_position_embeddings": 32, "scale_embedding": False}
        for half in ("encoder", "decoder"):
            sizes |= {f"{half}_layers": 2, f"{half}_attention_heads": 4, f"{half}_ffn_dim": 24}
        options = {"forced_eos_token_id": None, "decoder_start_token_id": 1, "attn_implementation": "eager"}
        theirs = PegasusForConditionalGeneration(PegasusConfig(**sizes, **TOKENS, **options)).double().eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        theirs.tie_weights()
        block = {"use_bias": True, "query_projection": "linear"}
        model = pair(encoder=block, **block)
        names = {"out_proj": "o_proj", "encoder_attn": "cross_attn", "final_layer_norm": "mlp_norm", "fc1": "mlp.fc1"}
        names |= {"self_attn_layer_norm": "self_attn_norm", "encoder_attn_layer_norm": "cross_attn_norm"}
        names |= {"fc2": "mlp.fc2", "layer_norm": "norm"}
        state = {}
        for key, tensor in theirs.state_dict().items():
            for name, ours in names.items():
                key = key.replace(f".{name}.", f".{ours}.")
            if "shared" not in key and key != "final_logits_bias":
                state[key] = tensor
        model.load_state_dict(state)
        source_ids, labels = (random_tokens(2, length).clamp(min=3) for length in (7, 5))
        labels[1, 3:] = -100
        inputs = {"input_ids": source_ids, "attention_mask": mask_of("1111111", "1111000")}
        with torch.no_grad():
            actual, expected = (each(**inputs, labels=labels) for each in (model, theirs))
        assert (actual.logits - expected.logits).abs().max() < 1e-9
        torch.testing.assert_close(actual.loss.double(), expected.loss.double(), rtol=1e-6, atol=1e-6)
        for options in ({}, {"num_beams": 4, "length_penalty": 0.8}, {"num_beams": 4, "num_return_sequences": 3}):
            options |= {"max_new_tokens": 9, "do_sample": False, "no_repeat_ngram_size": 1}
            assert model.generate(**inputs, **options).equal(theirs.generate(**inputs, **options))

    def test_stock_composites_generate_and_train(self):
        """A decoder in Transformers' own classes, whose caches are stock; and an encoder in their other slot."""
        set_seed(0)
        text = {"vocab_size": VOCABULARY, "hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 4}
        switches = {"sliding_window": 3, "cross_attention": {"attention_activation": "sigmoid"}}
        inputs = {"input_ids": random_tokens(2, 7), "attention_mask": SOURCE_MASK}
        bert = BertModel(BertConfig(**text, intermediate_size=24))
        for encoder in (bert, NLQModel(NLQConfig(**SIZES, is_causal=False))):
            width = encoder.config.hidden_size
            half = decoder(**switches, cross_attention_hidden_size=width, **TOKENS)
            model = EncoderDecoderModel(encoder=encoder, decoder=half).double().eval()
            model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
            options = {"max_new_tokens": 8, "min_new_tokens": 8, "num_beams": 2, "do_sample": False, **inputs}
            options |= {"no_repeat_ngram_size": 1, "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 2}
            assert model.generate(**options).equal(model.generate(**options, use_cache=False))
            labels = random_tokens(2, 5).clamp(min=3)
            loss = model(**inputs, labels=labels).loss
            loss.backward()
            with torch.no_grad():
                shifted = model.prepare_decoder_input_ids_from_labels(labels)
                states, mask = encoder(**inputs).last_hidden_state, inputs.get("attention_mask")
                logits = half(shifted, encoder_hidden_states=states, encoder_attention_mask=mask).logits
            expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            torch.testing.assert_close(loss.detach(), expected)


def test_backend_names_the_layer():
    layers = {0: {"cross_attention": False}, 1: {"cross_attention": {"attention_activation": "relu"}}}
    model = decoder(per_layer_config=layers)
    with pytest.raises(ValueError, match=r"attention_activation='relu' \(layer 1\)"):
        model.set_attn_implementation("sdpa")


def test_own_parts_where_cross_attention_names_them():
    """Only where `cross_attention` names them, and none that needs the decoder's tokens, MLP or state."""

    class Doubled(AttentionPart):
        name = "doubled_test_part"

        def change_output(self, call, heads):
            assert call.values is None
            return 2.0 * heads

    class Inner(AttentionPart):
        name = "inner_test_part"

        def change_mlp_input(self, call, hidden_states):
            return hidden_states

    for part in (Doubled, Inner):
        register_attention_part(part)
    inputs = {"input_ids": random_tokens(2, 5), "encoder_hidden_states": source()}
    for activation in ("softmax", "linear_attention"):
        cross = {"attention_activation": activation}
        model = decoder(cross_attention=cross | {"attention_parts": ["doubled_test_part"]})
        expected = decoder(cross_attention=cross | {"attention_output_scaling": 2.0})
        torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits)
    with pytest.raises((ValueError, StrictDataclassError), match="inner_test_part needs the decoder's own tokens or"):
        decoder(cross_attention={"attention_parts": ["inner_test_part"]})


@pytest.mark.slow
def test_compiled_and_exported_programs_compute_the_same():
    model = pair(torch.float32, cross_attention={"attention_activation": "sigmoid"})

    def inputs(source, target):
        ids = {"input_ids": random_tokens(2, source), "decoder_input_ids": random_tokens(2, target)}
        return {**ids, "attention_mask": torch.ones(2, source).long(), "use_cache": False}

    sample, longer = inputs(7, 5), inputs(11, 3)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**sample).logits, model(**sample).logits)
    source, target = (torch.export.Dim(name, min=2, max=32) for name in ("source", "target"))
    shapes = {"input_ids": {1: source}, "attention_mask": {1: source}, "decoder_input_ids": {1: target}}
    exported = torch.export.export(model, (), sample, dynamic_shapes={**shapes, "use_cache": None}).module()
    torch.testing.assert_close(exported(**longer).logits, model(**longer).logits)


class TestRefusals:
    @pytest.mark.parametrize(
        "message, switches",
        {
            "add_cross_attention=True needs is_causal=True": {"is_causal": False},
            "cross_attention={} needs add_cross_attention": {"add_cross_attention": False, "cross_attention": {}},
            "cross_attention=True must be the switches": {"cross_attention": True},
            "cross_attention_hidden_size=0 must be a positive integer": {"cross_attention_hidden_size": 0},
            "cross_attention: 'sliding_window' cannot be set": {"cross_attention": {"sliding_window": 3}},
            "did you mean 'attention_activation'": {"cross_attention": {"attention_activaton": "relu"}},
            "cross_attention: .*softmx": {"cross_attention": {"attention_activation": "softmx"}},
            "cross_attention: attention_gate='value' needs": {"cross_attention": {"attention_gate": "value"}},
            "cross_attention: .*'stick_breaking' needs an order": {"attention_activation": "stick_breaking"},
            "cross_attention: key_proj": {
                "cross_attention": {"key_projection": "identity"},
                "cross_attention_hidden_size": 20,
            },
            "layer 1: cross_attention: 'canon' cannot": {"per_layer_config": {1: {"cross_attention": {"canon": "A"}}}},
        }.items(),
    )
    def test_configurations_are_refused_by_name(self, message, switches):
        with pytest.raises((ValueError, StrictDataclassError), match=message):
            NLQConfig(**{**SIZES, "add_cross_attention": True, **switches})

    def test_inputs_are_refused_by_name(self):
        model, both, input_ids, encoded = decoder(), pair(), random_tokens(2, 4), source()
        packed = {"position_ids": torch.tensor([[0, 1, 0, 1]])}
        short = {"encoder_hidden_states": encoded, "encoder_attention_mask": SOURCE_MASK[:, :5]}
        for other, inputs, message in (
            (model, {}, r"encoder_hidden_states: add_cross_attention=True needs .*\(2, source, 16\)"),
            (model, {"encoder_hidden_states": source(20)}, r"encoder_hidden_states=\(2, 7, 20\) must be"),
            (model, short, r"encoder_attention_mask=\(2, 5\) must be \(batch, key\)=\(2, 7\)$"),
            (model, {"encoder_hidden_states": encoded, **packed}, "packed documents .* would all see the encoder's"),
            (decoder(add_cross_attention=False), {"encoder_hidden_states": encoded}, "no cross-attention; set add_"),
            (both, {"decoder_input_ids": input_ids, **packed}, "packed documents .* cannot be a source: each target"),
            (both, {}, "decoder_input_ids: the decoder needs its tokens; give them, or labels"),
        ):
            with pytest.raises(ValueError, match=message):
                other(input_ids, **inputs)
        both(input_ids, decoder_input_ids=input_ids, **packed, attention_mask=torch.ones_like(input_ids))
        for each in (model, both):
            with pytest.raises(ValueError, match="no continuous batching"):
                each.generate_batch([[1, 2]])

"""Cross-attention, and encoders with decoders: generation, other models, heads and refusals.

`test_invariants.py` compares random decoders with the formulas, and their backends with eager.
"""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support.attention_cases import mask_of
from support.model_cases import SIZES, VOCABULARY, make_model, random_tokens
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    DynamicCache,
    EncoderDecoderCache,
    EncoderDecoderModel,
    PegasusConfig,
    PegasusForConditionalGeneration,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTModel,
    set_seed,
)

from modeling_nlq import (
    AttentionPart,
    NLQConfig,
    NLQForSequenceClassification,
    NLQModel,
    register_attention_part,
)


pytestmark = pytest.mark.thin(4)


SOURCE_MASK = mask_of("1111000", "0101111")
TARGET_MASK = mask_of("000111111", "111111111")


def source(width=16, dtype=torch.float64, length=7):
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(1), dtype=dtype)


TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def decoder(**switches):
    return make_model(torch.float64, None, **{"add_cross_attention": True, **switches})


def pair(dtype=torch.float64, encoder=None, tied=True, **switches):
    halves = {"encoder": encoder or {}, "decoder": {**TOKENS, **switches}}
    return make_model(dtype, None, **halves, tie_word_embeddings=tied)


GENERATED = {
    "softmax": {},
    "window": {"sliding_window": 3, "position_embedding": "rope"},
    "linear": {"attention_activation": "linear_attention"},
    "linear_to_source": {"cross_attention": {"attention_activation": "linear_attention"}},
    "linear_and_sigmoid": {
        "attention_activation": "linear_attention",
        "linear_attention_decay": "learned",
        "cross_attention": {"attention_activation": "sigmoid"},
    },
    "sinks": {"attention_sink": "learned", "num_key_value_heads": 2},
    "own_state": {"forget_gate": "learned", "canon": "ABCD", "cross_attention": {"attention_activation": "relu"}},
    "layers_differ": {
        "per_layer_config": {
            0: {"cross_attention": False, "sliding_window": 3},
            1: {"attention_activation": "linear_attention", "cross_attention": {"attention_activation": "entmax15"}},
        }
    },
}


class TestGeneration:
    @pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "do_sample": True}], ids=str)
    @pytest.mark.parametrize("name", GENERATED)
    def test_cached_tokens_are_those_without_a_cache(self, name, options):
        model, inputs = pair(**GENERATED[name]), {"input_ids": random_tokens(2, 7), "attention_mask": SOURCE_MASK}
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **inputs, **options}
        options["no_repeat_ngram_size"] = 1  # random models repeat one token
        lengths = []
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))

        def generate(**more):
            set_seed(0)
            return model.generate(**options, **more)

        expected = generate(use_cache=False)
        assert generate().equal(expected)
        if "own_state" not in name and not options["do_sample"]:  # canon takes no static cache with beams
            assert generate(cache_implementation="static", disable_compile=True).equal(expected)
        with torch.no_grad():
            encoder_outputs = model.get_encoder()(inputs["input_ids"], attention_mask=SOURCE_MASK)
        assert generate(encoder_outputs=encoder_outputs).equal(expected)
        assert 0 not in lengths  # quantized layers and some adapters fail without tokens

    @pytest.mark.slow
    def test_compiled_steps_generate_the_same_tokens(self):
        model = pair(torch.float32, sliding_window=3, cross_attention={"attention_activation": "sigmoid"})
        inputs = {
            "input_ids": random_tokens(2, 7),
            "attention_mask": SOURCE_MASK,
            "max_new_tokens": 6,
            "do_sample": False,
        }
        expected = model.generate(**inputs)
        step = torch.compile(model, dynamic=False, fullgraph=True, backend="eager")
        cache = EncoderDecoderCache(DynamicCache(config=model.config.decoder), DynamicCache())
        tokens, encoder_outputs = expected[:, :1], model.get_encoder()(inputs["input_ids"], attention_mask=SOURCE_MASK)
        for _ in range(3):
            with torch.no_grad():
                shared = {"encoder_outputs": encoder_outputs, "attention_mask": SOURCE_MASK, "past_key_values": cache}
                output = step(decoder_input_ids=tokens[:, -1:], **shared)
            tokens = torch.cat([tokens, output.logits[:, -1:].argmax(dim=-1)], dim=1)
        assert tokens.equal(expected[:, :4])

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
    """Weights copied by hand."""

    @pytest.mark.parametrize("model_class", [PegasusForConditionalGeneration, BartForConditionalGeneration])
    def test_equals_pegasus_and_bart(self, model_class):
        set_seed(0)
        is_bart = model_class is BartForConditionalGeneration
        sizes = {"vocab_size": VOCABULARY, "d_model": 16, "max_position_embeddings": 32, "scale_embedding": False}
        for half in ("encoder", "decoder"):
            sizes |= {f"{half}_layers": 2, f"{half}_attention_heads": 4, f"{half}_ffn_dim": 24}
        tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "forced_eos_token_id": None}
        config = (BartConfig if is_bart else PegasusConfig)(
            **sizes, **tokens, decoder_start_token_id=1, attn_implementation="eager"
        )
        theirs = model_class(config).double().eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        theirs.tie_weights()
        block = {"use_bias": True, "query_projection": "linear", "norm_position": "post" if is_bart else "pre"}
        block |= {"embedding_norm": is_bart}
        model = pair(encoder=block, **block)
        names = {"out_proj": "o_proj", "encoder_attn": "cross_attn", "final_layer_norm": "mlp_norm", "fc1": "mlp.fc1"}
        names |= {
            "self_attn_layer_norm": "self_attn_norm",
            "encoder_attn_layer_norm": "cross_attn_norm",
            "fc2": "mlp.fc2",
        }
        names |= {"layernorm_embedding": "embed_norm", "layer_norm": "norm"}
        state = {}
        for key, tensor in theirs.state_dict().items():
            for name, ours in names.items():
                key = key.replace(f".{name}.", f".{ours}.")
            state[key] = tensor[2:] if is_bart and "embed_positions" in key else tensor
        state = {key: tensor for key, tensor in state.items() if "shared" not in key and key != "final_logits_bias"}
        model.load_state_dict(state)
        source_ids, mask, labels = (
            random_tokens(2, 7).clamp(min=3),
            mask_of("1111111", "1111000"),
            random_tokens(2, 5).clamp(min=3),
        )
        labels[1, 3:] = -100
        inputs = {"input_ids": source_ids, "attention_mask": mask}
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
        pixels = ViTConfig(hidden_size=20, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4)
        switches = {"sliding_window": 3, "cross_attention": {"attention_activation": "sigmoid"}}
        image = {"pixel_values": torch.rand(2, 3, 8, 8, dtype=torch.float64)}
        words = {"input_ids": random_tokens(2, 7), "attention_mask": SOURCE_MASK}
        for composite, encoder, inputs in (
            (EncoderDecoderModel, BertModel(BertConfig(**text, intermediate_size=24)), words),
            (EncoderDecoderModel, NLQModel(NLQConfig(**SIZES, is_causal=False)), words),
            (VisionEncoderDecoderModel, ViTModel(pixels, add_pooling_layer=False), image),
        ):
            width = encoder.config.hidden_size
            half = decoder(
                **switches, cross_attention_hidden_size=width, bos_token_id=1, eos_token_id=2, pad_token_id=0
            )
            model = composite(encoder=encoder, decoder=half).double().eval()
            model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
            options = {"max_new_tokens": 8, "min_new_tokens": 8, "num_beams": 2, "do_sample": False, **inputs}
            options |= {"no_repeat_ngram_size": 1}
            options |= {"decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 2}
            assert model.generate(**options).equal(model.generate(**options, use_cache=False))
            labels = random_tokens(2, 5).clamp(min=3)
            loss = model(**inputs, labels=labels).loss
            loss.backward()
            with torch.no_grad():
                states = encoder(**inputs).last_hidden_state
                shifted = model.prepare_decoder_input_ids_from_labels(labels)
                source_inputs = {
                    "encoder_hidden_states": states,
                    "encoder_attention_mask": inputs.get("attention_mask"),
                }
                logits = half(shifted, **source_inputs).logits
            torch.testing.assert_close(
                loss.detach(), torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "implementation, activation", [("sdpa", "softmax"), ("nlq_tiled", "sigmoid"), ("flex_attention", "sigmoid")]
)
def test_pairs_equal_eager_on_a_gpu(implementation, activation):
    """Compares gradients with `eager`, and the tokens of a compiled static cache with the CPU."""
    wide = {"hidden_size": 64, "num_key_value_heads": 2, "attention_activation": activation}
    model, inputs = (
        pair(torch.float32, encoder=wide, **wide),
        {"input_ids": random_tokens(2, 7), "attention_mask": SOURCE_MASK},
    )
    options, labels = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}, random_tokens(2, 9).cuda()
    expected = model.generate(**inputs, **options)
    model, inputs = model.cuda(), {name: value.cuda() for name, value in inputs.items()}
    found = []
    for name in (implementation, "eager"):
        model.set_attn_implementation(name)
        output = model(**inputs, labels=labels)
        found.append([output.logits, *torch.autograd.grad(output.loss, list(model.parameters()))])
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)
    model.set_attn_implementation("nlq")
    for cache in ("dynamic", "static"):
        assert model.generate(**inputs, **options, cache_implementation=cache).cpu().equal(expected)


@torch.no_grad()
@pytest.mark.parametrize("name", GENERATED)
def test_a_padded_pair_equals_the_pair_alone(name):
    """Through encoder and decoder."""
    model, input_ids, target = pair(**GENERATED[name]), random_tokens(2, 7), random_tokens(2, 9)
    masks = {"attention_mask": SOURCE_MASK, "decoder_attention_mask": TARGET_MASK}
    logits = model(input_ids, decoder_input_ids=target, **masks).logits
    for row in range(2):
        is_read, is_token = SOURCE_MASK[row].bool(), TARGET_MASK[row].bool()
        alone = model(input_ids[row, is_read][None], decoder_input_ids=target[row, is_token][None]).logits[0]
        torch.testing.assert_close(logits[row, is_token], alone, rtol=1e-9, atol=1e-9)


def test_a_classifier_sees_the_source():
    config = NLQConfig(**SIZES, add_cross_attention=True, attn_implementation="eager")
    model = NLQForSequenceClassification(config).double().eval()
    output = model(random_tokens(2, 9), TARGET_MASK, encoder_hidden_states=source(), output_attentions=True)
    assert output.logits.shape == (2, 2) and len(output.attentions) == 2


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
    inputs = {
        "input_ids": random_tokens(2, 5),
        "encoder_hidden_states": source(),
        "encoder_attention_mask": SOURCE_MASK,
    }
    for activation in ("softmax", "linear_attention"):
        cross = {"attention_activation": activation}
        model = decoder(cross_attention=cross | {"attention_parts": ["doubled_test_part"]})
        expected = decoder(cross_attention=cross | {"attention_output_scaling": 2.0})
        torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits)
    with pytest.raises(
        (ValueError, StrictDataclassError), match="inner_test_part needs the decoder's own tokens or its MLP"
    ):
        decoder(cross_attention={"attention_parts": ["inner_test_part"]})


@pytest.mark.slow
def test_compiles_and_exports():
    model = pair(torch.float32, cross_attention={"attention_activation": "sigmoid"})
    inputs = {
        "input_ids": random_tokens(2, 7),
        "attention_mask": SOURCE_MASK,
        "decoder_input_ids": random_tokens(2, 5),
    }
    expected = model(**inputs, use_cache=False).logits
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True, backend="eager")(**inputs, use_cache=False).logits, expected
    )
    lengths = {name: torch.export.Dim(name, min=2, max=60) for name in ("source", "target")}
    shapes = {"input_ids": {1: lengths["source"]}, "attention_mask": {1: lengths["source"]}}
    shapes |= {"decoder_input_ids": {1: lengths["target"]}, "use_cache": None}
    exported = torch.export.export(model, (), {**inputs, "use_cache": False}, dynamic_shapes=shapes).module()
    longer = {
        "input_ids": random_tokens(2, 11),
        "attention_mask": torch.ones(2, 11).long(),
        "decoder_input_ids": random_tokens(2, 3),
    }
    torch.testing.assert_close(exported(**longer, use_cache=False).logits, model(**longer, use_cache=False).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_both_embeddings_are_resized(tied, tmp_path):
    model = pair(torch.float32, tied=tied)
    model.resize_token_embeddings(VOCABULARY + 5)
    model.save_pretrained(tmp_path)
    inputs = {"input_ids": random_tokens(2, 7), "labels": torch.full((2, 5), VOCABULARY + 4)}
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits)
    assert again.config.encoder.vocab_size == again.config.decoder.vocab_size == VOCABULARY + 5
    decoder_table = again.model.decoder.embed_tokens.weight
    assert (
        (decoder_table is again.model.encoder.embed_tokens.weight) == (decoder_table is again.lm_head.weight) == tied
    )


class TestRefusals:
    @pytest.mark.parametrize(
        "switches, message",
        [
            ({"is_causal": False}, "add_cross_attention=True needs is_causal=True"),
            (
                {"add_cross_attention": False, "cross_attention": {}},
                "cross_attention={} needs add_cross_attention=True",
            ),
            ({"cross_attention": True}, "cross_attention=True must be the switches"),
            ({"cross_attention_hidden_size": 0}, "cross_attention_hidden_size=0 must be a positive integer"),
            ({"cross_attention": {"sliding_window": 3}}, "cross_attention: 'sliding_window' cannot be set there"),
            ({"cross_attention": {"attention_activaton": "relu"}}, "did you mean 'attention_activation'"),
            ({"cross_attention": {"attention_activation": "softmx"}}, "cross_attention: .*softmx"),
            ({"cross_attention": {"attention_gate": "value"}}, "cross_attention: attention_gate='value' reads"),
            (
                {"attention_activation": "stick_breaking"},
                "cross_attention: attention_activation='stick_breaking' needs an order",
            ),
            (
                {"cross_attention": {"attention_sink": "zero", "attention_activation": "relu"}},
                "cross_attention: attention_sink",
            ),
            (
                {"cross_attention": {"key_projection": "identity"}, "cross_attention_hidden_size": 20},
                "cross_attention: key_proj",
            ),
            (
                {"per_layer_config": {1: {"cross_attention": {"canon": "A"}}}},
                "layer 1: cross_attention: 'canon' cannot",
            ),
        ],
    )
    def test_configurations_are_refused_by_name(self, switches, message):
        with pytest.raises((ValueError, StrictDataclassError), match=message):
            NLQConfig(**{**SIZES, "add_cross_attention": True, **switches})

    def test_inputs_are_refused_by_name(self):
        model, input_ids, encoded = decoder(), random_tokens(2, 4), source()
        plain = decoder(add_cross_attention=False)
        packed = {"position_ids": torch.tensor([[0, 1, 0, 1]]), "encoder_hidden_states": encoded}
        for other, inputs, message in (
            (model, {}, r"encoder_hidden_states: add_cross_attention=True needs .*\(2, source, 16\)"),
            (model, {"encoder_hidden_states": source(20)}, r"encoder_hidden_states=\(2, 7, 20\) must be"),
            (
                model,
                {"encoder_hidden_states": encoded, "encoder_attention_mask": SOURCE_MASK[:, :5]},
                "encoder_attention_mask=",
            ),
            (model, packed, "packed documents .* would all see the encoder's tokens"),
            (
                plain,
                {"encoder_hidden_states": encoded},
                "this model has no cross-attention; set add_cross_attention=True",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                other(input_ids, **inputs)
        with pytest.raises(ValueError, match=r"packed documents .* cannot be a source: each target would see all"):
            pair()(input_ids, decoder_input_ids=input_ids, position_ids=packed["position_ids"])
        one_text = {"position_ids": packed["position_ids"], "attention_mask": torch.ones_like(input_ids)}
        pair()(input_ids, decoder_input_ids=input_ids, **one_text)
        with pytest.raises(ValueError, match="decoder_input_ids: the decoder needs its tokens; give them, or labels"):
            pair()(input_ids)
        for each in (model, pair()):
            with pytest.raises(ValueError, match="no continuous batching"):
                each.generate_batch([[1, 2]])

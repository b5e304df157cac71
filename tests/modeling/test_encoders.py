"""Encoders, `is_causal=False`: the formulas, every backend, other people's encoders, heads and refusals."""

import random

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support import reference
from support.attention_cases import mask_of
from support.model_cases import BLOCKS, PART_SWITCHES, PROJECTIONS, ROTARY, SWITCHES, VOCABULARY, random_tokens
from transformers import BertConfig, BertModel, DynamicCache, set_seed
from transformers.utils import logging

from modeling_nlq import (
    AttentionPart,
    NLQConfig,
    NLQForCausalLM,
    NLQForMaskedLM,
    NLQForQuestionAnswering,
    NLQForSequenceClassification,
    NLQForTokenClassification,
    NLQModel,
    register_attention_part,
)
from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS


pytestmark = pytest.mark.thin(4)


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
SIZES |= {"max_position_embeddings": 320, "is_causal": False}
ORDERED = ("forget_gate", "canon", "selective_attention", "linear_attention_decay")
PADDED = {
    "left": {"attention_mask": mask_of("000111111", "111111111")},
    "right": {"attention_mask": mask_of("111110000", "111111111")},
    "holes": {"attention_mask": mask_of("110101101", "011111011")},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4], [4, 5, 6, 7, 2, 3, 4, 0, 1]])},
    "plain": {},
}


def encoder(model_class=NLQForMaskedLM, dtype=torch.float64, **switches):
    """An encoder whose parameters are all far from their initial values."""
    set_seed(0)
    model = model_class(NLQConfig(**{**SIZES, **switches})).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def needs_order(switches):
    layers = [switches, *switches.get("per_layer_config", {}).values()]
    return any(layer.get(name) for layer in layers for name in ORDERED) or any(
        layer.get("attention_activation") == "stick_breaking" for layer in layers
    )


def check(model, input_ids, tolerance=1e-10, **inputs):
    """Logits and weights are those of the formulas, wherever a token is no padding."""
    has_weights = all(layer.attention_activation != "linear_attention" for layer in model.config.per_layer_config)
    with torch.no_grad():
        output = model(input_ids, output_attentions=has_weights, **inputs)
    logits, weights = reference.forward(model.config, model.state_dict(), input_ids, **inputs)
    is_token = inputs.get("attention_mask", torch.ones_like(input_ids)).bool()
    torch.testing.assert_close(output.logits[is_token], logits[is_token], rtol=tolerance, atol=tolerance)
    for actual, expected in zip(output.attentions or (), weights):
        actual, expected = (each.transpose(1, 2)[is_token] for each in (actual, expected))
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


CASES = {
    **BLOCKS,
    **SWITCHES,
    **PART_SWITCHES,
    **{f"rotary_{name}": {**ROTARY[name], "position_embedding": "rope"} for name in ROTARY},
}


@pytest.mark.parametrize("name", CASES)
def test_formulas(name):
    switches = CASES[name]
    if needs_order(switches):
        with pytest.raises((ValueError, StrictDataclassError), match="is_causal=False has none; use is_causal=True"):
            encoder(**switches)
        return
    padding = list(PADDED)[sum(map(ord, name)) % len(PADDED)]  # each with one of them; `test_random_encoders` mixes
    check(encoder(**switches), random_tokens(2, 9), 1e-5 if name.startswith("rotary") else 1e-10, **PADDED[padding])


def random_switches(chance: random.Random) -> dict:
    activation = chance.choice([name for name in ATTENTION_ACTIVATIONS if name != "stick_breaking"])
    row = ATTENTION_ACTIVATIONS[activation]
    groups = chance.choice([1, 2, 4])
    projections = PROJECTIONS if groups == 4 else ("linear", "bottleneck", "upcycled")
    normalizations = [None, "length", "none", *(["sum"] if row.non_negative else [])] if row.is_elementwise else [None]
    switches = {
        "attention_activation": activation,
        "attention_normalization": chance.choice(normalizations),
        "query_projection": chance.choice(PROJECTIONS),
        "key_projection": chance.choice(projections),
        "value_projection": chance.choice(projections),
        "num_key_value_heads": groups,
        "position_embedding": chance.choice(["learned", "none"]),
        "qk_norm": chance.choice([None, "rms", "rms_all_heads", "l2"]),
        "attention_gate": chance.choice([None, "headwise", "elementwise", "value"]),
        "head_projection": chance.random() < 0.3,
        "use_bias": chance.random() < 0.5,
        **chance.choice(list(BLOCKS.values())),
    }
    others = {"exclusive_attention": "learned", "value_residual": "learned", "attention_length_scaling": "log"}
    others |= {"sliding_window": chance.choice([2, 3, 5]), "attention_sink": "learned", "parallax": True}
    others |= {"differential_attention": chance.choice(["v1", "v2"]), "attention_output_scaling": 0.5}
    for name, value in others.items():
        if chance.random() < 0.25:
            try:
                NLQConfig(**{**SIZES, **switches, name: value})
            except (ValueError, StrictDataclassError):
                continue  # not with this activation
            switches[name] = value
    return switches


@pytest.mark.thin(5)
@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 300))]
)
def test_random_encoders(seed):
    chance = random.Random(seed)
    switches = random_switches(chance)
    check(encoder(**switches), random_tokens(2, 9), 1e-9, **PADDED[chance.choice(list(PADDED))])


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.usefixtures("small_tiles", "cpp_allowed", "small_chunks")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:_compile flag")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize(
    "implementation, activation",
    [
        *(("sdpa", "softmax"), ("nlq_rows", "softmax"), ("nlq_cpp", "softmax"), ("nlq_rows", "entmax15")),
        *((name, activation) for name in ("nlq_tiled", "nlq_cpp") for activation in ("sigmoid", "squared", "relu")),
        *(("flex_attention", activation) for activation in ("softmax", "squared")),
        ("nlq", "linear_attention"),
    ],
)
def test_backends_equal_eager(implementation, activation, padding, window):
    """Outputs, and gradients but of `flex_attention`, which has none on the CPU."""
    if activation == "linear_attention" and window:
        pytest.skip("linear attention has no windows")
    model = encoder(
        dtype=torch.float32,
        attention_activation=activation,
        num_key_value_heads=2,
        query_projection="linear",
        sliding_window=window,
        attention_sink=None,
    )
    input_ids, inputs = random_tokens(2, 9), PADDED[padding]
    is_token = inputs.get("attention_mask", torch.ones_like(input_ids))[..., None]
    has_gradients = implementation != "flex_attention"

    def results(name):
        model.set_attn_implementation(name)
        with torch.set_grad_enabled(has_gradients):
            logits = model(input_ids, **inputs).logits * is_token
            parameters = list(model.parameters())
            return [logits, *(torch.autograd.grad(logits.square().mean(), parameters) if has_gradients else ())]

    for actual, expected in zip(results(implementation), results("eager")):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5)


class TestOtherEncoders:
    """Weights copied by hand; `tests/training/conversion` converts EuroBERT."""

    def test_bert(self):
        """Post-norm, an embedding norm and biases."""
        set_seed(0)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        bert = BertModel(
            BertConfig(**sizes, intermediate_size=24, max_position_embeddings=12), add_pooling_layer=False
        )
        bert = bert.double().eval()
        switches = {"norm_position": "post", "embedding_norm": True, "use_bias": True, "query_projection": "linear"}
        model = encoder(NLQModel, **switches, layer_norm_eps=1e-12, max_position_embeddings=12)
        state = {
            "embed_tokens": bert.embeddings.word_embeddings,
            "embed_positions": bert.embeddings.position_embeddings,
            "embed_norm": bert.embeddings.LayerNorm,
        }
        for index, layer in enumerate(bert.encoder.layer):
            own = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
            state |= {
                f"layers.{index}.self_attn.{name}": getattr(layer.attention.self, of) for name, of in own.items()
            }
            state |= {
                f"layers.{index}.self_attn.o_proj": layer.attention.output.dense,
                f"layers.{index}.self_attn_norm": layer.attention.output.LayerNorm,
                f"layers.{index}.mlp.fc1": layer.intermediate.dense,
                f"layers.{index}.mlp.fc2": layer.output.dense,
                f"layers.{index}.mlp_norm": layer.output.LayerNorm,
            }
        model.load_state_dict(
            {f"{name}.{key}": value for name, module in state.items() for key, value in module.state_dict().items()}
        )
        model.embed_positions.weight.data += bert.embeddings.token_type_embeddings.weight[0]  # of the first segment
        mask = mask_of("111111111", "111110000")
        for inputs in ({}, {"attention_mask": mask}):
            input_ids = random_tokens(2, 9)
            with torch.no_grad():
                actual, expected = (each(input_ids, **inputs).last_hidden_state for each in (model, bert))
            is_token = inputs.get("attention_mask", torch.ones_like(mask)).bool()
            assert (actual - expected)[is_token].abs().max() < 1e-9


class TestHeads:
    @pytest.mark.parametrize("head", [NLQForMaskedLM, NLQForTokenClassification, NLQForQuestionAnswering])
    def test_padded_rows_equal_each_alone(self, head):
        model, input_ids = encoder(head), random_tokens(2, 9)
        with torch.no_grad():
            both = model(input_ids, attention_mask=mask_of("111110000", "111111111"))[0]
            alone = model(input_ids[:1, :5])[0]
        torch.testing.assert_close(both[:1, :5], alone)

    @pytest.mark.parametrize("is_causal", [True, False])
    @pytest.mark.parametrize("pooling", [None, "first", "last", "mean"])
    def test_classifier_pooling(self, pooling, is_causal):
        model = encoder(NLQForSequenceClassification, classifier_pooling=pooling, is_causal=is_causal, pad_token_id=0)
        input_ids = random_tokens(2, 9).clamp(min=1)
        mask = mask_of("001110100", "111111111")
        with torch.no_grad():
            hidden = model.model(input_ids, attention_mask=mask).last_hidden_state
            kind = pooling or ("last" if is_causal else "mean")
            rows = []
            for row, is_token in zip(hidden, mask.bool()):
                tokens = row[is_token]
                rows.append({"first": tokens[0], "last": tokens[-1], "mean": tokens.mean(dim=0)}[kind])
            expected = model.score(torch.stack(rows))
            torch.testing.assert_close(model(input_ids, attention_mask=mask).logits, expected)
            embeds = model.model.embed_tokens(input_ids)
            torch.testing.assert_close(model(inputs_embeds=embeds, attention_mask=mask).logits, expected)
            # Without a mask, `pad_token_id` says what is padding
            padded = torch.where(torch.arange(9) < 6, input_ids, 0)
            seen = None if is_causal else padded != 0
            pooled = model.model(padded, attention_mask=seen).last_hidden_state[:, :6]
            pooled = {"first": pooled[:, 0], "last": pooled[:, -1], "mean": pooled.mean(dim=1)}[kind]
            torch.testing.assert_close(model(padded).logits, model.score(pooled))

    def test_a_classifier_keeps_documents_apart(self):
        model, input_ids = encoder(NLQForSequenceClassification, pad_token_id=0), random_tokens(1, 8).clamp(min=1)
        packed = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}
        with torch.no_grad():
            expected = model.score(model.model(input_ids, **packed).last_hidden_state.mean(dim=1))
            torch.testing.assert_close(model(input_ids, **packed).logits, expected)

    def test_other_heads_warn_of_padding_without_a_mask(self, caplog):
        model = encoder(NLQForMaskedLM, pad_token_id=0)
        logging.get_logger("transformers").addHandler(caplog.handler)
        logging.get_logger("transformers.modeling_utils").warning_once.cache_clear()
        model(torch.tensor([[3, 4, 0]]))
        assert "attention_mask" in caplog.text

    def test_loss_counts_masked_tokens(self):
        model, input_ids = encoder(), random_tokens(2, 9)
        labels = input_ids.masked_fill(torch.rand(2, 9) < 0.6, -100)
        output = model(input_ids, labels=labels)
        shares = torch.log_softmax(output.logits, dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        torch.testing.assert_close(output.loss.double(), -shares[labels != -100].mean(), rtol=1e-6, atol=1e-6)
        halved = model(input_ids, labels=labels, num_items_in_batch=2 * (labels != -100).sum()).loss
        torch.testing.assert_close(halved, output.loss / 2)


@pytest.mark.slow
def test_export_of_packed_documents():
    """Of linear attention, whose chunks would fix the length."""
    model, (inputs, longer) = (
        encoder(attention_activation="linear_attention"),
        (
            {"input_ids": random_tokens(1, length), "position_ids": torch.arange(length)[None] % 4}
            for length in (9, 70)
        ),
    )
    shapes = {name: {1: torch.export.Dim("length", min=2, max=320)} for name in inputs}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()
    torch.testing.assert_close(exported(**longer).logits, model(**longer).logits)


class TestRefusals:
    @pytest.mark.parametrize(
        "head, is_causal, other", [(NLQForCausalLM, False, "NLQForMaskedLM"), (NLQForMaskedLM, True, "NLQForCausalLM")]
    )
    def test_head_of_the_other_direction(self, head, is_causal, other):
        with pytest.raises(ValueError, match=f"is_causal={is_causal} needs {other}"):
            head(NLQConfig(**{**SIZES, "is_causal": is_causal}))

    def test_cache(self):
        model, input_ids = encoder(NLQModel, use_cache=True), random_tokens(1, 4)
        assert model(input_ids).get("past_key_values") is None  # the configuration's field is Transformers' default
        for inputs in ({"use_cache": True}, {"past_key_values": DynamicCache(config=model.config)}):
            with pytest.raises(ValueError, match="is_causal=False: an encoder has no cache"):
                model(input_ids, **inputs)

    def test_direction_of_a_call(self):
        for model, given in ((encoder(NLQModel), True), (encoder(NLQModel, is_causal=True), False)):
            with pytest.raises(ValueError, match=f"is_causal={given}: the configuration of this model has"):
                model(random_tokens(1, 4), is_causal=given)

    def test_shapes(self):
        model, input_ids = encoder(NLQForMaskedLM), random_tokens(1, 4)
        for name, width, expected in (
            ("attention_mask", 5, r"\(batch, key\)=\(1, 4\)"),
            ("labels", 3, r"\(batch, length\)=\(1, 4\)"),
        ):
            with pytest.raises(ValueError, match=rf"{name}=\(1, {width}\) must be {expected}"):
                model(input_ids, **{name: torch.ones(1, width).long()})

    def test_direction_is_fixed(self):
        model = encoder(NLQModel)
        model.config.is_causal = True
        with pytest.raises(ValueError, match="is_causal=True: this model was made with is_causal=False; make it anew"):
            model(random_tokens(1, 4))

    def test_own_part_with_an_order(self):
        class Late(AttentionPart):
            name, causal_only = "late_test_part", True

        register_attention_part(Late)
        with pytest.raises((ValueError, StrictDataclassError), match="late_test_part needs an order of the tokens"):
            NLQConfig(**SIZES, attention_parts=["late_test_part"])

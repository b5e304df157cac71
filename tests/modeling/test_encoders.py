"""Encoders, `is_causal=False`: other people's encoders, heads and refusals. Formulas: `test_formulas.py`."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support.attention_cases import mask_of
from support.model_cases import SIZES, VOCABULARY, make_model, random_tokens
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


pytestmark = pytest.mark.thin(4)


def encoder(model_class=None, **switches):
    return make_model(torch.float64, None, **{"model_class": model_class, "is_causal": False, **switches})


class TestOtherEncoders:
    """Weights copied by hand; `tests/training/conversion` converts EuroBERT."""

    def test_equals_bert(self):
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
    def test_a_classifier_pools_as_configured(self, pooling, is_causal):
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

    def test_the_loss_counts_masked_tokens(self):
        model, input_ids = encoder(), random_tokens(2, 9)
        labels = input_ids.masked_fill(torch.rand(2, 9) < 0.6, -100)
        output = model(input_ids, labels=labels)
        shares = torch.log_softmax(output.logits, dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        torch.testing.assert_close(output.loss.double(), -shares[labels != -100].mean(), rtol=1e-6, atol=1e-6)
        halved = model(input_ids, labels=labels, num_items_in_batch=2 * (labels != -100).sum()).loss
        torch.testing.assert_close(halved, output.loss / 2)


@pytest.mark.slow
def test_export_of_packed_documents():
    """Linear attention works in chunks, which must not fix the length of the exported program."""
    model, (inputs, longer) = (
        encoder(attention_activation="linear_attention", max_position_embeddings=320),
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
    def test_a_head_of_the_other_direction_is_refused(self, head, is_causal, other):
        with pytest.raises(ValueError, match=f"is_causal={is_causal} needs {other}"):
            head(NLQConfig(**SIZES, is_causal=is_causal))

    def test_a_cache_is_refused(self):
        model, input_ids = encoder(NLQModel, use_cache=True), random_tokens(1, 4)
        assert model(input_ids).get("past_key_values") is None  # the configuration's field is Transformers' default
        for inputs in ({"use_cache": True}, {"past_key_values": DynamicCache(config=model.config)}):
            with pytest.raises(ValueError, match="is_causal=False: an encoder has no cache"):
                model(input_ids, **inputs)

    def test_another_direction_of_a_call_is_refused(self):
        for model, given in ((encoder(NLQModel), True), (encoder(NLQModel, is_causal=True), False)):
            with pytest.raises(ValueError, match=f"is_causal={given}: the configuration of this model has"):
                model(random_tokens(1, 4), is_causal=given)

    def test_inputs_of_another_shape_are_refused(self):
        model, input_ids = encoder(NLQForMaskedLM), random_tokens(1, 4)
        for name, width, expected in (
            ("attention_mask", 5, r"\(batch, key\)=\(1, 4\)"),
            ("labels", 3, r"\(batch, length\)=\(1, 4\)"),
        ):
            with pytest.raises(ValueError, match=rf"{name}=\(1, {width}\) must be {expected}"):
                model(input_ids, **{name: torch.ones(1, width).long()})

    def test_another_direction_of_a_made_model_is_refused(self):
        model = encoder(NLQModel)
        model.config.is_causal = True
        with pytest.raises(ValueError, match="is_causal=True: the model was made with is_causal=False; make it anew"):
            model(random_tokens(1, 4))

    def test_an_own_part_with_an_order_is_refused(self):
        class Late(AttentionPart):
            name, causal_only = "late_test_part", True

        register_attention_part(Late)
        with pytest.raises((ValueError, StrictDataclassError), match="late_test_part needs an order of the tokens"):
            NLQConfig(**SIZES, is_causal=False, attention_parts=["late_test_part"])

"""Encoders, `is_causal=False`: heads and refusals. Formulas: `test_formulas.py`."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support.attention_cases import mask_of
from support.model_cases import SIZES, make_model, random_tokens
from transformers import DynamicCache

from modeling_nlq import (
    AttentionPart,
    NLQConfig,
    NLQForCausalLM,
    NLQForMaskedLM,
    NLQForSequenceClassification,
    register_attention_part,
)


pytestmark = pytest.mark.thin(4)


def encoder(model_class=None, **switches):
    return make_model(torch.float64, None, **{"model_class": model_class, "is_causal": False, **switches})


class TestHeads:
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
            embeds, labels = model.model.embed_tokens(input_ids), torch.tensor([0, 1])
            output = model(inputs_embeds=embeds, attention_mask=mask, labels=labels)
            torch.testing.assert_close(output.logits, expected)
            torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(expected, labels))
            # Without a mask, `pad_token_id` says what is padding
            padded = torch.where(torch.arange(9) < 6, input_ids, 0)
            seen = None if is_causal else padded != 0
            pooled = model.model(padded, attention_mask=seen).last_hidden_state[:, :6]
            pooled = {"first": pooled[:, 0], "last": pooled[:, -1], "mean": pooled.mean(dim=1)}[kind]
            torch.testing.assert_close(model(padded).logits, model.score(pooled))
            model.config.pad_token_id = None  # nothing says enough
            if kind == "last":
                with pytest.raises(ValueError, match="pad_token_id=None: with several rows, give an attention_mask"):
                    model(padded)

    def test_a_classifier_keeps_documents_apart(self):
        model, input_ids = encoder(NLQForSequenceClassification, pad_token_id=0), random_tokens(1, 8).clamp(min=1)
        packed = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}
        with torch.no_grad():
            expected = model.score(model.model(input_ids, **packed).last_hidden_state.mean(dim=1))
            torch.testing.assert_close(model(input_ids, **packed).logits, expected)

    def test_the_loss_counts_masked_tokens(self):
        model, input_ids = encoder(), random_tokens(2, 9)
        labels = input_ids.masked_fill(torch.rand(2, 9) < 0.6, -100)
        output = model(input_ids, labels=labels)
        shares = torch.log_softmax(output.logits, dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        torch.testing.assert_close(output.loss.double(), -shares[labels != -100].mean(), rtol=1e-6, atol=1e-6)
        halved = model(input_ids, labels=labels, num_items_in_batch=2 * (labels != -100).sum()).loss
        torch.testing.assert_close(halved, output.loss / 2)


class TestRefusals:
    def test_calls_are_refused_by_name(self):
        model, decoder, input_ids = encoder(), encoder(is_causal=True), random_tokens(1, 4)
        changed = encoder()
        changed.config.is_causal = True
        cache = DynamicCache(config=decoder.config)
        for each, inputs, message in (
            (model, {"use_cache": True}, "is_causal=False: an encoder has no cache"),
            (model, {"past_key_values": cache}, "is_causal=False: an encoder has no cache"),
            (model, {"is_causal": True}, "is_causal=True: the configuration of this model has"),
            (decoder, {"is_causal": False}, "is_causal=False: the configuration of this model has"),
            (model, {"attention_mask": torch.ones(1, 5)}, r"attention_mask=\(1, 5\) must be \(batch, key\)=\(1, 4\)"),
            (model, {"labels": input_ids[:, :3]}, r"labels=\(1, 3\) must be \(batch, length\)=\(1, 4\)"),
            (changed, {}, "is_causal=True: the model was made with is_causal=False; make it anew"),
        ):
            with pytest.raises(ValueError, match=message):
                each(input_ids, **inputs)
        assert model(input_ids).get("past_key_values") is None

    def test_configurations_are_refused_by_name(self):
        class Late(AttentionPart):
            name, causal_only = "late_test_part", True

            def change_output(self, call, heads):
                return heads

        register_attention_part(Late)
        with pytest.raises((ValueError, StrictDataclassError), match="late_test_part needs an order of the tokens"):
            NLQConfig(**SIZES, is_causal=False, attention_parts=["late_test_part"])
        for head, other in ((NLQForCausalLM, NLQForMaskedLM), (NLQForMaskedLM, NLQForCausalLM)):
            is_causal = head is NLQForMaskedLM
            with pytest.raises(ValueError, match=f"is_causal={is_causal} needs {other.__name__}"):
                head(NLQConfig(**SIZES, is_causal=is_causal))

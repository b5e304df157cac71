"""Models of Transformers' families as NLQ models and back, against the families' own classes."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support.conversion_cases import (
    Frozen,
    assert_same_function,
    assert_same_state,
    from_nlq,
    output_of,
    upcycle,
)
from support.family_cases import (
    FAMILY_CASES,
    ONE_OF_EACH,
    WINDOW,
    comparable,
    family_of,
    is_encoder,
    make_config,
    make_family_model,
    shared_family_model,
)
from support.model_cases import random_tokens
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from modeling_nlq import NLQForCausalLM, NLQForMaskedLM
from modeling_nlq.training.conversion.draft import to_nlq
from modeling_nlq.training.conversion.families import FAMILIES


pytestmark = pytest.mark.thin(6)


LENGTH = 3 * WINDOW + 2
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
one_of_each = pytest.mark.parametrize("name", ONE_OF_EACH.values(), ids=ONE_OF_EACH)


def test_every_family_has_two_shapes_or_more():
    named = [family_of(name) for name in FAMILY_CASES]
    assert {family: named.count(family) >= 2 for family in FAMILIES} == dict.fromkeys(ONE_OF_EACH, True)


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_logits_are_those_of_the_family_and_back(name):
    theirs = shared_family_model(name)
    with Frozen(theirs):
        ours = to_nlq(theirs)
    assert type(ours) is (NLQForMaskedLM if is_encoder(name) else NLQForCausalLM) and not ours.training
    assert_same_function(ours, theirs, length=LENGTH)
    with Frozen(ours):
        back = from_nlq(ours, family_of(name))
    assert type(back) is type(theirs) and not back.training
    assert_same_state(back.state_dict(), theirs.state_dict())
    assert comparable(back.config) == comparable(theirs.config)
    assert_same_function(back, theirs, 0.0, length=LENGTH)


def test_dense_mask_of_a_window():
    """It covers all tokens, or the keys that a layer with a window still has."""
    theirs, tokens = shared_family_model("mistral-window"), random_tokens(1, LENGTH, 29)
    ours, visible = to_nlq(theirs), torch.ones(1, 1, 1, LENGTH, dtype=torch.bool)
    expected = output_of(theirs, tokens)[:, -1:]
    for width in (WINDOW, LENGTH):
        with torch.no_grad():
            cache = ours(tokens[:, :-1], use_cache=True).past_key_values
            logits = ours(tokens[:, -1:], attention_mask=visible[..., :width], past_key_values=cache).logits
        torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_angles_that_follow_from_the_length():
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": None, "original_max_position_embeddings": 8}
    theirs = make_family_model("llama-grouped", rope_parameters=yarn)
    ours = to_nlq(theirs)
    assert_same_function(ours, theirs, length=LENGTH)
    with pytest.raises(ValueError, match=r"max_position_embeddings=32 cannot become 64: .* angles"):
        upcycle(ours, {"max_position_embeddings": 64})
    longer = upcycle(ours, {"max_position_embeddings": 64, "rope_parameters": {**yarn, "factor": 4.0}})
    assert_same_function(longer, theirs, length=LENGTH)


HEADS = {
    "model": AutoModel,
    "sequence_classification": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
    "question_answering": AutoModelForQuestionAnswering,
}


@one_of_each
@pytest.mark.parametrize("head", HEADS)
def test_heads_are_converted(name, head):
    labels = {"num_labels": 3} if "classification" in head else {}
    try:
        theirs = make_family_model(name, HEADS[head], **labels)
    except ValueError:
        family = family_of(name)
        assert type(make_config(name)) not in HEADS[head]._model_mapping  # Transformers has no such class
        with pytest.raises(ValueError, match=f"{family} has no model with the head of NLQFor"):
            from_nlq(to_nlq(make_family_model(ONE_OF_EACH["llama"], HEADS[head], **labels)), family)
        return
    if is_encoder(name) and head == "sequence_classification":
        with pytest.raises(
            ValueError, match=r"no counterpart of dense\.weight, .* of EuroBertForSequenceClassification"
        ):
            to_nlq(theirs)
        return
    ours = to_nlq(theirs)
    assert_same_function(ours, theirs, length=LENGTH)
    back = from_nlq(ours, family_of(name))
    assert type(back) is type(theirs)
    assert_same_state(back.state_dict(), theirs.state_dict())
    assert comparable(back.config) == comparable(theirs.config)


_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
_LONGROPE |= {"rope_theta": 10.0, "factor": 2.0, "original_max_position_embeddings": 16}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
# (case, other fields, what the error names)
REFUSED = [
    ("llama-grouped", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10.0, "factor": 2.0}}, "dynamic"),
    ("mistral-window", {"rope_parameters": _LONGROPE}, "longrope"),
    ("llama-grouped", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("qwen2-grouped", {"use_qkv_bias": True}, "use_qkv_bias=True"),
    ("llama-grouped", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
    ("gpt2-untied", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("nanochat-without_cap", {"rope_parameters": _YARN}, "rope_type='yarn'"),
]


@pytest.mark.parametrize("name, options, named", REFUSED, ids=[named for *_, named in REFUSED])
def test_fields_without_a_counterpart_are_refused(name, options, named):
    config, family = make_config(name, **options), FAMILIES[family_of(name)]
    lost = family.not_read(config)
    try:
        family.read(config)
    except (ValueError, StrictDataclassError) as error:
        lost = [*lost, str(error)]
    assert len(lost) == 1 and named in lost[0]


# (case, family, what the error names)
NO_COUNTERPART = [
    ("gpt_neox-partial", "llama", ["norm_type", "mlp_type", "parallel_residual", "rope_parameters"]),
    ("qwen3-one_key_head", "llama", ["qk_norm='rms' cannot become None"]),
    ("qwen2-windows_in_upper_layers", "llama", ["layers 1, 2: sliding_window=4 cannot become None"]),
    ("llama-biases_and_wide_heads", "mistral", ["query_key_value_bias=True cannot become False", "mlp_bias"]),
    ("llama-grouped", "diffllama", ["differential_attention=None cannot become 'v1': the norm of the"]),
    ("arcee-yarn_and_epsilon", "nanochat", ["nanochat has no model of this shape", "yarn"]),
    ("llama-grouped", "eurobert", ["eurobert has no model with the head of NLQForCausalLM"]),
    ("eurobert-grouped", "llama", ["llama has no model with the head of NLQForMaskedLM"]),
]


@pytest.mark.parametrize("name, family, named", NO_COUNTERPART)
def test_no_counterpart(name, family, named):
    with pytest.raises(ValueError) as error:
        from_nlq(to_nlq(shared_family_model(name)), family)
    assert all(text in str(error.value) for text in named) and "\n" not in str(error.value)


# (case, another family that computes the same): new biases are 0, windows that are not there, or in all layers
OTHER_FAMILIES = [
    ("llama-grouped", "qwen2"),
    ("mistral-without_window", "llama"),
    ("mistral-window", "smollm3"),
    ("llama-biases_and_wide_heads", "smollm3"),
]


@pytest.mark.parametrize("name, family", OTHER_FAMILIES)
def test_another_family(name, family):
    theirs = shared_family_model(name)
    other = from_nlq(to_nlq(theirs), family)
    assert other.config.model_type == family
    assert_same_function(other, theirs, length=LENGTH)

"""The arguments of `forward`: both names of the cache, and none that matters is ignored. Deprecated calls."""

import contextlib

import pytest
import torch
from transformers import DynamicCache

from modeling_nlq import NLQConfig, NLQForMaskedLM
from modeling_nlq.cache_nlq import CACHE_NAME
from modeling_nlq.integrations_nlq import KNOWN_ARGUMENTS


TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("activation", ["softmax", "linear_attention"])
def test_the_cache_may_be_given_by_both_names(make_model, name, activation):
    model = make_model(attention_activation=activation)
    is_deprecated = name != "cache" and CACHE_NAME == "cache"
    for module, key in ((model, "logits"), (model.model, "last_hidden_state")):
        cache = DynamicCache(config=model.config)
        with pytest.warns(FutureWarning, match="is deprecated") if is_deprecated else contextlib.nullcontext():
            outputs = [module(part, **{name: cache}) for part in TOKENS.split([3, 2], dim=1)]
        torch.testing.assert_close(torch.cat([output[key] for output in outputs], dim=1), module(TOKENS)[key])
        assert outputs[0][CACHE_NAME] is cache
        with pytest.raises(
            ValueError, match=r"cache and past_key_values are two names|Both `past_key_values` and `cache`"
        ):
            module(TOKENS, cache=cache, past_key_values=DynamicCache(config=model.config))  # as PEFT may give


@pytest.mark.parametrize(
    "name, value",
    [
        ("kv_store", DynamicCache()),
        ("kv_store", torch.ones(1, 5)),
        ("kv_store", [torch.ones(1, 5)]),
        ("attention_mask", {"full_attention": None}),
    ],
    ids=["cache", "tensor", "list", "mask_by_layer_type"],
)
def test_no_argument_is_ignored(make_model, name, value):
    model = make_model()
    for module in (model, model.model, NLQForMaskedLM(NLQConfig(**{**model.config.to_dict(), "is_causal": False}))):
        with pytest.raises(ValueError, match=rf"^{name}\b.* a {type(value).__name__}"):
            module(TOKENS, **{name: value})


def test_known_arguments_and_plain_values_change_nothing(make_model):
    model = make_model()
    positions = torch.arange(5)[None]
    known = dict.fromkeys(KNOWN_ARGUMENTS - {"output_attentions", "output_hidden_states"}, torch.ones_like(TOKENS))
    switches = {"return_dict": True, "use_cache": False, "a_number": 3, "a_name": "x", "nothing": None}
    actual = model(TOKENS, position_ids=positions, **known, **switches).logits
    assert torch.equal(actual, model(TOKENS).logits)

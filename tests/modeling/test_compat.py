"""Both names of the cache that `forward` takes, and the guard against deprecated calls of our own."""

import pytest
import torch
from support.deprecations import DeprecationHandler
from support.paths import REPOSITORY
from transformers import DynamicCache
from transformers.utils import logging

from modeling_nlq.integrations_nlq import CACHE_NAME


TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("activation", ["softmax", "linear_attention"])
def test_both_names_of_the_cache(make_model, name, activation):
    model = make_model(attention_activation=activation)
    for module, key in ((model, "logits"), (model.model, "last_hidden_state")):
        cache = DynamicCache(config=model.config)
        outputs = [module(part, **{name: cache}) for part in TOKENS.split([3, 2], dim=1)]
        torch.testing.assert_close(torch.cat([output[key] for output in outputs], dim=1), module(TOKENS)[key])
        assert outputs[0][CACHE_NAME] is cache
        with pytest.raises(ValueError, match="cache and past_key_values are two names for one argument"):  # as PEFT may give
            module(TOKENS, cache=cache, past_key_values=DynamicCache(config=model.config))


@pytest.mark.parametrize("folder, is_ours", [("modeling_nlq", True), ("training/run", True), ("tests", False)])
def test_deprecations_are_found_by_their_caller(folder, is_ours):
    """The handler that fails every test in which our own code makes a deprecated call (conftest.py)."""
    handler, logger = DeprecationHandler(), logging.get_logger("transformers.tests")
    logger.addHandler(handler)
    code = compile(
        "logger.warning_once('`old` is deprecated'); logger.warning('fine')", REPOSITORY / folder / "file.py", "exec"
    )
    exec(code, {"logger": logger})
    logger.removeHandler(handler)
    assert len(handler.found) == is_ours
    for handler in logging.logging.getLogger("transformers").handlers:  # the fixture's own has heard it too
        getattr(handler, "found", []).clear()

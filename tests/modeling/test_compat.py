"""The arguments of `forward`: both names of the cache, and nothing that matters is ignored. The warning of a newer version."""

import pytest
import torch
from support.deprecations import DeprecationHandler
from support.paths import REPOSITORY
from transformers import DynamicCache, GenerationMixin
from transformers.utils import logging

from modeling_nlq import NLQModel, configuration_nlq
from modeling_nlq.integrations_nlq import CACHE_NAME, IGNORED_ARGUMENTS


TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture
def messages(monkeypatch):
    """What the loggers of Transformers print, each message as if it were the first."""
    found = []
    monkeypatch.setattr(logging.logging.Logger, "warning_once", lambda self, message, *args: found.append(message))
    return found


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "linear_attention"])
def test_both_names_of_the_cache(make_model, name, activation):
    model = make_model(attention_activation=activation)
    for module, key in ((model, "logits"), (model.model, "last_hidden_state")):
        cache = DynamicCache(config=model.config)
        outputs = [module(part, **{name: cache}) for part in TOKENS.split([3, 2], dim=1)]
        torch.testing.assert_close(torch.cat([output[key] for output in outputs], dim=1), module(TOKENS)[key])
        assert outputs[0][CACHE_NAME] is cache
        # In the old place of `past_key_values`
        torch.testing.assert_close(module(TOKENS[:, :1], None, None, cache)[key].shape[1], 1)


def test_both_names_at_once(make_model):
    model = make_model()
    one, two = (DynamicCache(config=model.config) for _ in range(2))
    assert model(TOKENS, cache=one, past_key_values=one)[CACHE_NAME] is one
    assert model(TOKENS, cache=None, past_key_values=two)[CACHE_NAME] is two
    for module in (model, model.model):
        with pytest.raises(ValueError, match=r"cache and past_key_values are two names for one argument"):
            module(TOKENS, cache=one, past_key_values=two)


@pytest.mark.parametrize(
    "value",
    [DynamicCache(), torch.ones(1, 5), [torch.ones(1, 5)], {"full_attention": None}, object()],
    ids=["cache", "tensor", "list", "dictionary", "object"],
)
def test_unknown_arguments_are_refused(make_model, value):
    model = make_model()
    for module in (model, model.model):
        with pytest.raises(ValueError, match=rf"^kv_store: .* a {type(value).__name__}\. Leave it out"):
            module(TOKENS, kv_store=value)


def test_known_and_harmless_arguments(make_model):
    model = make_model()
    expected = model(TOKENS).logits
    harmless = dict.fromkeys(IGNORED_ARGUMENTS, torch.ones_like(TOKENS))
    switches = {
        "return_dict": True,
        "use_cache": False,
        "some_switch": True,
        "some_number": 3,
        "some_name": "x",
        "nothing": None,
    }
    assert torch.equal(model(TOKENS, **harmless, **switches).logits, expected)


def test_documented_arguments():
    text = (REPOSITORY / "docs" / "versions.md").read_text()
    assert all(f"| `{name}` | {reason} |" in text for name, reason in IGNORED_ARGUMENTS.items())


@pytest.mark.parametrize("renamed", [CACHE_NAME, "attention_mask"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_a_renaming_stops_generation(make_model, renamed, activation, monkeypatch):
    """As a future release may rename what `generate` passes, other tokens must not come out in silence."""
    model = make_model(attention_activation=activation)
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    prepare = GenerationMixin.prepare_inputs_for_generation

    def renaming(*args, **kwargs):
        inputs = prepare(*args, **kwargs)
        inputs["a_new_name"] = inputs.pop(renamed)
        return inputs

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", renaming)
    with pytest.raises(ValueError, match=r"^a_new_name: NLQ models do not know this argument"):
        model.generate(TOKENS, attention_mask=mask, max_new_tokens=2, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize(
    "installed, is_newer", [("5.21.0", False), ("5.24.0", False), ("5.24.3", False), ("5.25.0.dev0", True)]
)
def test_warning_of_a_newer_transformers(make_model, messages, installed, is_newer, monkeypatch):
    monkeypatch.setattr(configuration_nlq.transformers, "__version__", installed)
    monkeypatch.setattr(configuration_nlq, "NEWEST_TRANSFORMERS", "5.24.0")
    NLQModel(make_model().config)
    found = {message for message in messages if "was tested with Transformers" in message}
    assert len(found) == is_newer
    assert all(f"{installed} is installed" in message and "docs/versions.md" in message for message in found)


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

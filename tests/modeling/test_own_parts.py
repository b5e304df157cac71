"""Parts of a user's own: their files travel with a model, and no other code is ever used in their place."""

import functools
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support.model_cases import random_tokens
from support.own_parts import DISTANCE
from support.remote_code import run_python
from transformers import AutoModelForCausalLM

from modeling_nlq import (
    AttentionPart,
    NLQConfig,
    NLQForCausalLM,
    NLQForConditionalGeneration,
    NLQSeq2SeqConfig,
    load_attention_parts,
    parts_files,
    parts_user_nlq,
    register_attention_part,
)
from modeling_nlq.training.loading import initialize_by_name


SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 32}
STEEPER = DISTANCE.replace("-5.0", "-6.0")


@pytest.fixture(autouse=True)
def no_parts(monkeypatch):
    """Each test begins as a new process does."""
    monkeypatch.setattr(parts_user_nlq, "_registered", {})
    monkeypatch.setattr(parts_user_nlq, "_latest", {})


def load(folder, text, name="my_idea.py"):
    path = folder / name
    path.write_text(text)
    return load_attention_parts(path)


def make(seed=0, **switches):
    torch.manual_seed(seed)
    return NLQForCausalLM(NLQConfig(**SIZES, attention_parts=["distance"], **switches)).eval()


LOADED = """
import sys
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

folder, again = sys.argv[1:]
inputs, expected = torch.arange(12)[None], torch.load(f"{folder}.pt")
for place in (folder, again):
    for head in ("", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"):
        auto_class = getattr(transformers, f"AutoModel{head}")
        model = auto_class.from_pretrained(place, trust_remote_code=True).eval()
        if head == "ForCausalLM":
            torch.testing.assert_close(model(inputs).logits, expected)
            options = {"max_new_tokens": 4, "do_sample": False}
            generated = [model.generate(inputs, use_cache=cache, **options) for cache in (True, False)]
            assert torch.equal(*generated)
            model.save_pretrained(again)
    assert AutoConfig.from_pretrained(place, trust_remote_code=True).attention_parts == ["distance"]
open(f"{folder}/my_idea.py", "a").write("# changed\\n")
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
except Exception as error:
    assert "'distance' (code" in str(error), error
    print("refused")
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_installed", [False, True], ids=["no_package", "installed_not_imported"])
def test_a_folder_brings_its_parts_and_a_changed_file_is_refused(tmp_path, is_installed):
    """Through all Auto classes, and again after it was saved by its own code."""
    load(tmp_path, DISTANCE)
    model = make()
    model.save_pretrained(tmp_path / "saved")
    torch.save(model(torch.arange(12)[None]).logits, tmp_path / "saved.pt")
    folders = (tmp_path / "saved", tmp_path / "again")
    assert run_python(LOADED, *folders, folder=tmp_path, is_installed=is_installed).endswith("refused\n")


PAIR = """
import sys
import torch
from transformers import AutoModelForSeq2SeqLM

folder, again = sys.argv[1:]
inputs, expected = torch.arange(12)[None], torch.load(f"{folder}.pt")
for place in (folder, again):
    model = AutoModelForSeq2SeqLM.from_pretrained(place, trust_remote_code=True).eval()
    torch.testing.assert_close(model(inputs, decoder_input_ids=inputs).logits, expected)
    model.save_pretrained(again)
"""


@pytest.mark.slow
def test_a_pair_brings_the_parts_of_both_halves(tmp_path):
    """Files of two parts, whose classes have one name, travel with it; without them, and the package, they load."""
    load(tmp_path, DISTANCE), load(tmp_path, STEEPER.replace('"distance"', '"steeper"'), name="steep.py")
    torch.manual_seed(0)
    halves = {"encoder": {"attention_parts": ["distance"]}, "decoder": {"attention_parts": ["steeper"]}}
    config = NLQSeq2SeqConfig(**{name: {**SIZES, **part} for name, part in halves.items()})
    model, tokens = NLQForConditionalGeneration(config).eval(), torch.arange(12)[None]
    torch.save(model(tokens, decoder_input_ids=tokens).logits, tmp_path / "saved.pt")
    model.save_pretrained(tmp_path / "saved")
    run_python(PAIR, tmp_path / "saved", tmp_path / "again", folder=tmp_path)


def test_the_imported_package_runs_no_file_by_itself(tmp_path):
    """Transformers prefers the package to the folder's code, also under `trust_remote_code=True`."""
    load(tmp_path, DISTANCE)
    model, tokens = make(), random_tokens(1, 9)
    model.save_pretrained(tmp_path / "saved")
    for register in (list, lambda: load(tmp_path, STEEPER)):
        parts_user_nlq._registered.clear()
        parts_user_nlq._latest.clear()
        register()
        with pytest.raises(StrictDataclassError, match="load it by"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    load_attention_parts(tmp_path / "saved" / "my_idea.py")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    loaded.save_pretrained(tmp_path / "again")
    for name in ("my_idea.py", "parts_nlq.py"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "saved" / name).read_text()


INITIAL = """
import torch
from torch import nn

from modeling_nlq import AttentionPart


class Zero(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)


class Part(AttentionPart):
    name = "initial"

    def change_output(self, call, heads):
        return heads

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.plain = nn.Linear(64, 64)
        self.zero, self.filled, self.replaced = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.zeros_(self.zero.weight)
        self.filled.weight.data.fill_(5.0)
        self.replaced.weight = nn.Parameter(torch.eye(4))
        self.own_class = Zero(4, 4)
        self.embedding = nn.Embedding(99, 64)
        nn.init.normal_(self.embedding.weight)
        self.norm, self.conv = nn.LayerNorm(4), nn.Conv1d(2, 2, 3)
        nn.init.constant_(self.norm.weight, 0.5)
        nn.init.dirac_(self.conv.weight)
        self.list = nn.ParameterList([nn.Parameter(torch.full((2,), 7.0))])
        self.inside = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        nn.init.ones_(self.inside[1].bias)
"""


@pytest.mark.parametrize("has_buffer", [False, True])
@pytest.mark.parametrize("made", ["from_config", "by_name", "missing", "loaded"])
def test_values_that_init_sets_in_modules_inside_are_kept(tmp_path, made, has_buffer):
    buffer = '        self.register_buffer("table", torch.full((2,), 4.0), persistent=False)\n'
    load(tmp_path, INITIAL + buffer * has_buffer)
    config = NLQConfig(**SIZES, attention_parts=["initial"])
    missing = {"config": config, "state_dict": {}}
    model = NLQForCausalLM.from_pretrained(None, **missing) if made == "missing" else NLQForCausalLM(config)
    if made == "by_name":
        initialize_by_name(model, 0)
    part = model.model.layers[1].self_attn.parts["initial"]
    if made == "loaded":
        torch.nn.init.ones_(part.zero.weight)
        model.save_pretrained(tmp_path / "saved")
        model = NLQForCausalLM.from_pretrained(tmp_path / "saved")
        part = model.model.layers[1].self_attn.parts["initial"]
    assert (part.zero.weight == (made == "loaded")).all()
    assert (part.filled.weight == 5).all() and torch.equal(part.replaced.weight, torch.eye(4))
    assert not part.own_class.weight.any() and (part.norm.weight == 0.5).all()
    assert torch.equal(part.conv.weight, torch.nn.init.dirac_(torch.empty(2, 2, 3)))
    assert (part.list[0] == 7).all() and (part.inside[1].bias == 1).all()
    assert not has_buffer or (part.table == 4).all()
    assert 0.9 < part.embedding.weight.std() < 1.1
    for plain in (part.plain, part.inside[0]):
        assert 0.01 < plain.weight.std() < 0.03 and not plain.bias.any()


def test_two_files_of_one_name_live_together(tmp_path):
    load(tmp_path, DISTANCE)
    first = make()
    first.save_pretrained(tmp_path / "first")
    load(tmp_path, STEEPER)
    second, tokens = make(), random_tokens(1, 9)
    assert first.config.attention_parts_code != second.config.attention_parts_code
    again = NLQForCausalLM.from_pretrained(tmp_path / "first").eval()
    assert torch.equal(again(tokens).logits, first(tokens).logits)
    assert not torch.equal(again(tokens).logits, second(tokens).logits)


@pytest.mark.parametrize(
    "before, imports, after",
    [
        ("x = 1; ", "AttentionPart", "; y = 2"),
        ("x = 'ä\u2028'; ", "(  # two\n    AttentionPart as A,\n    ScoreBias,\n)", "  # end"),
    ],
)
def test_only_imports_are_rewritten(before, imports, after):
    text = parts_files.published_text(f"{before}from modeling_nlq import {imports}{after}", "my_idea.py")
    names = "AttentionPart as A, ScoreBias" if "\n" in imports else imports
    assert text == f"{before}from .parts_base_nlq import {names}{after}\n"
    assert parts_files.published_text(text, "my_idea.py") == text


def test_names_that_are_refused(tmp_path):
    for name in ("keys", "forward", "training", "__class__", "_modules", "a.b"):
        with pytest.raises(ValueError, match=rf"^Bias.name='{name}' must be a Python identifier, and no attribute of"):
            load(tmp_path, DISTANCE.replace('"distance"', f'"{name}"'))
    load(tmp_path, DISTANCE.replace('"distance"', '"forget_gate"'))
    with pytest.raises(StrictDataclassError, match="'forget_gate' is a field of its own"):
        NLQConfig(**SIZES, attention_parts=["forget_gate"])


def test_a_part_may_be_in_one_layer(tmp_path):
    load(tmp_path, DISTANCE.replace("\n", "\r\n"))  # line ends make no other file
    model = make(per_layer_config={0: {"attention_parts": None}})
    load(tmp_path, DISTANCE)
    assert make().config.attention_parts_code == model.config.attention_parts_code
    assert [list(layer.self_attn.parts) for layer in model.model.layers] == [[], ["distance"]]
    model.save_pretrained(tmp_path / "saved")
    loaded = NLQForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_a_class_in_no_file_is_used_but_not_saved(tmp_path):
    class Here(AttentionPart):
        name = "distance"

        def change_output(self, call, heads):
            return heads

    register_attention_part(Here)
    model = make()
    assert model.config.attention_parts_code is None
    with pytest.raises(ValueError, match=r"'distance' is defined in no file"):
        model.save_pretrained(tmp_path)
    unnamed, called = (type("B", (AttentionPart,), own) for own in ({"name": "a b"}, {"name": "b", "forward": len}))
    wrong = ((unnamed, "a Python identifier"), (called, "B overrides `forward`"))
    for bad, message in ((int, "must be a subclass"), *wrong):
        with pytest.raises(ValueError, match=message):
            register_attention_part(bad)


# Methods of a part, and what is said of them; nothing of a part that is right
METHODS = {
    "change_outputs": "B.change_outputs is not a hook, so nothing calls it; did you mean 'change_output'?",
    "score_biass change_output": "B.score_biass is not a hook, so nothing calls it; did you mean 'score_bias'?",
    "token_states change_output": "did you mean 'token_state'?",
    "change_rotation change_output": "B.change_rotation is not a hook, so nothing calls it; did you mean 'change_",
    "changes_output": "B overrides no hook, so it changes nothing; did you mean 'change_output'? hooks are ch",
    "change_projections": "B.change_projections is 'change_qkv' now",
    "can_go_back change_output": "B.can_go_back is 'supports_crop' now",
    "": "B overrides no hook, so it changes nothing; hooks are change_residual, change_input,",
    "change_output helper": None,
    "measure": None,
}


@pytest.mark.parametrize("methods", METHODS)
def test_a_misspelt_hook_is_refused(methods):
    part = type("B", (AttentionPart,), {"name": "b", **dict.fromkeys(methods.split(), lambda self, call: None)})
    if METHODS[methods] is None:
        assert register_attention_part(part) is part
        return
    with pytest.raises(ValueError, match=re.escape(METHODS[methods])):
        register_attention_part(part)


def test_a_helper_may_be_named_as_a_hook(tmp_path):
    """Here within a comprehension, of which older versions of Python make a function."""
    helper = "    @staticmethod\n    def score_of(slope):\n        return slope.exp()\n"
    call = "torch.stack([self.score_of(slope) for slope in self.slope_bias])[:, None]"
    text = DISTANCE.replace("self.slope_bias.exp()[:, None]", call)
    assert text != DISTANCE and load(tmp_path, f"{text}\n{helper}")
    with pytest.raises(ValueError, match=r"Bias\.score_of is not a hook"):
        load(tmp_path, f"{DISTANCE}\n{helper}")
    for caller in (
        "    @property\n    def slope(self):\n        return self.score_of(self.slope_bias)\n",
        "\n\ndef slope(part):\n    return part.score_of(part.slope_bias)\n",
        "\n\nclass Slope:\n    def __call__(self, part):\n        return part.score_of(part.slope_bias)\n",
    ):
        assert load(tmp_path, f"{DISTANCE}\n{helper}\n{caller}")


def test_a_hook_may_be_any_callable():
    def scaled(call, heads, factor):
        return heads * factor

    hook = functools.partial(scaled, factor=2)
    assert register_attention_part(part := type("B", (AttentionPart,), {"name": "b", "change_output": hook})) is part

"""A saved folder loads, generates and is saved again in a process without this package."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from support.grids import slow_except
from support.remote_code import run_python, tiny_config
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_imports, get_relative_import_files

import modeling_nlq
from modeling_nlq import NLQConfig, NLQForCausalLM, NLQForMaskedLM, NLQForSequenceClassification, activations_nlq
from modeling_nlq.parts_user_nlq import AUTO_MAP


PACKAGE = Path(modeling_nlq.__file__).parent


INPUTS = torch.arange(12).reshape(2, 6) % 50
LOAD_ALL = """
import sys
import torch
import transformers

folder, out, again, resaved, *names = sys.argv[1:]
inputs = torch.arange(12).reshape(2, 6) % 50
results = {}
for name in names:
    torch.manual_seed(0)  # heads the folder has no weights for are new
    model = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    results[name] = model(inputs)[0].detach()
    if name == "AutoModelForCausalLM":
        results["generated"] = model.generate(inputs, max_new_tokens=5, do_sample=False)
    if name == resaved:
        model.save_pretrained(again)
config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
results["config"] = config.per_layer_config[0].attention_activation
assert sys.modules["modeling_nlq"] is None
torch.save(results, out)
"""


def save(folder: Path, **switches) -> NLQForCausalLM:
    """A model with some weights, saved in a folder."""
    torch.manual_seed(0)
    model = NLQForCausalLM(tiny_config(**switches)).eval()
    model.save_pretrained(folder)
    return model


def edit(path: Path, old: str, new: str) -> None:
    """Makes another revision of a file of a saved model."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def load_remote(folder: Path, **options) -> torch.nn.Module:
    """The model of a folder by its own code, beside the installed package."""
    model_class = get_class_from_dynamic_module(AUTO_MAP["AutoModelForCausalLM"], str(folder))
    return model_class.from_pretrained(folder, **options).eval()


@torch.no_grad()
def logits_of(model, inputs=INPUTS) -> torch.Tensor:
    return model(inputs).logits


@pytest.mark.parametrize(
    "saved_class",
    slow_except([NLQForCausalLM, NLQForMaskedLM, NLQForSequenceClassification], quick=[NLQForCausalLM]),
    ids=lambda saved: saved.__name__,
)
def test_folder_loads_without_the_package_through_every_auto_class(saved_class, tmp_path):
    torch.manual_seed(0)
    switches = {"attention_activation": "sigmoid", "attention_gate": "headwise", "head_projection": True}
    is_causal = saved_class is not NLQForMaskedLM
    model = saved_class(tiny_config(is_causal=is_causal, qk_norm="l2", **switches)).eval()
    folder, again, out = tmp_path / "saved", tmp_path / "again", tmp_path / "results.pt"
    model.save_pretrained(folder)
    auto_class = "AutoModel" + saved_class.__name__.removeprefix("NLQ")
    with torch.no_grad():
        expected = model(INPUTS)[0]
    other_direction = "AutoModelForMaskedLM" if is_causal else "AutoModelForCausalLM"
    names = [name for name in AUTO_MAP if name not in ("AutoConfig", other_direction)]
    run_python(LOAD_ALL, folder, out, again, auto_class, *names, folder=tmp_path)
    results = torch.load(out)
    assert results["config"] == "sigmoid" and set(names) <= set(results)
    # The package may have computed attention by its kernels
    torch.testing.assert_close(results[auto_class], expected, rtol=1e-5, atol=1e-6)
    assert not is_causal or results["generated"].shape == (2, 11)
    for file in folder.iterdir():  # saved again, it is the same
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    stored = json.loads((folder / "config.json").read_text())["auto_map"]
    assert stored == {name: AUTO_MAP[name] for name in ("AutoConfig", *names)}
    # `accelerate estimate-memory` and its like take the first
    first = next(name for name in stored if name.startswith("AutoModelFor"))
    assert first == f"AutoModelFor{'Causal' if is_causal else 'Masked'}LM"


ALL_CODE = {path.name for path in PACKAGE.glob("*_nlq.py")}
PAIR_CODE = {"configuration_seq2seq_nlq.py", "modeling_seq2seq_nlq.py"}


def test_published_folder_is_plain_pytorch(tmp_path):
    save(tmp_path, attention_activation="squared")
    files = {path.name: path.read_text() for path in tmp_path.glob("**/*.py")}
    assert set(files) == ALL_CODE - PAIR_CODE
    assert not list(tmp_path.glob("**/*.cpp")) + list(tmp_path.glob("**/*.h"))
    for name, text in files.items():
        assert not (found := re.findall(r"triton|#include|subprocess|ctypes|from \.+kernels", text)), (name, found)
        # packaging and huggingface_hub are requirements of Transformers itself
        allowed = {"torch", "transformers", "huggingface_hub", "packaging", *sys.stdlib_module_names}
        assert set(get_imports(tmp_path / name)) <= allowed, name
    for entry in ("configuration_nlq.py", "modeling_nlq.py", *PAIR_CODE):
        shipped = {Path(path).name for path in get_relative_import_files(PACKAGE / entry)} | {entry}
        assert shipped == (ALL_CODE if entry in PAIR_CODE else ALL_CODE - PAIR_CODE)


def test_old_revision_lives_beside_the_installed_package(tmp_path):
    model = save(tmp_path, attention_activation="relu")
    edit(tmp_path / "modeling_nlq.py", "return logits if cap is None", "return 2 * logits if cap is None")
    old_model = load_remote(tmp_path)
    # An installed class wins over remote code in the Auto classes: Transformers' rule
    installed = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    assert type(installed) is NLQForCausalLM
    assert torch.equal(logits_of(installed), logits_of(model))
    # The package may have computed attention by its kernels
    torch.testing.assert_close(logits_of(old_model), 2 * logits_of(model), rtol=1e-5, atol=1e-6)
    assert type(AutoModelForSequenceClassification.from_config(tiny_config()).model) is modeling_nlq.NLQModel


def test_registered_activations_belong_to_the_process(tmp_path):
    """Registered with the installed package, an activation is known to a model loaded as remote code."""
    name = "cube_of_the_process"
    activations_nlq.register_attention_activation(name, lambda scores: scores**3)
    try:
        model = save(tmp_path, attention_activation=name)
        remote = load_remote(tmp_path)
        assert type(remote) is not NLQForCausalLM and torch.equal(logits_of(remote), logits_of(model))
    finally:
        del activations_nlq._REGISTERED[name]


def test_revisions_have_caches_of_their_own(tmp_path):
    """Transformers' table of cache layers belongs to the process: a model must be given the state of its own code."""
    model = save(tmp_path, attention_activation="linear_attention", linear_attention_decay="learned")
    # A revision that has another name for what a model asks of its cache
    edit(tmp_path / "cache_nlq.py", "def get_state(", "def recall(")
    edit(tmp_path / "modeling_nlq.py", "get_state", "recall")
    other, inputs = load_remote(tmp_path), torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected = model(inputs, use_cache=False).logits
        for either in (model, other, model):
            cache = either(inputs[:, :4]).past_key_values
            torch.testing.assert_close(either(inputs[:, 4:], past_key_values=cache).logits, expected[:, 4:])
            static = either.generate(inputs, max_new_tokens=3, do_sample=False, cache_implementation="static")
            assert torch.equal(static, either.generate(inputs, max_new_tokens=3, do_sample=False, use_cache=False))


def test_revisions_have_operators_of_their_own(tmp_path):
    """PyTorch's table of operators belongs to the process: another `phi` of the same name may not replace ours."""
    ours, others = "torch.relu,", "lambda scores: 2 * torch.relu(scores),"
    options = {"attention_activation": "relu", "attention_normalization": "none", "attn_implementation": "nlq_tiled"}
    model = save(tmp_path, **options)
    edit(tmp_path / "activations_nlq.py", ours, others)
    other = load_remote(tmp_path, attn_implementation="nlq_tiled")
    heads = {}
    for name, either in (("ours", model), ("other", other)):
        output = either.model.layers[0].self_attn.o_proj
        output.register_forward_pre_hook(lambda module, inputs, name=name: heads.update({name: inputs[0]}))
    before = logits_of(model)
    logits_of(other)
    assert torch.equal(logits_of(model), before)
    assert torch.equal(heads["other"], 2 * heads["ours"])
    # The rows that the package added to its own table are not those of this revision
    with pytest.raises(ValueError, match="nlq_cpp"):
        other.set_attn_implementation("nlq_cpp")


def test_import_registers_and_twice_is_harmless():
    before = dict(vars(modeling_nlq))
    importlib.reload(modeling_nlq)
    assert vars(modeling_nlq)["NLQConfig"] is before["NLQConfig"]
    config = AutoConfig.for_model("nlq", hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=50)
    assert type(config) is NLQConfig
    assert type(AutoModel.from_config(config)) is modeling_nlq.NLQModel

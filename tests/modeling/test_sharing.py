"""A saved folder loads, generates and is saved again in a process without this package."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.grids import slow_except
from support.paths import TESTS
from support.remote_code import WITHOUT_THIS_PACKAGE, tiny_config
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_imports, get_relative_import_files

import modeling_nlq
from modeling_nlq import NLQConfig, NLQForCausalLM, NLQForMaskedLM, NLQForSequenceClassification, activations_nlq
from modeling_nlq.configuration_nlq import AUTO_MAP, MINIMUM_TRANSFORMERS


PACKAGE = Path(modeling_nlq.__file__).parent


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


INPUTS = torch.arange(12).reshape(2, 6) % 50


def run_python(code: str, *arguments: object, cache: Path, is_installed: bool = False) -> str:
    """Runs code in a process of its own, as if this package were not installed; returns what it prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cache), "PYTHONPATH": ""}
    command = [sys.executable, "-c", code if is_installed else WITHOUT_THIS_PACKAGE + code, *map(str, arguments)]
    done = subprocess.run(command, cwd=cache, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    return (
        get_class_from_dynamic_module(AUTO_MAP["AutoModelForCausalLM"], str(folder))
        .from_pretrained(folder, **options)
        .eval()
    )


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
    switches = {
        "attention_activation": "sigmoid",
        "attention_gate": "headwise",
        "head_projection": True,
        "qk_norm": "l2",
    }
    is_causal = saved_class is not NLQForMaskedLM
    model = saved_class(tiny_config(is_causal=is_causal, **switches)).eval()
    folder, again = tmp_path / "saved", tmp_path / "again"
    model.save_pretrained(folder)
    auto_class = "AutoModel" + saved_class.__name__.removeprefix("NLQ")
    with torch.no_grad():
        expected = model(INPUTS)[0]

    other_direction = "AutoModelForMaskedLM" if is_causal else "AutoModelForCausalLM"
    names = [name for name in AUTO_MAP if name not in ("AutoConfig", other_direction)]
    out = tmp_path / "results.pt"
    run_python(LOAD_ALL, folder, out, again, auto_class, *names, cache=tmp_path)
    results = torch.load(out)
    assert results["config"] == "sigmoid"
    # The package may have computed attention by its kernels
    torch.testing.assert_close(results[auto_class], expected, rtol=1e-5, atol=1e-6)
    assert not is_causal or results["generated"].shape == (2, 11)
    assert set(names) <= set(results)
    for file in folder.iterdir():  # saved again, it is the same
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    stored = json.loads((folder / "config.json").read_text())["auto_map"]
    assert stored == {name: AUTO_MAP[name] for name in ("AutoConfig", *names)}
    # `accelerate estimate-memory` and its like take the first
    assert (
        next(name for name in stored if name.startswith("AutoModelFor"))
        == f"AutoModelFor{'Causal' if is_causal else 'Masked'}LM"
    )


ALL_CODE = {path.name for path in PACKAGE.glob("*_nlq.py")}
PAIR_CODE = {"configuration_seq2seq_nlq.py", "modeling_seq2seq_nlq.py"}
PAIR = """
import sys
import torch
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float64)
inputs = torch.load(sys.argv[2])
torch.save([model(**inputs).logits, model.generate(**inputs, num_beams=2)], sys.argv[3])
model.save_pretrained(sys.argv[4])
"""


@pytest.mark.slow
def test_encoder_and_decoder_without_the_package(tmp_path):
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    decoder = {**sizes, "sliding_window": 3, "cross_attention": {"attention_activation": "sigmoid"}}
    config = modeling_nlq.NLQSeq2SeqConfig(
        encoder=sizes, decoder=decoder, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    model = modeling_nlq.NLQForConditionalGeneration(config).double().eval()
    folder, again, inputs = tmp_path / "first", tmp_path / "again", {"input_ids": torch.randint(3, 50, (2, 7))}
    model.save_pretrained(folder)
    assert {path.name for path in folder.glob("*.py")} == ALL_CODE
    inputs["decoder_input_ids"] = torch.tensor([[1], [1]])
    torch.save(inputs, tmp_path / "inputs")
    run_python(PAIR, folder, tmp_path / "inputs", tmp_path / "outputs", again, cache=tmp_path)
    logits, tokens = torch.load(tmp_path / "outputs")
    torch.testing.assert_close(logits, model(**inputs).logits)
    assert tokens.equal(model.generate(**inputs, num_beams=2))
    for file in folder.glob("*[!n]"):  # the configuration says after loading which type it was loaded in
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_published_folder_is_plain_pytorch(tmp_path):
    save(tmp_path, attention_activation="squared")
    files = {path.name: path.read_text() for path in tmp_path.glob("**/*.py")}
    assert set(files) == ALL_CODE - PAIR_CODE
    assert not list(tmp_path.glob("**/*.cpp")) + list(tmp_path.glob("**/*.h"))
    for name, text in files.items():
        found = re.findall(r"triton|#include|subprocess|ctypes|from \.+kernels", text)
        assert not found, (name, found)


BOTH = """
import sys
import torch
from transformers.dynamic_module_utils import get_class_from_dynamic_module

folder, order = sys.argv[1:]


def remote():
    return get_class_from_dynamic_module("modeling_nlq.NLQForCausalLM", folder)


def package():
    from modeling_nlq import NLQForCausalLM

    return NLQForCausalLM


inputs, logits = torch.arange(12).reshape(2, 6), []
for load in (remote, package) if order == "remote" else (package, remote):
    model = load().from_pretrained(folder).eval()
    model.train()(inputs, labels=inputs).loss.backward()
    logits.append(model.eval()(inputs).logits)
torch.testing.assert_close(*logits)
modules = {name: vars(module) for name, module in sys.modules.items() if name.endswith("_nlq")}
kernels = {name: names["used_kernels"]() for name, names in modules.items() if "used_kernels" in names}
(of_package,) = [used for name, used in kernels.items() if name.startswith("modeling_nlq.")]
(of_folder,) = [used for name, used in kernels.items() if name.startswith("transformers_modules.")]
assert of_folder == {"attention": ["nlq_tiled"], "loss": ["pytorch"]}, of_folder
print(of_package)
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["remote", "package"])
def test_kernels_stay_in_the_package(order, tmp_path):
    """Beside the package, and in both orders of import, a model of the folder computes by PyTorch."""
    save(tmp_path / "saved", attention_activation="squared")
    assert "loss" in run_python(BOTH, tmp_path / "saved", order, cache=tmp_path, is_installed=True)


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
    ours, others = "function=torch.relu,", "function=lambda scores: 2 * torch.relu(scores),"
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


@pytest.mark.parametrize(
    "entry", [f"{kind}{name}.py" for kind in ("configuration", "modeling") for name in ("_nlq", "_seq2seq_nlq")]
)
def test_scanner_finds_every_file_of_the_package(entry):
    shipped = {Path(path).name for path in get_relative_import_files(PACKAGE / entry)} | {entry}
    assert shipped == (ALL_CODE if "seq2seq" in entry else ALL_CODE - PAIR_CODE)


def test_shipped_files_need_transformers_and_torch_only():
    for path in PACKAGE.glob("*.py"):
        foreign = set(get_imports(path)) - set(sys.stdlib_module_names)
        # packaging and huggingface_hub are requirements of Transformers itself
        assert foreign <= {"torch", "transformers", "huggingface_hub", "packaging"}, path


@pytest.mark.slow
def test_transformers_too_old_says_so_in_one_line(tmp_path):
    save(tmp_path / "saved")
    script = (
        "import importlib.metadata, sys, transformers\nreal = importlib.metadata.version\nimportlib.metadata.version "
        "= lambda name: '5.0.0' if name == 'transformers' else real(name)\ntry:\n    "
        "transformers.AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)\nexcept ImportError as error:\n "
        "   print(str(error).splitlines()[0])\n"
    )
    message = run_python(script, tmp_path / "saved", cache=tmp_path)
    assert f"transformers>={MINIMUM_TRANSFORMERS}" in message and "5.0.0" in message


FSDP = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import modeling_nlq

folder, store, tests = sys.argv[1:]
sys.path.insert(0, tests)
from support.remote_code import tiny_config

dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
torch.manual_seed(0)
model = modeling_nlq.NLQForCausalLM(tiny_config())
mesh = init_device_mesh("cpu", (1,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.arange(12).reshape(2, 6)
model(inputs, labels=inputs).loss.backward()
optimizer.step()
assert type(model) is not modeling_nlq.NLQForCausalLM
assert model._get_name() == "NLQForCausalLM"  # by which Trainer knows that labels are to be shifted
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
model.save_pretrained(folder, state_dict=state)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_folder_saved_under_fsdp2_loads_without_the_package(tmp_path):
    folder = tmp_path / "saved"
    run_python(FSDP, folder, tmp_path / "store", TESTS, cache=tmp_path, is_installed=True)
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"].items() <= AUTO_MAP.items() and config["architectures"] == ["NLQForCausalLM"]
    assert {path.name for path in folder.glob("*.py")} == ALL_CODE - PAIR_CODE
    name, out = "AutoModelForCausalLM", tmp_path / "results.pt"
    run_python(LOAD_ALL, folder, out, tmp_path / "again", name, name, cache=tmp_path)
    assert torch.equal(torch.load(out)[name], logits_of(NLQForCausalLM.from_pretrained(folder).eval()))

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
from support.paths import TESTS
from support.remote_code import WITHOUT_THIS_PACKAGE, tiny_config
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_imports, get_relative_import_files

import modeling_nlq
from modeling_nlq import NLQConfig, NLQForCausalLM, NLQForSequenceClassification, activations_nlq
from modeling_nlq.configuration_nlq import AUTO_MAP, MINIMUM_TRANSFORMERS
from modeling_nlq.training import publish


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


def run_python(code: str, *arguments: object, cache: Path, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cache), "PYTHONPATH": "", **variables}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cache,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "saved_class",
    [NLQForCausalLM, pytest.param(NLQForSequenceClassification, marks=pytest.mark.slow)],
    ids=lambda saved: saved.__name__,
)
def test_folder_loads_without_the_package_through_every_auto_class(saved_class, tmp_path):
    torch.manual_seed(0)
    switches = {"attention_activation": "sigmoid", "attention_gate": "headwise", "head_projection": True, "qk_norm": "l2"}
    model = saved_class(tiny_config(**switches)).eval()
    folder, again = tmp_path / "saved", tmp_path / "again"
    model.save_pretrained(folder)
    auto_class = "AutoModel" + saved_class.__name__.removeprefix("NLQ")
    with torch.no_grad():
        expected = model(torch.arange(12).reshape(2, 6) % 50)[0]

    names = [name for name in AUTO_MAP if name != "AutoConfig"]
    out = tmp_path / "results.pt"
    for source, target in ((folder, again), (again, tmp_path / "third")):
        assert json.loads((source / "config.json").read_text())["auto_map"] == AUTO_MAP
        done = run_python(WITHOUT_THIS_PACKAGE + LOAD_ALL, source, out, target, auto_class, *names, cache=tmp_path)
        assert done.returncode == 0, done.stderr
        results = torch.load(out)
        assert results["config"] == "sigmoid"
        # The package may have computed attention by its kernels
        torch.testing.assert_close(results[auto_class], expected, rtol=1e-5, atol=1e-6)
        assert results["generated"].shape == (2, 11)
        assert set(AUTO_MAP) - {"AutoConfig"} <= set(results)


DERIVED = """
import torch
from modeling_nlq import NLQConfig, NLQForCausalLM


class MineConfig(NLQConfig):
    factor: int = 1


class Mine(NLQForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.own = torch.nn.Parameter(torch.ones(50))
        self.post_init()

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * self.own * getattr(self.config, "factor", 1)
        return outputs


class Both(Mine):
    config_class = MineConfig
"""
LOAD_DERIVED = """
import sys
import torch
from transformers import AutoModelForCausalLM

for folder in sys.argv[1:]:
    for again in range(2):  # the first of them imports the package
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        names = type(model).__name__, type(model.config).__name__, getattr(model.config, "factor", None)
        print(*names, float(model(torch.arange(6)[None]).logits.double().sum()))
        model.save_pretrained(folder)
"""


@pytest.fixture
def derived(tmp_path, monkeypatch):
    """A module of a user's own, with classes that derive from ours and are registered."""
    (tmp_path / "derived_models.py").write_text(DERIVED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "derived_models", raising=False)
    module = importlib.import_module("derived_models")
    for name in ("Mine", "Both"):
        getattr(module, name).register_for_auto_class("AutoModelForCausalLM")
    module.MineConfig.register_for_auto_class()
    return module


def test_derived_classes(derived, tmp_path):
    """A model, a configuration, and both. Transformers itself prefers the installed class to the one in the folder."""
    values, expected = tiny_config().to_dict(), []
    cases = {
        "model": (derived.Mine, NLQConfig, None),
        "config": (NLQForCausalLM, derived.MineConfig, 3),
        "both": (derived.Both, derived.MineConfig, 3),
    }
    for name, (model_class, config_class, factor) in cases.items():
        model = model_class(config_class(**{**values, **({"factor": factor} if factor else {})})).eval()
        model.save_pretrained(tmp_path / name)
        auto_map = json.loads((tmp_path / name / "config.json").read_text())["auto_map"]
        files = {path.name for path in (tmp_path / name).glob("*.py")}
        assert {f"{path.partition('.')[0]}.py" for path in auto_map.values()} <= files
        again = model_class.from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            logits = model(torch.arange(6)[None]).logits
            assert type(again.config) is model_class.config_class and torch.equal(again(torch.arange(6)[None]).logits, logits)
        expected.append([model_class.__name__, config_class.__name__, str(factor), float(logits.double().sum())])
        assert "derived_models.py" in publish(tmp_path / name, "you/mine", dry_run=True).files
    done = run_python(LOAD_DERIVED, *(tmp_path / name for name in cases), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [[*line[:3], pytest.approx(float(line[3]))] for line in lines] == [row for row in expected for _ in range(2)]
    # Saved by our class, the folder no longer names the derived one
    ours = NLQForCausalLM.from_pretrained(tmp_path / "both")
    ours.save_pretrained(tmp_path / "both")
    assert json.loads((tmp_path / "both" / "config.json").read_text())["auto_map"] == AUTO_MAP


LABEL_SMOOTHING = """
import sys

sys.modules["modeling_nlq"] = None
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokens = torch.arange(12).reshape(2, 6)
trainer = Trainer(model, TrainingArguments(sys.argv[2], label_smoothing_factor=0.3, use_cpu=True, report_to="none"))
loss = trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens.clone()})
logits = model(tokens).logits[:, :-1].flatten(0, 1)
assert torch.allclose(loss, torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), label_smoothing=0.3)), loss
"""


@pytest.mark.slow
def test_label_smoothing_without_the_package(tmp_path):
    """A stock Trainer shifts the labels of model classes that it knows by name only."""
    NLQForCausalLM(tiny_config()).save_pretrained(tmp_path / "saved")
    done = run_python(LABEL_SMOOTHING, tmp_path / "saved", tmp_path / "run", cache=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_linear_model_without_the_package(tmp_path):
    """The cache of linear attention comes from the folder too."""
    torch.manual_seed(0)
    layers = {1: {"attention_activation": "relu", "linear_attention_decay": None}}
    switches = {"attention_activation": "linear_attention", "linear_attention_decay": "learned", "per_layer_config": layers}
    model = NLQForCausalLM(tiny_config(**switches)).eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.decay_bias.normal_()
        inputs = torch.arange(12).reshape(2, 6)
        expected = model(inputs).logits
    folder, out, name = tmp_path / "saved", tmp_path / "results.pt", "AutoModelForCausalLM"
    model.save_pretrained(folder)
    done = run_python(WITHOUT_THIS_PACKAGE + LOAD_ALL, folder, out, tmp_path / "again", name, name, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    results = torch.load(out)
    assert results["config"] == "linear_attention"
    torch.testing.assert_close(results[name], expected, rtol=1e-5, atol=1e-6)  # the second layer's kernels are the package's
    assert torch.equal(results["generated"], model.generate(inputs, max_new_tokens=5, do_sample=False, use_cache=False))


WITHOUT_ENTMAX = """
import sys
import torch
from transformers import AutoModelForCausalLM

sys.modules["entmax"] = None
folder, again = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules."), type(model)
model.save_pretrained(again)
try:
    model(torch.arange(12).reshape(2, 6))
except ImportError as error:
    assert str(error).startswith("attention_activation='entmax15' needs the package entmax: pip install "), error
else:
    raise AssertionError("it ran without the package")
"""


@pytest.mark.slow
def test_sparse_model_where_its_package_is_missing(tmp_path):
    """The model loads and is saved again without entmax. Running it raises an error that names the package."""
    model = NLQForCausalLM(tiny_config(attention_activation="entmax15")).eval()
    model.save_pretrained(tmp_path / "saved")
    done = run_python(WITHOUT_THIS_PACKAGE + WITHOUT_ENTMAX, tmp_path / "saved", tmp_path / "again", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    inputs = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        again = NLQForCausalLM.from_pretrained(tmp_path / "again").eval()
        assert torch.equal(again(inputs).logits, model(inputs).logits)


def test_published_folder_is_plain_pytorch(tmp_path):
    NLQForCausalLM(tiny_config(attention_activation="squared")).save_pretrained(tmp_path)
    files = {path.name: path.read_text() for path in tmp_path.glob("**/*.py")}
    assert set(files) == {path.name for path in Path(modeling_nlq.__file__).parent.glob("*_nlq.py")}
    assert not list(tmp_path.glob("**/*.cpp")) + list(tmp_path.glob("**/*.h"))
    for name, text in files.items():
        found = re.findall(r"triton|#include|subprocess|ctypes|from \.+kernels|adasplash|(?:import|from) fla\b", text)
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
kernels = {name: sys.modules[name].used_kernels() for name in sys.modules if name.endswith("ops_nlq")}
(of_package,) = [used for name, used in kernels.items() if name.startswith("modeling_nlq.")]
(of_folder,) = [used for name, used in kernels.items() if name.startswith("transformers_modules.")]
assert of_folder == {"attention": ["nlq_tiled"], "loss": ["pytorch"]}, of_folder
print(of_package)
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["remote", "package"])
def test_kernels_stay_in_the_package(order, tmp_path):
    """Beside the package, and in both orders of import, a model of the folder computes by PyTorch."""
    NLQForCausalLM(tiny_config(attention_activation="squared")).save_pretrained(tmp_path / "saved")
    done = run_python(BOTH, tmp_path / "saved", order, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout


REVISIONS = """
import sys
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoProcessor

assert sys.modules["transformers"] is not transformers, "AutoProcessor makes another module object"

new, old = sys.argv[1:]
inputs = torch.arange(12).reshape(2, 6) % 50
models = [AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval() for folder in (new, old, new)]
with torch.no_grad():
    first, second, third = (model(inputs).logits for model in models)
assert torch.equal(first, third)
assert torch.allclose(second, 2 * first), "the old revision doubles its logits"
for folder in (old, new):  # the body of a generic head comes from the head's own revision
    head = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
    assert type(head.model).__module__ == type(head).__module__, (type(head), type(head.model))
# The server finds a model by the name of its class, in the first of the module objects
for model, folder in zip(models, (new, old)):
    assert type(transformers.NLQForCausalLM.from_pretrained(folder, trust_remote_code=True)) is type(model)
"""


def make_old_revision(folder: Path) -> None:
    code = folder / "modeling_nlq.py"
    text = code.read_text()
    changed = text.replace("logits = self.lm_head(", "logits = 2 * self.lm_head(")
    assert changed != text
    code.write_text(changed)


@pytest.mark.slow
def test_two_revisions_live_in_one_process(tmp_path):
    torch.manual_seed(0)
    model = NLQForCausalLM(tiny_config(attention_activation="relu")).eval()
    new, old = tmp_path / "new", tmp_path / "old"
    model.save_pretrained(new)
    model.save_pretrained(old)
    make_old_revision(old)
    done = run_python(WITHOUT_THIS_PACKAGE + REVISIONS, new, old, cache=tmp_path)
    assert done.returncode == 0, done.stderr


def test_old_revision_lives_beside_the_installed_package(tmp_path):
    torch.manual_seed(0)
    model = NLQForCausalLM(tiny_config(attention_activation="relu")).eval()
    folder = tmp_path / "old"
    model.save_pretrained(folder)
    make_old_revision(folder)
    inputs = torch.arange(12).reshape(2, 6) % 50
    old_class = get_class_from_dynamic_module(AUTO_MAP["AutoModelForCausalLM"], str(folder))
    old_model = old_class.from_pretrained(folder).eval()
    # An installed class wins over remote code in the Auto classes: Transformers' rule
    installed = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(installed) is NLQForCausalLM
    with torch.no_grad():
        assert torch.equal(installed(inputs).logits, model(inputs).logits)
        # The package may have computed attention by its kernels
        torch.testing.assert_close(old_model(inputs).logits, 2 * model(inputs).logits, rtol=1e-5, atol=1e-6)
    assert type(AutoModelForSequenceClassification.from_config(tiny_config()).model) is modeling_nlq.NLQModel


REGISTERED = """
import sys
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

folder, out = sys.argv[1:]
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
except StrictDataclassError as error:
    assert "attention_activation='cube' is unknown" in str(error), error
    assert "register_attention_activation('cube', function) first" in str(error), error
else:
    raise AssertionError("a function was found that had not been registered")
register = get_class_from_dynamic_module("activations_nlq.register_attention_activation", folder)
register("cube", lambda scores: scores**3)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
torch.save(model(torch.arange(12).reshape(2, 6) % 50).logits.detach(), out)
"""


@pytest.mark.slow
def test_registered_activation_elsewhere(tmp_path, monkeypatch):
    """A saved model names the activation, which is registered through the model's own code before loading."""
    monkeypatch.setattr(activations_nlq, "_REGISTERED", {})
    activations_nlq.register_attention_activation("cube", lambda scores: scores**3)
    torch.manual_seed(0)
    model = NLQForCausalLM(tiny_config(attention_activation="cube")).eval()
    model.save_pretrained(tmp_path / "folder")
    done = run_python(WITHOUT_THIS_PACKAGE + REGISTERED, tmp_path / "folder", tmp_path / "logits.pt", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model(torch.arange(12).reshape(2, 6) % 50).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_registered_activations_belong_to_the_process(tmp_path):
    """Registered with the installed package, an activation is known to a model loaded as remote code."""
    name = "cube_of_the_process"
    activations_nlq.register_attention_activation(name, lambda scores: scores**3)
    try:
        model = NLQForCausalLM(tiny_config(attention_activation=name)).eval()
        model.save_pretrained(tmp_path)
        remote_class = get_class_from_dynamic_module(AUTO_MAP["AutoModelForCausalLM"], str(tmp_path))
        assert remote_class is not NLQForCausalLM
        inputs = torch.arange(12).reshape(2, 6) % 50
        with torch.no_grad():
            assert torch.equal(remote_class.from_pretrained(tmp_path).eval()(inputs).logits, model(inputs).logits)
    finally:
        del activations_nlq._REGISTERED[name]


def test_revisions_have_caches_of_their_own(tmp_path):
    """Transformers' table of cache layers belongs to the process: a model must be given the state of its own code."""
    torch.manual_seed(0)
    model = NLQForCausalLM(tiny_config(attention_activation="linear_attention", linear_attention_decay="learned")).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "cache_nlq.py"
    source = path.read_text()
    # A revision that has another name for what a model asks of its cache
    assert "def get_state(" in source
    path.write_text(source.replace("def get_state(", "def recall("))
    model_path = tmp_path / "modeling_nlq.py"
    model_path.write_text(model_path.read_text().replace("get_state", "recall"))
    other = get_class_from_dynamic_module(AUTO_MAP["AutoModelForCausalLM"], str(tmp_path)).from_pretrained(tmp_path).eval()
    inputs = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected = model(inputs, use_cache=False).logits
        for either in (model, other, model):
            cache = either(inputs[:, :4]).past_key_values
            torch.testing.assert_close(either(inputs[:, 4:], past_key_values=cache).logits, expected[:, 4:])
            static = either.generate(inputs, max_new_tokens=3, do_sample=False, cache_implementation="static")
            assert torch.equal(static, either.generate(inputs, max_new_tokens=3, do_sample=False, use_cache=False))


def test_revisions_have_operators_of_their_own(tmp_path):
    """PyTorch's table of operators belongs to the process: another `phi` under the same name may not end up in ours."""
    ours, others = "function=torch.relu,", "function=lambda scores: 2 * torch.relu(scores),"
    options = {"attention_activation": "relu", "attention_normalization": "none", "attn_implementation": "nlq_tiled"}
    model = NLQForCausalLM(tiny_config(**options)).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "activations_nlq.py"
    source = path.read_text()
    assert ours in source
    path.write_text(source.replace(ours, others))
    of_revision = get_class_from_dynamic_module(AUTO_MAP["AutoModelForCausalLM"], str(tmp_path))
    other = of_revision.from_pretrained(tmp_path, attn_implementation="nlq_tiled").eval()
    heads = {}
    for name, either in (("ours", model), ("other", other)):
        output = either.model.layers[0].self_attn.o_proj
        output.register_forward_pre_hook(lambda module, inputs, name=name: heads.update({name: inputs[0]}))
    inputs = torch.arange(12).reshape(2, 6) % 50
    with torch.no_grad():
        before = model(inputs).logits
        other(inputs)
        assert torch.equal(model(inputs).logits, before)
    assert torch.equal(heads["other"], 2 * heads["ours"])
    # The rows that the package added to its own table are not those of this revision
    with pytest.raises(ValueError, match="nlq_cpp"):
        other.set_attn_implementation("nlq_cpp")


def test_import_registers_and_twice_is_harmless():
    import importlib

    before = dict(vars(modeling_nlq))
    importlib.reload(modeling_nlq)
    assert vars(modeling_nlq)["NLQConfig"] is before["NLQConfig"]
    config = AutoConfig.for_model("nlq", hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=50)
    assert type(config) is NLQConfig
    assert type(AutoModel.from_config(config)) is modeling_nlq.NLQModel


@pytest.mark.parametrize("entry", ["configuration_nlq.py", "modeling_nlq.py"])
def test_scanner_finds_every_file_of_the_package(entry):
    shipped = {Path(path).name for path in get_relative_import_files(PACKAGE / entry)} | {entry}
    assert shipped == {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}


def test_shipped_files_need_transformers_and_torch_only():
    for path in PACKAGE.glob("*.py"):
        foreign = set(get_imports(path)) - set(sys.stdlib_module_names)
        # packaging and huggingface_hub are requirements of Transformers itself
        assert foreign <= {"torch", "transformers", "huggingface_hub", "packaging"}, path


def test_transformers_too_old_says_so_in_one_line(tmp_path):
    NLQForCausalLM(tiny_config()).save_pretrained(tmp_path / "saved")
    script = WITHOUT_THIS_PACKAGE + (
        "import importlib.metadata, transformers\n"
        "real = importlib.metadata.version\n"
        "importlib.metadata.version = lambda name: '5.0.0' if name == 'transformers' else real(name)\n"
        f"transformers.AutoConfig.from_pretrained({str(tmp_path / 'saved')!r}, trust_remote_code=True)\n"
    )
    done = run_python(script, cache=tmp_path)
    assert done.returncode != 0
    last = [line for line in done.stderr.splitlines() if "Error" in line][-1]
    assert f"transformers>={MINIMUM_TRANSFORMERS}" in last and "5.0.0" in last


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
from derived_models import Mine

Mine.register_for_auto_class("AutoModelForCausalLM")
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
derived = Mine(tiny_config())
fully_shard(derived, mesh=mesh)
state = get_model_state_dict(derived, options=StateDictOptions(full_state_dict=True))
derived.save_pretrained(folder + "-derived", state_dict=state)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_folder_saved_under_fsdp2_loads_without_the_package(tmp_path):
    folder = tmp_path / "saved"
    (tmp_path / "derived_models.py").write_text(DERIVED)
    done = run_python(FSDP, folder, tmp_path / "store", TESTS, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP and config["architectures"] == ["NLQForCausalLM"]
    derived = json.loads((tmp_path / "saved-derived" / "config.json").read_text())
    assert derived["auto_map"] == {**AUTO_MAP, "AutoModelForCausalLM": "derived_models.Mine"}
    assert derived["architectures"] == ["Mine"] and (tmp_path / "saved-derived" / "derived_models.py").is_file()
    assert {path.name for path in folder.glob("*.py")} == {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    name, out = "AutoModelForCausalLM", tmp_path / "results.pt"
    done = run_python(WITHOUT_THIS_PACKAGE + LOAD_ALL, folder, out, tmp_path / "again", name, name, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    installed = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = installed(torch.arange(12).reshape(2, 6) % 50).logits
    assert torch.equal(torch.load(out)[name], expected)

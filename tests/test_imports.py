"""The direction of imports, by the contracts in pyproject.toml: docs/internals/architecture.md explains the rules."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.remote_code import WITHOUT_THIS_PACKAGE, tiny_config

from modeling_nlq.parts_builtin_nlq import ATTENTION_PARTS


ROOT = Path(__file__).resolve().parents[1]
TRAINING, MODEL = ROOT / "training", ROOT / "modeling_nlq"


@pytest.fixture
def installed(tmp_path):
    """A copy of the package as it is installed: `configuration/` and `training/` lie inside of `modeling_nlq/`."""
    shutil.copytree(MODEL, tmp_path / "modeling_nlq", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (ROOT / "configuration", ROOT / "examples", TRAINING):
        shutil.copytree(folder, tmp_path / "modeling_nlq" / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def lint(folder: Path) -> subprocess.CompletedProcess:
    """Runs import-linter on the contracts of pyproject.toml."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache", "--no-logo", str(ROOT / "pyproject.toml")]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)


def test_imports_go_one_way(installed):
    done = lint(installed)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "file, line",
    [
        ("configuration_nlq.py", "from .backends_nlq import find_backend"),
        ("masking_nlq.py", "from . import NLQForCausalLM"),
        ("modeling_nlq.py", "from modeling_nlq.training.sharing.card import render"),
        ("configuration/__init__.py", "from ..modeling_nlq import NLQModel"),
        ("training/run/data.py", "def late():\n    from ..comparison import report"),
        pytest.param("training/conversion/nanogpt.py", "from ..comparison import report", marks=pytest.mark.slow),
        ("training/run/stability.py", "def late():\n    from . import train"),
    ],
)
def test_wrong_import_is_found(file, line, installed):
    path = installed / "modeling_nlq" / file
    path.write_text(f"{path.read_text()}\n{line}\n")
    done = lint(installed)
    assert done.returncode == 1 and "BROKEN" in done.stdout


def test_form_of_imports():
    """The Hub's loader follows one dot only, and tools follow the repository's own folders only where imports are
    relative.
    """
    for path in [*MODEL.glob("*_nlq.py"), *TRAINING.rglob("*.py")]:
        wrong = r"^\s*(?:from|import) modeling_nlq\b.*|^\s*from \.(?:\.| import).*"
        if path.is_relative_to(TRAINING):
            wrong = r"^\s*(?:from|import) modeling_nlq\.(?:training|configuration)\b.*"
        if not path.is_relative_to(TRAINING / "nlq"):
            assert not (found := re.findall(wrong, path.read_text(), re.MULTILINE)), (
                f"{path.relative_to(ROOT)}: {found}"
            )


@pytest.mark.slow
def test_configuration_imports_no_kernels(tmp_path):
    """Only the tables are imported for a configuration that is loaded as remote code, and no optional package."""
    tiny_config(attention_activation="entmax15").save_pretrained(tmp_path / "saved")
    script = (
        "from transformers import AutoConfig\nAutoConfig.from_pretrained(sys.argv[1], "
        "trust_remote_code=True)\nprint(*sorted(name.rpartition('.')[2] for name in sys.modules if "
        "name.endswith('_nlq') and '.' in name or name == 'entmax'))\n"
    )
    command = [sys.executable, "-c", WITHOUT_THIS_PACKAGE + script, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tables = {"activations_nlq", "cache_nlq", "configuration_nlq", "masking_nlq"}
    parts = {f"{part.__module__.rpartition('.')[2]}" for part in ATTENTION_PARTS.values()}
    assert set(done.stdout.split()) == tables | parts | {
        "parts_base_nlq",
        "parts_user_nlq",
        "parts_builtin_nlq",
        "parts_nlq",
    }


def base_distributions() -> set[str]:
    """The names of the distributions that an installation without extras brings."""
    waiting = [*map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])]
    done = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset({"", *requirement.extras})
        if (name, extras) not in done:
            done.add((name, extras))
            found = map(Requirement, metadata.requires(name) or [])
            waiting += [
                each for each in found if not each.marker or any(each.marker.evaluate({"extra": x}) for x in extras)
            ]
    return {name for name, _ in done}


@pytest.mark.slow
def test_every_module_imports_with_the_base_dependencies_only(tmp_path):
    """Everything else is blocked that is installed here, and Triton, which some builds of PyTorch bring. Nothing
    starts.
    """
    needed = {*base_distributions(), "modeling-nlq"}
    installed = metadata.packages_distributions()
    blocked = {
        "triton",
        *(module for module, names in installed.items() if needed.isdisjoint(map(canonicalize_name, names))),
    }
    folders = {
        "modeling_nlq": MODEL,
        "modeling_nlq.configuration": ROOT / "configuration",
        "modeling_nlq.training": TRAINING,
    }
    folders["modeling_nlq.examples"] = ROOT / "examples"
    names = []
    for package, folder in folders.items():
        for path in folder.rglob("*.py"):
            name = ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
            if path.name != "__main__.py":
                names.append(name.replace("modeling_nlq.training.nlq", "nlq"))
    script = (
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({sorted(blocked)}))\nfor name in {names}:\n    "
        "importlib.import_module(name)\nimport torch; assert not torch.cuda.is_initialized()\n"
    )
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "libraries")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "libraries").exists(), "an import compiles"

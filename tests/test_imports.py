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
        ("modeling_nlq.py", "from modeling_nlq.training.sharing.card import render"),
        ("configuration/__init__.py", "from ..modeling_nlq import NLQModel"),
        ("training/run/data.py", "def late():\n    from ..comparison import report"),
        ("training/run/stability.py", "def late():\n    from . import train"),
    ],
)
def test_wrong_import_is_found(file, line, installed):
    path = installed / "modeling_nlq" / file
    path.write_text(f"{path.read_text()}\n{line}\n")
    done = lint(installed)
    assert done.returncode == 1 and "BROKEN" in done.stdout


def test_imports_are_relative_with_one_dot_in_the_published_files():
    """The Hub's loader follows one dot only, and tools follow relative imports only."""
    for path in [*MODEL.glob("*_nlq.py"), *TRAINING.rglob("*.py")]:
        wrong = r"^\s*(?:from|import) modeling_nlq\b.*|^\s*from \.(?:\.| import).*"
        if path.is_relative_to(TRAINING):
            wrong = r"^\s*(?:from|import) modeling_nlq\.(?:training|configuration)\b.*"
        if not path.is_relative_to(TRAINING / "nlq"):
            assert not (found := re.findall(wrong, path.read_text(), re.MULTILINE)), (
                f"{path.relative_to(ROOT)}: {found}"
            )


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
    needed, installed = {*base_distributions(), "modeling-nlq"}, metadata.packages_distributions()
    blocked = {module for module, names in installed.items() if needed.isdisjoint(map(canonicalize_name, names))}
    blocked.add("triton")
    names = []
    for folder in (MODEL, TRAINING, ROOT / "configuration", ROOT / "examples"):
        package = "modeling_nlq" if folder == MODEL else f"modeling_nlq.{folder.name}"
        for path in folder.rglob("*.py"):
            name = ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
            # The kernels in Triton are imported by their first call
            if path.name != "__main__.py" and not name.endswith("kernels.gpu.attention"):
                names.append(name.replace("modeling_nlq.training.nlq", "nlq"))
    script = (
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({sorted(blocked)}))\nfor name in {names}:\n    "
        "importlib.import_module(name)\nimport torch; assert not torch.cuda.is_initialized()\n"
    )
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "libraries")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "libraries").exists(), "an import compiles"

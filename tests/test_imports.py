"""The direction of imports, read from the source: docs/architecture.md explains the rules."""

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.remote_code import WITHOUT_THIS_PACKAGE, tiny_config


ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "modeling_nlq": "modeling_nlq",
    "modeling_nlq.configuration": "configuration",
    "modeling_nlq.training": "training",
    "nlq": "training/nlq",
}

# A module imports modules of lower rows only. Modules of one row do not know each other, unless they are in the same folder.
MODEL_ROWS = (
    ("kernels",),
    ("modeling_nlq",),
    ("continuous_batching_nlq",),
    ("backends_nlq",),
    ("flex_nlq", "linear_nlq", "rows_nlq", "tiled_nlq"),
    ("attention_nlq", "attention_projections_nlq", "operators_nlq"),
    ("configuration_nlq",),
    ("part_table_nlq",),
    ("own_parts_nlq",),
    (
        "differential_attention_nlq",
        "exclusive_attention_nlq",
        "forget_gate_nlq",
        "layer_parts_nlq",
        "length_scaling_nlq",
        "parallax_nlq",
        "selective_attention_nlq",
        "canon_nlq",
        "parts_nlq",
        "value_residual_nlq",
    ),
    ("attention_parts_nlq",),
    (
        "activations_nlq",
        "adapters_nlq",
        "arguments_nlq",
        "cache_nlq",
        "loss_nlq",
        "masking_nlq",
        "parallel_nlq",
        "projections_nlq",
        "rotary_nlq",
    ),
    ("operations_nlq",),
)
# What the table of parts is made of
PART_MODULES = {name for row in MODEL_ROWS[7:11] for name in row}
TRAINING_ROWS = (
    ("__main__",),
    ("sharing",),
    ("comparison", "engines"),
    ("explorer",),
    ("conversion",),
    ("run",),
    ("card",),
    ("models", "observing"),
    ("checking", "parameters", "traces"),
    ("files",),
    ("storage",),
    ("text",),
)


def modules(root: Path) -> dict[str, Path]:
    """The name of each module of the package, as it is installed, and its file."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            if package == "modeling_nlq.training" and path.is_relative_to(root / FOLDERS["nlq"]):
                continue
            parts = path.relative_to(root / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


@functools.cache
def imports(name: str, is_package: bool, source: str) -> list[tuple[str, str, bool]]:
    """The imports of one module from this package: module, imported name, and whether the import is relative.

    Those inside of functions are among them. Those below `if TYPE_CHECKING:` are left out.
    """
    found = []
    tree = ast.parse(source)
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    hidden = {child for guard in guards for statement in guard.body for child in ast.walk(statement)}
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, "", False) for alias in node.names if alias.name.split(".")[0] == "modeling_nlq"]
        elif isinstance(node, ast.ImportFrom):
            package = name if is_package else name.rpartition(".")[0]
            start = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, (start, node.module)))
            if module.split(".")[0] == "modeling_nlq":
                found += [(module, alias.name, node.level > 0) for alias in node.names]
    return found


@functools.cache
def names_of(source: str) -> set[str]:
    """The names that a module defines or imports at its top level, in any branch."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def row_of(module: str, prefix: str, rows: tuple[tuple[str, ...], ...]) -> int | None:
    """The index of the row of a module or of the folder it lies in, from the top; `None` for other modules."""
    if not module.startswith(f"{prefix}."):
        return None
    name = module.removeprefix(f"{prefix}.").split(".")[0]
    return next((index for index, row in enumerate(rows) if name in row), None)


def is_within(module: str, package: str) -> bool:
    """Tells whether a module is a package or one of its modules."""
    return f"{module}.".startswith(f"{package}.")


def check(name: str, path: Path, target: str, imported: str, is_relative: bool, known: dict[str, Path]) -> str | None:
    """The rule that an import of `target`, or of a name in it, breaks."""
    if target not in known:
        return "there is no such module"
    if imported and imported not in names_of(known[target].read_text()) | {"*"} and target != "modeling_nlq.training":
        return "there is no such name"
    if imported.startswith("_") and not imported.startswith("__") and path.parent != known[target].parent:
        return "private names stay in their folder"
    is_of_model = re.fullmatch(r"modeling_nlq\.\w+_nlq", name)
    if is_of_model and not (is_relative and target.startswith("modeling_nlq.") and target.endswith("_nlq")):
        return "a file of the model imports its neighbours only, and with one dot"
    is_near = is_within(target, "modeling_nlq.training") or is_within(target, "modeling_nlq.configuration")
    if is_within(name, "modeling_nlq.training") and is_near and not is_relative:
        return "training/ imports itself and configuration/ by dots, which tools can follow in the repository"
    if name == "modeling_nlq.configuration" and target != "modeling_nlq.activations_nlq":
        return "configuration/ does not know the model or training"
    if name.startswith("modeling_nlq.training.") and target == "modeling_nlq.training":
        return "the functions for Python are above everything in training/"
    for prefix, rows in (("modeling_nlq", MODEL_ROWS), ("modeling_nlq.training", TRAINING_ROWS)):
        above, below = row_of(name, prefix, rows), row_of(target, prefix, rows)
        place = len(prefix.split("."))
        is_same_folder = name.split(".")[place : place + 1] == target.split(".")[place : place + 1] and name != target
        if above is not None and below is not None and below <= above and not is_same_folder:
            return "imports go to lower rows"
    return None


def violations(root: Path) -> list[str]:
    """One line for each import that the rules forbid, and for each private name of another module that is read."""
    found, known = [], modules(root)
    for name, path in known.items():
        for module, imported, is_relative in imports(name, path.name == "__init__.py", path.read_text()):
            is_module = f"{module}.{imported}" in known  # `from package import module`
            target, imported_name = (f"{module}.{imported}", "") if is_module else (module, imported)
            if reason := check(name, path, target, imported_name, is_relative, known):
                found.append(f"{name} imports {imported or target} from {module}: {reason}")
            if is_module or not imported:
                alias = imported or module
                private = re.findall(rf"\b{re.escape(alias)}\._[a-z]\w*", path.read_text())
                found += [f"{name} reads {text}: private names stay in their module" for text in private]
    return found


def find_circle(root: Path) -> str | None:
    """The files of a circle of imports, wherever in a file the imports are; `None` if there is no circle."""
    known, graph = modules(root), {}
    for name, path in known.items():
        found = imports(name, path.name == "__init__.py", path.read_text())
        targets = {f"{module}.{imported}" if f"{module}.{imported}" in known else module for module, imported, _ in found}
        graph[name] = targets - {name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return " <- ".join(error.args[1])
    return None


def test_imports_go_one_way():
    assert violations(ROOT) == []


def test_files_form_no_circle():
    assert find_circle(ROOT) is None


def test_every_module_has_a_row():
    for name in modules(ROOT):
        parts = name.split(".")
        if parts[:2] == ["modeling_nlq", "training"] and len(parts) > 2:
            assert row_of(name, "modeling_nlq.training", TRAINING_ROWS) is not None, f"add {name} to TRAINING_ROWS"
        elif len(parts) == 2 and parts[1].endswith("_nlq"):
            assert row_of(name, "modeling_nlq", MODEL_ROWS) is not None, f"add {name} to MODEL_ROWS"


WRONG = {
    "configuration_imports_backends": ("modeling_nlq/configuration_nlq.py", "from .backends_nlq import find_backend"),
    "in_the_other_branch": (
        "modeling_nlq/configuration_nlq.py",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from .backends_nlq import find_backend",
    ),
    "masks_import_backends": ("modeling_nlq/masking_nlq.py", "from .backends_nlq import find_backend"),
    "backends_import_kernels": ("modeling_nlq/backends_nlq.py", "from .kernels.cpu.build import load"),
    "masks_import_the_model": ("modeling_nlq/masking_nlq.py", "from modeling_nlq import NLQForCausalLM"),
    "masks_import_the_package": ("modeling_nlq/masking_nlq.py", "from . import NLQForCausalLM"),
    "absolute_import": ("modeling_nlq/attention_nlq.py", "from modeling_nlq.masking_nlq import Visibility"),
    "model_imports_training": ("modeling_nlq/modeling_nlq.py", "from modeling_nlq.training.card import render"),
    "configuration_imports_training": ("configuration/__init__.py", "from modeling_nlq.training.card import render"),
    "configuration_imports_the_model": ("configuration/__init__.py", "from modeling_nlq.modeling_nlq import NLQModel"),
    "run_imports_comparison": ("training/run/data.py", "from ..comparison import report"),
    "run_imports_the_functions": ("training/run/data.py", "from .. import publish"),
    "in_a_function": ("training/run/data.py", "def late():\n    from ..comparison import report"),
    "rooms_know_each_other": ("training/conversion/paper.py", "from ..comparison import report"),
    "absolute_import_of_training": ("training/conversion/paper.py", "import modeling_nlq.training.text"),
    "absolute_import_of_configuration": ("training/run/data.py", "from modeling_nlq.configuration import find"),
    "private_name": ("training/comparison/report.py", "from ..run.data import _hash_file"),
    "private_attribute": ("training/comparison/report.py", "from ..run import data\n\ndata._count_tokens"),
    "missing_module": ("training/nlq/__init__.py", "from modeling_nlq.training.train import train"),
    "missing_name": ("training/nlq/__init__.py", "from modeling_nlq.training.card import no_such_function"),
}


@pytest.fixture
def plant(tmp_path):
    """A function that adds a line to a file in a copy of all modules, and returns the folder of the copy."""

    def add(file: str, line: str) -> Path:
        for path in modules(ROOT).values():
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
        planted = tmp_path / file
        planted.write_text(f"{planted.read_text()}\n{line}\n")
        return tmp_path

    return add


@pytest.mark.parametrize("file, line", WRONG.values(), ids=WRONG)
def test_wrong_import_is_found(file, line, plant):
    assert len(violations(plant(file, line))) == 1


@pytest.mark.parametrize(
    "line", ["from .trainer import train_recipe", "def late():\n    from . import trainer"], ids=["module", "function"]
)
def test_circle_is_found(line, plant):
    circle = find_circle(plant("training/run/stability.py", line))
    assert "modeling_nlq.training.run.stability" in circle and "modeling_nlq.training.run.trainer" in circle


def test_configuration_imports_no_kernels(tmp_path):
    """Only the tables are imported for a configuration that is loaded as remote code, and no optional package."""
    tiny_config(attention_activation="entmax15").save_pretrained(tmp_path / "saved")
    script = (
        "from transformers import AutoConfig\n"
        "AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(*sorted(name.rpartition('.')[2] for name in sys.modules"
        " if name.endswith('_nlq') and '.' in name or name in ('adasplash', 'entmax', 'fla')))\n"
    )
    command = [sys.executable, "-c", WITHOUT_THIS_PACKAGE + script, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tables = {"activations_nlq", "cache_nlq", "configuration_nlq", "masking_nlq", "parallel_nlq", "projections_nlq"}
    assert set(done.stdout.split()) == tables | PART_MODULES


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
            waiting += [each for each in found if not each.marker or any(each.marker.evaluate({"extra": x}) for x in extras)]
    return {name for name, _ in done}


def test_every_module_imports_with_the_base_dependencies_only():
    """Everything else is blocked that is installed here, and Triton, which only some builds of PyTorch bring."""
    needed = {*base_distributions(), "modeling-nlq"}
    installed = metadata.packages_distributions()
    blocked = {"triton", *(module for module, names in installed.items() if needed.isdisjoint(map(canonicalize_name, names)))}
    names = [name for name in modules(ROOT) if not name.endswith(".__main__")]
    script = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({sorted(blocked)}))\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_starts_nothing(tmp_path):
    """Importing the package compiles nothing, starts no CUDA, and imports no kernel for Triton."""
    script = (
        "import modeling_nlq, sys, torch\n"
        "print(torch.cuda.is_initialized(), [name for name in sys.modules if name.startswith('modeling_nlq.kernels.triton')])"
    )
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "libraries")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["False", "[]"], done.stderr
    assert not (tmp_path / "libraries").exists()

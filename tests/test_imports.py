"""The direction of imports, read from the source: docs/architecture.md explains the rules."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.remote_code import WITHOUT_THIS_PACKAGE, tiny_config


ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"modeling_nlq": "modeling_nlq", "modeling_nlq.configuration": "configuration", "modeling_nlq.training": "training"}

# A module imports modules of lower rows only. Modules of one row do not know each other.
MODEL_ROWS = (
    ("modeling_nlq",),
    ("backends_nlq",),
    ("triton_nlq",),
    ("flex_nlq", "linear_nlq", "tiled_nlq", "triton_gradients_nlq"),
    ("attention_nlq", "attention_projections_nlq", "operators_nlq", "triton_kernels_nlq"),
    ("configuration_nlq", "triton_activations_nlq"),
    ("activations_nlq", "cache_nlq", "loss_nlq", "masking_nlq", "projections_nlq"),
)
TRAINING_ROWS = (
    ("__main__",),
    ("cli",),
    ("sharing",),
    ("comparison", "conversion"),
    ("run",),
    ("card",),
    ("models",),
    ("files", "parameters", "text", "traces"),
)


def modules(root: Path) -> dict[str, Path]:
    """The name of each module of the package, as it is installed, and its file."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


def imports(name: str, path: Path) -> Iterator[tuple[str, str]]:
    """The imports of one module from this package, `(module, imported name)`; those for type checkers only are left out."""
    tree = ast.parse(path.read_text())
    guarded = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    hidden = {child for node in guarded for child in ast.walk(node)}
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("modeling_nlq"))
        elif isinstance(node, ast.ImportFrom):
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            start = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, (start, node.module)))
            if module.startswith("modeling_nlq"):
                yield from ((module, alias.name) for alias in node.names)


def row_of(module: str, prefix: str, rows: tuple[tuple[str, ...], ...]) -> int | None:
    """The index of the row of a module or of the folder it lies in, from the top; `None` for other modules."""
    if not module.startswith(f"{prefix}."):
        return None
    name = module.removeprefix(f"{prefix}.").split(".")[0]
    return next((index for index, row in enumerate(rows) if name in row), None)


def violations(root: Path) -> list[str]:
    """One line for each import that the rules forbid."""
    found, known = [], modules(root)
    for name, path in known.items():
        for module, imported in imports(name, path):
            # `from package import module` imports the module
            target = f"{module}.{imported}" if f"{module}.{imported}" in known else module
            line = f"{name} imports {imported or target} from {module}"
            if target not in known:
                found.append(f"{line}, which does not exist")
            is_model = name == "modeling_nlq" or name.endswith("_nlq")
            if is_model and (f"{target}.").startswith(("modeling_nlq.configuration.", "modeling_nlq.training.")):
                found.append(f"{line}: the model does not know recipes or training")
            if imported.startswith("_") and not imported.startswith("__") and path.parent != known.get(target, path).parent:
                found.append(f"{line}: private names stay in their folder")
            for prefix, rows in (("modeling_nlq", MODEL_ROWS), ("modeling_nlq.training", TRAINING_ROWS)):
                above, below = row_of(name, prefix, rows), row_of(target, prefix, rows)
                if above is None or below is None or below > above:
                    continue
                if prefix == "modeling_nlq.training" and below == above and name.split(".")[2] == target.split(".")[2]:
                    continue  # the same folder
                found.append(f"{line}: imports go to lower rows")
    return found


def test_imports_go_one_way():
    assert violations(ROOT) == []


def test_every_module_has_a_row():
    for name in modules(ROOT):
        parts = name.split(".")
        if parts[:2] == ["modeling_nlq", "training"] and len(parts) > 2:
            assert row_of(name, "modeling_nlq.training", TRAINING_ROWS) is not None, f"add {name} to TRAINING_ROWS"
        elif len(parts) == 2 and parts[1].endswith("_nlq"):
            assert row_of(name, "modeling_nlq", MODEL_ROWS) is not None, f"add {name} to MODEL_ROWS"


@pytest.mark.parametrize(
    "file, line",
    {
        "configuration_imports_backends": ("modeling_nlq/configuration_nlq.py", "from .backends_nlq import find_backend"),
        "masks_import_backends": ("modeling_nlq/masking_nlq.py", "from .backends_nlq import find_backend"),
        "model_imports_training": ("modeling_nlq/modeling_nlq.py", "from modeling_nlq.training.card import render"),
        "run_imports_comparison": ("training/run/data.py", "from modeling_nlq.training.comparison import report"),
        "rooms_know_each_other": ("training/conversion/gpt2.py", "import modeling_nlq.training.comparison.report"),
        "private_name": ("training/comparison/report.py", "from modeling_nlq.training.run.data import _hash_file"),
        "missing_module": ("training/cli.py", "from modeling_nlq.training.train import train"),
    }.values(),
    ids=lambda value: value.split("/")[-1].split(" ")[-1],
)
def test_wrong_import_is_found(file, line, tmp_path):
    for folder in FOLDERS.values():
        for path in (ROOT / folder).rglob("*.py"):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    planted = tmp_path / file
    planted.write_text(f"{planted.read_text()}\n{line}\n")
    assert len(violations(tmp_path)) == 1


def test_configuration_imports_no_kernels(tmp_path):
    """Only the tables are imported for a configuration that is loaded as remote code, and no optional package."""
    tiny_config(attention_activation="entmax15").save_pretrained(tmp_path / "saved")
    script = (
        "from transformers import AutoConfig\n"
        "AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(*sorted(name.rpartition('.')[2] for name in sys.modules"
        " if name.endswith('_nlq') or name in ('adasplash', 'entmax', 'fla')))\n"
    )
    command = [sys.executable, "-c", WITHOUT_THIS_PACKAGE + script, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["activations_nlq", "cache_nlq", "configuration_nlq", "modeling_nlq", "projections_nlq"]

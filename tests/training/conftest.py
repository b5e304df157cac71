"""Makes the runs of these tests quicker, and the use of lm_eval; writes the files of comparisons."""

import gc
from pathlib import Path

import pytest
from support.runs import write_comparison


@pytest.fixture(scope="session", autouse=True)
def frozen_imports():
    """Every run collects garbage, and need not look through all that was imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def small_index(monkeypatch):
    """lm_eval without its own 14,000 files of tasks, which take long to read."""
    index = pytest.importorskip("lm_eval.tasks._index")
    own_files = index.TaskIndex._iter_yaml_files

    def iterate(root: Path):
        return [] if root.parent.name == "lm_eval" else own_files(root)

    monkeypatch.setattr(index.TaskIndex, "_iter_yaml_files", staticmethod(iterate))


@pytest.fixture(scope="session")
def make_file(recipe_file, tmp_path_factory):
    """A function from the fields of a comparison to its file; the recipe is that of the other training tests, a bit longer."""

    def make(**fields) -> str:
        training = {"max_steps": 12, "save_steps": 3, "eval_steps": 6, "report_to": "none"}
        defaults = {"recipe": str(recipe_file), "models": {"base": None, "twin": None}, "training": training}
        return write_comparison(tmp_path_factory.mktemp("comparison"), **{**defaults, **fields})

    return make

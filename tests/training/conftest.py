"""Makes the runs of these tests quicker, and the use of lm_eval."""

import gc
from pathlib import Path

import pytest


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

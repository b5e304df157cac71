"""Fixtures for all tests: no network, a fixed seed, small models without zero parameters, and a finished run."""

import gc
import json
import logging
import os
from collections import Counter
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import yaml
from support import model_cases
from support.attention_cases import set_chunks, set_rows, set_tiles
from support.deprecations import DeprecationHandler
from transformers import dynamic_module_utils

from modeling_nlq.training import train, trust
from modeling_nlq.training.run.documents import python_documents


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` says
def pytest_collection_modifyitems(items):
    """Starts with the tests of training, which take longest: a long test at the end would leave the other processes
    idle.

    Of tests marked `thin`, rows become slow that are not among every so-many-th.
    """
    items.sort(key=lambda item: "/tests/training/" not in item.path.as_posix())
    rows = Counter()
    for item in items:
        thin = item.get_closest_marker("thin")
        if thin is not None and item.get_closest_marker("slow") is None:
            test = item.nodeid.partition("[")[0]
            if rows[test] % thin.args[0]:
                item.add_marker("slow")
            rows[test] += 1


def pytest_configure():
    gc.disable()  # until all is imported and collected


def pytest_collection_finish():
    """Leaves imported modules out of Python's garbage collections, which would take half a second each."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def no_deprecated_calls():
    """Fails a test in which our code makes a call that Transformers logs as deprecated."""
    logging.Logger.warning_once.cache_clear()  # each test hears what an earlier one heard
    logger, handler = logging.getLogger("transformers"), DeprecationHandler()
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.found, "\n".join(handler.found)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def own_list_of_trusted_parts(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(trust, "TRUSTED_PARTS", tmp_path_factory.mktemp("trust") / "trusted_parts")
        yield


@pytest.fixture(scope="session", autouse=True)
def own_modules(tmp_path_factory):
    """A folder for the code that tests load from saved models, one for each process of pytest-xdist."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = str(tmp_path_factory.mktemp("modules"))
        monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", folder)
        # First, because `evaluate` adds the user's own folder, where the code of other models may lie under the same
        # package
        monkeypatch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="session")
def make_model():
    return model_cases.make_model


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A slice of the built-in corpus as a JSONL file: real text, small enough to train on in seconds."""
    folders = ("json/", "email/", "collections/")
    documents = []
    for row in python_documents(""):
        if row["path"].startswith(folders):
            # In pieces, so that a split of a few percent holds some documents, whatever the version of Python
            lines = row["text"].splitlines(keepends=True)
            pieces = {first: "".join(lines[first : first + 40]) for first in range(0, len(lines), 40)}
            documents += [{"path": f"{row['path']}:{first}", "text": text} for first, text in pieces.items()]
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in documents))
    return path


@pytest.fixture(scope="session")
def recipe_file(corpus, tmp_path_factory) -> Path:
    """A recipe for a very small model, eight steps with a checkpoint every two."""
    folder = tmp_path_factory.mktemp("recipe")
    config = {
        "model_type": "nlq",
        "vocab_size": 512,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    (folder / "model.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    recipe = {
        "model": str(folder / "model.json"),
        "dataset": str(corpus),
        "validation_fraction": 0.1,
        "tokenizer": "bpe:512",
        "block_size": 64,
        "training": {
            "max_steps": 8,
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 64,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_steps": 2,
            "logging_steps": 1,
            "report_to": "tensorboard",
            "seed": 0,
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="session")
def run(recipe_file, tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    return folder, train(recipe_file, output_dir=folder)


@pytest.fixture(scope="module")
def tiny_tiles():
    """Tiles and chunks so small that these tests' short sequences take several."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_tiles(monkeypatch, 3, 2, 4)
        set_rows(monkeypatch, 3)
        set_chunks(monkeypatch)
        yield


@pytest.fixture(scope="module")
def uncompiled():
    """flex_attention compiles itself. A compiler may be missing, and the same function and mask run without."""
    with torch.compiler.set_stance("force_eager"):
        yield

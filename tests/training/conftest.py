"""Makes the use of lm_eval and of `nlq check` quicker; writes the files of recipes and comparisons."""

import json
from pathlib import Path

import pytest
from support.runs import PAIR_SWITCHES, write_comparison

from modeling_nlq.training import checking
from modeling_nlq.training.disk import write_text
from modeling_nlq.training.run import train


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Skips the loss plot, a third of the time of a short run. The shared runs draw it."""
    monkeypatch.setattr(train, "plot_losses", lambda history, path, title, unit: write_text(path, ""))


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
    """Returns a function that writes a comparison with these fields; its recipe has a few steps more than `recipe`."""

    def make(**fields) -> str:
        training = {"max_steps": 12, "save_steps": 3, "eval_steps": 6, "report_to": "none"}
        defaults = {"recipe": str(recipe_file), "models": {"base": None, "twin": None}, "training": training}
        return write_comparison(tmp_path_factory.mktemp("comparison"), **{**defaults, **fields})

    return make


@pytest.fixture(scope="session")
def pairs_recipe(tmp_path_factory):
    """An encoder and decoder that reverses two words; some sources are too long."""
    folder = tmp_path_factory.mktemp("pairs")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "ten", "eleven"]
    pairs = [(f"{first} {second}", f"{second} {first}") for first in words for second in words]
    pairs += [("nine " * 30, "nine")]
    lines = [json.dumps({"given": given, "wanted": wanted}) for given, wanted in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    training = {"max_steps": 40, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "logging_steps": 1}
    training |= {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 20}
    content = {"model": "tiny-seq2seq", "objective": "seq2seq", "dataset": str(folder / "pairs.jsonl")}
    content |= {"source_column": "given", "target_column": "wanted", "max_source_length": 24, "max_target_length": 16}
    content |= {"tokenizer": "bpe:300", "validation_fraction": 0.2, "switches": PAIR_SWITCHES}
    content["training"] = {**training, "use_cpu": True, "report_to": "none"}
    (folder / "pairs.yaml").write_text(json.dumps(content))
    return folder / "pairs.yaml"


@pytest.fixture
def two_surroundings(monkeypatch):
    """Fewer models and lengths, for time."""
    names = ("softmax", "sigmoid, wide heads and a gated MLP")
    kept = {1, 2, 3, checking.SHORT, checking.LONG}
    fewer = {name: each._replace(lengths=sorted(kept & {*each.lengths})) for name, each in checking.INVARIANTS.items()}
    monkeypatch.setattr(checking, "INVARIANTS", fewer)
    monkeypatch.setattr(checking, "_SURROUNDINGS", {name: checking._SURROUNDINGS[name] for name in names})

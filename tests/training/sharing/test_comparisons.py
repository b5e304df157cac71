"""A comparison on the Hub on loopback: what is published, who reads it, how a stranger repeats it, what is refused."""

import dataclasses
import io
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import DatasetCard
from support.hub_server import Blob
from support.inline_engine import InlineEngine
from support.own_parts import DISTANCE
from support.paths import REPOSITORY
from support.publishing_cases import TOKEN, Worker, check_refused
from support.runs import change_json, write_comparison

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.config import ComparisonConfig
from modeling_nlq.training.comparison.ledger import RunRow, VerdictRow, _origin, ledger_of
from modeling_nlq.training.comparison.report import write_report
from modeling_nlq.training.comparison.run import run_comparison


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
RECIPE = {"model": "tiny-linear", "dataset": "synthetic:recall", "switches": SIZES, "parts": ["mine.py"]}
RECIPE |= {"task": {"pairs": 2, "length": 8, "vocabulary": 8, "rows": 400}, "validation_fraction": 0.1}
RECIPE["training"] = {"max_steps": 4, "eval_steps": 4, "save_steps": 4, "logging_steps": 1, "report_to": "none"}
MODELS = {"base": {}, "gated": {"switches": {"attention_gate": "headwise"}}}
MODELS["mine"] = {"switches": {"attention_parts": ["distance"]}}
FILES = {"README.md", "comparison.yaml", "parts/mine.py", "results.md", "runs.parquet", "verdicts.parquet"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder of a finished comparison with a part of its own, and its results."""
    home = tmp_path_factory.mktemp("machine")
    (home / "mine.py").write_text(DISTANCE)
    file = write_comparison(home, recipe=RECIPE, models=MODELS, seeds=[3, 8], name="gates")
    folder = home / "compared"
    results = run_comparison(load_plan(file), folder, InlineEngine())
    write_report(results, folder)
    return folder, results


@pytest.fixture(scope="module")
def shared(server, nlq, compared):
    nlq.publish(compared[0], "anna/gates")
    return server.files("datasets/anna/gates")


@pytest.fixture
def stranger(server, tmp_path_factory):
    home = tmp_path_factory.mktemp("stranger") / "home"
    worker = Worker(home, {**server.client_environment(home), "HOME": str(home)})
    yield worker, home
    worker.close()


def test_repository_has_these_files_and_no_path_of_the_machine(server, nlq, compared, shared):
    folder, results = compared
    figures = {path.relative_to(folder).as_posix() for path in folder.glob("figures/*.png")}
    assert figures and shared.keys() == {".gitattributes", *FILES, *figures}
    for name, content in shared.items():
        assert str(folder.parent).encode() not in content, name
    before = server.commits("datasets/anna/gates")
    planned = nlq.publish(folder, "anna/gates", "--dry-run")
    assert planned.sizes == {name: len(data) for name, data in shared.items() if name != ".gitattributes"}
    nlq.publish(folder, "anna/gates")
    assert server.commits("datasets/anna/gates") == before, "the same again is no commit"
    card = DatasetCard(shared["README.md"].decode(), ignore_metadata_errors=False)
    assert [each["config_name"] for each in card.data.to_dict()["configs"]] == ["verdicts", "runs"]
    for text in ("nlq compare anna/gates", "https://arxiv.org/abs/2505.06708", "## Limits", "0.01", "too few seeds"):
        assert text in card.text, text
    written = yaml.safe_load(shared["comparison.yaml"])
    assert written["seeds"] == [3, 8] and written["recipe"]["parts"] == ["parts/mine.py"]
    assert shared["parts/mine.py"].decode() == DISTANCE


def test_pandas_and_datasets_read_the_tables(elsewhere, compared, shared, tmp_path):
    rows = ledger_of(compared[1])
    for name, kind, expected in (("runs", RunRow, rows.runs), ("verdicts", VerdictRow, rows.verdicts)):
        frame = pd.read_parquet(io.BytesIO(shared[f"{name}.parquet"]))
        assert [*frame.columns] == [field.name for field in dataclasses.fields(kind)] and len(frame) == len(expected)
        for column in ("model", "seed", "test_loss") if name == "runs" else ("model", "improvement", "arxiv"):
            assert frame[column].tolist() == pytest.approx([getattr(row, column) for row in expected], nan_ok=True)
    code = """
import datasets
for name, columns in (("runs", ("seed", "test_loss")), ("verdicts", ("model", "verdict"))):
    table = datasets.load_dataset("anna/gates", name, split="train")
    table.select_columns(list(columns)).to_json(f"{arguments[0]}/{name}.jsonl")
"""
    elsewhere.python(code, tmp_path)
    runs, verdicts = (pd.read_json(tmp_path / f"{name}.jsonl", lines=True) for name in ("runs", "verdicts"))
    assert runs.values.tolist() == [[row.seed, pytest.approx(row.test_loss)] for row in rows.runs]
    assert verdicts.values.tolist() == [[row.model, row.verdict] for row in rows.verdicts]

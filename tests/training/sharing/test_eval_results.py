"""The test results of a published model, as the Hub and Every Eval Ever read them."""

import json
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from huggingface_hub import EvalResultEntry, parse_eval_result_entries
from support.hub_server import Blob
from support.publishing_cases import RUN_FILES
from support.runs import change_json

from modeling_nlq.training.result import Data, Evaluation, Losses, RunResult
from modeling_nlq.training.sharing.eval_results import EEE_FILE, HUB_FILE, eval_results


TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MEASURED = {"loss": 4.5, "perplexity": 90.0, "bits_per_byte": 2.25, "token_accuracy": 0.25, "chrf": 31.0}
NAMES = {name: name for name in MEASURED}
RESULT = RunResult(Losses(False, test=Evaluation(**MEASURED)), Data(1, 1, "", test_tokens=1280))


def set_dataset(folder: Path, name: str, record: str) -> None:
    """Makes a finished run look as if it had been tested on another dataset."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "dataset": name}))
    values = {"losses__test": MEASURED, "data__test_tokens": 1280, "data__trained_on": [{"dataset": record}]}
    change_json(folder / "metrics.json", **values)
    os.utime(folder / "metrics.json", (TIME.timestamp(),) * 2)


def test_published_files_are_read_and_go_with_the_dataset(server, nlq, copy_run, tmp_path):
    folder = copy_run()
    set_dataset(folder, "bert/text", "bert/text")
    nlq.publish(folder, "anna/tested")
    files = server.files("anna/tested")
    assert files.keys() == RUN_FILES | {HUB_FILE, EEE_FILE}
    assert parse_eval_result_entries(yaml.safe_load(files[HUB_FILE])) == [
        EvalResultEntry(
            dataset_id="bert/text",
            task_id="default",
            value=2.25,
            date="2026-01-02T03:04:05+00:00",
            source_url="https://huggingface.co/anna/tested",
            source_name="Model card",
            source_user="anna",
            notes="bits per byte. 1,280 test tokens, held out as recipe.yaml says",
        )
    ]
    record = json.loads(files[EEE_FILE])
    results = {each["metric_config"]["metric_id"]: each for each in record["evaluation_results"]}
    assert {name: each["score_details"]["score"] for name, each in results.items()} == MEASURED
    better = {name for name, each in results.items() if not each["metric_config"]["lower_is_better"]}
    assert better == {"token_accuracy", "chrf"} and record["retrieved_timestamp"] == str(int(TIME.timestamp()))

    theirs = {**server._repos["anna/tested"].revision("main").files, ".eval_results/gpqa.yaml": Blob(b"theirs")}
    server._repos["anna/tested"].commit("main", theirs)
    set_dataset(folder, str(tmp_path / "text"), "text")  # a folder that is gone
    nlq.publish(folder, "anna/tested")
    files = server.files("anna/tested")
    assert files.keys() == RUN_FILES | {".eval_results/gpqa.yaml"} and b"\ndatasets:" not in files["README.md"]


@pytest.mark.parametrize("dataset", ["python-stdlib", "synthetic:recall", "mine.jsonl", "text", "here/text", "/a/b"])
def test_none_for_text_that_is_not_on_the_hub(dataset, tmp_path, monkeypatch):
    (tmp_path / "here" / "text").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert eval_results("anna/model", {"dataset": dataset}, RESULT, NAMES, 0.0) is None


def test_none_without_a_result_or_where_the_run_recorded_a_folder():
    diverged = replace(RESULT, losses=replace(RESULT.losses, diverged=True))
    untested = replace(RESULT, losses=Losses(False, validation=Evaluation(1.0)))
    local = replace(RESULT, data=replace(RESULT.data, trained_on=[{"dataset": "text"}]))
    found = [
        eval_results("anna/m", {"dataset": "bert/text"}, each, NAMES, 0.0) for each in (diverged, untested, local)
    ]
    assert found == [None] * 3


@pytest.mark.slow
def test_notes_have_the_interval_over_seeds(server, nlq, comparison, tmp_path):
    folder = shutil.copytree(comparison[0], tmp_path / "compared")
    name, results = "linear queries", comparison[1].largest
    run = folder / results.models[name].runs[0].folder
    set_dataset(run, "bert/text", "bert/text")
    nlq.publish(run, "anna/interval", "--comparison", folder)
    (entry,) = parse_eval_result_entries(yaml.safe_load(server.files("anna/interval")[HUB_FILE]))
    effect = results.statistics.effects[name]
    low, high = effect.loss_improvement_interval
    assert f"over base, 95 % interval over {effect.pairs} seeds" in entry.notes
    assert f"{effect.loss_improvement:+.2f} [{low:+.2f}, {high:+.2f}] %, {effect.verdict}" in entry.notes

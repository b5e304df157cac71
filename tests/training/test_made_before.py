"""Reads, resumes, evaluates and publishes folders that version 0.2.0 wrote; the README beside them says how."""

import dataclasses
import hashlib
import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
from support.hub_server import HubServer
from support.inline_engine import InlineEngine
from support.paths import TESTS
from support.publishing_cases import CODE, RUN_FILES, TOKEN

import modeling_nlq
from modeling_nlq.training import evaluate, publish, train
from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.report import describe
from modeling_nlq.training.comparison.results import read_outcome
from modeling_nlq.training.comparison.run import run_comparison
from modeling_nlq.training.result import RunResult
from modeling_nlq.training.run.recipe import Recipe
from nlq import main


DATA = TESTS / "data" / "made_before_run_results"
# The metrics of a run name the folder in which it was made
MADE_IN = "/tmp/example"
# What a run in an older `results.json` does not say
UNKNOWN = r".*/result/(size|attention/kernels|data/(trained_on|fingerprint|\w+_tokens)|losses/\w+/\w*perplexity"
UNKNOWN += r"|losses/validation/(bits_per_byte|token_accuracy)).*|.*/(counts_text|paired_loss)"
# What the clock, the memory and the installed packages decide
VARYING = re.compile(r".*(seconds|runtime|_per_second|_time|^peak_memory|^kernels|^versions|^device|^threads|^code)$")


def has_same_arithmetic() -> bool:
    """Returns whether PyTorch rounds here as it did where the folders were made, so that every bit must be equal."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation="gelu", batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for _ in range(3):
        torch.nn.functional.cross_entropy(layer(torch.randn(8, 16, 4)).flatten(0, 1), torch.arange(128) % 4).backward()
        optimizer.step()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in layer.parameters())
    return hashlib.sha256(weights).hexdigest() == (DATA / "arithmetic.txt").read_text().strip()


def values(content: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yields the values of a record by their keys, without those that vary."""
    if not isinstance(content, dict | list | tuple) or not content:
        content = Path(content).name if path[-1:] == ("dataset",) else content  # older results name its folder too
        yield "/".join(path), None if content == {} else content  # a model without changes was null
        return
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        is_default = path[-1:] == ("recipe",) and value == getattr(Recipe, key, ...)  # which is not written any more
        if not VARYING.fullmatch(str(key)) and not is_default:
            yield from values(value, *path, str(key))


def check_same(*results: Any) -> None:
    """Compares records to the bit, or approximately on a machine that rounds otherwise."""
    records = (dataclasses.asdict(each) if dataclasses.is_dataclass(each) else each for each in results)
    after, before = ({key: value for key, value in values(each) if not re.fullmatch(UNKNOWN, key)} for each in records)
    # Older results leave out the test loss of a run that diverged
    keys = [key for key in after if key.endswith("/diverged") and after[key]]
    diverged = {f"{key.removesuffix('diverged')}test/loss" for key in keys}
    after |= {key: before[key] for key in diverged & after.keys() & before.keys()}
    numbers = {key for key in after if isinstance(after[key], float) and isinstance(before.get(key), float)}
    # Quantiles of older and newer SciPy differ in the eleventh digit
    tolerance = {"rel": 1e-7} if has_same_arithmetic() else {"rel": 5e-2, "abs": 5e-2}
    inexact = {key for key in numbers if not has_same_arithmetic() or re.match("trend/|.*statistics/", key)}
    after |= {key: before[key] for key in inexact if after[key] == pytest.approx(before[key], **tolerance)}
    assert after == before


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    with tarfile.open(DATA / "folders.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    for path in tmp_path.rglob("metrics.json"):
        path.write_text(path.read_text().replace(MADE_IN, str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    # As then: the C++ code and more threads round otherwise
    monkeypatch.setenv("NLQ_CPP", "0")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["comparison", "ladder"])
def test_interrupted_comparison_resumes_to_the_same_results(name, capsys):
    def status() -> str:
        assert main(["compare", "any", "--output_dir", name, "--status"]) == 0
        return re.sub(r"\d+ s ago", "N s ago", capsys.readouterr().out)

    assert status() == (DATA / f"{name}.status.txt").read_text()
    before = read_outcome(Path(f"{name}.results.json"))
    after = run_comparison(load_plan(f"{name}.yaml"), Path(name), InlineEngine())
    capsys.readouterr()
    check_same(after, before)
    assert status() == (DATA / f"{name}.finished.status.txt").read_text()
    assert describe(before)  # which can be read


def test_interrupted_run_resumes_to_the_same_weights():
    train("recipe.yaml", output_dir="interrupted")
    files = [safetensors.torch.load_file(f"{run}/model.safetensors") for run in ("interrupted", "finished")]
    check_same(*({name: weight.tolist() for name, weight in file.items()} for file in files))
    check_same(*(RunResult.load(Path(run)) for run in ("interrupted", "finished")))


def test_finished_run_evaluates_to_the_recorded_loss():
    metrics = RunResult.load(Path("finished"))
    after = evaluate("finished", "text.jsonl", validation_fraction=0.2)
    # By another backend than in training, which rounds otherwise
    assert after["eval_loss"] == pytest.approx(metrics.losses.validation.loss, rel=1e-7)
    assert after["eval_token_accuracy"] == metrics.losses.validation.token_accuracy


def test_finished_run_is_published(monkeypatch):
    for name in CODE:  # which the archive leaves out
        shutil.copy(Path(modeling_nlq.__file__).with_name(name), "finished")
    with HubServer({TOKEN: "anna"}) as server:
        for name, value in {"ENDPOINT": server.endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        publish("finished", "anna/before")
        files = server.files("anna/before")
    assert files.keys() == RUN_FILES - {"loss.png"}
    assert files["model.safetensors"] == Path("finished/model.safetensors").read_bytes()
    assert json.loads(files["metrics.json"])["eval_loss"] == RunResult.load(Path("finished")).losses.validation.loss

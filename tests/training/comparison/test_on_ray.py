"""The engine `ray` on a stand-in for Ray; `make test-ray` tests it on several nodes, and what is lost there."""

import dataclasses
import json
import re
import shutil
from types import SimpleNamespace
from typing import Any, get_args, get_origin

import pytest
from datasets import Dataset
from support.fake_ray import FakeError, FakeRay, FakeTaskError, LostError
from support.runs import logged_losses, without_times

from modeling_nlq.training import compare, train
from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.on_ray import RayEngine
from modeling_nlq.training.comparison.results import read_outcome
from modeling_nlq.training.comparison.run import run_comparison
from modeling_nlq.training.disk import files_below
from modeling_nlq.training.files import read_json
from modeling_nlq.training.result import RunResult
from modeling_nlq.training.run import checkpoints, subprocess_run
from modeling_nlq.training.run.ray_jobs import share_batch, share_data
from modeling_nlq.training.run.recipe import Recipe
from modeling_nlq.training.run.subprocess_run import RunFailed


RUN = "runs/twin/rate-0.01-seed-2"


@pytest.fixture
def cluster(monkeypatch) -> FakeRay:
    return FakeRay().install(monkeypatch)


@pytest.fixture
def without_one(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "results")
    shutil.rmtree(tmp_path / "results" / RUN)
    return tmp_path / "results", finished[1], load_plan(finished[2])


def lose_node(monkeypatch, times: int) -> None:
    save, count = checkpoints.ChecksumCallback.on_save, iter(range(2 * times))

    def on_save(self, *arguments, **kwargs):
        save(self, *arguments, **kwargs)
        if next(count, 0) % 2 == 1:
            raise FakeError("The node died.\nIts raylet ...")

    monkeypatch.setattr(checkpoints.ChecksumCallback, "on_save", on_save)


class TestComparison:
    def test_last_run(self, cluster, without_one):
        folder, expected, comparison = without_one
        assert without_times(run_comparison(comparison, folder, RayEngine(cpus_per_run=1))) == without_times(expected)
        assert len(cluster.tasks) == 1 and cluster.tasks[0]["max_retries"] == 3 and cluster.tasks[0]["num_cpus"] == 1
        files = files_below(folder)
        assert {f"{RUN}/metrics.json", f"{RUN}/model.safetensors", f"{RUN}.log", "results.json"} <= set(files)
        assert not [name for name in files if re.search(r"checkpoint-|progress|unfinished", name)]
        assert any(re.fullmatch(r"\.data/\w+/blocks.json", name) for name in files)
        assert read_outcome(folder / "results.json").largest.models["twin"].runs[2].test_loss is not None

    def test_runs_that_fail(self, cluster, make_file, tmp_path, monkeypatch):
        def train_recipe(recipe, *arguments, **options):
            if "base" not in recipe.output_dir:
                raise TypeError("no\nsuch argument")
            return train(recipe, *arguments, **options)

        train = subprocess_run.train_recipe
        monkeypatch.setattr(subprocess_run, "train_recipe", train_recipe)
        models, training = dict.fromkeys(("base", "first", "second")), {"max_steps": 2, "report_to": "none"}
        file, place = make_file(models=models, seeds=[0], training=training), tmp_path / "results"
        with pytest.raises(ChildProcessError) as caught:
            compare(file, place, engine="ray", cpus_per_run=1)
        run = r"\w+/rate-0.01-seed-0"
        error = f"run {run} failed: TypeError: no such argument; see {place}/runs/{run}.log"
        assert re.fullmatch(f"2 runs failed: {error}; {error}", str(caught.value)) and len(cluster.tasks) == 3
        assert [path.parts[-3] for path in place.glob("runs/*/*/metrics.json")] == ["base"]
        assert read_json(place / "runs" / "first" / "rate-0.01-seed-0.progress.json")["state"] == "failed"

    def test_second_driver(self, cluster, without_one):
        folder, _, comparison = without_one
        engine = RayEngine(cpus_per_run=1)
        with engine.alone_in(folder), pytest.raises(ValueError, match="is in use by another process"):
            run_comparison(comparison, folder, engine)
        assert cluster.tasks == []

    def test_node_that_does_not_see_the_folder(self, cluster, without_one, monkeypatch):
        folder, _, comparison = without_one
        submit = RayEngine.submit

        def submit_elsewhere(self, name, recipe, data):
            return submit(self, name, recipe, data / "x")

        monkeypatch.setattr(RayEngine, "submit", submit_elsewhere)
        with pytest.raises(ChildProcessError, match=r"does not see .*; all nodes must see --output_dir"):
            run_comparison(comparison, folder, RayEngine(cpus_per_run=1))
        assert not (folder / RUN).exists()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"gpus_per_run": 1},
                "1 workers of a run take 1 CPUs and 1 GPUs each, and the nodes have 2 CPUs and 0",
            ),
            ({"workers_per_run": 4}, "4 workers of a run take 1 CPUs each, and the nodes have 2 CPUs"),
            ({"workers_per_run": 5}, "5 workers cannot share a batch"),
            ({"workers_per_run": 0}, "workers_per_run=0 must be at least 1"),
            ({"workers_per_run": 2, "cpus_per_run": 1}, "cpus_per_run=1 must be at least 2"),
        ],
    )
    def test_request_that_cannot_be_met(self, cluster, make_file, tmp_path, options, message):
        with pytest.raises(ValueError, match=message):
            compare(make_file(), tmp_path / "results", engine="ray", **options)
        assert not (tmp_path / "results").exists()

    def test_why_several_workers_failed(self, cluster):
        """A worker that died matters more than the others, which waited for it."""
        own = RunFailed("failed: OSError: no disk")
        died = SimpleNamespace(health_check_failure=LostError("It died.\n..."))
        for failures, expected in (({0: own, 1: died}, "was lost: It died."), ({0: own, 1: own}, str(own))):
            error = FakeTaskError(SimpleNamespace(worker_failures=failures))
            assert RayEngine(workers_per_run=2).describe_error(error) == expected

    def test_batches_of_workers(self):
        for training, workers, expected in (
            ({}, 4, {"per_device_train_batch_size": 2}),
            ({"gradient_accumulation_steps": 4}, 2, {"gradient_accumulation_steps": 2}),
            ({"per_device_train_batch_size": 3}, 1, {"per_device_train_batch_size": 3}),
        ):
            assert share_batch(Recipe("m", training=training), workers) == Recipe("m", training=expected)


CHANGED = {"dataset": "OTHER", "text_template": "{text} {b}", "target_column": "text", "tokenizer": "bpe:280"}


def another_value(field: dataclasses.Field):
    """A value of a recipe's field other than its default: of `CHANGED`, of a choice, or of the first type."""
    first, *others = [field.type] if get_origin(field.type) is dict else get_args(field.type) or [field.type]
    by_type = {str: "b", int: 5, float: 0.4, bool: not field.default, dict[str, str]: {}, dict[str, Any]: {"r": 8}}
    return CHANGED.get(field.name) or (others[-1] if isinstance(first, str) else by_type[first])


class TestSharedData:
    @pytest.mark.parametrize("objective", ["causal", "seq2seq"])
    def test_data_that_differ_have_other_names(self, tmp_path, objective):
        for name in ("ONE", "OTHER"):
            rows = [json.dumps({"text": f"{name} {row} " * 5, "b": f"{row} words"}) for row in range(40)]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))

        def share(**changes):
            fields = {"model": "tiny-linear", "block_size": 8, "validation_fraction": 0.3, "tokenizer": "bpe:270"}
            fields |= {"objective": objective, "source_column": "text", "target_column": "b", **changes}
            recipe = Recipe(**fields | {"dataset": str(tmp_path / f"{fields.get('dataset', 'ONE')}.jsonl")})
            folder = tmp_path / "results" / share_data(recipe, tmp_path / "results")[0]
            return folder, [str(Dataset.from_file(str(split))[:]) for split in sorted(folder.glob("*/*.arrow"))]

        before, tokens = share()
        values = {field.name: another_value(field) for field in dataclasses.fields(Recipe)}
        del values["task"]  # of a dataset that is made
        for name in values if objective == "causal" else ("max_source_length", "max_target_length", "source_column"):
            changes = {name: values[name]}
            if name in ("parametrization", "base_sizes"):  # each needs the other
                changes = {"parametrization": "completep", "base_sizes": {"hidden_size": 8}}
            folder, changed = share(**changes)
            assert (folder != before) == (name in Recipe.affecting("data")), name
            assert folder != before or changed == tokens, name


class TestTraining:
    def test_node_that_is_lost(self, cluster, recipe_file, run, tmp_path, monkeypatch):
        """The run resumes from its last checkpoint, and an interruption changes no number."""
        lose_node(monkeypatch, times=2)
        folder, options = tmp_path / "run", {"engine": "ray", "cpus_per_worker": 1}
        metrics = train(recipe_file, output_dir=folder, **options)
        assert metrics.data.token_stream == run[1].data.token_stream
        assert metrics.losses.validation.loss == run[1].losses.validation.loss
        assert logged_losses(folder) == logged_losses(run[0])
        names = {path.name for path in run[0].iterdir() if path.name not in ("runs", ".lock")}
        assert {path.name for path in folder.iterdir()} >= names and RunResult.load(folder) == metrics
        assert train(recipe_file, output_dir=folder, **options) == metrics

    def test_node_that_is_lost_too_often(self, cluster, recipe_file, tmp_path, monkeypatch):
        lose_node(monkeypatch, times=2)
        with pytest.raises(ChildProcessError) as caught:
            train(recipe_file, output_dir=tmp_path / "run", engine="ray", max_retries=1)
        assert str(caught.value) == f"run run was lost: The node died.; see {tmp_path}/run.log"
        assert not (tmp_path / "run" / "metrics.json").exists()

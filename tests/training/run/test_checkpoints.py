"""A run resumes with the same data, processes and best weights, or is refused."""

import json
import math
import pickle
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.runs import PowerCut, interrupt, logged_losses
from transformers import Trainer
from transformers.utils import logging

from modeling_nlq.training import train
from modeling_nlq.training.disk import make_empty_folder
from modeling_nlq.training.files import CHECKSUMS_FILE
from modeling_nlq.training.result import RunResult
from modeling_nlq.training.run import checkpoints
from modeling_nlq.training.run.checkpoints import fault_of, last_complete_checkpoint
from modeling_nlq.training.run.run_folder import describe_interrupted
from nlq import main


pytestmark = pytest.mark.thin(2)


def cut_after_its_last_step(finished: Path, folder: Path) -> None:
    shutil.copytree(finished, folder)
    (folder / "metrics.json").unlink()
    (folder / "model.safetensors").unlink()


@pytest.fixture(scope="module")
def interrupted(recipe_file, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    interrupt(recipe_file, output_dir=folder)
    return folder


def test_what_the_same_command_would_do(tmp_path):
    run, comparison = tmp_path / "run", tmp_path / "comparison"
    assert describe_interrupted(run) == "no checkpoint was saved, so the same command begins anew"
    for step in (9, 10, 11):
        (run / f"checkpoint-{step}").mkdir(parents=True)
    assert describe_interrupted(run) == "no checkpoint was saved, so the same command begins anew"
    for step in (9, 10):  # the last one is half written
        (run / f"checkpoint-{step}" / CHECKSUMS_FILE).touch()
    assert describe_interrupted(run) == "the same command goes on from checkpoint-10"
    (run / "metrics.json").touch()
    assert describe_interrupted(run) == "the run itself is finished"
    comparison.mkdir()
    (comparison / "comparison.yaml").touch()
    told = "the same command keeps {}, and makes the others from their {}"
    assert describe_interrupted(comparison) == told.format("0 finished runs", "first steps")
    shutil.copytree(run, comparison / "scales" / "small" / "runs" / "base" / "rate-1-seed-0")
    assert describe_interrupted(comparison) == told.format("1 finished run", "last checkpoints")


class TestCheckpoints:
    def test_interrupted_run_goes_on_to_the_same_result(self, run, recipe_file, tmp_path, monkeypatch, capsys, caplog):
        folder = tmp_path / "interrupted"
        real_init = Trainer.__init__

        def init(self, callbacks, **rest):
            real_init(self, callbacks=[*callbacks, PowerCut()], **rest)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "__init__", init)
            # A share of all steps, of which Trainer would say that it is not the number in the checkpoint
            arguments = ["train", str(recipe_file), "--output_dir", str(folder), "--logging_steps", "0.125"]
            assert main(arguments) == 130
        message = "nlq: interrupted: the same command goes on from checkpoint-4\n"
        assert capsys.readouterr().err.endswith(message)
        # A checkpoint that is half written must be passed over
        make_empty_folder(folder / "checkpoint-6")
        assert last_complete_checkpoint(folder) == folder / "checkpoint-4"
        assert main(arguments) == 0
        assert "Going on from" in caplog.text and "do not match" not in caplog.text
        assert logged_losses(folder) == logged_losses(run[0])
        assert RunResult.load(folder).data.token_stream == run[1].data.token_stream
        assert (folder / "model.safetensors").read_bytes() == (run[0] / "model.safetensors").read_bytes()

    def test_run_cut_in_a_later_epoch_ends_with_the_same_bits(self, corpus, recipe_file, tmp_path):
        dataset = tmp_path / "few.jsonl"  # some three steps an epoch
        dataset.write_text("".join(corpus.read_text().splitlines(keepends=True)[:14]))
        overrides = {"dataset": dataset, "streaming": True, "max_validation_documents": 3, "eval_strategy": "no"}
        overrides |= {"per_device_train_batch_size": 24, "gradient_accumulation_steps": 2}
        overrides |= {"switches": {"residual_dropout": 0.1}}
        whole = train(recipe_file, output_dir=tmp_path / "whole", **overrides)
        assert math.isfinite(whole.losses.train) and whole.data.steps == 8
        interrupt(recipe_file, output_dir=tmp_path / "cut", **overrides)
        cut = train(recipe_file, output_dir=tmp_path / "cut", **overrides)
        assert cut.data.token_stream == whole.data.token_stream
        weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
        assert weights[0] == weights[1]

    def test_run_cut_after_its_last_step_takes_no_more(self, run, recipe_file, tmp_path, caplog):
        folder = tmp_path / "cut"
        cut_after_its_last_step(run[0], folder)
        logging.enable_propagation()
        try:
            metrics = train(recipe_file, output_dir=folder)
        finally:
            logging.disable_propagation()
        # Tied weights are not missing
        assert "Going on from" in caplog.text and "missing keys" not in caplog.text
        assert metrics.data.steps == 8
        assert metrics.losses.validation.loss == pytest.approx(run[1].losses.validation.loss)
        for name in ("model.safetensors", "trainer_state.json"):
            assert (folder / name).read_bytes() == (run[0] / name).read_bytes()

    def test_another_model_does_not_go_on_from_the_checkpoint(self, run, recipe_file, tmp_path, monkeypatch):
        monkeypatch.setattr(checkpoints, "fault_of", lambda _: None)
        folder = tmp_path / "other"
        cut_after_its_last_step(run[0], folder)
        config = json.loads((folder / "checkpoint-8" / "config.json").read_text())
        (folder / "checkpoint-8" / "config.json").write_text(json.dumps({**config, "attention_activation": "relu"}))
        with pytest.raises(ValueError, match=r"another model .*attention_activation: 'relu' there, 'softmax' now"):
            train(recipe_file, output_dir=folder)

    def test_run_goes_on_from_before_a_damaged_checkpoint(self, interrupted, run, recipe_file, tmp_path, caplog):
        """A tail of zeros leaves the header of the weights whole."""
        path = shutil.copytree(interrupted, tmp_path / "run") / "checkpoint-4" / "model.safetensors"
        half = path.stat().st_size // 2
        path.write_bytes(path.read_bytes()[:half] + bytes(half))
        train(recipe_file, output_dir=tmp_path / "run")
        assert "checkpoint-4 is damaged (model.safetensors is not as it was written): passing over it" in caplog.text
        assert (tmp_path / "run" / "model.safetensors").read_bytes() == (run[0] / "model.safetensors").read_bytes()
        assert fault_of(path.parent) is None, "it was written again"

    @pytest.mark.parametrize(
        ("content", "fault"),
        [
            (None, "is incomplete"),
            (b"{}", "is incomplete"),
            (b'{"trainer_state.json', r"is damaged \(.*checksums.json is damaged"),
            (b'{"trainer_state.json": "", "../../recipe.yaml": ""}', r"is damaged \("),
        ],
    )
    def test_faults_of_checksums_are_named(self, content, fault, run, tmp_path):
        folder = shutil.copytree(run[0] / "checkpoint-8", tmp_path / "checkpoint-8")
        assert fault_of(folder) is None
        (folder / "checksums.json").unlink()
        if content is not None:
            (folder / "checksums.json").write_bytes(content)
        assert re.match(fault, fault_of(folder))

    def test_an_optimizer_that_is_code(self, interrupted, recipe_file, tmp_path):
        """PyTorch refuses it, and advises to run it."""
        checkpoint = shutil.copytree(interrupted, tmp_path / "run") / "checkpoint-4"
        (checkpoint / "optimizer.pt").write_bytes(pickle.dumps(PowerCut()))
        sums = json.loads((checkpoint / "checksums.json").read_text())
        sums["optimizer.pt"] = checkpoints._checksum(checkpoint / "optimizer.pt")
        (checkpoint / "checksums.json").write_text(json.dumps(sums))
        with pytest.raises(ValueError, match="checkpoint-4 is damaged, or holds code besides tensors"):
            train(recipe_file, output_dir=tmp_path / "run")


@pytest.fixture(scope="module")
def best_run(recipe_file, tmp_path_factory) -> tuple[Path, dict, str]:
    """A finished run, its overrides, and its best checkpoint, not its last: the highest loss counts as best."""
    folder = tmp_path_factory.mktemp("best") / "finished"
    overrides = {"load_best_model_at_end": True, "eval_steps": 2}
    overrides |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    train(recipe_file, output_dir=folder, **overrides)
    state = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["best_global_step"] < 8
    return folder, overrides, f"checkpoint-{state['best_global_step']}"


class TestBestModel:
    @pytest.mark.slow
    def test_run_that_was_killed_and_moved_ends_with_the_best_weights(
        self, best_run, recipe_file, tmp_path, monkeypatch
    ):
        finished, overrides, best = best_run
        monkeypatch.chdir(tmp_path)
        folder = tmp_path / "moved"
        cut_after_its_last_step(finished, folder)
        finished.rename(hidden := finished.with_name("hidden"))  # the checkpoints name this folder
        try:
            metrics = train(recipe_file, output_dir=folder, **overrides)
        finally:
            hidden.rename(finished)
        assert list(tmp_path.iterdir()) == [folder]  # also TensorBoard's files
        kept, wanted = (load_file(path / "model.safetensors") for path in (folder, finished / best))
        assert all((kept[name] == wanted[name]).all() for name in wanted)
        assert metrics.losses.validation.loss == RunResult.load(finished).losses.validation.loss

    def test_best_checkpoint_that_is_missing(self, best_run, recipe_file, tmp_path):
        finished, overrides, best = best_run
        folder = tmp_path / "run"
        cut_after_its_last_step(finished, folder)
        shutil.rmtree(folder / best)
        with pytest.raises(ValueError, match=f"{folder / best}, the best checkpoint so far, is missing or damaged"):
            train(recipe_file, output_dir=folder, **overrides)


class TestConditions:
    def test_dataset_that_changed(self, corpus, recipe_file, tmp_path):
        options = {"dataset": shutil.copy(corpus, tmp_path / "corpus.jsonl"), "output_dir": tmp_path / "run"}
        interrupt(recipe_file, **options)
        lines = corpus.read_text().splitlines(keepends=True)
        options["dataset"].write_text("".join(reversed(lines)))
        message = r"checkpoint-4 was made with another dataset or global batch size \(dataset_fingerprint: "
        with pytest.raises(ValueError, match=message):
            train(recipe_file, **options)
        assert not (tmp_path / "run" / "metrics.json").exists()

    def test_same_batch_in_other_shares_or_another_batch(self, interrupted, run, recipe_file, tmp_path):
        folder = shutil.copytree(interrupted, tmp_path / "run")
        recipe = (folder / "recipe.yaml").read_text()
        with pytest.raises(ValueError, match=r"\(global_batch_size: 8 there, 16 now\); restore what it was"):
            train(recipe_file, output_dir=folder, per_device_train_batch_size=16)
        assert (folder / "recipe.yaml").read_text() == recipe
        shares = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
        metrics = train(recipe_file, output_dir=folder, **shares)
        assert metrics.data.token_stream == run[1].data.token_stream
        assert logged_losses(folder) == pytest.approx(logged_losses(run[0]), abs=2e-4)
        # The run is finished: both commands do nothing, and another global batch size is another recipe
        assert train(recipe_file, output_dir=folder, **shares) == metrics
        assert train(recipe_file, output_dir=folder) == metrics
        with pytest.raises(ValueError, match=r"holds a run of another recipe .*global_batch_size: 8 there, 4 now"):
            train(recipe_file, output_dir=folder, per_device_train_batch_size=4)

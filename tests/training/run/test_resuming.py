"""How a run goes on after an interruption: with the same data, processes and best weights, or not at all."""

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from modeling_nlq.training.cli import main
from modeling_nlq.training.run import trainer as train_module
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.run.trainer import train


class PowerCut(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def interrupted(recipe_file: Path, *arguments: str) -> None:
    """Begins a run that ends in its fifth step, after a checkpoint at the fourth."""
    with pytest.raises(KeyboardInterrupt):
        train(load_recipe(str(recipe_file), [*arguments]), callbacks=[PowerCut()])


def cut_after_its_last_step(finished: Path, folder: Path) -> None:
    """Makes a copy of a run that was killed before it wrote its weights and metrics."""
    shutil.copytree(finished, folder)
    (folder / "metrics.json").unlink()
    (folder / "model.safetensors").unlink()


@pytest.fixture(scope="module")
def best_run(recipe_file, tmp_path_factory) -> tuple[Path, list[str], str]:
    """A finished run, its options, and the name of its best checkpoint, which is not its last: its rate is too high."""
    folder = tmp_path_factory.mktemp("best") / "finished"
    arguments = ["--load_best_model_at_end", "true", "--eval_steps", "2", "--learning_rate", "1"]
    arguments += ["--lr_scheduler_type", "constant", "--lr_scheduler_kwargs", "{}"]
    train(load_recipe(str(recipe_file), [*arguments, "--output_dir", str(folder)]))
    state = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["best_global_step"] < 8
    return folder, arguments, f"checkpoint-{state['best_global_step']}"


class TestBestModel:
    @pytest.mark.parametrize("is_cut_earlier", [False, True], ids=["after its last step", "earlier"])
    def test_run_that_was_killed_and_moved_ends_with_the_best_weights(self, best_run, recipe_file, tmp_path, is_cut_earlier):
        finished, arguments, best = best_run
        folder = tmp_path / "moved"
        cut_after_its_last_step(finished, folder)
        for checkpoint in folder.glob("checkpoint-*") if is_cut_earlier else []:
            if int(checkpoint.name.removeprefix("checkpoint-")) > int(best.removeprefix("checkpoint-")):
                shutil.rmtree(checkpoint)
        finished.rename(hidden := finished.with_name("hidden"))  # the checkpoints name this folder
        try:
            metrics = train(load_recipe(str(recipe_file), [*arguments, "--output_dir", str(folder)]))
        finally:
            hidden.rename(finished)
        kept, wanted = (load_file(path / "model.safetensors") for path in (folder, finished / best))
        assert all((kept[name] == wanted[name]).all() for name in wanted)
        assert metrics["eval_loss"] == json.loads((finished / "metrics.json").read_text())["eval_loss"]

    def test_best_checkpoint_that_is_missing(self, best_run, recipe_file, tmp_path, capsys):
        finished, arguments, best = best_run
        folder = tmp_path / "run"
        cut_after_its_last_step(finished, folder)
        shutil.rmtree(folder / best)
        assert main(["train", str(recipe_file), *arguments, "--output_dir", str(folder)]) == 1
        assert f"{folder / best}, the best checkpoint so far, is missing or damaged" in capsys.readouterr().err


class TestConditions:
    def test_dataset_that_changed(self, corpus, recipe_file, tmp_path, capsys):
        dataset, folder = tmp_path / "corpus.jsonl", tmp_path / "run"
        shutil.copy(corpus, dataset)
        arguments = ["--dataset", str(dataset), "--output_dir", str(folder)]
        interrupted(recipe_file, *arguments)
        lines = dataset.read_text().splitlines(keepends=True)
        dataset.write_text("".join(reversed(lines)))
        assert main(["train", str(recipe_file), *arguments]) == 1
        error = capsys.readouterr().err
        assert f"{folder / 'checkpoint-4'} was made with another dataset or number of processes (dataset_fingerprint: " in error
        assert f"go on all the same by --resume_from_checkpoint {folder / 'checkpoint-4'}" in error
        assert not (folder / "metrics.json").exists()
        dataset.write_text("".join(lines))
        assert main(["train", str(recipe_file), *arguments]) == 0

    def test_another_number_of_processes(self, recipe_file, tmp_path, capsys):
        folder = tmp_path / "run"
        arguments = ["--output_dir", str(folder)]
        interrupted(recipe_file, *arguments)
        checkpoint = folder / "checkpoint-4"
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        conditions = state["stateful_callbacks"]["RunRecord"]["attributes"]["conditions"]
        assert conditions["processes"] == 1 and conditions["global_batch_size"] == 8
        conditions.update(processes=2, global_batch_size=16)  # as two processes would have written
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        assert main(["train", str(recipe_file), *arguments]) == 1
        assert "(global_batch_size: 16 there, 8 now, processes: 2 there, 1 now); restore what it was" in capsys.readouterr().err
        assert main(["train", str(recipe_file), *arguments, "--resume_from_checkpoint", str(checkpoint)]) == 0
        metrics = json.loads((folder / "metrics.json").read_text())
        assert metrics["processes"] == 1 and metrics["tokens_seen"] == 8 * 8 * 64

    def test_checkpoint_that_does_not_say(self, recipe_file, tmp_path, capsys):
        arguments = ["--output_dir", str(tmp_path / "run")]
        interrupted(recipe_file, *arguments)
        path = tmp_path / "run" / "checkpoint-4" / "trainer_state.json"
        state = json.loads(path.read_text())
        del state["stateful_callbacks"]["RunRecord"]["attributes"]["conditions"]
        path.write_text(json.dumps(state))
        assert main(["train", str(recipe_file), *arguments]) == 1
        assert "does not say with which dataset and how many processes it was made" in capsys.readouterr().err


def test_tokens_seen_are_those_of_the_batches(recipe_file, tmp_path, monkeypatch):
    """The last batch of an epoch is smaller, and so is one that an interruption repeats."""
    shapes = []
    real_step = Trainer.training_step
    monkeypatch.setattr(
        Trainer,
        "training_step",
        lambda self, model, inputs, *args: shapes.append(inputs["input_ids"].shape) or real_step(self, model, inputs, *args),
    )
    arguments = ["--max_steps", "-1", "--num_train_epochs", "2", "--per_device_train_batch_size", "200"]
    arguments += ["--gradient_accumulation_steps", "2", "--save_steps", "1", "--output_dir", str(tmp_path / "run")]
    metrics = train(load_recipe(str(recipe_file), arguments))
    assert len(set(shapes)) == 2, "no batch was smaller: nothing is tested"
    assert metrics["tokens_seen"] == sum(rows * length for rows, length in shapes)
    assert metrics["tokens_per_second"] == pytest.approx(metrics["tokens_seen"] / metrics["train_seconds"])
    assert f"{metrics['tokens_seen']:,} tokens" in (tmp_path / "run" / "README.md").read_text()

    (tmp_path / "run" / "metrics.json").unlink()
    shutil.rmtree(tmp_path / "run" / f"checkpoint-{metrics['steps']}")
    assert train(load_recipe(str(recipe_file), arguments))["tokens_seen"] == metrics["tokens_seen"]


def test_label_smoothing_is_of_the_next_token(run, recipe_file, tmp_path, monkeypatch):
    """As little smoothing as makes no difference changes nothing, and held-out losses are never smoothed."""
    # As under `torch_compile`, where Trainer does not find the name of any model
    monkeypatch.delitem(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "nlq")
    histories = []
    for factor in ("1e-9", "0.3"):
        folder = tmp_path / factor
        metrics = train(load_recipe(str(recipe_file), ["--label_smoothing_factor", factor, "--output_dir", str(folder)]))
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        histories.append([entry["loss"] for entry in history if "loss" in entry])
        if factor == "1e-9":
            assert metrics["eval_loss"] == pytest.approx(run[1]["eval_loss"], rel=1e-4)
        assert metrics["eval_perplexity"] == pytest.approx(math.e ** metrics["eval_loss"])
    finished = json.loads((run[0] / "trainer_state.json").read_text())["log_history"]
    assert histories[0] == pytest.approx([entry["loss"] for entry in finished if "loss" in entry], rel=1e-4)
    assert histories[1][0] != pytest.approx(histories[0][0], rel=1e-4)


def test_tied_weights_are_not_missing(run, recipe_file, tmp_path, caplog):
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    (folder / "metrics.json").unlink()
    logging.enable_propagation()
    try:
        train(load_recipe(str(recipe_file), ["--output_dir", str(folder)]))
    finally:
        logging.disable_propagation()
    assert "Going on from" in caplog.text and "missing keys" not in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:820] . unexpected pos 512 vs 400"),
        Exception("No space left on device (os error 28)"),
    ],
    ids=["file", "archive", "tokenizer"],
)
def test_full_disk(error, recipe_file, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", fail)
    monkeypatch.setattr(train_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**20, 2**20, 0))
    folder = tmp_path / "run"
    assert main(["train", str(recipe_file), "--output_dir", str(folder)]) == 1
    assert f"nlq: error: the disk of {folder} is full; make room" in capsys.readouterr().err

"""A run from its recipe to its folder: what is in it, what it measured, and what it refuses."""

import hashlib
import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from modeling_nlq.training import files, train
from modeling_nlq.training.result import RunResult
from modeling_nlq.training.run.trainer import PEAK_TFLOPS, has_diverged
from nlq import main


def times(folder: Path) -> dict[Path, int]:
    """When each file in a folder was written. Older releases of filelock write to the lock's when they open it."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != files.LOCK_FILE}


def test_divergence_is_half_a_nat_above_chance():
    assert [has_diverged(math.log(50) + more, 50) for more in (-1.0, 0.4, 0.6, math.nan)] == [False, False, True, True]


class TestRun:
    def test_folder_has_everything(self, run):
        folder, metrics = run
        for name in ("config.json", "model.safetensors", "tokenizer.json", "modeling_nlq.py", "recipe.yaml"):
            assert (folder / name).is_file(), name
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert list(folder.glob("runs/*/events.out.tfevents.*"))
        stored = RunResult.load(folder)
        assert stored == metrics
        assert stored.data.steps == 8 and stored.data.tokens_seen == 8 * 8 * 64 and stored.machine.versions["torch"]
        kernels = r"code of the package [\d.]+; attention by \w+; loss by (cpp|pytorch)"
        assert re.fullmatch(kernels, stored.attention.kernels)
        assert f"({stored.attention.kernels})" in (folder / "README.md").read_text()
        assert stored.losses.validation.perplexity == pytest.approx(math.exp(stored.losses.validation.loss))

    def test_token_stream_is_the_hash_of_the_batches(self, run, recipe_file, monkeypatch):
        batches = []
        real_step = Trainer.training_step

        def keep(self, model, inputs, *rest):
            batches.append(inputs["input_ids"])
            return real_step(self, model, inputs, *rest)

        monkeypatch.setattr(Trainer, "training_step", keep)
        folder = run[0].parent / "other-model"
        switches = {"attention_activation": "relu", "query_projection": "identity"}
        batches_of_half = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        metrics = train(recipe_file, output_dir=folder, switches=switches, save_strategy="no", **batches_of_half)
        stream = ""
        for row in torch.cat(batches).numpy().astype("int32"):
            stream = hashlib.sha256(stream.encode() + row.tobytes()).hexdigest()
        assert len(batches) == 16 and metrics.data.token_stream == stream == run[1].data.token_stream
        assert metrics.machine.tokens_per_second == pytest.approx(metrics.data.tokens_seen / metrics.machine.seconds)
        assert metrics.machine.peak_memory > 2**20

    def test_utilization_is_that_of_half_precision(self, run, recipe_file, tmp_path, monkeypatch):
        monkeypatch.setitem(PEAK_TFLOPS, "cpu", 2.0)
        half = train(recipe_file, output_dir=tmp_path / "run", bf16=True, max_steps=2, save_strategy="no")
        flops = half.machine.tokens_per_second * half.size.flops_per_token
        assert half.machine.mfu == pytest.approx(flops / 2e12)
        assert run[1].machine.mfu is None

    def test_finished_run_is_not_repeated_and_no_other_recipe_begun(self, run, recipe_file, monkeypatch):
        before = times(run[0])
        monkeypatch.setattr(Trainer, "train", lambda *_, **__: pytest.fail("trained again"))
        assert train(recipe_file, output_dir=run[0]) == run[1]
        for change, name in (({"learning_rate": 0.5}, "learning_rate"), ({"switches": {"qk_norm": "l2"}}, "qk_norm")):
            with pytest.raises(ValueError, match=f"holds a run of another recipe.*{name}"):
                train(recipe_file, output_dir=run[0], **change)
        assert times(run[0]) == before

    @pytest.mark.parametrize("logged, step", [("steps", 2), ("no", 3)])
    def test_loss_that_is_no_number_ends_the_run(self, recipe_file, tmp_path, capsys, logged, step):
        """Also where no step was logged since."""
        folder = tmp_path / "run"
        options = ["--learning_rate", "1e38", "--save_strategy", "no", "--logging_strategy", logged]
        assert main(["train", str(recipe_file), "--output_dir", str(folder), "--max_steps", "3", *options]) == 0
        assert f"diverged: the loss was infinite or not a number after step {step}" in capsys.readouterr().out
        json.loads((folder / "metrics.json").read_text(), parse_constant=pytest.fail)  # NaN is not JSON
        losses = RunResult.load(folder).losses
        assert losses.diverged and losses.diverged_at == step
        assert losses.train is None if logged == "no" else math.isfinite(losses.train)
        assert not (folder / "model.safetensors").exists()

    def test_failed_attempt_does_not_claim_the_folder(self, recipe_file, tmp_path, capsys):
        arguments = ["train", str(recipe_file), "--output_dir", str(tmp_path / "run"), "--max_steps", "1"]
        assert main([*arguments, "--tokenizer", str(tmp_path / "missing")]) == 1
        assert main([*arguments, "--save_strategy", "no"]) == 0
        # Weights without metrics: cut off while finishing, and not to be overwritten by another recipe
        (tmp_path / "run" / "metrics.json").unlink()
        assert main([*arguments, "--learning_rate", "0.5"]) == 1
        assert "holds a run of another recipe" in capsys.readouterr().err

    def test_going_on_from_a_saved_model(self, run, recipe_file, tmp_path):
        folders = ["--from", str(run[0]), "--output_dir", str(tmp_path / "run")]
        options = ["--max_steps", "1", "--learning_rate", "0", "--save_strategy", "no"]
        assert main(["train", str(recipe_file), *folders, *options]) == 0
        metrics = RunResult.load(tmp_path / "run")
        assert metrics.losses.validation.loss == pytest.approx(run[1].losses.validation.loss, rel=1e-5)

    def test_trains_with_the_models_own_backend(self, run, recipe_file, tmp_path):
        """Counting the parameters once left every model with the slow reference backend."""
        assert run[1].attention.attn_implementation == "sdpa"
        switches = {"attention_activation": "relu"}
        metrics = train(recipe_file, output_dir=tmp_path / "relu", max_steps=1, save_strategy="no", switches=switches)
        assert metrics.attention.attn_implementation == "nlq"

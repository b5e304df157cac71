"""From text to a run folder: data, metrics, training, resuming, several processes, and the command line."""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, EvalPrediction, TrainerCallback
from transformers.trainer import Trainer

from modeling_nlq import NLQConfig, NLQForCausalLM
from modeling_nlq.configuration import find
from modeling_nlq.training.cli import main
from modeling_nlq.training.run import data as data_module
from modeling_nlq.training.run.data import (
    BlockCollator,
    load_documents,
    make_blocks,
    make_tokenizer,
    python_documents,
    unigram_perplexity,
)
from modeling_nlq.training.run.evaluation import LanguageModelingMetrics, token_losses
from modeling_nlq.training.run.recipe import Recipe, load_recipe
from modeling_nlq.training.run.trainer import is_complete_checkpoint, last_complete_checkpoint, train


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


class TestData:
    def test_stream_is_the_documents_joined_and_cut(self, corpus):
        recipe = Recipe(model="tiny-linear", dataset=str(corpus), tokenizer="bpe:512", block_size=64)
        documents = load_documents(recipe)["train"]
        tokenizer = make_tokenizer(recipe, {"train": documents})
        blocks = make_blocks(documents, tokenizer, recipe)
        stream = []
        for text in documents["text"]:
            stream += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        count = len(stream) // 64
        assert np.array_equal(blocks.dataset["input_ids"][:], np.array(stream[: count * 64]).reshape(count, 64))
        assert blocks.tokens == len(stream)
        total_bytes = sum(len(text.encode()) for text in documents["text"])
        assert blocks.bytes_per_token == pytest.approx(total_bytes / len(stream))

        recipe.num_proc = 2
        parallel = make_blocks(documents.select(range(30)), tokenizer, recipe).dataset
        assert np.array_equal(parallel["input_ids"][:], blocks.dataset["input_ids"][: len(parallel)])
        assert tokenizer.decode(tokenizer("x = 'ü…'\n\tdef f(): pass")["input_ids"]) == "x = 'ü…'\n\tdef f(): pass"

    def test_split_is_of_documents_and_stable(self, corpus):
        recipe = Recipe(model="tiny-linear", dataset=str(corpus), validation_fraction=0.2)
        splits = load_documents(recipe)
        train_paths, held_out = set(splits["train"]["path"]), set(splits["validation"]["path"])
        assert train_paths and held_out and not train_paths & held_out
        assert len(train_paths | held_out) == len(corpus.read_text().splitlines())
        recipe.streaming = True
        assert [row["path"] for row in load_documents(recipe)["validation"]] == list(splits["validation"]["path"])
        recipe.max_validation_documents = 2
        assert [row["path"] for row in load_documents(recipe)["validation"]] == list(splits["validation"]["path"])[:2]

    def test_test_split_is_held_out_once_more(self, corpus):
        fields = {"model": "tiny-linear", "dataset": str(corpus), "validation_fraction": 0.2}
        before = load_documents(Recipe(**fields))
        splits = load_documents(Recipe(**fields, test_fraction=0.3))
        parts = {split: set(splits[split]["path"]) for split in splits}
        assert parts["validation"] == set(before["validation"]["path"])
        assert parts["test"] and parts["train"] == set(before["train"]["path"]) - parts["test"]
        assert not parts["test"] & parts["validation"]
        streamed = load_documents(Recipe(**fields, test_fraction=0.3, streaming=True))
        assert {split: {row["path"] for row in streamed[split]} for split in streamed} == parts

    def test_splits_of_the_dataset_itself_are_taken(self):
        rows = {split: Dataset.from_dict({"text": [f"{split} {index}" for index in range(40)]}) for split in ("train", "test")}
        recipe = Recipe(model="tiny-linear", validation_fraction=0.2, test_fraction=0.2)
        splits = data_module._hold_out(rows, recipe)
        assert splits["test"]["text"][:] == rows["test"]["text"][:]
        assert sorted([*splits["train"]["text"], *splits["validation"]["text"]]) == sorted(rows["train"]["text"])
        recipe.test_fraction = 0.0
        assert "test" not in data_module._hold_out(rows, recipe)

    def test_streaming_gives_the_blocks_of_the_stored_corpus(self, corpus):
        stored = Recipe(model="tiny-linear", dataset=str(corpus), tokenizer="bpe:512", block_size=64)
        streamed = Recipe(model="tiny-linear", dataset=str(corpus), tokenizer="bpe:512", block_size=64, streaming=True)
        tokenizer = make_tokenizer(stored, load_documents(stored))
        expected = make_blocks(load_documents(stored)["train"], tokenizer, stored).dataset["input_ids"][:]
        blocks = make_blocks(load_documents(streamed)["train"], tokenizer, streamed).dataset
        assert np.array_equal([row["input_ids"] for row in blocks], expected)

    @pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
    def test_local_files(self, suffix, tmp_path):
        texts = [f"document {index}\nsecond line" for index in range(50)]
        path = tmp_path / f"corpus.{suffix}"
        if suffix == "txt":
            path.write_text("\n\n".join(texts))
        elif suffix == "jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            Dataset.from_dict({"text": texts}).to_parquet(path)
        splits = load_documents(Recipe(model="tiny-linear", dataset=str(path), validation_fraction=0.3))
        assert sorted([*splits["train"]["text"], *splits["validation"]["text"]]) == sorted(texts)

    def test_packed_documents_restart(self):
        rows = [{"input_ids": [5, 6, 0, 7, 8, 9, 0, 0, 4]}]
        batch = BlockCollator(end_of_text=0, restart=True)(rows)
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 0]]
        assert batch["labels"].tolist() == [[5, 6, 0, -100, 8, 9, 0, -100, -100]]
        assert "position_ids" not in BlockCollator(end_of_text=0)(rows)

    def test_packed_documents_see_themselves_only(self):
        model = NLQForCausalLM(NLQConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)).eval()
        batch = BlockCollator(end_of_text=0, restart=True)([{"input_ids": [5, 6, 0, 7, 8, 9, 0]}])
        packed = model(**batch)
        alone = model(torch.tensor([[7, 8, 9, 0]]))
        assert torch.allclose(packed.logits[:, 3:], alone.logits, atol=1e-6)

    def test_unigram_baseline(self, corpus):
        recipe = Recipe(model="tiny-linear", dataset=str(corpus), tokenizer="bpe:512", block_size=64, validation_fraction=0.2)
        documents = load_documents(recipe)
        tokenizer = make_tokenizer(recipe, documents)
        blocks = {split: make_blocks(dataset, tokenizer, recipe) for split, dataset in documents.items()}
        seen = blocks["train"].dataset["input_ids"][:].ravel()
        held_out = blocks["validation"].dataset["input_ids"][:].ravel()
        frequency = {token: (np.sum(seen == token) + 1) / (len(seen) + 512) for token in set(held_out.tolist())}
        expected = math.exp(-np.mean([math.log(frequency[token]) for token in held_out.tolist()]))
        assert unigram_perplexity(blocks["train"].dataset, blocks["validation"].dataset, 512) == pytest.approx(expected)

    def test_builtin_corpus(self):
        paths = [row["path"] for row in python_documents("python-stdlib", "")]
        assert len(paths) > 100 and "json/decoder.py" in paths and len(paths) == len(set(paths))

    def test_corpus_of_installed_packages(self, monkeypatch):
        files = data_module.python_files("python-site-packages")
        assert len(files) > 1000 and not any(path.name == "decoder.py" and path.parent.name == "json" for path in files)
        monkeypatch.setattr(data_module, "python_files", lambda _: [path for path in files if path.parent.name == "yaml"])
        splits = load_documents(Recipe(model="tiny-linear", dataset="python-site-packages", validation_fraction=0.4))
        assert {"yaml/loader.py", "yaml/dumper.py"} <= {*splits["train"]["path"], *splits["validation"]["path"]}


def test_metric_equals_a_direct_computation():
    logits = torch.randn(6, 9, 20, dtype=torch.float64)
    labels = torch.randint(20, (6, 9))
    labels[2, 4:] = -100
    metrics = LanguageModelingMetrics(bytes_per_token=3.5)
    for part in (slice(0, 4), slice(4, 6)):
        prediction = EvalPrediction(token_losses(logits[part], labels[part]), labels[part])
        result = metrics(prediction, compute_result=part.stop == 6)
    log_probabilities = logits.log_softmax(dim=-1)
    values, hits = [], []
    for row in range(6):
        for place in range(8):
            if (target := labels[row, place + 1].item()) != -100:
                values.append(-log_probabilities[row, place, target].item())
                hits.append(logits[row, place].argmax().item() == target)
    loss = sum(values) / len(values)
    assert result["loss"] == pytest.approx(loss, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(loss / math.log(2) / 3.5, rel=1e-6)
    assert result["token_accuracy"] == pytest.approx(sum(hits) / len(hits))


class TestRun:
    def test_folder_has_everything(self, run):
        folder, metrics = run
        for name in ("config.json", "model.safetensors", "tokenizer.json", "modeling_nlq.py", "recipe.yaml", "metrics.json"):
            assert (folder / name).is_file(), name
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert list(folder.glob("runs/*/events.out.tfevents.*"))
        stored = json.loads((folder / "metrics.json").read_text())
        assert stored == metrics
        assert stored["steps"] == 8 and stored["tokens_seen"] == 8 * 8 * 64 and stored["versions"]["torch"]
        assert 1 < stored["eval_perplexity"] < stored["unigram_perplexity"] * 2
        assert stored["eval_perplexity"] == pytest.approx(math.exp(stored["eval_loss"]))

    def test_token_stream_is_the_hash_of_the_batches(self, run, recipe_file, monkeypatch):
        batches = []
        real_step = Trainer.training_step
        keep = lambda self, model, inputs, *rest: batches.append(inputs["input_ids"]) or real_step(self, model, inputs, *rest)  # noqa: E731
        monkeypatch.setattr(Trainer, "training_step", keep)
        folder = run[0].parent / "other-model"
        arguments = ["--output_dir", str(folder), "--set", "attention_activation=relu", "--set", "query_projection=identity"]
        arguments += ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"]
        metrics = train(load_recipe(str(recipe_file), arguments))
        stream = ""
        for row in torch.cat(batches).numpy().astype("int32"):
            stream = hashlib.sha256(stream.encode() + row.tobytes()).hexdigest()
        assert len(batches) == 16 and metrics["token_stream"] == stream == run[1]["token_stream"]
        assert metrics["tokens_per_second"] == pytest.approx(metrics["tokens_seen"] / metrics["train_seconds"])
        assert metrics["peak_memory"] > 2**20

    def test_checkpoints_are_complete_models(self, run):
        folder = run[0] / "checkpoint-4"
        for name in ("config.json", "model.safetensors", "tokenizer.json", "modeling_nlq.py", "configuration_nlq.py"):
            assert (folder / name).is_file(), name
        assert AutoModelForCausalLM.from_pretrained(folder).config.eos_token_id == 0

    def test_folder_loads(self, run):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(run[0]), AutoTokenizer.from_pretrained(run[0])
        inputs = tokenizer("import ", return_tensors="pt")
        assert (
            model.generate(**inputs, max_new_tokens=5, do_sample=False, eos_token_id=-1).shape[1] > inputs["input_ids"].shape[1]
        )
        assert model.config.eos_token_id == tokenizer.eos_token_id and tokenizer.model_max_length == 64

    def test_card(self, run):
        card = ModelCard.load(run[0] / "README.md")
        assert card.data.library_name == "transformers" and "nlq" in card.data.tags
        results = {result.metric_type: result.metric_value for result in card.data.eval_results}
        assert results["loss"] == pytest.approx(run[1]["eval_loss"])
        assert "`query_projection` | `nonlinear`" in card.text and "{{" not in card.text
        assert str(run[0].parent) not in card.content

    def test_finished_run_is_not_repeated(self, run, recipe_file, monkeypatch):
        before = {path: path.stat().st_mtime_ns for path in run[0].rglob("*")}
        monkeypatch.setattr(Trainer, "train", lambda *_, **__: pytest.fail("trained again"))
        assert train(load_recipe(str(recipe_file), ["--output_dir", str(run[0])])) == run[1]
        assert {path: path.stat().st_mtime_ns for path in run[0].rglob("*")} == before

    def test_other_recipe_leaves_the_folder_alone(self, run, recipe_file):
        before = {path: path.stat().st_mtime_ns for path in run[0].rglob("*")}
        for change, name in ((["--learning_rate", "0.5"], "learning_rate"), (["--set", "qk_norm=l2"], "qk_norm")):
            with pytest.raises(ValueError, match=f"holds a run of another recipe.*{name}"):
                train(load_recipe(str(recipe_file), ["--output_dir", str(run[0]), *change]))
        assert {path: path.stat().st_mtime_ns for path in run[0].rglob("*")} == before

    def test_foreign_folder_is_left_alone(self, recipe_file, tmp_path):
        (tmp_path / "thesis.tex").write_text("all I have")
        with pytest.raises(ValueError, match="is no run of `nlq train`"):
            train(load_recipe(str(recipe_file), ["--output_dir", str(tmp_path)]))
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_interrupted_run_goes_on_to_the_same_result(self, run, recipe_file, tmp_path, monkeypatch):
        folder = tmp_path / "interrupted"
        stopped_at = []

        class PowerCut(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 5 and not stopped_at:
                    stopped_at.append(5)
                    raise KeyboardInterrupt

        real_init = Trainer.__init__
        monkeypatch.setattr(
            Trainer, "__init__", lambda self, callbacks, **kwargs: real_init(self, callbacks=[*callbacks, PowerCut()], **kwargs)
        )
        arguments = ["train", str(recipe_file), "--output_dir", str(folder)]
        assert main(arguments) == 130 and stopped_at == [5]
        # A checkpoint that was being written when the power went must be passed over, and must not be lost on
        shutil.copytree(folder / "checkpoint-4", folder / "checkpoint-6")
        (folder / "checkpoint-6" / "trainer_state.json").unlink()
        assert last_complete_checkpoint(folder) == folder / "checkpoint-4"

        assert main(arguments) == 0
        assert losses(folder) == pytest.approx(losses(run[0]), abs=1e-6)
        assert json.loads((folder / "metrics.json").read_text())["token_stream"] == run[1]["token_stream"]
        resumed = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for name, expected in AutoModelForCausalLM.from_pretrained(run[0]).state_dict().items():
            assert torch.allclose(resumed[name], expected, atol=1e-6), name

    def test_run_cut_after_its_last_step_takes_no_more(self, run, recipe_file, tmp_path):
        folder = tmp_path / "cut"
        shutil.copytree(run[0], folder)
        (folder / "metrics.json").unlink()
        metrics = train(load_recipe(str(recipe_file), ["--output_dir", str(folder)]))
        assert metrics["steps"] == 8 and metrics["eval_loss"] == pytest.approx(run[1]["eval_loss"])
        assert (folder / "model.safetensors").read_bytes() == (run[0] / "model.safetensors").read_bytes()

    def test_another_model_does_not_go_on_from_the_checkpoint(self, run, recipe_file, tmp_path):
        folder = tmp_path / "other"
        shutil.copytree(run[0], folder)
        (folder / "metrics.json").unlink()
        config = json.loads((folder / "checkpoint-8" / "config.json").read_text())
        for checkpoint in folder.glob("checkpoint-*"):
            (checkpoint / "config.json").write_text(json.dumps({**config, "attention_activation": "relu"}))
        with pytest.raises(ValueError, match=r"another model .*attention_activation: 'relu' there, 'softmax' now"):
            train(load_recipe(str(recipe_file), ["--output_dir", str(folder)]))

    def test_loss_that_is_no_number_ends_the_run(self, recipe_file, tmp_path, capsys):
        folder = tmp_path / "run"
        arguments = ["train", str(recipe_file), "--output_dir", str(folder), "--learning_rate", "1e38"]
        assert main(arguments) == 0
        assert "diverged: the loss was infinite or not a number after step 2" in capsys.readouterr().out
        metrics = json.loads((folder / "metrics.json").read_text(), parse_constant=pytest.fail)
        assert metrics["diverged"] and metrics["diverged_at"] == metrics["steps"] == 2 and math.isfinite(metrics["train_loss"])
        assert not (folder / "model.safetensors").exists()

    def test_stability_is_recorded_on_request(self, run, recipe_file, tmp_path):
        arguments = ["--output_dir", str(tmp_path / "run"), "--record_stability", "true", "--stability_steps", "4"]
        assert train(load_recipe(str(recipe_file), arguments))["eval_loss"] == run[1]["eval_loss"]
        histories = [
            json.loads((folder / "trainer_state.json").read_text())["log_history"] for folder in (tmp_path / "run", run[0])
        ]
        steps = [[entry["step"] for entry in history if "attention/layer_1/entropy" in entry] for history in histories]
        assert steps == [[1, 4, 8], []]

    def test_failed_attempt_does_not_claim_the_folder(self, recipe_file, tmp_path, capsys):
        arguments = ["train", str(recipe_file), "--output_dir", str(tmp_path / "run"), "--max_steps", "1"]
        assert main([*arguments, "--tokenizer", str(tmp_path / "missing")]) == 1
        assert main([*arguments, "--save_strategy", "no"]) == 0
        # Weights without metrics: cut off while finishing, and not to be overwritten by another recipe
        (tmp_path / "run" / "metrics.json").unlink()
        assert main([*arguments, "--learning_rate", "0.5"]) == 1
        assert "holds a run of another recipe" in capsys.readouterr().err

    def test_tokens_are_not_written_down(self, recipe_file):
        resolved = load_recipe(str(recipe_file), ["--hub_token", "hf_secret", "--hub_model_id", "owner/name"])
        assert "hf_secret" not in json.dumps(resolved.given) and resolved.training_arguments.hub_token == "hf_secret"

    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "config.json", "trainer_state.json"])
    @pytest.mark.parametrize("damage", ["missing", "empty", "half"])
    def test_damaged_file_makes_a_checkpoint_incomplete(self, name, damage, run, tmp_path):
        folder = tmp_path / "checkpoint-8"
        shutil.copytree(run[0] / "checkpoint-8", folder)
        assert is_complete_checkpoint(folder)
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        if damage != "missing":
            (folder / name).write_bytes(content[: len(content) // 2] if damage == "half" else b"")
        assert not is_complete_checkpoint(folder)

    def test_streaming_and_document_packing(self, recipe_file, tmp_path):
        overrides = ["--streaming", "--max_validation_documents", "3", "--packing", "documents", "--save_strategy", "no"]
        overrides += ["--max_steps", "2", "--output_dir", str(tmp_path / "run"), "--set", "attention_activation=sigmoid"]
        metrics = train(load_recipe(str(recipe_file), overrides))
        assert metrics["steps"] == 2 and math.isfinite(metrics["eval_loss"]) and metrics["unigram_perplexity"] is None

    def test_going_on_from_a_saved_model(self, run, recipe_file, tmp_path):
        overrides = ["--model", str(run[0]), "--tokenizer", str(run[0]), "--max_steps", "1", "--learning_rate", "0"]
        metrics = train(load_recipe(str(recipe_file), [*overrides, "--output_dir", str(tmp_path / "run")]))
        assert metrics["eval_loss"] == pytest.approx(run[1]["eval_loss"], rel=1e-5)

    def test_trains_with_the_models_own_backend(self, run, recipe_file, tmp_path):
        """Counting the parameters once left every model with the slow reference backend."""
        assert run[1]["attn_implementation"] == "sdpa"
        options = ["--output_dir", str(tmp_path / "relu"), "--max_steps", "2", "--set", "attention_activation=relu"]
        assert train(load_recipe(str(recipe_file), options))["attn_implementation"] == "nlq"

    def test_two_processes_train_as_one(self, run, recipe_file, tmp_path):
        folder = tmp_path / "two"
        accelerate_file = yaml.safe_load(find("accelerate", "cpu-two-processes").read_text())
        assert accelerate_file["num_processes"] == 2
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        command += [str(find("accelerate", "cpu-two-processes")), "-m", "modeling_nlq.training", "train", str(recipe_file)]
        command += ["--output_dir", str(folder), "--per_device_train_batch_size", "4", "--save_strategy", "no"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        metrics = json.loads((folder / "metrics.json").read_text())
        assert metrics["processes"] == 2 and metrics["tokens_seen"] == run[1]["tokens_seen"]
        assert losses(folder) == pytest.approx(losses(run[0]), abs=2e-4)
        assert metrics["eval_loss"] == pytest.approx(run[1]["eval_loss"], abs=2e-4)
        assert done.stdout.count("held-out perplexity") == 1


class TestCommandLine:
    def test_params(self, capsys):
        assert main(["params", "tiny-linear", "tiny-identity", "--match", "tiny-linear"]) == 0
        table = capsys.readouterr().out.splitlines()
        assert table[0].split()[:2] == ["model", "parameters"]
        assert table[1].split()[0] == "tiny-linear" and table[1].split()[-1] == "512"
        assert table[2].split()[0] == "tiny-identity" and table[2].split()[-1] == "576"

    def test_generate(self, run, capsys):
        assert main(["generate", str(run[0]), "import json", "--max_new_tokens", "5"]) == 0
        first = capsys.readouterr().out
        assert first.startswith("import json")
        main(["generate", str(run[0]), "import json", "--max_new_tokens", "5"])
        assert capsys.readouterr().out == first

    def test_evaluate_repeats_the_runs_own_result(self, run, corpus, capsys):
        arguments = ["evaluate", str(run[0]), "--dataset", str(corpus), "--validation_fraction", "0.1"]
        assert main(arguments) == 0
        assert f"perplexity {run[1]['eval_perplexity']:.2f}" in capsys.readouterr().out

    def test_evaluate_takes_a_small_file_whole(self, run, corpus, tmp_path, capsys):
        path = tmp_path / "few.jsonl"
        path.write_text("".join(corpus.read_text().splitlines(keepends=True)[:2]))
        assert main(["evaluate", str(run[0]), "--dataset", str(path)]) == 0
        assert "held-out perplexity" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "arguments, parts",
        [
            (["train", "domo"], ["'domo'", "'demo'"]),
            (["train", "demo", "--learning_rat", "1"], ["'--learning_rat'", "'--learning_rate'"]),
            (["train", "demo", "--learning_rate", "fast"], ["learning_rate", "'fast'"]),
            (["train", "demo", "--max_steps", "0"], ["max_steps=0", "num_train_epochs"]),
            (["train", "demo", "--prediction_loss_only", "true"], ["prediction_loss_only=True"]),
            (
                ["train", "demo", "--restore_callback_states_from_checkpoint", "true"],
                ["restore_callback_states_from_checkpoint"],
            ),
            (["train", "demo", "--max_validation_documents", "0"], ["max_validation_documents=0 must be at least 1"]),
            (["train", "demo", "--packing", "boxes"], ["packing", "'boxes'", "stream"]),
            (["train", "demo", "--set", "attention_activation=softmx"], ["attention_activation='softmx'", "sigmoid"]),
            (["train", "demo", "--set", "colour=blue"], ["'colour'"]),
            (["train", "demo", "--set", "num_attention_heads=5"], ["hidden_size=128", "num_attention_heads=5"]),
            (["train", "demo", "--model", "tiny-nonlinaer"], ["'tiny-nonlinaer'", "'tiny-nonlinear'"]),
            (["train", "demo", "--block_size", "512"], ["block_size=512", "max_position_embeddings=256"]),
            (["train", "demo", "--tokenizer", "bpe:9000", "--block_size", "300"], ["vocab_size=8192", "block_size=300"]),
            (["train", "demo", "--tokenizer", "bpe:many"], ["bpe:many", "257"]),
            (["train", "demo", "--dataset", "missing.jsonl"], ["'missing.jsonl'", "no such file"]),
            (["train", "demo", "--dataset", "empty.txt"], ["'empty.txt' is empty"]),
            (["train", "demo", "--dataset", "broken.jsonl"], ["'broken.jsonl'", "cannot be read"]),
            (["train", "demo", "--dataset", "fine.jsonl", "--text_column", "body"], ["'body'", "text"]),
            (["train", "demo", "--dataset", "fine.jsonl"], ["validation"]),
            (["train", "demo", "--dataset", "owner/nothing-there"], ["'owner/nothing-there'"]),
            (["train", "demo", "--attn_implementation", "sdpa", "--set", "attention_activation=relu"], ["'sdpa'", "eager"]),
            (["train", "broken.yaml"], ["broken.yaml", "cannot be read"]),
            (["train", "unknown.yaml"], ["unknown.yaml", "'learning_speed'", "training"]),
            (["generate", "no-such-folder", "x"], ["'no-such-folder'"]),
            (["generate", "runs/nothing-there", "x"], ["'runs/nothing-there'", "no such folder"]),
            (["generate", "half", "x"], ["'half'", "config.json"]),
            (["generate", "truncated", "x"], [""]),
            (["generate", "finished", "x", "--max_new_tokens", "70"], ["max_new_tokens=70", "64 positions"]),
            (["generate", "finished", ""], ["prompt is empty"]),
            (["train", "demo", "--attn_implementation", "flash_attention_2"], ["FlashAttention2"]),
            (["train", "numbers.yaml"], ["numbers.yaml", "training"]),
            (["train", "demo", "--dataset", "numbers.jsonl"], ["'text'", "3"]),
            (["params", "tiny-liner"], ["'tiny-liner'", "'tiny-linear'"]),
            (["params", "tiny-linear", "--match", "10"], ["no MLP width"]),
        ],
        ids=lambda value: " ".join(value) if value and value[0] in ("train", "generate", "params") else "",
    )
    def test_bad_input_gets_one_line(self, arguments, parts, run, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        Path("empty.txt").write_text("")
        Path("broken.jsonl").write_text('{"text": "one"}\n{"text": oops\n')
        Path("fine.jsonl").write_text('{"text": "one document"}\n')
        Path("broken.yaml").write_text("model: [unclosed")
        Path("unknown.yaml").write_text("model: tiny-linear\ntraining: {learning_speed: 1}\n")
        Path("numbers.yaml").write_text("model: tiny-linear\ntraining: [1]\n")
        Path("numbers.jsonl").write_text('{"text": 3}\n')
        Path("half").mkdir()
        for name in ("finished", "truncated"):
            shutil.copytree(run[0], name, ignore=shutil.ignore_patterns("checkpoint-*", "runs"))
        weights = Path("truncated", "model.safetensors")
        weights.write_bytes(weights.read_bytes()[:1000])
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

        assert main([*arguments]) != 0
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nlq: error: ")]
        assert len(errors) == 1
        for part in parts:
            assert part in errors[0]
        assert {path: path.read_bytes() for path in before} == before

    def test_tokenizer_larger_than_the_vocabulary(self, run, recipe_file, tmp_path, capsys):
        arguments = ["train", str(recipe_file), "--tokenizer", str(run[0]), "--set", "vocab_size=400"]
        assert main([*arguments, "--output_dir", str(tmp_path / "run")]) == 1
        assert "ids up to 511, too large for the model's vocab_size=400" in capsys.readouterr().err


def test_standard_library_split_needs_no_network(monkeypatch):
    monkeypatch.setattr(data_module, "load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    splits = load_documents(Recipe(model="tiny-linear"))
    assert len(splits["validation"]) > 10

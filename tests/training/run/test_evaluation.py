"""Metrics of a language model, and `nlq evaluate`."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from support.corpora import write_documents
from transformers import AutoModelForCausalLM, AutoTokenizer, EvalPrediction

from modeling_nlq.training import train
from modeling_nlq.training.run import evaluation
from modeling_nlq.training.run.blocks import BlockCollator
from modeling_nlq.training.run.evaluation import LanguageModelingMetrics, token_losses
from modeling_nlq.training.run.provenance import read_trained_on, record_run
from modeling_nlq.training.run.recipe import Recipe
from nlq import main


def test_metric_equals_a_direct_computation():
    logits = torch.randn(6, 9, 20, dtype=torch.float64)
    labels = torch.randint(20, (6, 9))
    labels[2, 4:] = -100
    metrics = LanguageModelingMetrics(bytes_per_token=3.5)
    for part in (slice(0, 4), slice(4, 6)):
        prediction = EvalPrediction(token_losses(logits[part], labels[part]), labels[part])
        result = metrics(prediction, compute_result=part.stop == 6)
    targets = labels[:, 1:]
    is_token = targets != -100
    values = -logits[:, :-1].log_softmax(dim=-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0][is_token]
    hits = (logits[:, :-1].argmax(dim=-1) == targets)[is_token]
    loss = values.mean().item()
    assert result["loss"] == pytest.approx(loss, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(loss / math.log(2) / 3.5, rel=1e-6)
    assert result["token_accuracy"] == pytest.approx(hits.double().mean().item())
    parts = metrics.loss_parts(3)  # the second has fewer tokens
    second = values[16:27].sum().item() * 3 / len(values)
    assert sum(parts) / 3 == pytest.approx(loss) and parts[1] == pytest.approx(second)


def test_evaluate_repeats_the_runs_own_result(run, corpus, tmp_path, monkeypatch, capsys):
    """Only with the options that it names: a stranger's folder may name any file of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "load_documents", None)
    assert main(["evaluate", str(run[0])]) == 1
    options = f"--dataset {corpus.resolve()} --validation_fraction 0.1"
    assert f"was trained on {corpus.name}; name the text" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["evaluate", str(run[0]), *options.split()]) == 0
    assert f"perplexity {run[1].losses.validation.perplexity:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("count", [1, 40], ids=["less than a block", "some blocks and a remainder"])
def test_all_tokens_of_a_file_count_in_blocks_of_the_run(count, packing, run, tmp_path):
    texts, block_size = [f"x = {index}" for index in range(count)], 24
    folder = shutil.copytree(run[0], tmp_path / "run")
    trained_on = [{**record, "block_size": block_size, "packing": packing} for record in run[1].data.trained_on]
    replace(run[1], data=replace(run[1].data, trained_on=trained_on)).save(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    stream = [token for text in texts for token in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    assert (len(stream) > block_size) == (count > 1) and len(stream) % block_size > 1
    losses = []
    for start in range(0, len(stream), block_size):
        rows = [{"input_ids": stream[start : start + block_size]}]
        batch = BlockCollator(tokenizer.eos_token_id, packing == "documents")(rows)
        labels = batch.pop("labels")
        found = token_losses(model.double()(**batch).logits, labels)[0]
        losses += found[labels[:, 1:] != -100].tolist()
    metrics = evaluation.evaluate(folder, write_documents(tmp_path / "other.jsonl", texts))
    loss = sum(losses) / len(losses)
    expected = (loss, math.exp(loss), loss / math.log(2) * len(stream) / sum(map(len, texts)))
    found = (metrics[f"eval_{name}"] for name in ("loss", "perplexity", "bits_per_byte"))
    assert tuple(found) == pytest.approx(expected, rel=1e-6)


class TestOwnDataset:
    """A model that was trained on the dataset: nothing that it was trained on counts as held out."""

    @pytest.fixture
    def own(self, run, tmp_path, monkeypatch):
        folder = shutil.copytree(run[0], tmp_path / "run")
        (folder / "metrics.json").unlink()  # as an unfinished run
        recipe = {"dataset": "python-stdlib", "validation_fraction": 0.003, "test_fraction": 0.004}
        recipe |= {"packing": "documents"}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        monkeypatch.setattr(evaluation, "evaluate_model", lambda model, tokenizer, recipe, *rest, **_: recipe)
        return folder

    def test_its_recipe_gives_the_defaults(self, own):
        recipe = evaluation.evaluate(own)
        assert (recipe.validation_fraction, recipe.packing) == (0.003, "documents")
        recipe = evaluation.evaluate(own, validation_fraction=0.007, packing="stream")
        assert (recipe.validation_fraction, recipe.packing) == (0.007, "stream")
        other = evaluation.evaluate(own, dataset="owner/other")
        assert (other.validation_fraction, other.packing, other.block_size) == (0.02, "documents", Recipe.block_size)

    def test_a_record_names_built_in_corpora_and_datasets_of_the_hub(self, own, monkeypatch):
        """Not what would be read from this machine: a file, a folder, or the working folder by a format's name."""
        monkeypatch.chdir(own.parent)
        Path("own", "folder").mkdir(parents=True)
        refused = "pandas csv squad own own/folder none/../own /etc/x ../x a/b/c hf://datasets/a/b file:///x"
        refused += " a/.. ./a ~/x é/b"
        allowed = ["python-docstrings", "owner/name", "o-w.n_er/na.me-1"]
        for dataset in (*allowed, "a/b\n", "", *refused.split()):
            (own / "recipe.yaml").write_text(yaml.safe_dump({"dataset": dataset, "block_size": 32}))
            if dataset in allowed:
                assert evaluation.evaluate(own).dataset == dataset
                continue
            such = ", such as --dataset squad" * (dataset == "squad")
            with pytest.raises(ValueError, match=f"(?s)trained on .*; name the text to evaluate by --dataset{such}"):
                evaluation.evaluate(own)

    def test_documents_it_was_trained_on(self, own, monkeypatch):
        monkeypatch.chdir(own.parent)
        Path("body.jsonl").write_text('{"text": "x = 1"}\n')
        warnings = []
        monkeypatch.setattr(evaluation.logger, "warning", warnings.append)
        record = record_run(Recipe(model="tiny-linear", dataset="body.jsonl"), None)
        shutil.copytree(own, "file")
        Path("file/metrics.json").write_text(json.dumps({"trained_on": record}))
        evaluation.evaluate("file", dataset="body.jsonl")
        assert "was trained on body.jsonl but for a share of 0.02, and all is evaluated" in warnings[0]
        with pytest.raises(ValueError, match="was trained on python-stdlib but for a share of"):
            evaluation.evaluate(own, validation_fraction=0.02)

    @pytest.mark.parametrize("model, dataset", [("run/checkpoint-4", "./fold/../fold"), ("converted", "link")])
    def test_the_same_documents_by_another_name(self, dataset, model, own, monkeypatch):
        monkeypatch.chdir(own.parent)
        for name in ("fold", "other"):
            write_documents(Path(name, "text.jsonl"), [f"x = {index}" for index in range(300)])
        Path("link").symlink_to("fold", target_is_directory=True)
        given = {"model": "tiny-linear", "dataset": "fold", "validation_fraction": 0.003, "test_fraction": 0.004}
        given |= {"text_column": "body", "text_template": "{body}", "packing": "documents", "block_size": 32}
        (own / "metrics.json").write_text(json.dumps({"trained_on": record_run(Recipe(**given), "a fingerprint")}))
        if model == "converted":
            assert main(["convert", "run", "converted", "--upcycle"]) == 0
        recipe = evaluation.evaluate(model, dataset=dataset)  # which is read as the run read it
        assert (recipe.validation_fraction, recipe.text_column, recipe.text_template) == (0.003, "body", "{body}")
        assert (recipe.packing, recipe.block_size) == ("documents", 32)
        assert evaluation.evaluate(model, dataset=dataset, packing="stream").packing == "stream"
        with pytest.raises(ValueError, match=r"but for a share of 0.007"):
            evaluation.evaluate(model, dataset=dataset, validation_fraction=0.01)
        assert evaluation.evaluate(model, dataset="other", validation_fraction=0.01).validation_fraction == 0.01
        with pytest.raises(ValueError, match="fold; name the text to evaluate by --dataset"):
            evaluation.evaluate(model)

    def test_later_runs_keep_the_record(self, run, recipe_file, corpus, tmp_path):
        dataset = write_documents(tmp_path / "b.txt", ["y = 1\n" * 99, "z\n" * 99])
        fields = {"max_steps": 1, "validation_fraction": 0.5, "save_strategy": "no", "eval_strategy": "no"}
        fields |= {"model": run[0], "tokenizer": run[0], "dataset": dataset}
        train(recipe_file, output_dir=tmp_path / "run", **fields)
        records = read_trained_on(str(tmp_path / "run"))
        assert [Path(record["dataset"]).name for record in records] == [corpus.name, "b.txt"]

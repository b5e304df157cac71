"""Metrics of a language model, and `nlq evaluate`."""

import math
import shutil

import pytest
import torch
import yaml
from support.corpora import write_documents
from transformers import EvalPrediction

from modeling_nlq.training.run import evaluation
from modeling_nlq.training.run.evaluation import LanguageModelingMetrics, token_losses
from nlq import main


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


def test_evaluate_repeats_the_runs_own_result(run, corpus, capsys):
    arguments = ["evaluate", str(run[0]), "--dataset", str(corpus), "--validation_fraction", "0.1"]
    assert main(arguments) == 0
    assert f"perplexity {run[1]['eval_perplexity']:.2f}" in capsys.readouterr().out


def test_evaluate_takes_a_small_file_whole(run, corpus, tmp_path, capsys):
    path = tmp_path / "few.jsonl"
    path.write_text("".join(corpus.read_text().splitlines(keepends=True)[:2]))
    assert main(["evaluate", str(run[0]), "--dataset", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{run[0]}: perplexity ")  # which may have been trained on


class TestOwnDataset:
    """A model whose recipe names the dataset: nothing that it was trained on counts as held out."""

    @pytest.fixture
    def own(self, run, tmp_path, monkeypatch):
        folder = shutil.copytree(run[0], tmp_path / "run")
        recipe = {"dataset": "python-stdlib", "validation_fraction": 0.003, "test_fraction": 0.004, "packing": "documents"}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        monkeypatch.setattr(evaluation, "evaluate_model", lambda model, tokenizer, recipe, *rest: recipe)
        return folder

    def test_its_recipe_gives_the_defaults(self, own):
        recipe = evaluation.evaluate(own)
        assert (recipe.validation_fraction, recipe.packing) == (0.003, "documents")
        recipe = evaluation.evaluate(own, validation_fraction=0.007, packing="stream")
        assert (recipe.validation_fraction, recipe.packing) == (0.007, "stream")
        assert evaluation.evaluate(own, dataset="owner/other").validation_fraction == 0.02

    def test_documents_it_was_trained_on(self, own):
        with pytest.raises(ValueError, match="was trained on python-stdlib but for a share of"):
            evaluation.evaluate(own, validation_fraction=0.02)


def test_at_most_as_many_documents_as_given_are_evaluated(run, tmp_path, capsys):
    texts = [f"x = {index}\n" * 40 for index in range(30)]
    many, first = write_documents(tmp_path / "many.jsonl", texts), write_documents(tmp_path / "first.jsonl", texts[:1])
    assert main(["evaluate", str(run[0]), "--dataset", str(many), "--max_validation_documents", "1"]) == 0
    limited = capsys.readouterr().out
    assert main(["evaluate", str(run[0]), "--dataset", str(first)]) == 0
    assert limited == capsys.readouterr().out
    assert main(["evaluate", str(run[0]), "--dataset", str(many)]) == 0
    assert limited != capsys.readouterr().out

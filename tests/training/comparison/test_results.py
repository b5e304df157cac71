"""The results of a comparison: they show a planted difference, and equal a computation that starts at the runs."""

import shutil

import numpy as np
import pytest
import torch
from support.planted import PlantedEngine
from support.runs import change_json
from transformers import AutoModelForCausalLM

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.comparison import Run
from modeling_nlq.training.comparison.run import run_comparison
from modeling_nlq.training.files import read_yaml, write_yaml
from modeling_nlq.training.run.data import prepare_data


class TestFindsWhatIsThere:
    def test_planted_difference_and_two_copies_of_one_model(self, finished):
        effects, models = finished[1].largest.statistics.effects, finished[1].largest.models
        assert effects["planted"].verdict == "worse" and effects["planted"].holm_p < 0.05
        assert effects["planted"].loss_improvement < 0 and effects["twin"].verdict == "within noise"
        assert [run.test_loss for run in models["twin"].runs] == [run.test_loss for run in models["base"].runs]

    def test_diverged_model_is_recorded_and_the_rest_completes(self, finished):
        results = finished[1]
        absurd = results.largest.models["absurd"]
        assert results.largest.statistics.effects["absurd"].verdict == "diverged"
        assert absurd.boundaries == {} and all(run.diverged for run in [*absurd.tried, *absurd.runs])
        far, lost = absurd.runs[0].result, absurd.tried[0].result  # the smallest rate is reported
        assert (far.losses.diverged_at, far.data.steps) == (None, 8)
        assert lost.losses.diverged_at == lost.data.steps == 2
        assert absurd.tried[0].history.stability["0"]["entropy"][1] == (2, None)
        assert all(len(model.runs) == 3 for model in results.largest.models.values())

    def test_one_diverged_rate_is_not_chosen(self, finished):
        model = finished[1].largest.models["one rate absurd"]
        assert {run.learning_rate for run in model.runs} == {1e-2} and set(model.boundaries.values()) == {"smallest"}
        assert [run.diverged for run in model.tried] == [True, True, True]


class TestRuns:
    def test_reported_loss_is_that_of_the_test_split(self, finished):
        folder, results, file = finished
        comparison = load_plan(file)
        run = results.largest.models["base"].runs[1]
        recipe = comparison.largest.recipe_of(Run("base", run.learning_rate, run.seed), folder / run.folder)
        _, blocks, _ = prepare_data(recipe, folder / "tokenizer")
        texts = {split: set(map(bytes, part.dataset["input_ids"][:])) for split, part in blocks.items()}
        assert set(texts) == {"train", "validation", "test"}
        assert not texts["test"] & (texts["train"] | texts["validation"])
        model = AutoModelForCausalLM.from_pretrained(folder / run.folder).double().eval()
        rows = torch.from_numpy(blocks["test"].dataset["input_ids"][:].astype(np.int64))
        with torch.no_grad():
            log_probabilities = model(rows).logits[:, :-1].log_softmax(dim=-1)
        expected = -log_probabilities.gather(-1, rows[:, 1:, None]).mean().item()
        assert run.test_loss == pytest.approx(expected, rel=1e-5) and run.test_loss != run.validation_loss

    def test_tokens_are_those_that_the_runs_saw(self, finished, tmp_path):
        folder, results, file = finished
        comparison, copy = load_plan(file), tmp_path / "results"
        shutil.copytree(folder, copy)
        files = sorted(copy.glob("runs/*/*/metrics.json"))
        change_json(next((copy / "runs" / "twin").glob("rate-*-seed-2/metrics.json")), data__token_stream="0" * 64)
        assert not run_comparison(comparison, copy).largest.same_tokens
        for index, metrics_file in enumerate(files):
            change_json(metrics_file, data__tokens_seen=5000 + index)
        change_json(files[-1], losses__diverged=True, losses__diverged_at=3)  # of a model that has one rate
        assert run_comparison(comparison, copy).largest.tokens_per_run == 5000 + len(files) - 2
        for metrics_file in files:
            change_json(metrics_file, losses__diverged=True, losses__diverged_at=3)
        assert run_comparison(comparison, copy).largest.tokens_per_run == comparison.largest.tokens_per_run
        assert comparison.largest.tokens_per_run == results.largest.tokens_per_run == 8 * 8 * 64


class TestResume:
    @pytest.mark.parametrize("made", [{}, {"record_stability": False}, {"record_stability": True}])
    @pytest.mark.parametrize("axis", [{}, {"conditions": {"a": {}, "b": {"training": {"weight_decay": 0.3}}}}])
    def test_from_its_own_comparison_file(self, recipe_file, make_file, tmp_path, made, axis):
        file = make_file(recipe={**read_yaml(recipe_file), **made}, **axis)
        outcome = run_comparison(load_plan(file), tmp_path, PlantedEngine(lambda scale, run: 3.0))
        again = load_plan(tmp_path / "comparison.yaml")
        assert run_comparison(again, tmp_path, PlantedEngine(None)).scales == outcome.scales
        # Older versions left a false `record_stability` out
        written = read_yaml(tmp_path / "comparison.yaml")
        if written["recipe"].get("record_stability") is False:
            del written["recipe"]["record_stability"]
            write_yaml(tmp_path / "comparison.yaml", written)
            assert run_comparison(load_plan(file), tmp_path, PlantedEngine(None)).scales == outcome.scales

    @pytest.mark.parametrize("field", ["optimizer", "match", "trainable", "switches.dtype", "switches.canon"])
    def test_a_field_that_became_null_is_refused(self, make_file, tmp_path, field):
        section, _, name = field.rpartition(".")
        change = {section: {name: None}} if section else {name: None}
        for models in ({}, {"twin": change}):
            plan = load_plan(make_file(models={"base": None, "twin": None, **models}, learning_rates=[1e-2]))
            if models:
                with pytest.raises(ValueError, match=f"holds another comparison .*{field}: not set there, None now"):
                    run_comparison(plan, tmp_path, PlantedEngine(None))
            else:
                run_comparison(plan, tmp_path, PlantedEngine(lambda scale, run: 3.0))

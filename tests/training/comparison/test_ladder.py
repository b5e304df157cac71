"""Comparisons at several scales: their plan, their order, their results and their report."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from support.planted import Interrupted, PlantedEngine

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.run import run_and_report, run_comparison
from modeling_nlq.training.files import read_yaml
from modeling_nlq.training.loading import load_config
from modeling_nlq.training.size import measure
from nlq import main


WIDTHS = {"small": 16, "middle": 32, "large": 48, "largest": 64}
SCALES = {
    name: {"switches": {"hidden_size": width, "intermediate_size": 4 * width}, "tokens_per_parameter": 1}
    for name, width in WIDTHS.items()
}
TRAINING = {"save_strategy": "no", "eval_strategy": "no", "report_to": "none"}


@pytest.fixture(scope="module")
def ladder_file(make_file, recipe_file):
    def make(**fields) -> str:
        recipe = read_yaml(Path(recipe_file))
        recipe["training"].pop("max_steps", None)
        rates = {"start": 1e-2, "factor": 2}
        defaults = {"recipe": recipe, "scales": SCALES, "training": TRAINING, "learning_rates": rates}
        return make_file(**{**defaults, **fields})

    return make


def planted(multiplier: float):
    """A law of compute, `2 + 40 C^-0.2`, that the model `twin` follows as with `multiplier` times its compute.

    The best rate halves from scale to scale.
    """

    def loss(comparison, run):
        width = WIDTHS[comparison.name.split(", ")[1]]
        flops = comparison.tokens_per_run * comparison.variants[run.model].size.flops_per_token
        gain = multiplier if run.model == "twin" else 1.0
        wiggle = 1e-4 * ((7 * run.seed + 3 * width + (run.model == "twin")) % 5 - 2)
        tuned = 0.01 * abs(run.learning_rate / (0.16 / width) - 1)
        return 2 + 40 * (gain * flops) ** -0.2 + wiggle + tuned

    return loss


class TestPlan:
    def test_tokens_and_order(self, ladder_file):
        ladder = load_plan(ladder_file(scales=dict(reversed(SCALES.items())), seeds=[0, 1]))
        assert list(ladder.scales) == list(ladder.config.scales) == list(SCALES)
        for name, comparison in ladder.scales.items():
            content = comparison.variants["base"].recipe.to_dict()
            size = measure(load_config(content["model"], content["switches"]), 64)
            assert size.non_embedding <= comparison.tokens_per_run < size.non_embedding + 8 * 64
            assert content["switches"]["hidden_size"] == WIDTHS[name]

    def test_fields_of_a_scale(self, ladder_file):
        own = {"seeds": [5], "training": {"warmup_steps": 7}}
        own["models"] = {"twin": {"switches": {"intermediate_size": 99}}}
        ladder = load_plan(ladder_file(scales={**SCALES, "middle": {**SCALES["middle"], **own}}))
        small, middle = ladder.scales["small"], ladder.scales["middle"]
        assert (small.seeds, middle.seeds) == ([0, 1], [5])
        assert (small.variants["twin"].intermediate_size, middle.variants["twin"].intermediate_size) == (64, 99)
        assert middle.variants["base"].intermediate_size == 128
        assert middle.variants["base"].recipe.training["warmup_steps"] == 7

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"scales": {"small": SCALES["small"]}}, "scales holds only 'small'; a ladder needs two or more"),
            ({"scales": {"a": SCALES["small"], "b": SCALES["small"]}}, "the scales 'a' and 'b' have the same compute"),
            (
                {"scales": {**SCALES, "large": {**SCALES["large"], "tokenizer": "bpe:300"}}},
                "scale 'large' has the tokenizer 'bpe:300', scale 'small' 'bpe:",
            ),
            (
                {"scales": {**SCALES, "b": {"models": {"twn": {}}}}},
                "scale 'b': models: unknown field 'twn'",
            ),
            (
                {"scales": {**SCALES, "b": {"tokens_per_parameter": 0}}},
                "tokens_per_parameter=0 must be",
            ),
            ({"training": {**TRAINING, "max_steps": 3}}, "tokens_per_parameter and max_steps both set the number of"),
        ],
    )
    def test_bad_input(self, ladder_file, capsys, tmp_path, fields, message):
        assert main(["compare", ladder_file(**fields), "--output_dir", str(tmp_path / "none")]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and not (tmp_path / "none").exists()


class TestRuns:
    def test_planted_ladder(self, ladder_file, tmp_path):
        file = ladder_file(seeds=[0, 1, 2])
        engine = PlantedEngine(planted(1.3))
        results = run_comparison(load_plan(file), tmp_path / "ladder", engine)
        trend = results.trend.models["twin"]
        assert list(results.scales) == list(trend.steps) == list(SCALES)
        for step in trend.steps.values():
            assert step.multiplier == pytest.approx(1.3, rel=0.05) and step.multiplier_interval[0] > 1
        # The best rate is 0.01 at `small`, and a third of a step away from the grid elsewhere
        models = {name: found.models["base"] for name, found in results.scales.items()}
        best = {name: {run.learning_rate for run in model.runs} for name, model in models.items()}
        assert best == {"small": {1e-2}, "middle": {5e-3}, "large": {2.5e-3}, "largest": {2.5e-3}}
        tried = {name: model.learning_rates for name, model in models.items()}
        assert tried["middle"] == [2.5e-3, 5e-3, 1e-2, 2e-2] and tried["largest"] == [1.25e-3, 2.5e-3, 5e-3]

    def test_interrupted_ladder_goes_on(self, ladder_file, tmp_path):
        file = ladder_file(seeds=[0, 1])
        whole = PlantedEngine(planted(1.0))
        expected = run_comparison(load_plan(file), tmp_path / "whole", whole)
        made = []
        for most in (5, 17, None):
            engine = PlantedEngine(planted(1.0), most)
            own = tmp_path / "parts" / "comparison.yaml"  # as good as the file that it was made from
            try:
                results = run_comparison(load_plan(own if own.is_file() else file), tmp_path / "parts", engine)
            except Interrupted:
                assert main(["compare", "any", "--status", "--output_dir", str(tmp_path / "parts")]) == 0
            made += engine.made
        assert sorted(made) == sorted(whole.made)
        assert results == replace(expected, command=results.command)

    def test_each_seed_begins_at_its_own_rate(self, ladder_file, tmp_path):
        """Seed 1 has its best rate at four times that of the others, and its search starts there."""
        seeds = {"small": [0, 1], "middle": [0, 2], "large": [0, 1, 2, 3]}
        scales = {name: {**SCALES[name], "seeds": own} for name, own in seeds.items()}
        file = ladder_file(scales=scales, learning_rates={"start": 1e-3, "factor": 3})

        def loss(comparison, run):
            return 4.0 + abs(math.log(run.learning_rate / (9e-3 if run.seed == 1 else 1e-3 / 3)))

        results = run_comparison(load_plan(file), tmp_path, PlantedEngine(loss))
        for name, found in results.scales.items():
            for model in found.models.values():
                tried = {seed: [] for seed in seeds[name]}
                for run in [*model.tried, *model.runs]:
                    tried[run.seed].append(run.learning_rate)
                tried = {seed: sorted(rates) for seed, rates in tried.items()}
                low, high = [0.000111111, 0.000333333, 0.001], [0.003, 0.009, 0.027]
                if name == "small":  # where the file says
                    assert tried == {0: [*low, 0.003], 1: [*low[1:], *high]}
                elif name == "middle":
                    assert tried == {0: low, 2: [*low, 0.003]}
                else:
                    assert tried == {0: low, 1: high, 2: low, 3: [*low, 0.003]}
        again = run_comparison(load_plan(tmp_path / "comparison.yaml"), tmp_path, PlantedEngine(None))
        assert again.scales["large"].models == results.scales["large"].models

    @pytest.mark.slow
    def test_added_seeds(self, ladder_file, tmp_path, capsys):
        """Only those are named that the first report had not. The folder's own file has them."""
        scales = dict(itertools.islice(SCALES.items(), 2))
        middle = {**scales, "middle": {**scales["middle"], "seeds": [0, 1, 2]}}
        engine = PlantedEngine(planted(1.3))
        results = run_comparison(load_plan(ladder_file(scales=middle, seeds=[0, 1])), tmp_path, engine)
        assert [found.added_seeds for found in results.scales.values()] == [[], []]
        for seeds in ([0, 1, 2], [0, 1, 2, 3]):
            results = run_and_report(load_plan(ladder_file(scales=scales, seeds=seeds)), tmp_path, engine)
        assert len(engine.made) == len(set(engine.made))
        assert [found.seeds for found in results.scales.values()] == [[0, 1, 2, 3]] * 2
        assert [found.added_seeds for found in results.scales.values()] == [[2, 3], [3]]
        again = run_comparison(load_plan(tmp_path / "comparison.yaml"), tmp_path, PlantedEngine(None))
        assert again.scales["small"].added_seeds == [2, 3]
        fewer = {**scales, "small": {**scales["small"], "seeds": [0, 1, 3]}}
        assert main(["compare", ladder_file(scales=fewer, seeds=[0, 1, 2, 3]), "--output_dir", str(tmp_path)]) == 1
        assert "scales.small.seeds: not set there, [0, 1, 3] now" in capsys.readouterr().err

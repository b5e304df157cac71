"""Comparisons on synthetic tasks: how many seeds learn a task, and ladders that climb in difficulty."""

import math
import re
from dataclasses import replace

import pytest
from support.inline_engine import InlineEngine
from support.planted import PlantedEngine

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.figures import draw_accuracies, draw_losses
from modeling_nlq.training.comparison.report import describe, write_report
from modeling_nlq.training.comparison.run import run_comparison
from modeling_nlq.training.comparison.tables import NOTHING, accuracy_cells, learned_p, summary_rows


SEEDS = [0, 1, 2, 3]
ACCURACIES = {"base": [1.0, 0.99, 0.2, 1.0], "twin": [0.3, 0.3, 0.3, 0.3], "half": [0.5, 0.6, 0.5, 0.8]}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def make(make_file):
    def plan(**fields):
        task = {"rows": 200}
        recipe = {"model": "tiny-linear", "dataset": "synthetic:recall", "task": task, "switches": SMALL}
        models = dict.fromkeys(ACCURACIES)
        return load_plan(make_file(**{"recipe": recipe, "models": models, "seeds": SEEDS, **fields}))

    return plan


class PreparingEngine(PlantedEngine):
    """Makes tokenizer and rows, and plants what is measured."""

    def prepare_data(self, scale, folder):
        super().prepare_data(scale, folder)
        return InlineEngine.prepare_data(self, scale, folder)


def with_accuracy(run, accuracy):
    test = replace(run.result.losses.test, token_accuracy=accuracy, loss_parts=None)
    result = replace(run.result, losses=replace(run.result.losses, test=test))
    at = 100 + run.seed if accuracy >= 0.99 else None
    return replace(run, result=result, history=replace(run.history, mastered_at=at))


def with_accuracies(results, accuracies):
    """Gives the reported runs these accuracies, and all others 1."""
    models = {}
    for name, model in results.models.items():
        runs = [with_accuracy(run, accuracy) for run, accuracy in zip(model.runs, accuracies[name])]
        models[name] = replace(model, runs=runs, tried=[with_accuracy(run, 1.0) for run in model.tried])
    return replace(results, models=models)


def test_reports_count_the_seeds_that_learn(make, tmp_path):
    outcome = run_comparison(make(), tmp_path / "run", PlantedEngine(lambda scale, run: 2.0 + 0.01 * run.seed))
    results = with_accuracies(outcome.largest, ACCURACIES)
    cells = accuracy_cells(results)
    assert [row["seeds at 99 %"] for row in cells.values()] == ["3 of 4", "0 of 4", "0 of 4"]
    assert [row["steps to 99 %"] for row in cells.values()] == ["101", NOTHING, NOTHING]
    assert cells["base"]["accuracy (%)"] == "79.8 (20.0 to 100.0)" and "runs at 99 %" not in cells["base"]
    # All of the 3 seeds that learn belong to one model, and Holm's method doubles p
    p = 2 * math.comb(4, 3) / math.comb(8, 3)
    assert learned_p(ACCURACIES["base"], ACCURACIES["twin"]) == pytest.approx(p)
    assert cells["twin"]["Fisher p"] == cells["half"]["Fisher p"] == f"{2 * p:.2g}"
    # Interim analyses choose how many seeds there are
    assert {row["Fisher p"] for row in accuracy_cells(replace(results, interim={"twin": []})).values()} == {NOTHING}
    # A seed at 99 % or more leaves no interval
    assert cells["twin"]["accuracy gain (points)"] == NOTHING
    middle = with_accuracies(results, ACCURACIES | {"base": [0.4, 0.4, 0.2, 0.6]})
    single = replace(middle, models={name: replace(each, runs=each.runs[:1]) for name, each in middle.models.items()})
    assert accuracy_cells(single)["half"]["accuracy gain (points)"] == NOTHING
    # Differences 10, 20, 30, 20 have a standard error of 4.08; t with 3 degrees of freedom is 3.182
    assert accuracy_cells(middle)["half"]["accuracy gain (points)"] == "+20.0 [+7.0, +33.0]"
    assert "seeds at 99 %" in summary_rows(results)[0] and "3 of 4" in describe(replace(outcome, scales={"": results}))
    write_report(replace(outcome, scales={"": results}), tmp_path / "report")
    text = (tmp_path / "report" / "results.md").read_text()
    assert [path.name for path in (tmp_path / "report" / "figures").iterdir()] == ["task_curves.png"]
    assert f"Seeds that learned the task: base 3 of 4, twin 0 of 4 (Holm p {2 * p:.2g}), half 0 of 4 (Holm p" in text
    assert "Fisher's exact test" in text and "the rows of the test are taken as they are" in text


def test_reports_count_the_runs_of_all_rates_that_learn(make, tmp_path):
    plan = make(learning_rates=[1.0e-3, 2.0e-3, 4.0e-3])
    results = run_comparison(plan, tmp_path / "run", PlantedEngine(lambda scale, run: 2.0)).largest
    cells = accuracy_cells(with_accuracies(results, ACCURACIES))
    assert [row["seeds at 99 %"] for row in cells.values()] == ["3 of 4", "0 of 4", "0 of 4"]
    assert [row["runs at 99 %"] for row in cells.values()] == ["11 of 12", "8 of 12", "8 of 12"]


def test_reports_on_text_have_no_accuracies(make_file, tmp_path):
    outcome = run_comparison(load_plan(make_file()), tmp_path / "run", PlantedEngine(lambda scale, run: 2.0))
    assert accuracy_cells(outcome.largest) == {} and "at 99 %" not in describe(outcome)


def test_a_condition_from_a_task_to_text(make, tmp_path):
    """Null gives fields of the recipe their defaults."""
    text = {"dataset": "python-stdlib", "task": None, "tokenizer": "bpe:300", "switches": {"vocab_size": 300}}
    plan = make(conditions={"task": {}, "text": {**text, "block_size": 64}}, training={"max_steps": 8})
    assert plan.scales["text"].variants["base"].recipe.task is None and plan.scales["task"].task.rows == 200
    outcome = run_comparison(plan, tmp_path, PlantedEngine(lambda scale, run: 2.0 + 0.01 * run.seed))
    task = with_accuracies(outcome.scales["task"], ACCURACIES)
    text = describe(replace(outcome, scales=outcome.scales | {"task": task}))
    lines = [re.split("  +", line) for line in text.splitlines()]
    titles = next(line for line in lines if line[0] == "condition")
    rows = {tuple(line[:2]): dict(zip(titles, line)) for line in lines if len(line) == len(titles)}
    assert (rows["task", "base"]["seeds at 99 %"], rows["text", "base"]["seeds at 99 %"]) == ("3 of 4", NOTHING)
    assert rows["text", "twin"]["verdict"] == rows["task", "twin"]["verdict"] == "within noise"


def test_a_ladder_climbs_in_difficulty(make, tmp_path):
    pairs = {"hard": 16, "easy": 4, "middle": 8}
    plan = make(scales={name: {"task": {"pairs": count}} for name, count in pairs.items()})
    assert list(plan.scales) == ["easy", "middle", "hard"] and all(
        scale.task.rows == 200 for scale in plan.scales.values()
    )
    gains = {"easy": 0.0, "middle": 0.1, "hard": 0.2}

    def loss(scale, run):
        noise = 0.001 * ((7 * run.seed + len(scale.name) + len(run.model)) % 3)
        return 2.0 + noise - gains[scale.name.split(", ")[1]] * (run.model == "twin")

    outcome = run_comparison(plan, tmp_path / "run", PreparingEngine(loss))
    assert outcome.trend.axis == "pairs" and outcome.trend.flops == {"easy": 4, "middle": 8, "hard": 16}
    # 5 % of the loss at each doubling
    assert outcome.trend.models["twin"].slope == pytest.approx(5 / math.log10(2), rel=0.02)
    assert outcome.trend.models["twin"].verdict == "grows" and outcome.trend.models["half"].verdict == "cannot tell"
    assert all(step.multiplier is None for step in outcome.trend.models["twin"].steps.values())
    write_report(outcome, tmp_path / "report")
    text = (tmp_path / "report" / "results.md").read_text()
    assert "logarithm of pairs" in text and text.count("There are no compute multipliers") == 1
    assert "## Accuracy over pairs" in text and "## Loss over pairs" in text and "over compute" not in text
    assert not re.search("test text|of the text", text)
    for axes in (draw(outcome).axes[0] for draw in (draw_losses, draw_accuracies)):
        assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "8", "16"]
        assert not len(axes.get_xticks(minor=True)) and "compute" not in axes.get_title()

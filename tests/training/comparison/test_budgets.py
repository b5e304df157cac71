"""Several token budgets from one run: their plan, their order, their rates, and that they equal runs of their own."""

import json
import re
from pathlib import Path

import pytest
from support.planted import Interrupted, PlantedEngine

from modeling_nlq.training.comparison.comparing import run_and_report, run_comparison
from modeling_nlq.training.comparison.local import LocalEngine
from modeling_nlq.training.comparison.reading import load_comparison
from modeling_nlq.training.comparison.status import describe_status
from modeling_nlq.training.files import read_json, read_yaml
from modeling_nlq.training.run.recipe import resolve_recipe
from modeling_nlq.training.run.trainer import train_recipe
from modeling_nlq.training.storage import open_folder
from nlq import main


SCALES = {
    "small": {"switches": {"hidden_size": 16, "intermediate_size": 64}, "tokens_per_parameter": 1},
    "large": {"switches": {"hidden_size": 32}, "tokens_per_parameter": 2, "budgets": [0.5, 0.25]},
}
BUDGETS = ["large at 0.25", "large at 0.5"]
SCHEDULE = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 0.2}, "warmup_steps": 0.02}
TRAINING = {"save_strategy": "no", "eval_strategy": "no", "logging_steps": 3, "report_to": "none", **SCHEDULE}


@pytest.fixture(scope="module")
def budgets_file(make_file, recipe_file):
    """A function from the fields of a ladder, and of `training` and the scale `large` in it, to its file."""

    def make(training=None, large=None, **fields) -> str:
        recipe = read_yaml(Path(recipe_file))
        recipe["training"].pop("max_steps", None)
        scales = {**SCALES, "large": {**SCALES["large"], **(large or {})}}
        defaults = {"recipe": recipe, "scales": scales, "training": {**TRAINING, **(training or {})}, "seeds": [0, 1, 2]}
        return make_file(**{**defaults, "learning_rates": {"start": 1e-2, "factor": 2}, **fields})

    return make


def planted(comparison, run):
    """The best rate is 0.04 for the seeds 0 and 1 of the longest runs, 0.01 for seed 2 of them, and 0.01 at other scales."""
    name = comparison.name.split(", ")[1]
    best = 4e-2 if name == "large" and run.seed < 2 else 1e-2
    flops = comparison.tokens_per_run * comparison.variants[run.model].size.flops_per_token
    return 2 + 40 * flops**-0.2 + 1e-4 * (run.seed - (run.model == "twin")) + 0.01 * abs(run.learning_rate / best - 1)


class OfTrunks(LocalEngine):
    """Trains all runs before the first smaller budget."""

    def make_runs(self, comparison, *args):
        if comparison.trunk is not None:
            raise Interrupted
        super().make_runs(comparison, *args)


class TestPlan:
    def test_scales(self, budgets_file):
        ladder = load_comparison(budgets_file())
        assert list(ladder.scales) == ["small", *BUDGETS, "large"]
        assert ladder.in_order_of_making() == ["small", "large", *BUDGETS]
        trunk = ladder.scales["large"].variants["twin"]
        training = {name: scale.variants["twin"].content["training"] for name, scale in ladder.scales.items()}
        for name, share in zip(BUDGETS, (0.25, 0.5)):
            scale, variant = ladder.scales[name], ladder.scales[name].variants["twin"]
            assert (scale.trunk, scale.name) == ("large", ladder.scales["large"].name + f" at {share}")
            assert training[name]["max_steps"] == variant.steps == round(share * trunk.steps)
            assert variant.tokens == scale.tokens_per_run == variant.steps * 8 * 64
            assert training[name]["warmup_steps"] == -(-trunk.steps // 50)
            assert variant.begins_at == variant.steps - training[name]["lr_scheduler_kwargs"]["num_decay_steps"]
            assert variant.begins_at % 3 == 0 and abs(0.8 * variant.steps - variant.begins_at) < 2
            assert scale.flops < 0.3 * share * ladder.scales["large"].flops
        assert trunk.keep == tuple(ladder.scales[name].variants["twin"].begins_at for name in BUDGETS)
        for name in ("small", "large"):  # without an effect on Trainer's own reading of the warm-up
            assert training[name]["lr_scheduler_kwargs"] == {
                "num_decay_steps": round(0.2 * ladder.scales[name].variants["twin"].steps)
            }
            assert training[name]["warmup_steps"] == 0.02 and ladder.scales[name].trunk is None

    @pytest.mark.parametrize(
        ("training", "large", "message"),
        [
            ({}, {"budgets": 0.5}, "scale 'large': budgets=0.5 must be a list of shares"),
            ({}, {"budgets": []}, "scale 'large': budgets=[] must be a list of shares"),
            ({}, {"budgets": [0.5, 1.0]}, "budgets=[0.5, 1.0]: 1.0 must be a number above 0 and below 1"),
            ({}, {"budgets": ["half"]}, "budgets=['half']: 'half' must be a number above 0 and below 1"),
            ({}, {"budgets": [0.5, 0.5]}, "budgets=[0.5, 0.5] holds a share twice"),
            ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": None}, {}, "lr_scheduler_type='linear' must be"),
            ({"lr_scheduler_kwargs": {}}, {}, "lr_scheduler_type=warmup_stable_decay, lr_scheduler_kwargs={}"),
            ({"lr_scheduler_kwargs": {"num_decay_steps": 0}}, {}, "lr_scheduler_kwargs: num_decay_steps=0 must be a share"),
            ({"lr_scheduler_kwargs": {"num_decay_steps": 1.5}}, {}, "num_decay_steps=1.5 must be a share"),
            ({"logging_strategy": "epoch"}, {}, "budgets: logging_strategy=epoch must be steps, or the runs of a budget"),
            ({"logging_steps": 13}, {}, "the budget 0.25 would decay for 11 of its 24 steps and not for 5"),
            ({"warmup_steps": 40}, {}, "the decay of the budget 0.25 would begin at step 18 of 24; it must begin between"),
            ({"metric_for_best_model": "loss"}, {}, "budgets: metric_for_best_model='loss' cannot be combined"),
        ],
    )  # fmt: skip
    def test_bad_input(self, budgets_file, capsys, tmp_path, training, large, message):
        assert main(["compare", budgets_file(training, large), "--output_dir", str(tmp_path / "none")]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and not (tmp_path / "none").exists()

    def test_name_of_another_scale(self, budgets_file):
        scales = {**SCALES, "Large at 0.5": SCALES["small"]}
        with pytest.raises(ValueError, match="would share a folder"):
            load_comparison(budgets_file(scales=scales))

    def test_address(self, budgets_file, tmp_path):
        folder = open_folder(f"local://{tmp_path}/there")
        with pytest.raises(
            ValueError, match="is no folder: the checkpoints with which budgets of scale 'large' begin need one"
        ):
            run_comparison(load_comparison(budgets_file()), folder, PlantedEngine(planted))
        assert not list(tmp_path.iterdir())


class TestRuns:
    def test_rates_and_order(self, budgets_file, tmp_path):
        engine = PlantedEngine(planted)
        results = run_and_report(load_comparison(budgets_file()), tmp_path, engine)
        found = {name: scale["models"]["base"] for name, scale in results["scales"].items()}
        assert {name: scale["trunk"] for name, scale in results["scales"].items()} == {
            "small": None, **dict.fromkeys(BUDGETS, "large"), "large": None
        }  # fmt: skip
        for name, model in found.items():
            tried = {seed: set() for seed in range(3)}
            for run in [*model["tried"], *model["runs"]]:
                tried[run["seed"]].add(run["learning_rate"])
            # Seed 2 has its best rate in the middle of the first three; the others search on at the trunk, and only there
            first, wide = {5e-3, 1e-2, 2e-2}, {5e-3, 1e-2, 2e-2, 4e-2, 8e-2}
            assert tried == (dict.fromkeys(range(3), first) if name == "small" else {0: wide, 1: wide, 2: first})
            assert model["edges"] == {}
        order = [name.split(":")[0].split(", ")[1] for name in engine.made]
        assert list(dict.fromkeys(order)) == ["small", "large", *BUDGETS]
        assert engine.begun == [name for name in engine.made if " at 0." in name]
        assert not list(tmp_path.rglob("trunk-*"))
        for page in ("results.md", "report.html"):
            text = (tmp_path / page).read_text()
            assert "those of large at 0.25, large at 0.5 with those of large" in text and "those that were tried there" in text

    def test_best_rate_at_an_edge(self, budgets_file, tmp_path):
        """The trunk has its best rate inside of its rates, its budgets beyond them: they get no verdict."""

        def loss(comparison, run):
            return planted(comparison, run) + 10 * run.learning_rate * (" at " in comparison.name)

        results = run_and_report(load_comparison(budgets_file()), tmp_path, PlantedEngine(loss))
        for name, scale in results["scales"].items():
            verdict = scale["statistics"]["effects"]["twin"]["verdict"]
            assert (" at " in name) == bool(scale["models"]["twin"]["edges"]) == ("no verdict" in verdict)
            assert (" at " in name) == (
                results["trend"]["models"]["twin"]["steps"][name]["note"] == "its best rate is at an edge"
            )
        assert results["trend"]["models"]["twin"]["verdict"] == "cannot tell"
        assert (
            "the search was that of scale large, with whose runs these begin, so there is no verdict"
            in (tmp_path / "results.md").read_text()
        )

    def test_interrupted_ladder_goes_on(self, budgets_file, tmp_path):
        """Checkpoints are kept until the last budget is finished."""
        file = budgets_file(seeds=[0, 1])
        whole = PlantedEngine(planted)
        expected = run_comparison(load_comparison(file), tmp_path / "whole", whole)
        at_small, at_trunk = (sum(f", {name}: " in run for run in whole.made) for name in ("small", "large"))
        made, begun = [], []
        for most in (3, at_small - 3, at_trunk // 2, at_trunk, 5, None):
            engine = PlantedEngine(planted, most)
            try:
                results = run_comparison(load_comparison(file), tmp_path / "parts", engine)
            except Interrupted:
                kept = {path.parent.parent.parent.parent.name for path in (tmp_path / "parts").rglob("trunk-*")}
                assert kept == ({"large"} if len(made) + most > at_small else set())
                lines = describe_status(tmp_path / "parts")
                assert [line for line in lines if line.startswith("scale ")] == [
                    f"scale {name}" for name in ("small", "large", *BUDGETS)
                ]
            made, begun = made + engine.made, begun + engine.begun
        assert (sorted(made), sorted(begun), results) == (sorted(whole.made), sorted(whole.begun), expected)
        assert not list((tmp_path / "parts").rglob("trunk-*"))
        status = "\n".join(describe_status(tmp_path / "parts"))
        assert status.count(" 0 running, 0 waiting") == 4 and "waits" not in status

    def test_swept_rate_that_the_trunk_did_not_take(self, budgets_file, tmp_path):
        """The sweep of a budget may choose another rate than that of the trunk: its reported runs begin at the start."""
        file = budgets_file(rate_choice="sweep", sweep_seeds=[1000], learning_rates=[1e-2, 4e-2])

        def loss(comparison, run):
            best = 4e-2 if comparison.name.endswith("large") else 1e-2
            return 5 + abs(run.learning_rate / best - 1) + 1e-3 * run.seed + (run.model == "twin")

        engine = PlantedEngine(loss)
        run_comparison(load_comparison(file), tmp_path, engine)
        assert engine.begun == [name for name in engine.made if " at 0." in name and "sweep" in name]

    @pytest.mark.slow
    def test_trained(self, budgets_file, tmp_path):
        """Really trained, and interrupted after the trunk: a budget's run trains its decay only, and equals one of its own."""
        scales = {"one": {"switches": {"hidden_size": 16, "intermediate_size": 64}, "budgets": [0.5]}}
        file = budgets_file(training={"max_steps": 24}, scales=scales, learning_rates=[1e-2], seeds=[0])
        with pytest.raises(Interrupted):
            run_comparison(load_comparison(file), tmp_path / "ladder", OfTrunks())
        assert [path.parent.parent.name for path in (tmp_path / "ladder").rglob("trunk-9")] in (
            ["base", "twin"],
            ["twin", "base"],
        )
        assert main(["compare", file, "--output_dir", str(tmp_path / "ladder")]) == 0
        folder = tmp_path / "ladder/scales/one at 0.5/runs/twin/rate-0.01-seed-0"
        assert re.search(
            r"Going on from .*/one/runs/twin/rate-0.01-seed-0/trunk-9\b", folder.with_name(f"{folder.name}.log").read_text()
        )
        assert not list((tmp_path / "ladder").rglob("trunk-*"))
        own = tmp_path / "own"
        metrics = train_recipe(
            resolve_recipe(read_yaml(folder / "recipe.yaml"), {"output_dir": own}), tmp_path / "ladder/tokenizer"
        )
        begun = read_json(folder / "metrics.json")
        for name in ("eval_loss", "test_loss", "test_loss_parts", "train_loss", "steps", "tokens_seen", "token_stream"):
            assert begun[name] == metrics[name], name
        assert (folder / "model.safetensors").read_bytes() == (own / "model.safetensors").read_bytes()
        scales = json.loads((tmp_path / "ladder/results.json").read_text())["scales"]
        assert [scale["tokens_per_run"] for scale in scales.values()] == [12 * 512, 24 * 512]

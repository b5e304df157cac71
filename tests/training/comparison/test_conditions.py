"""Comparisons under several conditions: the plan, the runs, interactions and the primary test."""

import math
from pathlib import Path

import numpy as np
import pytest
from support.planted import Interrupted, PlantedEngine

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.run import run_and_report
from nlq import main


CONDITIONS = {"adamw": {}, "muon": {"optimizer": "muon"}}
MODELS = dict.fromkeys(("base", "good", "twin"))


def planted(scale, run) -> float | None:
    """`good` improves by 2 %, and by 6 % under muon."""
    condition = scale.name.split(", ")[-1]
    noise = np.random.default_rng([run.seed, *map(ord, f"{condition}{run.model}")]).normal(0, 0.01)
    loss = {"adamw": 4.0, "muon": 3.0}.get(condition, 4.0) + 0.05 * run.seed
    gain = {"adamw": 0.02, "muon": 0.06}.get(condition, 0.02) * (run.model == "good")
    return loss * (1 - gain) + noise + 0.02 * abs(math.log2(run.learning_rate / 0.004))


def test_x(make_file, tmp_path, capsys):
    file = make_file(
        models=MODELS,
        conditions=CONDITIONS,
        seeds=[0, 1, 2, 3, 4],
        learning_rates={"start": 4e-3},
        primary={"contrast": {"good": 1, "base": -1}, "margin": 1.0},
    )
    plan = load_plan(file)
    print("\n".join(plan.describe()))
    run_and_report(plan, tmp_path / "out", PlantedEngine(planted))
    assert main(["compare", file, "--dry-run"]) == 0
    assert main(["compare", file, "--status", "--output_dir", str(tmp_path / "out")]) == 0
    from modeling_nlq.training.comparison.report import describe, verdicts
    from modeling_nlq.training.comparison.results import read_outcome

    o = read_outcome(tmp_path / "out" / "results.json")
    print(describe(o))
    print(verdicts(o, "good", None, "adamw"))
    print((tmp_path / "out" / "results.md").read_text())
    print(*(tmp_path / "out").rglob("*.png"))
    print(*(tmp_path / "out").glob("*"))
    assert 0

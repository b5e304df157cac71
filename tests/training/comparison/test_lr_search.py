"""Learning rates that find their own best: the search on planted bowls, and who chooses with whom."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planted import PlantedEngine

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.lr_search import Rates
from modeling_nlq.training.comparison.run import run_comparison
from modeling_nlq.training.comparison.sections import ConfirmConfig


def bowl(best: float, depth: float = 0.1):
    return lambda rate: 3.0 + depth * math.log2(rate / best) ** 2


def search(rates: Rates, loss) -> dict[float, float]:
    losses = {}
    while tried := rates.next(losses):
        assert not set(tried) & set(losses)
        losses |= {rate: loss(rate) for rate in tried}
    return losses


class TestSearch:
    @given(
        start=st.floats(1e-6, 1e1),
        factor=st.sampled_from([1.25, 1.5, 2.0, 3.0, 10.0]),
        offset=st.floats(-4.4, 4.4),
    )
    def test_the_best_has_worse_neighbours_on_both_sides(self, start, factor, offset):
        rates, loss = Rates(start=start, factor=factor, limit=20), bowl(start * factor**offset)
        losses = search(rates, loss)
        best, tried = rates.best(losses), sorted(losses)
        assert rates.boundary(losses) is None and tried[0] < best < tried[-1]
        assert abs(math.log(best / (start * factor**offset), factor)) <= 0.5 + 1e-4  # the nearest of the grid
        assert len(tried) <= 4 + math.ceil(abs(offset))
        assert all(above / below == pytest.approx(factor, rel=1e-4) for below, above in itertools.pairwise(tried))

    def test_a_search_stops_at_its_limit(self):
        rates = Rates(start=1e-3, factor=2, limit=5)
        losses = search(rates, bowl(1.0))
        assert sorted(losses) == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3] and rates.boundary(losses) == "largest"

    def test_a_search_crosses_a_ridge_while_its_end_falls(self):
        losses = {0.0025: 3.3, 0.005: 3.0, 0.01: 3.2, 0.02: 3.1, 0.04: 2.8, 0.08: 3.5}
        rates = Rates(start=0.01, factor=2)
        assert search(rates, losses.get) == losses and rates.best(losses) == 0.04

    def test_divergence_is_worse_than_any_loss(self):
        rates = Rates(start=1.0, factor=10)
        losses = search(rates, lambda rate: math.inf if rate > 0.05 else bowl(0.01)(rate))
        assert sorted(losses) == [0.001, 0.01, 0.1, 1.0, 10.0] and rates.best(losses) == 0.01
        losses = search(rates, lambda rate: math.inf)
        assert rates.best(losses) is None and len(losses) == rates.limit and min(losses) == pytest.approx(1e-6)

    def test_equal_losses_take_the_smaller_rate(self):
        assert Rates(listed=(1.0, 2.0)).best({2.0: 3.0, 1.0: 3.0}) == 1.0

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ([1e-3, "fast"], r"learning_rates=\[0.001, 'fast'\] must be a finite number or a list of"),
            ([1e-3, 1e-3], "holds a rate twice"),
            ({"factor": 2}, "start is missing; a search is {start: RATE, factor: 2, limit: 8}"),
            ({"start": 0}, "learning_rates: start=0 must be a number above 0"),
            ({"start": 1e-3, "limit": 2}, "limit=2 must be at least 3"),
        ],
    )
    def test_bad_input(self, fields, message):
        with pytest.raises(ValueError, match=message):
            ConfirmConfig.read({"learning_rates": fields}, "file")


class TestChoice:
    def test_each_seed_chooses_by_itself(self, make_file, tmp_path):
        file = make_file(learning_rates={"start": 1e-2, "factor": 2}, seeds=[0, 1])
        engine = PlantedEngine(lambda comparison, run: bowl(1e-2 * 4**run.seed)(run.learning_rate))
        results = run_comparison(load_plan(file), tmp_path / "results", engine)
        for model in results.largest.models.values():
            assert {run.seed: run.learning_rate for run in model.runs} == {0: 1e-2, 1: 4e-2}
            assert {(run.seed, run.learning_rate) for run in model.tried} == {
                *((0, rate) for rate in (5e-3, 2e-2)),
                *((1, rate) for rate in (5e-3, 1e-2, 2e-2, 8e-2)),
            }
            assert model.boundaries == {}
        assert len(engine.made) == len(set(engine.made)) == 2 * (3 + 5)
        assert results.largest.statistics.effects["twin"].p is not None

    def test_no_verdict_on_a_best_rate_at_the_boundary(self, make_file, tmp_path):
        plan = load_plan(make_file(learning_rates={"start": 1e-3, "factor": 2, "limit": 4}, seeds=[0, 1, 2]))
        engine = PlantedEngine(lambda comparison, run: bowl(1.0)(run.learning_rate) - 0.5 * (run.model == "twin"))
        found = run_comparison(plan, tmp_path, engine).largest
        assert found.statistics.effects["twin"].verdict == "no verdict: the baseline's best rate is at the boundary"
        assert found.models["twin"].boundaries == dict.fromkeys(range(3), "largest")

"""The trend over scales: against references written from the formulas, by properties, and by simulated error rates."""

import dataclasses
import math

import error_rates
import numpy as np
import pytest
from scipy import special
from scipy.interpolate import CubicHermiteSpline, PchipInterpolator

from modeling_nlq.training.comparison.trend import LossCurve, ScaleLosses, analyse_trend


# Hypothesis warns of its own references under Python 3.14
pytestmark = pytest.mark.filterwarnings("error", "ignore::hypothesis.errors.HypothesisWarning")

FLOPS = (1e15, 7e15, 3e16, 2e17)


def law(flops):
    return 2.0 + 95.0 * flops**-0.12


def make_scales(multipliers, seeds=4, noise=0.0, flops=FLOPS, own=1.0, random_seed=0):
    """Makes scales where a model equals the baseline with a multiple of its compute; `own` multiplies its FLOPs."""
    random = np.random.default_rng(random_seed)
    scales = []
    for index, compute in enumerate(flops):
        shared = random.standard_normal(seeds)
        losses = {}
        for name, multiplier in {"base": 1.0, **multipliers}.items():
            errors = 1 + noise * (shared + random.standard_normal(seeds))
            losses[name] = dict(enumerate((law(compute * multiplier) * errors).tolist()))
        computes = {name: compute * (own if name != "base" else 1.0) for name in losses}
        scales.append(ScaleLosses(f"scale {index}", computes, losses))
    return scales


def values(scale, model):
    return np.array(list(scale.losses[model].values()))


def quantile(degrees_of_freedom):
    return special.stdtrit(degrees_of_freedom, 0.975)


def combine(weights, samples):
    value, parts = 0.0, []
    for weight, sample in zip(weights, samples):
        mean = sum(sample) / len(sample)
        variance = sum((entry - mean) ** 2 for entry in sample) / (len(sample) - 1)
        value += weight * mean
        parts.append((weight**2 * variance / len(sample), len(sample) - 1))
    total = sum(part for part, _ in parts)
    degrees = total**2 / sum(part**2 / freedom for part, freedom in parts)
    return value, math.sqrt(total), (degrees + min(freedom for _, freedom in parts)) / 2


def test_slope_by_hand():
    scales = make_scales({"a": 1.3, "b": 0.7}, seeds=3, noise=0.004)
    found = analyse_trend(scales, "base").models["a"]
    samples = [100 * (values(s, "base") - values(s, "a")) / values(s, "base").mean() for s in scales]
    places = [math.log10(flops) for flops in FLOPS]
    middle = sum(places) / 4
    spread = sum((place - middle) ** 2 for place in places)
    slope, error, degrees = combine([(place - middle) / spread for place in places], samples)
    assert slope == pytest.approx(np.polyfit(places, [sample.mean() for sample in samples], 1)[0])
    assert found.slope == pytest.approx(slope)
    margin = quantile(degrees) * error
    assert found.slope_interval == pytest.approx((slope - margin, slope + margin))
    assert found.p == pytest.approx(2 * special.stdtr(degrees, -abs(slope) / error))
    weighted = [(place - middle) / spread * sample for place, sample in zip(places, samples)]
    assert found.p == pytest.approx(error_rates.p_of_trend(weighted))


class TestVerdict:
    @pytest.mark.parametrize(
        ("improvements", "verdict", "meaning"),
        [
            ((1.0, 2.0, 3.0, 4.0), "grows", "pulls ahead of the baseline"),
            ((-4.0, -3.0, -2.0, -1.0), "grows", "catches up with the baseline"),
            ((4.0, 3.0, 2.0, 1.0), "shrinks", "loses some of its lead over the baseline"),
            ((1.0, 0.0, -1.0, -2.0), "shrinks", "falls behind the baseline"),
            ((2.0, 2.0, 2.0, 2.0), "cannot tell", "the noise hides whether the distance from the baseline changes"),
        ],
    )
    def test_says_which_way(self, improvements, verdict, meaning):
        errors = np.array([0.05, -0.02, -0.03])
        scales = []
        for index, improvement in enumerate(improvements):
            base = np.array([4.0, 4.01, 3.99]) - 0.3 * index
            model = base - base.mean() * (improvement + np.roll(errors, index)) / 100
            losses = {"base": dict(enumerate(base.tolist())), "model": dict(enumerate(model.tolist()))}
            scales.append(ScaleLosses(str(index), dict.fromkeys(losses, FLOPS[index]), losses))
        found = analyse_trend(scales, "base").models["model"]
        assert (found.verdict, found.meaning) == (verdict, meaning)

    def test_diverged_runs_and_boundaries_leave_no_test(self):
        scales = make_scales({"a": 1.3, "b": 1.3, "c": 1.3}, noise=0.003)
        scales[1].losses["a"][2] = math.nan
        scales[2] = dataclasses.replace(scales[2], at_boundary={"c"})
        found = analyse_trend(scales, "base")
        model = found.models["a"]
        assert (model.verdict, model.meaning) == ("cannot tell", "no test: diverged in 1 of 4 runs at scale 1")
        assert model.slope is model.p is None
        step = model.steps["scale 1"]
        assert step.improvement_interval is step.multiplier is None
        assert step.note == "diverged in 1 of 4 runs" and step.improvement is not None
        assert model.steps["scale 0"].multiplier is not None
        assert found.models["b"].holm_p == found.models["b"].p  # one test
        # A better rate may exist, so there are no intervals either
        assert found.models["c"].meaning == "no test: its best rate is at the boundary at scale 2"
        step = found.models["c"].steps["scale 2"]
        assert step.improvement is not None and step.improvement_interval is step.multiplier is None

    def test_a_single_seed(self):
        found = analyse_trend(make_scales({"a": 1.3}, seeds=1), "base")
        assert found.models["a"].meaning.startswith("no test: a single seed at scale 0; a single seed at scale 1")
        step = found.models["a"].steps["scale 0"]
        assert step.improvement is not None and step.multiplier == pytest.approx(1.3, rel=0.003)
        assert step.improvement_interval is step.multiplier_interval is None


class TestMultiplier:
    def test_intervals_are_those_of_shifted_means(self):
        """The model needs a quarter more FLOPs than the baseline of its scale."""
        scales = make_scales({"a": 1.3}, seeds=3, noise=0.003, own=1.25)
        base, model = (np.array([values(scale, name) for scale in scales]) for name in ("base", "a"))
        differences = base - model

        def read(means, gaps):
            """The logarithms of the multipliers, by a search on a dense curve."""
            places = np.linspace(math.log(FLOPS[0]) - 2, math.log(FLOPS[-1]) + 2, 200_001)
            lines = np.diff(np.log(means)) / np.diff(np.log(FLOPS))
            slopes = PchipInterpolator(np.log(FLOPS), np.log(means)).derivative()(np.log(FLOPS))
            lengths = np.diff(np.log(FLOPS))
            slopes[0] = lines[0] * (lines[0] / lines[1]) ** (lengths[0] / (lengths[0] + lengths[1]))
            slopes[3] = lines[2] * (lines[2] / lines[1]) ** (lengths[2] / (lengths[2] + lengths[1]))
            inner = CubicHermiteSpline(np.log(FLOPS), np.log(means), slopes)
            curve = inner(np.clip(places, *np.log(FLOPS)[[0, -1]]))
            for end, outside in ((0, places < math.log(FLOPS[0])), (-1, places > math.log(FLOPS[-1]))):
                start = math.log(FLOPS[end])
                curve[outside] += (places[outside] - start) * inner(start, 1)
            return np.interp(-np.log(means - gaps), -curve, places) - np.log(FLOPS)

        means, gaps, samples = base.mean(axis=1), differences.mean(axis=1), []
        for scale, shift in enumerate(1e-3 * np.eye(4)):
            by_mean = (read(means + shift, gaps) - read(means - shift, gaps)) / 2e-3
            by_gap = (read(means, gaps + shift) - read(means, gaps - shift)) / 2e-3
            samples.append(np.outer(by_mean, base[scale]) + np.outer(by_gap, differences[scale]))
        model = analyse_trend(scales, "base").models["a"]
        found = np.log([step.multiplier_interval for step in model.steps.values()])
        for index, (interval, expected) in enumerate(zip(found, read(means, gaps))):
            _, error, degrees = combine([1.0] * 4, [sample[index] for sample in samples])
            assert np.mean(interval) == pytest.approx(expected - math.log(1.25), abs=1e-4)
            assert np.ptp(interval) / 2 == pytest.approx(quantile(degrees) * error, rel=0.02)

    def test_what_lies_beyond_has_no_number(self):
        models = analyse_trend(make_scales({"far": 5000.0, "bad": 1 / 5000, "near": 11.0}, noise=0.002), "base").models
        for name in ("far", "bad"):
            step = list(models[name].steps.values())[0 if name == "bad" else -1]
            assert (step.multiplier, step.note) == (None, "beyond")
        near = list(models["near"].steps.values())[-1]
        assert near.note == "beyond" and near.multiplier_interval[1] is None and near.multiplier_interval[0] > 4

    def test_of_a_model_that_equals_the_baseline_of_the_next_scale(self):
        """There the curve has a root that rounding may lose, as with these losses."""
        flops = (1.7e11, 1.4e12, 7e12, 2.4e13)
        losses = ([4.914, 4.909], [2.639, 2.616], [2.553, 2.557], [2.162, 2.152])
        curve = LossCurve("abcd", flops, list(map(np.array, losses)))
        assert curve.multiplier(0, np.subtract(*losses[:2]), flops[0], 0.95)[0] == pytest.approx(flops[1] / flops[0])

    def test_needs_two_scales_and_a_falling_loss(self):
        scales = make_scales({"a": 1.3})
        for scale in scales[1:]:
            scale.losses["base"][0] = None
        found = analyse_trend(scales, "base")
        assert found.multiplier_note == (
            "There are no compute multipliers: they need 2 scales at which every run of the baseline finished and no "
            "best rate is at the boundary, not 1."
        )
        assert found.models["a"].steps["scale 0"].multiplier is None
        with pytest.raises(ValueError, match=r"the baseline's loss does not fall from b to c\.$"):
            LossCurve("abc", FLOPS[:3], [np.array([3.0, 3.1]), np.array([2.0, 2.1]), np.array([2.0, 2.1])])

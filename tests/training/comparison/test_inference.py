"""The statistics of a comparison: against other ways to compute them, and by properties."""

import itertools
import math

import error_rates
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from support.properties import examples

from modeling_nlq.training.comparison.inference import (
    alpha_spent,
    analyse,
    critical_t,
    detectable_effect,
    holm,
    noise_from_text,
    power_warning,
    smallest_difference,
)


# Hypothesis warns of its own references under Python 3.14
pytestmark = pytest.mark.filterwarnings("error", "ignore::hypothesis.errors.HypothesisWarning")

# Multiples of 2^-10, whose differences and sums are exact
exact_losses = st.integers(1024, 8192).map(lambda count: count / 1024)


def runs(*losses):
    return dict(enumerate(losses))


BASE = runs(3.50, 3.52, 3.49, 3.53, 3.51)


class TestOneModel:
    @examples(30)
    @given(
        base=st.lists(exact_losses, min_size=5, max_size=5),
        model=st.lists(exact_losses, min_size=5, max_size=5),
        alpha=st.sampled_from([0.01, 0.05, 0.3]),
    )
    def test_is_the_paired_t_test(self, base, model, alpha):
        if len({left - right for left, right in zip(model, base)}) == 1:
            model[0] += 0.25
        expected = stats.ttest_rel(model, base)
        effect = analyse({"base": runs(*base), "model": runs(*model)}, "base", alpha).effects["model"]
        assert (effect.t, effect.p) == pytest.approx((expected.statistic, expected.pvalue))
        assert effect.pairs == 5
        assert effect.holm_p == effect.p

        low, high = expected.confidence_interval(1 - alpha)
        percents = [-100 * end / (sum(base) / 5) for end in (high, low)]
        assert effect.loss_improvement_interval == pytest.approx(percents)
        assert effect.loss_improvement == pytest.approx(sum(percents) / 2)
        perplexities = [100 * (1 - math.exp(end)) for end in (high, low)]
        assert effect.perplexity_improvement_interval == pytest.approx(perplexities)

    def test_pairs_are_the_seeds_both_finished(self):
        effect = analyse({"base": BASE, "model": {2: 3.4, 0: 3.6, 9: 1.0}}, "base").effects["model"]
        assert (effect.pairs, effect.diverged) == (2, 0) and effect.mean_loss == pytest.approx((3.4 + 3.6 + 1.0) / 3)
        assert effect.mean_difference == pytest.approx(((3.6 - 3.50) + (3.4 - 3.49)) / 2)
        assert effect.loss_improvement == pytest.approx(-100 * effect.mean_difference / ((3.50 + 3.49) / 2))


class TestHolm:
    @examples(50)
    @given(st.lists(st.floats(0, 1), min_size=1, max_size=5))
    def test_is_bonferroni_on_every_subset(self, p_values):
        # Closed testing: an hypothesis falls if Bonferroni's test rejects every set of hypotheses that contains it
        members = range(len(p_values))
        subsets = [subset for size in members for subset in itertools.combinations(members, size + 1)]
        bonferroni = {subset: min(1, len(subset) * min(p_values[member] for member in subset)) for subset in subsets}
        corrected = [max(bonferroni[subset] for subset in subsets if index in subset) for index in members]
        assert holm(p_values) == pytest.approx(corrected)


class TestVerdict:
    @pytest.mark.parametrize(
        ("model", "verdict"),
        [
            (runs(3.40, 3.41, 3.40, 3.43, 3.42), "better"),
            (runs(3.60, 3.61, 3.60, 3.63, 3.62), "worse"),
            (runs(3.52, 3.51, 3.48, 3.54, 3.50), "within noise"),
            (runs(3.40, 3.42), "better"),  # the same difference twice, but for rounding
            (runs(3.40), "too few seeds: no verdict"),
            (runs(3.40, 3.41, None, 3.43, 3.42), "diverged in some runs"),
            (runs(3.40, math.nan, None), "diverged in some runs"),
            (runs(None, math.inf), "diverged"),
        ],
        ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
    )
    def test_of_one_model(self, model, verdict):
        effect = analyse({"base": BASE, "model": model}, "base").effects["model"]
        assert effect.verdict == verdict
        assert (effect.p is not None) == (effect.pairs >= 2 and effect.diverged == 0)

    def test_a_diverged_baseline_leaves_none(self):
        model, unaffected = runs(3.40, 3.41, 3.40), {0: 3.40, 1: 3.42, 3: 3.44}
        losses = {"base": {**BASE, 2: None}, "a": model, "gone": {2: None}, "lame": {0: 3.4, 2: None}, "b": unaffected}
        verdicts = [effect.verdict for effect in analyse(losses, "base").effects.values()]
        without = "no verdict: the baseline diverged"
        assert verdicts == [without, "diverged", "diverged in some runs", "better"]
        analysis = analyse({"base": runs(None, None), "model": runs(3.4, 3.4)}, "base")
        assert analysis.effects["model"].verdict == without
        assert (analysis.effects["model"].mean_difference, analysis.baseline_mean_loss) == (None, None)

    def test_differences_without_noise(self):
        losses = {"base": runs(3.0, 3.5, 4.0), "same": runs(3.0, 3.5, 4.0), "better": runs(2.0, 2.5, 3.0)}
        same, better = analyse(losses, "base").effects.values()
        assert (same.verdict, same.t, same.p, same.mean_difference) == ("within noise", 0, 1, 0)
        assert (better.verdict, better.t, better.p, better.standard_error) == ("better", None, 0, 0)
        # In floating point the mean of 0.1 thrice is not 0.1
        equal = analyse({"base": runs(0.1, 0.1, 0.1), "model": runs(0.2, 0.2, 0.2)}, "base")
        assert (equal.noise_floor, equal.effects["model"].difference_deviation) == (0, 0)
        assert equal.effects["model"].verdict == "worse"

    def test_of_unsettled_models(self):
        better = runs(3.40, 3.41, 3.40, 3.43, 3.42)
        unfinished = {"short": {0: 3.4}, "gone": runs(None), "lame": {0: 3.4, 1: None}}
        losses = {"base": BASE, "a": better, "b": better, **unfinished}
        effects = analyse(losses, "base", at_boundary={"b", "short", "gone"}).effects
        boundary = "no verdict: its best rate is at the boundary"
        diverged = ["diverged", "diverged in some runs"]
        assert [effect.verdict for effect in effects.values()] == ["better", boundary, boundary, *diverged]
        assert effects["a"].holm_p == effects["a"].p
        assert effects["b"].p is effects["b"].loss_improvement_interval is None
        assert effects["b"].mean_difference == effects["a"].mean_difference
        effects = analyse(losses, "base", at_boundary=["base", "b"]).effects
        boundary = "no verdict: the baseline's best rate is at the boundary"
        assert [effect.verdict for effect in effects.values()] == [boundary] * 3 + diverged

    def test_correction_decides(self):
        # With two degrees of freedom |t| = 5 is significant at 5 % (4.3), but not beside another test (6.2)
        base = runs(3.0, 3.5, 4.0)
        model = {seed: base[seed] + 5 / math.sqrt(3) + noise for seed, noise in enumerate((-1, 0, 1))}
        alone = analyse({"base": base, "model": model}, "base").effects["model"]
        beside = analyse({"base": base, "model": model, "same": base}, "base").effects["model"]
        assert alone.t == beside.t == pytest.approx(5)
        assert (alone.verdict, beside.verdict) == ("worse", "within noise")
        assert beside.holm_p == pytest.approx(2 * alone.p)
        # The interval is not corrected
        assert beside.loss_improvement_interval[1] < 0


class TestPlan:
    def test_critical_t_of_three_seeds_has_a_closed_form(self):
        # Two degrees of freedom: P(|T| > t) = 1 - t / sqrt(2 + t^2)
        kept = 1 - 0.05 / 5
        assert critical_t(3, 5) == pytest.approx(kept * math.sqrt(2 / (1 - kept**2)))
        assert detectable_effect(3, 5) == pytest.approx(critical_t(3, 5) / math.sqrt(3))

    @pytest.mark.parametrize(
        ("seeds", "models", "words"),
        [
            (3, 5, ("3 seeds and 5 models", "|t| > 9.9,", "5.7 standard deviations", "at least 4 seeds")),
            (1, 1, ("1 seed and 1 model:", "at least 3 seeds")),
        ],
    )
    def test_warning_says_what_would_do(self, seeds, models, words):
        warning = power_warning(seeds, models)
        assert all(word in warning for word in words) and "\n" not in warning
        enough = int(words[-1].split()[2])
        assert power_warning(enough, models) is None
        assert power_warning(enough - 1, models) is not None

    @pytest.mark.parametrize(("seeds", "models", "power"), [(3, 5, 0.8), (5, 1, 0.3)])
    def test_smallest_difference_is_found_as_often_as_promised(self, seeds, models, power):
        """By the definition of the noncentral t, averaged over the distribution of the variance."""
        difference = smallest_difference(seeds, models, 0.3, power=power)
        shift, freedom = difference / (0.3 * math.sqrt(2 / seeds)), seeds - 1
        quantiles = stats.chi2.ppf((np.arange(200_000) + 0.5) / 200_000, freedom)
        found = special.ndtr(shift - critical_t(seeds, models) * np.sqrt(quantiles / freedom)).mean()
        assert found == pytest.approx(power, abs=1e-4)


class TestNoiseFromText:
    def test_is_that_of_a_regression(self):
        shape = (3, 5)
        parts = 3 + np.random.default_rng(1).normal(0, 0.01, shape) + np.arange(shape[0])[:, None] / 20
        seeds, count = shape
        by_seed, by_part = np.repeat(np.eye(seeds), count, axis=0), np.tile(np.eye(count), (seeds, 1))

        def residual(design):
            solution = np.linalg.lstsq(design, parts.ravel(), rcond=None)[0]
            return ((parts.ravel() - design @ solution) ** 2).sum()

        whole, without = residual(np.hstack([by_seed, by_part])), residual(by_part)
        f = ((without - whole) / (seeds - 1)) / (whole / ((seeds - 1) * (count - 1)))
        assert noise_from_text(parts.tolist()) == pytest.approx(1 / f) and f > 1

    def test_counts_what_neighbouring_parts_share(self):
        """Documents of five parts each: the text's share of the variance is that of ten documents, not of 50 parts."""
        random = np.random.default_rng(0)
        documents = np.repeat(random.normal(0, 0.05, (4000, 10)), 5, axis=1)
        parts = 3.5 + random.normal(0, 0.01, (4000, 1)) + documents
        assert noise_from_text(parts) == pytest.approx(0.05**2 / 10 / (0.05**2 / 10 + 0.01**2), rel=0.05)

    @pytest.mark.parametrize("parts", [[], [[3.0, 3.1]], [[3.0], [3.1]], [[3.0, 4.0], [4.0, 3.0]]])
    def test_is_unknown_where_it_cannot_be_computed(self, parts):
        assert noise_from_text(parts) is None


def of_text(differences, weights=None):
    """Losses and parts of a baseline and of a model, from differences `(seed, part)`."""
    parts = {"base": 3.5 + 0.1 * np.random.default_rng(0).normal(size=differences.shape)}
    parts["a"] = parts["base"] + differences
    losses = {name: runs(*np.average(found, axis=1, weights=weights)) for name, found in parts.items()}
    return losses, {name: runs(*found.tolist()) for name, found in parts.items()}


class TestText:
    @examples(30)
    @given(
        seed=st.integers(0, 10_000),
        seeds=st.integers(3, 7),
        noises=st.sampled_from([(0.0, 0.0), (0.02, 0.0), (0.02, 0.05), (0.1, 0.01)]),
        most=st.sampled_from([None, 7]),
    )
    def test_p_is_the_larger_of_both_and_the_interval_its_inversion(self, seed, seeds, noises, most):
        random = np.random.default_rng(seed)
        of_parts, of_rest = (noise * random.normal(size=shape) for noise, shape in zip(noises, ((1, 10), (seeds, 10))))
        differences = 0.02 + 0.02 * random.normal(size=(seeds, 1)) + of_parts + of_rest
        losses, parts = of_text(differences)
        analysis = analyse(losses, "base", most=most, parts=parts)
        effect = analysis.effects["a"]
        assert analysis.counts_text and effect.p == pytest.approx(error_rates.p_of_comparison(differences))
        alpha = 0.05 if most is None else 0.05 * alpha_spent(seeds, most)
        for end in effect.loss_improvement_interval:
            losses, parts = of_text(differences + end / 100 * effect.paired_loss)
            assert analyse(losses, "base", most=most, parts=parts).effects["a"].p == pytest.approx(alpha)

    def test_interval_is_centred_where_the_loss_is_not_the_mean_of_parts(self):
        differences = 0.1 * np.random.default_rng(1).normal(size=(4, 10))
        losses, parts = of_text(differences, weights=np.arange(1, 11))
        effect = analyse(losses, "base", parts=parts).effects["a"]
        assert np.mean(effect.loss_improvement_interval) == pytest.approx(effect.loss_improvement)
        base, model = (np.mean(list(losses[name].values())) for name in ("base", "a"))
        assert effect.loss_improvement == pytest.approx(100 * (base - model) / base)

    def test_only_seeds_count_where_a_run_has_no_parts(self):
        losses, parts = of_text(0.1 * np.random.default_rng(2).normal(size=(4, 1)) + np.arange(-3.0, 7.0))
        whole, parts["base"][3] = analyse(losses, "base", parts=parts).effects["a"], None
        found, alone = analyse(losses, "base", parts=parts), analyse(losses, "base")
        assert found == alone and found.counts_text is False and found.effects["a"].p < whole.p / 2
        losses["base"][3] = None  # a diverged run needs none
        assert analyse(losses, "base", parts=parts).counts_text

    def test_equivalent_needs_the_text_too(self):
        differences = 0.001 * np.random.default_rng(3).normal(size=(8, 1)) + np.zeros((8, 10))
        verdicts = []
        for of_parts in (0.0, 0.2):
            losses, parts = of_text(differences + of_parts * (np.arange(10) - 4.5))
            verdicts.append(analyse(losses, "base", most=9, parts=parts).effects["a"].verdict)
            assert analyse(losses, "base", most=9).effects["a"].verdict == "equivalent"
        assert verdicts == ["equivalent", "within noise"]

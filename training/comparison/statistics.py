"""The statistics of a controlled comparison: which models differ from the baseline by more than the noise of their runs.

Runs of one seed saw the same tokens in the same order, so each model is compared with the baseline seed by seed (Student's
paired t-test, 1908). Several models share one estimate of the noise where their noises agree, and share one error rate
(Holm 1979). Losses are in nats per token; K counts models, n seeds, s is a sample standard deviation (n - 1 in its divisor).

Error rates and intervals hold for given settings. Where a sweep chose the learning rate, the error of that choice is added:
`rate_gap` tells how large it may be, and `benchmarks/selection.py` measures its effect.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import stats


# In standard deviations of a paired difference. An effect of four shows in each single pair (a pair of the wrong sign has
# probability 3e-5), so a comparison that can only detect larger ones says nothing where it finds nothing.
PLAUSIBLE_EFFECT = 4.0

# Below this p-value of Bartlett's test (1937), variances do not agree.
AGREEMENT = 0.05

TOO_FEW_SEEDS = "too few seeds: no verdict"

# In standard deviations of a run. Below this gap of the two best learning rates, chance decides between them too often.
CLEAR_RATE_GAP = 3.0


@dataclass(frozen=True)
class Pool:
    """The estimate of the noise that models share.

    Attributes:
        models: whose variances agree; empty, or at least two.
        deviation: pooled standard deviation of a paired difference, in nats.
        degrees_of_freedom: the effective number, see `_pool`.
        agreement_p: of the last Bartlett test: among `models`, or among the two that remained and disagreed.
    """

    models: tuple[str, ...] = ()
    deviation: float | None = None
    degrees_of_freedom: float | None = None
    agreement_p: float | None = None


@dataclass(frozen=True)
class Effect:
    """One model against the baseline. Values that cannot be computed are None, as are those of the test if there is none.

    Intervals are t intervals of the one model, of nominally `Analysis.confidence`. They are not widened for the number of
    models, so one may exclude 0 where the verdict, which is corrected, says "within noise". Neither verdicts nor intervals
    include the error of choosing a learning rate.

    Attributes:
        verdict: "better", "worse", "within noise", "too few seeds: no verdict", "diverged", "diverged in K of N runs", or "no
            verdict: the baseline diverged".
        pairs: seeds that both the model and the baseline finished.
        diverged: runs of the model that diverged.
        mean_loss: in nats, over the seeds the model finished.
        mean_difference: model minus baseline over the pairs, in nats; negative is better.
        difference_deviation: the model's own standard deviation of these differences, in nats.
        loss_improvement: percent of the baseline's mean loss over the pairs; positive is better.
        perplexity_improvement: percent, 100 (1 - exp(`mean_difference`)); positive is better.
        is_pooled: whether the test uses the degrees of freedom of `Analysis.pool`, and the larger of the model's own deviation
            and the pooled one.
        standard_error: of `mean_difference`, in nats, as the test used it.
        degrees_of_freedom: of the test.
        t: `mean_difference` in standard errors; None also where it is infinite (a difference that is the same in every pair).
        p: two-sided.
        holm_p: `p` corrected for the number of models tested.
        loss_improvement_interval: percent, (low, high); the baseline's mean loss counts as known.
        perplexity_improvement_interval: percent, (low, high); exact, as the formula is monotone.
    """

    verdict: str
    pairs: int
    diverged: int
    mean_loss: float | None
    mean_difference: float | None
    difference_deviation: float | None
    loss_improvement: float | None
    perplexity_improvement: float | None
    is_pooled: bool = False
    standard_error: float | None = None
    degrees_of_freedom: float | None = None
    t: float | None = None
    p: float | None = None
    holm_p: float | None = None
    loss_improvement_interval: tuple[float | None, float | None] | None = None
    perplexity_improvement_interval: tuple[float | None, float | None] | None = None


@dataclass(frozen=True)
class Analysis:
    """A comparison's outcome; `dataclasses.asdict` makes it plain JSON, without NaN or infinity.

    Attributes:
        baseline: the model that the others are compared with.
        baseline_mean_loss: in nats, over the seeds it finished.
        noise_floor: standard deviation of the baseline's loss over its seeds, in nats; None below two.
        noise_floor_percent: the same in percent of `baseline_mean_loss`.
        alpha: the probability that any model at all is wrongly called better or worse, nominally and at given learning rates.
        confidence: 1 - `alpha`, the nominal level of each interval; see `_pool` for what simulations say of both.
        pool: the noise that models share.
        effects: of every model but the baseline.
    """

    baseline: str
    baseline_mean_loss: float | None
    noise_floor: float | None
    noise_floor_percent: float | None
    alpha: float
    confidence: float
    pool: Pool
    effects: dict[str, Effect]


def analyse(losses: dict[str, dict[int, float | None]], baseline: str, alpha: float = 0.05) -> Analysis:
    """Compares every model with the baseline over the seeds they share.

    A model with a diverged run is not tested on its other runs, since leaving out its failures would flatter it. Neither is a
    model tested if the baseline diverged on one of its seeds. Such models do not count among the tests. "Better" and "worse"
    need a corrected p-value below `alpha`. Otherwise the verdict is "within noise", or "too few seeds" where even the smallest
    detectable effect, at the strictest of Holm's steps, is larger than `PLAUSIBLE_EFFECT`; below two pairs there is no test. A
    model that equals the baseline in each pair has p = 1; one that differs by the same amount in each has p = 0, the limit for
    vanishing noise.

    Args:
        losses: `losses[model][seed]`, the final test loss in nats per token; None, NaN or infinity if the run diverged.
        baseline: a key of `losses`.
        alpha: family-wise error rate.

    Raises:
        ValueError: if the baseline is unknown, there is nothing to compare it with, or `alpha` is not between 0 and 1.
    """
    _check_alpha(alpha)
    if baseline not in losses:
        raise ValueError(f"unknown baseline {baseline!r}; the models are {', '.join(losses) or 'none'}")
    if len(losses) < 2:
        raise ValueError(f"{baseline!r} is the only model: a comparison needs another one")
    models = {name: {seed: _plain(loss) for seed, loss in runs.items()} for name, runs in losses.items()}
    reference = models.pop(baseline)
    effects = {name: _describe(runs, reference) for name, runs in models.items()}

    tested = {name: effect for name, effect in effects.items() if not effect.verdict}
    pool = _pool({name: _differences(models[name], reference) for name in tested})
    # A model that was set aside because it is less noisy than the pool is tested with the pool: a small variance may be luck
    quieter = {name for name, effect in tested.items() if effect.difference_deviation < (pool.deviation or 0.0)}
    tested = {name: _test(effect, pool if name in {*pool.models, *quieter} else None) for name, effect in tested.items()}
    for (name, effect), corrected in zip(tested.items(), holm(effect.p for effect in tested.values())):
        paired_loss = _mean([reference[seed] for seed in _pairs(models[name], reference)])
        effects[name] = _judge(dataclasses.replace(effect, holm_p=corrected), paired_loss, len(tested), alpha)

    finished = [loss for loss in reference.values() if loss is not None]
    mean_loss, noise_floor = _mean(finished), _deviation(finished)
    return Analysis(
        baseline=baseline,
        baseline_mean_loss=mean_loss,
        noise_floor=noise_floor,
        noise_floor_percent=_percent(noise_floor, mean_loss),
        alpha=alpha,
        confidence=1 - alpha,
        pool=pool,
        effects=effects,
    )


def holm(p_values: Iterable[float]) -> list[float]:
    """p-values corrected by Holm's step-down method (1979), in the order given.

    The i-th smallest of K is multiplied by K - i + 1, is at least its predecessor, and at most 1. Rejecting those below alpha
    rejects any true hypothesis with probability alpha at most, however the tests depend on each other.
    """
    p_values = np.fromiter(p_values, dtype=float)
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    corrected = np.empty_like(p_values)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(factors * p_values[order]))
    return corrected.tolist()


def critical_t(seeds: int, models: int, alpha: float = 0.05) -> float:
    """The |t| that makes a model better or worse at the strictest of Holm's steps, in the worst case: no pooled variance.

    Args:
        seeds: of each model.
        models: besides the baseline.
        alpha: family-wise error rate.

    Raises:
        ValueError: below two seeds or one model, or if `alpha` is not between 0 and 1.
    """
    _check_alpha(alpha)
    if seeds < 2:
        raise ValueError(f"a test needs at least 2 seeds, not {seeds}")
    if models < 1:
        raise ValueError(f"a comparison needs at least 1 model besides the baseline, not {models}")
    return _critical_t(seeds - 1, models, alpha)


def detectable_effect(seeds: int, models: int, alpha: float = 0.05) -> float:
    """The mean difference that just reaches `critical_t`, in standard deviations of a paired difference; raises as it does."""
    return critical_t(seeds, models, alpha) / math.sqrt(seeds)


def power_warning(seeds: int, models: int, alpha: float = 0.05) -> str | None:
    """Warns of a plan whose verdicts may be "too few seeds"; None if there are enough.

    Arguments and errors are those of `critical_t`, but one seed gets a warning, not an error.
    """
    enough = next(count for count in itertools.count(2) if detectable_effect(count, models, alpha) <= PLAUSIBLE_EFFECT)
    if seeds >= enough:
        return None
    plan = f"{seeds} seed{'s' * (seeds != 1)} and {models} model{'s' * (models != 1)}"
    if seeds < 2:
        return f"{plan}: no verdict is possible, for the noise shows only between seeds; take at least {enough} seeds"
    return (
        f"{plan} may need |t| > {critical_t(seeds, models, alpha):.1f}, a difference of "
        f"{detectable_effect(seeds, models, alpha):.1f} standard deviations, where up to {PLAUSIBLE_EFFECT:g} is plausible; "
        f"take at least {enough} seeds"
    )


def rate_gap(sweep: Iterable[float | None], reported: Iterable[float | None]) -> float | None:
    """The gap between the two best learning rates of a model, in standard deviations of a run.

    Each rate is tried by one run, so a gap below `CLEAR_RATE_GAP` may be luck. The standard deviation is that of the reported
    runs, which all have the chosen rate (n - 1 in its divisor).

    Args:
        sweep: validation loss of each rate in the sweep, in nats per token; None, NaN or infinity if that run diverged.
        reported: validation losses of the reported runs, likewise.

    Returns:
        At least 0; None if fewer than two rates or fewer than two reported runs finished, or if the reported losses are equal.
    """
    best = sorted(loss for loss in map(_plain, sweep) if loss is not None)[:2]
    deviation = _deviation([loss for loss in map(_plain, reported) if loss is not None])
    return _plain((best[1] - best[0]) / deviation) if len(best) == 2 and deviation else None


def _pool(differences: dict[str, np.ndarray]) -> Pool:
    """Pools the variances of the models that agree by Bartlett's test; outliers are set aside, the farthest first.

    The pooled variance is s^2 = sum (n_k - 1) s_k^2 / sum (n_k - 1). The differences of all models contain the same runs of the
    baseline, so it knows less than sum (n_k - 1) independent degrees of freedom. With equal noise in all runs, Cov(d_j, d_k) is
    the baseline's variance, half of Var(d_k) = sigma^2: the correlation is 1/2, that of s_j^2 and s_k^2 its square. Hence

        Var(s^2) = 2 sigma^4 / sum (n_k - 1) * (1 + (K - 1) / 4),

    while nu independent degrees of freedom would give 2 sigma^4 / nu. Equating the two, as Satterthwaite (1946) does:
    nu = sum (n_k - 1) / (1 + (K - 1) / 4), a lower bound where models have different seeds.

    With few seeds Bartlett's test often misses one noisy model, and sets aside one that is less noisy by luck. So no model
    counts as less noisy than its own runs show, or than the pool (see `_test`). In simulations of 3 to 5 seeds, 2 to 5
    models and alpha = 0.05 (`benchmarks/selection.py`), the family-wise error is then 0.01 to 0.04 with equal noise, 0.04
    to 0.05 with a baseline four times as noisy as the models, and 0.04 to 0.06 if one model is four times as noisy as the
    others (0.08 to 0.10 with the pooled deviation alone). Of the intervals, 95 to 97 % hold with equal noise, 91 to 94 %
    with the noisy baseline, and 90 to 94 % of those of the noisy model.
    """
    deviations = {name: _deviation(values) for name, values in differences.items()}
    # In the order of names, so that not even rounding depends on the order of the caller
    candidates = sorted(name for name, deviation in deviations.items() if deviation)
    agreement_p = None
    while len(candidates) >= 2:
        agreement_p = _plain(stats.bartlett(*(differences[name] for name in candidates)).pvalue)
        if agreement_p >= AGREEMENT:
            degrees = np.array([len(differences[name]) - 1 for name in candidates])
            variances = np.square([deviations[name] for name in candidates])
            return Pool(
                models=tuple(candidates),
                deviation=float(np.sqrt(degrees @ variances / degrees.sum())),
                degrees_of_freedom=float(degrees.sum() / (1 + (len(candidates) - 1) / 4)),
                agreement_p=agreement_p,
            )
        logarithms = np.log([deviations[name] for name in candidates])
        del candidates[np.argmax(np.abs(logarithms - np.median(logarithms)))]
    return Pool(agreement_p=agreement_p)


def _describe(runs: dict[int, float | None], reference: dict[int, float | None]) -> Effect:
    """Describes a model without a test; the verdict says why there is no test, or is empty."""
    finished = [loss for loss in runs.values() if loss is not None]
    diverged = len(runs) - len(finished)
    pairs, differences = _pairs(runs, reference), _differences(runs, reference)
    if diverged and not finished:
        verdict = "diverged"
    elif diverged:
        verdict = f"diverged in {diverged} of {len(runs)} runs"
    elif any(seed in reference and reference[seed] is None for seed in runs):
        verdict = "no verdict: the baseline diverged"
    else:
        verdict = TOO_FEW_SEEDS if len(pairs) < 2 else ""
    mean_difference = _mean(differences)
    return Effect(
        verdict=verdict,
        pairs=len(pairs),
        diverged=diverged,
        mean_loss=_mean(finished),
        mean_difference=mean_difference,
        difference_deviation=_deviation(differences),
        loss_improvement=_loss_improvement(mean_difference, _mean([reference[seed] for seed in pairs])),
        perplexity_improvement=_perplexity_improvement(mean_difference),
    )


def _test(effect: Effect, pool: Pool | None) -> Effect:
    """Adds the t-test of a mean difference of 0, with the model's own noise, or that of the pool where it is larger."""
    deviation = max(pool.deviation, effect.difference_deviation) if pool else effect.difference_deviation
    degrees_of_freedom = pool.degrees_of_freedom if pool else effect.pairs - 1.0
    standard_error = deviation / math.sqrt(effect.pairs)
    if standard_error:
        t = effect.mean_difference / standard_error
    else:
        t = math.copysign(math.inf, effect.mean_difference) if effect.mean_difference else 0.0
    return dataclasses.replace(
        effect,
        is_pooled=pool is not None,
        standard_error=standard_error,
        degrees_of_freedom=degrees_of_freedom,
        t=_plain(t),
        p=_plain(2 * stats.t.sf(abs(t), degrees_of_freedom)),
    )


def _judge(effect: Effect, paired_loss: float, tests: int, alpha: float) -> Effect:
    """Adds verdict and intervals to a test.

    Args:
        effect: with `holm_p`.
        paired_loss: the baseline's mean loss over the pairs, in nats.
        tests: number of models tested.
        alpha: family-wise error rate.
    """
    # In nats; both use the deviation of the test, so a model without noise of its own never has too few seeds
    detectable = _critical_t(effect.degrees_of_freedom, tests, alpha) * effect.standard_error
    plausible = PLAUSIBLE_EFFECT * effect.standard_error * math.sqrt(effect.pairs)
    if effect.holm_p < alpha:
        verdict = "better" if effect.mean_difference < 0 else "worse"
    else:
        verdict = TOO_FEW_SEEDS if detectable > plausible else "within noise"
    margin = _critical_t(effect.degrees_of_freedom, 1, alpha) * effect.standard_error
    ends = (effect.mean_difference + margin, effect.mean_difference - margin)
    return dataclasses.replace(
        effect,
        verdict=verdict,
        loss_improvement_interval=tuple(_loss_improvement(end, paired_loss) for end in ends),
        perplexity_improvement_interval=tuple(_perplexity_improvement(end) for end in ends),
    )


def _check_alpha(alpha: float):
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is a probability between 0 and 1, not {alpha}")


def _critical_t(degrees_of_freedom: float, tests: int, alpha: float) -> float:
    return float(stats.t.isf(alpha / tests / 2, degrees_of_freedom))


def _pairs(runs: dict[int, float | None], reference: dict[int, float | None]) -> list[int]:
    return sorted(seed for seed, loss in runs.items() if loss is not None and reference.get(seed) is not None)


def _differences(runs: dict[int, float | None], reference: dict[int, float | None]) -> np.ndarray:
    return np.array([runs[seed] - reference[seed] for seed in _pairs(runs, reference)])


def _mean(values) -> float | None:
    return _plain(np.mean(values)) if len(values) else None


def _deviation(values) -> float | None:
    if len(values) < 2:
        return None
    # The mean of equal numbers may differ from them by rounding, which would look like noise
    return _plain(np.std(values, ddof=1)) if np.ptp(values) else 0.0


def _percent(part: float | None, whole: float | None) -> float | None:
    return _plain(100 * part / whole) if part is not None and whole else None


def _loss_improvement(difference: float | None, paired_loss: float | None) -> float | None:
    return _percent(None if difference is None else -difference, paired_loss)


def _perplexity_improvement(difference: float | None) -> float | None:
    """100 (1 - exp(difference)); None also where it overflows."""
    if difference is None:
        return None
    with np.errstate(over="ignore"):
        return _plain(-100 * np.expm1(difference))


def _plain(value: float | None) -> float | None:
    """A float that JSON can hold, or None; without the sign of -0.0."""
    return float(value) + 0.0 if value is not None and math.isfinite(value) else None

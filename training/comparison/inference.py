"""The statistics of a comparison: which models differ from the baseline by more than noise.

Runs of one seed saw the same tokens in the same order. So each model is compared with the baseline seed by seed, by
Student's paired t-test (1908). Where the losses of parts of the text are known, a second test counts seeds and parts.
The larger p decides, and Holm's method (1979) corrects it. The tests assume independent seeds and parts, and normally
distributed differences. Losses are in nats per token; standard deviations divide by n - 1.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from scipy import optimize, special, stats

from ..text import count


# The nominal probability that a family of tests finds a difference where there is none
ALPHA = 0.05

# In standard deviations of a paired difference. A comparison that detects only larger ones cannot say "within noise"
PLAUSIBLE_EFFECT = 4.0

# Of a comparison with `stop: early`: the seeds of its first interim analysis
FIRST_INTERIM = 3

Interval = tuple[float | None, float | None]
# The final test losses of a model by seed; None, NaN or infinity if the run diverged
Losses = Mapping[int, float | None]
# The losses of a model on parts of the test text, `parts[seed][part]`; None where they are not known
Parts = Mapping[int, Sequence[float] | None]

# Of the test text, each of some 20,000 tokens where the text has 200,000
_TEXT_PARTS = 10

# In nats or percent. Smaller differences are rounding
ROUNDING = 1e-10


@dataclass(frozen=True)
class Estimate:
    """A number and its noise, by Student's distribution."""

    value: float
    standard_error: float
    degrees_of_freedom: float

    def p(self) -> float:
        """The two-sided p-value; without any noise its limit, 0 or 1."""
        if self.standard_error <= ROUNDING:
            return float(abs(self.value) <= ROUNDING)
        return float(2 * special.stdtr(self.degrees_of_freedom, -abs(self.value) / self.standard_error))

    def margin(self, alpha: float) -> float:
        """Half the width of the interval of the level 1 - `alpha`."""
        if self.standard_error <= ROUNDING:
            return 0.0
        return -float(special.stdtrit(self.degrees_of_freedom, alpha / 2)) * self.standard_error

    def interval(self, confidence: float) -> tuple[float, float]:
        margin = self.margin(1 - confidence)
        return self.value - margin, self.value + margin

    def smallest(self, alpha: float, power: float = 0.8) -> float:
        """Returns the true number that p finds at `alpha` with the probability `power`, by the noncentral t."""
        freedom = self.degrees_of_freedom
        critical = float(stats.t.isf(alpha / 2, freedom))
        # At the upper bound, half the risk is that the number is low, the other half that its noise is high
        half = (1 + power) / 2
        largest = critical * math.sqrt(stats.chi2.ppf(half, freedom) / freedom) + stats.norm.ppf(half)
        shift = optimize.brentq(lambda shift: stats.nct.sf(critical, freedom, shift) - power, 0, largest)
        return float(shift * self.standard_error)


class Verdict(StrEnum):
    """What a comparison says of a model, or why it says nothing."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"  # only with interim analyses, see `analyse`
    WITHIN_NOISE = "within noise"
    TOO_FEW_SEEDS = "too few seeds: no verdict"
    AT_BOUNDARY = "no verdict: its best rate is at the boundary"
    BASELINE_AT_BOUNDARY = "no verdict: the baseline's best rate is at the boundary"
    BASELINE_DIVERGED = "no verdict: the baseline diverged"
    DIVERGED = "diverged"
    SOME_DIVERGED = "diverged in some runs"

    @classmethod
    def _missing_(cls, value: object) -> "Verdict | None":
        """Reads "diverged in K of N runs", which older files say."""
        return cls.SOME_DIVERGED if str(value).startswith("diverged in ") else None


# The verdicts of models about which more seeds may tell more
_OPEN = (Verdict.WITHIN_NOISE, Verdict.TOO_FEW_SEEDS)


@dataclass(frozen=True)
class Effect:
    """One model against the baseline. Values that cannot be computed are None.

    Intervals have the level 1 - `Analysis.alpha`. Unlike verdicts, they are not corrected for the number of models.
    """

    verdict: Verdict
    pairs: int  # seeds that both the model and the baseline finished
    diverged: int
    mean_loss: float | None
    mean_difference: float | None  # model minus baseline over the pairs, in nats; negative is better
    difference_deviation: float | None
    loss_improvement: float | None  # percent of the baseline's mean loss over the pairs, which counts as known
    perplexity_improvement: float | None  # percent, 100 (1 - exp(`mean_difference`))
    standard_error: float | None = None
    t: float | None = None  # of the seeds alone, with `pairs` - 1 degrees of freedom
    p: float | None = None  # two-sided, the largest of `estimates`
    holm_p: float | None = None  # corrected for the number of models and of interim analyses
    loss_improvement_interval: Interval | None = None
    perplexity_improvement_interval: Interval | None = None
    paired_loss: float | None = None  # of the baseline, the mean over the pairs
    text_error: float | None = None  # standard error over seeds and parts of the text, and its degrees of freedom
    text_freedom: float | None = None

    def estimates(self) -> list[Estimate]:
        """Returns the mean difference with the noise of seeds alone, and of seeds and text where that is known."""
        noises = [(self.standard_error, self.pairs - 1), (self.text_error, self.text_freedom)]
        return [Estimate(self.mean_difference, *noise) for noise in noises if noise[0] is not None]

    def widest(self, alpha: float) -> Estimate:
        """Returns the estimate with the widest interval, which holds every difference whose p is at least `alpha`."""
        return max(self.estimates(), key=lambda estimate: estimate.margin(alpha))


@dataclass(frozen=True)
class Analysis:
    """The verdicts of a comparison at one scale, without NaN or infinity."""

    baseline: str
    baseline_mean_loss: float | None
    noise_floor: float | None  # standard deviation over the seeds that the baseline finished
    noise_floor_percent: float | None
    alpha: float  # the nominal probability that any model is wrongly called better or worse
    effects: dict[str, Effect]
    counts_text: bool | None = None  # whether p does; None in files of versions in which only intervals did
    family: int | None = None  # the number of tests corrected together, if others than these are among them

    def open_models(self) -> list[str]:
        return [name for name, effect in self.effects.items() if effect.verdict in _OPEN]


@dataclass(frozen=True)
class Interim:
    """A model at an interim analysis, as in `Effect`."""

    seeds: int
    loss_improvement: float | None
    loss_improvement_interval: Interval | None


def analyse_early(
    losses: Mapping[str, Losses],
    baseline: str,
    seeds: Sequence[int],
    boundaries: Mapping[str, Collection[int]],
    parts: Mapping[str, Parts] | None = None,
) -> tuple[Analysis, dict[str, list[Interim]]]:
    """Analyses a comparison with `stop: early`, each model at its last interim analysis, and returns all of these.

    `boundaries` are the seeds of a model whose best rate is the smallest or the largest tried.
    """
    interims: dict[str, list[Interim]] = {name: [] for name in losses if name != baseline}
    whole = analyse(losses, baseline, most=len(seeds), parts=parts)
    effects, parts = dict(whole.effects), parts if whole.counts_text else {}
    for number in range(FIRST_INTERIM, len(losses[baseline]) + 1):
        seen = seeds[:number]
        first = {name: _of_seeds(runs, seen) for name, runs in losses.items()}
        first_parts = {name: _of_seeds(runs, seen) for name, runs in parts.items()}
        at_boundary = [name for name in losses if set(boundaries.get(name, ())) & set(seen)]
        analysis = analyse(first, baseline, at_boundary=at_boundary, most=len(seeds), parts=first_parts)
        for name, history in interims.items():
            if len(first[name]) == number:
                effect = effects[name] = analysis.effects[name]
                history.append(Interim(number, effect.loss_improvement, effect.loss_improvement_interval))
    return replace(whole, effects=effects), interims


def _of_seeds(runs: Mapping[int, Any], seeds: Sequence[int]) -> dict[int, Any]:
    return {seed: runs[seed] for seed in seeds if seed in runs}


def analyse(
    losses: Mapping[str, Losses],
    baseline: str,
    alpha: float = ALPHA,
    at_boundary: Collection[str] = (),
    resolution: float = 0.0,
    most: int | None = None,
    parts: Mapping[str, Parts] | None = None,
) -> Analysis:
    """Compares every model with the baseline over the seeds they share.

    A model is not tested if it or the baseline diverged on one of its seeds, or if the best rate of either is at
    the boundary. "Better" and "worse" need a corrected p below `alpha`. Otherwise the verdict is "within noise",
    or "too few seeds" if the smallest detectable effect exceeds `PLAUSIBLE_EFFECT`. Without noise p is 1 for equal
    losses and 0 for others.

    Args:
        resolution: the smallest step of a loss, which is also the smallest standard deviation.
        most: with interim analyses, the number of seeds of the last. Each spends its part of `alpha` (see
            `alpha_spent`), and Bonferroni's method corrects for all models. A model is "equivalent" if its corrected
            interval lies within the noise floor.
        parts: `parts[model][seed][part]`. Only seeds count unless it has the parts of all runs that finished.
    """
    models = {name: {seed: _plain(loss) for seed, loss in runs.items()} for name, runs in losses.items()}
    counts_text = bool(parts) and all(
        loss is None or parts.get(name, {}).get(seed) for name, runs in models.items() for seed, loss in runs.items()
    )
    reference = models.pop(baseline)
    effects = {
        name: _describe(runs, reference, resolution, name in at_boundary, baseline in at_boundary)
        for name, runs in models.items()
    }
    if counts_text:
        for name, effect in effects.items():
            if effect.p is not None:
                effects[name] = _with_text(effect, parts[name], parts[baseline])
    finished = [loss for loss in reference.values() if loss is not None]
    mean_loss, noise_floor = _mean(finished), _deviation(finished)
    tested = {name: effect for name, effect in effects.items() if effect.p is not None}
    shares = [1.0 if most is None else alpha_spent(effect.pairs, most) for effect in tested.values()]
    p_values = [effect.p for effect in tested.values()]
    if most is None:
        tests, corrected = len(tested), holm(p_values)
    else:
        tests = len(models)
        corrected = [min(1.0, p * tests / share) if share else 1.0 for p, share in zip(p_values, shares)]
    for (name, effect), p, share in zip(tested.items(), corrected, shares):
        effect = effects[name] = _judge(replace(effect, holm_p=p), tests, alpha, share)
        if most is not None and effect.verdict in _OPEN and noise_floor and share:
            corrected_alpha = alpha * share / tests
            if max(map(abs, effect.widest(corrected_alpha).interval(1 - corrected_alpha))) < noise_floor:
                effects[name] = replace(effect, verdict=Verdict.EQUIVALENT)
    percent = _plain(100 * noise_floor / abs(mean_loss)) if noise_floor is not None and mean_loss else None
    return Analysis(baseline, mean_loss, noise_floor, percent, alpha, effects, counts_text)


def _describe(
    runs: Losses, reference: Losses, resolution: float, is_at_boundary: bool, is_baseline_at_boundary: bool
) -> Effect:
    """Describes a model, with p, or with a verdict that says why it has no test."""
    finished = [loss for loss in runs.values() if loss is not None]
    pairs = sorted(seed for seed, loss in runs.items() if loss is not None and reference.get(seed) is not None)
    differences = np.array([runs[seed] - reference[seed] for seed in pairs])
    mean, deviation = _mean(differences), _deviation(differences)
    paired_loss = _mean([reference[seed] for seed in pairs])
    diverged = len(runs) - len(finished)
    verdict = None
    if diverged:
        verdict = Verdict.SOME_DIVERGED if finished else Verdict.DIVERGED
    elif any(seed in reference and reference[seed] is None for seed in runs):
        verdict = Verdict.BASELINE_DIVERGED
    elif is_baseline_at_boundary:
        verdict = Verdict.BASELINE_AT_BOUNDARY
    elif is_at_boundary:
        verdict = Verdict.AT_BOUNDARY
    elif len(pairs) < 2:
        verdict = Verdict.TOO_FEW_SEEDS
    effect = Effect(
        verdict=verdict,
        pairs=len(pairs),
        diverged=diverged,
        mean_loss=_mean(finished),
        mean_difference=mean,
        difference_deviation=deviation,
        loss_improvement=_loss_improvement(mean, paired_loss),
        perplexity_improvement=_perplexity_improvement(mean),
        paired_loss=paired_loss,
    )
    if verdict is not None:
        return effect
    standard_error = max(deviation, resolution) / math.sqrt(len(pairs))
    t = mean / (standard_error or 1.0) if standard_error or not mean else math.copysign(math.inf, mean)
    effect = replace(effect, standard_error=standard_error, t=_plain(t))
    return replace(effect, p=effect.estimates()[0].p())


def _with_text(effect: Effect, parts: Parts, reference: Parts) -> Effect:
    """Makes p of a tested model count the text, so that it and the interval hold for other texts too.

    The difference of seed s on part p is modelled as in `noise_from_text`, with parts drawn at random. The variance of
    its mean over S seeds and P parts is estimated by (MS_seeds + MS_parts - MS_rest) / (S P), without bias.
    Degrees of freedom are Satterthwaite's (1946), and at least the fewer of seeds and parts. No p becomes smaller.
    """
    pairs = [seed for seed in parts if parts[seed] and reference.get(seed)]
    losses = _merged(np.array([np.subtract(parts[seed], reference[seed]) for seed in pairs]))
    of_seeds, of_parts, rest = mean_squares(losses)
    variance = of_seeds + of_parts - rest
    if variance <= of_seeds:
        return effect
    seeds, columns = (size - 1 for size in losses.shape)
    freedoms = (seeds, columns, seeds * columns)
    squares = zip((of_seeds, of_parts, rest), freedoms)
    freedom = max(variance**2 / sum(mean**2 / freedom for mean, freedom in squares), min(freedoms))
    effect = replace(effect, text_error=math.sqrt(variance / losses.size), text_freedom=float(freedom))
    return replace(effect, p=max(estimate.p() for estimate in effect.estimates()))


def _judge(effect: Effect, tests: int, alpha: float, share: float) -> Effect:
    """Adds verdict and intervals to a corrected test; this analysis spends `share` of `alpha`."""
    if not share:
        return replace(effect, verdict=Verdict.TOO_FEW_SEEDS)
    margin = effect.widest(alpha * share).margin(alpha * share)
    ends = (effect.mean_difference + margin, effect.mean_difference - margin)
    return replace(
        effect,
        verdict=verdict_of(effect, tests, alpha, share),
        loss_improvement_interval=tuple(_loss_improvement(end, effect.paired_loss) for end in ends),
        perplexity_improvement_interval=tuple(map(_perplexity_improvement, ends)),
    )


def verdict_of(effect: Effect, tests: int, alpha: float, share: float = 1.0) -> Verdict:
    """Judges an effect by its corrected p, which is one of so many tests."""
    if effect.holm_p < alpha:
        return Verdict.BETTER if effect.mean_difference < 0 else Verdict.WORSE
    if effect.standard_error and detectable_effect(effect.pairs, tests, alpha * share) > PLAUSIBLE_EFFECT:
        return Verdict.TOO_FEW_SEEDS
    return Verdict.WITHIN_NOISE


def holm(p_values: Iterable[float]) -> list[float]:
    """Corrects p-values by Holm's step-down method (1979)."""
    p_values = np.fromiter(p_values, dtype=float)
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    corrected = np.empty_like(p_values)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(factors * p_values[order]))
    return corrected.tolist()


def alpha_spent(seeds: int, most: int) -> float:
    """Returns the part of alpha that an analysis spends: half at the last one, the rest in equal parts before it."""
    if seeds < FIRST_INTERIM:
        return 0.0
    if most == FIRST_INTERIM:
        return 1.0
    return 0.5 if seeds >= most else 0.5 / (most - FIRST_INTERIM)


def alpha_of_last(seeds: int, has_interim: bool) -> float:
    """Returns what the last analysis spends of `ALPHA`."""
    return ALPHA * alpha_spent(seeds, seeds) if has_interim else ALPHA


def critical_t(seeds: int, models: int, alpha: float = ALPHA) -> float:
    """Returns the |t| that one of so many models needs at the strictest of Holm's steps."""
    return float(stats.t.isf(alpha / models / 2, seeds - 1))


def detectable_effect(seeds: int, models: int, alpha: float = ALPHA) -> float:
    """Returns the mean difference that reaches `critical_t`, in standard deviations of a paired difference."""
    return critical_t(seeds, models, alpha) / math.sqrt(seeds)


def smallest_difference(
    seeds: int, models: int, noise_floor: float, alpha: float = ALPHA, power: float = 0.8
) -> float:
    """Returns the smallest true difference that a comparison finds with probability `power`, by the noncentral t.

    It is in the unit of `noise_floor`, at the strictest of Holm's steps, for independent runs. Where runs of a seed
    share noise, smaller differences are found.
    """
    return Estimate(0.0, math.sqrt(2 / seeds) * noise_floor, seeds - 1).smallest(alpha / models, power)


def noise_range(freedom: float) -> tuple[float, float]:
    """Returns the ends of the 95 % interval of a standard deviation, in units of its estimate."""
    return tuple(math.sqrt(freedom / stats.chi2.ppf(quantile, freedom)) for quantile in (0.975, 0.025))


def power_warning(seeds: int, models: int, has_interim: bool = False, family: int | None = None) -> str | None:
    """Warns of a plan whose verdicts may be "too few seeds"; a `family` has other tests too."""
    alpha = alpha_of_last(seeds, has_interim)
    enough, tests = 2, family or models
    while detectable_effect(enough, tests, alpha) > PLAUSIBLE_EFFECT:
        enough += 1
    if seeds >= enough:
        return None
    plan = f"{count(seeds, 'seed')} and {count(models, 'model') if tests == models else count(tests, 'test')}"
    if seeds < 2:
        return f"{plan}: no verdict is possible, for the noise shows only between seeds; take at least {enough} seeds"
    needed, difference = critical_t(seeds, tests, alpha), detectable_effect(seeds, tests, alpha)
    return (
        f"{plan} may need |t| > {needed:.1f}, a difference of {difference:.1f} standard deviations, where up to "
        f"{PLAUSIBLE_EFFECT:g} is plausible; take at least {enough} seeds"
    )


def noise_from_text(parts: Sequence[Sequence[float]]) -> float | None:
    """Returns the share of the variance between seeds that is due to the choice of the test text.

    The loss of seed s on part p of the text is modelled as m + a_s + b_p + e_sp (two-way analysis of variance without
    replication, Fisher 1925). The mean over P parts of equal size keeps var(e) / P. So the share is 1 / F, the mean
    square of residuals over that of seeds. It is at most 1, and None with fewer than two seeds or parts, or if all
    seeds have the same mean.
    """
    losses = np.array(parts, dtype=float)
    if losses.ndim != 2 or min(losses.shape) < 2:
        return None
    seeds, _, rest = mean_squares(_merged(losses))
    return min(1.0, rest / seeds) if seeds else None


def _merged(losses: np.ndarray) -> np.ndarray:
    """Merges neighbours to at most `_TEXT_PARTS` parts, because parts of one document are not independent."""
    merged = np.array_split(losses, min(_TEXT_PARTS, losses.shape[1]), axis=1)
    return np.stack([part.mean(axis=1) for part in merged], axis=1)


def mean_squares(losses: np.ndarray) -> tuple[float, float, float]:
    """Returns the mean squares of rows, columns and residuals, as in a two-way analysis of variance."""
    rows, columns = losses.shape
    by_row, by_column = losses.mean(axis=1, keepdims=True), losses.mean(axis=0, keepdims=True)
    rest = ((losses - by_row - by_column + losses.mean()) ** 2).sum() / ((rows - 1) * (columns - 1))
    between_rows, between_columns = (_deviation(means.ravel()) ** 2 for means in (by_row, by_column))
    return columns * between_rows, rows * between_columns, float(rest)


def _mean(values: Sequence[float]) -> float | None:
    return _plain(np.mean(values)) if len(values) else None


def _deviation(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    # The mean of equal numbers may differ from them by rounding
    return _plain(np.std(values, ddof=1)) if np.ptp(values) else 0.0


def _loss_improvement(difference: float | None, paired_loss: float | None) -> float | None:
    return _plain(-100 * difference / abs(paired_loss)) if difference is not None and paired_loss else None


def _perplexity_improvement(difference: float | None) -> float | None:
    """100 (1 - exp(difference)); `None` where it overflows."""
    with np.errstate(over="ignore"):
        return None if difference is None else _plain(-100 * np.expm1(difference))


def _plain(value: float | None) -> float | None:
    """Returns a finite float, or None; without the sign of -0.0."""
    return float(value) + 0.0 if value is not None and math.isfinite(value) else None

"""Simulates comparisons: which test, and which way to choose learning rates, calls equal models different too often.

    python benchmarks/selection.py
    python benchmarks/selection.py --repetitions 2000

Losses are in standard deviations of a run, and "better" and "worse" are wrong where models are equal. Runs of one seed, at any
rate and of any model, may share three quarters of their variance, as happens if data and initial weights are the same. The
formulas are vectorised. Before any table is printed, they must give the verdicts of `analyse` and the warnings of
`noise_ratio`.

Noise is normal, has heavy tails (Student's t with three degrees of freedom), or is skewed (exponential). The tests are
two-sided, so it does not matter to which side. The baseline, one model, or all models but the baseline may be four times as
noisy as the rest.

Tests, at given learning rates:

* paired: that of `analyse`, a paired t-test for each model, and Holm's correction.
* pooled: the same, with one variance for the models whose variances agree by Bartlett's test (1937). The model whose variance
  is farthest is set aside until the test passes, and no model counts as less noisy than its own runs or the pool show. The pool
  of K models has (n - 1) K / (1 + (K - 1) / 4) degrees of freedom, because all differences share the baseline's runs.
* blocks: seeds are the blocks of a two-way analysis without interaction. All models, the baseline included, share its residual
  variance with (n - 1) K degrees of freedom, and Dunnett's critical value (1955) allows for the K tests.
* johnson: that of `analyse`, with Johnson's t (1978), which is corrected for the skewness of the differences.

Ways to choose a rate, each followed by the paired test:

* sweep m: m runs at each rate, with seeds of their own. The rate with the lowest mean validation loss is used for all seeds.
* two best: the two best rates of such a sweep with m = 1 are trained on every seed, which takes the better one.
* mean: every seed trains every rate. The rate with the lowest mean validation loss over the seeds is used for all of them.
* each seed: every seed trains every rate, and takes the rate of its own lowest validation loss.
* search: the same, where a seed begins at one rate and tries neighbours until the best rate has a worse one on both sides.
* first seed: the first seed searches. The others try its rate and the two neighbours, and take their own best.
* first seed's rate: the first seed searches, and the others train at its rate.
* baseline's rate: the baseline searches with every seed, and the other models train at its rate of their seed.
* known rate: all train at the baseline's truly best rate, as one that is transferred from a smaller model may be.

The true losses of three rates are (0, g, 3g) or (g, 0, g). The search has the bowl (..., 4g, g, 0, g, 4g, ...) and begins
beside its lowest point. Validation and test loss of a run correlate by 1 or by 0.5. A table has models that are equal at their
best rates, but not equally sensitive to the rate.

A table is about ladders: where the search of a scale begins, at the median of the rates that the seeds chose at the
scale before, or of each seed at its own. The bowls are (..., 2g, g, 0, g, 2g, ...) and (..., 4g, g, 0, g, 4g, ...). A table
is about seeds that are added until a report has a verdict.

The last tables are about `stop: early`, beside all seeds with the paired test, and beside an e-process that may be looked at
any number of times: the Bayes factor of a t-test (Rouder et al. 2009), whose effect has a normal prior with a standard
deviation of 2, against the number of models divided by alpha. Then come screenings (`factors`), whose main effects and Holm's
correction decide what is confirmed. They need the package pydoe.
"""

import argparse
import functools
import platform
from collections.abc import Callable

import numpy as np
import scipy
from scipy import optimize, special, stats

import modeling_nlq
from modeling_nlq.training.comparison.factors import analyse_effects, make_design
from modeling_nlq.training.comparison.statistics import FIRST_LOOK, analyse, critical_t, noise_ratio, share_of_look


ALPHA = 0.05
PLANS = tuple((seeds, models) for seeds in (3, 5, 10) for models in (1, 2, 5))  # models besides the baseline
SHARED = (0.0, 0.75)
GAPS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0)
REACH = 6  # rates on each side of the bowl's lowest point; the search hardly ever gets so far
MOVES = (0, 2, 4)  # rates by which the best one moves from scale to scale

Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

# Each has mean 0 and variance 1
DISTRIBUTIONS: dict[str, Noise] = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "t3": lambda random, shape: random.standard_t(3, shape) / np.sqrt(3),
    "skewed": lambda random, shape: random.standard_exponential(shape) - 1,
}
# How noisy the baseline, the first other model, and the rest are
NOISES = {"equal": (1, 1, 1), "one model 4 x": (1, 4, 1), "all models 4 x": (1, 4, 4), "baseline 4 x": (4, 1, 1)}


def draw(random: np.random.Generator, shape: tuple[int, ...], shared: float, noise: str = "normal") -> np.ndarray:
    """Draws the noise of runs `(repetition, model, ..., seed)`, of which runs of a seed share a part of the variance."""
    common = DISTRIBUTIONS[noise](random, (shape[0], *[1] * (len(shape) - 2), shape[-1]))
    return np.sqrt(shared) * common + np.sqrt(1 - shared) * DISTRIBUTIONS[noise](random, shape)


def holm(p: np.ndarray) -> np.ndarray:
    """Which of the tests `(repetition, model)` reject, by Holm's method."""
    order = p.argsort(axis=1)
    levels = ALPHA / np.arange(p.shape[1], 0, -1)
    passed = np.logical_and.accumulate(np.take_along_axis(p, order, axis=1) < levels, axis=1)
    rejected = np.empty_like(passed)
    np.put_along_axis(rejected, order, passed, axis=1)
    return rejected


def paired_t(losses: np.ndarray) -> np.ndarray:
    """t of each model, `(repetition, model)`, from losses `(repetition, model, seed)`, the baseline first."""
    differences = losses[:, 1:] - losses[:, :1]
    return differences.mean(axis=2) / differences.std(axis=2, ddof=1) * np.sqrt(losses.shape[2])


def paired(losses: np.ndarray) -> np.ndarray:
    return holm(2 * stats.t.sf(np.abs(paired_t(losses)), losses.shape[2] - 1))


def pooled(losses: np.ndarray) -> np.ndarray:
    differences = losses[:, 1:] - losses[:, :1]
    models, seeds = differences.shape[1:]
    freedom = seeds - 1
    own = differences.var(axis=2, ddof=1)
    logarithms = np.log(own)
    members = np.full(own.shape, models > 1)
    while True:
        count = members.sum(axis=1)
        variance = np.where(members, own, 0).sum(axis=1) / np.maximum(count, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            bartlett = freedom * (count * np.log(variance) - np.where(members, logarithms, 0).sum(axis=1))
            bartlett /= 1 + (count - 1 / count) / (3 * (count - 1) * freedom)
            disagree = (count > 1) & (stats.chi2.sf(bartlett, count - 1) < 0.05)
        if not disagree.any():
            break
        inside = np.where(members, logarithms, np.nan)[disagree]
        farthest = np.nanargmax(np.abs(inside - np.nanmedian(inside, axis=1, keepdims=True)), axis=1)
        members[np.flatnonzero(disagree), farthest] = False
    members[count < 2] = False
    variance, count = (np.where(count < 2, 0, values)[:, None] for values in (variance, count))
    shares = members | (own < variance)
    degrees = np.where(shares, freedom * count / (1 + (count - 1) / 4), freedom)
    t = differences.mean(axis=2) / np.sqrt(np.where(shares, np.maximum(own, variance), own) / seeds)
    return holm(2 * stats.t.sf(np.abs(t), degrees))


def blocks(losses: np.ndarray) -> np.ndarray:
    models, seeds = losses.shape[1] - 1, losses.shape[2]
    residuals = losses - losses.mean(axis=1, keepdims=True) - losses.mean(axis=2, keepdims=True)
    residuals += losses.mean(axis=(1, 2), keepdims=True)
    variance = np.square(residuals).sum(axis=(1, 2)) / (models * (seeds - 1))
    means = losses.mean(axis=2)
    t = (means[:, 1:] - means[:, :1]) / np.sqrt(2 * variance / seeds)[:, None]
    return np.abs(t) > dunnett(models, models * (seeds - 1))


@functools.cache
def dunnett(models: int, freedom: int) -> float:
    """Dunnett's two-sided critical value: the largest |t| of all models lies below it with probability 1 - `ALPHA`.

    With one baseline z and a standard deviation s, all |t| are below c if each model is within sqrt(2) c s of z.
    """
    quantiles = (np.arange(500) + 0.5) / 500
    z, s = special.ndtri(quantiles)[:, None], np.sqrt(stats.chi2.ppf(quantiles, freedom) / freedom)

    def excess(c: float) -> float:
        within = special.ndtr(z + np.sqrt(2) * c * s) - special.ndtr(z - np.sqrt(2) * c * s)
        return (within**models).mean() - (1 - ALPHA)

    return optimize.brentq(excess, 0.1, 100)


def johnson(losses: np.ndarray) -> np.ndarray:
    differences = losses[:, 1:] - losses[:, :1]
    seeds, mean, variance = losses.shape[2], differences.mean(axis=2), differences.var(axis=2, ddof=1)
    cubes = ((differences - mean[..., None]) ** 3).sum(axis=2) * seeds / ((seeds - 1) * (seeds - 2))
    corrected = mean + cubes / (6 * variance * seeds) + cubes * mean**2 / (3 * variance**2)
    return holm(2 * stats.t.sf(np.abs(corrected) / np.sqrt(variance / seeds), seeds - 1))


TESTS = {"pooled": pooled, "paired": paired, "blocks": blocks, "johnson": johnson}


def warned_of_noise(losses: np.ndarray) -> np.ndarray:
    """Whether `noise_ratio` finds a difference, `(repetition,)`, from losses as `paired_t` takes them."""
    variances, (models, freedom) = losses.var(axis=2, ddof=1), np.subtract(losses.shape[1:], 1)
    f, degrees = variances[:, 1:].mean(axis=1) / variances[:, 0], (models * freedom, freedom)
    return 2 * np.minimum(stats.f.sf(f, *degrees), stats.f.cdf(f, *degrees)) < 0.05


def compare_tests(
    random: np.random.Generator,
    seeds: int,
    models: int,
    shared: float = 0.0,
    noise: str = "equal",
    distribution: str = "normal",
    difference: float = 0.0,
    repetitions: int = 2000,
) -> dict[str, float]:
    """Simulates comparisons at given learning rates.

    Args:
        random: the source of all random numbers.
        seeds: number of runs of each model.
        models: number of models besides the baseline.
        shared: the part of a run's variance that all runs of its seed have in common.
        noise: a name of `NOISES`.
        distribution: a name of `DISTRIBUTIONS`.
        difference: of the first model to all others, in standard deviations of a run.
        repetitions: number of comparisons.

    Returns:
        by test: the share of comparisons with a wrong verdict if `difference` is 0, else that with the first model's right one.
        Also `warned`, comparisons with a warning of unequal noise, and `unwarned`, those in which the paired test is wrong and
        there is no such warning.
    """
    baseline, first, other = NOISES[noise]
    scale = np.array([baseline, first, *[other] * (models - 1)], float)[:, None]
    losses = scale * draw(random, (repetitions, models + 1, seeds), shared, distribution)
    losses[:, 1] -= difference
    found = {name: test(losses) for name, test in TESTS.items()}
    if difference:
        is_lower = losses[:, 1].mean(axis=1) < losses[:, 0].mean(axis=1)
        return {name: (rejected[:, 0] & is_lower).mean() for name, rejected in found.items()}
    wrong, warned = {name: rejected.any(axis=1) for name, rejected in found.items()}, warned_of_noise(losses)
    wrong |= {"warned": warned, "unwarned": wrong["paired"] & ~warned}
    return {name: values.mean() for name, values in wrong.items()}


def compare_choices(
    random: np.random.Generator,
    seeds: int,
    models: int,
    rates: np.ndarray,
    shared: float = 0.0,
    correlation: float = 1.0,
    repetitions: int = 2000,
) -> dict[str, dict[str, float]]:
    """Simulates comparisons in which each model, and the baseline, chooses a learning rate.

    Args:
        random: the source of all random numbers.
        seeds: number of reported seeds.
        models: number of models besides the baseline.
        rates: true losses of the rates, of all models `(rate,)` or of each `(model, rate)`, the baseline first.
        shared: the part of a run's variance that all runs of its seed have in common.
        correlation: of the validation and the test loss of runs at one rate.
        repetitions: number of comparisons.

    Returns:
        by way to choose: `wrong`, the share of comparisons with a wrong verdict; `runs` of each model; `deviation` of the mean
        difference, in standard deviations of a run.
    """
    rates = np.broadcast_to(rates, (models + 1, rates.shape[-1]))[..., None]
    count = rates.shape[1]

    def train(runs: int) -> tuple[np.ndarray, np.ndarray]:
        """Validation and test losses `(repetition, model, rate, seed)`; each split has an own error where they differ."""
        shape = (repetitions, models + 1, count, runs)
        noise = rates + np.sqrt(correlation) * draw(random, shape, shared)
        if correlation == 1:
            return noise, noise
        own = np.sqrt(1 - correlation)
        return noise + own * random.standard_normal(shape), noise + own * random.standard_normal(shape)

    def at(values: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Values `(repetition, model, rate, seed)` at the rates `(repetition, model, 1 or more, seed or 1)`."""
        return np.take_along_axis(values, index, axis=2)

    def judge(losses: np.ndarray, runs: float) -> dict[str, float]:
        # Holm's first step, which decides whether any test rejects
        t = np.abs(paired_t(losses)).max(axis=1)
        wrong = 2 * stats.t.sf(t, seeds - 1) < ALPHA / models
        deviation = (losses[:, 1:] - losses[:, :1]).mean(axis=2).std(axis=0).mean()
        return {"wrong": wrong, "runs": runs, "deviation": deviation}

    validation, test = train(seeds)
    if count > 3:
        tried = search(validation)
        chosen = np.where(tried, validation, np.inf).argmin(axis=2, keepdims=True)
        found = {"search": judge(at(test, chosen)[:, :, 0], tried.sum(axis=(2, 3)).mean())}
        first = chosen[..., :1]
        near = np.repeat(np.abs(np.arange(count)[:, None] - first) <= 1, seeds, axis=3)
        near[..., :1] = tried[..., :1]
        own = np.where(near, validation, np.inf).argmin(axis=2, keepdims=True)
        found["first seed"] = judge(at(test, own)[:, :, 0], near.sum(axis=(2, 3)).mean())
        runs = tried[..., 0].sum(axis=2).mean() + seeds - 1
        found["first seed's rate"] = judge(at(test, np.broadcast_to(first, chosen.shape))[:, :, 0], runs)
        taken = at(test, np.broadcast_to(chosen[:, :1], chosen.shape))[:, :, 0]
        found["baseline's rate"] = judge(taken, (tried[:, 0].sum(axis=(1, 2)).mean() + models * seeds) / (models + 1))
        known = np.broadcast_to(rates[0, :, 0].argmin(), chosen.shape)
        found["known rate"] = judge(at(test, known)[:, :, 0], seeds)
    else:
        found = {}
        sweep, _ = train(4)
        for runs in (1, 2, 4):
            tried = sweep[..., :runs].mean(axis=3, keepdims=True)
            chosen = tried.argmin(axis=2, keepdims=True)
            found[f"sweep {runs}"] = judge(at(test, chosen)[:, :, 0], count * runs + seeds)
        best = sweep[..., :1].argsort(axis=2)[:, :, :2]
        better = at(validation, best).argmin(axis=2, keepdims=True)
        found["two best"] = judge(at(at(test, best), better)[:, :, 0], count + 2 * seeds)
        chosen = validation.mean(axis=3, keepdims=True).argmin(axis=2, keepdims=True)
        found["mean"] = judge(at(test, chosen)[:, :, 0], count * seeds)
        found["each seed"] = judge(at(test, validation.argmin(axis=2, keepdims=True))[:, :, 0], count * seeds)
    return {name: {what: float(np.mean(value)) for what, value in values.items()} for name, values in found.items()}


def search(validation: np.ndarray, start: np.ndarray | int | None = None) -> np.ndarray:
    """The rates tried, as booleans, by searches through `(repetition, model, rate, seed)`, each seed by itself.

    Args:
        validation: the losses.
        start: indices of the rates where searches begin, `(repetition, model, 1, seed)`; by default beside the middle.
    """
    shape = validation.shape
    tried = np.zeros(shape, bool)
    start = np.array(shape[2] // 2 - 1 if start is None else start)
    np.put_along_axis(tried, np.broadcast_to(start, (*shape[:2], 1, shape[3])), True, axis=2)
    while True:
        best = np.where(tried, validation, np.inf).argmin(axis=2, keepdims=True)
        before = tried.sum()
        for neighbour in (best - 1, best + 1):
            np.put_along_axis(tried, neighbour.clip(0, shape[2] - 1), True, axis=2)
        if tried.sum() == before:
            return tried


def compare_starts(
    random: np.random.Generator, seeds: int, models: int, losses: np.ndarray, moves: int, repetitions: int = 2000
) -> dict[str, dict[str, float]]:
    """Simulates ladders of two scales, in which the best rate moves between them.

    Args:
        random: the source of all random numbers.
        seeds, models: as for `compare_choices`.
        losses: true losses of the rates at the smaller scale, the best in the middle.
        moves: by how many rates the best one moves.
        repetitions: number of ladders.

    Returns:
        by where the searches of the larger scale begin, `median` or `own`: `wrong`, the share of larger scales with a wrong
        verdict, and `runs` of a model there.
    """
    shape = (repetitions, models + 1, len(losses), seeds)
    smaller = losses[:, None] + random.standard_normal(shape)
    own = np.where(search(smaller), smaller, np.inf).argmin(axis=2, keepdims=True)
    larger = np.roll(losses, moves)[:, None] + random.standard_normal(shape)
    found = {}
    for name, start in (("median", np.sort(own, axis=3)[..., (seeds - 1) // 2, None]), ("own", own)):
        tried = search(larger, start)
        t = np.abs(paired_t(np.where(tried, larger, np.inf).min(axis=2))).max(axis=1)
        wrong = 2 * stats.t.sf(t, seeds - 1) < ALPHA / models
        found[name] = {"wrong": float(wrong.mean()), "runs": float(tried.sum(axis=(2, 3)).mean())}
    return found


def gate(repetitions: int = 40) -> None:
    """Checks the formulas against the package before any table is printed.

    Raises:
        SystemExit: if a verdict or a warning differs.
    """
    for seeds, models in PLANS:
        losses = np.random.default_rng(seeds).standard_normal((repetitions, models + 1, seeds))
        losses += np.linspace(0, 8 / np.sqrt(seeds), models + 1)[:, None]  # so that about half of the tests reject
        rejected, warned = paired(losses), warned_of_noise(losses)
        for index, comparison in enumerate(losses.tolist()):
            by_model = {str(model): dict(enumerate(runs)) for model, runs in enumerate(comparison)}
            if (noise_ratio(by_model, "0") is not None) != warned[index]:
                raise SystemExit(f"correctness gate: warnings differ (seeds {seeds}, models {models}); no tables")
            analysis = analyse(by_model, "0", ALPHA)
            verdicts = [effect.verdict in ("better", "worse") for effect in analysis.effects.values()]
            if verdicts != rejected[index].tolist():
                raise SystemExit(f"correctness gate: verdicts differ (seeds {seeds}, models {models}); no tables")
        # With `stop: early`, when the last seed is seen and no model has left before
        critical = critical_early(seeds, models)
        critical[:seeds] = np.inf
        differs, equivalent, _ = stop_early(losses, critical)
        for index, comparison in enumerate(losses.tolist()):
            by_model = {str(model): dict(enumerate(runs)) for model, runs in enumerate(comparison)}
            effects = analyse(by_model, "0", ALPHA, most=seeds).effects.values()
            own = [[effect.verdict in ("better", "worse"), effect.verdict == "equivalent"] for effect in effects]
            if own != np.stack([differs[index], equivalent[index]], axis=1).tolist():
                raise SystemExit(f"correctness gate: early verdicts differ (seeds {seeds}, models {models}); no tables")


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def show(header: list[str], rows: list[list[str]]) -> None:
    print("\n".join(f"| {' | '.join(row)} |" for row in (header, ["---:"] * len(header), *rows)), end="\n\n", flush=True)


def show_tests(random: np.random.Generator, repetitions: int) -> None:
    header = ["seeds", "models"]
    for shared in SHARED:
        for distribution in DISTRIBUTIONS:
            rows, warnings = [], []
            for seeds, models in PLANS:
                found = [
                    compare_tests(random, seeds, models, shared, noise, distribution, repetitions=repetitions)
                    for noise in NOISES
                ]
                plan = [str(seeds), str(models)]
                rows.append([*plan, *(" / ".join(percent(values[name]) for name in TESTS) for values in found)])
                warnings.append([*plan, *(f"{percent(of['warned'])} ({percent(of['unwarned'])})" for of in found)])
            what = f"{distribution} noise, seeds share {shared:.0%} of the variance"
            print(f"Comparisons of equals with a wrong verdict, %: {' / '.join(TESTS)}; {what}\n")
            show([*header, *NOISES], rows)
            print(f"Those with a warning of unequal noise, % (wrong without it: paired); {what}\n")
            show([*header, *NOISES], warnings)
    for shared in SHARED:
        print(f"True differences found, %: {' / '.join(TESTS)}; equal noise, seeds share {shared:.0%} of the variance\n")
        rows = []
        for seeds, models in PLANS:
            cells = [
                compare_tests(random, seeds, models, shared, difference=size, repetitions=repetitions).values()
                for size in (1, 2, 3)
            ]
            rows.append([str(seeds), str(models), *(" / ".join(map(percent, cell)) for cell in cells)])
        show([*header, "1 deviation", "2 deviations", "3 deviations"], rows)


def show_choices(random: np.random.Generator, repetitions: int) -> None:
    bowl = np.square(np.arange(-REACH, REACH + 1.0))
    lists = [
        *((f"(0, {gap:g}, {3 * gap:g})", gap * np.array([0.0, 1, 3])) for gap in GAPS),
        *((f"({gap:g}, 0, {gap:g})", gap * np.array([1.0, 0, 1])) for gap in GAPS[1:]),
    ]
    worst = []
    for correlation in (1.0, 0.5):
        for shared in SHARED:
            for seeds, models in [plan for plan in PLANS if plan[1] != 2]:
                options = {"shared": shared, "correlation": correlation, "repetitions": repetitions}
                found = {name: compare_choices(random, seeds, models, rates, **options) for name, rates in lists}
                searched = {gap: compare_choices(random, seeds, models, gap * bowl, **options)["search"] for gap in GAPS}
                ways = next(iter(found.values()))
                row = [max(values[way]["wrong"] for values in found.values()) for way in ways]
                row.append(max(values["wrong"] for values in searched.values()))
                worst.append([f"{correlation:g}", f"{shared:.0%}", str(seeds), str(models), *map(percent, row)])
                if correlation == 1 and models == 5 and seeds == 5:
                    show_lists(found, searched, shared)
    print("The highest share of comparisons with a wrong verdict, %, over all lists of rates\n")
    show(["correlation", "shared", "seeds", "models", *ways, "search"], worst)

    print("5 seeds or 10, 1 model: models equal at their best rates, but not equally sensitive; wrong verdicts, %\n")
    rows = []
    for baseline, model in (((0, 0, 0), (5, 0, 5)), ((0, 0, 5), (5, 0, 5)), ((1, 0, 1), (3, 0, 3))):
        for correlation in (1.0, 0.5):
            for shared in SHARED:
                row = [str(baseline), str(model), f"{correlation:g}", f"{shared:.0%}"]
                found = [
                    compare_choices(random, seeds, 1, np.array([baseline, model], float), shared, correlation, repetitions)
                    for seeds in (5, 10)
                ]
                rows.append(row + [" / ".join(percent(values[way]["wrong"]) for values in found) for way in ways])
    show(["baseline", "model", "correlation", "shared", *ways], rows)


def show_rules(random: np.random.Generator, repetitions: int) -> None:
    bowl = np.square(np.arange(-REACH, REACH + 1.0))
    for what, moved in (("models have the baseline's best rate", 0), ("their best rate is the next one", 1)):
        print(f"Wrong verdicts, %, the highest over all bowls, where {what} (runs a model, over all bowls)\n")
        rows = []
        for seeds, models in [plan for plan in PLANS if plan[1] != 2]:
            found = []
            for gap in GAPS:
                rates = gap * np.stack([bowl, *[np.roll(bowl, moved)] * models])
                found += [
                    compare_choices(random, seeds, models, rates, shared, repetitions=repetitions // 2) for shared in SHARED
                ]
            cells = {
                way: (max(of[way]["wrong"] for of in found), np.mean([of[way]["runs"] for of in found])) for way in found[0]
            }
            rows.append([str(seeds), str(models), *(f"{percent(wrong)} ({runs:.1f})" for wrong, runs in cells.values())])
        show(["seeds", "models", *cells], rows)


def show_starts(random: np.random.Generator, repetitions: int) -> None:
    print("Ladders: the highest share of larger scales with a wrong verdict, %, over all bowls (runs a model): median / own\n")
    away, rows = np.abs(np.arange(-2 * REACH, 2 * REACH + 1.0)), []
    for seeds, models in [plan for plan in PLANS if plan[1] != 2]:
        row = [str(seeds), str(models)]
        for moves in MOVES:
            found = [
                compare_starts(random, seeds, models, gap * away**power, moves, repetitions)
                for gap in (0.25, 0.5, 1.0)
                for power in (1, 2)
            ]
            worst = {way: max(values[way]["wrong"] for values in found) for way in ("median", "own")}
            runs = {way: np.mean([values[way]["runs"] for values in found]) for way in worst}
            row.append(" / ".join(f"{percent(worst[way])} ({runs[way]:.1f})" for way in worst))
        rows.append(row)
    show(["seeds", "models", *(f"moves by {moves}" for moves in MOVES)], rows)


def wrong_after_looks(random: np.random.Generator, looks: list[int], models: int, repetitions: int = 2000) -> float:
    """The share of comparisons of equals with a wrong verdict, if seeds are added until there is a verdict.

    Args:
        random: the source of all random numbers.
        looks: numbers of seeds of the reports, ascending.
        models: besides the baseline.
        repetitions: number of comparisons.
    """
    losses = random.standard_normal((repetitions, models + 1, looks[-1]))
    return float(np.any([paired(losses[..., :seeds]).any(axis=1) for seeds in looks], axis=0).mean())


def show_looks(random: np.random.Generator, repetitions: int) -> None:
    print("Comparisons of equals with a wrong verdict, %, if seeds are added after reports without one; equal noise\n")
    looks = {"3, 5": [3, 5], "5, 10": [5, 10], "3, 5, 10": [3, 5, 10], "every number from 3 to 10": list(range(3, 11))}
    rows = [
        [name, *(percent(wrong_after_looks(random, seeds, models, repetitions)) for models in (1, 2, 5))]
        for name, seeds in looks.items()
    ]
    show(["seeds of the reports", "1 model", "2 models", "5 models"], rows)


def critical_early(most: int, models: int) -> np.ndarray:
    """The |t| that ends the question about a model, after each number of seeds up to `most`."""
    shares = [share_of_look(seeds, most) for seeds in range(most + 1)]
    return np.array([critical_t(seeds, models, ALPHA * share) if share else np.inf for seeds, share in enumerate(shares)])


def critical_e_process(most: int, models: int, prior: float = 2.0) -> np.ndarray:
    """The same of the Bayes factor `(1 + g)^(-1/2) ((1 + t^2/v) / (1 + t^2/(v (1 + g))))^(n/2)`, with `g = n prior^2`."""
    critical = np.full(most + 1, np.inf)
    for seeds in range(FIRST_LOOK, most + 1):
        g = seeds * prior**2
        ratio = (models / ALPHA * np.sqrt(1 + g)) ** (2 / seeds)
        if ratio < 1 + g:  # else no t is large enough
            critical[seeds] = np.sqrt((seeds - 1) * (ratio - 1) / (1 - ratio / (1 + g)))
    return critical


def stop_early(losses: np.ndarray, critical: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Looks at comparisons after every seed.

    Args:
        losses: `(repetition, model, seed)`, the baseline first.
        critical: by number of seeds.

    Returns:
        `(repetition, model)` each: whether a model was found to differ, whether it was found to be equivalent, and its seeds.
    """
    repetitions, models, most = losses.shape
    differs, equivalent = np.zeros((2, repetitions, models - 1), bool)
    seeds = np.full((repetitions, models - 1), most)
    for count in range(FIRST_LOOK, most + 1):
        seen = losses[..., :count]
        differences = seen[:, 1:] - seen[:, :1]
        error = differences.std(axis=2, ddof=1) / np.sqrt(count)
        is_open = ~(differs | equivalent)
        differs |= is_open & (np.abs(differences.mean(axis=2)) > critical[count] * error)
        floor = seen[:, 0].std(axis=1, ddof=1)[:, None]
        is_inside = np.abs(differences.mean(axis=2)) + critical[count] * error < floor
        equivalent |= is_open & ~differs & is_inside
        seeds = np.where(is_open & (differs | equivalent), count, seeds)
    return differs, equivalent, seeds


def draw_losses(
    random: np.random.Generator, most: int, models: int, difference: float, kind: tuple[str, str, float, bool], repetitions: int
) -> np.ndarray:
    """Draws comparisons of models of which the first differs.

    Args:
        random: the source of all random numbers.
        most, models, repetitions: numbers of seeds, of models besides the baseline, and of comparisons.
        difference: of the first model, in standard deviations of a run.
        kind: a name of `NOISES`, one of `DISTRIBUTIONS`, the shared part of the variance, and whether each seed takes the best
            of three rates, whose true losses are (0, 1, 3).
    """
    noise, distribution, shared, has_choice = kind
    baseline, first, other = NOISES[noise]
    scale = np.array([baseline, first, *[other] * (models - 1)], float)[:, None]
    rates = np.array([0.0, 1.0, 3.0]) if has_choice else np.zeros(1)
    losses = draw(random, (repetitions, models + 1, len(rates), most), shared, distribution) + rates[:, None]
    losses = scale * losses.min(axis=2)
    losses[:, 1] += difference
    return losses


STOPPED = {
    "normal, equal": ("equal", "normal", 0.0, False),
    "shared by seeds": ("equal", "normal", 0.75, False),
    "heavy tails": ("equal", "t3", 0.0, False),
    "one model 4 x": ("one model 4 x", "normal", 0.0, False),
    "baseline 4 x": ("baseline 4 x", "normal", 0.0, False),
    "rates chosen": ("equal", "normal", 0.0, True),
    "skewed, all 4 x": ("all models 4 x", "skewed", 0.0, False),
}


def show_stopping(random: np.random.Generator, repetitions: int) -> None:
    plans = [(most, models) for most in (5, 10, 20) for models in (1, 4)]
    print("Comparisons of equals with a wrong verdict, %: all seeds / stop: early / e-process\n")
    rows = []
    for most, models in plans:
        row = [str(most), str(models)]
        for kind in STOPPED.values():
            losses = draw_losses(random, most, models, 0.0, kind, repetitions)
            ways = [critical(most, models) for critical in (critical_early, critical_e_process)]
            found = [paired(losses), *(stop_early(losses, critical)[0] for critical in ways)]
            row.append(" / ".join(percent(rejected.any(axis=1).mean()) for rejected in found))
        rows.append(row)
    show(["most seeds", "models", *STOPPED], rows)

    print(
        "The first model differs. Found, % (runs of a comparison): all seeds / stop: early / e-process; normal, equal noise\n"
    )
    rows = []
    for most, models in plans:
        row = [str(most), str(models)]
        for difference in (1.0, 2.0, 3.0, 6.0):
            losses = draw_losses(random, most, models, difference, STOPPED["normal, equal"], repetitions)
            cells = [f"{percent(paired(losses)[:, 0].mean())} ({most * (models + 1)})"]
            for critical in (critical_early, critical_e_process):
                differs, _, seeds = stop_early(losses, critical(most, models))
                runs = (seeds.sum(axis=1) + seeds.max(axis=1)).mean()
                cells.append(f"{percent(differs[:, 0].mean())} ({runs:.1f})")
            row.append(" / ".join(cells))
        rows.append(row)
    show(["most seeds", "models", *(f"{difference:g} deviations" for difference in (1, 2, 3, 6))], rows)

    print("Called equivalent, %: a model whose true difference is one noise floor, which is wrong, and the baseline's equal\n")
    rows = []
    for most, models in plans:
        row = [str(most), str(models)]
        for shared in (0.0, 0.75, 0.95):
            kind = ("equal", "normal", shared, False)
            for difference in (1.0, 0.0):
                losses = draw_losses(random, most, models, difference, kind, repetitions)
                row.append(percent(stop_early(losses, critical_early(most, models))[1][:, 0].mean()))
        rows.append(row)
    header = [f"{what}, shared {shared:.0%}" for shared in (0.0, 0.75, 0.95) for what in ("wrong", "right")]
    show(["most seeds", "models", *header], rows)


def screen(rows: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Effects and p of all columns of a design, as `analyse_effects` computes them.

    Args:
        rows: `(row, column)`, -1 or 1.
        losses: `(repetition, row, seed)`.

    Returns:
        `(repetition, column)` each.
    """
    count, seeds = losses.shape[1:]
    residuals = losses - losses.mean(axis=2, keepdims=True) - losses.mean(axis=1, keepdims=True)
    residuals += losses.mean(axis=(1, 2), keepdims=True)
    freedom = (count - 1) * (seeds - 1)
    noise = np.sqrt(np.square(residuals).sum(axis=(1, 2)) / freedom)
    effects = losses.mean(axis=2) @ rows * 2 / count
    t = np.abs(effects) / (2 * noise / np.sqrt(count * seeds))[:, None]
    return effects, 2 * stats.t.sf(t, freedom)


SCREENED = ("normal, equal", "75 % shared", "heavy tails", "skewed", "rows with one factor 4 x", "the same, skewed")


def draw_screening(random: np.random.Generator, rows: np.ndarray, seeds: int, kind: str, repetitions: int) -> np.ndarray:
    """The noise of screenings `(repetition, row, seed)`, of a name in `SCREENED`."""
    distribution = "t3" if kind == "heavy tails" else "skewed" if "skewed" in kind else "normal"
    noise = draw(random, (repetitions, len(rows), seeds), 0.75 if "shared" in kind else 0.0, distribution)
    return noise * np.where(rows[:, :1] > 0, 4.0, 1.0) if "4 x" in kind or kind == "the same, skewed" else noise


def show_screening(random: np.random.Generator, repetitions: int) -> None:
    try:
        import pydoe  # noqa: F401
    except ImportError:
        print("Screenings need pydoe, which is not installed\n")
        return
    plans = [(count, seeds) for count in (4, 7, 15) for seeds in (2, 3)]
    designs = {count: make_design([f"f{index}" for index in range(count)]).rows for count, _ in plans}
    for count, seeds in plans:  # the formulas are those of the package
        losses = 4 + draw_screening(random, designs[count], seeds, "normal, equal", 20)
        names = [f"f{index}" for index in range(count)]
        for index, p in enumerate(screen(designs[count], losses)[1]):
            main = analyse_effects(make_design(names), losses[index])["main"]
            if not np.allclose(p, [effect["p"] for effect in main.values()]):
                raise SystemExit(f"correctness gate: effects differ ({count} factors, {seeds} seeds); no tables")
    print("Screenings of factors without effect in which any is found, %\n")
    rows = []
    for count, seeds in plans:
        design = designs[count]
        wrong = [
            holm(screen(design, draw_screening(random, design, seeds, kind, repetitions))[1][:, :-1]).any(axis=1).mean()
            for kind in SCREENED
        ]
        rows.append([str(count), str(seeds), str(len(design) * seeds), *map(percent, wrong)])
    show(["factors", "seeds", "runs", *SCREENED], rows)
    print("A factor with this effect is found, %, in a screening / alone in a comparison of as many seeds as the runs allow\n")
    rows = []
    for count, seeds in plans:
        design = designs[count]
        row = [str(count), str(seeds), str(len(design) * seeds)]
        alone = len(design) * seeds // (count + 1)  # one factor at a time: the same runs, shared by all models and the baseline
        for effect in (0.5, 1.0, 2.0):
            losses = draw_screening(random, design, seeds, "normal, equal", repetitions)
            losses = losses - effect * (design[:, :1] > 0)
            found = holm(screen(design, losses)[1][:, :-1])[:, 0].mean()
            single = draw(random, (repetitions, count + 1, alone), 0.0)
            single[:, 1] -= effect
            row.append(f"{percent(found)} / {percent(paired(single)[:, 0].mean())}")
        rows.append(row)
    show(["factors", "seeds", "runs", *(f"{effect:g} deviations" for effect in (0.5, 1, 2))], rows)


CONFIRMING = 8  # the most seeds of a confirmation, which stops early


def confirm(
    random: np.random.Generator, rows: np.ndarray, seeds: int, effect: float, kind: str, repetitions: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Screens factors of which the first lowers the loss by `effect`, and compares what survives with the baseline.

    Returns:
        `(repetition,)` each: the verdict on the survivors together, 1 for better, -1 for worse and 0 for none; whether they are
        better and the first factor is among them; and all runs.
    """
    losses = draw_screening(random, rows, seeds, kind, repetitions) - effect * (rows[:, :1] > 0)
    effects, p = screen(rows, losses)
    survivors = holm(p[:, :-1]) & (effects[:, :-1] < 0)
    has_any = survivors.any(axis=1)
    distribution = "t3" if kind == "heavy tails" else "skewed" if "skewed" in kind else "normal"
    new = draw(random, (repetitions, 2, CONFIRMING), 0.75 if "shared" in kind else 0.0, distribution)
    if "4 x" in kind or kind == "the same, skewed":
        new[:, 1] *= np.where(survivors[:, :1], 4.0, 1.0)
    new[:, 1] -= effect * survivors[:, :1]
    differs, _, used = stop_early(new, critical_early(CONFIRMING, 1))
    verdict = np.where(has_any & differs[:, 0], np.sign(-paired_t(new)[:, 0]), 0)
    is_found = survivors[:, 0] & (verdict > 0)
    return verdict, is_found, rows.shape[0] * seeds + np.where(has_any, 2 * used[:, 0], 0)


def show_confirmed(random: np.random.Generator, repetitions: int) -> None:
    try:
        designs = {count: make_design([f"f{index}" for index in range(count)]).rows for count in (4, 7, 14)}
    except ImportError as error:
        print(f"{error}\n")
        return
    print("Screenings without any effect that end with a verdict of better or worse after their confirmation, %\n")
    plans = [(count, seeds) for count in designs for seeds in (2, 3)]
    rows = []
    for count, seeds in plans:
        wrong = [(confirm(random, designs[count], seeds, 0.0, kind, repetitions)[0] != 0).mean() for kind in SCREENED]
        rows.append([str(count), str(seeds), *map(percent, wrong)])
    show(["factors", "seeds", *SCREENED], rows)
    print(
        "One factor has an effect. Confirmed as better, % (mean number of runs); and the runs with which a comparison of every "
        "factor with the baseline finds it as often, normal, equal noise, all with 5 % of wrong verdicts at most\n"
    )
    rows = []
    for count, seeds in plans:
        row = [str(count), str(seeds)]
        for effect in (0.5, 1.0, 2.0):
            _, is_found, runs = confirm(random, designs[count], seeds, effect, "normal, equal", repetitions)
            found = is_found.mean()
            alone = next(n for n in range(3, 1000) if alone_finds(random, n, count, effect, repetitions // 5) >= found)
            row.append(f"{percent(found)} ({runs.mean():.0f}); {alone * (count + 1)}")
        rows.append(row)
    show(["factors", "seeds", *(f"{effect:g} deviations" for effect in (0.5, 1, 2))], rows)


def alone_finds(random: np.random.Generator, seeds: int, models: int, effect: float, repetitions: int) -> float:
    """How often a comparison finds the one model that is better."""
    losses = draw(random, (repetitions, models + 1, seeds), 0.0)
    losses[:, 1] -= effect
    return float((paired(losses)[:, 0] & (paired_t(losses)[:, 0] < 0)).mean())


def show_lists(found: dict[str, dict], searched: dict[float, dict], shared: float) -> None:
    print(
        f"5 seeds, 5 models, correlation 1, seeds share {shared:.0%}: wrong verdicts, % (runs a model; deviation of a mean)\n"
    )
    rows = []
    for name, values in found.items():
        cells = [f"{percent(of['wrong'])} ({of['runs']:.0f}; {of['deviation']:.2f})" for of in values.values()]
        rows.append([name, *cells])
    show(["rates", *values], rows)
    cells = [f"{percent(of['wrong'])} ({of['runs']:.1f}; {of['deviation']:.2f})" for of in searched.values()]
    show(["g", *(f"{gap:g}" for gap in searched)], [["search", *cells]])


PARTS = {
    "tests": show_tests,
    "choices": show_choices,
    "rules": show_rules,
    "starts": show_starts,
    "looks": show_looks,
    "stopping": show_stopping,
    "screening": show_screening,
    "confirmed": show_confirmed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10_000, help="comparisons simulated for each figure")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="which tables to make")
    arguments = parser.parse_args()
    repetitions = arguments.repetitions

    print(
        f"nlq {modeling_nlq.__version__}, python {platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__}"
    )
    error = np.sqrt(ALPHA * (1 - ALPHA) / repetitions)
    print(f"{repetitions:,} comparisons a figure; a share of 5 % has a standard error of {error:.2%}\n")
    gate()
    for name in arguments.parts:
        PARTS[name](np.random.default_rng(0), repetitions)


if __name__ == "__main__":
    main()

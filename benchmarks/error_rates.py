"""How often the rules of comparisons, ladders and screenings are wrong, by simulations with a known truth.

    python benchmarks/error_rates.py

Prints the table of `docs/statistics.md`, with two standard errors. 5 x 4 stands for five seeds and four models besides
the baseline. The rules are written from their formulas; a test compares them with those of `nlq compare`.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np
from scipy import linalg, special, stats

from modeling_nlq.training.comparison.inference import alpha_spent, noise_range, smallest_difference


ALPHA = 0.05
PARTS = 10  # of the test text, after neighbours were merged


def draw(random: np.random.Generator, kind: str, *shape: int) -> np.ndarray:
    """Draws noise with the mean 0, and with the standard deviation 1 but for "lost" runs."""
    normal = random.standard_normal(shape)
    if kind == "skewed":  # lognormal
        return (np.exp(normal) - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e)
    return normal + 10 * (random.random(shape) < 0.1) - 1 if kind == "lost" else normal


def p_of_t(value: np.ndarray, error: np.ndarray, freedom: np.ndarray | float) -> np.ndarray:
    return 2 * special.stdtr(freedom, -np.abs(value) / error)


def p_of_seeds(differences: np.ndarray) -> np.ndarray:
    return stats.ttest_1samp(differences, 0, axis=-1).pvalue


def p_of_comparison(differences: np.ndarray) -> np.ndarray:
    """The larger p of seeds, and of seeds and parts, from differences `(..., seed, part)`."""
    seeds, parts = differences.shape[-2:]
    by_seed, by_part = differences.mean(-1, keepdims=True), differences.mean(-2, keepdims=True)
    mean = differences.mean((-1, -2), keepdims=True)
    deviations = (by_seed - mean, by_part - mean, differences - by_seed - by_part + mean)
    freedoms = np.array([seeds - 1, parts - 1, (seeds - 1) * (parts - 1)])
    squares = np.stack([(part**2).mean((-1, -2)) for part in deviations], axis=-1) * seeds * parts / freedoms
    variance = squares @ [1, 1, -1]
    freedom = np.maximum(variance**2 / (squares**2 @ (1 / freedoms)), freedoms.min())
    p = p_of_t(mean[..., 0, 0], np.sqrt(np.abs(variance) / seeds / parts), freedom)
    return np.maximum(p_of_seeds(by_seed[..., 0]), np.where(variance > squares[..., 0], p, 0))


def p_of_trend(parts: list[np.ndarray]) -> np.ndarray:
    """The sum over scales of means over seeds, from weighted differences `(..., seed)` of each scale."""
    variances = np.stack([part.var(-1, ddof=1) / part.shape[-1] for part in parts], axis=-1)
    freedoms = np.array([part.shape[-1] - 1.0 for part in parts])
    satterthwaite = variances.sum(-1) ** 2 / (variances**2 @ (1 / freedoms))
    mean = sum(part.mean(-1) for part in parts)
    return p_of_t(mean, np.sqrt(variances.sum(-1)), (satterthwaite + freedoms.min()) / 2)


def p_of_screening(losses: np.ndarray, design: np.ndarray, is_welch: bool = True) -> np.ndarray:
    """The main effects of `design` `(row, factor)` from losses `(..., row, seed)`."""
    rows, seeds = losses.shape[-2:]
    variances = (losses - losses.mean(-2, keepdims=True)).var(-1, ddof=1)
    freedom, total = (rows - 1) * (seeds - 1), variances.sum(-1, keepdims=True)
    if is_welch:
        freedom = np.minimum(freedom, total**2 / (variances**2 / (seeds + 1)).sum(-1, keepdims=True) - 2)
    return p_of_t(losses.mean(-1) @ design * 2 / rows, np.sqrt(total / (rows - 1) * 4 / rows / seeds), freedom)


def holm_rejects_any(p: np.ndarray) -> np.ndarray:
    return p.min(-1) * p.shape[-1] < ALPHA


def simulate(random: np.random.Generator, repetitions: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each claim with its outcome in every repetition."""

    def noise(kind: str, *shape: int) -> np.ndarray:
        return draw(random, kind, repetitions, *shape)

    for what, seeds, models, of_base, of_models, scale in (
        ("normal noise", 5, 5, "normal", "normal", 1),
        ("normal noise, models 4-fold", 5, 5, "normal", "normal", 4),
        ("skewed noise", 5, 5, "skewed", "skewed", 1),
        ("skewed noise, models 4-fold", 5, 5, "skewed", "skewed", 4),
        ("skewed noise, models 4-fold", 10, 9, "skewed", "skewed", 4),
        ("one baseline run in ten 10 deviations worse", 5, 1, "lost", "normal", 1),
        ("one baseline run in ten 10 deviations worse", 10, 5, "lost", "normal", 1),
    ):
        p = p_of_seeds(scale * noise(of_models, models, seeds) - noise(of_base, 1, seeds))
        yield f"wrong: {what}, {seeds} x {models}", holm_rejects_any(p)

    def of_parts(seeds: int, models: int, text: float, rest: float, length: int = 1) -> np.ndarray:
        documents = np.repeat(noise("normal", models, 1, PARTS // length), length, axis=-1) * math.sqrt(PARTS / length)
        own = rest * math.sqrt(PARTS) * noise("normal", models, seeds, PARTS)
        return noise("normal", models, seeds, 1) + text * documents + own

    cases = list(itertools.product((3, 5, 10), (1, 4), (0, 0.3, 1, 3), (0, 0.5, 2)))
    worst = max((holm_rejects_any(p_of_comparison(of_parts(*case))) for case in cases), key=np.mean)
    yield f"wrong: independent parts of the text, worst of {len(cases)} settings", worst
    parts = of_parts(5, 4, 1, 0.5)
    skewed = (4 * noise("skewed", 4, 5, 1) - noise("skewed", 1, 5, 1)) * np.ones(PARTS)
    for what, early in (("text as noisy as seeds", parts), ("skewed noise, models 4-fold", skewed)):
        least = {seeds: p_of_comparison(early[..., :seeds, :]).min(-1) * 4 for seeds in (3, 4, 5)}
        looks = [p < ALPHA * alpha_spent(seeds, 5) for seeds, p in least.items()]
        yield f"wrong: {what}, `stop: early`, 5 x 4", np.any(looks, axis=0)
    yield "wrong: text as noisy as seeds, p of seeds alone, 5 x 4", holm_rejects_any(p_of_seeds(parts.mean(-1)))
    for words, length in (("fifth", 2), ("half", 5)):
        p = p_of_comparison(of_parts(5, 1, 3, 0.5, length))
        yield f"wrong: parts alike over a {words} of the text, 5 x 1", holm_rejects_any(p)

    for what, kind, models, scales, scale in (
        ("normal noise, one of two scales 4-fold", "normal", 1, (1, 4), 1),
        ("skewed noise, models 4-fold, four scales", "skewed", 5, (1, 1, 1, 1), 4),
        ("skewed noise, models 4-fold, one of two scales 4-fold", "skewed", 5, (1, 4), 4),
    ):
        weights = np.arange(len(scales)) - (len(scales) - 1) / 2
        differences = [of * (scale * noise(kind, models, 5) - noise(kind, 1, 5)) for of in weights * scales]
        yield f"wrong trends: {what}, 5 x {models}", holm_rejects_any(p_of_trend(differences))

    for what, noisy in (("equal noise", 0), ("two of 32 rows 10-fold", 2)):
        losses = np.where(np.arange(32) < noisy, 10, 1)[:, None] * noise("normal", 32, 2)
        for rule, is_welch in (("pooled", False), ("Welch's", True)):
            p = p_of_screening(losses, linalg.hadamard(32)[:, 1:15], is_welch)
            yield f"wrong screenings: {what}, {rule} freedom", holm_rejects_any(p)

    for rest in (0, 1):
        p = p_of_comparison(math.sqrt(2) * of_parts(5, 4, 0, rest) + smallest_difference(5, 4, math.sqrt(1 + rest)))
        yield f"found: a plan's smallest difference, noise of parts {rest}, 5 x 4", p[:, 0] * 4 < ALPHA
    (low, high), floor = noise_range(4), noise("normal", 5).std(-1, ddof=1)
    yield f"the true noise is {low:.2f} to {high:.2f} times that of 5 runs", (low * floor < 1) & (high * floor > 1)
    for true in (1, 2):
        differences = true + noise("normal", 5) - noise("normal", 5)
        sizes = np.abs(differences.mean(-1)[p_of_seeds(differences) * 4 < ALPHA])
        yield f"too large: estimate with a verdict, truly {true}, 5 x 4", sizes / true - 1
    differences = 2 + noise("normal", 5)
    end = abs(differences.mean(-1)) + stats.t.isf(ALPHA, 4) * differences.std(-1, ddof=1) / math.sqrt(5)
    yield "wrong: equivalent, where the true difference is the margin, 5 x 1", end < 2


def main(repetitions: int = 20_000) -> None:
    print("| claim | simulated, % |\n|---|---:|")
    for claim, outcomes in simulate(np.random.default_rng(0), repetitions):
        error = 200 * outcomes.std() / math.sqrt(len(outcomes))
        print(f"| {claim} | {100 * outcomes.mean():.1f}±{error:.1f} |", flush=True)


if __name__ == "__main__":
    main()

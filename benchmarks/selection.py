"""Simulates comparisons of equal models: how often a difference is found, and how often the intervals hold.

    python benchmarks/selection.py
    python benchmarks/selection.py --repetitions 1000

The statistics are those of `analyse`. All models are equal, so every "better" and "worse" is wrong, and an interval holds if it
contains 0. Losses are normally distributed. In the first table no learning rate is chosen. In the others every model, and the
baseline, chooses among three rates by one run each, as a sweep does. The true losses of the rates lie 0, g and 3 g standard
deviations of a run above the best, and the reported losses are those of the chosen rate. A comparison gets a warning if the gap
that `rate_gap` measures is below `CLEAR_RATE_GAP` for any model. In the last table the runs of one seed, at any rate and of any
model, share three quarters of their variance, as happens if data and initial weights are the same.
"""

import argparse
import platform
from dataclasses import dataclass

import numpy as np
import scipy

import modeling_nlq
from modeling_nlq.training.comparison.statistics import CLEAR_RATE_GAP, analyse, rate_gap


MEAN, DEVIATION = 3.5, 0.01  # nats; nothing depends on them
GAPS = (0.0, 1.0, 1.5, 2.0, 3.0, 5.0)
PLANS = ((3, 1), (5, 1), (5, 5))  # seeds, models besides the baseline


@dataclass(frozen=True)
class Shares:
    """Shares of the simulated comparisons, and of their intervals.

    Attributes:
        wrong: comparisons with a wrong verdict for any model.
        covered: intervals that hold.
        least_covered: intervals that hold, for the model where they hold least often.
        warned: comparisons with a warning that the best rate is not clear.
        wrong_without_warning: comparisons with a wrong verdict and no warning.
    """

    wrong: float
    covered: float
    least_covered: float
    warned: float
    wrong_without_warning: float


def simulate(
    seeds: int,
    models: int,
    gap: float | None = None,
    shared: float = 0.0,
    noise: tuple[float, ...] = (),
    repetitions: int = 2000,
    random_seed: int = 0,
) -> Shares:
    """Simulates comparisons of equal models.

    Args:
        seeds: number of reported runs of each model.
        models: number of models besides the baseline.
        gap: g, in standard deviations of a run; `None` if no rate is chosen.
        shared: the part of a run's variance that all runs of its seed have in common.
        noise: standard deviation of each model, the baseline first; by default 1 for all.
        repetitions: number of comparisons.
        random_seed: the seed of all random numbers.
    """
    random = np.random.default_rng(random_seed)
    scale = np.array(noise or [1.0] * (models + 1))[:, None]

    def draw(runs: int) -> np.ndarray:
        """Draws losses `(repetition, model, run)` without the effect of the rate."""
        common = random.standard_normal((repetitions, 1, runs))
        own = random.standard_normal((repetitions, models + 1, runs))
        return scale * (np.sqrt(shared) * common + np.sqrt(1 - shared) * own)

    reported = draw(seeds)
    sweep = np.empty((repetitions, models + 1, 0))
    if gap is not None:
        rates = np.array([0.0, gap, 3 * gap])
        # The common part of the sweep's one seed is the same at each rate, so it does not affect the choice
        sweep = rates + np.sqrt(1 - shared) * scale * random.standard_normal((repetitions, models + 1, 3))
        reported += rates[sweep.argmin(axis=2)][..., None]
    wrong, warned, held = np.zeros(repetitions, bool), np.zeros(repetitions, bool), np.zeros((repetitions, models), bool)
    for index, losses in enumerate((MEAN + DEVIATION * reported).tolist()):
        analysis = analyse({str(model): dict(enumerate(runs)) for model, runs in enumerate(losses)}, "0")
        effects = list(analysis.effects.values())
        wrong[index] = any(effect.verdict in ("better", "worse") for effect in effects)
        held[index] = [low <= 0 <= high for low, high in (effect.loss_improvement_interval for effect in effects)]
        gaps = [rate_gap(MEAN + DEVIATION * tried, runs) for tried, runs in zip(sweep[index], losses)]
        warned[index] = any(found is not None and found < CLEAR_RATE_GAP for found in gaps)
    return Shares(wrong.mean(), held.mean(), held.mean(axis=0).min(), warned.mean(), (wrong & ~warned).mean())


def gate(repetitions: int) -> None:
    """Checks the statistics before any table is printed.

    Raises:
        SystemExit: if the paired t-test of one model, which should be exact, is not.
    """
    found = simulate(5, 1, repetitions=repetitions)
    tolerance = 4 * np.sqrt(0.05 * 0.95 / repetitions)
    if abs(found.wrong - 0.05) > tolerance or abs(found.covered - 0.95) > tolerance:
        raise SystemExit(
            f"correctness gate: one model is wrong in {found.wrong:.1%}, covered in {found.covered:.1%}; no tables"
        )


def show(header: list[str], rows: list[list[str]]) -> None:
    print("\n".join(f"| {' | '.join(row)} |" for row in (header, ["---:"] * len(header), *rows)), end="\n\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5000, help="comparisons simulated for each figure")
    repetitions = parser.parse_args().repetitions

    print(
        f"nlq {modeling_nlq.__version__}, python {platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__}"
    )
    error = np.sqrt(0.05 * 0.95 / repetitions)
    print(f"{repetitions:,} comparisons a figure; a share of 5 % has a standard error of {error:.2%}\n")
    gate(repetitions)

    print("No rate is chosen\n")
    rows = []
    for seeds, models in ((3, 1), (3, 2), (3, 5), (5, 1), (5, 2), (5, 5)):
        for name, noise in (
            ("all equal", ()),
            ("one model 4 x", (1.0, 4.0, *[1.0] * (models - 1))),
            ("baseline 4 x", (4.0, *[1.0] * models)),
        ):
            found = simulate(seeds, models, noise=noise, repetitions=repetitions)
            shares = [f"{share:.1%}" for share in (found.wrong, found.covered, found.least_covered)]
            rows.append([str(seeds), str(models), name, *shares])
    show(["seeds", "models", "noise", "wrong", "intervals hold", "of the worst model"], rows)

    for shared in (0.0, 0.75):
        print(f"A rate is chosen; runs of a seed share {shared:.0%} of their variance\n")
        rows = []
        for seeds, models in PLANS:
            for gap in GAPS:
                found = simulate(seeds, models, gap, shared, repetitions=repetitions)
                shares = (found.wrong, found.covered, found.warned, found.wrong_without_warning)
                rows.append([str(seeds), str(models), f"{gap:g}", *(f"{share:.1%}" for share in shares)])
        show(["seeds", "models", "g", "wrong", "intervals hold", "warned", "wrong, no warning"], rows)


if __name__ == "__main__":
    main()

"""Simulates ladders of scales with a known truth: how often intervals hold, and how often a verdict on the trend is wrong.

    python benchmarks/trend.py
    python benchmarks/trend.py --repetitions 200

The statistics are those of `analyse_trend`. The baseline follows `L(C) = 2 + 1.6 (C / C_top)^-0.12` nats at four scales from
1e15 to 1.8e17 FLOPs, so its loss falls from 5.0 to 3.6. The noise of a run is a share of its loss, 0.3 or 1 %, and the runs of
one seed at one scale share none or three quarters of its variance. In the first table the model's loss is the baseline's with
M times the compute. An interval without an end counts as open there. Some of its baselines follow no such law: their loss falls
faster and faster, from 4.2 to 2.4 nats. In the other tables the models' improvement is a straight line in percent of the loss.
"""

import argparse
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy
from selection import DISTRIBUTIONS

import modeling_nlq
from modeling_nlq.training.comparison.trend import Scale, Trend, analyse_trend


FLOPS = np.logspace(15, 17.25, 4)
VERDICTS = ("grows", "shrinks", "cannot tell")
EQUAL = (1.0, 1.0, 1.0, 1.0)


def loss(flops: np.ndarray) -> np.ndarray:
    """The baseline's law, in nats."""
    return 2.0 + 1.6 * (flops / FLOPS[-1]) ** -0.12


def steep_loss(flops: np.ndarray) -> np.ndarray:
    """A baseline that follows no law, in nats: its log loss is a parabola of log compute, as in small models of text."""
    decades = np.log10(flops / FLOPS[0])
    return 4.24 * np.exp(-0.14 * decades - 0.054 * decades**2)


def with_multiplier(multiplier: float, of: Callable[[np.ndarray], np.ndarray] = loss) -> Callable[[np.ndarray], np.ndarray]:
    """The improvement in percent, by FLOPs, of a model that is as good as the baseline with so many times its compute."""
    return lambda flops: 100 * (1 - of(multiplier * flops) / of(flops))


def with_change(top: float, change: float) -> Callable[[np.ndarray], np.ndarray]:
    """An improvement of `top` percent at the largest scale, which has changed by `change` percent since the smallest."""
    decades = np.log10(FLOPS[-1] / FLOPS[0])
    return lambda flops: top + change * np.log10(flops / FLOPS[-1]) / decades


@dataclass(frozen=True)
class Noise:
    """The noise of runs.

    Attributes:
        share: standard deviation of a run, in percent of its loss.
        shared: the part of its variance that runs of one seed at one scale have in common.
        by_scale: factors of `share`.
        distribution: a name of `DISTRIBUTIONS`.
        of_models: a factor of `share` for all models but the baseline.
    """

    share: float = 0.3
    shared: float = 0.0
    by_scale: tuple[float, ...] = EQUAL
    distribution: str = "normal"
    of_models: float = 1.0


def simulate(
    improvement: Callable[[np.ndarray], np.ndarray],
    seeds: int,
    noise: Noise,
    models: int,
    repetitions: int,
    of: Callable[[np.ndarray], np.ndarray] = loss,
) -> list[Trend]:
    """Draws ladders and analyses them, always from the same random numbers.

    Args:
        improvement: of every model in percent, by FLOPs.
        seeds: of each model at each scale.
        noise: of the runs.
        models: besides the baseline.
        repetitions: number of ladders.
        of: the loss of the baseline, by FLOPs.
    """
    random = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return DISTRIBUTIONS[noise.distribution](random, shape)

    found = []
    names = [str(model) for model in range(models + 1)]
    for _ in range(repetitions):
        scales = []
        for index, flops in enumerate(FLOPS):
            factors = np.array([1.0, *[1 - improvement(flops) / 100] * models])[:, None]
            errors = np.sqrt(noise.shared) * draw(1, seeds) + np.sqrt(1 - noise.shared) * draw(models + 1, seeds)
            errors[1:] *= noise.of_models
            values = of(flops) * factors * (1 + noise.share / 100 * noise.by_scale[index] * errors)
            losses = {name: dict(enumerate(row)) for name, row in zip(names, values.tolist())}
            scales.append(Scale(str(index), dict.fromkeys(names, flops), losses))
        found.append(analyse_trend(scales, "0"))
    return found


def holds(interval: tuple[float | None, float | None], truth: float) -> bool:
    """Whether an interval contains the truth; a missing end is open."""
    low, high = interval
    return (low is None or low <= truth) and (high is None or truth <= high)


def shares(trends: list[Trend]) -> dict[str, float]:
    """The share of ladders in which any model has each verdict."""
    counts = Counter(verdict for trend in trends for verdict in {model.verdict for model in trend.models.values()})
    return {verdict: counts[verdict] / len(trends) for verdict in VERDICTS}


def wrong(trends: list[Trend]) -> float:
    """The share of ladders in which any model grows or shrinks."""
    return float(np.mean([any(model.verdict in VERDICTS[:2] for model in trend.models.values()) for trend in trends]))


def covered(trends: list[Trend], multiplier: float) -> np.ndarray:
    """The share of the multiplier's intervals that hold, by scale."""
    ladders = [trend for trend in trends if not trend.multiplier_note]
    steps = [[step.multiplier_interval for step in trend.models["1"].steps.values()] for trend in ladders]
    return np.mean([[holds(interval, multiplier) for interval in row] for row in steps], axis=0)


def gate(repetitions: int) -> None:
    """Checks the statistics before any table is printed.

    Raises:
        SystemExit: if losses without noise do not give the multiplier, or intervals hold too seldom.
    """
    for multiplier in (0.8, 1.0, 1.3):
        (trend,) = simulate(with_multiplier(multiplier), 2, Noise(0.0), 1, 1)
        errors = [abs(step.multiplier / multiplier - 1) for step in trend.models["1"].steps.values()]
        if max(errors) > 0.01:  # of the interpolation
            raise SystemExit(
                f"correctness gate: a multiplier of {multiplier} without noise is off by {max(errors):.1%}; no tables"
            )
    lowest = 0.95 - 4 * np.sqrt(0.05 * 0.95 / repetitions)
    found = covered(simulate(with_multiplier(1.3), 3, Noise(), 1, repetitions), 1.3)
    if found.min() < lowest:
        raise SystemExit(f"correctness gate: intervals of the multiplier hold in {found.min():.1%}; no tables")


def show(title: str, header: list[str], rows: list[list[str]]) -> None:
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---:"] * len(header), *rows)]
    print("\n".join([title, "", *lines]), end="\n\n", flush=True)


def show_multipliers(repetitions: int) -> None:
    noises = {f"{share:g} %, {shared:.0%} shared": Noise(share, shared) for shared in (0.0, 0.75) for share in (0.3, 1.0)}
    unlike = {
        "0.3 %, largest scale 4 x": Noise(by_scale=(1.0, 1.0, 1.0, 4.0)),
        "0.3 %, heavy tails": Noise(distribution="t3"),
        "0.3 %, none shared, no law": Noise(),
        "1 %, none shared, no law": Noise(1.0),
    }
    rows = []
    for multiplier in (1.0, 1.3):
        for seeds in (3, 5):
            for name, noise in (noises if multiplier == 1 else noises | unlike).items():
                of = steep_loss if "no law" in name else loss
                trends = simulate(with_multiplier(multiplier, of), seeds, noise, 1, repetitions, of)
                models = [trend.models["1"] for trend in trends]
                at_scales = covered(trends, multiplier)
                ends = [list(model.steps.values())[-1].multiplier_interval for model in models]
                low, high = np.median([(low or 0.0, high or np.inf) for low, high in filter(None, ends)], axis=0)
                slopes = [model.multiplier_slope_interval for model in models if model.multiplier_slope_interval]
                row = [f"{multiplier:g}", str(seeds), name, f"{at_scales.min():.1%}", f"{at_scales[-1]:.1%}"]
                row += [f"{low:.2f} to {high:.2f}", f"{np.mean([holds(slope, 0.0) for slope in slopes]):.1%}"]
                rows.append([*row, f"{wrong(trends):.1%}", f"{np.mean([trend.law is None for trend in trends]):.1%}"])
    header = ["M", "seeds", "noise", "interval of M holds, worst scale", "top scale", "median interval, top scale"]
    show("Multiplier", [*header, "slope of log10 M holds", "grows or shrinks", "law refused"], rows)


def show_errors(repetitions: int) -> None:
    rows = []
    for seeds in (3, 5):
        for models in (1, 5):
            for name, noise in (
                ("equal", Noise()),
                ("smallest scale 4 x", Noise(by_scale=(4.0, 1.0, 1.0, 1.0))),
                ("largest scale 4 x", Noise(by_scale=(1.0, 1.0, 1.0, 4.0))),
                ("heavy tails", Noise(distribution="t3")),
                ("skewed, models 4 x", Noise(distribution="skewed", of_models=4.0)),
            ):
                trends = simulate(with_change(1.0, 0.0), seeds, noise, models, repetitions)
                slopes = [model.slope_interval for trend in trends for model in trend.models.values()]
                held = np.mean([holds(slope, 0.0) for slope in slopes])
                rows.append([str(seeds), str(models), name, f"{wrong(trends):.1%}", f"{held:.1%}"])
    show("No slope", ["seeds", "models", "noise", "grows or shrinks, any model", "intervals of the slope that hold"], rows)


def show_verdicts(repetitions: int) -> None:
    rows = []
    for share in (0.3, 1.0):
        for seeds in (3, 5):
            for top, change in ((0.0, 0.0), (2.0, 0.0), (2.0, 0.5), (2.0, 1.0), (2.0, -1.0), (2.0, 2.0)):
                found = shares(simulate(with_change(top, change), seeds, Noise(share, 0.75), 1, repetitions))
                row = [f"{share:g} %", str(seeds), f"{top:g} %", f"{change:+g} %" if change else "0"]
                rows.append([*row, *(f"{found[verdict]:.1%}" for verdict in VERDICTS)])
    header = ["noise", "seeds", "improvement at the top", "change over the ladder", *VERDICTS]
    show("Verdicts, three quarters of the variance shared", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=2000, help="ladders simulated for each row")
    repetitions = parser.parse_args().repetitions

    print(
        f"nlq {modeling_nlq.__version__}, python {platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__}"
    )
    error = np.sqrt(0.05 * 0.95 / repetitions)
    print(f"{repetitions:,} ladders a row; a share of 5 % has a standard error of {error:.2%}\n")
    gate(repetitions)
    show_multipliers(repetitions)
    show_errors(repetitions)
    show_verdicts(repetitions)


if __name__ == "__main__":
    main()

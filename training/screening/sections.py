"""The report of a screening, made from its results alone: sections, figures, and the outcome for terminals."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.figure import Figure
from scipy import stats

from ..comparison.figures import BASELINE, save, scale_percent
from ..comparison.outcome import Outcome
from ..comparison.render import Section, bullets, figure, markdown_table, to_markdown, to_page, warning
from ..comparison.report import first_warnings, outcome_sentence, verdicts
from ..comparison.tables import Rows, number, p_value, with_interval
from ..files import write_text
from ..text import align
from .design import RATE, Design
from .effects import Effects, standard_error
from .plan import BEST, OFF


@dataclass(frozen=True)
class Factor:
    """A factor: what it changes, and how many parameters it adds."""

    change: dict[str, Any]
    parameters: int


@dataclass(frozen=True)
class ScreeningOutcome:
    """The results of a screening, in `results.json`.

    Attributes:
        name, command, comparison: as in `Outcome`.
        factors: the factors by name.
        design: the design.
        rates: the low and the high learning rate.
        runs_one_at_a_time: how many runs a comparison of each factor alone takes.
        alpha: the level of the tests.
        effects: those of the factors; `None` if a run diverged.
        diverged: the rows that did.
        runs: the results of the runs of the design.
        confirmation: those of the comparison of `best` with `off`; `None` if no factor survived.
    """

    name: str
    command: str
    comparison: dict[str, Any]
    factors: dict[str, Factor]
    design: Design
    rates: list[float]
    runs_one_at_a_time: int
    alpha: float
    effects: Effects | None
    diverged: list[str]
    runs: Outcome
    confirmation: Outcome | None = None


_NO_VERDICT = (
    "Main effects are averages over all other factors and over two learning rates. They are no verdict: two rates misjudge a "
    "change that moves the best one. The verdict is that of the confirmation, where each model has its own rate."
)


_INTERACTIONS = (
    "The design cannot separate the interactions in one row; the number is their sum. It is positive if the loss is lower with "
    "both on or both off than with one alone. p is not corrected."
)


def write_report(results: ScreeningOutcome, folder: Path) -> None:
    """Writes `results.md`, `figures/*.png` and `report.html`, each whole or not at all."""
    figures = []
    if results.effects is not None:
        left_out = " The options of a choice are left out, for their intervals are wider." * bool(results.design.choices)
        for name, title, caption, draw in (
            ("effects", "Effects", _EFFECTS_CAPTION, draw_effects),
            ("half-normal", "Half-normal plot", _HALF_NORMAL_CAPTION + left_out, draw_half_normal),
        ):
            save(draw(results), folder / "figures" / f"{name}.png")
            figures.append(figure(title, name, caption))
    sections = _sections(results, figures)
    write_text(folder / "results.md", to_markdown(results.name, sections))
    write_text(folder / "report.html", to_page(results.name, sections, folder))


def describe(results: ScreeningOutcome) -> str:
    """The outcome for a terminal."""
    rows = effect_rows(results)
    table = align([list(rows[0]), *(list(row.values()) for row in rows)], right=False) if rows else []
    return "\n".join([*table, *screening_outcome(results), *(f"warning: {text}" for text in limits_of(results))])


def screening_outcome(results: ScreeningOutcome) -> list[str]:
    """What was found, in a few sentences."""
    if results.effects is None:
        return [f"No effects: {', '.join(results.diverged)} diverged, and the design needs all runs."]
    survivors = results.effects.survivors
    if not survivors:
        return ["No factor lowers the loss by more than noise, so there was nothing to confirm."]
    return [f"Survivors: {', '.join(survivors)}.", f"Confirmation: {outcome_sentence(results.confirmation.largest)}"]


def warnings_of(results: ScreeningOutcome) -> list[str]:
    """What a reader must know first: of the runs of the design, and of those that confirm."""
    parts = {"Screening": results.runs, "Confirmation": results.confirmation}
    return [f"{part}: {text}" for part, found in parts.items() if found for text in first_warnings(found)]


def limits_of(results: ScreeningOutcome) -> list[str]:
    """What the main effects do not say."""
    effects = results.effects
    if effects is None or effects.p_of_interactions >= results.alpha:
        return [_NO_VERDICT]
    noise = math.sqrt(np.mean([error**2 for error in _errors_of_interactions(results)]))
    size, noise = (100 * value / effects.mean_loss for value in (effects.interaction_size, noise))
    return [
        _NO_VERDICT,
        f"Factors interact: the interactions of two have a root mean square of {size:.2g} %, and noise alone {noise:.2g} %. "
        "Main effects are mixed with interactions of three factors, so one of about this size may be an interaction.",
    ]


def _errors_of_interactions(results: ScreeningOutcome) -> list[float]:
    """The standard errors of all interactions, in nats. Those of options are larger."""
    seeds, design = len(results.runs.largest.seeds), results.design
    return [standard_error(design.product(group[0]), seeds, results.effects.noise) for group in design.aliases()]


def protocol(results: ScreeningOutcome) -> list[str]:
    """How the numbers were measured."""
    rows, seeds = len(results.design.rows), len(results.runs.largest.seeds)
    low, high = results.rates
    choices = results.design.choices
    sentences = [
        f"{len(results.factors)} {'factors and options' if choices else 'factors'} and the learning rate "
        f"({low:g} or {high:g}) in a two-level fractional factorial design of resolution IV: {rows} models with {seeds} seeds "
        f"each, {rows * seeds} runs. Each factor alone, compared with a baseline of as many runs, takes "
        f"{results.runs_one_at_a_time} runs at given rates for intervals of the same width."
        + "".join(
            f" The design is repeated without any of {', '.join(options)}, and with each of them." for options in choices
        ),
        "Runs of one seed are a block"
        + (": they saw the same tokens in the same order." if results.runs.largest.same_tokens else "."),
    ]
    if results.effects is not None:
        sentences.append(
            f"The noise of a run is {results.effects.noise:.2g} nats, with {results.effects.freedom} degrees of "
            "freedom. Intervals are 95 % intervals of one effect each. Holm's method corrects p for all factors. A factor "
            f"survives if it lowers the loss and its corrected p is below {results.alpha:g}"
            f"{', and of the options of a choice only the best one' * bool(choices)}. This takes the effect of a "
            "factor to be the same for every seed; if it varies, p is too small."
        )
    return sentences


def effect_rows(results: ScreeningOutcome) -> Rows:
    """A row for each factor, the best first, and one for the rate."""
    if results.effects is None:
        return []
    main = results.effects.main
    excluded = {name: " or ".join(options) for options in results.design.choices for name in options}
    rows = []
    for name in sorted(main, key=lambda name: (name == RATE, main[name].effect)):
        effect = main[name]
        factor = results.factors.get(name)
        rows.append(
            {
                "factor": name + (f" (one of {excluded[name]})" if name in excluded else ""),
                "loss improvement (%)": with_interval(effect.improvement, effect.improvement_interval, "+.2f"),
                "Holm p": p_value(effect.holm_p),
                "parameters": "" if factor is None else f"{factor.parameters:+,}",
                "survives": "yes" if name in results.effects.survivors else "",
            }
        )
    return rows


def interaction_rows(results: ScreeningOutcome) -> Rows:
    """A row for each group of interactions that cannot be told from each other, the largest first."""
    if results.effects is None:
        return []
    found = sorted(results.effects.interactions, key=lambda group: -abs(group.effect))
    return [
        {
            "interactions": " or ".join(" x ".join(pair) for pair in group.aliases),
            "loss improvement (%)": number(-100 * group.effect / results.effects.mean_loss, "+.2f"),
            "p": p_value(group.p),
        }
        for group in found
    ]


def draw_effects(results: ScreeningOutcome) -> Figure:
    """Main effects with their intervals."""
    main = results.effects.main
    names = sorted(main, key=lambda name: (name == RATE, main[name].effect))
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(names)), layout="constrained")
    axes = figure.subplots()
    middles = np.array([main[name].improvement for name in names])
    ends = np.array([main[name].improvement_interval for name in names]).T
    axes.axvline(0.0, color=BASELINE["color"], linewidth=1)
    axes.errorbar(middles, range(len(names)), xerr=np.abs(ends - middles), fmt="o", color="#0072B2", capsize=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("improvement of test loss (%), average over the other factors; right is better")
    axes.set_title(f"{results.name}: main effects", parse_math=False)
    axes.grid(axis="x", alpha=0.25)
    return figure


def draw_half_normal(results: ScreeningOutcome) -> Figure:
    """Absolute effects against half-normal quantiles: effects that are noise lie on a line through 0 (Daniel 1959)."""
    found = results.effects
    # Options have wider intervals than other factors
    options = set(itertools.chain.from_iterable(results.design.choices))
    points = [(abs(effect.effect), name) for name, effect in found.main.items() if name not in options]
    points += [
        (abs(group.effect), " or ".join(" x ".join(pair) for pair in group.aliases))
        for group in found.interactions
        if not options & {*itertools.chain.from_iterable(group.aliases)}
    ]
    points.sort()
    quantiles = stats.halfnorm.ppf((np.arange(len(points)) + 0.5) / len(points))
    sizes = np.array([100 * size / found.mean_loss for size, _ in points])
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    axes.plot(quantiles, sizes, "o", color="#0072B2")
    error = 100 * min(_errors_of_interactions(results)) / found.mean_loss  # of a factor; those of options are larger
    axes.plot([0, quantiles[-1]], [0, error * quantiles[-1]], color="#888888", linestyle="--", label="noise alone")
    for quantile, size, (_, name) in list(zip(quantiles, sizes, points))[-min(6, len(points)) :]:
        axes.annotate(
            name if len(name) < 50 else f"{name[:47]}...",
            (quantile, size),
            xytext=(-6, 2),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    scale_percent(axes, "size of the effect on test loss (%)", [0.0, *sizes])
    axes.set_xlabel("half-normal quantile")
    axes.set_title(f"{results.name}: half-normal plot", parse_math=False)
    axes.legend(frameon=False)
    return figure


_EFFECTS_CAPTION = "How much lower the loss is with each factor on, with 95 % intervals."
_HALF_NORMAL_CAPTION = (
    "Sizes of all effects and groups of interactions. Those that are noise lie near the line; others stand above it."
)


def _sections(results: ScreeningOutcome, figures: list[Section]) -> list[Section]:
    """The report, section by section."""
    head = [*map(warning, warnings_of(results)), *screening_outcome(results), *map(warning, limits_of(results))]
    sections = [Section("", [*head, bullets(protocol(results))])]
    if results.effects is not None:
        sections.append(Section("Main effects", [markdown_table(effect_rows(results))]))
        sections.append(Section("Interactions", [_INTERACTIONS, markdown_table(interaction_rows(results))]))
    sections += figures
    if results.confirmation is not None:
        about = "Its own report is in the folder `confirmation`, and the runs of the design are in `screening`."
        sections.append(Section(f"Confirmation: {BEST} against {OFF}", [verdicts(results.confirmation), about]))
    changes = [
        f"`{name}`: `{yaml.safe_dump(found.change, default_flow_style=True).strip()}`"
        for name, found in results.factors.items()
    ]
    return [*sections, Section("Factors", [bullets(changes), f"`{results.command}`"], is_folded=True)]

"""The report of a screening, made from its results alone."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context, rcParamsDefault
from matplotlib.figure import Figure

from ..comparison.figures import draw_intervals, figure_section
from ..comparison.render import Rows, Section, bullets, warning, write_sections
from ..comparison.report import PROTOCOL, describe, table_lines, verdicts
from ..comparison.results import VERSION, Outcome
from ..comparison.sentences import in_line, outcome_sentence, warning_sentences
from ..comparison.tables import in_one_line, number, p_value, point_rows, points_sentence, with_interval
from ..text import Markdown, code
from .design import RATE, Design
from .effects import Effects, MainEffect
from .plan import BEST, OFF


@dataclass(frozen=True)
class Factor:
    change: dict[str, Any]
    parameters: int


@dataclass(frozen=True)
class ScreeningOutcome:
    """The content of `results.json`."""

    name: str
    command: str
    comparison: dict[str, Any]
    factors: dict[str, Factor]
    design: Design
    rates: list[float]
    alpha: float
    effects: Effects | None  # None if a run diverged
    diverged: list[str]
    runs: Outcome
    confirmation: Outcome | None = None
    split: str = "test"  # of results that do not say
    version: int = VERSION


_NO_VERDICT = (
    "Main effects are averages over all other factors and over two learning rates. They are no verdict: two rates "
    "misjudge a change that moves the best one. The verdict is that of the confirmation."
)
_NOT_TUNED = "Nothing was tuned for the rows: effects may hang on values in the recipe, such as initial weights."
_FOLDERS = Markdown("Its own report is in the folder `confirmation`, and the runs of the design are in `screening`.")
_INTERACTIONS = (
    "The design cannot separate the interactions in one row; the number is their sum. It is positive if the loss is "
    "lower with both on or both off than with one alone. p is not corrected."
)


@rc_context(rcParamsDefault)
def write_report(results: ScreeningOutcome, folder: Path) -> None:
    figures = []
    if results.effects is not None:
        caption = "How much lower the loss is with each factor on, with 95 % intervals."
        figures = [figure_section(folder, "effects", "Effects", caption, draw_effects(results))]
    write_sections(folder, results.name, _sections(results, figures))


@describe.register
def _(results: ScreeningOutcome) -> str:
    table = table_lines(_effect_rows(results)) if results.effects else []
    return "\n".join([*table, *_outcome(results), *(f"warning: {text}" for text in _limits(results))])


def _outcome(results: ScreeningOutcome) -> list[str]:
    if results.effects is None:
        return [f"No effects: {in_line(results.diverged)} diverged, and the design needs all runs."]
    survivors = results.effects.survivors
    if not survivors:
        return ["No factor lowers the loss by more than noise, so there was nothing to confirm."]
    return [f"Survivors: {in_line(survivors)}.", f"Confirmation: {outcome_sentence(results.confirmation.largest)}"]


def _limits(results: ScreeningOutcome) -> list[str]:
    effects, sentences = results.effects, [_NO_VERDICT]
    seeds = set(results.runs.largest.seeds)
    if results.confirmation and (known := seeds & {*results.confirmation.largest.seeds}):
        sentences.append(
            f"The seeds {', '.join(map(str, sorted(known)))} of the confirmation chose what it confirms, so its p is "
            "too small."
        )
    if effects is not None and effects.p_of_interactions < results.alpha:
        noise = 2 * effects.noise / math.sqrt(len(results.design.rows) * len(seeds))
        size, noise = (100 * value / effects.mean_loss for value in (effects.interaction_size, noise))
        sentences.append(
            f"Factors interact: the interactions of two have a root mean square of {size:.2g} %, and noise alone "
            f"{noise:.2g} %. Main effects are mixed with interactions of three factors, so one of about this size may "
            "be an interaction."
        )
    return sentences


def _protocol(results: ScreeningOutcome) -> list[str]:
    runs, effects = results.runs.largest, results.effects
    rows, seeds = len(results.design.rows), len(runs.seeds)
    low, high = results.rates
    sentences = [
        f"{len(results.factors)} factors and the learning rate ({low:g} or {high:g}) in a two-level fractional "
        f"factorial design of resolution IV: {rows} models with {seeds} seeds each, {rows * seeds} runs.",
        f"Runs of one seed are a block{': they saw the same tokens in the same order' if runs.same_tokens else ''}.",
        runs.objective.loss_note,
        None if runs.tuned else _NOT_TUNED,
    ]
    if effects is not None:
        sentences.append(
            f"Effects are on the loss of the {results.split} split. The noise of a run is {effects.noise:.2g} nats, "
            f"with {effects.freedom:.3g} degrees of freedom. Intervals are 95 % intervals of one effect each. Holm's "
            "method corrects p for all factors. A factor survives if it lowers the loss and its corrected p is below "
            f"{results.alpha:g}. This takes the effect of a factor to be the same for every seed; if it varies, p is "
            "too small."
        )
    return list(filter(None, sentences))


def _sorted_effects(results: ScreeningOutcome) -> dict[str, MainEffect]:
    """The best first and the rate last."""
    main = results.effects.main
    return {name: main[name] for name in sorted(main, key=lambda name: (name == RATE, main[name].effect))}


def _effect_rows(results: ScreeningOutcome) -> Rows:
    return [
        {
            "factor": name,
            "loss improvement (%)": with_interval(effect.improvement, effect.improvement_interval, "+.2f"),
            "Holm p": p_value(effect.holm_p),
            "parameters": f"{results.factors[name].parameters:+,}" if name in results.factors else "",
            "survives": "yes" if name in results.effects.survivors else "",
        }
        for name, effect in _sorted_effects(results).items()
    ]


def draw_effects(results: ScreeningOutcome) -> Figure:
    effects = _sorted_effects(results)
    loss = f"{results.split} {results.runs.largest.objective.loss_name}"
    rows = [(name, effect.improvement, effect.improvement_interval) for name, effect in effects.items()]
    what = f"improvement of {loss} (%), average over the other factors"
    return draw_intervals(f"{results.name}: main effects", what, rows)


def _sections(results: ScreeningOutcome, figures: list[Section]) -> list[Section]:
    warnings = [f"Screening: {text}" for text in warning_sentences(results.runs, has_tests=False)]
    if results.confirmation is not None:
        warnings += [f"Confirmation: {text}" for text in warning_sentences(results.confirmation)]
    sections = [Section("", [*map(warning, warnings), *_outcome(results), *map(warning, _limits(results))]), *figures]
    if results.effects is not None:
        interactions = [
            {
                "interactions": " or ".join(" x ".join(pair) for pair in group.aliases),
                "loss improvement (%)": number(-100 * group.effect / results.effects.mean_loss, "+.2f"),
                "p": p_value(group.p),
            }
            for group in sorted(results.effects.interactions, key=lambda group: -abs(group.effect))
        ]
        sections.append(Section("Main effects", [_effect_rows(results)]))
        sections.append(Section("Interactions", [_INTERACTIONS, interactions]))
    if points := [row for row in point_rows(results.runs.largest) if row["model"] == results.runs.baseline]:
        sections.append(Section("Tuning", [points_sentence(results.runs.largest), points]))
    if results.confirmation is not None:
        sections.append(Section(f"Confirmation: {BEST} against {OFF}", [verdicts(results.confirmation), _FOLDERS]))
    changes = [
        Markdown(f"{code(name)}: {code(in_one_line(factor.change))}") for name, factor in results.factors.items()
    ]
    factors = Section("Factors", [bullets(changes), code(results.command)], is_folded=True)
    return [*sections, Section(PROTOCOL, [bullets(_protocol(results))], is_folded=True), factors]

"""The report of a comparison, made from its outcome alone: a list of sections, and parts of it for terminals and cards."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from ..files import PAGE_FILE, write_text
from ..text import align, without_html
from .figures import draw_costs, draw_curves, draw_interim, draw_stability, save
from .ladder_figures import draw_bowls, draw_improvements, draw_losses, draw_multipliers
from .outcome import Outcome, ScaleOutcome
from .render import Section, bullets, figure, markdown_table, to_markdown, to_page, warning
from .sentences import (
    cost_sentence,
    first_warning_sentences,
    first_warnings,
    last_warnings,
    noise_floor_sentence,
    of_each_scale,
    outcome_sentence,
    outcome_sentences,
    protocol_sentences,
    selection_sentences,
    trend_protocol,
    trend_sentence,
    warning_sentences,
)
from .tables import (
    MULTIPLIERS_CAPTION,
    given_fields,
    improvement_rows,
    provenance,
    rate_rows,
    run_rows,
    summary_rows,
    task_rows,
    trend_tables,
)


_TERMINAL_WIDTH = 120
# In the terminal: columns of the table of models, with their titles there
_TERMINAL_COLUMNS = {
    "model": "model",
    "test loss (nats)": "test loss (nats)",
    "loss improvement (%)": "improvement of loss %",
    "perplexity improvement (%)": "and of perplexity %",
    "Holm p": "Holm p",
    "seeds": "seeds",
    "learning rate": "learning rate",
    "verdict": "verdict",
}
_CARD_COLUMNS = ("model", "verdict", "test loss (nats)", "loss improvement (%)", "Holm p", "learning rate", "non-embedding")
_RATES_CAPTION = (
    "Validation loss in nats per token, the mean of the runs that tried the rate; ✓ marks a rate that was chosen, and in how "
    "many seeds if not in all."
)
_NOT_REPORTED = (
    "This model is none of those below. It is the run {run} of {model}, which was trained to choose a learning rate, and is "
    "not among the runs that are reported."
)
_TASKS_CAPTION = (
    "Scores of the reported runs, mean and standard deviation over seeds, judged seed by seed as losses are. The improvement "
    "is in percent of the baseline's score where lower is better, and of its distance from 1 for accuracies and probabilities "
    "(the rate of errors). Holm's method corrects p over the models, for each metric by itself: with many metrics, some "
    "verdicts are chance."
)

# Title, caption, and the function that draws it
_Figures = dict[str, tuple[str, str, Callable[[Any], Figure | None]]]
_FIGURES: _Figures = {
    "curves": (
        "Losses over steps",
        "Above: validation loss (solid, with a band from the lowest seed to the highest) and training loss (dashed, a moving "
        "average). Below: improvement of validation loss over the baseline, seed by seed. The ranges leave out the first tenth "
        "of training.",
        draw_curves,
    ),
    "parameters": (
        "Improvement against parameters",
        "Improvement of test loss, with the interval of each model. Models of nearly the same size stand side by side.",
        lambda found: draw_costs(found, "non_embedding_parameters", "non-embedding parameters"),
    ),
    "interim": (
        "Improvement at each interim analysis",
        "Improvement of test loss after each seed, with the interval of each model, which holds at all interim analyses "
        "together. A model leaves when there is a verdict.",
        draw_interim,
    ),
    "flops": (
        "Improvement against FLOPs",
        "Improvement of test loss, with the interval of each model. Models of nearly the same cost stand side by side.",
        lambda found: draw_costs(found, "flops_per_token", "FLOPs per token, forward and backward"),
    ),
    "stability": (
        "Stability",
        "Attention on the same tokens of the validation split while training. Runs that diverged are dotted, one by one, and "
        "are no part of the means. The legend counts the spikes of the training loss over all runs shown. Quantities that "
        "never change are left out.",
        draw_stability,
    ),
}
_FIGURES_OF_A_LADDER: _Figures = {
    "losses": (
        "Loss over compute",
        "Test loss of every run. Lines join means over the seeds.",
        draw_losses,
    ),
    "multipliers": ("Compute multiplier over compute", MULTIPLIERS_CAPTION, draw_multipliers),
    "improvements": (
        "Improvement over compute",
        "Improvement of test loss with the interval of each model and scale; grey is the noise floor. The points of a scale "
        "stand side by side around its line.",
        draw_improvements,
    ),
    "bowls": (
        "Loss against learning rate",
        "Validation loss of the runs that chose a rate, at each scale, and the mean of the seeds that tried it. Losses far "
        "above the others are cut off, but no reported one. If each seed chooses its own rate, not all try the same. The best "
        "rate of a seed has a worse neighbour on both sides unless it lies at the boundary.",
        draw_bowls,
    ),
}


def write_report(outcome: Outcome, folder: Path, has_page: bool = False) -> None:
    """Writes `results.md`, `figures/*.png` and `report.html`, each whole or not at all.

    Args:
        outcome: the results.
        folder: folder of the comparison.
        has_page: whether `nlq explore` has a page there, which the report links to.
    """
    found, of_figures = (outcome, _FIGURES_OF_A_LADDER) if outcome.trend else (outcome.largest, _FIGURES)
    drawn = []
    for name, (title, caption, draw) in of_figures.items():
        if (drawing := draw(found)) is not None:
            save(drawing, folder / "figures" / f"{name}.png")
            drawn.append(figure(title, name, caption))
        else:
            (folder / "figures" / f"{name}.png").unlink(missing_ok=True)  # of results that had more runs
    sections = _sections(outcome, drawn)
    write_text(folder / "results.md", to_markdown(outcome.name, sections))
    if has_page:
        link = f"See what attention does, in the best model and in the baseline: [{PAGE_FILE}]({PAGE_FILE})"
        sections.insert(1, Section("", [link]))
    write_text(folder / "report.html", to_page(outcome.name, sections, folder))


def describe(outcome: Outcome) -> str:
    """The outcome for a terminal: a line for each model, then notes and warnings."""
    if outcome.trend:
        rows, notes = improvement_rows(outcome.trend), outcome_sentences(outcome)
    else:
        found = outcome.largest
        rows = [{title: row[name] for name, title in _TERMINAL_COLUMNS.items() if name in row} for row in summary_rows(found)]
        notes = [noise_floor_sentence(found), *selection_sentences(found)]
    first, last = ([f"warning: {text}" for text in of(outcome)] for of in (first_warnings, last_warnings))
    table = align([list(rows[0]), *(list(row.values()) for row in rows)], right=False)
    wrapped = [
        [textwrap.fill(text, _TERMINAL_WIDTH, subsequent_indent="  ") for text in part] for part in (first, notes + last)
    ]
    return "\n".join([*wrapped[0], *table, *wrapped[1]])


def verdicts(outcome: Outcome, model: str | None = None, run: str | None = None, scale: str | None = None) -> str:
    """The outcome for a model card, as Markdown: the protocol, the noise floor, a row for each model, warnings, and the trend.

    Args:
        outcome: the results.
        model: the model of the card, whose row is marked; `None` if it is not part of the comparison.
        run: the name of its run's folder. A run that is not among the reported ones is said to be none of them.
        scale: that of the model, if there are several; by default the largest.

    Raises:
        ValueError: if there is no such model.
    """
    scale = scale or list(outcome.scales)[-1]
    found = outcome.scales[scale]
    if model is not None and model not in found.models:
        raise ValueError(f"the comparison {found.name} has no model {model!r}, only {', '.join(found.models)}")
    rows = [{name: row[name] for name in _CARD_COLUMNS} for row in summary_rows(found)]
    is_reported = run is None or any(each.folder == f"runs/{model}/{run}" for each in found.models[model].runs)
    for row in rows:
        if row["model"] == model and is_reported:
            row["model"] = f"**{model}** (this model)"
    others = {name: other for name, other in outcome.scales.items() if name != scale}
    parts = [
        *map(warning, of_each_scale(others, first_warning_sentences)),
        f"From the comparison `{found.name}`: {len(rows)} models, {'up to ' * bool(found.interim)}{len(found.seeds)} seeds "
        f"each, {found.tokens_per_run:,} tokens a run, each model at its own best learning rate, all on the same tokens in the "
        "same order.",
        *([] if is_reported else [warning(_NOT_REPORTED.format(run=run, model=model))]),
        *map(warning, first_warning_sentences(found)),
        outcome_sentence(found),
        noise_floor_sentence(found),
        *selection_sentences(found),
        markdown_table(rows),
        *map(warning, warning_sentences(found)),
    ]
    if outcome.trend:
        parts += [
            f"This is the scale {scale} of a ladder of {len(outcome.scales)} scales: {', '.join(outcome.scales)}.",
            trend_sentence(outcome),
            markdown_table(improvement_rows(outcome.trend)),
        ]
    return without_html("\n\n".join(parts))


def _sections(outcome: Outcome, figures: list[Section]) -> list[Section]:
    """The report, section by section."""
    head = [*map(warning, first_warnings(outcome)), *outcome_sentences(outcome), *map(warning, last_warnings(outcome))]
    if outcome.trend:
        tables = [part for rows, caption in trend_tables(outcome) for part in (markdown_table(rows), caption)]
        trend = Section("The trend over scales", [*tables, bullets(trend_protocol(outcome))])
        sections = [Section("", head), trend, *figures]
        for name, found in outcome.scales.items():
            parts = [cost_sentence(found), bullets(protocol_sentences(found))]
            for section in (_models(found), *_runs(found)):
                parts += [f"### {section.title}", *section.parts]
            sections.append(Section(f"Scale {name}", parts, is_folded=True))
    else:
        found = outcome.largest
        sections = [Section("", [*head, bullets(protocol_sentences(found))]), _models(found), *figures, *_runs(found)]
    configuration = [
        f"`{outcome.command}`, which is after the command line:",
        f"```yaml\n{yaml.safe_dump(outcome.comparison, sort_keys=False)}```",
        markdown_table(provenance(outcome.largest)),
    ]
    return [*sections, Section("Configuration", configuration, is_folded=True)]


def _models(found: ScaleOutcome) -> Section:
    """The models of one scale, and what differs between them."""
    given = {name: given_fields(model) for name, model in found.models.items()}
    differences = [
        f"`{name}`: " + (f"`{fields}`" if fields else "nothing, it is the recipe's") for name, fields in given.items()
    ]
    return Section("Models", [markdown_table(summary_rows(found)), "What differs between them:", bullets(differences)])


def _runs(found: ScaleOutcome) -> list[Section]:
    """The sections of one scale about tasks, rates and runs."""
    rates, tasks = rate_rows(found), task_rows(found)
    return [
        *([Section("Downstream tasks", [_TASKS_CAPTION, markdown_table(tasks)])] if tasks else []),
        *([Section("Learning rates", [_RATES_CAPTION, markdown_table(rates)])] if rates else []),
        Section("Every run", [markdown_table(run_rows(found))], is_folded=True),
    ]

"""The report of a comparison, made from `results.json` alone: sections, figures, and the outcome for terminals and cards.

A comparison at several scales has everything that one at a single scale has, for each of them, and the trend.
"""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from ..files import PAGE_FILE, write_text
from ..text import align, without_html
from .figures import draw_costs, draw_curves, draw_looks, draw_stability, save
from .ladder_figures import draw_bowls, draw_improvements, draw_losses, draw_multipliers
from .render import Section, bullets, figure, markdown_table, to_markdown, to_page, warning
from .sentences import (
    cost_sentence,
    first_warning_sentences,
    first_warnings,
    last_warnings,
    noise_floor_sentence,
    outcome,
    outcome_sentence,
    protocol_sentences,
    selection_sentences,
    trend_protocol,
    trend_sentence,
    warning_sentences,
    warnings_of_others,
)
from .tables import (
    difference_rows,
    given_fields,
    improvement_rows,
    multiplier_rows,
    provenance,
    rate_rows,
    run_rows,
    scales_in,
    summary_rows,
    task_rows,
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

_IMPROVEMENTS_CAPTION = (
    "Improvement of test loss over the baseline in percent, with 95 % intervals of each model and scale alone; positive is "
    "better. The slope is that of a line through the scales, and Holm p is its p-value, corrected for the number of models."
)
_DIFFERENCES_CAPTION = "Improvement in nats per token: the baseline's mean test loss minus the model's, with 95 % intervals."
_MULTIPLIERS_CAPTION = (
    "How many times the model's compute the baseline would need to reach the model's loss, by a curve through the baseline's "
    "mean losses, with 95 % intervals; above 1 is better. A dash stands for an end that lies more than a decade beyond the "
    "ladder. The slope is 0 if the multiplier is the same at all scales."
)

# Title, caption, and the function that draws it
_Figures = dict[str, tuple[str, str, Callable[[dict[str, Any]], Figure | None]]]
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
        lambda results: draw_costs(results, "non_embedding_parameters", "non-embedding parameters"),
    ),
    "looks": (
        "Improvement at each look",
        "Improvement of test loss after each seed, with the interval of each model, which holds at all looks together. A model "
        "leaves when there is a verdict.",
        draw_looks,
    ),
    "flops": (
        "Improvement against FLOPs",
        "Improvement of test loss, with the interval of each model. Models of nearly the same cost stand side by side.",
        lambda results: draw_costs(results, "flops_per_token", "FLOPs per token, forward and backward"),
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
    "multipliers": ("Compute multiplier over compute", _MULTIPLIERS_CAPTION, draw_multipliers),
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
        "rate of a seed has a worse neighbour on both sides unless it lies at an edge.",
        draw_bowls,
    ),
}


def write_report(results: dict[str, Any], folder: Path, has_page: bool = False) -> None:
    """Writes `results.md`, `figures/*.png` and `report.html`, each whole or not at all.

    Args:
        results: the content of `results.json`.
        folder: folder of the comparison.
        has_page: whether `nlq explore` has a page there, which the report links to.
    """
    figures = _write_figures(results, folder / "figures")
    sections = _sections(results, figures)
    write_text(folder / "results.md", to_markdown(results["name"], sections))
    if has_page:
        link = f"See what attention does, in the best model and in the baseline: [{PAGE_FILE}]({PAGE_FILE})"
        sections.insert(1, Section("", [link]))
    write_text(folder / "report.html", to_page(results["name"], sections, folder))


def describe(results: dict[str, Any]) -> str:
    """The outcome for a terminal: a line for each model, then notes and warnings."""
    if "trend" in results:
        rows, notes = improvement_rows(results), outcome(results)
    else:
        found = summary_rows(results)
        rows = [{title: row[name] for name, title in _TERMINAL_COLUMNS.items() if name in row} for row in found]
        notes = [noise_floor_sentence(results), *selection_sentences(results)]
    first, last = ([f"warning: {text}" for text in of(results)] for of in (first_warnings, last_warnings))
    table = align([list(rows[0]), *(list(row.values()) for row in rows)], right=False)
    return "\n".join([*_wrap(first), *table, *_wrap([*notes, *last])])


def _wrap(texts: list[str]) -> list[str]:
    return [textwrap.fill(text, _TERMINAL_WIDTH, subsequent_indent="  ") for text in texts if text]


def verdicts(results: dict[str, Any], model: str | None = None, run: str | None = None, scale: str | None = None) -> str:
    """The outcome for a model card, as Markdown: the protocol, the noise floor, a row for each model, warnings, and the trend.

    Args:
        results: the content of `results.json`.
        model: the model of the card, whose row is marked; `None` if it is not part of the comparison.
        run: the name of its run's folder. A run that is not among the reported ones is said to be none of them.
        scale: that of the model, if there are several; by default the largest.

    Raises:
        ValueError: if there is no such model.
    """
    scales = scales_in(results)
    scale = scale or list(scales)[-1]
    found = scales[scale]
    rows = [{name: row[name] for name in _CARD_COLUMNS} for row in summary_rows(found)]
    if model is not None and model not in found["models"]:
        raise ValueError(f"the comparison {found['name']} has no model {model!r}, only {', '.join(found['models'])}")
    is_reported = run is None or any(each["folder"] == f"runs/{model}/{run}" for each in found["models"][model]["runs"])
    for row in rows:
        if row["model"] == model and is_reported:
            row["model"] = f"**{model}** (this model)"
    count = "up to " if found.get("looks") else ""
    parts = [
        *map(warning, warnings_of_others(results, scale)),
        f"From the comparison `{found['name']}`: {len(rows)} models, {count}{len(found['seeds'])} seeds each, "
        f"{found['tokens_per_run']:,} tokens a run, each model at its own best learning rate, all on the same tokens in the "
        "same order.",
        *([] if is_reported else [warning(_NOT_REPORTED.format(run=run, model=model))]),
        *map(warning, first_warning_sentences(found)),
        outcome_sentence(found),
        noise_floor_sentence(found),
        *selection_sentences(found),
        markdown_table(rows),
        *map(warning, warning_sentences(found)),
    ]
    if "trend" in results:
        parts += [
            f"This is the scale {scale} of a ladder of {len(scales)} scales: {', '.join(scales)}.",
            trend_sentence(results),
            markdown_table(improvement_rows(results)),
        ]
    return without_html("\n\n".join(parts))


def _figures_of(results: dict[str, Any]) -> _Figures:
    return _FIGURES_OF_A_LADDER if "trend" in results else _FIGURES


def _write_figures(results: dict[str, Any], folder: Path) -> list[str]:
    """Draws the figures for which there are data, and returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, (_, _, draw) in _figures_of(results).items():
        drawing = draw(results)
        if drawing is not None:
            save(drawing, folder / f"{name}.png")
            drawn.append(name)
        else:
            (folder / f"{name}.png").unlink(missing_ok=True)  # of results that had more runs
    return drawn


def _sections(results: dict[str, Any], figures: list[str]) -> list[Section]:
    """The report, section by section."""
    scales, is_ladder = scales_in(results), "trend" in results
    head = [*map(warning, first_warnings(results)), *outcome(results), *map(warning, last_warnings(results))]
    if is_ladder:
        tables = [part for rows, caption in _tables_of_trend(results) for part in (markdown_table(rows), caption)]
        sections = [Section("", head), Section("The trend over scales", [*tables, bullets(trend_protocol(results))])]
    else:
        sections = [Section("", [*head, bullets(protocol_sentences(results))]), Section("Models", _models(results))]
    sections += [figure(title, name, caption) for name in figures for title, caption, _ in [_figures_of(results)[name]]]
    for name, found in scales.items():
        if is_ladder:
            cost = cost_sentence(found)
            parts = [f"{cost[0].upper()}{cost[1:]}.", bullets(protocol_sentences(found)), "### Models", *_models(found)]
            for section in _runs(found):
                parts += [f"### {section.title}", *section.parts]
            sections.append(Section(f"Scale {name}", parts, is_folded=True))
        else:
            sections += _runs(found)
    configuration = [
        f"`{results['command']}`, which is after the command line:",
        f"```yaml\n{yaml.safe_dump(results['comparison'], sort_keys=False)}```",
        markdown_table([{"what": what, "value": value} for what, value in provenance(_top(results)).items()]),
    ]
    return [*sections, Section("Configuration", configuration, is_folded=True)]


def _models(found: dict[str, Any]) -> list[str]:
    """The models of one scale, and what differs between them."""
    given = [f"`{name}`: {_code(given_fields(model))}" for name, model in found["models"].items()]
    return [markdown_table(summary_rows(found)), "What differs between them:", bullets(given)]


def _runs(found: dict[str, Any]) -> list[Section]:
    """The sections of one scale about tasks, rates and runs."""
    rates, tasks = rate_rows(found), task_rows(found)
    return [
        *([Section("Downstream tasks", [_TASKS_CAPTION, markdown_table(tasks)])] if tasks else []),
        *([Section("Learning rates", [_RATES_CAPTION, markdown_table(rates)])] if rates else []),
        Section("Every run", [markdown_table(run_rows(found))], is_folded=True),
    ]


def _code(text: str) -> str:
    return f"`{text}`" if text else "nothing, it is the recipe's"


def _top(results: dict[str, Any]) -> dict[str, Any]:
    """The results at the largest scale."""
    return list(scales_in(results).values())[-1]


def _tables_of_trend(results: dict[str, Any]) -> list[tuple[list[dict[str, str]], str]]:
    """The tables of a ladder's trend, each with its caption."""
    tables = [
        (improvement_rows(results), _IMPROVEMENTS_CAPTION),
        (multiplier_rows(results), _MULTIPLIERS_CAPTION),
        (difference_rows(results), _DIFFERENCES_CAPTION),
    ]
    return [(rows, caption) for rows, caption in tables if rows]

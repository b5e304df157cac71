"""The report of a comparison, made from `results.json` alone: a table, figures, a page for a browser, and texts."""

import base64
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from ..files import write_text
from ..text import align
from .figures import draw_costs, draw_curves, draw_stability, save
from .tables import given_fields, provenance, rate_rows, run_rows, summary_rows, task_rows
from .wording import (
    first_warning_sentences,
    noise_floor_sentence,
    outcome_sentence,
    protocol_sentences,
    selection_sentences,
    warning_sentences,
)


TEMPLATE = "report.html.jinja"
_TERMINAL_WIDTH = 120
# Columns of words; columns of numbers are aligned at the right
_WORDS = ("model", "task", "metric", "verdict", "learning rate", "kind", "outcome", "backend", "tokens seen")
_CARD_COLUMNS = ("model", "verdict", "test loss (nats)", "loss improvement (%)", "Holm p", "learning rate", "non-embedding")
# How the page marks a verdict: a class for its colour, and a sign for readers who cannot see colours
_BADGES = {"better": ("better", "▲"), "worse": ("worse", "▼"), "within noise": ("noise", "≈"), "baseline": ("baseline", "●")}
_NO_VERDICT = ("open", "!")
RATES_CAPTION = (
    "Validation loss in nats per token, the mean of the runs that tried the rate; ✓ marks a rate that was chosen, and in how "
    "many seeds if not in all."
)
_NOT_REPORTED = (
    "This model is none of those below. It is the run {run} of {model}, which was trained to choose a learning rate, and is "
    "not among the runs that are reported."
)
TASKS_CAPTION = (
    "Scores of the reported runs, mean and standard deviation over seeds, judged seed by seed as losses are. The improvement "
    "is in percent of the baseline's score where lower is better, and of its distance from 1 for accuracies and probabilities "
    "(the rate of errors). Holm's method corrects p over the models, for each metric by itself: with many metrics, some "
    "verdicts are chance."
)

# Title, caption, and the function that draws it
_FIGURES: dict[str, tuple[str, str, Callable[[dict[str, Any]], Figure | None]]] = {
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


def write_report(results: dict[str, Any], folder: Path) -> None:
    """Writes `results.md`, `figures/*.png` and `report.html`, each whole or not at all.

    Args:
        results: the content of `results.json`.
        folder: folder of the comparison.
    """
    figures = write_figures(results, folder / "figures", _FIGURES)
    write_text(folder / "results.md", _markdown(results, figures))
    write_text(folder / "report.html", _page(results, figures, folder / "figures"))


def describe(results: dict[str, Any]) -> str:
    """The outcome for a terminal: a line for each model, then notes and warnings."""
    headers = {
        "model": "model",
        "test loss (nats)": "test loss (nats)",
        "loss improvement (%)": "improvement of loss %",
        "perplexity improvement (%)": "and of perplexity %",
        "Holm p": "Holm p",
        "learning rate": "learning rate",
        "verdict": "verdict",
    }
    table = [list(headers.values()), *([row[name] for name in headers] for row in summary_rows(results))]
    first = [f"warning: {text}" for text in first_warning_sentences(results)]
    warnings = [f"warning: {text}" for text in warning_sentences(results)]
    notes = [noise_floor_sentence(results), *selection_sentences(results), *warnings]
    return "\n".join([*_wrap(first), *align(table, right=False), *_wrap(notes)])


def _wrap(texts: list[str]) -> list[str]:
    return [textwrap.fill(text, _TERMINAL_WIDTH, subsequent_indent="  ") for text in texts]


def verdicts(results: dict[str, Any], model: str | None = None, run: str | None = None) -> str:
    """The outcome for a model card, as Markdown: the protocol, the noise floor, a row for each model, and warnings.

    Args:
        results: the content of `results.json`.
        model: the model of the card, whose row is marked; `None` if it is not part of the comparison.
        run: the name of its run's folder. A run that is not among the reported ones is said to be none of them.

    Raises:
        ValueError: if there is no such model.
    """
    rows = [{name: row[name] for name in _CARD_COLUMNS} for row in summary_rows(results)]
    if model is not None and model not in results["models"]:
        raise ValueError(f"the comparison {results['name']} has no model {model!r}, only {', '.join(results['models'])}")
    is_reported = run is None or any(found["folder"] == f"runs/{model}/{run}" for found in results["models"][model]["runs"])
    for row in rows:
        if row["model"] == model and is_reported:
            row["model"] = f"**{model}** (this model)"
    seeds = len(results["seeds"])
    parts = [
        f"From the comparison `{results['name']}`: {len(rows)} models, {seeds} seeds each, {results['tokens_per_run']:,} "
        "tokens a run, each model at its own best learning rate, all on the same tokens in the same order.",
        *([] if is_reported else [markdown_warning(_NOT_REPORTED.format(run=run, model=model))]),
        *map(markdown_warning, first_warning_sentences(results)),
        outcome_sentence(results),
        noise_floor_sentence(results),
        *selection_sentences(results),
        markdown_table(rows),
        *map(markdown_warning, warning_sentences(results)),
    ]
    return "\n\n".join(parts)


def write_figures(
    results: dict[str, Any], folder: Path, figures: dict[str, tuple[str, str, Callable[[dict[str, Any]], Figure | None]]]
) -> list[str]:
    """Draws the figures for which there are data, and returns their names.

    Args:
        results: the content of `results.json`.
        folder: of the figures.
        figures: by name, the title, the caption, and the function that draws it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, (_, _, draw) in figures.items():
        figure = draw(results)
        if figure is not None:
            save(figure, folder / f"{name}.png")
            drawn.append(name)
        else:
            (folder / f"{name}.png").unlink(missing_ok=True)  # of results that had more runs
    return drawn


def _markdown(results: dict[str, Any], figures: list[str]) -> str:
    rates, tasks = rate_rows(results), task_rows(results)
    parts = [
        f"# {results['name']}",
        *map(markdown_warning, first_warning_sentences(results)),
        outcome_sentence(results),
        *map(markdown_warning, warning_sentences(results)),
        "\n".join(f"* {sentence}" for sentence in protocol_sentences(results)),
        "## Models",
        markdown_table(summary_rows(results)),
        "What differs between them:",
        "\n".join(f"* `{name}`: {_code(given_fields(model))}" for name, model in results["models"].items()),
        *(f"## {_FIGURES[name][0]}\n\n![{_FIGURES[name][0]}](figures/{name}.png)\n\n{_FIGURES[name][1]}" for name in figures),
        *(["## Downstream tasks", TASKS_CAPTION, markdown_table(tasks)] if tasks else []),
        *(["## Learning rates", RATES_CAPTION, markdown_table(rates)] if rates else []),
        "## Every run",
        markdown_table(run_rows(results)),
        "## Configuration",
        f"`{results['command']}`, which is after the command line:",
        f"```yaml\n{yaml.safe_dump(results['comparison'], sort_keys=False)}```",
        markdown_table([{"what": name, "value": value} for name, value in provenance(results).items()]),
    ]
    return "\n\n".join(parts) + "\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else "nothing, it is the recipe's"


def markdown_warning(text: str) -> str:
    return f"> **Warning:** {text}"


def markdown_table(rows: list[dict[str, str]]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---" if name in _WORDS else "---:" for name in columns], *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(map(_markdown_cell, line))} |" for line in lines)


def _markdown_cell(text: str) -> str:
    """Escapes a cell, whose text may be a name that the user gave."""
    return " ".join(text.split()).replace("|", "\\|")


def _page(results: dict[str, Any], figures: list[str], folder: Path) -> str:
    return render_page(
        TEMPLATE,
        results,
        figures=embedded_figures(folder, figures, _FIGURES, outcome_sentence(results)),
        outcome=outcome_sentence(results),
        first_warnings=first_warning_sentences(results),
        warnings=warning_sentences(results),
        corpus=provenance(results),
        last="",
        **parts_of_page(results),
    )


def parts_of_page(results: dict[str, Any]) -> dict[str, Any]:
    """What a page shows of one scale: verdicts, protocol and tables."""
    summary = summary_rows(results)
    return {
        "protocol": protocol_sentences(results),
        "badges": {row["model"]: _BADGES.get(row["verdict"], _NO_VERDICT) for row in summary},
        "bars": _bars(results),
        "given": {name: given_fields(model) for name, model in results["models"].items()},
        "summary": summary,
        "tasks": task_rows(results),
        "rates": rate_rows(results),
        "runs": run_rows(results),
    }


def embedded_figures(folder: Path, names: list[str], figures: dict[str, tuple], outcome: str) -> list[dict[str, str]]:
    """The figures of a folder as a page holds them; readers who cannot see them get the outcome."""
    return [
        {
            "title": figures[name][0],
            "caption": figures[name][1],
            "alternative": f"{figures[name][0]}. {outcome}",
            "data": base64.b64encode((folder / f"{name}.png").read_bytes()).decode(),
        }
        for name in names
    ]


def render_page(template: str, results: dict[str, Any], **parts: Any) -> str:
    """Makes the page of a report from a template and its parts."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(
        name=results["name"],
        command=results["command"],
        comparison=yaml.safe_dump(results["comparison"], sort_keys=False),
        tasks_caption=TASKS_CAPTION,
        rates_caption=RATES_CAPTION,
        words=_WORDS,
        **parts,
    )


def _bars(results: dict[str, Any]) -> dict[str, Any]:
    """Places improvement, interval and noise floor on the bars of the page: by model, in percent of a bar whose middle is 0.

    `limit` is the improvement, in percent, at which the bars end. A model far from all others lies beyond the bar, so that the
    others stay visible.
    """
    floor = results["statistics"]["noise_floor_percent"] or 0.0
    spans = {}
    for name, effect in results["statistics"]["effects"].items():
        value = effect["loss_improvement"]
        if value is not None:
            low, high = effect["loss_improvement_interval"] or (value, value)
            spans[name] = (low, value, high)
    extents = [max(map(abs, span)) for span in spans.values()] or [0.0]
    limit = 1.1 * max(min(max(extents), 2.5 * statistics.median(extents)), floor) or 1.0

    def place(value: float) -> float:
        return round(50 + 50 * min(max(value / limit, -1.0), 1.0), 2)

    models = {
        name: {
            "low": place(low),
            "width": round(place(high) - place(low), 2),
            "value": place(value),
            "beyond": "◀" if value < -limit else "▶" if value > limit else "",
        }
        for name, (low, value, high) in spans.items()
    }
    return {
        "models": models,
        "limit": f"{limit:.2g}",
        "noise": place(-floor),
        "noise_width": round(place(floor) - place(-floor), 2),
    }

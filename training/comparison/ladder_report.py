"""The report of a ladder, made from its `results.json` alone: what holds at the largest scale, and the trend over scales."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from ..files import write_text
from ..text import align
from .ladder import flops_of_runs
from .ladder_figures import draw_bowls, draw_improvements, draw_losses, draw_multipliers
from .report import (
    RATES_CAPTION,
    TASKS_CAPTION,
    embedded_figures,
    markdown_table,
    markdown_warning,
    parts_of_page,
    render_page,
    verdicts,
    write_figures,
)
from .tables import number, p_value, provenance, rate_rows, run_rows, summary_rows, task_rows
from .wording import (
    first_warning_sentences,
    outcome_sentence,
    protocol_sentences,
    warning_sentences,
)


TEMPLATE = "ladder.html.jinja"
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
_FIGURES: dict[str, tuple[str, str, Callable[[dict[str, Any]], Figure | None]]] = {
    "losses": (
        "Loss over compute",
        "Test loss of every run. Lines are laws of compute with their bands. If there is no law, they join means over the "
        "seeds.",
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


def write_ladder_report(results: dict[str, Any], folder: Path) -> None:
    """Writes `results.md`, `figures/*.png` and `report.html`, each whole or not at all.

    Args:
        results: the content of `results.json`.
        folder: folder of the ladder.
    """
    figures = write_figures(results, folder / "figures", _FIGURES)
    write_text(folder / "results.md", _markdown(results, figures))
    name, top = _top(results)
    improvements, multipliers = improvement_rows(results), multiplier_rows(results)
    page = render_page(
        TEMPLATE,
        results,
        figures=embedded_figures(folder / "figures", figures, _FIGURES, trend_sentence(results)),
        outcome=f"{top_sentence(results)} {trend_sentence(results)}",
        first_warnings=_warnings_of(results["scales"], first_warning_sentences),
        warnings=ladder_warnings(results),
        corpus=provenance(top),
        top={"name": name, **parts_of_page(top)},
        improvements=improvements,
        improvements_caption=_IMPROVEMENTS_CAPTION,
        differences=difference_rows(results),
        differences_caption=_DIFFERENCES_CAPTION,
        multipliers=multipliers,
        multipliers_caption=_MULTIPLIERS_CAPTION,
        protocol=trend_protocol(results),
        last=law_sentence(results),
        scales=[{"name": scale, "cost": _cost(found), **parts_of_page(found)} for scale, found in results["scales"].items()],
    )
    write_text(folder / "report.html", page)


def describe_ladder(results: dict[str, Any]) -> str:
    """The outcome for a terminal."""
    rows = improvement_rows(results)
    lines = [f"warning: {text}" for text in _warnings_of(results["scales"], first_warning_sentences)]
    lines += align([list(rows[0]), *(list(row.values()) for row in rows)], right=False)
    lines += [top_sentence(results), trend_sentence(results)]
    return "\n".join([*lines, *(f"warning: {text}" for text in ladder_warnings(results)), law_sentence(results)])


def ladder_verdicts(results: dict[str, Any], model: str | None = None, scale: str | None = None, run: str | None = None) -> str:
    """The outcome for a model card, as Markdown: the verdicts at a scale, and the trend.

    Args:
        results: the content of `results.json`.
        model: the model of the card, whose row is marked; `None` if it is not part of the ladder.
        scale: that of the model; by default the largest.
        run: the name of its run's folder, as `verdicts` takes it.

    Raises:
        ValueError: if there is no such model.
    """
    top, _ = _top(results)
    scale = scale or top
    scales = ", ".join(results["scales"])
    others = {name: found for name, found in results["scales"].items() if name != scale}
    parts = [
        *map(markdown_warning, _warnings_of(others, first_warning_sentences)),
        verdicts(results["scales"][scale], model, run),
        f"This is the scale {scale} of a ladder of {len(results['scales'])} scales: {scales}.",
        trend_sentence(results),
        markdown_table(improvement_rows(results)),
    ]
    return "\n\n".join(parts)


def top_sentence(results: dict[str, Any]) -> str:
    """The verdicts at the largest scale in one line."""
    name, top = _top(results)
    return f"Largest scale: {name}. {outcome_sentence(top)}"


def trend_sentence(results: dict[str, Any]) -> str:
    """The verdicts of the trend in one line."""
    verdicts: dict[str, list[str]] = {verdict: [] for verdict in ("grows", "shrinks", "cannot tell")}
    for name, trend in results["trend"]["models"].items():
        verdicts[trend["verdict"]].append(name)
    found = [f"{verdict} ({', '.join(names)})" for verdict, names in verdicts.items() if names]
    return f"Trend of the improvement over the scales: {', '.join(found)}."


def _warnings_of(scales: dict[str, dict[str, Any]], sentences: Callable[[dict[str, Any]], list[str]]) -> list[str]:
    """The sentences about each scale, the largest first."""
    return [f"Scale {name}: {text}" for name, found in reversed(scales.items()) for text in sentences(found)]


def ladder_warnings(results: dict[str, Any]) -> list[str]:
    """The limits of the outcome that stand after it: those of each scale, and of the trend."""
    note = results["trend"]["multiplier_note"]
    return [*_warnings_of(results["scales"], warning_sentences), *([note] if note else [])]


def law_sentence(results: dict[str, Any]) -> str:
    """The baseline's law of compute, or why there is none."""
    law = results["trend"]["law"]
    if law is None:
        return results["trend"]["law_note"]
    return (
        f"The baseline's law of compute, in nats: L = {law['irreducible_loss']:.3f} + {law['coefficient']:.3g} "
        f"C^-{law['exponent']:.3f}."
    )


def trend_protocol(results: dict[str, Any]) -> list[str]:
    """How the trend was judged."""
    trend = results["trend"]
    tested = sum(found["p"] is not None for found in trend["models"].values())
    meanings: dict[str, list[str]] = {}
    for name, found in trend["models"].items():
        meanings.setdefault(found["meaning"], []).append(name)
    sentences = [
        "The verdict at the largest scale is the judgement. The trend explains it.",
        "No model is tested over the scales."
        if not tested
        else "The slope is that of the improvements in percent of the baseline's loss, seed by seed, against the logarithm of "
        f"compute. Grows and shrinks mean that it differs from 0: a p below {trend['alpha']:g}, corrected for {tested} models "
        "by Holm's method.",
        *(f"{', '.join(names)}: {meaning}." for meaning, names in meanings.items()),
    ]
    return sentences


def improvement_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each model: improvement at each scale, slope and verdict."""
    rows = []
    for name, trend in results["trend"]["models"].items():
        rows.append(
            {
                "model": name,
                **{
                    f"{scale} (%)": _with_interval(step["improvement"], step["improvement_interval"], "+.2f")
                    for scale, step in trend["steps"].items()
                },
                "slope (% per decade)": _with_interval(trend["slope"], trend["slope_interval"], "+.2f"),
                "Holm p": p_value(trend["holm_p"]),
                "trend": trend["verdict"],
            }
        )
    return rows


def difference_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each model: improvement at each scale in nats."""
    return [
        {
            "model": name,
            **{
                f"{scale} (nats)": _with_interval(step["difference"], step["difference_interval"], "+.4f")
                for scale, step in trend["steps"].items()
            },
        }
        for name, trend in results["trend"]["models"].items()
    ]


def multiplier_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each model: its compute multiplier at each scale; empty if there are none."""
    if results["trend"]["multiplier_note"]:
        return []
    return [
        {
            "model": name,
            **{
                scale: _with_interval(step["multiplier"], step["multiplier_interval"], ".2f")
                if step["multiplier"] is not None
                else step["note"]
                for scale, step in trend["steps"].items()
            },
            "slope of log10 per decade": _with_interval(trend["multiplier_slope"], trend["multiplier_slope_interval"], "+.3f"),
        }
        for name, trend in results["trend"]["models"].items()
    ]


def _with_interval(value: float | None, interval: list[float | None] | None, form: str) -> str:
    if interval is None:
        return number(value, form)
    return f"{number(value, form)} [{', '.join(number(end, form) for end in interval)}]"


def _top(results: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and results of the largest scale."""
    return list(results["scales"].items())[-1]


def _cost(found: dict[str, Any]) -> str:
    baseline = found["models"][found["baseline"]]
    flops = flops_of_runs(found)[found["baseline"]]
    return (
        f"{baseline['non_embedding_parameters']:,} non-embedding parameters, {found['tokens_per_run']:,} tokens and "
        f"{flops:.2g} FLOPs a run, {len(found['seeds'])} seeds"
    )


def _markdown(results: dict[str, Any], figures: list[str]) -> str:
    multipliers = multiplier_rows(results)
    parts = [
        f"# {results['name']}",
        *map(markdown_warning, _warnings_of(results["scales"], first_warning_sentences)),
        top_sentence(results),
        trend_sentence(results),
        *map(markdown_warning, ladder_warnings(results)),
        "## The trend over scales",
        markdown_table(improvement_rows(results)),
        _IMPROVEMENTS_CAPTION,
        *([markdown_table(multipliers), _MULTIPLIERS_CAPTION] if multipliers else []),
        markdown_table(difference_rows(results)),
        _DIFFERENCES_CAPTION,
        "\n".join(f"* {sentence}" for sentence in trend_protocol(results)),
        *(
            f"## {_FIGURES[figure][0]}\n\n![{_FIGURES[figure][0]}](figures/{figure}.png)\n\n{_FIGURES[figure][1]}"
            for figure in figures
        ),
    ]
    for scale, found in results["scales"].items():
        parts += [
            f"## Scale {scale}",
            f"{_cost(found)[0].upper()}{_cost(found)[1:]}.",
            "\n".join(f"* {sentence}" for sentence in protocol_sentences(found)),
            markdown_table(summary_rows(found)),
        ]
        if tasks := task_rows(found):
            parts += [f"Downstream tasks. {TASKS_CAPTION}", markdown_table(tasks)]
        if rates := rate_rows(found):
            parts += ["Learning rates. " + RATES_CAPTION, markdown_table(rates)]
        parts += [markdown_table(run_rows(found))]
    parts += [
        "## Configuration",
        f"`{results['command']}`, which is after the command line:",
        f"```yaml\n{yaml.safe_dump(results['comparison'], sort_keys=False)}```",
        markdown_table([{"what": what, "value": value} for what, value in provenance(_top(results)[1]).items()]),
        law_sentence(results),
    ]
    return "\n\n".join(parts) + "\n"

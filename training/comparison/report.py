"""The report of a comparison, made from its outcome alone, and parts of it for terminals and cards."""

import itertools
import json
import textwrap
from collections.abc import Iterable
from functools import singledispatch
from pathlib import Path

import yaml
from matplotlib import rc_context, rcParamsDefault

from ..disk import delete, read_bytes
from ..files import PAGE_FILE, REPORT_FILES, RESULTS_FILE, files_in, read_json
from ..sharing.scrub import without_folders
from ..text import Markdown, align, code, count, plain
from .figures import FIGURES, FIGURES_OF_A_LADDER, figure_section
from .render import Rows, Section, bullets, to_text, warning, write_sections
from .results import Outcome, ScaleOutcome, read_outcome
from .sentences import (
    EARLY,
    about_rates,
    learned_sentences,
    noise_floor_sentence,
    outcome_sentence,
    outcome_sentences,
    primary_sentences,
    protocol_sentences,
    trend_protocol,
    trend_sentence,
    warning_sentences,
)
from .status import CONFIRMATION
from .tables import (
    BONFERRONI,
    FISHER,
    INTERACTIONS_CAPTION,
    LEARNED,
    NOTHING,
    cost_rows,
    given_fields,
    improvement_rows,
    interaction_rows,
    learned_rows,
    point_rows,
    points_sentence,
    provenance,
    rate_rows,
    run_rows,
    stability_rows,
    summary_rows,
    task_rows,
    trend_tables,
    with_interval,
)


PROTOCOL = "How this was measured and judged"

_TERMINAL_WIDTH = 120
# Columns with their titles in the terminal
_TERMINAL_COLUMNS = {
    "model": "model",
    "test loss (nats)": "test loss (nats)",
    "loss improvement (%)": "improvement of loss %",
    "test loss of masked tokens (nats)": "loss of masked tokens",
    "perplexity improvement (%)": "and of perplexity %",
    "pseudo-perplexity improvement (%)": "of pseudo-perplexity %",
    "Holm p": "Holm p",
    BONFERRONI: BONFERRONI,
    "accuracy (%)": "accuracy %",
    LEARNED: LEARNED,
    FISHER: FISHER,
    "seeds": "seeds",
    "learning rate": "learning rate",
    "verdict": "verdict",
}
_CARD_COLUMNS = ("model", "verdict", "test loss (nats)", "test loss of masked tokens (nats)", "loss improvement (%)")
_CARD_COLUMNS += ("Holm p", BONFERRONI, LEARNED, FISHER, "learning rate", "non-embedding")
_RATES_CAPTION = "Mean validation loss in nats per {} of the runs that tried the rate; ✓ marks a rate that was chosen."
_TASKS_CAPTION = (
    "Scores of the reported runs, mean and standard deviation over seeds, judged seed by seed; only seeds count. The "
    "improvement is in percent of the baseline's score where lower is better, and of its distance from 1 for "
    "accuracies and probabilities (the rate of errors). Holm's method corrects p over the models, for each metric by "
    "itself: with many metrics, some verdicts are chance."
)
_STABILITY_CAPTION = "At the last recorded step of the reported runs: mean and standard deviation over seeds."


@rc_context(rcParamsDefault)  # not a `matplotlibrc` of the working directory, which may run LaTeX
def write_report(outcome: Outcome, folder: Path, has_page: bool = False) -> None:
    """Writes `results.md`, `figures/*.png` and `report.html`, which may link to a page of `nlq explore`."""
    results, figures = (outcome, FIGURES_OF_A_LADDER) if outcome.trend else (outcome.largest, FIGURES)
    drawn = []
    for name, (title, caption, draw) in {} if outcome.interactions else figures.items():
        if (figure := draw(results)) is not None:
            title = title.format(axis=outcome.trend and outcome.trend.axis)
            drawn.append(figure_section(folder, name, title, caption, figure))
        else:
            delete(folder / "figures" / f"{name}.png")  # of results that had more runs
    link = Markdown(f"See what attention does, in the best model and in the baseline: [{PAGE_FILE}]({PAGE_FILE})")
    write_sections(folder, outcome.name, _sections(outcome, drawn), link if has_page else None)


@singledispatch
def describe(outcome: Outcome) -> str:
    """The outcome for a terminal: warnings, a line for each model, then notes."""
    if outcome.trend:
        tables, notes = [learned_rows(outcome) or improvement_rows(outcome.trend)], outcome_sentences(outcome)
    elif outcome.interactions:
        scales = outcome.scales.items()
        rows = [{"condition": name, **row} for name, each in scales for row in _columns(each, _TERMINAL_COLUMNS)]
        tables, notes = [rows, interaction_rows(outcome)], outcome_sentences(outcome)
    else:
        tables = [_columns(outcome.largest, _TERMINAL_COLUMNS)]
        notes = [*primary_sentences(outcome), *_notes(outcome.largest)]

    def wrap(sentences: Iterable[str]) -> list[str]:
        return [textwrap.fill(text, _TERMINAL_WIDTH, subsequent_indent="  ") for text in sentences]

    warnings = wrap(f"warning: {text}" for text in warning_sentences(outcome))
    return "\n".join([*warnings, *itertools.chain(*map(table_lines, tables)), *wrap(notes)])


def table_lines(rows: Rows) -> list[str]:
    titles = dict.fromkeys(title for row in rows for title in row)  # conditions may be text and a task
    return align([[*titles], *([row.get(title, NOTHING) for title in titles] for row in rows)], right=False)


def _columns(results: ScaleOutcome, titles: dict[str, str]) -> Rows:
    rows = [verdict | cost for verdict, cost in zip(summary_rows(results), cost_rows(results))]
    return [{titles[name]: row[name] for name in titles if name in row} for row in rows]


def _notes(results: ScaleOutcome) -> list[str]:
    return [noise_floor_sentence(results), *about_rates(results), *([EARLY] if results.interim else [])]


def verdicts(outcome: Outcome, model: str | None = None, run: str | None = None, scale: str | None = None) -> Markdown:
    """The outcome for a model card; marks the row of `model` if its `run`, the name of a folder, is reported."""
    scale = scale or list(outcome.scales)[-1]
    results = outcome.scales[scale]
    if model is not None and model not in results.models:
        raise ValueError(f"the comparison {results.name} has no model {model!r}, only {', '.join(results.models)}")
    rows = _columns(results, dict(zip(_CARD_COLUMNS, _CARD_COLUMNS)))
    is_reported = run is None or _is_reported(results, model, run)
    for row in rows:
        if row["model"] == model and is_reported:
            row["model"] = Markdown(f"**{plain(model)}** (this model)")
    chosen = ", each model at its own best learning rate" if results.has_choice else ""
    same = ", all on the same tokens in the same order" if results.same_tokens else ""
    parts = [
        *map(warning, warning_sentences(outcome)),
        Markdown(
            f"From the comparison {code(results.name)}: {len(rows)} models, "
            f"{'up to ' if results.interim else ''}{len(results.seeds)} seeds each, {results.tokens_per_run:,} "
            f"tokens a run{chosen}{same}."
        ),
        *learned_sentences(outcome),
        outcome_sentence(results),
        *_notes(results),
        rows,
    ]
    if outcome.trend:
        ladder = f"This is the scale {scale} of a ladder of {len(outcome.scales)} scales: {', '.join(outcome.scales)}."
        parts += [ladder, trend_sentence(outcome), learned_rows(outcome) or improvement_rows(outcome.trend)]
    elif outcome.interactions:
        names = ", ".join(outcome.scales)
        parts += [f"This is the condition {scale} of {len(outcome.scales)}: {names}.", interaction_rows(outcome)]
    parts += primary_sentences(outcome)
    return to_text(parts)


def read_published(folder: Path) -> tuple[Outcome, dict[str, bytes]]:
    """Reads a comparison, and the files of its report by name, without absolute paths."""
    paths = files_in(folder, REPORT_FILES)
    files = {path.relative_to(folder).as_posix(): read_bytes(path) for path in sorted(paths)}
    if (report := files.get("results.md")) is not None:
        files["results.md"] = without_folders(report.decode()).encode()
    if "design" in read_json(folder / RESULTS_FILE):
        raise ValueError(f"{folder} is a screening, without verdicts on models; name its folder {CONFIRMATION!r}")
    return read_outcome(folder / RESULTS_FILE), files


def read_for_card(run: Path, folder: Path) -> tuple[Markdown, dict[str, bytes], str | None]:
    """Reads the verdicts of a comparison, for the card of a run, and the files of its report by published names.

    The last value is the verdict on this run's model in one line, if the comparison has one.
    """
    outcome, files = read_published(folder)
    names = ()
    match run.relative_to(folder).parts if folder in run.parents else ():
        case "runs", model, name if outcome.axis is None:
            names = model, name, None
        case outcome.axis, scale, "runs", model, name if scale in outcome.scales:
            names = model, name, scale
    text, over_seeds = verdicts(outcome, *names), _over_seeds(outcome, *names) if names else None
    text = f"{text}\n\nThe whole report, with every run, is in [comparison/results.md](comparison/results.md)."
    contents = {f"comparison/{name}": content for name, content in files.items()}
    return Markdown(without_folders(text)), contents, over_seeds


def _over_seeds(outcome: Outcome, model: str, run: str, scale: str | None) -> str | None:
    results = outcome.scales[scale or list(outcome.scales)[-1]]
    effect = results.statistics.effects.get(model)
    if effect is None or effect.loss_improvement_interval is None or not _is_reported(results, model, run):
        return None
    if results.accuracies:
        return None  # percents of a loss near 0 say nothing
    improvement = with_interval(effect.loss_improvement, effect.loss_improvement_interval, "+.2f")
    level = 100 * (1 - results.statistics.alpha)
    text = f"Improvement of the test loss over {results.baseline}, {level:g} % interval over {effect.pairs} seeds"
    return f"{text}: {improvement} %, {effect.verdict}"


def _is_reported(results: ScaleOutcome, model: str, run: str) -> bool:
    return any(each.folder == f"runs/{model}/{run}" for each in results.models[model].runs)


def _sections(outcome: Outcome, figures: list[Section]) -> list[Section]:
    largest = outcome.largest
    sections = [Section("", [*map(warning, warning_sentences(outcome)), *outcome_sentences(outcome)]), *figures[:1]]
    if outcome.trend:
        tables = [part for rows, caption in trend_tables(outcome) for part in (rows, caption)]
        sections += [Section("The trend over scales", tables), *figures[1:], _protocol(trend_protocol(outcome))]
        sections += [
            _folded(f"Scale {name}", results, [_models(results), *_runs(results)])
            for name, results in outcome.scales.items()
        ]
    elif outcome.interactions:
        conditions = outcome.scales.items()
        for name, results in conditions:
            fields, models = given_fields(outcome.comparison["conditions"][name]), _models(results)
            changes = Markdown(f"What it changes of the recipe: {code(fields) if fields else 'nothing'}.")
            sections.append(Section(f"Condition {name}", [changes, *models.parts]))
        sections += [Section("Interactions", [interaction_rows(outcome), INTERACTIONS_CAPTION])]
        for name, results in conditions:
            data = Section("Data and machine", [provenance(results)])
            sections.append(_folded(f"Runs under {name}", results, [*_runs(results), data]))
    else:
        sections += [_models(largest), *figures[1:], *_runs(largest), _protocol(protocol_sentences(largest))]
    configuration = [
        Markdown(f"{code(outcome.command)}. With what the command line sets, the comparison is:"),
        code(yaml.safe_dump(json.loads(json.dumps(outcome.comparison)), sort_keys=False), "yaml"),
        *([] if outcome.interactions else [provenance(largest)]),
    ]
    return [*sections, Section("Configuration", configuration, is_folded=True)]


def _folded(title: str, results: ScaleOutcome, sections: list[Section]) -> Section:
    parameters = results.models[results.baseline].size.non_embedding
    cost = (
        f"{parameters:,} non-embedding parameters, {results.tokens_per_run:,} tokens "
        f"and {results.flops(results.baseline):.2g} FLOPs a run, {count(len(results.seeds), 'seed')}."
    )
    parts = [cost, bullets(protocol_sentences(results))]
    for section in sections:
        parts += [Markdown(f"### {section.title}"), *section.parts]
    return Section(title, parts, is_folded=True)


def _protocol(sentences: list[str]) -> Section:
    return Section(PROTOCOL, [bullets(sentences)], is_folded=True)


def _models(results: ScaleOutcome) -> Section:
    differences = []
    for name, model in results.models.items():
        fields = given_fields(model.given)
        differences.append(Markdown(f"{code(name)}: " + (code(fields) if fields else "nothing, it is the recipe's")))
    early = [EARLY] if results.interim else []
    parts = [summary_rows(results), *early, "What differs between them:", bullets(differences)]
    return Section("Models", [*parts, "Sizes, and what the runs took:", cost_rows(results)])


def _runs(results: ScaleOutcome) -> list[Section]:
    tables = {
        "Downstream tasks": (_TASKS_CAPTION, task_rows(results)),
        "Tuning": (points_sentence(results), point_rows(results)),
        "Learning rates": (_RATES_CAPTION.format(results.objective.loss_unit), rate_rows(results)),
        "Stability at the end": (_STABILITY_CAPTION, stability_rows(results)),
    }
    sections = [Section(title, [text, rows]) for title, (text, rows) in tables.items() if rows]
    return [*sections, Section("Every run", [run_rows(results)], is_folded=True)]


# Sentences

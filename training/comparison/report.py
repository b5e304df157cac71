"""The report of a comparison, made from its outcome alone, and parts of it for terminals and cards."""

import textwrap
from collections.abc import Iterable, Sequence
from functools import singledispatch
from pathlib import Path

import yaml
from matplotlib import rc_context, rcParamsDefault

from ..disk import delete, read_bytes
from ..files import PAGE_FILE, RESULTS_FILE, files_in, read_json
from ..sharing.scrub import without_folders
from ..text import Markdown, align, code, count, plain
from .accuracy import NOTE
from .figures import FIGURES, FIGURES_OF_A_LADDER, figure_section
from .inference import FIRST_INTERIM, Verdict, power_warning
from .render import Rows, Section, bullets, to_text, warning, write_sections
from .results import Outcome, ScaleOutcome, read_outcome
from .status import CONFIRMATION
from .tables import (
    BONFERRONI,
    describe_verdict,
    given_fields,
    improvement_rows,
    provenance,
    rate_rows,
    run_rows,
    stability_rows,
    summary_rows,
    task_rows,
    trend_tables,
)
from .trend import TrendVerdict


PROTOCOL = "How this was measured and judged"
# The verdicts that stand first in a sentence
_CLEAR = (Verdict.BETTER, Verdict.WORSE, Verdict.EQUIVALENT, Verdict.WITHIN_NOISE)

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
    "seeds at 99 %": "seeds at 99 %",
    "Fisher p": "Fisher p",
    "seeds": "seeds",
    "learning rate": "learning rate",
    "verdict": "verdict",
}
_CARD_COLUMNS = ("model", "verdict", "test loss (nats)", "test loss of masked tokens (nats)", "loss improvement (%)")
_CARD_COLUMNS += ("Holm p", BONFERRONI, "learning rate", "non-embedding")
_RATES_CAPTION = "Mean validation loss in nats per {} of the runs that tried the rate; ✓ marks a rate that was chosen."
_TASKS_CAPTION = (
    "Scores of the reported runs, mean and standard deviation over seeds, judged seed by seed as losses are. The "
    "improvement is in percent of the baseline's score where lower is better, and of its distance from 1 for "
    "accuracies and probabilities (the rate of errors). Holm's method corrects p over the models, for each metric by "
    "itself: with many metrics, some verdicts are chance."
)
_STABILITY_CAPTION = "At the last recorded step of the reported runs: mean and standard deviation over seeds."

# One of these stands beside every p-value and interval
_EACH_SEED = (
    "Every seed chooses among the learning rates anew, so p and the intervals include the risk of that choice."
)
_ONE_RATE = (
    "Each model has one learning rate, so p and the intervals do not include the risk that another rate suits it "
    "better: a difference may be one between rates and not between models."
)
_EARLY = (
    "A model leaves when its difference looks large, so the improvement of a model that left early is too large on "
    "average: after 3 seeds by 84, 27 and 13 % of a true difference of 1, 2 and 3 standard deviations, if runs of a "
    "seed share no noise. Its interval is wider than one of 95 %, for it holds at all interim analyses together."
)


@rc_context(rcParamsDefault)  # not a `matplotlibrc` of the working directory, which may run LaTeX
def write_report(outcome: Outcome, folder: Path, has_page: bool = False) -> None:
    """Writes `results.md`, `figures/*.png` and `report.html`, which may link to a page of `nlq explore`."""
    results, figures = (outcome, FIGURES_OF_A_LADDER) if outcome.trend else (outcome.largest, FIGURES)
    drawn = []
    for name, (title, caption, draw) in figures.items():
        if (figure := draw(results)) is not None:
            drawn.append(figure_section(folder, name, title, caption, figure))
        else:
            delete(folder / "figures" / f"{name}.png")  # of results that had more runs
    link = Markdown(f"See what attention does, in the best model and in the baseline: [{PAGE_FILE}]({PAGE_FILE})")
    write_sections(folder, outcome.name, _sections(outcome, drawn), link if has_page else None)


@singledispatch
def describe(outcome: Outcome) -> str:
    """The outcome for a terminal: warnings, a line for each model, then notes."""
    if outcome.trend:
        rows, notes = improvement_rows(outcome.trend), outcome_sentences(outcome)
    else:
        rows, notes = _columns(outcome.largest, _TERMINAL_COLUMNS), _notes(outcome.largest)

    def wrap(sentences: Iterable[str]) -> list[str]:
        return [textwrap.fill(text, _TERMINAL_WIDTH, subsequent_indent="  ") for text in sentences]

    warnings = wrap(f"warning: {text}" for text in warning_sentences(outcome))
    return "\n".join([*warnings, *table_lines(rows), *wrap(notes)])


def table_lines(rows: Rows) -> list[str]:
    return align([list(rows[0]), *(list(row.values()) for row in rows)], right=False)


def _columns(results: ScaleOutcome, titles: dict[str, str]) -> Rows:
    return [{titles[name]: row[name] for name in titles if name in row} for row in summary_rows(results)]


def _notes(results: ScaleOutcome) -> list[str]:
    return [noise_floor_sentence(results), *_about_rates(results), *([_EARLY] if results.interim else [])]


def verdicts(outcome: Outcome, model: str | None = None, run: str | None = None, scale: str | None = None) -> Markdown:
    """The outcome for a model card; marks the row of `model` if its `run`, the name of a folder, is reported."""
    scale = scale or list(outcome.scales)[-1]
    results = outcome.scales[scale]
    if model is not None and model not in results.models:
        raise ValueError(f"the comparison {results.name} has no model {model!r}, only {', '.join(results.models)}")
    rows = _columns(results, dict(zip(_CARD_COLUMNS, _CARD_COLUMNS)))
    is_reported = run is None or any(each.folder == f"runs/{model}/{run}" for each in results.models[model].runs)
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
        outcome_sentence(results),
        *_notes(results),
        rows,
    ]
    if outcome.trend:
        ladder = f"This is the scale {scale} of a ladder of {len(outcome.scales)} scales: {', '.join(outcome.scales)}."
        parts += [ladder, trend_sentence(outcome), improvement_rows(outcome.trend)]
    return to_text(parts)


def read_for_card(run: Path, folder: Path) -> tuple[Markdown, dict[str, bytes]]:
    """Reads the verdicts of a comparison, for the card of a run, and the files of its report by published names."""
    files = files_in(folder, ("results.md", "figures/*.png"))
    contents = {f"comparison/{path.relative_to(folder).as_posix()}": read_bytes(path) for path in files}
    if (report := contents.get("comparison/results.md")) is not None:
        contents["comparison/results.md"] = without_folders(report.decode()).encode()
    if "design" in read_json(folder / RESULTS_FILE):
        raise ValueError(f"{folder} is a screening, without verdicts on models; name its folder {CONFIRMATION!r}")
    outcome = read_outcome(folder / RESULTS_FILE)
    names = (run.parent.name, run.name, run.parents[2].name if outcome.trend else None)
    text = verdicts(outcome, *names) if folder in run.parents else verdicts(outcome)
    text = f"{text}\n\nThe whole report, with every run, is in [comparison/results.md](comparison/results.md)."
    return Markdown(without_folders(text)), contents


def _sections(outcome: Outcome, figures: list[Section]) -> list[Section]:
    largest = outcome.largest
    sections = [Section("", [*map(warning, warning_sentences(outcome)), *outcome_sentences(outcome)]), *figures[:1]]
    if outcome.trend:
        tables = [part for rows, caption in trend_tables(outcome) for part in (rows, caption)]
        sections += [Section("The trend over scales", tables), *figures[1:], _protocol(trend_protocol(outcome))]
        for name, results in outcome.scales.items():
            parts = [cost_sentence(results), bullets(protocol_sentences(results))]
            for section in (_models(results), *_runs(results)):
                parts += [Markdown(f"### {section.title}"), *section.parts]
            sections.append(Section(f"Scale {name}", parts, is_folded=True))
    else:
        sections += [_models(largest), *figures[1:], *_runs(largest), _protocol(protocol_sentences(largest))]
    configuration = [
        Markdown(f"{code(outcome.command)}, which is after the command line:"),
        code(yaml.safe_dump(outcome.comparison, sort_keys=False), "yaml"),
        provenance(largest),
    ]
    return [*sections, Section("Configuration", configuration, is_folded=True)]


def _protocol(sentences: list[str]) -> Section:
    return Section(PROTOCOL, [bullets(sentences)], is_folded=True)


def _models(results: ScaleOutcome) -> Section:
    differences = []
    for name, model in results.models.items():
        fields = given_fields(model)
        differences.append(Markdown(f"{code(name)}: " + (code(fields) if fields else "nothing, it is the recipe's")))
    early = [_EARLY] if results.interim else []
    return Section("Models", [summary_rows(results), *early, "What differs between them:", bullets(differences)])


def _runs(results: ScaleOutcome) -> list[Section]:
    tables = {
        "Downstream tasks": (_TASKS_CAPTION, task_rows(results)),
        "Learning rates": (_RATES_CAPTION.format(results.objective.loss_unit), rate_rows(results)),
        "Stability at the end": (_STABILITY_CAPTION, stability_rows(results)),
    }
    sections = [Section(title, [text, rows]) for title, (text, rows) in tables.items() if rows]
    return [*sections, Section("Every run", [run_rows(results)], is_folded=True)]


# Sentences


def outcome_sentences(outcome: Outcome) -> list[str]:
    sentence = outcome_sentence(outcome.largest)
    if outcome.trend is None:
        return [sentence]
    return [f"Largest scale: {list(outcome.scales)[-1]}. {sentence}", trend_sentence(outcome)]


def trend_sentence(outcome: Outcome) -> str:
    models = _by_text((trend.verdict, name) for name, trend in outcome.trend.models.items())
    parts = [f"{verdict} ({in_line(models[verdict])})" for verdict in TrendVerdict if verdict in models]
    return f"Trend of the improvement over the scales: {', '.join(parts)}."


def _by_text(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for text, name in names:
        groups.setdefault(text, []).append(name)
    return groups


def trend_protocol(outcome: Outcome) -> list[str]:
    trend = outcome.trend
    test = "No model is tested over the scales."
    if tested := sum(model.p is not None for model in trend.models.values()):
        test = (
            "The slope is that of the improvements in percent of the baseline's loss, seed by seed, against the "
            f"logarithm of {trend.axis}. Grows and shrinks mean that it differs from 0: a p below {trend.alpha:g}, "
            f"corrected for {tested} models by Holm's method."
        )
    meanings = _by_text((model.meaning, name) for name, model in trend.models.items())
    return [
        "The verdict at the largest scale is the judgement. The trend explains it.",
        test,
        *(f"{in_line(names)}: {meaning}." for meaning, names in meanings.items()),
    ]


def cost_sentence(results: ScaleOutcome) -> str:
    parameters = results.models[results.baseline].size.non_embedding
    return (
        f"{parameters:,} non-embedding parameters, {results.tokens_per_run:,} tokens "
        f"and {results.flops(results.baseline):.2g} FLOPs a run, {count(len(results.seeds), 'seed')}."
    )


def in_line(names: Sequence[str]) -> str:
    """Joins names, by semicolons if a name has a comma."""
    return ("; " if any("," in name for name in names) else ", ").join(names)


def outcome_sentence(results: ScaleOutcome) -> str:
    """All verdicts in one line, the clear ones first."""
    effects = results.statistics.effects.items()
    models = _by_text((describe_verdict(effect, len(results.models[name].runs)), name) for name, effect in effects)
    clear = [verdict for verdict in _CLEAR if verdict in models]
    verdicts = (
        f"{text.replace(':', ',').capitalize()}: {in_line(models[text])}." for text in dict.fromkeys([*clear, *models])
    )
    return " ".join([f"Baseline: {results.baseline}.", *verdicts])


def warning_sentences(outcome: Outcome, has_tests: bool = True) -> list[str]:
    """What a reader must know first, of the largest scale first."""
    warnings = []
    for name, scale in reversed(outcome.scales.items()):
        prefix = f"Scale {name}: " if len(outcome.scales) > 1 else ""
        warnings += [f"{prefix}{text}" for text in _warnings_of_scale(scale, has_tests)]
    if outcome.trend and outcome.trend.multiplier_note:
        warnings.append(outcome.trend.multiplier_note)
    return warnings


def _warnings_of_scale(results: ScaleOutcome, has_tests: bool) -> list[str]:
    warnings = []
    if results.same_tokens is False:
        warnings.append(
            "THE MODELS DID NOT SEE THE SAME TOKENS in the same order, as the hashes of the runs tell. What follows "
            "compares the data too, and its tests by seed do not hold."
        )
    for name, model in results.models.items():
        if len(model.kernels) > 1:
            warnings.append(f"The runs of {name} were computed in different ways: {' | '.join(model.kernels)}.")
        since = " from these seeds on" if results.interim else ""
        for end in ("smallest", "largest"):
            if seeds := {seed for seed, boundary in model.boundaries.items() if boundary == end}:
                rates = {run.learning_rate for run in model.runs if run.seed in seeds}
                listed = ", ".join(f"{rate:g}" for rate in sorted(rates))
                warnings.append(
                    f"{name} did best at {listed}, the {end} learning rate tried, in {len(seeds)} of "
                    f"{len(model.runs)} seeds: a better one may lie beyond, so there is no verdict{since}."
                )
        if diverged := len(model.runs) - len(model.finished):
            consequence = "it gets no verdict, for without its failures it would look better than it is"
            if name == results.baseline:
                consequence = "models get no verdict from these seeds"
            warnings.append(f"{name} diverged in {diverged} of {len(model.runs)} runs: {consequence}.")
    warning = power_warning(len(results.seeds), len(results.models) - 1, results.interim is not None)
    if has_tests and warning:
        warnings.append(f"{warning}.")
    if has_tests and len({len(model.learning_rates) > 1 for model in results.models.values()}) > 1:
        warnings.append("Some models chose among learning rates, and others had one: the choice favours the former.")
    if results.added_seeds:
        warnings.append(
            f"These seeds were added after a finished report: {', '.join(map(str, results.added_seeds))}. If its "
            "outcome was the reason, p is too small."
        )
    return warnings


def _about_rates(results: ScaleOutcome) -> list[str]:
    return [_EACH_SEED if results.has_choice else _ONE_RATE] if results.tested else []


def noise_floor_sentence(results: ScaleOutcome) -> str:
    statistics = results.statistics
    if statistics.noise_floor is None:
        return f"Noise floor: unknown; it needs at least two finished seeds of the baseline {results.baseline}."
    sentence = (
        f"Noise floor: the test loss of the baseline {results.baseline} varies by {statistics.noise_floor:.2g} nats "
        f"from seed to seed, {statistics.noise_floor_percent:.2g} % (standard deviation)"
    )
    if (share := results.noise_from_text) is None:
        return f"{sentence}; how much of it comes from the choice of the test text is unknown."
    percent = "less than 1" if share < 0.005 else f"about {100 * share:.0f}"
    return f"{sentence}; {percent} % of this variance comes from the choice of the test text."


def protocol_sentences(results: ScaleOutcome) -> list[str]:
    alpha, seeds, tested = results.statistics.alpha, results.seeds, len(results.tested)
    sentences = [
        noise_floor_sentence(results),
        f"{len(results.models)} models, {'up to ' if results.interim else ''}{count(len(seeds), 'seed')} "
        f"({', '.join(map(str, seeds))}), {results.tokens_per_run:,} tokens a run.",
        results.objective.loss_note,
        not results.objective.has_parts and NOTE,
        results.same_tokens
        and "Runs of one seed saw the same tokens in the same order, so models are compared seed by seed.",
    ]
    if results.has_choice:
        sentences += [
            "Each seed tried the learning rates of a model by itself and took the one with the lowest loss on the "
            "validation split. The reported loss is that of the same run on the test split, which was not used to "
            "choose.",
            any(model.search for model in results.models.values())
            and "The rates were searched for, until the best one had a worse neighbour on both sides or the limit was "
            "reached.",
        ]
    else:
        sentences.append("No learning rate was chosen. The losses are measured on the test split.")
    if results.interim:
        made = sum(len(model.runs) for model in results.models.values())
        sentences.append(
            f"From {FIRST_INTERIM} seeds on, each model still in question was compared with the baseline after every "
            "seed, by a paired t-test. It left as soon as there was a verdict: better, worse, or equivalent, which "
            "means that its interval, corrected for the number of models, lies within the noise floor. Half of the "
            f"probability of an error, {alpha:g}, belongs to the last analysis, the other half in equal parts to "
            f"those before it. Bonferroni's method corrects p for all models and analyses. {made} of at most "
            f"{len(seeds) * len(results.models)} runs are reported."
        )
    elif tested:
        sentences.append(
            "Each model is tested by a paired t-test on its differences from the baseline, seed by seed. Holm's "
            f"method corrects p for {count(tested, 'test')}; better or worse means a corrected p below {alpha:g}. "
            "Intervals are 95 % t intervals of one model each, not corrected, so an interval may exclude 0 where the "
            "verdict is within noise."
        )
    if tested:
        sentences.append(
            "Intervals count the parts of the test text as they count seeds, so they hold for other texts of the same "
            "kind. The tests are about this text."
            if results.counts_text
            else "Tests and intervals are about this test text: it is too short to tell how much its choice matters."
            if results.objective.has_parts
            else "Tests and intervals count seeds alone: the rows of the test are taken as they are."
        )
    speed = "Speed and time are the median of the reported runs, and memory the most of any."
    return [text for text in (*sentences, *_about_rates(results), speed) if text]

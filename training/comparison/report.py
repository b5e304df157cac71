"""The report of a comparison, made from its outcome alone, and parts of it for terminals and cards."""

import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from functools import singledispatch
from pathlib import Path

import numpy as np
import yaml
from matplotlib import rc_context, rcParamsDefault

from ..disk import delete, read_bytes
from ..files import PAGE_FILE, RESULTS_FILE, files_in, read_json
from ..sharing.scrub import without_folders
from ..text import Markdown, align, code, count, plain
from .conditions import SumVerdict
from .config import ComparisonConfig
from .figures import FIGURES, FIGURES_OF_A_LADDER, figure_section
from .inference import FIRST_INTERIM, ROUNDING, Verdict, alpha_of_last, noise_range, power_warning
from .lr_search import LEARNING_RATE
from .render import Rows, Section, bullets, to_text, warning, write_sections
from .results import Outcome, ScaleOutcome, read_outcome
from .status import CONFIRMATION
from .tables import (
    ACCURACY_NOTE,
    BONFERRONI,
    INTERACTIONS_CAPTION,
    describe_verdict,
    given_fields,
    improvement_rows,
    interaction_rows,
    p_value,
    point_rows,
    points_sentence,
    provenance,
    rate_rows,
    run_rows,
    stability_rows,
    summary_rows,
    task_rows,
    trend_tables,
    tuning_gain,
    with_interval,
)
from .trend import COMPUTE, TrendVerdict


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
    "Scores of the reported runs, mean and standard deviation over seeds, judged seed by seed; only seeds count. The "
    "improvement is in percent of the baseline's score where lower is better, and of its distance from 1 for "
    "accuracies and probabilities (the rate of errors). Holm's method corrects p over the models, for each metric by "
    "itself: with many metrics, some verdicts are chance."
)
_STABILITY_CAPTION = "At the last recorded step of the reported runs: mean and standard deviation over seeds."

# One of these stands beside every p-value and interval
_EACH_SEED = "Every seed chooses among the {} anew, so p and the intervals include the risk of that choice."
_TAKEN_POINTS = (
    "Each seed took its points over from the first scale, so no gain of tuning is measured here, and other points may "
    "suit this scale better. p and the intervals include the risk of the choice."
)
_NOT_TUNED = (
    "Other nuisance parameters, such as initial weights and warm-up, were not tuned: a verdict may hang on their "
    "values in the recipe. The field tune searches them for each model."
)
_ONE_RATE = (
    "Each model has one learning rate, so p and the intervals do not include the risk that another rate suits it "
    "better: a difference may be one between rates and not between models."
)
_TEXT = (
    "The parts of the test text count as seeds do: p is the larger of the paired test's and of a test over seeds and "
    "parts, and the interval is the wider of the two. So both hold for other texts of the same kind."
)
_TEXT_OF_INTERVALS = (
    "Intervals count the parts of the test text as they count seeds, so they hold for other texts of the same kind. "
    "The tests are about this text."
)
_NO_PARTS = "Only seeds count: the rows of the test are taken as they are."
_NO_TEXT = (
    "Only seeds count: tests and intervals are about this test text. Too few of its parts are known to tell how much "
    "its choice matters."
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
        tables, notes = [improvement_rows(outcome.trend)], outcome_sentences(outcome)
    elif outcome.interactions:
        scales = outcome.scales.items()
        rows = [{"condition": name, **row} for name, each in scales for row in _columns(each, _TERMINAL_COLUMNS)]
        tables, notes = [rows, interaction_rows(outcome)], outcome_sentences(outcome)
    else:
        primary = [primary_sentence(outcome)] if outcome.primary else []
        tables, notes = [_columns(outcome.largest, _TERMINAL_COLUMNS)], [*primary, *_notes(outcome.largest)]

    def wrap(sentences: Iterable[str]) -> list[str]:
        return [textwrap.fill(text, _TERMINAL_WIDTH, subsequent_indent="  ") for text in sentences]

    warnings = wrap(f"warning: {text}" for text in warning_sentences(outcome))
    return "\n".join([*warnings, *itertools.chain(*map(table_lines, tables)), *wrap(notes)])


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
    elif outcome.interactions:
        names = ", ".join(outcome.scales)
        parts += [f"This is the condition {scale} of {len(outcome.scales)}: {names}.", interaction_rows(outcome)]
    parts += [primary_sentence(outcome)] if outcome.primary else []
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
    names = (run.parent.name, run.name, run.parents[2].name if outcome.axis else None)
    text = verdicts(outcome, *names) if folder in run.parents else verdicts(outcome)
    text = f"{text}\n\nThe whole report, with every run, is in [comparison/results.md](comparison/results.md)."
    return Markdown(without_folders(text)), contents


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
        Markdown(f"{code(outcome.command)}, which is after the command line:"),
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
    early = [_EARLY] if results.interim else []
    return Section("Models", [summary_rows(results), *early, "What differs between them:", bullets(differences)])


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


def outcome_sentences(outcome: Outcome) -> list[str]:
    sentences = [primary_sentence(outcome)] if outcome.primary else []
    if outcome.interactions:
        sentences += [f"Condition {name}. {outcome_sentence(results)}" for name, results in outcome.scales.items()]
        return [*sentences, interaction_sentence(outcome)]
    sentence = outcome_sentence(outcome.largest)
    if outcome.trend is None:
        return [*sentences, sentence]
    return [*sentences, f"Largest scale: {list(outcome.scales)[-1]}. {sentence}", trend_sentence(outcome)]


def primary_sentence(outcome: Outcome) -> str:
    about, test = f"Primary test, {outcome.primary.about}", outcome.primary.test
    if test.note:
        return f"{about}: {test.verdict} ({test.note})."
    margin = ""
    if test.margin is not None:
        low, high = test.margin_interval
        margin = f" Equivalent means that its 90 % interval, [{low:+.2f}, {high:+.2f}], is within {test.margin:g} %."
    return (
        f"{about}: {test.verdict}, {with_interval(test.value, test.interval, '+.2f')} % of the baseline's loss, p "
        f"{p_value(test.p)}.{margin} It counts seeds, not the choice of the test data. It was tested first, at 5 % "
        f"without a correction; {count(outcome.largest.statistics.family, 'other test')} together are one family."
    )


def interaction_sentence(outcome: Outcome) -> str:
    words = {SumVerdict.ABOVE: "more", SumVerdict.BELOW: "less"}
    found = [
        f"{each.model} improves {words[each.test.verdict]} under {each.conditions[1]} than under {each.conditions[0]}"
        for each in outcome.interactions
        if each.test.verdict in words
    ]
    none = "none found" if any(each.test.p is not None for each in outcome.interactions) else "none tested"
    reasons = dict.fromkeys(each.test.note for each in outcome.interactions if each.test.note)
    why = f" (no test: {'; '.join(reasons)})" if reasons else ""
    return f"Interactions of models and conditions: {'; '.join(found) or none}{why}."


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
        *([] if trend.axis == COMPUTE else [trend.multiplier_note]),
    ]


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
    warnings, planned, names = [], outcome.largest.statistics.family, list(outcome.scales)
    if planned is not None:
        planned = ComparisonConfig.read(outcome.comparison, outcome.name).family
    for name in reversed(names) if outcome.trend else names:
        prefix = f"{outcome.axis.one.capitalize()} {name}: " if outcome.axis else ""
        warnings += [f"{prefix}{text}" for text in _warnings_of_scale(outcome.scales[name], has_tests, planned)]
    if outcome.trend and outcome.trend.axis == COMPUTE and outcome.trend.multiplier_note:
        warnings.append(outcome.trend.multiplier_note)
    return warnings


def _warnings_of_scale(results: ScaleOutcome, has_tests: bool, planned: int | None) -> list[str]:
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
        for field, values in results.tuned.ranges.items() if results.tuned else ():
            # Searches for the learning rate go beyond its range
            points = [run.point for run in model.finished if run.trial and field != LEARNING_RATE]
            ends = [end for point in points if (end := values.end_near(point[field])) is not None]
            if ends and len(ends) >= len(model.runs) / 2:
                listed = " and ".join(f"{end:g}" for end in sorted(set(ends)))
                warnings.append(
                    f"{name} did best with {field} {'at' if values.values else 'near'} {listed}, the end of its range "
                    f"({values}), in {len(ends)} of {len(model.runs)} seeds: better values may lie beyond."
                )
    counts, made = (len(results.seeds), len(results.models) - 1), results.statistics.family
    warning = power_warning(*counts, results.interim is not None, made or planned)
    if has_tests and warning:
        fewer = "" if made == planned else f" (of {planned} planned tests, {made} could be made)"
        warnings.append(f"{warning}{fewer}.")
    if has_tests and len({len(model.learning_rates) > 1 for model in results.models.values()}) > 1:
        warnings.append("Some models chose among learning rates, and others had one: the choice favours the former.")
    if results.added_seeds:
        warnings.append(
            f"These seeds were added after a finished report: {', '.join(map(str, results.added_seeds))}. If its "
            "outcome was the reason, p is too small."
        )
    return warnings


def _about_rates(results: ScaleOutcome) -> list[str]:
    if not results.tested:
        return []
    if results.tuned is None:
        return [_EACH_SEED.format("learning rates") if results.has_choice else _ONE_RATE, _NOT_TUNED]
    gains = ", ".join(f"{name} {tuning_gain(model)}" for name, model in results.models.items() if model.untuned)
    if not gains:
        return [_TAKEN_POINTS]
    start, more = (", at the learning rate where the search began,", []) if results.has_choice else ("", [_ONE_RATE])
    gains = f"By tuning, the test loss fell below that of the recipe's own values{start} by: {gains}."
    return [_EACH_SEED.format("points"), *more, f"{gains} A verdict that is smaller may hang on what was not tuned."]


def noise_floor_sentence(results: ScaleOutcome) -> str:
    statistics = results.statistics
    if statistics.noise_floor is None:
        return f"Noise floor: unknown; it needs at least two finished seeds of the baseline {results.baseline}."
    sentence = (
        f"Noise floor: the test loss of the baseline {results.baseline} varies by {statistics.noise_floor:.2g} nats "
        f"from seed to seed, {statistics.noise_floor_percent:.2g} % (standard deviation)"
    )
    if (share := results.noise_from_text) is None:
        unknown = "; how much of it comes from the choice of the test text is unknown"
        return f"{sentence}{unknown if results.objective.has_parts else ''}."
    percent = "less than 1" if share < 0.005 else f"about {100 * share:.0f}"
    return f"{sentence}; {percent} % of this variance comes from the choice of the test text."


def power_sentence(results: ScaleOutcome) -> str | None:
    """Says what a comparison finds by the noise of its paired differences; None where nothing has noise."""
    analysis, has_interim = results.statistics, results.interim is not None
    alpha = alpha_of_last(len(results.seeds), has_interim) / (analysis.family or len(analysis.effects))
    tested = [effect for effect in analysis.effects.values() if (effect.standard_error or 0.0) > ROUNDING]
    if not tested or not analysis.baseline_mean_loss:
        return None
    most = max(effect.pairs for effect in tested)
    smallest = [effect.widest(alpha).smallest(alpha) for effect in tested if effect.pairs == most]
    percents = 100 * np.array([*smallest, math.sqrt(np.square(smallest).mean())]) / abs(analysis.baseline_mean_loss)
    ends = [percents[-1] * end for end in noise_range(most - 1)]
    numbers = (percents[-1], percents.min(), percents.max(), *ends)
    mean, least, greatest, low, high = (f"{number:.{2 if number < 100 else 3}g}" for number in numbers)
    return (
        f"By the noise of paired differences, {count(most, 'seed')} find a difference of {mean} % with a probability "
        f"of 80 % (root mean square over the models, {least} to {greatest} % by model); {low} to {high} % by the 95 % "
        "range of this noise. If the true difference is smaller, an estimate with a verdict is too large on average."
    )


def protocol_sentences(results: ScaleOutcome) -> list[str]:
    alpha, seeds, tested = results.statistics.alpha, results.seeds, len(results.tested)
    family = results.statistics.family
    sentences = [
        noise_floor_sentence(results),
        f"{len(results.models)} models, {'up to ' if results.interim else ''}{count(len(seeds), 'seed')} "
        f"({', '.join(map(str, seeds))}), {results.tokens_per_run:,} tokens a run.",
        results.objective.loss_note,
        not results.objective.has_parts and ACCURACY_NOTE,
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
            f"method corrects p for {count(family or tested, 'test')}; better or worse means a corrected p below "
            f"{alpha:g}. "
            "Intervals are 95 % t intervals of one model each, not corrected, so an interval may exclude 0 where the "
            "verdict is within noise."
        )
    if tested:
        is_older = results.statistics.counts_text is None and results.counts_text
        no_text = _NO_TEXT if results.objective.has_parts else _NO_PARTS
        sentences += [_TEXT_OF_INTERVALS if is_older else _TEXT if results.statistics.counts_text else no_text]
        sentences += [power_sentence(results)]
    speed = "Speed and time are the median of the reported runs, and memory the most of any."
    return [text for text in (*sentences, *_about_rates(results), speed) if text]

"""The sentences of a report: what came out, what to beware of, and how it was measured."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ..text import count
from .conditions import Primary, SumVerdict
from .config import ComparisonConfig
from .inference import ALPHA, FIRST_INTERIM, ROUNDING, Verdict, alpha_of_last, noise_range, power_warning
from .lr_search import LEARNING_RATE
from .results import Outcome, ScaleOutcome
from .tables import (
    ACCURACY_NOTE,
    FISHER,
    LEARNED,
    NOTHING,
    accuracy_cells,
    describe_verdict,
    p_value,
    tuning_gain,
    with_interval,
)
from .trend import COMPUTE, TrendVerdict


# The verdicts that stand first in a sentence
_CLEAR = (Verdict.BETTER, Verdict.WORSE, Verdict.EQUIVALENT, Verdict.WITHIN_NOISE)

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
_KEPT_RATES = "Other learning rates may suit this scale better. p and the intervals include the risk of the choice."
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
EARLY = (
    "A model leaves when its difference looks large, so the improvement of a model that left early is too large on "
    "average: after 3 seeds by 84, 27 and 13 % of a true difference of 1, 2 and 3 standard deviations, if runs of a "
    "seed share no noise. Its interval is wider than one of 95 %, for it holds at all interim analyses together."
)


def outcome_sentences(outcome: Outcome) -> list[str]:
    sentences = [*primary_sentences(outcome), *learned_sentences(outcome)]
    if outcome.interactions:
        sentences += [f"Condition {name}. {outcome_sentence(results)}" for name, results in outcome.scales.items()]
        return [*sentences, interaction_sentence(outcome)]
    sentence = outcome_sentence(outcome.largest)
    if outcome.trend is None:
        return [*sentences, sentence]
    return [*sentences, f"Largest scale: {list(outcome.scales)[-1]}. {sentence}", trend_sentence(outcome)]


def primary_sentences(outcome: Outcome) -> list[str]:
    """Returns a sentence for each primary test, the last with how they were made."""
    tests = len(outcome.primary)
    sentences = [_primary_sentence(primary, tests) for primary in outcome.primary]
    if any(not primary.test.note for primary in outcome.primary):
        counts, first = "It counts", "It was tested first, at 5 % without a correction"
        if tests > 1:
            counts, first = "They count", "They were tested first, at 5 %, corrected among themselves by Holm's method"
        sentences[-1] += (
            f" {counts} seeds, not the choice of the test data. {first}; "
            f"{count(outcome.largest.statistics.family, 'other test')} together are one family."
        )
    return sentences


def _primary_sentence(primary: Primary, tests: int) -> str:
    about, test = f"{f'Primary test {primary.name}'.strip()}, {primary.about}", primary.test
    if test.note:
        return f"{about}: {test.verdict} ({test.note})."
    corrected, margin = f", Holm p {p_value(test.holm_p)}" if tests > 1 else "", ""
    if test.margin is not None:
        (low, high), confidence = test.margin_interval, f"{100 * (1 - 2 * ALPHA / tests):.3g} %"
        within = f"[{low:+.2f}, {high:+.2f}], is within {test.margin:g} %"
        margin = f" Equivalent means that its {confidence} interval, {within}."
    return (
        f"{about}: {test.verdict}, {with_interval(test.value, test.interval, '+.2f')} % of the baseline's loss, p "
        f"{p_value(test.p)}{corrected}.{margin}"
    )


def learned_sentences(outcome: Outcome) -> list[str]:
    """Returns for each scale or condition of a synthetic task how many seeds learned it."""
    sentences = []
    for place, results in outcome.scales.items():
        models = [
            f"{name} {cells[LEARNED]}" + ("" if cells[FISHER] == NOTHING else f" (Holm p {cells[FISHER]})")
            for name, cells in accuracy_cells(results).items()
        ]
        where = f", {outcome.axis.one} {place}" if outcome.axis else ""
        if models:
            sentences.append(f"Seeds that learned the task{where}: {in_line(models)}.")
    return sentences


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
        family = f"for {count(tested, 'model')}"
        if outcome.primary:
            family = "with the other tests of this comparison, unless it is a primary test,"
        test = (
            "The slope is that of the improvements in percent of the baseline's loss, seed by seed, against the "
            f"logarithm of {trend.axis}. Grows and shrinks mean that it differs from 0: a p below {trend.alpha:g}, "
            f"corrected {family} by Holm's method."
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
    warnings, at_ends = [], []
    if results.same_tokens is False:
        warnings.append(
            "THE MODELS DID NOT SEE THE SAME TOKENS in the same order, as the hashes of the runs tell. What follows "
            "compares the data too, and its tests by seed do not hold."
        )
    for name, model in results.models.items():
        if len(model.kernels) > 1:
            warnings.append(f"The runs of {name} were computed in different ways: {' | '.join(model.kernels)}.")
        for end in ("smallest", "largest"):
            if seeds := {seed for seed, boundary in model.boundaries.items() if boundary == end}:
                rates = {run.learning_rate for run in model.runs if run.seed in seeds}
                listed = ", ".join(f"{rate:g}" for rate in sorted(rates))
                at_ends.append(f"{name} at {listed}, the {end}, in {len(seeds)} of {len(model.runs)} seeds")
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
    if at_ends:
        since = " from these seeds on" if results.interim else ""
        which = "any model" if results.models[results.baseline].boundaries else "these models"
        warnings.append(
            "The best learning rate was the smallest or largest tried, so a better one may lie beyond, and there is "
            f"no verdict on {which}{since}: {'; '.join(at_ends)}."
        )
    counts, made = (len(results.seeds), len(results.models) - 1), results.statistics.family
    warning = power_warning(*counts, results.interim is not None, made or planned)
    if has_tests and warning:
        fewer = "" if made == planned else f" (of {planned} planned tests, {made} could be made)"
        warnings.append(f"{warning}{fewer}.")
    if has_tests and len({model.has_choice for model in results.models.values()}) > 1:
        warnings.append("Some models chose among learning rates, and others had one: the choice favours the former.")
    if results.added_seeds:
        seeds = ", ".join(map(str, results.added_seeds))
        which = f"Seed {seeds} was" if len(results.added_seeds) == 1 else f"Seeds {seeds} were"
        warnings.append(f"{which} added after a finished report. If its outcome was the reason, p is too small.")
    return warnings


def about_rates(results: ScaleOutcome) -> list[str]:
    if not results.tested:
        return []
    if results.tuned is None:
        one = _KEPT_RATES if results.keeps_rates else _ONE_RATE
        return [_EACH_SEED.format("learning rates") if results.has_choice else one, _NOT_TUNED]
    tuned = {name: tuning_gain(model) for name, model in results.models.items() if model.untuned}
    if not tuned:
        return [_TAKEN_POINTS]
    start, more = (", at the learning rate where the search began,", []) if results.has_choice else ("", [_ONE_RATE])
    listed = ", ".join(f"{name} {gain}" for name, gain in tuned.items())
    gains = f"By tuning, the test loss fell below that of the recipe's own values{start} by: {listed}."
    return [_EACH_SEED.format("points"), *more, f"{gains} A verdict that is smaller may hang on what was not tuned."]


def noise_floor_sentence(results: ScaleOutcome) -> str:
    statistics = results.statistics
    if statistics.noise_floor is None:
        return f"Noise floor: unknown; it needs at least two finished seeds of the baseline {results.baseline!r}."
    percent = statistics.noise_floor_percent  # None of a mean loss of 0
    sentence = (
        f"Noise floor: the test loss of the baseline {results.baseline!r} varies by {statistics.noise_floor:.2g} nats "
        f"from seed to seed{'' if percent is None else f', {percent:.2g} %'} (standard deviation)"
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
        results.interim and bool(results.accuracies) and "With `stop: early`, Fisher's exact test is left out.",
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
        kept = "Each seed kept the learning rate that it chose last, at a smaller scale."
        none = kept if results.keeps_rates else "No learning rate was chosen."
        sentences.append(f"{none} The losses are measured on the test split.")
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
    return [text for text in (*sentences, *about_rates(results), speed) if text]

"""The sentences of a report: the outcome, how it was measured, and what limits it. Some are about one scale, some about all."""

from collections.abc import Callable, Mapping

from .inference import EQUIVALENT, FIRST_INTERIM, WITHIN_NOISE, noise_ratio, power_warning
from .outcome import ModelOutcome, Outcome, ScaleOutcome


# One of these stands beside every p-value and interval
_EACH_SEED = "Every seed chooses among the learning rates anew, so p and the intervals include the risk of that choice."
_ONE_RATE = (
    "Each model has one learning rate, so p and the intervals do not include the risk that another rate suits it better: a "
    "difference may be one between rates and not between models."
)

# The share of wrong verdicts is the largest that the benchmark measures
_UNEQUAL_NOISE = (
    "The test losses of {} vary {:.1f} times as much from seed to seed as those of {}. If noise is strongly skewed, too, "
    "which a few seeds cannot show, p is too small: up to 17 % of simulated comparisons of equal models had a wrong verdict, "
    "not 5 %."
)


def outcome_sentences(outcome: Outcome) -> list[str]:
    """The verdicts in one line, those at the largest scale if there are several, and then the trend in another."""
    name, found = list(outcome.scales.items())[-1]
    if outcome.trend is None:
        return [outcome_sentence(found)]
    return [f"Largest scale: {name}. {outcome_sentence(found)}", trend_sentence(outcome)]


def first_warnings(outcome: Outcome) -> list[str]:
    """What a reader must know before the outcome, of each scale."""
    return of_each_scale(outcome.scales, first_warning_sentences)


def last_warnings(outcome: Outcome) -> list[str]:
    """The limits of the outcome that stand after it: those of each scale, and of the trend."""
    note = outcome.trend.multiplier_note if outcome.trend else ""
    return [*of_each_scale(outcome.scales, warning_sentences), *([note] if note else [])]


def of_each_scale(scales: Mapping[str, ScaleOutcome], sentences: Callable[[ScaleOutcome], list[str]]) -> list[str]:
    """The sentences about each scale, the largest first."""
    return [f"Scale {name}: {text}" if name else text for name, found in reversed(scales.items()) for text in sentences(found)]


def trend_sentence(outcome: Outcome) -> str:
    """The verdicts of the trend in one line."""
    verdicts: dict[str, list[str]] = {verdict: [] for verdict in ("grows", "shrinks", "cannot tell")}
    for name, trend in outcome.trend.models.items():
        verdicts[trend.verdict].append(name)
    found = [f"{verdict} ({', '.join(names)})" for verdict, names in verdicts.items() if names]
    return f"Trend of the improvement over the scales: {', '.join(found)}."


def trend_protocol(outcome: Outcome) -> list[str]:
    """How the trend was judged."""
    trend = outcome.trend
    tested = sum(found.p is not None for found in trend.models.values())
    meanings: dict[str, list[str]] = {}
    for name, found in trend.models.items():
        meanings.setdefault(found.meaning, []).append(name)
    return [
        "The verdict at the largest scale is the judgement. The trend explains it.",
        "No model is tested over the scales."
        if not tested
        else "The slope is that of the improvements in percent of the baseline's loss, seed by seed, against the logarithm of "
        f"compute. Grows and shrinks mean that it differs from 0: a p below {trend.alpha:g}, corrected for {tested} models "
        "by Holm's method.",
        *(f"{', '.join(names)}: {meaning}." for meaning, names in meanings.items()),
    ]


def cost_sentence(found: ScaleOutcome) -> str:
    """What a run of the baseline costs at one scale."""
    return (
        f"{found.models[found.baseline].non_embedding_parameters:,} non-embedding parameters, {found.tokens_per_run:,} tokens "
        f"and {found.flops(found.baseline):.2g} FLOPs a run, {len(found.seeds)} seeds."
    )


def outcome_sentence(found: ScaleOutcome) -> str:
    """All verdicts in one line, the clear ones first."""
    models: dict[str, list[str]] = {"better": [], "worse": [], EQUIVALENT: [], WITHIN_NOISE: []}
    for name, effect in found.statistics.effects.items():
        models.setdefault(effect.verdict, []).append(name)
    verdicts = [f"{verdict.replace(':', ',').capitalize()}: {', '.join(names)}." for verdict, names in models.items() if names]
    return " ".join([f"Baseline: {found.baseline}.", *verdicts])


def first_warning_sentences(found: ScaleOutcome) -> list[str]:
    """What a reader must know before the outcome: other tokens, best rates at the boundary, models without any good rate."""
    warnings = []
    if found.same_tokens is False:
        warnings.append(
            "THE MODELS DID NOT SEE THE SAME TOKENS in the same order, as the hashes of the runs tell. What follows compares "
            "the data too, and its tests by seed do not hold."
        )
    for name, model in found.models.items():
        if len(model.kernels) > 1:
            warnings.append(f"The runs of {name} were computed in different ways: {' | '.join(model.kernels)}.")
        warnings += _boundary_warnings(name, model)
        warnings += _diverged_warnings(name, model)
    return warnings


def warning_sentences(found: ScaleOutcome) -> list[str]:
    """The limits of the outcome that stand after it, the worst first."""
    warnings = []
    if warning := power_warning(len(found.seeds), len(found.models) - 1, found.statistics.alpha):
        warnings.append(f"{warning}.")
    if added := found.added_seeds:
        warnings.append(
            f"Seed{'s' * (len(added) > 1)} {', '.join(map(str, added))} {'were' if len(added) > 1 else 'was'} added after a "
            "finished report. If its outcome was the reason, p is too small."
        )
    for name, model in found.models.items():
        diverged, runs = len(model.runs) - len(model.finished), len(model.runs)
        if diverged and name == found.baseline:
            warnings.append(
                f"{name}, the baseline, diverged in {diverged} of {runs} runs: there are no verdicts"
                f"{' on models compared at these seeds' if found.interim else ''}."
            )
        elif 0 < diverged < runs:
            warnings.append(
                f"{name} diverged in {diverged} of {runs} runs. Its other runs get no verdict: without its failures it would "
                "look better than it is."
            )
        elif diverged and model.chosen:
            warnings.append(f"{name} diverged in all of its runs.")
    losses, baseline = found.losses, found.baseline
    if ratio := noise_ratio({name: losses[name] for name in (baseline, *found.tested)}, baseline):
        others, baseline = f"the other model{'s' * (len(found.tested) > 1)}", "the baseline"
        louder, calmer = (others, baseline) if ratio > 1 else (baseline, others)
        warnings.append(_UNEQUAL_NOISE.format(louder, max(ratio, 1 / ratio), calmer))
    return warnings


def _boundary_warnings(name: str, model: ModelOutcome) -> list[str]:
    """Says where the best rate of a model is the smallest or the largest tried."""
    warnings = []
    for end in dict.fromkeys(sorted(model.boundaries.values(), reverse=True)):
        seeds = [seed for seed, found in model.boundaries.items() if found == end]
        rates = sorted({run.learning_rate for run in model.runs if run.seed in seeds})
        where = f"at {', '.join(f'{rate:g}' for rate in rates)}, the {end} learning rate tried"
        if len(seeds) < len(model.runs):
            where += f", in {len(seeds)} of {len(model.runs)} seeds"
        after = (
            f"{_end_of_search(model)}, so there is no verdict"
            if model.search
            else "the file asked for just these rates, and a better one may lie beyond"
        )
        warnings.append(f"{name} did best {where}: {after}.")
    return warnings


def _diverged_warnings(name: str, model: ModelOutcome) -> list[str]:
    """Says where a model diverged at every rate tried, by all seeds or by some."""
    chosen = len(model.chosen)
    if chosen == len(model.runs) > 0:
        return []
    if chosen:
        tried = f", in {len(model.runs) - chosen} of {len(model.runs)} seeds"
    else:
        tried = f" ({', '.join(f'{rate:g}' for rate in model.learning_rates)})"
    end = f": {_end_of_search(model)}, and smaller rates were not tried" if model.search else ""
    return [f"{name} diverged at every learning rate tried{tried}{end}."]


def _end_of_search(model: ModelOutcome) -> str:
    return f"the search stopped at its limit of {model.search['limit']} rates"


def selection_sentences(found: ScaleOutcome) -> list[str]:
    """Whether tests and intervals include the risk of a wrong learning rate."""
    return [_EACH_SEED if found.has_choice else _ONE_RATE] if found.tested else []


def noise_floor_sentence(found: ScaleOutcome) -> str:
    """How much the losses of the baseline vary, and how much of it is due to the choice of the test text."""
    statistics = found.statistics
    if statistics.noise_floor is None:
        return f"Noise floor: unknown; it needs at least two finished seeds of the baseline {found.baseline}."
    sentence = (
        f"Noise floor: the test loss of the baseline {found.baseline} varies by {statistics.noise_floor:.2g} nats from seed "
        f"to seed, {statistics.noise_floor_percent:.2g} % (standard deviation)"
    )
    if (share := found.noise_from_text) is None:
        return f"{sentence}."
    text = "the test text" if found.test_tokens is None else f"the test text of {found.test_tokens:,} tokens"
    if share > 0.995:
        return f"{sentence}; all of this variance may come from the choice of {text}."
    percent = "less than 1 %" if share < 0.005 else f"about {100 * share:.0f} %"
    return f"{sentence}; {percent} of this variance comes from the choice of {text}, the rest from training."


def protocol_sentences(found: ScaleOutcome) -> list[str]:
    """How the numbers were measured."""
    statistics, seeds, tested = found.statistics, found.seeds, found.tested
    level, count = f"{100 * statistics.confidence:g} %", "up to " if found.interim else ""
    sentences = [
        noise_floor_sentence(found),
        f"{len(found.models)} models, {count}{len(seeds)} seed{'s' * (len(seeds) != 1)} ({', '.join(map(str, seeds))}), "
        f"{found.tokens_per_run:,} tokens a run.",
    ]
    if found.same_tokens:
        sentences.append("Runs of one seed saw the same tokens in the same order, so models are compared seed by seed.")
    if found.has_choice:
        sentences.append(
            "Each seed tried the learning rates of a model by itself and took the one with the lowest loss on the validation "
            "split. The reported loss is that of the same run on the test split, which was not used to choose."
        )
        if any(model.search for model in found.models.values()):
            sentences.append(
                "The rates were searched for: as long as the best rate was the smallest or the largest one tried, the next one "
                "beyond was tried, too."
            )
    else:
        sentences.append("No learning rate was chosen. The losses are measured on the test split.")
    if found.interim:
        made = sum(len(model.runs) for model in found.models.values())
        most, models = len(seeds) * len(found.models), len(found.interim)
        sentences.append(
            f"From {FIRST_INTERIM} seeds on, each model still in question was compared with the baseline after every seed, by "
            "a paired t-test on its differences from the baseline. It left as soon as there was a verdict: better, worse, or "
            "equivalent, which means that its interval, corrected for the number of models, lies within the noise floor on "
            f"both sides. Half of the probability of an error, {statistics.alpha:g}, belongs to the analysis at "
            f"{len(seeds)} seeds, the other half in equal parts to those before it. Bonferroni's method corrects p "
            f"for {models} model{'s' * (models != 1)} and all interim analyses. Intervals are {level} intervals of one model "
            f"each, which hold at all analyses together. {made} of at most {most} runs are reported."
        )
    elif tested:
        sentences.append(
            "Each model is tested by a paired t-test on its differences from the baseline, seed by seed, and by them alone. "
            f"Holm's method corrects p for {len(tested)} test{'s' * (len(tested) != 1)}; better or worse means a corrected p "
            f"below {statistics.alpha:g}. Intervals are {level} t intervals of one model each, not corrected, so an interval "
            "may exclude 0 where the verdict is within noise."
        )
    sentences += selection_sentences(found)
    sentences.append(
        "Speed and time are the median of the reported runs, and memory the most of any"
        + (" process, libraries included" if found.device == "cpu" else "")
        + ". All three depend on what else the machine was doing."
    )
    return sentences

"""The sentences of a report: the outcome, how it was measured, and what limits it. Some are about one scale, some about all."""

from collections.abc import Callable
from typing import Any

from .inference import EQUIVALENT, FIRST_INTERIM, WITHIN_NOISE, noise_ratio, power_warning
from .results import losses_by_seed
from .tables import chosen_runs, scales_in


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


def outcome(results: dict[str, Any]) -> list[str]:
    """The verdicts in one line, those at the largest scale if there are several, and then the trend in another."""
    name, found = list(scales_in(results).items())[-1]
    if "trend" not in results:
        return [outcome_sentence(found)]
    return [f"Largest scale: {name}. {outcome_sentence(found)}", trend_sentence(results)]


def first_warnings(results: dict[str, Any]) -> list[str]:
    """What a reader must know before the outcome, of each scale."""
    return _of_each_scale(scales_in(results), first_warning_sentences)


def last_warnings(results: dict[str, Any]) -> list[str]:
    """The limits of the outcome that stand after it: those of each scale, and of the trend."""
    warnings = _of_each_scale(scales_in(results), warning_sentences)
    note = results["trend"]["multiplier_note"] if "trend" in results else ""
    return [*warnings, note] if note else warnings


def warnings_of_others(results: dict[str, Any], scale: str) -> list[str]:
    """What a reader must know before the outcome at a scale, of the other scales."""
    return _of_each_scale({name: found for name, found in scales_in(results).items() if name != scale}, first_warning_sentences)


def _of_each_scale(scales: dict[str, dict[str, Any]], sentences: Callable[[dict[str, Any]], list[str]]) -> list[str]:
    """The sentences about each scale, the largest first."""
    return [f"Scale {name}: {text}" if name else text for name, found in reversed(scales.items()) for text in sentences(found)]


def trend_sentence(results: dict[str, Any]) -> str:
    """The verdicts of the trend in one line."""
    verdicts: dict[str, list[str]] = {verdict: [] for verdict in ("grows", "shrinks", "cannot tell")}
    for name, trend in results["trend"]["models"].items():
        verdicts[trend["verdict"]].append(name)
    found = [f"{verdict} ({', '.join(names)})" for verdict, names in verdicts.items() if names]
    return f"Trend of the improvement over the scales: {', '.join(found)}."


def trend_protocol(results: dict[str, Any]) -> list[str]:
    """How the trend was judged."""
    trend = results["trend"]
    tested = sum(found["p"] is not None for found in trend["models"].values())
    meanings: dict[str, list[str]] = {}
    for name, found in trend["models"].items():
        meanings.setdefault(found["meaning"], []).append(name)
    return [
        "The verdict at the largest scale is the judgement. The trend explains it.",
        "No model is tested over the scales."
        if not tested
        else "The slope is that of the improvements in percent of the baseline's loss, seed by seed, against the logarithm of "
        f"compute. Grows and shrinks mean that it differs from 0: a p below {trend['alpha']:g}, corrected for {tested} models "
        "by Holm's method.",
        *(f"{', '.join(names)}: {meaning}." for meaning, names in meanings.items()),
    ]


def cost_sentence(results: dict[str, Any]) -> str:
    """What a run of the baseline costs at one scale."""
    baseline = results["models"][results["baseline"]]
    flops = baseline["flops_per_token"] * results["tokens_per_run"]
    return (
        f"{baseline['non_embedding_parameters']:,} non-embedding parameters, {results['tokens_per_run']:,} tokens and "
        f"{flops:.2g} FLOPs a run, {len(results['seeds'])} seeds"
    )


def outcome_sentence(results: dict[str, Any]) -> str:
    """All verdicts in one line, the clear ones first."""
    models: dict[str, list[str]] = {"better": [], "worse": [], EQUIVALENT: [], WITHIN_NOISE: []}
    for name, effect in results["statistics"]["effects"].items():
        models.setdefault(effect["verdict"], []).append(name)
    verdicts = [f"{verdict.replace(':', ',').capitalize()}: {', '.join(names)}." for verdict, names in models.items() if names]
    return " ".join([f"Baseline: {results['baseline']}.", *verdicts])


def first_warning_sentences(results: dict[str, Any]) -> list[str]:
    """What a reader must know before the outcome: other tokens, best rates at an edge, and models without any good rate."""
    warnings = []
    if results["same_tokens"] is False:
        warnings.append(
            "THE MODELS DID NOT SEE THE SAME TOKENS in the same order, as the hashes of the runs tell. What follows compares "
            "the data too, and its tests by seed do not hold."
        )
    for name, model in results["models"].items():
        if len(kernels := model.get("kernels", [])) > 1:
            warnings.append(f"The runs of {name} were computed in different ways: {' | '.join(kernels)}.")
        warnings += _edge_warnings(name, model)
        warnings += _diverged_warnings(name, results)
    return warnings


def warning_sentences(results: dict[str, Any]) -> list[str]:
    """The limits of the outcome that stand after it, the worst first."""
    warnings = []
    if warning := power_warning(len(results["seeds"]), len(results["models"]) - 1, results["statistics"]["alpha"]):
        warnings.append(f"{warning}.")
    if added := results.get("added_seeds"):  # older results do not say
        warnings.append(
            f"Seed{'s' * (len(added) > 1)} {', '.join(map(str, added))} {'were' if len(added) > 1 else 'was'} added after a "
            "finished report. If its outcome was the reason, p is too small."
        )
    for name, model in results["models"].items():
        diverged = sum(run["diverged"] for run in model["runs"])
        if diverged and name == results["baseline"]:
            warnings.append(
                f"{name}, the baseline, diverged in {diverged} of {len(model['runs'])} runs: there are no verdicts"
                f"{' on models compared at these seeds' if results.get('looks') else ''}."
            )
        elif 0 < diverged < len(model["runs"]):
            warnings.append(
                f"{name} diverged in {diverged} of {len(model['runs'])} runs. Its other runs get no verdict: without its "
                "failures it would look better than it is."
            )
        elif diverged and chosen_runs(results, name):
            warnings.append(f"{name} diverged in all of its runs.")
    baseline, tested = results["baseline"], _tested(results)
    losses = losses_by_seed({name: results["models"][name] for name in (baseline, *tested)})
    if ratio := noise_ratio(losses, baseline):
        others, baseline = f"the other model{'s' * (len(tested) > 1)}", "the baseline"
        louder, calmer = (others, baseline) if ratio > 1 else (baseline, others)
        warnings.append(_UNEQUAL_NOISE.format(louder, max(ratio, 1 / ratio), calmer))
    return warnings


def _edge_warnings(name: str, model: dict[str, Any]) -> list[str]:
    """Says where the best rate of a model is the smallest or the largest tried."""
    warnings = []
    for end in ("smallest", "largest"):
        seeds = [seed for seed, edge in model["edges"].items() if edge == end]
        if not seeds:
            continue
        rates = sorted({run["learning_rate"] for run in model["runs"] if str(run["seed"]) in map(str, seeds)})
        where = f"at {', '.join(f'{rate:g}' for rate in rates)}, the {end} learning rate tried"
        if len(seeds) < len(model["runs"]):
            where += f", in {len(seeds)} of {len(model['runs'])} seeds"
        after = (
            f"{_end_of_search(model)}, so there is no verdict"
            if model["search"]
            else "the file asked for just these rates, and a better one may lie beyond"
        )
        warnings.append(f"{name} did best {where}: {after}.")
    return warnings


def _diverged_warnings(name: str, results: dict[str, Any]) -> list[str]:
    """Says where a model diverged at every rate tried, by all seeds or by some."""
    model, chosen = results["models"][name], len(chosen_runs(results, name))
    if model["runs"] and chosen == len(model["runs"]):
        return []
    if chosen:
        tried = f", in {len(model['runs']) - chosen} of {len(model['runs'])} seeds"
    else:
        tried = f" ({', '.join(f'{rate:g}' for rate in model['learning_rates'])})"
    end = f": {_end_of_search(model)}, and smaller rates were not tried" if model["search"] else ""
    return [f"{name} diverged at every learning rate tried{tried}{end}."]


def _end_of_search(model: dict[str, Any]) -> str:
    return f"the search stopped at its limit of {model['search']['limit']} rates"


def selection_sentences(results: dict[str, Any]) -> list[str]:
    """Whether tests and intervals include the risk of a wrong learning rate."""
    return [_EACH_SEED if _has_choice(results) else _ONE_RATE] if _tested(results) else []


def _tested(results: dict[str, Any]) -> list[str]:
    return [name for name, effect in results["statistics"]["effects"].items() if effect["p"] is not None]


def noise_floor_sentence(results: dict[str, Any]) -> str:
    found = results["statistics"]
    if found["noise_floor"] is None:
        return f"Noise floor: unknown; it needs at least two finished seeds of the baseline {results['baseline']}."
    sentence = (
        f"Noise floor: the test loss of the baseline {results['baseline']} varies by {found['noise_floor']:.2g} nats from seed "
        f"to seed, {found['noise_floor_percent']:.2g} % (standard deviation)"
    )
    share = results.get("noise_from_text")  # older results have none
    if share is None:
        return f"{sentence}."
    text = "the test text" if results["test_tokens"] is None else f"the test text of {results['test_tokens']:,} tokens"
    if share > 0.995:
        return f"{sentence}; all of this variance may come from the choice of {text}."
    percent = "less than 1 %" if share < 0.005 else f"about {100 * share:.0f} %"
    return f"{sentence}; {percent} of this variance comes from the choice of {text}, the rest from training."


def protocol_sentences(results: dict[str, Any]) -> list[str]:
    """How the numbers were measured."""
    found, seeds = results["statistics"], results["seeds"]
    level = f"{100 * found['confidence']:g} %"
    tested, count = _tested(results), "up to " if results.get("looks") else ""
    sentences = [
        noise_floor_sentence(results),
        f"{len(results['models'])} models, {count}{len(seeds)} seed{'s' * (len(seeds) != 1)} "
        f"({', '.join(map(str, seeds))}), "
        f"{results['tokens_per_run']:,} tokens a run.",
    ]
    if results["same_tokens"]:
        sentences.append("Runs of one seed saw the same tokens in the same order, so models are compared seed by seed.")
    if _has_choice(results):
        sentences.append(
            "Each seed tried the learning rates of a model by itself and took the one with the lowest loss on the validation "
            "split. The reported loss is that of the same run on the test split, which was not used to choose."
        )
        if any(model["search"] for model in results["models"].values()):
            sentences.append(
                "The rates were searched for: as long as the best rate was the smallest or the largest one tried, the next one "
                "beyond was tried, too."
            )
    else:
        sentences.append("No learning rate was chosen. The losses are measured on the test split.")
    if looks := results.get("looks"):
        made = sum(len(model["runs"]) for model in results["models"].values())
        most = len(seeds) * len(results["models"])
        sentences.append(
            f"From {FIRST_INTERIM} seeds on, each model still in question was compared with the baseline after every seed, by "
            "a paired t-test on its differences from the baseline. It left as soon as there was a verdict: better, worse, or "
            "equivalent, which means that its interval, corrected for the number of models, lies within the noise floor on "
            "both sides. Half of the probability of "
            f"an error, {found['alpha']:g}, belongs to the look at {len(seeds)} seeds, the other half in equal parts to those "
            f"before it. Bonferroni's method corrects p for {len(looks)} model{'s' * (len(looks) != 1)} and all looks. "
            f"Intervals are {level} intervals of one model each, which hold at all looks together. {made} of at most {most} "
            "runs are reported."
        )
    elif tested:
        sentences.append(
            "Each model is tested by a paired t-test on its differences from the baseline, seed by seed, and by them alone. "
            f"Holm's method corrects p for {len(tested)} test{'s' * (len(tested) != 1)}; better or worse means a corrected p "
            f"below {found['alpha']:g}. Intervals are {level} t intervals of one model each, not corrected, so an interval may "
            "exclude 0 where the verdict is within noise."
        )
    sentences += selection_sentences(results)
    sentences.append(
        "Speed and time are the median of the reported runs, and memory the most of any"
        + (" process, libraries included" if results["device"] == "cpu" else "")
        + ". All three depend on what else the machine was doing."
    )
    return sentences


def _has_choice(results: dict[str, Any]) -> bool:
    """Whether any model had several rates to choose among."""
    return any(len(model["learning_rates"]) > 1 for model in results["models"].values())

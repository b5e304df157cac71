"""The tables of a report: rows of texts by column, the same in every file."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import yaml
from scipy import stats

from ..run.tasks import is_guessable
from .figures import QUANTITIES, over_layers
from .inference import Analysis, Effect, Interval, Verdict, holm
from .lr_search import LEARNING_RATE
from .render import Rows
from .results import MASTERED, ModelOutcome, Outcome, ScaleOutcome
from .sections import SECTIONS
from .trend import ModelTrend, Trend, welch_sum


NOTHING = "\N{EN DASH}"
_MEBIBYTE = 2**20
# A wider interval in percent says nothing
_ABSURD = 100.0

# Accuracies between which a t interval has a meaning
_LOW, _HIGH = 0.05, 0.95

# With interim analyses: p times the number of models, divided by the share of alpha that the analysis spends
BONFERRONI = "Bonferroni p"
LEARNED = "seeds at 99 %"
LEARNED_RUNS = "runs at 99 %"
FISHER = "Fisher p"


def summary_rows(results: ScaleOutcome) -> Rows:
    """The verdict on each model, and the numbers that it comes from."""
    objective, rows = results.objective, []
    scores = {
        name: [run.result.losses.validation.chrf for run in model.finished] for name, model in results.models.items()
    }
    has_scores = any(score is not None for of_model in scores.values() for score in of_model)
    of_answers = accuracy_cells(results)
    for name, model in results.models.items():
        verdict, improvement, of_perplexity, p = _verdict_cells(results.statistics, name, len(model.runs))
        if of_answers:  # percents of a loss near 0 say nothing
            improvement = of_perplexity = None
        row = {
            "model": name,
            "verdict": verdict,
            "loss improvement (%)": improvement,
            BONFERRONI if results.interim else "Holm p": p,
            f"test {objective.loss_name} (nats)": _mean_and_deviation([run.test_loss for run in model.finished]),
            f"{objective.perplexity.replace('_', '-')} improvement (%)": of_perplexity,
            **of_answers.get(name, {}),
            "chrF (validation)": _mean_and_deviation(scores[name], ".1f") if has_scores else None,
            "seeds": str(len(model.runs)) if results.interim else None,
            "learning rate": _chosen_rate(model),
        }
        rows.append({column: text for column, text in row.items() if text is not None})
    return rows


def cost_rows(results: ScaleOutcome) -> Rows:
    """The size of each model, and what its runs took."""
    has_frozen = any(model.size.trained < model.size.total for model in results.models.values())
    rows = []
    for name, model in results.models.items():
        machines = [run.result.machine for run in model.finished]
        row = {
            "model": name,
            "parameters": f"{model.size.total:,}",
            "trained": f"{model.size.trained:,}" if has_frozen else None,
            "non-embedding": f"{model.size.non_embedding:,}",
            "MLP width": number(model.intermediate_size, ","),
            "FLOPs per token": f"{model.size.flops_per_token:,}",
            "tokens/s": _median([machine.tokens_per_second for machine in machines], ",.0f"),
            "peak memory (MiB)": _memory([machine.peak_memory for machine in machines]),
            "training time (s)": _median([machine.seconds for machine in machines], ",.1f"),
            "diverged": f"{len(model.runs) - len(model.finished)} of {len(model.runs)}",
        }
        rows.append({column: text for column, text in row.items() if text is not None})
    return rows


def accuracy_cells(results: ScaleOutcome) -> dict[str, dict[str, str]]:
    """The accuracy on a synthetic task, which is often all or nothing, by model and column; nothing for text."""
    if not (of_models := results.accuracies):
        return {}
    base = of_models[results.baseline]
    p_values = {name: learned_p(base, values) for name, values in of_models.items() if name != results.baseline}
    corrected, cells = dict(zip(p_values, holm(p_values.values()))), {}
    for name, values in of_models.items():
        model, gain = results.models[name], NOTHING
        ends = f"{100 * min(values):.1f} to {100 * max(values):.1f}"
        is_between = all(_LOW <= value <= _HIGH for value in (*base, *values))
        if name in corrected and is_between and 1 < len(base) == len(values):
            estimate = welch_sum([100 * (np.array(values) - np.array(base))])
            gain = with_interval(estimate.value, estimate.interval(0.95), "+.1f")
        cells[name] = {
            "accuracy (%)": f"{100 * statistics.fmean(values):.1f} ({ends})",
            "accuracy gain (points)": gain,
            LEARNED: f"{_count_learned(values)} of {len(values)}",
            # Fisher's p holds for one test with all planned seeds, so not with interim analyses
            FISHER: number(None if results.interim else corrected.get(name), ".2g"),
            "steps to 99 %": _median([run.history.mastered_at for run in model.runs], ",.0f"),
        }
        if results.has_choice:
            of_all = [run.accuracy for run in (*model.tried, *model.runs)]
            cells[name][LEARNED_RUNS] = f"{_count_learned(of_all)} of {len(of_all)}"
    return cells


def _count_learned(accuracies: Iterable[float]) -> int:
    return sum(accuracy >= MASTERED for accuracy in accuracies)


def learned_p(base: list[float], values: list[float]) -> float:
    """Returns the two-sided p of Fisher's exact test (1922) on the numbers of seeds that learn the task."""
    learned = [_count_learned(row) for row in (base, values)]
    return float(stats.fisher_exact([learned, [len(base) - learned[0], len(values) - learned[1]]]).pvalue)


def describe_verdict(effect: Effect, runs: int) -> str:
    if effect.verdict is Verdict.SOME_DIVERGED:
        return f"diverged in {effect.diverged} of {runs} runs"
    return str(effect.verdict)


def _verdict_cells(analysis: Analysis, model: str, runs: int) -> tuple[str, str, str, str]:
    if (effect := analysis.effects.get(model)) is None:
        return "baseline", NOTHING, NOTHING, NOTHING
    improvements = (_improvement(effect, name) for name in ("loss_improvement", "perplexity_improvement"))
    return describe_verdict(effect, runs), *improvements, p_value(effect.holm_p)


def rate_rows(results: ScaleOutcome) -> Rows:
    """The mean validation loss by model and rate; empty if there was no choice."""
    swept = {name: model for name, model in results.models.items() if len(model.losses_by_rate()) > 1}
    rates = sorted({rate for model in swept.values() for rate in model.learning_rates})
    rows = []
    for name, model in swept.items():
        row = {"model": name, **{f"{rate:g}": NOTHING for rate in rates}}
        chosen = [run.learning_rate for run in model.chosen]
        for rate, losses in model.losses_by_rate().items():
            text = "diverged" if None in losses else number(statistics.fmean(losses), ".4f")
            seeds = chosen.count(rate)
            mark = f"✓ {seeds}: " if 0 < seeds < len(model.runs) else "✓ " if seeds else ""
            row[f"{rate:g}"] = mark + text
        rows.append(row)
    return rows


def point_rows(results: ScaleOutcome) -> Rows:
    """The point that each seed chose, with its validation loss and that of the recipe's own values."""
    rows, loss = [], results.objective.loss_name
    fields = results.tuned.ranges.keys() - {LEARNING_RATE} if results.tuned else ()
    for name, model in results.models.items():
        untuned = model.untuned
        for run in model.runs if model.is_tuned else []:
            own = untuned[run.seed].validation_loss if run.seed in untuned else None
            row = {
                "model": name,
                "seed": str(run.seed),
                "trial": str(run.trial),
                "learning rate": f"{run.learning_rate:g}",
                **{field: str(run.point.get(field, "the recipe's")) for field in sorted(fields)},
                f"validation {loss}": number(run.validation_loss, ".4f"),
                f"{loss} of the recipe's values": number(own, ".4f"),
            }
            rows.append(row)
    return rows


def points_sentence(results: ScaleOutcome) -> str:
    """Says which points of `tune` were tried, and for which models; nothing without `tune`."""
    if (tuned := results.tuned) is None:
        return ""
    search = " It searched learning rates around that point." if results.has_choice else ""
    has_own = {run.seed in model.untuned for model in results.models.values() for run in model.runs}
    if has_own == {False}:
        return f"Each seed took its point for each model over from the first scale.{search}"
    whose = "each model" if has_own == {True} else "each model without a point of the first scale"
    if tuned.at == "baseline":
        whose = "the baseline, whose point all models take"
    ranges = "; ".join(f"{name} ({values})" for name, values in tuned.ranges.items())
    return (
        f"Each seed tried {tuned.trials} points for {whose}: trial 0 with the recipe's own values, then Halton's "
        f"quasi-random points over {ranges}. It took the one with the lowest validation loss.{search}"
    )


def tuning_gain(model: ModelOutcome) -> str:
    """Returns by how many percent tuning lowered the test loss, as mean and standard deviation over seeds."""
    pairs = [(run.test_loss, model.untuned[run.seed].test_loss) for run in model.runs if run.seed in model.untuned]
    gains = [100 * (own - loss) / own for loss, own in pairs if loss is not None and own]
    deviation = f" ± {statistics.stdev(gains):.1f}" if len(gains) > 1 else ""
    if not gains:
        return "an unknown amount (nothing finished to compare with)"
    return f"{statistics.fmean(gains):.1f} %{deviation}"


def task_rows(results: ScaleOutcome) -> Rows:
    rows = []
    for task, metrics in results.tasks.items():
        for metric, entry in metrics.items():
            for name, scores in entry.scores.items():
                verdict, improvement, _, p = _verdict_cells(entry.statistics, name, len(scores))
                row = {
                    "task": task,
                    "metric": f"{metric} ({'higher' if entry.higher_is_better else 'lower'} is better)",
                    "model": name,
                    "verdict": verdict,
                    "score": _mean_and_deviation(scores.values()),
                    "improvement (%)": improvement,
                    "Holm p": p,
                    "chance": number(entry.chance, ".3f") if is_guessable(metric) else NOTHING,
                    "items": number(entry.items, ","),
                }
                rows.append(row)
    return rows


def stability_rows(results: ScaleOutcome) -> Rows:
    """The stability of each model at the last recorded step; empty if none was recorded."""
    if not any(run.history.stability for model in results.models.values() for run in model.finished):
        return []
    rows = []
    for name, model in results.models.items():
        row = {"model": name}
        for quantity, (title, *_) in QUANTITIES.items():
            curves = [over_layers(run, quantity) for run in model.finished]
            row[title] = _mean_and_deviation([curve[-1][1] for curve in curves if curve], ".3g")
        rows.append(row)
    return rows


def run_rows(results: ScaleOutcome) -> Rows:
    rows, loss = [], results.objective.loss_name
    for name, model in results.models.items():
        for run in (*model.tried, *model.runs):
            losses, machine = run.result.losses, run.result.machine
            diverged = "diverged" if losses.diverged_at is None else f"diverged at step {losses.diverged_at:,}"
            row = {
                "model": name,
                "kind": "reported" if run in model.runs else "tried",
                **({"trial": str(run.trial)} if results.tuned else {}),
                "learning rate": f"{run.learning_rate:g}",
                "seed": str(run.seed),
                "outcome": diverged if run.diverged else "finished",
                f"train {loss}": number(losses.train, ".4f"),
                f"validation {loss}": number(run.validation_loss, ".4f"),
                f"test {loss}": number(run.test_loss, ".4f"),
                "tokens/s": number(machine.tokens_per_second, ",.0f"),
                "seconds": number(machine.seconds, ",.1f"),
                "peak memory (MiB)": _memory([machine.peak_memory]),
                "loss spikes": str(len(run.history.loss_spikes)),
            }
            rows.append(row)
    return rows


def trend_tables(outcome: Outcome) -> list[tuple[Rows, str]]:
    tables = [(learned_rows(outcome), ACCURACY_NOTE)]
    if not tables[0][0]:
        tables = [(improvement_rows(outcome.trend), _IMPROVEMENTS_CAPTION)]
    if not outcome.primary and (rows := family_rows(outcome)):
        tables.append((rows, _FAMILY_CAPTION))
    if not outcome.trend.multiplier_note:
        models = outcome.trend.models.items()
        rows = [{"model": name, **_steps(trend, "", "multiplier", ".2f")} for name, trend in models]
        tables.append((rows, _MULTIPLIERS_CAPTION))
    return tables


def family_rows(outcome: Outcome) -> Rows:
    """p of each model and scale, corrected for all tests."""
    tests = {
        (scale, model): effect.p
        for scale, results in outcome.scales.items()
        for model, effect in results.statistics.effects.items()
        if effect.p is not None
    }
    corrected = dict(zip(tests, holm(tests.values())))
    return [
        {"model": name, **{f"{scale}, p": p_value(corrected.get((scale, name))) for scale in outcome.scales}}
        for name in dict.fromkeys(model for _, model in tests)
    ]


def learned_rows(outcome: Outcome) -> Rows:
    """How many seeds learned a synthetic task at each scale; nothing for text."""
    columns = {scale: accuracy_cells(results) for scale, results in outcome.scales.items()}
    return [
        {"model": name}
        | {f"{scale}, {title}": cells[name][title] for scale, cells in columns.items() for title in (LEARNED, FISHER)}
        for name in columns[next(iter(columns))]
    ]


def improvement_rows(trend: Trend) -> Rows:
    return [
        {
            "model": name,
            **_steps(model, " (%)", "improvement", "+.2f"),
            "slope (% per decade)": with_interval(model.slope, model.slope_interval, "+.2f"),
            "Holm p": p_value(model.holm_p),
            "trend": model.verdict,
        }
        for name, model in trend.models.items()
    ]


def interaction_rows(outcome: Outcome) -> Rows:
    return [
        {
            "model": each.model,
            "conditions": " to ".join(each.conditions),
            "verdict": f"{each.test.verdict}: {each.test.note}" if each.test.note else each.test.verdict,
            "change of the improvement (%)": with_interval(each.test.value, each.test.interval, "+.2f"),
            "Holm p": p_value(each.test.holm_p),
        }
        for each in outcome.interactions
    ]


def _steps(model: ModelTrend, unit: str, quantity: str, form: str) -> dict[str, str]:
    cells = {}
    for scale, step in model.steps.items():
        value, interval = getattr(step, quantity), getattr(step, f"{quantity}_interval")
        has_note = quantity == "multiplier" and value is None
        cells[f"{scale}{unit}"] = step.note if has_note else with_interval(value, interval, form)
    return cells


_IMPROVEMENTS_CAPTION = (
    "Improvement of test loss over the baseline in percent, with 95 % intervals of each model and scale alone; "
    "positive is better. The slope is that of a line through the scales, and Holm p is its p-value, corrected as said "
    "below."
)
ACCURACY_NOTE = (
    f"A seed learns a task if its accuracy in the test is {MASTERED:.0%} or more. Fisher's exact test compares the "
    "number of such seeds with the baseline's, corrected by Holm's method for the models of a scale. Steps to 99 % "
    "are the median over seeds whose evaluations while training reached it. Runs at 99 % are those of all rates and "
    "points tried, which models may search differently. Differences in accuracy have 95 % t "
    f"intervals where every seed lies between {_LOW:.0%} and {_HIGH:.0%}."
)
INTERACTIONS_CAPTION = (
    "Improvement under the second condition minus that under the first, each in percent of the loss that the baseline "
    "has there, seed by seed, with the 95 % interval of one test. Only seeds count, not the choice of the test data."
)
_FAMILY_CAPTION = (
    "p of the test at each scale, corrected by Holm's method for all models at all scales as one family. The verdict "
    "of a scale counts the models of that scale alone, which is the family of the judgement at the largest scale. A "
    "verdict at another scale may be chance unless p is below 0.05 here too."
)
_MULTIPLIERS_CAPTION = (
    "Compute multiplier: how many times the model's compute the baseline would need for the model's loss, by a curve "
    "through its mean losses, with 95 % intervals. A dash stands for an end that lies more than a decade "
    "beyond the ladder."
)


def provenance(results: ScaleOutcome) -> Rows:
    data, machine = results.sample.data, results.sample.machine
    values = {
        "corpus": str(results.comparison["recipe"].get("dataset", "python-stdlib")),
        "fingerprint": data.fingerprint or NOTHING,
        "train tokens": number(data.train_tokens, ","),
        "validation tokens": number(data.validation_tokens, ","),
        "test tokens": number(data.test_tokens, ","),
        "device": machine.device,
        **machine.versions,
        **{f"kernels of {name}": " | ".join(model.kernels) for name, model in results.models.items() if model.kernels},
    }
    return [{"what": what, "value": value} for what, value in values.items()]


def given_fields(given: Mapping) -> str:
    flat = {name: value for name, value in given.items() if name not in SECTIONS}
    for name in SECTIONS:
        flat |= given.get(name) or {}
    return in_one_line(flat)[1:-1]


def in_one_line(fields: Mapping) -> str:
    """Returns fields as YAML, with the keys that they have in `results.json`, where all are text."""
    fields = json.loads(json.dumps(fields))
    return yaml.safe_dump(fields, sort_keys=False, default_flow_style=True, width=float("inf")).strip()


def with_interval(value: float | None, interval: Interval | None, form: str) -> str:
    if interval is None:
        return number(value, form)
    return f"{number(value, form)} [{', '.join(number(end, form) for end in interval)}]"


def p_value(p: float | None) -> str:
    """Formats tiny p-values as a bound, those near 0.05 with one more digit."""
    if p is not None and p < 1e-4:
        return "< 0.0001"
    return number(p, ".3g" if p is not None and 0.045 < p < 0.055 else ".2g")


def number(value: float | None, form: str) -> str:
    if value is None:
        return NOTHING
    text = format(value, form)
    return text if text.strip("-0.") else format(0.0, form)  # not -0.00


def _mean_and_deviation(values: Iterable[float | None], form: str = ".4f") -> str:
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    return f"{statistics.fmean(known):{form}}" + (f" ± {statistics.stdev(known):{form}}" if len(known) > 1 else "")


def _improvement(effect: Effect, name: str) -> str:
    value, interval = getattr(effect, name), getattr(effect, f"{name}_interval")
    if value is not None and interval is not None and (None in interval or interval[1] - interval[0] > _ABSURD):
        return f"{number(value, '+.2f')} [wider than {_ABSURD:g}]"
    return with_interval(value, interval, "+.2f")


def _chosen_rate(model: ModelOutcome) -> str:
    """The rates, with the number of seeds at each unless all chose the same."""
    chosen = [run.learning_rate for run in model.chosen]
    if not chosen:
        return "none"
    is_same = len(set(chosen)) == 1 and len(chosen) == len(model.runs)
    text = " ".join(f"{rate:g}" + ("" if is_same else f" ({chosen.count(rate)})") for rate in sorted(set(chosen)))
    one = " (kept)" if model.keeps_rate else "" if len(model.learning_rates) > 1 else " (the only one)"
    return text + (" (boundary)" if model.boundaries else one)


def _median(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return number(statistics.median(known) if known else None, form)


def _memory(values: Sequence[int | None]) -> str:
    return number(max((value / _MEBIBYTE for value in values if value is not None), default=None), ",.0f")

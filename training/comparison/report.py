"""The report of a comparison, made from its outcome alone: a list of sections, and parts of it for terminals and cards."""

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from ..files import PAGE_FILE, write_text
from ..text import align, without_html
from .figures import draw_costs, draw_curves, draw_interim, draw_stability, save
from .inference import EQUIVALENT, FIRST_INTERIM, WITHIN_NOISE, noise_ratio, power_warning
from .ladder_figures import draw_bowls, draw_improvements, draw_losses, draw_multipliers
from .outcome import ModelOutcome, Outcome, ScaleOutcome
from .render import Section, bullets, figure, markdown_table, to_markdown, to_page, warning
from .tables import (
    MULTIPLIERS_CAPTION,
    given_fields,
    improvement_rows,
    provenance,
    rate_rows,
    run_rows,
    summary_rows,
    task_rows,
    trend_tables,
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

# Title, caption, and the function that draws it
_Figures = dict[str, tuple[str, str, Callable[[Any], Figure | None]]]
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
        lambda found: draw_costs(found, "non_embedding_parameters", "non-embedding parameters"),
    ),
    "interim": (
        "Improvement at each interim analysis",
        "Improvement of test loss after each seed, with the interval of each model, which holds at all interim analyses "
        "together. A model leaves when there is a verdict.",
        draw_interim,
    ),
    "flops": (
        "Improvement against FLOPs",
        "Improvement of test loss, with the interval of each model. Models of nearly the same cost stand side by side.",
        lambda found: draw_costs(found, "flops_per_token", "FLOPs per token, forward and backward"),
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
    "multipliers": ("Compute multiplier over compute", MULTIPLIERS_CAPTION, draw_multipliers),
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
        "rate of a seed has a worse neighbour on both sides unless it lies at the boundary.",
        draw_bowls,
    ),
}


def write_report(outcome: Outcome, folder: Path, has_page: bool = False) -> None:
    """Writes `results.md`, `figures/*.png` and `report.html`, each whole or not at all.

    Args:
        outcome: the results.
        folder: folder of the comparison.
        has_page: whether `nlq explore` has a page there, which the report links to.
    """
    found, of_figures = (outcome, _FIGURES_OF_A_LADDER) if outcome.trend else (outcome.largest, _FIGURES)
    drawn = []
    for name, (title, caption, draw) in of_figures.items():
        if (drawing := draw(found)) is not None:
            save(drawing, folder / "figures" / f"{name}.png")
            drawn.append(figure(title, name, caption))
        else:
            (folder / "figures" / f"{name}.png").unlink(missing_ok=True)  # of results that had more runs
    sections = _sections(outcome, drawn)
    write_text(folder / "results.md", to_markdown(outcome.name, sections))
    if has_page:
        link = f"See what attention does, in the best model and in the baseline: [{PAGE_FILE}]({PAGE_FILE})"
        sections.insert(1, Section("", [link]))
    write_text(folder / "report.html", to_page(outcome.name, sections, folder))


def describe(outcome: Outcome) -> str:
    """The outcome for a terminal: a line for each model, then notes and warnings."""
    if outcome.trend:
        rows, notes = improvement_rows(outcome.trend), outcome_sentences(outcome)
    else:
        found = outcome.largest
        rows = [{title: row[name] for name, title in _TERMINAL_COLUMNS.items() if name in row} for row in summary_rows(found)]
        notes = [noise_floor_sentence(found), *selection_sentences(found)]
    first, last = ([f"warning: {text}" for text in of(outcome)] for of in (first_warnings, last_warnings))
    table = align([list(rows[0]), *(list(row.values()) for row in rows)], right=False)
    wrapped = [
        [textwrap.fill(text, _TERMINAL_WIDTH, subsequent_indent="  ") for text in part] for part in (first, notes + last)
    ]
    return "\n".join([*wrapped[0], *table, *wrapped[1]])


def verdicts(outcome: Outcome, model: str | None = None, run: str | None = None, scale: str | None = None) -> str:
    """The outcome for a model card, as Markdown: the protocol, the noise floor, a row for each model, warnings, and the trend.

    Args:
        outcome: the results.
        model: the model of the card, whose row is marked; `None` if it is not part of the comparison.
        run: the name of its run's folder. A run that is not among the reported ones is said to be none of them.
        scale: that of the model, if there are several; by default the largest.

    Raises:
        ValueError: if there is no such model.
    """
    scale = scale or list(outcome.scales)[-1]
    found = outcome.scales[scale]
    if model is not None and model not in found.models:
        raise ValueError(f"the comparison {found.name} has no model {model!r}, only {', '.join(found.models)}")
    rows = [{name: row[name] for name in _CARD_COLUMNS} for row in summary_rows(found)]
    is_reported = run is None or any(each.folder == f"runs/{model}/{run}" for each in found.models[model].runs)
    for row in rows:
        if row["model"] == model and is_reported:
            row["model"] = f"**{model}** (this model)"
    others = {name: other for name, other in outcome.scales.items() if name != scale}
    parts = [
        *map(warning, of_each_scale(others, first_warning_sentences)),
        f"From the comparison `{found.name}`: {len(rows)} models, {'up to ' * bool(found.interim)}{len(found.seeds)} seeds "
        f"each, {found.tokens_per_run:,} tokens a run, each model at its own best learning rate, all on the same tokens in the "
        "same order.",
        *([] if is_reported else [warning(_NOT_REPORTED.format(run=run, model=model))]),
        *map(warning, first_warning_sentences(found)),
        outcome_sentence(found),
        noise_floor_sentence(found),
        *selection_sentences(found),
        markdown_table(rows),
        *map(warning, warning_sentences(found)),
    ]
    if outcome.trend:
        parts += [
            f"This is the scale {scale} of a ladder of {len(outcome.scales)} scales: {', '.join(outcome.scales)}.",
            trend_sentence(outcome),
            markdown_table(improvement_rows(outcome.trend)),
        ]
    return without_html("\n\n".join(parts))


def _sections(outcome: Outcome, figures: list[Section]) -> list[Section]:
    """The report, section by section."""
    head = [*map(warning, first_warnings(outcome)), *outcome_sentences(outcome), *map(warning, last_warnings(outcome))]
    if outcome.trend:
        tables = [part for rows, caption in trend_tables(outcome) for part in (markdown_table(rows), caption)]
        trend = Section("The trend over scales", [*tables, bullets(trend_protocol(outcome))])
        sections = [Section("", head), trend, *figures]
        for name, found in outcome.scales.items():
            parts = [cost_sentence(found), bullets(protocol_sentences(found))]
            for section in (_models(found), *_runs(found)):
                parts += [f"### {section.title}", *section.parts]
            sections.append(Section(f"Scale {name}", parts, is_folded=True))
    else:
        found = outcome.largest
        sections = [Section("", [*head, bullets(protocol_sentences(found))]), _models(found), *figures, *_runs(found)]
    configuration = [
        f"`{outcome.command}`, which is after the command line:",
        f"```yaml\n{yaml.safe_dump(outcome.comparison, sort_keys=False)}```",
        markdown_table(provenance(outcome.largest)),
    ]
    return [*sections, Section("Configuration", configuration, is_folded=True)]


def _models(found: ScaleOutcome) -> Section:
    """The models of one scale, and what differs between them."""
    given = {name: given_fields(model) for name, model in found.models.items()}
    differences = [
        f"`{name}`: " + (f"`{fields}`" if fields else "nothing, it is the recipe's") for name, fields in given.items()
    ]
    return Section("Models", [markdown_table(summary_rows(found)), "What differs between them:", bullets(differences)])


def _runs(found: ScaleOutcome) -> list[Section]:
    """The sections of one scale about tasks, rates and runs."""
    rates, tasks = rate_rows(found), task_rows(found)
    return [
        *([Section("Downstream tasks", [_TASKS_CAPTION, markdown_table(tasks)])] if tasks else []),
        *([Section("Learning rates", [_RATES_CAPTION, markdown_table(rates)])] if rates else []),
        Section("Every run", [markdown_table(run_rows(found))], is_folded=True),
    ]


# Sentences


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

"""The report of a comparison, from nothing but what `results.json` holds: a table, figures, and one page for a browser."""

import base64
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from modeling_nlq.training.comparison.figures import draw_costs, draw_curves, draw_stability, save
from modeling_nlq.training.comparison.statistics import CLEAR_RATE_GAP, power_warning
from modeling_nlq.training.run.trainer import write_text


TEMPLATE = "report.html.jinja"
_NOTHING = "\N{EN DASH}"
_MEBIBYTE = 2**20
_TERMINAL_WIDTH = 120
# Columns of words; those of numbers are aligned at the right
_WORDS = ("model", "verdict", "learning rate", "kind", "outcome", "backend", "tokens seen")
_CARD_COLUMNS = ("model", "verdict", "test loss (nats)", "loss improvement (%)", "Holm p", "learning rate", "non-embedding")
# How the page marks a verdict: a class for its colour, and a sign for readers who do not see colours
_BADGES = {"better": ("better", "▲"), "worse": ("worse", "▼"), "within noise": ("noise", "≈"), "baseline": ("baseline", "●")}
_NO_VERDICT = ("open", "!")
# Beside every error rate and interval of a comparison in which rates were chosen; `benchmarks/selection.py` measures it
_SELECTION = (
    "p and the intervals do not include the risk that one run picked the wrong learning rate. In simulations of equal models "
    "whose two best rates lie 1 to 2 standard deviations of a run apart, 8 to 22 % of the comparisons had a wrong verdict, not "
    "5 %, and 85 to 92 % of the intervals held, not 95 %."
)
_RATES_CAPTION = (
    "Validation loss in nats per token; ✓ marks the rate chosen. The gap of the two lowest is in standard deviations of the "
    "validation loss of the model's reported runs; there is none where fewer than two rates, or two of those runs, finished."
)

# Title, what is to be seen, and how it is drawn
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
        results: what `results.json` holds, decoded.
        folder: of the comparison.
    """
    figures = _write_figures(results, folder / "figures")
    write_text(folder / "results.md", _markdown(results, figures))
    write_text(folder / "report.html", _page(results, figures, folder / "figures"))


def describe(results: dict[str, Any]) -> str:
    """The outcome for a terminal: a line for each model, then what to know about them."""
    headers = {
        "model": "model",
        "test loss (nats)": "test loss (nats)",
        "loss improvement (%)": "improvement of loss %",
        "perplexity improvement (%)": "and of perplexity %",
        "Holm p": "Holm p",
        "learning rate": "learning rate",
        "verdict": "verdict",
    }
    table = [list(headers.values()), *([row[name] for name in headers] for row in _summary(results))]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
    notes = [_noise_floor(results), *_selection(results), *(f"warning: {text}" for text in _warnings(results))]
    return "\n".join([*lines, *(textwrap.fill(note, _TERMINAL_WIDTH, subsequent_indent="  ") for note in notes)])


def verdicts(results: dict[str, Any], model: str | None = None) -> str:
    """The outcome for a model card, as Markdown: the question, the noise floor, a row for each model, and what limits it all.

    Args:
        results: what `results.json` holds, decoded.
        model: the one of them whose card it is, which is marked; `None` if it is none of them.

    Raises:
        ValueError: if there is no such model.
    """
    rows = [{name: row[name] for name in _CARD_COLUMNS} for row in _summary(results)]
    if model is not None and model not in results["models"]:
        raise ValueError(f"the comparison {results['name']} has no model {model!r}, only {', '.join(results['models'])}")
    for row in rows:
        if row["model"] == model:
            row["model"] = f"**{model}** (this model)"
    seeds = len(results["seeds"])
    parts = [
        f"From the comparison `{results['name']}`: {len(rows)} models, {seeds} seeds each, {results['tokens_per_run']:,} "
        "tokens a run, each model at its own best learning rate, all on the same tokens in the same order.",
        _outcome(results),
        _noise_floor(results),
        *_selection(results),
        _markdown_table(rows),
        *(f"> **Warning:** {warning}" for warning in _warnings(results)),
    ]
    return "\n\n".join(parts)


# Tables: rows of texts by column, the same in every file


def _summary(results: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each model."""
    rows = []
    for name, model in results["models"].items():
        effect = results["statistics"]["effects"].get(name, {})  # the baseline has none
        finished = [run for run in model["runs"] if not run["diverged"]]
        diverged = f"{len(model['runs']) - len(finished)} of {len(model['runs'])}" if model["runs"] else "at every rate"
        rows.append(
            {
                "model": name,
                "verdict": effect.get("verdict", "baseline"),
                "test loss (nats)": _mean_and_deviation([run["test_loss"] for run in finished]),
                "loss improvement (%)": _improvement(effect, "loss_improvement"),
                "perplexity improvement (%)": _improvement(effect, "perplexity_improvement"),
                "Holm p": _p_value(effect.get("holm_p")),
                "learning rate": _chosen_rate(model),
                "parameters": f"{model['parameters']:,}",
                "non-embedding": f"{model['non_embedding_parameters']:,}",
                "MLP width": _number(model["intermediate_size"], ","),
                "FLOPs per token": f"{model['flops_per_token']:,}",
                "tokens/s": _median([run["tokens_per_second"] for run in finished], ",.0f"),
                "peak memory (MiB)": _largest_memory(finished),
                "training time (s)": _median([run["train_seconds"] for run in finished], ",.1f"),
                "diverged": diverged,
            }
        )
    return rows


def _rates(results: dict[str, Any]) -> list[dict[str, str]]:
    """Validation loss of each model at each learning rate tried; empty if there was no choice."""
    swept = {name: model for name, model in results["models"].items() if model["sweep"]}
    rates = sorted({run["learning_rate"] for model in swept.values() for run in model["sweep"]})
    rows = []
    for name, model in swept.items():
        row = {"model": name, **{f"{rate:g}": _NOTHING for rate in rates}}
        for run in model["sweep"]:
            text = "diverged" if run["diverged"] else _number(run["validation_loss"], ".4f")
            row[f"{run['learning_rate']:g}"] = "✓ " * (run["learning_rate"] == model["learning_rate"]) + text
        row["gap (deviations)"] = _number(model["rate_gap"], ".2f")
        rows.append(row)
    return rows


def _runs(results: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each run."""
    rows = []
    for name, model in results["models"].items():
        kinds = ["sweep"] * len(model["sweep"]) + ["reported"] * len(model["runs"])
        for kind, run in zip(kinds, [*model["sweep"], *model["runs"]]):
            outcome = "finished"
            if run["diverged"]:
                outcome = "diverged" + ("" if run["diverged_at"] is None else f" at step {run['diverged_at']:,}")
            norms = [norm for _, norm in run["history"]["gradient_norm"]]
            rows.append(
                {
                    "model": name,
                    "kind": kind,
                    "learning rate": f"{run['learning_rate']:g}",
                    "seed": str(run["seed"]),
                    "outcome": outcome,
                    "train loss": _number(run["train_loss"], ".4f"),
                    "validation loss": _number(run["validation_loss"], ".4f"),
                    "test loss": _number(run["test_loss"], ".4f"),
                    "tokens/s": _number(run["tokens_per_second"], ",.0f"),
                    "seconds": _number(run["train_seconds"], ",.1f"),
                    "peak memory (MiB)": _number(run["peak_memory"] and run["peak_memory"] / _MEBIBYTE, ",.0f"),
                    "backend": run["attn_implementation"],
                    "loss spikes": str(len(run["history"]["loss_spikes"])),
                    "largest gradient norm": "not finite" if None in norms else _number(max(norms, default=None), ".3g"),
                    "tokens seen": run["token_stream"][:8],
                }
            )
    return rows


def _mean_and_deviation(losses: list[float]) -> str:
    if not losses:
        return _NOTHING
    return f"{statistics.fmean(losses):.4f}" + (f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else "")


def _improvement(effect: dict[str, Any], name: str) -> str:
    if effect.get(name) is None:
        return _NOTHING
    ends = effect[f"{name}_interval"]
    return f"{effect[name]:+.2f}" + (f" [{', '.join(_number(end, '+.2f') for end in ends)}]" if ends else "")


def _p_value(p: float | None) -> str:
    return "< 0.0001" if p is not None and p < 1e-4 else _number(p, ".2g")


def _chosen_rate(model: dict[str, Any]) -> str:
    if model["learning_rate"] is None:
        return "none"
    remark = " (edge)" if model["is_at_edge"] else "" if model["sweep"] else " (no choice)"
    return f"{model['learning_rate']:g}{remark}"


def _median(values: list[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return _number(statistics.median(known) if known else None, form)


def _largest_memory(runs: list[dict[str, Any]]) -> str:
    known = [run["peak_memory"] / _MEBIBYTE for run in runs if run["peak_memory"] is not None]
    return _number(max(known, default=None), ",.0f")


def _number(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)


# Words


def _outcome(results: dict[str, Any]) -> str:
    """All verdicts in a line, the clear ones first."""
    models: dict[str, list[str]] = {"better": [], "worse": [], "within noise": []}
    for name, effect in results["statistics"]["effects"].items():
        models.setdefault(effect["verdict"], []).append(name)
    verdicts = [f"{verdict.replace(':', ',').capitalize()}: {', '.join(names)}." for verdict, names in models.items() if names]
    return " ".join([f"Baseline: {results['baseline']}.", *verdicts])


def _warnings(results: dict[str, Any]) -> list[str]:
    """What limits the outcome, the worst first."""
    warnings = []
    if results["same_tokens"] is False:
        warnings.append(
            "THE MODELS DID NOT SEE THE SAME TOKENS in the same order, as the hashes of the runs tell. What follows compares "
            "the data too, and its tests by seed do not hold."
        )
    if warning := power_warning(len(results["seeds"]), len(results["models"]) - 1, results["statistics"]["alpha"]):
        warnings.append(f"{warning}.")
    for name, model in results["models"].items():
        rates, rate = model["learning_rates"], model["learning_rate"]
        diverged = sum(run["diverged"] for run in model["runs"])
        if rate is None:
            warnings.append(f"{name} diverged at every learning rate tried: {', '.join(f'{tried:g}' for tried in rates)}.")
        if diverged and name == results["baseline"]:
            warnings.append(
                f"{name}, the baseline, diverged in {diverged} of {len(model['runs'])} runs: there are no verdicts."
            )
        elif 0 < diverged < len(model["runs"]):
            warnings.append(
                f"{name} diverged in {diverged} of {len(model['runs'])} runs. Its other runs get no verdict: without its "
                "failures it would look better than it is."
            )
        elif diverged:
            warnings.append(f"{name} diverged in all of its runs.")
        if model["is_at_edge"]:
            end = "smallest" if rate == rates[0] else "largest"
            warnings.append(f"{name} did best at {rate:g}, the {end} learning rate tried: a better one may lie beyond.")
    gaps = {name: model["rate_gap"] for name, model in results["models"].items()}
    if unclear := [f"{name} ({gap:.2f})" for name, gap in gaps.items() if gap is not None and gap < CLEAR_RATE_GAP]:
        warnings.append(
            f"The two best learning rates lie less than {CLEAR_RATE_GAP:g} standard deviations of a run apart for "
            f"{', '.join(unclear)}: the one chosen may not be the best."
        )
    return warnings


def _selection(results: dict[str, Any]) -> list[str]:
    """What tests and intervals leave out, if there are both and a rate was chosen."""
    is_chosen = any(model["sweep"] for model in results["models"].values())
    is_tested = any(effect["p"] is not None for effect in results["statistics"]["effects"].values())
    return [_SELECTION] if is_chosen and is_tested else []


def _noise_floor(results: dict[str, Any]) -> str:
    found = results["statistics"]
    if found["noise_floor"] is None:
        return f"Noise floor: unknown, for it takes two seeds that the baseline {results['baseline']} finished."
    return (
        f"Noise floor: the test loss of the baseline {results['baseline']} varies by {found['noise_floor']:.2g} nats from seed "
        f"to seed, {found['noise_floor_percent']:.2g} % (standard deviation)."
    )


def _protocol(results: dict[str, Any]) -> list[str]:
    """How the numbers came about."""
    found, seeds = results["statistics"], results["seeds"]
    level = f"{100 * found['confidence']:g} %"
    tested = [name for name, effect in found["effects"].items() if effect["p"] is not None]
    sentences = [
        _noise_floor(results),
        f"{len(results['models'])} models, {len(seeds)} seed{'s' * (len(seeds) != 1)} ({', '.join(map(str, seeds))}), "
        f"{results['tokens_per_run']:,} tokens a run.",
    ]
    if results["same_tokens"]:
        sentences.append("Runs of one seed saw the same tokens in the same order, so models are compared seed by seed.")
    if any(model["sweep"] for model in results["models"].values()):
        sentences.append(
            f"Each learning rate was chosen on the validation split, in runs with seed {results['sweep_seed']} that are not "
            "reported. The losses reported are of the test split, which chose nothing."
        )
    else:
        sentences.append("No learning rate was chosen. The losses are of the test split, which chose nothing.")
    if tested:
        sentences.append(_noise_of_tests(found, tested))
        sentences.append(
            f"Intervals are t intervals of one model each, of nominally {level}. Verdicts follow from p, which Holm's method "
            f"corrects for {len(tested)} test{'s' * (len(tested) != 1)} (better or worse: below {found['alpha']:g}), so an "
            "interval may exclude 0 where the verdict is within noise."
        )
    sentences += _selection(results)
    sentences.append(
        "Speed and time are the median of the reported runs, and memory the most of any"
        + (" process, libraries included" if results["device"] == "cpu" else "")
        + ". All three depend on what else the machine was doing."
    )
    return sentences


def _noise_of_tests(found: dict[str, Any], tested: list[str]) -> str:
    pool = found["pool"]
    agreement = (
        "" if pool["agreement_p"] is None else f" (Bartlett's test: p = {_p_value(pool['agreement_p'])})".replace("= <", "<")
    )
    if not pool["models"]:
        return f"Each model is tested with the noise of its own differences{agreement}."
    quiet = [name for name in tested if found["effects"][name]["is_pooled"] and name not in pool["models"]]
    loud = [name for name in tested if not found["effects"][name]["is_pooled"]]
    return (
        f"The tests of {', '.join(pool['models'])} share one estimate of the noise, for their variances agree{agreement}: "
        f"a difference has a standard deviation of {pool['deviation']:.2g} nats, with {pool['degrees_of_freedom']:.3g} degrees "
        f"of freedom. A model noisier than that is tested with its own noise."
        + (f" {', '.join(quiet)}: quieter, tested with the same." if quiet else "")
        + (f" {', '.join(loud)}: noisier, with its own degrees of freedom too." if loud else "")
    )


def _corpus(results: dict[str, Any]) -> dict[str, str]:
    return {
        "corpus": str(results["comparison"]["recipe"].get("dataset", "python-stdlib")),
        "fingerprint": results["dataset_fingerprint"] or _NOTHING,
        **{f"{split} tokens": _number(results[f"{split}_tokens"], ",") for split in ("train", "validation", "test")},
        "device": results["device"],
        **results["versions"],
    }


def _given(model: dict[str, Any]) -> str:
    """What a model's entry in the comparison says, in a line."""
    sections = {name: model["given"].get(name) or {} for name in ("switches", "training")}
    flat = {name: value for name, value in model["given"].items() if name not in sections}
    flat.update(sections["switches"], **sections["training"])
    return yaml.safe_dump(flat, sort_keys=False, default_flow_style=True, width=float("inf")).strip()[1:-1]


# Files


def _write_figures(results: dict[str, Any], folder: Path) -> list[str]:
    """Draws what there is to draw, and returns its names."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, (_, _, draw) in _FIGURES.items():
        figure = draw(results)
        if figure is not None:
            save(figure, folder / f"{name}.png")
            drawn.append(name)
        else:
            (folder / f"{name}.png").unlink(missing_ok=True)  # of results that had more runs
    return drawn


def _markdown(results: dict[str, Any], figures: list[str]) -> str:
    rates = _rates(results)
    parts = [
        f"# {results['name']}",
        _outcome(results),
        *(f"> **Warning:** {warning}" for warning in _warnings(results)),
        "\n".join(f"* {sentence}" for sentence in _protocol(results)),
        "## Models",
        _markdown_table(_summary(results)),
        "What differs between them:",
        "\n".join(f"* `{name}`: {_code(_given(model))}" for name, model in results["models"].items()),
        *(f"## {_FIGURES[name][0]}\n\n![{_FIGURES[name][0]}](figures/{name}.png)\n\n{_FIGURES[name][1]}" for name in figures),
        *(["## Learning rates", _RATES_CAPTION, _markdown_table(rates)] if rates else []),
        "## Every run",
        _markdown_table(_runs(results)),
        "## Configuration",
        f"`{results['command']}`, which is after the command line:",
        f"```yaml\n{yaml.safe_dump(results['comparison'], sort_keys=False)}```",
        _markdown_table([{"what": name, "value": value} for name, value in _corpus(results).items()]),
    ]
    return "\n\n".join(parts) + "\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else "nothing, it is the recipe's"


def _markdown_table(rows: list[dict[str, str]]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---" if name in _WORDS else "---:" for name in columns], *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(map(_markdown_cell, line))} |" for line in lines)


def _markdown_cell(text: str) -> str:
    """A cell that stays one, whatever names the user gave."""
    return " ".join(text.split()).replace("|", "\\|")


def _page(results: dict[str, Any], figures: list[str], folder: Path) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    summary = _summary(results)
    outcome = _outcome(results)
    return environment.get_template(TEMPLATE).render(
        name=results["name"],
        outcome=outcome,
        warnings=_warnings(results),
        protocol=_protocol(results),
        badges={row["model"]: _BADGES.get(row["verdict"], _NO_VERDICT) for row in summary},
        bars=_bars(results),
        given={name: _given(model) for name, model in results["models"].items()},
        summary=summary,
        figures=[
            {
                "title": _FIGURES[name][0],
                "caption": _FIGURES[name][1],
                "alternative": f"{_FIGURES[name][0]}. {outcome}",
                "data": base64.b64encode((folder / f"{name}.png").read_bytes()).decode(),
            }
            for name in figures
        ],
        rates=_rates(results),
        rates_caption=_RATES_CAPTION,
        runs=_runs(results),
        command=results["command"],
        comparison=yaml.safe_dump(results["comparison"], sort_keys=False),
        corpus=_corpus(results),
        words=_WORDS,
    )


def _bars(results: dict[str, Any]) -> dict[str, Any]:
    """Where the page draws improvement, interval and noise floor: by model, in percent of a bar whose middle is 0.

    `limit` is the improvement, in percent, at which the bars end. One model far from all others does not make these invisible:
    it lies beyond the bar.
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

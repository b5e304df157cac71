"""The tables of a report: rows of texts by column, the same in every file."""

import statistics
from typing import Any

import yaml

from ..run.tasks import is_guessable


NOTHING = "\N{EN DASH}"
_MEBIBYTE = 2**20


def scales_in(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The results at each scale by name, the smallest first; those of a single scale are the only ones, without a name."""
    return results.get("scales") or {"": results}


def summary_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each model."""
    trained = {name: model["trained_parameters"] for name, model in results["models"].items()}
    has_frozen = any(trained[name] < model["parameters"] for name, model in results["models"].items())
    rows = []
    for name, model in results["models"].items():
        effect = results["statistics"]["effects"].get(name, {})  # the baseline has none
        finished = [run for run in model["runs"] if not run["diverged"]]
        rows.append(
            {
                "model": name,
                "verdict": effect.get("verdict", "baseline"),
                "test loss (nats)": _mean_and_deviation([run["test_loss"] for run in finished]),
                "loss improvement (%)": _improvement(effect, "loss_improvement"),
                "perplexity improvement (%)": _improvement(effect, "perplexity_improvement"),
                "Holm p": p_value(effect.get("holm_p")),
                **({"seeds": str(len(model["runs"]))} if results.get("looks") else {}),
                "learning rate": _chosen_rate(results, name),
                "parameters": f"{model['parameters']:,}",
                **({"trained": f"{trained[name]:,}"} if has_frozen else {}),
                "non-embedding": f"{model['non_embedding_parameters']:,}",
                "MLP width": number(model["intermediate_size"], ","),
                "FLOPs per token": f"{model['flops_per_token']:,}",
                "tokens/s": _median([run["tokens_per_second"] for run in finished], ",.0f"),
                "peak memory (MiB)": _largest_memory(finished),
                "training time (s)": _median([run["train_seconds"] for run in finished], ",.1f"),
                "diverged": f"{len(model['runs']) - len(finished)} of {len(model['runs'])}",
            }
        )
    return rows


def rate_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """Validation loss of each model at each learning rate tried, the mean over seeds; empty if there was no choice."""
    swept = {name: model for name, model in results["models"].items() if len(model["learning_rates"]) > 1}
    rates = sorted({rate for model in swept.values() for rate in model["learning_rates"]})
    rows = []
    for name, model in swept.items():
        row = {"model": name, **{f"{rate:g}": NOTHING for rate in rates}}
        chosen = [run["learning_rate"] for run in chosen_runs(results, name)]
        for rate, losses in losses_by_rate(results, name).items():
            text = "diverged" if None in losses else number(statistics.fmean(losses), ".4f")
            seeds = chosen.count(rate)
            mark = f"✓ {seeds}: " if 0 < seeds < len(model["runs"]) else "✓ " if seeds else ""
            row[f"{rate:g}"] = mark + text
        rows.append(row)
    return rows


def task_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each model, downstream task and metric; empty if the comparison has no tasks."""
    rows = []
    for task, metrics in results["tasks"].items():
        for metric, found in metrics.items():
            for name, scores in found["scores"].items():
                effect = found["statistics"]["effects"].get(name, {})
                rows.append(
                    {
                        "task": task,
                        "metric": f"{metric} ({'higher' if found['higher_is_better'] else 'lower'} is better)",
                        "model": name,
                        "verdict": effect.get("verdict", "baseline"),
                        "score": _mean_and_deviation([value for value in scores.values() if value is not None]),
                        "improvement (%)": _improvement(effect, "loss_improvement"),
                        "Holm p": p_value(effect.get("holm_p")),
                        "chance": number(found["chance"], ".3f") if is_guessable(metric) else NOTHING,
                        "items": number(found["items"], ","),
                    }
                )
    return rows


def improvement_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each model of a ladder: improvement at each scale, slope and verdict."""
    return [
        {
            "model": name,
            **{
                f"{scale} (%)": with_interval(step["improvement"], step["improvement_interval"], "+.2f")
                for scale, step in trend["steps"].items()
            },
            "slope (% per decade)": with_interval(trend["slope"], trend["slope_interval"], "+.2f"),
            "Holm p": p_value(trend["holm_p"]),
            "trend": trend["verdict"],
        }
        for name, trend in results["trend"]["models"].items()
    ]


def difference_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each model of a ladder: improvement at each scale in nats."""
    return [
        {
            "model": name,
            **{
                f"{scale} (nats)": with_interval(step["difference"], step["difference_interval"], "+.4f")
                for scale, step in trend["steps"].items()
            },
        }
        for name, trend in results["trend"]["models"].items()
    ]


def multiplier_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each model of a ladder: its compute multiplier at each scale; empty if there are none."""
    if results["trend"]["multiplier_note"]:
        return []
    return [
        {
            "model": name,
            **{
                scale: with_interval(step["multiplier"], step["multiplier_interval"], ".2f")
                if step["multiplier"] is not None
                else step["note"]
                for scale, step in trend["steps"].items()
            },
            "slope of log10 per decade": with_interval(trend["multiplier_slope"], trend["multiplier_slope_interval"], "+.3f"),
        }
        for name, trend in results["trend"]["models"].items()
    ]


def losses_by_rate(results: dict[str, Any], model: str) -> dict[float, list[float | None]]:
    """The validation losses of the runs that chose a model's learning rate; `None` for a run that diverged."""
    found = results["models"][model]
    losses: dict[float, list[float | None]] = {}
    for run in sorted([*found["tried"], *found["runs"]], key=lambda run: run["learning_rate"]):
        losses.setdefault(run["learning_rate"], []).append(None if run["diverged"] else run["validation_loss"])
    return losses


def chosen_runs(results: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """The reported runs whose rate was chosen or given. A seed that diverged at every rate reports a run and chose none."""
    found = results["models"][model]
    if len(found["learning_rates"]) == 1:
        return found["runs"]
    return [run for run in found["runs"] if not run["diverged"]]


def run_rows(results: dict[str, Any]) -> list[dict[str, str]]:
    """A row for each run."""
    rows = []
    for name, model in results["models"].items():
        runs = [*(("tried", run) for run in model["tried"]), *(("reported", run) for run in model["runs"])]
        for kind, run in runs:
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
                    "train loss": number(run["train_loss"], ".4f"),
                    "validation loss": number(run["validation_loss"], ".4f"),
                    "test loss": number(run["test_loss"], ".4f"),
                    "tokens/s": number(run["tokens_per_second"], ",.0f"),
                    "seconds": number(run["train_seconds"], ",.1f"),
                    "peak memory (MiB)": number(run["peak_memory"] and run["peak_memory"] / _MEBIBYTE, ",.0f"),
                    "backend": run["attn_implementation"],
                    "loss spikes": str(len(run["history"]["loss_spikes"])),
                    "largest gradient norm": "not finite" if None in norms else number(max(norms, default=None), ".3g"),
                    "tokens seen": run["token_stream"][:8],
                }
            )
    return rows


def _mean_and_deviation(losses: list[float]) -> str:
    if not losses:
        return NOTHING
    return f"{statistics.fmean(losses):.4f}" + (f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else "")


def _improvement(effect: dict[str, Any], name: str) -> str:
    return with_interval(effect.get(name), effect.get(f"{name}_interval"), "+.2f")


def with_interval(value: float | None, interval: list[float | None] | None, form: str) -> str:
    """Formats a number with its interval in brackets, if there is one."""
    if interval is None:
        return number(value, form)
    return f"{number(value, form)} [{', '.join(number(end, form) for end in interval)}]"


def p_value(p: float | None) -> str:
    """Formats a p-value; tiny ones only as a bound, and those near 0.05 so that the reader sees on which side they are."""
    if p is not None and p < 1e-4:
        return "< 0.0001"
    return number(p, ".3g" if p is not None and 0.045 < p < 0.055 else ".2g")


def _chosen_rate(results: dict[str, Any], name: str) -> str:
    """The rates that were chosen, with the number of seeds at each if not all chose the same."""
    model, chosen = results["models"][name], [run["learning_rate"] for run in chosen_runs(results, name)]
    if not chosen:
        return "none"
    rates = sorted(set(chosen))
    is_same = len(rates) == 1 and len(chosen) == len(model["runs"])
    text = " ".join(f"{rate:g}" + ("" if is_same else f" ({chosen.count(rate)})") for rate in rates)
    return text + (" (edge)" if model["edges"] else "" if len(model["learning_rates"]) > 1 else " (no choice)")


def _median(values: list[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return number(statistics.median(known) if known else None, form)


def _largest_memory(runs: list[dict[str, Any]]) -> str:
    known = [run["peak_memory"] / _MEBIBYTE for run in runs if run["peak_memory"] is not None]
    return number(max(known, default=None), ",.0f")


def number(value: float | None, form: str) -> str:
    """Formats a number; a dash stands for a missing one."""
    return NOTHING if value is None else format(value, form)


def provenance(results: dict[str, Any]) -> dict[str, str]:
    """Corpus, device, versions, and what computed the runs of each model."""
    kernels = {name: model["kernels"] for name, model in results["models"].items() if "kernels" in model}
    return {
        "corpus": str(results["comparison"]["recipe"].get("dataset", "python-stdlib")),
        "fingerprint": results["dataset_fingerprint"] or NOTHING,
        **{f"{split} tokens": number(results[f"{split}_tokens"], ",") for split in ("train", "validation", "test")},
        "device": results["device"],
        **results["versions"],
        **{f"kernels of {name}": " | ".join(found) for name, found in kernels.items()},
    }


def given_fields(model: dict[str, Any]) -> str:
    """The entry of a model in the comparison, in one line."""
    sections = {name: model["given"].get(name) or {} for name in ("switches", "training")}
    flat = {name: value for name, value in model["given"].items() if name not in sections}
    flat.update(sections["switches"], **sections["training"])
    return yaml.safe_dump(flat, sort_keys=False, default_flow_style=True, width=float("inf")).strip()[1:-1]

"""Draws gaps.png and prints its table: how far a model is from the unchanged one while both are trained.

Models of one seed see the same tokens in the same order, so losses are compared step by step. Each loss is
computed before the step, so the first one is the loss without training.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from modeling_nlq.training.comparison.figures import model_styles
from modeling_nlq.training.comparison.outcome import ScaleOutcome, read_outcome


FOLDER = Path(__file__).parent


def losses(results: ScaleOutcome, model: str) -> np.ndarray:
    """Training losses in nats per token, `(seed, step)`."""
    runs = sorted(results.models[model].runs, key=lambda run: run.seed)
    return np.array([[loss for _, loss in run.history.train_loss] for run in runs])


def tokens_until(gap: np.ndarray, share: float, tokens: np.ndarray) -> str:
    """The tokens after which no more than a share of the first gap is left."""
    found = np.flatnonzero(gap <= share * gap[0])
    return f"{tokens[found[0]]:,}" if len(found) else f"more than {tokens[-1]:,}"


def main() -> None:
    results = read_outcome(FOLDER / "results.json").largest
    reference = losses(results, results.baseline)
    styles = model_styles(results.baseline, results.models)
    tokens = np.arange(reference.shape[1]) * results.tokens_per_run // reference.shape[1]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    print("| model | before training | mean of the last 5 steps | half closed after | nine tenths closed after |")
    print("|---|---:|---:|---:|---:|")
    for name in results.models:
        if name == results.baseline:
            continue
        gaps = losses(results, name) - reference
        mean = gaps.mean(axis=0)
        is_apart = mean[0] > 0.1  # a part without effect starts at 0
        closed = [tokens_until(mean, share, tokens) if is_apart else "" for share in (0.5, 0.1)]
        print(f"| {name} | {mean[0]:+.4f} | {mean[-5:].mean():+.4f} | {' | '.join(closed)} |")
        label = f"{name}, all layers" if name == "sigmoid" else name
        # Exclusive lies on f
        axes.plot(tokens, mean, label=label, **{**styles[name], "markersize": 8 if name == "f" else 4})
        axes.fill_between(
            tokens, gaps.min(axis=0), gaps.max(axis=0), color=styles[name]["color"], alpha=0.15, linewidth=0
        )
    axes.axhline(0, color="#222222", linewidth=1)
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_ylim(bottom=-0.02)
    axes.set(
        xlabel="tokens trained on",
        ylabel="training loss above the unchanged model's (nats)\n(logarithmic beyond ±0.01)",
    )
    axes.set_title(
        "Distance from the unchanged model: mean over seeds, band from the lowest to the highest", fontsize=11
    )
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(FOLDER / "gaps.png", dpi=150)


if __name__ == "__main__":
    main()

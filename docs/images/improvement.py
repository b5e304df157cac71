"""Draws the picture of README.md from the results of a ladder: `python docs/images/improvement.py`."""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "results" / "ladder" / "activations" / "results.json"
# Colour, marker, and where the label stands beside the last point, in points: labels must not overlap
STYLES = {
    "sigmoid": ("#D55E00", "s", 0),
    "relu": ("#0072B2", "o", 7),
    "squared": ("#009E73", "D", -7),
    "tanh": ("#CC79A7", "^", 0),
}
# 1,200 pixels wide. The text stays readable at a third of that, on a phone
SIZE, DPI, FONT = (8.0, 4.8), 150, 14


def draw(ladder: dict) -> Figure:
    """The improvement of each model over the baseline at every scale, with its 95 % interval.

    Args:
        ladder: the content of a ladder's `results.json`.
    """
    trend = ladder["trend"]
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axhline(0, color="#222222", linewidth=2)
    beside = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center", "size": FONT}
    axes.annotate("softmax", (1, 0), (6, 0), **beside)
    for index, (name, (colour, marker, shift)) in enumerate(STYLES.items()):
        steps = trend["models"][name]["steps"].values()
        # A little aside of the compute, so that intervals do not cover each other
        flops = np.array([step["flops"] for step in steps]) * 1.06 ** (index - 1.5)
        improvements = [step["improvement"] for step in steps]
        reach = [np.abs(np.array(step["improvement_interval"]) - step["improvement"]) for step in steps]
        style = {"color": colour, "marker": marker, "markersize": 9, "linewidth": 2, "capsize": 4}
        axes.errorbar(flops, improvements, yerr=np.transpose(reach), **style)
        axes.annotate(name, (1, improvements[-1]), (6, shift), color=colour, **beside)
    compute = list(trend["flops"].values())
    labels = [
        f"{parameters(ladder, scale):,}\n{flops:.1e} FLOPs".replace("e+", "e")
        for scale, flops in trend["flops"].items()
    ]
    axes.set_xticks(compute, labels, size=FONT)
    axes.set_xticks([], minor=True)
    axes.set_xlim(compute[0] / 1.4, compute[-1] * 1.3)
    axes.set_xlabel("parameters outside the embedding, compute of a run", size=FONT)
    ticks = range(-15, 11, 5)
    axes.set_yticks(
        ticks, [f"{tick:+d} %".replace("-", "\N{MINUS SIGN}") if tick else "0" for tick in ticks], size=FONT
    )
    axes.set_ylabel("improvement of the loss", size=FONT)
    figure.suptitle("Four activations beside softmax, at three sizes", size=FONT + 3, weight="bold")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def parameters(ladder: dict, scale: str) -> int:
    """Parameters outside the embedding of the baseline, rounded to thousands."""
    found = ladder["scales"][scale]["models"][ladder["baseline"]]["non_embedding_parameters"]
    return round(found, -3)


if __name__ == "__main__":
    draw(json.loads(RESULTS.read_text())).savefig(FOLDER / "improvement.png", dpi=DPI)

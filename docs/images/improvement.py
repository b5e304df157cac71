"""Draws the picture of README.md from the results of a ladder: `python docs/images/improvement.py`."""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "results" / "softmax-tokens" / "results.json"
# Colour, marker, and what the last point says
STYLES = {"softplus": ("#0072B2", "o", "softplus\nin place of exp"), "tanh": ("#D55E00", "^", "tanh")}
# 1,200 pixels wide. The text stays readable at a third of that, on a phone
SIZE, DPI, FONT = (8.0, 4.2), 150, 14


def draw(ladder: dict) -> Figure:
    """The improvement of each model over the baseline at every scale, with its 95 % interval.

    Args:
        ladder: the content of a ladder's `results.json`.
    """
    models = ladder["trend"]["models"]
    tokens = np.array([scale["tokens_per_run"] for scale in ladder["scales"].values()])
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axhline(0, color="#222222", linewidth=2)
    beside = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center", "size": FONT}
    axes.annotate("softmax", (1, 0), (6, 0), **beside)
    for name, (colour, marker, label) in STYLES.items():
        steps = models[name]["steps"].values()
        improvements = [step["improvement"] for step in steps]
        reach = [np.abs(np.array(step["improvement_interval"]) - step["improvement"]) for step in steps]
        style = {"color": colour, "marker": marker, "markersize": 9, "linewidth": 2, "capsize": 4}
        axes.errorbar(tokens, improvements, yerr=np.transpose(reach), **style)
        axes.annotate(label, (1, improvements[-1]), (6, 0), color=colour, **beside)
    axes.set_xticks(tokens, [f"{count / 1e6:.2g} million" for count in tokens], size=FONT)
    axes.set_xticks([], minor=True)
    axes.set_xlim(tokens[0] / 1.3, tokens[-1] * 1.3)
    axes.set_xlabel("training tokens", size=FONT)
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:+.0f} %".replace("-", "\N{MINUS SIGN}") if tick else "0")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(axis="y", labelsize=FONT)
    axes.set_ylabel("improvement of the loss", size=FONT)
    figure.suptitle("Two activations beside softmax, tuned in short runs", size=FONT + 3, weight="bold")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    draw(json.loads(RESULTS.read_text())).savefig(FOLDER / "improvement.png", dpi=DPI)

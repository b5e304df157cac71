"""Draws an attention map of each of several trained models on the same text, and counts the weights that are exactly 0.

    nlq train study --set attention_activation=softmax --output_dir runs/softmax
    nlq train study --set attention_activation=entmax15 --output_dir runs/entmax15
    nlq train study --set attention_activation=sparsemax --output_dir runs/sparsemax
    python benchmarks/attention_map.py runs/softmax runs/entmax15 runs/sparsemax --plot docs/images/attention-maps.png

The text is the beginning of a module of the standard library. Each map shows the densest head of a model, the one with the
highest mean entropy, and not a head that looks at one token only. The zeros are counted among the weights of visible keys, over
all layers and heads.
"""

import argparse
import inspect
import textwrap
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_nlq  # noqa: F401 - registers the Auto classes


@torch.no_grad()
def attention_maps(folder: Path, tokens: int) -> tuple[torch.Tensor, int]:
    """Returns the maps `(layer, head, query, key)` and the number of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="nlq").eval()
    inputs = tokenizer(inspect.getsource(textwrap), return_tensors="pt", truncation=True, max_length=tokens)
    return torch.cat(model(**inputs, output_attentions=True).attentions), inputs["input_ids"].shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of trained models")
    parser.add_argument("--tokens", type=int, default=256, help="of the text")
    parser.add_argument("--shown", type=int, default=64, help="of them in the picture")
    parser.add_argument("--plot", type=Path, help="the picture's file")
    arguments = parser.parse_args()
    densest = {}
    for folder in arguments.runs:
        maps, length = attention_maps(folder, arguments.tokens)
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        zeros = (maps[..., visible] == 0).float().mean(dim=-1)  # (layer, head)
        entropy = torch.special.entr(maps).sum(dim=-1).mean(dim=-1)
        layer, head = divmod(int(entropy.argmax()), maps.shape[1])
        by_layer = ", ".join(f"{share:.1%}" for share in zeros.mean(dim=1))
        print(f"{folder.name}: {zeros.mean():.1%} of the weights are exactly 0; by layer {by_layer}")
        densest[f"{folder.name}: layer {layer}, head {head}, {zeros[layer, head]:.0%} zeros"] = maps[layer, head]
    if arguments.plot:
        plot(densest, arguments.shown, arguments.plot)


def plot(maps: dict[str, torch.Tensor], shown: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = pyplot.get_cmap("viridis").with_extremes(bad="white")
    figure, axes = pyplot.subplots(1, len(maps), figsize=(4.2 * len(maps), 4.4), layout="constrained", squeeze=False)
    for panel, (title, weights) in zip(axes[0], maps.items()):
        weights = weights[:shown, :shown]
        # The scale is logarithmic, so a weight of 0 has no colour
        image = panel.imshow(weights.masked_fill(weights == 0, torch.nan).log10(), cmap=colours, vmin=-3, vmax=0)
        panel.set(title=title, xlabel="key")
        panel.title.set_fontsize(9)
    axes[0][0].set_ylabel("query")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, label="weight (white: exactly 0)")
    bar.set_ticks([-3, -2, -1, 0], labels=["0.001 and less", "0.01", "0.1", "1"])
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()

"""The page of the explorer: one HTML file that works from disk, without any request.

Its policy forbids every request, and its text is data that is never read as HTML. Maps are packed: the lower triangle
of a head's weights, each row as whole numbers from -127 to 127 of its largest, as bytes, deflated, in base64. Numbers
of rows are packed too. The page unpacks a head when it is looked at.
"""

import base64
import html
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch

from .attention import HEADS, ROWS, Layer


# Bytes of a page, a little below 10 MB
PAGE_LIMIT = 9_900_000
FEWEST_MAP_TOKENS = 16
# Steps of a weight between 0 and the largest of its row
LEVELS = 127


@dataclass
class ExploredModel:
    """A model as a page shows it.

    Attributes:
        name, description: what it is.
        losses: `(length - 1,)`, the loss of each token after the first.
        layers: its attention layers.
        is_causal: whether no query sees a later key.
    """

    name: str
    description: str
    losses: torch.Tensor
    layers: list[Layer]
    is_causal: bool = True


def pack(numbers: np.ndarray) -> str:
    """Deflates the bytes of an array, in base64."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(numbers).tobytes())).decode()


def quantize(weights: torch.Tensor, is_causal: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Rounds weights `(heads, length, length)` to 1/127 of the largest in each row.

    Returns:
        The levels of the keys up to each query, `(heads, length * (length + 1) / 2)`, or of all,
        `(heads, length * keys)`, from -127 to 127, and the largest absolute weight of each row, `(heads, length)`.
    """
    largest = weights.abs().amax(dim=-1)
    levels = (weights * (LEVELS / largest.where(largest > 0, 1.0))[..., None]).round().to(torch.int8)
    if not is_causal:
        return levels.flatten(1).numpy(), largest.float().numpy()
    query, key = torch.tril_indices(*weights.shape[1:])
    return levels[:, query, key].numpy(), largest.float().numpy()


def write_page(
    title: str,
    notes: Sequence[str],
    tokens: Sequence[str],
    models: Sequence[ExploredModel],
    source: Sequence[str] = (),
) -> str:
    """Makes the page of one model or of two, of at most `PAGE_LIMIT` bytes, or a quarter more for a thousand heads.

    If not all fits, the page has the maps of the first tokens only, and says so.

    Args:
        notes: sentences below the title.
        tokens: the tokens of the text.
        models: each has a loss for every token but the first.
        source: the tokens that layers of cross-attention see.
    """
    notes, length = list(notes), len(tokens)
    content = _content(tokens, models) | {"source": list(source)}
    rest = PAGE_LIMIT - len(json.dumps(content)) - len(_read("explorer.js")) - 10_000
    map_tokens, maps = _pack_maps(models, length, max(rest, PAGE_LIMIT // 4))
    if map_tokens < length:
        notes.append(f"Maps show the first {map_tokens} of {length} tokens only, to keep the page small.")
    for model, layers in zip(content["models"], maps):
        model["map_tokens"] = map_tokens
        for layer, packed in zip(model["layers"], layers):
            layer["maps"] = packed
    together = (
        '<label><input type="checkbox" id="together" autocomplete="off" checked> same head in both models</label>\n'
    )
    return Template(_read("page.html")).substitute(
        title=html.escape(title),
        notes="".join(f'<p class="soft">{html.escape(note)}</p>\n' for note in notes),
        together=together if len(models) > 1 else "",
        levels=LEVELS,
        style=_read("explorer.css"),
        script=_read("explorer.js"),
        # No text can end the element, or begin another
        data=json.dumps(content, allow_nan=False).replace("<", "\\u003c"),
    )


def _content(tokens: Sequence[str], models: Sequence[ExploredModel]) -> dict[str, Any]:
    """What the page's script reads, without the maps."""
    return {
        "tokens": list(tokens),
        "levels": LEVELS,
        "quantities": _quantities(models),
        "models": [
            {
                "name": model.name,
                "description": model.description,
                "is_causal": model.is_causal,
                "loss": _number(model.losses.double().mean().item()) if len(model.losses) else None,
                "losses": [None, *map(_number, model.losses.tolist())],
                "layers": [_layer(layer) for layer in model.layers],
            }
            for model in models
        ],
    }


@cache
def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _pack_maps(models: Sequence[ExploredModel], length: int, budget: int) -> tuple[int, list[list[list[str] | None]]]:
    """Packs the maps of as many tokens as fit into some bytes; returns their number, and maps by model and layer."""
    tokens = length
    while True:
        packed = [[_pack_layer(layer, tokens, model.is_causal) for layer in model.layers] for model in models]
        size = sum(len(head) + 4 for layers in packed for heads in layers if heads for head in heads)
        if size <= budget or tokens <= FEWEST_MAP_TOKENS:
            return tokens, packed
        # The size of a map grows with the square
        fitting = int(tokens * math.sqrt(max(budget, 1) / size) * 0.98)
        tokens = max(FEWEST_MAP_TOKENS, fitting // 16 * 16)


def _pack_layer(layer: Layer, tokens: int, is_causal: bool) -> list[str] | None:
    if layer.weights is None:
        return None
    weights = layer.weights[:, :tokens] if layer.is_cross else layer.weights[:, :tokens, :tokens]
    return [pack(head) for head in quantize(weights, is_causal and not layer.is_cross)[0]]


def _quantities(models: Sequence[ExploredModel]) -> dict[str, str]:
    """Returns the quantities that the page shows of heads, with their descriptions, if some layer has them."""
    named = {name for model in models for layer in model.layers for name in (*layer.numbers, *layer.missing)} - {
        "weights"
    }
    known = ROWS | HEADS
    return {name: known[name] for name in known if name in named} | dict.fromkeys(
        sorted(named - known.keys()), "Measured by a part of the layer."
    )


def _layer(layer: Layer) -> dict[str, Any]:
    # Rows are rounded to 11 bits: that is enough to look at, and they compress better. The scale of a map is exact
    rows = {name: _round(row) for name, row in layer.rows.items()}
    if layer.weights is not None:
        rows = {"largest": layer.weights.abs().amax(dim=-1).float(), **rows}
    return {
        "name": layer.name,
        "is_cross": layer.is_cross,
        "activation": layer.activation,
        "heads": layer.heads,
        "numbers": {name: [_number(value) for value in values.tolist()] for name, values in layer.numbers.items()},
        "missing": layer.missing,
        "row_names": list(rows),
        "rows": [pack(torch.stack(head).numpy()) for head in zip(*rows.values())] if rows else None,
    }


def _round(row: torch.Tensor) -> torch.Tensor:
    """Rounds to 11 bits, in float32."""
    mantissa, exponent = torch.frexp(row.float())
    return torch.ldexp((mantissa * 2048).round() / 2048, exponent)


def _number(value: float) -> float | None:
    """Six digits; `None` for what JSON has no number for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None

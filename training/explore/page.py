"""The page of the explorer: one HTML file that works from disk, without any request.

Maps are packed: the lower triangle of a head's weights, each row as whole numbers from -127 to 127 of its largest, as bytes,
deflated, in base64. Numbers of rows are packed too. The page unpacks a head when it is looked at.
"""

import base64
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .attention import HEADS, ROWS, Layer
from .measures import LossDifference


# Bytes that the packed maps of a page may take; the rest of it stays well below the other 2 MB of 10
MAPS_BUDGET = 7_000_000
_LEVELS = 127


@dataclass
class Shown:
    """A model as a page shows it.

    Attributes:
        name, description: what it is.
        losses: `(length - 1,)`, the loss of each token after the first.
        layers: its attention layers.
        missing: why none of its layers has something.
    """

    name: str
    description: str
    losses: torch.Tensor
    layers: list[Layer]
    missing: dict[str, str] = field(default_factory=dict)


def pack(numbers: np.ndarray) -> str:
    """Deflates the bytes of an array, in base64."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(numbers).tobytes())).decode()


def quantize(weights: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Rounds weights `(heads, length, length)` to 1/127 of the largest in each row.

    Returns:
        The levels of the keys up to each query, `(heads, length * (length + 1) / 2)` from -127 to 127, and the largest absolute
        weight of each row, `(heads, length)`.
    """
    largest = weights.abs().amax(dim=-1)
    levels = (weights * (_LEVELS / largest.where(largest > 0, 1.0))[..., None]).round().to(torch.int8)
    query, key = torch.tril_indices(*weights.shape[1:])
    return levels[:, query, key].numpy(), largest.float().numpy()


def write_page(
    title: str, notes: Sequence[str], tokens: Sequence[str], models: Sequence[Shown], difference: LossDifference | None = None
) -> str:
    """Makes the page of one model or of two.

    Args:
        title: its title.
        notes: sentences below the title.
        tokens: the tokens of the text.
        models: each has a loss for every token but the first.
        difference: of the two models' losses on a whole file.
    """
    length = len(tokens)
    map_tokens, maps = _pack_maps(models, length)
    notes = list(notes)
    if difference is not None:
        notes.append(describe_difference(difference, [model.name for model in models]))
    if map_tokens < length:
        notes.append(
            f"The maps have the first {map_tokens} of {length} tokens, for the size of this page; all numbers have all tokens."
        )
    content = {
        "tokens": list(tokens),
        "quantities": _quantities(models),
        "models": [
            {
                "name": model.name,
                "description": model.description,
                "loss": _number(model.losses.double().mean().item()) if len(model.losses) else None,
                "losses": [None, *map(_number, model.losses.tolist())],
                "map_tokens": map_tokens,
                "layers": [_layer(layer, packed) for layer, packed in zip(model.layers, maps[index])],
            }
            for index, model in enumerate(models)
        ],
        "difference": None if difference is None else asdict(difference),
    }
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    return environment.get_template("page.html.jinja").render(
        title=title,
        notes=notes,
        is_pair=len(models) > 1,
        style=Markup(_read("explorer.css")),
        script=Markup(_read("explorer.js")),
        # No text can end the element, or begin another
        data=Markup(json.dumps(content, allow_nan=False).replace("<", "\\u003c")),
    )


def describe_difference(difference: LossDifference, names: Sequence[str]) -> str:
    """One sentence about the losses of two models on documents."""
    first, second = names
    interval = (
        "" if difference.low is None else f" (95 % interval over documents: {difference.low:+.4f} to {difference.high:+.4f})"
    )
    many = "document" if difference.documents == 1 else "documents"
    return (
        f"Loss of {second} minus loss of {first}: {difference.mean:+.4f} nats per token{interval}, over "
        f"{difference.documents:,} {many} of {difference.tokens:,} tokens."
    )


@cache
def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _pack_maps(models: Sequence[Shown], length: int) -> tuple[int, list[list[list[str] | None]]]:
    """Packs all maps, of as many tokens as the budget allows: their number, and the maps by model, layer and head."""
    tokens = length
    while True:
        packed = [
            [
                None if layer.weights is None else [pack(head) for head in quantize(layer.weights[:, :tokens, :tokens])[0]]
                for layer in model.layers
            ]
            for model in models
        ]
        size = sum(len(head) for layers in packed for heads in layers if heads for head in heads)
        if size <= MAPS_BUDGET or tokens <= 16:
            return tokens, packed
        # A map is a triangle: its size grows with the square
        fitting = int(tokens * math.sqrt(MAPS_BUDGET / size) * 0.98)
        tokens = max(16, fitting // 16 * 16)


def _quantities(models: Sequence[Shown]) -> dict[str, str]:
    """What the page shows of heads, with what it says of each: names that some layer has, or has a reason not to have."""
    named = {name for model in models for layer in model.layers for name in (*layer.numbers, *layer.missing)} - {"weights"}
    known = ROWS | HEADS
    return {name: known[name] for name in known if name in named} | {
        name: f"Of a part of the layer: {name}." for name in sorted(named - known.keys())
    }


def _layer(layer: Layer, maps: list[str] | None) -> dict[str, Any]:
    # Half precision is enough to look at, and its zeros are deflated; the scale of a map is exact
    rows = {name: _halved(row) for name, row in layer.rows.items()}
    if layer.weights is not None:
        rows = {"largest": layer.weights.abs().amax(dim=-1).float(), **rows}
    return {
        "activation": layer.activation,
        "heads": layer.heads,
        "numbers": {name: [_number(value) for value in values.tolist()] for name, values in layer.numbers.items()},
        "missing": layer.missing,
        "maps": maps,
        "row_names": list(rows),
        "rows": [pack(torch.stack(head).numpy()) for head in zip(*rows.values())] if rows else None,
    }


def _halved(row: torch.Tensor) -> torch.Tensor:
    """Rounds to 11 bits, in float32."""
    mantissa, exponent = torch.frexp(row.float())
    return torch.ldexp((mantissa * 2048).round() / 2048, exponent)


def _number(value: float) -> float | None:
    """Six digits; `None` for what JSON has no number for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None

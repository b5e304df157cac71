"""Writes the page of the explorer: one HTML file, which unpacks a map when its head is selected."""

import base64
import html
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch

from .attention import HEADS, ROWS, Layer


MAP_BYTES = 9_000_000  # of all maps; the Hub's limit for files in git is 10 MB
LEVELS = 127  # steps of a weight between 0 and the largest in its row


@dataclass
class ExploredModel:
    """A model on a page; `losses` are of the tokens after the first, `(length - 1,)`."""

    name: str
    description: str
    losses: torch.Tensor
    layers: list[Layer]
    is_causal: bool = True


def pack(numbers: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(numbers).tobytes())).decode()


def quantize(weights: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Rounds weights `(heads, length, keys)` to whole 1/127 of the largest in each row, `(heads, length)`."""
    largest = weights.abs().amax(dim=-1)
    levels = (weights * (LEVELS / largest.where(largest > 0, 1.0))[..., None]).round().to(torch.int8)
    return levels.numpy(), largest.float().numpy()


def write_page(
    title: str,
    notes: Sequence[str],
    tokens: Sequence[str],
    models: Sequence[ExploredModel],
    source: Sequence[str] = (),
) -> str:
    """Returns the page of one or two models. If the maps do not fit, only first tokens have them."""
    map_tokens = len(tokens)
    while map_tokens > 1 and sum(_map_bytes(model, map_tokens) for model in models) > MAP_BYTES:
        map_tokens -= 1
    if map_tokens < len(tokens):
        notes = [*notes, f"Maps show the first {map_tokens} of {len(tokens)} tokens only, to keep the page small."]
    content = {
        "notes": list(notes),
        "tokens": list(tokens),
        "source": list(source),
        "levels": LEVELS,
        "map_tokens": map_tokens,
        "quantities": _quantities(models),
        "models": [
            {
                "name": model.name,
                "description": model.description,
                "is_causal": model.is_causal,
                "loss": _number(model.losses.double().mean().item()) if len(model.losses) else None,
                "losses": [None, *map(_number, model.losses.tolist())],
                "layers": [_layer(layer, map_tokens) for layer in model.layers],
            }
            for model in models
        ],
    }
    return Template(_read("page.html")).substitute(
        title=html.escape(title),
        levels=LEVELS,
        style=_read("explorer.css"),
        script=_read("explorer.js"),
        # Without `<`, a text cannot end the element
        data=json.dumps(content, allow_nan=False).replace("<", "\\u003c"),
    )


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _map_bytes(model: ExploredModel, tokens: int) -> float:
    """Returns the size of a model's maps if nothing but later keys can be compressed."""
    size = 0.0
    for layer in model.layers:
        if layer.weights is not None:
            keys = layer.weights.shape[-1] if layer.is_cross else tokens / (2 if model.is_causal else 1)
            # A byte for each weight, four for the largest of each row, and two headers of zlib
            size += layer.heads * (tokens * (keys + 4) + 48)
    return size * 4 / 3


def _quantities(models: Sequence[ExploredModel]) -> dict[str, str]:
    names = {name for model in models for layer in model.layers for name in (*layer.numbers, *layer.missing)}
    known = {name: text for name, text in (ROWS | HEADS).items() if name in names}
    return known | dict.fromkeys(sorted(names - known.keys() - {"weights"}), "Measured by a part of the layer.")


def _layer(layer: Layer, tokens: int) -> dict[str, Any]:
    maps = largest = None
    if layer.weights is not None:
        weights = layer.weights[:, :tokens] if layer.is_cross else layer.weights[:, :tokens, :tokens]
        maps, largest = (list(map(pack, each)) for each in quantize(weights))
    return {
        "name": layer.name,
        "is_cross": layer.is_cross,
        "activation": layer.activation,
        "heads": layer.heads,
        "numbers": {name: [_number(value) for value in values.tolist()] for name, values in layer.numbers.items()},
        "missing": layer.missing,
        "maps": maps,
        "largest": largest,
    }


def _number(value: float) -> float | None:
    """Rounds to six digits; `None` stands for NaN and infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else None

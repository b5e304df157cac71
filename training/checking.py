"""`nlq check`: the invariants of every configuration, on an attention part of the user's own.

The models are small and random. Each invariant goes from the shortest cases to longer ones, so the first that fails is the
smallest.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import DynamicCache, StaticCache

from modeling_nlq import AttentionPart, NLQConfig, NLQForCausalLM, load_attention_parts, rows_nlq
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS, needs_of

from .text import one_line


VOCABULARY, LONGEST = 13, 7
# In float64, where nothing but a wrong number is left to differ; rotary angles are float32 everywhere
TOLERANCE = 1e-6
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 24, "max_position_embeddings": 32}
# What may meet a part: kinds of weights, shared keys, a window. A part may refuse some of them
_SURROUNDINGS = {
    "softmax": {},
    "shared keys and rotary positions": {"num_key_value_heads": 2, "query_projection": "linear", "position_embedding": "rope"},
    "a window of 3 tokens": {"sliding_window": 3},
    "sigmoid": {"attention_activation": "sigmoid"},
    "relu, normalised by the length": {"attention_activation": "relu"},
    "linear attention": {"attention_activation": "linear_attention"},
}


@dataclass
class Finding:
    """The result of one invariant.

    Attributes:
        invariant: its name.
        difference: the largest difference found.
        case: the smallest case that fails, in words; `None` if it holds.
    """

    invariant: str
    difference: float
    case: str | None = None


def check_parts(file: str | Path) -> Iterator[tuple[str, Finding]]:
    """Checks the parts of a file. It ends with the first invariant that fails.

    Args:
        file: a Python file, as `load_attention_parts` takes it.

    Yields:
        The name of a part, and the result of one invariant.

    Raises:
        ValueError: if the file has no parts, or one of them fits no model.
    """
    for part in load_attention_parts(file):
        models = _models(part)
        for invariant, differences in INVARIANTS.items():
            finding = _try(invariant, differences, models)
            yield part.name, finding
            if finding.case is not None:
                return


def _models(part: type[AttentionPart]) -> dict[str, NLQForCausalLM]:
    models, reasons = {}, []
    for name, switches in _SURROUNDINGS.items():
        try:
            config = NLQConfig(**{**_SIZES, **switches}, attention_parts=[part.name], attn_implementation="eager")
        except StrictDataclassError as error:
            reasons.append(one_line(error))
            continue
        try:
            model = NLQForCausalLM(config)
        except Exception as error:
            raise ValueError(f"{part.name} cannot be made: {type(error).__name__}: {one_line(error)}") from error
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():  # with initial values, many a fault has no effect
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
        models[name] = model.double().eval()
    if not models:
        raise ValueError(f"{part.name} fits no model: {reasons[0]}")
    return models


def _try(
    invariant: str, differences: Callable[[NLQForCausalLM, int], Iterator[tuple[str, float]]], models: dict[str, NLQForCausalLM]
) -> Finding:
    largest = 0.0
    for length in range(1, LONGEST + 1):
        for name, model in models.items():
            model.set_attn_implementation("eager")
            try:
                for case, difference in differences(model, length):
                    if not difference <= TOLERANCE:  # also NaN
                        return Finding(invariant, difference, f"{case}, with {name}")
                    largest = max(largest, difference)
            except Exception as error:
                case = f"{length} token{'s' * (length > 1)}, with {name}: {type(error).__name__}: {one_line(error)}"
                return Finding(invariant, float("nan"), case)
    return Finding(invariant, largest)


def _tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).detach().abs().max()) if one.numel() else 0.0


@torch.no_grad()
def _causality(model: NLQForCausalLM, length: int) -> Iterator[tuple[str, float]]:
    tokens = _tokens(1, length)
    before = model(tokens, use_cache=False).logits[0]
    for changed in range(1, length):
        other = tokens.clone()
        other[0, changed:] = (other[0, changed:] + 1) % VOCABULARY
        after = model(other, use_cache=False).logits[0]
        yield (
            f"{length} tokens, of which those from number {changed + 1} on change",
            _difference(after[:changed], before[:changed]),
        )


@torch.no_grad()
def _padding(model: NLQForCausalLM, length: int) -> Iterator[tuple[str, float]]:
    tokens = _tokens(1, length)
    alone = model(tokens, use_cache=False).logits[0]
    has_window = model.model.layers[0].self_attn.sliding_window is not None
    for place, word in ((0, "before"), (length, "after"), (length // 2, "between")):
        if word == "between" and (length < 2 or has_window):  # a window counts places
            continue
        padded = torch.cat([tokens[:, :place], torch.full((1, 2), 7), tokens[:, place:]], dim=1)
        mask = torch.ones_like(padded)
        mask[:, place : place + 2] = 0
        logits = model(padded, attention_mask=mask, use_cache=False).logits[mask.bool()]
        yield f"{length} tokens with 2 of padding {word} them", _difference(logits, alone)


@torch.no_grad()
def _documents(model: NLQForCausalLM, length: int) -> Iterator[tuple[str, float]]:
    tokens = _tokens(1, length)
    for first in range(1, length):
        parts = tokens.split([first, length - first], dim=1)
        positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
        packed = model(tokens, position_ids=positions, use_cache=False).logits
        separate = torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)
        yield f"documents of {first} and {length - first} tokens, packed", _difference(packed, separate)


def _chunks(length: int) -> Iterator[list[int]]:
    for cut in range(1, length):
        yield [cut, length - cut]
    if length > 2:
        yield [1] * length


def _cached(make_cache: Callable) -> Callable[[NLQForCausalLM, int], Iterator[tuple[str, float]]]:
    @torch.no_grad()
    def differences(model: NLQForCausalLM, length: int) -> Iterator[tuple[str, float]]:
        tokens = _tokens(2, length)
        expected = model(tokens, use_cache=False).logits
        for sizes in _chunks(length):
            cache = make_cache(model.config, length)
            logits = [model(chunk, cache=cache, use_cache=True).logits for chunk in tokens.split(sizes, dim=1)]
            yield f"{length} tokens in chunks of {', '.join(map(str, sizes))}", _difference(torch.cat(logits, dim=1), expected)

    return differences


@torch.no_grad()
def _taken_back(model: NLQForCausalLM, length: int) -> Iterator[tuple[str, float]]:
    layer = model.model.layers[0].self_attn
    is_one_way = layer.activation.kind == "linear" or not all(part.can_go_back for part in layer.parts.values())
    if length < 3 or is_one_way or layer.sliding_window is not None:
        return
    tokens = _tokens(1, length)
    expected, cache = model(tokens, use_cache=False).logits, DynamicCache(config=model.config)
    cache.activate_past_recording()  # as assisted decoding does
    model(torch.cat([tokens[:, :2], tokens[:, :1]], dim=1), cache=cache, use_cache=True)
    cache.crop(-1)
    logits = model(tokens[:, 2:], cache=cache, use_cache=True).logits
    yield f"{length} tokens, after a third one was taken back from the cache", _difference(logits, expected[:, 2:])


def _backends(model: NLQForCausalLM, length: int) -> Iterator[tuple[str, float]]:
    if model.model.layers[0].self_attn.activation.kind == "linear":
        return
    tokens = _tokens(2, length)
    parameters = list(model.parameters())

    def outputs() -> list[torch.Tensor]:
        logits = model(tokens, use_cache=False).logits
        return [logits, *torch.autograd.grad(logits.square().mean(), parameters, materialize_grads=True)]

    expected = outputs()
    for name in ("sdpa", "nlq_tiled", "nlq_rows"):
        if not all(ATTENTION_BACKENDS[name].can_compute(needs_of(layer)) for layer in model.config.per_layer_config):
            continue
        model.set_attn_implementation(name)
        with patch.object(rows_nlq, "ROWS", 2):  # blocks that short texts have too
            difference = max(map(_difference, outputs(), expected))
        model.set_attn_implementation("eager")
        yield f"{length} tokens on {name}, gradients included", difference


@torch.no_grad()
def _finite(model: NLQForCausalLM, length: int) -> Iterator[tuple[str, float]]:
    tokens, mask = _tokens(2, length), torch.ones(2, length, dtype=torch.long)
    mask[1] = 0
    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    yield f"a row of {length} tokens of padding alone", 0.0 if logits.isfinite().all() else float("nan")


@torch.no_grad()
def _saved(model: NLQForCausalLM, length: int) -> Iterator[tuple[str, float]]:
    if length != LONGEST:
        return
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = NLQForCausalLM.from_pretrained(folder, dtype=model.dtype, attn_implementation="eager").eval()
    tokens = _tokens(1, length)
    yield f"{length} tokens, after saving and loading", _difference(loaded(tokens).logits, model(tokens).logits)


# The invariants in the order in which they are tried: what is called causal, padded, packed and cached
INVARIANTS: dict[str, Callable[[NLQForCausalLM, int], Iterator[tuple[str, float]]]] = {
    "no token sees the future": _causality,
    "a padded text equals the text alone": _padding,
    "packed documents equal separate ones": _documents,
    "cached decoding equals the full pass": _cached(lambda config, length: DynamicCache(config=config)),
    "a static cache equals the full pass": _cached(lambda config, length: StaticCache(config=config, max_cache_len=length + 3)),
    "tokens can be taken back from the cache": _taken_back,
    "a row of padding alone stays finite": _finite,
    "every backend equals eager": _backends,
    "saving and loading changes nothing": _saved,
}


def describe(file: str | Path) -> tuple[list[str], bool]:
    """Checks the parts of a file, and says what came out.

    Returns:
        A line for each invariant that was tried, and whether all of them hold.
    """
    lines, holds = [], True
    for name, findings in itertools.groupby(check_parts(file), key=lambda pair: pair[0]):
        lines.append(f"{name}:")
        for _, finding in findings:
            if finding.case is None:
                lines.append(f"  {finding.invariant:<41} holds, largest difference {finding.difference:.1e}")
            else:
                holds = False
                lines.append(f"  {finding.invariant:<41} FAILS, difference {finding.difference:.1e}: {finding.case}")
    return lines, holds

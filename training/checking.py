"""`nlq check`: tests the invariants of all models on attention parts, in small random models.

Short texts come first. If a long text fails, shorter ones are tried, to report the smallest case.
"""

import copy
import itertools
import math
import random
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StaticCache

from modeling_nlq import AttentionPart, NLQConfig, NLQForCausalLM, NLQForMaskedLM, attention_nlq
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS, request_of
from modeling_nlq.modeling_nlq import NLQAttention
from modeling_nlq.parts_base_nlq import HOOKS, AttentionCall

from .text import count, one_line
from .trust import run_parts


VOCABULARY = 13
SHORT = 7  # texts of at most this many tokens are cut everywhere
LONG = 130  # exceeds the blocks in which a part may compute
LONGEST = 512  # takes most of the time, so only one decoder and one encoder are tested with it
LENGTHS = (1, 2, 3, 5, SHORT, LONG, LONGEST)
ROWS = 5  # of the largest batch
TOLERANCE = 1e-6  # rounding is smaller in float64, but rotary angles are float32
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": LONGEST + 2,
}
# Switches that a part is tested with. A part may refuse some of them
_SURROUNDINGS = {
    "softmax": {},
    "8 heads, shared keys and rotary positions": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "query_projection": "linear",
        "position_embedding": "rope",
    },
    "a window of 3 tokens": {"sliding_window": 3},
    "16 heads": {"num_attention_heads": 16, "head_dim": 2, "query_projection": "linear"},
    "sigmoid, wide heads and a gated MLP": {
        "attention_activation": "sigmoid",
        "query_projection": "linear",
        "head_dim": 6,
        "mlp_type": "gated",
    },
    "relu, normalised by the length": {"attention_activation": "relu"},
    "linear attention": {"attention_activation": "linear_attention"},
    "the gated delta rule": {
        "attention_activation": "linear_attention",
        "linear_attention_update": "delta",
        "linear_attention_decay": "gated",
    },
    "an encoder (causal_only = True refuses those)": {"is_causal": False},
    "an encoder with sigmoid and a window (causal_only = True refuses those)": {
        "is_causal": False,
        "attention_activation": "sigmoid",
        "sliding_window": 3,
    },
}

Cases = Iterator[tuple[str, float]]  # descriptions of cases, and the difference in each
Differences = Callable[[NLQForCausalLM, int], Cases]  # takes a model and a length
Results = torch.Tensor | list[torch.Tensor | None] | None
Models = dict[str, NLQForCausalLM]


class Invariant(NamedTuple):
    """What must hold for texts of some lengths, perhaps of decoders only."""

    differences: Differences
    lengths: Sequence[int] = LENGTHS
    needs_decoder: bool = False


def describe(file: str | Path, seed: int | None = None) -> tuple[list[str], bool]:
    """Checks the parts of a file until an invariant fails; returns the report's lines and whether all hold.

    Raises `ValueError` for a file without parts, or a part that refuses all models.
    """
    lines = []
    seed = random.randrange(10**6) if seed is None else seed
    for part in run_parts(file):
        lines.append(f"{part.name}, random cases of --seed {seed}:")
        draws = random.Random(seed)
        switches = _draw_switches(draws)
        drawn = ", ".join(f"{name}={value}" for name, value in switches.items())
        models = _models(part, {**_SURROUNDINGS, drawn: switches})
        decoders = [name for name, model in models.items() if model.config.is_causal]
        encoders = [name for name in models if name not in decoders]
        for title, invariant in INVARIANTS.items():
            names = decoders if invariant.needs_decoder else list(models)
            cases = itertools.product(invariant.lengths, names)
            cases = [case for case in cases if case[0] <= LONG or case[1] in (*decoders[:1], *encoders[:1])]
            if LONGEST in invariant.lengths and drawn in names:
                most = LONGEST // max(1, switches["num_attention_heads"] // 4)  # many heads take more time
                cases.append((draws.randint(SHORT + 1, most), drawn))
            cases.sort(key=lambda case: case[0])
            difference, failure = _try(invariant.differences, cases, models)
            if failure is not None:
                size = f", difference {difference:.1e}" if math.isfinite(difference) else ""
                lines.append(f"  {title:<41} FAILS{size}: {failure}")
                return lines, False
            lines.append(f"  {title:<41} holds, largest difference {difference:.1e}")
        lines += _describe_effect(models)
    return lines, True


def _draw_switches(draws: random.Random) -> dict[str, Any]:
    groups = draws.randint(1, 4)
    window = draws.choice((None, draws.randint(1, LONGEST)))
    heads = {"num_attention_heads": groups * draws.randint(1, 16 // groups), "num_key_value_heads": groups}
    return {**heads, "head_dim": 2 * draws.randint(1, 3), "sliding_window": window, "query_projection": "linear"}


def _models(part: type[AttentionPart], surroundings: dict[str, dict[str, Any]]) -> Models:
    models = {}
    for name, switches in surroundings.items():
        try:
            config = NLQConfig(**{**_SIZES, **switches}, attention_parts=[part.name], attn_implementation="eager")
        except StrictDataclassError as error:
            reason = one_line(error)
            continue
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = NLQForCausalLM(config) if config.is_causal else NLQForMaskedLM(config)
            for parameter in model.parameters():  # many faults do not show with initial values
                parameter.add_(torch.randn(parameter.shape), alpha=0.3)
        models[name] = model.double().eval()
    if not models:
        raise ValueError(f"{part.name} fits no model: {reason}")
    return models


def _describe_effect(models: Models) -> Iterator[str]:
    """Yields whether outputs differ from those of a model without the part, at its start and after changes."""
    effects = [_effects(model) for model in models.values()]
    at_start, at_all = (max(differences) for differences in zip(*effects))
    own = [name for model in models.values() for name, _ in model.named_parameters() if ".parts." in name]
    if own and at_start <= TOLERANCE:
        yield f"  {'changes outputs at its start':<41} no: it begins as without it"
    elif own:
        yield f"  {'changes outputs at its start':<41} yes, by up to {at_start:.1e}"
    title = f"changes outputs{', its parameters changed' if own else ''}"
    yes = f"yes, by up to {at_all:.1e}"
    yield f"  {title:<41} {yes if at_all > TOLERANCE else 'NO: all models compute the same as without it'}"


@torch.no_grad()
def _effects(model: NLQForCausalLM) -> tuple[float, float]:
    """Returns how much outputs differ from those without the part: with its initial parameters, and with others."""
    config = type(model.config).from_dict({**model.config.to_dict(), "attention_parts": None})
    without, initial = (type(model)(made).double() for made in (config, model.config))
    weights, shapes = model.state_dict(), {name: value.shape for name, value in without.state_dict().items()}
    without.load_state_dict({n: v for n, v in weights.items() if shapes.get(n) == v.shape}, strict=False)
    initial.load_state_dict({name: value for name, value in weights.items() if name in shapes}, strict=False)
    changed = copy.deepcopy(model)
    largest = []
    for other in (initial, changed):
        differences = [0.0]
        for length, is_training in itertools.product((SHORT, LONG), (False, True)):
            with torch.random.fork_rng(devices=[]):
                expected = _logits(without.train(is_training), _tokens(2, length))
                differences.append(_difference(_logits(other.train(is_training), _tokens(2, length)), expected))
        largest.append(max(differences))
    return largest[0], largest[1]


def _try(differences: Differences, cases: Sequence[tuple[int, str]], models: Models) -> tuple[float, str | None]:
    """Returns the largest difference and `None`, or those of the smallest failing case."""
    largest = 0.0
    passed = dict.fromkeys(models)
    for length, name in cases:
        run = partial(_try_one, differences, name, models[name])
        difference, failure = run(length)
        if failure is not None:
            shorter = range((passed[name] or length - 1) + 1, length)
            index = bisect_left(shorter, True, key=lambda tried: run(tried)[1] is not None)
            return run([*shorter, length][index])
        passed[name] = length
        largest = max(largest, difference)
    return largest, None


def _try_one(differences: Differences, name: str, model: NLQForCausalLM, length: int) -> tuple[float, str | None]:
    largest = 0.0
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            for case, difference in differences(model, length):
                if not difference <= TOLERANCE:  # `>` would accept NaN
                    return difference, f"{case}, with {name}"
                largest = max(largest, difference)
    except Exception as error:
        return math.nan, f"{count(length, 'token')}, with {name}: {type(error).__name__}: {one_line(error)}"
    return largest, None


def _layers(model: NLQForCausalLM) -> list[NLQAttention]:
    return [layer.self_attn for layer in model.model.layers]


def _parts(model: NLQForCausalLM) -> list[AttentionPart]:
    return [part for layer in _layers(model) for part in layer.parts.values()]


def _has_window(model: NLQForCausalLM) -> bool:
    return any(layer.sliding_window is not None for layer in _layers(model))


def _has_linear_attention(model: NLQForCausalLM) -> bool:
    return any(layer.activation.kind == "linear" for layer in _layers(model))


def _cuts(length: int) -> Sequence[int]:
    """Returns where a text is cut: everywhere, or if it is long, at and inside a block and near the end."""
    return range(1, length) if length <= SHORT else sorted({min(64, length // 3), length // 2 + 1, length - 1})


def _rows(length: int) -> int:
    return ROWS if length == SHORT else 2


def _tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))


def _logits(model: NLQForCausalLM, tokens: torch.Tensor, **kwargs) -> torch.Tensor:
    return model(tokens, use_cache=False, **kwargs).logits


def _difference(values: Results, expected: Results) -> float:
    if isinstance(values, list):
        return max(map(_difference, values, expected))
    if values is None or expected is None:
        return 0.0 if values is expected else math.inf
    return float((values - expected).detach().abs().max()) if values.numel() else 0.0


def _with_gradients(model: NLQForCausalLM, tokens: torch.Tensor, **kwargs) -> list[torch.Tensor | None]:
    """Returns the logits and each parameter's gradient, or `None` if it does not affect the logits."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        logits = _logits(model, tokens, **kwargs)
        return [logits, *torch.autograd.grad(logits.float().square().mean(), parameters, allow_unused=True)]


def _repeated(model: NLQForCausalLM, length: int) -> Cases:
    tokens = _tokens(1, length)
    other = copy.deepcopy(model) if length == 1 else model  # a copy that has not seen this text
    with torch.inference_mode():
        expected = _logits(model, tokens).clone()
    with torch.enable_grad():
        logits = _logits(model, tokens)
    yield f"{count(length, 'token')}, with gradients and without", _difference(logits, expected)
    other((_tokens(2, length + 1) + 1) % VOCABULARY, use_cache=False)
    logits = _logits(other, tokens)
    yield f"{count(length, 'token')}, before and after another text", _difference(logits, expected)


def _causality(model: NLQForCausalLM, length: int) -> Cases:
    tokens = _tokens(1, length)
    before = _logits(model, tokens)[0]
    for changed in _cuts(length):
        other = tokens.clone()
        other[0, changed:] = (other[0, changed:] + 1) % VOCABULARY
        after = _logits(model, other)[0]
        case = f"{length} tokens, of which those from number {changed + 1} on change"
        yield case, _difference(after[:changed], before[:changed])


def _padding(model: NLQForCausalLM, length: int) -> Cases:
    tokens = _tokens(1, length)
    alone = _logits(model, tokens)[0]
    places = {"before": 0, "after": length}
    if length > 1 and not _has_window(model):  # a window counts padding, too
        places["between"] = length // 2
    for word, start in places.items():
        padded = torch.cat([tokens[:, :start], torch.full((1, 2), 7), tokens[:, start:]], dim=1)
        mask = torch.ones_like(padded)
        mask[:, start : start + 2] = 0
        logits = _logits(model, padded, attention_mask=mask)[mask.bool()]
        yield f"{count(length, 'token')} with 2 of padding {word} them", _difference(logits, alone)


def _texts(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch and its mask; every other text is padded at the left."""
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(0, rows, 2):
        mask[row, : length // (2 + row)] = 0
    return _tokens(rows, length), mask


def _batch(model: NLQForCausalLM, length: int) -> Cases:
    tokens, mask = _texts(ROWS, length)
    alone = [_logits(model, text[is_token][None])[0] for text, is_token in zip(tokens, mask.bool())]
    for rows in range(2, ROWS + 1) if length <= SHORT else (2, ROWS):
        logits = _logits(model, tokens[:rows], attention_mask=mask[:rows])
        others = ", ".join(str(len(text)) for text in alone[: rows - 1])
        for row in range(rows):
            case = f"text {row + 1} of a batch of {others} and {count(len(alone[rows - 1]), 'token')}"
            if length > 1:
                case += ", the shorter padded"
            yield case, _difference(logits[row, mask[row].bool()], alone[row])


def _documents(model: NLQForCausalLM, length: int) -> Cases:
    tokens = _tokens(1, length)
    for first in _cuts(length):
        parts = tokens.split([first, length - first], dim=1)
        positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
        packed = _logits(model, tokens, position_ids=positions)
        separate = torch.cat([_logits(model, part) for part in parts], dim=1)
        yield f"documents of {first} and {length - first} tokens, packed", _difference(packed, separate)


def _cached(model: NLQForCausalLM, length: int, is_static: bool = False, is_padded: bool = False) -> Cases:
    tokens, mask = _texts(_rows(length), length)
    mask = mask if is_padded else torch.ones_like(mask)
    expected = _logits(model, tokens, attention_mask=mask)
    splits = [[cut, length - cut] for cut in _cuts(length)]
    if 2 < length <= SHORT:
        splits.append([1] * length)
    for sizes in splits:
        logits = []
        cache = StaticCache(model.config, length + 3) if is_static else DynamicCache(config=model.config)
        for end, chunk in zip(itertools.accumulate(sizes), tokens.split(sizes, dim=1)):
            seen = mask[:, :end] if is_padded else None
            logits.append(model(chunk, attention_mask=seen, cache=cache, use_cache=True).logits)
        case = f"{length} tokens in chunks of {', '.join(map(str, sizes))}"
        if is_padded:
            case += f", {length // 2} of them padding before the first text"
        if len(tokens) > 2:
            case += f", in a batch of {len(tokens)}"
        yield case, _difference(torch.cat(logits, dim=1)[mask.bool()], expected[mask.bool()])


def _several_caches(model: NLQForCausalLM, length: int) -> Cases:
    tokens = _tokens(2, length)
    cut = length // 2
    expected = _logits(model, tokens)
    first, second, both = (DynamicCache(config=model.config) for _ in range(3))
    for rows, cache in ((tokens[:, :cut], both), (tokens[:1, :cut], first), (tokens[1:], second)):
        model(rows, cache=cache, use_cache=True)
    logits = model(tokens[:1, cut:], cache=first, use_cache=True).logits
    case = f"{cut} and {length - cut} tokens, between which another text has its own cache"
    yield case, _difference(logits[0], expected[0, cut:])
    both.reorder_cache(torch.tensor([1, 0]))  # as beam search does
    logits = model(tokens.flip(0)[:, cut:], cache=both, use_cache=True).logits
    case = f"2 texts of {length} tokens that change places in the cache after {count(cut, 'token')}"
    yield case, _difference(logits, expected.flip(0)[:, cut:])


def _taken_back(model: NLQForCausalLM, length: int) -> Cases:
    if _has_window(model) or _has_linear_attention(model):
        return
    if not all(part.supports_crop for part in _parts(model)):
        return
    tokens = _tokens(1, length)
    expected = _logits(model, tokens)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()  # as assisted decoding does
    model(torch.cat([tokens[:, :2], tokens[:, :1]], dim=1), cache=cache, use_cache=True)
    cache.crop(-1)
    logits = model(tokens[:, 2:], cache=cache, use_cache=True).logits
    yield f"{length} tokens, after a third one was taken back from the cache", _difference(logits, expected[:, 2:])


def _backends(model: NLQForCausalLM, length: int) -> Cases:
    if _has_linear_attention(model):
        return
    tokens = _tokens(_rows(length), length)
    expected = _with_gradients(model, tokens)
    for name in ("sdpa", "nlq_tiled", "nlq_rows"):
        supports = ATTENTION_BACKENDS[name].supports_layer
        if not all(supports(request_of(layer)) for layer in model.config.per_layer_config):
            continue
        model.set_attn_implementation(name)
        rows = 2 if length <= SHORT else attention_nlq.ROWS  # short texts get several blocks, too
        with patch.object(attention_nlq, "ROWS", rows):
            difference = _difference(_with_gradients(model, tokens), expected)
        model.set_attn_implementation("eager")
        yield f"{count(length, 'token')} on {name}, gradients included", difference


def _finite(model: NLQForCausalLM, length: int) -> Cases:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1] = 0
    results = _with_gradients(model, _tokens(2, length), attention_mask=mask)
    is_finite = all(result.isfinite().all() for result in results if result is not None)
    yield f"a row of {count(length, 'token')} of padding alone, gradients included", 0.0 if is_finite else math.nan


def _training(model: NLQForCausalLM, length: int) -> Cases:
    state = copy.deepcopy(model.state_dict())
    tokens = _tokens(_rows(length), length)
    results = []
    for seed in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            results.append(_with_gradients(model.train(), tokens))
        model.eval().load_state_dict(state)  # a part may update buffers
    # Otherwise, the part draws random numbers
    if _difference(results[0][0], results[1][0]) <= TOLERANCE:
        difference = _difference(results[0], _with_gradients(model, tokens))
        yield f"{len(tokens)} texts of {count(length, 'token')}, gradients included", difference


def _used(model: NLQForCausalLM, length: int) -> Cases:
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, gradient in zip(names, _with_gradients(model, _tokens(2, length))[1:]):
        if ".parts." in name and gradient is None:
            yield f"{name} has no gradient", math.nan


def _unchanged(model: NLQForCausalLM, length: int) -> Cases:
    changes = []

    def watch(function: Callable, call: AttentionCall, *inputs: Any) -> Any:
        leaves = tree_leaves((call.hidden_states, call.values, inputs))
        tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
        versions = [tensor._version for tensor in tensors]
        result = function(call, *inputs)
        if versions != [tensor._version for tensor in tensors]:
            changes.append(function.__name__)
        return result

    with ExitStack() as stack:
        for part, hook in itertools.product(_parts(model), HOOKS):
            if part.has_hook(hook):
                stack.enter_context(patch.object(part, hook, partial(watch, getattr(part, hook))))
        model(_tokens(2, length), use_cache=False)
    if changes:
        yield f"{count(length, 'token')}: {changes[0]} changes a tensor in place", math.nan


def _dtypes(model: NLQForCausalLM, length: int) -> Cases:
    fresh = type(model)(model.config).eval()  # `double` converted the buffers of `model`
    for name in ("float32", "autocast", "bfloat16"):
        if name == "bfloat16":
            fresh.bfloat16()
        with torch.autocast("cpu", enabled=name == "autocast"):
            logits = _logits(fresh, _tokens(2, length))
        yield f"{length} tokens in {name}", 0.0 if logits.isfinite().all() else math.nan


def _devices(model: NLQForCausalLM, length: int) -> Cases:
    try:
        type(model)(model.config).to("meta")(_tokens(2, length).to("meta"), use_cache=False)
    except (NotImplementedError, RuntimeError) as error:
        if "device" not in str(error):  # a part may read values, which the meta device does not have
            return
        raise
    yield f"{length} tokens on meta", 0.0


def _initial(model: NLQForCausalLM, length: int) -> Cases:
    for part in _parts(type(model)(model.config)):
        if type(part).initialize is not AttentionPart.initialize:
            continue  # `initialize` sets other values
        once, again = (type(part)(part.config, part.layer_idx).state_dict() for _ in range(2))
        for name, value in part.state_dict().items():
            if torch.equal(once[name], again[name]) and not torch.equal(value, once[name]):
                yield f"{name} begins with other values than `__init__` sets", _difference(value, once[name])


def _saved(model: NLQForCausalLM, length: int) -> Cases:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder, dtype=model.dtype, attn_implementation="eager").eval()
    tokens = _tokens(1, length)
    yield f"{length} tokens, after saving and loading", _difference(loaded(tokens).logits, model(tokens).logits)


INVARIANTS = {
    "a repeated call gives the same": Invariant(_repeated),
    "no token sees the future": Invariant(_causality, needs_decoder=True),
    "a padded text equals the text alone": Invariant(_padding),
    "texts of a batch equal each text alone": Invariant(_batch),
    "packed documents equal separate ones": Invariant(_documents),
    "cached decoding equals the full pass": Invariant(_cached, needs_decoder=True),
    "a static cache equals the full pass": Invariant(partial(_cached, is_static=True), needs_decoder=True),
    "a padded batch can be cached": Invariant(partial(_cached, is_padded=True), needs_decoder=True),
    "each cache has what belongs to its texts": Invariant(_several_caches, LENGTHS[1:], needs_decoder=True),
    "tokens can be taken back from the cache": Invariant(_taken_back, LENGTHS[2:], needs_decoder=True),
    "a row of padding alone stays finite": Invariant(_finite),
    "every backend equals eager": Invariant(_backends),
    "training equals evaluation": Invariant(_training),
    "every parameter has a gradient": Invariant(_used, (SHORT,)),
    "no hook changes its inputs in place": Invariant(_unchanged),
    "float32, bfloat16 and autocast run": Invariant(_dtypes, (SHORT, LONG)),
    "a model can be on another device": Invariant(_devices, (SHORT,)),
    "initial values are those of __init__": Invariant(_initial, (SHORT,)),
    "saving and loading changes nothing": Invariant(_saved, (SHORT,)),
}

"""What attention weights are: the table of attention activations, which keys a query sees, and the eager backend.

Shapes: batch, heads, query (positions of this call), key (cached positions plus those of this call), head_dim.

Scores are `s = attention_scaling * q . k`. The weights are `phi(s) / Z` on the keys a query sees and 0 elsewhere, where the
normaliser `Z` is the sum of `phi` (`"sum"`), the number `n` of visible keys (`"length"`), or 1 (`"none"`). `n` depends on the
query alone, never on the padded, cached or total length: that is what makes cached decoding, padding and packing exact.
"""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import repeat_kv
from transformers.utils.import_utils import is_tracing

from .triton_activations_nlq import TRITON_BODIES


try:
    import entmax
except ImportError:
    entmax = None


# Transformers' function names without the two that own parameters: a switch names a function, not a layer.
FUNCTIONS = tuple(sorted(set(ACT2FN) - {"prelu", "xielu"}))

# The value of `attn_implementation` that leaves the choice to each layer and call.
AUTOMATIC = "nlq"

NORMALIZATIONS = ("sum", "length", "none")


@dataclass(frozen=True)
class AttentionActivation:
    """One row of the table of attention activations.

    Attributes:
        name: the value of the switch `attention_activation`.
        function: `phi`, element by element. For softmax it is `exp`, whose sum is taken in a numerically safe order.
        derivative: `phi'` as a function of the scores and of `phi` there, or `None`: then it is taken by differentiation.
        normalization: the canonical normaliser, used when `attention_normalization` is `None`.
        non_negative: whether `phi >= 0` everywhere, which the normaliser `"sum"` needs.
        formula: `phi(s)` in words.
        source: where the formula comes from.
        subtract_log_count: whether `log n` is subtracted from the scores when the normaliser is `"none"`.
        is_homogeneous: whether `phi(c s) = c^k phi(s)` for all `c > 0`: the normaliser `"sum"` cancels such a factor.
        kind: what a weight depends on: `"elementwise"`, on its own score, but for the normaliser; `"softmax"` and `"simplex"`,
            on its whole row, which the latter's `function` projects; `"linear"`, on no score at all.
        triton_body: a function decorated with `triton.jit`, from a tile of scores to `phi` and `phi'` there, or `None`.
    """

    name: str
    function: Callable[[torch.Tensor], torch.Tensor]
    derivative: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    normalization: str
    non_negative: bool
    formula: str
    source: str
    subtract_log_count: bool = False
    is_homogeneous: bool = False
    kind: Literal["elementwise", "softmax", "simplex", "linear"] = "elementwise"
    triton_body: Callable | None = None

    @property
    def is_elementwise(self) -> bool:
        """Whether a weight depends on its own score only, but for the normaliser."""
        return self.kind == "elementwise"

    def weights_and_gradient(self, scores: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`phi(scores)`, and `phi'(scores) * gradient`: what a gradient with respect to `phi` is with respect to the scores."""
        if self.derivative is None:
            weights, pull_back = torch.func.vjp(self.function, scores)
            return weights, pull_back(gradient)[0]
        weights = self.function(scores)
        return weights, gradient * self.derivative(scores, weights)


def _identity(scores: torch.Tensor) -> torch.Tensor:
    return scores


def _project_onto_simplex(name: str, scores: torch.Tensor) -> torch.Tensor:
    """`(..., key)` -> the nearest weights that are positive or exactly 0 and sum to 1, row by row.

    Raises:
        ImportError: if the package `entmax` is not installed.
    """
    if entmax is None:
        raise ImportError(
            f"attention_activation={name!r} needs the package entmax: pip install entmax, or use another activation"
        )
    return getattr(entmax, name)(scores, dim=-1)


def _no_scores(scores: torch.Tensor) -> torch.Tensor:
    raise ValueError("attention_activation='linear_attention' is no function of the scores: it never forms them")


def _relu_squared(scores: torch.Tensor) -> torch.Tensor:
    return torch.relu(scores).square()


ATTENTION_ACTIVATIONS = {
    activation.name: activation
    for activation in (
        AttentionActivation(
            name="softmax",
            function=torch.exp,
            derivative=lambda scores, weights: weights,
            normalization="sum",
            non_negative=True,
            formula="exp(s)",
            source="Vaswani et al. 2017, arXiv 1706.03762",
            kind="softmax",
        ),
        AttentionActivation(
            name="sigmoid",
            function=torch.sigmoid,
            derivative=lambda scores, weights: torch.addcmul(weights, weights, weights, value=-1),  # w - w^2, in one pass
            normalization="none",
            non_negative=True,
            formula="sigmoid(s - log n_i); without log n_i under sum and length",
            source="Ramapuram et al. 2024, arXiv 2409.04431, with the constant log n",
            subtract_log_count=True,
            triton_body=TRITON_BODIES["sigmoid"],
        ),
        AttentionActivation(
            name="relu",
            function=torch.relu,
            derivative=lambda scores, weights: weights.sign(),
            normalization="length",
            non_negative=True,
            formula="max(s, 0)",
            source="Wortsman et al. 2023, arXiv 2309.08586",
            is_homogeneous=True,
            triton_body=TRITON_BODIES["relu"],
        ),
        AttentionActivation(
            name="relu_squared",
            function=_relu_squared,
            derivative=lambda scores, weights: 2 * torch.relu(scores),
            normalization="length",
            non_negative=True,
            formula="max(s, 0)^2",
            source="So et al. 2021, arXiv 2109.08668; Hua et al. 2022, arXiv 2202.10447",
            is_homogeneous=True,
            triton_body=TRITON_BODIES["relu_squared"],
        ),
        AttentionActivation(
            name="squared",
            function=torch.square,
            derivative=lambda scores, weights: 2 * scores,
            normalization="sum",
            non_negative=True,
            formula="s^2",
            source="p_i^2 / sum_j p_j^2: another map onto the simplex",
            is_homogeneous=True,
            triton_body=TRITON_BODIES["squared"],
        ),
        AttentionActivation(
            name="softplus",
            function=nn.functional.softplus,
            derivative=lambda scores, weights: torch.sigmoid(scores),
            normalization="sum",
            non_negative=True,
            formula="log(1 + exp(s))",
            source="a smooth map onto the simplex",
            triton_body=TRITON_BODIES["softplus"],
        ),
        AttentionActivation(
            name="tanh",
            function=torch.tanh,
            derivative=lambda scores, weights: 1 - weights.square(),
            normalization="length",
            non_negative=False,
            formula="tanh(s)",
            source="bounded, but neither positive nor summing to one",
            triton_body=TRITON_BODIES["tanh"],
        ),
        AttentionActivation(
            name="identity",
            function=_identity,
            derivative=lambda scores, weights: torch.ones_like(scores),
            normalization="length",
            non_negative=False,
            formula="s",
            source="no activation at all",
            triton_body=TRITON_BODIES["identity"],
        ),
        AttentionActivation(
            name="sparsemax",
            function=functools.partial(_project_onto_simplex, "sparsemax"),
            derivative=None,
            normalization="sum",
            non_negative=True,
            formula="max(s - tau, 0), where tau makes the sum 1",
            source="Martins and Astudillo 2016, arXiv 1602.02068",
            kind="simplex",
        ),
        AttentionActivation(
            name="entmax15",
            function=functools.partial(_project_onto_simplex, "entmax15"),
            derivative=None,
            normalization="sum",
            non_negative=True,
            formula="max(s/2 - tau, 0)^2, where tau makes the sum 1",
            source="Peters et al. 2019, arXiv 1905.05702",
            kind="simplex",
        ),
        AttentionActivation(
            name="linear_attention",
            function=_no_scores,
            derivative=None,
            normalization="sum",
            non_negative=True,
            formula="psi(c q) . psi(k), psi(x) = elu(x) + 1",
            source="Katharopoulos et al. 2020, arXiv 2006.16236",
            kind="linear",
        ),
    )
}
# Transformers' own divides 0 by 0 in its gradient where softplus underflows.
_SAFE_FUNCTIONS = {
    "sqrtsoftplus": lambda scores: nn.functional.softplus(scores).clamp(min=torch.finfo(scores.dtype).tiny).sqrt(),
}
LIBRARY_ACTIVATIONS = {
    name: AttentionActivation(
        name=name,
        function=_SAFE_FUNCTIONS.get(name, ACT2FN[name]),
        derivative=None,
        normalization="length",
        non_negative=False,
        formula=f"{name}(s)",
        source="transformers.activations.ACT2FN",
        triton_body=TRITON_BODIES[name],
    )
    for name in FUNCTIONS
    if name not in (*ATTENTION_ACTIVATIONS, "linear")  # which is `identity`; linear attention is something else
}

# Users' own activations, by name, as keyword arguments of `AttentionActivation`. The installed package and every model loaded
# as remote code have a copy of this file each, so what they share lives outside of it.
_SHARED = sys.modules.setdefault("nlq_attention_activations", ModuleType("nlq_attention_activations"))
_FIELDS = tuple(field.name for field in fields(AttentionActivation))
_REGISTERED: dict[str, dict] = vars(_SHARED).setdefault("registered", {})


def register_attention_activation(
    name: str,
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    derivative: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    normalization: str = "length",
    non_negative: bool = False,
    formula: str = "",
    source: str = "",
    triton_body: Callable | None = None,
    exist_ok: bool = False,
) -> None:
    """Adds an attention activation, which every model of this process can then name, downloaded ones included.

    A saved model carries the name only: whoever loads it registers the function first.

    Args:
        name: the value of the switch `attention_activation`.
        function: `phi`: a tensor of scores, of any shape, to a new tensor of the same shape, element by element; without
            parameters of its own, for nothing would train them.
        derivative: `phi'(scores, phi(scores))`; by default taken by differentiation, which costs time.
        normalization: the normaliser used when `attention_normalization` is `None`: `"sum"`, `"length"` or `"none"`.
        non_negative: whether `phi >= 0` everywhere; `"sum"` and `flex_attention` need it.
        formula, source: for readers.
        triton_body: the same for `nlq_triton`, which cannot compute the activation without: a function decorated with
            `triton.jit`, from a tile of scores in float32 to the pair `phi(scores)`, `phi'(scores)`.
        exist_ok: whether to replace an activation registered before by one that keeps its normaliser and sign: models that
            exist compute the new function from then on.

    Raises:
        ValueError: for a name that is taken, and for a function that is not what the other arguments say.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name={name!r} must be a Python identifier")
    if name in ATTENTION_ACTIVATIONS or name in FUNCTIONS:
        raise ValueError(f"name={name!r} is an attention activation already; choose another name")
    if name in _REGISTERED and not exist_ok:
        raise ValueError(f"name={name!r} is registered already; choose another name, or give exist_ok=True to replace it")
    if not callable(function):
        raise ValueError(f"function={function!r} of {name!r} must be a function of a tensor")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r} must be one of {', '.join(NORMALIZATIONS)}")
    if normalization == "sum" and not non_negative:
        raise ValueError("normalization='sum' needs weights that are never negative: give non_negative=True if they are not")

    if triton_body is not None and not hasattr(triton_body, "arg_names"):
        raise ValueError(f"triton_body={triton_body!r} of {name!r} must be a function decorated with triton.jit")

    row = AttentionActivation(name, function, derivative, normalization, non_negative, formula, source, triton_body=triton_body)
    if name in _REGISTERED and any(_REGISTERED[name][key] != getattr(row, key) for key in ("normalization", "non_negative")):
        raise ValueError(f"name={name!r} is in use with another normalization or non_negative; choose another name")
    _check_function(row)
    _REGISTERED[name] = {field: getattr(row, field) for field in _FIELDS}


def _check_function(row: AttentionActivation) -> None:
    """Tries a user's function on a sample of scores.

    Raises:
        ValueError: if it is not elementwise, not finite, negative against its word, or not what the derivative belongs to.
    """
    generator = torch.Generator().manual_seed(0)
    # In no order, and off the round numbers, where functions have their kinks
    scores = (torch.rand(20, 20, dtype=torch.float64, generator=generator) - 0.5) * 40.123
    try:
        weights = row.function(given := scores.clone())
        if weights.shape != scores.shape:
            raise ValueError(f"it returns {tuple(weights.shape)} for scores {tuple(scores.shape)}")
        alone = [row.function(score.clone()) for score in scores[0]]
        if not all(torch.allclose(one, weight, equal_nan=True) for one, weight in zip(alone, weights[0])):
            raise ValueError("it gives a score another value when it is alone")
    except Exception as error:
        asked = "must work element by element and keep the shape of the scores"
        raise ValueError(f"function of {row.name!r} {asked}, also in float64: {error}") from error
    if not torch.equal(given, scores):
        raise ValueError(f"function of {row.name!r} must return a new tensor, not change the scores")
    if weights.requires_grad:
        raise ValueError(f"function of {row.name!r} must have no parameters of its own: nothing would train them")
    _, slope = replace(row, derivative=None).weights_and_gradient(scores, torch.ones_like(scores))
    for tensor, what in ((weights, "function"), (slope, "the derivative of the function")):
        if not tensor.isfinite().all():
            raise ValueError(f"{what} of {row.name!r} is not finite for all scores from -20 to 20")
    # Where all scores are equal, or a query is 0, they are exactly 0
    zero = torch.zeros(1, dtype=torch.float64)
    if not all(tensor.isfinite().all() for tensor in row.weights_and_gradient(zero, torch.ones_like(zero))):
        raise ValueError(f"function of {row.name!r}, or its derivative, is not finite for a score of 0")
    if row.non_negative and weights.min() < 0:
        raise ValueError(f"function of {row.name!r} is {weights.min().item():.3g} somewhere, but non_negative=True")
    if row.derivative is not None:
        try:
            _, own_slope = row.weights_and_gradient(scores, torch.ones_like(scores))
            agrees = torch.allclose(own_slope, slope, rtol=1e-4, atol=1e-6)
        except Exception as error:
            raise ValueError(f"derivative of {row.name!r} fails on a tensor of scores: {error}") from error
        if not agrees:
            raise ValueError(f"derivative of {row.name!r} is not that of its function")


def is_registered(name: str) -> bool:
    """Whether an activation is a user's own."""
    return name in _REGISTERED


def get_attention_activation(name: str) -> AttentionActivation:
    """The table's row for `name`, a registered one, or one made for any other parameter-free function of Transformers.

    Raises:
        ValueError: if `name` is none of these.
    """
    if name in ATTENTION_ACTIVATIONS:
        return ATTENTION_ACTIVATIONS[name]
    if name in _REGISTERED:
        # Only what this code knows: newer code may have registered more
        return AttentionActivation(**{key: value for key, value in _REGISTERED[name].items() if key in _FIELDS})
    if name in LIBRARY_ACTIVATIONS:
        return LIBRARY_ACTIVATIONS[name]
    choices = ", ".join((*ATTENTION_ACTIVATIONS, *_REGISTERED, *LIBRARY_ACTIVATIONS))
    raise ValueError(
        f"attention_activation={name!r} is unknown; choose one of {choices}, or, if it is one of your own, call "
        f"register_attention_activation({name!r}, function) first"
    )


class Visibility(NamedTuple):
    """Which keys each query sees, in O(length) memory.

    Attributes:
        query_index: `(query,)`, each query's own place on the key axis, rising by one; it sees no key after that.
        key_length: number of keys, those of a static cache that are still empty included.
        visible_count: `(batch or 1, query)`, the number `n` of keys each query sees.
        key_is_valid: `(batch, key)` booleans, false for padding, or `None` if every key is valid.
        document_start: `(batch or 1, query)`, the first key of each query's packed document; it sees no key before that.
            `None` if not packed.
    """

    query_index: torch.Tensor
    key_length: int
    visible_count: torch.Tensor
    key_is_valid: torch.Tensor | None = None
    document_start: torch.Tensor | None = None

    def check(self, query_length: int, key_length: int) -> None:
        """Raises `ValueError` where it was made for another number of queries or keys."""
        if (made_for := (self.query_index.shape[0], self.key_length)) != (query_length, key_length):
            raise ValueError(f"the mask is for (query, key)={made_for}, and this call has {(query_length, key_length)}")

    def dense(self) -> torch.Tensor:
        """The boolean mask `(batch or 1, 1, query, key)`, true where the query sees the key."""
        key_index = torch.arange(self.key_length, device=self.query_index.device)
        visible = (key_index <= self.query_index[:, None])[None, None]
        if self.key_is_valid is not None:
            visible = visible & self.key_is_valid[:, None, None, :]
        if self.document_start is not None:
            visible = visible & (key_index >= self.document_start[:, None, :, None])
        return visible


def make_visibility(
    query_length: int,
    key_length: int,
    query_offset: int | torch.Tensor,
    device: torch.device,
    attention_mask: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
) -> Visibility:
    """Causal visibility of the last `query_length` positions, with padding or packing.

    Args:
        query_length: number of queries in this call.
        key_length: number of keys, those of a static cache that are still empty included.
        query_offset: number of keys before the first query; a tensor if a static cache counts them.
        attention_mask: `(batch, up to key)` booleans, false for padding.
        segments: `(batch or 1, key)`, a number per packed document; excludes `attention_mask` and a cache.
    """
    query_index = torch.arange(query_length, device=device) + query_offset
    if segments is not None:
        starts_here = torch.ones_like(segments, dtype=torch.bool)
        starts_here[:, 1:] = segments[:, 1:] != segments[:, :-1]
        document_start = torch.where(starts_here, query_index, 0).cummax(dim=-1).values
        return Visibility(query_index, key_length, query_index - document_start + 1, document_start=document_start)
    if attention_mask is not None:
        key_is_valid = nn.functional.pad(attention_mask.bool(), (0, max(key_length - attention_mask.shape[-1], 0)))
        key_is_valid = key_is_valid[:, :key_length]
        return Visibility(query_index, key_length, key_is_valid.cumsum(dim=-1)[:, query_index], key_is_valid)
    return Visibility(query_index, key_length, query_index[None].clamp(max=key_length - 1) + 1)


def boolean_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Reads a caller's own 4-D mask `(batch, 1 or heads, query, key)` as booleans, true where a query sees a key.

    Additive masks may hold 0 (visible) and large negative numbers (hidden) only: a bias has no meaning for most activations.

    Raises:
        ValueError: if a floating-point mask holds anything else.
    """
    if not attention_mask.is_floating_point():
        return attention_mask.bool()
    hidden = attention_mask <= -1e4  # the lowest float16 number is -65504
    if not is_tracing(attention_mask) and not (hidden | (attention_mask == 0)).all():
        raise ValueError(
            "attention_mask: a 4-D floating-point mask must hold only 0 (visible) and the dtype's lowest number (hidden); "
            "additive biases are not supported"
        )
    return ~hidden


def read_mask(
    attention_mask: Visibility | torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> tuple[Visibility | torch.Tensor, torch.Tensor]:
    """A backend's mask argument, checked, with the case of no mask spelled out.

    Args:
        attention_mask: a `Visibility`, a 4-D mask, or `None`: then several queries see the keys up to their own place,
            counted from the first key, and a single query sees all keys.
        query: `(batch, heads, query, head_dim)`.
        key: `(batch, key_value_heads, key, head_dim)`.

    Returns:
        A `Visibility` or a boolean mask `(batch or 1, 1 or heads, query, key)`, and how many keys each query sees,
        `(batch or 1, 1 or heads, query)`.

    Raises:
        ValueError: if a mask does not fit queries and keys, or holds numbers that say neither visible nor hidden.
    """
    (batch, heads, query_length, _), key_length = query.shape, key.shape[2]
    if attention_mask is None:
        offset = 0 if query_length > 1 else key_length - 1
        attention_mask = make_visibility(query_length, key_length, offset, query.device)
    if isinstance(attention_mask, Visibility):
        attention_mask.check(query_length, key_length)
        return attention_mask, attention_mask.visible_count[:, None]
    shape = tuple(attention_mask.shape)
    if shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2] != query_length or shape[3] < key_length:
        expected = f"({batch}, 1 or {heads}, {query_length}, {key_length})"
        raise ValueError(f"attention_mask={shape} must be (batch, 1 or heads, query, key)={expected}")
    visible = boolean_mask(attention_mask)[..., :key_length]
    return visible, visible.sum(dim=-1)


def zero_limit(dtype: torch.dtype) -> float:
    """Below this a sum of weights counts as 0: its reciprocal, or a gradient, would overflow."""
    return torch.finfo(dtype).tiny / torch.finfo(dtype).eps


def counts_as_zero(total: torch.Tensor) -> torch.Tensor:
    """Whether a sum of weights counts as 0."""
    return total < zero_limit(total.dtype)


# Scores up to this power of 2 have squares whose sums, and what is divided by them, fit into float32.
_LARGE_SCORE = 40


def keep_from_overflow(
    query: torch.Tensor, key: torch.Tensor, scaling: float, activation: AttentionActivation, normalization: str
) -> torch.Tensor:
    """The queries, divided so that no sum of weights overflows, where that changes no weight.

    That is under the normaliser `"sum"`, which cancels a factor that all scores of a query share, for homogeneous activations:
    the square of a score of 1e20 overflows float32, although its share of the sum does not. The divisors are powers of 2, which
    round nothing, and 1 where no score can be large.

    Args:
        query: `(batch, heads, query, head_dim)`.
        key: `(batch, key_value_heads, key, head_dim)`.
        scaling: factor of the scores.
        activation: a row of the table.
        normalization: `"sum"`, `"length"` or `"none"`.
    """
    if normalization != "sum" or not activation.is_homogeneous or not key.numel() or not scaling:
        return query
    largest_key = _largest_exponent(key, dim=(-2, -1)).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    largest_score = _largest_exponent(query, dim=(-1,)) + largest_key + math.log2(abs(scaling) * query.shape[-1])
    exponent = _exponent_above(largest_score)
    # In two steps, for a power of 2 below 2^-126 has no place in float32
    half = (exponent / 2).ceil()
    return query * torch.exp2(-half).to(query.dtype) * torch.exp2(half - exponent).to(query.dtype)


def _largest_exponent(states: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
    """The logarithm to base 2 of the largest absolute number along `dim`, which is kept."""
    return torch.linalg.vector_norm(states.detach(), math.inf, dim=dim, keepdim=True, dtype=_at_least_float32(states)).log2()


def _exponent_above(largest: torch.Tensor) -> torch.Tensor:
    """By how much logarithms exceed `_LARGE_SCORE`, rounded up; 0 where they do not, or are not finite."""
    return (largest - _LARGE_SCORE).clamp(min=0.0).ceil().nan_to_num(nan=0.0, posinf=0.0)


def _at_least_float32(states: torch.Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)


def attention_weights(
    scores: torch.Tensor,
    visible: torch.Tensor,
    visible_count: torch.Tensor,
    activation: AttentionActivation,
    normalization: str,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention weights of every activation, as the formula says, computed in at least float32.

    Args:
        scores: `(batch, heads, query, key)`, already scaled.
        visible: booleans that broadcast to the scores.
        visible_count: `(batch or 1, 1 or heads, query)`.
        activation: a row of the table.
        normalization: `"sum"`, `"length"` or `"none"`.
        sink: `(heads,)` logits whose `exp` joins softmax's denominator, or `None`.

    Returns:
        Weights of the scores' shape. A query that sees no key, or whose normaliser is 0, gets weights 0; a sum so small that
        its reciprocal or its gradient overflows counts as 0.
    """
    scores = scores.to(_at_least_float32(scores))
    if activation.name == "softmax":
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        if sink is not None:
            column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : visible.shape[-1]]
        return weights.masked_fill(~visible, 0.0)

    if activation.kind == "simplex":
        # Far below what a visible score can be and still have weight, and small enough to be summed up
        scores = scores - scores.masked_fill(~visible, -torch.inf).amax(dim=-1, keepdim=True).clamp(
            min=torch.finfo(scores.dtype).min
        )
        weights = activation.function(scores.masked_fill(~visible, -1e4))
        return weights.masked_fill(~visible, 0.0)

    count = visible_count.clamp(min=1).to(scores.dtype).unsqueeze(-1)
    scores = scores.masked_fill(~visible, 0.0)
    if activation.subtract_log_count and normalization == "none":
        scores = scores - count.log()
    if normalization == "sum" and activation.is_homogeneous and scores.numel():
        scores = scores * torch.exp2(-_exponent_above(_largest_exponent(scores, dim=(-1,))))
    weights = activation.function(scores).masked_fill(~visible, 0.0)
    if normalization == "sum":
        total = weights.sum(dim=-1, keepdim=True)
        is_zero = counts_as_zero(total)
        return weights.masked_fill(is_zero, 0.0) / total.masked_fill(is_zero, 1.0)
    return weights / count if normalization == "length" else weights


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Visibility | torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention for every activation, with the weights in memory: the reference for all other backends.

    Args:
        module: the attention layer, whose `activation`, `normalization` and `sink` say what to compute.
        query: `(batch, heads, query, head_dim)`.
        key, value: `(batch, key_value_heads, key, head_dim)`.
        attention_mask: as in `read_mask`.
        scaling: factor of the scores.
        dropout: probability of dropping a weight.

    Returns:
        The output `(batch, query, heads, head_dim)` and the weights `(batch, heads, query, key)`.
    """
    visible, visible_count = read_mask(attention_mask, query, key)
    if isinstance(visible, Visibility):
        visible = visible.dense()
    query = keep_from_overflow(query, key, scaling, module.activation, module.normalization)
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = attention_weights(scores, visible, visible_count, module.activation, module.normalization, module.sink)
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    output = torch.matmul(weights, value).transpose(1, 2).contiguous()
    return output, weights

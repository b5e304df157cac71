"""The table of attention activations: the functions `phi` that turn scores into weights, and the users' own.

Scores are `s = attention_scaling * q . k`. The weights are `phi(s) / Z` on the keys a query sees and 0 elsewhere. The
normaliser `Z` is the sum of `phi` (`"sum"`), the number `n` of visible keys (`"length"`), or 1 (`"none"`).
"""

import difflib
import functools
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Literal

import torch
from torch import nn
from transformers.activations import ACT2FN


# Transformers' function names without the two that own parameters: a switch names a function, not a layer.
FUNCTIONS = tuple(sorted(set(ACT2FN) - {"prelu", "xielu"}))

NORMALIZATIONS = ("sum", "length", "none")


@dataclass(frozen=True)
class AttentionActivation:
    """One row of the table of attention activations.

    Attributes:
        name: the value of the switch `attention_activation`.
        function: `phi`, element by element. For softmax it is `exp`, whose sum is taken in a numerically safe order.
        derivative: `phi'` as a function of the scores and of `phi` there, or `None`: then it is taken by
            differentiation.
        normalization: the canonical normaliser, used when `attention_normalization` is `None`.
        non_negative: whether `phi >= 0` everywhere, which the normaliser `"sum"` needs.
        formula: `phi(s)` in words.
        source: where the formula comes from.
        subtract_log_count: whether `log n` is subtracted from the scores when the normaliser is `"none"`.
        is_homogeneous: whether `phi(c s) = c^k phi(s)` for all `c > 0`: the normaliser `"sum"` cancels such a factor.
        kind: `"elementwise"`: apart from the normaliser, a weight depends on its own score only. `"softmax"`,
            `"simplex"` and `"row"`: it depends on its whole row; the `function` of a `"simplex"` row projects it, and
            that of a `"row"` takes the scores and which keys are visible (or `None`). `"linear"`: no scores are
            computed.
        sees_own_key: whether a query sees the key of its own token.
    """

    name: str
    function: Callable[..., torch.Tensor]
    derivative: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    normalization: str = "sum"
    non_negative: bool = True
    formula: str = ""
    source: str = ""
    subtract_log_count: bool = False
    is_homogeneous: bool = False
    kind: Literal["elementwise", "softmax", "simplex", "row", "linear"] = "elementwise"
    sees_own_key: bool = True

    @property
    def is_elementwise(self) -> bool:
        """True if, apart from the normaliser, a weight depends on its own score only."""
        return self.kind == "elementwise"

    def weights_and_gradient(self, scores: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`phi(scores)`, and `phi'(scores) * gradient`: what a gradient with respect to `phi` is with respect to the
        scores.
        """
        if self.derivative is None:
            weights, pull_back = torch.func.vjp(self.function, scores)
            return weights, pull_back(gradient)[0]
        weights = self.function(scores)
        return weights, gradient * self.derivative(scores, weights)


def _project_onto_simplex(name: str, scores: torch.Tensor) -> torch.Tensor:
    """`(..., key)` -> the nearest weights that are positive or exactly 0 and sum to 1, row by row.

    Raises:
        ImportError: if the package `entmax` is not installed.
    """
    try:
        import entmax  # here, so that reading a configuration does not import it
    except ImportError:
        raise ImportError(
            f"attention_activation={name!r} needs the package entmax: pip install entmax, or use another activation"
        ) from None
    return getattr(entmax, name)(scores, dim=-1)


def zero_limit(dtype: torch.dtype) -> float:
    """Returns the limit below which a sum of weights counts as 0: its reciprocal or a gradient would overflow."""
    return torch.finfo(dtype).tiny / torch.finfo(dtype).eps


def counts_as_zero(total: torch.Tensor) -> torch.Tensor:
    """True where a sum of weights counts as 0."""
    return total < zero_limit(total.dtype)


def exp_(scores: torch.Tensor) -> torch.Tensor:
    """Computes `exp` in place, and 0 below `zero_limit`.

    PyTorch's own, which is MKL's, takes 5 to 30 times as long where the result is 0 or a denormal number.
    """
    limit = zero_limit(scores.dtype)
    return nn.functional.threshold_(scores.clamp_(min=math.log(limit) - 1.0).exp_(), limit, 0.0)


def _softpick(scores: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
    """`relu(e^s - 1) / sum |e^s - 1|`. The largest score above 0 is taken out of the exponents; a sum of 0 gives
    weights 0.
    """
    scores = hide(scores, visible, 0.0)  # |e^0 - 1| = 0: hidden keys count nothing
    largest = scores.detach().amax(dim=-1, keepdim=True).clamp(min=0.0)
    # |e^s - 1| / e^largest, without cancellation
    size = torch.exp(torch.relu(scores) - largest) * -torch.expm1(-scores.abs())
    total = size.sum(dim=-1, keepdim=True)
    is_zero = counts_as_zero(total)
    return torch.where(scores > 0, size, 0.0).masked_fill(is_zero, 0.0) / total.masked_fill(is_zero, 1.0)


def _stick_breaking(scores: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
    """`sigmoid(s_j) prod_{k > j} (1 - sigmoid(s_k))`: the latest key takes its share of the stick first."""
    log_rest = hide(nn.functional.logsigmoid(-hide(scores, visible, 0.0)), visible, 0.0)
    # The sum over later keys, without the key itself: taking its term out again could cancel all digits
    later = nn.functional.pad(log_rest, (0, 1)).flip(-1).cumsum(dim=-1).flip(-1)[..., 1:]
    log_weights = nn.functional.logsigmoid(hide(scores, visible, 0.0)) + later
    # As in `exp_`, denormal numbers take long
    return hide(torch.exp(log_weights.clamp(min=math.log(zero_limit(scores.dtype)))), visible, 0.0)


def hide(tensor: torch.Tensor, visible: torch.Tensor | None, value: float) -> torch.Tensor:
    """Puts `value` in the place of hidden keys. `visible` broadcasts to the tensor; `None` hides nothing."""
    return tensor if visible is None else tensor.masked_fill(~visible, value)


def _no_scores(scores: torch.Tensor) -> torch.Tensor:
    raise ValueError("attention_activation='linear_attention' is not a function of the scores: it computes none")


ATTENTION_ACTIVATIONS = {
    activation.name: activation
    for activation in (
        AttentionActivation(
            name="softmax",
            function=torch.exp,
            derivative=lambda scores, weights: weights,
            formula="exp(s)",
            source="Vaswani et al. 2017, arXiv 1706.03762",
            kind="softmax",
        ),
        AttentionActivation(
            name="sigmoid",
            function=torch.sigmoid,
            # W - w^2, in one pass
            derivative=lambda scores, weights: torch.addcmul(weights, weights, weights, value=-1),
            normalization="none",
            formula="sigmoid(s - log n_i); without log n_i under sum and length",
            source="Ramapuram et al. 2024, arXiv 2409.04431, with the constant log n",
            subtract_log_count=True,
        ),
        AttentionActivation(
            name="relu",
            function=torch.relu,
            derivative=lambda scores, weights: weights.sign(),
            normalization="length",
            formula="max(s, 0)",
            source="Wortsman et al. 2023, arXiv 2309.08586",
            is_homogeneous=True,
        ),
        AttentionActivation(
            name="relu_squared",
            function=lambda scores: torch.relu(scores).square(),
            derivative=lambda scores, weights: 2 * torch.relu(scores),
            normalization="length",
            formula="max(s, 0)^2",
            source="So et al. 2021, arXiv 2109.08668; Hua et al. 2022, arXiv 2202.10447",
            is_homogeneous=True,
        ),
        AttentionActivation(
            name="squared",
            function=torch.square,
            derivative=lambda scores, weights: 2 * scores,
            formula="s^2",
            source="p_i^2 / sum_j p_j^2: another map onto the simplex",
            is_homogeneous=True,
        ),
        AttentionActivation(
            name="softplus",
            function=nn.functional.softplus,
            derivative=lambda scores, weights: torch.sigmoid(scores),
            formula="log(1 + exp(s))",
            source="a smooth map onto the simplex",
        ),
        AttentionActivation(
            name="tanh",
            function=torch.tanh,
            derivative=lambda scores, weights: 1 - weights.square(),
            normalization="length",
            non_negative=False,
            formula="tanh(s)",
            source="bounded, but neither positive nor summing to one",
        ),
        AttentionActivation(
            name="identity",
            function=lambda scores: scores,
            derivative=lambda scores, weights: torch.ones_like(scores),
            normalization="length",
            non_negative=False,
            formula="s",
            source="no activation at all",
        ),
        AttentionActivation(
            name="sparsemax",
            function=functools.partial(_project_onto_simplex, "sparsemax"),
            formula="max(s - tau, 0), where tau makes the sum 1",
            source="Martins and Astudillo 2016, arXiv 1602.02068",
            kind="simplex",
        ),
        AttentionActivation(
            name="entmax15",
            function=functools.partial(_project_onto_simplex, "entmax15"),
            formula="max(s/2 - tau, 0)^2, where tau makes the sum 1",
            source="Peters et al. 2019, arXiv 1905.05702",
            kind="simplex",
        ),
        AttentionActivation(
            name="softpick",
            function=_softpick,
            formula="relu(exp(s) - 1) / sum |exp(s) - 1|",
            source="Zuhri et al. 2025, arXiv 2504.20966, without an epsilon",
            kind="row",
        ),
        AttentionActivation(
            name="stick_breaking",
            function=_stick_breaking,
            normalization="none",
            formula="sigmoid(s_j) prod_{j < k < i} (1 - sigmoid(s_k)), of earlier keys alone",
            source="Tan et al. 2024, arXiv 2410.17980",
            kind="row",
            sees_own_key=False,
        ),
        AttentionActivation(
            name="linear_attention",
            function=_no_scores,
            formula="psi(c q) . psi(k), psi(x) = elu(x) + 1",
            source="Katharopoulos et al. 2020, arXiv 2006.16236",
            kind="linear",
        ),
    )
}
# Transformers' function divides 0 by 0 in its gradient where softplus underflows.
_SAFE_FUNCTIONS = {
    "sqrtsoftplus": lambda scores: nn.functional.softplus(scores).clamp(min=torch.finfo(scores.dtype).tiny).sqrt(),
}
LIBRARY_ACTIVATIONS = {
    name: AttentionActivation(
        name=name,
        function=_SAFE_FUNCTIONS.get(name, ACT2FN[name]),
        normalization="length",
        non_negative=False,
        formula=f"{name}(s)",
        source="transformers.activations.ACT2FN",
    )
    for name in FUNCTIONS
    if name not in (*ATTENTION_ACTIVATIONS, "linear")  # Transformers' "linear" is `identity` here
}

# The activations that users registered: name -> keyword arguments of `AttentionActivation`. The installed package and
# every model loaded as remote code have their own copy of this file, so what they share is kept outside of it.
_SHARED = sys.modules.setdefault("nlq_attention_activations", ModuleType("nlq_attention_activations"))
_FIELDS = tuple(field.name for field in fields(AttentionActivation))
_REGISTERED: dict[str, dict] = vars(_SHARED).setdefault("registered", {})


def registered_activations() -> set[str]:
    """Returns the names of the activations that users registered in this process."""
    return set(_REGISTERED)


def register_attention_activation(
    name: str,
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    derivative: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    normalization: str = "length",
    non_negative: bool = False,
    formula: str = "",
    source: str = "",
    exist_ok: bool = False,
) -> None:
    """Adds an attention activation. Every model in this process can then use its name, downloaded models included.

    A saved model contains the name only. Register the function again before you load the model in another process.

    Args:
        name: the value of the switch `attention_activation`.
        function: `phi`. It maps a tensor of scores of any shape to a new tensor of the same shape, element by element.
            It has no parameters, because nothing would train them.
        derivative: `phi'(scores, phi(scores))`. Without it PyTorch differentiates `function`, which is slower.
        normalization: the normaliser used when `attention_normalization` is `None`: `"sum"`, `"length"` or `"none"`.
        non_negative: whether `phi >= 0` everywhere; `"sum"` and `flex_attention` need it.
        formula, source: shown to readers only.
        exist_ok: replace an activation that was registered under this name. Existing models compute the new function
            from then on.

    Raises:
        ValueError: if the name is taken, or the function contradicts the other arguments.
    """
    if not name.isidentifier():
        raise ValueError(f"name={name!r} must be a Python identifier")
    if name in ATTENTION_ACTIVATIONS or name in FUNCTIONS:
        raise ValueError(f"name={name!r} is an attention activation already; choose another name")
    if name in _REGISTERED and not exist_ok:
        raise ValueError(
            f"name={name!r} is registered already; choose another name, or give exist_ok=True to replace it"
        )
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r} must be one of {', '.join(NORMALIZATIONS)}")
    if normalization == "sum" and not non_negative:
        raise ValueError(
            "normalization='sum' needs weights that are never negative: give non_negative=True if they are not"
        )

    row = AttentionActivation(name, function, derivative, normalization, non_negative, formula, source)
    _check_function(row)
    _REGISTERED[name] = {field: getattr(row, field) for field in _FIELDS}


def _check_function(row: AttentionActivation) -> None:
    """Tries a user's function on a sample of scores.

    Raises:
        ValueError: if it has parameters, is not elementwise, not finite, negative despite `non_negative`, or does not
            match its derivative.
    """
    generator = torch.Generator().manual_seed(0)
    # Unsorted, and away from round numbers, where functions have their kinks; but a query of 0 has scores of exactly 0
    scores = (torch.rand(20, 20, dtype=torch.float64, generator=generator) - 0.5) * 40.123
    scores[10:, 3] = 0.0
    weights = row.function(given := scores.clone())
    if weights.requires_grad:
        raise ValueError(
            f"function of {row.name!r} must have no parameters, as nothing trains them; write an AttentionPart"
        )
    if not torch.equal(given, scores):
        raise ValueError(f"function of {row.name!r} must return a new tensor, not change the scores")
    alone = torch.stack([row.function(score.clone()) for score in scores[0]])
    if weights.shape != scores.shape or not torch.allclose(alone, weights[0], equal_nan=True):
        raise ValueError(f"function of {row.name!r} must work element by element and keep the shape of the scores")
    _, slope = replace(row, derivative=None).weights_and_gradient(scores, torch.ones_like(scores))
    if not (weights.isfinite() & slope.isfinite()).all():
        raise ValueError(f"function of {row.name!r}, or its derivative, is not finite for all scores from -20 to 20")
    if row.non_negative and weights.min() < 0:
        raise ValueError(f"function of {row.name!r} is {weights.min().item():.3g} somewhere, but non_negative=True")
    _, own_slope = row.weights_and_gradient(scores, torch.ones_like(scores))
    if not torch.allclose(own_slope[:10], slope[:10], rtol=1e-4, atol=1e-6) or not own_slope.isfinite().all():
        raise ValueError(f"derivative of {row.name!r} is not the derivative of its function")


def get_attention_activation(name: str) -> AttentionActivation:
    """Returns the row of `name`: of the table, of a registered activation, or of another function of Transformers.

    Raises:
        ValueError: if `name` is none of these.
    """
    if name in ATTENTION_ACTIVATIONS:
        return ATTENTION_ACTIVATIONS[name]
    if name in _REGISTERED:
        # Newer code may have registered fields that this code does not know
        return AttentionActivation(**{key: value for key, value in _REGISTERED[name].items() if key in _FIELDS})
    if name in LIBRARY_ACTIVATIONS:
        return LIBRARY_ACTIVATIONS[name]
    choices = (*ATTENTION_ACTIVATIONS, *_REGISTERED, *LIBRARY_ACTIVATIONS)
    longer = [choice for choice in choices if choice.startswith(f"{name}_")]  # "linear" means "linear_attention"
    suggestion = did_you_mean(name, longer or choices, cutoff=0.5 if longer else 0.6)
    raise ValueError(
        f"attention_activation={name!r} is unknown; {suggestion}choose one of {', '.join(choices)}, or, if it is one "
        f"of your own, call register_attention_activation({name!r}, function) first"
    )


def did_you_mean(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns `"did you mean 'X'? "` if a choice is similar to `name`, else an empty string; `cutoff` is that of
    `difflib`.
    """
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}? " if near else ""

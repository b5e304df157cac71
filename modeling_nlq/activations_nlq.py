"""The table of attention activations, which turn scores into weights, and the activations that users register.

Scores are `s = attention_scaling * q . k`. The weights are `phi(s) / Z` on the keys a query sees and 0 elsewhere. The
normaliser `Z` is the sum of `phi` (`"sum"`), the number `n` of visible keys (`"length"`), or 1 (`"none"`).
"""

import difflib
import functools
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN


# Without the two that have parameters
FUNCTIONS = tuple(sorted(set(ACT2FN) - {"prelu", "xielu"}))

NORMALIZATIONS = ("sum", "length", "none")


@dataclass(frozen=True)
class AttentionActivation:
    """One row of the table of attention activations."""

    name: str  # the value of the switch `attention_activation`
    function: Callable[..., Tensor]  # `phi`
    # Maps the scores and `phi` to `phi'`. Without it PyTorch differentiates `function`
    derivative: Callable[[Tensor, Tensor], Tensor] | None = None
    normalization: str = "sum"  # the default of `attention_normalization`
    non_negative: bool = True  # whether `phi >= 0` everywhere, which `"sum"` and `flex_attention` need
    formula: str = ""
    source: str = ""
    subtract_log_count: bool = False  # whether the scores lose `log n` when the normaliser is `"none"`
    is_homogeneous: bool = False  # whether `phi(c s) = c^k phi(s)` for all `c > 0`: `"sum"` cancels such a factor
    # An `"elementwise"` weight depends on its score and the normaliser alone. `"simplex"` projects a query's scores, a
    # `"row"` function also takes a mask of visible keys (or `None`), and `"linear"` has no scores
    kind: Literal["elementwise", "softmax", "simplex", "row", "linear"] = "elementwise"
    sees_own_key: bool = True  # whether a query sees the key of its own token

    @property
    def is_elementwise(self) -> bool:
        return self.kind == "elementwise"

    def weights_and_gradient(self, scores: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `phi(scores)` and the gradient of the scores."""
        if self.derivative is None:
            weights, pull_back = torch.func.vjp(self.function, scores)
            return weights, pull_back(gradient)[0]
        weights = self.function(scores)
        return weights, gradient * self.derivative(scores, weights)


def _project_onto_simplex(name, scores) -> Tensor:
    try:
        import entmax  # only where it is needed
    except ImportError:
        raise ImportError(
            f"attention_activation={name!r} needs the package entmax: pip install entmax, or use another activation"
        ) from None
    return getattr(entmax, name)(scores, dim=-1)


def at_least_float32(states: Tensor) -> torch.dtype:
    """Returns the dtype of sums over tokens."""
    return torch.promote_types(states.dtype, torch.float32)


def zero_limit(dtype: torch.dtype) -> float:
    """Returns the limit below which a sum of weights counts as 0: its reciprocal could overflow."""
    return torch.finfo(dtype).tiny / torch.finfo(dtype).eps


def counts_as_zero(total: Tensor) -> Tensor:
    return total < zero_limit(total.dtype)


def exp_(scores: Tensor) -> Tensor:
    """Computes `exp` in place, and 0 below `zero_limit`.

    MKL's, PyTorch's own, takes 5 to 30 times as long where the result is 0 or denormal.
    """
    limit = zero_limit(scores.dtype)
    return F.threshold_(scores.clamp_(min=math.log(limit) - 1.0).exp_(), limit, 0.0)


def _softpick(scores, visible=None) -> Tensor:
    """Computes `relu(e^s - 1) / sum |e^s - 1|`, or 0 for a sum of 0, without overflow."""
    scores = hide(scores, visible, 0.0)
    largest = scores.detach().amax(dim=-1, keepdim=True).clamp(min=0.0)
    # |e^s - 1| / e^largest, without cancellation
    size = torch.exp(torch.relu(scores) - largest) * -torch.expm1(-scores.abs())
    total = size.sum(dim=-1, keepdim=True)
    is_zero = counts_as_zero(total)
    return torch.where(scores > 0, size, 0.0).masked_fill(is_zero, 0.0) / total.masked_fill(is_zero, 1.0)


def _stick_breaking(scores, visible=None) -> Tensor:
    """Computes `sigmoid(s_j) prod_{k > j} (1 - sigmoid(s_k))`: the latest key takes its share first."""
    log_rest = hide(F.logsigmoid(-hide(scores, visible, 0.0)), visible, 0.0)
    # The sum over later keys only: subtracting the key's own term again could cancel all digits
    later = F.pad(log_rest, (0, 1)).flip(-1).cumsum(dim=-1).flip(-1)[..., 1:]
    log_weights = F.logsigmoid(hide(scores, visible, 0.0)) + later
    # Denormal numbers are slow
    return hide(torch.exp(log_weights.clamp(min=math.log(zero_limit(scores.dtype)))), visible, 0.0)


def hide(tensor: Tensor, visible: Tensor | None, value: float) -> Tensor:
    """Sets hidden keys to `value`. `visible` broadcasts to the tensor; `None` hides nothing."""
    return tensor if visible is None else tensor.masked_fill(~visible, value)


def _no_scores(scores) -> Tensor:
    raise ValueError("attention_activation='linear_attention' is not a function of the scores: it computes none")


_BUILT_IN = (
    AttentionActivation(
        "softmax",
        torch.exp,
        derivative=lambda scores, weights: weights,
        formula="exp(s)",
        source="Vaswani et al. 2017, arXiv 1706.03762",
        kind="softmax",
    ),
    AttentionActivation(
        "sigmoid",
        torch.sigmoid,
        # w - w^2, in one pass
        derivative=lambda scores, weights: torch.addcmul(weights, weights, weights, value=-1),
        normalization="none",
        formula="sigmoid(s - log n_i); without log n_i under sum and length",
        source="Ramapuram et al. 2024, arXiv 2409.04431, with the constant log n",
        subtract_log_count=True,
    ),
    AttentionActivation(
        "relu",
        torch.relu,
        derivative=lambda scores, weights: weights.sign(),
        normalization="length",
        formula="max(s, 0)",
        source="Wortsman et al. 2023, arXiv 2309.08586",
        is_homogeneous=True,
    ),
    AttentionActivation(
        "relu_squared",
        lambda scores: torch.relu(scores).square(),
        derivative=lambda scores, weights: 2 * torch.relu(scores),
        normalization="length",
        formula="max(s, 0)^2",
        source="So et al. 2021, arXiv 2109.08668; Hua et al. 2022, arXiv 2202.10447",
        is_homogeneous=True,
    ),
    AttentionActivation(
        "squared",
        torch.square,
        derivative=lambda scores, weights: 2 * scores,
        formula="s^2",
        source="p_i^2 / sum_j p_j^2: another map onto the simplex",
        is_homogeneous=True,
    ),
    AttentionActivation(
        "softplus",
        F.softplus,
        derivative=lambda scores, weights: torch.sigmoid(scores),
        formula="log(1 + exp(s))",
        source="a smooth map onto the simplex",
    ),
    AttentionActivation(
        "tanh",
        torch.tanh,
        derivative=lambda scores, weights: 1 - weights.square(),
        normalization="length",
        non_negative=False,
        formula="tanh(s)",
        source="bounded, but neither positive nor summing to one",
    ),
    AttentionActivation(
        "identity",
        lambda scores: scores,
        derivative=lambda scores, weights: torch.ones_like(scores),
        normalization="length",
        non_negative=False,
        formula="s",
        source="no activation at all",
    ),
    AttentionActivation(
        "sparsemax",
        functools.partial(_project_onto_simplex, "sparsemax"),
        formula="max(s - tau, 0), where tau makes the sum 1",
        source="Martins and Astudillo 2016, arXiv 1602.02068",
        kind="simplex",
    ),
    AttentionActivation(
        "entmax15",
        functools.partial(_project_onto_simplex, "entmax15"),
        formula="max(s/2 - tau, 0)^2, where tau makes the sum 1",
        source="Peters et al. 2019, arXiv 1905.05702",
        kind="simplex",
    ),
    AttentionActivation(
        "softpick",
        _softpick,
        formula="relu(exp(s) - 1) / sum |exp(s) - 1|",
        source="Zuhri et al. 2025, arXiv 2504.20966, without an epsilon",
        kind="row",
    ),
    AttentionActivation(
        "stick_breaking",
        _stick_breaking,
        normalization="none",
        formula="sigmoid(s_j) prod_{j < k < i} (1 - sigmoid(s_k)), of earlier keys alone",
        source="Tan et al. 2024, arXiv 2410.17980",
        kind="row",
        sees_own_key=False,
    ),
    AttentionActivation(
        "linear_attention",
        _no_scores,
        formula="psi(c q) . psi(k), psi(x) = elu(x) + 1",
        source="Katharopoulos et al. 2020, arXiv 2006.16236",
        kind="linear",
    ),
)
ATTENTION_ACTIVATIONS = {activation.name: activation for activation in _BUILT_IN}
# Transformers' function divides 0 by 0 in its gradient where softplus underflows.
_SAFE_FUNCTIONS = {"sqrtsoftplus": lambda scores: F.softplus(scores).clamp(min=torch.finfo(scores.dtype).tiny).sqrt()}
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

# Name -> keyword arguments of `AttentionActivation`, which the copies of this file in remote code share
_SHARED = sys.modules.setdefault("nlq_attention_activations", ModuleType("nlq_attention_activations"))
_REGISTERED: dict[str, dict] = vars(_SHARED).setdefault("registered", {})


def registered_activations() -> set[str]:
    return set(_REGISTERED)


def register_attention_activation(
    name: str,
    function: Callable[[Tensor], Tensor],
    *,
    derivative: Callable[[Tensor, Tensor], Tensor] | None = None,
    normalization: str = "length",
    non_negative: bool = False,
    formula: str = "",
    source: str = "",
    exist_ok: bool = False,
) -> None:
    """Adds an attention activation, whose name every model in this process can then use, downloaded models too.

    A saved model has the name only: register the function again before you load it in another process.

    Args:
        function: `phi`, maps scores of any shape to a new tensor of the same shape, element by element, and has no
            parameters.
        exist_ok: replace an activation of this name, also in existing models.

    Raises `ValueError` if the name is taken, or the function contradicts the other arguments.
    """
    if not name.isidentifier():
        raise ValueError(f"name={name!r} must be a Python identifier")
    if name in ATTENTION_ACTIVATIONS or name in FUNCTIONS:
        raise ValueError(f"name={name!r} is an attention activation already; choose another name")
    if name in _REGISTERED and not exist_ok:
        raise ValueError(f"name={name!r} is registered already; choose another name or exist_ok=True")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r} must be one of {', '.join(NORMALIZATIONS)}")
    if normalization == "sum" and not non_negative:
        raise ValueError("normalization='sum' needs weights that are never negative: give non_negative=True")

    row = AttentionActivation(name, function, derivative, normalization, non_negative, formula, source)
    _check_function(row)
    _REGISTERED[name] = dict(vars(row))


def _check_function(row):
    generator = torch.Generator().manual_seed(0)
    # Away from round numbers, where functions have kinks, but with some zeros
    scores = (torch.rand(20, 20, dtype=torch.float64, generator=generator) - 0.5) * 40.123
    scores[10:, 3] = 0.0
    copy = scores.clone()
    weights = row.function(copy)
    function = f"function of {row.name!r}"
    if weights.requires_grad:
        raise ValueError(f"{function} must have no parameters, as nothing trains them; write an AttentionPart")
    if not torch.equal(copy, scores):
        raise ValueError(f"{function} must return a new tensor, not change the scores")
    alone = torch.stack([row.function(score.clone()) for score in scores[0]])
    if weights.shape != scores.shape or not torch.allclose(alone, weights[0], equal_nan=True):
        raise ValueError(f"{function} must work element by element and keep the shape of the scores")
    _, slope = replace(row, derivative=None).weights_and_gradient(scores, torch.ones_like(scores))
    if not (weights.isfinite() & slope.isfinite()).all():
        raise ValueError(f"{function}, or its derivative, is not finite for all scores from -20 to 20")
    if row.non_negative and weights.min() < 0:
        raise ValueError(f"{function} is {weights.min().item():.3g} somewhere, but non_negative=True")
    _, derivative = row.weights_and_gradient(scores, torch.ones_like(scores))
    if not torch.allclose(derivative[:10], slope[:10], rtol=1e-4, atol=1e-6) or not derivative.isfinite().all():
        raise ValueError(f"derivative of {row.name!r} is not the derivative of its function")


def get_attention_activation(name: str) -> AttentionActivation:
    """Returns a row by name: built-in, registered, or a function of Transformers."""
    if name in ATTENTION_ACTIVATIONS:
        return ATTENTION_ACTIVATIONS[name]
    if name in _REGISTERED:
        known = AttentionActivation.__dataclass_fields__
        return AttentionActivation(**{key: value for key, value in _REGISTERED[name].items() if key in known})
    if name in LIBRARY_ACTIVATIONS:
        return LIBRARY_ACTIVATIONS[name]
    choices = (*ATTENTION_ACTIVATIONS, *_REGISTERED, *LIBRARY_ACTIVATIONS)
    suggestion = did_you_mean(name, choices, cutoff=0.5)  # "linear" means "linear_attention"
    raise ValueError(
        f"attention_activation={name!r} is unknown; {suggestion}choose one of {', '.join(choices)}, or call "
        f"register_attention_activation({name!r}, function) first"
    )


def did_you_mean(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns `"did you mean 'X'? "`, or an empty string if no choice is similar."""
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}? " if near else ""

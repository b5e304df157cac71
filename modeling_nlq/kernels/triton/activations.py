"""The elementwise attention activations in Triton's language, for kernels that compute scores tile by tile.

Every function takes a tile of scores of any shape in float32 (or float64 under Triton's interpreter) and returns the pair
`phi(scores)`, `phi'(scores)`. If a caller ignores one of the two, the compiler removes its computation.

A multiprocessor computes 16 exponentials, logarithms, reciprocals or square roots per clock, but 128 multiply-adds. So the
functions below use few of the former, and polynomials where they can. Each polynomial minimises the largest relative error for
its degree (Remez exchange); the comment beside it gives the interval and the error. Rounding to float32 alone costs up to 6e-8.
"""

import functools
from collections.abc import Callable

import torch

from ...activations_nlq import AttentionActivation, is_registered


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

    class tl:
        """Lets Python read the signatures of kernels without Triton."""

        constexpr = object


def jit(function):
    """Applies `triton.jit`; without Triton, returns a function that raises `ImportError`."""
    if triton is not None:
        return triton.jit(function)

    @functools.wraps(function)
    def unavailable(*_):
        raise ImportError(f"{function.__name__} needs the package triton: pip install triton")

    return unavailable


@jit
def triton_identity(scores):
    return scores, tl.full(scores.shape, 1.0, scores.dtype)


# Whether Triton's interpreter runs the kernels, on the CPU
IS_INTERPRETED = triton is not None and not isinstance(triton_identity, triton.JITFunction)
INTERPRETED = None if triton is None else tl.constexpr(IS_INTERPRETED)
HAS_PTX = None if triton is None else tl.constexpr(not IS_INTERPRETED and torch.version.hip is None)


# Triton's exponential and division handle subnormal numbers, which costs nine instructions per sigmoid. These two round
# subnormal numbers to 0; their relative errors are below 2e-7 and 1e-7.
@jit
def _exp2(x):
    if HAS_PTX and x.dtype == tl.float32:
        power = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        power = tl.exp2(x)
    return power


@jit
def _exp(x):
    return _exp2(x * 1.4426950408889634) if HAS_PTX else tl.exp(x)


@jit
def _reciprocal(x):
    if HAS_PTX and x.dtype == tl.float32:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        inverse = 1.0 / x
    return inverse


@jit
def triton_relu(scores):
    return tl.maximum(scores, 0.0), (scores > 0).to(scores.dtype)


@jit
def triton_relu_squared(scores):
    positive = tl.maximum(scores, 0.0)
    return positive * positive, 2.0 * positive


@jit
def triton_relu6(scores):
    return tl.minimum(tl.maximum(scores, 0.0), 6.0), ((scores > 0) & (scores < 6)).to(scores.dtype)


@jit
def triton_leaky_relu(scores):
    slope = tl.where(scores > 0, 1.0, tl.full(scores.shape, 0.01, scores.dtype))
    return scores * slope, slope


@jit
def triton_hardswish(scores):
    """`s min(max(s + 3, 0), 6) / 6` (Howard et al. 2019, arXiv 1905.02244, section 5.2)."""
    gate = tl.minimum(tl.maximum(scores + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    slope = tl.where(scores < 3.0, tl.where(scores > -3.0, scores * (1.0 / 3.0) + 0.5, 0.0), 1.0)
    return scores * gate, slope


@jit
def triton_squared(scores):
    return scores * scores, 2.0 * scores


@jit
def triton_sigmoid(scores):
    """`w = 1 / (1 + e)` with `e = exp(-s)`, and `w' = w (1 - w)`."""
    exponential = _exp(-scores)
    weights = _reciprocal(1.0 + exponential)
    # 1 - w = e w, without the cancellation where w is nearly 1, and without infinity times 0 where e overflows
    complement = tl.where(scores < 0, 1.0 - weights, exponential * weights)
    return weights, weights * complement


@jit
def triton_tanh(scores):
    """`tanh(s) = 2 sigmoid(2 s) - 1`, and `tanh'(s) = 4 sigmoid'(2 s)`."""
    gate, gate_slope = triton_sigmoid(2.0 * scores)
    # Where the difference above would cancel: tanh(s) / s for |s| <= 1/2, by powers of s^2; relative error 1.3e-8
    square = scores * scores
    series = -0.05298607529 + square * 0.01713500663
    series = 0.1332477932 + square * series
    series = 0.9999999869 + square * (-0.3333306939 + square * series)
    return tl.where(square < 0.25, scores * series, 2.0 * gate - 1.0), 4.0 * gate_slope


@jit
def _log1p_ratio(x):
    """`log(1 + x) / x` for `0 <= x <= 1`; relative error 4.7e-9."""
    series = 0.01985146236 - x * 0.003244025177
    series = -0.05695953427 + x * series
    series = 0.1060365489 + x * series
    series = -0.1530559257 + x * series
    series = 0.1967593926 + x * series
    series = -0.2495413366 + x * series
    series = 0.3332996242 + x * series
    series = -0.4999990242 + x * series
    return 0.9999999953 + x * series


@jit
def triton_softplus(scores):
    """`max(s, 0) + log(1 + x)` with `x = exp(-|s|)`, and the sigmoid."""
    x = _exp(-tl.abs(scores))
    return tl.maximum(scores, 0.0) + x * _log1p_ratio(x), tl.where(scores < 0, x, 1.0) * _reciprocal(1.0 + x)


@jit
def triton_sqrtsoftplus(scores):
    """`w = sqrt(softplus(s))`, and `w' = sigmoid(s) / (2 w)`.

    Both are `h = exp(-|s| / 2)` times something moderate where `s < 0`: neither underflows where softplus does.
    """
    half = _exp(-0.5 * tl.abs(scores))
    x = half * half
    ratio = _log1p_ratio(x)
    root = tl.sqrt(tl.where(scores < 0, ratio, scores + x * ratio))
    half = tl.where(scores < 0, half, 1.0)
    return half * root, half * _reciprocal(2.0 * (1.0 + x) * root)


@jit
def triton_silu(scores):
    gate, gate_slope = triton_sigmoid(scores)
    return scores * gate, gate + scores * gate_slope


@jit
def triton_quick_gelu(scores):
    """`s sigmoid(1.702 s)` (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2)."""
    gate, gate_slope = triton_sigmoid(1.702 * scores)
    return scores * gate, gate + 1.702 * scores * gate_slope


@jit
def triton_gelu_tanh(scores):
    """`s (1 + tanh(u)) / 2 = s sigmoid(2 u)` with `u = sqrt(2/pi) (s + 0.044715 s^3)` (arXiv 1606.08415, section 2)."""
    square = scores * scores
    # 2 sqrt(2/pi), its product with 0.044715, and three times that, for the derivative of 2 u
    gate, gate_slope = triton_sigmoid(scores * (1.5957691216057308 + 0.07135481627260025 * square))
    return scores * gate, gate + scores * gate_slope * (1.5957691216057308 + 0.21406444881780074 * square)


@jit
def _normal_distribution(x):
    """`Phi(x) = (1 + erf(x / sqrt(2))) / 2`, also in the lower tail, where that formula would cancel, and its density.

    `log2(Phi(-|x|))` is nearly a parabola, so that a polynomial in `|x|` leaves `Phi` a relative error of 2.4e-8 for
    `|x| <= 6.5`. It decreases faster from there, where `Phi` is below 4e-11.
    """
    distance = tl.abs(x)
    series = 8.84216936e-09 - distance * 1.896723144e-10
    series = -1.858029737e-07 + distance * series
    series = 2.319205443e-06 + distance * series
    series = -1.89497481e-05 + distance * series
    series = 0.0001031693679 + distance * series
    series = -0.0003342863727 + distance * series
    series = 6.53594062e-05 + distance * series
    series = 0.006906078266 + distance * series
    series = -0.05243226033 + distance * series
    series = -0.4592192682 + distance * series
    series = -1.151104812 + distance * series
    tail = _exp2(-0.9999999832 + distance * series)
    density = 0.3989422804014327 * _exp(-0.5 * x * x)  # 1 / sqrt(2 pi)
    return tl.where(x < 0, tail, 1.0 - tail), density


@jit
def triton_gelu(scores):
    """`s Phi(s)` (arXiv 1606.08415, section 2)."""
    gate, density = _normal_distribution(scores)
    return scores * gate, gate + scores * density


@jit
def triton_gelu_10(scores):
    """gelu, clipped to 10; it never comes near the other bound, -10 (Wu et al. 2020, arXiv 2004.09602)."""
    weights, slope = triton_gelu(scores)
    return tl.minimum(weights, 10.0), tl.where(weights > 10.0, 0.0, slope)


@jit
def triton_laplace(scores):
    """`Phi((s - 0.707107) / 0.282095)` (Ma et al. 2022, arXiv 2209.10655, with these constants in Transformers)."""
    weights, density = _normal_distribution((scores - 0.707107) * (1.0 / 0.282095))
    return weights, density * (1.0 / 0.282095)


@jit
def triton_mish(scores):
    """`s t` with `t = tanh(log(1 + e)) = n / (n + 2)`, `n = e (e + 2)`, `e = exp(s)` (Misra 2019, arXiv 1908.08681).

    The derivative is `t + s (1 - t^2) sigmoid(s)`, and `(1 - t^2) sigmoid(s) = 4 e (1 + e) / (n + 2)^2`.
    """
    # From s = 20 on t rounds to 1, also in float64, and `e (e + 2)` must not overflow
    exponential = _exp(tl.minimum(scores, 20.0))
    numerator = exponential * (exponential + 2.0)
    reciprocal = _reciprocal(numerator + 2.0)
    gate = numerator * reciprocal
    gate_slope = (4.0 * exponential * reciprocal) * ((1.0 + exponential) * reciprocal)
    return scores * gate, gate + scores * gate_slope


# Some names share a function, because Transformers has several implementations of one formula
TRITON_BODIES = {
    "gelu": triton_gelu,
    "gelu_10": triton_gelu_10,
    "gelu_accurate": triton_gelu_tanh,
    "gelu_fast": triton_gelu_tanh,
    "gelu_new": triton_gelu_tanh,
    "gelu_python": triton_gelu,
    "gelu_python_tanh": triton_gelu_tanh,
    "gelu_pytorch_tanh": triton_gelu_tanh,
    "hardswish": triton_hardswish,
    "identity": triton_identity,
    "laplace": triton_laplace,
    "leaky_relu": triton_leaky_relu,
    "mish": triton_mish,
    "quick_gelu": triton_quick_gelu,
    "relu": triton_relu,
    "relu2": triton_relu_squared,
    "relu6": triton_relu6,
    "relu_squared": triton_relu_squared,
    "sigmoid": triton_sigmoid,
    "silu": triton_silu,
    "softplus": triton_softplus,
    "sqrtsoftplus": triton_sqrtsoftplus,
    "squared": triton_squared,
    "swish": triton_silu,
    "tanh": triton_tanh,
}


# The users' own
_REGISTERED: dict[str, Callable] = {}


def register_triton_body(name: str, body: Callable) -> None:
    """Lets `nlq_triton` compute an activation that was added by `register_attention_activation`.

    Args:
        name: the name of the activation.
        body: a function decorated with `triton.jit` that maps a tile of scores in float32 to the pair `phi(scores)`,
            `phi'(scores)`. The first call on each device compares it with the activation's function.

    Raises:
        ValueError: if no such activation was registered, or the body is not such a function.
    """
    if not is_registered(name):
        raise ValueError(f"name={name!r} must be an activation of your own; call register_attention_activation first")
    if not hasattr(body, "arg_names"):
        raise ValueError(f"body={body!r} of {name!r} must be a function decorated with triton.jit")
    _REGISTERED[name] = body


def triton_body(activation: AttentionActivation) -> Callable | None:
    """Returns the Triton function of an activation, the user's own or the one in the table above; `None` if there is none."""
    return _REGISTERED.get(activation.name) or TRITON_BODIES.get(activation.name)

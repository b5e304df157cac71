"""The attention activations in Triton's language, on the CPU: run by Triton's interpreter, and compiled but not run."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from support.grids import slow_except
from support.paths import TESTS

from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS, LIBRARY_ACTIVATIONS
from modeling_nlq.kernels.triton import activations as triton_activations
from modeling_nlq.kernels.triton.activations import TRITON_BODIES


triton = pytest.importorskip("triton")
elementwise_kernel = pytest.importorskip("support.triton_special_functions").elementwise_kernel


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = {name: row for name, row in (ATTENTION_ACTIVATIONS | LIBRARY_ACTIVATIONS).items() if row.is_elementwise}
# Relative error of the result, and of the score that it would belong to, that is allowed. Rounding costs 6e-8; a GPU's
# exponential is less exact than the CPU's. In float64 there remains the error of the polynomials.
TOLERANCE = {torch.float32: 6e-7 if DEVICE == "cpu" else 3e-6, torch.float64: 6e-8}
# Special functions per score, of the weights alone and with the derivative
SPECIAL_FUNCTIONS = {
    "sigmoid": (["ex2", "rcp"], ["ex2", "rcp"]),
    "tanh": (["ex2", "rcp"], ["ex2", "rcp"]),
    "softplus": (["ex2"], ["ex2", "rcp"]),
    "sqrtsoftplus": (["ex2", "sqrt"], ["ex2", "rcp", "sqrt"]),
    "silu": (["ex2", "rcp"], ["ex2", "rcp"]),
    "quick_gelu": (["ex2", "rcp"], ["ex2", "rcp"]),
    "gelu_new": (["ex2", "rcp"], ["ex2", "rcp"]),
    "mish": (["ex2", "rcp"], ["ex2", "rcp"]),
    "gelu": (["ex2"], ["ex2", "ex2"]),
    "gelu_10": (["ex2"], ["ex2", "ex2"]),
    "laplace": (["ex2"], ["ex2", "ex2"]),
    **{name: ([], []) for name in ("relu", "relu_squared", "relu6", "leaky_relu", "hardswish", "squared", "identity")},
}
# What the functions are far from 0, to float32 accuracy, written without the cancellation of their formulas; from and to where
TAILS = [
    ("sigmoid", torch.exp, -86, -20),
    ("sigmoid", lambda s: 1 - torch.exp(-s), 20, 86),
    ("tanh", lambda s: 2 * torch.exp(2 * s) - 1, -43, -20),
    ("tanh", lambda s: 1 - 2 * torch.exp(-2 * s), 20, 43),
    ("softplus", torch.exp, -86, -20),
    ("sqrtsoftplus", lambda s: torch.exp(s / 2), -170, -20),
    ("silu", lambda s: s * torch.exp(s), -86, -20),
    ("mish", lambda s: s * torch.exp(s), -86, -20),
    ("quick_gelu", lambda s: s * torch.exp(1.702 * s), -50, -20),
    ("gelu_new", lambda s: s * torch.sigmoid(math.sqrt(8 / math.pi) * (s + 0.044715 * s**3)), -9, -1),
    ("gelu", lambda s: s * torch.special.erfc(-s / math.sqrt(2)) / 2, -6.5, -1),
    ("laplace", lambda s: torch.special.erfc((0.707107 - s) / (0.282095 * math.sqrt(2))) / 2, -1.1, 0.5),
]


def run(name: str, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`phi(scores)` and `phi'(scores)` as Triton computes them."""
    scores = scores.to(DEVICE)
    weights, slopes, tile = torch.empty_like(scores), torch.empty_like(scores), 4096
    grid = (triton.cdiv(scores.numel(), tile),)
    elementwise_kernel[grid](scores, weights, slopes, scores.numel(), TRITON_BODIES[name], True, tile)
    return weights.cpu(), slopes.cpu()


def derivative(function):
    return lambda scores: torch.func.vjp(function, scores)[1](torch.ones_like(scores))[0]


def check(name: str, function, scores: torch.Tensor, absolute: float = 1e-37):
    """Compares `phi` and `phi'` with those of a function in float64, up to relative errors of result and score."""
    exact = scores.double()
    truths = [function, derivative(function), derivative(derivative(function))]
    value, slope, curvature = (truth(exact) for truth in truths)
    # laplace's score is rounded after a subtraction
    size = exact.abs() + (0.707107 if name == "laplace" else 0)
    for actual, truth, change in zip(run(name, scores), (value, slope), (slope, curvature)):
        # PyTorch's second derivative of mish is NaN where exp overflows, and should be 0
        allowed = absolute + TOLERANCE[scores.dtype] * (truth.abs() + size * change.abs().nan_to_num())
        excess = (actual.double() - truth).abs() / allowed
        worst = excess.argmax()
        assert excess[worst] <= 1, f"{name}({exact[worst].item()}): {actual[worst].item()} instead of {truth[worst].item()}"


def scores_of_all_sizes(dtype: torch.dtype) -> torch.Tensor:
    """Both signs of 1e-8 to 1e4, most of them from 0 to 30, and where some function has a kink."""
    sizes = torch.cat([torch.logspace(-8, 4, 1001), torch.linspace(0, 30, 2001)])
    kinks = torch.tensor([0.0, -0.0, 3.0, 6.0, 10.0, 20.0, 0.5, 0.707107])
    return torch.cat([sizes, -sizes, kinks, -kinks]).to(dtype)


# The interpreter is numpy, which warns where an exponential is to become infinite
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning")
class TestValues:
    def test_every_elementwise_activation_has_a_body(self):
        assert set(TRITON_BODIES) == set(ROWS)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
    @pytest.mark.parametrize("name", TRITON_BODIES)
    def test_weights_and_derivative(self, name, dtype):
        # What PyTorch's own formulas lose in float64 where they cancel, as in 1 + tanh(s): `TAILS` is stricter there
        scores = scores_of_all_sizes(dtype)
        if name == "gelu_10":  # PyTorch's slope at the bound itself is 1, and since 2.14 it is 0
            scores = scores[scores != 10.0]
        check(name, ROWS[name].function, scores, absolute=5e-14 if name.startswith("gelu") else 4e-15)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
    @pytest.mark.parametrize("name, function, low, high", TAILS, ids=[f"{name} from {low}" for name, _, low, _ in TAILS])
    def test_relative_accuracy_of_tails(self, name, function, low, high, dtype):
        check(name, function, torch.linspace(low, high, 1000, dtype=dtype))

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
    @pytest.mark.parametrize("name", TRITON_BODIES)
    def test_finite(self, name, dtype):
        sizes = torch.tensor([1e-45, 1e-38, 43.0, 44.5, 87.5, 88.5, 89.0, 104.0, 176.0, 710.0, 1e4, 1e5, 1e6], dtype=dtype)
        weights, slopes = run(name, torch.cat([sizes, -sizes]))
        assert weights.isfinite().all() and slopes.isfinite().all()

    @pytest.mark.parametrize("name", TRITON_BODIES)
    def test_finite_differences(self, name):
        """Central differences of the weights that Triton computes, as `torch.autograd.gradcheck` takes them."""
        scores, step = 12 * torch.rand(500, dtype=torch.float64) - 6, 1e-6
        difference = (run(name, scores + step)[0] - run(name, scores - step)[0]) / (2 * step)
        torch.testing.assert_close(run(name, scores)[1], difference, rtol=1e-6, atol=1e-6)


CASES = [(False, 90), (True, 80), (True, 90)]


@pytest.mark.parametrize(
    "with_slopes, capability", slow_except(CASES, [(True, 90)]), ids=["weights-sm_90", "both-sm_80", "both-sm_90"]
)
@pytest.mark.slow
def test_code_for_a_gpu(with_slopes, capability):
    """Every function compiles, and without slopes it uses no special function of the derivative."""
    arguments = json.dumps({"names": list(SPECIAL_FUNCTIONS), "with_slopes": with_slopes, "capability": capability})
    command = [sys.executable, "-m", "support.triton_special_functions", arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {name: functions[with_slopes] for name, functions in SPECIAL_FUNCTIONS.items()}


def test_every_function_is_compiled():
    assert {TRITON_BODIES[name] for name in SPECIAL_FUNCTIONS} == set(TRITON_BODIES.values())


def test_importable_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    specification = importlib.util.spec_from_file_location("modeling_nlq.without_triton", triton_activations.__file__)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert set(module.TRITON_BODIES) == set(TRITON_BODIES)
    with pytest.raises(ImportError, match="triton_relu needs the package triton"):
        module.TRITON_BODIES["relu"](torch.zeros(1))

"""Calls of `eager`, `nlq_tiled` and `nlq_triton` in tests, on the devices that are here."""

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from support.attention_cases import SCALING, results

from modeling_nlq import tiled_nlq
from modeling_nlq.attention_nlq import eager_attention_forward
from modeling_nlq.backends_nlq import Inputs, Needs
from modeling_nlq.kernels.cpu import build, operators
from modeling_nlq.kernels.triton import attention as triton_attention
from modeling_nlq.kernels.triton.activations import IS_INTERPRETED
from modeling_nlq.kernels.triton.attention import TILES, Tiles, triton_attention_forward
from modeling_nlq.masking_nlq import Visibility
from modeling_nlq.tiled_nlq import tiled_attention_forward


CPU = torch.device("cpu")
TRITON_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter is numpy, which warns where an exponential is to become infinite
ignore_overflow = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)


@contextlib.contextmanager
def poisoned_memory(device=CPU):
    """New memory is NaN, or the largest number if it holds integers: PyTorch fills it under deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=device).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Backend:
    """An attention function, the device that it runs on here, and how exact it is."""

    name: str
    function: Callable
    device: torch.device = CPU
    # Relative to the largest number, in float32 and in the widest precision that it takes
    tolerance: float = 1e-5
    least_tolerance: float = 1e-9
    widest: torch.dtype = torch.float64

    def place(self, states):
        """The states on the backend's device, with gradients of their own."""
        return [tensor.detach().to(self.device).requires_grad_() for tensor in states]

    def mask(self, mask):
        """A layout's mask on the backend's device."""
        if isinstance(mask, Visibility):
            fields = (field.to(self.device) if isinstance(field, torch.Tensor) else field for field in mask)
            return Visibility(*fields)
        return None if mask is None else mask.to(self.device)

    def __call__(self, module, *states, mask=None, scaling=SCALING, **options):
        """The output for states that are on the backend's device."""
        return self.function(module, *states, self.mask(mask), scaling=scaling, **options)[0]

    def run(self, layout, module, states, **options):
        """The output and gradients, on the CPU; new memory is poisoned."""
        states = self.place(states)
        with poisoned_memory(self.device):
            tensors = results(self(module, *states, mask=layout.mask(), **options), states)
        assert all(gradient.dtype == tensor.dtype for gradient, tensor in zip(tensors[1:], states))
        return [tensor.cpu() for tensor in tensors]


def allow_cpp(patch):
    """Lets attention run in C++ here, and tells whether it does. On CPUs without AVX-512 its products are plain loops."""
    patch.delenv("NLQ_CPP", raising=False)
    if build.instructions() != "AVX512":
        patch.setattr(build, "_FLAGS", (*build._FLAGS, "-DNLQ_PLAIN_PRODUCTS"))
        patch.setattr(operators, "_multiplies", lambda is_half: operators.is_built("attention"))
    return operators._multiplies(True)


def cpp_or_tiled(module, query, *inputs, dropout=0.0, **options):
    """Attention in C++ where there is code for it, else by `nlq_tiled`."""
    needs = Needs(module.activation, inputs=Inputs(query.device, query.dtype, 2, query.shape[-1]))
    is_right = operators.computes_attention(needs) and not dropout
    function = operators.attention_forward if is_right else tiled_attention_forward
    return function(module, query, *inputs, dropout=dropout, **options)


EAGER = Backend("eager", eager_attention_forward)
TILED = Backend("nlq_tiled", tiled_attention_forward)
CPP = Backend("nlq_cpp", cpp_or_tiled)
# The interpreter alone takes float64, in which the polynomials of the activations are good to 1e-8. Its `tl.dot` does so since
# Triton 3.5
HAS_FLOAT64 = IS_INTERPRETED and Version(version("triton")) >= Version("3.5")
float64_only = pytest.mark.skipif(
    not HAS_FLOAT64, reason="needs Triton's interpreter (TRITON_INTERPRET=1, no GPU) of version 3.5"
)
TRITON = Backend(
    "nlq_triton",
    triton_attention_forward,
    TRITON_DEVICE,
    least_tolerance=1e-7 if HAS_FLOAT64 else 1e-5,
    widest=torch.float64 if HAS_FLOAT64 else torch.float32,
)


def marks_of(backend: Backend) -> list:
    if backend is not TRITON:
        return []
    is_missing = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
    return [is_missing, *([pytest.mark.gpu] if TRITON_DEVICE.type == "cuda" else [])]


def parametrize_backends(*backends: Backend) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "backend", [pytest.param(backend, id=backend.name, marks=marks_of(backend)) for backend in backends]
    )


def set_tiled_tiles(patch, large, small, many_heads):
    patch.setattr(tiled_nlq, "LARGE_TILE", large)
    patch.setattr(tiled_nlq, "SMALL_TILE", small)
    patch.setattr(tiled_nlq, "MANY_HEADS", many_heads)
    tile = (large + 1) // 2 * 2  # of an even number of queries or keys
    patch.setattr(operators, "FORWARD_TILES", (tile, tile + 2))
    patch.setattr(operators, "BACKWARD_TILES", (tile + 2, tile))


def set_triton_tiles(patch, tile, step, least=16):
    """Small tiles for the interpreter. Compiled kernels run in their own, for tensor cores take no smaller ones."""
    if IS_INTERPRETED:
        for kernel in TILES:
            patch.setitem(TILES, kernel, {size: {256: Tiles(tile, step, 1, 1)} for size in (2, 4)})
        patch.setattr(triton_attention, "MIN_TILE", least)

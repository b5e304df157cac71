"""Calls of `eager`, `nlq_tiled` and the C++ code in tests."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.attention_cases import SCALING, results

from modeling_nlq import tiled_nlq
from modeling_nlq.attention_nlq import eager_attention_forward
from modeling_nlq.backends_nlq import AttentionRequest
from modeling_nlq.kernels.cpu import build, cpu_ops
from modeling_nlq.tiled_nlq import tiled_attention_forward


CPU = torch.device("cpu")


@contextlib.contextmanager
def poisoned_memory():
    """New memory is NaN, or the largest number if it holds integers: PyTorch fills it under deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Backend:
    """An attention function, and how exact it is."""

    name: str
    function: Callable
    # Relative to the largest number, in float32
    tolerance: float = 1e-5

    def place(self, states):
        """The states, with gradients of their own."""
        return [tensor.detach().requires_grad_() for tensor in states]

    def __call__(self, module, *states, mask=None, scaling=SCALING, **options):
        """The output."""
        return self.function(module, *states, mask, scaling=scaling, **options)[0]

    def run(self, layout, module, states, **options):
        """The output and gradients; new memory is poisoned."""
        states = self.place(states)
        with poisoned_memory():
            tensors = results(self(module, *states, mask=layout.mask(), **options), states)
        assert all(gradient.dtype == tensor.dtype for gradient, tensor in zip(tensors[1:], states))
        return tensors


def allow_cpp(patch):
    """Lets attention run in C++ here, and tells whether it does. On CPUs without AVX-512 its products are plain loops."""
    patch.delenv("NLQ_CPP", raising=False)
    if build.instructions() != "AVX512":
        patch.setattr(build, "_FLAGS", (*build._FLAGS, "-DNLQ_PLAIN_PRODUCTS"))
        patch.setattr(cpu_ops, "_multiplies", lambda is_half: cpu_ops.is_built("attention"))
    return cpu_ops._multiplies(True)


def cpp_or_tiled(module, query, *inputs, dropout=0.0, **options):
    """Attention in C++ where there is code for it, else by `nlq_tiled`."""
    request = AttentionRequest(module.activation, device=query.device, dtype=query.dtype, queries=2, head_dim=query.shape[-1])
    is_right = cpu_ops.computes_attention(request) and not dropout
    function = cpu_ops.attention_forward if is_right else tiled_attention_forward
    return function(module, query, *inputs, dropout=dropout, **options)


EAGER = Backend("eager", eager_attention_forward)
TILED = Backend("nlq_tiled", tiled_attention_forward)
CPP = Backend("nlq_cpp", cpp_or_tiled)


def parametrize_backends(*backends: Backend) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("backend", backends, ids=lambda backend: backend.name)


def set_tiled_tiles(patch, large, small, many_heads):
    patch.setattr(tiled_nlq, "LARGE_TILE", large)
    patch.setattr(tiled_nlq, "SMALL_TILE", small)
    patch.setattr(tiled_nlq, "MANY_HEADS", many_heads)
    tile = (large + 1) // 2 * 2  # of an even number of queries or keys
    patch.setattr(cpu_ops, "FORWARD_TILES", (tile, tile + 2))
    patch.setattr(cpu_ops, "BACKWARD_TILES", (tile + 2, tile))

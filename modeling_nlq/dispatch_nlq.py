"""Operations that several kernels can compute.

A model that is loaded as remote code computes everything by PyTorch. The installed package adds kernels in front of PyTorch's
function, which stays for what they cannot compute.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Kernel(NamedTuple):
    """One way to compute an operation.

    Attributes:
        name: its name in records of runs.
        function: the computation.
        computes: tells, from the same arguments, whether it can.
    """

    name: str
    function: Callable
    computes: Callable[..., bool]


# The kernels that this process has used, by operation
_used: dict[str, set[str]] = {}


@torch.compiler.assume_constant_result
def record_use(operation: str, kernel: str) -> None:
    """Notes that a kernel is used. A compiled graph notes it when it is traced."""
    _used.setdefault(operation, set()).add(kernel)


def used_kernels() -> dict[str, list[str]]:
    """Returns the names of the kernels that this process has used, by operation."""
    return {operation: sorted(names) for operation, names in sorted(_used.items())}


def forget_used_kernels() -> None:
    """Begins a new record, as before a run."""
    _used.clear()


class Operation:
    """A function that is computed by the first kernel that can.

    Args:
        name: its name in records of runs.
        function: the computation by PyTorch, which takes every input.
    """

    def __init__(self, name: str, function: Callable):
        self.name = name
        self.kernels = [Kernel("pytorch", function, lambda *inputs: True)]

    def add(self, kernel: Kernel) -> None:
        """Adds a kernel in front of all others."""
        self.kernels.insert(0, kernel)

    def choose(self, *inputs) -> Kernel:
        """Returns the first kernel that can compute these inputs."""
        kernel = next(kernel for kernel in self.kernels if kernel.computes(*inputs))
        record_use(self.name, kernel.name)
        return kernel

    def __call__(self, *inputs):
        return self.choose(*inputs).function(*inputs)


class OnceDifferentiable(torch.autograd.Function):
    """Hands on a gradient, and raises a `RuntimeError` where it is differentiated, as part of the graph of `anchor`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: torch.Tensor, anchor: torch.Tensor, message: str) -> torch.Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.message = inputs[2]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> None:
        raise RuntimeError(ctx.message)

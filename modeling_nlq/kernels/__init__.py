"""Kernels that compute what the model's own files compute by PyTorch, faster where they can.

The model's files do not import this folder, and a published model does not hold it. The installed package adds its
kernels to the tables of backends and operations when it is imported. That builds nothing: a kernel is compiled when it
is first used.
"""

from ..attention_nlq import one_query_attention
from ..backends_nlq import add_backend
from ..loss_nlq import loss_and_gradient
from ..ops_nlq import Kernel
from . import gpu
from .cpu import cpu_ops as cpu


if gpu.has_triton():
    add_backend("nlq_triton", gpu.BACKEND)  # by name only, until it has been measured on a GPU
add_backend("nlq_cpp", cpu.BACKEND, is_preferred=True)
one_query_attention.add(Kernel("cpp", cpu.one_query, cpu.computes_one_query))
loss_and_gradient.add(Kernel("cpp", cpu.loss, cpu.computes_loss))

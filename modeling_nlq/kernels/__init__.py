"""Kernels that compute what the model's own files compute by PyTorch, faster where they can.

A published model does not hold this folder. The installed package adds its kernels to the tables of backends and
operations. A kernel is compiled when it is first used.
"""

from ..attention_nlq import one_query_attention
from ..backends_nlq import ATTENTION_BACKENDS, PREFERENCE, accept_backend
from ..loss_nlq import loss_and_gradient
from ..ops_nlq import Kernel
from . import gpu
from .cpu import cpu_ops as cpu


ATTENTION_BACKENDS["nlq_cpp"] = cpu.BACKEND
PREFERENCE.insert(0, "nlq_cpp")
accept_backend("nlq_cpp")
if gpu.has_triton():  # taken by name only, until it has been measured on a GPU
    ATTENTION_BACKENDS["nlq_triton"] = gpu.BACKEND
    accept_backend("nlq_triton")
one_query_attention.add(Kernel("cpp", cpu.one_query, cpu.computes_one_query))
loss_and_gradient.add(Kernel("cpp", lambda *inputs: cpu.operators.loss(*inputs), cpu.computes_loss))

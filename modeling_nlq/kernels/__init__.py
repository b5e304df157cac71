"""Kernels that compute what the model's own files compute by PyTorch, faster where they can.

The model's files do not import this folder, and a published model does not hold it. The installed package adds its kernels to
the tables of backends and operations when it is imported. That builds nothing and imports no Triton: a kernel is compiled when
it is first used.
"""

from ..attention_nlq import one_query_attention
from ..backends_nlq import AttentionBackend, Needs, add_backend
from ..linear_nlq import LINEAR_ATTENTION
from ..loss_nlq import loss_and_gradient
from ..operations_nlq import Kernel
from . import optional
from .cpu import operators as cpu
from .cpu.operators import kernelize


__all__ = ["kernelize"]


def _triton_attention_forward(*inputs, **options):
    from .triton.attention import triton_attention_forward  # here, because it imports Triton

    return triton_attention_forward(*inputs, **options)


def _has_triton_body(needs: Needs) -> bool:
    if not needs.activation.is_elementwise:
        return False
    from .triton.activations import triton_body

    return triton_body(needs.activation) is not None


add_backend("nlq_sparse", optional.SPARSE, is_preferred=True)
# Not among the preferred ones until its tests have passed on a GPU
add_backend("nlq_triton", AttentionBackend(_triton_attention_forward, _has_triton_body, is_portable=False))
add_backend("nlq_cpp", cpu.BACKEND, is_preferred=True)
one_query_attention.add(Kernel("cpp", cpu.one_query, cpu.computes_one_query))
loss_and_gradient.add(Kernel("cpp", cpu.loss, cpu.computes_loss))
LINEAR_ATTENTION.add(optional.LINEAR_ATTENTION)

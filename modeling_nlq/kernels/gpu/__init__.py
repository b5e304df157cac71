"""The row `nlq_triton` of the table of backends. The first call imports Triton, which takes a second."""

import importlib.metadata

from ...backends_nlq import AttentionBackend, AttentionRequest


ACTIVATIONS = ("identity", "relu", "relu_squared", "sigmoid", "softplus", "squared", "tanh")
# The Triton of torch 2.8
OLDEST = (3, 4)


def has_triton() -> bool:
    """Tells whether a Triton is installed that is new enough."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= OLDEST


def attention_forward(*inputs, **options):
    from . import attention

    return attention.attention_forward(*inputs, **options)


def _has_kernel(request: AttentionRequest) -> bool:
    return request.activation.name in ACTIVATIONS


BACKEND = AttentionBackend(attention_forward, _has_kernel, has_dropout=False, is_portable=False)

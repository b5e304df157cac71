"""Kernels of other packages, which are used where they are installed: `fla` for linear attention, `adasplash` for entmax."""

import importlib.util
import math

import torch
from torch import nn
from transformers.models.llama.modeling_llama import repeat_kv
from transformers.utils import is_flash_linear_attention_available

from ..attention_nlq import eager_attention_forward
from ..backends_nlq import AttentionBackend, AttentionRequest
from ..cache_nlq import LinearState
from ..linear_nlq import LinearInputs, divide
from ..masking_nlq import Visibility
from ..ops_nlq import Kernel


HAS_FLA = is_flash_linear_attention_available()
HAS_ADASPLASH = importlib.util.find_spec("adasplash") is not None
# The smallest width of values that fla's kernel accepts
_COLUMNS = 16


def kernel_form(inputs: LinearInputs, state: LinearState | None = None) -> tuple[torch.Tensor, LinearState]:
    """Computes the chunked form by the kernels of flash-linear-attention, on CUDA, without packed documents."""
    from fla.ops.simple_gla import chunk_simple_gla  # here, because importing it takes seconds

    groups = inputs.query.shape[2]
    gates = None
    if inputs.log_decay is not None:  # (b, n, heads): padding decays nothing
        gates = inputs.log_decay.repeat_interleave(groups) * inputs.is_valid[..., None]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, before: torch.Tensor | None):
        if before is not None:
            before = before.repeat_interleave(groups, dim=1)
        key, value = (states.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous() for states in (key, value))
        query = query.flatten(1, 2).transpose(1, 2).contiguous()
        output, after = chunk_simple_gla(query, key, value, g=gates, scale=1.0, initial_state=before, output_final_state=True)
        return output.transpose(1, 2).unflatten(1, (-1, groups)), after[:, ::groups]

    # The kernel accepts no single column; the sum of the keys is the first of these columns
    ones = nn.functional.pad(torch.ones_like(inputs.value[..., :1]), (0, _COLUMNS - 1))
    before = None if state is None else nn.functional.pad(state.denominator[..., None], (0, _COLUMNS - 1))
    numerator, numerator_state = attend(
        inputs.rotated_query, inputs.rotated_key, inputs.value, None if state is None else state.numerator
    )
    denominator, denominator_state = attend(inputs.query, inputs.key, ones, before)
    return divide(numerator, denominator[..., 0]), LinearState(numerator_state, denominator_state[..., 0])


def computes_linear_attention(query: torch.Tensor, first_key: torch.Tensor | None) -> bool:
    """Tells whether `kernel_form` computes a call."""
    return HAS_FLA and query.is_cuda and first_key is None and not torch.compiler.is_exporting()


LINEAR_ATTENTION = Kernel("fla", kernel_form, computes_linear_attention)


def sparse_attention_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs
) -> tuple[torch.Tensor, None]:
    """Computes projections onto the simplex: entmax15 by the kernel of `adasplash` where it can, the rest as `eager` does.

    The kernel needs CUDA, no padding, packing or cache, a length that is a power of 2 and at least 64, and certain widths of
    the head. Its memory is linear in the length. Arguments and output are those of `eager_attention_forward`; there are no
    weights.
    """
    is_plain = attention_mask is None or (
        isinstance(attention_mask, Visibility) and attention_mask.key_is_valid is None and attention_mask.first_key is None
    )
    is_plain = is_plain and module.is_causal
    length, head_dim = query.shape[2:]
    fits = length == key.shape[2] >= 64 and length.bit_count() == 1 and head_dim in (16, 32, 64, 128, 256)
    is_entmax15 = module.activation.name == "entmax15" and dropout == 0.0
    if HAS_ADASPLASH and query.is_cuda and is_entmax15 and is_plain and fits:
        import adasplash  # here, because it imports Triton

        # It scales by 1 / sqrt(head_dim)
        inputs = [query * (scaling * math.sqrt(head_dim))]
        inputs += [repeat_kv(states, module.num_key_value_groups) for states in (key, value)]
        output = adasplash.adasplash(*(states.contiguous() for states in inputs), is_causal=True)
        return output.transpose(1, 2).contiguous(), None
    output, _ = eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    return output, None


def _is_simplex(request: AttentionRequest) -> bool:
    is_here = request.device is None or (HAS_ADASPLASH and request.device.type == "cuda")
    return request.activation.kind == "simplex" and is_here


SPARSE = AttentionBackend(sparse_attention_forward, _is_simplex, is_portable=False)

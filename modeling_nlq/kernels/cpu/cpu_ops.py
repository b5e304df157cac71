"""The C++ operators as a backend of attention and as kernels of operations, and which calls each supports."""

import threading

import torch
from torch import nn
from torch.autograd import forward_ad

from ...activations_nlq import get_attention_activation
from ...attention_nlq import eager_attention_forward
from ...backends_nlq import AttentionBackend, AttentionRequest
from ...configuration_nlq import AUTOMATIC
from ...masking_nlq import read_visible
from ...ops_nlq import AttentionInputs, DifferentiableAttention, in_autocast_precision, operator_namespace
from ...tiled_nlq import attend_in_tiles, tiled_attention_forward
from .build import FOLDER, instructions, is_enabled, load


ACTIVATIONS = ("identity", "relu", "relu_squared", "sigmoid", "softplus", "squared", "tanh")
# Queries and keys of a tile of forward and of backward, multiples of 64
FORWARD_TILES, BACKWARD_TILES = (128, 512), (128, 256)
NAMESPACE = operator_namespace([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"), *FOLDER.glob("*.py")])
operators = getattr(torch.ops, NAMESPACE)


# A compiled graph takes the answer as a constant: the operators are built before they enter a graph
@torch.compiler.assume_constant_result
def is_built() -> bool:
    """Tells whether the operators can be used here. The first call compiles them, unless `nlq build` did."""
    return is_enabled() and _load()


_lock = threading.Lock()


def _load() -> bool:
    with _lock:  # two threads may begin
        if hasattr(operators, "loss"):  # perhaps by an earlier import of this package
            return True
        if not load(NAMESPACE):
            return False
        for operator, fake in FAKES.items():
            torch.library.register_fake(f"{NAMESPACE}::{operator}", fake)
        return True


@torch.compiler.assume_constant_result
def _multiplies(is_half: bool) -> bool:
    """Tells whether this CPU has oneDNN's kernels for small matrices."""
    return instructions() == "AVX512" and is_built() and operators.can_multiply(is_half)


def _attention(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inverse_count = 1.0 / inputs.visible_count.clamp(min=1).float() if inputs.normalization == "length" else None
    states = (inputs.query, inputs.key, inputs.value, _log_count(inputs), inverse_count)
    return operators.attention(*states, *_masks_and_options(inputs), *FORWARD_TILES)


def _attention_backward(
    gradient: torch.Tensor, inputs: AttentionInputs, results: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    states = (gradient, inputs.query, inputs.key, inputs.value, *results, _log_count(inputs))
    return operators.attention_backward(*states, *_masks_and_options(inputs), *BACKWARD_TILES)


def _masks_and_options(inputs: AttentionInputs) -> tuple:
    masks = (inputs.last_key, inputs.key_is_valid, inputs.first_key, inputs.visible)
    return (*masks, inputs.activation, inputs.normalization, inputs.scaling)


def _log_count(inputs: AttentionInputs) -> torch.Tensor | None:
    """Returns the term that sigmoid subtracts from the scores, or `None`."""
    is_subtracted = get_attention_activation(inputs.activation).subtract_log_count and inputs.normalization == "none"
    return inputs.visible_count.clamp(min=1).float().log() if is_subtracted else None


attention = DifferentiableAttention(_attention, _attention_backward)


def attention_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs
) -> tuple[torch.Tensor, None]:
    """Computes what `tiled_attention_forward` computes, and softmax.

    Raises `ValueError` if this backend was requested by name and the C++ code does not support the call.
    """
    states = in_autocast_precision(query, key, value)
    query, key, value = states
    is_supported = (
        query.dtype == key.dtype == value.dtype
        and key.shape == value.shape
        and all(tensor.device.type == "cpu" for tensor in states)
        and not (dropout and module.training)
        and _supports(query.dtype, query.shape[-1])
    )
    if not is_supported:
        if module.config._attn_implementation == AUTOMATIC:
            # Unlike the embeddings, this layer is on another device, or its cache has another dtype
            other = tiled_attention_forward if module.activation.is_elementwise else eager_attention_forward
            return other(module, *states, attention_mask, scaling, dropout)[0], None
        raise ValueError(
            f"attn_implementation='nlq_cpp' (layer {module.layer_idx}) computes float32 and bfloat16, with heads of "
            "an even size, on a CPU with AVX-512 and a C++ compiler, without dropout; use 'nlq' or 'eager'"
        )
    if module.activation.name == "softmax":
        return attention.attend(module, *states, attention_mask, scaling, dropout), None
    return attend_in_tiles(attention, module, *states, attention_mask, scaling, dropout), None


def _supports(dtype: torch.dtype, head_dim: int) -> bool:
    if dtype == torch.bfloat16:
        return head_dim % 2 == 0 and _multiplies(True)  # it is multiplied in pairs
    return dtype == torch.float32 and _multiplies(False)


def computes_attention(request: AttentionRequest) -> bool:
    """Tells whether `attention_forward` supports a layer, and a call with the tensors of the request."""
    if request.activation.name not in (*ACTIVATIONS, "softmax") or request.sink is not None:
        return False
    if request.device is None:
        return True
    # PyTorch's own kernels are as fast for a single query
    return request.device.type == "cpu" and request.queries > 1 and _supports(request.dtype, request.head_dim)


BACKEND = AttentionBackend(attention_forward, computes_attention, has_dropout=False, is_portable=False)


def computes_one_query(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others
) -> bool:
    """Tells whether `one_query` supports a call. Compiled models fuse PyTorch's operators instead."""
    if module.activation.name not in ACTIVATIONS or torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if any(states.dtype != torch.float32 or states.device.type != "cpu" for states in (query, key, value)):
        return False
    fits = key.shape == value.shape and query.shape[::3] == key.shape[::3] and key.numel() > 0
    return fits and forward_ad.unpack_dual(query).tangent is None and is_built()


def one_query(module, query, key, value, attention_mask, scaling) -> torch.Tensor:
    """Computes what `one_query_by_pytorch` computes."""
    activation, normalization = module.activation, module.normalization
    visible, count = read_visible(attention_mask, query, key, module.is_causal)
    count = count if isinstance(count, torch.Tensor) else None  # else every query sees all keys
    has_bias = activation.subtract_log_count and normalization == "none"
    options = (activation.name, normalization, has_bias, scaling)
    return operators.one_query(query, key, value, visible, count, *options)


def computes_loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> bool:
    """Tells whether the operator `loss` supports a call."""
    has_dtype = logits.dtype in (torch.float32, torch.bfloat16)
    return has_dtype and logits.device.type == "cpu" and logits.numel() > 0 and is_built()


def _new_attention(query, key, value, bias, inverse_count, last_key, key_is_valid, first_key, visible, *options):
    batch, heads, queries, head_dim = query.shape
    output = query.new_empty(batch, queries, heads, head_dim)
    has_remainder = options[1] == "sum" and query.dtype == torch.bfloat16
    remainder = torch.empty_like(output) if has_remainder else output.new_empty(0)
    return output, remainder, query.new_empty(batch, heads, queries, dtype=torch.float32)


def _new_gradients(gradient, query, key, value, *others):
    return tuple(states.new_empty(states.shape) for states in (query, key, value))


# They make the empty results of operators in a compiled graph
FAKES = {"attention": _new_attention, "attention_backward": _new_gradients}

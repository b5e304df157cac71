"""Operations with several kernels, and attention in linear memory as an operator of PyTorch.

Remote code computes everything by PyTorch. The installed package adds kernels in front of PyTorch's function.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .masking_nlq import Visibility, read_mask


class Kernel(NamedTuple):
    name: str
    function: Callable
    computes: Callable[..., bool]


# The kernels that this process has used, by operation
_used: dict[str, set[str]] = {}


@torch.compiler.assume_constant_result
def record_use(operation: str, kernel: str) -> None:
    _used.setdefault(operation, set()).add(kernel)


def used_kernels() -> dict[str, list[str]]:
    return {operation: sorted(names) for operation, names in sorted(_used.items())}


def forget_used_kernels() -> None:
    _used.clear()


class Operation:
    """A function that the first kernel computes that can; PyTorch's, which always can, comes last."""

    def __init__(self, name: str, function: Callable):
        self.name = name
        self.kernels = [Kernel("pytorch", function, lambda *inputs: True)]

    def add(self, kernel: Kernel) -> None:
        self.kernels.insert(0, kernel)

    def choose(self, *inputs) -> Kernel:
        kernel = next(kernel for kernel in self.kernels if kernel.computes(*inputs))
        record_use(self.name, kernel.name)
        return kernel

    def __call__(self, *inputs):
        return self.choose(*inputs).function(*inputs)


class OnceDifferentiable(torch.autograd.Function):
    """Passes a gradient on in the graph of `anchor`, and raises `RuntimeError` for its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient, anchor, message):
        return gradient.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.message = inputs[2]

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError(ctx.message)


def operator_namespace(files: Iterable[Path]) -> str:
    """Returns a namespace with a hash of these files: the process may have loaded other revisions."""
    return f"nlq_{hashlib.sha256(b''.join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]}"


NAMESPACE = operator_namespace(Path(__file__).parent.glob("*_nlq.py"))


def define_operator(name: str, schema: str, function: Callable, fake: Callable) -> Callable:
    """Returns an operator that `torch.compile` keeps as one node; `fake` makes empty results."""
    operators = getattr(torch.ops, NAMESPACE)
    if not hasattr(operators, name):  # equal code may have defined it
        # A recorded CUDA graph cannot read sizes from the device
        options = {"mutates_args": (), "schema": schema, "tags": (torch.Tag.cudagraph_unsafe,)}
        torch.library.custom_op(f"{NAMESPACE}::{name}", function, **options).register_fake(fake)
    return getattr(operators, name).default


class AttentionInputs(NamedTuple):
    """The inputs of one forward pass of attention, as arguments of an operator."""

    query: Tensor  # (batch, heads, query, head_dim)
    key: Tensor  # (batch, key_value_heads, key, head_dim), as the value
    value: Tensor
    query_bias: Tensor | None  # the fields of a `ScoreBias`
    key_bias: Tensor | None
    visible_count: Tensor  # (batch or 1, 1 or heads, query), how many keys each query sees
    last_key: Tensor | None  # the fields of a `Visibility`
    key_is_valid: Tensor | None
    first_key: Tensor | None
    visible: Tensor | None  # a boolean mask in its place, (batch or 1, 1 or heads, query, key)
    seed: Tensor | None  # (), from which dropout draws
    activation: str  # its name in the table
    normalization: str
    scaling: float
    dropout: float
    first_offset: int | None = None  # the fields of a `Visibility`
    last_offset: int | None = None


_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", float: "float", int | None: "SymInt?"}
SCHEMA = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in AttentionInputs.__annotations__.items())
# Differentiable inputs come first, inputs that are not tensors last
_STATES, _OPTIONS = 5, 6
_NO_SECOND_DERIVATIVE = "this attention backend has no second derivative; set attn_implementation='eager'"


class DifferentiableAttention:
    """A forward and a backward pass as one differentiable function.

    `forward` maps `AttentionInputs` to the output and tensors for `backward`, which maps the gradient of the output,
    the inputs and the results of `forward` to the gradients of query, key, value and perhaps biases. The passes read
    the seed on `seed_device`, by default the query's.
    """

    def __init__(self, forward: Callable, backward: Callable, seed_device: str | None = None):
        self.forward, self.seed_device = forward, seed_device

        class Attention(torch.autograd.Function):
            # Forward mode would skip a backward formula of the operator
            generate_vmap_rule = True

            @staticmethod
            def forward(*inputs):
                return forward(AttentionInputs(*inputs))

            @staticmethod
            def setup_context(ctx, inputs, outputs):
                tensors, ctx.options = inputs[:-_OPTIONS], inputs[-_OPTIONS:]
                ctx.mark_non_differentiable(*outputs[1:])
                ctx.save_for_backward(*tensors, *outputs)

            @staticmethod
            def backward(ctx, gradient, *_):
                saved, count = ctx.saved_tensors, len(AttentionInputs._fields)
                inputs = AttentionInputs(*saved[: count - _OPTIONS], *ctx.options)
                with torch.no_grad():
                    gradients = backward(gradient, inputs, saved[count - _OPTIONS :])
                if torch.is_grad_enabled():  # `create_graph=True`
                    anchor = sum(states[:0].sum() for states in inputs[:_STATES] if states is not None)
                    gradients = [OnceDifferentiable.apply(grad, anchor, _NO_SECOND_DERIVATIVE) for grad in gradients]
                # An operator cannot return None as the gradient of a missing bias
                gradients = [None if states is None else grad for states, grad in zip(inputs[:_STATES], gradients)]
                return (*gradients, *[None] * (count - len(gradients)))

        self.function = Attention

    def attend(self, module, query, key, value, attention_mask, scaling, dropout, score_bias=None) -> Tensor:
        """Returns `(batch, query, heads, head_dim)`, from the arguments of a backend's function."""
        mask, visible_count = read_mask(attention_mask, query, key, module.is_causal)
        masks, offsets = (None, None, None, mask), (None, None)
        if isinstance(mask, Visibility):
            masks = (mask.last_key, mask.key_is_valid, mask.first_key, None)
            offsets = (mask.first_offset, mask.last_offset)
        dropout = dropout if module.training else 0.0
        seed = torch.randint(2**62, (), device=self.seed_device or query.device) if dropout > 0.0 else None
        options = (module.activation.name, module.normalization, float(scaling), float(dropout), *offsets)
        inputs = AttentionInputs(query, key, value, *score_bias or (None, None), visible_count, *masks, seed, *options)
        # Dynamo (torch 2.13) fails on such a class without gradients
        tensors = [states for states in inputs[:_STATES] if states is not None]
        has_gradient = torch.is_grad_enabled() and any(states.requires_grad for states in tensors)
        is_plain = torch.compiler.is_compiling() and not has_gradient
        output, *_ = self.forward(inputs) if is_plain else self.function.apply(*inputs)
        return output


def autocast_dtype(states: Tensor) -> torch.dtype:
    """Returns the dtype that autocast casts a tensor to."""
    device_type = states.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # which raises on a meta device
        return torch.get_autocast_dtype(device_type)
    return states.dtype


def in_autocast_precision(*states: Tensor) -> list[Tensor]:
    """Casts tensors as autocast would, which does not know our operators."""
    return [tensor.to(autocast_dtype(tensor)) for tensor in states]

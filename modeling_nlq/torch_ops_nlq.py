"""PyTorch operators of attention in linear memory.

Each pass is one operator of `torch.library`, which `torch.compile` keeps as one node. An exporting model calls none of them
(`backends_nlq.find_backend`). Both passes take the query, key and value, a `ScoreBias` where they know one, the number of keys
that each query sees, the fields of a `Visibility` or a boolean mask, a seed for dropout, and the options.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from .dispatch_nlq import OnceDifferentiable
from .masking_nlq import Visibility, read_mask
from .parts_base_nlq import ScoreBias


def operator_namespace(files: Iterable[Path]) -> str:
    """Returns the namespace of operators that these files define.

    Operators belong to the whole process, which may have loaded other revisions of this code. The hash of all its files tells
    them apart, and equal code shares operators.
    """
    return f"nlq_{hashlib.sha256(b''.join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]}"


NAMESPACE = operator_namespace(Path(__file__).parent.glob("*_nlq.py"))
_NO_SECOND_DERIVATIVE = "this attention backend has no second derivative; set attn_implementation='eager', which has one"


class DifferentiableAttention:
    """A forward and a backward pass as one differentiable function.

    Args:
        forward: `(query, key, value, visible_count, query_index, key_is_valid, first_key, visible, seed, activation,
            normalization, scaling, dropout)` to the output `(batch, query, heads, head_dim)` and other tensors for backward.
            Its operators need no gradients of their own. With `has_bias`, the bias of queries and that of keys follow the
            value, or `None` twice.
        backward: the gradient of the output, query, key, value (and biases), all results of `forward`, and the rest of its
            arguments, to the gradients of query, key and value (and biases).
        seed_device: where the passes read the seed: `"cpu"`, or that of the query if `None`.
        has_bias: whether they know a bias of the scores.
    """

    def __init__(self, forward: Callable, backward: Callable, seed_device: str | None = None, has_bias: bool = False):
        self.forward, self.backward, self.seed_device, self.has_bias = forward, backward, seed_device, has_bias
        states = 5 if has_bias else 3

        class Attention(torch.autograd.Function):
            # Forward-mode differentiation would silently skip a backward formula of the operator itself; it refuses this class
            generate_vmap_rule = True

            @staticmethod
            def forward(*inputs):
                return forward(*inputs)

            @staticmethod
            def setup_context(ctx, inputs, outputs):
                tensors, ctx.options = inputs[:-4], inputs[-4:]
                ctx.mark_non_differentiable(*outputs[1:])
                ctx.save_for_backward(*tensors[:states], *outputs, *tensors[states:])

            @staticmethod
            def backward(ctx, gradient, *_):
                saved = ctx.saved_tensors
                with torch.no_grad():
                    gradients = backward(gradient, *saved, *ctx.options)
                if torch.is_grad_enabled():  # `create_graph=True`
                    anchor = sum(one[:0].sum() for one in saved[:states] if one is not None)
                    gradients = [OnceDifferentiable.apply(one, anchor, _NO_SECOND_DERIVATIVE) for one in gradients]
                # An operator cannot return None for a bias that there is not
                given = (None if one is None else other for one, other in zip(saved[:states], gradients))
                return (*given, *[None] * 10)

        self.function = Attention

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Visibility | torch.Tensor | None,
        scaling: float,
        dropout: float,
        score_bias: ScoreBias | None = None,
    ) -> torch.Tensor:
        """Returns the output `(batch, query, heads, head_dim)`; the arguments are those of the backends' functions."""
        mask, visible_count = read_mask(attention_mask, query, key)
        if isinstance(mask, Visibility):
            masks = (mask.query_index, mask.key_is_valid, mask.first_key, None)
        else:
            masks = (None, None, None, mask)
        dropout = dropout if module.training else 0.0
        seed = torch.randint(2**62, (), device=self.seed_device or query.device) if dropout > 0.0 else None
        options = (module.activation.name, module.normalization, float(scaling), float(dropout))
        # Dynamo (torch 2.13) fails on such a class without gradients, where the operator alone is enough
        states = [query, key, value]
        if self.has_bias:
            states += [None, None] if score_bias is None else score_bias
        has_gradient = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in states)
        is_plain = torch.compiler.is_compiling() and not has_gradient
        function = self.forward if is_plain else self.function.apply
        output, *_ = function(*states, visible_count, *masks, seed, *options)
        return output


class AttentionOperators(DifferentiableAttention):
    """The same of two Python functions, which become operators.

    Args:
        name: name of the forward operator. The name of the backward operator ends in `_backward`.
        forward, backward, seed_device, has_bias: as in `DifferentiableAttention`.
        new_results: makes the results of `forward`, empty, from its arguments.
        new_gradient: makes an empty gradient of one of the first arguments, with the strides that `backward` returns.
        tags: PyTorch's tags of both operators.
        namespace: namespace of the operators.
    """

    def __init__(
        self,
        name: str,
        forward: Callable,
        backward: Callable,
        new_results: Callable[..., tuple[torch.Tensor, ...]],
        new_gradient: Callable[[torch.Tensor], torch.Tensor],
        tags: Sequence[torch.Tag] = (),
        seed_device: str | None = None,
        namespace: str = NAMESPACE,
        has_bias: bool = False,
    ):
        if not hasattr(operators := getattr(torch.ops, namespace), name):
            options = {"mutates_args": (), "tags": tuple(tags)}
            definition = torch.library.custom_op(f"{namespace}::{name}", forward, **options)
            backward_definition = torch.library.custom_op(f"{namespace}::{name}_backward", backward, **options)

            definition.register_fake(new_results)

            @backward_definition.register_fake
            def _(gradient, *inputs):
                return tuple(map(new_gradient, inputs[: 5 if has_bias else 3]))

        passes = getattr(operators, name).default, getattr(operators, f"{name}_backward").default
        super().__init__(*passes, seed_device, has_bias)


def autocast_dtype(states: torch.Tensor) -> torch.dtype:
    """Returns the type that autocast casts a tensor to, if it is on; else that of the tensor."""
    device_type = states.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # which raises on a meta device
        return torch.get_autocast_dtype(device_type)
    return states.dtype


def in_autocast_precision(*states: torch.Tensor) -> list[torch.Tensor]:
    """Casts the tensors as autocast would, if it is on. It does not know our operators."""
    return [tensor.to(autocast_dtype(tensor)) for tensor in states]

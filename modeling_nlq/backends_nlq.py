"""Who computes attention: the table of backends, what each can do, and the automatic choice among them.

`attention_activation` says what the weights are, `attn_implementation` how they are computed. No backend may compute anything
else than it was asked for: what it cannot do is an error, never softmax in silence.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import (
    compile_friendly_flex_attention,
    flex_attention_forward,
    get_flex_attention_lse_kwargs,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import repeat_kv
from transformers.utils import logging

from .attention_nlq import (
    AUTOMATIC,
    AttentionActivation,
    Visibility,
    counts_as_zero,
    eager_attention_forward,
    keep_from_overflow,
)
from .linear_nlq import linear_attention
from .tiled_nlq import tiled_attention_forward
from .triton_nlq import refusal, triton_attention_forward


try:
    import adasplash
except ImportError:
    adasplash = None


logger = logging.get_logger(__name__)


def sdpa_with_sink_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Softmax by PyTorch's fused kernels, with the layer's sink if it has one.

    The sink is one more key before all others, whose value is 0. A learned logit `b` needs one more column: 1 in the sink's
    key, 0 in the other keys, `b` in every query; more columns of 0 keep the head's width a multiple of 8, which CUDA's kernels
    want. Exact, for a term `exp(b)` in the denominator is all that this adds.

    Args:
        module: the attention layer.
        query: `(batch, heads, query, head_dim)`.
        key, value: `(batch, key_value_heads, key, head_dim)`.
        attention_mask: booleans `(batch, 1 or heads, query, key)`, or `None`: then several queries see the keys up to their own
            place, counted from the first key, and a single query sees all keys.
        scaling: factor of the scores.
        dropout: probability of dropping a weight.

    Returns:
        The output `(batch, query, heads, head_dim)`, and no weights.
    """
    if query.shape[0] == 0:  # Transformers' own leaves a size open there
        return eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout)[0], None
    if scaling <= 0.0:
        query, scaling = query * scaling, 1.0  # PyTorch's causal kernel hides keys before it scales: NaN from 0 times infinity
    if module.attention_sink is None:
        inputs = (module, query, key, value, attention_mask)
        return sdpa_attention_forward(*inputs, scaling=scaling, dropout=dropout, **kwargs)
    head_dim = query.shape[-1]
    pad = nn.functional.pad
    is_learned = module.attention_sink == "learned"
    columns = 8 - head_dim % 8 if is_learned else 0
    key, value = pad(key, (0, columns, 1, 0)), pad(value, (0, columns, 1, 0))
    if is_learned:
        # The scaling moves into the query, which the logit joins unscaled
        logit = module.sink.to(query.dtype)[None, :, None, None].expand(*query.shape[:-1], 1)
        query, scaling = pad(torch.cat([query * scaling, logit], dim=-1), (0, columns - 1)), 1.0
        key[:, :, 0, head_dim] = 1.0
    is_aligned = attention_mask is None and query.shape[2] > 1
    if is_aligned:
        query = pad(query, (0, 0, 1, 0))  # a query in the sink's place, so that each still sees the keys up to its own
    elif attention_mask is not None:
        attention_mask = pad(attention_mask, (1, 0), value=True)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    return output[:, int(is_aligned) :, :, :head_dim].contiguous(), None


def log_function(activation: AttentionActivation, scores: torch.Tensor) -> torch.Tensor:
    """`log phi(scores)`, minus infinity where `phi` counts as 0, with a gradient of 0 there instead of none."""
    weights = activation.function(scores)
    is_zero = counts_as_zero(weights)
    return torch.where(is_zero, -torch.inf, torch.where(is_zero, 1.0, weights).log())


def flex_attention_with_log_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask,
    scaling: float,
    dropout: float = 0.0,
    visible_count: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax, and every activation that is never negative, by PyTorch's FlexAttention.

    FlexAttention normalises `exp` of its scores. Given `log phi(s)` for a score it returns the mean of the values weighted with
    `phi`, and the logarithm of the sum of `phi`, which takes the normaliser out again where another one is asked for (the idea
    is that of https://github.com/meta-pytorch/attention-gym).

    Args:
        module: the attention layer.
        query: `(batch, heads, query, head_dim)`.
        key, value: `(batch, key_value_heads, key, head_dim)`.
        attention_mask: Transformers' `BlockMask`.
        scaling: factor of the scores.
        dropout: must be 0.
        visible_count: `(batch or 1, query)`, how many keys each query sees.

    Returns:
        The output `(batch, query, heads, head_dim)`, and nothing of use.

    Raises:
        ValueError: on the CPU, for gradients, for a sink and for another normaliser than `"sum"`; and for a caller's own block
            mask where the number of visible keys is needed.
    """
    activation, normalization = module.activation, module.normalization
    _check_flex_attention_on_cpu(module, query, key, value)
    if activation.name == "softmax" and module.sink is None:
        inputs = (module, query, key, value, attention_mask)
        output, _ = flex_attention_forward(*inputs, scaling=scaling, **kwargs)
        return output, None
    needs_count = normalization == "length" or (normalization == "none" and activation.subtract_log_count)
    if needs_count and visible_count is None:
        raise ValueError(
            f"attn_implementation='flex_attention' cannot count the keys that a BlockMask shows, which attention_activation="
            f"{activation.name!r} normalised by {normalization!r} needs; give a padding mask"
        )
    log_count = None
    if needs_count:
        visible_count = visible_count.expand(query.shape[0], -1).clamp(min=1).float()
        log_count = visible_count.log() if normalization == "none" else None

    def score_mod(score, batch, head, query_index, key_index):
        if log_count is not None:
            score = score - log_count[batch, query_index]
        return score if activation.name == "softmax" else log_function(activation, score)

    query = keep_from_overflow(query, key, scaling, activation, normalization)
    needs_sum = normalization != "sum" or module.sink is not None
    result = compile_friendly_flex_attention(
        query,
        key,
        value,
        training=module.training,
        score_mod=score_mod,
        block_mask=attention_mask,
        enable_gqa=key.shape[1] != query.shape[1],
        scale=scaling,
        **get_flex_attention_lse_kwargs(needs_sum),
    )
    if not needs_sum:
        return result.transpose(1, 2).contiguous(), None
    output, auxiliary = result
    if activation.name == "softmax":
        factor = torch.sigmoid(auxiliary.lse - module.sink.float()[:, None])  # sum / (sum + exp(sink))
    elif normalization == "length":
        factor = auxiliary.lse.exp() / visible_count[:, None]
    else:
        factor = auxiliary.lse.exp()
    output = (output * factor[..., None]).to(query.dtype)
    return output.transpose(1, 2).contiguous(), None


def _check_flex_attention_on_cpu(module: nn.Module, *inputs: torch.Tensor) -> None:
    """PyTorch's FlexAttention has no gradients on the CPU, and its compiled kernel returns no log-sum-exp there."""
    if inputs[0].device.type != "cpu":
        return
    refused = None
    if module.attention_sink is not None:
        refused = f"attention_sink={module.attention_sink!r}"
    elif module.normalization != "sum":
        refused = f"attention_activation={module.activation.name!r} normalised by {module.normalization!r}"
    elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        refused = "gradients"
    if refused is not None:
        asked = (module.activation, module.attention_sink)
        elsewhere = ("flex_attention", "nlq_triton")
        able = [name for name, row in ATTENTION_BACKENDS.items() if name not in elsewhere and row.computes(*asked)]
        raise ValueError(
            f"attn_implementation='flex_attention' cannot compute {refused} on the CPU (layer {module.layer_idx}); use one of "
            f"{', '.join((AUTOMATIC, *able))}"
        )


def sparse_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Visibility | torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Projections onto the simplex: entmax15 by the kernel of `adasplash` where that can do it, the rest as `eager` does.

    The kernel needs CUDA and takes causal texts without padding, packing or a cache, of a length that is a power of 2 and at
    least 64, and heads of some widths; its memory is linear in the length. Arguments and the first result are those of
    `eager_attention_forward`; there are no weights.
    """
    is_plain = attention_mask is None or (
        isinstance(attention_mask, Visibility) and attention_mask.key_is_valid is None and attention_mask.document_start is None
    )
    length, head_dim = query.shape[2:]
    fits = length == key.shape[2] >= 64 and length.bit_count() == 1 and head_dim in (16, 32, 64, 128, 256)
    is_entmax15 = module.activation.name == "entmax15" and dropout == 0.0
    if adasplash is not None and query.is_cuda and is_entmax15 and is_plain and fits:
        # It scales by 1 / sqrt(head_dim)
        inputs = [query * (scaling * math.sqrt(head_dim))]
        inputs += [repeat_kv(states, module.num_key_value_groups) for states in (key, value)]
        output = adasplash.adasplash(*(states.contiguous() for states in inputs), is_causal=True)
        return output.transpose(1, 2).contiguous(), None
    output, _ = eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    return output, None


@dataclass(frozen=True)
class AttentionBackend:
    """One row of the table of backends.

    Attributes:
        function: the attention function, with the arguments of Transformers' own.
        computes: whether it computes an activation with an `attention_sink`.
        has_dropout: whether it drops weights in training.
        weights: what comes of `output_attentions=True`: the weights are `"returned"`; `None` in their place, with a warning, as
            everywhere in Transformers (`"omitted"`); or an error (`"refused"`).
        takes_visibility: whether its mask is a `Visibility`, and not a tensor or block mask as Transformers makes it.
    """

    function: Callable
    computes: Callable[[AttentionActivation, str | None], bool]
    has_dropout: bool = True
    weights: Literal["returned", "omitted", "refused"] = "refused"
    takes_visibility: bool = False

    def can(self, activation: AttentionActivation, sink: str | None, dropout: float, needs_weights: bool) -> bool:
        """Whether it does all that a layer asks for in one call."""
        if not self.computes(activation, sink) or (needs_weights and self.weights == "refused"):
            return False
        return self.has_dropout or dropout == 0.0


def _softmax_without_sink(activation: AttentionActivation, sink: str | None) -> bool:
    return activation.name == "softmax" and sink is None


_flash_attention = AttentionBackend(flash_attention_forward, _softmax_without_sink, weights="omitted")
_other = AttentionBackend(sdpa_attention_forward, _softmax_without_sink, weights="omitted")
ATTENTION_BACKENDS = {
    "eager": AttentionBackend(
        # Of linear layers it takes the parallel form, which has no weights to return
        eager_attention_forward,
        lambda activation, sink: True,
        weights="returned",
        takes_visibility=True,
    ),
    "sdpa": AttentionBackend(sdpa_with_sink_forward, lambda activation, sink: activation.name == "softmax", weights="omitted"),
    "flash_attention_2": _flash_attention,
    "flash_attention_3": _flash_attention,
    "flash_attention_4": _flash_attention,
    "flex_attention": AttentionBackend(
        flex_attention_with_log_forward,
        lambda activation, sink: activation.non_negative and activation.kind in ("softmax", "elementwise"),
        has_dropout=False,
    ),
    "nlq_tiled": AttentionBackend(
        tiled_attention_forward, lambda activation, sink: activation.is_elementwise, takes_visibility=True
    ),
    "nlq_triton": AttentionBackend(
        triton_attention_forward,
        lambda activation, sink: activation.is_elementwise and activation.triton_body is not None,
        takes_visibility=True,
    ),
    "nlq_sparse": AttentionBackend(
        sparse_attention_forward, lambda activation, sink: activation.kind == "simplex", takes_visibility=True
    ),
    # Linear layers keep a state instead of keys and values, so they call `linear_attention` themselves
    "nlq_linear": AttentionBackend(
        linear_attention, lambda activation, sink: activation.kind == "linear", has_dropout=False, takes_visibility=True
    ),
}
# The backends that the automatic choice tries, in this order. The last one computes everything. On CUDA `use_fused_kernels`
# takes `nlq_triton` in the place of `nlq_tiled`.
PREFERENCE = ("sdpa", "nlq_tiled", "nlq_sparse", "nlq_linear", "eager")


def find_backend(
    implementation: str | None,
    layers: Sequence[int],
    activation: AttentionActivation,
    sink: str | None,
    dropout: float = 0.0,
    needs_weights: bool = False,
) -> str:
    """The name of the backend that computes layers in one call: the guard against a softmax nobody asked for.

    A name that is not in the table, as that of a kernel on the Hub, stands for softmax without sinks: all such functions return
    that, whatever they are asked for.

    Args:
        implementation: the value of `attn_implementation`; `None` stands for `"eager"`.
        layers: the layers' numbers, for the message.
        activation: the layers' activation.
        sink: the layers' `attention_sink`.
        dropout: their dropout probability in this call.
        needs_weights: whether this call returns the weights.

    Raises:
        ValueError: if the implementation cannot do what is asked; names what can.
    """
    if activation.kind == "linear" and needs_weights:
        raise ValueError(
            f"output_attentions=True: attention_activation='linear_attention' (layer {', '.join(map(str, layers))}) has no "
            "weights to show, for it never forms them; leave output_attentions out, or use another activation there"
        )
    asked = (activation, sink, dropout, needs_weights)
    name = implementation or "eager"
    if name == AUTOMATIC:
        names = [name for name in PREFERENCE if not needs_weights or ATTENTION_BACKENDS[name].weights == "returned"]
        return next(name for name in names if ATTENTION_BACKENDS[name].can(*asked))
    backend = ATTENTION_BACKENDS.get(name, _other)
    if backend.can(*asked):
        return name
    if not backend.computes(activation, sink):
        refused = f"attention_activation={activation.name!r}" + (f" with attention_sink={sink!r}" if sink else "")
    elif needs_weights and backend.weights == "refused":
        refused = "the weights that output_attentions=True asks for"
    else:
        refused = f"attention_dropout={dropout}"
    choices = ", ".join((AUTOMATIC, *(other for other, backend in ATTENTION_BACKENDS.items() if backend.can(*asked))))
    raise ValueError(
        f"attn_implementation={name!r} cannot compute {refused} (layer {', '.join(map(str, layers))}); use one of {choices}"
    )


def use_fused_kernels(name: str, activation: AttentionActivation, query: torch.Tensor) -> str:
    """The automatic choice once the query is there: `nlq_triton` for `nlq_tiled` on CUDA, where it can; else a warning, once.

    Args:
        name: what `find_backend` chose.
        activation: the layer's activation.
        query: `(batch, heads, query, head_dim)`.
    """
    if name != "nlq_tiled" or query.device.type != "cuda":
        return name
    reason = refusal(activation, query.device, query.dtype, query.shape[-1])
    if reason is None:
        return "nlq_triton"
    if not torch.compiler.is_compiling():
        logger.warning_once(f"attn_implementation='nlq' uses nlq_tiled, which is slower: nlq_triton {reason}")
    return name


def _of_nlq_models_only(*args, **kwargs):
    raise ValueError("the attention implementations 'nlq' and 'nlq_...' are those of NLQ models: other models cannot use them")


# Transformers accepts the names it finds in these two tables. They belong to the whole process, where several revisions of this
# code may be loaded, so nothing is looked up there: NLQ's layers ask the table above.
for _name in (AUTOMATIC, *(name for name in ATTENTION_BACKENDS if name.startswith(AUTOMATIC))):
    ALL_ATTENTION_FUNCTIONS.register(_name, _of_nlq_models_only)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, sdpa_mask)  # for layers of softmax, which "nlq" hands to SDPA

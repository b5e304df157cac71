"""The projections of an attention layer: the table of their terms, the modules that compute them, rotary positions.

Shapes: d is `hidden_size`, r is `projection_bottleneck_size`.

`f(X) = LayerNorm(act(RMSNorm(X) W1) W2)`, `W1: d x r`, `W2: r x output` (Karbevski 2026, arXiv 2603.13381). With the
default `r = d / 2` it has `d^2 + O(d)` parameters, as many as the matrix it replaces.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as rotate_part
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_whole


@dataclass(frozen=True)
class Projection:
    """One row of the table of projections: the terms of the sum.

    Attributes:
        identity: adds the input `X` itself, so the output is as wide as the input.
        linear: adds `X W`.
        bottleneck: adds `f(X)`.
        starts_at_zero: whether the output LayerNorm of `f` starts with gain and bias 0, so that `f = 0` at first.
    """

    identity: bool = False
    linear: bool = False
    bottleneck: bool = False
    starts_at_zero: bool = False

    def default_attention_scaling(self, head_dim: int) -> float:
        """Returns the factor of the scores when this projection computes the queries.

        With an identity term it is half of the usual factor. The paper has `Q(X) = (X + f(X)) / 2`; here the factor of
        the scores contains the 1/2, and `Q(X) = X + f(X)`.
        """
        return (0.5 if self.identity else 1.0) / math.sqrt(head_dim)


PROJECTIONS = {
    "linear": Projection(linear=True),
    "identity": Projection(identity=True),
    "residual": Projection(identity=True, linear=True),
    "nonlinear": Projection(identity=True, bottleneck=True),
    "bottleneck": Projection(bottleneck=True),
    "upcycled": Projection(linear=True, bottleneck=True, starts_at_zero=True),
}


class NLQBottleneck(nn.Module):
    """`f(X) = LayerNorm(act(RMSNorm(X) W1) W2)`.

    Args:
        input_size: d.
        output_size: width of the output.
        bottleneck_size: r.
        activation: a name in Transformers' `ACT2FN`.
        use_bias: whether `W1`, `W2` and the output LayerNorm have biases.
        eps: the epsilon of both norms.
        starts_at_zero: whether the output LayerNorm starts with gain and bias 0.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bottleneck_size: int,
        activation: str,
        use_bias: bool,
        eps: float,
        starts_at_zero: bool = False,
    ):
        super().__init__()
        self.input_norm = nn.RMSNorm(input_size, eps=eps)
        self.fc1 = nn.Linear(input_size, bottleneck_size, bias=use_bias)
        self.activation = ACT2FN[activation]
        self.fc2 = nn.Linear(bottleneck_size, output_size, bias=use_bias)
        self.output_norm = nn.LayerNorm(output_size, eps=eps, bias=use_bias)
        self.output_norm.starts_at_zero = starts_at_zero  # read by `_init_weights`

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(batch, length, input)` -> `(batch, length, output)`."""
        return self.output_norm(self.fc2(self.activation(self.fc1(self.input_norm(hidden_states)))))


def make_terms(layer: PreTrainedConfig, name: str) -> tuple[nn.Linear | None, NLQBottleneck | None]:
    """Makes the terms with weights of one projection, `None` for one that it lacks.

    Args:
        layer: the `NLQConfig` of the layer.
        name: `"query"`, `"key"` or `"value"`.
    """
    projection, linear, bottleneck = PROJECTIONS[getattr(layer, f"{name}_projection")], None, None
    is_query = name == "query"
    input_size = layer.hidden_size if is_query else layer.key_value_input_size
    output_size = (layer.num_query_heads if is_query else layer.num_key_value_heads) * layer.head_dim
    if projection.linear:
        linear = nn.Linear(input_size, output_size, bias=layer.has_bias("query_key_value"))
    if projection.bottleneck:
        bottleneck = NLQBottleneck(
            input_size,
            output_size,
            bottleneck_size=layer.projection_bottleneck_size,
            activation=layer.projection_activation,
            use_bias=layer.use_bias,
            eps=layer.layer_norm_eps,
            starts_at_zero=projection.starts_at_zero,
        )
    return linear, bottleneck


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates queries and keys by their positions (Su et al. 2021, arXiv 2104.09864).

    Args:
        query, key: `(batch, heads, length, head_dim)`.
        cos, sin: `(batch or 1, length, rotated)`. The first `rotated` elements of each head are rotated.
    """
    rotation = rotate_whole if cos.shape[-1] == query.shape[-1] else rotate_part
    return rotation(query, key, cos, sin)

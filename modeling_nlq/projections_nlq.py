"""The table of query, key and value projections, and the module of their nonlinear term.

Shapes: d is `hidden_size`, r is `projection_bottleneck_size`.

`f(X) = LayerNorm(act(RMSNorm(X) W1) W2)`, `W1: d x r`, `W2: r x output` (Karbevski 2026, arXiv 2603.13381). With the default
`r = d / 2` it has `d^2 + O(d)` parameters, as many as the matrix it replaces.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers.activations import ACT2FN


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

        With an identity term it is half of the usual factor. The paper has `Q(X) = (X + f(X)) / 2`; here the factor of the
        scores contains the 1/2, and `Q(X) = X + f(X)`.
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

"""The projections of one attention layer: the table of their terms, and what linear attention has in common with the
others.

Shapes: d is `hidden_size`, r is `projection_bottleneck_size`.

`f(X) = LayerNorm(act(RMSNorm(X) W1) W2)`, `W1: d x r`, `W2: r x output` (Karbevski 2026, arXiv 2603.13381). With the
default `r = d / 2` it has `d^2 + O(d)` parameters, as many as the matrix it replaces.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as rotate_part
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_whole

from .activations_nlq import AttentionActivation, get_attention_activation
from .parts_base_nlq import HOOKS, MLP_HOOKS, AttentionCall, AttentionPart, SplitByHeads, materialized_by, own_heads
from .parts_builtin_nlq import parts_of


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


class NLQAttentionProjections(SplitByHeads):
    """The projections before and after the attention of one layer, shared by `NLQAttention` and `NLQLinearAttention`.

    The parts of the layer change what passes through, in the order of their table.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        # `config` is the global configuration, because only it has the current attention implementation. The switches
        # come from the layer's own copy, which is read here once.
        self.config = config
        layer = self.layer_config(config, layer_idx)
        self.layer_idx = layer_idx
        self.num_heads = layer.num_query_heads
        self.head_dim = config.head_dim
        self.num_key_value_groups = self.num_heads // config.num_key_value_heads
        self.has_rotary_positions = layer.position_embedding == "rope"
        self.scaling = layer.score_scaling
        self.attention_activation = layer.attention_activation
        self.output_scaling = layer.attention_output_scaling

        # diff with Llama: each projection is a sum of terms. A term with weights is a module, and a missing one is
        # `None`
        heads = {"query": self.num_heads, "key": config.num_key_value_heads, "value": config.num_key_value_heads}
        self.projections = {name: PROJECTIONS[getattr(layer, f"{name}_projection")] for name in heads}
        for name, projection in self.projections.items():
            size, linear, bottleneck = heads[name] * self.head_dim, None, None
            input_size = config.hidden_size if name == "query" else layer.key_value_input_size
            if projection.linear:
                linear = nn.Linear(input_size, size, bias=config.has_bias("query_key_value"))
            if projection.bottleneck:
                bottleneck = NLQBottleneck(
                    input_size,
                    size,
                    bottleneck_size=layer.projection_bottleneck_size,
                    activation=layer.projection_activation,
                    use_bias=config.use_bias,
                    eps=config.layer_norm_eps,
                    starts_at_zero=projection.starts_at_zero,
                )
            # The names that Transformers, PEFT and quantizers know belong to plain linear layers only
            self.register_module(f"{name[0]}_proj", linear)
            self.register_module(f"{name[0]}_bottleneck", bottleneck)
        output_size = config.num_attention_heads * self.head_dim
        self.o_proj = nn.Linear(output_size, config.hidden_size, bias=config.has_bias("attention_output"))
        self.o_proj.ends_sublayer = True  # read by `_init_weights`

        # What a layer may have under a name of its own is `None` where it has none
        self.q_norm = self.k_norm = self.head_proj = self.output_activation = self.gate_proj = self.value_gate_proj = (
            None
        )
        parts = {}
        for part in parts_of(layer):
            if part.needs_first_values and layer_idx == 0:
                continue  # they are its own
            for name, module in part.layer_modules(layer).items():
                setattr(self, name, module)
            parts[part.name] = part(layer, layer_idx)
        self.parts = nn.ModuleDict(parts)
        # Names, because copies of the layer on other devices have other modules
        self._names_by_hook = {hook: [name for name, part in parts.items() if part.has_hook(hook)] for hook in HOOKS}
        self.has_score_bias = bool(self._names_by_hook["score_bias"])
        self.has_mlp_hooks = any(self._names_by_hook[hook] for hook in MLP_HOOKS)
        self.materializes = materialized_by(parts.values())
        self.needs_token_context = any(part.needs_token_context for part in parts.values())
        self.needs_first_values = any(part.needs_first_values for part in parts.values())
        self.needs_exact_output = any(part.needs_exact_output for part in parts.values())
        # The first layer hands its values on where another one reads them
        self.returns_values = layer_idx == 0 and config.needs_first_values and not layer.is_cross_attention

    @staticmethod
    def layer_config(config: PreTrainedConfig, layer_idx: int) -> PreTrainedConfig:
        """Returns the switches of the layer."""
        return config.per_layer_config[layer_idx]

    @property
    def activation(self) -> AttentionActivation:
        """The row of the table, found by name: a registered function may be replaced, and few functions can be
        pickled.
        """
        return get_attention_activation(self.attention_activation)

    def parts_with(self, hook: str) -> Sequence[AttentionPart]:
        """Returns the parts that have a hook, in order."""
        names = self._names_by_hook[hook]
        return [self.parts[name] for name in names] if names else ()

    def make_call(self, hidden_states: torch.Tensor, *args) -> AttentionCall:
        """Makes the record of a call; the arguments are its first fields."""
        call = AttentionCall(self, hidden_states, *args)
        for part in self.parts_with("change_input"):
            call.hidden_states = part("change_input", call, call.hidden_states)
        return call

    def own_positions(self, position_embeddings: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...] | None:
        """Returns cosines and sines of rotary positions, or `None` for a layer that has no such positions."""
        return position_embeddings if self.has_rotary_positions else None

    def project(
        self, call: AttentionCall, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns query, key and value of the new tokens, `(batch, heads or groups, length, head_dim)` each.

        Args:
            call: the call, with the input of the layer, `(batch, length, hidden)`. Its `values` are set.
            position_embeddings: what `own_positions` returns, `(batch or 1, length, rotated)` each, of which `rotated`
                is `head_dim` or a part of it.
        """
        query_states = self._apply_projection("query", call.hidden_states)
        states = (query_states, *self.project_source(call, query_states))
        for part in self.parts_with("change_qkv"):
            states = part("change_qkv", call, *states)
        # (batch, length, heads, head_dim) -> (batch, heads, length, head_dim)
        query_states, key_states, value_states = (each.transpose(1, 2) for each in states)
        call.values = value_states if call.source is None else None  # an encoder's are no values of this call's tokens
        if position_embeddings is not None:
            query_states, key_states = rotate(query_states, key_states, *position_embeddings)
        return query_states, key_states, value_states

    def project_source(self, call: AttentionCall, query_states: torch.Tensor) -> list[torch.Tensor]:
        """Returns key and value of the new tokens, `(batch, length, groups, head_dim)` each, after the queries."""
        source = call.hidden_states if call.source is None else call.source
        return [self._apply_projection(name, source) for name in ("key", "value")]

    def _apply_projection(self, name: str, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(batch, length, hidden)` -> `(batch, length, heads, head_dim)`, for the `"query"`, `"key"` or `"value"`."""
        linear, bottleneck = getattr(self, f"{name[0]}_proj"), getattr(self, f"{name[0]}_bottleneck")
        terms = [own_heads(hidden_states, self.tp_mesh, dim=-1)] if self.projections[name].identity else []
        if linear is not None:
            terms.append(linear(hidden_states))
        if bottleneck is not None:
            terms.append(own_heads(bottleneck(hidden_states), self.tp_mesh, dim=-1))
        states = sum(terms[1:], start=terms[0])
        # `unflatten` takes longer
        return states.view(*states.shape[:-1], states.shape[-1] // self.head_dim, self.head_dim)

    def project_output(self, call: AttentionCall, attn_output: torch.Tensor) -> torch.Tensor:
        """`(batch, query, heads, head_dim)` -> `(batch, query, hidden)`."""
        for part in self.parts_with("change_output"):
            attn_output = part("change_output", call, attn_output)
        return self.o_proj(attn_output.flatten(2))

    def change_mlp(self, states: torch.Tensor, factor: torch.Tensor | None, hook: str, call: AttentionCall) -> tuple:
        """Returns states `(batch, query, ...)` as one of the `MLP_HOOKS` changes them, no attention weights, and the
        factor.
        """
        states = (states,) if factor is None else (states, factor)
        for part in self.parts_with(hook):
            changed = part(hook, call, *states)
            states = changed if isinstance(changed, tuple) else (changed,)
        return (states[0], None, *states[1:])

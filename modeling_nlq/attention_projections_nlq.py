"""The projections of one attention layer: query, key and value before the attention, and the output after it."""

from collections.abc import Sequence

import torch
from torch import nn

from .activations_nlq import AttentionActivation, get_attention_activation
from .attention_parts_nlq import HOOKS, MLP_HOOKS, AttentionCall, AttentionPart, materialized_by
from .configuration_nlq import NLQConfig
from .parallel_nlq import own_heads
from .part_table_nlq import parts_of
from .projections_nlq import PROJECTIONS, NLQBottleneck
from .rotary_nlq import rotate


class NLQAttentionProjections(nn.Module):
    """The projections before and after the attention of one layer, shared by `NLQAttention` and `NLQLinearAttention`.

    The parts of the layer change what passes through, in the order of their table.
    """

    tp_mesh = None  # the processes that share the heads

    def __init__(self, config: NLQConfig, layer_idx: int):
        super().__init__()
        # `config` is the global configuration, because only it has the current attention implementation. The switches come from
        # the layer's own copy, which is read here once.
        self.config = config
        layer = config.per_layer_config[layer_idx]
        self.layer_idx = layer_idx
        self.num_heads = layer.num_query_heads
        self.head_dim = config.head_dim
        self.num_key_value_groups = self.num_heads // config.num_key_value_heads
        self.has_rotary_positions = layer.position_embedding == "rope"
        self.scaling = layer.score_scaling
        self.attention_activation = layer.attention_activation
        self.output_scaling = layer.attention_output_scaling

        query_size = self.num_heads * self.head_dim
        key_value_size = config.num_key_value_heads * self.head_dim
        # diff with Llama: each projection is a sum of terms. A term with weights is a module, and a missing one is `None`
        sizes = {"query": query_size, "key": key_value_size, "value": key_value_size}
        self.projections = {name: PROJECTIONS[getattr(layer, f"{name}_projection")] for name in sizes}
        for name, projection in self.projections.items():
            linear = bottleneck = None
            if projection.linear:
                linear = nn.Linear(config.hidden_size, sizes[name], bias=config.has_bias("query_key_value"))
            if projection.bottleneck:
                bottleneck = NLQBottleneck(
                    config.hidden_size,
                    sizes[name],
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
        self.q_norm = self.k_norm = self.head_proj = self.output_activation = self.gate_proj = self.value_gate_proj = None
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
        self.readers_of_first_values = [part.name for part in parts.values() if part.needs_first_values]
        self.needs_exact_output = any(part.needs_exact_output for part in parts.values())
        # The first layer hands its values on where another one reads them
        self.returns_values = layer_idx == 0 and config.needs_first_values

    @property
    def activation(self) -> AttentionActivation:
        """The row of the table, found by name: a registered function may be replaced, and few functions can be pickled."""
        return get_attention_activation(self.attention_activation)

    def parts_with(self, hook: str) -> Sequence[AttentionPart]:
        """Returns the parts that have a hook, in order."""
        names = self._names_by_hook[hook]
        return [self.parts[name] for name in names] if names else ()

    def make_call(self, hidden_states: torch.Tensor, *args) -> AttentionCall:
        """Makes the record of a call; the arguments are its first fields.

        Raises:
            ValueError: if a part needs the values of the first layer, and there are none.
        """
        call = AttentionCall(self, hidden_states, *args)
        if self.readers_of_first_values and call.first_values is None:
            names = ", ".join(self.readers_of_first_values)
            raise ValueError(
                f"{names} (layer {self.layer_idx}) needs first_values, the values of the model's first layer; a program that "
                "calls the layers one by one must pass them on, or call the model instead"
            )
        for part in self.parts_with("change_input"):
            call.hidden_states = part("change_input", call, call.hidden_states)
        return call

    def own_positions(self, position_embeddings: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...] | None:
        """Returns cosines and sines of rotary positions, or `None` for a layer that has no such positions.

        Raises:
            ValueError: if they are missing.
        """
        if self.has_rotary_positions and position_embeddings is None:
            raise ValueError(f"position_embeddings: layer {self.layer_idx} has rotary positions and needs cosines and sines")
        return position_embeddings if self.has_rotary_positions else None

    def project(
        self, call: AttentionCall, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns query, key and value of the new tokens, `(batch, heads or groups, length, head_dim)` each.

        Args:
            call: the call, with the input of the layer, `(batch, length, hidden)`. Its `values` are set.
            position_embeddings: what `own_positions` returns, `(batch or 1, length, rotated)` each, of which `rotated` is
                `head_dim` or a part of it.
        """
        query_states = self._apply_projection("query", call.hidden_states)
        key_states = self._apply_projection("key", call.hidden_states)
        value_states = self._apply_projection("value", call.hidden_states)
        for part in self.parts_with("change_qkv"):
            states = (query_states, key_states, value_states)
            query_states, key_states, value_states = part("change_qkv", call, *states)
        # (batch, length, heads, head_dim) -> (batch, heads, length, head_dim)
        query_states, key_states = query_states.transpose(1, 2), key_states.transpose(1, 2)
        call.values = value_states.transpose(1, 2)
        if position_embeddings is not None:
            query_states, key_states = rotate(query_states, key_states, *position_embeddings)
        return query_states, key_states, call.values

    def _apply_projection(self, name: str, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(batch, length, hidden)` -> `(batch, length, heads, head_dim)`, for the `"query"`, `"key"` or `"value"`."""
        linear, bottleneck = getattr(self, f"{name[0]}_proj"), getattr(self, f"{name[0]}_bottleneck")
        terms = []
        if self.projections[name].identity:
            terms.append(own_heads(hidden_states, self.tp_mesh, dim=-1))
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
        """Returns states `(batch, query, ...)` as one of the `MLP_HOOKS` changes them, no attention weights, and the factor."""
        states = (states,) if factor is None else (states, factor)
        for part in self.parts_with(hook):
            changed = part(hook, call, *states)
            states = changed if isinstance(changed, tuple) else (changed,)
        return (states[0], None, *states[1:])

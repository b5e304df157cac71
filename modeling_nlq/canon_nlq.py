"""Canon layers: each token gets a weighted sum of itself and the three tokens before it (arXiv 2512.17351)."""

import torch
from torch import nn
from transformers import initialization as init

from .attention_parts_nlq import AttentionCall, AttentionPart
from .cache_nlq import keep_rows_together
from .masking_nlq import TokenContext
from .parallel_nlq import own_heads


KERNEL = 4  # tokens of a sum


class ShortConvolution(nn.Module):
    """`x_t + sum_k w_k x_{t-k}` over the tokens of one text, with a weight for each channel."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, KERNEL))
        nn.init.uniform_(self.weight, -0.5, 0.5)

    def initialize(self) -> None:
        init.uniform_(self.weight, -0.5, 0.5)  # PyTorch's own range of a convolution over 4 tokens of one channel

    def forward(
        self, states: torch.Tensor, earlier: torch.Tensor | None, context: TokenContext, mesh=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the sums, and what later tokens need.

        Args:
            states: `(batch, query, width)`, or some of the channels where several processes share the heads.
            earlier: `(batch, 3, width)`, the last tokens before, 0 for none; `None` is 0.
            context: that of the call. Padding is passed over, wherever it is.
            mesh: the processes that share the heads, or `None`.

        Returns:
            The sums in the shape of `states`, and the last 3 tokens that are no padding, `(batch, 3, width)`.
        """
        (batch, length, width), kept = states.shape, KERNEL - 1
        if earlier is None:
            earlier = states.new_zeros(batch, kept, width)
        full = torch.cat([earlier, states], dim=1)
        place = None
        if context.is_valid is not None:  # tokens move together, and padding to the end
            is_valid = nn.functional.pad(context.is_valid, (kept, 0), value=True)
            order = torch.argsort(is_valid.logical_not().byte(), dim=1, stable=True)
            full = full.gather(1, order[..., None].expand_as(full))
            place = (is_valid.cumsum(dim=1)[:, kept:] - 1 - kept).clamp(min=0)[..., None]
        weight = own_heads(self.weight, mesh, dim=0)
        sums = full[:, kept:] * (1.0 + weight[:, -1])
        for back in range(1, KERNEL):
            term = full[:, kept - back : kept - back + length] * weight[:, -1 - back]
            sums = sums + (
                term if context.position_in_document is None else term * (context.position_in_document >= back)[..., None]
            )
        if place is None:
            return sums.to(states.dtype), full[:, length:]
        last = is_valid.sum(dim=1)[:, None] + torch.arange(-kept, 0, device=states.device)
        latest = full.gather(1, last[..., None].expand(-1, -1, width))
        return sums.gather(1, place.expand_as(states)).to(states.dtype), latest


class Canon(AttentionPart):
    """`h + conv(h)` over 4 tokens, at sites that the letters name.

    `"A"`: the input of the attention. `"B"`: queries, keys and values, before norms and positions. `"C"`: the input of the MLP.
    `"D"`: what the MLP's activation gets, of a gated MLP also the factor. The cache keeps 3 tokens for each, in Transformers'
    own layer for convolutions beside keys and values.
    """

    name = "canon"
    formula = "h_t + sum_{k < 4} w_k * h_{t-k}"
    source = "Allen-Zhu 2025, arXiv 2512.17351"
    needs_token_context = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        widths = self.widths(config)
        self.convolutions = nn.ModuleDict({name: ShortConvolution(width) for name, width in widths.items()})
        # The number of each among the states of the cache layer; those of linear attention come first
        first = config.first_conv_state
        self.state_indices = {name: first + index for index, name in enumerate(widths)}

    @classmethod
    def widths(cls, config) -> dict[str, int]:
        """Returns the number of channels of each convolution of a layer."""
        head_dim, inner, sites = config.head_dim, config.intermediate_size, config.canon
        widths = {}
        if "A" in sites:
            widths["attention_input"] = config.hidden_size
        if "B" in sites:
            widths |= {"query": config.num_query_heads * head_dim}
            widths |= dict.fromkeys(("key", "value"), config.num_key_value_heads * head_dim)
        if "C" in sites:
            widths["mlp_input"] = config.hidden_size
        if "D" in sites:
            widths |= dict.fromkeys(("mlp_gate", "mlp_inner") if config.mlp_type == "gated" else ("mlp_inner",), inner)
        return widths

    @classmethod
    def check(cls, config) -> None:
        sites = config.canon
        if not sites or set(sites) - set("ABCD") or list(sites) != sorted(set(sites)):
            raise ValueError(f"canon={sites!r} must be letters out of 'ABCD', each once and in order, such as 'ABCD' or 'AC'")

    @classmethod
    def refuse_paged(cls, config) -> str | None:
        return "the paged cache has no place for the tokens that it keeps"

    @classmethod
    def conv_states(cls, config) -> int:
        return len(cls.widths(config))

    @classmethod
    def kind_of(cls, parameter: str) -> str:
        _, name, _ = parameter.split(".")
        return {"key": "key_value", "value": "key_value", "mlp_gate": "inner", "mlp_inner": "inner"}.get(name, "query")

    def start_without_effect(self, layer) -> str | None:
        for convolution in self.convolutions.values():
            convolution.weight.zero_()
        return None

    def _convolve(self, name: str, call: AttentionCall, states: torch.Tensor, is_split: bool = False) -> torch.Tensor:
        if name not in self.convolutions:
            return states
        if call.token_context.has_own_mask:
            raise ValueError(
                "canon takes no 4-D attention_mask and no BlockMask, which do not say which tokens come before one; give a "
                "padding mask (batch, key), or position_ids of packed documents"
            )
        index, earlier, cache_layer = self.state_indices[name], None, None
        if call.cache is not None:
            cache_layer = self._cache_layer(call)
            if cache_layer.is_conv_states_initialized[index]:
                earlier = cache_layer.conv_states[index].transpose(1, 2)[:, -(KERNEL - 1) :]
                earlier = nn.functional.pad(earlier, (0, 0, KERNEL - 1 - earlier.shape[1], 0))
        mesh = call.tp_mesh if is_split else None
        states, latest = self.convolutions[name](given := states, earlier, call.token_context, mesh)
        if cache_layer is not None:
            kept = latest
            if cache_layer.record_past:  # it may have to go back, and wants all new tokens; padding comes before them
                is_valid = call.token_context.is_valid
                kept = given if is_valid is None else given.masked_fill(~is_valid[..., None], 0.0)
            cache_layer.update_conv_state(kept.transpose(1, 2), state_idx=index, conv_kernel_size=KERNEL - 1)
        return states

    def _cache_layer(self, call: AttentionCall):
        layers, index = call.cache.layers, call.layer.layer_idx
        layer = layers[index] if index < len(layers) else None
        if not hasattr(layer, "update_conv_state"):
            raise ValueError(
                f"canon (layer {index}) needs a cache that stores its tokens: make it by DynamicCache(config=model.config)"
            )
        keep_rows_together(layer)
        return layer

    def change_input(self, call: AttentionCall, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._convolve("attention_input", call, hidden_states)

    def change_qkv(self, call: AttentionCall, query, key, value):
        pairs = zip(("query", "key", "value"), (query, key, value))
        return tuple(self._convolve(name, call, states.flatten(2), is_split=True).view(states.shape) for name, states in pairs)

    def change_mlp_input(self, call: AttentionCall, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._convolve("mlp_input", call, hidden_states)

    def change_mlp_inner(self, call: AttentionCall, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        names = ("mlp_gate", "mlp_inner")[-len(states) :]
        return tuple(self._convolve(name, call, own, is_split=True) for name, own in zip(names, states))

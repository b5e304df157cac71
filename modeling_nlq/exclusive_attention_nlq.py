"""Exclusive attention: a head's output loses what points along the token's own value (arXiv 2603.09078)."""

import torch
from torch import nn

from .attention_parts_nlq import AttentionCall, AttentionPart
from .parallel_nlq import own_heads


class ExclusiveAttention(AttentionPart):
    """`y_i - a_h (y_i . v_i) v_i / |v_i|^2`, with `a = 1` if `"fixed"` and `a_h = tanh(alpha_h)` if `"learned"`."""

    name = "exclusive_attention"
    formula = "y_i - a_h (y_i . v_i) v_i / |v_i|^2"
    source = "arXiv 2603.09078"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        # A norm after the layer would blow up the rounding of what is left
        self.needs_exact_output = config.norm_position in ("output", "sandwich")
        self.alpha = None
        if config.exclusive_attention == "learned":
            self.alpha = nn.Parameter(torch.zeros(config.num_attention_heads))

    @classmethod
    def check(cls, config) -> None:
        if config.differential_attention == "v1":
            raise ValueError(
                f"exclusive_attention={config.exclusive_attention!r}: with differential_attention='v1' a head reads the values "
                "of two groups, and a token has no value of its own there; use 'v2'"
            )

    def start_without_effect(self, layer) -> str | None:
        if self.alpha is None:
            return "the outputs would lose a direction; use 'learned', which starts at 0"
        self.alpha.zero_()
        return None

    def measure(self, call: AttentionCall) -> dict[str, torch.Tensor]:
        return {} if self.alpha is None else {"own_value_taken_out": torch.tanh(self.alpha)}

    def change_output(self, call: AttentionCall, heads: torch.Tensor) -> torch.Tensor:
        values = call.values.transpose(1, 2)[:, :, :, None]  # (batch, query, groups, 1, head_dim)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        direction = nn.functional.normalize(values, dim=-1, eps=torch.finfo(values.dtype).tiny)  # 0 where the value is 0
        by_group = heads.unflatten(2, (values.shape[2], -1))
        along = (by_group * direction).sum(dim=-1, keepdim=True)
        if self.alpha is not None:
            alpha = own_heads(self.alpha, call.tp_mesh, dim=0)
            along = along * torch.tanh(alpha.to(values.dtype)).view(values.shape[2], -1, 1)
        return (by_group - along * direction).to(call.values.dtype).flatten(2, 3)

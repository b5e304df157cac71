"""The forget gate: earlier keys lose score token by token (Forgetting Transformer, arXiv 2503.02130)."""

import functools

import torch
from torch import nn

from .attention_parts_nlq import AttentionCall, AttentionPart, ScoreBias
from .parallel_nlq import own_heads


# Their weights fall to 0 as a score falls, so a key with a low score is forgotten
_FORGETTING = ("softmax", "sigmoid", "softplus", "relu", "relu_squared", "sparsemax", "entmax15")


@functools.cache
def _try_float64(device: torch.device) -> bool:
    """Tells whether a device can sum in float64, by trying: Apple's GPUs cannot, nor can some of Intel's."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).cumsum(dim=0)
    except (RuntimeError, TypeError):
        return False
    return True


@torch.compiler.assume_constant_result
def _has_float64(device: torch.device) -> bool:
    return _try_float64(device)  # a call of its own: Dynamo warns of a cached function and traces what is inside of it


class ForgetGate(AttentionPart):
    """Adds `c_i - c_j` to the scores. `c` is the running sum of `log sigmoid(x w_h + b_h)` over the tokens.

    Padding adds 0, and a difference within a document does not depend on earlier documents. The cache keeps the terms of the
    sum, so it can go back, and a window's can forget. `"fixed"` has no parameters: `sigmoid(b_h) = exp(-1 / T_h)`, with `T`
    from 2 tokens to `max_position_embeddings`, equally spaced in logarithm.
    """

    name = "forget_gate"
    formula = "s_ij + sum_{j < t <= i} log sigmoid(x_t w_h + b_h)"
    source = "Lin et al. 2025, arXiv 2503.02130"
    needs_token_context = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.num_heads, self.longest = config.num_query_heads, config.max_position_embeddings
        self.state_size = config.num_query_heads // config.num_key_value_heads
        self.proj = None
        if config.forget_gate == "learned":
            self.proj = nn.Linear(config.hidden_size, self.num_heads)

    @classmethod
    def check(cls, config) -> None:
        if config.activation.name not in _FORGETTING:
            raise ValueError(
                f"forget_gate={config.forget_gate!r} needs weights that fall to 0 as the score falls, and "
                f"attention_activation={config.activation.name!r} has others; use one of {', '.join(_FORGETTING)}"
            )

    @classmethod
    def split_layers(cls, config) -> dict[str, str]:
        return {"parts.forget_gate.proj": "colwise"} if config.forget_gate == "learned" else {}

    @classmethod
    def refuse_change(cls, before, after) -> str | None:
        is_same = all(getattr(before, name) == getattr(after, name) for name in ("max_position_embeddings", "num_query_heads"))
        if before.forget_gate == "learned" or is_same:
            return None
        return "the rates depend on max_position_embeddings and on the number of query heads"

    def start_without_effect(self, layer) -> str | None:
        return "a gate that forgets nothing has no gradient"

    def token_state(self, call: AttentionCall) -> torch.Tensor:
        batch, length = call.hidden_states.shape[:2]
        if self.proj is None:
            dtype = torch.promote_types(call.hidden_states.dtype, torch.float32)
            options = {"base": self.longest / 2.0, "dtype": dtype, "device": call.hidden_states.device}
            log_gate = -1.0 / (2.0 * torch.logspace(0.0, 1.0, self.num_heads, **options))  # log sigmoid(b) = -1 / T
            log_gate = own_heads(log_gate, call.tp_mesh, dim=0).expand(batch, length, -1)
        else:
            gate = self.proj(call.hidden_states)
            log_gate = nn.functional.logsigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))
        if call.token_context.is_valid is not None:
            log_gate = log_gate.masked_fill(~call.token_context.is_valid[..., None], 0.0)
        return log_gate.unflatten(-1, (-1, self.state_size)).transpose(1, 2)

    def score_bias(self, call: AttentionCall, state: torch.Tensor) -> ScoreBias:
        # In float64, because only differences of these sums count
        dtype = torch.float64 if _has_float64(state.device) else torch.float32
        total = state.transpose(2, 3).flatten(1, 2).cumsum(dim=-1, dtype=dtype)
        return ScoreBias(total[..., call.token_context.query_index], total)

    def measure(self, call: AttentionCall) -> dict[str, torch.Tensor]:
        return {"mean_log_forget_gate": self.token_state(call).mean(dim=(0, 2)).flatten()}

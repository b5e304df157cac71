"""Selective attention: a token can lower the scores that all later queries give an earlier token (arXiv 2410.02703)."""

import torch
from torch import nn
from transformers.utils.import_utils import is_tracing

from .attention_parts_nlq import AttentionCall, AttentionPart


class SelectiveAttention(AttentionPart):
    """`s_ij - sum_{j < k < i} S_kj` in all heads, with `S` the `relu` of the first head's scores.

    `k` is a token, no padding, that sees `j`. A document's first token loses nothing. The cache keeps the sum for each key, and
    forward writes it there, so tokens cannot be taken back. Memory is quadratic in the length.
    """

    name = "selective_attention"
    formula = "s_ij - sum_{j < k < i} relu(s_kj of the first head)"
    source = "Leviathan et al. 2024, arXiv 2410.02703"
    needs_token_context = True
    supports_crop = False
    state_size = 3  # the sum, the number of tokens that it covers, and whether the key is a document's first

    @classmethod
    def check(cls, config) -> None:
        if config.sliding_window is not None:
            raise ValueError(
                f"selective_attention=True: the cache of sliding_window={config.sliding_window!r} does not keep its sums yet; "
                "use one of them"
            )

    @classmethod
    def refuse_split(cls, config) -> str | None:
        return "all heads read the scores of the first one"

    def start_without_effect(self, layer) -> str | None:
        return "it has no parameters"

    def token_state(self, call: AttentionCall) -> torch.Tensor:
        query, groups = call.hidden_states, call.layer.config.num_key_value_heads
        state = query.new_zeros(*query.shape[:2], self.state_size, dtype=torch.promote_types(query.dtype, torch.float32))
        state[..., 2] = call.token_context.visible_count[:, 0] <= int(call.layer.activation.sees_own_key)
        return state[:, None].expand(-1, groups, -1, -1)

    def change_scores(self, call: AttentionCall, scores: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        state, token_context = call.states[self.name][:, 0], call.token_context
        earlier_sum, covered, is_first = state.unbind(dim=-1)  # (batch, key) each
        before = token_context.query_index[0]
        has_numbers = not (is_tracing(covered) or covered.is_meta) and covered.numel()
        if has_numbers and covered.max() > before:
            raise ValueError(
                "selective_attention: the cache was cropped, and its sums cannot go back by some tokens, which assisted "
                "decoding and prompt lookup need; generate without assistant_model and prompt_lookup_num_tokens"
            )
        own = torch.arange(scores.shape[-1], device=scores.device) == token_context.query_index[:, None]
        selects = nn.functional.relu(scores[:, 0]).masked_fill(own | is_first.bool()[:, None], 0.0)
        if visible is not None:
            selects = selects.masked_fill(~visible[:, 0], 0.0)
        if token_context.is_valid is not None:
            selects = selects.masked_fill(~token_context.is_valid[..., None], 0.0)
        # What a query selects holds for later queries
        sums = nn.functional.pad(selects, (0, 0, 1, 0)).cumsum(dim=1) + earlier_sum[:, None]
        if call.cache is not None:
            covered = torch.zeros_like(earlier_sum) + (token_context.query_index[-1] + 1)
            state = torch.stack([sums[:, -1], covered, is_first], dim=-1)[:, None]
            call.store_state(self.name, state.expand_as(call.states[self.name]))
        return scores - sums[:, None, :-1]

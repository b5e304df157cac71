"""A gate on the output: each token decides how much of each head it lets through (arXiv 2505.06708)."""

from torch import nn

from modeling_nlq import AttentionPart


class Gate(AttentionPart):
    name = "gate"
    formula = "y_i * 2 sigmoid(x_i W)_h"

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.proj = nn.Linear(config.hidden_size, config.num_attention_heads)

    def change_output(self, call, heads):
        return heads * 2.0 * self.proj(call.hidden_states).sigmoid()[..., None]

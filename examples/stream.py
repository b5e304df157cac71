"""Sub-layers also read a share of the embeddings (of all earlier blocks: DenseFormer, arXiv 2402.02622)."""

import torch
from torch import nn

from modeling_nlq import AttentionPart


class Stream(AttentionPart):
    name = "stream"
    formula = "h + c x_0"

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.readers = self.stream_readers(config, layer_idx)
        self.share_bias = nn.Parameter(torch.zeros(len(self.readers)))

    def change_residual(self, call, states, earlier):
        return states + self.share_bias[self.readers.index(call.reader)] * earlier[0]

"""Runs the kernels on a few small cases: `compute-sanitizer python -m support.triton_sanitizer` in the folder `tests`."""

import torch
from support.attention_cases import LAYOUTS, chunk, layer_for
from support.elementwise_backends import TRITON


if __name__ == "__main__":
    for name in ("packed_grouped_queries", "padded_chunk_in_static_cache", "mask_per_head", "odd_length"):
        layout = LAYOUTS[name]
        TRITON.run(layout, layer_for(layout, "softplus"), layout.states(torch.bfloat16))
    long = chunk(2, 700, 690, heads=4)
    TRITON.run(long, layer_for(long, "softplus"), long.states())

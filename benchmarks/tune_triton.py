"""Finds the tiles that make the kernels of `nlq_triton` fastest on this GPU, for `TILES` in `triton_attention.py`.

    python benchmarks/tune_triton.py                                   # all three kernels, head dimensions 64, 128 and 256
    python benchmarks/tune_triton.py --kernels forward --head_dim 64

It runs causal attention in bfloat16. Every choice of tiles for one kernel is tried on the whole forward or backward pass, while
the other kernels keep their tiles. Choices that do not fit on the device, or that give other results than the present tiles,
are left out.
"""

import argparse
import itertools

import torch
from measure import Clock, attempt, attention_layer, describe_gpu

from modeling_nlq.kernels.triton import attention as triton_attention
from modeling_nlq.kernels.triton.attention import TILES, Tiles
from modeling_nlq.kernels.triton.backward import key_value_gradient_kernel, query_gradient_kernel
from modeling_nlq.kernels.triton.forward import forward_kernel
from modeling_nlq.masking_nlq import make_visibility


KERNELS = {"forward": forward_kernel, "query": query_gradient_kernel, "key_value": key_value_gradient_kernel}
CHOICES = [
    Tiles(tile, step, warps, stages)
    for tile, step, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))
    if tile == 128 or warps == 4
]


class Pass:
    """One forward or backward pass, in which the tiles of one kernel can be set."""

    def __init__(self, kernel: str, head_dim: int, length: int, tokens: int, activation: str, device: str):
        self.kernel, self.width = KERNELS[kernel], triton_attention.tile_of(head_dim)
        shape = (tokens // length, length, 2048 // head_dim, head_dim)
        states = [torch.randn(shape, device=device).to(torch.bfloat16).transpose(1, 2) for _ in range(3)]
        visibility = make_visibility(length, length, 0, torch.device(device))
        layer = attention_layer(activation)
        options = (layer.activation.name, layer.normalization, head_dim**-0.5, 0.0)
        inputs = (*states, visibility.visible_count[:, None], visibility.query_index, None, None, None, None, *options)
        operators = triton_attention.operators
        if kernel == "forward":
            self.function = lambda: operators.forward(*inputs)
        else:
            results = operators.forward(*inputs)
            gradient = torch.randn(shape, device=device).to(torch.bfloat16)
            self.function = lambda: operators.backward(gradient, *states, *results, *inputs[3:])

    def run(self, tiles: Tiles | None = None) -> tuple[torch.Tensor, ...]:
        """Returns the results with these tiles, or with those of the table."""
        if tiles is None:
            return self.function()
        lines, last = TILES[self.kernel], triton_attention.LAST_TILES
        TILES[self.kernel], triton_attention.LAST_TILES = {2: {self.width: tiles}}, tiles  # no other tiles to fall back on
        try:
            return self.function()
        finally:
            TILES[self.kernel], triton_attention.LAST_TILES = lines, last


def tune(one_pass: Pass, clock: Clock, choices: list[Tiles]) -> list[tuple[float, Tiles]]:
    """Returns the seconds of the pass with each choice that works, the fastest first."""
    expected = one_pass.run()
    times = []
    for tiles in choices:

        def check(tiles=tiles):
            for one, other in zip(one_pass.run(tiles), expected):
                if one.numel():
                    error = (one.float() - other.float()).abs().max() / other.float().abs().max()
                    assert error < 2**-6, f"off by {error:.2g}"

        if (reason := attempt(str(tiles), check)) is not None:
            print(f"    {tiles}: {reason}", flush=True)
            continue
        repeats = clock.repeats(lambda tiles=tiles: one_pass.run(tiles))
        times.append((min(clock.turn(lambda tiles=tiles: one_pass.run(tiles), repeats) for _ in range(3)), tiles))
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--head_dim", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=16384, help="length times batch")
    parser.add_argument("--activation", default="sigmoid")
    parser.add_argument("--show", type=int, default=5, help="how many choices to print")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    torch.manual_seed(0)
    print(describe_gpu())
    print(f"{arguments.activation}, length {arguments.length}, {arguments.tokens} tokens, hidden size 2048")
    clock = Clock("cuda")
    for head_dim, kernel in itertools.product(arguments.head_dim, arguments.kernels):
        one_pass = Pass(kernel, head_dim, arguments.length, arguments.tokens, arguments.activation, "cuda")
        one_pass.run()
        now = clock.turn(one_pass.run, clock.repeats(one_pass.run))
        print(f"{kernel}, head_dim {head_dim}: {1000 * now:.3f} ms in the tiles of the table")
        for seconds, tiles in tune(one_pass, clock, CHOICES)[: arguments.show]:
            print(f"    {1000 * seconds:.3f} ms  {tiles}", flush=True)


if __name__ == "__main__":
    main()

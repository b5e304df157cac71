"""Compiles the activations for a GPU that need not be there, and prints the special functions that each uses.

`python -m support.triton_special_functions ARGUMENTS`, with the names, the capability and `with_slopes` as JSON, and with
`TRITON_INTERPRET=0`.
"""

import json
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from modeling_nlq.kernels.triton.activations import TRITON_BODIES


@triton.jit
def elementwise_kernel(scores, weights, slopes, count, BODY: tl.constexpr, WITH_SLOPES: tl.constexpr, TILE: tl.constexpr):
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = position < count
    tile = tl.load(scores + position, mask=inside, other=0.0)
    tile_weights, tile_slopes = BODY(tile)
    # In a kernel they meet other tiles of the scores' type
    tl.static_assert(tile_weights.dtype == tile.dtype and tile_slopes.dtype == tile.dtype)
    tl.store(weights + position, tile_weights, mask=inside)
    if WITH_SLOPES:
        tl.store(slopes + position, tile_slopes, mask=inside)


def special_functions(name: str, capability: int, with_slopes: bool) -> list[str]:
    """The special functions in the code for a GPU of this capability, which need not be there."""
    constants = {"BODY": TRITON_BODIES[name], "WITH_SLOPES": with_slopes, "TILE": 128}
    types = {"scores": "*fp32", "weights": "*fp32", "slopes": "*fp32", "count": "i32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(elementwise_kernel, types, constants)
    # 128 threads for 128 scores: each instruction is there once
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["ptx"]
    return sorted(re.findall(r"\b(ex2|lg2|rcp|div|sqrt|rsqrt|sin|cos|tanh)\.", code))


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    names = arguments.pop("names")
    print(json.dumps({name: special_functions(name, **arguments) for name in names}))

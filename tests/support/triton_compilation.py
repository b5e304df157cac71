"""Compiles kernels for GPUs that need not be there, and prints what they take: `python -m support.triton_compilation CASES`.

The cases are JSON, and `TRITON_INTERPRET=0` must be set.
"""

import json
import sys

import triton
import triton.language as tl

from modeling_nlq.kernels.triton import backward, forward
from modeling_nlq.kernels.triton.activations import triton_sigmoid
from modeling_nlq.kernels.triton.attention import LAST_TILES, TILES


def compiled(kernel, state, head_dim, capability, normalization="sum", line=0, one_head=False, **options):
    """The shared memory and matrix instructions of a kernel on a GPU of this capability, which need not be there.

    Args:
        kernel: its name.
        state: the precision of query, key and value, by Triton's name.
        head_dim: any.
        capability: 80 or 90.
        normalization: of sigmoid.
        line: which of the lines of `TILES` that such heads may use; -1 is the last.
        one_head: with one head and one batch, whose numbers are constants then.
        options: the kernel's constants, in lower case.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    file = backward if "gradient" in kernel else forward
    function, size = getattr(file, kernel), 2 if state == "bf16" else 4
    width = max(16, 1 << (head_dim - 1).bit_length())
    tiles = [*(tiles for most, tiles in TILES[function][size].items() if width <= most), LAST_TILES][line]
    flags = dict.fromkeys(("has_dropout", "causal", "packed", "padded", "masked"), False) | options
    constants = {
        **{name.upper(): value for name, value in flags.items()},
        "TILE": tiles.tile,
        "STEP": tiles.step,
        "WIDTH": width,
        "HEAD_DIM": head_dim,
        "SUM": tl.float32,
        "LIMIT": 1e-31,
        "BODY": triton_sigmoid,
        "NORMALIZATION": normalization,
        "HAS_BIAS": normalization == "none",
        "PRECISION": "tf32x3" if state == "fp32" else "ieee",
        "HAS_REMAINDER": normalization == "sum" and state != "fp32",
    }
    if one_head:
        constants |= {"heads": 1, "group": 1}
    types = {
        **dict.fromkeys(("inverse_normalizer", "delta", "log_count", "weighted_sums", "totals", "scaling", "dropout"), "fp32"),
        **dict.fromkeys(("query_index", "visible_count", "first_key", "query_end", "seed"), "i64"),
        **dict.fromkeys(("key_is_valid", "visible"), "u8"),
        "valid_range": "i32",
    }
    numbers = ("scaling", "dropout", "heads", "group", "query_length", "key_length", "keys_per_split", "splits")
    signature = {}
    for name in function.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in numbers or name.endswith("stride"):
            signature[name] = types.get(name, "i32")
        else:
            signature[name] = "*" + types.get(name, state)
    # As PyTorch lays memory out
    aligned = [
        index
        for index, (name, kind) in enumerate(signature.items())
        if kind[0] == "*" or (name.endswith("stride") and name.split("_")[0] in ("query", "key", "value"))
    ]
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(function, signature, constants, {(index,): [["tt.divisibility", 16]] for index in aligned})
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"shared": binary.metadata.shared, "wgmma": binary.asm["ptx"].count("wgmma.mma_async")}


if __name__ == "__main__":
    print(json.dumps([compiled(**case) for case in json.loads(sys.argv[1])]))

"""Registers, spills and shared memory of the kernels of `nlq_triton`, compiled for GPUs that need not be there.

    python benchmarks/triton_resources.py --head_dims 64 128 --dtypes bfloat16

It compiles causal attention with an activation and its normaliser, for each shape that the kernels try.
"""

import argparse
import itertools
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from modeling_nlq.activations_nlq import get_attention_activation
from modeling_nlq.kernels.gpu import attention
from modeling_nlq.ops_nlq import AttentionInputs


CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KERNELS = {"forward": attention.query_kernel, "queries": attention.query_kernel, "keys": attention.key_kernel}
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.bool: "i1"}


def compile_kernel(
    name: str, dtype: torch.dtype, head_dim: int, activation: str, shape: tuple, capability: int, has_masks: bool
) -> tuple[int, int, int]:
    """Returns registers, bytes of spills and bytes of shared memory of a kernel."""
    kernel, (tile, step, warps, stages) = KERNELS[name], shape
    states = torch.empty(4, 4096, 16, head_dim, dtype=dtype, device="meta").transpose(1, 2)
    index = torch.empty(1, 4096, dtype=torch.int64, device="meta")
    masks = (index[:, None], index, *([index.bool(), index] if has_masks else [None, None]), None)
    normalization = get_attention_activation(activation).normalization
    inputs = AttentionInputs(states, states, states, None, None, *masks, None, activation, normalization, 0.125, 0.0)
    arguments = attention.arguments_of(inputs) | {"TILE": tile, "STEP": step}
    number = torch.empty(0, dtype=torch.float32, device="meta")
    output = states.float() if normalization == "sum" else states
    arguments |= {"output": output, "inverse_normalizer": number}
    if name != "forward":
        arguments |= dict.fromkeys(("gradient", "query_gradient", "key_gradient", "value_gradient"), states)
        arguments |= {"delta": number}
    constants, signature, aligned = {}, {}, {}
    for position, parameter in enumerate(kernel.arg_names):
        argument = arguments.get(parameter)
        if argument is None or parameter.isupper():
            signature[parameter], constants[parameter] = "constexpr", argument
            continue
        is_tensor = isinstance(argument, torch.Tensor)
        signature[parameter] = (
            f"*{TYPES[argument.dtype]}" if is_tensor else "fp32" if parameter == "scaling" else "i32"
        )
        # As Triton finds out at a launch
        if is_tensor or (signature[parameter] == "i32" and "length" not in parameter and argument % 16 == 0):
            aligned[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    return registers, stack, binary.metadata.shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", nargs="+", type=int, default=[80, 89, 90])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--head_dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--activation", default="sigmoid")
    parser.add_argument("--masks", action="store_true", help="with a window and padding")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    arguments = parser.parse_args()
    print("| GPU | kernel | dtype | head_dim | tile, step, warps, stages | registers | spills | shared KiB |")
    print("|---|---|---|---|---|---|---|---|")
    rows = itertools.product(arguments.dtypes, arguments.head_dims, arguments.kernels, arguments.capabilities)
    for dtype_name, head_dim, name, capability in rows:
        dtype = getattr(torch, dtype_name)
        width = next(width for width in (64, 128, 256) if head_dim <= width)
        shapes = attention.SHAPES[name == "forward", 2 if dtype == torch.bfloat16 else 4, width]
        for shape in dict.fromkeys(shapes[int(capability < 90) :]):
            usage = compile_kernel(name, dtype, head_dim, arguments.activation, shape, capability, arguments.masks)
            cells = (f"sm_{capability}", name, dtype_name, head_dim, ", ".join(map(str, shape)), *usage[:2])
            print("|", " | ".join(map(str, cells)), f"| {usage[2] / 1024:.0f} |", flush=True)


if __name__ == "__main__":
    main()

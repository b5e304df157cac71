"""Measures the memory and time of `nlq convert` on a sharded checkpoint of several gigabytes.

    python benchmarks/conversion.py
    python benchmarks/conversion.py --folder /data/tmp --layers 40

It writes random bfloat16 weights of a Llama and of a GPT-NeoX in eight shards. Each is converted with and without
`--upcycle`, and back. The peak of resident memory (Linux only) counts the pages of mapped files. The limit is twice
the largest shard plus 1 GiB; a peak above it ends the benchmark with exit status 1.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from measure import in_new_process, process_memory
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedConfig

from modeling_nlq.training.conversion.converting import convert
from modeling_nlq.training.conversion.streaming import find_weights
from modeling_nlq.training.size import empty_model


SHARDS = 8
GIB = 2**30
SHAPE = {"vocab_size": 32000, "hidden_size": 2048, "num_attention_heads": 16, "max_position_embeddings": 4096}
CONFIGURATIONS = {
    "llama": lambda layers: LlamaConfig(
        **SHAPE, num_key_value_heads=4, intermediate_size=5632, num_hidden_layers=layers
    ),
    "gpt_neox": lambda layers: GPTNeoXConfig(**SHAPE, intermediate_size=8192, num_hidden_layers=layers),
}


def write_checkpoint(folder: Path, config: PreTrainedConfig) -> None:
    """Writes random weights, one shard in memory at a time."""
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).bfloat16().state_dict()
    total = sum(value.nbytes for value in state.values())
    # Tensors of the meta device would share one storage
    split = split_torch_state_dict_into_shards(
        {name: torch.empty(0).new_empty(value.shape, dtype=value.dtype) for name, value in state.items()},
        max_shard_size=-(-total // (SHARDS - 1)),
    )
    generator = torch.Generator().manual_seed(0)
    for file, names in split.filename_to_tensors.items():
        tensors = {
            name: torch.empty(state[name].shape).normal_(0, 0.02, generator=generator).bfloat16() for name in names
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures, config.dtype = [AutoModelForCausalLM._model_mapping[type(config)].__name__], "bfloat16"
    config.save_pretrained(folder)


def check_equal(source: Path, back: Path, config: PreTrainedConfig) -> None:
    """Raises `AssertionError` if a weight changed on the way to NLQ and back."""
    model = empty_model(config)
    weights = [find_weights(str(folder), model) for folder in (source, back)]
    for name in weights[0].tensors:
        before, after = (each.tensors[name]() for each in weights)
        assert torch.equal(before, after), name


def largest_shard(folder: Path) -> int:
    """Returns the size of the largest shard, in bytes."""
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


def measure(source: Path, target: Path, options: dict) -> tuple[float, int]:
    """Returns the seconds of a conversion, and the peak memory of this process, in bytes."""
    start = time.perf_counter()
    convert(source, target, **options)
    seconds = time.perf_counter() - start
    return seconds, process_memory("VmHWM")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=44)
    parser.add_argument("--folder", default=None, help="where to write the checkpoints; by default the system's")
    arguments = parser.parse_args(words)
    root, status = Path(tempfile.mkdtemp(dir=arguments.folder)), 0
    print(f"{os.cpu_count()} CPU cores, PyTorch {torch.__version__}\n")
    print(f"{'conversion':<28}{'weights':>10}{'shard':>10}{'seconds':>10}{'peak':>10}{'limit':>10}   (GiB)")
    try:
        for family, make in CONFIGURATIONS.items():
            source = root / family
            source.mkdir()
            write_checkpoint(source, make(arguments.layers))
            steps = {
                f"{family} to nlq": (source, root / "nlq", {}),
                f"{family} to nlq, upcycled": (source, root / "upcycled", {"upcycle": True}),
                f"nlq to {family}": (root / "nlq", root / "back", {"to": family}),
            }
            for name, (start, target, options) in steps.items():
                seconds, peak = in_new_process(measure, start, target, options)
                limit = 2 * largest_shard(start) + GIB
                weights = sum(file.stat().st_size for file in start.glob("*.safetensors"))
                numbers = "".join(f"{value / GIB:>10.2f}" for value in (weights, largest_shard(start)))
                print(f"{name:<28}{numbers}{seconds:>10.1f}{peak / GIB:>10.2f}{limit / GIB:>10.2f}", flush=True)
                status |= peak > limit
            check_equal(source, root / "back", make(arguments.layers))
            for folder in root.iterdir():
                shutil.rmtree(folder)
    finally:
        shutil.rmtree(root)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())

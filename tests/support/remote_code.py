"""Shared parts of the tests of saved folders: a process without this package, and a small configuration."""

import os
import subprocess
import sys
from pathlib import Path

from modeling_nlq import NLQConfig


# Runs before a script: as if nothing but Transformers, PyTorch and what they need were installed.
WITHOUT_THIS_PACKAGE = """
import sys

sys.modules.update(dict.fromkeys(["modeling_nlq", "accelerate", "datasets", "evaluate", "matplotlib"]))
"""


def run_python(code: str, *arguments: object, folder: Path, is_installed: bool = False) -> str:
    """Runs code in a process of its own in `folder`, which also has the modules that it loads; returns the output."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": ""}
    command = [sys.executable, "-c", code if is_installed else WITHOUT_THIS_PACKAGE + code, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tiny_config(**switches) -> NLQConfig:
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["max_position_embeddings"] = 32
    return NLQConfig(**{**sizes, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **switches})

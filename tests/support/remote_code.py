"""Shared parts of the tests of saved folders: a process without this package, and a small configuration."""

from modeling_nlq import NLQConfig


# Runs before a script: as if nothing but Transformers, PyTorch and what they need were installed.
WITHOUT_THIS_PACKAGE = """
import sys

sys.modules.update(dict.fromkeys(["modeling_nlq", "accelerate", "datasets", "evaluate", "matplotlib"]))
"""


def tiny_config(**switches) -> NLQConfig:
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["max_position_embeddings"] = 32
    return NLQConfig(**{**sizes, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **switches})

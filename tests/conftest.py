"""What all tests share: no network, one seed, and small models whose parameters all matter."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from modeling_nlq import NLQConfig, NLQForCausalLM


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def _make_model(dtype=torch.float32, implementation="eager", seed=0, **switches):
    sizes = {
        "vocab_size": 13,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
    }
    config = NLQConfig(**{**sizes, **switches}, attn_implementation=implementation)
    model = NLQForCausalLM(config).to(dtype).eval()
    # In the initial state biases are 0, gains 1 and scores nearly 0, which would hide whatever they multiply.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


@pytest.fixture(scope="session")
def make_model():
    """A function from switches to a small `NLQForCausalLM` with random biases, gains and sinks."""
    return _make_model

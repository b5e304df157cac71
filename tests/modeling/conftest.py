"""Fixtures of the tests of attention: small tiles and chunks, and tokens."""

import pytest
import torch
from support.attention_cases import allow_cpp, set_chunks, set_rows, set_tiles
from support.model_cases import VOCABULARY

from modeling_nlq.kernels.cpu import cpu_ops


@pytest.fixture
def small_tiles(monkeypatch):
    """Short sequences take several tiles; those of `nlq_tiled` are smaller with more than 4 heads in the batch."""
    set_tiles(monkeypatch, 4, 3, 4)
    set_rows(monkeypatch, 4)


@pytest.fixture
def cpp_allowed(monkeypatch):
    """Whether attention in C++ runs here, on any CPU that has a compiler."""
    return allow_cpp(monkeypatch)


@pytest.fixture
def cpp_passes(cpp_allowed, monkeypatch):
    """The names of the C++ operators of attention, one for each call."""
    if not cpp_allowed:
        pytest.skip("needs a C++ compiler")
    calls, namespace, multiplies = [], cpu_ops.operators, cpu_ops._multiplies

    def multiplies_or_skips(is_half):
        if is_half and not multiplies(True):  # AVX-512 without its instructions for bfloat16
            pytest.skip("needs a CPU that multiplies bfloat16")
        return multiplies(is_half)

    class Counted:
        def __getattr__(self, name):
            if name.startswith("attention"):
                calls.append(name)
            return getattr(namespace, name)

    monkeypatch.setattr(cpu_ops, "operators", Counted())
    monkeypatch.setattr(cpu_ops, "_multiplies", multiplies_or_skips)
    return calls


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def small_chunks(monkeypatch):
    set_chunks(monkeypatch)


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (2, 9))

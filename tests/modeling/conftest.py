"""Fixtures of the tests of attention: small tiles and chunks, a faster interpreter of Triton, and tokens."""

import functools
from types import SimpleNamespace

import pytest
import torch
from support.elementwise_backends import allow_cpp, cpp_or_tiled, set_tiled_tiles, set_triton_tiles
from support.model_cases import VOCABULARY

from modeling_nlq import linear_nlq
from modeling_nlq.kernels.cpu import operators
from modeling_nlq.kernels.triton import attention as triton_attention
from modeling_nlq.kernels.triton.activations import IS_INTERPRETED
from modeling_nlq.tiled_nlq import tiled_attention_forward


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that short sequences take several; for `nlq_tiled` smaller ones with more than 4 heads in the batch."""
    set_tiled_tiles(monkeypatch, 4, 3, 4)
    set_triton_tiles(monkeypatch, 8, 4)


@pytest.fixture
def cpp_allowed(monkeypatch):
    """Whether attention in C++ runs here, on any CPU that has a compiler."""
    return allow_cpp(monkeypatch)


@pytest.fixture
def cpp_passes(cpp_allowed, monkeypatch):
    """The names of the C++ operators of attention, one for each call."""
    if not cpp_allowed:
        pytest.skip("needs a C++ compiler")
    calls, namespace = [], operators.operators

    def counted(name):
        def call(*inputs):
            calls.append(name)
            return getattr(namespace, name)(*inputs)

        return call

    passes = {name: counted(name) for name in ("attention", "attention_backward")}
    monkeypatch.setattr(operators, "operators", SimpleNamespace(**passes, one_query=namespace.one_query, loss=namespace.loss))
    return calls


@pytest.fixture(params=["pytorch", "cpp"])
def tiled(request):
    """Attention in linear memory: `nlq_tiled`, and again the C++ code where it computes the same."""
    if request.param == "pytorch":
        return tiled_attention_forward
    request.getfixturevalue("cpp_passes")
    return cpp_or_tiled


@pytest.fixture
def splits(monkeypatch):
    """The calls of `nlq_triton` whose keys were split, which all but the longest are."""
    set_triton_tiles(monkeypatch, 4, 4)
    monkeypatch.setattr(triton_attention, "MIN_SPLIT_KEYS", 1)
    if IS_INTERPRETED:
        monkeypatch.setattr(triton_attention, "SPLIT_STEP", 4)
    calls, function = [], triton_attention._attend_in_parts

    def counted(problem, **results):
        calls.append(problem)
        function(problem, **results)

    monkeypatch.setattr(triton_attention, "_attend_in_parts", counted)
    return calls


@pytest.fixture(scope="module")
def patched_once():
    """The interpreter (Triton 3.9) patches its language at each call of each function, half of its time: once is enough."""
    if not IS_INTERPRETED:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    patch_language, done = interpreter._patch_lang, set()

    def once(function):
        modules = [value for value in function.__globals__.values() if value is language or value is language.core]
        names = frozenset(map(id, modules))
        if names not in done:
            patch_language(function)
            done.add(names)
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        yield


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of linear attention so small that short sequences take several."""
    monkeypatch.setattr(linear_nlq, "SEGMENT_SIZE", 6)
    monkeypatch.setattr(linear_nlq, "chunked_form", functools.partial(linear_nlq.chunked_form, chunk_size=3))


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (2, 9))

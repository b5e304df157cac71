"""The C++ code for the CPU: attention of a single query, and where it cannot be built."""

import subprocess
import sys

import pytest
import torch
from support.attention_cases import ALL_COMBINATIONS, combinations, error, layer, reference
from torch.overrides import BaseTorchFunctionMode

from modeling_nlq import cpp_nlq, one_query_nlq
from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS
from modeling_nlq.cpp_activations_nlq import CPP_BODIES
from modeling_nlq.one_query_nlq import one_query_in_cpp


needs_library = pytest.mark.skipif(
    not cpp_nlq.is_enabled() or one_query_nlq._library() is None, reason="the C++ code cannot be built here"
)


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


# batch, heads, key-value heads, keys, head_dim
SIZES = ((2, 4, 4, 33, 64), (2, 4, 2, 100, 40), (1, 3, 1, 1, 7), (3, 2, 2, 700, 128))
BUILT_IN = [(name, normalization) for name, normalization in ALL_COMBINATIONS if name in CPP_BODIES]


def one_query(batch, heads, key_value_heads, keys, head_dim):
    """Query, key and value; the keys' heads lie side by side, as in the model before they are cached."""
    key, value = (torch.randn(batch, keys, key_value_heads, head_dim).transpose(1, 2) for _ in range(2))
    return torch.randn(batch, heads, 1, head_dim), key, value.contiguous()


@needs_library
@pytest.mark.usefixtures("no_grad")
class TestOneQuery:
    @combinations(BUILT_IN)
    @pytest.mark.parametrize("masked", [None, "rows", "heads"])
    def test_formulas(self, activation, normalization, masked):
        for batch, heads, key_value_heads, keys, head_dim in SIZES:
            states = one_query(batch, heads, key_value_heads, keys, head_dim)
            visible = torch.ones(batch, heads, 1, keys, dtype=torch.bool)
            if masked is not None:
                visible &= torch.rand(batch, heads if masked == "heads" else 1, 1, keys) > 0.4
                visible[0] = False
            expected = reference(*states, visible, activation, normalization, scaling=0.3)
            given = None if masked is None else visible if masked == "heads" else visible[:, :1]
            actual = one_query_in_cpp(layer(activation, normalization), *states, given, 0.3)
            assert error(actual, expected) < 2e-6

    @pytest.mark.parametrize("name", [name for name in CPP_BODIES if ATTENTION_ACTIVATIONS[name].is_homogeneous])
    def test_large_scores(self, name):
        """Squares of scores may overflow, the scores themselves may not."""
        query, key, value = one_query(1, 2, 2, 9, 16)
        module = layer(name, "sum")
        expected = one_query_in_cpp(module, query, key, value, None, 1.0)
        torch.testing.assert_close(one_query_in_cpp(module, query * 2.0**90, key, value, None, 1.0), expected)
        assert one_query_in_cpp(module, query * 2.0**90, key * 2.0**90, value, None, 1.0) is None

    @pytest.mark.parametrize("name", CPP_BODIES)
    def test_not_a_number(self, name):
        query, key, value = one_query(1, 2, 2, 9, 16)
        query[:, 0] = torch.nan
        module = layer(name, "length")
        output = one_query_in_cpp(module, query, key, value, None, 1.0)
        assert output[:, :, 0].isnan().all() and not output[:, :, 1].isnan().any()

    def test_refused(self):
        """What it does not compute."""
        states, module = one_query(1, 2, 2, 9, 16), layer("relu", "length")
        assert one_query_in_cpp(layer("gelu", "length"), *states, None, 1.0) is None
        assert one_query_in_cpp(module, *(tensor.double() for tensor in states), None, 1.0) is None
        assert one_query_in_cpp(module, *states[:2], states[2][..., :4], None, 1.0) is None
        with torch.enable_grad():
            assert one_query_in_cpp(module, *states, None, 1.0) is None
        with BaseTorchFunctionMode():  # as those that count or quantise
            assert one_query_in_cpp(module, *states, None, 1.0) is None


class TestBuild:
    SOURCE = 'extern "C" int seven() { return 7; }'

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        """A folder without libraries."""
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        cpp_nlq.load_library.cache_clear()
        yield tmp_path
        cpp_nlq.load_library.cache_clear()

    @needs_library
    def test_built_once(self, folder, monkeypatch):
        assert cpp_nlq.load_library("test", self.SOURCE).seven() == 7
        (library,) = folder.iterdir()
        cpp_nlq.load_library.cache_clear()
        monkeypatch.setattr(cpp_nlq.subprocess, "run", None)
        assert cpp_nlq.load_library("test", self.SOURCE).seven() == 7
        assert list(folder.iterdir()) == [library]

    def test_no_home(self, monkeypatch):
        def no_home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
        monkeypatch.setattr(cpp_nlq.Path, "home", no_home)
        assert cpp_nlq.load_library("test", self.SOURCE) is None

    @pytest.mark.parametrize(
        "compiler, source", [("no-such-compiler", SOURCE), ("false '", SOURCE), ("false", SOURCE), ("c++", "nonsense")]
    )
    def test_cannot_be_built(self, monkeypatch, folder, compiler, source):
        """One warning says what to do, and nothing half-built stays."""
        messages = []
        monkeypatch.setattr(cpp_nlq.logger, "warning", messages.append)
        monkeypatch.setattr(cpp_nlq, "_has_warned", False)
        monkeypatch.setenv("CXX", compiler)
        assert [cpp_nlq.load_library(name, source) for name in ("one", "two")] == [None, None]
        assert len(messages) == 1
        assert "Install a C++ compiler" in messages[0] and "NLQ_CPP=0" in messages[0]
        assert list(folder.iterdir()) == []

    @needs_library
    def test_turned_off(self, monkeypatch, no_grad):
        monkeypatch.setenv("NLQ_CPP", "0")
        assert one_query_in_cpp(layer("relu"), *one_query(1, 1, 1, 2, 4), None, 1.0) is None

    @needs_library
    @pytest.mark.slow
    def test_two_processes(self, folder):
        code = "from modeling_nlq import one_query_nlq; assert one_query_nlq._library() is not None"
        processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
        assert [process.wait(300) for process in processes] == [0, 0]
        assert len(list(folder.iterdir())) == 1

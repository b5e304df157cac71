"""The C++ code for the CPU: linear layers of a few rows, attention of a single query, and where it cannot be built."""

import subprocess
import sys

import pytest
import torch
from support.attention_cases import ALL_COMBINATIONS, combinations, error, layer, reference
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from modeling_nlq import cpp_nlq, linear_layers_nlq
from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS
from modeling_nlq.cpp_activations_nlq import CPP_BODIES
from modeling_nlq.linear_layers_nlq import MOST_ROWS, apply_linear
from modeling_nlq.one_query_nlq import one_query_in_cpp


needs_library = pytest.mark.skipif(
    not cpp_nlq.is_enabled() or linear_layers_nlq._library() is None, reason="the C++ code cannot be built here"
)


@pytest.fixture
def calls(monkeypatch):
    """The numbers of rows that the C++ code multiplied."""
    found, library = [], linear_layers_nlq._library()

    class Counting:
        @staticmethod
        def linear(*arguments):
            found.append(arguments[4])
            library.linear(*arguments)

    monkeypatch.setattr(linear_layers_nlq, "_library", lambda: Counting)
    return found


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@needs_library
@pytest.mark.usefixtures("no_grad")
class TestLinearLayers:
    @pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
    @pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
    def test_product(self, calls, rows, bias):
        """Widths and sizes that no block of the code divides, and enough of them for several threads."""
        for width, size in ((1, 1), (17, 5), (200, 131)):
            layer = nn.Linear(width, size, bias=bias)
            states = torch.randn(2, rows, width)[1:]
            expected = layer.double()(states.double())
            torch.testing.assert_close(apply_linear(layer.float(), states).double(), expected, rtol=1e-5, atol=1e-5)
        assert calls == [rows] * 3

    def test_strided_rows(self, calls):
        layer, states = nn.Linear(20, 7), torch.randn(20, 3).t()
        torch.testing.assert_close(apply_linear(layer, states), layer(states))
        assert calls == [3]

    def test_threads_change_nothing(self, calls):
        layer, states, threads = nn.Linear(512, 300), torch.randn(3, 512), torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            one = apply_linear(layer, states)
            torch.set_num_threads(3)
            assert torch.equal(apply_linear(layer, states), one)
        finally:
            torch.set_num_threads(threads)

    def test_not_used(self, calls):
        """Where someone could tell the difference, the layer itself is called."""
        layer, states = nn.Linear(6, 4), torch.randn(2, 6)
        with torch.enable_grad():
            assert apply_linear(layer, states).requires_grad
        with torch.autocast("cpu"):
            assert apply_linear(layer, states).dtype == torch.bfloat16
        for inputs in (torch.randn(MOST_ROWS + 1, 6), torch.randn(0, 6), states.double()):
            torch.testing.assert_close(apply_linear(layer.to(inputs.dtype), inputs), layer(inputs))
        layer = layer.float()
        torch.testing.assert_close(torch.func.vmap(lambda row: apply_linear(layer, row))(states), layer(states))
        with forward_ad.dual_level():
            assert forward_ad.unpack_dual(apply_linear(layer, forward_ad.make_dual(states, states))).tangent is not None
        recorded = make_fx(lambda row: apply_linear(layer, row))(states)
        torch.testing.assert_close(recorded(2 * states), layer(2 * states))
        for bias in (torch.randn(8)[::2], torch.randn(1).expand(4)):
            odd = nn.Linear(6, 4)
            odd.bias = nn.Parameter(bias)
            torch.testing.assert_close(apply_linear(odd, states), odd(states))
        negative = torch._neg_view(states)
        torch.testing.assert_close(apply_linear(layer, negative), layer(negative))
        assert apply_linear(nn.Linear(0, 4), torch.empty(2, 0)).shape == (2, 4)
        seen = []
        layer.register_forward_hook(lambda *arguments: seen.append(arguments))
        apply_linear(layer, states)
        assert len(seen) == 1
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            apply_linear(nn.Linear(6, 4), torch.randn(2, 3))
        assert calls == []

    def test_bias_that_is_no_parameter(self):
        layer, states = nn.Linear(6, 4), torch.randn(2, 6)
        del layer.bias
        layer.register_buffer("bias", torch.randn(4))
        torch.testing.assert_close(apply_linear(layer, states), layer(states))


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
    def test_turned_off(self, monkeypatch, calls, no_grad):
        monkeypatch.setenv("NLQ_CPP", "0")
        apply_linear(nn.Linear(3, 2), torch.ones(1, 3))
        assert one_query_in_cpp(layer("relu"), *one_query(1, 1, 1, 2, 4), None, 1.0) is None
        assert calls == []

    @needs_library
    @pytest.mark.slow
    def test_two_processes(self, folder):
        code = "from modeling_nlq import linear_layers_nlq; assert linear_layers_nlq._library() is not None"
        processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
        assert [process.wait(300) for process in processes] == [0, 0]
        assert len(list(folder.iterdir())) == 1

"""The C++ operators for a single query and the loss, and where nothing can be built."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.attention_cases import ALL_COMBINATIONS, combinations, error, layer, reference
from support.grids import slow_except
from torch.utils.data import DataLoader, Dataset

from modeling_nlq.attention_nlq import one_query_attention, one_query_by_pytorch
from modeling_nlq.kernels.cpu import build, cpu_ops
from modeling_nlq.kernels.cpu.cpu_ops import ACTIVATIONS
from modeling_nlq.loss_nlq import loss_and_gradient
from modeling_nlq.ops_nlq import used_kernels
from nlq import main


pytestmark = pytest.mark.thin(2)


needs_compiler = pytest.mark.skipif(not cpu_ops.is_built(), reason="the C++ code cannot be built here")

# batch, heads, key-value heads, keys, head_dim
SIZES = ((2, 4, 4, 33, 64), (2, 4, 2, 100, 40), (1, 3, 1, 1, 7), (3, 2, 2, 700, 128))
BUILT_IN = [(name, normalization) for name, normalization in ALL_COMBINATIONS if name in ACTIVATIONS]


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


def one_query(batch, heads, key_value_heads, keys, head_dim):
    """Query, key and value; the keys' heads lie side by side, as in the model before they are cached."""
    key, value = (torch.randn(batch, keys, key_value_heads, head_dim).transpose(1, 2) for _ in range(2))
    return torch.randn(batch, heads, 1, head_dim), key, value.contiguous()


def attend(*inputs):
    """Attention of a single query, by the C++ code."""
    assert one_query_attention.choose(*inputs).name == "cpp"
    return one_query_attention(*inputs)


@needs_compiler
@pytest.mark.usefixtures("no_grad")
class TestOneQuery:
    @combinations(BUILT_IN)
    @pytest.mark.parametrize("masked", [None, "rows", "heads"])
    def test_one_query_computes_the_formulas(self, activation, normalization, masked):
        for batch, heads, key_value_heads, keys, head_dim in SIZES:
            states = one_query(batch, heads, key_value_heads, keys, head_dim)
            visible = torch.ones(batch, heads, 1, keys, dtype=torch.bool)
            if masked is not None:
                visible &= torch.rand(batch, heads if masked == "heads" else 1, 1, keys) > 0.4
                visible[0] = False
            expected = reference(*states, visible, activation, normalization, scaling=0.3)
            given = None if masked is None else visible if masked == "heads" else visible[:, :1]
            assert error(attend(layer(activation, normalization), *states, given, 0.3), expected) < 2e-6

    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_nan_stays_in_its_head(self, name):
        query, key, value = one_query(1, 2, 2, 9, 16)
        query[:, 0] = torch.nan
        output = attend(layer(name, "length"), query, key, value, None, 1.0)
        assert output[:, :, 0].isnan().all() and not output[:, :, 1].isnan().any()

    @pytest.mark.parametrize("size", [2.0**40, 2.0**70])
    @pytest.mark.parametrize("normalization", ["sum", "length"])
    def test_overflow_gives_what_pytorch_gives(self, size, normalization):
        """The squares of the scores, or the scores themselves, are infinite in float32."""
        module = layer("squared", normalization)
        query, key, value = (states.abs() for states in one_query(1, 2, 2, 9, 16))
        inputs = (query * size, key * size, value, None, 1.0)
        expected = one_query_by_pytorch(module, *inputs)
        assert not expected.isfinite().any()
        torch.testing.assert_close(attend(module, *inputs), expected, equal_nan=True)

    def test_left_to_pytorch(self, monkeypatch):
        states, module = one_query(1, 2, 2, 9, 16), layer("relu", "length")

        def kernel(*inputs):
            return one_query_attention.choose(*inputs).name

        assert kernel(layer("gelu", "length"), *states, None, 1.0) == "pytorch"
        assert kernel(module, *(tensor.double() for tensor in states), None, 1.0) == "pytorch"
        assert kernel(module, *states[:2], states[2][..., :4], None, 1.0) == "pytorch"
        with torch.enable_grad():
            assert kernel(module, *states, None, 1.0) == "pytorch"
        assert kernel(module, *states, None, 1.0) == "cpp"
        monkeypatch.setenv("NLQ_CPP", "0")
        assert kernel(module, *states, None, 1.0) == "pytorch"


@needs_compiler
@pytest.mark.usefixtures("no_grad")
class TestOperators:
    def test_vmap_of_the_loss_equals_a_loop(self):
        logits, targets, weights = torch.randn(3, 5, 7), torch.randint(7, (3, 5)), torch.rand(3, 5)
        found = torch.func.vmap(loss_and_gradient)(logits, targets, weights)
        expected = [loss_and_gradient(*row) for row in zip(logits, targets, weights)]
        for results, rows in zip(found, zip(*expected)):
            torch.testing.assert_close(results, torch.stack(rows))

    def test_label_out_of_bounds(self):
        for label in (-1, 7):
            with pytest.raises(IndexError, match=f"target {label} is out of bounds"):
                loss_and_gradient(torch.randn(2, 7), torch.tensor([0, label]), None)


class Answers(Dataset):
    """What the C++ operators compute from given inputs, in whichever process asks."""

    def __init__(self, states, logits, targets):
        self.states, self.loss_inputs = states, (logits, targets, None)

    def __len__(self):
        return 1

    @torch.no_grad()
    def __getitem__(self, index):
        return [attend(layer("sigmoid", "none"), *self.states, None, 1.0), *loss_and_gradient(*self.loss_inputs)]


@needs_compiler
@pytest.mark.parametrize("method", slow_except(("fork", "spawn"), ("fork",)))
def test_in_another_process(method):
    """After use in this process. A worker of a DataLoader has one thread: after a fork, several would wait for each
    other.
    """
    answers = Answers(one_query(2, 4, 2, 100, 16), torch.randn(5, 7), torch.randint(7, (5,)))
    expected = answers[0]
    (actual,) = DataLoader(answers, batch_size=None, num_workers=1, multiprocessing_context=method, timeout=120)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_use_is_recorded(make_model):
    model = make_model(attention_activation="relu", implementation="nlq")
    tokens = torch.randint(13, (1, 4))
    model(tokens, labels=tokens)
    used = used_kernels()
    assert set(used["attention"]) & {"nlq_tiled", "nlq_cpp"} and set(used["loss"]) & {"cpp", "pytorch"}


class TestBuild:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        """A folder without libraries, and small sources."""
        (tmp_path / "sources").mkdir()
        monkeypatch.setattr(build, "FOLDER", tmp_path / "sources")
        for number, name in enumerate(("zero", "one")):
            operator = f'library.def("{name}() -> int", [] {{ return int64_t({number}); }});'
            source = f"#include <torch/library.h>\nTORCH_LIBRARY_FRAGMENT(NLQ_NAMESPACE, library) {{ {operator} }}"
            (tmp_path / "sources" / f"{name}.cpp").write_text(source)
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "libraries"))
        build.load.cache_clear()
        yield tmp_path / "libraries"
        build.load.cache_clear()

    @pytest.mark.slow
    @needs_compiler
    def test_built_once(self, folder, monkeypatch):
        """All files are in one library."""
        assert build.load("nlq_test") and (torch.ops.nlq_test.zero(), torch.ops.nlq_test.one()) == (0, 1)
        (library,) = folder.iterdir()
        build.load.cache_clear()
        monkeypatch.setattr(build.subprocess, "run", None)
        assert build.load("nlq_test")
        assert list(folder.iterdir()) == [library]

    @pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "c++ -include nonsense.h"])
    def test_cannot_be_built(self, monkeypatch, folder, compiler):
        """A warning says what to do, and nothing half-built stays."""
        messages = []
        monkeypatch.setattr(build.logger, "warning", messages.append)
        monkeypatch.setenv("CXX", compiler)
        assert not build.load("nlq_none")
        (message,) = [message for message in messages if "could not be compiled" in message]
        assert "g++ 11" in message and "NLQ_CPP=0" in message
        assert not folder.exists() or list(folder.iterdir()) == []

    @pytest.mark.parametrize("change", ["folder", "library", "link", "owner"])
    def test_a_library_that_another_user_may_have_written(self, change, folder, tmp_path, monkeypatch):
        """It is not loaded. If it is the folder, the default one is used, where nothing lies."""
        loaded, messages = [], []
        monkeypatch.setattr(build.ctypes, "CDLL", loaded.append)
        monkeypatch.setattr(build.logger, "warning", messages.append)
        monkeypatch.setattr(build.logger, "warning_once", messages.append)
        monkeypatch.setattr(build.Path, "home", lambda: tmp_path / "home")
        monkeypatch.setenv("CXX", "false")
        folder.mkdir()
        library = build.library_file("nlq_planted")
        library.write_bytes(b"")
        library.chmod(0o755)
        assert build.load("nlq_planted") and len(loaded) == 1 and messages == []
        build.load.cache_clear()
        if change == "link":
            library.symlink_to(library.rename(folder / "other.so"))
        elif change == "owner":
            if os.geteuid():
                pytest.skip("only root can give a file away")
            os.chown(library, 12345, -1)
        else:
            (folder if change == "folder" else library).chmod(0o757)
        assert not build.load("nlq_planted") and len(loaded) == 1
        assert "could not be compiled" in messages[-1] and "\n" not in messages[-1]
        assert build.library_file("nlq_planted").is_relative_to(tmp_path / "home") == (change == "folder")

    @pytest.mark.parametrize("names, is_private", [({"anna"}, True), ({"anna", "bert"}, False), ({"staff"}, False)])
    def test_group_that_may_write(self, names, is_private, tmp_path, monkeypatch):
        """With a umask of 002, files are the user's alone only in a group of the user's own."""
        tmp_path.chmod(0o775)
        group = SimpleNamespace(gr_gid=5, gr_name=min(names), gr_mem=sorted(names))
        monkeypatch.setattr("pwd.getpwuid", lambda number: SimpleNamespace(pw_gid=5, pw_name="anna"))
        monkeypatch.setattr("grp.getgrgid", lambda number: group)
        assert build.is_private(tmp_path) == is_private

    def test_command_builds_or_says_why_not(self, monkeypatch, capsys):
        monkeypatch.setenv("NLQ_CPP", "0")
        assert main(["build"]) == 0 and "NLQ_CPP=0" in capsys.readouterr().out
        monkeypatch.delenv("NLQ_CPP")
        for is_built in (True, False):
            monkeypatch.setattr(cpu_ops, "_load", lambda is_built=is_built: is_built)
            assert main(["build"]) == (0 if is_built else 1)

    @needs_compiler
    @pytest.mark.slow
    def test_two_processes(self, folder):
        code = "from modeling_nlq.kernels.cpu import cpu_ops; assert cpu_ops.is_built()"
        processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
        assert [process.wait(300) for process in processes] == [0, 0]
        assert len(list(folder.iterdir())) == 1

    @needs_compiler
    @pytest.mark.slow
    def test_killed_in_the_middle(self, folder):
        """The next process builds anew; nothing waits for the dead one."""
        code = "from modeling_nlq.kernels.cpu import cpu_ops; print('begun', flush=True); assert cpu_ops.is_built()"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        process.stdout.readline()
        while not folder.exists() or not list(folder.iterdir()):
            assert process.poll() is None
        process.kill()
        process.wait()
        assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
        assert len(list(folder.glob("*.so"))) == 1

"""The C++ operators for a single query and the loss, and where nothing can be built."""

import os
from types import SimpleNamespace

import pytest
import torch
from support.attention_cases import ALL_COMBINATIONS, combinations, error, layer, reference
from support.grids import slow_except
from torch.utils.data import DataLoader, Dataset

from modeling_nlq.attention_nlq import one_query_attention
from modeling_nlq.kernels.cpu import build, cpu_ops
from modeling_nlq.kernels.cpu.cpu_ops import ACTIVATIONS
from modeling_nlq.loss_nlq import loss_and_gradient
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
    assert one_query_attention.choose(*inputs).name == "cpp"
    return one_query_attention(*inputs)


@needs_compiler
@pytest.mark.usefixtures("no_grad")
class TestOneQuery:
    @combinations(BUILT_IN)
    @pytest.mark.parametrize("masked", [None, "rows", "heads"])
    def test_one_query_computes_the_formulas(self, activation, normalization, masked):
        module = layer(activation, normalization)
        for batch, heads, key_value_heads, keys, head_dim in SIZES:
            states = one_query(batch, heads, key_value_heads, keys, head_dim)
            visible = torch.ones(batch, heads, 1, keys, dtype=torch.bool)
            if masked is not None:
                visible &= torch.rand(batch, heads if masked == "heads" else 1, 1, keys) > 0.4
                visible[0] = False
            expected = reference(*states, visible, activation, normalization, scaling=0.3)
            given = None if masked is None else visible if masked == "heads" else visible[:, :1]
            assert error(attend(module, *states, given, 0.3), expected) < 2e-6
            states[0][:, 0] = torch.nan  # and stays in its head
            output = attend(module, *states, None, 0.3)
            assert output[:, :, 0].isnan().all() and not output[:, :, 1:].isnan().any()

    def test_what_cpp_does_not_compute_is_left_to_pytorch(self, monkeypatch):
        states, module = one_query(1, 2, 2, 9, 16), layer("relu", "length")

        def kernel(module, *states):
            return one_query_attention.choose(module, *states, None, 1.0).name

        assert kernel(module, *states) == "cpp"
        assert kernel(layer("gelu", "length"), *states) == "pytorch"
        assert kernel(module, *(tensor.double() for tensor in states)) == "pytorch"
        assert kernel(module, *states[:2], states[2][..., :4]) == "pytorch"
        with torch.enable_grad():
            assert kernel(module, *states) == "pytorch"
        monkeypatch.setenv("NLQ_CPP", "0")
        assert kernel(module, *states) == "pytorch"


@needs_compiler
def test_labels_out_of_bounds_are_refused():
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
def test_other_processes_compute_the_same(method):
    """After use in this process. A worker of a DataLoader has one thread: after a fork, several would wait for each
    other.
    """
    answers = Answers(one_query(2, 4, 2, 100, 16), torch.randn(5, 7), torch.randint(7, (5,)))
    expected = answers[0]
    (actual,) = DataLoader(answers, batch_size=None, num_workers=1, multiprocessing_context=method, timeout=120)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


class TestBuild:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
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
    def test_a_library_is_built_once(self, folder, monkeypatch):
        assert build.load("nlq_test") and (torch.ops.nlq_test.zero(), torch.ops.nlq_test.one()) == (0, 1)
        (library,) = folder.iterdir()
        build.load.cache_clear()
        monkeypatch.setattr(build.subprocess, "run", None)
        assert build.load("nlq_test")
        assert list(folder.iterdir()) == [library]

    @pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "c++ -include nonsense.h"])
    def test_a_warning_says_what_to_do_and_nothing_half_built_stays(self, monkeypatch, folder, compiler):
        messages = []
        monkeypatch.setattr(build.logger, "warning", messages.append)
        monkeypatch.setenv("CXX", compiler)
        assert not build.load("nlq_none")
        (message,) = [message for message in messages if "could not be compiled" in message]
        assert "g++ 11" in message and "NLQ_CPP=0" in message
        assert not folder.exists() or list(folder.iterdir()) == []

    @pytest.mark.parametrize("change", ["folder", "library", "link", "owner"])
    def test_what_another_user_may_have_written_is_not_loaded(self, change, folder, tmp_path, monkeypatch):
        """If it is the folder, the default one is used, where nothing lies."""
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
    def test_only_a_group_of_the_users_own_is_private(self, names, is_private, tmp_path, monkeypatch):
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
@pytest.mark.parametrize("targets, weights", [(3, None), (5, 5), (4, 3)])
def test_loss_needs_a_target_and_a_weight_for_each_row(targets, weights):
    weights = None if weights is None else torch.ones(weights)
    with pytest.raises(IndexError, match="each of the 4 rows of logits needs a target"):
        loss_and_gradient(torch.randn(4, 7), torch.zeros(targets, dtype=torch.long), weights)

"""A pretrained model in three forms: read by Transformers, converted by `nlq convert`, and converted back."""

from pathlib import Path

import pytest
import torch
from support.conversion_cases import run_nlq
from support.paths import REPOSITORY
from transformers import AutoTokenizer, LlamaForCausalLM

from modeling_nlq import NLQForCausalLM


GGUF = REPOSITORY / ".cache" / "pretrained" / "model.gguf"
_MEASURED: list[tuple[str, str, str]] = []


def pytest_terminal_summary(terminalreporter):
    if _MEASURED:
        terminalreporter.section("equalities")
        for row in (("what", "compared with", "largest error"), ("---", "---", "---"), *_MEASURED):
            terminalreporter.line(f"| {' | '.join(row)} |")


@pytest.fixture(scope="session")
def measured():
    """A function that adds a row to the table: what, compared with what, and the largest error, a number or text."""

    def add(what: str, other: str, error: float | str) -> None:
        _MEASURED.append((what, other, error if isinstance(error, str) else f"{error:.1e}" if error else "0"))

    return add


@pytest.fixture(scope="session")
def gguf() -> Path:
    if not GGUF.is_file():
        pytest.skip(f"needs {GGUF.relative_to(REPOSITORY)}, which `make test-weights` fetches")
    return GGUF


@pytest.fixture(scope="session")
def folder(gguf, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "nlq"
    assert run_nlq("convert", gguf, folder) == 0
    return folder


@pytest.fixture(scope="session")
def llama_folder(folder) -> Path:
    assert run_nlq("convert", folder, folder.parent / "llama", "--to", "llama") == 0
    return folder.parent / "llama"


@pytest.fixture(scope="session")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder, padding_side="left")


@pytest.fixture(scope="session")
def make_llama(gguf):

    def make(**options) -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **options
        ).eval()

    return make


@pytest.fixture(scope="session")
def llama(make_llama):
    return make_llama()


@pytest.fixture(scope="session")
def nlq(folder):
    return NLQForCausalLM.from_pretrained(folder).eval()

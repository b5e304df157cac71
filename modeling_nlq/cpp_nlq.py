"""C++ code for the CPU, compiled once per machine.

It is optional and for Linux. It replaces PyTorch code that computes the same, and where it cannot be compiled, that code stays.
Compiling needs a C++ compiler and takes seconds at the first use. The libraries are kept in `TORCH_EXTENSIONS_DIR`, by default
`~/.cache/torch_extensions`. The environment variable `NLQ_CPP=0` turns all of them off.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.autograd import forward_ad
from transformers.utils import logging


logger = logging.get_logger(__name__)

# Instructions by what PyTorch itself uses here. Not those of the compiler's machine, because several may share the folder
_TARGETS = {"AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512"), "AVX2": ("-march=x86-64-v3",)}
# Without -ffast-math, because NaN and infinity have a meaning here
_FLAGS = (
    *("-O3", "-std=gnu++20", "-shared", "-fPIC", "-fopenmp", "-fno-strict-aliasing"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
_has_warned = False


def instructions() -> str:
    """Returns the vector instructions that PyTorch uses on this CPU, such as `"AVX2"` or `"AVX512"`."""
    return torch.backends.cpu.get_cpu_capability()


def is_enabled() -> bool:
    """True on Linux, unless the environment turns the C++ code off."""
    return sys.platform == "linux" and os.environ.get("NLQ_CPP") != "0"


@functools.cache
def load_library(name: str, source: str) -> ctypes.CDLL | None:
    """Compiles C++ code, unless that was done before, and loads it; `None`, with a warning, if it cannot be compiled.

    Args:
        name: a word for the name of the file.
        source: C++ code with `extern "C"` functions. It may include PyTorch's headers.
    """
    try:
        return ctypes.CDLL(str(_build(name, source)))
    # `Path.home` raises `RuntimeError`, and `shlex.split` `ValueError`
    except (OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
        _warn(error)
        return None


def _warn(error: Exception) -> None:
    """Says once in a process what is missing; the next library would most likely fail for the same reason, in other words."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[0])[:200]
        logger.warning(
            "NLQ computes with PyTorch's operators alone: its C++ code, which is faster here, could not be compiled "
            f"({reason}). Install a C++ compiler (g++ 11 or later), or name one in the environment variable CXX; the "
            "folder TORCH_EXTENSIONS_DIR must be writable. NLQ_CPP=0 turns the C++ code and this warning off."
        )


def _build(name: str, source: str) -> Path:
    """Compiles a library, unless that was done before.

    Raises:
        OSError: if there is no compiler, or the folder cannot be written.
        RuntimeError: if there is no home directory.
        ValueError: if CXX is not a command.
        subprocess.CalledProcessError: if the compiler fails.
    """
    compiler, torch_folder = os.environ.get("CXX") or "g++", Path(torch.__file__).parent
    flags = (*_FLAGS, *_TARGETS.get(instructions(), ()))
    # What tells builds apart, also those of other machines that share the folder
    parts = (source, flags, compiler, torch.__version__, str(torch_folder), platform.machine())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    library = folder / f"nlq_{name}_{key}.so"
    if not library.exists():
        logger.info(f"Compiling {library}, which takes seconds")
        folder.mkdir(parents=True, exist_ok=True)
        # Processes that compile at the same time each write a file of their own; the last one to finish stays
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            file, result = Path(scratch, "source.cpp"), Path(scratch, "library.so")
            file.write_text(source)
            libraries = (f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10")
            command = [*shlex.split(compiler), *flags, str(file), "-o", str(result), *libraries]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
            result.replace(library)
    return library


def is_plain_call(*tensors: torch.Tensor) -> bool:
    """True if C++ code may read these tensors: nothing traces or transforms their operators, and they are in CPU memory."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    for tensor in tensors:
        # Other classes of tensors, such as `DTensor` and `FakeTensor`, have no memory of their own here
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_cpu or tensor.is_neg():
            return False
    # Modes, such as that of `make_fx` and those that count or quantise, see operators only
    has_modes = torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
    return not has_modes and torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0

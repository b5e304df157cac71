"""Compiles the C++ operators of this folder, once per machine.

They are optional and for Linux. They replace PyTorch code that computes the same, and where they cannot be compiled, that code
stays. Compiling needs a C++ compiler and takes some ten seconds at the first use of each operator. The libraries are kept in
`TORCH_EXTENSIONS_DIR`, by default `~/.cache/torch_extensions`. The environment variable `NLQ_CPP=0` turns all of them off.
"""

import functools
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)

FOLDER = Path(__file__).parent

# Instructions by what PyTorch itself uses here. Not those of the compiler's machine, because several may share the folder
_TARGETS = {"AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512"), "AVX2": ("-march=x86-64-v3",)}
# Without -ffast-math, because NaN and infinity have a meaning here
_FLAGS = (
    *("-O3", "-std=gnu++20", "-shared", "-fPIC", "-fopenmp", "-fno-strict-aliasing"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    "-Wno-psabi",  # a note about vectors of 64 bytes, which stay within a file
)
_has_warned = False


def instructions() -> str:
    """Returns the vector instructions that PyTorch uses on this CPU, such as `"AVX2"` or `"AVX512"`."""
    return torch.backends.cpu.get_cpu_capability()


def is_enabled() -> bool:
    """True on Linux, unless the environment turns the C++ code off."""
    return sys.platform == "linux" and os.environ.get("NLQ_CPP") != "0"


@functools.cache
def load(name: str, namespace: str) -> bool:
    """Compiles the file `name.cpp`, unless that was done before, and loads it, which registers its operators.

    Args:
        name: name of the file.
        namespace: namespace of the operators.

    Returns:
        False if it cannot be compiled, with one warning in a process: another file would fail for the same reason.
    """
    global _has_warned
    if _has_warned:
        return False
    try:
        torch.ops.load_library(str(_build(name, namespace)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        _has_warned = True
        logger.warning(
            "NLQ computes with PyTorch's operators alone: its C++ code, which is faster here, could not be compiled. It needs "
            "g++ 11 or later, or a compiler named in CXX, and a folder TORCH_EXTENSIONS_DIR that can be written. NLQ_CPP=0 "
            f"turns it off. {getattr(error, 'stderr', None) or error}"
        )
        return False
    return True


def _build(name: str, namespace: str) -> Path:
    """Compiles a library, unless that was done before. Raises `OSError` or `subprocess.CalledProcessError` if it cannot."""
    compiler, torch_folder = os.environ.get("CXX") or "g++", Path(torch.__file__).parent
    flags = (*_FLAGS, *_TARGETS.get(instructions(), ()), f"-DNLQ_NAMESPACE={namespace}")
    sources = [FOLDER / f"{name}.cpp", *sorted(FOLDER.glob("*.h"))]
    # What tells builds apart, also those of other machines that share the folder
    contents = [source.read_bytes() for source in sources]
    parts = (contents, flags, compiler, torch.__version__, str(torch_folder))
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    library = folder / f"nlq_{name}_{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        logger.warning(f"NLQ compiles its C++ code for {name.replace('_', ' ')} once, which takes some ten seconds: {library}")
        # Processes that compile at the same time each write a file of their own; the last one to finish stays
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            result = Path(scratch, "library.so")
            headers = [f"-I{torch_folder / 'include' / place}" for place in ("", "torch/csrc/api/include")]
            libraries = (f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10")
            command = [*shlex.split(compiler), *flags, str(sources[0]), "-o", str(result), *headers, *libraries]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
            result.replace(library)
    return library

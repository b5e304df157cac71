"""Compiles the C++ operators of this folder, once per machine.

They are optional and for Linux. They replace PyTorch code that computes the same, and where they cannot be compiled, that code
stays. Compiling needs a C++ compiler and takes some ten seconds at the first use of each operator. The libraries are kept in
`TORCH_EXTENSIONS_DIR`, by default `~/.cache/torch_extensions`; if other users can write there, in `~/.cache/modeling-nlq`. The
environment variable `NLQ_CPP=0` turns all of them off.
"""

import functools
import hashlib
import os
import platform
import shlex
import stat
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
    # `Path.home` raises `RuntimeError`, and `shlex.split` `ValueError`
    except (OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
        _has_warned = True
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[0])[:200]
        logger.warning(
            "NLQ computes with PyTorch's operators alone: its C++ code, which is faster here, could not be compiled "
            f"({reason}). Install a C++ compiler (g++ 11 or later), or name one in the environment variable CXX; the folder "
            "TORCH_EXTENSIONS_DIR must be writable, for this user alone. NLQ_CPP=0 turns the C++ code and this warning off."
        )
        return False
    return True


def _is_trusted(path: Path) -> bool:
    """Whether nobody but this user and root can have written a file, or into a folder."""
    state = path.lstat()
    return not stat.S_ISLNK(state.st_mode) and state.st_uid in (0, os.getuid()) and not state.st_mode & 0o022


def _folder(name: str) -> Path:
    """The folder of a library, or one of this user's own if others could have put code into it, which loading would run.

    Raises:
        OSError: if neither can be used.
    """
    shared = os.environ.get("TORCH_EXTENSIONS_DIR")
    shared = Path(shared) if shared else Path.home() / ".cache" / "torch_extensions"
    shared.mkdir(mode=0o755, parents=True, exist_ok=True)
    if _is_trusted(shared.resolve()) and (not os.path.lexists(shared / name) or _is_trusted(shared / name)):
        return shared
    own = Path.home() / ".cache" / "modeling-nlq"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_trusted(own):
        raise PermissionError(f"other users can write in {shared} and in {own}")
    return own


def _build(name: str, namespace: str) -> Path:
    """Compiles a library, unless that was done before.

    Raises:
        OSError: if there is no compiler, or no folder can be written that is safe.
        RuntimeError: if there is no home directory.
        ValueError: if CXX is not a command.
        subprocess.CalledProcessError: if the compiler fails.
    """
    compiler, torch_folder = os.environ.get("CXX") or "g++", Path(torch.__file__).parent
    flags = (*_FLAGS, *_TARGETS.get(instructions(), ()), f"-DNLQ_NAMESPACE={namespace}")
    sources = [FOLDER / f"{name}.cpp", *sorted(FOLDER.glob("*.h"))]
    # What tells builds apart, also those of other machines that share the folder
    contents = [source.read_bytes() for source in sources]
    parts = (contents, flags, compiler, torch.__version__, str(torch_folder), platform.machine())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    folder = _folder(f"nlq_{name}_{key}.so")
    library = folder / f"nlq_{name}_{key}.so"
    if not library.exists():
        logger.warning(f"NLQ compiles its C++ code for {name.replace('_', ' ')} once, which takes some ten seconds: {library}")
        # Processes that compile at the same time each write a file of their own; the last one to finish stays
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            result = Path(scratch, "library.so")
            headers = [f"-I{torch_folder / 'include' / place}" for place in ("", "torch/csrc/api/include")]
            libraries = (f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10")
            command = [*shlex.split(compiler), *flags, str(sources[0]), "-o", str(result), *headers, *libraries]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
            result.chmod(0o755)  # also where the mask of new files lets a group write
            result.replace(library)
    return library

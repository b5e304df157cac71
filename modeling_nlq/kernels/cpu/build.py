"""Compiles the C++ operators of this folder into one library, once per machine.

They are optional and for Linux. `nlq build` or the first use of an operator compiles them, in up to a minute. The
library lies in `TORCH_EXTENSIONS_DIR`, by default `~/.cache/torch_extensions`, and is not loaded if another user can
write it.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)

FOLDER = Path(__file__).parent
TORCH = Path(torch.__file__).parent

# Not `-march=native`, because machines with other instructions may share the folder
_TARGETS = {"AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512"), "AVX2": ("-march=x86-64-v3",)}
_WITHOUT_AVX512 = ("-DNLQ_PLAIN_PRODUCTS",)  # products as loops, which only tests use: PyTorch's need AVX-512
# Without -ffast-math, because NaN and infinity have a meaning here
_FLAGS = (
    *("-O3", "-std=gnu++20", "-fPIC", "-fopenmp", "-fno-strict-aliasing"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    "-Wno-psabi",  # a note about vectors of 64 bytes, which stay within a file
)


def instructions() -> str:
    """Returns PyTorch's vector instructions on this CPU, such as `"AVX512"`."""
    return torch.backends.cpu.get_cpu_capability()


def is_enabled() -> bool:
    """True on Linux, unless the environment turns the C++ code off."""
    return sys.platform == "linux" and os.environ.get("NLQ_CPP") != "0"


@functools.cache
def load(namespace: str) -> bool:
    """Loads the library, which registers its operators, and compiles it if needed; false with a warning on failure."""
    library = library_file(namespace)
    try:
        if not library.exists():
            logger.warning(f"NLQ compiles its C++ code once, which takes up to a minute: {library}")
            compile_library(namespace)
        _open_library(library)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        lines = [line for line in (getattr(error, "stderr", None) or "").splitlines() if "error" in line.lower()]
        logger.warning(
            "NLQ computes with PyTorch's operators: its faster C++ code could not be compiled. It needs g++ 11 or "
            "later, or a compiler named in CXX, and a TORCH_EXTENSIONS_DIR that you alone can write. NLQ_CPP=0 turns "
            f"it off. {lines[0] if lines else error}"
        )
        return False
    return True


def is_private(file: int | Path) -> bool:
    """Tells whether only this user and root can write a file or folder.

    A group of the owner's name without other members may write it too (umask 002).
    """
    if sys.platform == "win32":  # which has no such permissions
        return True
    import grp
    import pwd

    status = os.stat(file)
    is_users_group = False
    with contextlib.suppress(KeyError):  # an id without a name
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
        is_users_group = owner.pw_gid == group.gr_gid and {group.gr_name, *group.gr_mem} == {owner.pw_name}
    others = stat.S_IWOTH if is_users_group else stat.S_IWOTH | stat.S_IWGRP
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & others


def _open_library(library: Path) -> None:
    """Loads the library by the descriptor of the file that was checked; `OSError` if other users can write it."""
    file = os.open(library, os.O_NOFOLLOW)  # stays open, because the loader knows a library by this path
    if not (is_private(file) and is_private(library.parent)):
        raise PermissionError(f"other users can write {library}, or its folder")
    ctypes.CDLL(f"/proc/self/fd/{file}")


def library_file(namespace: str) -> Path:
    """Returns the path of the library. Its name is a hash of all that a build depends on."""
    contents = [file.read_bytes() for file in (*_sources(), *sorted(FOLDER.glob("*.h")))]
    parts = (contents, _flags(namespace), _compiler(), torch.__version__, str(TORCH))
    default = Path.home() / ".cache" / "torch_extensions"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default)
    if folder.is_dir() and not is_private(folder):
        logger.warning_once(f"TORCH_EXTENSIONS_DIR={folder}: other users can write it, so {default} is used")
        folder = default
    return folder / f"nlq_{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"


def compile_library(namespace: str) -> None:
    """Compiles the files, as many at a time as there are cores, and links them."""
    library = library_file(namespace)
    headers = [f"-I{TORCH / 'include' / folder}" for folder in ("", "torch/csrc/api/include")]
    # Processes that compile at the same time write to different folders
    library.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch, ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = {source: str(Path(scratch, f"{source.stem}.o")) for source in _sources()}
        list(threads.map(lambda source: _run(namespace, "-c", str(source), "-o", objects[source], *headers), objects))
        result = Path(scratch, "library.so")
        libraries = (f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10")
        _run(namespace, "-shared", *objects.values(), "-o", str(result), *libraries)
        result.chmod(0o755)  # whatever the umask is
        result.replace(library)


def _run(namespace: str, *arguments: str) -> None:
    command = [*shlex.split(_compiler()), *_flags(namespace), *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")


def _sources() -> list[Path]:
    return sorted(FOLDER.glob("*.cpp"))


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _flags(namespace: str) -> tuple[str, ...]:
    plain = () if instructions() == "AVX512" else _WITHOUT_AVX512
    return (*_FLAGS, *_TARGETS.get(instructions(), ()), *plain, f"-DNLQ_NAMESPACE={namespace}")

"""Small C++ libraries for the CPU, built once per machine by `torch.utils.cpp_extension`.

A library is optional. It replaces PyTorch code that computes the same, and where it cannot be built, that code stays. A build
needs a C++ compiler and ninja (`pip install ninja`). It takes a few seconds at the first use and is kept in
`TORCH_EXTENSIONS_DIR`, by default `~/.cache/torch_extensions`. The environment variable `NLQ_CPP=0` turns all libraries off.
"""

import ctypes
import functools
import hashlib
import os
from pathlib import Path

import torch
from filelock import FileLock
from torch.autograd import forward_ad
from transformers.utils import logging


logger = logging.get_logger(__name__)

# Instructions by what PyTorch itself uses here. Not those of the compiler's machine, because a folder of builds may be shared
_TARGETS = {"AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512"), "AVX2": ("-march=x86-64-v3",)}
# Without `-ffast-math`, which would assume that nothing is infinite or NaN
_FLAGS = ("-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")


def instructions() -> str:
    """Returns the vector instructions that PyTorch uses on this CPU, such as `"AVX2"` or `"AVX512"`."""
    return torch.backends.cpu.get_cpu_capability()


def load_library(name: str, source: str) -> ctypes.CDLL | None:
    """Builds C++ code, or finds it built, and loads it; `None` where there is no library, for which a warning gives the reason.

    Args:
        name: a word for the name of the library.
        source: C++20 code with `extern "C"` functions.
    """
    return _load_library(name, source) if os.environ.get("NLQ_CPP", "1") != "0" else None


@functools.cache
def _load_library(name: str, source: str) -> ctypes.CDLL | None:
    flags = [*_FLAGS, *_TARGETS.get(instructions(), ())]
    # The name tells builds of other code, flags and versions of PyTorch apart
    version = hashlib.sha256(repr((source, flags, torch.__version__)).encode()).hexdigest()[:16]
    name = f"nlq_{name}_{version}"
    try:
        from torch.utils import cpp_extension  # here, because it takes long to import

        folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()) / name
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "nlq.lock"):
            # PyTorch's own lock is a file, which a build that was killed leaves behind. All others would wait for ever
            (folder / "lock").unlink(missing_ok=True)
            path = cpp_extension.load_inline(
                name,
                source,
                extra_cflags=flags,
                extra_ldflags=["-fopenmp"],
                build_directory=str(folder),
                is_python_module=False,
                no_implicit_headers=True,
            )
        return ctypes.CDLL(path)
    except Exception as error:  # a missing compiler, ninja or permission must not break what works without
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning(
            f"NLQ computes without its C++ code for the CPU, which would be faster: {reason}. It needs a C++ compiler and "
            "ninja (pip install ninja). NLQ_CPP=0 turns it off, and this warning too."
        )
        return None


def is_plain_call(*tensors: torch.Tensor) -> bool:
    """True if C++ code may compute with these tensors: in float32 on the CPU, where nobody sees or changes what operators do.

    That is, without gradients, tracing, autocast, `torch.func` and dual numbers.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    for tensor in tensors:
        # Other classes of tensors, such as `DTensor` and `FakeTensor`, have no memory of their own here
        if type(tensor) not in _PLAIN or tensor.dtype != torch.float32 or not tensor.is_cpu:
            return False
    return (
        not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)

"""Helpers of the benchmarks: clocks, the roofline, quartiles, and the description of the machine."""

import contextlib
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import torch

import modeling_nlq
from modeling_nlq.activations_nlq import get_attention_activation


# About how long one turn of a candidate lasts, and the most repeats in it. In shorter turns the clock's own noise
# would show
TURN_SECONDS, MOST_REPEATS = 0.02, 50
# More than the L2 cache of any GPU (50 MB on an H100), as in `triton.testing.do_bench`
FLUSHED_BYTES = 256 * 2**20
MATMUL_SIZE = 8192


def attention_layer(name: str) -> SimpleNamespace:
    """Makes a stand-in for an attention layer: the attributes that backends read, for the canonical normaliser of
    `name`.
    """
    activation = get_attention_activation(name)
    return SimpleNamespace(
        activation=activation,
        normalization=activation.normalization,
        sink=None,
        attention_sink=None,
        is_causal=True,
        num_key_value_groups=1,
        training=True,
    )


def read_command(*command: str) -> str:
    """Returns the output of a program, or an empty text if the program does not exist or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe(device: str) -> str:
    """Describes the device (`"cpu"` or `"cuda"`), the versions and the commit."""
    if device == "cuda":
        drivers = read_command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        name = (
            f"{torch.cuda.get_device_name()}, driver {drivers[0] if drivers else 'unknown'}, CUDA {torch.version.cuda}"
        )
    else:
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    commit = read_command("git", "rev-parse", "--short", "HEAD") or "unknown"
    # Only Python files count: a new table in the docs does not change the code
    is_changed = bool(read_command("git", "status", "--porcelain", "--untracked-files=no", "--", "*.py"))
    changes = " with changes" if is_changed else ""
    return f"{name}; torch {torch.__version__}; nlq {modeling_nlq.__version__}, commit {commit}{changes}"


class Clock:
    """Measures the seconds of a function on a device.

    On CUDA it measures like `triton.testing.do_bench`: by events around each of several calls, with the L2 cache
    overwritten before each call. It does not wait between calls, so launching a kernel costs nothing if the previous
    one takes longer. A turn is the median of its calls.
    """

    def __init__(self, device: str):
        self.is_cuda = device == "cuda"
        self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device) if self.is_cuda else None

    def repeats(self, function: Callable[[], object]) -> int:
        """Returns how many calls make a turn of `TURN_SECONDS`. The function must have run before."""
        return max(1, min(MOST_REPEATS, int(TURN_SECONDS / self.turn(function, 3 if self.is_cuda else 1))))

    def turn(self, function: Callable[[], object], repeats: int) -> float:
        """Returns the median seconds of `repeats` calls."""
        return statistics.median(self._cuda(function, repeats) if self.is_cuda else self._cpu(function, repeats))

    def _cuda(self, function: Callable[[], object], repeats: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            self._flushed.zero_()
            start.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in events]

    def _cpu(self, function: Callable[[], object], repeats: int) -> list[float]:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return times


def make_matmul(device: str, dtype: torch.dtype, size: int = MATMUL_SIZE) -> tuple[Callable[[], object], int]:
    """Makes the roofline: a product of two square matrices by the vendor's library, and its number of operations."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return lambda: torch.matmul(left, right, out=product), 2 * size**3


def matmul_rate(device: str, dtype: torch.dtype, size: int = MATMUL_SIZE) -> float:
    """Returns the operations per second of that product, the median of several turns after a warm-up."""
    clock = Clock(device)
    function, operations = make_matmul(device, dtype, size)
    function()
    repeats = clock.repeats(function)
    return operations / statistics.median([clock.turn(function, repeats) for _ in range(10)])


def quartiles(numerator: list[float], denominator: list[float]) -> list[float]:
    """Returns the quartiles of the rounds' ratios. The second is the median."""
    ratios = [above / below for above, below in zip(numerator, denominator)]
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios


def compiled_without_fallback() -> contextlib.AbstractContextManager:
    """Makes `torch.compile` compile every shape and function anew.

    By default it runs a function uncompiled after eight recompilations, and compiles for any length after the second
    one. It reports neither.
    """
    return torch._dynamo.config.patch(
        recompile_limit=1000,
        accumulated_recompile_limit=10_000,
        fail_on_recompile_limit_hit=True,
        automatic_dynamic_shapes=False,
    )


def attempt(name: str, function: Callable[[], object]) -> str | None:
    """Runs a function that may fail on an untried device, and returns the reason of a failure in a few words.

    The traceback goes to stderr. A candidate that fails must not cost the figures of all others, so the caller shows
    the reason in place of its figure.
    """
    try:
        function()
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:
        print(f"{name} failed:", file=sys.stderr)
        traceback.print_exc()
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return f"{type(error).__name__}: {first_line[:200]}"
    return None

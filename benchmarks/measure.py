"""Helpers of the benchmarks: clocks, memory, the roofline, quartiles, and the description of the machine."""

import contextlib
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
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
    """Makes a stand-in for an attention layer, with the attributes that backends read."""
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


def processor() -> str:
    """Returns the name of the CPU."""
    names = [line for line in read_command("lscpu").splitlines() if line.startswith("Model name")]
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def describe(device: str) -> str:
    """Describes the device (`"cpu"` or `"cuda"`), the versions and the commit."""
    if device == "cuda":
        drivers = read_command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        name = (
            f"{torch.cuda.get_device_name()}, driver {drivers[0] if drivers else 'unknown'}, CUDA {torch.version.cuda}"
        )
    else:
        name = f"{processor()}, {torch.get_num_threads()} threads"
    commit = read_command("git", "rev-parse", "--short", "HEAD") or "unknown"
    changes = " with changes" if read_command("git", "status", "--porcelain", "-uno", "--", "*.py") else ""
    return f"{name}; torch {torch.__version__}; nlq {modeling_nlq.__version__}, commit {commit}{changes}"


def seconds(function: Callable[[], object], device: str = "cpu") -> float:
    """Returns the seconds of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def process_memory(field: str) -> int:
    """Returns the bytes of this process: `"VmRSS"` now, `"VmHWM"` at its peak (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def in_new_process(function: Callable, *arguments):
    """Returns the result of a function in a new process, for which peak memory is measured."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


class Clock:
    """Measures the seconds of a function on a device.

    On CUDA it measures like `triton.testing.do_bench`: by events around each call, with the L2 cache overwritten
    before it. It does not wait between calls, so launching a kernel costs nothing if the previous one takes longer.
    """

    def __init__(self, device: str):
        self.is_cuda = device == "cuda"
        self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device) if self.is_cuda else None

    def repeats(self, function: Callable[[], object]) -> int:
        """Returns how many calls make a turn of `TURN_SECONDS`. The function must have run before."""
        return max(1, min(MOST_REPEATS, int(TURN_SECONDS / self.turn(function, 3 if self.is_cuda else 1))))

    def turn(self, function: Callable[[], object], repeats: int) -> float:
        """Returns the median seconds of `repeats` calls."""
        if not self.is_cuda:
            return statistics.median([seconds(function) for _ in range(repeats)])
        return statistics.median(self._cuda(function, repeats))

    def _cuda(self, function: Callable[[], object], repeats: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            self._flushed.zero_()
            start.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in events]


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

    By default it silently gives up on a function after eight recompilations, and makes the length dynamic.
    """
    return torch._dynamo.config.patch(
        recompile_limit=1000,
        accumulated_recompile_limit=10_000,
        fail_on_recompile_limit_hit=True,
        automatic_dynamic_shapes=False,
    )


def attempt(name: str, function: Callable[[], object]) -> str | None:
    """Runs a function and returns the reason of a failure, which callers show in place of a figure.

    The traceback goes to stderr.
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

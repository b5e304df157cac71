"""What the benchmarks share: clocks, the roofline, quartiles, and what a table must say of the machine it comes from."""

import contextlib
import importlib.metadata
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


# One turn of a candidate lasts about so long, and takes at most so many repeats: in short ones the clock's own noise shows
TURN_SECONDS, MOST_REPEATS = 0.02, 50
# More than the L2 cache of any GPU (50 MB on an H100), as in `triton.testing.do_bench`
FLUSHED_BYTES = 256 * 2**20
MATMUL_SIZE = 8192


def attention_layer(name: str) -> SimpleNamespace:
    """What a backend reads of an attention layer, for the activation `name` with its canonical normaliser."""
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
    """What a program prints, or nothing where it does not exist or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe_gpu() -> str:
    """The device, and the versions and the commit that numbers of it belong to."""
    drivers = read_command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    commit = read_command("git", "rev-parse", "--short", "HEAD") or "unknown"
    # Written for a file of the repository, so a table in it does not count as a change
    is_changed = bool(read_command("git", "status", "--porcelain", "--untracked-files=no", "--", "*.py"))
    return (
        f"{torch.cuda.get_device_name()}, driver {drivers[0] if drivers else 'unknown'}, CUDA {torch.version.cuda}; "
        f"torch {torch.__version__}, triton {triton}; nlq {modeling_nlq.__version__}, commit {commit}"
        f"{' with changes' if is_changed else ''}"
    )


class Clock:
    """Seconds that a function takes on a device.

    On CUDA as `triton.testing.do_bench` measures: by events around each of several calls, with the L2 cache overwritten before
    each, and without waiting in between, so that launching a kernel costs nothing where the one before it takes longer. A turn
    is the median of its calls.
    """

    def __init__(self, device: str):
        self.is_cuda = device == "cuda"
        self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device) if self.is_cuda else None

    def repeats(self, function: Callable[[], object]) -> int:
        """How many calls make a turn of `TURN_SECONDS`; the function must have run before."""
        return max(1, min(MOST_REPEATS, int(TURN_SECONDS / self.turn(function, 3 if self.is_cuda else 1))))

    def turn(self, function: Callable[[], object], repeats: int) -> float:
        """The median of the seconds of so many calls."""
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
    """The roofline: a product of two square matrices by the vendor's library, and its floating-point operations."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return lambda: torch.matmul(left, right, out=product), 2 * size**3


def matmul_rate(device: str, dtype: torch.dtype, size: int = MATMUL_SIZE) -> float:
    """Floating-point operations per second of that product, in the middle of several warm turns."""
    clock = Clock(device)
    function, operations = make_matmul(device, dtype, size)
    function()
    repeats = clock.repeats(function)
    return operations / statistics.median([clock.turn(function, repeats) for _ in range(10)])


def quartiles(numerator: list[float], denominator: list[float]) -> list[float]:
    """The quartiles of the rounds' ratios; the second is the median."""
    return statistics.quantiles([above / below for above, below in zip(numerator, denominator)], n=4, method="inclusive")


def compiled_without_fallback() -> contextlib.AbstractContextManager:
    """`torch.compile` for each shape and function of its own, as often as it takes.

    By default it runs a function uncompiled after eight recompilations, and compiles for any length after the second one, both
    without a word in the results.
    """
    return torch._dynamo.config.patch(
        recompile_limit=1000,
        accumulated_recompile_limit=10_000,
        fail_on_recompile_limit_hit=True,
        automatic_dynamic_shapes=False,
    )


def attempt(name: str, function: Callable[[], object]) -> str | None:
    """Runs what may fail on a device that nobody has tried: the reason in a few words, the whole of it on stderr.

    One candidate that fails must not cost the figures of all others. Whoever calls this shows the reason in place of a figure.
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

"""How many threads PyTorch computes with on a CPU that other programs use too.

Threads wait for each other, so one that must share its core holds up all: PyTorch's default can take many times as
long as one thread. Another number of threads adds numbers in another order, so runs that are resumed keep theirs.
"""

import os
import time
from pathlib import Path

import torch
from transformers.utils import logging

from ..disk import read_text, write_text
from ..files import THREADS_FILE


logger = logging.get_logger(__name__)

# Another number than PyTorch's must be so many times as fast; on an idle machine none is
_GAIN = 1.5
# Seconds for each number, and the width of the matrices, whose product takes some milliseconds
_SECONDS, _WIDTH = 0.2, 384
# By which a user has chosen
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def choose_threads() -> int:
    """Returns PyTorch's number of threads, or on a busy CPU a smaller one that computes faster, and says so.

    Nothing is measured if an environment variable sets the number, or if there is an accelerator.
    """
    default = torch.get_num_threads()
    if default == 1 or torch.accelerator.is_available() or any(name in os.environ for name in _VARIABLES):
        return default
    numbers = sorted({max(1, default >> shift) for shift in range(default.bit_length())}, reverse=True)
    seconds = {threads: _seconds_of_product(threads) for threads in numbers}
    best = min(numbers, key=seconds.get)
    gain = seconds[default] / seconds[best]
    if gain < _GAIN:
        return default
    logger.warning(
        f"threads: {best} instead of PyTorch's {default}, {gain:.1f} times as fast now, as other programs use this "
        "machine; OMP_NUM_THREADS sets another number"
    )
    return best


def _seconds_of_product(threads: int) -> float:
    """Returns the mean time of a product of matrices, with the waiting of threads for each other."""
    before, matrix = torch.get_num_threads(), torch.ones(_WIDTH, _WIDTH)
    torch.set_num_threads(threads)
    try:
        matrix @ matrix  # starts the threads
        start, count = time.perf_counter(), 0
        while (seconds := time.perf_counter() - start) < _SECONDS or count == 0:
            matrix @ matrix
            count += 1
        return seconds / count
    finally:
        torch.set_num_threads(before)


def threads_of(folder: Path, given: int | None = None) -> int:
    """Returns the number of threads for the runs in a folder: the `given` one, or else that with which it was begun.

    The first call chooses and writes it.
    """
    file = folder / THREADS_FILE
    if not file.is_file():
        threads = given or choose_threads()
        write_text(file, f"{threads}\n")
        return threads
    text = read_text(file).strip()
    if not (text.isdecimal() and int(text)):
        raise ValueError(f"{file} must hold a number of threads, and holds {text[:20]!r}")
    if given not in (None, int(text)):
        logger.warning(f"threads: {given}, and {folder} was begun with {text}: results may differ in the last digits")
    return given or int(text)

"""Time and memory of causal attention for every activation, beside PyTorch's fused softmax (SDPA).

    python benchmarks/attention.py                                        # on the CPU, in float32 and bfloat16
    python benchmarks/attention.py --backends nlq_cpp                     # the C++ code, on a CPU with AVX-512
    python benchmarks/attention.py --device cuda --backends nlq_tiled flex_attention

The candidates of a length take turns in one process, so that other work of the machine slows all of them alike. On
CUDA a time is the device's, by events, and `wall` is the median of calls that the processor waits for. The ratio is
the median of the rounds' ratios, with its quartiles. Memory is the peak of one forward and backward pass beyond its
inputs. On the CPU it is measured in a new process. Before anything is timed, outputs and gradients must equal those of
`eager` in float32 within the rounding of the dtype.
"""

import argparse
import platform
import statistics
from collections.abc import Callable

import torch
from measure import (
    Clock,
    attempt,
    attention_layer,
    compiled_without_fallback,
    describe,
    in_new_process,
    process_memory,
    quartiles,
    seconds,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS, LIBRARY_ACTIVATIONS, get_attention_activation
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS, AttentionRequest
from modeling_nlq.masking_nlq import FlexMask, make_visibility


ELEMENTWISE = [name for name, activation in ATTENTION_ACTIVATIONS.items() if activation.is_elementwise]
# PyTorch's own choice, and the two fused kernels of a GPU
SDPA = {
    "sdpa": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "sdpa_flash": [SDPBackend.FLASH_ATTENTION],
    "sdpa_cudnn": [SDPBackend.CUDNN_ATTENTION],
}
BASELINES = {"cpu": [("sdpa", "softmax")], "cuda": [("sdpa_flash", "softmax"), ("sdpa_cudnn", "softmax")]}
DIRECTIONS = ("forward", "forward and backward")
DEFAULTS = {
    "cpu": {"dtypes": ["float32", "bfloat16"], "lengths": [512, 1024, 2048, 4096], "batch": 1, "heads": 4},
    "cuda": {"dtypes": ["bfloat16"], "lengths": [1024, 4096, 16384], "batch": 4, "heads": 16},
}
Candidate = tuple[str, str]  # backend, activation


class Problem:
    """Random queries, keys, values and a gradient of the output, `(batch, heads, length, head_dim)`."""

    def __init__(self, arguments: argparse.Namespace, length: int, dtype: torch.dtype):
        shape = (arguments.batch, arguments.heads, length, arguments.head_dim)
        options = {"dtype": dtype, "device": arguments.device}
        self.inputs = [torch.randn(shape, **options, requires_grad=True) for _ in range(3)]
        self.gradient = torch.randn(shape, **options).transpose(1, 2)
        self.flex_mask = None
        if "flex_attention" in arguments.backends:
            block_mask = create_block_mask(
                lambda b, h, q, k: k <= q, None, None, length, length, device=arguments.device
            )
            visibility = make_visibility(length, length, 0, torch.device(arguments.device))
            self.flex_mask = FlexMask(block_mask, visibility.visible_count)

    def run(self, candidate: Candidate, direction: str) -> list[torch.Tensor]:
        """Returns the output, and with `"forward and backward"` the gradients of query, key and value."""
        backend, name = candidate
        mask = self.flex_mask if backend == "flex_attention" else None
        function = ATTENTION_BACKENDS["sdpa" if backend in SDPA else backend].function
        scaling = self.inputs[0].shape[-1] ** -0.5
        with torch.set_grad_enabled(direction != "forward"), sdpa_kernel(SDPA.get(backend, SDPA["sdpa"])):
            output, _ = function(attention_layer(name), *self.inputs, mask, scaling=scaling)
        if direction == "forward":
            return [output]
        return [output, *torch.autograd.grad(output, self.inputs, self.gradient)]

    def in_float32(self) -> "Problem":
        """Returns the same problem with the rounded inputs in float32."""
        copy = object.__new__(Problem)
        copy.inputs = [states.detach().float().requires_grad_() for states in self.inputs]
        copy.gradient, copy.flex_mask = self.gradient.float(), self.flex_mask
        return copy


def check(arguments: argparse.Namespace, candidate: Candidate, dtype: torch.dtype) -> None:
    """Raises `ValueError` if a candidate's results differ from those of `eager` in float32 by more than rounding."""
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    problem = Problem(arguments, 600, dtype)
    expected = problem.in_float32().run(("eager", candidate[1]), DIRECTIONS[1])
    for one, other in zip(expected, problem.run(candidate, DIRECTIONS[1])):
        error = (one - other).abs().max() / one.abs().max()
        if not error < tolerance:
            raise ValueError(f"wrong result, off by {error:.2g}, where {tolerance:.2g} is allowed")


def make_candidates(arguments: argparse.Namespace) -> list[Candidate]:
    """Returns softmax on SDPA, and each backend with the activations that it computes."""
    candidates = list(BASELINES[arguments.device])
    for backend in arguments.backends:
        computes = ATTENTION_BACKENDS[backend].computes
        names = ["softmax", *arguments.activations] if backend == "flex_attention" else arguments.activations
        candidates += [(backend, name) for name in names if computes(AttentionRequest(get_attention_activation(name)))]
    return candidates


def measure_times(
    problem: Problem, candidates: list[Candidate], direction: str, rounds: int
) -> dict[Candidate, list[float]]:
    """Returns the seconds of each candidate in each round."""
    clock, times = Clock(problem.inputs[0].device.type), {candidate: [] for candidate in candidates}
    repeats = {}
    for candidate in candidates:  # which warms up
        problem.run(candidate, direction)
        repeats[candidate] = clock.repeats(lambda: problem.run(candidate, direction))  # noqa: B023
    for _ in range(rounds):
        for candidate in candidates:
            times[candidate].append(clock.turn(lambda: problem.run(candidate, direction), repeats[candidate]))  # noqa: B023
    return times


def measure_walls(
    problem: Problem, candidates: list[Candidate], direction: str, rounds: int
) -> dict[Candidate, float]:
    """Returns the median seconds of a call until the device has finished it."""
    walls = {}
    for candidate in candidates:
        calls = [seconds(lambda: problem.run(candidate, direction), "cuda") for _ in range(rounds)]  # noqa: B023
        walls[candidate] = statistics.median(calls)
    return walls


def peak_memory(arguments: argparse.Namespace, candidate: Candidate, length: int, dtype: torch.dtype) -> int:
    """Returns the peak bytes of one forward and backward pass beyond its inputs, on the CPU in a separate process."""
    Problem(arguments, 64, dtype).run(candidate, DIRECTIONS[1])  # libraries load their kernels
    problem, is_cuda = Problem(arguments, length, dtype), arguments.device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if is_cuda else process_memory("VmRSS")
    problem.run(candidate, DIRECTIONS[1])
    return (torch.cuda.max_memory_allocated() if is_cuda else process_memory("VmHWM")) - before


def print_table(
    title: str, lengths: list[int], candidates: list[Candidate], cell: Callable[[int, Candidate], str]
) -> None:
    print(
        f"\n| {title} | " + " | ".join(f"{length:,}" for length in lengths) + " |\n|---" + "|---:" * len(lengths) + "|"
    )
    for candidate in candidates:
        cells = " | ".join(cell(length, candidate) for length in lengths)
        print(f"| {candidate[1]}, {candidate[0]} | {cells} |", flush=True)


def report(arguments: argparse.Namespace, name: str) -> bool:
    """Prints the tables of one dtype, and returns whether every candidate could be measured."""
    dtype, candidates, has_failed = getattr(torch, name), [], False
    for candidate in make_candidates(arguments):
        if reason := attempt(str(candidate), lambda: check(arguments, candidate, dtype)):  # noqa: B023
            print(f"\n{candidate[1]}, {candidate[0]}: {reason}")
            has_failed = True
        else:
            candidates.append(candidate)
    for direction in DIRECTIONS:
        times, walls = {}, {}
        for length in arguments.lengths:
            problem = Problem(arguments, length, dtype)
            times[length] = measure_times(problem, candidates, direction, arguments.rounds)
            if arguments.device == "cuda":
                walls[length] = measure_walls(problem, candidates, direction, arguments.rounds)

        def cell(length: int, candidate: Candidate) -> str:
            own, base = times[length][candidate], times[length][candidates[0]]  # noqa: B023
            low, middle, high = quartiles(own, base)
            wall = f" (wall {1000 * walls[length][candidate]:.2f})" if walls else ""  # noqa: B023
            return f"{1000 * statistics.median(own):.2f} ms{wall}, {middle:.2f} ({low:.2f} to {high:.2f})"

        title = f"{direction}, {name}: time, and that over {', '.join(reversed(candidates[0]))}"
        print_table(title, arguments.lengths, candidates, cell)
    if arguments.memory:

        def memory(length: int, candidate: Candidate) -> str:
            inputs = (arguments, candidate, length, dtype)
            peak = peak_memory(*inputs) if arguments.device == "cuda" else in_new_process(peak_memory, *inputs)
            return f"{peak / 2**20:.1f}"

        print_table(f"{DIRECTIONS[1]}, {name}: MiB beyond the inputs", arguments.lengths, candidates, memory)
    return not has_failed


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backends", nargs="+", default=["nlq_tiled", "eager"], choices=list(ATTENTION_BACKENDS))
    parser.add_argument("--activations", nargs="+", default=ELEMENTWISE, choices=[*ELEMENTWISE, *LIBRARY_ACTIVATIONS])
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--heads", type=int)
    arguments = parser.parse_args(words)
    for name, default in DEFAULTS[arguments.device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device here")
    torch.manual_seed(0)
    print(describe(arguments.device))
    print(f"batch {arguments.batch}, {arguments.heads} heads of {arguments.head_dim}, causal, {platform.machine()}")
    with compiled_without_fallback():  # FlexAttention, for each activation, length and direction
        return int(sum(not report(arguments, name) for name in arguments.dtypes) > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""Time and memory of `nlq_tiled` with a sliding window, forward and backward, by length, beside the same without a
window.

    python benchmarks/windows.py                     # window 256, lengths from 2,048 to 32,768, on the CPU in float32

The lengths and candidates take turns in one process, and times are medians over the rounds. Memory is the peak of one
forward and backward pass beyond its inputs, in a new process. Before anything is timed, the outputs and gradients must
equal those of `eager`.
"""

import argparse
import statistics

import torch
from measure import attention_layer, in_new_process, process_memory, seconds

from modeling_nlq.backends_nlq import ATTENTION_BACKENDS
from modeling_nlq.masking_nlq import make_visibility


HEAD_DIM = 64


def make_inputs(heads: int, length: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns query, key and value `(1, heads, length, head_dim)`, and a gradient of the output."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, length, HEAD_DIM, requires_grad=True) for _ in range(3)]
    return inputs, torch.randn(1, length, heads, HEAD_DIM)


def step(activation: str, backend: str, inputs: list[torch.Tensor], gradient: torch.Tensor, window: int | None):
    """Returns the output of one forward and backward pass, and the gradients of query, key and value."""
    length = inputs[0].shape[2]
    mask = make_visibility(length, length, 0, torch.device("cpu"), sliding_window=window)
    output, _ = ATTENTION_BACKENDS[backend].function(attention_layer(activation), *inputs, mask, HEAD_DIM**-0.5)
    return [output, *torch.autograd.grad(output, inputs, gradient)]


def gate(arguments: argparse.Namespace) -> None:
    """Raises `SystemExit` if the results of `nlq_tiled` differ from those of `eager`."""
    inputs, gradient = make_inputs(arguments.heads, 3 * arguments.window + 7)
    results = (step(arguments.activation, name, inputs, gradient, arguments.window) for name in ("eager", "nlq_tiled"))
    for expected, found in zip(*results):
        error = (expected - found).abs().max() / expected.abs().max()
        if not error < 1e-5:
            raise SystemExit(f"correctness gate: a window is off by {error:.2g}; nothing is timed")


def peak_memory(arguments: argparse.Namespace, length: int, window: int | None) -> int:
    """Returns the peak bytes of one forward and backward pass beyond its inputs; needs a process of its own."""
    torch.set_num_threads(arguments.threads)
    case = make_inputs(arguments.heads, length)
    before = process_memory("VmRSS")
    step(arguments.activation, "nlq_tiled", *case, window)
    return process_memory("VmHWM") - before


def report(arguments: argparse.Namespace) -> None:
    cases = {length: make_inputs(arguments.heads, length) for length in arguments.lengths}
    candidates = [(length, arguments.window) for length in cases]
    candidates += [(length, None) for length in cases if length <= arguments.whole_up_to]
    times: dict[tuple[int, int | None], list[float]] = {candidate: [] for candidate in candidates}
    for round_number in range(arguments.rounds + 1):  # the first one warms up
        for length, window in candidates:
            elapsed = seconds(lambda: step(arguments.activation, "nlq_tiled", *cases[length], window))  # noqa: B023
            if round_number:
                times[length, window].append(elapsed)
    medians = {candidate: statistics.median(values) for candidate, values in times.items()}
    peaks = {candidate: in_new_process(peak_memory, arguments, *candidate) for candidate in candidates}
    first = arguments.lengths[0], arguments.window
    print(
        "| length | window, ms | x shortest | MiB | x shortest | no window, ms | MiB |\n|---|---|---|---|---|---|---|"
    )
    for length in cases:
        own, whole = (length, arguments.window), (length, None)
        cells = [f"{length:,}", f"{1000 * medians[own]:.1f}", f"{medians[own] / medians[first]:.1f}"]
        cells += [f"{peaks[own] / 2**20:.1f}", f"{peaks[own] / peaks[first]:.1f}"]
        cells += [f"{1000 * medians[whole]:.1f}", f"{peaks[whole] / 2**20:.1f}"] if whole in medians else ["-", "-"]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--activation", default="sigmoid")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument(
        "--whole-up-to", type=int, default=8192, help="longest length that is measured without a window too"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    gate(arguments)
    report(arguments)


if __name__ == "__main__":
    main()

"""Time and memory of attention for every activation, forward and backward, beside PyTorch's softmax.

    python benchmarks/attention.py                       # time and memory on the CPU, in float32 and bfloat16
    python benchmarks/attention.py --backend nlq_cpp     # the C++ code, on a CPU with AVX-512
    python benchmarks/attention.py --plot docs/images    # and the two pictures
    python benchmarks/attention.py --device cuda --markdown results/gpu/attention.md   # see `attention_cuda.py`

Measures causal attention of random queries, keys and values. The candidates of a length take turns in one process, so that
other work of the machine slows all of them alike. Times are medians, ratios are medians of the rounds' ratios. Memory is
measured in a fresh process: the peak of one forward and backward pass, minus what the process held before. Before anything is
timed, the backend must give the outputs and gradients of `eager`.
"""

import argparse
import multiprocessing
import platform
import statistics
import subprocess
import time
from pathlib import Path

import attention_cuda
import torch
from measure import attention_layer, quartiles

import modeling_nlq
from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS, LIBRARY_ACTIVATIONS
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS


ELEMENTWISE = [name for name, activation in ATTENTION_ACTIVATIONS.items() if activation.is_elementwise]
BASELINE = ("sdpa", "softmax")
DEFAULTS = {
    "cpu": {
        "dtypes": ["float32", "bfloat16"],
        "lengths": [512, 1024, 2048, 4096, 8192],
        "batch": 1,
        "heads": 4,
        "head_dim": [64],
    },
    "cuda": attention_cuda.DEFAULTS,
}


def attention(backend: str, name: str, inputs: list[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    """One forward and backward pass: the output, and the gradients of query, key and value."""
    function = ATTENTION_BACKENDS[backend].function
    output, _ = function(attention_layer(name), *inputs, None, scaling=inputs[0].shape[-1] ** -0.5)
    return [output, *torch.autograd.grad(output, inputs, gradient)]


def make_inputs(arguments: argparse.Namespace, length: int, dtype: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    options = {"dtype": getattr(torch, dtype)}
    shape = (arguments.batch, arguments.heads, length, arguments.head_dim)
    inputs = [torch.randn(shape, **options, requires_grad=True) for _ in range(3)]
    return inputs, torch.randn(shape, **options).transpose(1, 2)


def gate(arguments: argparse.Namespace, dtype: str) -> None:
    """Checks the results before anything is timed.

    Raises:
        SystemExit: if outputs or gradients of the backend differ from those of `eager` in float32 by more than the rounding of
            `dtype`.
    """
    tolerance = 1e-5 if dtype == "float32" else 4 * torch.finfo(getattr(torch, dtype)).eps
    for name in arguments.activations:
        inputs, gradient = make_inputs(arguments, 600, dtype)
        exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
        expected = attention("eager", name, exact, gradient.float())
        for one, other in zip(expected, attention(arguments.backend, name, inputs, gradient)):
            error = (one - other).abs().max() / one.abs().max()
            if not error < tolerance:
                raise SystemExit(f"correctness gate: {name} in {dtype} is off by {error:.2g}; nothing is timed")


def seconds(candidate: tuple[str, str], inputs: list[torch.Tensor], gradient: torch.Tensor) -> float:
    start = time.perf_counter()
    attention(*candidate, inputs, gradient)
    return time.perf_counter() - start


def measure_time(arguments: argparse.Namespace, length: int, dtype: str) -> dict[tuple[str, str], list[float]]:
    """Seconds of each candidate, `(backend, activation)`, in each round."""
    inputs, gradient = make_inputs(arguments, length, dtype)
    backends = (arguments.backend, "eager") if arguments.eager else (arguments.backend,)
    candidates = [BASELINE, *((backend, name) for backend in backends for name in arguments.activations)]
    times = {candidate: [] for candidate in candidates}
    rounds = arguments.rounds if length <= 2048 else max(arguments.rounds // 3, 3)
    for round_number in range(rounds + 1):  # the first one warms up
        attention(*BASELINE, inputs, gradient)  # the call after eager is slower, because eager freed large matrices
        for candidate in candidates:
            elapsed = seconds(candidate, inputs, gradient)
            if round_number:
                times[candidate].append(elapsed)
    return times


def report_time(arguments: argparse.Namespace, dtype: str) -> dict[int, dict[tuple[str, str], list[float]]]:
    gate(arguments, dtype)
    ours = arguments.backend
    print(f"\n{dtype}: time of {ours} as a multiple of softmax's on SDPA (quartiles); eager's as a multiple of {ours}'s")
    width = max(map(len, arguments.activations))
    results = {}
    for length in arguments.lengths:
        times = results[length] = measure_time(arguments, length, dtype)
        print(f"length {length}, SDPA {1000 * statistics.median(times[BASELINE]):.1f} ms")
        for name in arguments.activations:
            low, middle, high = quartiles(times[ours, name], times[BASELINE])
            line = f"  {name:{width}}  {middle:.2f} ({low:.2f} to {high:.2f})"
            if arguments.eager:
                line += f"  eager {quartiles(times['eager', name], times[ours, name])[1]:.1f}"
            print(line, flush=True)
    return results


def process_memory(field: str) -> int:
    """Returns the bytes of this process: `"VmRSS"` now, `"VmHWM"` at its peak (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: memory on the CPU can be measured on Linux only")


def peak_memory(arguments: argparse.Namespace, backend: str, name: str, length: int, dtype: str) -> int:
    """Returns the peak bytes of one forward and backward pass beyond its inputs; needs a process of its own."""
    attention(backend, name, *make_inputs(arguments, 64, dtype))  # libraries load their kernels
    inputs, gradient = make_inputs(arguments, length, dtype)
    before = process_memory("VmRSS")
    attention(backend, name, inputs, gradient)
    return process_memory("VmHWM") - before


def report_memory(arguments: argparse.Namespace, name: str, dtype: str) -> dict[int, dict[tuple[str, str], int]]:
    candidates = [BASELINE, (arguments.backend, name), ("eager", name)]
    print(f"\n{dtype}: peak memory of forward and backward beyond the inputs, MiB")
    print(
        f"{'length':>8}"
        + "".join(f"{' '.join(candidate):>20}" for candidate in candidates)
        + f"{'eager/' + arguments.backend:>20}"
    )
    results = {}
    # A new process for each measurement, because the peak of a process never falls
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for length in arguments.lengths:
            peaks = results[length] = {
                candidate: pool.apply(peak_memory, (arguments, *candidate, length, dtype)) for candidate in candidates
            }
            cells = "".join(f"{peak / 2**20:>20.1f}" for peak in peaks.values())
            print(f"{length:>8}{cells}{peaks['eager', name] / peaks[arguments.backend, name]:>20.1f}", flush=True)
    return results


def plot(folder: Path, device: str, dtype: str, times: dict, memory: dict, memory_name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = list(times)
    styles = {"sdpa": "k--", "nlq_tiled": "-", "nlq_cpp": "-", "eager": ":"}
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    colours = {}
    for backend, name in times[lengths[0]]:
        options = {} if backend == "sdpa" else {"color": colours.setdefault(name, f"C{len(colours)}")}
        values = [1000 * statistics.median(times[length][backend, name]) for length in lengths]
        label = {"sdpa": "softmax, SDPA", "eager": None}.get(backend, f"{name}, {backend}")
        axes.plot(lengths, values, styles[backend], label=label, **options)
    axes.plot([], [], ":", color="grey", label="the same, eager")
    axes.set(ylabel="forward and backward, ms", title=f"Causal attention, {device}, {dtype}")
    _finish(figure, axes, lengths, folder / "attention-time.png")

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for backend, name in memory[lengths[0]]:
        options = {} if backend == "sdpa" else {"color": colours[memory_name]}
        values = [memory[length][backend, name] / 2**20 for length in lengths]
        axes.plot(lengths, values, styles[backend], marker=".", label=f"{name}, {backend}", **options)
    axes.set(ylabel="peak memory beyond the inputs, MiB", title=f"Causal attention, forward and backward, {dtype}")
    _finish(figure, axes, lengths, folder / "attention-memory.png")


def _finish(figure, axes, lengths: list[int], path: Path) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("length, tokens")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def report_cpu(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"{device}; batch {arguments.batch}, {arguments.heads} heads of {arguments.head_dim}, causal, forward and backward")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"nlq {modeling_nlq.__version__} {commit}, torch {torch.__version__}")
    memory_name = arguments.activations[0]
    times, memory = {}, {}
    for dtype in arguments.dtypes:
        times[dtype] = report_time(arguments, dtype)
        if arguments.eager:
            memory[dtype] = report_memory(arguments, memory_name, dtype)
    if arguments.plot is not None and arguments.eager:
        dtype = arguments.dtypes[0]
        plot(arguments.plot, device, dtype, times[dtype], memory[dtype], memory_name)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="the defaults in brackets are those of both")
    parser.add_argument("--backend", default="nlq_tiled", choices=["nlq_tiled", "nlq_cpp"], help="on the CPU")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"], help=_defaults("dtypes"))
    parser.add_argument("--lengths", nargs="+", type=int, help=_defaults("lengths"))
    parser.add_argument("--activations", nargs="+", default=ELEMENTWISE, choices=[*ELEMENTWISE, *LIBRARY_ACTIVATIONS])
    parser.add_argument("--batch", type=int, help=_defaults("batch"))
    parser.add_argument("--heads", type=int, help=_defaults("heads"))
    parser.add_argument("--head_dim", nargs="+", type=int, help=_defaults("head_dim"))
    parser.add_argument("--rounds", type=int, default=15, help="on the CPU up to length 2048, a third of them beyond")
    parser.add_argument(
        "--eager", action=argparse.BooleanOptionalAction, default=True, help="eager's time too, and memory: most of the minutes"
    )
    parser.add_argument(
        "--flex",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="CUDA: FlexAttention too, minutes of compiling",
    )
    parser.add_argument("--plot", type=Path, help="CPU: folder for the two pictures, drawn from the first dtype")
    parser.add_argument("--markdown", type=Path, help="CUDA: file for the tables, as docs/benchmarks.md has them")
    arguments = parser.parse_args(words)
    for name, default in DEFAULTS[arguments.device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)

    if arguments.device == "cuda":
        if arguments.plot is not None:
            parser.error("--plot draws what is measured on the CPU; on CUDA use --markdown")
        if not torch.cuda.is_available():
            parser.error("--device cuda: PyTorch sees no CUDA device here")
        if attention_cuda.OURS not in ATTENTION_BACKENDS:
            parser.error(f"--device cuda measures the backend {attention_cuda.OURS}, which this version does not have")
    elif arguments.markdown is not None:
        parser.error("--markdown is for --device cuda")
    elif len(arguments.head_dim) > 1:
        parser.error("--head_dim: one at a time on the CPU")
    else:
        arguments.head_dim = arguments.head_dim[0]
    return arguments


def _defaults(name: str) -> str:
    def text(value) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    on_cuda = attention_cuda.COMPUTED.get(name) or text(DEFAULTS["cuda"][name])
    return f"[{text(DEFAULTS['cpu'][name])}; CUDA: {on_cuda}]"


def main() -> None:
    arguments = parse_arguments()
    if arguments.device == "cuda":
        torch.manual_seed(0)
        raise SystemExit(attention_cuda.report(arguments))
    report_cpu(arguments)


if __name__ == "__main__":
    main()

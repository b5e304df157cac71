"""Compares linear attention with PyTorch's softmax: training time by length, and time and memory of decoding by
context.

    python benchmarks/linear.py                      # both, on the CPU, in float32
    python benchmarks/linear.py --plot docs/images   # and the picture of decoding
    python benchmarks/linear.py --device cuda

Training: attention alone, forward and backward, on random queries, keys and values. Decoding: a whole model of two
layers with rotary positions, which generates tokens after a context of a given length. The softmax model's cache holds
random keys and values, because computing them would take minutes. The candidates take turns in one process, and times
are medians over the rounds. Memory is that of the cache. Before anything is timed, the chunked form must give the
outputs and gradients of the parallel one.
"""

import argparse
import statistics
from pathlib import Path

import torch
from measure import describe, seconds
from transformers import DynamicCache

from modeling_nlq import NLQConfig, NLQForCausalLM
from modeling_nlq.linear_nlq import fixed_log_decay, linear_attention


HEAD_DIM = 64
MODELS = {
    "softmax": {"attention_activation": "softmax"},
    "linear": {"attention_activation": "linear_attention"},
    "linear, fixed decay": {"attention_activation": "linear_attention", "linear_attention_decay": "fixed"},
    "linear, learned decay": {"attention_activation": "linear_attention", "linear_attention_decay": "learned"},
    "delta": {"attention_activation": "linear_attention", "linear_attention_update": "delta"},
}


def train_step(
    name: str, inputs: list[torch.Tensor], gradient: torch.Tensor, form: str = "chunked"
) -> list[torch.Tensor]:
    """Returns the output of one forward and backward pass, and the gradients of query, key and value."""
    if name == "softmax":
        output = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True).transpose(1, 2)
    else:
        heads = inputs[0].shape[1]
        log_decay = fixed_log_decay(heads).to(inputs[0].device) if "decay" in name else None
        beta = inputs[0].new_full(inputs[0].shape[:-1], 0.5) if name == "delta" else None
        output, _ = linear_attention(*inputs, None, HEAD_DIM**-0.5, log_decay, form=form, beta=beta)
    return [output, *torch.autograd.grad(output, inputs, gradient)]


def make_inputs(arguments: argparse.Namespace, length: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    shape = (1, arguments.heads, length, HEAD_DIM)
    inputs = [torch.randn(shape, device=arguments.device, requires_grad=True) for _ in range(3)]
    return inputs, torch.randn(shape, device=arguments.device).transpose(1, 2)


def gate(arguments: argparse.Namespace) -> None:
    """Raises `SystemExit` if the chunked form differs from the parallel one, before anything is timed."""
    inputs, gradient = make_inputs(arguments, 600)
    for name in ("linear", "linear, fixed decay", "delta"):
        forms = (train_step(name, inputs, gradient, form) for form in ("parallel", "chunked"))
        for expected, found in zip(*forms):
            error = (expected - found).abs().max() / expected.abs().max()
            if not error < 1e-5:
                raise SystemExit(f"correctness gate: {name} is off by {error:.2g}; nothing is timed")


def report_training(arguments: argparse.Namespace) -> None:
    print("training: forward and backward, milliseconds; as a multiple of softmax")
    for length in arguments.lengths:
        inputs, gradient = make_inputs(arguments, length)
        times: dict[str, list[float]] = {name: [] for name in ("softmax", "linear", "linear, fixed decay", "delta")}
        for round_number in range(arguments.rounds + 1):  # the first one warms up
            for name in times:
                elapsed = seconds(lambda: train_step(name, inputs, gradient), arguments.device)  # noqa: B023
                if round_number:
                    times[name].append(elapsed)
        medians = {name: statistics.median(values) for name, values in times.items()}
        cells = [f"{name} {1000 * value:.1f} ({value / medians['softmax']:.2f})" for name, value in medians.items()]
        print(f"  length {length:6}: {', '.join(cells)}", flush=True)


def make_model(arguments: argparse.Namespace, name: str) -> NLQForCausalLM:
    torch.manual_seed(0)
    config = NLQConfig(
        vocab_size=8192,
        hidden_size=HEAD_DIM * arguments.heads,
        num_hidden_layers=2,
        num_attention_heads=arguments.heads,
        query_projection="linear",
        position_embedding="rope",
        **MODELS[name],
    )
    return NLQForCausalLM(config).to(arguments.device).eval()


def fill(arguments: argparse.Namespace, model: NLQForCausalLM, context: int) -> DynamicCache:
    """Makes a cache of `context` tokens."""
    cache = DynamicCache(config=model.config)
    if model.config.attention_activation == "softmax":
        shape = (1, arguments.heads, context, HEAD_DIM)
        for index in range(model.config.num_hidden_layers):
            cache.update(
                torch.randn(shape, device=arguments.device), torch.randn(shape, device=arguments.device), index
            )
    else:
        model.model(torch.randint(8192, (1, context), device=arguments.device), past_key_values=cache)
    return cache


def cache_bytes(cache: DynamicCache) -> int:
    states = (tensor for layer in cache.layers for tensor in vars(layer).values())
    tensors = [part for state in states for part in (state.values() if isinstance(state, dict) else [state])]
    return sum(part.numel() * part.element_size() for part in tensors if isinstance(part, torch.Tensor))


@torch.no_grad()
def report_decoding(arguments: argparse.Namespace) -> dict[str, list[tuple[int, float]]]:
    print("decoding: milliseconds a token (as a multiple of the first context's); kilobytes of cache")
    curves: dict[str, list[tuple[int, float]]] = {}
    for name in MODELS:
        model = make_model(arguments, name)
        token = torch.zeros(1, 1, dtype=torch.long, device=arguments.device)
        caches = {context: fill(arguments, model, context) for context in arguments.contexts}
        times: dict[int, list[float]] = {context: [] for context in caches}
        for round_number in range(arguments.tokens + 5):
            for context, cache in caches.items():
                elapsed = seconds(lambda: model(token, past_key_values=cache), arguments.device)  # noqa: B023
                if round_number >= 5:
                    times[context].append(elapsed)
        curves[name] = [(context, statistics.median(values)) for context, values in times.items()]
        first = curves[name][0][1]
        cells = [
            f"{context}: {1000 * value:.2f} ({value / first:.2f}), {cache_bytes(caches[context]) / 1024:,.0f} kB"
            for context, value in curves[name]
        ]
        print(f"  {name}: {'; '.join(cells)}", flush=True)
    return curves


def plot(curves: dict[str, list[tuple[int, float]]], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, points in curves.items():
        lengths, times = zip(*points)
        axes.plot(lengths, [1000 * value for value in times], marker="o", label=name)
    axes.set(xlabel="tokens in the context", ylabel="milliseconds a token", xscale="log", yscale="log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(folder / "decoding-time.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192], help="beside softmax"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--rounds", type=int, default=9, help="of training")
    parser.add_argument("--tokens", type=int, default=50, help="decoded after each context")
    parser.add_argument("--plot", type=Path, help="folder for the picture")
    arguments = parser.parse_args()
    print(f"{describe(arguments.device)}; {arguments.heads} heads of {HEAD_DIM}")
    gate(arguments)
    curves = report_decoding(arguments)
    report_training(arguments)
    if arguments.plot:
        plot(curves, arguments.plot)


if __name__ == "__main__":
    main()

"""Speed and memory of a pretrained model, as an NLQ model and in the class of Transformers that it comes from.

    python benchmarks/pretrained.py                       # the file that `make test-weights` fetches
    python benchmarks/pretrained.py --source runs/llama --dtypes bfloat16

It measures loading from a folder, a prompt, each token that greedy `generate` adds to it, and a training step
(forward, backward and fused AdamW, on one text). The models take turns in one process. A multiple is the median of the
rounds' ratios to Llama's time, with its quartiles. The peak of resident memory (Linux only) is the median of
`--processes` new processes. Before anything is timed, both models must give the same logits. bfloat16 means weights,
gradients and optimizer in it.
"""

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
import transformers
from generation import Setting, turn
from measure import in_new_process, process_memory, processor, quartiles, seconds
from training_step import make_step, transformers_loss
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import modeling_nlq  # registers the model
from modeling_nlq.training.conversion.converting import convert


REFERENCE, OURS = "Llama", "NLQ"
LOAD, PROMPT, TOKEN, STEP = "load", "prompt", "token", "training step"
TOLERANCE = 1e-4  # of the largest logit, in float32
# Without autocast: weights and gradients have the model's dtype
STEP_OPTIONS = argparse.Namespace(device="cpu", dtype="float32", compile=False)


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def random_tokens(model: PreTrainedModel, length: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


def gate(folders: dict[str, Path], length: int) -> None:
    """Raises `SystemExit` if the models give other logits."""
    with torch.no_grad():
        logits = [
            (model := load(folder, torch.float32))(random_tokens(model, length)).logits for folder in folders.values()
        ]
    error = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
    if not error <= TOLERANCE:
        raise SystemExit(f"correctness gate: the logits differ by {error:.1e} of the largest; nothing is timed")


def measure_times(
    folders: dict[str, Path], dtype: torch.dtype, arguments: argparse.Namespace
) -> dict[str, dict[str, list]]:
    """Returns the seconds of all rounds: what -> model -> seconds."""
    setting = Setting(1, arguments.prompt, arguments.new, REFERENCE, shows_prompt=True)
    models = {name: load(folder, dtype) for name, folder in folders.items()}
    tokens = random_tokens(models[REFERENCE], arguments.prompt)
    times = {what: {name: [] for name in folders} for what in (LOAD, PROMPT, TOKEN)}
    for number in range(arguments.rounds + 1):  # the first round warms up
        for name, model in models.items():
            found = [seconds(partial(load, folders[name], dtype)), *turn(model, tokens, setting)]
            for what, value in zip(times, found if number else []):
                times[what][name].append(value)
    times[STEP] = {name: [] for name in folders}
    steps = {name: make_step(model, transformers_loss(model), STEP_OPTIONS) for name, model in models.items()}
    for number in range(arguments.rounds + 1):
        for name, step in steps.items():
            value = seconds(partial(step, tokens[:, : arguments.context]))
            if number:
                times[STEP][name].append(value)
    return times


def peak_memory(folder: Path, dtype: torch.dtype, what: str, arguments: argparse.Namespace) -> int:
    """Returns the peak of the resident memory of this process, after it has done one thing."""
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = load(folder, dtype)
    tokens = random_tokens(model, arguments.prompt)
    if what == STEP:
        step = make_step(model, transformers_loss(model), STEP_OPTIONS)
        for _ in range(2):  # the optimizer's state comes with the first
            step(tokens[:, : arguments.context])
    elif what != LOAD:
        turn(model, tokens, Setting(1, arguments.prompt, arguments.new if what == TOKEN else 2, REFERENCE))
    return process_memory("VmHWM")  # `ru_maxrss` would begin with the memory of the process that started this one


def measure_peak(folder: Path, dtype: torch.dtype, what: str, arguments: argparse.Namespace) -> int:
    """Returns the median peak of some new processes, in bytes."""
    inputs = (folder, dtype, what, arguments)
    return int(statistics.median(in_new_process(peak_memory, *inputs) for _ in range(arguments.processes)))


def report(dtype: str, times: dict[str, dict[str, list]], peaks: dict[str, dict[str, int]]) -> None:
    for what, rows in times.items():
        low, middle, high = quartiles(rows[OURS], rows[REFERENCE])
        cells = [what, dtype, *(f"{1000 * statistics.median(rows[name]):.1f}" for name in (REFERENCE, OURS))]
        cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        ours, theirs = peaks[what][OURS], peaks[what][REFERENCE]
        cells += [f"{theirs / 2**20:,.0f}", f"{ours / 2**20:,.0f}", f"{ours / theirs:.3f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--source", default=".cache/pretrained/model.gguf", help="a model of Llama's family: folder or GGUF file"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens that are generated")
    parser.add_argument("--context", type=int, default=512, help="tokens of a training step")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processes", type=int, default=3, help="processes whose memory is measured, for each figure")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as root:
        folders = {REFERENCE: Path(root) / "llama", OURS: Path(root) / "nlq"}
        convert(arguments.source, folders[OURS])
        convert(folders[OURS], folders[REFERENCE], to="llama")
        gate(folders, arguments.context)
        print(
            f"{processor()}, {arguments.threads} threads; torch {torch.__version__}, transformers "
            f"{transformers.__version__}, nlq {modeling_nlq.__version__}; prompt of {arguments.prompt:,}, "
            f"{arguments.new} new tokens, training on {arguments.context} tokens; {arguments.rounds} rounds\n"
        )
        print(
            f"| | | {REFERENCE}, ms | {OURS}, ms | multiple (quartiles) | {REFERENCE}, MiB | {OURS}, MiB | multiple |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for name in arguments.dtypes:
            dtype = getattr(torch, name)
            times = measure_times(folders, dtype, arguments)
            peaks = {
                what: {model: measure_peak(folder, dtype, what, arguments) for model, folder in folders.items()}
                for what in times
            }
            report(name, times, peaks)


if __name__ == "__main__":
    main()

"""Measures the tokens per second of a comparison by `--jobs`, and how long the GPU is idle in a training step.

    python benchmarks/jobs.py                                     # on the GPU, if there is one
    python benchmarks/jobs.py --sizes 0.4M --jobs 1 2 4 8

Half of the runs train sigmoid attention, half relu. The columns are:

* `idle`: the share of the time of some steps in which PyTorch's profiler sees no kernel.
* `all`: the tokens of all runs per second of the whole command, which starts processes and evaluates.
* `training`: the sum of the tokens per second of the runs that train side by side.
"""

import argparse
import math
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import yaml
from measure import describe
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from modeling_nlq.training import compare
from modeling_nlq.training.result import RunResult
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.run.train import train_recipe


SIZES = {
    "0.4M": {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 384},
    "5M": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024},
    "30M": {"hidden_size": 512, "num_hidden_layers": 10, "num_attention_heads": 8, "intermediate_size": 2048},
}
SWITCHES = {"vocab_size": 2048, "attention_activation": "sigmoid", "position_embedding": "rope"}
# Steps before the profiler starts
WARM_UP = 10


class IdleShare(TrainerCallback):
    """Profiles the steps after the first `WARM_UP`. A profiler needs some memory for each step, so they are few."""

    share: float | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == WARM_UP:
            self.profiler = profile(activities=[ProfilerActivity.CUDA])
            self.profiler.start()

    def on_train_end(self, args, state, control, **kwargs):
        torch.cuda.synchronize()
        self.profiler.stop()
        events = [event.time_range for event in self.profiler.events() if event.device_type == DeviceType.CUDA]
        busy, end = 0.0, events[0].start
        for span in sorted(events, key=lambda span: span.start):
            busy += max(0.0, span.end - max(end, span.start))
            end = max(end, span.end)
        self.share = 1 - busy / (end - min(span.start for span in events))


def recipe_of(size: str, arguments: argparse.Namespace) -> dict:
    training = {
        "per_device_train_batch_size": arguments.batch,
        "max_steps": arguments.steps,
        "logging_steps": 0.25,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
    }
    recipe = {"model": "tiny-linear", "dataset": "python-stdlib", "tokenizer": "bpe:2048", "packing": "stream"}
    recipe |= {"block_size": arguments.length, "validation_fraction": 0.001, "record_stability": False}
    return recipe | {"switches": SWITCHES | SIZES[size], "training": training}


def measure_idle(size: str, arguments: argparse.Namespace, folder: Path) -> float:
    file, callback = folder / "recipe.yaml", IdleShare()
    content = recipe_of(size, arguments)
    content["training"]["max_steps"] = 2 * WARM_UP
    file.write_text(yaml.safe_dump(content))
    train_recipe(load_recipe(file, {"output_dir": str(folder / "profiled")}), callbacks=[callback])
    return callback.share


def measure_jobs(size: str, jobs: int, arguments: argparse.Namespace, folder: Path) -> tuple[float, float, list]:
    """Returns the tokens per second of the command and of its runs in training, and the MFU of each run."""
    content = {"recipe": recipe_of(size, arguments), "name": f"jobs-{jobs}", "learning_rates": [1e-3]}
    models = {name: {"switches": {"attention_activation": name}} for name in ("sigmoid", "relu")}
    content |= {"models": models, "baseline": "sigmoid", "seeds": list(range(math.ceil(jobs / len(models))))}
    file, results = folder / "comparison.yaml", folder / f"jobs-{jobs}"
    file.write_text(yaml.safe_dump(content))
    start = time.perf_counter()
    compare(file, results, jobs=jobs, cpus_per_run=arguments.threads)
    seconds = time.perf_counter() - start
    runs = [RunResult.load(path.parent) for path in results.glob("runs/*/*/metrics.json")]
    speeds = [run.machine.tokens_per_second for run in runs]
    in_all = sum(run.data.tokens_seen for run in runs) / seconds
    return in_all, jobs * statistics.mean(speeds), [run.machine.mfu for run in runs]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--jobs", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, help="of a run [its share of the cores on a GPU]")
    arguments = parser.parse_args(words)
    if (arguments.device == "cuda") != torch.cuda.is_available():
        parser.error(
            f"--device {arguments.device}: runs take a GPU if PyTorch sees one, which is the case only with cuda"
        )
    print(describe(arguments.device))
    print(f"{arguments.steps} steps of {arguments.batch} x {arguments.length} tokens\n")
    print("| size | idle | " + " | ".join(f"jobs {jobs}: all, training, MFU" for jobs in arguments.jobs) + " |")
    print("|---" * (2 + len(arguments.jobs)) + "|", flush=True)
    for size in arguments.sizes:
        folder = Path(tempfile.mkdtemp())
        try:
            cells = [f"{measure_idle(size, arguments, folder):.1%}" if arguments.device == "cuda" else "-"]
            for jobs in arguments.jobs:
                in_all, training, shares = measure_jobs(size, jobs, arguments, folder)
                mfu = "-" if None in shares else f"{jobs * statistics.mean(shares):.1%}"
                cells.append(f"{in_all:,.0f}, {training:,.0f}, {mfu}")
            print(f"| {size} | {' | '.join(cells)} |", flush=True)
        finally:
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

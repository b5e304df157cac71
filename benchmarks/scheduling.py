"""What it costs to start runs: runs of one optimizer step on each engine, and runs that are finished already.

    python benchmarks/scheduling.py --runs 200

The engine `ray` needs the extra `ray`. Each engine takes one thread for a run; Ray makes as many at once as there are CPUs.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import psutil
import torch
import yaml
from tqdm.auto import tqdm

from modeling_nlq.training.comparison.comparing import make_engine
from modeling_nlq.training.comparison.plan import Comparison, Run
from modeling_nlq.training.comparison.reading import load_comparison
from modeling_nlq.training.comparison.results import FinishedRuns, run_folder
from modeling_nlq.training.run.unattended import Order, train_unattended


MODEL = {"model_type": "nlq", "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TRAINING = {"max_steps": 1, "save_strategy": "no", "report_to": "none", "per_device_eval_batch_size": 32}


def plan(folder: Path, runs: int) -> Comparison:
    """A comparison of two models that are the same, on the first 20 documents that are held out."""
    (folder / "model.json").write_text(json.dumps({**MODEL, "max_position_embeddings": 64}))
    recipe = {"model": str(folder / "model.json"), "tokenizer": "bpe:512", "block_size": 64, "max_validation_documents": 5}
    content = {
        "recipe": {**recipe, "training": TRAINING, "record_stability": False},
        "baseline": "a",
        "models": {"a": None, "b": None},
        "learning_rates": [1e-3],
        "seeds": list(range(runs // 2)),
    }
    file = folder / "comparison.yaml"
    file.write_text(yaml.safe_dump(content))
    return load_comparison(file)


def all_runs(comparison: Comparison) -> list[Run]:
    return [Run(model, 1e-3, seed) for model in comparison.variants for seed in comparison.seeds]


def on_local(comparison: Comparison, folder: Path, data: Path, count: int) -> float:
    """Seconds for a run that is finished already: a process that starts, looks, and ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["modeling_nlq.training.comparison.local"])
    context.Process(target=int).start()
    begin = time.perf_counter()
    for run in all_runs(comparison)[:count]:
        process = context.Process(target=train_unattended, args=(order(comparison, run, folder, data),))
        process.start()
        process.join()
        assert process.exitcode == 0
    return (time.perf_counter() - begin) / count


def on_ray(comparison: Comparison, folder: Path, data: Path, count: int) -> float:
    """The same as a task of Ray, several at once."""
    from modeling_nlq.training.run.ray_jobs import RayJobs, Resources

    begin = time.perf_counter()
    with tqdm(disable=True) as progress:
        jobs = RayJobs(Resources(), 0, progress, 1)
        for run in all_runs(comparison)[:count]:
            jobs.submit(order(comparison, run, folder, data))
        assert len(list(jobs.finished())) == count
    return (time.perf_counter() - begin) / count


def order(comparison: Comparison, run: Run, folder: Path, data: Path) -> Order:
    path = run_folder(folder, run)
    return Order(run.name, comparison.resolve(run, path).given, str(path), str(data), threads=1)


def measure(name: str, comparison: Comparison, folder: Path) -> None:
    """Prints a row of the table."""
    engine, process = make_engine(name, cpus_per_run=1), psutil.Process()
    runs = len(all_runs(comparison))
    with engine.connected([comparison], folder), engine.alone_in(folder):
        data, _ = engine.prepare_data(comparison, folder)
        before, begin = process.memory_info().rss, time.perf_counter()
        engine.make_runs(comparison, folder, data, FinishedRuns(folder))
        seconds = (time.perf_counter() - begin) / runs
        grown = (process.memory_info().rss - before) / 2**20
        empty = (on_local if name == "local" else on_ray)(comparison, folder, data, min(runs, 20))
    memory = process.memory_info().rss / 2**20
    print(f"| {name} | {runs} | {seconds:.2f} | {empty:.2f} | {memory:.0f} | {grown:+.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--engines", nargs="+", choices=["local", "ray"], default=["local", "ray"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} CPUs")
    print("| engine | runs | seconds per run of one step | seconds per run without training | driver (MiB) | growth (MiB) |")
    print("|---|---|---|---|---|---|")
    for name in arguments.engines:
        with tempfile.TemporaryDirectory() as folder:
            measure(name, plan(Path(folder), arguments.runs), Path(folder) / "results")


if __name__ == "__main__":
    main()

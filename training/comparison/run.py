"""`nlq compare`: makes every run of a comparison once, on an engine, and then the results and the report."""

import functools
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from datasets import disable_progress_bars

from ..files import (
    COMPARISON_FILE,
    RESULTS_FILE,
    differences,
    read_json,
    write_text,
)
from ..models import config_differences, weights_fingerprint
from ..run.recipe import public_recipe
from ..run.run_folder import CLAIM_PATIENCE, RunFolder
from ..storage import open_folder, publish
from .downstream import read_scores, score_runs
from .explored import explore_best
from .ladder import gather_ladder, in_turn
from .local import LocalEngine
from .plan import Comparison, Ladder, default_folder, scales_of
from .reading import load_comparison, load_outline
from .report import write_report
from .results import RunStore, gather, unsettled_models
from .screening import Screening, run_screening
from .screening_report import write_screening_report


ADDED_SEEDS_FILE = "added_seeds.json"
FINGERPRINT_FILE = "dataset_fingerprint.txt"
MODELS_FILE = "models.json"


class Engine(Protocol):
    """Where and how the runs of a comparison are made."""

    def connected(self, comparisons: Sequence[Comparison], folder: Path) -> AbstractContextManager[None]:
        """A context in which runs can be made. It raises `ValueError` if they cannot; the folder has no file more then."""

    def alone_in(self, folder: Path) -> AbstractContextManager[None]:
        """A context inside `connected` in which no other process makes the runs of the folder unless the engine allows it."""

    def prepare_data(self, comparison: Comparison, folder: Path) -> tuple[Path, str | None]:
        """Makes tokenizer and data once for all runs, and returns their folder and the fingerprint of the documents.

        The scales of a ladder share `folder`, and so their tokenizer.
        """

    def make_runs(self, comparison: Comparison, folder: Path, data: Path, finished: RunStore) -> None:
        """Makes all runs that are not finished; raises `ChildProcessError` if one failed."""


def make_engine(name: str = "local", **options: Any) -> Engine:
    """Makes an engine.

    Args:
        name: `local` or `ray`.
        options: those of `LocalEngine` or `RayEngine`; `None` stands for the default.

    Raises:
        ValueError: for an unknown name, or an option that the engine does not have or whose value is not allowed.
    """
    given = {option: value for option, value in options.items() if value is not None}
    if name not in ("local", "ray"):
        raise ValueError(f"engine={name!r} must be 'local' or 'ray'")
    if name == "ray":
        from .on_ray import RayEngine

        return RayEngine(**given)
    if others := sorted(given.keys() - {"cpus_per_run"}):
        raise ValueError(f"{', '.join(others)}: only the engine 'ray' has that; set --engine ray")
    return LocalEngine(**given)


def compare(
    comparison: str | Path,
    output_dir: str | Path | None = None,
    *,
    engine: str = "local",
    cpus_per_run: int | None = None,
    gpus_per_run: float | None = None,
    workers_per_run: int | None = None,
    max_retries: int | None = None,
    trust_parts: bool = False,
    **overrides: Any,
) -> dict[str, Any]:
    """Trains the models of a comparison and reports which differ from the baseline. Called again, it goes on.

    Each run is a process of its own, so a script must call this under `if __name__ == "__main__":`.

    Args:
        comparison: name of a shipped comparison, or a YAML file.
        output_dir: results folder; by default `runs/compare-NAME`. With the engine `ray` also an address, such as
            `s3://bucket/results`.
        engine: `local`, one run after another on this machine, or `ray`, on the cluster that Ray finds.
        cpus_per_run: threads of a run; with `ray`, the CPUs it reserves. By default as many as PyTorch takes here.
        gpus_per_run, workers_per_run, max_retries: options of the engine `ray`, see `RayEngine`.
        trust_parts: run the parts whose code the file itself holds.
        overrides: fields of the recipe that all models share, as for `train`.

    Returns:
        The content of `results.json` in the results folder (see `gather`).

    Raises:
        ValueError: for an unknown field, name or value, a cluster that cannot make the runs, or a folder that cannot be written
            or holds another comparison or something else.
        ChildProcessError: if a run failed for another reason than its loss; finished runs stay.
    """
    options = {"cpus_per_run": cpus_per_run, "gpus_per_run": gpus_per_run}
    options |= {"workers_per_run": workers_per_run, "max_retries": max_retries}
    made = make_engine(engine, **options)
    loaded = load_comparison(comparison, overrides, trust_parts)
    return run_and_report(loaded, open_folder(output_dir or default_folder(loaded.name)), made)


def run_and_report(comparison: Comparison | Ladder | Screening, folder: Path, engine: Engine | None = None) -> dict[str, Any]:
    """Makes all runs that are not finished, writes the report, and returns the results; raises as `compare` does."""
    if isinstance(comparison, Screening):
        return _screen(comparison, folder, engine)
    results = run_comparison(comparison, folder, engine)
    if is_main_process():
        write_report(results, folder, has_page=explore_best(comparison, results, folder, folder))
        publish(folder)
    return results


def _screen(screening: Screening, folder: Path, engine: Engine | None) -> dict[str, Any]:
    """Makes a screening: its runs, their confirmation with a report of its own, and the report of both."""

    run, confirm = (functools.partial(make, engine=engine) for make in (run_comparison, run_and_report))
    results = run_screening(screening, folder, run, confirm)
    if is_main_process():
        write_screening_report(results, folder)
        publish(folder)
    return results


def is_main_process() -> bool:
    """Tells whether this is the first of the processes that a launcher started on this machine, or the only one."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def run_comparison(comparison: Comparison | Ladder, folder: Path, engine: Engine | None = None) -> dict[str, Any]:
    """Makes all runs that are not finished, and returns the results without a report.

    The scales of a ladder are made one after another, the smallest first (see `in_turn`).

    Args:
        comparison: the runs to make.
        folder: folder of the runs, or an address (see `storage`) if the engine takes one.
        engine: the engine; by default `LocalEngine()`.

    Raises:
        ValueError: if the folder holds another comparison or something else; nothing in it is touched.
        ChildProcessError: if a run failed for another reason than its loss; finished runs stay.
    """
    engine = engine or LocalEngine()
    if not sys.stderr.isatty():
        disable_progress_bars()  # a log file does not need those of the data
    scales = scales_of(comparison)
    gathered = {}
    with engine.connected(list(scales.values()), folder):
        _claim_folder(folder, comparison)
        with engine.alone_in(folder):
            check_same_models(folder / MODELS_FILE, scales)
            for name, scale, finished in in_turn(comparison, folder):
                data, fingerprint = engine.prepare_data(scale, folder)
                _check_same_dataset(folder / FINGERPRINT_FILE, fingerprint)
                engine.make_runs(scale, finished.folder, data, finished)
                for checkpoint in finished.folder.glob("runs/*/*/checkpoint-*"):
                    shutil.rmtree(checkpoint, ignore_errors=True)  # of a run that was killed after its last step
                if scale.tasks:
                    score_runs(scale, finished.folder, finished)
                gathered[name] = {**gather(scale, finished), "added_seeds": _added_seeds(folder).get(name, [])}
                unsettled = unsettled_models(gathered[name]["models"])
                gathered[name]["tasks"] = read_scores(scale, finished.folder, finished, unsettled)
            results = gather_ladder(comparison, gathered) if isinstance(comparison, Ladder) else gathered[""]
            text = json.dumps(results, allow_nan=False)
            write_text(folder / RESULTS_FILE, text + "\n")
    return json.loads(text)


def _claim_folder(folder: Path, comparison: Comparison | Ladder) -> None:
    """Writes the comparison into a new folder, or checks that it is the one there, which may have fewer seeds.

    Raises:
        ValueError: if the folder holds another comparison or something else.
    """
    place = RunFolder(folder, COMPARISON_FILE)
    with place.held(CLAIM_PATIENCE):
        before = place.made_from()
        if isinstance((before or {}).get("recipe"), dict):
            before["recipe"] = public_recipe(before["recipe"])
        changes = before and differences(before, comparison.given)
        if changes:
            added = None if differences(*map(_without_seeds, (before, comparison.given))) else _new_seeds(before, comparison)
            if added is not None and comparison.given.get("stop"):
                before = f"{folder} was planned with other seeds ({changes})"
                raise ValueError(f"{before}, and stop: early needs the plan of its looks")
            if added is None:
                place.refuse(changes)
            if (folder / RESULTS_FILE).is_file():
                known = _added_seeds(folder)
                added = {scale: list(dict.fromkeys([*known.get(scale, []), *seeds])) for scale, seeds in added.items()}
                write_text(folder / ADDED_SEEDS_FILE, json.dumps(added) + "\n")
        if before is None or changes:
            place.write(comparison.given)


def _without_seeds(given: dict[str, Any]) -> dict[str, Any]:
    scales = {name: _without_seeds(fields or {}) for name, fields in (given.get("scales") or {}).items()}
    return {name: value for name, value in given.items() if name != "seeds"} | ({"scales": scales} if scales else {})


def _new_seeds(before: dict[str, Any], comparison: Comparison | Ladder) -> dict[str, list[int]] | None:
    """The seeds that a comparison adds to the one in a folder, by scale; `None` if it lacks one of those there."""
    scales, new = scales_of(load_outline(before)), {}
    for name, scale in scales_of(comparison).items():
        if not set(scales[name].seeds) <= set(scale.seeds):
            return None
        new[name] = [seed for seed in scale.seeds if seed not in scales[name].seeds]
    return new if any(new.values()) else None


def _added_seeds(folder: Path) -> dict[str, list[int]]:
    """The seeds that were added after a finished report, by scale."""
    file = folder / ADDED_SEEDS_FILE
    return read_json(file) if file.is_file() else {}


def check_same_models(file: Path, scales: Mapping[str, Comparison]) -> None:
    """Writes what the names of models stand for, or compares it with what was written before the first run.

    Raises:
        ValueError: if the configuration of a model has changed, or the saved weights that its runs begin with.
    """
    sources = {variant.content["model"] for comparison in scales.values() for variant in comparison.variants.values()}
    weights = {source: weights_fingerprint(source) for source in sources}
    now = {
        scale: {
            model: {"config": variant.config, "weights": weights[variant.content["model"]]}
            for model, variant in comparison.variants.items()
        }
        for scale, comparison in scales.items()
    }
    if not file.is_file():
        write_text(file, json.dumps(now) + "\n")
        return
    for scale, models in read_json(file).items():
        for model, before in models.items():
            found = now[scale][model]
            changes = config_differences(before["config"], found["config"])
            if before["weights"] != found["weights"]:
                changes = ", ".join(filter(None, (changes, "other weights")))
            if changes:
                where = f"model {model!r} of scale {scale!r}" if scale else f"model {model!r}"
                raise ValueError(
                    f"{where} has changed since {file.parent} was begun ({changes}); put the old one back, or choose another "
                    "--output_dir"
                )


def _check_same_dataset(file: Path, fingerprint: str | None) -> None:
    """Raises `ValueError` if the dataset differs from that of earlier runs."""
    if file.is_file() and (before := file.read_text(encoding="utf-8").strip()) != str(fingerprint):
        raise ValueError(
            f"the dataset has changed since {file.parent} was begun (fingerprint {before} then, {fingerprint} now); put the "
            "old one back, or choose another --output_dir"
        )
    write_text(file, f"{fingerprint}\n")

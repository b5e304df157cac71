"""`nlq compare`: makes every run of a comparison once, on an engine, and then the results and the report."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import singledispatch
from pathlib import Path
from typing import Any, Protocol

from datasets import disable_progress_bars
from tqdm.auto import tqdm

from ..disk import delete, read_text, write_text
from ..explorer.exploring import explore_runs
from ..files import CHECKPOINT, COMPARISON_FILE, MODELS_FILE, PAGE_FILE, RESULTS_FILE, differences, read_json
from ..loading import config_differences, weights_fingerprint
from ..run.jobs import Workers, make_runs
from ..run.recipe import Recipe
from ..run.run_folder import CLAIM_PATIENCE, RunFolder
from ..sharing.scrub import without_folders
from ..text import bar_options
from ..values import to_json
from .comparison import Comparison, Run, RunStore, Scale, ScaleProgress, scale_folder
from .config import ComparisonConfig, read_made_from
from .downstream import score_runs
from .local import LocalEngine
from .report import write_report
from .results import Outcome, conclude, gather, read_outcome
from .sections import SINGLE, Axis


FINGERPRINT_FILE = "dataset_fingerprint.txt"


class Engine(Workers, Protocol):
    """Where and how the runs of a comparison are made."""

    def connected(self, scales: Sequence[Scale]) -> AbstractContextManager[None]:
        """Returns a context for making runs; raises `ValueError` if they cannot be made."""

    def alone_in(self, folder: Path) -> AbstractContextManager[None]:
        """Returns a context that keeps other processes out of the folder, unless the engine allows them."""

    def choose_threads(self, folder: Path) -> None:
        """Settles the number of threads of a run, which is the same whenever the comparison is resumed."""

    def prepare_data(self, scale: Scale, folder: Path) -> tuple[Path, str | None]:
        """Makes tokenizer and data once for all scales. Returns their folder and the documents' fingerprint."""


def make_engine(name: str = "local", **options: Any) -> Engine:
    """Makes an engine; options are the fields of `LocalEngine` or `RayEngine`, and `None` is the default."""
    options = {option: value for option, value in options.items() if value is not None}
    if name == "ray":
        if "jobs" in options:
            raise ValueError("jobs: the engine 'ray' makes as many runs at a time as the cluster has room for")
        from .on_ray import RayEngine

        return RayEngine(**options)
    if name != "local":
        raise ValueError(f"engine={name!r} must be 'local' or 'ray'")
    if others := sorted(options.keys() - {"cpus_per_run", "jobs"}):
        raise ValueError(f"{', '.join(others)}: only the engine 'ray' has that; set --engine ray")
    return LocalEngine(**options)


@singledispatch
def run_and_report(comparison: Comparison, folder: Path, engine: Engine | None = None) -> Outcome:
    """Makes the unfinished runs of a plan, writes the report, and returns the results."""
    outcome = run_comparison(comparison, folder, engine)
    if is_main_process():
        write_report(outcome, folder, has_page=_explore_best(comparison, outcome, folder))
    return outcome


def is_main_process() -> bool:
    """Tells whether this is the first process that a launcher started on this machine, or the only one."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def run_comparison(comparison: Comparison, folder: Path, engine: Engine | None = None) -> Outcome:
    """Makes all runs that are not finished, the smallest scale first, and writes and returns the results.

    Raises:
        ValueError: if the folder holds another comparison or something else; nothing in it is touched.
        ChildProcessError: if a run failed for another reason than its loss; finished runs stay.
    """
    engine = engine or LocalEngine()
    if not sys.stderr.isatty():
        disable_progress_bars()  # a log file needs no bars of the data
    scales = {}
    with engine.connected(list(comparison.scales.values())):
        _claim_folder(folder, comparison)
        with engine.alone_in(folder):
            check_same_models(folder / MODELS_FILE, comparison.scales)
            engine.choose_threads(folder)
            added = _added_seeds(folder, comparison.scales)
            axis = comparison.config.axis
            stores = {name: RunStore(scale_folder(folder, axis, name)) for name in comparison.scales}
            for name, store in stores.items():
                # Conditions may differ in dataset and tokenizer, scales in the sizes of a task
                has_own = axis is Axis.CONDITIONS or comparison.scales[name].task is not None
                of_data = store.folder if has_own else folder
                data, fingerprint = engine.prepare_data(comparison.scales[name], of_data)
                if comparison.published is not None:
                    comparison.published.warn_of_other_text(name, fingerprint)
                file = of_data / FINGERPRINT_FILE
                if file.is_file() and (before := read_text(file).strip()) != str(fingerprint):
                    change = f"fingerprint {before} then, {fingerprint} now"
                    raise ValueError(f"the dataset has changed since {file.parent} was begun ({change})")
                write_text(file, f"{fingerprint}\n")
                progress = _make_runs(comparison, name, stores, engine, data)
                for checkpoint in store.folder.glob("runs/*/*/checkpoint-*"):
                    delete(checkpoint)  # of a run that was killed after its last step
                tasks = score_runs(progress, store)
                scales[name] = gather(progress, store, tasks=tasks, added_seeds=added.get(name, []))
            config = without_folders(comparison.config.to_dict())
            outcome = Outcome(comparison.name, comparison.baseline, comparison.command, config, scales)
            outcome = conclude(outcome, comparison.config)
            write_text(folder / RESULTS_FILE, to_json(outcome))
    return outcome


def _make_runs(
    comparison: Comparison, name: str, stores: dict[str, RunStore], engine: Engine, data: Path
) -> ScaleProgress:
    scale, store = comparison.scales[name], stores[name]

    def ready() -> tuple[dict[str, Recipe], int]:
        progress = comparison.progress(stores)[name]
        recipes = {run.name: scale.recipe_of(run, store.folder_of(run)) for run in progress.ready}
        bar.total = (progress.finished + len(recipes)) * scale.steps_per_run
        return recipes, progress.finished

    with tqdm(desc=scale.name, unit="step", **bar_options()) as bar:
        for run, result in make_runs(engine, ready, data, bar, scale.steps_per_run):
            store.add(run, result)
            for checkpoint in Path(store.folder, "runs", run).glob(f"{CHECKPOINT}*"):
                delete(checkpoint)  # many runs would fill the disk
    return comparison.progress(stores)[name]


def _explore_best(comparison: Comparison, outcome: Outcome, folder: Path) -> bool:
    """Writes the page of the best model and the baseline if the recipe asks for it, and returns whether it did."""
    name, results = list(outcome.scales.items())[-1]
    scale = comparison.largest
    recipe = scale.recipe_of(Run(scale.baseline, 1.0, scale.seeds[0]), folder)
    if not recipe.explore:
        return False
    delete(folder / PAGE_FILE)
    finished = {name: model.runs[0] for name, model in results.models.items() if model.finished == model.runs}
    if scale.baseline not in finished:
        return False
    differences = {name: effect.mean_difference for name, effect in results.statistics.effects.items()}
    differences[scale.baseline] = 0.0
    best = min(finished, key=lambda name: (differences[name], name != scale.baseline))
    shown = {model: finished[model] for model in dict.fromkeys((scale.baseline, best))}
    runs = {model: scale_folder(folder, comparison.config.axis, name) / run.folder for model, run in shown.items()}
    seeds = " and ".join(f"{model} of seed {run.seed}" for model, run in shown.items())
    note = f"One run of each model: {seeds}. The report compares all seeds."
    return explore_runs(recipe, runs, "test", folder, [note])


def _claim_folder(folder: Path, comparison: Comparison) -> None:
    """Writes the comparison into a new folder, or checks that the folder has it, perhaps with fewer seeds."""
    claimed, config = RunFolder(folder, COMPARISON_FILE), comparison.config
    with claimed.held(CLAIM_PATIENCE):
        written, changes = claimed.made_from(), ""
        if written is not None:
            before = read_made_from(written, str(folder / COMPARISON_FILE))
            changes = differences(before.to_dict(), config.to_dict())
        if changes:
            if not _adds_seeds(before, config):
                claimed.refuse(changes)
            if config.stop:
                reason = "stop: early needs the plan of its interim analyses"
                raise ValueError(f"{folder} was planned with other seeds ({changes}), and {reason}")
        claimed.begin_manifest()
        if written is None or changes:
            claimed.write(config.to_dict())


def _adds_seeds(before: ComparisonConfig, now: ComparisonConfig) -> bool:
    """Tells whether a comparison has more seeds than before, and differs in nothing else."""
    if differences(before.without_seeds().to_dict(), now.without_seeds().to_dict()):
        return False
    known, seeds = (
        {name: set(scale.seeds or config.seeds) for name, scale in config.scale_configs.items()}
        for config in (before, now)
    )
    return known != seeds and all(known[name] <= seeds[name] for name in seeds)


def _added_seeds(folder: Path, scales: Mapping[str, Scale]) -> dict[str, list[int]]:
    """Returns the seeds of each scale that the results did not have at first."""
    file = folder / RESULTS_FILE
    before = read_outcome(file).scales if file.is_file() else {}
    return {
        name: [*before[name].added_seeds, *(seed for seed in scale.seeds if seed not in before[name].seeds)]
        for name, scale in scales.items()
        if name in before
    }


def check_same_models(file: Path, scales: Mapping[str, Scale]) -> None:
    """Writes the configurations and weights of all models, or compares them with the record of the folder."""
    sources = {variant.recipe.model for scale in scales.values() for variant in scale.variants.values()}
    weights = {source: weights_fingerprint(source) for source in sources}
    now = {
        name: {
            model: {"config": variant.model_config, "weights": weights[variant.recipe.model]}
            for model, variant in scale.variants.items()
        }
        for name, scale in scales.items()
    }
    if not file.is_file():
        write_text(file, json.dumps(now) + "\n")
        return
    for scale, models in read_json(file).items():
        name = scale or SINGLE  # older versions called a single scale ""
        for model, before in models.items():
            try:
                after = now[name][model]
                changes = config_differences(before["config"], after["config"], with_dtype=True)
                is_same = not changes and before["weights"] == after["weights"]
            except (KeyError, TypeError, AttributeError):
                raise ValueError(f"{file}: {model!r} is not a model of this comparison, or has wrong fields") from None
            if not is_same:
                where = f"model {model!r} of {name!r}" if len(scales) > 1 else f"model {model!r}"
                raise ValueError(f"{where} has changed since {file.parent} was begun ({changes or 'other weights'})")

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
from ..explorer.run_pages import explore_runs
from ..files import CHECKPOINT, COMPARISON_FILE, MODELS_FILE, PAGE_FILE, RESULTS_FILE, differences, read_json
from ..loading import config_differences, weights_fingerprint
from ..run.jobs import Workers, make_runs
from ..run.recipe import Recipe
from ..run.run_folder import CLAIM_PATIENCE, RunFolder
from ..text import bar_options
from ..values import to_json
from .comparison import Comparison, Run, Scale, ScaleProgress, progress_of
from .config import SINGLE, ComparisonConfig, read_made_from
from .downstream import read_scores, score_runs
from .local import LocalEngine
from .report import write_report
from .results import Outcome, gather, gather_scales
from .store import RunStore, run_folder, scale_folder


ADDED_SEEDS_FILE = "added_seeds.json"
FINGERPRINT_FILE = "dataset_fingerprint.txt"


class Engine(Workers, Protocol):
    """Where and how the runs of a comparison are made."""

    def connected(self, scales: Sequence[Scale]) -> AbstractContextManager[None]:
        """Returns a context for making runs. Raises `ValueError`, before it writes, if they cannot be made."""

    def alone_in(self, folder: Path) -> AbstractContextManager[None]:
        """Returns a context inside `connected` that keeps other processes out unless the engine allows them."""

    def prepare_data(self, scale: Scale, folder: Path) -> tuple[Path, str | None]:
        """Makes tokenizer and data once for all runs, and returns their folder and the fingerprint of the documents.

        All scales share `folder`, and so their tokenizer.
        """


def make_engine(name: str = "local", **options: Any) -> Engine:
    """Makes an engine.

    Args:
        options: the fields of `LocalEngine` or `RayEngine`; `None` is the default.
    """
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
    """Makes all runs of a plan that are not finished, writes the report, and returns the results."""
    outcome = run_comparison(comparison, folder, engine)
    if is_main_process():
        write_report(outcome, folder, has_page=_explore_best(comparison, outcome, folder))
    return outcome


def is_main_process() -> bool:
    """Tells whether this is the first of the processes that a launcher started on this machine, or the only one."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def run_comparison(comparison: Comparison, folder: Path, engine: Engine | None = None) -> Outcome:
    """Makes all runs that are not finished, writes `results.json`, and returns its content, without a report.

    The scales are made one after another, the smallest first.

    Raises:
        ValueError: if the folder holds another comparison or something else; nothing in it is touched.
        ChildProcessError: if a run failed for another reason than its loss; finished runs stay.
    """
    engine = engine or LocalEngine()
    if not sys.stderr.isatty():
        disable_progress_bars()  # a log file needs no bars of the data
    gathered = {}
    with engine.connected(list(comparison.scales.values())):
        _claim_folder(folder, comparison)
        with engine.alone_in(folder):
            check_same_models(folder / MODELS_FILE, comparison.scales)
            stores = {name: RunStore(scale_folder(folder, name)) for name in comparison.scales}
            for name, store in stores.items():
                progress = comparison.progress(stores)[name]
                data, fingerprint = engine.prepare_data(progress.scale, folder)
                _check_same_dataset(folder / FINGERPRINT_FILE, fingerprint)
                progress = _make_runs(progress.scale, store, engine, data)
                for checkpoint in store.folder.glob("runs/*/*/checkpoint-*"):
                    delete(checkpoint)  # of a run that was killed after its last step
                score_runs(progress, store)
                tasks, added = read_scores(progress, store.folder), _added_seeds(folder).get(name, [])
                gathered[name] = gather(progress, store, tasks=tasks, added_seeds=added)
            outcome = gather_scales(comparison, gathered)
            write_text(folder / RESULTS_FILE, to_json(outcome))
    return outcome


def _make_runs(scale: Scale, store: RunStore, engine: Engine, data: Path) -> ScaleProgress:
    """Makes the runs of a scale that are not finished, and returns its progress."""

    def ready() -> tuple[dict[str, Recipe], int]:
        progress = progress_of(scale, store)
        finished = sum(progress.finished.values())
        bar.total = (finished + len(progress.ready)) * scale.steps_per_run
        return {run.name: scale.recipe_of(run, run_folder(store.folder, run)) for run in progress.ready}, finished

    with tqdm(desc=scale.name, unit="step", **bar_options()) as bar:
        for name, result in make_runs(engine, ready, data, bar, scale.steps_per_run):
            store.add(name, result)
            for checkpoint in Path(store.folder, "runs", name).glob(f"{CHECKPOINT}*"):
                delete(checkpoint)  # many runs would fill the disk
    return progress_of(scale, store)


def _explore_best(comparison: Comparison, outcome: Outcome, folder: Path) -> bool:
    """Writes the page of the best model and the baseline if the recipe asks for it. Returns whether it was written."""
    (name, found), scale = list(outcome.scales.items())[-1], comparison.largest
    recipe = scale.recipe_of(Run(scale.baseline, 1.0, scale.seeds[0]), folder)
    if not recipe.explore:
        return False
    delete(folder / PAGE_FILE)
    finished = {model: content.runs for model, content in found.models.items() if content.finished == content.runs}
    if scale.baseline not in finished:
        return False
    effects = found.statistics.effects.items()
    difference = {model: effect.mean_difference for model, effect in effects if model in finished}
    best = min({scale.baseline: 0.0, **difference}.items(), key=lambda item: item[1])[0]
    shown = {model: finished[model][0] for model in dict.fromkeys((scale.baseline, best))}
    runs = {model: scale_folder(folder, name) / run.folder for model, run in shown.items()}
    seeds = " and ".join(f"{model} of seed {run.seed}" for model, run in shown.items())
    return explore_runs(
        recipe, runs, "test", folder, [f"One run of each model: {seeds}. The report compares all seeds."]
    )


def _claim_folder(folder: Path, comparison: Comparison) -> None:
    """Writes the comparison into a new folder, or checks that the folder has the same, perhaps with fewer seeds."""
    place, config = RunFolder(folder, COMPARISON_FILE), comparison.config
    with place.held(CLAIM_PATIENCE):
        written = place.made_from()
        changes = ""
        if written is not None:
            before = read_made_from(written, str(folder / COMPARISON_FILE))
            changes = differences(before.to_dict(), config.to_dict())
        if changes:
            added = _added_to(before, config)
            if added is None:
                place.refuse(changes)
            if config.stop:
                raise ValueError(
                    f"{folder} was planned with other seeds ({changes}), and stop: early needs the plan of its "
                    "interim analyses"
                )
            if (folder / RESULTS_FILE).is_file():
                known = _added_seeds(folder)
                added = {scale: list(dict.fromkeys([*known.get(scale, []), *seeds])) for scale, seeds in added.items()}
                write_text(folder / ADDED_SEEDS_FILE, json.dumps(added) + "\n")
        place.begin_manifest()
        if written is None or changes:
            place.write(config.to_dict())


def _added_to(before: ComparisonConfig, now: ComparisonConfig) -> dict[str, list[int]] | None:
    """Returns the seeds that a comparison adds to the one in its folder, by scale; `None` if more has changed."""
    if differences(before.without_seeds().to_dict(), now.without_seeds().to_dict()):
        return None
    added = {}
    for name in now.scale_configs:
        known, seeds = (config.at_scale(name, COMPARISON_FILE).seeds for config in (before, now))
        if not set(known) <= set(seeds):
            return None
        added[name] = [seed for seed in seeds if seed not in known]
    return added if any(added.values()) else None


def _added_seeds(folder: Path) -> dict[str, list[int]]:
    """The seeds that were added after a finished report, by scale."""
    file = folder / ADDED_SEEDS_FILE
    return _by_scale(read_json(file)) if file.is_file() else {}


def _by_scale(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a record by scale; older versions called a single scale ""."""
    return {name or SINGLE: value for name, value in content.items()}


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
    for name, models in _by_scale(read_json(file)).items():
        for model, before in models.items():
            try:
                after = now[name][model]
                changes = config_differences(before["config"], after["config"])
                is_same = not changes and before["weights"] == after["weights"]
            except (KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"{file}: {model!r} is no model of this comparison, or its fields are wrong"
                ) from None
            if not is_same:
                where = f"model {model!r} of scale {name!r}" if len(scales) > 1 else f"model {model!r}"
                raise ValueError(f"{where} has changed since {file.parent} was begun ({changes or 'other weights'})")


def _check_same_dataset(file: Path, fingerprint: str | None) -> None:
    """Raises `ValueError` if earlier runs had another dataset."""
    if file.is_file() and (before := read_text(file).strip()) != str(fingerprint):
        raise ValueError(
            f"the dataset has changed since {file.parent} was begun (fingerprint {before} then, {fingerprint} now)"
        )
    write_text(file, f"{fingerprint}\n")

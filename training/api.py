"""The Python entry points of `nlq train` and `nlq compare`. The engines for many runs are in `comparison/`."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from .files import PAGE_FILE
from .run.lease import driver_lock
from .run.recipe import TRACKERS, ResolvedRecipe, check_recipe, load_recipe
from .run.run_folder import RunFolder
from .run.shared_files import share_data, share_model
from .run.trainer import train_recipe
from .storage import check_writable, is_address, open_folder
from .text import bar_options


if TYPE_CHECKING:
    from .comparison.plan import Comparison
    from .comparison.run import Engine
    from .screening.plan import Screening


def train(
    recipe: str | Path,
    *,
    engine: str = "local",
    workers: int | None = None,
    cpus_per_worker: int | None = None,
    gpus_per_worker: float | None = None,
    max_retries: int | None = None,
    trust_parts: bool = False,
    **overrides: Any,
) -> dict[str, Any]:
    """Trains a model from a recipe, evaluates it and saves it. Called again, it goes on where it was interrupted.

    Args:
        recipe: name of a shipped recipe, or a YAML file.
        engine: `local`, this process, or `ray`, workers on the cluster that Ray finds.
        workers, cpus_per_worker, gpus_per_worker, max_retries: options of the engine `ray`, see `train_on_ray`.
        trust_parts: run the parts whose code the recipe itself holds.
        overrides: any fields of `Recipe` and `transformers.TrainingArguments`, such as `output_dir` or `max_steps`, and
            `switches`, a mapping of model switches.

    Returns:
        The metrics that `metrics.json` in the run folder holds.

    Raises:
        ValueError: for unknown fields, conflicting settings, data or a tokenizer that cannot be loaded, or a folder that holds
            another run.
        ChildProcessError: if the run failed on the engine `ray`.
    """
    options = {"workers": workers, "cpus_per_worker": cpus_per_worker, "gpus_per_worker": gpus_per_worker}
    return train_with(engine, load_recipe(recipe, overrides, trust_parts), max_retries=max_retries, **options)


def train_with(engine: str, resolved: ResolvedRecipe, **options: Any) -> dict[str, Any]:
    """Trains a recipe by an engine, as `train` does; an option that is `None` keeps its default."""
    given = {option: value for option, value in options.items() if value is not None}
    if engine not in ("local", "ray"):
        raise ValueError(f"engine={engine!r} must be 'local' or 'ray'")
    if given and engine == "local":
        raise ValueError(f"{', '.join(given)}: only the engine 'ray' has that; set --engine ray")
    place = resolved.training_arguments.output_dir
    is_first = resolved.training_arguments.process_index == 0
    # On Ray, the process that trains holds the folder
    is_owner = engine == "local" and is_first and not is_address(place)
    with RunFolder(Path(place)).held() if is_owner else nullcontext():
        metrics = train_on_ray(resolved, **given) if engine == "ray" else train_recipe(resolved)
        folder = open_folder(place)
        if is_first and resolved.recipe.explore and "eval_loss" in metrics and not (folder / PAGE_FILE).exists():
            from .explorer.of_runs import explore_runs  # without a page, training imports no explorer

            name = folder.resolve().name if isinstance(folder, Path) else folder.name
            explore_runs(resolved.recipe, {name: folder}, "validation", folder)
    return metrics


def train_on_ray(
    resolved: ResolvedRecipe,
    workers: int = 1,
    cpus_per_worker: int | None = None,
    gpus_per_worker: float = 0,
    max_retries: int = 3,
) -> dict[str, Any]:
    """Trains a recipe on the cluster that Ray finds, at the same global batch size for any number of workers.

    Called again, it goes on. Tokenizer and tokenised data lie beside the run folder, in `NAME.data`, and so does the log.

    Args:
        resolved: the recipe; its `output_dir` is a folder that all nodes share, or an address such as `s3://bucket/run`.
        workers: processes that train together.
        cpus_per_worker: CPUs that each of them reserves, and its number of threads; by default one, or as many as PyTorch takes
            in this process if there is one worker and no GPU.
        gpus_per_worker: 0, 1, or a fraction for a single worker.
        max_retries: how often the run is retried if it loses a node or a process, or runs out of memory.

    Returns:
        The content of `metrics.json` in the run folder.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: for a recipe that cannot be trained, a cluster that does not answer or is too small, or a folder that cannot
            be written or holds something else.
        ChildProcessError: if the run failed.
    """
    from .run import ray_jobs  # it imports Ray, which takes seconds

    ray_jobs.require_ray()
    arguments = resolved.training_arguments
    if cpus_per_worker is None:
        cpus_per_worker = ray_jobs.default_cpus(workers, gpus_per_worker) if workers == 1 else 1
    resources = ray_jobs.Resources(cpus_per_worker * workers, gpus_per_worker * workers, workers)
    if max_retries < 0:
        raise ValueError(f"max_retries={max_retries} must be at least 0")
    if arguments.resume_from_checkpoint is not None:
        raise ValueError(
            "resume_from_checkpoint: the engine 'ray' goes on from the run's own checkpoints; use the engine 'local'"
        )
    check_recipe(resolved)
    ray_jobs.share_batch(resolved.given, workers)
    folder = open_folder(arguments.output_dir)
    RunFolder(folder).made_from()
    folder = folder.absolute() if isinstance(folder, Path) else folder
    beside = {name: folder.with_name(f"{folder.name}.{name}") for name in ("data", "model", "at-work.json")}
    check_writable(beside["data"])
    steps = max(arguments.max_steps, 0)
    with ray_jobs.connected_to_ray():
        resources.check()
        with driver_lock(beside["at-work.json"]):
            data, _ = share_data(resolved.recipe, beside["data"])
            model = share_model(resolved.recipe.model, beside["model"])
            names = {name: value for name in TRACKERS if (value := getattr(arguments, name, None)) is not None}
            given = {**resolved.given, "training": {**resolved.given["training"], **names}}
            order = ray_jobs.order_for_ray(folder.name, given, folder, data, resources, model=model, keeps_checkpoints=True)
            with (
                tqdm(total=steps or None, unit="step", **bar_options()) as progress,
                ray_jobs.RayJobs(resources, max_retries, progress, steps) as jobs,
            ):
                jobs.submit(order)
                results = [metrics for _, metrics in jobs.finished()]
    if jobs.failures:
        raise ChildProcessError(jobs.failures[0])
    return results[0]


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
        The content of `results.json` in the results folder (see `Outcome` and `ScreeningOutcome`).

    Raises:
        ValueError: for an unknown field, name or value, a cluster that cannot make the runs, or a folder that cannot be written
            or holds another comparison or something else.
        ChildProcessError: if a run failed for another reason than its loss; finished runs stay.
    """
    options = {"cpus_per_run": cpus_per_run, "gpus_per_run": gpus_per_run}
    options |= {"workers_per_run": workers_per_run, "max_retries": max_retries}
    from .comparison.plan import default_folder
    from .comparison.run import make_engine

    made = make_engine(engine, **options)
    plan = load_plan(comparison, overrides, trust_parts)
    return run_and_report(plan, open_folder(output_dir or default_folder(plan.name)), made)


def load_plan(
    source: str | Path, overrides: Mapping[str, Any] | None = None, trust_parts: bool = False
) -> "Comparison | Screening":
    """Reads the file of a comparison, or of a screening if it has `factors`; see `load_comparison`."""
    from .comparison.reading import read_comparison, read_file

    file = read_file(source, overrides, trust_parts)
    if file.given.get("factors") is None:
        return read_comparison(file)
    from .screening.plan import read_screening

    return read_screening(file)


def run_and_report(plan: "Comparison | Screening", folder: Path, engine: "Engine | None" = None) -> dict[str, Any]:
    """Makes all runs that are not finished, writes the report, and returns the results; raises as `compare` does."""
    from .comparison import run as comparison
    from .screening import run as screening
    from .screening.plan import Screening

    return (screening if isinstance(plan, Screening) else comparison).run_and_report(plan, folder, engine)


def describe_results(results: dict[str, Any]) -> str:
    """The outcome of a comparison or a screening for a terminal, from the content of `results.json`."""
    from .comparison import report
    from .comparison.outcome import from_json
    from .screening import sections

    if "design" in results:
        return sections.describe(from_json(sections.ScreeningOutcome, results))
    return report.describe(from_json(report.Outcome, results))

"""The Python entry points of `nlq train`, `nlq compare` and `nlq publish`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from .files import PAGE_FILE
from .run.jobs import make_runs
from .run.recipe import Recipe, check_recipe, load_recipe
from .run.result import RunResult
from .run.run_folder import RunFolder
from .run.trainer import train_recipe
from .run.unattended import RunSpec
from .storage import fetch, is_address, open_folder, origin
from .storage import publish as upload
from .text import bar_options


if TYPE_CHECKING:
    from .comparison.outcome import Outcome
    from .comparison.plan import Comparison
    from .comparison.run import Engine
    from .screening.plan import Screening
    from .screening.sections import ScreeningOutcome
    from .sharing.publishing import Publication


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
) -> RunResult:
    """Trains a model from a recipe, evaluates it and saves it. Called again, it goes on where it was interrupted.

    Args:
        recipe: name of a shipped recipe, or a YAML file.
        engine: `local`, this process, or `ray`, workers on the cluster that Ray finds.
        workers, cpus_per_worker, gpus_per_worker, max_retries: options of the engine `ray`, see `train_on_ray`.
        trust_parts: run the parts whose code the recipe itself holds.
        overrides: any fields of `Recipe` and `transformers.TrainingArguments`, such as `output_dir` or `max_steps`,
            and `switches`, a mapping of model switches.

    Returns:
        What `metrics.json` in the run folder holds.

    Raises:
        ValueError: for unknown fields, conflicting settings, data or a tokenizer that cannot be loaded, or a folder
            that holds another run.
        ChildProcessError: if the run failed on the engine `ray`.
    """
    options = {"workers": workers, "cpus_per_worker": cpus_per_worker, "gpus_per_worker": gpus_per_worker}
    return train_with(engine, load_recipe(recipe, overrides, trust_parts), max_retries=max_retries, **options)


def train_with(engine: str, recipe: Recipe, **options: Any) -> RunResult:
    """Trains a recipe by an engine, as `train` does; an option that is `None` keeps its default."""
    given = {option: value for option, value in options.items() if value is not None}
    if engine not in ("local", "ray"):
        raise ValueError(f"engine={engine!r} must be 'local' or 'ray'")
    if given and engine == "local":
        raise ValueError(f"{', '.join(given)}: only the engine 'ray' has that; set --engine ray")
    if engine == "local" and recipe.arguments.process_index > 0:
        return train_recipe(recipe)
    place = recipe.output_dir
    if engine == "local" and is_address(place):
        raise ValueError(f"output_dir={place} is no folder: an address needs --engine ray")
    folder = open_folder(place)
    with RunFolder(folder).held():
        result = train_on_ray(recipe, folder, **given) if engine == "ray" else train_recipe(recipe)
        if recipe.explore and result.losses.diverged_at is None and not (folder / PAGE_FILE).exists():
            from .explorer.run_pages import explore_runs  # without a page, training imports no explorer

            explore_runs(recipe, {Path(origin(folder)).resolve().name: folder}, "validation", folder)
        upload(folder)
    return result


def train_on_ray(
    recipe: Recipe,
    folder: Path,
    workers: int = 1,
    cpus_per_worker: int | None = None,
    gpus_per_worker: float = 0,
    max_retries: int = 3,
) -> RunResult:
    """Trains a recipe on the cluster that Ray finds, at the same global batch size for any number of workers.

    Called again, it goes on. Tokenizer and tokenised data lie beside the run folder, in `NAME.data`, and so does the
    log.

    Args:
        folder: its `output_dir`, by `open_folder`.
        workers: processes that train together.
        cpus_per_worker: CPUs that each of them reserves, and its number of threads; by default one, or as many as
            PyTorch takes in this process if there is one worker and no GPU.
        gpus_per_worker: 0, 1, or a fraction for a single worker.
        max_retries: how often the run is retried if it loses a node or a process, or runs out of memory.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: for a recipe that cannot be trained, a cluster that does not answer or is too small, or a folder
            that cannot be written.
        ChildProcessError: if the run failed.
    """
    from .run import ray_jobs  # it imports Ray, which takes seconds

    cpus = None if cpus_per_worker is None else cpus_per_worker * workers
    resources = ray_jobs.Resources(cpus, gpus_per_worker * workers, workers, max_retries)
    check_recipe(recipe)
    ray_jobs.share_batch(recipe, workers)
    parent, _, name = origin(folder).rpartition("/")
    steps = max(recipe.arguments.max_steps, 0)
    with ray_jobs.connected_to_ray(), tqdm(total=steps or None, unit="step", **bar_options()) as progress:
        resources.check_room()
        data, _ = ray_jobs.share_data(recipe, {recipe.model}, parent, f"{name}.data")
        data, there = str(folder.parent / data), recipe.without_tokens().replace(training={"output_dir": str(folder)})
        spec = RunSpec(name, there, data, keeps_checkpoints=True)
        workers, finished = ray_jobs.RayWorkers(parent, resources, folder.parent), []
        try:
            for _, result in make_runs(workers, lambda: ([spec], len(finished)), progress, steps):
                finished.append(result)
        finally:
            workers.close()
    fetch(folder, has_large=False)
    return finished[0]


def compare(
    comparison: str | Path,
    output_dir: str | Path | None = None,
    *,
    engine: str = "local",
    cpus_per_run: int | None = None,
    jobs: int | None = None,
    gpus_per_run: float | None = None,
    workers_per_run: int | None = None,
    max_retries: int | None = None,
    trust_parts: bool = False,
    **overrides: Any,
) -> "Outcome | ScreeningOutcome":
    """Trains the models of a comparison and reports which differ from the baseline. Called again, it goes on.

    Each run is a process of its own, so a script must call this under `if __name__ == "__main__":`.

    Args:
        comparison: name of a shipped comparison, or a YAML file.
        output_dir: results folder; by default `runs/compare-NAME`. With the engine `ray` also an address, such as
            `s3://bucket/results`.
        engine: `local`, on this machine, or `ray`, on the cluster that Ray finds.
        cpus_per_run: threads of a run; with `ray`, the CPUs it reserves. By default as many as PyTorch takes here.
        jobs: runs at a time with `local`, see `LocalEngine`. Results do not depend on it.
        gpus_per_run, workers_per_run, max_retries: options of the engine `ray`, see `Resources`.
        trust_parts: run the parts whose code the file itself holds.
        overrides: fields of the recipe that all models share, as for `train`.

    Returns:
        What `results.json` in the results folder holds.

    Raises:
        ValueError: for an unknown field, name or value, a cluster that cannot make the runs, or a folder that cannot
            be written or holds another comparison or something else.
        ChildProcessError: if a run failed for another reason than its loss; finished runs stay.
    """
    options = {"cpus_per_run": cpus_per_run, "jobs": jobs, "gpus_per_run": gpus_per_run}
    options |= {"workers_per_run": workers_per_run, "max_retries": max_retries}
    from .comparison.plan import default_folder
    from .comparison.run import make_engine

    made = make_engine(engine, **options)
    plan = load_plan(comparison, overrides, trust_parts)
    return run_and_report(plan, open_folder(output_dir or default_folder(plan.name)), made)


def load_plan(
    source: str | Path, overrides: Mapping[str, Any] | None = None, trust_parts: bool = False
) -> "Comparison | Screening":
    """Reads the file of a comparison, or of a screening if it has `factors`; see `read_file`."""
    from .comparison.reading import read_comparison, read_file

    file = read_file(source, overrides, trust_parts)
    if file.given.get("factors") is None:
        return read_comparison(file)
    from .screening.plan import read_screening

    return read_screening(file)


def run_and_report(
    plan: "Comparison | Screening", folder: Path, engine: "Engine | None" = None
) -> "Outcome | ScreeningOutcome":
    """Makes all runs that are not finished, writes the report, and returns the results; raises as `compare` does."""
    from .comparison import run as comparison
    from .screening import run as screening
    from .screening.plan import Screening

    return (screening if isinstance(plan, Screening) else comparison).run_and_report(plan, folder, engine)


def describe_results(results: "Outcome | ScreeningOutcome") -> str:
    """The outcome of a comparison or a screening for a terminal."""
    from .comparison import report
    from .screening import sections

    return (sections if isinstance(results, sections.ScreeningOutcome) else report).describe(results)


def publish(
    folder: str | Path,
    repo_id: str,
    private: bool | None = None,
    comparison: str | Path | None = None,
    card: str | Path | None = None,
    license: str | None = None,
    adapter: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
) -> "Publication":
    """Uploads a trained or converted model with its code, tokenizer, results and card, in one commit.

    The repository is created if it does not exist. Files that an earlier publication uploaded and this one does not
    have are deleted in the same commit. Other files stay.

    Args:
        folder: folder of a run, a conversion, or any saved NLQ model.
        repo_id: `owner/name`.
        private: make a new repository private; by default the owner's setting decides.
        comparison: folder of `nlq compare`; the card reports its verdicts.
        card: a Markdown file to use as the card; by default the card is generated.
        license: license of the weights, for the card.
        adapter: upload only the parameters that a run with `trainable: new` trained, as an adapter of PEFT.
        revision: the branch, which is created if it does not exist; by default the main branch.
        dry_run: stop before anything is sent.

    Raises:
        ValueError: if the folder does not contain a complete model or the parameters of an adapter, if a file contains
            a token or a path of this machine, or if the name of the repository is not valid.
        ImportError: for an adapter, if PEFT is not installed.
        PublishingError: if the Hub refuses, or cannot be reached. The repository is then unchanged.
    """
    from .comparison.report import read_for_card
    from .sharing.publishing import CardOptions, publish_model

    options = CardOptions(card, license)
    if comparison is not None:
        options.verdicts, options.report = read_for_card(Path(folder).resolve(), Path(comparison).resolve())
    return publish_model(folder, repo_id, options, adapter, private, revision, dry_run)

"""The Python entry points of `nlq train`, `nlq compare` and `nlq publish`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from .disk import results_folder
from .files import PAGE_FILE
from .result import RunResult
from .run.conflicts import check_recipe
from .run.jobs import make_runs
from .run.recipe import Recipe, load_recipe
from .run.run_folder import RunFolder
from .run.train import train_recipe
from .text import bar_options, check_number


if TYPE_CHECKING:
    from .comparison.comparison import Comparison
    from .comparison.results import Outcome
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
    """Trains a model from a recipe, evaluates it and saves it. A second call resumes an interrupted run.

    Args:
        recipe: name of a shipped recipe, or a YAML file.
        engine: `local`, this process, or `ray`, workers on the cluster that Ray finds.
        workers, cpus_per_worker, gpus_per_worker, max_retries: options of the engine `ray`, see `train_on_ray`.
        trust_parts: run the parts whose code is in the recipe.
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
    folder = Path(recipe.output_dir)
    result = train_on_ray(recipe, **given) if engine == "ray" else None
    with RunFolder(folder).held():
        result = result or train_recipe(recipe)
        if recipe.explore and result.losses.diverged_at is None and not (folder / PAGE_FILE).exists():
            from .explorer.run_pages import explore_runs  # without a page, training imports no explorer

            explore_runs(recipe, {folder.resolve().name: folder}, "validation", folder)
    return result


def train_on_ray(
    recipe: Recipe,
    workers: int = 1,
    cpus_per_worker: int | None = None,
    gpus_per_worker: float = 0,
    max_retries: int = 3,
) -> RunResult:
    """Trains a recipe on a cluster of Ray, at the same global batch size for any number of workers.

    A second call resumes the run. Its log and `NAME.data`, with tokenizer and tokenised data, are beside its folder.

    Args:
        recipe: its `output_dir` is a folder that all nodes see.
        workers: processes that train together.
        cpus_per_worker: CPUs and threads of each. Defaults to 1, or for a single worker without GPU to PyTorch's
            number of threads here.
        gpus_per_worker: 0, 1, or a fraction for a single worker.
        max_retries: how often the run is retried if it loses a node or a process, or runs out of memory.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: for an impossible recipe, a cluster that does not answer or is too small, or a folder that cannot
            be written.
        ChildProcessError: if the run failed.
    """
    from .run import ray_jobs  # it imports Ray, which takes seconds

    check_number("workers", workers, 1)
    check_number("cpus_per_worker", cpus_per_worker, 1)
    cpus = None if cpus_per_worker is None else cpus_per_worker * workers
    cluster = ray_jobs.RayWorkers(cpus, gpus_per_worker * workers, workers, max_retries)
    check_recipe(recipe)
    folder, steps = Path(recipe.output_dir).absolute(), max(recipe.arguments.max_steps, 0)
    with RunFolder(folder).held():  # an error if another process trains there, or it holds something else
        pass
    beside, finished = folder.with_name(f"{folder.name}.data"), []
    with (
        cluster.at_work([recipe]),
        RunFolder(beside, plan=None).held(),
        tqdm(total=steps or None, unit="step", **bar_options()) as progress,
    ):
        data, _ = ray_jobs.share_data(recipe, beside)
        runs = {folder.name: recipe}
        for _, result in make_runs(cluster, lambda: (runs, len(finished)), data, progress, steps):
            finished.append(result)
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
    """Trains the models of a comparison and reports which differ from the baseline. A second call resumes it.

    Each run is a process of its own, so a script must call this under `if __name__ == "__main__":`.

    Args:
        comparison: name of a shipped comparison, or a YAML file.
        output_dir: results folder; by default `runs/compare-NAME`. With the engine `ray`, all nodes must see it.
        engine: `local`, on this machine, or `ray`, on the cluster that Ray finds.
        cpus_per_run: threads of a run; with `ray`, the CPUs it reserves. By default as many as PyTorch takes here.
        jobs: runs at a time with `local`, see `LocalEngine`. Results do not depend on it.
        gpus_per_run, workers_per_run, max_retries: options of the engine `ray`, see `RayWorkers`.
        trust_parts: run the parts whose code is in the file.
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
    from .comparison.config import default_folder
    from .comparison.run import make_engine

    made = make_engine(engine, **options)
    plan = load_plan(comparison, overrides, trust_parts)
    return run_and_report(plan, results_folder(output_dir or default_folder(plan.name)), made)


def load_plan(
    source: str | Path, overrides: Mapping[str, Any] | None = None, trust_parts: bool = False
) -> "Comparison | Screening":
    """Reads the file of a comparison, or of a screening if it has `factors`; see `read_file`."""
    from .comparison.comparison import read_comparison
    from .comparison.config import read_file

    file = read_file(source, overrides, trust_parts)
    if file.config.factors is None:
        return read_comparison(file)
    from .screening.plan import read_screening

    return read_screening(file)


def run_and_report(
    plan: "Comparison | Screening", folder: Path, engine: "Engine | None" = None
) -> "Outcome | ScreeningOutcome":
    """Makes all runs that are not finished, writes the report, and returns the results; raises as `compare` does."""
    from .comparison import run as comparison
    from .screening import run as screening

    return (comparison if plan.config.factors is None else screening).run_and_report(plan, folder, engine)


def describe_estimate(
    plan: "Comparison | Screening", threads: int | None = None, noise_floor: float | None = None
) -> Iterator[str]:
    """Yields lines about the time of a plan on this machine and what it can find, from the estimate of its room."""
    from .comparison import estimate as comparison
    from .screening import plan as screening

    return (comparison if plan.config.factors is None else screening).describe_estimate(plan, threads, noise_floor)


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

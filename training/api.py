"""The Python entry points of `nlq train`, `nlq compare` and `nlq publish`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .disk import resolve_user_path, results_folder
from .files import PAGE_FILE
from .result import RunResult
from .run.recipe import Recipe, load_recipe
from .run.run_folder import RunFolder
from .run.threads import choose_threads
from .run.train import train_recipe


if TYPE_CHECKING:
    from .comparison.comparison import Comparison
    from .comparison.publication import Published
    from .comparison.results import Outcome
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
    """Trains a model from a recipe, evaluates and saves it. A second call resumes an interrupted run.

    Args:
        recipe: name of a shipped recipe, or a YAML file.
        engine: `local`, or `ray`, which takes the next four options: see `train_on_ray`.
        trust_parts: run the parts whose code is in the recipe.
        overrides: fields of `Recipe` and `transformers.TrainingArguments`, and `switches`, a mapping.

    Raises:
        ValueError: for wrong or conflicting fields, data that cannot be loaded, or a folder of another run.
        ChildProcessError: if the run failed on the engine `ray`.
    """
    options = {"workers": workers, "cpus_per_worker": cpus_per_worker, "gpus_per_worker": gpus_per_worker}
    return train_with(engine, load_recipe(recipe, overrides, trust_parts), max_retries=max_retries, **options)


def train_with(engine: str, recipe: Recipe, **options: Any) -> RunResult:
    """Trains a recipe as `train` does; an option that is `None` keeps its default."""
    options = {option: value for option, value in options.items() if value is not None}
    if engine not in ("local", "ray"):
        raise ValueError(f"engine={engine!r} must be 'local' or 'ray'")
    if options and engine == "local":
        raise ValueError(f"{', '.join(options)}: only the engine 'ray' has that; set --engine ray")
    if engine == "local" and recipe.arguments.process_index > 0:
        return train_recipe(recipe)
    folder = Path(recipe.output_dir)
    result = None
    if engine == "ray":
        from .run.ray_jobs import train_on_ray  # it imports Ray, which takes seconds

        result = train_on_ray(recipe, **options)
    if engine == "local" and recipe.arguments.world_size == 1:
        torch.set_num_threads(choose_threads())
    with RunFolder(folder).held():
        result = result or train_recipe(recipe)
        if recipe.explore and result.losses.diverged_at is None and not (folder / PAGE_FILE).exists():
            from .explorer.exploring import explore_runs  # without a page, training imports no explorer

            explore_runs(recipe, {folder.resolve().name: folder}, "validation", folder)
    return result


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
    seeds: str | None = None,
    **overrides: Any,
) -> "Outcome | ScreeningOutcome":
    """Trains the models of a comparison and reports which differ from the baseline. A second call resumes it.

    Runs are processes, so a script must call this under `if __name__ == "__main__":`.

    Args:
        comparison: name of a shipped comparison, a YAML file, or a published comparison, `owner/name`.
        output_dir: results folder, which all nodes of a cluster must see; by default `runs/compare-NAME`.
        engine: `local`, with the options of `LocalEngine`, or `ray`, with those of `RayWorkers`.
        cpus_per_run: threads of a run, by default PyTorch's number.
        trust_parts: run the parts whose code is in the file, or beside it on the Hub.
        seeds: of a published comparison: `fresh`, as many others, by default, or `original`.
        overrides: fields of the recipe that all models share, as for `train`.

    Raises:
        ValueError: for a wrong field, a cluster that cannot make the runs, or a folder that cannot be written or holds
            something else.
        ChildProcessError: if a run failed for another reason than its loss; finished runs stay.
    """
    from .comparison.config import default_folder
    from .comparison.publication import find_published
    from .comparison.run import make_engine, run_and_report

    options = {"gpus_per_run": gpus_per_run, "workers_per_run": workers_per_run, "max_retries": max_retries}
    made = make_engine(engine, cpus_per_run=cpus_per_run, jobs=jobs, **options)
    plan = load_plan(comparison, overrides, trust_parts, find_published(comparison, seeds))
    return run_and_report(plan, results_folder(output_dir or default_folder(plan.name)), made)


def load_plan(
    source: str | Path,
    overrides: Mapping[str, Any] | None = None,
    trust_parts: bool = False,
    published: "Published | None" = None,
) -> "Comparison | Screening":
    """Reads a comparison, or a screening if the file has `factors`; `published` is that of `source` on the Hub."""
    from .comparison.comparison import read_comparison
    from .comparison.config import read_file

    file = read_file(source, overrides, trust_parts, published)
    if file.config.factors is None:
        return replace(read_comparison(file), published=published)
    from .screening.run import read_screening

    return read_screening(file)


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

    A comparison becomes a data set with its file, runs, verdicts, report and card, and no model. Creates a missing
    repository or branch, and deletes files that only an earlier publication uploaded.

    Args:
        folder: a run, a conversion, any saved NLQ model, or a finished comparison.
        private: of a new repository; by default the owner's setting decides.
        comparison: folder of `nlq compare`, whose verdicts go into the card.
        card: a Markdown file; by default the card is generated.
        license: of the weights or the comparison, for the card.
        adapter: upload only what a run with `trainable: new` trained, as an adapter of PEFT.
        revision: the branch; by default the main one.

    Raises:
        ValueError: for an incomplete model or comparison, a file with a token or a path of this machine, or a wrong
            name.
        ImportError: for an adapter without PEFT.
        PublishingError: if the Hub refuses, or cannot be reached. The repository is then unchanged.
    """
    from .comparison.publication import is_comparison, publish_comparison
    from .comparison.report import read_for_card
    from .sharing.publishing import CardOptions, publish_model

    if is_comparison(Path(folder)):
        for name, value in {"comparison": comparison, "card": card, "adapter": adapter or None}.items():
            if value is not None:
                raise ValueError(f"{name}={value!r} is for a model, and {folder} holds a comparison")
        return publish_comparison(resolve_user_path(folder), repo_id, license, private, revision, dry_run)
    options = CardOptions(card, license)
    if comparison is not None:
        read = read_for_card(Path(folder).resolve(), Path(comparison).resolve())
        options.verdicts, options.report, options.over_seeds = read
    return publish_model(folder, repo_id, options, adapter, private, revision, dry_run)

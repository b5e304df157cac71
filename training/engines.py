"""`nlq train`: one training run, in this process or on a cluster. The engines for many runs are in `comparison/`."""

from pathlib import Path
from typing import Any

from .run.recipe import ResolvedRecipe, load_recipe
from .run.trainer import train_recipe


def train(
    recipe: str | Path,
    *,
    engine: str = "local",
    workers: int | None = None,
    cpus_per_worker: int | None = None,
    gpus_per_worker: float | None = None,
    max_retries: int | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Trains a model from a recipe, evaluates it and saves it. Called again, it goes on where it was interrupted.

    Args:
        recipe: name of a shipped recipe, or a YAML file.
        engine: `local`, this process, or `ray`, workers on the cluster that Ray finds.
        workers, cpus_per_worker, gpus_per_worker, max_retries: of the engine `ray`, see `train_on_ray`.
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
    return train_with(engine, load_recipe(recipe, overrides), max_retries=max_retries, **options)


def train_with(engine: str, resolved: ResolvedRecipe, **options: Any) -> dict[str, Any]:
    """Trains a recipe by an engine, as `train` does; an option that is `None` keeps its default."""
    given = {option: value for option, value in options.items() if value is not None}
    if engine == "ray":
        from .run.on_ray import train_on_ray

        return train_on_ray(resolved, **given)
    if engine != "local":
        raise ValueError(f"engine={engine!r} must be 'local' or 'ray'")
    if given:
        raise ValueError(f"{', '.join(given)}: only the engine 'ray' has that; set --engine ray")
    return train_recipe(resolved)

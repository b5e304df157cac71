"""`nlq train --engine ray`: one training on a cluster."""

from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from modeling_nlq.training.files import METRICS_FILE, read_json
from modeling_nlq.training.models import load_config
from modeling_nlq.training.run.ray_jobs import RayJobs, Resources, connected_to_ray, order_for_ray
from modeling_nlq.training.run.recipe import ResolvedRecipe, check_recipe
from modeling_nlq.training.run.shared_files import share_data, share_model
from modeling_nlq.training.storage import check_writable, open_folder
from modeling_nlq.training.text import bar_options


def train_on_ray(
    resolved: ResolvedRecipe, workers: int = 1, cpus_per_worker: int = 1, gpus_per_worker: float = 0, max_retries: int = 3
) -> dict[str, Any]:
    """Trains a recipe on the cluster that Ray finds, at the same global batch size for any number of workers.

    Called again, it goes on. Tokenizer and tokenised data lie beside the run folder, in `NAME.data`, and so does the log.

    Args:
        resolved: the recipe; its `output_dir` is a folder that all nodes share, or an address such as `s3://bucket/run`.
        workers: processes that train together.
        cpus_per_worker, gpus_per_worker: what each of them reserves; `cpus_per_worker` is also its number of threads.
        max_retries: how often it is begun again if it loses a node or its memory.

    Returns:
        The content of `metrics.json` in the run folder.

    Raises:
        ValueError: for a recipe that cannot be trained, a cluster that does not answer or is too small, or a folder that cannot
            be written.
        ChildProcessError: if the run failed.
    """
    resources = Resources(cpus_per_worker * workers, gpus_per_worker * workers, workers)
    check_recipe(resolved, load_config(resolved.recipe.model, resolved.switches))
    folder = open_folder(resolved.training_arguments.output_dir)
    folder = folder.absolute() if isinstance(folder, Path) else folder
    data = folder.with_name(f"{folder.name}.data")
    check_writable(data)
    steps = max(resolved.training_arguments.max_steps, 0)
    with connected_to_ray():
        resources.check()
        share_data(resolved.recipe, data)
        model = share_model(resolved.recipe.model, data.with_name(f"{folder.name}.model"))
        order = order_for_ray(folder.name, resolved.given, folder, data, resources, model=model, keeps_checkpoints=True)
        with tqdm(total=steps or None, unit="step", **bar_options()) as progress:
            jobs = RayJobs(resources, max_retries, progress, steps)
            jobs.submit(order)
            for _ in jobs.finished():
                pass
    if jobs.failures:
        raise ChildProcessError(jobs.failures[0])
    return read_json(folder / METRICS_FILE)

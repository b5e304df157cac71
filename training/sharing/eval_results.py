"""Writes test results on a dataset of the Hub as the Hub and Every Eval Ever (arXiv 2606.14516) read them."""

from datetime import UTC, datetime
from typing import Any

from huggingface_hub import EvalResultEntry, constants, eval_result_entries_to_yaml

from ..result import RunResult
from .card import hub_dataset, measured_on


HUB_FILE = ".eval_results/nlq.yaml"  # others in this folder may be other people's
EEE_FILE = "every_eval_ever.json"
_LARGEST = {"token_accuracy": 1, "chrf": 100}  # where higher is better


def eval_results(
    repo_id: str,
    recipe: dict[str, Any],
    result: RunResult,
    metrics: dict[str, str],
    time: float,
    over_seeds: str | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
    """Returns the contents of `HUB_FILE` and `EEE_FILE`, or `None` without a test loss on OWNER/NAME of the Hub.

    Args:
        metrics: the name of each metric in words.
        time: when the run ended, in seconds since 1970.
        over_seeds: the verdict of a comparison in one line.
    """
    dataset, values = hub_dataset(recipe, result), measured_on(result, "test")
    if dataset is None or "/" not in dataset or result.test_loss is None:
        return None
    owner, _, name = repo_id.partition("/")
    home, date = constants.HUGGINGFACE_CO_URL_HOME, datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")
    tokens = f"{result.data.test_tokens:,} " if result.data.test_tokens else ""
    details = {"text": f"{tokens}test tokens, held out as recipe.yaml says"}
    details |= {"over_seeds": over_seeds} if over_seeds else {}
    # Losses per token of different tokenizers cannot be compared
    main = "bits_per_byte" if "bits_per_byte" in values else "loss"
    entry = EvalResultEntry(
        dataset_id=dataset,
        task_id=recipe.get("dataset_config") or "default",
        value=values[main],
        date=date,
        source_url=f"{home}{repo_id}",
        source_name="Model card",
        source_user=owner,
        notes=". ".join([metrics[main], *details.values()]),
    )
    results = [
        {
            "evaluation_name": dataset,
            "source_data": {"dataset_name": dataset, "source_type": "hf_dataset", "hf_repo": dataset},
            "metric_config": {
                "metric_id": metric,
                "metric_name": metrics[metric],
                "lower_is_better": metric not in _LARGEST,
                "score_type": "continuous",
                "min_score": 1 if metric in ("perplexity", "pseudo_perplexity") else 0,
                "max_score": _LARGEST.get(metric, "Infinity"),
            },
            "score_details": {"score": value, "details": details},
        }
        for metric, value in values.items()
    ]
    record = {
        "schema_version": "0.3.0",  # before it, the largest score had to be a number
        "evaluation_id": f"{dataset}/{repo_id}/{int(time)}",
        "evaluation_timestamp": date,
        "retrieved_timestamp": str(int(time)),
        "source_metadata": {
            "source_type": "documentation",  # no results of single texts
            "source_organization_name": owner,
            "evaluator_relationship": "first_party",
        },
        "eval_library": {"name": "modeling-nlq", "version": result.machine.versions.get("nlq", "unknown")},
        "model_info": {
            "name": name,
            "id": repo_id,
            "additional_details": {"deployment_type": "self_deployed", "model_availability": "open_weights"},
        },
        "evaluation_results": results,
    }
    return eval_result_entries_to_yaml([entry]), record

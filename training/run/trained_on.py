"""What a saved model was trained on: a record beside it, which its conversions and later runs keep."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import BUILT_IN_CORPORA, CONVERSION_FILE, METRICS_FILE, RECIPE_FILE, STATE_FILE
from ..models import is_saved_model, read_record
from .recipe import Recipe


# The fields of a recipe that say how texts are cut and shown to the model
SHAPES = ("block_size", "packing", "mask_probability", "source_column", "target_column", "max_source_length")
SHAPES += ("max_target_length",)
# Those that say which documents were trained on, and how held-out ones are evaluated
RECIPE_FIELDS = ("dataset", "dataset_config", "text_column", "text_template", "streaming", "validation_fraction")
RECIPE_FIELDS += ("test_fraction", "max_validation_documents", *SHAPES)


def read_trained_on(model: str, after: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The datasets that a saved model was trained on, in their order, as far as it is known.

    Args:
        model: a folder (also a checkpoint in one) or a Hub name, of a run or of a conversion.
        after: the models whose records led here, of which nothing more is known.

    Returns:
        For each run the fields of its recipe that say which documents it saw, with `fingerprint`: that of its documents, or
        `None`.
    """
    folder = Path(model)
    if (folder / STATE_FILE).is_file() and not (folder / RECIPE_FILE).is_file():
        model = str(folder.resolve().parent)  # of a checkpoint
    if (place := str(Path(model).resolve())) in after:
        return []
    metrics, given = read_record(model, METRICS_FILE) or {}, read_record(model, RECIPE_FILE)
    if "trained_on" in metrics:
        return metrics["trained_on"]
    if given is None:
        return (read_record(model, CONVERSION_FILE) or {}).get("trained_on", [])
    return record_run(given, metrics.get("dataset_fingerprint"), (*after, place))


def record_run(given: Mapping[str, Any], fingerprint: str | None, after: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """What the model of a run was trained on: by those before it, and by the run of this recipe and fingerprint."""
    base = given.get("model")
    before = read_trained_on(base, after) if base and is_saved_model(base) else []
    record = {name: given.get(name, getattr(Recipe, name)) for name in RECIPE_FIELDS}
    if record["dataset"] not in BUILT_IN_CORPORA and Path(record["dataset"]).exists():
        record["dataset"] = str(Path(record["dataset"]).resolve())  # to be found from everywhere
    return [*before, {**record, "fingerprint": fingerprint}]

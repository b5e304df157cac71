"""What a saved model was trained on: a record beside it, which its conversions and later runs keep."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import BUILT_IN_CORPORA, CONVERSION_FILE, METRICS_FILE, RECIPE_FILE, STATE_FILE
from ..models import is_saved_model, read_record
from .documents import has_own_splits, local_fingerprint
from .recipe import Recipe


# The fields of a recipe that say which documents were trained on, and how held-out ones are evaluated
_FIELDS = ("dataset", "dataset_config", "text_column", "streaming", "validation_fraction", "test_fraction")
_FIELDS += ("max_validation_documents", "block_size", "packing")


def read_trained_on(model: str) -> list[dict[str, Any]]:
    """The datasets that a saved model was trained on, in their order, as far as it is known.

    Args:
        model: a folder (also a checkpoint in one) or a Hub name, of a run or of a conversion.

    Returns:
        For each run the fields of its recipe that say which documents it saw, with `fingerprint`: that of its documents, or
        `None`.
    """
    folder = Path(model)
    if (folder / STATE_FILE).is_file() and not (folder / RECIPE_FILE).is_file():
        model = str(folder.resolve().parent)  # of a checkpoint
    metrics, given = read_record(model, METRICS_FILE) or {}, read_record(model, RECIPE_FILE)
    if "trained_on" in metrics:
        return metrics["trained_on"]
    if given is None:
        return (read_record(model, CONVERSION_FILE) or {}).get("trained_on", [])
    return record_run(given, metrics.get("dataset_fingerprint"))


def record_run(given: Mapping[str, Any], fingerprint: str | None) -> list[dict[str, Any]]:
    """What the model of a run was trained on: by those before it, and by the run of this recipe and fingerprint."""
    base = given.get("model")
    before = read_trained_on(base) if base and is_saved_model(base) else []
    record = {name: given.get(name, getattr(Recipe, name)) for name in _FIELDS}
    if record["dataset"] not in BUILT_IN_CORPORA and Path(record["dataset"]).exists():
        record["dataset"] = str(Path(record["dataset"]).resolve())  # to be found from everywhere
    return [*before, {**record, "fingerprint": fingerprint}]


def find_place(record: Mapping[str, Any], dataset: str) -> str | None:
    """Finds the place of a record's dataset, if it is the given one, a folder around it or a file in it.

    It is recognised by its name, its place or its content; a folder that was moved or copied, around a file, by its content if
    it kept its own name. Of another dataset the result is `None`.
    """
    before = record["dataset"]
    if before == dataset:
        return before
    if dataset in BUILT_IN_CORPORA or not Path(dataset).exists():
        return None
    here = Path(dataset).resolve()
    if before not in BUILT_IN_CORPORA and Path(before).exists():
        there = Path(before).resolve()
        if there == here or there in here.parents or here in there.parents:
            return before
    around = [folder for folder in here.parents if folder.name == Path(before).name]
    return next((str(place) for place in (Path(dataset), *around) if _has_content(record, place)), None)


def _has_content(record: Mapping[str, Any], place: Path) -> bool:
    try:
        fingerprint = local_fingerprint(recipe_of(record, dataset=str(place)))
    except ValueError:  # it has no such configuration, or cannot be read that way
        return False
    return fingerprint is not None and fingerprint == record["fingerprint"]


def is_split_otherwise(record: Mapping[str, Any], dataset: str) -> bool:
    """Tells whether a file and a folder with splits of its own overlap, so that no share tells what was trained on.

    The record is of this dataset, with the place that `find_place` found.
    """
    there, here = Path(record["dataset"]).resolve(), Path(dataset).resolve()
    if there in here.parents or here in there.parents:
        return has_own_splits(recipe_of(record, dataset=str(there if there in here.parents else here)))
    return False


def recipe_of(record: Mapping[str, Any], **fields: Any) -> Recipe:
    """The recipe of a record, with other values for some fields. Its model and tokenizer are none of the record's."""
    given = {name: record[name] for name in _FIELDS if name in record}
    return Recipe(**{"model": "-", **given, **fields})


def held_out_by(record: Mapping[str, Any]) -> float:
    """The share of documents that a run was not trained on, of a dataset without splits of its own."""
    return record["validation_fraction"] + record["test_fraction"]

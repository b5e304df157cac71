"""What a saved model was trained on: a record beside it, which its conversions and later runs keep."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import modeling_nlq

from ..disk import read_bytes
from ..files import CONVERSION_FILE, METRICS_FILE, RECIPE_FILE, STATE_FILE, is_built_in
from ..loading import read_record
from ..result import RunResult
from ..values import from_json
from .recipe import Recipe


# The fields of a recipe that say which documents were trained on, and how held-out ones are evaluated
RECORDED = [name for name in Recipe.affecting("data") if name not in ("tokenizer", "objective")]
# Those that say how texts are cut and shown to the model
SHAPES = [item.name for item in fields(Recipe) if item.metadata["is_shape"]]
_TYPES = {name: kind for name, kind in get_type_hints(Recipe).items() if name in RECORDED}


def read_trained_on(model: str) -> list[dict[str, Any]]:
    """Returns the datasets that a saved model was trained on, in order, as far as it is known.

    Each has the fields of a run that say which documents it saw, with their `fingerprint`. Of an unfinished run, which
    may name any model of this machine, only its own are known. `model` is a folder, a checkpoint, or a Hub name.
    """
    folder = Path(model)
    if (folder / STATE_FILE).is_file() and not (folder / RECIPE_FILE).is_file():
        model = str(folder.resolve().parent)  # of a checkpoint
    metrics = RunResult.fields_in(read_record(model, METRICS_FILE) or {})
    recipe = read_record(model, RECIPE_FILE)
    data = from_json(dict[str, Any], metrics.get("data", {}), f"{model}: data.")  # of any file with this name
    if "trained_on" in data:
        records = data["trained_on"]
    elif recipe is None:
        records = (read_record(model, CONVERSION_FILE) or {}).get("trained_on", [])
    else:
        records = [_record(recipe, data.get("fingerprint"))]
    for record in from_json(list[dict[str, Any]], records, f"{model}: trained_on."):
        for name in _TYPES.keys() & record:
            from_json(_TYPES[name], record[name], f"{model}: trained_on: {name}.")
    return records


def record_run(recipe: Recipe, fingerprint: str | None) -> list[dict[str, Any]]:
    """Returns what the model of a run was trained on, before it and by it."""
    before = read_trained_on(recipe.model) if recipe.has_weights else []
    return [*before, _record(vars(recipe), fingerprint)]


@functools.cache
def code_fingerprint() -> str:
    """Returns the SHA-256 of the installed code: runs of equal code, data and settings on one machine are equal."""
    digest = hashlib.sha256()
    for root in (Path(modeling_nlq.__file__).parent, Path(__file__).parents[1]):
        for path in sorted(path for kind in ("py", "cpp", "h") for path in root.rglob(f"*.{kind}")):
            digest.update(f"{path.relative_to(root.parent).as_posix()}\0".encode() + read_bytes(path))
    return digest.hexdigest()


def names_of_dataset(dataset: str) -> set[str]:
    """Returns the names of a dataset in records: of a local one the last component, once the path."""
    path = Path(dataset)
    return {dataset, str(path.resolve()), path.resolve().name} if path.exists() else {dataset}


def _record(values: Mapping[str, Any], fingerprint: str | None) -> dict[str, Any]:
    record = {name: values.get(name, getattr(Recipe, name)) for name in RECORDED}
    if record["task"] is None:  # as in older records, of text
        del record["task"]
    if not is_built_in(record["dataset"]) and Path(str(record["dataset"])).exists():
        record["dataset"] = Path(record["dataset"]).resolve().name  # records name no folder of this machine
    return {**record, "fingerprint": fingerprint}

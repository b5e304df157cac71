"""What nodes take from the folder of results: the tokenizer, the tokenised data, and models that are files of one machine.

Each lies in a folder whose name is a hash: of the documents and the fields that shape the tokens, or of the names, sizes and
times of the model's files. What lies there never changes.
"""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from datasets.fingerprint import Hasher
from filelock import FileLock

from ..files import write_text
from ..storage import copy_file, copy_files, is_address, lock_file, open_folder, scratch_folder
from .data import prepare_data, save_blocks
from .documents import load_documents
from .recipe import Recipe


if TYPE_CHECKING:
    from upath import UPath

# The fields of a recipe that shape its tokens
_FIELDS = ("dataset", "dataset_config", "text_column", "streaming", "validation_fraction", "test_fraction")
_FIELDS += ("max_validation_documents", "tokenizer", "block_size")
# Says that the files beside it are complete
_COMPLETE = "complete"


def share_data(recipe: Recipe, folder: "Path | UPath") -> "tuple[Path | UPath, str | None]":
    """Saves tokenizer and tokenised data, once for all nodes; the data of a stream are read by each node.

    Args:
        recipe: names the data.
        folder: one that all nodes see, or an address.

    Returns:
        The folder in it that holds them, and the fingerprint of the documents.
    """
    fingerprint = load_documents(recipe).fingerprint
    target = folder / Hasher.hash([fingerprint, *(getattr(recipe, name) for name in _FIELDS)])
    if not (target / _COMPLETE).is_file():
        with tempfile.TemporaryDirectory() as name:
            _, blocks, _ = prepare_data(recipe, Path(name))
            if not recipe.streaming:
                save_blocks(blocks, fingerprint, Path(name))
            copy_files(Path(name), target)
        write_text(target / _COMPLETE, "")
    return target, fingerprint


def share_model(model: str, folder: "Path | UPath") -> str | None:
    """Makes a model that is a file or a folder of this machine known to all nodes; returns its path or its address.

    Args:
        model: as in a recipe.
        folder: the folder of a copy, if it is an address; a folder that all nodes see needs none.

    Returns:
        `None` for a model that nodes find by its name.
    """
    source = Path(model)
    if not source.exists():
        return None
    if isinstance(folder, Path):
        return os.fspath(source.absolute())
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    state = [(os.fspath(path.relative_to(source)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    target = folder / Hasher.hash([os.fspath(source.absolute()), *state])
    if not (target / _COMPLETE).is_file():
        (copy_files if source.is_dir() else copy_file)(source, target / source.name)
        write_text(target / _COMPLETE, "")
    return str(target / source.name)


def local_data(folder: str) -> Path:
    """The folder of tokenizer and blocks on this machine, from the place where `share_data` put them."""
    return _local_copy(folder) if is_address(folder) else Path(folder)


def local_model(model: str) -> Path:
    """The model on this machine, from the place where `share_model` put it."""
    if not is_address(model):
        return Path(model)
    parent, _, name = model.rpartition("/")
    return _local_copy(parent) / name


def _local_copy(address: str) -> Path:
    """A copy of the files at an address on this machine, which all its runs share. It is made once."""
    folder = scratch_folder(address)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock_file(folder)):
        if not (folder / _COMPLETE).is_file():
            copy_files(open_folder(address), folder, last=_COMPLETE)
    return folder

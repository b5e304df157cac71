"""What nodes take from the folder of results: the tokenizer, the tokenised data, and models that are files of one machine."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from modeling_nlq.training.files import read_json, write_text
from modeling_nlq.training.run.data import BLOCKS_FILE, prepare_data, save_blocks
from modeling_nlq.training.run.recipe import Recipe
from modeling_nlq.training.storage import copy_file, copy_files, files_below, lock_file, open_folder, scratch_folder


def share_data(recipe: Recipe, folder) -> str | None:
    """Saves tokenizer and tokenised data, once for all nodes; those of a stream are read by each node.

    Args:
        recipe: names the data.
        folder: one that all nodes see, or an address.

    Returns:
        The fingerprint of the documents.
    """
    with tempfile.TemporaryDirectory() as name:
        local, file = Path(name), folder / BLOCKS_FILE
        if (folder / "tokenizer.json").is_file():
            for path in folder.iterdir():
                # Without the blocks: whether the documents have changed is found here, not on the nodes
                if path.is_file() and path.name != BLOCKS_FILE:
                    copy_file(path, local / path.name)
        _, blocks, fingerprint = prepare_data(recipe, local)
        if recipe.streaming:
            copy_files(local, folder, last="tokenizer.json")
        elif not file.is_file() or read_json(file)["fingerprint"] != fingerprint:
            save_blocks(blocks, fingerprint, local)
            copy_files(local, folder, last=BLOCKS_FILE)
    return fingerprint


def share_model(model: str, folder) -> str | None:
    """Copies a model that is a file or a folder of this machine to an address; returns its own address there.

    It is `None` for a model that nodes find by its name, and if the folder is one that all nodes see.
    """
    source = Path(model)
    if isinstance(folder, Path) or not source.exists():
        return None
    target = folder / hashlib.sha256(os.fspath(source.absolute()).encode()).hexdigest()[:12] / source.name
    (copy_files if source.is_dir() else copy_file)(source, target)
    return str(target)


def local_data(folder: str) -> Path:
    """The folder of tokenizer and blocks on this machine, from the place where `share_data` put them."""
    place = open_folder(folder)
    return place if isinstance(place, Path) else local_copy(folder, BLOCKS_FILE)


def local_copy(address: str, mark: str | None = None) -> Path:
    """A copy of the files at an address on this machine, which all its runs share. It is made once.

    Args:
        address: of a folder.
        mark: the name of a file there; if its content has changed, the copy is made anew.
    """
    folder = scratch_folder(address)
    is_complete = folder.with_name(f"{folder.name}.complete")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock_file(folder)):
        source = open_folder(address)
        names = files_below(source)
        content = json.dumps([names, (source / mark).read_text(encoding="utf-8") if mark in names else None])
        if not is_complete.is_file() or is_complete.read_text(encoding="utf-8") != content:
            is_complete.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            copy_files(source, folder)
            write_text(is_complete, content)
    return folder

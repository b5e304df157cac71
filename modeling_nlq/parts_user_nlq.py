"""Attention parts of a user's own: told apart by a hash of their code, and saved beside a model."""

import functools
import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

from .parts_base_nlq import AttentionPart
from .parts_nlq import PARTS


# By name and hash of the code. The latest of a name is what a new configuration means by it
_registered: dict[tuple[str, str], type[AttentionPart]] = {}
_latest: dict[str, str] = {}
# Name and published text of a file, by module
_files: dict[str, tuple[str, str]] = {}


def add_part(part: type[AttentionPart]) -> None:
    """Adds a part that `attention_parts` can name."""
    code = code_of(part)
    _registered[part.name, code] = part
    _latest[part.name] = code


def add_file(module: str, file: str, text: str) -> None:
    """Notes the name and the published text of the file that a module was made from."""
    _files[module] = (file, text)


def add_to_package(name: str) -> None:
    """Makes a loaded module an attribute of its package, as importing does; Transformers leaves that out.

    dill, and with it `datasets.map`, pickles by value any class that it cannot find there, with all that it refers to.
    """
    package, _, own_name = name.rpartition(".")
    setattr(sys.modules[package], own_name, sys.modules[name])


def hash_of(text: str) -> str:
    """Returns the hash of a file's published text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def code_of(part: type[AttentionPart]) -> str:
    """Returns the hash of the file that defines a part, as it is published; `""` without a file."""
    if part.__module__ in _files:
        return hash_of(_files[part.__module__][1])
    if part not in PARTS:
        return ""
    return hash_of(Path(sys.modules[part.__module__].__file__).read_text(encoding="utf-8"))


def find_part(name: str, code: str | None) -> type[AttentionPart]:
    """Returns the part of a name with this hash of its code, or the latest; `ValueError` if it is unknown."""
    for part in PARTS:
        if part.name == name and code in (None, code_of(part)):
            return part
    if part := _registered.get((name, _latest.get(name) if code is None else code)):
        return part
    raise ValueError(
        f"attention_parts: {name!r} (code {code}) is unknown here; if you trust its file, which lies beside the "
        "model, load it by load_attention_parts('FILE.py') or --parts FILE.py"
    )


def save_parts(folder: str | Path, parts: Iterable[type[AttentionPart]]) -> None:
    """Writes the files of parts into the folder of a saved model, and a `parts_nlq.py` that imports them."""
    imports: dict[str, list[tuple[str, str]]] = {}
    texts: dict[str, str] = {}
    for part in parts:
        if part.__module__ not in _files:
            raise ValueError(
                f"attention_parts: {part.name!r} is defined in no file, and a model cannot be saved without its code; "
                "put the class into a file, and load it by load_attention_parts"
            )
        file, text = _files[part.__module__]
        if texts.setdefault(file, text) != text:
            raise ValueError(f"attention_parts: two files are named {file}; rename one of them")
        module = file.removesuffix(".py")
        # Two files may have one class name
        imports.setdefault(module, []).append((part.__name__, f"{module}_{part.__name__}"))
    for file, text in texts.items():
        Path(folder, file).write_text(text, encoding="utf-8")
    lines = ['"""The attention parts that the author of this model wrote."""', ""]
    lines += [f"from .{module} import {', '.join(map(' as '.join, names))}" for module, names in imports.items()]
    classes = ", ".join(alias for names in imports.values() for _, alias in names)
    lines += ["", "", f"PARTS = ({classes},)", ""]
    Path(folder, "parts_nlq.py").write_text("\n".join(lines), encoding="utf-8")

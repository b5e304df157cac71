"""Attention parts of a user's own: files that are loaded, told apart by a hash of their code, and saved beside a
model.
"""

import ast
import functools
import hashlib
import keyword
import linecache
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from torch import nn

from .activations_nlq import registered_activations
from .parts_base_nlq import AttentionPart
from .parts_nlq import PARTS


# The names of this package that a file may import, because every saved model brings them, and their modules
_MODULES = {
    **dict.fromkeys(("AttentionCall", "AttentionPart", "ScoreBias", "TokenContext"), "parts_base_nlq"),
    "register_attention_activation": "activations_nlq",
}
_ORIGINS = (
    "modeling_nlq",
    *(f"{prefix}{module}" for prefix in ("modeling_nlq.", ".") for module in set(_MODULES.values())),
)

# By name and hash of the code. The latest of a name is what a new configuration means by it
_registered: dict[tuple[str, str], type[AttentionPart]] = {}
_latest: dict[str, str] = {}
# Name and published text of a file, by module
_files: dict[str, tuple[str, str]] = {}
# The modules that register activations
_registering: set[str] = set()


def register_attention_part(part: type[AttentionPart]) -> type[AttentionPart]:
    """Adds an attention part, so that models can have it: `attention_parts=["its name"]`. Also a decorator.

    A configuration remembers the code that it was made with. A part of a notebook or a script can be used, but its
    model cannot be saved: put the class into a file, and load it by `load_attention_parts`.

    Args:
        part: a subclass of `AttentionPart`.

    Returns:
        The class itself.

    Raises:
        ValueError: if it is not such a class, its name is not an identifier or is one that modules use, or it
            overrides `forward`.
    """
    if not (isinstance(part, type) and issubclass(part, AttentionPart)):
        raise ValueError(f"part={part!r} must be a subclass of AttentionPart")
    # A layer keeps its parts in a `ModuleDict`, which has attributes of its own
    if not part.name.isidentifier() or hasattr(nn.ModuleDict(), part.name):
        raise ValueError(
            f"{part.__name__}.name={part.name!r} must be a Python identifier, and no attribute of nn.ModuleDict"
        )
    if part.forward is not AttentionPart.forward:
        raise ValueError(
            f"{part.__name__} overrides `forward`, by which a layer runs its hooks; give the method another name"
        )
    code = code_of(part)
    _registered[part.name, code] = part
    _latest[part.name] = code
    return part


def load_attention_parts(source: str | Path, text: str | None = None) -> list[type[AttentionPart]]:
    """Runs a file, and registers the attention parts that it defines. It may register activations itself.

    It may import PyTorch, Transformers, the standard library, and of this package the classes that a part needs and
    `register_attention_activation`.

    Args:
        source: the file, such as `my_idea.py`.
        text: its text, if it is not to be read.

    Returns:
        The parts. The same text is run once in a process.

    Raises:
        ValueError: if the file cannot be read or run, imports something else of this package, or defines neither a
            part nor an activation.
    """
    path = Path(source)
    if (
        not path.stem.isidentifier()
        or keyword.iskeyword(path.stem)
        or path.suffix != ".py"
        or path.stem.endswith("_nlq")
    ):
        raise ValueError(f"{source}: a file of parts must have a name such as my_idea.py, and not end in _nlq")
    text = published_text(text_of(source) if text is None else text, str(source))
    name = f"{__package__}.{path.stem}_{_hash(text)}"
    if (module := sys.modules.get(name)) is None:
        module = _run(name, path.name, text)
    parts = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, AttentionPart) and value.__module__ == name
    ]
    if not parts and name not in _registering:
        raise ValueError(f"{source} defines no subclass of AttentionPart, and registers no attention activation")
    return [register_attention_part(part) for part in parts]


def text_of(source: str | Path) -> str:
    """Reads a file of parts; `ValueError` if it cannot be read."""
    try:
        return Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from error


def add_to_package(name: str) -> None:
    """Makes a loaded module an attribute of its package, as importing does; Transformers leaves that out for remote
    code.

    dill, and with it `datasets.map`, pickles by value any class that it cannot find there, with everything the class
    refers to.
    """
    package, _, own_name = name.rpartition(".")
    setattr(sys.modules[package], own_name, sys.modules[name])


def _run(name: str, file: str, text: str) -> ModuleType:
    module = ModuleType(name)
    module.__package__, module.__file__ = __package__, f"<{file} {name[-12:]}>"
    # For tracebacks and `inspect`, as there may be no such file here
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[name] = module
    add_to_package(name)
    _files[name] = (file, text)
    before = registered_activations()
    try:
        exec(compile(text, module.__file__, "exec"), vars(module))
        if registered_activations() != before:
            _registering.add(name)
    except Exception as error:
        del sys.modules[name], _files[name]
        raise ValueError(f"{file} cannot be run: {type(error).__name__}: {error}") from error
    return module


def published_text(text: str, source: str) -> str:
    """Returns the text of a file of parts as it is saved with a model, where this package may be missing.

    Raises:
        ValueError: if it is not valid Python, or imports what a saved model does not bring.
    """
    text = text.replace("\r\n", "\n")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{source}, line {error.lineno}: {error.msg}") from error
    lines = text.encode().split(b"\n")  # as `ast` counts, in bytes
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(imports, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        names = [alias.name for alias in node.names]
        origin = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if origin in _ORIGINS:
            foreign = [name for name in names if name not in _MODULES]
        else:
            foreign = [name for name in ([origin] if origin else names) if name.split(".")[0] in ("", "modeling_nlq")]
        if foreign:
            raise ValueError(
                f"{source}, line {node.lineno}: a file of parts cannot import {foreign[0]}; of this package it may "
                f"write `from modeling_nlq import ...` with {', '.join(_MODULES)}"
            )
        if origin in _ORIGINS:
            aliases = {
                module: [a for a in node.names if _MODULES[a.name] == module] for module in map(_MODULES.get, names)
            }
            new = "; ".join(
                f"from .{module} import {', '.join(map(ast.unparse, names))}" for module, names in aliases.items()
            )
            first, last = node.lineno - 1, node.end_lineno - 1
            line = lines[first][: node.col_offset] + new.encode() + lines[last][node.end_col_offset :]
            lines[first : last + 1] = [line] + [b""] * (last - first)
    return b"\n".join(lines).decode().rstrip("\n") + "\n"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def code_of(part: type[AttentionPart]) -> str:
    """Returns the hash of the file that defines a part, as it is published; `""` without a file."""
    if part.__module__ in _files:
        return _hash(_files[part.__module__][1])
    if part not in PARTS:
        return ""
    return _hash(
        published_text(Path(sys.modules[part.__module__].__file__).read_text(encoding="utf-8"), part.__module__)
    )


def find_part(name: str, code: str | None) -> type[AttentionPart]:
    """Returns the part of a name.

    Args:
        code: the hash of its code, or `None` for the latest.

    Raises:
        ValueError: if it is unknown, or known with other code only.
    """
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
    """Writes the files of parts into the folder of a saved model, and a `parts_nlq.py` that imports them.

    Raises:
        ValueError: for a part that is defined in no file.
    """
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

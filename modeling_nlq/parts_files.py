"""Loads files of attention parts of a user. A published model imports its parts without this code."""

import ast
import inspect
import keyword
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

from torch import nn

from .activations_nlq import did_you_mean, registered_activations
from .parts_base_nlq import HOOKS, AttentionPart
from .parts_user_nlq import add_file, add_part, add_to_package, hash_of


# The names of this package that a file may import, because every saved model brings them, and their modules
_MODULES = {
    **dict.fromkeys(("AttentionCall", "AttentionPart", "ScoreBias", "TokenContext"), "parts_base_nlq"),
    "register_attention_activation": "activations_nlq",
}
_ORIGINS = (
    "modeling_nlq",
    *(f"{prefix}{module}" for prefix in ("modeling_nlq.", ".") for module in set(_MODULES.values())),
)

# The modules that register activations
_registering: set[str] = set()


def register_attention_part(part: type[AttentionPart]) -> type[AttentionPart]:
    """Adds an attention part, so that models can have it: `attention_parts=["its name"]`. Also a decorator.

    A configuration remembers the code that it was made with. A model with a part of a notebook or a script cannot be
    saved: put the class into a file, and load it by `load_attention_parts`.

    Raises `ValueError` for another class, a name that a part cannot have, a `forward` of its own, or a method that is
    named like a hook and is none. A part without any hook would do nothing, so it raises too.
    """
    if not (isinstance(part, type) and issubclass(part, AttentionPart)):
        raise ValueError(f"part={part!r} must be a subclass of AttentionPart")
    # A layer keeps its parts in a `ModuleDict`, which has attributes of its own
    if not part.name.isidentifier() or hasattr(nn.ModuleDict(), part.name):
        name = f"{part.__name__}.name={part.name!r}"
        raise ValueError(f"{name} must be a Python identifier, and no attribute of nn.ModuleDict")
    if part.forward is not AttentionPart.forward:
        raise ValueError(f"{part.__name__} overrides `forward`, which runs hooks; give the method another name")
    _check_hooks(part)
    add_part(part)
    return part


# Hooks by the names that they had
_RENAMED = {"change_projections": "change_qkv", "change_attended": "change_cached_qkv", "reweigh": "change_weights"}
_RENAMED |= {"can_go_back": "supports_crop", "needs_places": "needs_token_context", "kind_of": "shard_dim"}


def _check_hooks(part: type[AttentionPart]) -> None:
    own = {name: getattr(part, name) for name in dir(part) if not hasattr(AttentionPart, name)}
    methods = {name: inspect.unwrap(method) for name, method in own.items() if inspect.isroutine(method)}
    # What code of the part or beside it names is a helper of it
    beside = list(vars(sys.modules.get(part.__module__, part)).values())
    classes = [*part.__mro__, *filter(inspect.isclass, beside)]
    values = [*beside, *(value for owner in classes for value in vars(owner).values())]
    called = {name for value in values for name in _names_in(_code_of(value))}
    for name in own.keys() & _RENAMED:
        raise ValueError(f"{part.__name__}.{name} is {_RENAMED[name]!r} now")
    for name in methods.keys() - called:
        if name.startswith(("change_", "score_", "token_")):
            near = did_you_mean(name, HOOKS, cutoff=0.0)
            raise ValueError(f"{part.__name__}.{name} is not a hook, so nothing calls it; {near}or rename it")
    if not any(map(part.has_hook, (*HOOKS, "measure"))):
        near = next(filter(None, (did_you_mean(name, HOOKS, cutoff=0.7) for name in methods)), "")
        raise ValueError(
            f"{part.__name__} overrides no hook, so it changes nothing; {near}hooks are {', '.join(HOOKS)}"
        )


def _code_of(value: object) -> CodeType | None:
    function = value.fget if isinstance(value, property) else value
    return getattr(inspect.unwrap(function), "__code__", None) if inspect.isroutine(function) else None


def _names_in(code: CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _names_in(constant)


def load_attention_parts(source: str | Path, text: str | None = None) -> list[type[AttentionPart]]:
    """Runs a file such as `my_idea.py`, or its `text`, once in a process; registers and returns its attention parts.

    It may import PyTorch, Transformers, the standard library, and of this package the classes that a part needs and
    `register_attention_activation`.

    Raises `ValueError` if the file cannot be read or run, imports something else of this package, or defines neither a
    part nor an activation.
    """
    path = Path(source)
    is_name = path.stem.isidentifier() and not keyword.iskeyword(path.stem)
    if not is_name or path.suffix != ".py" or path.stem.endswith("_nlq"):
        raise ValueError(f"{source}: a file of parts must have a name such as my_idea.py, and not end in _nlq")
    text = published_text(text_of(source) if text is None else text, str(source))
    name = f"{__package__}.{path.stem}_{hash_of(text)}"
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


def _run(name: str, file: str, text: str) -> ModuleType:
    module = ModuleType(name)
    module.__package__, module.__file__ = __package__, f"<{file} {name[-12:]}>"
    # For tracebacks and `inspect`, as there may be no such file here
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[name] = module
    add_to_package(name)
    before = registered_activations()
    try:
        exec(compile(text, module.__file__, "exec"), vars(module))
        if registered_activations() != before:
            _registering.add(name)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{file} cannot be run: {type(error).__name__}: {error}") from error
    add_file(name, file, text)
    return module


def published_text(text: str, source: str) -> str:
    """Returns the text of a file of parts as it is saved with a model, where this package may be missing.

    Raises `ValueError` if it is not valid Python, or imports what a saved model does not bring.
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

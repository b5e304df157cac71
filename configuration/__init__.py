"""Named configurations that ship with the package: models, recipes, comparisons and accelerate files."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from modeling_nlq.activations_nlq import did_you_mean


_ROOT = Path(__file__).parent
_SUFFIXES = {"models": ".json", "recipes": ".yaml", "comparisons": ".yaml", "accelerate": ".yaml"}


def names(kind: str) -> list[str]:
    """Returns the shipped names of a kind: `"models"`, `"recipes"`, `"comparisons"` or `"accelerate"`."""
    return sorted(path.stem for path in (_ROOT / kind).glob(f"*{_SUFFIXES[kind]}"))


def descriptions(kind: str) -> dict[str, str]:
    """Returns the first sentence of the comment that begins each shipped recipe or comparison, by name."""
    sentences = {}
    for name in names(kind):
        lines = find(kind, name).read_text(encoding="utf-8").splitlines()
        comment = [line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
        sentences[name] = re.match(r".*?[.?](?= |$)|.*", " ".join(comment))[0]
    return sentences


def suggestion(name: str, known: Iterable[str], is_short: bool = False) -> str:
    """Returns the end of a message about an unknown name: a near name, or a list, also both if the list `is_short`."""
    known = sorted(known)
    choices = ", ".join(known)
    # Other programs' short names: lr is learning_rate, and batch_size one of several
    initials = {choice: "".join(word[:1] for word in choice.split("_")) for choice in known}
    longer = [choice for choice in known if choice.endswith(f"_{name}") or initials[choice] == name]
    near = did_you_mean(name, known).strip()
    if 0 < len(longer) <= 3:
        near = f"did you mean {' or '.join(map(repr, longer))}?"
    if near:
        return f"{near} There are {choices}" if is_short else near
    return f"there are {choices}"


def find(kind: str, name: str) -> Path:
    """Returns the file of a shipped configuration, or of a path; raises `ValueError` if there is neither.

    A file in this folder that has a shipped name needs a path such as `./demo`.
    """
    if name in names(kind):
        return _ROOT / kind / f"{name}{_SUFFIXES[kind]}"
    if Path(name).is_file():
        return Path(name)
    other = next((other for other in _SUFFIXES if name in names(other)), None)
    hint = suggestion(name, names(kind), is_short=True) if other is None else f"it is one of the {other}"
    for near in (Path(f"{name}{_SUFFIXES[kind]}"), Path(name) / f"{kind.removesuffix('s')}{_SUFFIXES[kind]}"):
        if near.is_file():
            hint = f"did you mean the file {near}?"
    raise ValueError(f"{kind.removesuffix('s')} {name!r} is neither a file nor a shipped name; {hint}")

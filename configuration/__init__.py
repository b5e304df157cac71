"""Named configurations that ship with the package: models, recipes, comparisons and accelerate files."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from modeling_nlq.activations_nlq import did_you_mean


_ROOT = Path(__file__).parent
_SUFFIXES = {"models": ".json", "recipes": ".yaml", "comparisons": ".yaml", "accelerate": ".yaml"}


def names(kind: str) -> list[str]:
    """The shipped names of a kind: `"models"`, `"recipes"`, `"comparisons"` or `"accelerate"`."""
    return sorted(path.stem for path in (_ROOT / kind).glob(f"*{_SUFFIXES[kind]}"))


def descriptions(kind: str) -> dict[str, str]:
    """The first sentence of each shipped recipe or comparison, by name: its file begins with a comment."""
    found = {}
    for name in names(kind):
        lines = find(kind, name).read_text(encoding="utf-8").splitlines()
        comment = " ".join(
            line.removeprefix("#").strip() for line in itertools.takewhile(lambda line: line[:1] == "#", lines)
        )
        first = re.match(r".*?[.?](?= |$)", comment)
        found[name] = first[0] if first else comment
    return found


def suggestion(name: str, known: Iterable[str], is_short: bool = False) -> str:
    """Ends a message about an unknown name.

    Args:
        name: the unknown name.
        known: the known ones.
        is_short: whether `known` is a short list, which is given even if one name is near.
    """
    known = sorted(known)
    choices = ", ".join(known)
    # Other programs' short names: lr is learning_rate, and batch_size one of several
    longer = [one for one in known if one.endswith(f"_{name}") or "".join(word[:1] for word in one.split("_")) == name]
    near = (
        f"did you mean {' or '.join(map(repr, longer))}?"
        if 0 < len(longer) <= 3
        else did_you_mean(name, known).strip()
    )
    if near:
        return f"{near} There are {choices}" if is_short else near
    return f"there are {choices}"


def find(kind: str, name: str) -> Path:
    """The file of a named configuration.

    Args:
        kind: `"models"`, `"recipes"`, `"comparisons"` or `"accelerate"`.
        name: a name without folder and suffix, or the path of a file; a file of a shipped name needs its folder.

    Raises:
        ValueError: if there is neither such a name nor such a file.
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

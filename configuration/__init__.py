"""Named configurations that ship with the package: models, recipes, comparisons and accelerate files."""

import difflib
from pathlib import Path


_ROOT = Path(__file__).parent
_SUFFIXES = {"models": ".json", "recipes": ".yaml", "comparisons": ".yaml", "accelerate": ".yaml"}


def names(kind: str) -> list[str]:
    """The names there are of a kind: `"models"`, `"recipes"`, `"comparisons"` or `"accelerate"`."""
    return sorted(path.stem for path in (_ROOT / kind).glob(f"*{_SUFFIXES[kind]}"))


def find(kind: str, name: str) -> Path:
    """The file of a named configuration.

    Args:
        kind: `"models"`, `"recipes"`, `"comparisons"` or `"accelerate"`.
        name: a name without folder and suffix, or the path of a file of one's own.

    Raises:
        ValueError: if there is neither such a name nor such a file.
    """
    if Path(name).is_file():
        return Path(name)
    path = _ROOT / kind / f"{name.removesuffix(_SUFFIXES[kind])}{_SUFFIXES[kind]}"
    if path.is_file():
        return path
    known = names(kind)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? There are " if near else "there are "
    raise ValueError(f"{kind.removesuffix('s')} {name!r} is neither a file nor a shipped name; {hint}{', '.join(known)}")

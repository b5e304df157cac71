"""Which files of attention parts may run unasked: those whose code this user has run before, known by its hash alone."""

import contextlib
import hashlib
from pathlib import Path

from huggingface_hub import constants

from modeling_nlq import AttentionPart, load_attention_parts
from modeling_nlq.parts_user_nlq import published_text


# A line for each file; what a folder says of itself counts for nothing
TRUSTED_PARTS = Path(constants.HF_HOME) / "nlq" / "trusted_parts"


def run_parts(source: str | Path, text: str | None = None) -> list[type[AttentionPart]]:
    """Runs a file of parts, and remembers its code; arguments, result and errors are those of `load_attention_parts`."""
    parts = load_attention_parts(source, text)
    digest = _digest(Path(source).read_text(encoding="utf-8") if text is None else text)
    if digest not in _known():
        with contextlib.suppress(OSError):  # a cache that cannot be written: the file is asked for again
            TRUSTED_PARTS.parent.mkdir(parents=True, exist_ok=True)
            with open(TRUSTED_PARTS, "a", encoding="utf-8") as file:
                file.write(f"{digest}\n")
    return parts


def is_trusted(path: str | Path) -> bool:
    """Tells whether this user has run a file of parts, there or elsewhere."""
    with contextlib.suppress(OSError, ValueError):
        return _digest(Path(path).read_text(encoding="utf-8")) in _known()
    return False


def _known() -> list[str]:
    return TRUSTED_PARTS.read_text(encoding="utf-8").split() if TRUSTED_PARTS.is_file() else []


def _digest(text: str) -> str:
    # As it is published, since the file beside a model has other import lines than its author's
    return hashlib.sha256(published_text(text, "parts").encode()).hexdigest()

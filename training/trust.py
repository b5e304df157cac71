"""Remembers the part files that this user has run, so that they run again without `--trust-parts`."""

import contextlib
import errno
import hashlib
from pathlib import Path
from typing import IO

from huggingface_hub import constants
from transformers.utils import logging

from modeling_nlq import AttentionPart, load_attention_parts
from modeling_nlq.kernels.cpu.build import is_private
from modeling_nlq.parts_files import published_text, text_of

from .disk import open_file, resolve_user_path


logger = logging.get_logger(__name__)

TRUSTED_PARTS = resolve_user_path(constants.HF_HOME) / "nlq" / "trusted_parts"


def run_parts(source: str | Path, text: str | None = None, only_known: bool = False) -> list[type[AttentionPart]]:
    """Runs a file of parts, and remembers it; `only_known` runs no new one."""
    if text is None:
        text = text_of(source)  # read once, so that the text which is hashed runs
    # Of the published text, because publishing changes the import lines
    digest = hashlib.sha256(published_text(text, str(source)).encode()).hexdigest()
    is_known = digest in _known()
    if only_known and not is_known:
        return []
    parts = load_attention_parts(source, text)
    if not is_known:
        with contextlib.suppress(OSError, ValueError):  # without a cache, the user has to name the file again
            TRUSTED_PARTS.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _open("a") as file:
                file.write(f"{digest}\n".encode())
    return parts


def _known() -> list[str]:
    try:
        with _open("r") as file:
            return file.read().decode("ascii").split()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is a link, or not text"
        logger.warning_once(f"{TRUSTED_PARTS} is not used, and part files must be named again: {reason}; delete it")
        return []


def _open(mode: str) -> IO[bytes]:
    """Raises `OSError` if another user could write it, and `ValueError` for a link."""
    file = open_file(TRUSTED_PARTS, mode, 0o600)
    if is_private(file.fileno()) and is_private(TRUSTED_PARTS.parent):
        return file
    file.close()
    raise PermissionError(errno.EPERM, "other users can write it or its folder")

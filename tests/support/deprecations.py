"""Deprecations that Transformers logs because of a call of our own. Python's warnings are in pyproject.toml."""

import logging
import sys
from pathlib import Path

from support.paths import REPOSITORY


OWN_FOLDERS = tuple(f"{REPOSITORY / folder}/" for folder in ("modeling_nlq", "configuration", "training"))
# What is passed over on the way to the caller: the loggers, and libraries, which only hand a call on
LIBRARIES = (f"{sys.prefix}/", f"{Path(logging.__file__).parents[1]}/", __file__)


class DeprecationHandler(logging.Handler):
    """Collects messages about deprecations whose nearest caller outside of libraries is a file of this project."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "deprecated" not in (message := record.getMessage()).lower():
            return
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(OWN_FOLDERS):
            self.found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}: {message}")

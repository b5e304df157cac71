"""Texts that are kept beside the tests: a change of a single character shows."""

from pathlib import Path


def check_golden(file: Path, text: str) -> None:
    """Compares a text with a kept one. To renew one that changed on purpose, delete it, and run its test twice."""
    if not file.is_file():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        raise AssertionError(f"{file} was not there; it is now: read it, and run the test again")
    assert text == file.read_text(encoding="utf-8")

"""Texts that are kept beside the tests: a change of a single character shows."""

from pathlib import Path


def check_golden(texts: dict[Path, str]) -> None:
    """Compares texts with kept ones. To renew those that changed on purpose, delete them, and run their test twice."""
    missing = [file for file in texts if not file.is_file()]
    for file in missing:
        file.parent.mkdir(exist_ok=True)
        file.write_text(texts[file], encoding="utf-8")
    assert not missing, f"they are there now: read them, and run the test again: {', '.join(map(str, missing))}"
    for file, text in texts.items():
        assert text == file.read_text(encoding="utf-8")

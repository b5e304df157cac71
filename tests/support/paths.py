"""Where the repository and its tests are."""

from pathlib import Path


REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests"

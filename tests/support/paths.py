"""Paths of the repository and of its tests."""

from pathlib import Path


REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests"

"""Makes training runs quicker, of which the tests here make many."""

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def frozen_imports():
    """Every run collects garbage, and need not look through all that was imported."""
    gc.freeze()
    yield
    gc.unfreeze()

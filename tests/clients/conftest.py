"""Fixtures of the tests of other people's programs."""

import pytest
from filelock import FileLock
from support.client_cases import trained_model


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A function from switches to the folder of a tiny trained model; pytest-xdist's processes share the folders."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if root.name.startswith("popen-") else root

    def get(activation="softmax", query="linear", **switches):
        name = "-".join([activation, query, *(f"{key}={value}" for key, value in sorted(switches.items()))])
        folder = root / "trained" / name
        folder.parent.mkdir(exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "tokenizer.json").exists():
                trained_model(folder, attention_activation=activation, query_projection=query, **switches)
        return folder

    return get

"""Fetches Transformers' own test code, from the source distribution of the installed version, and imports it.

The wheel has no tests, and they are not ours to copy: they are downloaded once and kept outside version control.
"""

import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import transformers
from filelock import FileLock
from support.paths import REPOSITORY


CACHE_VARIABLE = "NLQ_TEST_CACHE"
CACHE = Path(os.environ.get(CACHE_VARIABLE) or REPOSITORY / ".cache")
DISTRIBUTION = f"transformers-{transformers.__version__}"
FOLDER = CACHE / DISTRIBUTION / "tests"

# The fetched files import each other relatively, so their package may have any name: not `tests`, which others use
# too.
PACKAGE = "transformers_common_tests"

# What the fetched files import although the source distribution leaves it out, with the least that lets the import
# succeed.
STUBS = {
    # Export to ONNX and the like: a base class of the common model tests.
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    # The tests of `generate`: the common model tests only ask whether a class inherits from them.
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    # Values, none of them the default, for options that every configuration has.
    "utils.test_configuration_utils": {
        "config_common_kwargs": {
            "architectures": ["NLQModel"],
            "chunk_size_feed_forward": 3,
            "dtype": "float16",
            "id2label": {0: "only"},
            "label2id": {"only": 0},
            "output_attentions": True,
            "output_hidden_states": True,
            "problem_type": "regression",
            "return_dict": False,
        }
    },
}


class FetchError(Exception):
    """The source distribution is out of reach."""


def fetch() -> None:
    """Downloads the source distribution and unpacks its tests, unless they are there already.

    Raises:
        FetchError: if the download is impossible; says how to fix it.
    """
    if FOLDER.is_dir():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "transformers.lock"):  # of several processes, one downloads
        if not FOLDER.is_dir():
            _download()


def _download() -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        requirement = f"transformers=={transformers.__version__}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "transformers"]
        command += ["--dest", temporary, "--retries", "1", "--timeout", "15", "--disable-pip-version-check"]
        result = subprocess.run([*command, requirement], capture_output=True, text=True)
        archive_path = Path(temporary) / f"{DISTRIBUTION}.tar.gz"
        if not archive_path.is_file():
            cause = (result.stderr or result.stdout).strip().splitlines()[-1:]
            raise FetchError(
                f"cannot download the source distribution of {requirement} ({''.join(cause)}); run this with access "
                f"to PyPI, or unpack {archive_path.name} into {CACHE} (${CACHE_VARIABLE} names another folder)"
            )
        with tarfile.open(archive_path) as archive:
            members = [member for member in archive if member.name.startswith(f"{DISTRIBUTION}/tests/")]
            archive.extractall(temporary, members=members, filter="data")
        FOLDER.parent.mkdir(exist_ok=True)
        (Path(temporary) / DISTRIBUTION / "tests").rename(FOLDER)  # in one step


def _add_stub(name: str, **contents) -> None:
    module = ModuleType(f"{PACKAGE}.{name}")
    module.__path__ = []  # a package, so that it may have submodules
    vars(module).update(contents)
    sys.modules[module.__name__] = module


def load(*names: str) -> list[ModuleType]:
    if PACKAGE not in sys.modules:
        initial_file = FOLDER / "__init__.py"
        initial_file.touch()  # the source distribution leaves it out, and the configuration tests look for it
        specification = importlib.util.spec_from_file_location(PACKAGE, initial_file)
        sys.modules[PACKAGE] = importlib.util.module_from_spec(specification)
        for name, contents in STUBS.items():
            _add_stub(name.partition(".")[0])
            _add_stub(name, **contents)
    # The fetched code is full of marks that our pytest configuration does not know and therefore refuses. A generator
    # of marks that was given no configuration takes any.
    with mock.patch.object(pytest, "mark", pytest.MarkGenerator(_ispytest=True)):
        return [importlib.import_module(f"{PACKAGE}.{name}") for name in names]

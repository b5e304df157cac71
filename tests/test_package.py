"""The distribution: what a wheel holds, and that it works away from the checkout."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from support.paths import REPOSITORY

import modeling_nlq
from modeling_nlq.configuration_nlq import MINIMUM_TRANSFORMERS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the tracked files, so that nothing is left behind in the checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, files.split("\0")):
        if (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return next(target.glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_the_package_its_command_and_all_its_data(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    information = f"modeling_nlq-{modeling_nlq.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"modeling_nlq", "nlq", information}
    for folder, pattern in (
        ("configuration", "*/*.json"),
        ("configuration", "*/*.yaml"),
        ("examples", "*.*"),
        ("training", "**/*.py"),
        ("modeling_nlq", "kernels/**/*.*"),
    ):
        for path in (REPOSITORY / folder).glob(pattern):
            place = path.relative_to(REPOSITORY).as_posix()
            place = place.removeprefix("training/") if place.startswith("training/nlq/") else place
            assert place.endswith(".pyc") or {place, f"modeling_nlq/{place}"} & set(names)
    assert {"modeling_nlq/model_card.md", "modeling_nlq/training/comparison/report.css"} <= set(names)


@pytest.mark.slow
def test_road_of_the_readme_by_the_wheel(wheel, corpus, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}

    def python(*words):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert python("-c", "import nlq; print(nlq.__file__)").startswith(str(site))
    quick = f"--dataset {corpus} --max_steps 2 --validation_fraction 0.1 --test_fraction 0.1 --tokenizer bpe:512"
    assert "held-out perplexity" in python("-m", "nlq", *f"train demo {quick}".split())
    python("-m", "nlq", "new", "my_idea.py", "--from", "bias")
    assert "saving and loading changes nothing" in python("-m", "nlq", "check", "my_idea.py")
    assert "baseline" in python("-m", "nlq", *f"compare my_idea.yaml {quick}".split())
    run = "runs/compare-my_idea/runs/my_idea/rate-0.016-seed-0"
    assert "nothing was sent" in python("-m", "nlq", "publish", run, "you/idea", "--dry-run")
    assert "import" in python("-m", "nlq", "generate", run, "import ", "--max_new_tokens", "4")


def test_one_version_everywhere():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == modeling_nlq.__version__
    assert f"version = {{{modeling_nlq.__version__}}}" in (REPOSITORY / "docs" / "faq.md").read_text()
    assert f"## {modeling_nlq.__version__} " in (REPOSITORY / "CHANGELOG.md").read_text()
    assert f'"transformers>={MINIMUM_TRANSFORMERS},<6"' in (REPOSITORY / "pyproject.toml").read_text()


@pytest.mark.skipif(sys.prefix.endswith(".venv-newest"), reason="make test-newest installs without constraints")
def test_constraints_are_what_is_installed():
    names = ("torch", "transformers", "accelerate", "datasets", "evaluate", "huggingface_hub", "tokenizers")
    installed = {f"{name}=={version(name).split('+')[0]}" for name in names}
    files = [set(path.read_text().splitlines()) for path in REPOSITORY.glob("constraints*.txt")]
    assert any(installed <= lines for lines in files), f"no constraints file names these versions: {sorted(installed)}"

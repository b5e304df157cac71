"""The engine `ray`, where Ray is installed; `make test-ray` tests it on several nodes, and what is lost there."""

import json
import shutil
import subprocess
import sys

import pytest
from support.paths import REPOSITORY
from support.runs import without_times


pytest.importorskip("ray")
# A network of loopback alone, where the system allows one: Ray's nodes listen to the machine's own address
ALONE = ["unshare", "--net", "--map-root-user", "bash", "-c", 'ip link set lo up && exec "$@"', "--"]


@pytest.fixture(scope="module")
def alone() -> list[str]:
    is_possible = shutil.which("unshare") and subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0
    return ALONE if is_possible else []


def test_last_run_of_a_comparison(finished, alone, tmp_path):
    """A cluster of one node is started, goes on with what the local engine has finished, and is stopped."""
    folder, expected, file = finished
    shutil.copytree(folder, tmp_path / "results")
    shutil.rmtree(tmp_path / "results" / "runs" / "twin" / "rate-0.01-seed-2")
    command = [sys.executable, "-m", "nlq", "compare", file, "--output_dir", str(tmp_path / "results")]
    command = [*alone, *command, "--engine", "ray", "--cpus-per-run", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert without_times(json.loads((tmp_path / "results" / "results.json").read_text())) == without_times(expected)
    logs = [log.read_text().count("train_runtime") for log in (tmp_path / "results").glob("runs/*/*.log")]
    assert sorted(set(logs)) == [1, 2] and logs.count(2) == 1

"""Starts clusters of Ray on this machine, and writes comparisons."""

from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from support.runs import write_comparison

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.local import LocalEngine
from modeling_nlq.training.comparison.run import run_comparison


# Enough steps that a run can be lost after a checkpoint
TRAINING = {
    "max_steps": 120,
    "save_steps": 10,
    "save_total_limit": 2,
    "eval_steps": 60,
    "logging_steps": 5,
    "report_to": "none",
}


@pytest.fixture(scope="session", autouse=True)
def ray_settings():
    """No usage statistics, and processes that find the tests' own modules as these do."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        # Ray's default of 15 would make runs wait for everything else on the machine
        monkeypatch.setenv("RAY_worker_niceness", "0")
        yield


@pytest.fixture
def start_cluster(monkeypatch):
    """A function that starts a cluster, which `RAY_ADDRESS` then names: from the CPUs of its nodes to the cluster."""
    clusters = []

    def start(head: int, *others: int) -> Cluster:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head, "include_dashboard": False})
        for cpus in others:
            cluster.add_node(num_cpus=cpus)
        clusters.append(cluster)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        return cluster

    yield start
    ray.shutdown()
    for cluster in clusters:
        cluster.shutdown()


@pytest.fixture(scope="session")
def comparison_file(recipe_file, tmp_path_factory):

    def make(**fields) -> str:
        models = {"base": None, "squared": {"switches": {"attention_activation": "squared"}}}
        defaults = {"recipe": str(recipe_file), "models": models, "training": TRAINING}
        return write_comparison(tmp_path_factory.mktemp("comparison"), **{**defaults, **fields})

    return make


@pytest.fixture(scope="session")
def made_locally(comparison_file, tmp_path_factory) -> tuple[str, dict, Path]:
    """A comparison, its results on the local engine, and their folder: one model chooses between two rates."""
    file = comparison_file(
        models={
            "base": {"learning_rates": [5e-3, 1e-2]},
            "squared": {"switches": {"attention_activation": "squared"}},
        },
        seeds=[0],
    )
    folder = tmp_path_factory.mktemp("local") / "results"
    return file, run_comparison(load_plan(file), folder, LocalEngine(1)), folder


@pytest.fixture(scope="session")
def two_runs(comparison_file, tmp_path_factory) -> tuple[str, dict]:
    """A comparison of two short runs, slow enough that rounding does not grow, and its results on the local engine."""
    file = comparison_file(seeds=[0], training={**TRAINING, "max_steps": 40, "eval_steps": 20}, learning_rates=[1e-3])
    return file, run_comparison(load_plan(file), tmp_path_factory.mktemp("local") / "results", LocalEngine(1))

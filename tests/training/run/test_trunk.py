"""Several lengths of training from one run: what begins with a kept checkpoint equals a run of its own."""

import shutil
from pathlib import Path

import pytest
from support.runs import PowerCut, logged_losses

from modeling_nlq.training.files import read_json
from modeling_nlq.training.run.checkpoints import KeptCheckpoints, is_complete_checkpoint, kept_checkpoint
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.run.trainer import train_recipe


CLOCK = ("seconds", "runtime", "per_second", "peak_memory")


def recipe_of(recipe_file: Path, folder: Path, steps: int, decay: int, **overrides):
    """A recipe with two steps of warm-up and a decay at its end."""
    schedule = {"num_decay_steps": decay, "min_lr_ratio": 0.1}
    fields = {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": schedule,
        "warmup_steps": 2,
        "report_to": "none",
    }
    fields |= {"max_steps": steps, "output_dir": folder, "save_steps": 3, "eval_steps": 3, "save_total_limit": 1}
    return load_recipe(recipe_file, {**fields, **overrides})


@pytest.fixture(scope="module")
def trunk(recipe_file, tmp_path_factory) -> Path:
    """A run of nine steps that kept its fourth and sixth, and was cut after the fifth, before the fourth was copied."""
    place = tmp_path_factory.mktemp("trunk")
    resolved, keep = recipe_of(recipe_file, place / "long", 9, 2), KeptCheckpoints((4, 6))
    with pytest.raises(KeyboardInterrupt):
        train_recipe(resolved, place / "data", [keep, PowerCut()])
    shutil.rmtree(kept_checkpoint(place / "long", 4))
    train_recipe(recipe_of(recipe_file, place / "long", 9, 2), place / "data", [keep])
    return place / "long"


def assert_equal_runs(one: Path, other: Path) -> None:
    metrics = [
        {name: value for name, value in read_json(folder / "metrics.json").items() if not name.endswith(CLOCK)}
        for folder in (one, other)
    ]
    assert metrics[0] == metrics[1]
    assert logged_losses(one) == logged_losses(other)
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


class TestBeginWith:
    def test_equals_a_run_of_its_own(self, trunk, recipe_file, tmp_path):
        data = trunk.parent / "data"
        for name, begin_with in (("own", None), ("begun", kept_checkpoint(trunk, 4))):
            train_recipe(recipe_of(recipe_file, tmp_path / name, 6, 2), data, begin_with=begin_with)
        assert_equal_runs(tmp_path / "begun", tmp_path / "own")
        assert read_json(tmp_path / "own" / "metrics.json")["token_stream"] != read_json(trunk / "metrics.json")["token_stream"]

    def test_goes_on_from_its_own_checkpoint(self, trunk, recipe_file, tmp_path):
        resolved = [recipe_of(recipe_file, tmp_path / name, 7, 3, save_steps=1) for name in ("cut", "cut", "whole")]
        begin_with = kept_checkpoint(trunk, 4)
        with pytest.raises(KeyboardInterrupt):
            train_recipe(resolved[0], trunk.parent / "data", [PowerCut(6)], begin_with)
        assert (tmp_path / "cut" / "checkpoint-5").is_dir()
        train_recipe(resolved[1], trunk.parent / "data", begin_with=tmp_path / "no longer there")
        train_recipe(resolved[2], trunk.parent / "data", begin_with=begin_with)
        assert_equal_runs(tmp_path / "cut", tmp_path / "whole")

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"switches": {"attention_activation": "relu"}}, "trunk-4 holds another model"),
            ({"per_device_train_batch_size": 4}, "trunk-4 was made with another dataset or global batch size"),
            ({"max_steps": 4}, "is of step 4, not before max_steps=4"),
        ],
    )
    def test_refused(self, trunk, recipe_file, tmp_path, overrides, message):
        resolved = recipe_of(recipe_file, tmp_path / "run", 6, 2, **overrides)
        with pytest.raises(ValueError, match=message):
            train_recipe(resolved, trunk.parent / "data", begin_with=kept_checkpoint(trunk, 4))
        assert not (tmp_path / "run" / "metrics.json").exists()

    def test_no_checkpoint(self, trunk, recipe_file, tmp_path):
        resolved = recipe_of(recipe_file, tmp_path / "run", 6, 2)
        with pytest.raises(ValueError, match="trunk-5' is no complete checkpoint"):
            train_recipe(resolved, trunk.parent / "data", begin_with=kept_checkpoint(trunk, 5))


class TestKept:
    def test_kept_and_nothing_else_changed(self, trunk, recipe_file, tmp_path):
        assert {path.name for path in trunk.glob("trunk-*")} == {"trunk-4", "trunk-6"}
        assert all(is_complete_checkpoint(kept_checkpoint(trunk, step)) for step in (4, 6))
        assert [path.name for path in trunk.glob("checkpoint-*")] == ["checkpoint-9"] and not list(trunk.glob(".*"))
        train_recipe(recipe_of(recipe_file, tmp_path / "plain", 9, 2), trunk.parent / "data")
        assert_equal_runs(trunk, tmp_path / "plain")

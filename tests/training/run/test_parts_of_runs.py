"""Runs of models with a part of the user's own: the recipe holds its file, so every process has the same."""

import sys

import pytest
import yaml
from support.own_parts import DISTANCE

from modeling_nlq import activations_nlq, own_parts_nlq
from modeling_nlq.training import train
from modeling_nlq.training.run.recipe import load_recipe, resolve_recipe
from nlq import main


@pytest.fixture
def new_process(monkeypatch):
    """A function after which no part is registered, as in another process."""

    def forget():
        monkeypatch.setattr(own_parts_nlq, "_registered", {})
        monkeypatch.setattr(own_parts_nlq, "_latest", {})

    forget()
    return forget


@pytest.fixture
def recipe(recipe_file, tmp_path):
    content = yaml.safe_load(recipe_file.read_text())
    content |= {"parts": ["my_idea.py"], "switches": {"attention_parts": ["distance"]}}
    content["training"] |= {"max_steps": 2, "report_to": "none", "save_strategy": "no"}
    (tmp_path / "my_idea.py").write_text(DISTANCE)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_run(recipe, new_process, tmp_path, capsys):
    run = tmp_path / "run"
    train(recipe, output_dir=run)
    assert (run / "my_idea.py").is_file()
    new_process()
    assert main(["generate", str(run), "import ", "--max_new_tokens", "3"]) == 1
    assert "--parts FILE.py" in capsys.readouterr().err
    assert main(["generate", str(run), "import ", "--max_new_tokens", "3", "--parts", str(run / "my_idea.py")]) == 0
    (tmp_path / "my_idea.py").write_text(DISTANCE.replace("-5.0", "-6.0"))
    with pytest.raises(ValueError, match=r"holds a run of another recipe \(parts.my_idea.py: a file with the hash"):
        train(recipe, output_dir=run)


def test_another_machine_needs_no_file(recipe, new_process, tmp_path):
    """What an engine sends is what `resolve_recipe` takes."""
    given = load_recipe(recipe, {"output_dir": str(tmp_path / "run")}).given
    (tmp_path / "my_idea.py").unlink()
    new_process()
    resolved = resolve_recipe(given, {"output_dir": str(tmp_path / "run")})
    assert resolved.given == given
    assert resolved.config.attention_parts == ["distance"]
    with pytest.raises(ValueError, match=r"^parts: there is no file my_idea.py$"):
        load_recipe(recipe)


def test_a_file_may_register_an_activation(recipe, new_process, tmp_path, monkeypatch):
    monkeypatch.setattr(activations_nlq, "_REGISTERED", {})
    (tmp_path / "my_idea.py").write_text(
        "import torch\nfrom modeling_nlq import register_attention_activation\n"
        "register_attention_activation('bell', lambda s: torch.exp(-s * s), non_negative=True)\n"
    )
    content = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**content, "switches": {"attention_activation": "bell"}}))
    given = load_recipe(recipe, {"output_dir": str(tmp_path / "run")}).given
    assert train(recipe, output_dir=tmp_path / "run")["steps"] == 2
    # What an engine sends registers it elsewhere
    monkeypatch.setattr(activations_nlq, "_REGISTERED", {})
    for name in [name for name in sys.modules if "my_idea" in name]:
        del sys.modules[name]
    assert resolve_recipe(given, {"output_dir": str(tmp_path / "run")}).config.attention_activation == "bell"


@pytest.mark.parametrize("holds", [True, False])
def test_command_check(holds, new_process, tmp_path, capsys):
    path = tmp_path / "my_idea.py"
    path.write_text(DISTANCE if holds else DISTANCE.replace("cumsum(dim=-1)", "cumsum(dim=-1).sqrt()"))
    assert main(["check", str(path)]) == (0 if holds else 1)
    printed = capsys.readouterr().out
    assert printed.startswith("distance:\n") and ("FAILS" in printed) == (not holds)
    assert main(["check", str(tmp_path / "none.py")]) == 1
    assert capsys.readouterr().err.startswith("nlq: error: ")

"""Runs of models with a part of the user's own: the recipe holds its file, so every process has the same."""

import pytest
import yaml
from support.own_parts import DISTANCE

from modeling_nlq import parts_user_nlq
from modeling_nlq.training import train, trust
from modeling_nlq.training.api import load_plan
from modeling_nlq.training.run.recipe import load_recipe, read_recipe
from nlq import main


@pytest.fixture
def new_process(monkeypatch):
    def forget():
        monkeypatch.setattr(parts_user_nlq, "_registered", {})
        monkeypatch.setattr(parts_user_nlq, "_latest", {})

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
    command, beside = ["generate", str(run), "import ", "--max_new_tokens", "3"], run / "my_idea.py"
    text = beside.read_text()
    for options in ([], ["--parts", str(beside)], ["--trust-parts"]):
        new_process()
        assert main([*command, *options]) == 0  # without options too: whoever has run the code trusts it
        trust.TRUSTED_PARTS.unlink()
        for own in (text, f"{text}# changed\n"):
            beside.write_text(own)
            new_process()
            assert main(command) == 1
            assert "--parts FILE.py" in capsys.readouterr().err
        beside.write_text(text)
    (tmp_path / "my_idea.py").write_text(DISTANCE.replace("-5.0", "-6.0"))
    with pytest.raises(ValueError, match=r"holds a run of another recipe \(parts.my_idea.py: a file with the hash"):
        train(recipe, output_dir=run)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_code_in_yaml_is_not_run(command, recipe, new_process, tmp_path, capsys):
    """A recipe with a part is published with its code, and must not run where it is downloaded."""
    content = load_recipe(recipe).to_dict()
    assert isinstance(content["parts"], dict)
    content["parts"] = {"my_idea.py": f"open({str(tmp_path / 'planted')!r}, 'w').close()\n{DISTANCE}"}
    if command == "compare":
        models = {"baseline": "a", "models": {"a": None, "b": None}, "learning_rates": [1e-3], "seeds": [1, 2]}
        content = {"recipe": content, **models}
    file = tmp_path / "downloaded.yaml"
    file.write_text(yaml.safe_dump(content))
    new_process()
    options = ["--output_dir", str(tmp_path / "run")] + ["--dry-run"] * (command == "compare")
    assert main([command, str(file), *options]) == 1
    assert "holds code, which was not run: the attention parts in my_idea.py" in capsys.readouterr().err
    assert not (tmp_path / "planted").exists()
    # The user's word, either way
    reader = load_plan if command == "compare" else load_recipe
    reader(file, {"parts": [str(tmp_path / "my_idea.py")]})
    assert not (tmp_path / "planted").exists()
    reader(file, trust_parts=True)
    assert (tmp_path / "planted").exists()


def test_another_machine_needs_no_file(recipe, new_process, tmp_path):
    """What an engine sends is what `read_recipe` takes."""
    given = load_recipe(recipe, {"output_dir": str(tmp_path / "run")}).to_dict()
    (tmp_path / "my_idea.py").unlink()
    new_process()
    again = read_recipe(given, {"output_dir": str(tmp_path / "run")})
    assert again.to_dict() == given
    assert again.config.attention_parts == ["distance"]
    with pytest.raises(ValueError, match=r"^parts: there is no file my_idea.py$"):
        load_recipe(recipe)

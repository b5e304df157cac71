"""Code in the folder of a model or tokenizer runs only if the user allows it."""

import json
import logging
import shutil
from importlib.util import find_spec

import pytest
import yaml
from support.client_cases import small_model
from support.runs import change_json
from transformers import LlamaConfig, modeling_utils

from modeling_nlq import NLQConfig
from modeling_nlq.training.loading import load_parts
from modeling_nlq.training.run.recipe import load_recipe
from nlq import main


GENERATE = ["generate", "{}", "the ", "--max_new_tokens", "2"]
COMMANDS = [GENERATE, ["evaluate", "{}"], ["explore", "{}", "--text", "the fox"], ["train", "{}/recipe.yaml"]]


EVIL = {"attn_implementation": "evil/kernel"}
KERNELS = [EVIL, {"_attn_implementation": "evil/kernel@main"}, {"experts_implementation": "evil/kernel"}]
KERNELS += [{"attn_implementation": {"": "paged|kernels-community/x"}}, {"model_type": "nlq", **EVIL}]
KERNELS += [{"model_type": "nlq_seq2seq", half: EVIL} for half in ("encoder", "decoder")]
KERNELS += [{"model_type": "llava", "attn_implementation": {"text_config": "evil/kernel"}}]
if find_spec("flash_attn") is None:
    KERNELS += [{"model_type": "nlq", "attn_implementation": "flash_attention_4"}]


EVIL_CODE = """from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class C(LlamaConfig): model_type = "evil"
class M(LlamaForCausalLM): config_class = C
class T(PreTrainedTokenizerFast): pass
"""


@pytest.mark.parametrize("fields", [EVIL, {"switches": {"decoder": {"_attn_implementation": "evil/kernel"}}}])
def test_a_kernel_that_a_recipe_names(fields, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": "tiny-linear", **fields}))
    with pytest.raises(ValueError, match="evil/kernel' is code from the Hub; pass it as an argument"):
        load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("what", ["model", "tokenizer"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_code_beside_a_model(arguments, what, corpus, tmp_path, capsys):
    """Never by a question on the terminal, and where there is an option, only with it."""
    folder, planted = tmp_path / f"{what}_{arguments[0]}", tmp_path / "planted"
    small_model(folder, LlamaConfig)
    shutil.copytree(folder, tmp_path / "plain")
    if what == "model":
        auto_map = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
        change_json(folder / "config.json", model_type="evil", auto_map=auto_map)
    else:
        auto_map = {"AutoTokenizer": ["evil.T", None]}
        change_json(folder / "tokenizer_config.json", tokenizer_class="T", auto_map=auto_map)
    (folder / "evil.py").write_text(EVIL_CODE + f"open({str(planted)!r}, 'w').close()\n")
    recipe = {"model": str(folder if what == "model" else tmp_path / "plain"), "tokenizer": str(folder)}
    recipe |= {"dataset": str(corpus), "block_size": 16, "training": {"max_steps": 1}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = [argument.format(folder) for argument in arguments]
    assert main(words) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nlq: error: ")]
    assert len(errors) == 1 and not planted.exists()
    if arguments is GENERATE:
        assert "--trust-remote-code" in errors[0]
        assert main([*words, "--trust-remote-code"]) == 0 and planted.exists()


@pytest.mark.parametrize("fields", KERNELS, ids=str)
def test_a_kernel_that_a_configuration_names(fields, tmp_path, monkeypatch, capsys):
    """Transformers would fetch its code from the Hub; a value that the caller gives is the caller's."""
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda *_, **__: pytest.fail("fetched"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    commands = [*COMMANDS[:3], ["convert", "{}", "{}-new"], ["publish", "{}", "a/b"]]
    commands.append(["train", "demo", "--model", "{}", "--output_dir", "{}-run"])
    for command in commands:
        assert main([word.format(tmp_path / "model") for word in command]) == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nlq: error: ")]
        is_other = command[0] == "publish" and "model_type" not in fields
        assert "is code from the Hub" in line or is_other or "llava" in line
    assert NLQConfig.from_dict({}, attn_implementation="mine/kernel")._attn_implementation == "mine/kernel"


@pytest.mark.parametrize("name", ["parts_nlq.py", "mine.py"])
def test_part_files_that_are_links(name, tmp_path):
    """Trust in a model is not trust in a file elsewhere."""
    texts = {"parts_nlq.py": "from .mine import Part\n", "mine.py": f"open({str(tmp_path / 'planted')!r}, 'w')\n"}
    (tmp_path / "model").mkdir()
    for file, text in texts.items():
        (tmp_path / "model" / file).write_text(text)
    (tmp_path / "model" / name).rename(tmp_path / name)
    (tmp_path / "model" / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is a symbolic link"):
        load_parts([], [str(tmp_path / "model")], trust=True)
    assert not (tmp_path / "planted").exists()


def test_log_lines():
    """Names of tensors and files, which a terminal must not act on."""
    library = logging.getLogger("some.library")
    library.addHandler(logging.StreamHandler())
    assert main(["params", "tiny-linear"]) == 0
    record = logging.makeLogRecord({"msg": "\x1b[31mthe \x1b]0;%s\x07\nfox", "args": ("title",)})
    for handler in (logging.lastResort, *logging.getLogger("transformers").handlers, *library.handlers):
        assert handler.format(record) == "the \\x1b]0;title\\x07\nfox"

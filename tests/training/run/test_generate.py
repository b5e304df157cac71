"""`nlq generate`."""

import json
import shutil

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from modeling_nlq import NLQForCausalLM, NLQForSequenceClassification
from nlq import main


def test_generate_continues_the_prompt(run, capsys):
    assert main(["generate", str(run[0]), "import json", "--max_new_tokens", "5"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("import json")
    main(["generate", str(run[0]), "import json", "--max_new_tokens", "5"])
    assert capsys.readouterr().out == first
    assert main(["generate", str(run[0]), "import json", "--temperature", "-1"]) == 1
    assert "`temperature` (=-1.0) has to be" in capsys.readouterr().err


def test_prompt_has_no_special_tokens(run, tmp_path, monkeypatch, capsys):
    shutil.copytree(run[0], tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(run[0])
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(f"$A {end[0]}", special_tokens=[end])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("import json")["input_ids"][-1] == end[1]
    prompts, generate = [], NLQForCausalLM.generate
    keep = lambda self, **inputs: prompts.append(inputs["input_ids"][0].tolist()) or generate(self, **inputs)  # noqa: E731
    monkeypatch.setattr(NLQForCausalLM, "generate", keep)
    assert main(["generate", str(tmp_path), "import json", "--max_new_tokens", "3"]) == 0
    assert prompts == [tokenizer("import json", add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "none"}}', "the tokenizer of '{}' cannot be read"),
        ("model.safetensors", b"half", "'{}' cannot be read"),
    ],
)
def test_damaged_files_are_named(name, content, message, run, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(run[0], folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    (folder / name).write_bytes(content)
    assert main(["generate", str(folder), "import"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"nlq: error: {message.format(folder)}")


def test_classifier_is_no_language_model(run, corpus, tmp_path, capsys):
    """Its head is missing, and a random one would give numbers too."""
    NLQForSequenceClassification.from_pretrained(run[0]).save_pretrained(tmp_path)
    for file in run[0].glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    untied = {**json.loads((tmp_path / "config.json").read_text()), "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(untied))
    for command in (["evaluate", str(tmp_path), "--dataset", str(corpus)], ["generate", str(tmp_path), "import"]):
        assert main(command) == 1
        assert "is not a language model: its weights lack lm_head.weight" in capsys.readouterr().err

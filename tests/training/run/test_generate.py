"""`nlq generate`."""

from support.corpora import write_documents
from tokenizers import processors
from transformers import AutoTokenizer

from modeling_nlq import NLQForCausalLM
from modeling_nlq.training.cli import main


def test_generate(run, capsys):
    assert main(["generate", str(run[0]), "import json", "--max_new_tokens", "5"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("import json")
    main(["generate", str(run[0]), "import json", "--max_new_tokens", "5"])
    assert capsys.readouterr().out == first


def test_prompt_has_no_special_tokens(run, tmp_path, monkeypatch, capsys):
    for path in run[0].iterdir():
        (tmp_path / path.name).symlink_to(path)
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


def test_evaluate_and_generate_from_a_folder_with_an_odd_name(run, tmp_path, capsys):
    folder = tmp_path / "[model]"
    folder.symlink_to(run[0])
    write_documents(tmp_path / "d1.jsonl", ["x = 2"] * 40)
    for name in ("[d]1.jsonl", "same.jsonl"):
        write_documents(tmp_path / name, ["import json\n" * 8] * 9)
    results = []
    for name in ("[d]1.jsonl", "same.jsonl"):
        assert main(["evaluate", str(folder), "--dataset", str(tmp_path / name)]) == 0
        results.append(capsys.readouterr().out)
    assert results[0] == results[1]
    assert main(["generate", str(folder), "import", "--max_new_tokens", "3"]) == 0

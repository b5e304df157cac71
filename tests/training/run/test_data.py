"""Documents as users have them: odd file names, encodings, copies, tokenizers with gaps, and datasets that change."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from modeling_nlq import NLQForCausalLM
from modeling_nlq.training.cli import main
from modeling_nlq.training.run import data as data_module
from modeling_nlq.training.run.data import load_documents, make_blocks, make_tokenizer
from modeling_nlq.training.run.recipe import Recipe
from modeling_nlq.training.run.trainer import prepare_data


def write(path: Path, texts: list[str]) -> Path:
    """A file of documents, in the format of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".txt":
        path.write_text("\n\n".join(texts))
    elif path.suffix == ".parquet":
        Dataset.from_dict({"text": texts}).to_parquet(path)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def read(dataset, **fields) -> set[str]:
    recipe = Recipe(model="tiny-linear", dataset=str(dataset), **{"validation_fraction": 0.3, **fields})
    return {row["text"] for split in load_documents(recipe).values() for row in split}


def byte_tokenizer(end_of_text: int) -> PreTrainedTokenizerFast:
    """One token for each byte, at even ids, and end-of-text."""
    vocabulary = {byte: 2 * index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<|endoftext|>": end_of_text}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


RIGHT = [f"right {index}" for index in range(30)]


class TestNames:
    @pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
    @pytest.mark.parametrize(
        "name, wrong",
        [
            ("g[1].txt", "g1.txt"),
            ("g[1].jsonl", "g1.jsonl"),
            ("g[1].parquet", "g1.parquet"),
            ("[g]/f.jsonl", "g/f.jsonl"),
            ("a*b.jsonl", "axb.jsonl"),
            ("a?b.jsonl", "axb.jsonl"),
            ("a::b.txt", "b.txt"),
        ],
    )
    def test_a_name_is_no_pattern(self, name, wrong, streaming, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write(Path(name), RIGHT)
        write(Path(wrong), [text.replace("right", "wrong") for text in RIGHT])
        assert read(name, streaming=streaming) == read(tmp_path / name, streaming=streaming) == set(RIGHT)

    def test_evaluate_and_generate_from_such_a_folder(self, run, tmp_path, capsys):
        folder = tmp_path / "[model]"
        folder.symlink_to(run[0])
        write(tmp_path / "d1.jsonl", ["x = 2"] * 40)
        for name in ("[d]1.jsonl", "same.jsonl"):
            write(tmp_path / name, ["import json\n" * 8] * 9)
        results = []
        for name in ("[d]1.jsonl", "same.jsonl"):
            assert main(["evaluate", str(folder), "--dataset", str(tmp_path / name)]) == 0
            results.append(capsys.readouterr().out)
        assert results[0] == results[1]
        assert main(["generate", str(folder), "import", "--max_new_tokens", "3"]) == 0

    def test_dataset_folder(self, tmp_path, monkeypatch):
        write(tmp_path / "json" / "train.jsonl", RIGHT)  # also the name of a format of `datasets`
        write(tmp_path / "other.jsonl", ["wrong"] * 30)
        monkeypatch.chdir(tmp_path)
        assert read("json") == read(tmp_path / "json") == read("json", streaming=True) == set(RIGHT)

    @pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
    @pytest.mark.parametrize(
        "name, parts",
        [
            ("a::b.jsonl", ["'a::b.jsonl'", "rename"]),
            ("[folder]", ["'[folder]'", "rename"]),
            ("json", ["'json'", "no such folder"]),
            ("empty", ["'empty' cannot be read"]),
            ("latin.jsonl", ["'latin.jsonl' is not UTF-8: byte 0xe9 in line 2"]),
            ("latin.txt", ["'latin.txt' is not UTF-8: byte 0xe9 in line 2"]),
            ("folder", ["latin.jsonl' is not UTF-8: byte 0xe9 in line 2"]),
            ("broken.jsonl", ["'broken.jsonl' cannot be read"]),
            ("blank.txt", ["'blank.txt' is empty"]),
        ],
    )
    def test_what_cannot_be_read_is_named(self, name, parts, streaming, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write(Path("a::b.jsonl"), RIGHT)
        write(Path("[folder]/a.jsonl"), RIGHT)
        for folder in ("empty", "folder"):
            Path(folder).mkdir()
        for path in ("latin.txt", "latin.jsonl", "folder/latin.jsonl"):
            Path(path).write_bytes('{"text": "one"}\n{"text": "café"}\n'.encode("latin-1"))
        Path("broken.jsonl").write_text('{"text": "one"}\n{"text": oops\n')
        Path("blank.txt").write_text(" \n\n\t\n")
        with pytest.raises(ValueError) as error:
            read(name, streaming=streaming)
        assert all(part in str(error.value) for part in parts), error.value


def test_tokenizer_without_a_fast_form(tmp_path):
    recipe = Recipe(
        model="tiny-linear", dataset=str(write(tmp_path / "text.jsonl", RIGHT)), tokenizer="bytes", validation_fraction=0.3
    )
    with pytest.raises(ValueError, match="tokenizer 'bytes' is a ByT5Tokenizer: only fast tokenizers can be used"):
        make_blocks(load_documents(recipe)["train"], ByT5Tokenizer(), recipe)


class TestText:
    @pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
    def test_blank_lines_separate_documents(self, streaming, tmp_path):
        path = tmp_path / "text.txt"
        path.write_bytes("\ufeffone\r\n  more\r\n   \r\ntwo\n\t\n\n\n\nthree\nfour\n".encode())
        assert read(path, validation_fraction=0.5, streaming=streaming) == {"one\n  more", "two", "three\nfour"}
        (tmp_path / "folder").mkdir()
        path.rename(tmp_path / "folder" / "a.txt")
        (tmp_path / "folder" / "b.txt").write_text("five\nsix\n\nseven")
        found = read(tmp_path / "folder", validation_fraction=0.5, streaming=streaming)
        assert found == {"one\n  more", "two", "three\nfour", "five\nsix", "seven"}

    @pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
    def test_byte_order_mark_in_json(self, streaming, tmp_path):
        path = write(tmp_path / "text.jsonl", RIGHT)
        path.write_text(path.read_text(), encoding="utf-8-sig")
        assert read(path, streaming=streaming) == set(RIGHT)

    @pytest.mark.parametrize("saved", [False, True], ids=["made here", "saved"])
    @pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
    def test_end_of_text_in_a_document_is_no_boundary(self, saved, streaming, tmp_path):
        texts = [f"{index} before <|endoftext|> after" for index in range(40)]
        fields = {"dataset": str(write(tmp_path / "text.jsonl", texts)), "validation_fraction": 0.3, "block_size": 2}
        recipe = Recipe(model="tiny-linear", tokenizer="bpe:300", streaming=streaming, **fields)
        documents = load_documents(recipe)
        tokenizer = make_tokenizer(recipe, documents)
        if saved:
            tokenizer.save_pretrained(tmp_path / "tokenizer")
            tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        stream = [token for row in make_blocks(documents["train"], tokenizer, recipe).dataset for token in row["input_ids"]]
        whole = tokenizer.decode([token for token in stream if token != tokenizer.eos_token_id])
        count = sum(1 for _ in documents["train"])
        assert stream.count(tokenizer.eos_token_id) in (count - 1, count)  # the last may fill no block
        assert whole.count("before <|endoftext|> after") >= count - 1

    @pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
    def test_copies_stay_together_whatever_their_names(self, streaming, tmp_path):
        rows = [{"path": copy * 100 + index, "text": f"text {index}"} for copy in range(3) for index in range(100)]
        path = tmp_path / "copies.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = Recipe(model="tiny-linear", dataset=str(path), validation_fraction=0.3, test_fraction=0.3, streaming=streaming)
        splits = [{row["text"] for row in split} for split in load_documents(recipe).values()]
        assert all(splits) and sum(map(len, splits)) == 100

    def test_documents_cached_by_another_split_are_not_reused(self, tmp_path):
        """`datasets` hashes a function by its name: what a version before cached would be taken for what this one computes."""
        recipe = Recipe(model="tiny-linear", dataset=str(write(tmp_path / "text.jsonl", RIGHT)), validation_fraction=0.3)
        rows, _ = data_module._load_file(recipe)
        cached = rows.filter(partial(data_module._lies_between, column="text", first=0.0, last=0.3))
        assert load_documents(recipe)["validation"]._fingerprint != cached._fingerprint


def test_fingerprint_follows_the_text(tmp_path):
    def fingerprint(path, **fields):
        return load_documents(
            Recipe(model="tiny-linear", dataset=str(path), **{"validation_fraction": 0.3, **fields})
        ).fingerprint

    for name in ("text.txt", "text.jsonl", "text.parquet", "folder/train.jsonl"):
        path = write(tmp_path / "before" / name, RIGHT)
        moved = write(tmp_path / "after" / name, RIGHT)
        os.utime(moved, (0, 0))
        if "/" in name:
            path, moved = path.parent, moved.parent
        before = fingerprint(path)
        assert before == fingerprint(moved) == fingerprint(moved, streaming=True), name
        assert before != fingerprint(path, validation_fraction=0.2), name
        changed = write(tmp_path / "after" / name, [*RIGHT[:-1], "other"])
        os.utime(changed, (0, 0))
        assert fingerprint(moved) != before, name
        assert "other" in read(moved), name

    path = tmp_path / "before" / "text.txt"
    recipe = Recipe(model="tiny-linear", dataset=str(path), tokenizer="bpe:300", block_size=2, validation_fraction=0.3)
    program = (
        "import sys; from modeling_nlq.training.run.data import load_documents;"
        "from modeling_nlq.training.run.recipe import Recipe;"
        "print(load_documents(Recipe(model='tiny-linear', dataset=sys.argv[1], validation_fraction=0.3)).fingerprint)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint(path) == prepare_data(recipe)[2]
    recipe.streaming, recipe.max_validation_documents = True, 3
    assert prepare_data(recipe)[2] is not None


def test_at_most_so_many_documents_are_evaluated(run, tmp_path, capsys):
    texts = [f"x = {index}\n" * 40 for index in range(30)]
    many, first = write(tmp_path / "many.jsonl", texts), write(tmp_path / "first.jsonl", texts[:1])
    assert main(["evaluate", str(run[0]), "--dataset", str(many), "--max_validation_documents", "1"]) == 0
    limited = capsys.readouterr().out
    assert main(["evaluate", str(run[0]), "--dataset", str(first)]) == 0
    assert limited == capsys.readouterr().out
    assert main(["evaluate", str(run[0]), "--dataset", str(many)]) == 0
    assert limited != capsys.readouterr().out


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


class TestIdsWithGaps:
    def test_run_finishes(self, recipe_file, tmp_path):
        byte_tokenizer(end_of_text=511).save_pretrained(tmp_path / "tokenizer")
        arguments = ["train", str(recipe_file), "--tokenizer", str(tmp_path / "tokenizer"), "--max_steps", "1"]
        assert main([*arguments, "--save_strategy", "no", "--output_dir", str(tmp_path / "run")]) == 0
        assert json.loads((tmp_path / "run" / "metrics.json").read_text())["unigram_perplexity"] > 1

    def test_ids_beyond_the_vocabulary(self, run, recipe_file, tmp_path, capsys):
        byte_tokenizer(end_of_text=600).save_pretrained(tmp_path / "tokenizer")
        options = ["--tokenizer", str(tmp_path / "tokenizer")]
        assert main(["train", str(recipe_file), *options, "--output_dir", str(tmp_path / "run")]) == 1
        assert main(["convert", str(run[0]), str(tmp_path / "converted"), *options]) == 1
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nlq: error: ")]
        assert len(errors) == 2
        assert all("ids up to 600, too large for the model's vocab_size=512" in error for error in errors)


def test_stream_too_small_for_a_block(recipe_file, tmp_path, capsys):
    arguments = ["train", str(recipe_file), "--dataset", str(write(tmp_path / "small.jsonl", RIGHT)), "--streaming", "true"]
    arguments += ["--max_validation_documents", "2", "--output_dir", str(tmp_path / "run")]
    assert main(arguments) == 1
    assert "small.jsonl' has too few tokens in a split: block_size=64 fits none" in capsys.readouterr().err

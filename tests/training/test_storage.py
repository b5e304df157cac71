"""Folders and addresses: what is written at an address is whole, and copies are complete."""

import sys
from pathlib import Path

import pytest

from modeling_nlq.training.files import is_taken, read_yaml, write_yaml, written_whole
from modeling_nlq.training.storage import (
    check_writable,
    copy_files,
    files_below,
    is_address,
    open_folder,
    remove_folder,
    scratch_folder,
)


@pytest.fixture
def address(request):
    folder = open_folder(f"memory://{request.node.name}/results")
    yield folder
    remove_folder(folder)


def test_what_is_an_address():
    assert is_address("s3://bucket/results") and not is_address("runs/results") and not is_address("file:///runs")
    assert open_folder("file:///runs/a%20b") == Path("/runs/a b") and open_folder("runs/x") == Path("runs/x")
    assert not isinstance(open_folder("memory://x"), Path)
    assert scratch_folder("memory://x/") == scratch_folder("memory://x") != scratch_folder("memory://y")


def test_files_at_an_address(address, tmp_path):
    assert not is_taken(address)
    check_writable(address)
    write_yaml(address / "below" / "x.yaml", {"a": 1})
    assert read_yaml(address / "below" / "x.yaml") == {"a": 1} and is_taken(address)
    with pytest.raises(RuntimeError), written_whole(address) as unfinished:
        (unfinished / "y").write_text("half")
        raise RuntimeError
    assert files_below(address) == ["below/x.yaml"]
    copy_files(address, tmp_path / "copy")
    assert read_yaml(tmp_path / "copy" / "below" / "x.yaml") == {"a": 1}
    remove_folder(address / "below")
    remove_folder(address / "below")
    assert files_below(address) == []


def test_order_of_a_copy(address, tmp_path, monkeypatch):
    """The file whose presence shows that all are there is the last one."""
    for name in ("z.txt", "done.json", "sub/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    copied = []
    monkeypatch.setattr("modeling_nlq.training.storage.copy_file", lambda source, _: copied.append(source.name))
    copy_files(tmp_path, address, last="done.json")
    assert copied == ["a.txt", "z.txt", "done.json"]


def test_addresses_that_cannot_be_used(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^s5://bucket cannot be opened: .*s5"):
        open_folder("s5://bucket")
    with pytest.raises(ValueError, match=r"cannot be written: \w*Error"):
        (tmp_path / "file").write_text("")
        check_writable(tmp_path / "file" / "below")
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(ValueError, match=r"^s3://bucket cannot be opened: .*pip install modeling-nlq\[ray\]"):
        open_folder("s3://bucket")

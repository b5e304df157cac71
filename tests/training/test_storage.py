"""Folders and addresses: what is written at an address is whole, and copies are complete."""

import sys
import tempfile
from pathlib import Path

import pytest
from support.other_user import run_as_nobody

from modeling_nlq.training.files import atomic_dir, is_nonempty, read_yaml, write_yaml
from modeling_nlq.training.run.shared_files import local_data
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


@pytest.mark.parametrize("case", ["files", "link", "mode"])
def test_scratch_folder_of_another_user(case, address, open_folder, monkeypatch):
    """Its name can be guessed. What a stranger put there is neither read nor, behind a link, overwritten."""
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    (address / "tokenizer.json").write_text("true")
    (address / "complete").write_text("")
    place = scratch_folder(str(address))
    private = place.parents[1]
    assert private.stat().st_mode & 0o777 == 0o700
    if case == "mode":
        private.chmod(0o770)
    else:
        private.rmdir()
        target = open_folder / "theirs" if case == "link" else private
        run_as_nobody(
            f"mkdir -p {target}/{place.parent.name}/{place.name} && cd {target}/{place.parent.name}/{place.name} && "
            f"echo planted > tokenizer.json && touch complete && ( [ -e {private} ] || ln -s {target} {private} )"
        )
    with pytest.raises(ValueError, match=r"must be a folder of this user's own with mode 700.*TMPDIR"):
        local_data(str(address))
    if case != "mode":
        (open_folder / "own").mkdir(mode=0o700)
        monkeypatch.setattr(tempfile, "tempdir", str(open_folder / "own"))
    else:
        private.chmod(0o700)
    assert (local_data(str(address)) / "tokenizer.json").read_text() == "true"


def test_scratch_folder_that_is_a_link_to_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private = scratch_folder("memory://x").parents[1]
    private.rmdir()
    private.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="must be a folder of this user's own"):
        scratch_folder("memory://x")


def test_names_at_an_address_that_lead_elsewhere(address, tmp_path, monkeypatch):
    (address / "x").write_text("x")
    monkeypatch.setattr("modeling_nlq.training.storage.files_below", lambda folder: ["below/../../escaped"])
    with pytest.raises(ValueError, match="escaped leads out of"):
        copy_files(address, tmp_path / "copy")


def test_files_at_an_address(address, tmp_path):
    assert not is_nonempty(address)
    check_writable(address)
    write_yaml(address / "below" / "x.yaml", {"a": 1})
    assert read_yaml(address / "below" / "x.yaml") == {"a": 1} and is_nonempty(address)
    with pytest.raises(RuntimeError), atomic_dir(address) as unfinished:
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

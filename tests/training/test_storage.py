"""Addresses: what a command reads and writes in the folder that stands for one."""

import sys
from pathlib import Path

import fsspec
import pytest

from modeling_nlq.training.storage import WorkingCopy, fetch, open_folder, origin, publish


@pytest.fixture(params=["memory", "local"])
def address(request, tmp_path):
    place = (
        f"memory://{request.node.name}/results" if request.param == "memory" else f"local://{tmp_path}/there/results"
    )
    yield place
    copy = WorkingCopy(place, tmp_path)
    copy.delete(copy.files())


def test_folder_that_stands_for_an_address(address, tmp_path):
    """What is large is fetched when it is asked for; what was changed or deleted is so at the address, and nothing
    else.
    """
    folder = open_folder(address)
    assert list(folder.iterdir()) == [] and folder.parts[-1] == "results" and address.partition(":")[0] in folder.parts
    there = WorkingCopy(address, tmp_path / "files")
    names = [
        "a/recipe.yaml",
        "a/model.safetensors",
        "a/checkpoint-8/trainer_state.json",
        "runs.log",
        ".data/x/blocks.json",
    ]
    for name in [*names, "b/old.json"]:
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_text(name)
    there.push()
    folder = open_folder(address)
    assert sorted(there.files()) == sorted([*names, "b/old.json"]) and there.files("a/checkpoint-8") == [names[2]]
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        names[0],
        "b/old.json",
    }
    assert origin(folder / "a") == f"{address}/a" and fetch(folder / "a") == folder / "a"
    assert (folder / names[1]).read_text() == names[1] and not (folder / names[3]).exists()

    (folder / "b" / "old.json").unlink()
    (folder / "new.json").write_text("new")
    (folder / ".lock").write_text("")
    there.delete(["a/recipe.yaml"])  # another process did that: it is neither sent nor looked for
    publish(folder / "a")
    assert sorted(there.files()) == sorted([*names[1:], "new.json"])
    (folder / "new.json").write_text("newer")
    publish(folder)
    there.pull("new.json")
    assert (tmp_path / "files" / "new.json").read_text() == "newer"
    there.delete([names[1], names[1], names[2]])
    assert sorted(there.files()) == sorted([*names[3:], "new.json"])
    assert not (tmp_path / "there" / "results" / "a" / "checkpoint-8").exists()


def test_order_and_what_has_not_changed(tmp_path, monkeypatch):
    """The files whose presence shows that all are there are the last ones."""
    copy, sent = WorkingCopy("memory://order/x", tmp_path), []
    monkeypatch.setattr(type(copy.system), "put_file", lambda self, path, name: sent.append(Path(name).name))
    for name in ("metrics.json", "z.txt", "sub/trainer_state.json", "sub/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    copy.push("sub")
    assert sent == ["a.txt", "trainer_state.json"]
    copy.push()
    assert sent[2:] == ["z.txt", "metrics.json"]
    copy.push("z.txt")
    assert len(sent) == 4


def test_folder_that_stands_for_itself(tmp_path):
    assert open_folder(tmp_path) == tmp_path == fetch(tmp_path) and origin(tmp_path) == str(tmp_path)
    publish(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["res/../../x", "../x", "a//x", "a/./x", "/x", ".."])
def test_keys_that_lead_out_of_the_folder(key, tmp_path, monkeypatch):
    """Whoever may write there, and every node, decides on them. Keys that end so are folders to the programs of
    stores.
    """
    copy, fetched = WorkingCopy("memory://keys/results", tmp_path / "below"), []
    found = [f"{copy.path}/{name}" for name in ("good", "sub/", key)]
    monkeypatch.setattr(type(copy.system), "find", lambda *_, **__: found)
    monkeypatch.setattr(type(copy.system), "get", lambda self, names, targets: fetched.append(names))
    with pytest.raises(ValueError, match=rf"^'{key}' is a path outside"):
        copy.pull()
    assert fetched == [] and list(tmp_path.iterdir()) == []
    del found[-1]
    assert copy.files() == ["good"]


def test_addresses_that_cannot_be_used(monkeypatch):
    with pytest.raises(ValueError, match=r"^s5://bucket cannot be opened: .*s5"):
        open_folder("s5://bucket")
    folder = open_folder("memory://bucket/results")
    (folder / "x.json").write_text("x")
    system = fsspec.filesystem("memory")
    for method, call, message in (("put_file", publish, "written"), ("find", fetch, "read")):
        monkeypatch.setattr(type(system), method, lambda *_, **__: 1 / 0)
        with pytest.raises(ValueError, match=f"^memory://bucket/results cannot be {message}: "):
            call(folder)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match=r"^gs://bucket cannot be opened: .*gcsfs.*; pip install"):
        open_folder("gs://bucket")

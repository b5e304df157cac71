"""Opening, writing and deleting below a folder of the user: no link is followed, and only files of nlq change."""

import ast
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.paths import REPOSITORY

from modeling_nlq.training import disk
from modeling_nlq.training.files import COMPARISON_FILE, METRICS_FILE, RECIPE_FILE
from modeling_nlq.training.run.recipe import Recipe
from modeling_nlq.training.run.run_folder import RunFolder


@pytest.fixture
def victim(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("mine")
    (tmp_path / "results").mkdir()
    yield tmp_path / "victim"
    assert [path.name for path in (tmp_path / "victim").iterdir()] == ["file"]
    assert (tmp_path / "victim" / "file").read_text() == "mine"


ACTIONS = {
    "read": disk.read_text,
    "append": lambda path: disk.open_file(path, "a"),
    "write": lambda path: disk.write_text(path, "new"),
    "delete": disk.delete,
    "folder": disk.make_folder,
}


def test_a_folder_that_cannot_be_made_is_named_in_full(tmp_path, monkeypatch):
    def refuse(name, **_):
        raise FileExistsError if name != "new" else OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(OSError, match=f"Read-only file system: '{tmp_path}/new'"):
        disk.make_folder(tmp_path / "new" / "folder")


class TestLinks:
    @pytest.mark.parametrize("action", ACTIONS)
    @pytest.mark.parametrize("below", ["file", "new/file"])
    @pytest.mark.parametrize("place", ["results", "{}/results"])
    def test_a_folder_that_is_a_link(self, victim, monkeypatch, action, below, place):
        monkeypatch.chdir(victim.parent)
        link = Path(place.format(victim.parent)) / "link"
        link.symlink_to(victim)
        with pytest.raises(ValueError, match=f"{link} is a symbolic link"):
            ACTIONS[action](link / below)

    @pytest.mark.parametrize("action", ["read", "append"])
    @pytest.mark.parametrize("to", ["../victim/file", "no-such-file", "link"])
    def test_a_file_that_is_a_link(self, victim, action, to):
        link = victim.parent / "results" / "link"
        link.symlink_to(to)
        with pytest.raises(ValueError, match="results/link is a symbolic link"):
            ACTIONS[action](link)

    def test_a_link_is_itself_replaced_or_deleted(self, victim):
        results = victim.parent / "results"
        for name, target in (("file", "file"), ("folder", ""), ("deleted", "")):
            (results / name).symlink_to(victim / target)
        disk.write_text(results / "file", "new")
        disk.delete(results / "deleted")
        assert (results / "file").read_text() == "new" and not (results / "file").is_symlink()
        disk.delete(results)  # what is below it, too
        assert not results.exists()

    @pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
    def test_only_regular_files_are_read(self, tmp_path, make):
        make(tmp_path / "file")
        with pytest.raises(ValueError, match="is not a regular file"):
            disk.read_text(tmp_path / "file")

    def test_links_of_the_user(self, victim):
        """A path that is itself a link works as what it points to, also where it does not exist yet."""
        link = victim.parent / "scratch"
        link.symlink_to(victim.parent / "results")
        disk.write_text(disk.resolve_user_path(link / "new" / "file"), "new")
        assert disk.read_text(disk.resolve_user_path(link) / "new" / "file") == "new"
        assert disk.resolve_user_path("a/b") == Path("a/b")  # as it is in messages

    @pytest.mark.parametrize("name", ["config.json", "below/config.json"])
    def test_a_snapshot_of_the_hub(self, tmp_path, name):
        blobs, file = tmp_path / "models--a" / "blobs", tmp_path / "models--a" / "snapshots" / "main" / name
        other = tmp_path / "models--b" / "blobs"
        for blob in (blobs / "0a", blobs.parent / "0a", other / "0a", other.parent / "0a"):
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_text("blob")
        file.parent.mkdir(parents=True)
        for target in (other, blobs.parent, blobs):
            file.unlink(missing_ok=True)
            file.symlink_to(os.path.relpath(target / "0a", file.parent))
            if target != blobs:
                with pytest.raises(ValueError, match="is a symbolic link"):
                    disk.read_text(file)
        assert disk.read_text(file) == "blob"
        (blobs / "0a").unlink()
        (blobs / "0a").symlink_to(other.parent / "0a")
        for read in (disk.read_text, lambda path: disk.check_no_symlinks([path], allow_hub=True)):
            with pytest.raises(ValueError, match="0a is a symbolic link"):
                read(file)
        with pytest.raises(ValueError, match=r"config\.json is a symbolic link"), RunFolder(file.parent, None).held():
            raise AssertionError

    @pytest.mark.parametrize("plan", [RECIPE_FILE, None])
    @pytest.mark.parametrize("link", ["runs/a", "runs/a/checkpoint-5", "config.json", ".lock", "a.log"])
    def test_a_link_in_a_folder_of_results(self, victim, plan, link):
        """Before anything is written, for the libraries that write there would follow it."""
        results = RunFolder(victim.parent / "results", plan)
        with results.held():
            if plan is not None:
                results.claim({"name": "a"})
        (results.path / link).unlink(missing_ok=True)
        (results.path / link).parent.mkdir(parents=True, exist_ok=True)
        (results.path / link).symlink_to(victim / ("file" if "." in link else ""))
        with pytest.raises(ValueError, match=f"{link} is a symbolic link"), results.held():
            raise AssertionError


class TestRecord:
    @pytest.mark.parametrize("plan", [RECIPE_FILE, COMPARISON_FILE])
    @pytest.mark.parametrize("others", [(), ("model.safetensors", METRICS_FILE), ("results.json", "models.json")])
    def test_a_plan_of_the_user_stays(self, tmp_path, plan, others):
        for name in (plan, *others):
            (tmp_path / name).write_text("name: a  # mine")
        before = {path.name: path.read_text() for path in tmp_path.iterdir()}
        with pytest.raises(ValueError, match=f"{plan} was not written by nlq"), RunFolder(tmp_path, plan).held():
            raise AssertionError
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before

    @pytest.mark.parametrize("name", ["README.md", METRICS_FILE, "figures/losses.png", "checkpoint-7"])
    def test_a_name_that_is_taken(self, tmp_path, name):
        place = RunFolder(tmp_path, COMPARISON_FILE)
        with place.held():
            place.claim({"name": "a"})
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("mine")
            with pytest.raises(ValueError, match=f"{name} exists and was not written by nlq"):
                disk.write_text(tmp_path / name, "ours")
            disk.delete(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name} exists and was not written by nlq"), place.held():
            raise AssertionError
        assert (tmp_path / name).read_text() == "mine"

    def test_folders_that_were_made_before_there_were_records(self, tmp_path):
        metrics = '{"tokens_seen": 1, "processes": 1, "steps": 1, "token_stream": "", "diverged": false}'
        for name in (METRICS_FILE, "tokenizer.json", "notes.txt"):
            (tmp_path / name).write_text(metrics)
        (tmp_path / RECIPE_FILE).write_text("{model: m, switches: {}, training: {}}")
        place = RunFolder(tmp_path)
        with pytest.raises(ValueError, match="a run of another recipe"), place.held():
            place.claim_run(Recipe("other").to_dict(), 1, True)
        assert disk.read_manifest(tmp_path) is None
        with place.held():
            place.claim_run(Recipe("m").to_dict(), 1, True)
            disk.write_text(tmp_path / "tokenizer.json", "new")
            disk.delete(tmp_path / "notes.txt")
        assert (tmp_path / "tokenizer.json").read_text() == "new" and (tmp_path / "notes.txt").exists()

    def test_processes_that_write_the_same_files(self, tmp_path):
        disk.add_to_manifest(tmp_path)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: disk.write_text(tmp_path / f"{number % 3}", "text"), range(60)))
        assert {*disk.read_manifest(tmp_path)} == {"0", "1", "2"}

    def test_a_record_that_somebody_else_wrote(self, tmp_path):
        (tmp_path / disk.MANIFEST).write_text(".\n..\n/etc\n../a\na/../../b\na//b\n\nc/d\ne\x0bf\n")
        assert disk.read_manifest(tmp_path) == ["c/d", "e\x0bf"]
        assert disk.not_in_manifest(tmp_path, ["README.md", "c/d", "c/d/e"]) == ["README.md"]

    @pytest.mark.parametrize("name", ["a\nthesis.txt", "a\r", "\x1b[2J", "a\u2028b"])
    def test_names_with_lines(self, tmp_path, name):
        disk.add_to_manifest(tmp_path)
        with pytest.raises(ValueError, match="has characters that"):
            disk.write_text(tmp_path / "folder" / name, "text")
        assert disk.read_manifest(tmp_path) == [] and not (tmp_path / "folder" / name).exists()

    @pytest.mark.parametrize("is_link", [False, True])
    def test_a_record_in_a_shared_folder(self, tmp_path, monkeypatch, is_link):
        """Somebody else made it: by another user, or as a link."""
        (tmp_path / disk.MANIFEST).symlink_to("/no-such-file") if is_link else disk.add_to_manifest(tmp_path)
        stat_of = os.lstat

        def stranger(path, **options):
            return os.stat_result([*(found := stat_of(path, **options))[:4], os.geteuid() + 1, *found[5:]])

        monkeypatch.setattr(os, "lstat", stranger)
        disk.write_text(tmp_path / "mine" / "a", "text")
        assert is_link or disk.read_manifest(tmp_path) == []

    def test_what_a_killed_process_left(self, tmp_path):
        old, new = (tmp_path / "figures" / f".figures.x{name}{disk.UNFINISHED}" for name in ("1234567", "1234568"))
        for folder in (old, new):
            folder.mkdir(parents=True)
            (folder / "half").write_text("half")
        notes = [tmp_path / f".notes.{end}.unfinished" for end in ("20250101", "x1234567")]  # which only look like it
        notes[0].touch()
        notes[1].mkdir()
        for path in (old, *notes):
            os.utime(path, (0, 0))
        with RunFolder(tmp_path, None).held():
            assert new.exists() and not old.exists() and all(path.exists() for path in notes)


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_of_libraries_have_the_usual_permissions(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with disk.atomic_dir(tmp_path) as folder:
            (folder / "weights").touch(0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "weights").stat().st_mode) == mode


def test_libraries_read_a_folder_after_it_is_checked():
    """`from_pretrained` follows links: it stands in `with source_named(...)`, or reads what this package wrote."""
    own = {"checking.py", "checkpoints.py", "publishing.py"}
    for file in (REPOSITORY / "training").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        checked = [node for node in nodes if isinstance(node, ast.With) and "source_named" in ast.unparse(node)]
        calls = [node for node in nodes if isinstance(node, ast.Call) and ".from_pretrained(" in ast.unparse(node)]
        inside = {node for root in checked for node in ast.walk(root)}
        assert file.name in own or inside.issuperset(calls), file


def test_nothing_else_opens_writes_or_deletes():
    calls = (
        "open read_text read_bytes write_text write_bytes unlink rmtree rmdir rename mkdir makedirs copyfile copytree"
    )
    calls = {*calls.split(), "symlink_to", "chmod", "touch", "remove"}
    allowed = {
        "training/run/documents.py",  # datasets: files that were listed below the folder that the user named
        "training/sharing/publishing.py",  # a copy in a temporary folder
        "training/trust.py",  # the folder of its list, closed to others
    }
    found = set()
    for file in sorted((REPOSITORY / "training").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                text = ast.unparse(node.func)
                name, own = text.rpartition(".")[2], ("read_text", "read_bytes", "write_text")
                is_package = any(word in text for word in ("__file__", "parent / name", "_EXAMPLES"))
                if name in calls and text not in own and not is_package and not text.startswith("hook"):
                    found.add(file.relative_to(REPOSITORY).as_posix())
    assert found - allowed == {"training/disk.py"}

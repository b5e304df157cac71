"""The list of part files that this user has run: what is in it, and when it is not believed."""

import os

import pytest
from support.own_parts import DISTANCE

from modeling_nlq.training import trust


OTHER = DISTANCE.replace("-5.0", "-6.0")


@pytest.fixture
def ran(tmp_path, monkeypatch):
    monkeypatch.setattr(trust, "TRUSTED_PARTS", tmp_path / "home" / "nlq" / "trusted_parts")
    return lambda text: bool(trust.run_parts(tmp_path / "my_idea.py", text, only_known=True))


@pytest.mark.parametrize("moment", ["_known", "load_attention_parts"])
def test_a_file_that_changes_meanwhile(moment, ran, tmp_path, monkeypatch):
    """What was read once is what runs and what is remembered."""
    path, original = tmp_path / "my_idea.py", getattr(trust, moment)
    path.write_text(DISTANCE)

    def swap(*arguments):
        path.write_text(OTHER.replace("distance", "hostile"))
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trust, moment, swap)
        assert [part.name for part in trust.run_parts(path)] == ["distance"]
    assert "hostile" in path.read_text() and ran(DISTANCE) and not ran(path.read_text())


def test_who_may_write_the_list(ran, monkeypatch):
    said = []
    monkeypatch.setattr(trust.logger, "warning_once", said.append)
    trust.run_parts("my_idea.py", DISTANCE)
    file, folder = trust.TRUSTED_PARTS, trust.TRUSTED_PARTS.parent
    assert ran(DISTANCE) and not ran(OTHER) and said == []
    assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)

    def link(path):
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")

    def give(path):
        os.chown(path, 12345, -1)

    changes = [lambda path: path.chmod(0o722), lambda path: path.chmod(0o702), link]
    for change in changes + ([give] if os.geteuid() == 0 else []):
        for path in (file, folder):
            change(path)
            said.clear()
            assert not ran(DISTANCE) and len(said) == 1 and "\n" not in said[0] and str(file) in said[0]
            before = file.read_bytes()
            trust.run_parts("my_idea.py", OTHER)
            assert file.read_bytes() == before
            if path.is_symlink():
                path.unlink()
                path.with_name("elsewhere").rename(path)
            os.chown(path, os.geteuid(), -1)
            path.chmod(0o600 if path == file else 0o700)
            assert ran(DISTANCE)
    file.write_bytes(b"\xff\xfe" + file.read_bytes())
    said.clear()
    assert not ran(DISTANCE) and len(said) == 1 and "not text" in said[0]

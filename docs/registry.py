"""Writes the published comparisons of docs/results as the data sets that `nlq publish` would upload.

    python docs/registry.py registry     (or `make registry`)

Each becomes a folder, such as registry/ladder-queries, with the tables `runs` and `verdicts`. Screenings have no
verdicts, so they are left out.
"""

import sys
from pathlib import Path

from modeling_nlq.training.comparison.publication import contents_of
from modeling_nlq.training.files import read_json


RESULTS = Path(__file__).parent / "results"
OWNER = "modeling-nlq"


def comparisons() -> list[Path]:
    """Returns the folders of finished comparisons."""
    files = sorted(RESULTS.rglob("results.json"))
    return [file.parent for file in files if "design" not in read_json(file)]


def write(folder: Path, target: Path) -> Path:
    """Writes one data set below `target`, and returns its folder."""
    name = "-".join(folder.relative_to(RESULTS).parts)
    for path, content in contents_of(folder, f"{OWNER}/{name}", license="apache-2.0")[0].items():
        file = target / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return target / name


if __name__ == "__main__":
    for comparison in comparisons():
        print(write(comparison, Path(sys.argv[1])))

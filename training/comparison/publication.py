"""A comparison on the Hub: a data set of its file, its runs and verdicts as tables, its report and a card."""

import io
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import DatasetCardData, hf_hub_download
from huggingface_hub.errors import HTTPError, RemoteEntryNotFoundError
from transformers.utils import logging

from ...configuration import names
from ..disk import read_text, resolve_user_path
from ..files import (
    CARD_FILE,
    COMPARISON_FILE,
    RESULTS_FILE,
    RUNS_FILE,
    VERDICTS_FILE,
    data_format,
    flatten,
    is_built_in,
    is_repository_name,
    read_yaml,
    yaml_text,
)
from ..sharing.publishing import Publication, explain, send
from ..sharing.scrub import check_for_traces, without_folders
from ..text import Markdown, align, check_name, code, count, plain
from .config import ComparisonConfig, read_made_from
from .ledger import Ledger, RunRow, VerdictRow, ledger_of, place_of, read_table, write_table
from .render import bullets, to_text
from .report import read_published, verdicts
from .results import Outcome
from .tables import with_interval


logger = logging.get_logger(__name__)

_TABLES = {"verdicts": (VERDICTS_FILE, VerdictRow), "runs": (RUNS_FILE, RunRow)}
_LARGEST_FILE = 2**26
_PART = re.compile(r"parts/(.+)\.py")


def is_comparison(folder: Path) -> bool:
    """Tells whether a folder holds a comparison, perhaps unfinished, and no model."""
    has_comparison = any((folder / name).is_file() for name in (RESULTS_FILE, COMPARISON_FILE))
    return has_comparison and not (folder / "config.json").exists()


def publish_comparison(
    folder: Path,
    repo_id: str,
    license: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    dry_run: bool = False,
) -> Publication:
    """Uploads a finished comparison as a data set, as `api.publish` explains."""
    contents, ledger = contents_of(folder, repo_id, license)
    rows = {name: getattr(ledger, table) for table, (name, _) in _TABLES.items()}
    # A table is compressed, so the check reads its rows as lines of text
    texts = {name: "\n".join(json.dumps(asdict(row)) for row in each).encode() for name, each in rows.items()}
    check_for_traces(folder, contents | texts)
    return send(repo_id, contents, private, revision, dry_run, "dataset")


def contents_of(folder: Path, repo_id: str, license: str | None = None) -> tuple[dict[str, bytes], Ledger]:
    """Returns the files that publishing uploads, by name, and the rows in its tables.

    Raises `ValueError` if the comparison is not finished, or needs models of this machine.
    """
    if not (folder / RESULTS_FILE).is_file():
        raise ValueError(f"{folder}: the comparison is not finished, for it has no {RESULTS_FILE}; run it again")
    outcome, contents = read_published(folder)
    made = read_made_from(outcome.comparison, RESULTS_FILE)
    config, written = made.to_dict(), made
    if (folder / COMPARISON_FILE).is_file():
        written = read_made_from(read_yaml(folder / COMPARISON_FILE), COMPARISON_FILE)
        if written.all_seeds != made.all_seeds:
            seeds = " ".join(map(str, written.all_seeds))
            raise ValueError(f"{folder}: the comparison is not finished with its seeds, {seeds}; run it again")
    for field, value in flatten(written.to_dict()).items():
        _check_public(field, value)
    # In the results, paths are cut, which could change the code of a part
    exact = written.recipe.get("parts") if isinstance(written.recipe, dict) else None
    parts = config["recipe"].pop("parts", None) or {}
    parts = exact if isinstance(exact, dict) else parts
    config = without_folders(config)
    for name, text in parts.items():
        check_name(f"{COMPARISON_FILE}: parts", name)
        contents[f"parts/{name.removesuffix('.py')}.py"] = text.encode()
    if parts:
        config["recipe"]["parts"] = [name for name in contents if _PART.fullmatch(name)]
    contents[COMPARISON_FILE] = yaml_text(config).encode()
    ledger = ledger_of(outcome)
    for table, (name, kind) in _TABLES.items():
        buffer = io.BytesIO()
        write_table(getattr(ledger, table), kind, buffer)
        contents[name] = buffer.getvalue()
    contents[CARD_FILE] = _card(repo_id, outcome, ledger, license, "results.md" in contents).encode()
    return dict(sorted(contents.items())), ledger


def _check_public(field: str, value: Any) -> None:
    """Raises `ValueError` for a model, a tokenizer or a folder of texts that is on this machine alone."""
    is_named = field.rpartition(".")[2] in ("model", "tokenizer", "dataset") and isinstance(value, str)
    if not is_named or value in names("models") or (field.endswith("dataset") and data_format(value)):
        return
    is_public = is_built_in(value) or is_repository_name(value.removeprefix("bpe:"))
    if os.path.exists(value) or not is_public or value.endswith(".json"):
        raise ValueError(
            f"{COMPARISON_FILE}: {field}={value!r} is on this machine alone, so nobody could repeat the comparison; "
            "put it on the Hub and compare by that name"
        )


def _card(repo_id: str, outcome: Outcome, ledger: Ledger, license: str | None, has_report: bool) -> str:
    configs = [{"config_name": table, "data_files": name} for table, (name, _) in _TABLES.items()]
    metadata = DatasetCardData(license=license, tags=["nlq", "attention"], configs=configs).to_dict()
    results, recipe = outcome.largest, outcome.comparison["recipe"]
    tried = [
        f"{name}: {count(len(model.tried) + len(model.runs), 'run')}, learning rates "
        f"{', '.join(f'{rate:g}' for rate in model.learning_rates)}"
        for name, model in results.models.items()
    ]
    if results.tuned is not None:
        ranges = ", ".join(f"{name} {entry}" for name, entry in results.tuned.ranges.items())
        tried.append(f"{count(results.tuned.trials, 'point')} for each seed and model: {ranges}")
    dataset = str(recipe.get("dataset", "python-stdlib"))
    limits = [
        f"The models have up to {max(row.non_embedding for row in ledger.runs):,} non-embedding parameters and see up "
        f"to {max(row.tokens for row in ledger.runs):,} tokens. Others may have other verdicts."
    ]
    if data_format(dataset):
        limits.append(f"The text, {dataset}, is not published. Name yours by `--dataset FILE`.")
    elif dataset == "python-stdlib":
        limits.append("The text, python-stdlib, is that of the Python that runs it. A repetition says if it differs.")
    papers: dict[str, list[str]] = {}
    for row in ledger.verdicts:
        for paper in filter(None, (row.arxiv or "").split(", ")):
            papers.setdefault(paper, []).append(row.model)
    links = [
        f"* https://arxiv.org/abs/{paper} ({', '.join(map(plain, dict.fromkeys(models)))})"
        for paper, models in papers.items()
    ]
    tables = [f'{table} = datasets.load_dataset("{repo_id}", "{table}", split="train")\n' for table in _TABLES]
    parts = [
        Markdown(f"# {plain(outcome.name)}"),
        verdicts(outcome),
        *([Markdown("[results.md](results.md) is the whole report.")] if has_report else []),
        Markdown("## What was tuned"),
        bullets(tried),
        Markdown("## Limits"),
        bullets(limits),
        *([Markdown("## Papers"), Markdown("\n".join(links))] if links else []),
        Markdown("## Repeat it"),
        "With other seeds, and with --seeds original with the same:",
        code(f"nlq compare {repo_id}\n", "sh"),
        "All runs and verdicts, in nats per token and percent:",
        code("".join(["import datasets\n\n", *tables]), "python"),
    ]
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n{without_folders(to_text(parts))}\n"


@dataclass(frozen=True)
class Published:
    """A comparison of the Hub.

    `content` are the fields of its file, with the code of parts, and with the seeds that a repetition takes.
    """

    name: str
    file: Path
    content: dict[str, Any]
    seeds: list[int]
    own_seeds: list[int]
    ledger: Ledger

    def describe(self) -> str:
        published, own = (" ".join(map(str, seeds)) for seeds in (self.seeds, self.own_seeds))
        return f"{self.name}: published with the seeds {published}, and repeated with {own}"

    def warn_of_other_text(self, scale: str, fingerprint: str | None) -> None:
        """Warns if a scale or condition has other documents than published."""
        there = next((row.data for row in self.ledger.runs if scale == place_of(row)), None)
        if there != fingerprint:
            logger.warning_once(
                f"the text differs from that of {self.name} (fingerprint {there} there, {fingerprint} here): this "
                "measures the same change on other documents"
            )

    def verdict_lines(self, repeated: Ledger) -> Iterator[str]:
        """Yields a table of the published verdicts, and of those of a repetition."""
        here = {(row.scale, row.condition, row.model): row for row in repeated.verdicts}
        rows = [["model", "published: improvement of loss (%)", "repeated"]]
        for row in self.ledger.verdicts:
            place = (row.scale, row.condition, row.model)
            rows.append([", ".join(filter(None, place)), *map(_describe_verdict, (row, here.get(place)))])
        yield from align(rows, right=False)


def _describe_verdict(row: VerdictRow | None) -> str:
    if row is None:
        return "not compared"
    interval = None if row.low is None or row.high is None else (row.low, row.high)
    return f"{with_interval(row.improvement, interval, '+.2f')}, {row.verdict}"


def find_published(source: str | Path, seeds: str | None = None) -> Published | None:
    """Downloads the comparison that `owner/name` means on the Hub; `None` for a file and a shipped name.

    Its seeds are replaced by as many others unless `seeds` is `original`. Raises `ValueError` if it cannot be
    downloaded, or holds what a published comparison does not.
    """
    if seeds not in (None, "fresh", "original"):
        raise ValueError(f"seeds={seeds!r} must be 'fresh' or 'original'")
    name = str(source)
    is_here = any(map(os.path.lexists, (name, f"{name}.yaml"))) or name in names("comparisons")
    is_file = is_here or name.endswith((".yaml", ".yml"))
    if is_file or "/" not in name or not is_repository_name(name):
        if seeds is not None:
            raise ValueError(f"--seeds {seeds} is for a comparison of the Hub, owner/name, and {name} is none")
        return None
    return _download(name, seeds == "original")


def read_ledger(source: str) -> Ledger:
    """Reads the results folder of a comparison, or a published one: its folder, or a data set `owner/name` of the Hub.

    A path on this machine comes first. Raises `ValueError` as `find_published`.
    """
    folder = resolve_user_path(source)
    if (folder / RESULTS_FILE).exists():
        return ledger_of(read_published(folder)[0])
    if folder.exists():
        if not (folder / COMPARISON_FILE).exists():
            raise ValueError(f"{source} holds no comparison: neither {RESULTS_FILE} nor {COMPARISON_FILE}")
        return _read(source, lambda name: folder / name)[1]
    if (published := find_published(source)) is None:
        raise ValueError(f"{source!r} must be a folder, or a data set on the Hub, owner/name")
    return published.ledger


def _download(name: str, keeps_seeds: bool) -> Published:
    file = _fetch(name, COMPARISON_FILE)
    config, ledger = _read(name, lambda part: _fetch(name, part, file.parent.name))  # all of one commit
    repeated = config if keeps_seeds else config.with_fresh_seeds()
    return Published(name, file, repeated.to_dict(), config.all_seeds, repeated.all_seeds, ledger)


def _read(name: str, fetch: Callable[[str], Path]) -> tuple[ComparisonConfig, Ledger]:
    """Reads the files of a published comparison, which `fetch` finds by their names; raises as `find_published`."""
    source, content = f"{name}: {COMPARISON_FILE}", read_yaml(fetch(COMPARISON_FILE))
    recipe = content.get("recipe")
    if not isinstance(recipe, dict):
        raise ValueError(f"{source}: recipe={reprlib.repr(recipe)} must be the fields of a recipe")
    parts = recipe.pop("parts", None)
    if paths := [field for field, value in flatten(content).items() if without_folders(value) != value]:
        raise ValueError(f"{source}: {', '.join(paths)}: paths of another machine cannot be repeated")
    if parts is not None:
        if not isinstance(parts, list):
            raise ValueError(f"{source}: recipe: parts must be a list of files, not {type(parts).__name__}")
        recipe["parts"] = {}
        for part in parts:
            if not (match := _PART.fullmatch(str(part))):
                raise ValueError(f"{source}: parts: {reprlib.repr(part)} must be a file parts/NAME.py")
            check_name(f"{source}: parts", match[1])
            recipe["parts"][f"{match[1]}.py"] = read_text(fetch(part))
    config = ComparisonConfig.read({"name": name.rpartition("/")[2], **content}, source)
    check_name(f"{source}: name", config.name)
    if config.factors is not None:
        raise ValueError(f"{name} is a screening, which has no verdicts to repeat; download its file and run that")
    tables = {table: read_table(kind, fetch(at)) for table, (at, kind) in _TABLES.items()}
    ledger = Ledger(**tables, comparison=config.to_dict())
    for row in (*ledger.verdicts, *ledger.runs):
        if row.model not in config.models or place_of(row) not in config.scale_configs:
            raise ValueError(
                f"{name}: a table has {row.model!r} of {place_of(row)!r}, which {COMPARISON_FILE} does not"
            )
    return config, ledger


def _fetch(repo_id: str, name: str, revision: str | None = None) -> Path:
    """Downloads a file of a data set, if it is not too large; without network, takes it from the cache."""
    options = {"repo_type": "dataset", "revision": revision}
    try:
        size = hf_hub_download(repo_id, name, **options, dry_run=True).file_size or 0
        if size > _LARGEST_FILE:
            raise ValueError(f"{repo_id}: {name} has {size:,} bytes; at most {_LARGEST_FILE:,} are downloaded")
        path = Path(hf_hub_download(repo_id, name, **options))
    except RemoteEntryNotFoundError:
        raise ValueError(f"{repo_id}: there is no {name} in this data set of the Hub") from None
    except (HTTPError, OSError) as error:
        message = f"comparison {repo_id!r} is neither a file nor a shipped name, and cannot be read from the Hub"
        raise ValueError(f"{message}: {explain(error)}") from None
    return resolve_user_path(path.parent) / path.name

"""The runs and verdicts of a comparison as two flat tables, which `nlq publish` writes and `nlq pool` reads.

Both are parquet files that `datasets`, pandas and the Hub's viewer read without this package. Settings are JSON in a
cell, because their fields differ from model to model.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
from huggingface_hub import snapshot_download

from ..disk import open_file, resolve_user_path
from ..files import COMPARISON_FILE, RESULTS_FILE, RUNS_FILE, VERDICTS_FILE, read_yaml
from ..values import Value, from_json
from .results import ModelOutcome, Outcome, RunOutcome, ScaleOutcome, read_outcome
from .sections import SINGLE


@dataclass(frozen=True)
class RunRow(Value):
    """A run of a comparison. Losses are in nats per token, and `None` if the run diverged.

    `is_reported` is false for a run that only chose a rate or a point. `test_loss_parts` are the losses on parts of
    the test text. `token_stream` is a hash of the training tokens in order, `code` one of the package's files.
    """

    scale: str | None
    condition: str | None
    model: str
    seed: int
    is_reported: bool
    learning_rate: float
    point: str
    """The tuned values, as JSON."""
    parameters: int
    non_embedding: int
    tokens: int
    train_loss: float | None
    validation_loss: float | None
    test_loss: float | None
    test_loss_parts: list[float] | None
    seconds: float | None
    device: str
    threads: int | None
    versions: str
    """Of packages, as JSON."""
    data: str | None
    """Fingerprint of the documents."""
    token_stream: str
    code: str | None


@dataclass(frozen=True)
class VerdictRow(Value):
    """A model beside its baseline, at one scale or under one condition.

    `improvement` of the test loss is in percent of the baseline's, with the ends of its interval, and `p` is corrected
    for `family` tests. `noise` is the baseline's standard deviation over seeds, in percent. `time_ratio` is the
    training time of the model over that of the baseline.
    """

    scale: str | None
    condition: str | None
    model: str
    change: str
    """What the model changes of the recipe, as JSON."""
    baseline: str
    baseline_change: str
    non_embedding: int
    tokens: int
    optimizer: str
    seeds: int
    improvement: float | None
    low: float | None
    high: float | None
    p: float | None
    family: int
    verdict: str
    noise: float | None
    time_ratio: float | None
    version: str


_MOST_ROWS = 100_000


@dataclass(frozen=True)
class Ledger:
    """The two tables of a comparison, and its file."""

    runs: list[RunRow] = field(default_factory=list)
    verdicts: list[VerdictRow] = field(default_factory=list)
    comparison: dict[str, Any] = field(default_factory=dict)


def place_of(row: RunRow | VerdictRow) -> str:
    """Returns the scale or condition of a row, as `ComparisonConfig.scale_configs` names it."""
    return row.scale or row.condition or SINGLE


def ledger_of(outcome: Outcome) -> Ledger:
    """Returns the tables of a finished comparison."""
    ledger = Ledger(comparison=outcome.comparison)
    for name, scale in outcome.scales.items():
        place = {"scale": None, "condition": None}
        if outcome.axis is not None and name != SINGLE:
            place[outcome.axis.one] = name
        for model, entry in scale.models.items():
            ledger.runs.extend(RunRow(**place, model=model, **_describe_run(run, False)) for run in entry.tried)
            ledger.runs.extend(RunRow(**place, model=model, **_describe_run(run, True)) for run in entry.runs)
        ledger.verdicts.extend(VerdictRow(**place, **verdict) for verdict in _verdicts(scale))
    return ledger


def _describe_run(run: RunOutcome, is_reported: bool) -> dict[str, Any]:
    result = run.result
    return {
        "seed": run.seed,
        "is_reported": is_reported,
        "learning_rate": run.learning_rate,
        "point": json.dumps(run.point, sort_keys=True),
        "parameters": result.size.total,
        "non_embedding": result.size.non_embedding,
        "tokens": result.data.tokens_seen,
        "train_loss": result.losses.train,
        "validation_loss": run.validation_loss,
        "test_loss": run.test_loss,
        "test_loss_parts": None if run.diverged else run.test_loss_parts,
        "seconds": result.machine.seconds,
        "device": result.machine.device,
        "threads": result.machine.threads,
        "versions": json.dumps(result.machine.versions, sort_keys=True),
        "data": result.data.fingerprint,
        "token_stream": result.data.token_stream,
        "code": result.machine.code,
    }


def _verdicts(scale: ScaleOutcome) -> Iterator[dict[str, Any]]:
    analysis, baseline = scale.statistics, scale.models[scale.baseline]
    for model, effect in analysis.effects.items():
        entry = scale.models[model]
        low, high = effect.loss_improvement_interval or (None, None)
        seconds = [_median_seconds(each) for each in (entry, baseline)]
        yield {
            "model": model,
            "change": json.dumps(entry.given, sort_keys=True),
            "baseline": scale.baseline,
            "baseline_change": json.dumps(baseline.given, sort_keys=True),
            "non_embedding": entry.size.non_embedding,
            "tokens": scale.tokens_per_run,
            "optimizer": entry.given.get("optimizer") or scale.comparison["recipe"].get("optimizer") or "adamw",
            "seeds": effect.pairs,
            "improvement": effect.loss_improvement,
            "low": low,
            "high": high,
            "p": effect.holm_p,
            "family": analysis.family or len(analysis.effects),
            "verdict": str(effect.verdict),
            "noise": analysis.noise_floor_percent,
            "time_ratio": seconds[0] / seconds[1] if all(seconds) else None,
            "version": entry.runs[0].result.machine.versions.get("nlq", ""),
        }


def _median_seconds(model: ModelOutcome) -> float | None:
    seconds = [run.result.machine.seconds for run in model.finished if run.result.machine.seconds is not None]
    return statistics.median(seconds) if seconds else None


# The types of columns in parquet, which a table without a single value could not tell
_TYPES = {int: "int64", float: "float64", bool: "bool", str: "string"}


def features_of(kind: type[Value]) -> datasets.Features:
    """Returns the columns of a table of rows."""
    columns = {}
    for item in fields(kind):
        plain = next((name for name in _TYPES if item.type in (name, name | None)), None)
        value = datasets.Value("float64" if plain is None else _TYPES[plain])
        columns[item.name] = datasets.List(value) if plain is None else value
    return datasets.Features(columns)


def write_table(rows: list[RunRow] | list[VerdictRow], kind: type[Value], file: Path) -> None:
    datasets.Dataset.from_list([asdict(row) for row in rows], features=features_of(kind)).to_parquet(file)


def read_ledger(source: str) -> Ledger:
    """Reads the results folder of a comparison, or a published one: a folder, or a data set `owner/name` on the Hub.

    A path on this machine comes first. Raises `ValueError` for a damaged file, or a table with other columns or too
    many rows.
    """
    folder = resolve_user_path(source)
    if not folder.exists():
        if source.count("/") != 1:
            raise ValueError(f"{source!r} must be a folder, or a data set on the Hub, owner/name")
        patterns = [COMPARISON_FILE, RUNS_FILE, VERDICTS_FILE]
        folder = Path(snapshot_download(source, repo_type="dataset", allow_patterns=patterns))
    if (folder / RESULTS_FILE).exists():
        return ledger_of(read_outcome(folder / RESULTS_FILE))
    return Ledger(
        runs=read_table(RunRow, folder / RUNS_FILE),
        verdicts=read_table(VerdictRow, folder / VERDICTS_FILE),
        comparison=read_yaml(folder / COMPARISON_FILE),
    )


def read_table(kind: type[Value], file: Path) -> list[Any]:
    """Reads a table that somebody else may have written."""
    with open_file(file) as opened:
        try:
            table = pyarrow.parquet.ParquetFile(opened)
            is_expected = table.schema_arrow.equals(features_of(kind).arrow_schema)
            rows = table.metadata.num_rows
            if is_expected and rows <= _MOST_ROWS:
                return read_rows(kind, table.read().to_pylist(), str(file))
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{file} is damaged: {error}") from error
    if is_expected:
        raise ValueError(f"{file} holds {rows:,} rows, and at most {_MOST_ROWS:,} are read")
    columns = ", ".join(item.name for item in fields(kind))
    raise ValueError(f"{file} holds other columns or types than those of a published comparison, {columns}")


def read_rows(kind: type[Value], rows: list[dict[str, Any]], source: str) -> list[Any]:
    """Converts rows of a table; raises `ValueError` for a missing column or a value of another type."""
    return [from_json(kind, row, f"{source}: row {index}: ") for index, row in enumerate(rows)]

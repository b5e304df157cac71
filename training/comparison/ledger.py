"""The runs and verdicts of a comparison as two flat tables, which `nlq publish` writes and `nlq pool` reads.

Both are parquet files that `datasets`, pandas and the Hub's viewer read without this package. Settings are JSON in a
cell, because their fields differ from model to model.
"""

import inspect
import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import pyarrow
from pyarrow import parquet

from modeling_nlq import NLQConfig
from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS, LIBRARY_ACTIVATIONS
from modeling_nlq.parts_builtin_nlq import ATTENTION_PARTS

from ..disk import open_file
from ..text import one_line
from ..values import Value, from_json
from .inference import Verdict
from .results import ModelOutcome, Outcome, RunOutcome, ScaleOutcome
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
    settings: str
    """What the model changes of the recipe, and the values in its `tuned` that this run had, as JSON."""
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

    `improvement`, from `low` to `high`, is the decrease of the test loss in percent of the baseline's. `p` is
    corrected for `family` tests. Only switches have a `formula` and `arxiv` (ids of papers). `noise` is the standard
    deviation of the baseline's loss over seeds, in percent. `time_ratio` divides the model's training time by the
    baseline's.
    """

    scale: str | None
    condition: str | None
    model: str
    change: str
    """What the model changes of the recipe, as JSON."""
    baseline: str
    baseline_change: str
    formula: str | None
    arxiv: str | None
    non_embedding: int
    tokens: int
    optimizer: str
    seeds: int
    improvement: float | None
    low: float | None
    high: float | None
    p: float | None
    family: int
    verdict: Verdict
    noise: float | None
    time_ratio: float | None
    version: str


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
            runs = [*((run, False) for run in entry.tried), *((run, True) for run in entry.runs)]
            ledger.runs.extend(_run_row(place, model, entry, *run) for run in runs)
        ledger.verdicts.extend(_verdict_row(place, model, scale) for model in scale.statistics.effects)
    return ledger


def _run_row(
    place: Mapping[str, str | None], name: str, model: ModelOutcome, run: RunOutcome, is_reported: bool
) -> RunRow:
    result = run.result
    return RunRow(
        **place,
        model=name,
        seed=run.seed,
        is_reported=is_reported,
        learning_rate=run.learning_rate,
        settings=json.dumps(model.given | ({"tuned": run.point} if run.point else {}), sort_keys=True),
        parameters=result.size.total,
        non_embedding=result.size.non_embedding,
        tokens=result.data.tokens_seen,
        train_loss=result.losses.train,
        validation_loss=run.validation_loss,
        test_loss=run.test_loss,
        test_loss_parts=None if run.diverged else run.test_loss_parts,
        seconds=result.machine.seconds,
        device=result.machine.device,
        threads=result.machine.threads,
        versions=json.dumps(result.machine.versions, sort_keys=True),
        data=result.data.fingerprint,
        token_stream=result.data.token_stream,
        code=result.machine.code,
    )


def _verdict_row(place: Mapping[str, str | None], name: str, scale: ScaleOutcome) -> VerdictRow:
    analysis, model, baseline = scale.statistics, scale.models[name], scale.models[scale.baseline]
    effect = analysis.effects[name]
    formula, arxiv = _origin(model.given, baseline.given)
    low, high = effect.loss_improvement_interval or (None, None)
    seconds = [_median_seconds(each) for each in (model, baseline)]
    return VerdictRow(
        **place,
        model=name,
        change=json.dumps(model.given, sort_keys=True),
        baseline=scale.baseline,
        baseline_change=json.dumps(baseline.given, sort_keys=True),
        formula=formula,
        arxiv=arxiv,
        non_embedding=model.size.non_embedding,
        tokens=scale.tokens_per_run,
        optimizer=_optimizer(scale.comparison["recipe"], model.given),
        seeds=effect.pairs,
        improvement=effect.loss_improvement,
        low=low,
        high=high,
        p=effect.holm_p,
        family=analysis.family or len(analysis.effects),
        verdict=effect.verdict,
        noise=analysis.noise_floor_percent,
        time_ratio=seconds[0] / seconds[1] if all(seconds) else None,
        version=model.runs[0].result.machine.versions.get("nlq", ""),
    )


def _optimizer(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    training = {**(recipe.get("training") or {}), **(given.get("training") or {})}
    if {**recipe, **given}.get("optimizer") == "muon":
        return "muon"
    return training.get("optim") or "adamw"


def _origin(given: Mapping[str, Any], of_baseline: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Returns formulas and arXiv ids of the switches that a model does not share with its baseline."""
    switches, others = (each.get("switches") or {} for each in (given, of_baseline))
    changed = {name: value for name, value in switches.items() if value and value != others.get(name)}
    found = [_describe_switch(name, value) for name, value in changed.items()]
    formulas = [formula for formula, _ in found if formula]
    ids = dict.fromkeys(re.findall(r"arXiv (\d{4}\.\d{4,5})", " ".join(source for _, source in found)))
    return "; ".join(formulas) or None, ", ".join(ids) or None


def _describe_switch(name: str, value: Any) -> tuple[str, str]:
    """Returns the formula of a value, and a text that names its source, as the model's code documents them."""
    rows = LIBRARY_ACTIVATIONS | ATTENTION_ACTIVATIONS if name == "attention_activation" else {}
    if (row := ATTENTION_PARTS.get(name) or rows.get(str(value))) is not None:
        sources = row.source.split(";")
        # A source of some values names them
        of_all = [source for source in sources if not re.search("[(:]", source)]
        of_value = [source for source in sources if re.search(rf"\b{re.escape(str(value))}s?\b", source)]
        return row.formula, " ".join(of_value or of_all)
    name = "query_projection" if name.endswith("_projection") and value != "key" else name
    pattern = rf"^    (?:\w+, )*{re.escape(name)}(?:, \w+)*: (.*?)(?=^    \w|\Z)"
    entry = re.search(pattern, inspect.getdoc(NLQConfig) or "", re.MULTILINE | re.DOTALL)
    text = entry[1] if entry else ""
    token = f'`"{value}"`' if isinstance(value, str) else str(value)
    if (match := re.search(rf'{re.escape(token)}(?:,\s+`([^`]+)`)?([^;"]*)', text)) is None:
        return "", "" if '"' in text else text
    return match[1] or "", match[2]


def _median_seconds(model: ModelOutcome) -> float | None:
    seconds = [run.result.machine.seconds for run in model.finished if run.result.machine.seconds is not None]
    return statistics.median(seconds) if seconds else None


# The most that is read of a table
_MOST_ROWS, _MOST_BYTES = 100_000, 2**28
# The types of columns in parquet, which a table without a single value could not tell
_TYPES = {int: "int64", float: "float64", bool: "bool", str: "string", Verdict: "string"}


def features_of(kind: type[Value]) -> datasets.Features:
    """Returns the columns of a table of rows."""
    columns = {}
    for item in fields(kind):
        plain = next((name for name in _TYPES if item.type in (name, name | None)), None)
        value = datasets.Value("float64" if plain is None else _TYPES[plain])
        columns[item.name] = datasets.List(value) if plain is None else value
    return datasets.Features(columns)


def write_table(rows: list[RunRow] | list[VerdictRow], kind: type[Value], file: Path | BinaryIO) -> None:
    table = pyarrow.Table.from_pylist([asdict(row) for row in rows], schema=features_of(kind).arrow_schema)
    parquet.write_table(table, file)


def read_rows(kind: type[Value], rows: list[dict[str, Any]], source: str) -> list[Any]:
    """Converts rows of a table; raises `ValueError` for a missing column or a value of another type."""
    return [from_json(kind, row, f"{source}: row {index}: ") for index, row in enumerate(rows)]


def read_table(kind: type[Value], file: Path) -> list[Any]:
    """Reads a table that somebody else may have written; raises `ValueError` for too many rows, and as `read_rows`."""
    names = [item.name for item in fields(kind)]
    with open_file(file) as opened:
        try:
            table = parquet.ParquetFile(opened)
            groups = [table.metadata.row_group(index) for index in range(table.metadata.num_row_groups)]
            size = sum(group.total_byte_size for group in groups)
            # The metadata tells the size before rows fill the memory
            if table.metadata.num_rows > _MOST_ROWS or size > _MOST_BYTES:
                held = f"{table.metadata.num_rows:,} rows of {size:,} bytes"
                raise ValueError(f"{file.name}: holds {held}; at most {_MOST_ROWS:,} and {_MOST_BYTES:,} are read")
            rows = table.read(columns=[name for name in names if name in table.schema_arrow.names]).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{file.name} is damaged: {one_line(error)}") from None
    return read_rows(kind, rows, file.name)

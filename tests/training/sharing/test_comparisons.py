"""A comparison on the Hub on loopback: what is published, who reads it, how a stranger repeats it, what is refused."""

import dataclasses
import importlib.util
import io
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import DatasetCard
from support.hub_server import Blob, Repo
from support.own_parts import DISTANCE
from support.paths import REPOSITORY, TESTS
from support.planted import PlantedEngine, gated_is_better
from support.publishing_cases import TOKEN, Worker, check_refused
from support.runs import change_json, write_comparison

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.config import ComparisonConfig
from modeling_nlq.training.comparison.ledger import RunRow, VerdictRow, _origin, ledger_of
from modeling_nlq.training.comparison.publication import read_ledger
from modeling_nlq.training.comparison.report import write_report
from modeling_nlq.training.comparison.results import read_outcome
from modeling_nlq.training.comparison.run import run_comparison
from modeling_nlq.training.comparison.sections import SINGLE


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
RECIPE = {"model": "tiny-linear", "dataset": "synthetic:recall", "switches": SIZES, "parts": ["mine.py"]}
RECIPE |= {"task": {"pairs": 2, "length": 8, "vocabulary": 8, "rows": 400}, "training": {"max_steps": 4}}
MODELS = {"base": {}, "gated": {"switches": {"attention_gate": "headwise"}}}
MODELS["mine"] = {"switches": {"attention_parts": ["distance"]}}
SEEDS = [3, 4, 5, 8, 9]
FILES = {"README.md", "comparison.yaml", "parts/mine.py", "results.md", "runs.parquet", "verdicts.parquet"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder of a finished comparison with a part of its own and planted losses, and its results."""
    home = tmp_path_factory.mktemp("machine")
    (home / "mine.py").write_text(DISTANCE)
    file = write_comparison(home, recipe=RECIPE, models=MODELS, seeds=SEEDS, name="gates")
    folder = home / "compared"
    results = run_comparison(load_plan(file), folder, PlantedEngine(gated_is_better))
    write_report(results, folder)
    return folder, results


@pytest.fixture(scope="module")
def shared(server, nlq, compared):
    nlq.publish(compared[0], "anna/gates")
    return server.files("datasets/anna/gates")


@pytest.fixture
def stranger(server, tmp_path_factory):
    home = tmp_path_factory.mktemp("stranger") / "home"
    worker = Worker(home, {**server.client_environment(home), "HOME": str(home)})
    yield worker, home
    worker.close()


def test_repository_has_these_files_and_no_path_of_the_machine(server, nlq, compared, shared):
    folder, _ = compared
    figures = {path.relative_to(folder).as_posix() for path in folder.glob("figures/*.png")}
    assert figures and shared.keys() == {".gitattributes", *FILES, *figures}
    for name, content in shared.items():
        assert str(folder.parent).encode() not in content, name
    before = server.commits("datasets/anna/gates")
    planned = nlq.publish(folder, "anna/gates", "--dry-run")
    assert planned.sizes == {name: len(data) for name, data in shared.items() if name != ".gitattributes"}
    nlq.publish(folder, "anna/gates")
    assert server.commits("datasets/anna/gates") == before, "the same again is no commit"
    card = DatasetCard(shared["README.md"].decode(), ignore_metadata_errors=False)
    assert [each["config_name"] for each in card.data.to_dict()["configs"]] == ["verdicts", "runs"]
    for text in ("nlq compare anna/gates", "https://arxiv.org/abs/2505.06708", "## Limits", "0.01", "Better: gated."):
        assert text in card.text, text
    written = yaml.safe_load(shared["comparison.yaml"])
    assert written["seeds"] == SEEDS and written["recipe"]["parts"] == ["parts/mine.py"]
    assert shared["parts/mine.py"].decode() == DISTANCE


def test_pandas_and_datasets_read_the_tables(stranger, compared, shared, tmp_path):
    rows = ledger_of(compared[1])
    for name, kind, expected in (("runs", RunRow, rows.runs), ("verdicts", VerdictRow, rows.verdicts)):
        frame = pd.read_parquet(io.BytesIO(shared[f"{name}.parquet"]))
        assert [*frame.columns] == [field.name for field in dataclasses.fields(kind)] and len(frame) == len(expected)
        for column in ("model", "seed", "test_loss") if name == "runs" else ("model", "improvement"):
            assert frame[column].tolist() == [getattr(row, column) for row in expected]
    code = """
import datasets
for name, columns in (("runs", ("seed", "test_loss")), ("verdicts", ("model", "verdict"))):
    table = datasets.load_dataset("anna/gates", name, split="train")
    table.select_columns(list(columns)).to_json(f"{arguments[0]}/{name}.jsonl")
"""
    stranger[0].python(code, tmp_path)
    runs, verdicts = (pd.read_json(tmp_path / f"{name}.jsonl", lines=True) for name in ("runs", "verdicts"))
    assert runs.values.tolist() == [[row.seed, pytest.approx(row.test_loss)] for row in rows.runs]
    assert verdicts.values.tolist() == [[row.model, row.verdict] for row in rows.verdicts]


def test_the_registry_holds_the_published_results(tmp_path):
    spec = importlib.util.spec_from_file_location("registry", REPOSITORY / "docs" / "registry.py")
    spec.loader.exec_module(registry := importlib.util.module_from_spec(spec))
    assert REPOSITORY / "docs/results/ladder/queries" in (folders := registry.comparisons())
    assert not any("screening/2026" in str(folder) for folder in folders)
    written = registry.write(REPOSITORY / "docs/results/muon", tmp_path)
    runs, verdicts = (
        datasets.load_dataset("parquet", data_files=str(written / f"{name}.parquet"), cache_dir=tmp_path)["train"]
        for name in ("runs", "verdicts")
    )
    (verdict,) = verdicts
    reported = pd.DataFrame(runs).query("is_reported").pivot(index="seed", columns="model", values="test_loss")
    change = 100 * (1 - reported["muon"].mean() / reported["adamw"].mean())
    assert verdict["improvement"] == pytest.approx(change) and verdict["seeds"] == len(reported) == 3
    assert read_ledger(str(written)).verdicts == read_ledger(str(REPOSITORY / "docs/results/muon")).verdicts


# The command in another working directory, where losses are planted as they are here
REPEAT = """
import os
import sys

folder, tests, *arguments = arguments
os.chdir(folder)
sys.path.append(tests)
from support.planted import PlantedEngine, gated_is_better

from modeling_nlq.training.comparison import run
from nlq import main

run.make_engine = lambda *_, **options: PlantedEngine(gated_is_better)
raise SystemExit(main(arguments))
"""


def repeat(worker: Worker, folder: Path, *arguments: object, code: str = REPEAT):
    worker.begin((folder, TESTS, *arguments), code)
    return worker.end()


def test_a_stranger_repeats_it_with_other_seeds(server, shared, stranger):
    worker, home = stranger
    check_refused(repeat(worker, home, "compare", "anna/gates"), "holds code", "mine.py", "--trust-parts")
    assert not (home / "runs").exists()
    done = repeat(worker, home, "compare", "anna/gates", "--trust-parts")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "anna/gates: published with the seeds 3 4 5 8 9, and repeated with 10 11 12 13 14"
    assert "15 runs" in done.out and "differs" not in done.err
    table = lines[next(index for index, line in enumerate(lines) if "published: improvement" in line) :]
    assert re.fullmatch(r"gated +\+3\.\d\d \[.*\], better +\+3\.\d\d \[.*\], better", table[1]), table
    assert re.fullmatch(r"mine +.*, within noise +.*, within noise", table[2]), table
    # Both have the same file and text, so all ten pairs are one analysis
    pooled = lines[lines.index("both together:") + 1]
    assert re.fullmatch(r"gated: \+3\.\d\d \[.*\] % over 10 seeds, Holm p < 0\.0001: better", pooled), pooled
    folder = home / "runs" / "compare-gates"
    assert yaml.safe_load((folder / "comparison.yaml").read_text())["seeds"] == [10, 11, 12, 13, 14]
    assert json.loads((folder / "results.json").read_text())["command"] == "nlq compare anna/gates"
    # The published comparison and this one by their names; the numbers are those of test_pooling.py
    both = repeat(worker, home, "pool", "anna/gates", folder, "--model", "gated")
    assert both.status == 0, both.err
    assert pooled.split(" % over")[0].removeprefix("gated: ") in both.out and "all seeds as one analysis" in both.out
    check_refused(repeat(worker, home, "pool", "anna/gates", "anna/gates", "--model", "gated"), "anna/gates")
    # Without network, from the cache: the same seeds, so no run is made again
    offline = REPEAT.replace(
        "raise", "from huggingface_hub import constants\n\nconstants.HF_HUB_OFFLINE = True\nraise"
    )
    again = repeat(worker, home, "compare", "anna/gates", "--trust-parts", code=offline)
    assert again.status == 0 and again.out == done.out, again.err
    status = repeat(worker, home, "compare", "anna/gates", "--status", code=offline)
    assert status.status == 0 and "15 of 15 runs finished" in status.out
    check_refused(repeat(worker, home, "compare", "anna/none", code=offline), "anna/none", "HF_HUB_OFFLINE")


def test_original_seeds_and_a_path_that_wins(compared, shared, stranger):
    worker, home = stranger
    arguments = ("anna/gates", "--trust-parts", "--seeds", "original", "--output_dir", "same")
    done = repeat(worker, home, "compare", *arguments)
    assert done.status == 0, done.err
    rows = [
        [run["test_loss"] for run in frame.to_dict("records")]
        for frame in (
            pd.DataFrame([dataclasses.asdict(row) for row in ledger_of(outcome).runs])
            for outcome in (compared[1], read_outcome(home / "same" / "results.json"))
        )
    ]
    assert rows[0] == rows[1]
    (home / "anna" / "gates").mkdir(parents=True)
    check_refused(repeat(worker, home, "compare", *arguments[:2]), "'anna/gates' is neither a file nor a shipped name")
    check_refused(repeat(worker, home, "compare", "demo", "--seeds", "fresh"), "--seeds fresh", "demo")


def test_another_text_is_named_before_training(server, shared, stranger):
    worker, home = stranger
    table = pq.read_table(io.BytesIO(shared["runs.parquet"]))
    place = table.schema.get_field_index("data")
    table = table.set_column(place, "data", pa.array(["another"] * len(table)))
    put(server, shared, "anna/text", {"runs.parquet": parquet(table)})
    code = REPEAT.replace("PlantedEngine(gated_is_better)", "PlantedEngine(gated_is_better, most_runs=0)")
    done = repeat(worker, home, "compare", "anna/text", "--trust-parts", code=code)
    assert "the text differs from that of anna/text (fingerprint another there, planted here)" in done.err
    assert done.status != 0 and "Interrupted" in done.err


def parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def put(server, shared: dict[str, bytes], name: str, changes: dict[str, bytes | None]) -> None:
    """Makes a data set of the Hub from the published one, with other files; `None` leaves one out."""
    files = {path: Blob(data) for path, data in {**shared, **changes}.items() if data is not None}
    repo = server._repos.setdefault(f"datasets/{name}", Repo(f"datasets/{name}", private=False))
    repo.commit("main", files)


def with_fields(**fields: object):
    """Changes fields of the comparison, or with the prefix `recipe__` of its recipe."""

    def change(shared: dict[str, bytes]) -> dict[str, bytes]:
        content = yaml.safe_load(shared["comparison.yaml"])
        for name, value in fields.items():
            section, _, last = name.rpartition("__")
            (content[section] if section else content)[last] = value
        return {"comparison.yaml": yaml.safe_dump(content).encode()}

    return change


def with_column(table: str, name: str, value: object):
    """Changes all values in a column of a table, or without a value drops it."""

    def change(shared: dict[str, bytes]) -> dict[str, bytes]:
        frame = pd.read_parquet(io.BytesIO(shared[f"{table}.parquet"]))
        frame = frame.drop(columns=name) if value is None else frame.assign(**{name: value})
        return {f"{table}.parquet": parquet(pa.Table.from_pandas(frame))}

    return change


def with_text(text: str):
    return lambda shared: {"comparison.yaml": text.encode()}


MILLION = parquet(pa.table({"seed": pa.array([0] * 1_000_000, pa.int8())}))
BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
# What is done to a published comparison, and words of the one line
HOSTILE = {
    "python tag": (with_text("!!python/object/apply:os.mkdir [owned]\n"), ("comparison.yaml", "python/object")),
    "aliases": (with_text(BOMB), ("aliases repeat them",)),
    "huge": (lambda _: {"comparison.yaml": b"#" * (2**26 + 1)}, ("comparison.yaml has 67,108,865 bytes",)),
    "recipe of a file": (with_fields(recipe="../secret.yaml"), ("'../secret.yaml'", "must be the fields")),
    "text of a file": (with_fields(recipe__dataset="/etc/words.txt"), ("recipe.dataset", "another machine")),
    "part outside": (with_fields(recipe__parts=["../mine.py"]), ("'../mine.py'", "parts/NAME.py")),
    "part above": (with_fields(recipe__parts=["parts/../../mine.py"]), ("must be made of",)),
    "absolute part": (with_fields(recipe__parts=["/etc/mine.py"]), ("'/etc/mine.py'",)),
    "code in the file": (with_fields(recipe__parts={"mine.py": "import os"}), ("must be a list of files",)),
    "part that is missing": (with_fields(recipe__parts=["parts/other.py"]), ("no parts/other.py",)),
    "name outside": (with_fields(name="../../outside"), ("'../../outside'", "must be made of")),
    "HTML": (with_fields(models={"base": {}, "<img src=x>": {}}), ("'<img src=x>'", "must be made of")),
    "control": (with_fields(models={"base": {}, "\x1b[2J": {}}), (r"\x1b[2J", "must be made of")),
    "screening": (with_fields(models=None, baseline=None, factors={"a": {}, "b": {}}), ("is a screening",)),
    "no column": (with_column("verdicts", "model", None), ("verdicts.parquet", "model is missing")),
    "text for a number": (with_column("runs", "seed", "<b>"), ("seed='<b>'", "whole number")),
    "infinite": (with_column("verdicts", "improvement", math.inf), ("improvement=inf", "finite")),
    "verdict": (with_column("verdicts", "verdict", "better\nmuch"), ("verdict='better\\nmuch'", "or 'worse'")),
    "other model": (with_column("verdicts", "model", "\x1b[2J"), (r"\x1b[2J", "comparison.yaml does not")),
    "a million rows": (lambda _: {"runs.parquet": MILLION}, ("runs.parquet", "1,000,000 rows", "100,000")),
    "no parquet": (lambda _: {"runs.parquet": b"PAR1 but no more"}, ("runs.parquet is damaged",)),
    "no table": (lambda _: {"runs.parquet": None}, ("there is no runs.parquet",)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_repositories_get_one_line(name, server, nlq, shared, tmp_path):
    change, words = HOSTILE[name]
    put(server, shared, "anna/hostile", change(shared))
    done = nlq("compare", "anna/hostile", "--trust-parts", "--output_dir", tmp_path / "out")
    check_refused(done, *words)
    assert list(tmp_path.iterdir()) == [] and not (nlq.home / "owned").exists() and "\x1b" not in done.err


def unfinish(folder: Path) -> None:
    (folder / "results.json").unlink()


def add_a_seed(folder: Path) -> None:
    path = folder / "comparison.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "seeds": [*SEEDS, 10]}))


def name_a_model(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "comparison.yaml").unlink()
        change_json(folder / "results.json", comparison__recipe__model=name)

    return damage


def leave_a_token(folder: Path) -> None:
    content = json.loads((folder / "results.json").read_text())
    content["scales"]["(single)"]["models"]["gated"]["runs"][0]["result"]["machine"]["device"] = TOKEN
    (folder / "results.json").write_text(json.dumps(content))


REFUSED = {
    "unfinished": (unfinish, (), ("not finished", "results.json")),
    "more seeds": (add_a_seed, (), ("not finished", "3 4 5 8 9 10")),
    "screening": (lambda folder: change_json(folder / "results.json", design={}), (), ("is a screening",)),
    **{
        name: (name_a_model(name), (), ("recipe.model", "on this machine alone"))
        for name in ("/models/up", "../models/up", "./up", "runs/a/b", "~/models/up", "up.json")
    },
    "token": (leave_a_token, (), ("runs.parquet, line", "token of Hugging Face")),
    "card": (lambda _: None, ("--card", "card.md"), ("card='card.md' is for a model",)),
    "adapter": (lambda _: None, ("--adapter",), ("adapter=True is for a model",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_published(name, compared, refuses, tmp_path):
    damage, options, words = REFUSED[name]
    folder = shutil.copytree(compared[0], tmp_path / "compared")
    damage(folder)
    refuses(folder, "anna/refused", *options, words=words, without=TOKEN)


def test_what_only_an_earlier_publication_uploaded_is_deleted(server, nlq, compared, shared, tmp_path):
    stale = {"figures/old.png": b"old", "parts/old.py": b"old", "analysis.py": b"mine", "data/mine.parquet": b"mine"}
    put(server, shared, "anna/again", stale)
    folder = shutil.copytree(compared[0], tmp_path / "compared")
    nlq.publish(folder, "anna/again", "--license", "cc-by-4.0")
    files = server.files("datasets/anna/again")
    assert files.keys() == {*shared, "analysis.py", "data/mine.parquet"}
    assert DatasetCard(files["README.md"].decode()).data.license == "cc-by-4.0"


@pytest.mark.parametrize(
    "recipe, given, expected",
    [
        ({}, {}, "adamw"),
        ({"optimizer": "muon"}, {}, "muon"),
        ({"optimizer": "muon"}, {"optimizer": None}, "adamw"),
        ({"training": {"optim": "sgd"}}, {"optimizer": "muon", "training": {}}, "muon"),
        ({"training": {"optim": "adafactor"}}, {"training": {"optim": "sgd"}}, "sgd"),
        ({"optimizer": "muon"}, {"optimizer": "adamw", "training": {"optim": "sgd"}}, "sgd"),
    ],
)
def test_tables_name_the_optimizer_of_a_model(compared, recipe, given, expected):
    outcome = compared[1]
    scale = outcome.largest
    model = dataclasses.replace(scale.models["gated"], given=scale.models["gated"].given | given)
    comparison = {**scale.comparison, "recipe": {**scale.comparison["recipe"], **recipe}}
    changed = dataclasses.replace(scale, comparison=comparison, models={**scale.models, "gated": model})
    rows = ledger_of(dataclasses.replace(outcome, scales={SINGLE: changed})).verdicts
    assert [row.optimizer for row in rows if row.model == "gated"] == [expected]


@pytest.mark.parametrize("axis", ["scales", "conditions"])
def test_equal_seeds_stay_equal_over_scales(axis):
    places = {"a": {"seeds": [0, 7]}, "b": {"seeds": [7, 2]}, "c": {}}
    content = {"recipe": {}, "baseline": "x", "models": {"x": {}, "y": {}}, "seeds": [0, 1], axis: places}
    fresh = ComparisonConfig.read(content, "file").with_fresh_seeds()
    assert fresh.seeds == [8, 9] and [each.seeds for each in fresh.scale_configs.values()] == [[8, 11], [11, 10], None]


def test_seeds_after_the_largest_are_the_smallest():
    content = {"recipe": {}, "baseline": "x", "models": {"x": {}, "y": {}}, "seeds": [2**32 - 2, 0, 2, 2**32 - 3]}
    assert ComparisonConfig.read(content, "file").with_fresh_seeds().seeds == [4, 2**32 - 1, 1, 3]


def papers_in_the_documentation() -> list[tuple[str, str, set[str]]]:
    """Switches and values in the tables of the documentation, with the papers in their rows."""
    rows = []
    for file in ("attention", "parts"):
        for line in (REPOSITORY / "docs" / f"{file}.md").read_text().splitlines():
            papers = set(re.findall(r"(?:abs/|arXiv )(\d{4}\.\d{5})", line))
            if not papers:
                continue
            if file == "attention" and (match := re.match(r"\| `(\w+)` \| `", line)):
                rows.append(("attention_activation", match[1], papers))
            elif match := re.match(r"\|[^|]*\| `(\w+)`: ((?:`\w+`(?:, )?)+) \|", line):
                rows += [(match[1], value, papers) for value in re.findall(r"`(\w+)`", match[2])]
    return rows


@pytest.mark.parametrize("switch, value, papers", papers_in_the_documentation())
def test_papers_are_those_of_the_documentation(switch, value, papers):
    formula, found = _origin({"switches": {switch: True if value == "True" else value}}, {})
    assert formula and set((found or "").split(", ")) - {""} <= papers
    assert found or value == "rms", "QK-norm of Qwen 3 has no paper"


def test_papers_of_other_switches():
    given = {
        "switches": {"query_projection": "nonlinear", "mlp_type": "gated", "norm_type": "rmsnorm", "use_bias": True}
    }
    shared = {"switches": {"norm_type": "rmsnorm"}}
    expected = ("X + f(X); (act(X W_gate) * X W_up) W_down", "2603.13381, 2002.05202")
    assert _origin(given, shared) == expected
    assert _origin({"switches": {"key_projection": "nonlinear"}}, {})[1] == "2603.13381"
    assert _origin({"training": {"weight_decay": 0.1}}, {}) == (None, None)

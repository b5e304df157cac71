"""Snippets of the documents run as they stand, one after the other, and tables are those in the code."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from support.client_cases import SIZES, make_tokenizer
from support.hub_server import HubServer
from support.own_parts import IDEAS
from support.paths import REPOSITORY

from modeling_nlq import (
    ATTENTION_ACTIVATIONS,
    NLQConfig,
    NLQForCausalLM,
    NLQForMaskedLM,
    activations_nlq,
    load_attention_parts,
)
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS
from modeling_nlq.parts_builtin_nlq import ATTENTION_PARTS
from modeling_nlq.training.run.recipe import read_overrides
from nlq import app


README = REPOSITORY / "README.md"
DOCUMENTS = REPOSITORY / "docs"


def snippets(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)


def test_snippets_run(run, tmp_path, monkeypatch):
    shutil.copytree(run[0], tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    names = {}
    for document, count in ((README, 2), (DOCUMENTS / "switches.md", 1), (DOCUMENTS / "training.md", 3)):
        assert len(snippets(document)) == count
        for snippet in snippets(document):
            exec(compile(snippet, document.name, "exec"), names)
    assert names["other"].config.attention_activation == "sigmoid" != names["model"].config.attention_activation
    assert (tmp_path / "shared" / "modeling_nlq.py").is_file()
    assert names["loaded"].config.num_labels == 2


@pytest.mark.slow
def test_snippets_of_encoders_and_pairs_run(tmp_path, monkeypatch, capsys):
    tokenizer, folder = make_tokenizer(), tmp_path / "runs"
    tokenizer.save_pretrained(folder / "demo")
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    tokenizer.save_pretrained(folder / "masked-demo")
    config = NLQConfig(**SIZES, is_causal=False, pad_token_id=tokenizer.pad_token_id)
    NLQForMaskedLM(config).save_pretrained(folder / "masked-demo")
    monkeypatch.chdir(tmp_path)
    printed = []
    for page in ("encoders.md", "encoder_decoder.md"):
        names = {}
        for snippet in snippets(DOCUMENTS / page):
            exec(compile(snippet, page, "exec"), names)
        printed.append(capsys.readouterr().out.splitlines()[-1])
    assert float(printed[0]) > 0.7 and "torch.Size([2, " in printed[1]
    for name, code in (("lines", "modeling_nlq.py"), ("reversed", "modeling_seq2seq_nlq.py")):
        assert {code, "tokenizer.json"} <= {path.name for path in (folder / name).iterdir()}


@pytest.mark.slow
def test_snippets_of_the_other_side(run, tmp_path):
    """Snippets that load a published model run in a process without this package, on a local Hub."""
    shared = snippets(DOCUMENTS / "conversion.md")
    assert len(shared) == 2
    with HubServer({"hf_you": "you"}) as server:
        environment = {**os.environ, **server.client_environment(tmp_path / "home", "hf_you"), "PYTHONPATH": ""}
        publish = [sys.executable, "-m", "nlq", "publish", str(run[0]), "you/demo"]
        done = subprocess.run(publish, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        # Trainer needs accelerate, and the snippet datasets
        code = 'import sys\nsys.modules["modeling_nlq"] = None\n' + "".join(shared) + "print(tuple(features.shape))\n"
        environment = {**os.environ, **server.client_environment(tmp_path / "other", "hf_you"), "PYTHONPATH": ""}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("import ") and done.stdout.splitlines()[-1].startswith("(1, ")
        assert {"modeling_nlq.py", "model.safetensors", "tokenizer.json"} <= server.files("you/mine").keys()


@pytest.mark.slow
def test_notebook_runs(tmp_path, monkeypatch):
    cells = json.loads((DOCUMENTS / "quickstart.ipynb").read_text())["cells"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = {}
    for cell in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        if cell.startswith("!nlq "):
            subprocess.run([sys.executable, "-m", *cell.removeprefix("!").split()], check=True)
        else:
            exec(compile(cell, "quickstart.ipynb", "exec"), names)
    assert names["results"].largest.statistics.effects.keys() == {"my_idea"} and len(names["panels"]) == 2


PAGES = [*sorted(REPOSITORY.glob("[A-Z]*.md")), *sorted(DOCUMENTS.glob("*.md")), *sorted(DOCUMENTS.glob("[ir]*/*.md"))]


def test_a_new_python_block_needs_a_test_that_runs_it():
    """All are run: here, by test_python and test_checking, and by test_pages and test_peft of tests/clients."""
    assert ", ".join(f"{page.stem} {len(snippets(page))}" for page in PAGES if snippets(page)) == (
        "README 2, adapters 3, attention 1, conversion 2, distributed 1, encoder_decoder 3, encoders 3, export 3, "
        "own_parts 4, python 7, serving 2, switches 1, training 3"
    )


def test_examples_of_own_parts_are_those_that_nlq_check_tests(tmp_path):
    """They run as they stand, and `test_checking.py` tests the same files. The README has one without its formula."""
    ideas = {name: path.read_text().partition('"""\n\n')[2] for name, path in IDEAS.items()}
    blocks = snippets(DOCUMENTS / "own_parts.md")
    assert len(blocks) == 4
    for block in blocks:
        name = re.search(r'name = "(\w+)"', block)[1]
        assert block == ideas[name]
        (tmp_path / f"my_{name}.py").write_text(block.replace(f'"{name}"', f'"my_{name}"'))
        (part,) = load_attention_parts(tmp_path / f"my_{name}.py")
        model = NLQForCausalLM(NLQConfig(**SIZES, attention_parts=[part.name]))
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    shown = set(snippets(README)[0].splitlines()) - {"# my_idea.py"}
    assert shown <= set(ideas["gate"].replace('"gate"', '"my_idea"').splitlines())
    assert len(set(ideas["gate"].splitlines())) == len(shown) + 1


_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def test_the_readme_is_one_screen():
    """Counts words as `wc` does, and numbers also in code and links."""
    text = README.read_text()
    assert len(text.split()) <= 900 and len(_NUMBER.findall(text)) <= 25
    findings = text.partition("## What we found")[2].partition("## ")[0]
    assert len(findings.split()) <= 150 and len(_NUMBER.findall(findings)) <= 10


def test_pages_stay_short():
    assert sum(len(page.read_text().split()) for page in (*PAGES, REPOSITORY / "model_card.md")) <= 30_000


def headings(document: Path) -> set[str]:
    """Returns the names that GitHub gives to the headings of a document."""
    titles = re.findall(r"^#+ (.*)", document.read_text(), flags=re.MULTILINE)
    titles = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(document):
    for target, heading in re.findall(r"(?:\]\(|src=\")(?!https?:)([^)#\"]*)#?([^)\"]*)[)\"]", document.read_text()):
        path = document.parent / target if target else document
        assert path.exists(), target
        assert not heading or heading in headings(path), f"{target}#{heading}"


def table(rows) -> str:
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def test_tables_are_those_of_the_code():
    attention, parts = ((DOCUMENTS / f"{name}.md").read_text() for name in ("attention", "parts"))
    rows = [
        (
            f"`{row.name}`",
            f"`{row.formula}`",
            f"`{row.normalization}`",
            "yes" if row.non_negative else "no",
            row.source,
        )
        for row in ATTENTION_ACTIVATIONS.values()
    ]
    assert table(rows) in attention
    for name in ATTENTION_PARTS:
        assert re.search(rf"^\| .*\| `{name}", parts, flags=re.MULTILINE), name
    dropout = {True: "yes", False: "an error"}
    weights = {"returned": "yes", "omitted": "`None`, with a warning", "refused": "an error"}
    # A row is found by its first column
    lines = {line.partition(" | ")[0]: line for line in attention.splitlines()}
    for name, backend in ATTENTION_BACKENDS.items():
        shown = "`flash_attention_2`, `_3`, `_4`" if name.startswith("flash") else f"`{name}`".replace("|", "\\|")
        assert lines[f"| {shown}"].endswith(f" | {dropout[backend.has_dropout]} | {weights[backend.weights]} |"), name


def test_an_activation_of_your_own(tmp_path, monkeypatch):
    monkeypatch.setattr(activations_nlq, "_REGISTERED", {})
    (tmp_path / "snippets.py").write_text("".join(snippets(DOCUMENTS / "attention.md")))
    names = runpy.run_path(str(tmp_path / "snippets.py"))
    tokens = torch.randint(100, (1, 6))
    assert names["model"](tokens, labels=tokens).loss.isfinite()


COMMANDS = [
    (page, line)
    for page in PAGES
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("nlq ") and "$options" not in line
]


@pytest.mark.parametrize(
    "page, line", COMMANDS, ids=[f"{page.stem}-{index}" for index, (page, _) in enumerate(COMMANDS)]
)
def test_commands_are_understood(page, line):
    """Options exist, and a recipe, `TrainingArguments` or the model has the fields."""
    command, (name, *words) = typer.main.get_command(app), shlex.split(line.partition(" > ")[0], comments=True)[1:]
    context = command.commands[name].make_context(name, words, parent=command.make_context("nlq", [name]))
    assert read_overrides(context.args).get("switches", {}).keys() <= NLQConfig().to_dict().keys()

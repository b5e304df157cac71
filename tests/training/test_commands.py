"""The command lines of the pages run as they stand, but for two steps and seeds, on a part of the corpus, and without
a Hub.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from support.client_cases import small_model
from support.inline_engine import InlineEngine
from support.lm_eval_command import write_task
from support.paths import REPOSITORY
from transformers import GPT2Config, LlamaConfig

from modeling_nlq.training.comparison import run as comparisons
from modeling_nlq.training.run import documents
from nlq import main


# Pages or parts of lines that are not run, and why. Every other line that begins with `nlq` is
NOT_RUN = {
    "scaling.md": "needs a cluster; tests/cluster runs them",
    "pretrained.md": "needs the weights of `make test-weights`",
    "--tasks arc_easy": "needs data of the Hub",
    ".gguf": "needs weights of the Hub",
    "out/ckpt.pt": "needs a checkpoint of nanoGPT; tests/training/conversion has one",
    "--lora": "needs PEFT; tests/clients has it",
    "--adapter": "needs PEFT; tests/clients has it",
    "--block_size 8192": "needs the whole corpus, and minutes",
    "EuroBERT-folder": "needs weights of the Hub",
}


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[str]:
    lines = [line for block in fenced(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    return [
        line
        for line in lines
        if line.startswith("nlq ") and not any(part in f"{page.name} {line}" for part in NOT_RUN)
    ]


PAGES = [page for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))) if commands(page)]
# Files that a page names and another one shows, by their first line
FILES = {
    match[1]: block
    for page in PAGES
    for block in fenced(page, "yaml")
    if (match := re.match(r"# ([\w-]+\.yaml)\n", block))
}
FILES["my-encoders.yaml"] = f"{FILES['my-comparison.yaml']}switches: {{is_causal: false}}\n"


def is_needed(name: str, lines: list[str]) -> bool:
    makes = rf"train {name}(?!.*output_dir)|(output_dir|convert \S+) runs/{name}\b"
    return f"runs/{name}" in str(lines) and not any(re.search(makes, line) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run(page, run, corpus, small_index, tmp_path, monkeypatch):
    small_files = [path for path in documents.python_files() if path.stat().st_size < 2000]
    monkeypatch.setattr(documents, "python_files", lambda: small_files)
    monkeypatch.setattr(comparisons, "LocalEngine", InlineEngine)
    monkeypatch.setenv("NLQ_TRACEBACK", "1")
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path)
    own = {match[1]: block for block in fenced(page, "yaml") if (match := re.match(r"# ([\w-]+\.yaml)\n", block))}
    for name, text in {**FILES, **own}.items():
        text = text.replace("seeds: [0, 1, 2, 3, 4]", "seeds: [0, 1]").replace("factor: 2}", "factor: 2, limit: 3}")
        Path(name).write_text(text)
    shutil.copy(corpus, "my-text.jsonl")
    Path("my-text.txt").write_text("import json\n")
    Path("function.py").write_text("def add(a, b):\n    return a + b\n")
    Path("pairs.jsonl").write_text(
        "".join(f'{{"german": "Guten Tag {n}", "english": "Good day {n}"}}\n' for n in range(300))
    )
    small_model(Path("openai-community/gpt2"), GPT2Config)
    lines = commands(page)
    for name in ("demo", "sigmoid", "study"):
        if is_needed(name, lines):
            shutil.copytree(run[0], f"runs/{name}")
    for name, config_class in {"gpt2": GPT2Config, "smollm2": LlamaConfig}.items():
        if is_needed(name, lines):
            small_model(Path("sources", name), config_class)
            lines.insert(0, f"nlq convert sources/{name} runs/{name}")
    if is_needed("docstring-demo", lines):
        lines.insert(0, "nlq train docstring-demo")
    for line in lines:
        name, *words = shlex.split(re.sub(r"--max_steps \d+", "", line), comments=True)[1:]
        if words[0] == "you/mine":  # of the Hub: sharing/test_comparisons.py
            continue
        if name in ("train", "compare") and not {"--dry-run", "--status"} & set(words):
            words += ["--max_steps", "2", "--bf16", "false"]  # emulated on older CPUs
        if name == "publish":
            words += ["--dry-run"]
        assert main([name, *words]) in (0, None), line

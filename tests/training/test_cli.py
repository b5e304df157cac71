"""The command line: what it accepts, its tables, its help, and one line for each error."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from support.paths import REPOSITORY

from nlq import main


# Exit status, command, and what its error says. No command changes a file
BAD_INPUT = r"""
2 | trian | No such command 'trian'
2 | train | Missing argument 'recipe'; see nlq train --help
2 | train demo --engine spark | '--engine' | 'spark' | 'local', 'ray'
2 | generate finished x --seed | '--seed' requires an argument
2 | generate finished x y | unexpected extra argument(s) (y)
1 | explore finished --text a --file b | give either --text TEXT or --file FILE
2 | convert finished out --no-upcycle | No such option: --no_upcycle | --upcycle
1 | train domo | 'domo' | 'demo'
1 | train demo --cpus_per_worker 2 --max-retries 1 | cpus_per_worker, max_retries: only the engine 'ray' has that
1 | train demo extra | cannot read 'extra'
1 | train demo --learning_rate fast | learning_rate | 'fast'
1 | train demo --max_validation_documents 0 | max_validation_documents=0 must be at least 1
1 | train demo --lr 1e-3 | unknown field 'lr'; did you mean 'learning_rate' or
1 | train demo --report_to clearml | report_to=clearml | to be installed | report_to: none
1 | train demo --set attention_activation=softmx | attention_activation='softmx' | sigmoid
1 | train demo --dataset owner/nothing-there | 'owner/nothing-there'
1 | train demo --set qk_norm=l2 --set qk_norm=rms | --set qk_norm is given twice
1 | train demo --model runs/nothing-there | 'runs/nothing-there' is not a local folder; runs has no saved models
1 | train demo --model owner/nothing-there | 'owner/nothing-there' is not a local folder and cannot
1 | train study --tokenizer bpe:9000 --set position_embedding=learned --block_size 300 | vocab_size | block_size=300
1 | train demo --set attention_activaton=relu | 'attention_activaton' | did you mean 'attention_activation'?
1 | train demo --dataset fine.jsonl | leaves none of 1 document for the split | validation_fraction=0.0
1 | train demo --dataset nosuch.jsonl | 'nosuch.jsonl': there is no such file in
1 | train demo --dataset void.csv | dataset 'void.csv' is empty
1 | train demo --dataset torn.jsonl | 'torn.jsonl' cannot be read: line 2 is not JSON: Invalid control character
1 | train demo --attn_implementation sdpa --set attention_activation=relu | 'sdpa' | eager
1 | train demo --attn_implementation flash_attention_2 | FlashAttention2
1 | train unknown.yaml | unknown.yaml | 'learning_speed' | training
1 | compare demo --noise-floor 1 | --noise-floor needs --dry-run
1 | compare demo.yaml | neither a file nor a shipped name; did you mean 'demo'?
1 | train unknown | did you mean the file unknown.yaml?
1 | compare demo --status | holds no comparison yet
1 | generate runs/nothing-there x | 'runs/nothing-there' | is not a local folder
1 | generate model.gguf x | 'model.gguf' is a GGUF file | nlq convert model.gguf TARGET
1 | generate half x | half lacks config.json: it is not a saved model, or its training did not finish
1 | publish nothing-there you/demo | there is no folder nothing-there
1 | generate finished x --max_new_tokens 70 | max_new_tokens=70 | 64 positions
1 | generate finished "" | prompt is empty
1 | generate finished x --parts none.py | none.py cannot be read
1 | evaluate finished --block_size 0 | block_size=0 must be at least 2
1 | evaluate finished --batch_size 0 | batch_size=0
1 | generate finished x --max-new-tokens 0 | max_new_tokens=0 must be at least 1
1 | evaluate finished --tasks arc_easy --block_size 9 | --block_size is for text, and cannot be given with --tasks
1 | evaluate finished --dataset fine.jsonl --validation_fraction nan | validation_fraction=nan must be between 0 and 1
1 | params tiny-linear --context 0 | context=0 must be at least 1
1 | params tiny-liner | 'tiny-liner' | 'tiny-linear'
1 | params tiny-linear --match 10 | no MLP width
1 | convert finished out --set a | 'a' must have the form switch=value
1 | convert half out | half lacks config.json: it is not a saved model, or its training did not finish
1 | publish finished you/demo --space --adapter | --adapter and --space exclude each other
""".strip().splitlines()


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    (folder / "fine.jsonl").write_text('{"text": "one document"}\n')
    (folder / "torn.jsonl").write_text('{"text": "one"}\n{"text": "two\n{"text": "three"}\n')
    (folder / "void.csv").touch()
    (folder / "unknown.yaml").write_text("model: tiny-linear\ntraining: {learning_speed: 1}\n")
    (folder / "half").mkdir()
    shutil.copytree(run[0], folder / "finished", ignore=shutil.ignore_patterns("checkpoint-*", "runs"))
    return folder


@pytest.mark.parametrize("case", BAD_INPUT, ids=lambda case: case.split("|")[1].strip())
def test_bad_input_gets_one_line(case, folder, monkeypatch, capsys):
    status, command, *parts = (cell.strip() for cell in case.split("|"))
    monkeypatch.chdir(folder)
    shutil.rmtree("runs", ignore_errors=True)  # an earlier command may have begun a run
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(shlex.split(command)) == int(status)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nlq: error: ")]
    assert len(errors) == 1 and all(part in errors[0] for part in parts), errors
    assert {path: path.read_bytes() for path in before} == before


HELP = "import nlq; nlq.main(['--help']); nlq.main(['generate', '--help']); nlq.main(['generate'])"
TRAINING = "modeling_nlq.training"


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "code, absent",
    [
        (HELP, ["modeling_nlq", "torch"]),
        (f"import {TRAINING}.api", [f"{TRAINING}.explorer", f"{TRAINING}.comparison"]),
    ],
    ids=["help and wrong arguments", "train"],
)
def test_imports_no_more_than_it_needs(code, absent):
    assert run_python(f"import sys; {code}; print({{*{absent}}} & {{*sys.modules}})").endswith("set()\n")


def test_help_in_groups(capsys):
    groups = {"Try an idea": "new check", "Train and compare": "train compare pool", "Set up": "build"}
    groups |= {"Use and measure": "generate evaluate explore params", "Convert and share": "convert publish"}
    assert main(["--help"]) == 0
    for group, text in re.findall(r"─ (\w+(?: \w+)+) ─.*\n([^╰]*)", capsys.readouterr().out):
        assert re.findall(r"^│ (\w+)", text, flags=re.MULTILINE) == groups.pop(group).split()
    assert not groups
    assert main([]) == 0 and " Usage: nlq [OPTIONS] COMMAND" in capsys.readouterr().out
    assert main(["train", "-h"]) == 0 and "Usage: nlq train [OPTIONS]" in capsys.readouterr().out


COMPLETED = {
    "nlq tra": "train\n",
    "nlq train demo --engine ": "local\nray\n",
    "nlq train dem": "demo\n",
    "nlq compare que": "queries\nqueries-modern\n",
    "nlq params tiny-linear tiny-se": "tiny-selective\ntiny-seq2seq\n",
}


@pytest.mark.parametrize("words, completed", COMPLETED.items())
def test_options_are_completed(words, completed):
    environment = {"_NLQ_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert run_python(f"import os; os.environ |= {environment}; import nlq; nlq.main()") == completed


def test_params_prints_a_table_of_sizes(capsys):
    assert main(["params", "tiny-linear", "tiny-identity", "--match", "tiny-linear"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[0][:2] == ["model", "parameters"]
    assert [[row[0], row[-1]] for row in table[1:]] == [["tiny-linear", "512"], ["tiny-identity", "576"]]

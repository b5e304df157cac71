"""Measures the strength of the tests: plants one fault at a time in the code and counts the faults that the tests find.

    python tests/support/mutants.py --per_module 20 --output mutants.jsonl        # the quick tests, `make test`
    python tests/support/mutants.py --all --survivors_of mutants.jsonl --output survivors.jsonl   # the slow ones, `make
    test-all`

Each mutant changes one token of one line: a comparison, an operator, a number, a condition. It runs the tests of its module in
a copy of the repository and stops at the first failure. A mutant that no test fails for has survived.
"""

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

import pytest


ROOT = Path(__file__).resolve().parents[2]

# The files to change, and the tests that run for each, in stages. A fault that one stage finds needs no other.
M = "tests/modeling/test_"
TESTS = {
    "modeling_nlq/attention_nlq.py": [
        [f"{M}weights.py", f"{M}extremes.py"],
        [f"{M}formulas.py", f"{M}activations.py", f"{M}elementwise_gradients.py", f"{M}softmax_sinks.py", f"{M}sparse.py"],
        ["tests/test_invariants.py"],
    ],
    "modeling_nlq/masking_nlq.py": [
        [f"{M}model.py", f"{M}tiled.py"],
        [f"{M}generation.py", f"{M}formulas.py", f"{M}linear_model.py"],
        ["tests/test_invariants.py"],
    ],
    "modeling_nlq/projections_nlq.py": [[f"{M}formulas.py", f"{M}initial_state.py"], ["tests/training/conversion"]],
    "modeling_nlq/tiled_nlq.py": [
        [f"{M}tiled.py", f"{M}elementwise_gradients.py"],
        [f"{M}elementwise_dropout.py", f"{M}elementwise_pytorch.py", f"{M}extremes.py"],
    ],
    "modeling_nlq/linear_nlq.py": [
        [f"{M}linear_forms.py"],
        [f"{M}linear_model.py", f"{M}linear_cache.py", f"{M}formulas.py", f"{M}optional_kernels.py"],
        ["tests/test_invariants.py"],
    ],
    "modeling_nlq/ops_nlq.py": [
        [f"{M}tiled.py", f"{M}elementwise_pytorch.py"],
        [f"{M}elementwise_dropout.py", f"{M}sharing.py"],
    ],
    "training/comparison/inference.py": [
        ["tests/training/comparison/test_inference.py"],
        ["tests/training/comparison/test_report.py"],
    ],
    "training/conversion/upcycling.py": [["tests/training/conversion/test_upcycling.py"], ["tests/training/conversion"]],
    "training/sharing/publishing.py": [["tests/training/sharing"]],
}
SECONDS = 900

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPARISONS |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.BitAnd: "|"}
OPERATORS |= {ast.BitOr: "&", ast.Pow: "*", ast.MatMult: "+"}


@dataclass(frozen=True)
class Mutant:
    """One fault: the text from `start` to `end`, offsets in the file, becomes `new`."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str


def find_mutants(file: str) -> Iterator[Mutant]:
    """All mutants of a file. Strings, annotations and messages of errors are left alone."""
    source = (ROOT / file).read_text()
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def place(node: ast.AST) -> tuple[int, int]:
        return offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset

    def mutant(node: ast.AST, start: int, end: int, new: str) -> Mutant:
        return Mutant(file, node.lineno, start, end, source.encode()[start:end].decode(), new)

    def visit(node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.arg | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            start, end = place(node.left)[1], place(node.comparators[0])[0]
            yield mutant(node, start, end, f" {COMPARISONS[type(node.ops[0])]} ")
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not isinstance(node.left, ast.JoinedStr):
            start, end = place(node.left)[1], place(node.right)[0]
            if "(" not in source.encode()[start:end].decode() and ")" not in source.encode()[start:end].decode():
                yield mutant(node, start, end, f" {OPERATORS[type(node.op)]} ")
        elif isinstance(node, ast.BoolOp) and node.lineno == node.end_lineno:
            start, end = place(node.values[0])[1], place(node.values[1])[0]
            text = source.encode()[start:end].decode()
            if text.strip() in ("and", "or"):
                yield mutant(node, start, end, " or " if isinstance(node.op, ast.And) else " and ")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert | ast.USub):
            yield mutant(node, place(node)[0], place(node.operand)[0], "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield mutant(node, *place(node), str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield mutant(node, *place(node), str(node.value + 1))
        elif isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            start, end = place(node.test)
            yield mutant(node.test, start, end, f"(not {source.encode()[start:end].decode()})")
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child)

    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from visit(node)


def choose(per_module: int, seed: int) -> list[Mutant]:
    """A random sample of the mutants of each file, at most one per line and operator."""
    chosen = []
    for file in TESTS:
        by_line = {(mutant.line, mutant.start): mutant for mutant in find_mutants(file)}
        mutants = sorted(by_line.values(), key=lambda mutant: mutant.start)
        chosen += sorted(
            random.Random(f"{seed} {file}").sample(mutants, min(per_module, len(mutants))), key=lambda mutant: mutant.start
        )
    return chosen


def make_copy(folder: Path) -> Path:
    """A copy of the tracked files with an environment that imports them; the packages are those of this environment."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    for command in (["git", "init", "--quiet"], ["git", "add", "--all"]):
        subprocess.run(command, cwd=folder, check=True)  # some tests ask git for the tracked files
    if (ROOT / ".cache").is_dir():
        (folder / ".cache").symlink_to(ROOT / ".cache")
    venv.create(folder / ".venv", symlinks=True)
    python = folder / ".venv" / "bin" / "python"
    packages = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    own = folder / ".venv" / "lib" / packages.parent.name / "site-packages"
    (own / "base.pth").write_text(f"{packages}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--editable",
        str(folder),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return folder


SERVER = """
import os, sys
# What takes seconds to import and does not change; every mutant starts as a fork of this process
import accelerate, datasets, evaluate, hypothesis, matplotlib.pyplot, pytest, scipy.stats, torch, transformers
import transformers.models.llama.modeling_llama, transformers.integrations.flex_attention, transformers.trainer
torch.set_num_threads(1)
for line in sys.stdin:
    arguments = [argument.replace("\\0", " ") for argument in line.split()]
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open("pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2), os.close(0)
        os._exit(int(pytest.main(arguments)))
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Worker:
    """A copy of the repository and a process that runs tests in it."""

    def __init__(self, folder: Path):
        self.folder = make_copy(folder)
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false"}
        command = [str(self.folder / ".venv" / "bin" / "python"), "-c", SERVER]
        self.process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _pytest(self, tests: list[str], markers: str) -> int:
        """Runs tests up to the first failure, in a fork of the process; returns pytest's exit status."""
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", markers.replace(" ", "\0"), *tests]
        self.process.stdin.write(" ".join(arguments) + "\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.process.stdout.readline)
            try:
                return int(waiting.result(timeout=SECONDS))
            except TimeoutError:
                os.killpg(child, signal.SIGKILL)
                return int(waiting.result())

    def run(self, mutant: Mutant, markers: str) -> dict:
        """Runs the tests with a fault; tells whether it was found, by which test, and after how many seconds."""
        path = self.folder / mutant.file
        original = path.read_bytes()
        path.write_bytes(original[: mutant.start] + mutant.new.encode() + original[mutant.end :])
        start = time.monotonic()
        try:
            code = next((code for stage in TESTS[mutant.file] if (code := self._pytest(stage, markers)) != 0), 0)
        finally:
            path.write_bytes(original)
        log = (self.folder / "pytest.log").read_text(errors="replace")
        if code == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise RuntimeError(f"no tests for {mutant.file}: {log[-1000:]}")
        failed = [line for line in log.splitlines() if line.startswith(("FAILED", "ERROR"))]
        found = failed[0][:200] if failed else "" if code == 0 else f"exit {code}"
        return {**asdict(mutant), "killed": code != 0, "by": found, "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    """Runs the mutants and prints a line for each file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per_module", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="run the slow tests too, as `make test-all` does")
    parser.add_argument("--survivors_of", type=Path, help="run only the mutants that survived in this file")
    parser.add_argument("--output", type=Path, default=Path("mutants.jsonl"))
    arguments = parser.parse_args()
    mutants = choose(arguments.per_module, arguments.seed)
    if arguments.survivors_of:
        rows = [json.loads(line) for line in arguments.survivors_of.read_text().splitlines()]
        names = Mutant.__dataclass_fields__
        mutants = [Mutant(**{name: row[name] for name in names}) for row in rows if not row["killed"]]
    done = {}
    if arguments.output.exists():  # go on where an earlier call stopped
        rows = [json.loads(line) for line in arguments.output.read_text().splitlines()]
        done = {(row["file"], row["start"]): row for row in rows}
    markers = "not gpu" if arguments.all else "not slow and not gpu"
    with tempfile.TemporaryDirectory() as folder:
        workers: Queue[Worker] = Queue()
        for index in range(arguments.workers):
            (copy := Path(folder) / f"worker-{index}").mkdir()
            workers.put(Worker(copy))

        def run(mutant: Mutant) -> None:
            worker = workers.get()
            try:
                row = worker.run(mutant, markers)
            finally:
                workers.put(worker)
            done[mutant.file, mutant.start] = row
            with arguments.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                "killed  " if row["killed"] else "SURVIVED", f"{row['seconds']:6.1f} s", f"{mutant.file}:{mutant.line}", end=" "
            )
            print(f"{mutant.old.strip()!r} -> {mutant.new.strip()!r}", row["by"], flush=True)

        with ThreadPoolExecutor(arguments.workers) as pool:
            list(pool.map(run, [mutant for mutant in mutants if (mutant.file, mutant.start) not in done]))
        while not workers.empty():
            workers.get().process.kill()
    for file in TESTS:
        rows = [row for row in done.values() if row["file"] == file]
        print(f"{file}: {sum(row['killed'] for row in rows)} of {len(rows)} killed")


if __name__ == "__main__":
    main()

"""Measures the strength of the tests: makes one small fault at a time, and counts those that the tests find.

    pip install -e ".[mutation]"
    pytest -n 2 -m "not gpu" tests/test_*.py tests/modeling tests/training --cov --cov-context=test --cov-report=
    python tests/support/mutants.py --output mutants.jsonl

The faults are the mutations of cosmic-ray. From each group of files some places are drawn by a seed, and one mutation
for each. A mutant runs tests that reach its statement, as the contexts of coverage.py tell, and stops at the first
failure. The files of this checkout are changed and put back, so work in a clone; several clones may share the mutants
by `--shard`.
"""

import argparse
import ast
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider
from coverage import CoverageData


ROOT = Path(__file__).resolve().parents[2]
# How many mutants of which files
GROUPS = {
    "modeling": (100, ("modeling_nlq/*.py", "modeling_nlq/kernels/**/*.py")),
    "comparison": (60, ("training/comparison/*.py", "training/screening/*.py")),
    "run": (40, ("training/run/**/*.py",)),
}
TESTS = 100  # of one mutant, at most
SECONDS = 300  # of its tests; a mutant that never ends is found
# Names that are exchanged or inserted need a list of names, which we have not
OPERATORS = {name: OperatorProvider()[name]() for name in OperatorProvider() if not name.startswith("Variable")}


@dataclass(frozen=True)
class Mutant:
    """One fault: the mutation `operator` at its place number `occurrence` in a file."""

    group: str
    file: str
    line: int
    operator: str
    occurrence: int


def draw_mutants(seed: int) -> list[Mutant]:
    """Draws places uniformly, but none in annotations and in the messages of errors, and one mutation for each."""
    drawn = []
    for group, (number, patterns) in GROUPS.items():
        places: dict[tuple, list[Mutant]] = {}
        for file in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
            source = file.read_text(encoding="utf-8")
            left_alone, nodes = list(_spans_left_alone(source)), list(ast_nodes(get_ast(source)))
            for name, operator in OPERATORS.items():
                starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
                for occurrence, start in enumerate(map(tuple, starts)):
                    if not any(first <= start < end for first, end in left_alone):
                        mutant = Mutant(group, str(file.relative_to(ROOT)), start[0], name, occurrence)
                        places.setdefault((mutant.file, start), []).append(mutant)
        generator = random.Random(f"{seed} {group}")
        drawn += [generator.choice(places[place]) for place in generator.sample(sorted(places), number)]
    return drawn


def _spans_left_alone(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for node in ast.walk(ast.parse(source)):
        inner = [getattr(node, name, None) for name in ("annotation", "returns")]
        for each in [node] if isinstance(node, ast.Raise) else filter(None, inner):
            yield (each.lineno, each.col_offset), (each.end_lineno, each.end_col_offset)


def tests_of(mutant: Mutant, contexts: dict[int, list[str]], seed: int) -> list[str]:
    """Draws from the tests that reach the statement of a mutant, or its file if that runs at import only."""
    lines = {mutant.line}
    for node in ast.walk(ast.parse((ROOT / mutant.file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and node.lineno <= mutant.line <= node.end_lineno:
            lines.update(range(node.lineno, node.end_lineno + 1))
    reaching = {test for line in lines for test in contexts.get(line, ()) if test}
    reaching = reaching or {test for tests in contexts.values() for test in tests if test}
    tests = sorted({test.partition("|")[0] for test in reaching})
    return random.Random(f"{seed} {mutant}").sample(tests, min(TESTS, len(tests)))


def run(mutant: Mutant, tests: list[str]) -> dict:
    """Runs tests with a fault, in a fork of this process, which has imported what takes long and does not change."""
    path, start = ROOT / mutant.file, time.monotonic()
    original = path.read_text(encoding="utf-8")
    path.write_text(mutate_code(original, OPERATORS[mutant.operator], mutant.occurrence), encoding="utf-8")
    try:
        child = os.fork()
        if child == 0:
            os.setsid()
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1), os.dup2(silent, 2)
            options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not gpu"]
            os._exit(int(pytest.main([*options, *tests])))
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            time.sleep(0.05)
            if time.monotonic() - start > SECONDS:
                os.killpg(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)
                break
    finally:
        path.write_text(original, encoding="utf-8")
    status = os.waitstatus_to_exitcode(ended[1])
    seconds = round(time.monotonic() - start, 1)
    return {**asdict(mutant), "found": status != 0, "status": status, "tests": len(tests), "seconds": seconds}


def main() -> None:
    """Runs the mutants, a line of JSON for each, and prints how many were found. Goes on where an earlier call
    stopped.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coverage", default=".coverage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="0/1", help="this clone's number, and how many share the mutants")
    parser.add_argument("--output", type=Path, default=Path("mutants.jsonl"))
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True

    import datasets  # noqa: F401
    import matplotlib.pyplot
    import scipy.stats  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # noqa: F401

    torch.set_num_threads(1)
    matplotlib.use("agg")
    data = CoverageData(arguments.coverage)
    data.read()
    files = {os.path.relpath(name, ROOT): name for name in data.measured_files()}
    number, shards = map(int, arguments.shard.split("/"))
    lines = arguments.output.read_text().splitlines() if arguments.output.exists() else []
    done = {Mutant(*[json.loads(line)[name] for name in Mutant.__dataclass_fields__]) for line in lines}
    for mutant in draw_mutants(arguments.seed)[number::shards]:
        if mutant not in done:
            contexts = data.contexts_by_lineno(files[mutant.file]) if mutant.file in files else {}
            tests = tests_of(mutant, contexts, arguments.seed)
            row = run(mutant, tests) if tests else {**asdict(mutant), "found": False, "tests": 0}
            with arguments.output.open("a") as output:
                output.write(json.dumps(row) + "\n")
    rows = [json.loads(line) for line in arguments.output.read_text().splitlines()]
    for group in GROUPS:
        print(f"{group}: {sum(row['found'] for row in rows if row['group'] == group)} found")


if __name__ == "__main__":
    main()

"""Measures the strength of the tests: makes one small fault at a time, and counts those that the tests find.

    pip install -e ".[mutation]"
    python tests/support/mutants.py --output mutants.jsonl

The faults are mutations of cosmic-ray at places that a seed draws. Each stops the tests of its group at the first
failure, so the tests that find most come first. The files of this checkout are changed, so work in a clone; several
clones may share the mutants by `--shard`.
"""

import argparse
import ast
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider


ROOT = Path(__file__).resolve().parents[2]
# How many mutants of which files, and the tests that look for them
GROUPS = {
    "modeling": (100, ("modeling_nlq/*.py", "modeling_nlq/kernels/**/*.py"), ("test_invariants.py", "modeling")),
    "comparison": (60, ("training/comparison/*.py", "training/screening/*.py"), ("training/comparison", "training")),
    "run": (40, ("training/run/**/*.py",), ("training/run", "training")),
}
SECONDS = 600  # of the tests of a mutant; one that never ends is found
# Names that are exchanged or inserted need a list of names, which we have not
OPERATORS = {name: OperatorProvider()[name]() for name in OperatorProvider() if not name.startswith("Variable")}


def draw_mutants(seed: int) -> list[dict]:
    """Draws places uniformly, but none in annotations and in the messages of errors, and one mutation for each."""
    drawn = []
    for group, (number, patterns, _) in GROUPS.items():
        places: dict[tuple, list[dict]] = {}
        for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
            source, file = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
            left_alone, nodes = _lines_left_alone(source), list(ast_nodes(get_ast(source)))
            for name, operator in OPERATORS.items():
                starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
                for occurrence, start in enumerate(starts):
                    if start[0] not in left_alone:
                        mutant = {"group": group, "file": file, "line": start[0]}
                        mutant |= {"operator": name, "occurrence": occurrence}
                        places.setdefault((file, *start), []).append(mutant)
        generator = random.Random(f"{seed} {group}")
        drawn += [generator.choice(places[place]) for place in generator.sample(sorted(places), number)]
    return drawn


def _lines_left_alone(source: str) -> set[int]:
    lines = set()
    for node in ast.walk(ast.parse(source)):
        inner = [getattr(node, name, None) for name in ("annotation", "returns")]
        for each in [node] if isinstance(node, ast.Raise) else filter(None, inner):
            lines.update(range(each.lineno, each.end_lineno + 1))
    return lines


def run(mutant: dict) -> dict:
    """Runs the tests with a fault, in a fork of this process, which has imported what takes long."""
    path, start = ROOT / mutant["file"], time.monotonic()
    original = path.read_text(encoding="utf-8")
    path.write_text(mutate_code(original, OPERATORS[mutant["operator"]], mutant["occurrence"]), encoding="utf-8")
    try:
        child = os.fork()
        if child == 0:
            os.setsid()
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1), os.dup2(silent, 2)
            options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not slow and not gpu"]
            os._exit(int(pytest.main([*options, *(f"tests/{name}" for name in GROUPS[mutant["group"]][2])])))
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            time.sleep(0.05)
            if time.monotonic() - start > SECONDS:
                os.killpg(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)
                break
    finally:
        path.write_text(original, encoding="utf-8")
    found = os.waitstatus_to_exitcode(ended[1]) != 0
    return {**mutant, "found": found, "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    """Runs the mutants, from where an earlier call stopped, and prints how many were found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="0/1", help="this clone's number, and how many share the mutants")
    parser.add_argument("--output", type=Path, default=Path("mutants.jsonl"))
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True

    import datasets  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch
    import transformers.trainer  # noqa: F401

    torch.set_num_threads(1)
    number, shards = map(int, arguments.shard.split("/"))
    with arguments.output.open("a+") as output:
        output.seek(0)
        rows = [json.loads(line) for line in output]
        for mutant in draw_mutants(arguments.seed)[number::shards]:
            if not any(mutant.items() <= row.items() for row in rows):
                rows.append(run(mutant))
                print(json.dumps(rows[-1]), file=output, flush=True)
    for group in GROUPS:
        print(f"{group}: {sum(row['found'] for row in rows if row['group'] == group)} found")


if __name__ == "__main__":
    main()

"""Commands of `nlq` in forks of a process that has imported everything: a command takes a fraction of a second, and its
memory can be measured alone.

Run as a script, it reads a list of arguments as JSON from each line, and answers by the fields of `Outcome`.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


_MOST_SECONDS = 60
_MODULES = (
    "comparison.run",
    "conversion.converting",
    "api",
    "explorer.exploring",
    "run.evaluation",
    "run.generation",
)


@dataclass(frozen=True)
class Outcome:
    """How a command ended: exit status (negative: the signal that killed it), peak memory in bytes, and what it printed."""

    status: int
    memory: int
    printed: str


@contextmanager
def forking():
    """A function that runs a command, given as a list of arguments, and returns its `Outcome`."""
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "NLQ_CPP": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryDirectory() as modules,  # code that Transformers copies
        subprocess.Popen(
            [sys.executable, __file__], env={**os.environ, **environment, "HF_MODULES_CACHE": modules}, **pipes
        ) as server,
    ):

        def run(arguments: list[str]) -> Outcome:
            server.stdin.write(json.dumps(arguments) + "\n")
            server.stdin.flush()
            return Outcome(**json.loads(server.stdout.readline()))

        yield run
        server.stdin.close()


def _run(arguments: list[str]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        if (process := os.fork()) == 0:
            signal.alarm(_MOST_SECONDS)
            # What takes more than the tests allow, and is refused by the system, spoils nothing else here
            resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
            output = os.open(printed, os.O_CREAT | os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.chdir(folder)
            from nlq import main

            status = main(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status, usage = os.wait4(process, 0)
        text = printed.read_text(errors="replace") if printed.exists() else ""
        return Outcome(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024, text)


if __name__ == "__main__":
    from importlib import import_module

    for module in _MODULES:
        import_module(f"modeling_nlq.training.{module}")
    for line in sys.stdin:
        print(json.dumps(asdict(_run(json.loads(line)))), flush=True)

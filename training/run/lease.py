"""One driver for a folder of results: the process at work changes a file there every few seconds."""

import _thread
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write_text
from ..text import one_line


if TYPE_CHECKING:
    from upath import UPath

# Seconds between two signs of life; without one, until another process may take over; and until a new one is sure of its place
_PACE, _PATIENCE, _PAUSE = 10.0, 30.0, 1.0


@contextmanager
def driver_lock(file: "Path | UPath") -> Iterator[None]:
    """Waits until no other process holds the file, and holds it. Addresses have no locks, and this needs none.

    A process that was killed changes the file no more. If another process takes over all the same, because this one was stopped
    for too long, this one is interrupted.
    """
    own = uuid.uuid4().hex
    _wait_for(file)
    _write(file, own, 0)
    time.sleep(_PAUSE)
    while (holder := _read(file)) is not None and holder.get("id") != own:  # another process came at the same moment
        _wait_for(file)
        _write(file, own, 0)
        time.sleep(_PAUSE)
    is_over = threading.Event()
    thread = threading.Thread(target=_hold, args=(file, own, is_over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        if (_read(file) or {}).get("id") == own:
            with suppress(Exception):
                file.unlink(missing_ok=True)


def _wait_for(file) -> None:
    holder, unchanged_since = _read(file), time.monotonic()
    if holder is not None:
        where = f"process {holder.get('pid')} on {holder.get('host')}"
        print(
            f"{where} was at work here: waiting until it has ended, or {file} is unchanged for {_PATIENCE:.0f} s",
            file=sys.stderr,
        )
    while holder is not None and time.monotonic() - unchanged_since < _PATIENCE:
        time.sleep(_PAUSE)
        if (now := _read(file)) != holder:
            holder, unchanged_since = now, time.monotonic()


def _hold(file, own: str, is_over: threading.Event) -> None:
    count = 0
    while not is_over.wait(_PACE):
        count += 1
        try:
            if (holder := _read(file)) is not None and holder.get("id") != own:
                print(f"process {holder.get('pid')} on {holder.get('host')} has taken over: this one ends", file=sys.stderr)
                _thread.interrupt_main()
                return
            _write(file, own, count)
        except Exception as error:  # the next time may work
            print(f"{file} was not written: {one_line(error)}", file=sys.stderr)


def _write(file, own: str, count: int) -> None:
    write_text(file, json.dumps({"id": own, "host": socket.gethostname(), "pid": os.getpid(), "count": count}))


def _read(file) -> dict[str, Any] | None:
    if not isinstance(file, Path):
        file.fs.invalidate_cache()
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None

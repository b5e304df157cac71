"""Folders of results: on a file system, or at an address of object storage such as `s3://bucket/results`.

An address becomes a `upath.UPath`, which has the methods of `pathlib.Path`. `isinstance(folder, Path)` tells a folder from an
address.
"""

import contextlib
import getpass
import hashlib
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from .text import one_line


if TYPE_CHECKING:
    from upath import UPath


# Protocols of file systems, where a file needs its folder first
_WITH_FOLDERS = ("local://", "smb://")


def is_address(name: str | Path) -> bool:
    """Tells whether a name is an address, such as `s3://bucket/results`, and no path. `file:///...` is a path."""
    return "://" in str(name) and not str(name).startswith("file://")


def open_folder(name: "str | Path | UPath") -> "Path | UPath":
    """The folder of a path, or that at an address, which is not looked for yet.

    Raises:
        ValueError: if no package is installed that knows the address.
    """
    if not is_address(name):
        text = str(name)
        return Path(url2pathname(urlsplit(text).path)) if text.startswith("file://") else Path(text)
    try:
        from upath import UPath

        # Other machines write there too: what was listed a moment ago may have changed
        options = {"use_listings_cache": False}
        if str(name).startswith(_WITH_FOLDERS):
            options["auto_mkdir"] = True
        folder = UPath(str(name), **options)
        _ = folder.fs  # imports the package of its protocol
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be opened: {one_line(error)}; pip install modeling-nlq[ray] and that package"
        ) from error
    return folder


def check_writable(folder: "Path | UPath") -> None:
    """Writes and removes a small file.

    Raises:
        ValueError: if that fails.
    """
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"nlq")
        probe.unlink()
    except Exception as error:  # each protocol has its own
        raise ValueError(f"{folder} cannot be written: {type(error).__name__}: {one_line(error)}") from error


def inside(folder: Path, path: Path) -> Path:
    """Returns a path in a folder, which need not exist.

    Raises:
        ValueError: if it leads out of the folder, by a link or by `..`.
    """
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise ValueError(f"{path} leads out of {folder}; put the file itself there, or remove the link")
    return path


def scratch_folder(address: str) -> Path:
    """The folder of this machine that stands for an address, with the same name, in a folder below `TMPDIR` that is private.

    Raises:
        ValueError: if other users can, or could, write in the private folder: its name can be guessed.
    """
    address = address.rstrip("/")
    private = Path(tempfile.gettempdir()) / f"modeling-nlq-{getpass.getuser()}"
    with contextlib.suppress(FileExistsError):  # a file, or a link to nowhere, which the next lines refuse
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = private.lstat()  # not of what a link names
    if os.name == "posix" and (not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077):
        raise ValueError(
            f"{private} must be a folder of this user's own with mode 700 (others could write in it); remove it, or set TMPDIR "
            "to a folder of your own"
        )
    return inside(private, private / hashlib.sha256(address.encode()).hexdigest()[:20] / address.rpartition("/")[2])


def lock_file(folder: Path) -> Path:
    """The lock of a folder, beside it. The operating system frees the lock of a dead process."""
    return folder.with_name(f"{folder.name}.lock")


def copy_file(source: "Path | UPath", target: "Path | UPath") -> None:
    """Copies a file from or to an address. At an address it appears whole."""
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(source, Path) and isinstance(target, Path):
        shutil.copyfile(source, target)
    elif isinstance(source, Path):
        target.fs.put_file(os.fspath(source), target.path)
    else:
        source.fs.get_file(source.path, os.fspath(target))


def copy_files(source: "Path | UPath", target: "Path | UPath", last: str | None = None) -> None:
    """Copies the files below a folder.

    Args:
        source, target: folders or addresses.
        last: the name of a file that is copied after all others, so that its presence shows that they are complete.

    Raises:
        ValueError: for a name at an address that leads out of the target.
    """
    for path in sorted(files_below(source), key=lambda path: path.rpartition("/")[2] == last):
        copy_file(source / path, inside(target, target / path) if isinstance(target, Path) else target / path)


@contextlib.contextmanager
def local_copy(folder: "Path | UPath") -> Iterator[Path]:
    """The folder itself, or a copy of what lies at an address, for as long as a `with` block lasts."""
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory() as copy:
        copy_files(folder, Path(copy))
        yield Path(copy)


def files_below(folder: "Path | UPath") -> list[str]:
    """The paths of all files below a folder, relative to it."""
    if isinstance(folder, Path):
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    base = folder.fs._strip_protocol(folder.path).rstrip("/")
    return sorted(path.removeprefix(f"{base}/") for path in folder.fs.find(base))


def remove_folder(folder: "Path | UPath") -> None:
    """Removes a folder with all that it holds; nothing happens if another process was quicker."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):
        folder.fs.rm(folder.path, recursive=True)

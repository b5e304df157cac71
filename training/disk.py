"""Opening, writing and deleting files, below folders in which somebody else may have put links.

`opened`, `atomic_dir` and `delete` are the only ways in which this package opens, writes (appends, renames) and deletes. Each
walks a path folder by folder and decides on what it has opened, so that no link is followed. The links of a path that the user
named are the user's own: `named` follows them once, where a command takes the path.
"""

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, NoReturn


UNFINISHED = ".unfinished"  # files and folders that end so are not written to the end
# In a folder of results: the names of what was written there, a line for each. Other files are neither replaced nor deleted
RECORD = ".files"
_MODES = {"r": os.O_RDONLY, "a": os.O_WRONLY | os.O_APPEND | os.O_CREAT}
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# With O_PATH, a folder that may be entered need not be readable
_FOLDER = _NO_LINK | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_PATH", 0)


def named(path: str | Path) -> Path:
    """The path of a file or folder that the user named, without the links in it, which are followed here."""
    resolved = Path(os.path.realpath(path))
    return Path(path) if resolved == Path(os.path.abspath(path)) else resolved


def below(folder: Path, name: str) -> Path:
    """The path of a file in a folder by a name that somebody else gave; raises `ValueError` if it would lead out of there."""
    if {"", ".", ".."} & {*name.split("/")} or PurePath(name).parts != PurePosixPath(name).parts:
        raise ValueError(f"{name!r} leads out of {folder}; rename that file")
    return folder / name


def opened(path: Path, mode: str = "r", permissions: int = 0o666) -> IO[bytes]:
    """Opens a file, to read it (`r`) or to append to it (`a`); then it and its folders are made if need be.

    In a snapshot of the Hub's cache, a link to that repository's own `blobs` is followed.

    Raises:
        ValueError: if the path has a link, or is no regular file.
        OSError: if it cannot be opened.
    """
    try:
        with _entered(path, makes=mode == "a") as (folder, name):
            # A pipe without a writer would wait for ever
            flags = _MODES[mode] | _NO_LINK | getattr(os, "O_NONBLOCK", 0)
            descriptor = os.open(name, flags, permissions, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP and (blob := _blob_of(path)) is not None and mode == "r":
            return opened(blob)
        _refuse_link(error, path)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is no regular file")
    return os.fdopen(descriptor, f"{mode}b")


@contextmanager
def atomic_dir(folder: Path, last: str | None = None) -> Iterator[Path]:
    """A temporary folder, whose files move into `folder` when the block ends; none does if it ends with an error.

    Libraries write there, in a folder that is new. What they write is as readable as the user's other files.

    Args:
        folder: made if it does not exist.
        last: the file that moves after all others, so that its presence shows that they are complete.

    Raises:
        ValueError: if a file would replace one that the folder's record does not name, or a path has a link. No file moves
            then.
    """
    place = folder if os.path.lexists(folder) else folder.parent
    with _entered(place / UNFINISHED, makes=True):  # refuses links, and makes the folder
        pass
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=UNFINISHED, dir=place) as name:
        unfinished = Path(name)
        yield unfinished
        paths = sorted(files_below(unfinished), key=lambda path: Path(path).name == last)
        _add_to_record(folder, paths)
        mode = _usual_mode(unfinished)
        for path in paths:
            os.chmod(unfinished / path, mode)  # safetensors and `tempfile` make files that only their owner can read
            with _entered(unfinished / path) as source, _entered(folder / path, makes=True) as target:
                os.replace(source[1], target[1], src_dir_fd=source[0], dst_dir_fd=target[0])


def delete(path: Path, is_own: bool = False) -> None:
    """Deletes a file, or a folder with all that is in it, if it is there. Of a link, the link itself goes.

    Below a folder with a record, only what was written by this package is deleted, as the record says or `is_own`.
    """
    root = _root_of(path.parent)
    if root is not None and not is_own and not_recorded(root, [path.relative_to(root).as_posix()]):
        return
    with suppress(FileNotFoundError), _entered(path) as (folder, name):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, if need be."""
    with _entered(path / UNFINISHED, makes=True):
        pass


def make_new_folder(path: Path) -> None:
    """Makes a folder in which a library may write, in place of one that this package has made there before."""
    delete(path)
    _add_to_record(path.parent, [path.name])
    make_folder(path)


def refuse_links(folder: Path) -> None:
    """Raises `ValueError` if there is a link below a folder, for libraries that open files there by their paths.

    Links of the Hub's cache may stay, as in `opened`.
    """
    for path in folder.rglob("*"):
        if path.is_symlink() and _blob_of(path) is None:
            raise ValueError(_LINK.format(path))


def read_text(path: Path) -> str:
    """Reads a text in UTF-8; raises as `opened`, and `UnicodeDecodeError`, which is a `ValueError`."""
    with opened(path) as file:
        return file.read().decode("utf-8")


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all; raises as `atomic_dir`."""
    with atomic_dir(path.parent) as folder:
        (folder / path.name).write_text(text, encoding="utf-8")


def files_below(folder: Path) -> list[str]:
    """The paths of all files below a folder, relative to it. Links are not followed, and are no files."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def begin_record(folder: Path, names: Sequence[str] = ()) -> None:
    """Begins the record of a folder, with the names of files that were written there before there were records."""
    with opened(folder / RECORD, "a") as file:
        file.write("".join(f"{name}\n" for name in names).encode())


def recorded(folder: Path) -> list[str] | None:
    """The names of the files that were written into a folder; `None` if it has no record."""
    if not os.path.lexists(folder / RECORD):
        return None
    # Somebody else may have written it: only names below the folder count
    return [name for name in read_text(folder / RECORD).splitlines() if {"", ".", ".."}.isdisjoint(name.split("/"))]


def not_recorded(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of some files below a folder that its record does not name, nor a folder that they lie in."""
    known = {*(recorded(folder) or ())}
    return [name for name in names if known.isdisjoint((name, *map(str, PurePosixPath(name).parents)))]


def refuse_taken(folder: Path, names: Iterable[str]) -> None:
    """Raises `ValueError` if the record of a folder lacks one of some files that are there, whose names are needed."""
    if taken := not_recorded(folder, names):  # read after them, for another process adds a name before it writes the file
        raise ValueError(f"{folder / taken[0]} is a file of yours, whose name is needed; move it away")


def _add_to_record(folder: Path, names: Sequence[str]) -> None:
    """Adds names of files to the record of their folder or of the nearest one above that has one.

    Raises:
        ValueError: if a file of such a name is there and the record does not have it.
    """
    if (root := _root_of(folder)) is None:
        return
    paths = [(folder / name).relative_to(root).as_posix() for name in names if name != RECORD]
    refuse_taken(root, [path for path in paths if os.path.lexists(root / path)])
    if new := not_recorded(root, paths):
        begin_record(root, new)


def _root_of(folder: Path) -> Path | None:
    """The nearest folder that has a record: `folder` itself or one above it."""
    return next((root for root in (folder, *folder.parents) if os.path.lexists(root / RECORD)), None)


def _usual_mode(folder: Path) -> int:
    """The permissions of a new file, which a process could only ask for by changing them for all of its threads."""
    probe = os.open(folder / UNFINISHED, os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        return stat.S_IMODE(os.fstat(probe).st_mode)
    finally:
        os.close(probe)


@contextmanager
def _entered(path: Path, makes: bool = False) -> Iterator[tuple[int | None, str]]:
    """Opens the folder of a path, step by step from the beginning, and yields its descriptor and the last name of the path.

    Args:
        path: may be relative.
        makes: whether folders that do not exist are made.

    Raises:
        ValueError: if a folder is a link.
        OSError: if there is none.
    """
    *steps, name = path.parts
    if os.open not in os.supports_dir_fd:  # on Windows
        if any(step.is_symlink() for step in path.parents):
            raise ValueError(_LINK.format(path.parent))
        if makes:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield None, str(path)
        return
    descriptor = os.open(path.anchor or ".", _FOLDER)
    try:
        for index, step in enumerate(steps[bool(path.anchor) :], start=1 + bool(path.anchor)):
            if makes:
                with suppress(FileExistsError):
                    os.mkdir(step, dir_fd=descriptor)
            try:
                following = os.open(step, _FOLDER, dir_fd=descriptor)
            except OSError as error:
                _refuse_link(error, Path(*path.parts[:index]))
            os.close(descriptor)
            descriptor = following
        yield descriptor, name
    finally:
        os.close(descriptor)


# A link of the Hub's cache and its target: from a snapshot into its repository's `blobs`, or from there to a file that
# repositories share, whose name is the hash of its content
_HUB_LINK = re.compile(
    r"(.*/\w+--[^/]+)/snapshots/.+\0\1/blobs/[^/]+|(.*)/\w+--[^/]+/blobs/[^/]+\0\2/blobs/[0-9a-f]{2}/[0-9a-f]{64}", re.DOTALL
)
_LINK = "{} is a link, which is not followed below a folder that you name; put there what it points to, or remove it"


def _refuse_link(error: OSError, path: Path) -> NoReturn:
    """Raises `ValueError` if a path could not be opened because it is a link, and otherwise the error of the whole path."""
    if path.is_symlink():
        raise ValueError(_LINK.format(path)) from None
    raise type(error)(error.errno, error.strerror, str(path)) from None


def _blob_of(path: Path) -> Path | None:
    """The file to which a link of the Hub's cache points, if it is one that the cache itself makes."""
    source = os.path.abspath(path)
    target = os.path.normpath(os.path.join(os.path.dirname(source), os.readlink(source)))
    return Path(target) if _HUB_LINK.fullmatch(f"{source}\0{target}") else None

"""Opens, writes and deletes files in folders where somebody else may have put symbolic links.

`open_file`, `atomic_dir` and `delete` alone do so in this package, by opening the folders of a path one below the
other with `O_NOFOLLOW`. Commands pass a path that the user typed to `resolve_user_path`, which follows links.
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


UNFINISHED = ".unfinished"  # suffix of temporary files and folders
# Lists the files that this package wrote. Only these are replaced or deleted
MANIFEST = ".nlq-manifest"
_MODES = {"r": os.O_RDONLY, "a": os.O_WRONLY | os.O_APPEND | os.O_CREAT}
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# O_PATH works without the permission to list the folder
_FOLDER = _NO_LINK | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_PATH", 0)
_LINK = "{} is a symbolic link, which nlq does not follow inside a folder; replace it by what it points to"
# A link that huggingface_hub makes, and its target: from a snapshot to its repository's `blobs`, or from there to a
# file that repositories share under its hash
_HUB_LINK = re.compile(
    r"(.*/\w+--[^/]+)/snapshots/.+\0\1/blobs/[^/]+|(.*)/\w+--[^/]+/blobs/[^/]+\0\2/blobs/[0-9a-f]{2}/[0-9a-f]{64}",
    re.DOTALL,
)


def resolve_user_path(path: str | Path) -> Path:
    """Follows the links of a typed path."""
    resolved = Path(os.path.realpath(path))
    return Path(path) if resolved == Path(os.path.abspath(path)) else resolved


def results_folder(name: str | Path) -> Path:
    """Returns the folder that an `output_dir` names; raises `ValueError` for an address."""
    if "://" in str(name):
        raise ValueError(f"output_dir={name} is an address; name a folder")
    return resolve_user_path(name)


def safe_join(folder: Path, name: str) -> Path:
    """Joins a folder and a name that somebody else chose; raises `ValueError` for one outside it."""
    if not _is_inside(name) or PurePath(name).parts != PurePosixPath(name).parts:
        raise ValueError(f"{name!r} is a path outside {folder}")
    return folder / name


def _is_inside(name: str) -> bool:
    return {"", ".", ".."}.isdisjoint(name.split("/"))


def open_file(path: Path, mode: str = "r", permissions: int = 0o666) -> IO[bytes]:
    """Opens a file to read (`r`) or to append (`a`), which creates the file and its folders.

    Follows links that huggingface_hub makes in its cache. Raises `ValueError` for another link or no regular file, and
    `OSError` if it cannot be opened.
    """
    try:
        with _open_parent(path, makes=mode == "a") as (folder, name):
            # O_NONBLOCK: opening a pipe would wait for its other end
            flags = _MODES[mode] | _NO_LINK | getattr(os, "O_NONBLOCK", 0)
            descriptor = os.open(name, flags, permissions, dir_fd=folder)
    except OSError as error:
        if mode == "r" and error.errno == errno.ELOOP and (blob := _hub_blob(path)) is not None:
            return open_file(blob)
        _reraise(error, path)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return os.fdopen(descriptor, f"{mode}b")


def read_bytes(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Reads UTF-8; raises as `open_file`, and `ValueError` for other encodings."""
    return read_bytes(path).decode("utf-8")


@contextmanager
def atomic_dir(folder: Path, last: str | None = None) -> Iterator[Path]:
    """Yields a temporary folder for libraries to write into, and moves its files into `folder` at the end.

    No file moves if the block ends with an error, a path contains a link, or a file would replace one that is not in
    the manifest (`ValueError`). The file `last` moves last, and so shows that all are complete.
    """
    parent = folder if os.path.lexists(folder) else folder.parent
    make_folder(parent)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=UNFINISHED, dir=parent) as name:
        unfinished = Path(name)
        yield unfinished
        paths = sorted(files_below(unfinished), key=lambda path: Path(path).name == last)
        _register(folder, paths)
        mode = _default_mode(unfinished)
        for path in paths:
            os.chmod(unfinished / path, mode)  # safetensors and tempfile create files with mode 0600
            with _open_parent(unfinished / path) as source, _open_parent(folder / path, makes=True) as target:
                os.replace(source[1], target[1], src_dir_fd=source[0], dst_dir_fd=target[0])


def write_text(path: Path, text: str) -> None:
    """Writes a file completely or not at all; raises as `atomic_dir`."""
    with atomic_dir(path.parent) as folder:
        (folder / path.name).write_text(text, encoding="utf-8")


def delete(path: Path, force: bool = False) -> None:
    """Deletes a file, a folder or a link, if it exists, and without `force` only if a manifest above names it."""
    root = _manifest_folder(path.parent)
    if root is not None and not force and not_in_manifest(root, [path.relative_to(root).as_posix()]):
        return
    with suppress(FileNotFoundError), _open_parent(path) as (folder, name):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def make_folder(path: Path) -> None:
    """Creates a folder and its parents; raises `ValueError` if one is a link."""
    with _open_parent(path / UNFINISHED, makes=True):
        pass


def make_empty_folder(path: Path) -> None:
    """Creates an empty folder, or replaces one of this package."""
    delete(path)
    _register(path.parent, [path.name])
    make_folder(path)


def check_no_symlinks(paths: Iterable[Path], allow_hub: bool = False) -> None:
    """Raises `ValueError` for links, which libraries would follow; `allow_hub` allows those of the Hub's cache."""
    for path in paths:
        if path.is_symlink():
            if not allow_hub:
                raise ValueError(_LINK.format(path))
            open_file(path).close()  # raises for a link to another file


def paths_below(folder: Path) -> list[Path]:
    """Lists files, folders and links, which another process may delete."""
    return [Path(root, name) for root, folders, files in os.walk(folder) for name in (*folders, *files)]


def files_below(folder: Path) -> list[str]:
    """Lists all files below a folder, relative to it, without links."""
    files = [path for path in paths_below(folder) if path.is_file() and not path.is_symlink()]
    return sorted(path.relative_to(folder).as_posix() for path in files)


def add_to_manifest(folder: Path, names: Sequence[str] = ()) -> None:
    """Adds names to a folder's manifest; raises `ValueError` for a control character."""
    for name in names:
        if not name.isprintable():
            raise ValueError(f"{folder}: {name!r} has characters that names of files may not have")
    with open_file(folder / MANIFEST, "a") as file:
        file.write("".join(f"{name}\n" for name in names).encode())


def read_manifest(folder: Path) -> list[str] | None:
    """Returns the names in a manifest that are inside its folder; `None` without one."""
    if not os.path.lexists(folder / MANIFEST):
        return None
    return list(filter(_is_inside, read_text(folder / MANIFEST).split("\n")))


def not_in_manifest(folder: Path, names: Iterable[str]) -> list[str]:
    """Returns the names that a folder's manifest lacks, with their parents."""
    known = set(read_manifest(folder) or ())
    return [name for name in names if known.isdisjoint((name, *map(str, PurePosixPath(name).parents)))]


def check_not_taken(folder: Path, existing: Iterable[str]) -> None:
    """Raises `ValueError` for an existing file that is not in the manifest."""
    if taken := not_in_manifest(folder, existing):
        raise ValueError(f"{folder / taken[0]} exists and was not written by nlq; move it, or choose another folder")


def _register(folder: Path, names: Sequence[str]) -> None:
    if (root := _manifest_folder(folder)) is None:
        return
    paths = [(folder / name).relative_to(root).as_posix() for name in names]
    # Read after the files are listed: another process adds a name before it writes the file
    check_not_taken(root, [path for path in paths if os.path.lexists(root / path)])
    if new := not_in_manifest(root, paths):
        add_to_manifest(root, new)


def _manifest_folder(folder: Path) -> Path | None:
    """Returns the nearest folder with a manifest of this user or its owner; `None` for a temporary one."""
    for root in (folder, *folder.parents):
        if root.name.endswith(UNFINISHED):
            return None
        with suppress(OSError):
            manifest = os.lstat(root / MANIFEST)
            owners = (getattr(os, "geteuid", int)(), os.stat(root).st_uid)
            if stat.S_ISREG(manifest.st_mode) and manifest.st_uid in owners:
                return root
    return None


def _default_mode(folder: Path) -> int:
    """Returns the mode of a new file; Python reads the umask only by changing it."""
    probe = os.open(folder / UNFINISHED, os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        return stat.S_IMODE(os.fstat(probe).st_mode)
    finally:
        os.close(probe)


@contextmanager
def _open_parent(path: Path, makes: bool = False) -> Iterator[tuple[int | None, str]]:
    """Yields the descriptor of a path's parent, which `makes` creates, and the file's name.

    Raises `ValueError` if a parent is a link, and `OSError` if it cannot be opened.
    """
    if os.open not in os.supports_dir_fd:  # on Windows
        check_no_symlinks(path.parents)
        if makes:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield None, str(path)
        return
    parent = Path(path.anchor)
    descriptor = os.open(path.anchor or ".", _FOLDER)
    try:
        for step in path.parent.relative_to(parent).parts:
            parent /= step
            try:
                if makes:
                    with suppress(FileExistsError):
                        os.mkdir(step, dir_fd=descriptor)
                following = os.open(step, _FOLDER, dir_fd=descriptor)
            except OSError as error:
                _reraise(error, parent)
            os.close(descriptor)
            descriptor = following
        yield descriptor, path.name
    finally:
        os.close(descriptor)


def _reraise(error: OSError, path: Path) -> NoReturn:
    if path.is_symlink():
        raise ValueError(_LINK.format(path)) from None
    raise type(error)(error.errno, error.strerror, str(path)) from None


def _hub_blob(path: Path) -> Path | None:
    """Returns the target of a link in huggingface_hub's cache, `None` for others."""
    source = os.path.abspath(path)
    target = os.path.normpath(os.path.join(os.path.dirname(source), os.readlink(source)))
    return Path(target) if _HUB_LINK.fullmatch(f"{source}\0{target}") else None

"""Addresses of object storage, such as `s3://bucket/results`: their files, and the folder in which a command works on them.

Commands read and write folders. For an address, that is a temporary folder: `open_folder` fetches what is small, `fetch` the
rest, and `publish` sends what has changed.
"""

import glob
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import fsspec

from .files import HOLDER_FILE, LOCK_FILE, files_below, inside
from .text import one_line


# Protocols of file systems, where a file needs its folder first
_WITH_FOLDERS = ("local://", "smb://")
# Names below a folder of results that a command reads only when it needs them
_LARGE = re.compile(r"(^|/)(checkpoint-\d+|\.data)/|\.(safetensors|bin|log)$")


def is_address(name: str | Path) -> bool:
    """Tells whether a name is an address, such as `s3://bucket/results`, and no path. `file:///...` is a path."""
    return "://" in str(name) and not str(name).startswith("file://")


def normalized(name: str | Path) -> str:
    """A path as `pathlib` writes it, also that of a `file:///...`; an address as it is."""
    if is_address(name):
        return str(name)
    return str(Path(url2pathname(urlsplit(str(name)).path) if str(name).startswith("file://") else name))


class Storage:
    """The files below a folder or an address. Names are relative to it, with `/`.

    Args:
        location: an absolute path, or an address that `fsspec` knows.

    Raises:
        ValueError: if no package is installed that knows the address.
    """

    def __init__(self, location: str):
        self.location = location.rstrip("/")
        options = {} if is_address(location) and not location.startswith(_WITH_FOLDERS) else {"auto_mkdir": True}
        try:
            # Other machines write there too, and what was listed a moment ago may have changed
            self.system, path = fsspec.core.url_to_fs(self.location, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{location} cannot be opened: {one_line(error)}; pip install that package") from error
        self.path = path.rstrip("/")

    def files(self, below: str = "") -> list[str]:
        """The names of all files below a folder."""
        return [path.removeprefix(f"{self.path}/") for path in self.system.find(f"{self.path}/{below}".rstrip("/"))]

    def fetch(self, names: Iterable[str], folder: Path) -> None:
        """Copies files into a folder of this machine; raises `ValueError` for a name that leads out of it."""
        targets = {f"{self.path}/{name}": inside(folder, folder / name) for name in names}
        for target in targets.values():
            target.parent.mkdir(parents=True, exist_ok=True)
        self.system.get(list(targets), [str(target) for target in targets.values()])

    def send(self, folder: Path, names: Iterable[str]) -> None:
        """Copies files of a folder of this machine, one after another. At an address, each appears whole."""
        for name in names:
            self.system.put_file(str(folder / name), f"{self.path}/{name}")

    def delete(self, name: str) -> None:
        """Deletes a file or a folder, if it is there."""
        with suppress(FileNotFoundError):
            self.system.rm(glob.escape(f"{self.path}/{name}".rstrip("/")), recursive=True)


class _WorkingCopy(Storage):
    """The temporary folder in which a command works on what lies at an address."""

    def __init__(self, address: str):
        super().__init__(address)
        self._temporary = tempfile.TemporaryDirectory(prefix="nlq-")
        # Messages that name its path show the address
        self.folder = inside(Path(self._temporary.name), Path(self._temporary.name, self.location.replace("://", "/")))
        self.folder.mkdir(parents=True)
        self._known: dict[str, int] = {}

    def pull(self, path: Path, has_large: bool) -> None:
        names = self.files("" if path == self.folder else path.relative_to(self.folder).as_posix())
        names = [name for name in names if has_large or not _LARGE.search(name)]
        self.fetch(names, self.folder)
        self._known |= {name: (self.folder / name).stat().st_mtime_ns for name in names}

    def push(self) -> None:
        names = [name for name in files_below(self.folder) if Path(name).name not in (LOCK_FILE, HOLDER_FILE)]
        now = {name: (self.folder / name).stat().st_mtime_ns for name in names}
        self.send(self.folder, [name for name, time in now.items() if self._known.get(name) != time])
        for name in self._known.keys() - now.keys():
            self.delete(name)
        self._known = now


_copies: list[_WorkingCopy] = []


def _copy_of(path: Path) -> _WorkingCopy | None:
    return next((copy for copy in _copies if path.is_relative_to(copy.folder)), None)


def open_folder(name: str | Path) -> Path:
    """The folder of a path, which need not exist, or the folder that stands for an address, for as long as the process lasts.

    Raises:
        ValueError: if the address cannot be read.
    """
    if not is_address(name):
        return Path(normalized(name))
    _copies.append(copy := _WorkingCopy(str(name)))
    return fetch(copy.folder, has_large=False)


def origin(path: Path) -> str:
    """What users call a path: the address that its folder stands for, or its absolute path."""
    copy = _copy_of(path)
    return str(path.absolute()) if copy is None else copy.location + path.as_posix().removeprefix(copy.folder.as_posix())


def fetch(path: Path, has_large: bool = True) -> Path:
    """Fetches the files below a folder, if it stands for an address, and returns the folder.

    Raises:
        ValueError: if the address cannot be read.
    """
    if (copy := _copy_of(path)) is not None:
        try:
            copy.pull(path, has_large)
        except Exception as error:  # each protocol has its own
            raise ValueError(f"{copy.location} cannot be read: {one_line(error)}") from error
    return path


def publish(path: Path) -> None:
    """Sends what has changed in a folder that stands for an address, and deletes there what was deleted here.

    Raises:
        ValueError: if the address cannot be written.
    """
    if (copy := _copy_of(path)) is not None:
        try:
            copy.push()
        except Exception as error:  # each protocol has its own
            raise ValueError(f"{copy.location} cannot be written: {one_line(error)}") from error

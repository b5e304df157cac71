"""Addresses of object storage, such as `s3://bucket/results`: their files, and the folder in which a command works on them.

Commands read and write folders. For an address, that is a temporary folder: `open_folder` fetches what is small, `fetch` the
rest, and `publish` sends what has changed.
"""

import re
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pyarrow import fs

from .files import HOLDER_FILE, LOCK_FILE, files_below, inside
from .text import one_line


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
        location: an absolute path, or an address that pyarrow knows.

    Raises:
        ValueError: for any other address.
    """

    def __init__(self, location: str):
        self.location = location.rstrip("/")
        try:
            self.system, self.path = fs.FileSystem.from_uri(self.location)
        except (ValueError, OSError) as error:
            raise ValueError(f"{location} cannot be opened: {one_line(error)}") from error

    def files(self, below: str = "") -> list[str]:
        """The names of all files below a folder."""
        selector = fs.FileSelector(str(PurePosixPath(self.path, below)), recursive=True, allow_not_found=True)
        return [info.path.removeprefix(f"{self.path}/") for info in self.system.get_file_info(selector) if info.is_file]

    def fetch(self, names: Iterable[str], folder: Path) -> None:
        """Copies files into a folder of this machine; raises `ValueError` for a name that leads out of it."""

        def copy(name: str) -> None:
            target = inside(folder, folder / name)
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.copy_files(f"{self.path}/{name}", str(target), self.system, fs.LocalFileSystem())

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(copy, names))

    def send(self, folder: Path, names: Iterable[str]) -> None:
        """Copies files of a folder of this machine, one after another."""
        for name in names:
            target = f"{self.path}/{name}"
            if isinstance(self.system, fs.LocalFileSystem):
                Path(target).parent.mkdir(parents=True, exist_ok=True)
            # In several threads, pyarrow may fail to send to S3 (arrow issue 32372)
            fs.copy_files(str(folder / name), target, fs.LocalFileSystem(), self.system, chunk_size=2**26, use_threads=False)

    def delete(self, name: str) -> None:
        """Deletes a file or a folder, if it is there."""
        match self.system.get_file_info(f"{self.path}/{name}").type:
            case fs.FileType.File:
                self.system.delete_file(f"{self.path}/{name}")
            case fs.FileType.Directory:
                self.system.delete_dir(f"{self.path}/{name}")


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
        names = self.files(path.relative_to(self.folder).as_posix())
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
        except OSError as error:
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
        except OSError as error:
            raise ValueError(f"{copy.location} cannot be written: {one_line(error)}") from error

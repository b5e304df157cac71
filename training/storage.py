"""Addresses of object storage, such as `s3://bucket/results`: their files, and the folder in which a command works on
them.

Commands read and write folders. For an address, that is a temporary folder: `open_folder` fetches what is small,
`fetch` the rest, and `publish` sends what has changed.
"""

import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import fsspec

from .disk import check_no_symlinks, files_below, paths_below, resolve_user_path, safe_join
from .files import LOCK_FILE, METRICS_FILE, STATE_FILE
from .text import one_line


# Files whose presence shows that those beside them are complete
_LAST = ("tokenizer.json", STATE_FILE, METRICS_FILE)
# Names below a folder of results that a command reads only when it needs them
_LARGE = re.compile(r"(^|/)(checkpoint-\d+|\.data)/|\.(safetensors|bin|log)$")


def is_address(name: str | Path) -> bool:
    """Tells whether a name is an address, such as `s3://bucket/results`, and no path."""
    return "://" in str(name)


def normalized(name: str | Path) -> str:
    """A path, without the links that the user has in it; an address as it is."""
    return str(name) if is_address(name) else str(resolve_user_path(name))


class WorkingCopy:
    """A folder of this machine in which a process works on files of a storage, under their names there, with `/`.

    Args:
        location: the storage: an absolute path, or an address that `fsspec` knows.

    Raises:
        ValueError: if no package is installed that knows the address, or there is a symbolic link below a local one.
    """

    def __init__(self, location: str, folder: Path):
        self.location, self.folder = location.rstrip("/"), folder
        options = {} if is_address(location) and not location.startswith("local://") else {"auto_mkdir": True}
        try:
            # Other machines write there too, and what was listed a moment ago may have changed
            self.system, path = fsspec.core.url_to_fs(self.location, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{location} cannot be opened: {one_line(error)}; pip install that package") from error
        self.path, self._known = path.rstrip("/"), {}
        if "file" in self.system.protocol:
            check_no_symlinks(paths_below(Path(self.path)))

    def files(self, name: str = "") -> list[str]:
        """The name of a file of the storage, or those of the files below a folder; `ValueError` for a key such as
        `a/../b`.
        """
        found = self.system.find(f"{self.path}/{name}".rstrip("/"))
        # That stands for a folder
        keys = [path.removeprefix(f"{self.path}/") for path in found if not path.endswith("/")]
        for key in keys:
            safe_join(self.folder, key)
        return keys

    def pull(self, name: str = "", has_large: bool = True) -> None:
        """Fetches a file, or the files below a folder; without `has_large` only those that are small."""
        names = [file for file in self.files(name) if has_large or not _LARGE.search(file)]
        targets = [self.folder / file for file in names]
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
        self.system.get([f"{self.path}/{file}" for file in names], [str(target) for target in targets])
        self._known.update((file, target.stat().st_mtime_ns) for file, target in zip(names, targets))

    def push(self, name: str = "") -> None:
        """Sends a file, or the files below a folder, that have changed; deletes there what was deleted here.

        At an address, each appears whole. Those whose presence shows that others are complete are sent last.
        """
        path = self.folder / name
        names = [name] if path.is_file() else [f"{name}/{file}".lstrip("/") for file in files_below(path)]
        names = [file for file in names if Path(file).name != LOCK_FILE]
        for file in sorted(names, key=lambda file: Path(file).name in _LAST):
            changed = (self.folder / file).stat().st_mtime_ns
            if self._known.get(file) != changed:
                self.system.put_file(str(self.folder / file), f"{self.path}/{file}")
                self._known[file] = changed
        self.delete(file for file in self._known.keys() - set(names) if f"{file}/".startswith(f"{name}/".lstrip("/")))

    def delete(self, names: Iterable[str]) -> None:
        """Deletes files of the storage; one that is not there is passed over. A folder goes with its last file."""
        for name in names:
            self._known.pop(name, None)
            with suppress(FileNotFoundError):
                self.system.rm_file(f"{self.path}/{name}")
            if "file" in self.system.protocol:
                with suppress(OSError):
                    Path(self.path, name).parent.rmdir()


_copies: list[WorkingCopy] = []
_temporary: list[tempfile.TemporaryDirectory] = []  # their folders are removed when the process ends


def open_folder(name: str | Path) -> Path:
    """The folder of a path, which need not exist, or the folder that stands for an address, for as long as the process
    lasts.

    Raises:
        ValueError: if the address cannot be read.
    """
    if not is_address(name):
        return Path(normalized(name))
    _temporary.append(tempfile.TemporaryDirectory(prefix="nlq-"))
    # Messages that name it show the address
    folder = resolve_user_path(_temporary[-1].name) / str(name).strip("/").replace("://", "/")
    folder.mkdir(parents=True)
    _copies.append(WorkingCopy(str(name), folder))
    return fetch(folder, has_large=False)


def _copy_of(path: Path) -> tuple[WorkingCopy | None, str]:
    """The copy that holds a path, if one does, and the name of the path in it."""
    copy = next((copy for copy in _copies if path.is_relative_to(copy.folder)), None)
    return copy, "" if copy is None else path.as_posix().removeprefix(copy.folder.as_posix()).lstrip("/")


def origin(path: Path) -> str:
    """What users call a path: the address that its folder stands for, or its absolute path."""
    copy, name = _copy_of(path)
    return str(path.absolute()) if copy is None else f"{copy.location}/{name}".rstrip("/")


def fetch(path: Path, has_large: bool = True) -> Path:
    """Fetches the files below a folder, if it stands for an address, and returns the folder.

    Raises:
        ValueError: if the address cannot be read.
    """
    copy, name = _copy_of(path)
    if copy is not None:
        try:
            copy.pull(name, has_large)
        except Exception as error:  # each protocol has its own
            raise ValueError(f"{copy.location} cannot be read: {one_line(error)}") from error
    return path


def publish(path: Path) -> None:
    """Sends what has changed in a folder that stands for an address, and deletes there what was deleted here.

    Raises:
        ValueError: if the address cannot be written.
    """
    copy, _ = _copy_of(path)
    if copy is not None:
        try:
            copy.push()
        except Exception as error:  # each protocol has its own
            raise ValueError(f"{copy.location} cannot be written: {one_line(error)}") from error

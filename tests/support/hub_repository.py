"""Repositories of the local Hub: files, commits, branches and uploads, as Git and LFS keep them."""

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path


class HubError(Exception):
    """Becomes an error answer; the client chooses its exception by status and code, not by the message."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        message_in_header = " ".join(message.split()).encode("ascii", "replace").decode()
        self.headers = {"X-Error-Message": message_in_header, **({"X-Error-Code": code} if code else {}), **(headers or {})}


@dataclass(frozen=True)
class Blob:
    """A file's content. Git keeps the content itself or, of an LFS file, a pointer to it."""

    data: bytes
    is_lfs: bool = False

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()

    @cached_property
    def oid(self) -> str:
        kept = self.pointer if self.is_lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(kept) + kept).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.oid

    def entry(self, path: str) -> dict:
        """The file in a listing."""
        entry = {"type": "file", "path": path, "oid": self.oid, "size": len(self.data)}
        return {**entry, "lfs": self.lfs_entry("oid")} if self.is_lfs else entry

    def sibling(self, path: str) -> dict:
        """The file in the description of a repository, where the same has other names."""
        sibling = {"rfilename": path, "blobId": self.oid, "size": len(self.data)}
        return {**sibling, "lfs": self.lfs_entry("sha256")} if self.is_lfs else sibling

    def lfs_entry(self, name: str) -> dict:
        return {name: self.sha256, "size": len(self.data), "pointerSize": len(self.pointer)}


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: "Commit | None"
    files: dict[str, Blob]
    title: str
    message: str
    author: str
    date: str

    def entries(self, folder: str = "", recursive: bool = True) -> list[dict]:
        """What lies in a folder, sub-folders included, as the Hub lists it."""
        prefix = f"{folder}/" if folder else ""
        inside = {path: blob for path, blob in sorted(self.files.items()) if path.startswith(prefix)}
        folders = {str(parent) for path in inside for parent in Path(path).parents}
        folders = {name for name in folders if name != "." and name.startswith(prefix)}
        entries = [{"type": "directory", "path": name, "oid": git_oid(name), "size": 0} for name in sorted(folders)]
        entries += [blob.entry(path) for path, blob in inside.items()]
        return [entry for entry in entries if recursive or "/" not in entry["path"].removeprefix(prefix)]


@dataclass
class Repo:
    id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, Commit] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)  # all that was uploaded, by sha256, committed or not

    @property
    def owner(self) -> str:
        return self.id.split("/")[0]

    def revision(self, name: str) -> Commit:
        for known in (self.branches, self.commits):
            if name in known:
                return known[name]
        raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")

    def history(self, revision: str) -> list[Commit]:
        commits = [self.revision(revision)]
        while commits[-1].parent:
            commits.append(commits[-1].parent)
        return commits

    def commit(self, branch: str, files: dict[str, Blob], title: str, message: str, author: str) -> Commit:
        parent, date = self.branches.get(branch), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        tree = [f"{path} {blob.oid}" for path, blob in sorted(files.items())]
        oid = git_oid(self.id, parent.oid if parent else "", title, message, author, date, *tree)
        self.commits[oid] = self.branches[branch] = commit = Commit(oid, parent, files, title, message, author, date)
        return commit


@dataclass
class Upload:
    """Where one announced LFS object goes."""

    repo: Repo
    oid: str
    size: int

    def finish(self, data: bytes) -> None:
        if len(data) != self.size or hashlib.sha256(data).hexdigest() != self.oid:
            raise HubError(400, "The content does not match the SHA-256 and size it was announced with")
        self.repo.lfs[self.oid] = data


def git_oid(*lines: str) -> str:
    return hashlib.sha1("\n".join(lines).encode()).hexdigest()

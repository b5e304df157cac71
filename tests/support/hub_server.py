"""A Hub on loopback: enough of the Hub for the real `huggingface_hub` client to create, upload, list and download.

The client reads `HF_ENDPOINT` when it is imported, so it runs in a separate process.
"""

import base64
import hashlib
import json
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard


LFS_PATTERNS = ("*.safetensors", "*.bin", "*.png")


class HubError(Exception):
    """Becomes an error answer; the client chooses its exception by status and code, not by the message."""

    def __init__(self, status: int, message: str, code: str = "", headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.headers = status, {"X-Error-Message": message, "X-Error-Code": code, **(headers or {})}


@dataclass(frozen=True)
class Blob:
    """A file's content; large files are known by their SHA-256, others by the hash of Git."""

    data: bytes
    is_lfs: bool = False

    @cached_property
    def oid(self) -> str:
        if self.is_lfs:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    def described(self, path: str) -> dict:
        return {"rfilename": path, "path": path, "type": "file", "size": len(self.data), "oid": self.oid}


@dataclass(frozen=True)
class Commit:
    files: dict[str, Blob]
    oid: str = field(default_factory=lambda: secrets.token_hex(20))


@dataclass
class Repo:
    place: str  # its path, such as `anna/model`, `spaces/anna/page` or `datasets/anna/verdicts`
    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=dict)  # the newest commit last

    def revision(self, name: str) -> Commit:
        if name in self.branches:
            return self.branches[name][-1]
        for commit in (commit for branch in self.branches.values() for commit in branch):
            if commit.oid == name:
                return commit
        raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")

    def commit(self, branch: str, files: dict[str, Blob]) -> Commit:
        self.branches.setdefault(branch, []).append(Commit(files))
        return self.branches[branch][-1]


@dataclass
class Request:
    method: str
    path: str  # still quoted: a branch `a/b` is one segment, `a%2Fb`
    token: str
    body: bytes
    user: str | None = None

    def json(self) -> dict:
        return json.loads(self.body)


Reply = tuple[int, bytes, dict[str, str]]  # status, body, headers


# Method, path, who may ask, and the `HubServer` method that answers
ROUTES: list[tuple[str, re.Pattern, str, Callable]] = []


def route(method: str, path: str, access: str = "read") -> Callable:
    """Answers `path`; access is "anyone", or, where the path names a repository, "read" or "write"."""
    patterns = {
        "kind": "models|spaces|datasets",
        "repo": "[^/]+/[^/]+",
        "rev": "[^/]+",
        "path": ".+",
        "oid": "[0-9a-f]+",
    }
    for name, pattern in patterns.items():
        path = path.replace(f"{{{name}}}", f"(?P<{name}>{pattern})")

    def register(answer: Callable) -> Callable:
        ROUTES.append((method, re.compile(path), access, answer))
        return answer

    return register


class HubServer:
    """A Hub in memory, which serves until `close` or the end of its `with` block; `tokens` names their users."""

    def __init__(self, tokens: dict[str, str]):
        self.tokens = tokens
        self.requests: list[tuple[str, str]] = []  # method and path without query
        self.unknown: list[tuple[str, str]] = []  # method and path of requests that no endpoint answers
        self.errors: list[BaseException] = []  # faults of this server; `close` raises the first
        self._repos: dict[str, Repo] = {}
        self._uploaded: dict[str, bytes] = {}  # large files by SHA-256, committed or not
        self._faults: list[tuple] = []  # method, pattern of the path, and the error or None
        self._lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub, self._server.daemon_threads, self._server.block_on_close = self, True, False
        self._server.handle_error = lambda *_: None  # clients may go away
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
        if self.errors:
            raise RuntimeError("The Hub server itself failed") from self.errors[0]

    def client_environment(self, home: Path, token: str = "") -> dict[str, str]:
        """What to add to the environment of a process whose client shall talk to this Hub; `home` keeps its caches."""
        caches = {"HF_HOME": home, "HF_HUB_CACHE": home / "hub", "HF_MODULES_CACHE": home / "modules"}
        switches = {"HF_HUB_OFFLINE": 0, "TRANSFORMERS_OFFLINE": 0, "HF_HUB_DISABLE_TELEMETRY": 1}
        switches["HF_HUB_DISABLE_XET"] = 1  # by xet, the client would upload without asking whether the Hub has it
        addresses = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        addresses |= {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": token}
        return {name: str(value) for name, value in {**caches, **switches, **addresses}.items()}

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        return {path: blob.data for path, blob in self._repos[repo_id].revision(revision).files.items()}

    def commits(self, repo_id: str, revision: str = "main") -> list[str]:
        return [commit.oid for commit in reversed(self._repos[repo_id].branches[revision])]

    def fail(self, method: str, pattern: str, status: int, message="On purpose", headers=None) -> None:
        """Requests of this method in whose path `pattern` is found get an error until `heal`."""
        self._faults.append((method, pattern, HubError(status, message, headers=headers)))

    def drop(self, method: str, pattern: str) -> None:
        """Like `fail`, but resets the connection of one request after ten bytes of its body."""
        self._faults.append((method, pattern, None))

    def heal(self) -> None:
        self._faults.clear()

    def next_fault(self, method: str, path: str) -> tuple | None:
        with self._lock:
            for fault in self._faults:
                if fault[0] == method and re.search(fault[1], path):
                    if fault[2] is None:
                        self._faults.remove(fault)
                    return fault
        return None

    def answer(self, request: Request) -> Reply:
        with self._lock:
            for route_method, pattern, access, endpoint in ROUTES:
                # HEAD is GET without a body, which the connection handler withholds
                if request.method.replace("HEAD", "GET") == route_method and (
                    match := pattern.fullmatch(request.path)
                ):
                    if request.token and request.token not in self.tokens:
                        raise HubError(401, "Invalid credentials in Authorization header")
                    request.user = self.tokens.get(request.token)
                    arguments = {name: unquote(value) for name, value in match.groupdict("").items()}
                    if "repo" in arguments:
                        kind = arguments.pop("kind", "")
                        key = f"{kind}/" * (kind in ("spaces", "datasets")) + arguments["repo"]
                        arguments["repo"] = self._permitted_repo(key, request.user, access)
                    result = endpoint(self, request, **arguments)
                    return result if isinstance(result, tuple) else (200, json.dumps(result).encode(), {})
        self.unknown.append((request.method, request.path))
        raise HubError(404, f"Sorry, we can't find {request.path}")

    def _permitted_repo(self, repo_id: str, user: str | None, access: str) -> Repo:
        repo = self._repos.get(repo_id)
        owner = repo and repo.place.split("/")[-2]
        # The Hub tells nobody without permission whether a repository exists
        if repo is None or (user != owner and (repo.private or (access == "write" and user is None))):
            raise HubError(401 if user is None else 404, "Repository not found", "RepoNotFound")
        if access == "write" and user != owner:
            raise HubError(403, f"Forbidden: {user} has no permission to write to {repo_id}")
        return repo

    @route("GET", "/api/agent-harnesses", access="anyone")
    def _registry(self, request: Request) -> dict:
        return {"standardEnvVars": [], "harnesses": {}}

    @route("POST", "/api/repos/create", access="anyone")
    def _create_repo(self, request: Request) -> Reply:
        asked = request.json()
        owner, kind = asked.get("organization") or request.user, asked.get("type", "model")
        if request.user is None or owner != request.user:
            raise HubError(403 if request.user else 401, f"{request.user} may not create a {kind} of {owner}")
        repo_id = f"{owner}/{asked['name']}"
        key = f"{kind}s/" * (kind in ("space", "dataset")) + repo_id
        url, known = {"url": f"{self.endpoint}/{key}", "name": repo_id}, key in self._repos
        if not known:
            self._repos[key] = Repo(key, asked.get("visibility") == "private" or bool(asked.get("private")))
            self._repos[key].commit("main", {".gitattributes": Blob(" ".join(LFS_PATTERNS).encode())})
        return 409 if known else 200, json.dumps(url).encode(), {}

    @route("GET", "/api/{kind}/{repo}(/revision/{rev})?")
    def _repo_info(self, request: Request, repo: Repo, rev: str) -> dict:
        commit = repo.revision(rev or "main")
        siblings = [blob.described(path) for path, blob in sorted(commit.files.items())]
        name = repo.place.removeprefix("spaces/").removeprefix("datasets/")
        return {"id": name, "private": repo.private, "sha": commit.oid, "siblings": siblings, "tags": []}

    @route("GET", "/api/{kind}/{repo}/tree/{rev}(/{path})?")
    def _tree(self, request: Request, repo: Repo, rev: str, path: str) -> list[dict]:
        files = repo.revision(rev).files.items()
        return [blob.described(name) for name, blob in files if name.startswith(path and path + "/")]

    @route("POST", "/api/{kind}/{repo}/branch/{rev}", access="write")
    def _create_branch(self, request: Request, repo: Repo, rev: str) -> dict:
        repo.branches[rev] = [*repo.branches["main"]]
        return {}

    @route("POST", "/api/validate-yaml", access="anyone")
    def _validate_card(self, request: Request) -> Reply:
        try:
            data = ModelCard(request.json()["content"], ignore_metadata_errors=False).data.to_dict()
            errors = [] if isinstance(data.get("license", ""), str) else ['"license" must be a string']
        except ValueError as error:
            errors = [str(error)]
        report = {"errors": [{"message": text} for text in errors], "warnings": []}
        return 400 if errors else 200, json.dumps(report).encode(), {}

    @route("POST", "/api/{kind}/{repo}/preupload/{rev}", access="write")
    def _preupload(self, request: Request, repo: Repo, rev: str) -> dict:
        commit, answers = repo.revision(rev), []
        for path in (file["path"] for file in request.json()["files"]):
            is_lfs = any(fnmatch(path, pattern) for pattern in LFS_PATTERNS)
            answers.append({"path": path, "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False})
            if path in commit.files:  # tells the client that it need not upload the same again
                answers[-1]["oid"] = commit.files[path].oid
        return {"files": answers, "commitOid": commit.oid}

    @route("POST", r"(/{kind})?/{repo}\.git/info/lfs/objects/batch", access="write")
    def _lfs_batch(self, request: Request, repo: Repo) -> dict:
        objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in request.json()["objects"]]
        for wanted in objects:
            if wanted["oid"] not in self._uploaded:
                wanted["actions"] = {"upload": {"href": f"{self.endpoint}/upload/{wanted['oid']}"}}
        return {"transfer": "basic", "objects": objects, "hash_algo": "sha256"}

    @route("PUT", "/upload/{oid}", access="anyone")
    def _upload(self, request: Request, oid: str) -> Reply:
        self._uploaded[oid] = request.body
        return 200, b"", {}

    @route("POST", "/api/{kind}/{repo}/commit/{rev}", access="write")
    def _commit(self, request: Request, repo: Repo, rev: str) -> dict:
        """All or nothing: the branch moves only after every line was found good."""
        header, *operations = (json.loads(line) for line in request.body.splitlines())
        parent = repo.revision(rev)
        if not parent.oid.startswith(header["value"].get("parentCommit") or ""):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(parent.files)
        for operation in operations:
            value = operation["value"]
            path = value["path"]
            if operation["key"] == "deletedFile":
                del files[path]
            elif operation["key"] == "lfsFile":
                files[path] = Blob(self._uploaded[value["oid"]], is_lfs=True)
            else:
                files[path] = Blob(base64.b64decode(value["content"]))
        commit = repo.commit(rev, files)
        url = f"{self.endpoint}/{repo.place}/commit/{commit.oid}"
        return {"success": True, "commitOid": commit.oid, "commitUrl": url}

    @route("GET", "(/{kind})?/{repo}/resolve/{rev}/{path}")
    def _resolve(self, request: Request, repo: Repo, rev: str, path: str) -> Reply:
        commit = repo.revision(rev)
        headers = {"X-Repo-Commit": commit.oid}
        if path not in commit.files:
            raise HubError(404, "Entry not found", "EntryNotFound", headers)
        blob = commit.files[path]
        return 200, blob.data, {**headers, "ETag": f'"{blob.oid}"'}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait for the client's delayed ACK

    def log_message(self, *_) -> None:
        pass

    def handle_request(self) -> None:
        hub, path = self.server.hub, urlsplit(self.path).path
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        hub.requests.append((self.command, path))
        fault, size = hub.next_fault(self.command, path), int(self.headers.get("content-length", 0))
        if fault and fault[2] is None:
            self.rfile.read(min(size, 10))
            # Without lingering, closing sends a reset, not the farewell that the server would send after this method
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        body = self.rfile.read(size)
        try:
            if fault:
                raise fault[2]
            status, content, added = hub.answer(Request(self.command, path, token, body))
        except HubError as error:
            status, content, added = error.status, json.dumps({"error": str(error)}).encode(), error.headers
        except Exception as error:
            hub.errors.append(error)
            status, content, added = 500, str(error).encode(), {}
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **added, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

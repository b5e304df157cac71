"""A Hub on loopback: enough of the Hub for the real `huggingface_hub` client to create, upload, list and download.

    with HubServer(tokens={"hf_anna": "anna"}) as server:
        subprocess.run([...], env={**os.environ, **server.client_environment(tmp_path / "home", token="hf_anna")})
        assert "config.json" in server.files("anna/model")

The client reads `HF_ENDPOINT` when it is imported, so it must run in a process of its own; `client_environment` gives all the
variables that process needs. `HF_HUB_DISABLE_XET=1` is one of them: where hf_xet is installed, the client uploads by xet
without asking whether the Hub has it. This one has LFS only.

As on the real Hub, large files live on another host than the API (here another port), behind links that need no token: the
client must not send its token there. Models and Spaces only: no datasets, no pull requests, and no .gitignore is applied.
"""

import base64
import contextlib
import json
import re
import secrets
import socket
import socketserver
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml
from support.hub_repository import Blob, HubError, Repo, Upload


LOOPBACK = "127.0.0.1,localhost"
LFS_PATTERNS = ("*.safetensors", "*.bin", "*.png")
GIT_ATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LFS_PATTERNS)


@dataclass
class Request:
    method: str
    path: str  # still quoted: a branch `a/b` is one segment, `a%2Fb`
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes
    user: str | None = None

    def json(self) -> dict:
        return json.loads(self.body)


@dataclass
class Reply:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, data: object, status: int = 200, headers: dict[str, str] | None = None) -> "Reply":
        return cls(status, json.dumps(data).encode(), {"Content-Type": "application/json; charset=utf-8", **(headers or {})})


@dataclass
class Fault:
    method: str
    pattern: str
    times: int | None
    error: HubError | None = None
    after: int = 0  # bytes of the body, before the connection breaks


def entity_tag(value: str) -> dict[str, str]:
    return {"ETag": f'"{value}"'}


def read_card(text: str) -> dict:
    """The metadata at the head of a model card; {} where there are none, ValueError where they are no mapping."""
    block = re.match(r"\s*---\r?\n(.*?)^---\s*$", text, re.DOTALL | re.MULTILINE)
    try:
        card = yaml.safe_load(block[1]) if block else None
    except yaml.YAMLError as error:
        raise ValueError(f"invalid YAML: {error}") from error
    if not isinstance(card, dict | None):
        raise ValueError("the metadata must be a mapping")
    return card or {}


def card_errors(card: dict) -> list[str]:
    """What the Hub would refuse: https://github.com/huggingface/hub-docs/blob/main/modelcard.md"""
    errors = [] if isinstance(card.get("license", ""), str) else ['"license" must be a string']
    try:
        for model in card.get("model-index", []):
            required = [model["name"]]
            for result in model["results"]:
                required += [result["task"]["type"], result["dataset"]["type"], result["dataset"]["name"]]
                for metric in result["metrics"]:
                    required += [metric["type"], metric["value"]]
            if None in required:
                errors.append('"model-index" has an empty field')
    except KeyError as error:
        errors.append(f'"model-index" lacks {error}')
    except TypeError as error:
        errors.append(f'"model-index" has another structure: {error}')
    return errors


# Method, path, who may ask, and the `HubServer` method that answers
ROUTES: list[tuple[str, re.Pattern, str, Callable]] = []


def route(method: str, path: str, access: str = "read") -> Callable:
    """Answers `path`; access is "anyone", "user", or, where the path names a repository, "read" or "write"."""
    patterns = {"kind": "models|spaces", "repo": "[^/]+/[^/]+", "rev": "[^/]+", "path": ".+", "ticket": "[0-9a-f]+"}
    for name, pattern in patterns.items():
        path = path.replace(f"{{{name}}}", f"(?P<{name}>{pattern})")

    def register(answer: Callable) -> Callable:
        ROUTES.append((method, re.compile(path), access, answer))
        return answer

    return register


class HubServer:
    """A Hub in memory. It serves from construction on, and until `close` or the end of its `with` block.

    Args:
        tokens: User name by token. May be changed while the server runs.
    """

    def __init__(self, tokens: dict[str, str]):
        self.tokens = tokens
        self.requests: list[tuple[str, str, bool]] = []  # method, path without query, whether a token came with it
        self.unknown: list[tuple[str, str]] = []  # method and path of requests that no endpoint answers
        self.errors: list[BaseException] = []  # faults of this server; `close` raises the first
        self._repos: dict[str, Repo] = {}
        self._uploads: dict[str, Upload] = {}
        self._downloads: dict[str, Blob] = {}
        self._faults: list[Fault] = []
        self._lock = threading.RLock()
        # As on the Hub, large files come from a host with another name: a client reads their metadata before that redirect
        self._servers = [_Server(self, "127.0.0.1"), _Server(self, "localhost")]
        self.endpoint, self.storage = (server.url for server in self._servers)

    def __enter__(self) -> "HubServer":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        for server in self._servers:
            server.close()
        if self.errors:
            raise RuntimeError("The Hub server itself failed") from self.errors[0]

    def client_environment(self, home: Path, token: str = "") -> dict[str, str]:
        """What to add to the environment of a process whose client shall talk to this Hub; `home` keeps its caches."""
        caches = {"HF_HOME": home, "HF_HUB_CACHE": home / "hub", "HF_MODULES_CACHE": home / "modules"}
        switches = {"HF_HUB_OFFLINE": 0, "TRANSFORMERS_OFFLINE": 0, "HF_HUB_DISABLE_XET": 1, "HF_HUB_DISABLE_TELEMETRY": 1}
        addresses = {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": token, "NO_PROXY": LOOPBACK, "no_proxy": LOOPBACK}
        return {name: str(value) for name, value in {**caches, **switches, **addresses}.items()}

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        with self._lock:
            return {path: blob.data for path, blob in self._repos[repo_id].revision(revision).files.items()}

    def commits(self, repo_id: str, revision: str = "main") -> list[str]:
        """Commit ids, the newest first."""
        with self._lock:
            return [commit.oid for commit in self._repos[repo_id].history(revision)]

    def fail(
        self,
        method: str,
        pattern: str,
        status: int,
        times: int | None = 1,
        message: str = "This request fails on purpose",
        headers: dict[str, str] | None = None,
    ) -> None:
        """The next `times` requests (None: all, until `heal`) of this method get an error if `pattern` is found in their path.

        The path is without query. Where the client repeats a request, it makes up to 6 attempts, with 1, 2, 4, 8 and 8 seconds
        between them, or 1 second each with `headers={"Retry-After": "0"}`.
        """
        self._faults.append(Fault(method, pattern, times, HubError(status, message, headers=headers)))

    def drop(self, method: str, pattern: str, after: int = 0, times: int | None = 1) -> None:
        """Like `fail`, but reads only `after` bytes of the body and then resets the connection."""
        self._faults.append(Fault(method, pattern, times, after=after))

    def heal(self) -> None:
        """Ends all faults."""
        self._faults.clear()

    def next_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.times != 0 and fault.method == method and re.search(fault.pattern, path):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None

    def answer(self, request: Request) -> Reply:
        # HEAD is GET without a body, which the connection handler withholds
        method = "GET" if request.method == "HEAD" else request.method
        with self._lock:
            for route_method, pattern, access, endpoint in ROUTES:
                if method == route_method and (match := pattern.fullmatch(request.path)):
                    request.user = self._user(request)
                    arguments = {name: unquote(value) for name, value in match.groupdict("").items()}
                    if access == "user" and request.user is None:
                        raise HubError(401, "Invalid username or password.")
                    if "repo" in arguments:
                        key = "spaces/" * (arguments.pop("kind", "") == "spaces") + arguments["repo"]
                        arguments["repo"] = self._permitted_repo(key, request.user, access)
                    result = endpoint(self, request, **arguments)
                    return result if isinstance(result, Reply) else Reply.json(result)
            self.unknown.append((request.method, request.path))
        raise HubError(404, f"Sorry, we can't find {request.path}")

    def _user(self, request: Request) -> str | None:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.tokens.get(token)

    def _permitted_repo(self, repo_id: str, user: str | None, access: str) -> Repo:
        repo = self._repos.get(repo_id)
        is_hidden = repo is None or (repo.private and user != repo.owner)
        # The Hub tells nobody without permission whether a repository exists
        if user is None and (is_hidden or access == "write"):
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        if is_hidden:
            raise HubError(404, "Repository not found", "RepoNotFound")
        if access == "write" and user != repo.owner:
            raise HubError(403, f"Forbidden: {user} has no permission to write to {repo_id}")
        return repo

    @route("GET", "/api/agent-harnesses", access="anyone")
    def _registry(self, request: Request) -> dict:
        """The client asks for it on its own account, once in each new home, to describe its surroundings."""
        return {"standardEnvVars": [], "harnesses": {}}

    # Repositories

    @route("POST", "/api/repos/create", access="user")
    def _create_repo(self, request: Request) -> Reply:
        asked = request.json()
        owner, name = asked.get("organization") or request.user, asked["name"]
        kind = asked.get("type", "model")
        if kind not in ("model", "space"):
            raise HubError(400, f"This Hub keeps models and Spaces, not {kind}s")
        if kind == "space" and asked.get("sdk") not in ("docker", "gradio", "static"):
            raise HubError(400, "A Space needs an sdk")
        if not re.fullmatch(r"[\w.-]{1,96}", name, re.ASCII):
            raise HubError(400, f"Invalid repository name {name!r}")
        if owner != request.user:
            raise HubError(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        repo_id = f"{owner}/{name}"
        key = "spaces/" * (kind == "space") + repo_id
        url = {"url": f"{self.endpoint}/{key}", "name": repo_id}
        if key in self._repos:
            return Reply.json({"error": f"You already created this {kind} repo", **url}, 409)
        self._repos[key] = Repo(repo_id, asked.get("visibility") == "private" or bool(asked.get("private")))
        files = {".gitattributes": Blob(GIT_ATTRIBUTES.encode())}
        self._repos[key].commit("main", files, "initial commit", "", owner)
        return Reply.json(url)

    # Listings

    @route("GET", "/api/{kind}/{repo}(/revision/{rev})?")
    def _model_info(self, request: Request, repo: Repo, rev: str) -> dict:
        commit = repo.revision(rev or "main")
        card = read_card(commit.files.get("README.md", Blob(b"")).data.decode())
        siblings = [blob.sibling(path) for path, blob in sorted(commit.files.items())]
        license_tag = [f"license:{card['license']}"] if card.get("license") else []
        about = {"id": repo.id, "author": repo.owner, "private": repo.private, "gated": False, "disabled": False}
        described = {"cardData": card, "tags": [*(card.get("tags") or []), *license_tag]}
        described |= {name: card.get(name) for name in ("library_name", "pipeline_tag")}
        return {**about, **described, "sha": commit.oid, "lastModified": commit.date, "siblings": siblings}

    @route("GET", "/api/{kind}/{repo}/tree/{rev}(/{path})?")
    def _tree(self, request: Request, repo: Repo, rev: str, path: str) -> list[dict]:
        recursive = request.query.get("recursive", [""])[0].lower() in ("true", "1")
        entries = repo.revision(rev).entries(path.rstrip("/"), recursive)
        if path and not entries:
            raise HubError(404, f"{path} does not exist on {rev}", "EntryNotFound")
        return entries

    @route("POST", "/api/{kind}/{repo}/branch/{rev}", access="write")
    def _create_branch(self, request: Request, repo: Repo, rev: str) -> dict:
        if rev in repo.branches:
            raise HubError(409, f"Reference already exists: refs/heads/{rev}")
        repo.branches[rev] = repo.revision(request.json().get("startingPoint") or "main")
        return {}

    # Uploading

    @route("POST", "/api/validate-yaml", access="anyone")
    def _validate_card(self, request: Request) -> Reply:
        content = request.json()["content"]
        try:
            card = read_card(content)
            errors = card_errors(card)
            warnings = [] if card else ["empty or missing yaml metadata in repo card"]
        except ValueError as error:
            errors, warnings = [str(error)], []
        report = {"errors": [{"message": text} for text in errors], "warnings": [{"message": text} for text in warnings]}
        return Reply.json(report, 400 if errors else 200)

    @route("POST", "/api/{kind}/{repo}/preupload/{rev}", access="write")
    def _preupload(self, request: Request, repo: Repo, rev: str) -> dict:
        commit, answers = repo.revision(rev), []
        for file in request.json()["files"]:
            is_lfs = any(fnmatch(file["path"], pattern) for pattern in LFS_PATTERNS)
            answer = {"path": file["path"], "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False}
            if file["path"] in commit.files:  # tells the client that it need not upload the same again
                answer["oid"] = commit.files[file["path"]].etag
            answers.append(answer)
        return {"files": answers, "commitOid": commit.oid}

    @route("POST", r"/{repo}\.git/info/lfs/objects/batch", access="write")
    def _lfs_batch(self, request: Request, repo: Repo) -> dict:
        objects = []
        for wanted in request.json()["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            objects.append({"oid": oid, "size": size})
            if oid in repo.lfs:  # no action: there is nothing to do
                continue
            ticket = secrets.token_hex(16)
            self._uploads[ticket] = Upload(repo, oid, size)
            upload = {"href": f"{self.storage}/upload/{repo.id}/{ticket}"}
            objects[-1]["actions"] = {"upload": upload}
        return {"transfer": "basic", "objects": objects, "hash_algo": "sha256"}

    @route("PUT", "/upload/[^/]+/[^/]+/{ticket}", access="anyone")
    def _upload(self, request: Request, ticket: str) -> Reply:
        if ticket not in self._uploads:
            raise HubError(403, "This upload link is not valid")
        self._uploads[ticket].finish(request.body)
        return Reply(200)

    @route("POST", "/api/{kind}/{repo}/commit/{rev}", access="write")
    def _commit(self, request: Request, repo: Repo, rev: str) -> dict:
        """All or nothing: the branch moves only after every line was found good."""
        if "create_pr" in request.query:
            raise HubError(400, "This Hub has no pull requests")
        if rev not in repo.branches:
            raise HubError(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        parent = repo.branches[rev]
        header, *operations = (json.loads(line) for line in request.body.splitlines())
        if not parent.oid.startswith(header["value"].get("parentCommit") or ""):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(parent.files)
        for operation in operations:
            self._apply(operation["key"], operation["value"], repo, files)
        if "README.md" in files:
            try:
                errors = card_errors(read_card(files["README.md"].data.decode()))
            except ValueError as error:
                errors = [str(error)]
            if errors:
                raise HubError(400, f"Invalid metadata in README.md: {'; '.join(errors)}")
        title, message = header["value"]["summary"], header["value"].get("description", "")
        commit = repo.commit(rev, files, title, message, request.user)
        place = next(key for key, known in self._repos.items() if known is repo)
        url = f"{self.endpoint}/{place}/commit/{commit.oid}"
        return {"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""}

    def _apply(self, key: str, value: dict, repo: Repo, files: dict[str, Blob]) -> None:
        path = value["path"]
        if not path.strip("/") or path.startswith("/") or {"..", ".", ".git"} & set(path.split("/")):
            raise HubError(400, f"Invalid path {path!r}")
        if key == "file":
            files[path] = Blob(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            if value["oid"] not in repo.lfs:
                raise HubError(400, f"{path} names the LFS object {value['oid']}, which was not uploaded")
            files[path] = Blob(repo.lfs[value["oid"]], is_lfs=True)
        elif key == "deletedFile":
            if path not in files:
                raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            del files[path]
        else:
            raise HubError(400, f"Unknown operation {key!r}")

    # Downloading

    @route("GET", "(/{kind})?/{repo}/resolve/{rev}/{path}")
    def _resolve(self, request: Request, repo: Repo, rev: str, path: str) -> Reply:
        commit = repo.revision(rev)
        headers = {"X-Repo-Commit": commit.oid}
        if path not in commit.files:
            raise HubError(404, "Entry not found", "EntryNotFound", headers)
        blob = commit.files[path]
        headers |= entity_tag(blob.oid)
        if not blob.is_lfs:
            return Reply(200, blob.data, headers)
        ticket = secrets.token_hex(16)
        self._downloads[ticket] = blob
        headers |= {"X-Linked-Etag": f'"{blob.etag}"', "X-Linked-Size": str(len(blob.data))}
        return Reply(302, headers={**headers, "Location": f"{self.storage}/content/{repo.id}/{ticket}/{quote(path)}"})

    @route("GET", "/content/[^/]+/[^/]+/{ticket}/{path}", access="anyone")
    def _content(self, request: Request, ticket: str, path: str) -> Reply:
        if ticket not in self._downloads:
            raise HubError(403, "This download link is not valid")
        blob = self._downloads[ticket]
        return Reply(200, blob.data, entity_tag(blob.etag))


class _Handler(BaseHTTPRequestHandler):
    """One connection, with as many requests as the client sends over it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait for the client's delayed ACK

    def setup(self) -> None:
        super().setup()
        self.server.connections[threading.current_thread()] = self.connection

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            self.server.connections.pop(threading.current_thread(), None)

    def log_message(self, *_) -> None:
        pass

    def handle_request(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.requests.append((self.command, url.path, "authorization" in headers))
        fault = hub.next_fault(self.command, url.path)
        if fault and not fault.error:
            self.read_body(headers, fault.after)
            # Without lingering, closing sends a reset, not the farewell that the server would send after this method
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        body = self.read_body(headers)
        try:
            if fault:
                raise fault.error
            reply = hub.answer(Request(self.command, url.path, parse_qs(url.query), headers, body))
        except HubError as error:
            reply = Reply.json({"error": str(error)}, error.status, error.headers)
        except Exception as error:
            hub.errors.append(error)
            reply = Reply.json({"error": f"The Hub server itself failed: {error!r}"}, 500)
        self.send_response(reply.status)
        sizes = {"Content-Length": str(len(reply.body)), "X-Request-Id": secrets.token_hex(8)}
        for name, value in {**reply.headers, **sizes}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def read_body(self, headers: dict[str, str], limit: int = sys.maxsize) -> bytes:
        if "transfer-encoding" in headers:
            raise NotImplementedError("The client is expected to announce the length of what it sends")
        size = min(int(headers.get("content-length", 0)), limit)
        body = self.rfile.read(size)
        if len(body) < size:
            raise ConnectionError("The client went away in the middle of a request")
        return body


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, hub: HubServer, host: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.url = f"http://{host}:{self.server_address[1]}"
        self.connections: dict[threading.Thread, socket.socket] = {}
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients may go away
            self.hub.errors.append(sys.exception())

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()
        # Connections that the client keeps open for its next request
        for thread, connection in list(self.connections.items()):
            with contextlib.suppress(OSError):  # closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=10)

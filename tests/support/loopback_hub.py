"""The part of a model hub that huggingface_hub and the server use, on loopback. It can be told to fail."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_a_member"
LARGE = 4096
"""Bytes from which a file is kept outside git: its hash is SHA-256 and its address a redirect."""


@dataclass
class Repository:
    """access: who may read it; "gated" needs a token of a member. revisions: commit by branch or tag."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    access: Literal["public", "private", "gated"] = "public"
    revisions: dict[str, str] = field(default_factory=dict)

    def resolve(self, revision: str) -> str | None:
        known = {"main": self.commit, **self.revisions}
        return revision if revision in known.values() else known.get(revision)


@dataclass(frozen=True)
class Asked:
    """A request as it came. name: the file, "" for the list of files."""

    path: str
    name: str
    token: str | None


@dataclass(frozen=True)
class Fault:
    """Instead of a good answer: a status, or `cut` bytes of the body and the end of the connection, or a wrong body."""

    status: int | None = None
    cut: int | None = None
    body: bytes | None = None


class LoopbackHub:
    """faults: by file name ("" for the list) what the next requests get, one each; the last one stays if `forever`."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        self.faults: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self.forever: dict[str, Fault] = {}
        self.lock = threading.Lock()
        self.url = ""

    def fetched(self) -> list[str]:
        """Names of the files that were asked for (redirects not counted), in order and as often."""
        with self.lock:
            return [asked.name for asked in self.asked if asked.name and "/resolve/" in asked.path]

    def next_fault(self, name: str) -> Fault | None:
        with self.lock:
            return self.faults[name].popleft() if self.faults[name] else self.forever.get(name)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LoopbackHub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api(path, parts[2:])
        elif parts[0] == "lfs":
            repository = self.hub.repositories["/".join(parts[1:3])]
            self._body(path, repository, "/".join(parts[3:]), urlsplit(self.path).query)
        elif "resolve" in parts:
            at = parts.index("resolve")
            self._resolve(path, "/".join(parts[:at]), parts[at + 1], "/".join(parts[at + 2 :]))
        else:
            self._refuse(404, "")

    do_HEAD = do_GET

    def _api(self, path: str, parts: list[str]) -> None:
        """/api/models/OWNER/NAME[/revision/REVISION] and /api/models/OWNER/NAME/tree/REVISION."""
        self._note(path, "")
        repository = self._readable("/".join(parts[:2]))
        if repository is None or self._fails(""):
            return None
        commit = repository.resolve(parts[3] if len(parts) > 3 else "main")
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        if parts[2:3] == ["tree"]:
            return self._json([_entry(name, data) for name, data in repository.files.items()])
        name = "/".join(parts[:2])
        siblings = [_sibling(name, data) for name, data in repository.files.items()]
        return self._json({"id": name, "modelId": name, "sha": commit, "private": False, "siblings": siblings})

    def _resolve(self, path: str, source: str, revision: str, name: str) -> None:
        repository = self._readable(source)
        if repository is None:
            return self._note(path, name)
        if repository.resolve(revision) is None:
            return self._refuse(404, "RevisionNotFound")
        if name not in repository.files:
            return self._refuse(404, "EntryNotFound")
        data = repository.files[name]
        if len(data) < LARGE:
            return self._body(path, repository, name, repository.resolve(revision))
        self._note(path, name)
        headers = {
            "Location": f"{self.hub.url}/lfs/{source}/{name}?{repository.resolve(revision)}",
            "X-Linked-Size": str(len(data)),
        }
        headers |= {"X-Linked-Etag": f'"{etag(data)}"', "X-Repo-Commit": repository.resolve(revision) or ""}
        return self._send(302, b"", headers)

    def _body(self, path: str, repository: Repository, name: str, commit: str | None = None) -> None:
        self._note(path, name)
        data = repository.files[name]
        headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": commit or repository.commit, "Accept-Ranges": "bytes"}
        fault = None if self.command == "HEAD" else self.hub.next_fault(name)
        if fault is not None and fault.status is not None:
            return self._refuse(fault.status, "")
        status, start = 200, 0
        wanted = self.headers.get("Range")
        if wanted:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = (fault.body if fault and fault.body is not None else data)[start:]
        return self._send(status, body, headers, cut=fault.cut if fault else None)

    def _readable(self, source: str) -> Repository | None:
        repository = self.hub.repositories.get(source)
        sent = self.headers.get("Authorization")
        if sent not in (None, f"Bearer {TOKEN}"):
            headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self._refuse(401, "", headers)
            return None
        if repository is None or (repository.access == "private" and sent is None):
            self._refuse(401 if sent is None else 404, "RepoNotFound")
            return None
        if repository.access == "gated" and sent is None:
            self._refuse(401, "GatedRepo")
            return None
        return repository

    def _fails(self, name: str) -> bool:
        fault = self.hub.next_fault(name)
        if fault is None:
            return False
        if fault.status is not None:
            self._refuse(fault.status, "")
        else:
            self._send(200, fault.body or b"", {})
        return True

    def _note(self, path: str, name: str) -> None:
        sent = self.headers
        asked = Asked(path, name, sent.get("Authorization"))
        with self.hub.lock:
            self.hub.asked.append(asked)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b'{"error": "refused"}', {**({"X-Error-Code": code} if code else {}), **(headers or {})})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


def etag(data: bytes) -> str:
    if len(data) >= LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _lfs(data: bytes) -> dict[str, Any]:
    return {"sha256": etag(data), "oid": etag(data), "size": len(data), "pointerSize": 130}


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    lfs = {"lfs": _lfs(data)} if len(data) >= LARGE else {}
    return {"rfilename": name, "size": len(data), "blobId": etag(data), **lfs}


def _entry(name: str, data: bytes) -> dict[str, Any]:
    lfs = {"lfs": _lfs(data)} if len(data) >= LARGE else {}
    return {"type": "file", "path": name, "oid": etag(data), "size": len(data), **lfs}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle of an answer is expected here."""


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    hub = LoopbackHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

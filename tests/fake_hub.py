"""A server on 127.0.0.1 that answers as the Hugging Face hub does, and, if told to, as it does on a bad day."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOBODY = "http://127.0.0.1:9"


class FakeHub(ThreadingHTTPServer):
    """Serves `folder` as the repository `repo`. `faults` are answered in order, one a request that they match.

    A fault is (method, part of the path, what): a status with optional headers, "cut" or "stall" in the middle of a
    file, "whole" where a range was asked, or "damaged". As on the hub, weights have a SHA-256 and are elsewhere.
    """

    daemon_threads = True

    def __init__(self, repo: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repo, self.folder = repo, folder
        self.faults: list[tuple[str, str, object]] = []
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, Range
        self.sent_bytes = 0  # of weights
        self.refused_token: str | None = None  # requests that send it are answered 401
        self.xet = False  # offer weights through an accelerated transfer too, from a server that is not there
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(repo: str, folder: Path) -> Iterator[FakeHub]:
    hub = FakeHub(repo, folder)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        if self.server.refused_token and self.server.refused_token in self.headers.get("Authorization", ""):
            return self._send(401, b"{}", {"Content-Type": "application/json"}, with_body)
        prefix = f"/{self.server.repo}/resolve/{COMMIT}/"
        path = path.replace("/resolve/main/", f"/resolve/{COMMIT}/")
        if path.startswith(prefix) and _is_large(path) and self.server.folder.joinpath(Path(path).name).is_file():
            return self._send(302, b"", self._elsewhere(self.server.folder / Path(path).name), with_body)
        fault = self._fault(path)
        if isinstance(fault, tuple):
            status, headers = fault
            body = b"<html>Log in</html>" if headers.get("Content-Type") == "text/html" else b"{}"
            return self._send(status, body, {"Content-Type": "application/json", **headers}, with_body)
        if path == "/xet-token":
            key = {"X-Xet-Cas-Url": NOBODY, "X-Xet-Access-Token": "key", "X-Xet-Token-Expiration": str(1 << 40)}
            return self._send(200, b"{}", key, with_body)
        if path.startswith(f"/api/models/{self.server.repo}"):
            return self._send(200, json.dumps(self._info()).encode(), {"Content-Type": "application/json"}, with_body)
        file = self.server.folder / path.removeprefix(prefix).removeprefix("/elsewhere/")
        if not path.startswith((prefix, "/elsewhere/")) or not file.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        content = file.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        if fault == "damaged":
            content = bytes(len(content))
        status, start = 200, 0
        if self.headers.get("Range") and fault != "whole":
            status, start = 206, int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(status, content[start:], headers, with_body, fault)

    def _elsewhere(self, file: Path) -> dict[str, str]:
        xet = {"X-Xet-Hash": "0" * 64, "Link": f'<{self.server.url}/xet-token>; rel="xet-auth"'}
        return {
            "Location": f"http://localhost:{self.server.server_port}/elsewhere/{file.name}",
            "X-Repo-Commit": COMMIT,
            "X-Linked-ETag": f'"{_sha256(file)}"',
            "X-Linked-Size": str(file.stat().st_size),
            **(xet if self.server.xet else {}),
        }

    def _fault(self, path: str) -> object:
        for fault in self.server.faults:
            if fault[0] == self.command and fault[1] in path:
                self.server.faults.remove(fault)
                return fault[2]
        return None

    def _info(self) -> dict:
        files = []
        for file in self.server.folder.iterdir():
            size = file.stat().st_size
            lfs = {"lfs": {"sha256": _sha256(file), "size": size, "pointerSize": 135}} if _is_large(file.name) else {}
            files.append({"rfilename": file.name, "size": size, **lfs})
        return {
            "id": self.server.repo,
            "sha": COMMIT,
            "siblings": files,
            "tags": [],
            "private": False,
            "downloads": 0,
            "likes": 0,
            "_id": "0",
        }

    def _send(self, status: int, body: bytes, headers: dict, with_body: bool, fault: object = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not with_body:
            return
        half = fault in ("cut", "stall")
        sent = body[: len(body) // 2] if half else body
        self.wfile.write(sent)
        if self.path.startswith("/elsewhere/"):
            self.server.sent_bytes += len(sent)
        if not half:
            return
        self.wfile.flush()
        if fault == "stall":
            self.server.closing.wait()
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".msgpack"))


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()

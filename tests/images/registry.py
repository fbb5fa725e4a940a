"""A registry that takes images and keeps them in memory: the pushing half of the OCI protocol."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Registry(ThreadingHTTPServer):
    """What was pushed: manifests by "name:tag", blobs by digest."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.manifests: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.uploads: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serve() -> Generator[Registry]:
    """A registry while the block runs; what it holds can be read after it too."""
    registry = Registry()
    thread = threading.Thread(target=registry.serve_forever)
    thread.start()
    try:
        yield registry
    finally:
        registry.shutdown()
        thread.join()
        registry.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _registry(self) -> Registry:
        assert isinstance(self.server, Registry)
        return self.server

    def _answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is not None:
            return self.rfile.read(int(length))
        parts: list[bytes] = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/v2/" else 404)

    def do_HEAD(self) -> None:
        digest = self.path.rpartition("/")[2]
        self._answer(200 if digest in self._registry.blobs else 404)

    def do_POST(self) -> None:
        self._body()
        key = secrets.token_hex(8)
        self._registry.uploads[key] = b""
        self._answer(202, Location=f"/upload/{key}")

    def do_PATCH(self) -> None:
        self._registry.uploads[self.path.rpartition("/")[2]] += self._body()
        self._answer(202, Location=self.path)

    def do_PUT(self) -> None:
        url, body = urlsplit(self.path), self._body()
        if url.path.startswith("/upload/"):
            body = self._registry.uploads.pop(url.path.rpartition("/")[2]) + body
            if parse_qs(url.query)["digest"] != [_digest(body)]:
                self._answer(400)
                return
            self._registry.blobs[_digest(body)] = body
        else:
            repository, _, tag = url.path.removeprefix("/v2/").rsplit("/", 2)
            self._registry.manifests[f"{repository}:{tag}"] = body
        self._answer(201, Docker_Content_Digest=_digest(body))

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Nothing is printed: the test looks at what arrived."""


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"

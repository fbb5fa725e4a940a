"""What a request's head and its chunks must have, besides what llhttp checks by itself. Pure.

llhttp, the parser under uvicorn, takes a request line without a version, a request without a Host
or with two, and every transfer coding whose last one is chunked. A proxy in front may read such a
request in another way than we do. RFC 9112, 2.3, 3.2 and 6.1.

llhttp also calls us for each chunk of a body, whatever it holds: a read of the socket with a chunk
for each byte would hold the event loop for a hundred times as long as one of a single chunk.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

Scope = MutableMapping[str, Any]
_VERSIONS = ("1.1", "1.0")
MANY_HEADERS = 256
"""64 KiB have room for 15,000, each of which is looked at again and again. Browsers send 30."""
MANY_CHUNKS = 4096
"""To read so many takes some milliseconds."""
LEAST_MEAN_BYTES = 64
"""Clients' libraries send KiB in a chunk; a program that writes its body in words sends less."""


def head_fault(version: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Why a request is refused with 400; empty for one that is served.

    `version` is as the parser says it, `headers` have names in lower case.
    """
    if version not in _VERSIONS:
        return "the request line has no version, or another one than HTTP/1.1 and HTTP/1.0"
    if len(headers) > MANY_HEADERS:
        return f"the request has more than {MANY_HEADERS} headers"
    hosts = codings = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            codings += 1
            if codings > 1 or version == "1.0" or value.strip().lower() != b"chunked":
                return "Transfer-Encoding must be chunked, once, and not in HTTP/1.0"
    if hosts > 1:
        return "the request has several Host headers"
    if not hosts and version == "1.1":
        return "the request has no Host header"
    return ""


class Chunks:
    """Counts the chunks of a body; of `MANY_CHUNKS` in a row the mean has `LEAST_MEAN_BYTES`."""

    __slots__ = ("_count", "size")

    def __init__(self) -> None:
        self._count = 0
        self.size = 0
        """Bytes of the counted ones, which the reader of the body adds."""

    def begin(self) -> str:
        """The head of the next chunk is here. Why the body is refused with 400, or empty."""
        self._count += 1
        if self._count <= MANY_CHUNKS:
            return ""
        is_short = self.size < MANY_CHUNKS * LEAST_MEAN_BYTES
        self._count, self.size = 1, 0
        if not is_short:
            return ""
        return (
            f"{MANY_CHUNKS} chunks of the body in a row have less than {LEAST_MEAN_BYTES} bytes "
            "each on average: send longer chunks, or a Content-Length"
        )


def one_slash(path: str) -> str:
    """The path with one slash at its beginning: a client's base URL that ends in one makes two."""
    return "/" + path.lstrip("/") if path.startswith("//") else path


def with_one_slash(scope: Scope) -> Scope:
    """The ASGI scope with such a path: to URL libraries what follows two slashes is a host."""
    if not scope.get("path", "").startswith("//"):
        return scope
    raw_path = b"/" + scope["raw_path"].lstrip(b"/")
    return {**scope, "path": one_slash(scope["path"]), "raw_path": raw_path}

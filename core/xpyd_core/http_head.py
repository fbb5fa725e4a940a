"""What a request's head must have, besides what llhttp checks by itself. Pure.

llhttp, the parser under uvicorn, takes a request line without a version, a request without a Host
or with two, and every transfer coding whose last one is chunked. A proxy in front may read such a
request in another way than we do. RFC 9112, 2.3, 3.2 and 6.1.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
_VERSIONS = ("1.1", "1.0")


def head_fault(version: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Why a request is refused with 400; empty for one that is served.

    `version` is as the parser says it, `headers` have names in lower case.
    """
    if version not in _VERSIONS:
        return "the request line has no version, or another one than HTTP/1.1 and HTTP/1.0"
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


def one_slash(path: str) -> str:
    """The path with one slash at its beginning: a client's base URL that ends in one makes two."""
    return "/" + path.lstrip("/") if path.startswith("//") else path


def with_one_slash(scope: Scope) -> Scope:
    """The ASGI scope with such a path: to URL libraries what follows two slashes is a host."""
    if not scope.get("path", "").startswith("//"):
        return scope
    raw_path = b"/" + scope["raw_path"].lstrip(b"/")
    return {**scope, "path": one_slash(scope["path"]), "raw_path": raw_path}

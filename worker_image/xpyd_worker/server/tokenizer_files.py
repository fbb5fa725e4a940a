"""`GET /tokenizer`: the tokenizer's files for routers, made once at the load, sent in pieces.

A document may have tens of megabytes. Made when it is asked for it would hold Python's lock, and
with it every stream, for tenths of a second; sent in one piece it would be copied at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from hashlib import sha256

from quart import Response

from xpyd_core.tokenizer_files import MAX_BYTES, TokenizerFiles, encode_tokenizer_files

_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True)
class ServedFiles:
    """The document and its ETag, quotes included."""

    body: bytes
    etag: str

    @classmethod
    def of(cls, files: TokenizerFiles) -> ServedFiles | None:
        """Slow for a large vocabulary; None for one that is longer than routers take."""
        body = encode_tokenizer_files(files)
        if len(body) > MAX_BYTES:
            return None
        return cls(body, f'"{sha256(body).hexdigest()[:32]}"')


def tokenizer_files_response(files: ServedFiles, if_none_match: str) -> Response:
    """The document; 304 where the caller has it."""
    known = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    if files.etag in known or "*" in known:
        return Response(b"", 304, {"ETag": files.etag})
    headers = {"ETag": files.etag, "Content-Length": str(len(files.body))}
    return Response(_pieces(files.body), 200, headers, content_type="application/json")


async def _pieces(body: bytes) -> AsyncGenerator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]

"""What a router needs to turn a request into the engine's token ids and block hashes. Pure.

An engine answers `GET /tokenizer` with one such document as JSON; the router's package `tokens`
reads it. Append-only, as xpyd_core.messages: unknown fields are ignored, so that either side may be
newer.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

import msgspec

from xpyd_core.blocks import SCHEME
from xpyd_core.errors import ProtocolError

PATH = "/tokenizer"
MAX_BYTES = 64 * 1024 * 1024
"""The bound on a document. The largest tokenizer.json of known models has 33 MB (Gemma 3)."""

_Count = Annotated[int, msgspec.Meta(ge=0)]


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint's tokenizer and chat templates, and how its engine hashes blocks."""

    tokenizer: str
    """tokenizer.json as the engine encodes with it: what tokenizer_config.json changes in it (BOS,
    added tokens) is done, and it neither cuts nor pads."""
    chat_templates: dict[str, str] = {}
    """Templates by name: `default`, and for requests with tools `tool_use` where there is one."""
    special_tokens: dict[str, str] = {}
    """Variables of the templates: `bos_token` and its like."""
    knows_developer: bool = False
    """Where not, templates get messages of that role as the system's."""
    vocab_size: _Count
    """Ids that the model has. A prompt with another is refused."""
    max_model_len: _Count
    """Tokens of prompt and output together."""
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens of a block."""
    block_hash: str = SCHEME
    """How blocks are hashed: xpyd_core.blocks, salted by the request's `cache_salt`, no extras."""
    prefix_caching: bool = True
    """Whether the engine keeps prefixes at all."""


_decoder = msgspec.json.Decoder(TokenizerFiles)


def encode_tokenizer_files(files: TokenizerFiles) -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(files)


def decode_tokenizer_files(data: bytes) -> TokenizerFiles:
    """The document in `data`; ProtocolError where it is none or too long."""
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"tokenizer files of {len(data)} bytes, more than {MAX_BYTES}")
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"tokenizer files: {error}") from error


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

    def is_known(self, if_none_match: str) -> bool:
        """Whether the caller has the document, by its If-None-Match."""
        known = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        return self.etag in known or "*" in known

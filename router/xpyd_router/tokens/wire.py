"""Frames between the router and its tokenizing child, over the child's stdin and stdout. Pure.

A frame: length of its head and of its body (u32 each, little-endian), the head as msgpack, the body
as it is: a client's JSON, an engine's tokenizer files, hashes. Both ends are of one version of this
package, so nothing is optional here.
"""

from __future__ import annotations

import struct

import msgspec

HEAD = struct.Struct("<II")
HASH_BYTES = 32


class LoadTokenizer(msgspec.Struct, frozen=True, tag="load"):
    """Read the tokenizer files in the body, to be known as `key`. Answered by Loaded."""

    key: str


class ForgetTokenizer(msgspec.Struct, frozen=True, tag="forget"):
    """Free what is known as `key`. Not answered."""

    key: str


class Count(msgspec.Struct, frozen=True, tag="count"):
    """Count the request in the body. Answered by Counted."""

    key: str
    is_chat: bool


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The answer to LoadTokenizer; `error` is empty for success. `block_tokens`: the size of hashed
    blocks.
    """

    error: str = ""
    block_tokens: int = 0


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """The answer to Count, with the hashes in the body. `refused` says why there is no count."""

    tokens: int = 0
    refused: str = ""


ToChild = LoadTokenizer | ForgetTokenizer | Count
FromChild = Loaded | Counted

_encoder = msgspec.msgpack.Encoder()
to_child = msgspec.msgpack.Decoder(ToChild)
from_child = msgspec.msgpack.Decoder(FromChild)


def frame_head(message: ToChild | FromChild, body_bytes: int) -> bytes:
    """The bytes of a frame in front of its body."""
    head = _encoder.encode(message)
    return HEAD.pack(len(head), body_bytes) + head

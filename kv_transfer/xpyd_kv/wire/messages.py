"""The frames' headers as typed values. docs/wire.md describes each to the byte. Pure.

A frame is a fixed prefix, this header (msgpack map, strict types, unknown fields ignored) and a
body. Long lists (token ids, frame numbers) ride in the body as little-endian u32. Append-only
within a major version: new fields get defaults, new types the MUST flag where an old peer may not
ignore them. What a header's numbers mean for a transfer is the session's business.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

MAJOR = 1
MINOR = 0
# 16 groups of the default size: one frame holds the I/O thread for a few milliseconds at most.
DEFAULT_MAX_DATA_BYTES = 64 * 2**20
MAX_PROBE_BYTES = 64 * 1024
CHECKSUM_BYTES = 8
_Text = Annotated[str, msgspec.Meta(max_length=256)]
# Printable ASCII: they are in log lines.
_Id = Annotated[str, msgspec.Meta(pattern=r"^[!-~]+\Z", max_length=64)]
_Group = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]*\Z", max_length=64)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
# `$` alone would let a newline pass at the end; the length does not.
_Uuid = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
_U16 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
_U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=0xFFFF_FFFF)]
_U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
# An ip and a port; who dials it looks closer.
_Address = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.:\[\]%]+\Z", max_length=64)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_Layers = Annotated[tuple[_U16, ...], msgspec.Meta(min_length=1, max_length=1024)]
Mode = Literal["put_async", "put", "get"]
"""The side that decides when a prompt's KV moves: P as soon as it is computed (put_async), P while
its engine waits (put), or D when its request runs (get)."""
MODES: tuple[Mode, ...] = ("put_async", "put", "get")
_Mac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Hello(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """First frame of either side. `incarnation` is random per process start."""

    major: _U16
    minor: _U16
    engine_id: _Id
    incarnation: _Id
    role: Literal["P", "D", "A"]
    nonce: _Nonce
    rank: _U16 = 0
    transports: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=16)] = ("tcp",)
    # Which machine, as a digest, and which of its GPUs holds the cache.
    host: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    gpu: Annotated[str, msgspec.Meta(pattern=r"^[!-~]*\Z", max_length=64)] = ""
    group: _Group = ""
    """P: random for each peer of it; further connections name the first one's."""
    link: _U16 = 0
    """P: 0 on the first connection of a group, which is the peer; the others carry DATA only."""
    data: bool = False
    """The connection is between two ranks: it carries what follows GRANT."""
    engine: Annotated[str, msgspec.Meta(pattern=r"^[ -~]*\Z", max_length=64)] = ""
    """The program, where it is not xpyd's own. A D compares another one's KV with its own first."""


class Auth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """HMAC-SHA256 with a fleet key over both HELLOs and the sender's side of the connection."""

    mac: _Mac


class Layout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """After mutual AUTH: the compatibility factors, compared one by one, and the cache's shape.

    `layers`, `kv_heads`, `block_size` (tokens) and `block_bytes` (one block of one layer) are the
    rank's, `total_kv_heads` (0: `kv_heads`), `tp`, `stages` (the layers of each pipeline stage;
    empty: `layers` alone) and `is_mla` the engine's. `fit` says which two go together.
    `max_tokens` is the longest prompt that the sender takes in an OFFER, `max_data_bytes` the most
    KV bytes in a DATA body. `is_ranked`: the caches are in the processes of the ranks, even where
    there is one rank. `ranks`: where each rank of a D takes connections, if they are processes.
    """

    factors: Annotated[
        dict[_Text, Annotated[str, msgspec.Meta(max_length=4096)]], msgspec.Meta(max_length=64)
    ]
    layers: _Layers
    kv_heads: _U16
    head_dim: _U16
    block_size: _U16
    dtype: _Text
    block_bytes: _Count
    max_tokens: _Count
    max_data_bytes: _Count = DEFAULT_MAX_DATA_BYTES
    total_kv_heads: _U16 = 0
    tp: _Ranks = 1
    stages: Annotated[tuple[_Layers, ...], msgspec.Meta(max_length=1024)] = ()
    is_mla: bool = False
    ranks: Annotated[tuple[_Address, ...], msgspec.Meta(max_length=1024)] = ()
    is_ranked: bool = False


class Refuse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why this connection is closed next: the factor or limit at fault. Never a secret."""

    reason: _Text
    factor: _Text = ""


class _OfTransfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of one transfer, at its first or a later try (`epoch`)."""

    uuid: _Uuid
    prompt_index: _U16
    epoch: _U32


class Offer(_OfTransfer, frozen=True, kw_only=True, omit_defaults=True):
    """P -> D: KV of one prompt will come. Body: all token ids offered (4 x `tokens` bytes).

    The first `prompt_tokens` are the prompt's, the rest continue_from's. `digest` is SHA-256 of the
    body. `salt` enters the block hashes. `total_bytes` without any skip. With `mode` get D takes no
    room now and sends PULL when its request runs; the other modes ask for GRANT as soon as may be.
    """

    tokens: _Count
    prompt_tokens: _Count
    digest: _Mac
    total_bytes: _U63
    salt: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    mode: Mode = "put_async"


class Grant(_OfTransfer, frozen=True, kw_only=True, omit_defaults=True):
    """D -> P: send now, beginning behind the first `skip_tokens` tokens, which D has."""

    skip_tokens: _U32 = 0


class Pull(_OfTransfer, frozen=True, kw_only=True, omit_defaults=True):
    """D -> P: GRANT for an OFFER whose mode is get: the request runs now, send."""

    skip_tokens: _U32 = 0


class _Blocks(_OfTransfer, frozen=True, kw_only=True, omit_defaults=True):
    """A message of blocks [first_block, end_block) of layers [first_layer, end_layer)."""

    seq: _U32
    first_layer: _U16
    end_layer: _U16
    first_block: _U32
    end_block: _U32


class Data(_Blocks, frozen=True, kw_only=True, omit_defaults=True):
    """P -> D: whole blocks of a layer group. Body: for each layer of [first_layer, end_layer), for
    each block of [first_block, end_block) of the prompt, its `block_bytes` bytes; behind them their
    xxh3-64, big-endian, so that P can send while it sums up.

    Neither range is empty. Layers index the layout's list, blocks count from the prompt's start.
    `seq` counts the transfer's DATA frames from 0.
    """


class Commit(_OfTransfer, frozen=True, kw_only=True, omit_defaults=True):
    """P -> D: that was all. `frames` and `total_bytes` sent; `digest` = SHA-256 over the frames'
    checksums in the order of their seq."""

    frames: _U32
    total_bytes: _U63
    digest: _Mac


class Done(_OfTransfer, frozen=True, kw_only=True, omit_defaults=True):
    """D -> P: all bytes are here and agree with COMMIT."""


class Nack(_OfTransfer, frozen=True, kw_only=True, omit_defaults=True):
    """D -> P: these DATA frames (body: their seq as u32) are missing or broken; send them again."""

    frames: _Count


class Cancel(_OfTransfer, frozen=True, kw_only=True, omit_defaults=True):
    """Either side: give this transfer up. Also D's answer to a frame of an unknown or stale one."""

    reason: _Text = ""


class Cancelled(_OfTransfer, frozen=True, kw_only=True, omit_defaults=True):
    """The answer: from the sender of DATA, no byte of it follows; from D, none will be written."""


class Lease(_OfTransfer, frozen=True, kw_only=True, omit_defaults=True):
    """D -> P: this OFFER stays for `ttl_ms` from receipt: deferred, or renewed while it waits."""

    ttl_ms: _U32


class Ping(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Are you there? `token` comes back in PONG."""

    token: _U32


class Pong(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to PING."""

    token: _U32


class Goaway(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sender drains: transfers under way finish, new OFFERs are refused."""

    reason: _Text = ""


class Region(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """P -> D, once, before its first SHARED: the memory whose descriptor comes with this frame's
    first byte, sealed. Only where the transport is `shm`, like the next two."""

    size_bytes: _Size


class Shared(_Blocks, frozen=True, kw_only=True, omit_defaults=True):
    """P -> D: what DATA is, but the bytes are in P's memory. Body: where, in DATA's order, as
    runs (offset u64, length u32)."""


class Copied(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """D -> P: the oldest `frames` SHARED frames that no COPIED named yet are no longer read."""

    frames: _Count


class Probe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """P -> D: bytes of no transfer, moved as DATA is: what are they? Body: `size_bytes` bytes, or,
    `shared`, where they lie, as in SHARED. `checksum`: xxh3-64 of the bytes, big-endian. One at a
    time."""

    token: _U32
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROBE_BYTES)]
    checksum: Annotated[bytes, msgspec.Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]
    shared: bool = False


class Probed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to PROBE: SHA-256 of the bytes that D has read, and what moved them."""

    token: _U32
    digest: _Mac
    transport: _Name


Message = (
    Hello | Auth | Layout | Refuse | Offer | Grant | Data | Commit | Done | Pull | Nack
    | Cancel | Cancelled | Lease | Ping | Pong | Goaway | Region | Shared | Copied
    | Probe | Probed
)  # fmt: skip

# Wire type numbers; never reused.
TYPE_NUMBERS: dict[type[Message], int] = {
    Hello: 1,
    Auth: 2,
    Layout: 3,
    Refuse: 4,
    Offer: 5,
    Grant: 6,
    Data: 7,
    Commit: 8,
    Done: 9,
    Pull: 10,
    Nack: 11,
    Cancel: 12,
    Cancelled: 13,
    Lease: 14,
    Ping: 15,
    Pong: 16,
    Goaway: 17,
    Region: 18,
    Shared: 19,
    Copied: 20,
    Probe: 21,
    Probed: 22,
}

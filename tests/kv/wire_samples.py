"""One example of every frame: the golden files in tests/testdata/wire and the examples of
docs/wire.md. `python -m tests.kv.wire_samples` prints what the encoder makes of them today; the
files are only ever added to, since they are what peers of this major version send."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from xpyd_core.blocks import token_bytes
from xpyd_kv.wire.fit import pair_on
from xpyd_kv.wire.frames import PREFIX_BYTES, encode
from xpyd_kv.wire.handshake import auth_mac
from xpyd_kv.wire.messages import (
    Auth,
    Cancel,
    Cancelled,
    Commit,
    Copied,
    Data,
    Done,
    Goaway,
    Grant,
    Hello,
    Layout,
    Lease,
    Message,
    Nack,
    Offer,
    Ping,
    Pong,
    Probe,
    Probed,
    Pull,
    Refuse,
    Region,
    Shared,
)

FOLDER = Path(__file__).parent.parent / "testdata" / "wire"
KEY = b"an example key of a fleet"
UUID = "00112233445566778899aabbccddeeff"
KEYS = {"uuid": UUID, "prompt_index": 1, "epoch": 2}
LAYOUT = Layout(
    factors={"model": "demo", "kv_dtype": "float32"},
    layers=(0, 1),
    kv_heads=1,
    head_dim=1,
    block_size=16,
    dtype="float32",
    block_bytes=128,
    max_tokens=4096,
)
# The second stage of two, the first rank of two in it.
LAYOUT_OF_A_RANK = msgspec.structs.replace(
    LAYOUT, layers=(2, 3), total_kv_heads=2, tp=2, stages=((0, 1), (2, 3))
)
# And of the first rank, which is what the engine says of itself; a D's, so it is dialled.
LAYOUT_OF_AN_ENGINE = msgspec.structs.replace(
    LAYOUT_OF_A_RANK,
    layers=(0, 1),
    ranks=tuple(f"127.1.1.3:{port}" for port in range(21002, 21006)),
)
DIALLER_HELLO = Hello(
    major=1,
    minor=0,
    engine_id="demo-prefill-0",
    incarnation="a1b2c3d4",
    role="P",
    nonce=bytes(range(32)),
)
ACCEPTOR_HELLO = Hello(
    major=1,
    minor=0,
    engine_id="demo-decode-0",
    incarnation="e5f60718",
    role="D",
    nonce=bytes(range(32, 64)),
)
RANK_HELLO = msgspec.structs.replace(DIALLER_HELLO, rank=2, data=True)


def _mac(*, by_dialler: bool) -> bytes:
    return auth_mac(
        KEY,
        by_dialler=by_dialler,
        dialler_hello=encode(DIALLER_HELLO),
        acceptor_hello=encode(ACCEPTOR_HELLO),
    )


PAIR = pair_on(LAYOUT, LAYOUT, dialler=DIALLER_HELLO, acceptor=ACCEPTOR_HELLO)
_TOKENS = token_bytes([5, 6, 70_000])
_BLOCK = bytes(range(128))
_SUM = bytes.fromhex("85c6174c7ff4c46b")  # xxh3-64 of _BLOCK

# Blocks 3 and 4 of layer 0, which are neighbours, and 7 and 5 of layer 1, 1,024 blocks further on.
_RUNS = struct.pack("<QIQIQI", 384, 256, 131_968, 128, 131_712, 128)


class Sample(NamedTuple):
    """A frame: its file's name, its message and its body."""

    name: str
    message: Message
    body: bytes = b""

    @property
    def raw(self) -> bytes:
        return encode(self.message, len(self.body)) + self.body


SAMPLES = (
    Sample("hello_dialler", DIALLER_HELLO),
    Sample("hello_acceptor", ACCEPTOR_HELLO),
    Sample("auth_dialler", Auth(mac=_mac(by_dialler=True))),
    Sample("auth_acceptor", Auth(mac=_mac(by_dialler=False))),
    Sample("layout", LAYOUT),
    Sample("refuse", Refuse(reason="incompatible", factor="kv_dtype")),
    Sample(
        "offer",
        Offer(
            **KEYS,
            tokens=3,
            prompt_tokens=2,
            digest=sha256(_TOKENS).digest(),
            total_bytes=256,
            salt=b"tenant",
        ),
        _TOKENS,
    ),
    Sample("grant", Grant(**KEYS, skip_tokens=16)),
    Sample(
        "data",
        Data(**KEYS, seq=0, first_layer=0, end_layer=1, first_block=0, end_block=1),
        _BLOCK + _SUM,
    ),
    Sample(
        "commit",
        Commit(**KEYS, frames=1, total_bytes=128, digest=sha256(_SUM).digest()),
    ),
    Sample("done", Done(**KEYS)),
    Sample("nack", Nack(**KEYS, frames=2), token_bytes([0, 3])),
    Sample("cancel", Cancel(**KEYS, reason="preempted")),
    Sample("cancelled", Cancelled(**KEYS)),
    Sample("lease", Lease(**KEYS, ttl_ms=30_000)),
    Sample("ping", Ping(token=7)),
    Sample("pong", Pong(token=7)),
    Sample("goaway", Goaway(reason="closing")),
    Sample("region", Region(size_bytes=2**20)),
    Sample(
        "shared",
        Shared(**KEYS, seq=0, first_layer=0, end_layer=2, first_block=0, end_block=2),
        _RUNS,
    ),
    Sample("copied", Copied(frames=1)),
    Sample("probe", Probe(token=7, size_bytes=128, checksum=_SUM), _BLOCK),
    Sample(
        "probe_shared",
        Probe(token=8, size_bytes=128, checksum=bytes(8), shared=True),
        struct.pack("<QI", 2**20 - 128, 128),
    ),
    Sample("probed", Probed(token=7, digest=sha256(_BLOCK).digest(), transport="tcp")),
    Sample("region_cuda_ipc", Region(size_bytes=2**20), bytes(range(80)) + b"GPU-0"),
    Sample(
        "offer_get",
        Offer(
            **KEYS,
            tokens=3,
            prompt_tokens=3,
            digest=sha256(_TOKENS).digest(),
            total_bytes=256,
            mode="get",
        ),
        _TOKENS,
    ),
    Sample("pull", Pull(**KEYS, skip_tokens=16)),
    Sample("hello_of_a_rank", RANK_HELLO),
    Sample("layout_of_an_engine", LAYOUT_OF_AN_ENGINE),
    Sample("layout_of_a_rank", LAYOUT_OF_A_RANK),
)


def _lines(part: bytes) -> Iterator[str]:
    for start in range(0, len(part), 32):
        yield part[start : start + 32].hex(" ")


def hex_text(sample: Sample) -> str:
    """The golden file: the prefix's fields on a line each, then header and body in rows of 32."""
    raw = sample.raw
    header_bytes = int.from_bytes(raw[6:8], "little")
    cuts = ((0, 4, "magic"), (4, 5, "type"), (5, 6, "flags"), (6, 8, "header bytes"))
    cuts = (*cuts, (8, 12, "body bytes"), (12, 16, "CRC-32 of the header"))
    lines = [f"# {sample.name}"]
    lines += [f"{raw[a:b].hex(' '):<11}  # {what}" for a, b, what in cuts]
    lines += ["# header", *_lines(raw[PREFIX_BYTES : PREFIX_BYTES + header_bytes])]
    if sample.body:
        lines += ["# body", *_lines(sample.body)]
    return "\n".join(lines) + "\n"


def bytes_of(text: str) -> bytes:
    """The bytes of a golden file."""
    return bytes.fromhex("".join(line.partition("#")[0] for line in text.splitlines()))


if __name__ == "__main__":
    for one in SAMPLES:
        print(hex_text(one))  # noqa: T201 - its purpose

"""Attacks on the discovery port: each on a connection of its own, by a seeded draw."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import msgspec

from tests.router.zmtp_kit import GREETING, HELLO, frame, message, ready

BASE = {"type": "A", "http_address": "10.9.0.1:20001", "zmq_address": "10.9.0.1:21001"}
FIELDS = (
    "type",
    "http_address",
    "zmq_address",
    "version",
    "instance",
    "incarnation",
    "fleet",
    "pool",
    "revision",
    "compatibility",
    "models",
    "max_model_len",
    "state",
    "continuation",
    "period_ms",
    "sent_us",
    "tensor",
    "running",
    "free_blocks",
    "x",
)
Draw = random.Random
Attack = Callable[[Draw], bytes]


def value(draw: Draw, depth: int = 0) -> object:
    """Anything that msgpack can say."""
    kind = draw.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return draw.choice([0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
    if kind == 1:
        return draw.choice(["", "P", "Ready", "Gone", "h:1", "[::1]:9", "\0", "\n", "x" * 600])
    if kind == 2:
        return draw.choice([None, True, False, 1.5, float("nan"), float("inf")])
    if kind == 3:
        return draw.randbytes(draw.randrange(40))
    if kind == 4:
        return msgspec.msgpack.Ext(draw.randrange(-128, 128), draw.randbytes(draw.randrange(20)))
    if kind == 5:
        return "".join(chr(draw.randrange(1, 0xD7FF)) for _ in range(draw.randrange(8)))
    if kind == 6:
        return [value(draw, depth + 1) for _ in range(draw.randrange(5))]
    return {
        draw.choice(FIELDS) if kind == 7 else str(draw.random()): value(draw, depth + 1)
        for _ in range(draw.randrange(5))
    }


def wrong_field(draw: Draw) -> bytes:
    """A beat with one field of any kind."""
    return message(msgspec.msgpack.encode({**BASE, draw.choice(FIELDS): value(draw)}))


def cut_beat(draw: Draw) -> bytes:
    """Truncated msgpack, or with bytes changed in it."""
    data = bytearray(msgspec.msgpack.encode({**BASE, "models": ["m"] * 3, "running": 7}))
    if draw.random() < 0.5:
        return message(bytes(data[: draw.randrange(len(data))]))
    for _ in range(draw.randrange(1, 4)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return message(bytes(data))


def nested(draw: Draw) -> bytes:
    """Lists or maps in each other, as deep as a frame allows."""
    depth = draw.choice([10, 600, 3000, 60_000])
    head = b"\x84" + msgspec.msgpack.encode(BASE)[1:] + b"\xa1x"
    return message(head + draw.choice([b"\x91", b"\x81\xa1k"]) * (depth // 3) + b"\xc0")


def huge_map(draw: Draw) -> bytes:
    """Many members, or the claim of many."""
    if draw.random() < 0.5:
        return message(draw.choice([b"\xdf", b"\xdd", b"\xc6", b"\xdb"]) + b"\xff" * 4)
    return message(msgspec.msgpack.encode({**BASE, **{f"k{n}": n for n in range(6000)}}))


def parts(draw: Draw) -> bytes:
    """A message of several frames, sound and not."""
    frames = [
        draw.randbytes(draw.choice([0, 1, 32, 32, 300])) for _ in range(draw.randrange(1, 20))
    ]
    if draw.random() < 0.5:
        frames[0] = msgspec.msgpack.encode(BASE)
    return message(*frames)


def many(draw: Draw) -> bytes:
    """A burst of sound beats of as many instances, which say goodbye at once."""
    out = b""
    for _ in range(draw.randrange(1, 40)):
        number = draw.randrange(60_000)
        own = {"http_address": f"10.8.0.1:{number + 1}", "incarnation": str(draw.random())}
        for state in ("Ready", "Gone"):
            out += message(msgspec.msgpack.encode({**BASE, **own, "state": state}))
    return out


def broken_wire(draw: Draw) -> bytes:
    """Frames that say what no frame may."""
    return draw.choice(
        [
            bytes((draw.randrange(256),)) + draw.randbytes(12),
            b"\x02" + draw.randbytes(8),
            frame(draw.randbytes(draw.randrange(60)), is_command=True),
            frame(b"\x04PING" + draw.randbytes(draw.randrange(30)), is_command=True) * 50,
            frame(b"\x05READY" + draw.randbytes(20), is_command=True),
            b"\x03" + (60_000).to_bytes(8, "big") + draw.randbytes(draw.randrange(60_000)),
        ]
    )


def no_handshake(draw: Draw) -> bytes:
    """Other protocols, and greetings that go wrong. Nothing of HELLO stands before it."""
    junk = draw.randbytes(draw.randrange(200))
    return draw.choice(
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + junk,
            junk,
            GREETING[: draw.randrange(64)],
            GREETING + junk,
            GREETING + ready((b"Socket-Type", draw.choice([b"PUB", b"", b"REP"]))),
        ]
    )


ATTACKS: tuple[Attack, ...] = (
    *(wrong_field, cut_beat, nested, huge_map, parts, many, broken_wire, no_handshake),
)


async def attack(draw: Draw, port: int) -> None:
    """One attack, in pieces; the connection then ends, or is left to the router to end."""
    kind = draw.choice(ATTACKS)
    data = kind(draw)
    if kind is not no_handshake:
        data = HELLO + data
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for begin in range(0, len(data), size := draw.choice([7, 1400, 1 << 20])):
            if begin > 40 * size:
                writer.write(data[begin:])
                break
            writer.write(data[begin : begin + size])
            await asyncio.sleep(0)
        await writer.drain()
    writer.transport.abort() if draw.random() < 0.3 else writer.close()

"""ZMTP 3 as a DEALER speaks it, by hand: what libzmq would never send, too."""

from __future__ import annotations

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def frame(
    body: bytes, *, more: bool = False, is_command: bool = False, long: bool = False
) -> bytes:
    """One frame; `long`: its length in eight bytes even where one would do."""
    long = long or len(body) > 255
    flags = (1 if more else 0) | (2 if long else 0) | (4 if is_command else 0)
    return bytes((flags,)) + len(body).to_bytes(8 if long else 1, "big") + body


def prop(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def ready(*properties: tuple[bytes, bytes]) -> bytes:
    """The READY command; a DEALER's with an identity unless others are given."""
    properties = properties or ((b"Socket-Type", b"DEALER"), (b"Identity", b"127.0.0.1:21001"))
    return frame(b"\x05READY" + b"".join(prop(*p) for p in properties), is_command=True)


def message(*frames: bytes) -> bytes:
    return b"".join(frame(f, more=n < len(frames)) for n, f in enumerate(frames, 1))


HELLO = GREETING + ready()

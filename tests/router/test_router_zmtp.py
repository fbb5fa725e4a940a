"""The wire of the discovery port, byte by byte, and what libzmq itself says to it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import zmq

from tests.router.zmtp_kit import GREETING, HELLO, frame, message, ready
from xpyd_core.errors import ProtocolError
from xpyd_router.discovery.zmtp import MAX_COMMAND_BYTES, MAX_FRAMES, Command, Message, Receiver

LIMIT = 1000


def read(data: bytes, *cuts: int) -> list[Message | Command]:
    """All that `data` means, fed in pieces that end at `cuts`."""
    receiver = Receiver(LIMIT)
    return list(feed(receiver, data, *cuts))


def feed(receiver: Receiver, data: bytes, *cuts: int) -> Iterator[Message | Command]:
    ends = [0, *sorted(cuts), len(data)]
    for begin, end in itertools.pairwise(ends):
        receiver.feed(data[begin:end])
        while (event := receiver.next()) is not None:
            yield event


def test_messages_come_out_however_the_bytes_are_cut() -> None:
    data = HELLO + message(b"one") + message(b"", b"x" * 300) + message(b"a", b"b", b"c", b"d")
    expected = [Command(), Message((b"one",)), Message((b"", b"x" * 300)), Message((b"a", b"b"))]
    assert read(data) == expected
    assert read(data, *range(1, len(data))) == expected
    draw = random.Random(7)
    for _ in range(200):
        assert read(data, *draw.sample(range(len(data)), 5)) == expected


@pytest.mark.parametrize("kind", [b"DEALER", b"REQ", b"ROUTER"])
def test_who_may_send_to_a_router_is_welcome(kind: bytes) -> None:
    assert read(GREETING + ready((b"Socket-Type", kind)) + message(b"m"))[1:] == [Message((b"m",))]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not ZMQ"),
        (b"\xff" * 64, "not ZMQ"),
        (b"\xff" + bytes(8) + b"\x7f\x01", "before version 4"),
        (GREETING.replace(b"NULL\0", b"CURVE") + bytes(64), "mechanism"),
        (GREETING + message(b"m"), "before READY"),
        (GREETING + frame(b"\x05HELLO", is_command=True), "expected READY"),
        (GREETING + frame(b"", is_command=True), "expected READY"),
        (GREETING + ready((b"Socket-Type", b"SUB")), "sends no messages"),
        (GREETING + ready((b"Identity", b"x")), "sends no messages"),
        (GREETING + frame(b"\x05READY\xff", is_command=True), "cut off"),
        (GREETING + frame(b"\x05READY\x01a\xff\xff\xff\xff", is_command=True), "cut off"),
        (HELLO + b"\x08\x00", "flags"),
        (HELLO + b"\x05\x00", "flags"),
        (HELLO + b"\x02" + (LIMIT + 1).to_bytes(8, "big"), "1001 bytes"),
        (HELLO + b"\x02" + b"\xff" * 8, "bytes, more than"),
        (HELLO + b"\x06" + (MAX_COMMAND_BYTES + 1).to_bytes(8, "big"), "bytes, more than"),
        (HELLO + message(*[b""] * (MAX_FRAMES + 1)), "frames"),
        (HELLO + frame(b"\x04PING\0\0" + b"x" * 17, is_command=True), "PING"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_forbidden_ends_the_connection_before_it_is_held(data: bytes, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        read(data)


def test_frames_behind_those_that_are_kept_hold_no_memory() -> None:
    receiver = Receiver(LIMIT)
    big = frame(b"x" * LIMIT, more=True)
    most = 0
    for _ in feed(receiver, HELLO):
        pass
    for _ in range(MAX_FRAMES - 1):
        receiver.feed(big)
        assert receiver.next() is None
        most = max(most, receiver.held_bytes)
    assert most == 2 * LIMIT


def test_a_ping_is_answered_with_its_context() -> None:
    ping = frame(b"\x04PING\x00\x64context", is_command=True)
    assert read(HELLO + ping)[1:] == [Command(frame(b"\x04PONGcontext", is_command=True))]
    assert read(HELLO + frame(b"\x09SUBSCRIBE", is_command=True))[1:] == [Command()]


def test_random_bytes_end_in_messages_or_a_protocol_error_and_nothing_else() -> None:
    draw = random.Random(11)
    sound = HELLO + message(b"one", b"two") + message(b"y" * 400) + message(b"z")
    ended = 0
    for _ in range(3000):
        data = bytearray(sound)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        try:
            for event in read(bytes(data), draw.randrange(len(data))):
                assert isinstance(event, Command | Message)
        except ProtocolError:
            ended += 1
    assert ended > 500


@pytest.mark.parametrize("ivl_ms", [0, 50], ids=["plain", "with-heartbeats"])
def test_libzmq_sends_what_is_read_here(ivl_ms: int) -> None:
    """The bytes of a DEALER of this machine's libzmq, by way of a plain socket."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IDENTITY, b"127.0.0.1:21001/abc/1")
        if ivl_ms:
            dealer.setsockopt(zmq.HEARTBEAT_IVL, ivl_ms)
            dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
        dealer.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        dealer.send_multipart([b"beat", b"m" * 32])
        server.settimeout(20)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(20)
            connection.sendall(Receiver.HELLO)
            receiver = Receiver(LIMIT)
            found: list[Message | Command] = []

            def is_complete() -> bool:
                pongs = [e for e in found if isinstance(e, Command) and e.answer]
                return Message((b"beat", b"m" * 32)) in found and bool(pongs) == bool(ivl_ms)

            while not is_complete():
                for event in feed(receiver, connection.recv(4096)):
                    found.append(event)
                    if isinstance(event, Command):
                        connection.sendall(event.answer)
            dealer.send(b"x" * 900)
            while found[-1] != Message((b"x" * 900,)):
                found += feed(receiver, connection.recv(4096))
        dealer.close()

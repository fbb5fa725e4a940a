"""KV over TLS: what passes on the wire, who may sit in between, and who is refused."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.kv.pods import KEY, PATIENCE_S
from tests.kv.tls_kit import TRUSTING
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    Net,
    dial,
    network,
    networks,
    run,
    send_data,
)
from xpyd_core.errors import UserError
from xpyd_core.keys import INSECURE_KEYS
from xpyd_core.request_id import Address
from xpyd_kv.transport.stream.tls import Encryption

BODY = b"a secret prompt." * (BLOCK_BYTES // 4)
"""Four blocks of KV that would be found on the wire."""


net = networks("tls", "tcp")
encrypted = networks("tls")


class Relay:
    """Passes bytes between P and D, `step` at a time, and keeps them."""

    def __init__(self, target: Address, *, step: int = 65536) -> None:
        self.seen = bytearray()
        self._step = step
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._listener.getsockname()[:2])
        self._socks: list[socket.socket] = [self._listener]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wrap(self, accepted: socket.socket) -> tuple[socket.socket, socket.socket]:
        return accepted, socket.create_connection(self._target)

    def close(self) -> None:
        for sock in self._socks:
            with_shutdown(sock)
        self._thread.join(PATIENCE_S)

    def _serve(self) -> None:
        try:
            accepted, _ = self._listener.accept()
            pair = self.wrap(accepted)
        except OSError:
            return
        self._socks += pair
        other = threading.Thread(target=self._pass, args=pair[::-1], daemon=True)
        other.start()
        self._pass(*pair)
        other.join(PATIENCE_S)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self._step):
                self.seen += data
                sink.sendall(data)
        with_shutdown(sink)


class InBetween(Relay):
    """Ends TLS towards both sides, with a certificate of its own."""

    def wrap(self, accepted: socket.socket) -> tuple[socket.socket, socket.socket]:
        towards_p = Encryption()._accepting.wrap_socket(accepted, server_side=True)  # type: ignore[reportPrivateUsage] # what an attacker would make
        towards_d = TRUSTING.wrap_socket(socket.create_connection(self._target))
        return towards_p, towards_d


def with_shutdown(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


Start = Callable[..., Relay]


@pytest.fixture
def start() -> Iterator[Start]:
    relays: list[Relay] = []

    def make(kind: type[Relay], target: Address | None, **options: int) -> Relay:
        assert target is not None
        relays.append(kind(target, **options))
        return relays[-1]

    yield make
    for relay in relays:
        relay.close()


def moved(net: Net, relay: Relay, p: tuple, d_told, *, frames: int = 1) -> None:
    """Move BODY through the relay, and compare it at D."""
    end, told = p
    room = [bytearray(len(BODY)) for _ in range(frames)]
    d_told.on["begin"] = lambda _peer, header, _length: [memoryview(room[header.seq])]
    peer = dial(end, told, relay.address)
    for seq in range(frames):
        send_data(end, told, peer, [memoryview(bytearray(BODY))], seq=seq)
    for number in range(frames):
        d_told.wait("end", number + 1)
        told.wait("done", number + 1)
    assert all(bytes(one) == BODY for one in room)
    assert all(intact for *_, intact in d_told.all("end"))


def test_kv_can_be_read_on_the_wire_only_without_tls(net, start):
    d, d_told = net.endpoint("D")
    relay = start(Relay, d.listen_address)
    moved(net, relay, net.endpoint("P"), d_told)
    assert (BODY[:64] in relay.seen) == (not net.encrypted)
    assert (b"incarnation" in relay.seen) == (not net.encrypted)


@pytest.mark.parametrize("step", [1, 5, 1000, 16_000, 60_000])
def test_records_that_come_in_pieces_are_put_together(encrypted, start, step):
    d, d_told = encrypted.endpoint("D")
    relay = start(Relay, d.listen_address, step=step)
    moved(encrypted, relay, encrypted.endpoint("P"), d_told, frames=1 if step < 1000 else 40)


def test_one_in_between_with_a_certificate_of_its_own_gets_no_more_than_hellos(encrypted, start):
    d, d_told = encrypted.endpoint("D")
    relay = start(InBetween, d.listen_address)
    p, p_told = encrypted.endpoint("P")
    run(p, lambda: p.connect(relay.address))
    assert p_told.wait("failed") == (relay.address, "auth")
    assert not d_told.all("up")
    assert b"incarnation" in relay.seen
    assert b"dtype" not in relay.seen


@pytest.mark.parametrize("who", ["P", "D"])
def test_a_side_without_tls_is_refused_and_the_log_says_why(who, caplog):
    caplog.set_level(logging.WARNING)
    with network("tls") as net:
        d, d_told = net.endpoint("D", encrypted=who == "P")
        p, p_told = net.endpoint("P", encrypted=who == "D")
        run(p, lambda: p.connect(d.listen_address))
        _, reason = p_told.wait("failed")
        assert reason in ("protocol", "unreachable")
        assert not d_told.all("up")
        assert {
            "P": "has the peer --kv-encryption tls, too?",
            "D": "the peer has --kv-encryption tls and this side has not",
        }[who] in caplog.text


def test_a_dialler_whose_peer_says_nothing_sleeps_until_its_deadline(encrypted):
    listener = socket.create_server(("127.0.0.1", 0))
    p, p_told = encrypted.endpoint("P")
    address = Address(*listener.getsockname()[:2])
    run(p, lambda: p.connect(address))
    mute, _ = listener.accept()
    with listener, mute:
        assert mute.recv(1)  # the begin of ClientHello
        watched = run(p, lambda: [one.wants_write for one in p._streams.registry])  # type: ignore[reportPrivateUsage] # a loop that spins cannot be seen elsewhere
        assert watched == [False]
    p_told.wait("failed")


def test_a_stranger_that_does_not_know_the_key_is_refused(encrypted):
    d, _ = encrypted.endpoint("D")
    p, p_told = encrypted.endpoint("P", keys=(b"another key of no fleet",))
    run(p, lambda: p.connect(d.listen_address))
    assert p_told.wait("failed") == (d.listen_address, "auth")


def test_older_tls_is_refused(encrypted, caplog):
    d, _ = encrypted.endpoint("D")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    sock = encrypted.unconnected()
    sock.connect(d.listen_address)
    with pytest.raises(ssl.SSLError):
        old.wrap_socket(sock)
    assert "UNSUPPORTED_PROTOCOL" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"transports": ("shm", "tcp")}, "shm move KV through memory"),
        ({"transports": ("nccl",)}, "nccl move KV"),
        ({"connections": 2}, "--kv-connections 1"),
        ({"keys": INSECURE_KEYS}, "needs the fleet's secret"),
    ],
)
def test_tls_is_refused_where_it_would_not_hold_all_kv(encrypted, options, reason):
    with pytest.raises(UserError, match=reason):
        encrypted.endpoint("D", **options)


def test_the_key_of_the_certificate_is_not_the_same_in_two_processes():
    assert Encryption()._digest != Encryption()._digest  # type: ignore[reportPrivateUsage] # else the binding proves nothing
    assert KEY

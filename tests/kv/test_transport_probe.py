"""PROBE over every transport: D says what it has read, however it came."""

import pytest

from tests.kv.pods import until
from tests.kv.test_transport_shm import region, say
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    KINDS,
    SHARED,
    Puppet,
    networks,
    run,
    send_data,
)
from xpyd_kv.spans import Span
from xpyd_kv.transport.body import checksum
from xpyd_kv.transport.host.data_path import pack
from xpyd_kv.transport.host.shared_memory import SharedMemoryPath
from xpyd_kv.wire.frames import encode
from xpyd_kv.wire.handshake import LENT
from xpyd_kv.wire.messages import MAX_PROBE_BYTES, Probe, Probed

net = networks(*KINDS, "tls")


shm = networks("shm")


def probe(**changes):
    body = bytes(100)
    fields = {"token": 5, "size_bytes": 100, "checksum": checksum([memoryview(body)]), **changes}
    return Probe(**fields), body


def test_d_answers_with_the_digest_of_ps_bytes_and_what_moved_them(net):
    (p, p_told, d_at_p), (d, d_told, _) = net.pair()
    digest = run(p, lambda: p.send_probe(d_at_p, 5))
    peer, answer, body = p_told.wait("message")
    assert (peer, body) == (d_at_p, b"")
    assert answer == Probed(token=5, digest=digest, transport=net.transport)
    assert p.probe_bytes == MAX_PROBE_BYTES
    assert d_told.names() == ["up"]
    assert d.counters.corrupt_frames == d.counters.shared_bytes == 0
    assert d_at_p.protocol.kept_bytes == 0


def test_probes_go_between_data_and_are_no_kv(net):
    (p, p_told, d_at_p), (d, d_told, _) = net.pair()
    room = bytearray(BLOCK_BYTES)
    d_told.on["begin"] = lambda *_: [memoryview(room)]
    for seq in range(3):
        send_data(p, p_told, d_at_p, [net.share(bytes([seq]) * BLOCK_BYTES)], seq=seq)
        run(p, lambda token=seq: p.send_probe(d_at_p, token))
    answers = [p_told.wait("message", n)[1] for n in (1, 2, 3)]
    assert [answer.token for answer in answers] == [0, 1, 2]
    assert len({answer.digest for answer in answers}) == 1
    p_told.wait("done", 3)
    assert p_told.all("done") == [(seq, True) for seq in range(3)]
    moved = 3 * BLOCK_BYTES if net.transport in LENT else 0
    assert p.counters.shared_bytes == d.counters.shared_bytes == moved


def test_bytes_that_stand_elsewhere_go_through_the_socket_and_that_is_said(shm):
    elsewhere = memoryview(bytearray(MAX_PROBE_BYTES))
    d, _ = shm.endpoint("D", transports=("shm", "uds"))
    p, p_told = shm.endpoint(
        "P", transports=("shm", "uds"), paths=[SharedMemoryPath(SHARED)], probe_room=elsewhere
    )
    p.call(lambda: p.connect(d.listen_address))
    peer = p_told.wait("up")[0]
    assert peer.transport == "shm"
    digest = run(p, lambda: p.send_probe(peer, 1))
    assert p_told.wait("message")[1] == Probed(token=1, digest=digest, transport="uds")


def test_a_broken_probe_is_counted_and_answered_with_what_came(net):
    d, _ = net.endpoint("D")
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    message, body = probe(checksum=bytes(8))
    puppet.sock.sendall(encode(message, len(body)) + body)
    assert [event.message.token for event in puppet.read()] == [5]
    assert d.counters.corrupt_frames == 1
    assert d.counters.protocol_errors == 0


@pytest.mark.parametrize(
    "changes",
    [{"size_bytes": 99}, {"size_bytes": 101}, {"shared": True}],
    ids=["shorter", "longer", "lent before REGION, or over a socket"],
)
def test_a_probe_that_lies_ends_the_connection(net, changes):
    d, d_told = net.endpoint("D")
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    message, body = probe(**changes)
    puppet.sock.sendall(encode(message, len(body)) + body)
    assert d_told.wait("down")[1] == "protocol"
    assert d.counters.protocol_errors == 1


@pytest.mark.parametrize(
    ("places", "size"),
    [
        ([Span(SHARED.size_bytes - 1, 100)], 100),
        ([Span(0, 99)], 100),
        ([Span(0, 60), Span(60, 60)], 100),
    ],
    ids=["outside", "too few", "too many"],
)
def test_places_that_lie_end_the_connection_too(shm, places, size):
    d, d_told = shm.endpoint("D")
    puppet = Puppet(shm.connect(d.listen_address), "P").open()
    say(puppet.sock, region(), [SHARED.fd])
    body = pack(places)
    message, _ = probe(size_bytes=size, shared=True)
    puppet.sock.sendall(encode(message, len(body)) + body)
    assert d_told.wait("down")[1] == "protocol"
    until(lambda: d.counters.connections == 0)

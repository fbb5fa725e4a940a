"""DATA over further connections: who may open one, what goes over it, and what its end ends. All
that holds for every transport is in test_transport_conformance, which runs over this one too."""

from __future__ import annotations

import random
import select
import socket
import threading
import time
from contextlib import closing

import pytest

from tests.e2e.relay import Relay
from tests.kv.pods import KEY, PATIENCE_S, until
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    Puppet,
    address_of,
    data_header,
    dial,
    is_closed,
    network,
    networks,
    run,
    send_data,
)
from xpyd_core.request_id import Address
from xpyd_kv.spans import Span
from xpyd_kv.transport.body import checksum
from xpyd_kv.transport.host import striped
from xpyd_kv.transport.host.data_path import pack
from xpyd_kv.transport.host.sharing import shared_of
from xpyd_kv.transport.settings import MAX_LINKS, Timeouts
from xpyd_kv.wire.connection import Opened
from xpyd_kv.wire.frames import DataEnd, encode
from xpyd_kv.wire.messages import Auth, Copied, Probe, Probed, Region, Shared

GROUP = "0123456789abcdef"
BODY = random.Random(5).randbytes(7 * BLOCK_BYTES)


net = networks("striped")


def puppet(net, d, *, link=0, group=GROUP, incarnation="i", key=KEY, engine_id="p"):
    sock = net.connect(d.listen_address)
    hello = {"engine_id": engine_id, "incarnation": incarnation, "group": group, "link": link}
    return Puppet(sock, "P", key=key, **hello).open()


def linked(net, count=1):
    """A D whose P, and its further connections, are written by hand: all are through."""
    d, d_told = net.endpoint("D")
    main = puppet(net, d)
    d_told.wait("up")
    links = [puppet(net, d, link=n + 1).sock for n in range(count)]
    assert [link.recv(1) for link in links] == [b"\1"] * count
    main.sock.sendall(encode(Region(size_bytes=count)))
    return d, d_told, main, links


def announce(main, seq, body=BODY, length=None):
    places = pack([Span(seq, len(body) if length is None else length)])
    header = shared_of(data_header(body, seq=seq))
    main.sock.sendall(encode(header, len(places)) + places)


def part(body):
    return body + checksum([memoryview(body)])


def refused(net, d, **hello):
    before = d.counters.refused.get("group", 0)
    assert is_closed(puppet(net, d, link=1, **hello).sock)
    until(lambda: d.counters.refused.get("group", 0) == before + 1)


@pytest.mark.parametrize("step_bytes", [100, 2**20])
def test_both_ends_use_the_further_connections_once_all_are_there(net, monkeypatch, step_bytes):
    """`step_bytes`: of one call of the kernel."""
    monkeypatch.setattr(striped, "_STEP_BYTES", step_bytes)
    (p, p_told, d_at_p), (d, d_told, p_at_d) = net.pair(connections=3)
    assert d_at_p.transport == p_at_d.transport == "striped"
    assert p.counters.connections == d.counters.connections == 1
    room = bytearray(len(BODY))
    d_told.on["begin"] = lambda *_: [memoryview(room)]
    sent = 0
    while not d.counters.shared_bytes:
        send_data(p, p_told, d_at_p, [memoryview(BODY)], seq=sent)
        sent += 1
        assert d_told.wait("end", sent)[2:] == (True, True)
    through_first = d.counters.received_bytes
    room[:] = bytes(len(room))
    send_data(p, p_told, d_at_p, [memoryview(BODY)], seq=sent)
    assert d_told.wait("end", sent + 1)[2:] == (True, True)
    assert room == BODY
    assert d.counters.received_bytes - through_first < len(BODY)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("xpyd-kv-link") == 6


@pytest.mark.parametrize("fewer", ["P", "D"])
def test_a_side_that_uses_one_connection_only_gets_one(net, fewer):
    d, d_told = net.endpoint("D", **({"connections": 0} if fewer == "D" else {}))
    p, p_told = net.endpoint("P", **({"connections": 0} if fewer == "P" else {}))
    peer = dial(p, p_told, d.listen_address)
    assert peer.transport == "tcp"
    room = bytearray(len(BODY))
    d_told.on["begin"] = lambda *_: [memoryview(room)]
    send_data(p, p_told, peer, [memoryview(BODY)])
    assert d_told.wait("end")[2:] == (True, True)
    assert room == BODY
    assert d.counters.shared_bytes == 0


def test_parts_come_in_any_order_and_frames_end_in_theirs(net):
    _, d_told, main, links = linked(net, 2)
    rooms = [bytearray(len(BODY)) for _ in range(2)]
    d_told.on["begin"] = lambda _, header, __: [memoryview(rooms[header.seq])]
    half = len(BODY) // 2
    announce(main, 0)
    announce(main, 1)
    d_told.wait("begin", 2)
    links[1].sendall(part(BODY[half:]) + part(BODY[half:]))
    links[0].sendall(part(BODY[:half]) + part(BODY[:half]))
    ends = [d_told.wait("end", n + 1) for n in range(2)]
    assert [(end[1].seq, *end[2:]) for end in ends] == [(0, True, True), (1, True, True)]
    assert rooms == [BODY, BODY]
    copied = 0
    while copied < 2:
        copied += sum(event.message.frames for event in main.read() if _is_copied(event))
    assert copied == 2


def _is_copied(event):
    return isinstance(getattr(event, "message", None), Copied)


def test_a_part_that_comes_broken_is_told_and_counted_and_the_next_frame_is_right(net):
    d, d_told, main, (link,) = linked(net)
    room = bytearray(len(BODY))
    d_told.on["begin"] = lambda *_: [memoryview(room)]
    announce(main, 0)
    link.sendall(BODY + bytes(8))
    assert d_told.wait("end")[2:] == (True, False)
    until(lambda: d.counters.corrupt_frames == 1)
    announce(main, 1)
    link.sendall(part(BODY))
    assert d_told.wait("end", 2)[2:] == (True, True)
    assert room == BODY


def test_bytes_that_nobody_wants_are_read_to_nowhere(net):
    _, d_told, main, (link,) = linked(net)
    room = bytearray(len(BODY))
    d_told.on["begin"] = lambda _, header, __: [memoryview(room)] if header.seq else None
    for seq in range(2):
        announce(main, seq)
        link.sendall(part(BODY))
    assert [d_told.wait("end", n + 1)[2:] for n in range(2)] == [(False, False), (True, True)]
    assert room == BODY


def test_each_connection_proves_the_key(net):
    d, d_told = net.endpoint("D")
    puppet(net, d)
    peer = d_told.wait("up")[0]
    with pytest.raises(Exception, match="auth"):
        puppet(net, d, link=1, key=b"another fleet's key")
    assert d.counters.auth_failed == 1
    assert d_told.all("down") == []
    assert peer.closing is None


def test_a_further_connection_without_its_peer_is_refused(net):
    d, d_told = net.endpoint("D")
    refused(net, d)
    puppet(net, d)
    d_told.wait("up")
    refused(net, d, group="ffff")
    refused(net, d, group="")
    refused(net, d, incarnation="another")
    refused(net, d, engine_id="q")
    assert d_told.names() == ["up"]
    assert d.counters.connections == 1
    assert d.counters.strangers == 0


@pytest.mark.parametrize("number", [2, MAX_LINKS + 1])
def test_a_number_that_is_there_or_too_high_ends_that_connection_only(net, number):
    d, d_told, _, _ = linked(net, MAX_LINKS)
    assert is_closed(puppet(net, d, link=number).sock)
    until(lambda: d.counters.junk_connections + d.counters.protocol_errors == 1)
    assert d_told.all("down") == []


def test_connections_are_known_by_number_not_by_order(net):
    d, d_told = net.endpoint("D")
    main = puppet(net, d)
    d_told.wait("up")
    second, first = (puppet(net, d, link=number).sock for number in (2, 1))
    assert [first.recv(1), second.recv(1)] == [b"\1"] * 2
    main.sock.sendall(encode(Region(size_bytes=2)))
    room = bytearray(len(BODY))
    d_told.on["begin"] = lambda *_: [memoryview(room)]
    announce(main, 0)
    half = len(BODY) // 2
    first.sendall(part(BODY[:half]))
    second.sendall(part(BODY[half:]))
    assert d_told.wait("end")[2:] == (True, True)
    assert room == BODY


@pytest.mark.parametrize("lie", ["before all are there", "length", "number"])
def test_a_frame_that_lies_ends_the_peer_and_lands_nowhere(net, lie):
    _, d_told, main, _ = short_of_one(net) if lie == "before all are there" else linked(net)
    announce(main, 1 if lie == "number" else 0, length=3 if lie == "length" else None)
    assert d_told.wait("down")[1] == "protocol"
    assert d_told.all("begin") == []


def short_of_one(net):
    d, d_told = net.endpoint("D")
    main = puppet(net, d)
    d_told.wait("up")
    main.sock.sendall(encode(Region(size_bytes=2)))
    return d, d_told, main, []


def test_the_end_of_a_further_connection_ends_the_peer_and_nothing_lands_after(net):
    _, d_told, main, (link, other) = linked(net, 2)
    room = bytearray(len(BODY))
    d_told.on["begin"] = lambda *_: [memoryview(room)]
    announce(main, 0)
    d_told.wait("begin")
    link.close()
    assert d_told.wait("down")[1] == "lost"
    assert d_told.all("end") == []
    seen = bytes(room)
    assert is_closed(other)
    assert is_closed(main.sock)
    assert room == seen


def test_a_connection_that_breaks_under_way_gives_p_its_views_back(net):
    """Every connection is cut while bytes are held: P's `done` is False, and it may dial again."""
    d, d_told = net.endpoint("D")
    relay_port = _free_port()
    with closing(Relay("127.0.0.1", relay_port, target=tuple(d.listen_address))) as relay:
        p, p_told = net.endpoint("P")
        peer = dial(p, p_told, Address("127.0.0.1", relay_port))
        room = bytearray(len(BODY))
        d_told.on["begin"] = lambda *_: [memoryview(room)]
        sent = 0
        while not d.counters.shared_bytes:
            send_data(p, p_told, peer, [memoryview(BODY)], seq=sent)
            sent += 1
            d_told.wait("end", sent)
        p_told.wait("done", sent)
        relay.stall()
        send_data(p, p_told, peer, [memoryview(BODY)], seq=sent)
        run(p, lambda: p.disconnect(peer, "test"))
        assert p_told.wait("done", sent + 1) == (sent, False)
        assert p_told.wait("down") == (peer, "test")
        relay.resume()
        d_told.wait("down")


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_a_d_that_stops_reading_does_not_keep_p_from_closing(net):
    (p, p_told, peer), (_, d_told, _) = net.pair(connections=1)
    held = threading.Event()
    d_told.on["begin"] = lambda *_: held.wait(PATIENCE_S) and None
    body = bytes(40_000 * BLOCK_BYTES)
    for seq in range(3):
        send_data(p, p_told, peer, [memoryview(body)], seq=seq)
    d_told.wait("begin")
    run(p, lambda: p.disconnect(peer, "test"))
    p_told.wait("down")
    held.set()
    assert p_told.names().index("down") > p_told.names().index("done")


def test_a_connection_that_is_taken_while_p_reads_late_is_used(net):
    """D's byte may come in one read with the LAYOUT before it."""
    listener = net.listener()
    p, p_told = net.endpoint("P", connections=1)
    run(p, lambda: p.connect(address_of(listener)))
    main = _accepted(net, listener).open()
    peer = p_told.wait("up")[0]
    link = _accepted(net, listener)
    for _ in range(2):  # HELLO, AUTH
        assert list(link.wire.feed(link.sock.recv(65536), 0.0)) == []
        answer = link.wire.outgoing()
        auth_bytes = len(encode(Auth(mac=bytes(32))))
        link.sock.sendall(answer if link.wire.is_proved is False else answer[:auth_bytes])
    assert isinstance(next(iter(link.wire.feed(link.sock.recv(65536), 0.0))), Opened)
    link.sock.sendall(answer[auth_bytes:] + b"\1")
    until(lambda: _is_shared(p, p_told, peer, main))


def _accepted(net, listener):
    sock = net.socket(listener.accept()[0])
    return Puppet(sock, "D", transports=("striped", "tcp"), engine_id="d", incarnation="d")


def _is_shared(p, p_told, peer, main):
    """Whether the next frame goes over the further connection."""
    send_data(p, p_told, peer, [memoryview(BODY)], seq=len(p_told.all("done")))
    while events := main.read():
        for event in events:
            message = getattr(event, "message", None)
            if isinstance(message, Shared):
                return True
            if isinstance(event, DataEnd):
                return False
    raise ConnectionError("P has closed")


def test_a_slow_network_is_no_dead_one(net):
    """What counts is that something comes, not that a frame is through in time."""
    d, d_told = net.endpoint("D", timeouts=Timeouts(fetch_s=0.8))
    main = puppet(net, d)
    d_told.wait("up")
    link = puppet(net, d, link=1).sock
    assert link.recv(1) == b"\1"
    main.sock.sendall(encode(Region(size_bytes=1)))
    step = 2**20
    body = bytes(4 * step)
    room = bytearray(len(body))
    d_told.on["begin"] = lambda *_: [memoryview(room)]
    announce(main, 0, body)
    begun = time.monotonic()
    for at in range(0, len(body), step):
        # The time that the network takes; waiting for D would be waiting for nothing.
        assert not select.select([link], [], [], 0.3)[0]
        link.sendall(body[at : at + step])
    link.sendall(checksum([memoryview(body)]))
    assert d_told.wait("end")[2:] == (True, True)
    assert time.monotonic() - begun > 0.8


def test_further_connections_that_say_nothing_end_the_peer(net):
    d, d_told = net.endpoint("D", timeouts=Timeouts(fetch_s=0.2))
    main = puppet(net, d)
    d_told.wait("up")
    link = puppet(net, d, link=1).sock
    assert link.recv(1) == b"\1"
    main.sock.sendall(encode(Region(size_bytes=1)))
    announce(main, 0)
    assert d_told.wait("down")[1] == "lost"


def test_a_broken_probe_is_counted_there_too(net):
    d, _, main, (link,) = linked(net)
    probe = Probe(token=1, size_bytes=len(BODY), checksum=bytes(8), shared=True)
    places = pack([Span(0, len(BODY))])
    main.sock.sendall(encode(probe, len(places)) + places)
    link.sendall(BODY + bytes(8))
    assert any(isinstance(getattr(e, "message", None), Probed) for e in main.read())
    assert d.counters.corrupt_frames == 1


def test_a_d_whose_cache_is_on_a_gpu_takes_one_connection():
    """The threads reach host memory only."""
    with network("tcp+gpu") as net:
        d, d_told = net.endpoint("D", connections=2)
        p, p_told = net.endpoint("P", connections=2, staging=None)
        peer = dial(p, p_told, d.listen_address)
        assert peer.transport == "tcp"
        room = net.room(len(BODY))
        d_told.on["begin"] = lambda *_: [room]
        send_data(p, p_told, peer, [memoryview(BODY)])
        assert d_told.wait("end")[2:] == (True, True)
        assert net.read(room) == BODY

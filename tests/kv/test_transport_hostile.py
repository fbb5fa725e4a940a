"""What strangers, dying peers and a defective session cost: one connection, nothing else.

The flaws R7 to R13 of the connector this one replaces (test_old_flaws_liveness.py) were of this
kind: a byte of junk or a full pool ended the only thread, a dead peer stopped all others, closing
never returned.
"""

import os
import random
import resource
import socket
import struct
import threading

import pytest

from tests.kv.pods import PATIENCE_S, until
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    KINDS,
    QUICK,
    Puppet,
    address_of,
    broken,
    dial,
    is_closed,
    networks,
    protocol_error,
    raw_data,
    run,
    send_data,
)
from tests.kv.wire_samples import KEYS, SAMPLES
from xpyd_kv.transport.settings import Bounds, Timeouts
from xpyd_kv.wire.frames import encode
from xpyd_kv.wire.messages import Cancel, Done, Ping, Refuse

SAMPLE = {sample.name: sample for sample in SAMPLES}


net = networks(*KINDS)


def huge(number):
    return struct.pack("<4sBBHII", b"XKV1", number, 1, 65_535, 2**32 - 1, 0)


JUNK = {
    "one byte": b"\x00",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "random": random.Random(3).randbytes(5000),
    "a huge HELLO": huge(1),
    "a huge DATA": huge(7),
    "a header that is none": struct.pack("<4sBBHII", b"XKV1", 1, 1, 3, 0, 0) + b"\xff\xff\xff",
}
# By names of the wire's samples.
MISPLACED = {
    "DATA before HELLO": ("data",),
    "OFFER before HELLO": ("offer",),
    "AUTH before HELLO": ("auth_dialler",),
    "HELLO twice": ("hello_dialler", "hello_dialler"),
    "HELLO, then OFFER": ("hello_dialler", "offer"),
    "a recorded HELLO and AUTH": ("hello_dialler", "auth_dialler"),
}


@pytest.mark.parametrize("junk", [*JUNK.values(), *MISPLACED.values()], ids=[*JUNK, *MISPLACED])
def test_junk_costs_its_connection_only(net, junk):
    (p, p_told, d_at_p), (d, d_told, _) = net.pair()
    stranger = net.connect(d.listen_address)
    stranger.sendall(junk if isinstance(junk, bytes) else b"".join(map(net.raw, junk)))
    assert is_closed(stranger)
    until(lambda: d.counters.junk_connections + d.counters.auth_failed == 1)
    run(p, lambda: p.send(d_at_p, SAMPLE["offer"].message, SAMPLE["offer"].body))
    d_told.wait("message")
    assert d_told.names() == ["up", "message"]
    assert p_told.names() == ["up"]


def test_half_a_message_and_silence_is_closed_at_the_deadline(net):
    d, d_told = net.endpoint("D", timeouts=QUICK)
    hello = net.raw("hello_dialler")
    for beginning in (b"", b"XKV", hello[:40], hello):
        stranger = net.connect(d.listen_address)
        stranger.sendall(beginning)
        assert is_closed(stranger)
    assert d.counters.junk_connections == 4
    assert d.counters.strangers == 0
    assert d_told.told == []


def test_a_stranger_who_drips_bytes_is_closed_at_the_deadline(net):
    now = [0.0]
    d, _ = net.endpoint("D", clock=lambda: now[0])
    stranger = net.connect(d.listen_address)
    until(lambda: d.counters.strangers == 1)
    for byte in net.raw("hello_dialler")[:8]:
        stranger.sendall(bytes([byte]))
        now[0] += 0.5
        d.call(lambda: None)
    assert is_closed(stranger)


def test_strangers_are_few_and_the_oldest_goes_first(net):
    d, d_told = net.endpoint("D", bounds=Bounds(strangers=3))
    crowd = [net.connect(d.listen_address) for _ in range(6)]
    assert [is_closed(sock) for sock in crowd[:3]] == [True] * 3
    p, p_told = net.endpoint("P")
    dial(p, p_told, d.listen_address)
    d_told.wait("up")
    assert d.counters.strangers <= 3


def test_a_good_transfer_is_not_disturbed_by_a_crowd(net):
    (p, p_told, d_at_p), (d, d_told, _) = net.pair()
    body = random.Random(4).randbytes(40_000 * BLOCK_BYTES)
    room = bytearray(len(body))
    d_told.on["begin"] = lambda *_: [memoryview(room)]

    def pester(seed):
        pick = random.Random(seed)
        for _ in range(25):
            with socket.socket(net.family) as stranger:
                stranger.connect(net.target(d.listen_address))
                try:
                    stranger.sendall(pick.choice([*JUNK.values(), b"", b"XKV1"]))
                except ConnectionError:
                    continue

    crowd = [threading.Thread(target=pester, args=(seed,)) for seed in range(4)]
    for thread in crowd:
        thread.start()
    for seq in range(10):
        send_data(p, p_told, d_at_p, [net.share(body)], seq=seq)
    d_told.wait("end", 10)
    for thread in crowd:
        thread.join(PATIENCE_S)
    assert {end[2:] for end in d_told.all("end")} == {(True, True)}
    assert room == body
    until(lambda: d.counters.strangers == 0)
    assert d_told.all("down") == p_told.all("down") == []
    assert d.counters.connections == 1


_RIGHT = raw_data(bytes(BLOCK_BYTES))
WRONG_LENGTH = _RIGHT[:8] + (BLOCK_BYTES - 1).to_bytes(4, "little") + _RIGHT[12:]
PEERS_FAULTS = {
    "random bytes": random.Random(5).randbytes(100),
    "HELLO again": SAMPLE["hello_dialler"].raw,
    "a frame of D": SAMPLE["grant"].raw,
    "DATA of the wrong length": WRONG_LENGTH,
    "a broken header": encode(Ping(token=1))[:-1] + b"\xc1",
}


@pytest.mark.parametrize("fault", PEERS_FAULTS.values(), ids=PEERS_FAULTS.keys())
def test_a_peer_that_breaks_the_protocol_is_closed_and_may_come_back(net, fault):
    d, d_told = net.endpoint("D")
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    peer = d_told.wait("up")[0]
    puppet.sock.sendall(fault)
    assert d_told.wait("down") == (peer, "protocol")
    assert is_closed(puppet.sock)
    assert d.counters.protocol_errors == 1
    Puppet(net.connect(d.listen_address), "P").open()
    d_told.wait("up", 2)


def test_a_p_killed_in_mid_data_leaves_no_end_of_it(net):
    d, d_told = net.endpoint("D")
    room = bytearray(BLOCK_BYTES * 1000)
    d_told.on["begin"] = lambda *_: [memoryview(room)]
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    frame = raw_data(b"\x07" * len(room))
    puppet.sock.sendall(frame[: len(frame) // 2])
    d_told.wait("begin")
    puppet.sock.close()
    d_told.wait("down")
    assert d_told.names() == ["up", "begin", "down"]
    # The room is the session's again: nothing holds its views.
    room.clear()


def test_a_d_killed_in_mid_data_gives_the_frames_back(net):
    p, p_told = net.endpoint("P")
    listener = net.listener()
    run(p, lambda: p.connect(address_of(listener)))
    puppet = Puppet(net.socket(listener.accept()[0]), "D").open()
    peer = p_told.wait("up")[0]
    body = bytes(100_000 * BLOCK_BYTES)
    for seq in range(3):
        send_data(p, p_told, peer, [net.share(body)], seq=seq)
    assert puppet.sock.recv(1000)
    puppet.sock.close()
    p_told.wait("down")
    assert p_told.all("done") == [(0, False), (1, False), (2, False)]
    assert p_told.names() == ["up", "done", "done", "done", "down"]


def stalled_d(net, **options):
    """A P whose D has opened and then reads nothing."""
    p, p_told = net.endpoint("P", **options)
    listener = net.listener()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    run(p, lambda: p.connect(address_of(listener)))
    puppet = Puppet(net.socket(listener.accept()[0]), "D").open()
    return p, p_told, p_told.wait("up")[0], puppet


def test_data_waits_for_a_reader(net):
    p, p_told, peer, puppet = stalled_d(net)
    body = bytes(100_000 * BLOCK_BYTES)
    send_data(p, p_told, peer, [memoryview(body)])
    run(p, lambda: None)
    assert p_told.names() == ["up"]
    left = len(raw_data(body))
    while left:
        left -= len(puppet.sock.recv(min(left, 1 << 20)))
    assert p_told.wait("done") == (0, True)


def test_who_leaves_control_frames_unread_is_closed(net):
    bounds = Bounds(control_frames=50)
    p, p_told, peer, _ = stalled_d(net, bounds=bounds)
    body = bytes(100_000 * BLOCK_BYTES)
    send_data(p, p_told, peer, [memoryview(body)])
    run(p, lambda: [p.send(peer, Cancel(**KEYS)) for _ in range(60)])
    assert p_told.wait("down") == (peer, "slow_reader")
    assert p_told.all("done") == [(0, False)]
    assert p.counters.silent_peers == 1


def test_a_peer_that_answers_no_ping_is_closed(net):
    now = [0.0]
    p, p_told, peer, puppet = stalled_d(net, clock=lambda: now[0])
    for _ in range(3):
        now[0] += 2.0
        run(p, lambda: None)
        run(p, lambda: None)
    assert p_told.all("down") == []
    pings = puppet.sock.recv(65536)
    assert pings.startswith(encode(Ping(token=1)))
    now[0] += 2.0
    p.call(lambda: None)
    assert p_told.wait("down") == (peer, "timeout")
    assert p.counters.silent_peers == 1


def test_the_first_ping_does_not_wait_for_the_handshakes_deadline(net):
    now = [0.0]
    d, d_told = net.endpoint("D", clock=lambda: now[0])
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    d_told.wait("up")
    now[0] = 2.0
    d.call(lambda: None)
    assert puppet.sock.recv(65536) == encode(Ping(token=1))


def test_pings_keep_a_quiet_connection(net):
    now = [0.0]
    (p, p_told, _), (d, d_told, _) = net.pair(clock=lambda: now[0])
    for _ in range(10):
        before = (p.counters.received_bytes, d.counters.received_bytes)
        now[0] += 2.0
        p.call(lambda: None)
        d.call(lambda: None)
        until(lambda: p.counters.received_bytes > before[0])  # noqa: B023 - called in this turn
        until(lambda: d.counters.received_bytes > before[1])  # noqa: B023 - called in this turn
    assert p_told.names() == d_told.names() == ["up"]


def test_an_acceptor_that_says_nothing_is_a_timeout(net):
    p, p_told = net.endpoint("P", timeouts=QUICK)
    listener = net.listener()
    run(p, lambda: p.connect(address_of(listener)))
    assert p_told.wait("failed") == (address_of(listener), "timeout")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "protocol"),
        (encode(Refuse(reason="auth")), "protocol"),
        (("hello_acceptor", encode(Refuse(reason="auth"))), "auth"),
        (("hello_acceptor", SAMPLE["auth_acceptor"].raw), "auth"),
        (("hello_acceptor", encode(Refuse(reason="limit"))), "refused:limit"),
        (("hello_acceptor", encode(Refuse(reason="\n"))), "refused:other"),
        (b"", "unreachable"),
    ],
)
def test_what_a_wrong_acceptor_answers_has_a_name(net, answer, reason):
    p, p_told = net.endpoint("P")
    listener = net.listener()
    run(p, lambda: p.connect(address_of(listener)))
    sock = listener.accept()[0]
    assert sock.recv(65536).startswith(b"XKV1\x01")
    hello, rest = ("", answer) if isinstance(answer, bytes) else answer
    sock.sendall((net.raw(hello) if hello else b"") + rest)
    sock.shutdown(socket.SHUT_WR)
    net.socket(sock)
    assert p_told.wait("failed") == (address_of(listener), reason)
    # HELLO, and AUTH where it answered with a HELLO: nothing else ever left P.
    assert p.counters.sent_bytes < 300


def test_over_the_limit_a_peer_is_refused_by_name(net):
    d, d_told = net.endpoint("D", bounds=Bounds(connections=1))
    first, first_told = net.endpoint("P")
    dial(first, first_told, d.listen_address)
    d_told.wait("up")
    second, second_told = net.endpoint("P")
    run(second, lambda: second.connect(d.listen_address))
    assert second_told.wait("down")[1] == "refused:limit"
    assert d.counters.refused == {"limit": 1}
    assert d_told.names() == ["up"]


@pytest.mark.parametrize("event", ["up", "message", "begin", "end"])
@pytest.mark.parametrize(("defect", "reason"), [(broken, "internal"), (protocol_error, "protocol")])
def test_a_session_that_raises_loses_that_peer_only(net, event, defect, reason):
    d, d_told = net.endpoint("D")
    other, other_told = net.endpoint("P")
    other_peer = dial(other, other_told, d.listen_address)
    d_told.wait("up")
    d_told.on[event] = defect
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    peer = d_told.wait("up", 2)[0]
    frames = SAMPLE["offer"].raw + raw_data(bytes(BLOCK_BYTES))
    try:
        puppet.sock.sendall(frames)
    except ConnectionError:
        assert event == "up"
    assert d_told.wait("down") == (peer, reason)
    d_told.on.clear()
    run(other, lambda: other.send(other_peer, Cancel(**KEYS)))
    until(lambda: any(m[1] == Cancel(**KEYS) for m in d_told.all("message")))


def test_a_session_that_raises_in_a_call_a_tick_or_a_done_does_not_end_the_thread(net):
    (p, p_told, d_at_p), (_, d_told, _) = net.pair()
    p_told.on["tick"] = broken
    p.call(broken)
    p_told.on["down"] = broken
    view = [net.share(bytes(BLOCK_BYTES))]
    run(p, lambda: p.send_data(d_at_p, lambda: None, view, broken))
    assert p_told.wait("down") == (d_at_p, "internal")
    p_told.on.clear()
    p_told.on["failed"] = broken
    assert run(p, lambda: 1) == 1
    d_told.wait("down")


@pytest.mark.parametrize("excess", [-1, 1])
def test_room_of_the_wrong_size_is_the_sessions_defect(net, excess):
    (p, p_told, d_at_p), (_, d_told, p_at_d) = net.pair()
    d_told.on["begin"] = lambda *_: [memoryview(bytearray(BLOCK_BYTES + excess))]
    send_data(p, p_told, d_at_p, [net.share(bytes(BLOCK_BYTES))])
    assert d_told.wait("down") == (p_at_d, "internal")


def test_close_returns_in_time_whatever_a_peer_does(net):
    p, p_told, peer, _ = stalled_d(net)
    body = bytes(100_000 * BLOCK_BYTES)
    send_data(p, p_told, peer, [net.share(body)])
    p.close(1.0)
    p_told.wait("down")
    assert p_told.names() == ["up", "done", "down"]
    assert p_told.wait("done") == (0, False)


def test_close_ends_dials_and_strangers_too(net):
    p, p_told = net.endpoint("P")
    listener = net.listener()
    run(p, lambda: p.connect(address_of(listener)))
    d, _ = net.endpoint("D")
    stranger = net.connect(d.listen_address)
    until(lambda: d.counters.strangers == 1)
    p.close(2.0)
    d.close(2.0)
    assert p_told.told == [("failed", address_of(listener), "closed")]
    assert is_closed(stranger)


def test_a_process_out_of_descriptors_accepts_again_later(net, caplog):
    d, d_told = net.endpoint("D", timeouts=Timeouts(listen_pause_s=0.05))
    client = net.unconnected()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_free = os.dup(0)
    os.close(next_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, hard))
        client.connect(net.target(d.listen_address))
        until(lambda: "not accepting" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    Puppet(client, "P").open()
    d_told.wait("up")


def test_a_session_that_redials_for_ever_cannot_stop_close(net):
    p, p_told = net.endpoint("P")
    closed = net.listener()
    address = address_of(closed)
    closed.close()
    p_told.on["failed"] = lambda *_: p.connect(address)
    run(p, lambda: p.connect(address))
    p_told.wait("failed", 3)
    p.close(2.0)


def test_a_frame_that_comes_with_the_end_of_the_stream_is_still_heard(net):
    p, p_told = net.endpoint("P")
    listener = net.listener()
    run(p, lambda: p.connect(address_of(listener)))
    puppet = Puppet(net.socket(listener.accept()[0]), "D").open()
    puppet.sock.sendall(puppet.wire.encode(Done(**KEYS)))
    puppet.sock.close()
    p_told.wait("down")
    assert p_told.names() == ["up", "message", "down"]

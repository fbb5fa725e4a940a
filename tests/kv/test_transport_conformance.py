"""What every transport does, over real sockets: connecting, control frames, DATA, keys, closing."""

import itertools
import logging
import random
import threading
import time

import msgspec
import pytest

from tests.kv.pods import KEY, until
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    CONFORMING,
    UUID,
    Puppet,
    Recorder,
    address_of,
    cuts,
    data_header,
    dial,
    is_closed,
    networks,
    raw_data,
    run,
    send_data,
)
from tests.kv.wire_samples import KEYS, LAYOUT, SAMPLES
from xpyd_core.request_id import Address
from xpyd_kv.transport.body import checksum
from xpyd_kv.transport.host.sharing import NO_CHECKSUM
from xpyd_kv.transport.settings import Timeouts
from xpyd_kv.wire.errors import IllegalMoveError
from xpyd_kv.wire.messages import Cancel, Goaway, Grant, Lease, Offer

OFFER = next(sample for sample in SAMPLES if isinstance(sample.message, Offer))


net = networks(*CONFORMING, "striped")


def test_both_sides_meet_and_talk(net):
    (p, p_told, d_at_p), (d, d_told, p_at_d) = net.pair()
    assert d_at_p.address == d.listen_address
    assert p_at_d.address is None
    assert (d_at_p.hello.role, p_at_d.hello.role) == ("D", "P")
    assert d_at_p.layout == LAYOUT
    run(p, lambda: p.send(d_at_p, OFFER.message, OFFER.body))
    assert d_told.wait("message") == (p_at_d, OFFER.message, OFFER.body)
    grant = Grant(**KEYS)
    run(d, lambda: d.send(p_at_d, grant))
    assert p_told.wait("message") == (d_at_p, grant, b"")
    assert p.counters.connections == d.counters.connections == 1


def test_a_connected_peer_is_not_dialled_again(net):
    (p, _, peer), (d, d_told, _) = net.pair()
    assert run(p, lambda: p.connect(d.listen_address)) is peer
    assert d_told.names() == ["up"]


def test_one_dial_at_a_time(net):
    p, _ = net.endpoint("P")
    listener = net.listener()
    run(p, lambda: [p.connect(address_of(listener)) for _ in range(5)])
    net.socket(listener.accept()[0])
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_data_goes_from_views_to_views_and_nowhere_else(net):
    (p, p_told, d_at_p), (_, d_told, _) = net.pair()
    shuffle = random.Random(7)
    source = shuffle.randbytes(300 * BLOCK_BYTES)
    # The arena in odd pieces, in turns D's room for this frame and somebody else's.
    arena = net.room(3 * len(source), fill=0xEE)
    pieces = cuts(arena, iter(lambda: shuffle.randint(200, 400), 0))
    ours, others = [], pieces[1::2]
    left = len(source)
    for piece in pieces[::2]:
        ours.append(piece[:left])
        others.append(piece[left:])
        left -= len(ours[-1])
    assert left == 0
    order = list(range(len(ours)))
    shuffle.shuffle(order)
    landing = [ours[i] for i in order]
    d_told.on["begin"] = lambda *_: landing
    views = cuts(net.share(source), iter(lambda: shuffle.randint(1, 900), 0))
    send_data(p, p_told, d_at_p, views)
    assert d_told.wait("end")[2:] == (True, True)
    assert net.read(*landing) == source
    assert all(net.read(view) == b"\xee" * len(view) for view in others)
    assert p_told.wait("done") == (0, True)


def test_large_frames_one_after_another(net):
    (p, p_told, d_at_p), (d, d_told, _) = net.pair()
    content = [random.Random(seq).randbytes(40_000 * BLOCK_BYTES) for seq in range(4)]
    rooms = [net.room(len(body)) for body in content]
    d_told.on["begin"] = lambda _, header, __: cuts(rooms[header.seq], itertools.repeat(64 * 1024))
    for seq, body in enumerate(content):
        send_data(p, p_told, d_at_p, cuts(net.share(body), itertools.repeat(4096)), seq=seq)
    ends = [d_told.wait("end", n + 1) for n in range(4)]
    assert [(end[1].seq, *end[2:]) for end in ends] == [(seq, True, True) for seq in range(4)]
    assert [net.read(room) for room in rooms] == content
    p_told.wait("done", 4)
    assert p_told.all("done") == [(seq, True) for seq in range(4)]
    carried = d.counters.shared_bytes + d.counters.received_bytes
    assert carried >= sum(map(len, content))


def test_control_frames_overtake_queued_data(net):
    (p, p_told, d_at_p), (_, d_told, _) = net.pair()
    body = bytes(40_000 * BLOCK_BYTES)

    def queue():
        for seq in range(5):
            header = data_header(body, seq=seq)
            p.send_data(d_at_p, lambda h=header: h, [net.share(body)], lambda _: None)
        p.send(d_at_p, Cancel(**KEYS))

    run(p, queue)
    d_told.wait("end", 5)
    assert d_told.names().index("message") < d_told.names().index("end")
    assert p_told.all("down") == []


def test_a_frame_can_be_dropped_when_its_turn_comes(net):
    (p, p_told, d_at_p), (_, d_told, _) = net.pair()
    body = bytes(BLOCK_BYTES)
    view = [net.share(body)]

    def done(digest):
        p_told.tell("done", 0, digest)

    run(p, lambda: p.send_data(d_at_p, lambda: None, view, done))
    send_data(p, p_told, d_at_p, view, seq=1)
    d_told.wait("end")
    p_told.wait("done", 2)
    assert p_told.all("done") == [(0, None), (1, True)]
    assert [header.seq for _, header, *_ in d_told.all("begin")] == [1]
    (digest,) = p_told.checksums
    assert d_told.checksums == [digest]
    through_socket = digest == checksum([memoryview(body)])
    # Further connections may be there already.
    assert through_socket or (digest == NO_CHECKSUM and (net.is_lent or net.connections))


def test_data_that_nobody_wants_is_read_to_nowhere(net):
    (p, p_told, d_at_p), (_, d_told, _) = net.pair()
    body = random.Random(1).randbytes(5000 * BLOCK_BYTES)
    room = net.room(len(body))
    d_told.on["begin"] = lambda _, header, __: [room] if header.seq == 1 else None
    for seq in range(3):
        send_data(p, p_told, d_at_p, [net.share(body)], seq=seq)
    d_told.wait("end", 3)
    assert [end[2:] for end in d_told.all("end")] == [(False, False), (True, True), (False, False)]
    assert net.read(room) == body


def test_a_wrong_checksum_is_reported_and_counted(net):
    d, d_told = net.endpoint("D")
    over = {"transports": (net.transport,), **net.place}
    puppet = Puppet(net.connect(d.listen_address), "P", **over).open()
    rooms = [bytearray(BLOCK_BYTES) for _ in range(2)]
    d_told.on["begin"] = lambda _, header, __: [memoryview(rooms[header.seq])]
    puppet.sock.sendall(raw_data(bytes(BLOCK_BYTES), digest=b"01234567"))
    assert d_told.wait("end")[2:] == (True, False)
    until(lambda: d.counters.corrupt_frames == 1)
    puppet.sock.sendall(raw_data(b"\x07" * BLOCK_BYTES, seq=1))
    assert d_told.wait("end", 2)[2:] == (True, True)
    assert rooms[1] == b"\x07" * BLOCK_BYTES


def test_two_peers_are_served_side_by_side(net):
    """While one P keeps D busy with DATA, another's small question is heard in between."""
    (p, p_told, d_at_p), (d, d_told, _) = net.pair()
    other, other_told = net.endpoint("P")
    peer = dial(other, other_told, d.listen_address)
    view = net.share(bytes(40_000 * BLOCK_BYTES))
    room = net.room(len(view))
    asked = threading.Event()

    def ask():
        other.send(peer, Cancel(**KEYS))
        asked.set()

    def begin(*_):
        if not asked.is_set():
            other.call(ask)
            # On a busy machine its thread would have no turn before all DATA is here.
            assert asked.wait(10)
        if "message" not in d_told.names():
            time.sleep(0.02)
        return [room]

    d_told.on["begin"] = begin
    for seq in range(40):
        send_data(p, p_told, d_at_p, [view], seq=seq)
    d_told.wait("end", 40)
    assert d_told.names().index("message") < len(d_told.names()) - 1


def test_frames_follow_each_other_without_the_help_of_a_timer(net):
    """What P may lend is bounded: the next frame leaves when D has copied one, not with a PING."""
    (p, p_told, d_at_p), (_, d_told, _) = net.pair(timeouts=Timeouts(ping_s=60.0))
    view = net.share(bytes(4_000 * BLOCK_BYTES))
    room = net.room(len(view))
    d_told.on["begin"] = lambda *_: [room]
    for seq in range(20):
        send_data(p, p_told, d_at_p, [view], seq=seq)
    d_told.wait("end", 20)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"factors": {**LAYOUT.factors, "model": "x"}}, "model"),
        ({"block_size": 24, "block_bytes": 192}, "block_size"),
    ],
)
def test_incompatible_sides_both_name_the_factor(net, changes, factor):
    d, d_told = net.endpoint("D")
    p, p_told = net.endpoint("P", layout=msgspec.structs.replace(LAYOUT, **changes))
    run(p, lambda: p.connect(d.listen_address))
    assert p_told.wait("failed") == (d.listen_address, f"incompatible:{factor}")
    until(lambda: d.counters.refused == {factor: 1})
    assert p.counters.refused == {factor: 1}
    assert d_told.told == []


def test_a_refusal_is_logged_once_on_each_side_however_often_it_is_dialled(net, caplog):
    d, _ = net.endpoint("D")
    changed = {**LAYOUT.factors, "model": "x"}
    p, p_told = net.endpoint("P", layout=msgspec.structs.replace(LAYOUT, factors=changed))
    with caplog.at_level(logging.WARNING):
        for n in range(1, 6):
            run(p, lambda: p.connect(d.listen_address))
            p_told.wait("failed", n)
        until(lambda: d.counters.refused == {"model": 5})
    lines = [line for line in caplog.messages if "incompatible (model)" in line]
    assert len(lines) == 2
    assert {line.split()[2] for line in lines} == {"to", "from"}


def test_a_wrong_key_is_refused_counted_and_not_tried_again(net):
    d, d_told = net.endpoint("D")
    p, p_told = net.endpoint("P", keys=(b"another fleet's key",))
    for n in (1, 2, 3):
        run(p, lambda: p.connect(d.listen_address))
        assert p_told.wait("failed", n) == (d.listen_address, "auth")
    assert p.counters.auth_failed == 1
    assert d.counters.auth_failed == 1
    assert p.counters.refused == d.counters.refused == {"auth": 1}
    assert d_told.told == []


def test_a_failed_auth_is_forgotten_after_a_while(net):
    now = [1000.0]
    d, _ = net.endpoint("D")
    options = {"keys": (b"another fleet's key",), "clock": lambda: now[0]}
    p, p_told = net.endpoint("P", **options)
    run(p, lambda: p.connect(d.listen_address))
    p_told.wait("failed")
    now[0] += 29.0
    run(p, lambda: p.connect(d.listen_address))
    p_told.wait("failed", 2)
    assert d.counters.auth_failed == 1
    now[0] += 2.0
    run(p, lambda: p.connect(d.listen_address))
    p_told.wait("failed", 3)
    assert d.counters.auth_failed == 2


def test_a_rotated_key_is_accepted(net):
    new = b"the fleet's next key"
    d, d_told = net.endpoint("D", keys=(new, KEY))
    p, p_told = net.endpoint("P", keys=(KEY,))
    assert dial(p, p_told, d.listen_address)
    d_told.wait("up")


def test_new_connections_use_the_keys_of_now_and_old_connections_stay(net):
    new, d_keys, p_keys = b"the fleet's next key", [KEY], [KEY]
    d, d_told = net.endpoint("D", keys=d_keys)
    first, first_told = net.endpoint("P", keys=p_keys)
    dial(first, first_told, d.listen_address)
    d_told.wait("up")
    d_keys[:], p_keys[:] = [KEY, new], [new, KEY]
    between, between_told = net.endpoint("P", keys=p_keys)
    dial(between, between_told, d.listen_address)
    d_told.wait("up", 2)
    d_keys[:] = [new]
    late, late_told = net.endpoint("P", keys=(KEY,))
    run(late, lambda: late.connect(d.listen_address))
    assert late_told.wait("failed") == (d.listen_address, "auth")
    assert run(first, lambda: first.connect(d.listen_address)) is not None
    assert [name for name, *_ in d_told.told if name == "down"] == []


def test_p_does_not_take_connections_of_p_or_d(net):
    listening, told = net.endpoint("P", listen=Address("127.0.0.1", 0))
    p, p_told = net.endpoint("P")
    run(p, lambda: p.connect(listening.listen_address))
    assert p_told.wait("failed")[1] == "refused:role"
    assert told.told == []


def test_dialling_oneself_is_refused(net):
    p, p_told = net.endpoint("P", listen=Address("127.0.0.1", 0))
    run(p, lambda: p.connect(p.listen_address))
    assert p_told.wait("failed")[1] == "refused:self"


def test_nobody_there_is_unreachable(net):
    p, p_told = net.endpoint("P")
    closed = net.listener()
    address = address_of(closed)
    closed.close()
    run(p, lambda: p.connect(address))
    assert p_told.wait("failed") in ((address, "unreachable"), (address, "no_socket"))


def test_a_restarted_d_is_another_peer(net):
    (p, p_told, first), (d, _, _) = net.pair()
    d.close(2.0)
    assert p_told.wait("down") == (first, "closed_by_peer")
    again, again_told = net.endpoint("D", listen=d.listen_address)
    second = dial(p, p_told, again.listen_address)
    assert second is not first
    again_told.wait("up")


def test_a_second_connection_of_the_same_instance_replaces_the_first(net):
    d, d_told = net.endpoint("D")
    same = {"engine_id": "p", "incarnation": "i", **net.place}
    first = Puppet(net.connect(d.listen_address), "P", **same).open()
    first_peer = d_told.wait("up")[0]
    Puppet(net.connect(d.listen_address), "P", **same).open()
    second_peer = d_told.wait("up", 2)[0]
    assert d_told.wait("down") == (first_peer, "replaced")
    assert is_closed(first.sock)
    assert d.counters.connections == 1
    assert second_peer is not first_peer


def test_a_handler_may_redial_when_told_of_a_loss(net):
    (p, p_told, first), (d, d_told, p_at_d) = net.pair()
    p_told.on["down"] = lambda peer, _: p.connect(peer.address)
    run(d, lambda: d.disconnect(p_at_d, "test"))
    second = p_told.wait("up", 2)[0]
    assert second is not first
    assert d_told.wait("down") == (p_at_d, "test")
    assert p_told.wait("down") == (first, "closed_by_peer")


def test_close_says_goaway_and_reports_every_peer(net):
    (p, p_told, d_at_p), (d, d_told, p_at_d) = net.pair()
    d.close(5.0)
    assert d_told.wait("down") == (p_at_d, "closed")
    assert p_told.wait("message") == (d_at_p, Goaway(reason="closing"), b"")
    p_told.wait("down")
    d.close(5.0)
    d.call(lambda: pytest.fail("the thread has ended"))
    assert p.counters.connections == d.counters.connections == 0


def test_close_sends_what_is_queued(net):
    (p, p_told, d_at_p), (_, d_told, _) = net.pair()
    body = random.Random(2).randbytes(60_000 * BLOCK_BYTES)
    room = net.room(len(body))
    d_told.on["begin"] = lambda *_: [room]
    send_data(p, p_told, d_at_p, [net.share(body)])
    p.close(10.0)
    d_told.wait("end")
    assert net.read(room) == body
    assert p_told.names() == ["up", "done", "down"]


def test_what_is_queued_on_a_closed_peer_is_given_back(net):
    (p, p_told, d_at_p), _ = net.pair()
    run(p, lambda: p.disconnect(d_at_p, "test"))
    p_told.wait("down")
    send_data(p, p_told, d_at_p, [net.share(bytes(BLOCK_BYTES))])
    run(p, lambda: p.send(d_at_p, Cancel(**KEYS)))
    assert p_told.wait("done") == (0, False)


def test_our_own_mistakes_are_told_to_the_caller(net):
    (p, _, d_at_p), (d, _, p_at_d) = net.pair()
    with pytest.raises(IllegalMoveError):
        run(p, lambda: p.send(d_at_p, Lease(**KEYS, ttl_ms=1)))
    with pytest.raises(IllegalMoveError):
        run(d, lambda: d.send(p_at_d, OFFER.message, OFFER.body))
    large = [memoryview(bytes(2**20))] * 65
    with pytest.raises(IllegalMoveError):
        run(p, lambda: p.send_data(d_at_p, lambda: None, large, lambda _: None))
    with pytest.raises(RuntimeError):
        p.send(d_at_p, Cancel(**KEYS))
    with pytest.raises(RuntimeError):
        run(p, lambda: p.close(1.0))
    assert p.counters.connections == 1


def test_ticks_come_when_asked_for(net):
    ticks = []

    def tick(now):
        ticks.append(now)
        return now + 0.005 if len(ticks) < 20 else None

    told = Recorder()
    told.on["tick"] = tick
    net.endpoint("P", handler=told)
    until(lambda: len(ticks) == 20)


def test_a_tick_follows_whatever_the_session_was_told(net):
    """Its deadlines may have moved, and it was asked for the next one before."""
    (p, p_told, d_at_p), (_, d_told, _) = net.pair()
    for told in (p_told, d_told):
        told.on["tick"] = lambda _, told=told: told.tell("ticked")
    run(p, lambda: p.send(d_at_p, Cancel(**KEYS)))
    until(lambda: _is_followed_by_tick(d_told, "message"))
    send_data(p, p_told, d_at_p, [net.share(bytes(BLOCK_BYTES))])
    until(lambda: _is_followed_by_tick(d_told, "end"))
    until(lambda: _is_followed_by_tick(p_told, "done"))


def _is_followed_by_tick(told, name):
    names = told.names()
    return name in names and "ticked" in names[names.index(name) :]


def test_the_first_byte_of_each_frame_is_logged_for_whoever_debugs(net, caplog):
    caplog.set_level(logging.DEBUG, "xpyd_kv.transport.stream.writer")
    (p, p_told, d_at_p), (_, d_told, _) = net.pair()
    send_data(p, p_told, d_at_p, [net.share(bytes(BLOCK_BYTES))], seq=3)
    d_told.wait("end")
    p_told.wait("done")
    (record,) = [r for r in caplog.records if r.message == "data sent"]
    assert (record.request, record.seq, record.layers) == (UUID, 3, "0:1")
    assert record.monotonic_ns > 0

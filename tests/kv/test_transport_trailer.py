"""DATA's checksum behind its body, over real sockets: cut anywhere, broken, in short sends."""

import contextlib
import random
import socket
import struct
import threading
import time
from contextlib import closing

import msgspec
import pytest

from tests.kv.pods import PATIENCE_S, admitted, ids_of, key_of, pods, send, settled, until
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    Puppet,
    address_of,
    network,
    networks,
    raw_data,
    run,
    send_data,
)
from tests.kv.wire_samples import LAYOUT
from xpyd_core.request_id import Address
from xpyd_kv.transport.body import TURN_BYTES, checksum
from xpyd_kv.transport.devices.staging import Staging
from xpyd_kv.values import Landed
from xpyd_kv.wire.messages import CHECKSUM_BYTES

ON_HOST = ("tcp", "uds")


net = networks(*ON_HOST, "tcp+gpu", "uds+gpu")


host_net = networks(*ON_HOST)


def body_of(blocks, seed=1):
    return random.Random(seed).randbytes(blocks * BLOCK_BYTES)


def opened(net, **options):
    """A D and a P by hand."""
    d, d_told = net.endpoint("D", **options)
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    d_told.wait("up")
    return d, d_told, puppet


@pytest.mark.parametrize("blocks", [1, 2000])
@pytest.mark.parametrize("is_wanted", [True, False])
def test_where_the_end_of_a_frame_is_cut_changes_nothing(net, blocks, is_wanted):
    """Each beginning is read by itself; behind each frame comes the next at once."""
    d, d_told, puppet = opened(net)
    cuts = range(CHECKSUM_BYTES + 3)
    rooms = [net.room(blocks * BLOCK_BYTES) for _ in cuts]
    d_told.on["begin"] = lambda _, header, __: [rooms[header.seq]] if is_wanted else None
    sent, rest = d.counters.received_bytes, b""
    for seq in cuts:
        frame = rest + raw_data(body_of(blocks, seq), seq=seq)
        puppet.sock.sendall(frame[: len(frame) - seq])
        rest = frame[len(frame) - seq :]
        sent += len(frame) - seq
        until(lambda count=sent: d.counters.received_bytes == count)
    puppet.sock.sendall(rest)
    d_told.wait("end", len(cuts))
    assert [end[1].seq for end in d_told.all("end")] == list(cuts)
    assert {end[2:] for end in d_told.all("end")} == {(is_wanted, is_wanted)}
    bodies = [body_of(blocks, seq) for seq in cuts]
    assert d_told.checksums == [checksum([memoryview(body)]) for body in bodies]
    assert [net.read(room) for room in rooms] == (
        bodies if is_wanted else [bytes(len(body)) for body in bodies]
    )


def test_a_frame_has_not_ended_before_its_checksum_has(net):
    d, d_told, puppet = opened(net)
    room = net.room(BLOCK_BYTES)
    d_told.on["begin"] = lambda *_: [room]
    begun = d.counters.received_bytes
    frame = raw_data(body_of(1))[:-1]
    puppet.sock.sendall(frame)
    until(lambda: d.counters.received_bytes == begun + len(frame))
    puppet.sock.close()
    d_told.wait("down")
    assert d_told.names() == ["up", "begin", "down"]


def test_frames_that_lack_their_checksum_keep_no_slab_from_each_other():
    """As many as there are slabs: none waits for another one to read those last bytes, and what
    stands behind them does not come before there is room for it."""
    blocks, connections = 1000, 2
    layout = msgspec.structs.replace(LAYOUT, max_data_bytes=blocks * BLOCK_BYTES)
    with network("tcp+gpu") as net:
        slab_bytes = layout.max_data_bytes + 64 * 1024
        staging = Staging(net.gpus.d, slab_bytes=slab_bytes, slabs=connections)
        net.stagings.append(staging)
        d, d_told = net.endpoint("D", layout=layout, staging=staging)
        puppets = [Puppet(net.connect(d.listen_address), "P").open() for _ in range(connections)]
        rooms = {seq: net.room(blocks * BLOCK_BYTES) for seq in range(2 * connections)}
        d_told.on["begin"] = lambda _, header, __: [rooms[header.seq]]
        first = [raw_data(body_of(blocks, seq), seq=seq) for seq in range(connections)]
        second = [
            raw_data(body_of(blocks, seq), seq=seq) for seq in range(connections, 2 * connections)
        ]
        d_told.wait("up", connections)
        begun = d.counters.received_bytes
        for puppet, frame in zip(puppets, first, strict=True):
            puppet.sock.sendall(frame[:-CHECKSUM_BYTES])
        sent = begun + sum(len(frame) - CHECKSUM_BYTES for frame in first)
        until(lambda: d.counters.received_bytes == sent)
        assert run(d, lambda: staging.free_slabs) == 0
        for puppet, frame, behind in zip(puppets, first, second, strict=True):
            puppet.sock.sendall(frame[-CHECKSUM_BYTES:] + behind)
        d_told.wait("end", 2 * connections)
        assert {end[2:] for end in d_told.all("end")} == {(True, True)}
        assert [net.read(rooms[seq]) for seq in rooms] == [body_of(blocks, seq) for seq in rooms]
        assert d_told.all("down") == []


@pytest.mark.parametrize("place", [-1, -CHECKSUM_BYTES, -CHECKSUM_BYTES - 1, -1000])
def test_a_flipped_bit_in_body_or_checksum_is_a_broken_frame(net, place):
    d, d_told, puppet = opened(net)
    rooms = [net.room(20 * BLOCK_BYTES) for _ in range(2)]
    d_told.on["begin"] = lambda _, header, __: [rooms[header.seq]]
    frame = bytearray(raw_data(body_of(20)))
    frame[place] ^= 0x10
    puppet.sock.sendall(frame + raw_data(body_of(20, 2), seq=1))
    d_told.wait("end", 2)
    assert [end[2:] for end in d_told.all("end")] == [(True, False), (True, True)]
    assert net.read(rooms[1]) == body_of(20, 2)
    assert d.counters.corrupt_frames == 1


@pytest.mark.parametrize("size", [BLOCK_BYTES, TURN_BYTES, 2 * TURN_BYTES + BLOCK_BYTES, 5_000_064])
def test_p_sums_up_right_however_little_the_kernel_takes_at_once(host_net, size):
    net = host_net
    p, p_told = net.endpoint("P")
    listener = net.listener()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    run(p, lambda: p.connect(address_of(listener)))
    puppet = Puppet(net.socket(listener.accept()[0]), "D").open()
    peer = p_told.wait("up")[0]
    run(p, lambda: peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096))
    bodies = [body_of(size // BLOCK_BYTES, seed) for seed in range(2)]
    pick = random.Random(3)
    for seq, body in enumerate(bodies):
        edges = sorted(pick.randrange(len(body)) for _ in range(50))
        views = [memoryview(body)[a:b] for a, b in zip([0, *edges], [*edges, None], strict=True)]
        send_data(p, p_told, peer, views, seq=seq)
    expected = b"".join(raw_data(body, seq=seq) for seq, body in enumerate(bodies))
    came = bytearray()
    while len(came) < len(expected):
        came += puppet.sock.recv(min(pick.choice([7, 4096, 70_000]), len(expected) - len(came)))
    assert came == expected
    assert p_told.wait("done", 2) == (1, True)
    assert p_told.checksums == [checksum([memoryview(body)]) for body in bodies]


class Flipper:
    """Between one P and one D: flips a bit of the first DATA frame at `place` of its body, and of
    no other."""

    def __init__(self, target: Address, place: int) -> None:
        self._target, self._place = target, place
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._listener.getsockname())
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def close(self) -> None:
        for sock in [*self._sockets, self._listener]:
            with contextlib.suppress(OSError):  # Its other end may be gone.
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for sock in [*self._sockets, self._listener]:
            sock.close()

    def _run(self) -> None:
        of_p = self._listener.accept()[0]
        of_d = socket.create_connection(self._target)
        self._sockets += [of_p, of_d]
        back = threading.Thread(target=_forward, args=(of_d, of_p, lambda _: None))
        self._threads.append(back)
        back.start()
        _forward(of_p, of_d, self._flip)

    def _flip(self, stream: bytearray) -> int | None:
        start = stream.find(b"XKV1\x07")
        if start < 0 or len(stream) < start + 16:
            return None
        header_bytes, body_bytes = struct.unpack_from("<HI", stream, start + 6)
        return start + 16 + header_bytes + self._place % body_bytes


def _forward(source, target, find) -> None:
    stream, sent = bytearray(), 0
    try:
        while chunk := source.recv(65536):
            stream += chunk
            at = find(stream)
            if at is not None and sent <= at < len(stream):
                stream[at] ^= 1
            target.sendall(stream[sent:])
            sent = len(stream)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return  # Closed by the test, or by the other side.


@pytest.mark.parametrize("place", [0, -CHECKSUM_BYTES - 1, -CHECKSUM_BYTES, -1])
def test_a_frame_that_is_broken_on_the_way_comes_once_more_and_commit_agrees(place):
    with pods() as (p, d), closing(Flipper(d.address, place)) as flipper:
        assert d.kv.consumer is not None
        ids = ids_of(3, 12)
        d.kv.consumer.expect(key_of(3), wait_s=PATIENCE_S, now=time.monotonic())
        key = send(p, flipper.address, ids, 3, 4)
        answer = admitted(d, key, ids)
        assert isinstance(answer, Landed)
        assert d.memory.holds(answer.block_ids, 3)
        until(lambda: settled(p, key))
        assert d.kv.metrics.checksum_mismatches == 1
        assert p.kv.metrics.sent_frames == d.kv.metrics.received_frames + 1
        assert p.lost == d.lost == []

"""DATA through shared memory: who may do what with it, what is lent when, and peers that lie."""

import mmap
import os
import random
import socket
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.pods import until
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    SHARED,
    UUID,
    Puppet,
    address_of,
    data_header,
    is_closed,
    network,
    networks,
    run,
    send_data,
)
from xpyd_core.errors import UserError
from xpyd_kv.spans import Span
from xpyd_kv.transport.host.data_path import pack, unpack
from xpyd_kv.transport.host.shared_memory import PeerMemory, SharedMemory
from xpyd_kv.transport.host.sharing import NO_CHECKSUM, WINDOW_BYTES, shared_of
from xpyd_kv.wire.frames import encode
from xpyd_kv.wire.messages import Copied, Goaway, Refuse, Region

FRAME = 4 * 2**20


net = networks("shm")


@pytest.fixture
def memory():
    memory = SharedMemory(1 << 20)
    yield memory
    memory.close()


def maps_of_peers():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:xpyd-kv" in line and " r--s " in line]


# --- the memory


def test_a_peer_reads_it_and_can_neither_write_nor_resize_it(memory):
    memory.buffer[:5] = b"bytes"
    fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR)
    try:
        assert os.pread(fd, 5, 0) == b"bytes"
        with mmap.mmap(fd, 5, prot=mmap.PROT_READ) as seen:
            assert seen[:] == b"bytes"
            memory.buffer[:5] = b"later"
            assert seen[:] == b"later"
        for forbidden in (
            lambda: mmap.mmap(fd, 5),
            lambda: os.pwrite(fd, b"x", 0),
            lambda: os.ftruncate(fd, 0),
            lambda: os.ftruncate(fd, 2 << 20),
        ):
            with pytest.raises(PermissionError):
                forbidden()
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [0, -1, 2**41])
def test_a_size_that_cannot_be_shared_is_refused(size):
    with pytest.raises(UserError, match="--kv-transport uds"):
        SharedMemory(size)


def test_places_are_found_and_neighbours_joined(memory):
    whole = memoryview(memory.buffer)
    views = [whole[8:16], whole[16:20], whole[0:0], whole[4:8], whole[100:101]]
    assert memory.runs_of(views, at_most=3) == [Span(8, 12), Span(4, 4), Span(100, 1)]
    assert memory.runs_of(views, at_most=2) is None
    assert memory.runs_of([memoryview(bytearray(8))], at_most=9) is None
    assert memory.runs_of([memoryview(b"read-only")], at_most=9) is None


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 100)), max_size=20),
    st.lists(st.integers(0, 80), min_size=60, max_size=60),
)
def test_runs_are_copied_into_room_of_any_shape(runs, sizes):
    memory = SharedMemory(1000)
    memory.buffer[:] = random.Random(1).randbytes(1000)
    runs = [Span(*run) for run in runs]
    content = b"".join(memory.buffer[o : o + n] for o, n in runs)
    room, views, start = bytearray(len(content)), [], 0
    for size in [*sizes, len(room)]:
        views.append(memoryview(room)[start : start + size])
        start += size
    peer = PeerMemory(memory.fd, 1000)
    peer.check(unpack(pack(runs)), len(content))
    peer.copy(unpack(pack(runs)), views)
    peer.close()
    memory.close()
    assert room == content


# --- what is lent


def test_bytes_stay_lent_until_d_says_copied(net):
    p, p_told, peer, puppet = opened_d(net)
    send_data(p, p_told, peer, [net.share(bytes(BLOCK_BYTES))])
    p.call(lambda: None)
    assert puppet.read()
    run(p, lambda: None)
    assert p_told.all("done") == []
    puppet.sock.sendall(encode(Copied(frames=1)))
    assert p_told.wait("done") == (0, True)
    assert p.counters.shared_bytes == BLOCK_BYTES


def test_what_is_lent_comes_back_when_d_dies(net):
    p, p_told, peer, puppet = opened_d(net)
    for seq in range(3):
        send_data(p, p_told, peer, [net.share(bytes(BLOCK_BYTES))], seq=seq)
    puppet.read()
    puppet.sock.close()
    p_told.wait("down")
    assert p_told.names() == ["up", "done", "done", "done", "down"]
    assert p_told.all("done") == [(0, False), (1, False), (2, False)]


def test_no_more_is_lent_than_the_window(net):
    p, p_told, peer, puppet = opened_d(net)
    view = net.share(bytes(FRAME))
    most = WINDOW_BYTES // FRAME
    for seq in range(most + 2):
        send_data(p, p_told, peer, [view], seq=seq)
    assert puppet.count_shared(most) == most
    puppet.sock.settimeout(0.05)
    with pytest.raises(TimeoutError):
        puppet.sock.recv(1)
    puppet.sock.sendall(encode(Copied(frames=1)))
    puppet.sock.settimeout(20)
    assert puppet.count_shared(1) == 1


def test_of_frames_longer_than_the_window_two_are_lent(net):
    p, p_told, peer, puppet = opened_d(net)
    view = net.share(bytes(WINDOW_BYTES))
    for seq in range(4):
        send_data(p, p_told, peer, [view], seq=seq)
    assert puppet.count_shared(2) == 2
    puppet.sock.settimeout(0.05)
    with pytest.raises(TimeoutError):
        puppet.sock.recv(1)
    puppet.sock.sendall(encode(Copied(frames=1)))
    puppet.sock.settimeout(20)
    assert puppet.count_shared(1) == 1


def test_close_waits_until_d_has_copied(net):
    p, p_told, peer, puppet = opened_d(net)
    send_data(p, p_told, peer, [net.share(bytes(BLOCK_BYTES))])
    closing = threading.Thread(target=p.close, args=(10.0,))
    closing.start()
    while not any(isinstance(event.message, Goaway) for event in puppet.read()):
        pass
    puppet.sock.sendall(encode(Copied(frames=1)))
    closing.join()
    assert p_told.wait("done") == (0, True)


def test_close_does_not_wait_for_ever_for_a_d_that_copies_nothing(net):
    p, p_told, peer, puppet = opened_d(net)
    send_data(p, p_told, peer, [net.share(bytes(BLOCK_BYTES))])
    puppet.read()
    p.close(0.5)
    assert p_told.wait("done") == (0, False)


def test_bytes_that_stand_elsewhere_go_through_the_socket(net):
    (p, p_told, d_at_p), (d, d_told, _) = net.pair()
    body = random.Random(1).randbytes(8 * BLOCK_BYTES)
    rooms = [bytearray(len(body)) for _ in range(2)]
    d_told.on["begin"] = lambda _, header, __: [memoryview(rooms[header.seq])]
    mixed = [net.share(body[: 4 * BLOCK_BYTES]), memoryview(bytearray(body[4 * BLOCK_BYTES :]))]
    send_data(p, p_told, d_at_p, mixed)
    send_data(p, p_told, d_at_p, [net.share(body)], seq=1)
    d_told.wait("end", 2)
    assert rooms == [body, body]
    assert d.counters.shared_bytes == len(body)
    assert [digest == NO_CHECKSUM for digest in d_told.checksums] == [False, True]
    p_told.wait("done", 2)
    assert p_told.checksums == d_told.checksums


def test_the_peers_memory_is_unmapped_with_the_connection(net):
    (p, p_told, d_at_p), (_, d_told, _) = net.pair()
    send_data(p, p_told, d_at_p, [net.share(bytes(BLOCK_BYTES))])
    d_told.wait("end")
    assert len(maps_of_peers()) == 1
    run(p, lambda: p.disconnect(d_at_p, "test"))
    d_told.wait("down")
    until(lambda: maps_of_peers() == [])


# --- peers that lie


def region(size=SHARED.size_bytes):
    return encode(Region(size_bytes=size))


def shared(*runs, blocks=1, seq=0, body=None):
    header = shared_of(data_header(bytes(blocks * BLOCK_BYTES), seq=seq))
    body = pack(Span(*r) for r in runs) if body is None else body
    return encode(header, len(body)) + body


def say(sock, frames, fds=()):
    socket.send_fds(sock, [frames], list(fds))


def loosely_sealed():
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    return fd


OK_RUN = (0, BLOCK_BYTES)
LIES = {
    "an offset behind the end": [shared((SHARED.size_bytes - 1, BLOCK_BYTES))],
    "an offset that would wrap around": [shared((2**64 - BLOCK_BYTES, BLOCK_BYTES))],
    "fewer bytes than the ranges mean": [shared((0, BLOCK_BYTES - 1))],
    "more bytes than the ranges mean": [shared((0, 200), (0, 200), blocks=2)],
    "an empty run": [shared((0, 0), OK_RUN, blocks=2)],
    "half a run": [shared(body=pack([Span(*OK_RUN)])[:6])],
    "no run": [shared(body=b"")],
    "more runs than blocks": [shared((0, 64), (64, 64))],
}


def test_copied_is_said_before_the_next_frame_begins(net):
    _, d_told, puppet = opened_p(net)
    puppet.sock.settimeout(5.0)
    said = []

    def begin(_, header, length):
        if header.seq:
            said.extend(event.message for event in puppet.read())
        return [memoryview(bytearray(length))]

    d_told.on["begin"] = begin
    say(puppet.sock, region() + shared(OK_RUN) + shared(OK_RUN, seq=1), [SHARED.fd])
    d_told.wait("end", 2)
    assert said == [Copied(frames=1)]


@pytest.mark.parametrize("last", [Goaway(reason="closing"), Refuse(reason="limit")])
def test_what_p_says_behind_its_last_frame_is_heard_when_it_is_gone(net, last):
    _, d_told, puppet = opened_p(net)

    def begin(_, header, length):
        puppet.sock.close()
        return [memoryview(bytearray(length))]

    d_told.on["begin"] = begin
    say(puppet.sock, region() + shared(OK_RUN) + encode(last), [SHARED.fd])
    reason = d_told.wait("down")[1]
    if isinstance(last, Refuse):
        assert reason == "refused:limit"
    else:
        assert [message for _, message, _ in d_told.all("message")] == [last]


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_p_that_lies_about_places_loses_its_connection(net, lie):
    d, d_told, puppet = opened_p(net)
    say(puppet.sock, region(), [SHARED.fd])
    puppet.sock.sendall(b"".join(lie))
    assert d_told.wait("down")[1] == "protocol"
    assert is_closed(puppet.sock)
    assert d.counters.protocol_errors == 1
    assert maps_of_peers() == []


def test_shared_before_region_and_region_without_or_twice_end_the_connection(net):
    for frames in ([shared(OK_RUN)], [region()], None):
        _, d_told, puppet = opened_p(net)
        if frames is None:
            say(puppet.sock, region(), [SHARED.fd])
            say(puppet.sock, region(), [SHARED.fd])
        else:
            puppet.sock.sendall(b"".join(frames))
        assert d_told.wait("down")[1] == "protocol"


@pytest.mark.parametrize("count", [2, 20])
def test_a_flood_of_descriptors_ends_the_connection_and_leaks_none(net, count):
    _, d_told, puppet = opened_p(net)
    say(puppet.sock, region(), [SHARED.fd] * count)
    assert d_told.wait("down")[1] == "protocol"


def test_memory_of_another_size_or_that_may_shrink_is_not_mapped(net):
    pipe = os.pipe()
    for fd, size in ((SHARED.fd, 4096), (loosely_sealed(), 4096), (pipe[0], 4096), (0, 1)):
        _, d_told, puppet = opened_p(net)
        say(puppet.sock, region(size), [fd])
        assert d_told.wait("down")[1] == "protocol"
        if fd not in (SHARED.fd, 0):
            os.close(fd)
    os.close(pipe[1])
    assert maps_of_peers() == []


def test_copied_for_what_was_not_sent_ends_the_connection(net):
    _, p_told, _, puppet = opened_d(net)
    puppet.sock.sendall(encode(Copied(frames=1)))
    assert p_told.wait("down")[1] == "protocol"


def test_over_tcp_and_uds_these_frames_are_not_legal():
    for transport in ("tcp", "uds"):
        with network(transport) as net:
            _, d_told, puppet = opened_p(net)
            puppet.sock.sendall(region())
            assert d_told.wait("down")[1] == "protocol"


def test_descriptors_of_strangers_are_dropped(net):
    d, _ = net.endpoint("D")
    stranger = net.connect(d.listen_address)
    say(stranger, net.raw("hello_dialler"), [SHARED.fd] * 3)
    assert stranger.recv(65536)
    say(stranger, struct.pack("<I", 7), [SHARED.fd] * 3)
    assert is_closed(stranger)


class SharedPuppet(Puppet):
    """A D that counts SHARED frames."""

    def count_shared(self, count):
        """How many came, once at least `count` did."""
        found = 0
        while found < count:
            found += sum(getattr(e.message, "uuid", "") == UUID for e in self.read())
        return found


def opened_d(net):
    """A P whose D is a puppet."""
    p, p_told = net.endpoint("P")
    listener = net.listener()
    run(p, lambda: p.connect(address_of(listener)))
    puppet = SharedPuppet(net.socket(listener.accept()[0]), "D").open()
    return p, p_told, p_told.wait("up")[0], puppet


def opened_p(net):
    """A D whose P is a puppet."""
    d, d_told = net.endpoint("D")
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    d_told.wait("up")
    return d, d_told, puppet

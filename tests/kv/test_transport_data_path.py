"""Fetches that another thread or a device carries out: their order, their deadline, their end."""

import socket
import threading

from tests.kv.transport_kit import (
    BLOCK_BYTES,
    SHARED,
    Puppet,
    data_header,
    networks,
    send_data,
)
from xpyd_kv.spans import Span
from xpyd_kv.transport.host.data_path import pack
from xpyd_kv.transport.host.shared_memory import SharedMemoryBorrower, SharedMemoryPath
from xpyd_kv.transport.host.sharing import WINDOW_BYTES, WINDOW_FRAMES, shared_of
from xpyd_kv.transport.settings import Timeouts
from xpyd_kv.wire.frames import encode
from xpyd_kv.wire.messages import Region


class SlowPath(SharedMemoryPath):
    """shm whose bytes come when the test lets them: one permit for each frame."""

    def __init__(self):
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.fault = None
        self.closed = threading.Event()

    def borrower(self):
        return SlowBorrower(self)


class SlowBorrower(SharedMemoryBorrower):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def prepare(self, body, length):
        start = super().prepare(body, length)
        return lambda views: SlowFetch(self.path, lambda: start(views))

    def close(self):
        super().close()
        self.path.closed.set()


class SlowFetch:
    def __init__(self, path, start):
        self.path = path
        self.start = start

    def poll(self):
        if self.path.fault is not None:
            raise self.path.fault
        return self.path.permits.acquire(blocking=False) and self.start().poll()


net = networks("shm")


def slow_pair(net, **times):
    path = SlowPath()
    d, d_told = net.endpoint("D", paths=[path], timeouts=Timeouts(**times))
    p, p_told = net.endpoint("P", paths=[SharedMemoryPath(SHARED)])
    p.call(lambda: p.connect(d.listen_address))
    return p, p_told, p_told.wait("up")[0], d_told, path


def test_a_frame_ends_and_is_copied_when_its_bytes_have_come(net):
    p, p_told, peer, d_told, path = slow_pair(net)
    rooms = [bytearray(BLOCK_BYTES) for _ in range(3)]
    d_told.on["begin"] = lambda peer, header, length: [memoryview(rooms[header.seq])]
    for seq in range(3):
        view = net.share(bytes([seq + 1]) * BLOCK_BYTES)
        send_data(p, p_told, peer, [view], seq=seq)
    d_told.wait("begin", 3)
    assert d_told.all("end") == []
    for count in (1, 2, 3):
        path.permits.release()
        assert p_told.wait("done", count) == (count - 1, True)
        assert len(d_told.all("end")) == count
        assert [room[0] for room in rooms] == [*range(1, count + 1)] + [0] * (3 - count)


def test_bytes_that_do_not_come_in_time_end_the_connection(net):
    p, p_told, peer, d_told, path = slow_pair(net, fetch_s=0.05)
    d_told.on["begin"] = lambda peer, header, length: [memoryview(bytearray(length))]
    send_data(p, p_told, peer, [net.share(bytes(BLOCK_BYTES))])
    assert d_told.wait("down")[1] == "timeout"
    assert path.closed.is_set()
    assert d_told.all("end") == []
    assert p_told.wait("done") == (0, False)


def test_a_fetch_that_fails_ends_the_connection(net):
    p, p_told, peer, d_told, path = slow_pair(net)
    d_told.on["begin"] = lambda peer, header, length: [memoryview(bytearray(length))]
    path.fault = OSError("the device is gone")
    send_data(p, p_told, peer, [net.share(bytes(BLOCK_BYTES))])
    assert d_told.wait("down")[1] == "refused:transport"
    assert d_told.all("end") == []


def test_what_is_on_its_way_at_the_end_is_let_go_of_before_the_session_hears(net):
    p, p_told, peer, d_told, path = slow_pair(net)
    d_told.on["begin"] = lambda peer, header, length: [memoryview(bytearray(length))]
    was_closed = []
    d_told.on["down"] = lambda *_: was_closed.append(path.closed.is_set())
    send_data(p, p_told, peer, [net.share(bytes(BLOCK_BYTES))])
    d_told.wait("begin")
    p.close(1.0)
    d_told.wait("down")
    assert was_closed == [True]


def test_a_p_that_lends_more_than_the_window_loses_its_connection(net):
    d, d_told = net.endpoint("D", paths=[SlowPath()])
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    d_told.wait("up")
    d_told.on["begin"] = lambda peer, header, length: None
    socket.send_fds(puppet.sock, [encode(Region(size_bytes=SHARED.size_bytes))], [SHARED.fd])
    body = bytes(WINDOW_BYTES)
    places = pack([Span(0, 2**20)] * (WINDOW_BYTES // 2**20))
    frames = [shared_of(data_header(body, seq=seq)) for seq in range(WINDOW_FRAMES + 1)]
    for frame in frames[:-1]:
        puppet.sock.sendall(encode(frame, len(places)) + places)
    d_told.wait("begin", WINDOW_FRAMES)
    assert d_told.all("down") == []
    puppet.sock.sendall(encode(frames[-1], len(places)) + places)
    assert d_told.wait("down")[1] == "protocol"


def test_a_p_does_not_offer_what_it_has_no_memory_for(net):
    d, _ = net.endpoint("D", transports=("shm", "uds"))
    p, p_told = net.endpoint("P", transports=("shm", "uds"), paths=[SharedMemoryPath()])
    p.call(lambda: p.connect(d.listen_address))
    assert p_told.wait("up")[0].transport == "uds"

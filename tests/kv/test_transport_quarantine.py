"""A P whose DATA comes broken is refused for a while; a path that does not work is done without."""

import logging

import pytest

from tests.kv.pods import until
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    KINDS,
    SHARED,
    Puppet,
    dial,
    is_closed,
    networks,
    raw_data,
    run,
    send_data,
)
from xpyd_kv.transport.host.shared_memory import SharedMemoryBorrower, SharedMemoryPath
from xpyd_kv.transport.settings import Timeouts
from xpyd_kv.transport.stream.registry import MISMATCHES, Quarantine

net = networks(*KINDS, "tls")


shm = networks("shm")


def broken_frame(seq):
    body = bytes(BLOCK_BYTES)
    return raw_data(body, seq=seq, digest=b"\x01" * 8)


def test_three_within_the_window_begin_it_and_time_ends_it():
    quarantine = Quarantine(window_s=600.0, for_s=60.0)
    for now in (0.0, 500.0, 601.0, 1101.0):
        assert not quarantine.mismatch("p", now)
        assert not quarantine.mismatch("other", 10 * now)
    assert quarantine.mismatch("p", 1102.0)
    assert quarantine.holds("p", 1161.0)
    assert not quarantine.holds("other", 1161.0)
    assert not quarantine.holds("p", 1162.0)
    # It begins anew with the first.
    assert not quarantine.mismatch("p", 1163.0)


def test_what_it_remembers_is_bounded():
    quarantine = Quarantine(window_s=600.0, for_s=60.0)
    for number in range(10_000):
        for _ in range(MISMATCHES):
            quarantine.mismatch(f"p{number}", 0.0)
        quarantine.mismatch(f"q{number}", 0.0)
    assert sum(quarantine.holds(f"p{number}", 1.0) for number in range(10_000)) == 4096


def test_it_counts_broken_frames_of_a_bounded_number_of_peers():
    quarantine = Quarantine(window_s=600.0, for_s=60.0)
    for number in range(4096 + 1):
        quarantine.mismatch(f"p{number}", 0.0)
        quarantine.mismatch(f"p{number}", 0.0)
    # The oldest was forgotten, so that its third broken frame is its first.
    assert not quarantine.mismatch("p0", 1.0)
    assert quarantine.mismatch("p4096", 1.0)


def test_a_p_whose_frames_come_broken_is_closed_and_refused_for_a_minute(net, caplog):
    now = [1000.0]
    d, d_told = net.endpoint("D", clock=lambda: now[0], timeouts=Timeouts(ping_s=1e6))
    d_told.on["begin"] = lambda *_: [memoryview(bytearray(BLOCK_BYTES))]

    def puppet():
        return Puppet(net.connect(d.listen_address), "P", engine_id="bad").open()

    with caplog.at_level(logging.WARNING):
        first = puppet()
        first.sock.sendall(b"".join(map(broken_frame, range(MISMATCHES + 1))))
        assert d_told.wait("down")[1] == "refused:quarantine"
        assert is_closed(first.sock)
        # The session heard of the last one, too, and of nothing behind it.
        assert [end[3] for end in d_told.all("end")] == [False] * MISMATCHES
        for _ in range(3):
            assert is_closed(puppet().sock)
        until(lambda: d.counters.refused == {"quarantine": 4})
        # Others are none the worse.
        Puppet(net.connect(d.listen_address), "P", engine_id="good").open()
        d_told.wait("up", 2)
        now[0] += 61.0
        puppet()
        d_told.wait("up", 3)
    assert (d.counters.quarantines, d.counters.corrupt_frames) == (1, MISMATCHES)
    lines = [line for line in caplog.messages if "bad" in line and "is refused for 60 s" in line]
    assert len(lines) == 1
    assert sum("quarantine" in line for line in caplog.messages) <= 3


def test_a_p_in_quarantine_does_not_dial_for_a_while(net):
    now = [1000.0]
    d, _ = net.endpoint("D")
    # A PROBE's bytes are summed up once: what becomes of them then is broken on the way.
    room, patient = bytearray(100), Timeouts(ping_s=1e6)
    probed = memoryview(room)
    p, p_told = net.endpoint("P", clock=lambda: now[0], timeouts=patient, probe_room=probed)
    peer = dial(p, p_told, d.listen_address)
    room[0] ^= 1
    for token in range(MISMATCHES):
        run(p, lambda token=token: p.send_probe(peer, token))
    assert p_told.wait("down")[1] == "refused:quarantine"
    for n in (1, 2, 3):
        run(p, lambda: p.connect(d.listen_address))
        assert p_told.wait("failed", n)[1] == "refused:quarantine"
    assert d.counters.refused == {"quarantine": 1}
    now[0] += 31.0
    run(p, lambda: p.connect(d.listen_address))
    until(lambda: d.counters.refused == {"quarantine": 2})


# --- paths that do not work


class BrokenPath(SharedMemoryPath):
    """shm on a machine whose D gets no map, or cannot read what it has mapped."""

    def __init__(self, *, breaks):
        super().__init__()
        self.breaks = breaks

    def borrower(self):
        return _Broken(self.breaks)


class _Broken(SharedMemoryBorrower):
    def __init__(self, breaks):
        super().__init__()
        self.breaks = breaks

    def open(self, size_bytes, body, descriptors):
        if self.breaks == "open":
            raise OSError("Cannot allocate memory")
        super().open(size_bytes, body, descriptors)

    def prepare(self, body, length):
        start = super().prepare(body, length)
        return (lambda _: self) if self.breaks == "read" else start

    def poll(self):
        raise OSError("the device is gone")


@pytest.mark.parametrize("breaks", ["open", "read"])
def test_what_d_cannot_open_or_read_is_done_without_and_tried_again_later(shm, caplog, breaks):
    now = [1000.0]
    both = ("shm", "uds")
    d, d_told = shm.endpoint("D", transports=both, paths=[BrokenPath(breaks=breaks)])
    p, p_told = shm.endpoint(
        "P", transports=both, clock=lambda: now[0], timeouts=Timeouts(ping_s=1e6)
    )
    room = bytearray(BLOCK_BYTES)
    d_told.on["begin"] = lambda *_: [memoryview(room)]
    with caplog.at_level(logging.WARNING):
        first = dial(p, p_told, d.listen_address)
        assert first.transport == "shm"
        send_data(p, p_told, first, [shm.share(b"\x07" * BLOCK_BYTES)])
        assert p_told.wait("down")[1] == "refused:transport"
        assert p_told.wait("done") == (0, False)
    assert d_told.wait("down")[1] == "refused:transport"
    assert d_told.all("end") == []
    second = dial(p, p_told, d.listen_address)
    assert second.transport == "uds"
    send_data(p, p_told, second, [shm.share(b"\x07" * BLOCK_BYTES)], seq=1)
    assert d_told.wait("end")[2:] == (True, True)
    assert room == b"\x07" * BLOCK_BYTES
    assert p.counters.paths_failed == d.counters.paths_failed == {"shm": 1}
    assert sum("shm" in line and "does not work here" in line for line in caplog.messages) == 1
    assert sum("cannot use shm" in line for line in caplog.messages) == 1
    run(p, lambda: p.disconnect(second, "test"))
    p_told.wait("down", 2)
    now[0] += 301.0
    assert dial(p, p_told, d.listen_address).transport == "shm"


def test_told_to_use_shm_only_p_does_not_fall_back(shm):
    d, _ = shm.endpoint("D", transports=("shm",), paths=[BrokenPath(breaks="open")])
    p, p_told = shm.endpoint("P", transports=("shm",), paths=[SharedMemoryPath(SHARED)])
    peer = dial(p, p_told, d.listen_address)
    send_data(p, p_told, peer, [shm.share(bytes(BLOCK_BYTES))])
    p_told.wait("down")
    run(p, lambda: p.connect(d.listen_address))
    assert p_told.wait("failed")[1] == "refused:transport"

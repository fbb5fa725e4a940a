"""DATA of GPU caches through sockets: slabs, their events, and what waits when there is none."""

import random
import threading
from functools import partial

import pytest

from tests.kv.device_fake import Machine
from tests.kv.gpu_kit import FakeGpus
from tests.kv.pods import until
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    SLAB_BYTES,
    Puppet,
    data_header,
    dial,
    networks,
    raw_data,
    run,
    send_data,
)
from tests.kv.wire_samples import KEYS
from xpyd_core.errors import UserError
from xpyd_kv.transport.devices.staging import Staging
from xpyd_kv.transport.settings import Timeouts
from xpyd_kv.wire.frames import encode
from xpyd_kv.wire.messages import Cancel, Commit

COMMIT = Commit(**KEYS, frames=1, total_bytes=BLOCK_BYTES, digest=bytes(32))


net = networks("tcp+gpu", "uds+gpu")


@pytest.fixture
def machine(net):
    assert isinstance(net.gpus, FakeGpus)
    return net.gpus.machine


def body_of(blocks, seed=1):
    return random.Random(seed).randbytes(blocks * BLOCK_BYTES)


def rooms_for(net, d_told, count, blocks=1):
    rooms = [net.room(blocks * BLOCK_BYTES) for _ in range(count)]
    d_told.on["begin"] = lambda _, header, __: [rooms[header.seq]]
    return rooms


def test_a_frame_is_the_sessions_when_it_stands_in_device_memory_and_not_before(net, machine):
    d, d_told = net.endpoint("D")
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    (room,) = rooms_for(net, d_told, 1)
    body = body_of(1)
    machine.is_stalled = True
    puppet.sock.sendall(raw_data(body))
    d_told.wait("begin")
    run(d, lambda: None)
    assert d_told.all("end") == []
    machine.is_stalled = False
    assert d_told.wait("end")[2:] == (True, True)
    assert net.read(room) == body


def test_what_p_says_behind_a_frame_is_heard_behind_it(net, machine):
    """COMMIT above all: before the frame's end it would look as if bytes were missing."""
    d, d_told = net.endpoint("D")
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    rooms_for(net, d_told, 2)
    machine.is_stalled = True
    say = (
        raw_data(body_of(1)) + encode(COMMIT) + raw_data(body_of(1), seq=1) + encode(Cancel(**KEYS))
    )
    puppet.sock.sendall(say)
    d_told.wait("begin", 2)
    run(d, lambda: None)
    assert d_told.names() == ["up", "begin", "begin"]
    machine.is_stalled = False
    d_told.wait("message", 2)
    assert d_told.names() == ["up", "begin", "begin", "end", "message", "end", "message"]


@pytest.mark.parametrize("place", [-1, -8, -9], ids=["its sum's end", "its sum", "its body"])
def test_a_broken_frame_is_not_copied_and_its_slab_comes_back(net, machine, place):
    d, d_told = net.endpoint("D")
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    (room,) = rooms_for(net, d_told, 1)
    frame = bytearray(raw_data(body_of(1)))
    frame[place] ^= 1
    puppet.sock.sendall(frame)
    assert d_told.wait("end")[2:] == (True, False)
    assert net.read(room) == bytes(BLOCK_BYTES)
    assert d.counters.corrupt_frames == 1
    assert run(d, lambda: net.stagings[0].free_slabs) == 3
    assert sum(stream.copies for stream in machine.streams.values()) == 0


def test_p_sends_a_frame_when_its_copy_is_done(net, machine):
    (p, p_told, peer), (_, d_told, _) = net.pair()
    (room,) = rooms_for(net, d_told, 1, blocks=4)
    body = body_of(4)
    machine.is_stalled = True
    send_data(p, p_told, peer, [net.share(body)])
    run(p, lambda: None)
    run(p, lambda: p.send(peer, Cancel(**KEYS)))
    d_told.wait("message")
    assert d_told.names() == ["up", "message"]
    machine.is_stalled = False
    assert p_told.wait("done") == (0, True)
    d_told.wait("end")
    assert net.read(room) == body


def test_frames_that_the_device_has_copied_at_once_leave_at_once(net, machine):
    machine.latest = 0
    quiet = Timeouts(ping_s=60.0)  # Nothing else would look at the queue.
    (p, p_told, peer), (_, d_told, _) = net.pair(timeouts=quiet)
    rooms = rooms_for(net, d_told, 12)
    bodies = [body_of(1, seed) for seed in range(12)]
    views = [[net.share(body)] for body in bodies]

    def queue_all():
        for seq in range(12):
            header = partial(data_header, views[seq], seq=seq)
            p.send_data(peer, header, views[seq], lambda checksum: p_told.tell("done", checksum))

    run(p, queue_all)
    p_told.wait("done", 12)
    d_told.wait("end", 12)
    assert [net.read(room) for room in rooms] == bodies


def test_with_all_slabs_taken_frames_wait_and_all_arrive(net, machine):
    d, d_told = net.endpoint("D", staging=net.staging("D", slabs=2))
    p, p_told = net.endpoint("P", staging=net.staging("P", slabs=2))
    peer = dial(p, p_told, d.listen_address)
    rooms = rooms_for(net, d_told, 20, blocks=3)
    bodies = [body_of(3, seed) for seed in range(20)]
    views = [[net.share(body)] for body in bodies]
    machine.is_stalled = True
    for seq in range(20):
        send_data(p, p_told, peer, views[seq], seq=seq)
    until(lambda: net.stagings[1].free_slabs == 0)
    assert p_told.all("done") == []
    machine.is_stalled = False
    d_told.wait("end", 20)
    assert [net.read(room) for room in rooms] == bodies
    p_told.wait("done", 20)
    until(lambda: [staging.free_slabs for staging in net.stagings] == [2, 2])


def test_a_connection_that_finds_no_slab_is_not_read_and_not_taken_for_dead(net, machine):
    times = Timeouts(ping_s=0.05)
    d, d_told = net.endpoint("D", staging=net.staging("D", slabs=2), timeouts=times)
    machine.is_stalled = True
    rooms = [net.room(BLOCK_BYTES) for _ in range(3)]
    d_told.on["begin"] = lambda *_: [rooms[len(d_told.all("begin")) - 1]]
    puppets = []
    for _ in range(3):
        puppet = Puppet(net.connect(d.listen_address), "P").open()
        puppets.append(puppet)
        d_told.wait("up", len(puppets))
        puppet.sock.sendall(raw_data(body_of(1)))
        if len(puppets) < 3:
            d_told.wait("begin", len(puppets))
    # The first two frames hold the slabs. The third stays in its socket, PINGs and all.
    answering = [threading.Thread(target=answer_pings, args=(one,)) for one in puppets]
    for thread in answering:
        thread.start()
    until(lambda: run(d, lambda: net.stagings[0].free_slabs) == 0)
    until(lambda: d.counters.received_bytes > 0)
    assert len(d_told.all("begin")) == 2
    machine.is_stalled = False
    d_told.wait("end", 3)
    assert d_told.all("down") == []
    assert [net.read(room) for room in rooms] == [body_of(1)] * 3
    d.close(5.0)
    for thread in answering:
        thread.join()


def answer_pings(puppet):
    """Until D closes."""
    try:
        while data := puppet.sock.recv(65536):
            for _ in puppet.wire.feed(data, 0.0):
                pass
            if answer := puppet.wire.outgoing():
                puppet.sock.sendall(answer)
    except ConnectionError:
        return


def test_a_gpu_that_hangs_ends_the_connection_on_either_side(net, machine):
    times = Timeouts(fetch_s=0.1)
    d, d_told = net.endpoint("D", timeouts=times)
    p, p_told = net.endpoint("P", timeouts=times)
    peer = dial(p, p_told, d.listen_address)
    machine.is_stalled = True
    send_data(p, p_told, peer, [net.share(body_of(1))])
    assert p_told.wait("down")[1] == "timeout"
    assert p_told.all("done") == [(0, False)]
    rooms_for(net, d_told, 1)
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    puppet.sock.sendall(raw_data(body_of(1)))
    d_told.wait("begin")
    assert d_told.wait("down", 2)[1] == "timeout"
    assert d_told.all("end") == []
    # The slabs are still copied from and to: they are not given out again.
    assert [staging.free_slabs for staging in net.stagings] == [2, 2]
    leave_hung(machine)


def test_a_gpu_that_fails_ends_the_connection(net, machine):
    (p, p_told, peer), _ = net.pair()
    machine.is_stalled = True
    send_data(p, p_told, peer, [net.share(body_of(1))])
    run(p, lambda: None)
    machine.broken = "an illegal memory access was encountered"
    assert p_told.wait("down")[1] == "lost"
    machine.broken = ""
    leave_hung(machine)


def leave_hung(machine):
    """What hung has run at last; slabs that it had were left to the end of the process."""
    machine.is_stalled, machine.is_lost = False, True
    for stream in list(machine.streams.values()):
        stream.record().wait(1.0)


def test_the_end_of_a_connection_waits_for_its_copies(net, machine):
    """Or they would land in blocks that are somebody else's by then; the fake would say so."""
    d, d_told = net.endpoint("D")
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    (room,) = rooms_for(net, d_told, 1)
    seen = []
    d_told.on["down"] = lambda *_: seen.append(net.read(room))
    machine.is_slow = True
    body = body_of(1)
    puppet.sock.sendall(raw_data(body))
    d_told.wait("begin")
    peer = d_told.wait("up")[0]
    run(d, lambda: d.disconnect(peer, "test"))
    d_told.wait("down")
    assert seen == [body]
    assert net.stagings[0].free_slabs == 3


def test_a_frame_cut_off_gives_its_slab_back(net):
    d, d_told = net.endpoint("D")
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    rooms_for(net, d_told, 1, blocks=2000)
    puppet.sock.sendall(raw_data(body_of(2000))[:-1000])
    d_told.wait("begin")
    assert run(d, lambda: net.stagings[0].free_slabs) == 2
    puppet.sock.close()
    d_told.wait("down")
    assert net.stagings[0].free_slabs == 3


def test_host_memory_goes_straight_through_and_needs_no_slab(net, machine):
    (p, p_told, peer), (_, d_told, _) = net.pair()
    room = bytearray(BLOCK_BYTES)
    d_told.on["begin"] = lambda *_: [memoryview(room)]
    body = body_of(1)
    machine.is_stalled = True
    send_data(p, p_told, peer, [memoryview(bytearray(body))])
    assert d_told.wait("end")[2:] == (True, True)
    assert room == body
    machine.is_stalled = False


def test_slabs_that_are_too_small_are_refused_at_the_start(net):
    small = Staging(net.gpus.d, slab_bytes=SLAB_BYTES - 1, slabs=2)
    net.stagings.append(small)
    with pytest.raises(UserError, match=f"at least {SLAB_BYTES} bytes"):
        net.endpoint("D", staging=small)
    with pytest.raises(UserError, match="at least 2"):
        Staging(net.gpus.d, slab_bytes=SLAB_BYTES, slabs=1)


def test_memory_is_taken_once_and_given_back():
    machine = Machine()
    gpu = machine.device("d")
    staging = Staging(gpu, slab_bytes=4096, slabs=3)
    slabs = [staging.take() for _ in range(4)]
    assert slabs[3] is None
    assert {len(slab.memory) for slab in slabs[:3]} == {4096}
    for slab in slabs[:3]:
        staging.give(slab)
    staging.close()
    machine.check()

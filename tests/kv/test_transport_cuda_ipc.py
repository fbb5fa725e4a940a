"""DATA from GPU to GPU: who may, what is lent until which event, and peers or GPUs that fail."""

import random

import pytest

from tests.kv.gpu_kit import FakeGpus
from tests.kv.pods import until
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    HOST,
    Puppet,
    address_of,
    data_header,
    networks,
    run,
    send_data,
)
from xpyd_core.errors import ProtocolError
from xpyd_kv.memory.device import DeviceView
from xpyd_kv.spans import Span
from xpyd_kv.transport.devices.cuda_ipc import CudaIpcPath, runs_in
from xpyd_kv.transport.host.data_path import check_runs, pack, unpack
from xpyd_kv.transport.host.shared_memory import host_token
from xpyd_kv.transport.host.sharing import shared_of
from xpyd_kv.transport.settings import Timeouts
from xpyd_kv.wire.frames import encode
from xpyd_kv.wire.messages import Copied, Region

WITH_TCP = {"transports": ("cuda_ipc", "tcp")}


net = networks("cuda_ipc")


@pytest.fixture
def machine(net):
    assert isinstance(net.gpus, FakeGpus)
    return net.gpus.machine


# --- who may


def chosen(net, p_options, d_options):
    """The transport of a pair that could also use TCP."""
    d, d_told = net.endpoint("D", **{**WITH_TCP, **d_options})
    p, p_told = net.endpoint("P", **{**WITH_TCP, **p_options})
    run(p, lambda: p.connect(d.listen_address))
    peers = p_told.wait("up")[0], d_told.wait("up")[0]
    assert peers[0].transport == peers[1].transport
    return peers[0].transport


def test_two_processes_of_one_machine_whose_gpus_reach_each_other_use_it(net):
    assert chosen(net, {}, {}) == "cuda_ipc"


def test_it_is_chosen_before_the_others_also_over_a_unix_socket(net):
    every = {"transports": ("tcp", "uds", "cuda_ipc"), "socket_dir": net.folder}
    assert chosen(net, every, every) == "cuda_ipc"


@pytest.mark.parametrize(
    "place",
    [
        {"host": b"another machine", "gpu": "GPU-0"},
        {"host": HOST, "gpu": "GPU-7"},
        {"host": HOST, "gpu": ""},
        {"host": b"", "gpu": "GPU-0"},
    ],
)
def test_another_machine_or_a_gpu_out_of_reach_falls_back_at_the_handshake(net, place):
    assert chosen(net, {"place": place}, {}) == "tcp"


def test_a_machine_without_a_name_never_uses_it(net):
    unnamed = {"host": b"", "gpu": "GPU-0"}
    path = CudaIpcPath(net.gpus.d, host=b"")
    assert chosen(net, {"place": unnamed}, {"place": unnamed, "paths": [path]}) == "tcp"


def test_another_gpu_is_reached_where_the_two_have_peer_access(net, machine):
    other = {"host": HOST, "gpu": "GPU-1"}
    assert chosen(net, {"place": other}, {}) == "tcp"
    machine.peers.add(frozenset({"GPU-0", "GPU-1"}))
    assert chosen(net, {"place": other}, {}) == "cuda_ipc"


def test_without_another_transport_the_refusal_says_what_is_missing(net):
    d, _ = net.endpoint("D")
    p, p_told = net.endpoint("P", place={"host": b"another machine", "gpu": "GPU-0"})
    run(p, lambda: p.connect(d.listen_address))
    assert p_told.wait("failed") == (d.listen_address, "refused:transport")


def test_memory_that_cannot_be_opened_is_refused_by_name_and_the_next_dial_falls_back(net, machine):
    machine.refuses_handles = True
    d, d_told = net.endpoint("D", **WITH_TCP)
    p, p_told = net.endpoint("P", **WITH_TCP)
    run(p, lambda: p.connect(d.listen_address))
    peer = p_told.wait("up")[0]
    send_data(p, p_told, peer, [net.share(bytes(BLOCK_BYTES))])
    assert p_told.wait("down")[1] == "refused:transport"
    assert p_told.wait("done") == (0, False)
    assert (p.counters.refused, d.counters.refused) == ({"cuda_ipc": 1}, {"cuda_ipc": 1})
    d_told.wait("down")
    assert d_told.all("begin") == []
    run(p, lambda: p.connect(d.listen_address))
    assert p_told.wait("up", 2)[0].transport == "tcp"
    # Another process is tried again.
    machine.refuses_handles = False
    assert chosen(net, {}, {"paths": [net.path("D")]}) == "cuda_ipc"


def test_the_token_of_a_machine_is_the_same_each_time_and_says_nothing():
    token = host_token()
    assert token == host_token()
    assert len(token) == 16
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        assert bytes.fromhex(file.read().strip().replace(b"-", b"").decode()) != token


# --- what is lent until which event


def test_bytes_stay_lent_until_the_event_of_the_copy(net, machine):
    (p, p_told, peer), (d, d_told, _) = net.pair()
    room = net.room(4 * BLOCK_BYTES)
    d_told.on["begin"] = lambda *_: [room]
    body = random.Random(1).randbytes(4 * BLOCK_BYTES)
    view = net.share(body)
    machine.is_stalled = True
    send_data(p, p_told, peer, [view])
    d_told.wait("begin")
    run(d, lambda: None)
    run(p, lambda: None)
    assert p_told.all("done") == []
    assert d_told.all("end") == []
    machine.is_stalled = False
    assert p_told.wait("done") == (0, True)
    assert d_told.all("end")[0][2:] == (True, True)
    assert net.read(room) == body


def test_one_launch_for_each_frame_however_many_blocks(net, machine):
    (p, p_told, peer), (_, d_told, _) = net.pair()
    arena = net.room(128 * BLOCK_BYTES)
    blocks = [arena[i * 2 * BLOCK_BYTES :][:BLOCK_BYTES] for i in range(64)]
    d_told.on["begin"] = lambda *_: blocks
    shared = net.share(random.Random(2).randbytes(128 * BLOCK_BYTES))
    views = [shared[i * 2 * BLOCK_BYTES :][:BLOCK_BYTES] for i in range(64)]
    for seq in range(3):
        send_data(p, p_told, peer, views, seq=seq)
    p_told.wait("done", 3)
    assert sum(stream.copies for stream in machine.streams.values()) == 3


def test_the_end_of_a_connection_waits_for_its_copies(net, machine):
    """Or they would land in blocks that are somebody else's by then; the fake would say so."""
    machine.is_slow = True
    (p, p_told, peer), (_, d_told, _) = net.pair()
    room = net.room(BLOCK_BYTES)
    d_told.on["begin"] = lambda *_: [room]
    seen = []
    d_told.on["down"] = lambda *_: seen.append(net.read(room))
    send_data(p, p_told, peer, [net.share(b"k" * BLOCK_BYTES)])
    d_told.wait("begin")
    run(p, lambda: p.disconnect(peer, "test"))
    d_told.wait("down")
    assert seen == [b"k" * BLOCK_BYTES]


def test_the_peers_memory_is_closed_with_the_connection_and_with_its_incarnation(net, machine):
    (p, p_told, peer), (d, d_told, _) = net.pair()
    send_data(p, p_told, peer, [net.share(bytes(BLOCK_BYTES))])
    p_told.wait("done")
    assert len(machine.opened) == 1
    engine_id = d_told.wait("up")[0].hello.engine_id
    again, again_told = net.endpoint("P", engine_id=engine_id, incarnation="restarted")
    run(again, lambda: again.connect(d.listen_address))
    assert d_told.wait("down")[1] == "replaced"
    until(lambda: machine.opened == {})
    send_data(again, again_told, again_told.wait("up")[0], [net.share(bytes(BLOCK_BYTES))])
    again_told.wait("done")
    assert len(machine.opened) == 1


def test_a_gpu_that_hangs_ends_the_connection_by_its_deadline(net, machine):
    d, d_told = net.endpoint("D", timeouts=Timeouts(fetch_s=0.1))
    p, p_told = net.endpoint("P")
    run(p, lambda: p.connect(d.listen_address))
    room = net.room(BLOCK_BYTES)
    d_told.on["begin"] = lambda *_: [room]
    machine.is_stalled = True
    send_data(p, p_told, p_told.wait("up")[0], [net.share(bytes(BLOCK_BYTES))])
    assert d_told.wait("down")[1] == "timeout"
    assert p_told.wait("done") == (0, False)
    # Mapped it stays: the copy may still run. Here it does.
    assert len(machine.opened) == 1
    machine.is_stalled = False
    for stream in machine.streams.values():
        stream.record().wait(1.0)
    for address in list(machine.opened):
        net.gpus.d.close_peer(DeviceView(0, address, 0))


def test_a_gpu_that_fails_ends_the_connection(net, machine):
    (p, p_told, peer), (_, d_told, _) = net.pair()
    room = net.room(BLOCK_BYTES)
    d_told.on["begin"] = lambda *_: [room]
    machine.is_stalled = True
    send_data(p, p_told, peer, [net.share(bytes(BLOCK_BYTES))])
    d_told.wait("begin")
    machine.broken = "an illegal memory access was encountered"
    assert d_told.wait("down")[1] == "refused:transport"
    assert d_told.all("end") == []
    machine.broken, machine.is_stalled = "", False
    for stream in machine.streams.values():
        stream.record().wait(1.0)
    for address in list(machine.opened):
        net.gpus.d.close_peer(DeviceView(0, address, 0))


# --- places


def test_places_are_found_and_neighbours_joined():
    region = DeviceView(0, 1000, 100)
    views = [region[8:16], region[16:20], region[:0], region[4:8]]
    assert runs_in(region, views) == [Span(8, 12), Span(4, 4)]
    for other in (DeviceView(0, 1090, 11), DeviceView(1, 1000, 4), DeviceView(0, 999, 4)):
        assert runs_in(region, [other]) is None
    assert runs_in(region, [memoryview(bytes(4))]) is None


@pytest.mark.parametrize(
    "runs", [[Span(90, 11)], [Span(2**64 - 1, 10)], [Span(0, 0), Span(0, 10)], [Span(0, 9)]]
)
def test_places_that_lie_are_refused(runs):
    with pytest.raises(ProtocolError):
        check_runs(unpack(pack(runs)), 100, 10)


def region_of(net, body=None, size=None):
    handle = net.gpus.p.export(net._region)
    whole = handle.handle + handle.process + handle.device_uuid.encode()
    body = whole if body is None else body(whole)
    return encode(Region(size_bytes=size or handle.size_bytes), len(body)) + body


LIES = {
    "no body": lambda whole: b"",
    "half a handle": lambda whole: whole[:40],
    "no gpu": lambda whole: whole[:80],
    "a name that is no name": lambda whole: whole[:80] + b"\xff" * 8,
    "a long name": lambda whole: whole + b"x" * 65,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_region_that_lies_ends_the_connection(net, lie):
    d_told, puppet = opened_p(net)
    puppet.sock.sendall(region_of(net, LIES[lie]))
    assert d_told.wait("down")[1] == "protocol"


def test_a_frame_that_points_outside_ends_the_connection_and_copies_nothing(net, machine):
    d_told, puppet = opened_p(net)
    body = pack([Span(net._region.length - 1, BLOCK_BYTES)])
    header = shared_of(data_header(bytes(BLOCK_BYTES)))
    puppet.sock.sendall(region_of(net) + encode(header, len(body)) + body)
    assert d_told.wait("down")[1] == "protocol"
    assert sum(stream.copies for stream in machine.streams.values()) == 0


def test_what_is_lent_comes_back_when_d_dies(net):
    p, p_told = net.endpoint("P")
    listener = net.listener()
    run(p, lambda: p.connect(address_of(listener)))
    puppet = Puppet(net.socket(listener.accept()[0]), "D", **net.place).open()
    peer = p_told.wait("up")[0]
    for seq in range(2):
        send_data(p, p_told, peer, [net.share(bytes(BLOCK_BYTES))], seq=seq)
    puppet.read()
    puppet.sock.sendall(encode(Copied(frames=1)))
    assert p_told.wait("done") == (0, True)
    puppet.sock.close()
    p_told.wait("down")
    assert p_told.all("done") == [(0, True), (1, False)]


def opened_p(net):
    """A D whose P is a puppet."""
    d, d_told = net.endpoint("D")
    puppet = Puppet(net.connect(d.listen_address), "P", **net.place).open()
    d_told.wait("up")
    return d_told, puppet

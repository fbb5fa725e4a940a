"""nccl: communicators made, reused, bounded and ended; groups, scratch memory; whatever does not
come ends within its deadline."""

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv.nccl_kit import NcclWorld
from tests.kv.pods import until
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    Puppet,
    data_header,
    network,
    run,
    send_data,
)
from xpyd_core.errors import UserError
from xpyd_kv.memory.device import DeviceView
from xpyd_kv.spans import Span
from xpyd_kv.transport.devices.nccl.library import (
    ID_BYTES,
    NcclError,
    NcclLimits,
    communicator_bytes,
    load,
)
from xpyd_kv.transport.devices.nccl.path import place
from xpyd_kv.transport.host.data_path import pack
from xpyd_kv.transport.host.sharing import shared_of
from xpyd_kv.wire.frames import encode
from xpyd_kv.wire.messages import Region

SHORT = {"make_s": 0.3, "frame_s": 0.3, "abort_s": 0.3}
FRAME = bytes(range(256)) * (BLOCK_BYTES // 64)
UNIT = BLOCK_BYTES


@pytest.fixture
def net():
    with network("nccl") as net:
        net.nccl = NcclWorld(net.gpus)
        yield net


def connected(net, *, p_limits=None, d_limits=None, is_staged=False):
    d_more, p_more = ({"staging": net.staging(role)} if is_staged else {} for role in "DP")
    d, d_told = net.endpoint("D", paths=[nccl_path(net, "D", **(d_limits or {}))], **d_more)
    p, p_told = net.endpoint("P", paths=[nccl_path(net, "P", **(p_limits or {}))], **p_more)
    run(p, lambda: p.connect(d.listen_address))
    return (p, p_told, p_told.wait("up")[0]), (d, d_told)


def nccl_path(net, role, **limits):
    path = net.nccl.path(role, unit_bytes=UNIT, **limits)
    net.keep(path)
    return path


def metrics(net, role):
    return net.nccl.communicators[role].metrics


def move(net, p, d, seq=0, body=FRAME):
    """One frame of these bytes from P to D; where they stand then."""
    (end, told, peer), (_, d_told) = p, d
    room = net.room(len(body))
    d_told.on["begin"] = lambda *_: [room]
    before = len(d_told.all("end"))
    send_data(end, told, peer, [net.share(body)], seq=seq)
    assert d_told.wait("end", before + 1)[2:] == (True, True)
    assert net.read(room) == body


# --- communicators


def test_a_pair_makes_one_communicator_at_first_use_and_uses_it_again(net):
    p, d = connected(net)
    assert net.nccl.world.made == 0
    for seq in range(5):
        move(net, p, d, seq)
    assert net.nccl.world.made == 2
    assert (metrics(net, "P").made, metrics(net, "D").made) == (1, 1)
    assert metrics(net, "P").communicators == 1
    assert net.nccl.world.channels == [8, 8]


def test_a_communicator_ends_with_its_connection(net):
    p, d = connected(net)
    move(net, p, d)
    run(p[0], lambda: p[0].disconnect(p[2], "test"))
    until(lambda: net.nccl.world.alive == 0)
    until(lambda: metrics(net, "P").communicators == metrics(net, "D").communicators == 0)
    until(lambda: metrics(net, "P").ended == {"closed": 1})
    assert metrics(net, "P").memory_bytes == 0


def test_an_idle_one_is_ended_on_both_sides_and_the_next_frame_makes_another(net):
    idle = {"idle_s": 0.2}
    p, d = connected(net, p_limits=idle, d_limits=idle)
    move(net, p, d)
    until(lambda: net.nccl.world.alive == 0)
    # Each side counts a moment after its communicator is gone.
    until(lambda: metrics(net, "P").ended == metrics(net, "D").ended == {"idle": 1})
    move(net, p, d, seq=1)
    assert net.nccl.world.made == 4
    assert p[1].all("down") == []


def test_a_restarted_peer_is_another_communicator(net):
    p, d = connected(net)
    move(net, p, d)
    p[0].close(5.0)
    d[1].wait("down")
    again, told = net.endpoint("P", paths=[nccl_path(net, "P")])
    run(again, lambda: again.connect(d[0].listen_address))
    move(net, (again, told, told.wait("up")[0]), d)
    assert len(net.nccl.world.comms) == 2


def test_the_memory_of_all_communicators_is_bounded_and_counted(net):
    p, d = connected(net, p_limits={"max_communicators": 1, "channels": 16})
    move(net, p, d)
    assert metrics(net, "P").memory_bytes == 100_000_000
    assert NcclLimits(channels=16, max_communicators=10).most_bytes == 1_000_000_000
    # The idle one makes room; until it is gone there is none.
    end_idle_one(net)


def end_idle_one(net):
    """P's only communicator ends for another, when P too is through with what D has."""
    communicators = net.nccl.communicators["P"]
    until(lambda: not any(pair.has_frames for pair in communicators._communicators))
    assert communicators.open(bytes(ID_BYTES), 0) is None
    until(lambda: metrics(net, "P").ended == {"idle": 1})


def test_p_goes_on_when_there_is_room_again(net):
    p, d = connected(net, p_limits={"max_communicators": 1})
    communicators = net.nccl.communicators["P"]
    pair = communicators.open(bytes(ID_BYTES), 0)
    assert pair is not None
    communicators.end(pair, "closed")
    until(lambda: metrics(net, "P").communicators == 0)
    move(net, p, d)


def test_a_frame_through_the_socket_is_itself_whatever_a_communicator_has_moved_before(net):
    p, d = connected(net, p_limits={"max_communicators": 1}, is_staged=True)
    move(net, p, d, body=b"1" * UNIT)
    staging, communicators = net.stagings[-1], net.nccl.communicators["P"]
    assert staging.free_slabs == 3, "a frame that a communicator moves is copied to a slab, too"
    # The idle one ends for another, so that the next frame finds no room for one.
    end_idle_one(net)
    assert communicators.open(bytes(ID_BYTES), 0) is not None
    move(net, p, d, seq=1, body=b"2" * UNIT)
    assert net.nccl.world.made == 3
    assert p[0].counters.shared_bytes == UNIT


@pytest.mark.parametrize("channels", [0, 33])
def test_channels_are_bounded(channels):
    with pytest.raises(UserError, match="1 to 32"):
        NcclLimits(channels=channels)


# --- messages


def test_what_nobody_wants_is_received_too_and_what_follows_is_right(net):
    p, d = connected(net)
    d[1].on["begin"] = lambda *_: None
    send_data(p[0], p[1], p[2], [net.share(FRAME)])
    assert d[1].wait("end")[2:] == (False, False)
    assert p[1].wait("done") == (0, True)
    move(net, p, d, seq=1)
    # One message at a time may stand in scratch memory.
    assert metrics(net, "D").memory_bytes == communicator_bytes(8) + UNIT


def test_bytes_for_the_host_pool_and_for_parts_of_blocks_come_through_scratch_memory(net):
    p, d = connected(net)
    device = net.gpus.d
    pinned = device.allocate_pinned(len(FRAME))
    d[1].on["begin"] = lambda *_: [pinned]
    send_data(p[0], p[1], p[2], [net.share(FRAME)])
    d[1].wait("end")
    assert bytes(pinned) == FRAME
    rooms = [net.room(size) for size in (UNIT // 2, UNIT, len(FRAME) - 3 * UNIT // 2)]
    d[1].on["begin"] = lambda *_: rooms
    send_data(p[0], p[1], p[2], [net.share(FRAME)], seq=1)
    d[1].wait("end", 2)
    assert net.read(*rooms) == FRAME
    assert metrics(net, "D").memory_bytes == communicator_bytes(8) + len(FRAME)
    device.free_pinned(pinned)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.data())
def test_messages_fill_views_of_any_shape_in_order(lengths, data):
    total = sum(lengths)
    inside = st.sets(st.integers(1, max(1, total - 1)), max_size=8)
    cuts = sorted(data.draw(inside) & {*range(total)})
    views, base = [], 0
    for start, end in zip([0, *cuts], [*cuts, total], strict=True):
        if data.draw(st.booleans()):
            views.append(DeviceView(0, 10_000 + base, end - start))
        else:
            views.append(memoryview(bytearray(end - start)))
        base += end - start + 7
    frame = place(lengths, views, 0)
    spilled = [n for n, message in zip(lengths, frame.messages, strict=True) if message == n]
    assert sum(map(len, frame.spill)) == sum(spilled) == frame.scratch_bytes
    for message, length in zip(frame.messages, lengths, strict=True):
        if isinstance(message, DeviceView):
            assert message.length == length
            assert any(
                isinstance(view, DeviceView)
                and view.address <= message.address
                and message.address + length <= view.address + view.length
                for view in views
            )


# --- what goes wrong


def test_a_peer_that_does_not_join_ends_the_connection_in_time(net):
    """P died between its header and its data: only the frame came."""
    d, d_told = net.endpoint("D", paths=[nccl_path(net, "D", **SHORT)])
    room = net.room(len(FRAME))
    d_told.on["begin"] = lambda *_: [room]
    puppet = announced(net, d, [Span(1, UNIT)] * (len(FRAME) // UNIT))
    assert d_told.wait("down")[1] == "refused:transport"
    until(lambda: metrics(net, "D").ended == {"failed": 1})
    assert d_told.all("end") == []
    assert net.nccl.given_up == []
    puppet.sock.close()


@pytest.mark.parametrize("fault", ["async error", "mismatched", "silent", "device"])
def test_a_transfer_that_cannot_end_is_aborted_and_nothing_lands_after(net, fault):
    p, d = connected(net, p_limits=SHORT, d_limits=SHORT)
    move(net, p, d)
    world = net.nccl.world
    with world.machine.lock:
        d_rank = next(iter(world.comms.values()))[1]
        if fault == "async error":
            d_rank.error = "unhandled system error"
        elif fault == "mismatched":
            d_rank.groups.append(d_rank.groups[0])
        elif fault == "silent":
            world.machine.is_stalled = True
    if fault == "device":
        world.machine.broken = "an illegal memory access"
    room = net.room(len(FRAME), fill=9)
    d[1].on["begin"] = lambda *_: [room]
    was_over = []
    d[1].on["down"] = lambda *_: was_over.append(d_rank.is_aborted)
    send_data(p[0], p[1], p[2], [net.share(FRAME)], seq=1)
    assert d[1].wait("down")[1] == "refused:transport"
    assert p[1].wait("done", 2) == (1, False)
    world.machine.is_stalled, world.machine.broken = False, ""
    until(lambda: metrics(net, "D").communicators == metrics(net, "P").communicators == 0)
    assert len(d[1].all("end")) == 1
    assert was_over == [True]
    if fault in ("async error", "mismatched"):
        assert net.nccl.given_up == []
        assert net.read(room) == bytes([9]) * len(FRAME)
    else:
        # A GPU that answers no event, or fails: what it still writes nobody knows.
        until(lambda: net.nccl.given_up != [])
        forget_streams(world.machine)


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_an_abort_that_does_not_end_is_said_loudly_and_the_worker_is_given_up(net, how, caplog):
    p, d = connected(net, p_limits=SHORT, d_limits=SHORT)
    move(net, p, d)
    world = net.nccl.world
    world.abort_hangs, world.abort_fails = how == "hangs", "no" if how == "fails" else ""
    run(p[0], lambda: p[0].disconnect(p[2], "test"))
    until(lambda: len(net.nccl.given_up) == 2)
    assert "NCCL" in net.nccl.given_up[0]
    assert any(record.levelname == "CRITICAL" for record in caplog.records)
    until(lambda: metrics(net, "P").ended == metrics(net, "D").ended == {"hung": 1})
    d[1].wait("down")
    world.let_go.set()
    forget_streams(world.machine)


def forget_streams(machine):
    """What a worker that ends would leave."""
    for stream in machine.streams.values():
        if not stream.is_compute:
            stream.record().wait(1.0)
            stream.is_closed = True


def test_an_unlike_nccl_is_done_without(net):
    d, d_told = net.endpoint("D", paths=[nccl_path(net, "D")])
    puppet = announced(net, d, [Span(1, UNIT)], version=22000)
    assert d_told.wait("down")[1] == "refused:transport"
    assert net.nccl.world.made == 0
    puppet.sock.close()


@pytest.mark.parametrize(
    "runs", [[Span(2, UNIT)], [Span(1, UNIT - 1)], [Span(1, 0), Span(1, UNIT)]]
)
def test_a_shared_that_lies_ends_the_connection(net, runs):
    d, d_told = net.endpoint("D", paths=[nccl_path(net, "D")])
    puppet = announced(net, d, runs)
    assert d_told.wait("down")[1] == "protocol"
    assert d_told.all("begin") == []
    puppet.sock.close()


def announced(net, d, runs, *, version=23007):
    puppet = Puppet(net.connect(d.listen_address), "P", transports=("nccl",)).open()
    comm_id = random.Random(1).randbytes(ID_BYTES)
    body = version.to_bytes(4, "little") + comm_id
    puppet.sock.sendall(encode(Region(size_bytes=52_000_000), len(body)) + body)
    header, places = shared_of(data_header(bytes(UNIT * len(runs)))), pack(runs)
    puppet.sock.sendall(encode(header, len(places)) + places)
    return puppet


# --- the library itself, as far as it goes without a GPU


def library():
    try:
        return load(contextlib.nullcontext)
    except UserError as error:
        pytest.skip(str(error))


def test_the_library_of_torch_is_found_and_names_its_version():
    assert 21700 <= library().version < 30000


def test_ids_are_new_each_time():
    nccl = library()
    first, second = nccl.new_id(), nccl.new_id()
    assert len(first) == len(second) == ID_BYTES
    assert first != second


def test_without_a_gpu_a_communicator_is_refused_by_name_and_nothing_hangs():
    nccl = library()
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(NcclError, match=r"CUDA|cuda|driver"):  # noqa: PT012
        comm = nccl.init(nccl.new_id(), 0, channels=8)
        until(lambda: nccl.is_ready(comm))

"""nixl: where bytes are found in registered memory, peers that lie, reads that do not end."""

import mmap
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv import nixl_kit
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    NIXL,
    SHARED,
    Puppet,
    data_header,
    networks,
    run,
    send_data,
)
from xpyd_core.errors import ProtocolError, UserError
from xpyd_kv.spans import Span
from xpyd_kv.transport.devices.nixl import regions as region_body
from xpyd_kv.transport.devices.nixl.library import check
from xpyd_kv.transport.devices.nixl.path import NixlPath
from xpyd_kv.transport.devices.nixl.regions import (
    HOST,
    Described,
    NixlRegion,
    Row,
    cuts,
    joined,
    region_of,
    unit_numbers,
)
from xpyd_kv.transport.host.data_path import pack
from xpyd_kv.transport.host.sharing import shared_of
from xpyd_kv.wire.frames import encode
from xpyd_kv.wire.messages import Region as RegionFrame

GAP = 1000
PATIENCE_S = 60


def row_of(lengths):
    start, regions = GAP, []
    for length in lengths:
        regions.append(NixlRegion(start, length, HOST))
        start += length + GAP
    return Row(regions)


# --- places


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.data())
def test_bytes_are_found_in_a_row_and_back(lengths, data):
    row = row_of(lengths)
    total = sum(lengths)
    addresses = [region.address + i for region in row.regions for i in range(region.length)]
    chosen = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=20))
    runs = row.runs_of([NixlRegion(addresses[i], 1, HOST) for i in chosen], at_most=len(chosen))
    assert runs is not None
    assert [offset + i for offset, length in runs for i in range(length)] == chosen
    spans = row.spans_of(runs)
    found = [address + i for address, length, _ in spans for i in range(length)]
    assert found == [addresses[i] for i in chosen]
    assert all(row.offset_of(span) is not None for span in spans)


def test_bytes_that_are_not_in_the_row_are_not_found():
    row = row_of([100, 100])
    first = row.regions[0]
    for address, length, device in (
        (0, 1, HOST),
        (first.address, 101, HOST),
        (first.address + 99, 2, HOST),
        (first.address, 1, 0),
        (first.address + 100, 1, HOST),
    ):
        assert row.runs_of([NixlRegion(address, length, device)], at_most=9) is None
    two = [NixlRegion(first.address, 1, HOST), NixlRegion(first.address + 2, 1, HOST)]
    assert row.runs_of(two, at_most=1) is None


@given(st.lists(st.integers(0, 30), max_size=12), st.lists(st.integers(0, 30), max_size=12))
def test_two_lists_are_cut_where_either_is_cut(targets, sources):
    size = min(sum(targets), sum(sources))

    def first(lengths, base):
        regions, left, at = [], size, base
        for length in lengths:
            length = min(length, left)
            regions.append(NixlRegion(at, length, HOST))
            at, left = at + length + 1, left - length
        return regions

    to, since = first(targets, 0), first(sources, 10_000)
    pairs = list(cuts(to, since))
    for side, whole in ((0, to), (1, since)):
        got = [pair[side].address + i for pair in pairs for i in range(pair[side].length)]
        assert got == [region.address + i for region in whole for i in range(region.length)]


def test_whole_units_have_numbers_and_parts_have_none():
    assert unit_numbers([Span(20, 30), Span(0, 10)], 10) == [2, 3, 4, 0]
    assert unit_numbers([Span(5, 10)], 10) is None
    assert unit_numbers([Span(10, 15)], 10) is None


def test_neighbours_of_one_device_are_joined():
    regions = [NixlRegion(0, 5, 0), NixlRegion(5, 5, 0), NixlRegion(10, 0, 0), NixlRegion(10, 5, 1)]
    assert joined(regions) == [NixlRegion(0, 10, 0), NixlRegion(10, 5, 1)]


# --- REGION


def described():
    return Described(row_of([64, 128]), 32, b"opaque")


def test_what_p_lends_survives_its_way():
    body = region_body.pack(described())
    got = region_body.unpack(body, 192)
    assert got.row.regions == described().row.regions
    assert (got.unit_bytes, got.metadata) == (32, b"opaque")
    assert body[:28].hex(" ") == (
        "20 00 00 00 02 00 00 00 e8 03 00 00 00 00 00 00 40 00 00 00 00 00 00 00 ff ff ff ff"
    )


@pytest.mark.parametrize("change", ["size", "cut", "no unit", "too many", "nothing", "two devices"])
def test_a_region_that_lies_is_refused(change):
    body, size = region_body.pack(described()), 192
    if change == "size":
        size = 193
    elif change == "cut":
        body = body[:40]
    elif change == "no unit":
        body = bytes(4) + body[4:]
    elif change == "too many":
        body = body[:4] + b"\xff\xff\xff\xff" + body[8:]
    elif change == "nothing":
        body = b""
    else:
        body = body[:24] + b"\x01\x00\x00\x00" + body[28:]
    with pytest.raises(ProtocolError, match="REGION"):
        region_body.unpack(body, size)


# --- the library


@pytest.mark.parametrize("found", [None, "1.4.9", "1.6.0", "2.0", "unknown"])
def test_a_missing_or_untested_nixl_is_refused_with_what_brings_the_right_one(found):
    with pytest.raises(UserError, match=r"nixl.*pip install 'xpyd\[nixl\]'"):
        check(found)


def test_a_tested_nixl_is_taken():
    assert check("1.5.1") == "1.5.1"


@nixl_kit.needs_nixl
def test_ucx_without_tcp_is_refused_by_name():
    code = (
        "import mmap; from xpyd_kv.transport.nixl import library, path\n"
        "path.NixlPath(library.load(), unit_bytes=8, lends_from=[memoryview(mmap.mmap(-1, 8))])"
    )
    env = {**os.environ, "UCX_TLS": "shm"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert "UserError: KV transport nixl: NIXL createBackend: where UCX_TLS is set" in done.stderr


# --- over real connections


net = networks("nixl")


def pair_with(net, *, lends, lands, unit=BLOCK_BYTES, its_unit=BLOCK_BYTES):
    sides = []
    for role, views in (("D", lands), ("P", lends)):
        theirs = {"lends_from": views} if role == "P" else {"lands_in": lambda: lands}
        size = unit if role == "P" else its_unit
        path = NixlPath(NIXL, unit_bytes=size, **theirs)
        net.keep(path)
        sides.append(net.endpoint(role, paths=[path]))
    (d, d_told), (p, p_told) = sides
    run(p, lambda: p.connect(d.listen_address))
    return p, p_told, p_told.wait("up")[0], d, d_told


@nixl_kit.needs_nixl
@pytest.mark.parametrize("its_unit", [BLOCK_BYTES, BLOCK_BYTES // 2], ids=["units", "any bytes"])
def test_blocks_of_several_regions_come_into_blocks_of_several_regions(net, its_unit):
    blocks = 24
    cache = [memoryview(mmap.mmap(-1, blocks * BLOCK_BYTES)) for _ in range(3)]
    landing = [memoryview(mmap.mmap(-1, blocks * BLOCK_BYTES)) for _ in range(2)]
    shuffle = random.Random(5)
    for view in cache:
        view[:] = shuffle.randbytes(len(view))
    p, p_told, peer, _, d_told = pair_with(net, lends=cache, lands=landing, its_unit=its_unit)

    def block(views, number):
        layer, row = divmod(number, blocks)
        return views[layer][row * BLOCK_BYTES : (row + 1) * BLOCK_BYTES]

    sources = shuffle.sample(range(3 * blocks), 30)
    targets = shuffle.sample(range(2 * blocks), 30)
    d_told.on["begin"] = lambda *_: [block(landing, n) for n in targets]
    send_data(p, p_told, peer, [block(cache, n) for n in sources])
    assert d_told.wait("end")[2:] == (True, True)
    assert p_told.wait("done") == (0, True)
    for source, target in zip(sources, targets, strict=True):
        assert block(landing, target) == block(cache, source)
    for number in {*range(2 * blocks)} - {*targets}:
        assert block(landing, number) == bytes(BLOCK_BYTES)


@nixl_kit.needs_nixl
@pytest.mark.parametrize("what", ["metadata", "address"])
def test_a_p_that_lends_what_it_has_not_ends_its_own_connection_only(net, what):
    d, d_told = net.endpoint("D")
    good, good_told = net.endpoint("P")
    run(good, lambda: good.connect(d.listen_address))
    its = good_told.wait("up")[0]
    room = bytearray(BLOCK_BYTES)
    d_told.on["begin"] = lambda *_: [memoryview(room)]
    agent = NIXL.agent(has_progress_thread=False)
    whole = region_of(memoryview(SHARED.buffer))
    agent.register([whole])
    metadata = agent.metadata()
    row = Row([whole])
    if what == "metadata":
        metadata = b"junk" * 50
    else:
        row = Row([NixlRegion(whole.address + 2 * whole.length, whole.length, HOST)])
    puppet = Puppet(net.connect(d.listen_address), "P", transports=("nixl",)).open()
    body = region_body.pack(Described(row, BLOCK_BYTES, metadata))
    puppet.sock.sendall(encode(RegionFrame(size_bytes=row.size_bytes), len(body)) + body)
    puppet.sock.sendall(shared_frame([Span(0, BLOCK_BYTES)]))
    assert d_told.wait("down")[1] == "refused:transport"
    agent.close()
    send_data(good, good_told, its, [net.share(b"\x07" * BLOCK_BYTES)])
    d_told.wait("end")
    assert room == b"\x07" * BLOCK_BYTES


@nixl_kit.needs_nixl
@pytest.mark.parametrize(
    "runs",
    [
        [Span(0, BLOCK_BYTES - 1)],
        [Span(2**40, BLOCK_BYTES)],
        [Span(2**64 - 1, BLOCK_BYTES)],
        [Span(0, 0), Span(0, BLOCK_BYTES)],
    ],
)
def test_runs_that_lie_end_the_connection(net, runs):
    d, d_told = net.endpoint("D")
    puppet = Puppet(net.connect(d.listen_address), "P", transports=("nixl",)).open()
    row = Row([region_of(memoryview(SHARED.buffer))])
    body = region_body.pack(Described(row, BLOCK_BYTES, b"never looked at"))
    puppet.sock.sendall(encode(RegionFrame(size_bytes=row.size_bytes), len(body)) + body)
    puppet.sock.sendall(shared_frame(runs))
    assert d_told.wait("down")[1] == "protocol"
    assert d_told.all("begin") == []


def shared_frame(runs):
    header = shared_of(data_header(bytes(BLOCK_BYTES * len(runs))))
    body = pack(runs)
    return encode(header, len(body)) + body


@nixl_kit.needs_nixl
@pytest.mark.slow
def test_a_read_that_a_stopped_p_has_not_finished_is_over_when_d_closes():
    """With NIXL 1.5.1 bytes came for seconds after the transfer was released and P forgotten."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kv.nixl_stop"],
        env={**os.environ, "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr

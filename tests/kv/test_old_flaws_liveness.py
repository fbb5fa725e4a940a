"""R7 to R13: how the connector that vLLM shipped until 0.22 hung, went deaf, or decoded on nothing.

Each test says what was observed of the old one. R1 to R6 are in test_old_flaws_memory.py, R11 in
GET and R12 in PUT in test_old_flaws_modes.py.
"""

from __future__ import annotations

import contextlib
import socket
import zlib
from collections.abc import Iterator
from hashlib import sha256

import pytest

from tests.kv.kvfakes import BLOCK_SIZE, LAYOUT
from tests.kv.kvsim import World
from tests.kv.pod_process import PodProcess, pod_process
from tests.kv.pods import (
    PATIENCE_S,
    WIRE_LAYOUT,
    Pod,
    ids_of,
    key_of,
    pod,
    send,
    settled,
    until,
)
from tests.kv.transport_kit import Puppet, address_of, is_closed
from tests.kv.wire_samples import ACCEPTOR_HELLO, DIALLER_HELLO, SAMPLES
from xpyd_core.blocks import token_bytes
from xpyd_core.request_id import TransferKey, parse_pair_id
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.values import NoKv, Wait
from xpyd_kv.wire.frames import encode
from xpyd_kv.wire.messages import CHECKSUM_BYTES, Data, Offer

UNIT = LAYOUT.bytes_per_block
THREADS = ["MainThread", "xpyd-kv-io"]
LAYER_BY_LAYER = KvSettings(frames=FrameLimits(group_bytes=1))
SAMPLE = {sample.name: sample.raw for sample in SAMPLES}


@contextlib.contextmanager
def stranger(d: PodProcess) -> Iterator[socket.socket]:
    with socket.create_connection(d.address, timeout=PATIENCE_S) as sock:
        yield sock


def goes_through(p: Pod, d: PodProcess, seed: int) -> bool:
    """Whether a transfer from `p` lands in `d`, and whether it did so without dialling anew."""
    d.expect(seed, 24)
    key = send(p, d.address, ids_of(seed, 24), seed, chunk=10)
    answer = d.answer(seed)
    until(lambda: settled(p, key))
    return answer == "right" and p.lost == []


# --- R7: waiting


def test_r7_the_random_suffix_of_an_engines_id_is_no_part_of_the_transfers_key() -> None:
    """Old: P's and D's keys differed by it, so D waited for a tensor that could never come."""
    uuid = "0123456789abcdef" * 2
    pair = f"___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:21001_{uuid}"
    ids = [parse_pair_id(text) for text in (f"cmpl-{pair}-3-8953d2a7", f"cmpl-{pair}-3-adbca30f")]
    keys = {TransferKey(found.uuid, found.suffix_index) for found in ids if found is not None}
    assert keys == {TransferKey(uuid, 3)}


def test_r7_kv_that_never_comes_stalls_nobody_and_is_given_up_at_its_deadline() -> None:
    """Old: D blocked without limit inside the forward pass; all its requests stood still."""
    world = World()
    never, sent = world.prompt(8), world.prompt(8)
    world.expect(never, wait_s=10)
    assert world.admit(never) == Wait()
    for _ in range(3):
        world.expect(sent)
        world.send(sent)
        world.settle()
        world.take_over(sent, world.admit(sent))
        assert world.admit(never) == Wait()
        sent = world.prompt(8)
    world.pass_time(9.9)
    assert world.admit(never) == Wait()
    assert world.consumer.next_deadline() == pytest.approx(world.clock.now + 0.1)
    world.pass_time(0.2)
    assert world.admit(never) == NoKv("no_offer")


def test_r7_a_real_d_lands_other_kv_while_it_waits_for_what_never_comes() -> None:
    """Old: as above; here D's thread is asked and answers all the while."""
    with pod_process("D") as d, pod("P") as p:
        d.expect(99, 24, wait_s=1.0)
        assert goes_through(p, d, 1)
        assert d.answer(99) == "no_offer"
        assert d.state()["free_blocks"] == 64


# --- R8: no room


def test_r8_a_full_buffer_and_a_full_pool_defer_and_no_thread_dies() -> None:
    """Old: `ValueError` ended the listener thread, the node was deaf, every P waited for ever."""
    store = {"direct_free": 1.0, "buffer_bytes": 4 * UNIT, "pool_bytes": 4 * UNIT}
    with pod_process("D", store=store) as d, pod("P") as p, pod("P", name="other") as other:
        assert p.kv.producer is not None
        keys = [send(p, d.address, ids_of(seed, 16), seed, chunk=16) for seed in range(1, 6)]
        until(lambda: d.state()["leases"] == 2)
        producer = p.kv.producer
        until(lambda: [producer.status(key).state for key in keys].count("granted") == 2)
        states = [producer.status(key).state for key in keys]
        assert sorted(states) == ["granted"] * 2 + ["pending"] * 3
        full = d.state()
        assert (full["buffer"], full["pool"]) == (4 * UNIT, 4 * UNIT)
        # Not deaf: another P is heard, and waits too.
        keys.append(send(other, d.address, ids_of(6, 16), 6, chunk=16))
        until(lambda: d.state()["connections"] == 2)
        assert d.state()["threads"] == THREADS
        # Requests come, and with them room.
        for seed in range(1, 7):
            d.expect(seed, 16)
        assert [d.answer(seed) for seed in range(1, 7)] == ["right"] * 6
        until(lambda: all(settled(p, key) for key in keys[:5]) and settled(other, keys[5]))
        after = d.state()
        assert (after["leases"], after["buffer"], after["pool"]) == (0, 0, 0)
        assert (after["free_blocks"], after["lost"]) == (64, 0)
        assert p.pool.num_free == 64


def test_r8_a_p_that_finds_no_room_waits_for_its_lease_and_no_longer() -> None:
    """Old: `wait_for_sent` blocked for ever. No request ever comes for this KV."""
    limits = {"lease_s": 0.3}
    store = {"direct_free": 1.0, "buffer_bytes": 4 * UNIT}
    with (
        pod_process("D", store=store, limits=limits) as d,
        pod("P", KvSettings(limits=KvLimits(**limits))) as p,
    ):
        keys = [send(p, d.address, ids_of(seed, 16), seed, chunk=16) for seed in range(1, 4)]
        until(lambda: all(settled(p, key) for key in keys))
        assert p.pool.num_free == 64
        until(lambda: d.state()["leases"] == 0)
        assert d.state()["threads"] == THREADS


# --- R9 and R10: strangers


@pytest.mark.parametrize("junk", [b"\x00", b"\xc1", b"\xff", b"{"])
def test_r9_one_junk_byte_ends_its_own_connection_and_no_thread(junk: bytes) -> None:
    """Old: one byte from any client killed the listener (`FormatError`)."""
    with pod_process("D") as d, pod("P") as p:
        assert goes_through(p, d, 1)
        with stranger(d) as sock:
            sock.sendall(junk)
            assert is_closed(sock)
        assert goes_through(p, d, 2)
        state = d.state()
        assert state["threads"] == THREADS
        assert (state["connections"], state["lost"], state["junk"]) == (1, 0, 1)


def _with_a_name_that_is_no_text() -> bytes:
    raw = bytearray(encode(DIALLER_HELLO))
    raw[raw.index(b"demo-prefill-0")] = 0xFF
    raw[12:16] = zlib.crc32(raw[16:]).to_bytes(4, "little")
    return bytes(raw)


UNKNOWN = {
    "a name that is not UTF-8": _with_a_name_that_is_no_text(),
    "OFFER without a handshake": SAMPLE["offer"],
    "DATA without a handshake": SAMPLE["data"],
    "a HELLO of D to D": encode(ACCEPTOR_HELLO),
}


@pytest.mark.parametrize("frame", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_r10_a_message_of_nobody_known_ends_its_own_connection_and_no_thread(frame: bytes) -> None:
    """Old: an identity that was no UTF-8, or had no communicator, killed the listener."""
    with pod_process("D") as d, pod("P") as p:
        assert goes_through(p, d, 1)
        with stranger(d) as sock:
            sock.sendall(frame)
            assert is_closed(sock)
        assert goes_through(p, d, 2)
        state = d.state()
        assert state["threads"] == THREADS
        assert (state["connections"], state["lost"], state["free_blocks"]) == (1, 0, 64)


# --- R11: KV that is not whole


def test_r11_kv_that_did_not_come_whole_is_not_decoded_on() -> None:
    """Old: a missing tensor was a warning, and D decoded on unwritten blocks: wrong text."""
    world = World(settings=LAYER_BY_LAYER)
    sent = world.prompt(8)
    world.expect(sent)
    world.send(sent)
    for _ in range(60):
        # A layer is broken on its way, also when it is sent once more.
        link = world.link
        is_next = link is not None and link.queued and not link.on_wire and not link.landing
        if is_next:
            world.read_frame(corrupt=True)
        world.step_control("D")
        world.step_control("P")
        world.step_data()
        for endpoint in world.endpoints.values():
            endpoint.run_calls()
        world.dial()
        world.producer.poll(world.clock.now)
        world.consumer.poll(world.clock.now)
    assert world.admit(sent) == NoKv("corrupt")
    assert world.d.metrics.checksum_mismatches >= 2


@pytest.mark.parametrize("layers", range(len(LAYOUT.layers)))
def test_r11_kv_of_a_p_that_died_between_two_layers_is_not_decoded_on(layers: int) -> None:
    """Old: as above; here some layers are written and the others never will be."""
    world = World(settings=LAYER_BY_LAYER)
    sent = world.prompt(8)
    world.expect(sent)
    world.offer(sent)
    world.settle()

    def die(layer: int) -> None:
        world.settle()
        if layer == layers:
            world.hang_up("lost")

    world.forward(sent, between=die)
    world.settle()
    assert isinstance(world.admit(sent), NoKv)


def test_r11_kv_that_p_gave_up_under_pressure_is_not_decoded_on() -> None:
    """Old: as above. P gives up what waits under a lease for a D without room, and D is told so.
    The same in GET: test_old_flaws_modes.py."""
    world = World(p_blocks=16, store=StoreLimits(1.0, 0, 0))
    prompts = [world.prompt(6 * BLOCK_SIZE) for _ in range(2)]
    for sent in prompts:
        world.expect(sent)
        world.send(sent)
        world.settle()
    assert world.p.metrics.pressure_cancels == 1
    assert isinstance(world.admit(prompts[0]), NoKv)
    assert world.admit(prompts[1]) == Wait()
    world.settle()
    world.take_over(prompts[1], world.admit(prompts[1]))


# --- R12: what has been sent


def test_r12_blocks_are_held_until_the_last_byte_is_away() -> None:
    """Old: `wait_for_sent` returned when the queue was empty, the last tensor still being sent."""
    world = World(settings=LAYER_BY_LAYER)
    sent = world.prompt(8)
    world.expect(sent)
    world.offer(sent)
    world.settle()
    world.forward(sent)
    world.finish_request(sent)
    world.endpoints["P"].run_calls()
    for _ in range(len(LAYOUT.layers)):
        world.producer.poll(world.clock.now)
        assert not world.producer.is_settled(sent.key)
        assert world.p_pool.num_free == world.p_pool.num_blocks - 2
        world.read_frame()
    world.settle()
    assert world.producer.is_settled(sent.key)
    assert world.p_pool.num_free == world.p_pool.num_blocks


# --- R13: closing


def _stop_in_mid_data(sock: socket.socket) -> None:
    """As a P: offer, be granted, and send half of a DATA frame."""
    puppet = Puppet(sock, "P", layout=WIRE_LAYOUT).open()
    tokens, key = token_bytes(ids_of(7, BLOCK_SIZE)), key_of(7)
    names = {"uuid": key.uuid, "prompt_index": 0, "epoch": 0}
    offer = Offer(
        **names,
        tokens=BLOCK_SIZE,
        prompt_tokens=BLOCK_SIZE,
        digest=sha256(tokens).digest(),
        total_bytes=UNIT,
    )
    sock.sendall(encode(offer, len(tokens)) + tokens)
    assert puppet.read()
    area = {"first_layer": 0, "end_layer": 3, "first_block": 0, "end_block": 1}
    data = Data(**names, **area, seq=0)
    sock.sendall(encode(data, UNIT + CHECKSUM_BYTES) + bytes(UNIT // 2))


def test_r13_close_of_a_d_returns_with_peers_strangers_and_half_a_frame() -> None:
    """Old: `close()` joined endless threads and never returned."""
    with pod_process("D") as d, pod("P") as p, stranger(d) as silent, stranger(d) as half:
        assert goes_through(p, d, 1)
        _stop_in_mid_data(half)
        until(lambda: d.state()["connections"] == 2 and d.state()["strangers"] == 1)
        assert d.ask("close", deadline_s=2.0) == ["MainThread"]
        assert is_closed(silent)
        assert is_closed(half)
        until(lambda: len(p.lost) == 1)


def test_r13_close_of_a_p_returns_whose_d_reads_nothing() -> None:
    """Old: as above. The D accepts and is silent, with KV to send."""
    with socket.create_server(("127.0.0.1", 0)) as mute, pod_process("P") as p:
        p.ask("send", seed=1, tokens=24, address=address_of(mute))
        mute.settimeout(PATIENCE_S)
        with mute.accept()[0]:
            assert p.ask("close", deadline_s=2.0) == ["MainThread"]

"""R1 to R6: what the connector that vLLM shipped until 0.22 did with memory, flaw by flaw.

Each test says what was observed of the old one. R7 to R13 are in test_old_flaws_liveness.py.
"""

from __future__ import annotations

import gc
import sys

import pytest

from tests.kv.kvfakes import BLOCK_SIZE, LAYOUT
from tests.kv.kvsim import Sent, World
from tests.kv.pod_process import pod_process
from tests.kv.pods import pod, send, settled, until
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.values import NoKv

UNIT = LAYOUT.bytes_per_block
MIB = 2**20
PAGE = 4096
BUFFER = StoreLimits(1.0, 6 * UNIT, 0)


def held(world: World) -> tuple[int, int]:
    """Bytes that D's buffer and pool hold."""
    assert world.d.store is not None
    metrics = world.d.store.metrics()
    return metrics.buffer_used_bytes, metrics.pool_used_bytes


def offered(world: World, blocks: int) -> Sent:
    """A prompt of so many blocks, sent to a D that expects it."""
    sent = world.prompt(blocks * BLOCK_SIZE)
    world.expect(sent)
    world.send(sent)
    world.settle()
    return sent


@pytest.mark.parametrize("mib", [20, 33, 48])
def test_r1_a_pool_has_exactly_the_size_that_was_asked(mib: int) -> None:
    """Old: bytes held, rounded up to a power of two: asked 20, got 32; 33 and 48 became 64."""
    with pod_process("D", store={"pool_bytes": mib * MIB}) as d:
        # Whole blocks, in whole pages.
        assert mib * MIB - UNIT < d.mapped_pool_bytes() < mib * MIB + PAGE


def test_r1b_a_producer_takes_no_pool_and_a_consumers_is_not_resident_before_kv_lands() -> None:
    """Old: 32 GiB pinned at start by every rank, a producer's too, which never used them."""
    with pod_process("P", store={"pool_bytes": 64 * MIB}) as p:
        assert p.mapped_pool_bytes() == 0
    with pod_process("D", store={"pool_bytes": 64 * MIB}) as d:
        assert d.mapped_pool_bytes() > 0
        assert d.memory("RssShmem") < MIB


def test_r2_tensors_just_over_a_power_of_two_fill_the_pool() -> None:
    """Old: tensors of 2 MiB + 4 KiB filled a pool of 64 MiB to 50 %, then `Insufficient memory`.

    The same in blocks of the test's size: 513 of them in a pool of 16,384."""
    blocks, pool_bytes = 513, 16_384 * UNIT
    world = World(p_blocks=2 * blocks, d_blocks=blocks, store=StoreLimits(1.0, 0, pool_bytes))
    prompts = [offered(world, blocks) for _ in range(31)]
    assert held(world)[1] / pool_bytes >= 0.95
    assert world.d.metrics.landings == {"pool": 31}
    # The next waits until there is room, wherever the pool's room is.
    late = offered(world, blocks)
    assert held(world)[1] == 31 * blocks * UNIT
    for sent in [*prompts[1::2], *prompts[::2]]:
        world.take_over(sent, world.admit(sent))
    world.admit(late)
    world.settle()
    world.take_over(late, world.admit(late))
    world.settle()
    world.assert_nothing_is_left()


def test_r3_the_buffer_is_charged_until_its_bytes_are_gone_and_not_until_decoding_ends() -> None:
    """Old: the counter was 0 with 786,432 B held until the request had finished decoding."""
    world = World(store=BUFFER)
    sent = offered(world, 3)
    assert held(world) == (3 * UNIT, 0)
    answer = world.admit(sent)
    # The request decodes from here on; its landing is free: the whole budget is another's.
    assert held(world) == (0, 0)
    other = offered(world, 6)
    assert held(world) == (6 * UNIT, 0)
    world.take_over(sent, answer)
    world.take_over(other, world.admit(other))


def test_r3b_asking_twice_does_not_make_the_budget_negative() -> None:
    """Old: a preempted request read again, the counter went to -786,432 B and bounded nothing."""
    world = World(store=BUFFER)
    sent = offered(world, 3)
    world.take_over(sent, world.admit(sent))
    # Preempted, it comes again: it computes, and the accounts do not change.
    assert isinstance(world.admit(sent), NoKv)
    world.expect(sent)
    world.pass_time(11)
    assert isinstance(world.admit(sent), NoKv)
    assert held(world) == (0, 0)
    # The threshold is enforced still: six blocks go in, a seventh does not.
    six = offered(world, 6)
    one = offered(world, 1)
    assert held(world) == (6 * UNIT, 0)
    assert world.producer.status(one.key).state == "pending"
    world.take_over(six, world.admit(six))


def test_r4_an_aborted_request_gives_its_budget_back() -> None:
    """Old: its tensors were dropped, their bytes stayed charged: after a while nothing fitted."""
    world = World(store=BUFFER)
    for _ in range(5):
        sent = offered(world, 6)
        assert held(world) == (6 * UNIT, 0)
        world.consumer.forget(sent.key)
        assert held(world) == (0, 0)
    world.settle()
    world.assert_nothing_is_left()


def test_r5_kv_that_comes_after_the_end_of_its_request_does_not_stay() -> None:
    """Old: such a tensor stayed for ever."""
    world = World(store=BUFFER)
    sent = world.prompt(6 * BLOCK_SIZE)
    world.expect(sent)
    world.consumer.forget(sent.key)
    world.settle()
    world.send(sent)
    world.settle()
    assert held(world) == (0, 0)
    world.assert_nothing_is_left()


def test_r5_kv_on_its_way_when_its_request_ends_does_not_stay_between_two_processes() -> None:
    """Old: such a tensor stayed for ever. D's engine gives up before P has computed."""
    store = {"direct_free": 1.0, "buffer_bytes": 6 * UNIT}
    with pod_process("D", store=store) as d, pod("P") as p:
        for seed in range(1, 6):
            d.expect(seed, 24, wait_s=0.0)
            assert d.answer(seed) == "no_offer"
            key = send(p, d.address, tuple(range(24)), seed, chunk=8)
            until(lambda key=key: settled(p, key))
        assert (d.state()["leases"], d.state()["buffer"]) == (0, 0)
        assert p.pool.num_free == p.pool.num_blocks


def test_r6_nothing_grows_with_the_number_of_transfers_on_p_or_d() -> None:
    """Old: P's map of sent tensors grew for ever. Counted: all objects of the interpreter."""
    world = World(settings=KvSettings(store=BUFFER))

    def objects_after(transfers: int) -> tuple[int, int]:
        for _ in range(transfers):
            sent = world.prompt(5)
            world.expect(sent)
            world.send(sent)
            world.settle()
            world.take_over(sent, world.admit(sent))
        world.settle()
        world.pass_time(61)
        gc.collect()
        return len(gc.get_objects()), sys.getallocatedblocks()

    objects_after(50)
    containers, blocks = objects_after(50)
    later_containers, later_blocks = objects_after(400)
    assert later_containers - containers < 40
    assert later_blocks - blocks < 200
    world.assert_nothing_is_left()

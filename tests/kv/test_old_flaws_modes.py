"""R11 and R12 of the connector that vLLM shipped until 0.22, in the modes that it had them in: KV
that nobody has read in GET, and the end of a send in PUT.

Each test says what was observed of the old one. The rest: test_old_flaws_liveness.py.
"""

from __future__ import annotations

import time

import pytest

from tests.kv.kvfakes import BLOCK_SIZE, LAYOUT
from tests.kv.kvsim import Sent, World
from tests.kv.pod_process import pod_process
from tests.kv.pods import Pod, ids_of, pod, send, settled, until
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.values import NoKv, Wait

UNIT = LAYOUT.bytes_per_block
NOWHERE = StoreLimits(1.0, 0, 0)
BESIDE = StoreLimits(1.0, 6 * UNIT, 100 * UNIT)
PUT = KvSettings(mode="put", frames=FrameLimits(group_bytes=1))


def _unread(world: World, count: int) -> list[Sent]:
    """Prompts of 6 blocks that P has computed and D has not asked for; P's cache holds two."""
    prompts: list[Sent] = []
    for _ in range(count):
        sent = world.prompt(6 * BLOCK_SIZE)
        world.expect(sent)
        world.send(sent)
        world.settle()
        prompts.append(sent)
    return prompts


def _read(world: World, sent: Sent) -> None:
    assert world.admit(sent) == Wait()
    world.settle()
    world.take_over(sent, world.admit(sent))
    world.settle()


# --- R11


def test_r11_kv_that_nobody_has_read_is_given_up_by_name_and_never_replaced() -> None:
    """Old, in GET: unread tensors were evicted oldest first; D was told `ret=1`, logged a warning
    and decoded on unwritten blocks."""
    world = World(p_blocks=16, settings=KvSettings(mode="get"), store=NOWHERE)
    given_up, *kept = _unread(world, 2)
    assert world.p.metrics.pressure_cancels == 1
    assert world.admit(given_up) == NoKv("cancelled")
    for sent in kept:
        _read(world, sent)
    world.assert_nothing_is_left()


@pytest.mark.parametrize("order", [1, -1], ids=["oldest first", "newest first"])
def test_r11_unread_kv_that_moved_out_of_ps_cache_is_what_it_was(order: int) -> None:
    """Old: as above. P's blocks are used again while the KV waits: take_over compares the bytes."""
    world = World(p_blocks=16, settings=KvSettings(mode="get"), store=BESIDE)
    prompts = _unread(world, 6)
    assert world.p.metrics.pressure_cancels == 0
    assert world.p.metrics.spilled == {"buffer": 1, "pool": 4}
    for sent in prompts[::order]:
        _read(world, sent)
    assert world.p.store is not None
    assert world.p.store.metrics().leases == 0
    world.assert_nothing_is_left()


@pytest.mark.parametrize("pool_units", [0, 12, 100])
def test_r11_a_real_d_that_reads_late_gets_the_right_bytes_or_a_reason(pool_units: int) -> None:
    """Old: as above, and one more: the same key may hold another prompt's bytes. Ten prompts of 6
    blocks through a P of 16, all computed before the first is read."""
    store = StoreLimits(1.0, 0, pool_units * UNIT)
    with (
        pod_process("D") as d,
        pod("P", KvSettings(mode="get", store=store), blocks=16) as p,
    ):
        keys = [_computed(p, d.address, seed) for seed in range(1, 11)]
        _poll(p)
        for seed in range(1, 11):
            d.expect(seed, 24, wait_s=2.0)
        until(lambda: all(settled(p, key) for key in keys))
        answers = [d.answer(seed) for seed in range(1, 11)]
        # The first may be given up before P has reached D at all.
        assert set(answers) <= {"right", "cancelled", "no_offer"}
        assert answers[-1] == "right"
        assert answers.count("right") == 10 or pool_units < 100
        assert p.pool.num_free == p.pool.num_blocks
        state = d.state()
        assert (state["leases"], state["free_blocks"]) == (0, 64)


def _computed(p: Pod, address: tuple[str, int], seed: int) -> object:
    until(lambda: _poll(p) and p.pool.num_free >= 6)
    return send(p, address, ids_of(seed, 24), seed, chunk=10)  # type: ignore[arg-type]


def _poll(p: Pod) -> bool:
    assert p.kv.producer is not None
    p.kv.producer.poll(time.monotonic())
    return True


# --- R12


def test_r12_a_step_in_put_is_held_until_d_has_said_that_all_is_there() -> None:
    """Old, in PUT: `wait_for_sent` returned when the queue was empty, the last tensor still being
    sent."""
    world = World(settings=PUT)
    sent = world.prompt(8)
    world.expect(sent)
    world.offer(sent)
    world.settle()
    world.forward(sent)
    assert _is_held(world)
    for _ in LAYOUT.layers:
        # A frame leaves P; the last one is still on its way.
        world.endpoints["P"].run_calls()
        world.read_frame()
        assert _is_held(world)
    while world.link is not None and not world.link.to_p:
        assert _is_held(world)
        world.endpoints["P"].run_calls()
        world.endpoints["D"].run_calls()
        world.step_data() or world.step_control("D")
        world.consumer.poll(world.clock.now)
    assert _is_held(world), "held until DONE has come, not until it was sent"
    world.settle()
    assert not _is_held(world)
    world.finish_request(sent)
    world.take_over(sent, world.admit(sent))
    world.settle()
    world.assert_nothing_is_left()


def test_r12_a_step_in_put_is_not_held_for_ever() -> None:
    """Old: with no D to take it `wait_for_sent` blocked without limit."""
    world = World(settings=PUT)
    sent = world.prompt(8)
    world.expect(sent)
    world.offer(sent)
    world.settle()
    world.forward(sent)
    until_s = world.producer.held_until(world.clock.now)
    assert until_s is not None
    assert 0 < until_s - world.clock.now <= 10
    world.pass_time(until_s - world.clock.now, settle=False)
    assert not _is_held(world)


def test_r12_what_a_real_p_has_sent_in_put_is_with_d_when_its_step_ends() -> None:
    """Old: as above. P's process is gone the moment after its step has ended."""
    with pod_process("D") as d, pod("P", PUT) as p:
        assert p.kv.producer is not None
        producer = p.kv.producer
        for seed in (1, 2, 3):
            d.expect(seed, 24)
            send(p, d.address, ids_of(seed, 24), seed, chunk=10)
            start = time.monotonic()
            until(lambda: producer.held_until(time.monotonic()) is None)
            assert time.monotonic() - start < 9, "let go by its deadline"
        p.kv.endpoint.close(0.0)
        assert [d.answer(seed) for seed in (1, 2, 3)] == ["right"] * 3


def _is_held(world: World) -> bool:
    return world.producer.held_until(world.clock.now) is not None

"""What the modes change between two engines: holds, pulls, and KV that P moves aside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kv.kvfakes import BLOCK_SIZE, LAYOUT
from tests.kv.kvsim import Sent, World
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.values import Landed, NoKv, SendStatus, Wait
from xpyd_kv.wire.messages import MODES, Mode

UNIT = LAYOUT.bytes_per_block
STORES = {"buffer": StoreLimits(0.1, 100 * UNIT, 0), "pool": StoreLimits(0.1, 0, 100 * UNIT)}


def settings(mode: Mode, store: StoreLimits | None = None) -> KvSettings:
    return KvSettings(frames=FrameLimits(group_bytes=1), store=store or StoreLimits(), mode=mode)


def adopt(world: World, sent: Sent) -> None:
    """D's request runs, pulling its KV if it must, and ends."""
    answer = world.admit(sent)
    if isinstance(answer, Wait):
        world.settle()
        answer = world.admit(sent)
    world.take_over(sent, answer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("tokens", "chunks", "cached"), [(1, None, 0), (17, [6, 7, 4], 0), (30, [3, 19], 8)]
)
def test_the_bytes_arrive_in_every_mode(
    mode: Mode, tokens: int, chunks: list[int] | None, cached: int
) -> None:
    world = World(settings=settings(mode))
    sent = world.prompt(tokens, chunks=chunks, cached_tokens=cached)
    world.expect(sent)
    world.send(sent)
    world.settle()
    adopt(world, sent)
    world.settle()
    assert world.d.metrics.landings == {"pulled" if mode == "get" else "direct": 1}
    assert world.producer.status(sent.key) == SendStatus("granted", "D1")
    world.assert_nothing_is_left()


# --- put


def put() -> tuple[World, Sent]:
    """A prompt of two chunks, offered and granted."""
    world = World(settings=settings("put"))
    sent = world.prompt(16, chunks=[8, 8], cached_tokens=0)
    world.offer(sent)
    world.settle()
    return world, sent


def test_put_sends_nothing_during_a_step_and_holds_it_until_its_bytes_are_sent() -> None:
    world, sent = put()
    seen: list[int] = []

    def between(layer: int) -> None:
        world.settle()
        seen.append(world.p.metrics.sent_bytes)

    world.forward(sent, between=between)
    assert seen == [0, 0, 0]
    now = world.clock.now
    assert world.producer.held_until(now) == now + KvLimits().hold_s
    world.settle()
    assert world.p.metrics.sent_bytes == 2 * UNIT
    world.clock.now += 1
    assert world.producer.held_until(world.clock.now) is None
    assert world.p.metrics.held_s == 1


def test_put_holds_the_last_step_until_d_has_confirmed() -> None:
    world, sent = put()
    world.forward(sent)
    world.settle()
    world.forward(sent)
    world.endpoints["P"].run_calls()
    while world.step_data():
        pass
    world.endpoints["P"].run_calls()
    assert world.p.metrics.sent_bytes == 4 * UNIT
    assert world.producer.held_until(world.clock.now) is not None
    world.settle()
    assert world.producer.held_until(world.clock.now) is None
    assert world.producer.status(sent.key) == SendStatus("granted", "D1")


def test_put_sends_what_was_cached_with_the_step() -> None:
    world = World(settings=settings("put"))
    sent = world.prompt(16, chunks=[8], cached_tokens=8)
    world.offer(sent)
    world.settle()
    assert world.p.metrics.sent_bytes == 0
    world.forward(sent)
    world.settle()
    assert world.p.metrics.sent_bytes == 4 * UNIT


def test_put_does_not_wait_for_a_grant_before_the_last_step_but_does_after_it() -> None:
    world = World(settings=settings("put"))
    sent = world.prompt(16, chunks=[8, 8])
    world.offer(sent)
    world.forward(sent)
    assert world.producer.held_until(world.clock.now) is None
    world.forward(sent)
    assert world.producer.held_until(world.clock.now) is not None
    world.settle()
    assert world.producer.held_until(world.clock.now) is None


def test_put_does_not_wait_for_a_d_that_defers() -> None:
    """D makes room when the request comes, and that comes when P has answered."""
    world = World(settings=settings("put", StoreLimits(1.0, 0, 0)))
    sent = world.prompt(16, chunks=[8, 8])
    world.offer(sent)
    world.settle()
    for _ in range(2):
        world.forward(sent)
        assert world.producer.held_until(world.clock.now) is None
    world.finish_request(sent)
    world.expect(sent)
    adopt(world, sent)
    world.settle()
    world.assert_nothing_is_left()


@pytest.mark.parametrize("end", ["cancel", "peer", "release"])
def test_a_held_step_goes_on_at_once_when_the_transfer_is_over(end: str) -> None:
    world, sent = put()
    world.forward(sent)
    world.settle()
    world.forward(sent)
    assert world.producer.held_until(world.clock.now) is not None
    if end == "cancel":
        world.producer.cancel(sent.key, "aborted")
    elif end == "peer":
        world.hang_up()
    else:
        world.consumer.release(sent.key.uuid, world.clock.now)
        world.endpoints["D"].run_calls()
        while world.step_control("P"):
            pass
        world.hang_up()
    assert world.producer.held_until(world.clock.now) is None


def test_a_held_step_goes_on_at_its_deadline_and_the_transfer_too() -> None:
    world, sent = put()
    world.forward(sent)
    world.settle()
    world.forward(sent)
    until = world.producer.held_until(world.clock.now)
    assert until is not None
    world.clock.now = until - 0.1
    assert world.producer.held_until(world.clock.now) == until
    world.clock.now = until
    assert world.producer.held_until(world.clock.now) is None
    world.finish_request(sent)
    world.expect(sent)
    world.settle()
    world.take_over(sent, world.admit(sent))
    world.settle()
    world.assert_nothing_is_left()


def test_a_failed_step_holds_nothing() -> None:
    world, sent = put()
    world.producer.stage(sent.key, sent.blocks, 8)
    world.producer.step_done(failed=True)
    assert world.producer.held_until(world.clock.now) is None


def test_other_modes_hold_nothing() -> None:
    for mode in ("put_async", "get"):
        world = World(settings=settings(mode))
        sent = world.prompt(8)
        world.offer(sent)
        world.forward(sent)
        assert world.producer.held_until(world.clock.now) is None


# --- get


def test_get_leaves_d_as_it_was_until_the_request_runs() -> None:
    world = World(settings=settings("get"))
    sent = world.prompt(18, chunks=[10, 8])
    world.send(sent)
    world.settle()
    assert world.d_pool.num_free == world.d_pool.num_blocks
    assert world.p_pool.num_free == world.p_pool.num_blocks - 5
    # P says which D has its offer, so that one that started anew is known at once.
    assert world.producer.status(sent.key) == SendStatus("pending", "D1")
    world.expect(sent)
    world.settle()
    assert world.d_pool.num_free == world.d_pool.num_blocks
    assert world.admit(sent) == Wait()
    assert world.d_pool.num_free == world.d_pool.num_blocks - 5
    world.settle()
    world.take_over(sent, world.admit(sent))
    world.settle()
    world.assert_nothing_is_left()


def test_get_skips_what_d_has_cached_when_it_pulls() -> None:
    world = World(settings=settings("get"))
    sent = world.prompt(18)
    world.expect(sent)
    world.send(sent)
    world.settle()
    have = world.d_pool.take(3)
    assert have is not None
    world.d_pool.remember(sent.ids, have)
    world.d_pool.release(have)
    assert world.admit(sent) == Wait()
    world.settle()
    answer = world.admit(sent)
    assert isinstance(answer, Landed)
    assert answer.skipped_tokens == 12
    assert world.p.metrics.sent_bytes == 2 * UNIT


def test_kv_that_nobody_pulls_is_dropped_with_its_lease() -> None:
    world = World(settings=settings("get"))
    sent = world.prompt(9)
    world.send(sent)
    world.settle()
    world.pass_time(29)
    assert world.producer.status(sent.key).state == "pending"
    world.pass_time(3)
    assert world.producer.status(sent.key).state == "none"
    world.assert_nothing_is_left()


def crowd(store: StoreLimits, prompts: int = 5) -> tuple[World, list[Sent]]:
    """Prompts of 3 blocks each on a P of 20, of which 10 may wait."""
    world = World(p_blocks=20, settings=settings("get", store))
    sent = [world.prompt(3 * BLOCK_SIZE) for _ in range(prompts)]
    for one in sent:
        world.send(one)
        world.settle()
    return world, sent


@pytest.mark.parametrize("where", STORES)
def test_under_pressure_the_oldest_kv_moves_aside_and_none_is_given_up(where: str) -> None:
    world, prompts = crowd(STORES[where])
    assert world.p.metrics.spilled == {where: 2}
    assert world.p.metrics.spilled_bytes == 6 * UNIT
    assert world.p.metrics.pressure_cancels == 0
    assert world.p_pool.num_free == 20 - 9
    # Others write into the blocks that were given back.
    taken = world.p_pool.take(11)
    assert taken is not None
    world.p_memory.fill(taken, 999)
    for sent in prompts:
        world.expect(sent)
        adopt(world, sent)
        world.settle()
    world.p_pool.release(taken)
    world.assert_nothing_is_left()
    assert world.p.store is not None
    assert world.p.store.metrics().leases == 0


def test_where_nothing_has_room_the_oldest_is_given_up() -> None:
    world, prompts = crowd(StoreLimits(0.1, 3 * UNIT, 2 * UNIT))
    assert world.p.metrics.spilled == {"buffer": 1}
    assert world.p.metrics.pressure_cancels == 1
    assert [world.producer.status(s.key).state for s in prompts] == [
        "pending", "none", "pending", "pending", "pending"
    ]  # fmt: skip
    for sent in prompts:
        world.expect(sent)
        if sent is prompts[1]:
            assert world.admit(sent) == NoKv("cancelled")
        else:
            adopt(world, sent)
            world.settle()
    world.assert_nothing_is_left()


def test_what_d_pulls_at_that_moment_stays_in_its_blocks() -> None:
    world, prompts = crowd(STORES["pool"], prompts=3)
    for sent in prompts:
        world.expect(sent)
    assert world.admit(prompts[0]) == Wait()
    world.endpoints["D"].run_calls()
    last = world.prompt(3 * BLOCK_SIZE)
    world.expect(last)
    world.send(last)
    world.producer.poll(world.clock.now)
    assert world.p.store is not None
    assert world.p.store.metrics().pool_used_bytes == 3 * UNIT
    # The session gets PULL before it hears that the KV stands elsewhere too.
    assert world.step_control("P")
    world.settle()
    # So the next one moved in its place; what did not move is not counted.
    assert world.p.metrics.spilled == {"pool": 1}
    assert world.p.store.metrics().pool_used_bytes == 3 * UNIT
    for sent in (*prompts, last):
        adopt(world, sent)
        world.settle()
    world.assert_nothing_is_left()


def queue(world: World, prompts: int) -> list[Sent]:
    """Prompts of 3 blocks each that wait at P, and whose requests wait at D."""
    sent = [world.prompt(3 * BLOCK_SIZE) for _ in range(prompts)]
    for one in sent:
        world.expect(one)
        world.send(one)
        world.settle()
    return sent


def pulled(world: World) -> int:
    return world.d.metrics.landings["pulled"]


def test_d_pulls_for_no_more_requests_than_may_start() -> None:
    world = World(settings=settings("get"))
    prompts = queue(world, 5)
    for sent in prompts:
        assert world.admit(sent, seats=2) == Wait()
    assert pulled(world) == 2
    world.settle()
    for sent in prompts[2:]:
        assert world.admit(sent, seats=2) == Wait()
    # One runs and the other, whose KV has come, will: there is no seat for a third.
    world.take_over(prompts[0], world.admit(prompts[0], seats=2))
    assert world.admit(prompts[2], seats=1) == Wait()
    assert pulled(world) == 2
    assert world.admit(prompts[2], seats=2) == Wait()
    assert pulled(world) == 3
    # Whoever leaves without having run makes room for another.
    world.consumer.forget(prompts[1].key)
    world.settle()
    assert world.admit(prompts[3], seats=2) == Wait()
    assert pulled(world) == 4
    world.settle()
    for sent in (prompts[2], prompts[3], prompts[4]):
        adopt(world, sent)
        world.settle()
    world.assert_nothing_is_left()


def test_d_says_when_kv_that_may_be_pulled_finds_no_blocks() -> None:
    world = World(d_blocks=4, settings=settings("get"))
    first, second = queue(world, 2)
    assert world.admit(first) == Wait()
    assert world.admit(second) == Wait(for_blocks=True)
    world.settle()
    world.take_over(first, world.admit(first))
    assert world.admit(second) == Wait()
    world.settle()
    world.take_over(second, world.admit(second))
    world.settle()
    world.assert_nothing_is_left()


@pytest.mark.parametrize("end", ["cancel", "peer", "lease", "release"])
def test_memory_beside_the_blocks_comes_back_however_a_transfer_ends(end: str) -> None:
    world, prompts = crowd(STORES["pool"])
    oldest = prompts[0]
    assert world.p.store is not None
    assert world.p.store.metrics().pool_used_bytes == 6 * UNIT
    if end == "cancel":
        world.producer.cancel(oldest.key, "aborted")
    elif end == "peer":
        world.hang_up()
    elif end == "lease":
        world.pass_time(40)
    else:
        world.consumer.release(oldest.key.uuid, world.clock.now)
    world.settle()
    left = 3 * UNIT if end in ("cancel", "release") else 0
    assert world.p.store.metrics().pool_used_bytes == left


def test_other_modes_take_no_memory_on_p() -> None:
    for mode in ("put_async", "put"):
        world = World(settings=settings(mode, STORES["pool"]))
        assert world.p.store is None


def test_a_pulled_prompt_may_be_preempted_at_p_and_offered_again() -> None:
    world = World(settings=replace(settings("get"), limits=KvLimits(tombstone_s=60)))
    sent = world.prompt(16, chunks=[8, 8])
    world.expect(sent)
    world.offer(sent)
    world.settle()
    world.forward(sent)
    world.producer.cancel(sent.key, "preempted")
    world.settle()
    world.finish_request(sent)
    again = world.prompt(16, chunks=[8, 8], uuid=sent.key.uuid)
    again.ids = sent.ids
    world.send(again)
    world.settle()
    adopt(world, again)
    world.settle()
    world.assert_nothing_is_left()

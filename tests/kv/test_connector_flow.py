"""P's and D's connectors over an in-memory network: the whole life of transfers, step by step."""

from __future__ import annotations

import pytest

from tests.kv.kvfakes import BLOCK_SIZE, LAYOUT
from tests.kv.kvsim import D_ADDRESS, World
from xpyd_core.request_id import Address
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.values import Landed, NoKv, SendStatus, Wait

UNIT = LAYOUT.bytes_per_block
STORES = {
    "direct": StoreLimits(),
    "buffer": StoreLimits(1.0, 100 * UNIT, 0),
    "pool": StoreLimits(1.0, 0, 100 * UNIT),
    "deferred": StoreLimits(1.0, 0, 0),
}
ONE_LAYER = KvSettings(frames=FrameLimits(group_bytes=1))


@pytest.mark.parametrize("where", STORES)
@pytest.mark.parametrize(
    ("tokens", "chunks", "cached"),
    [
        (1, None, 0),
        (4, None, 0),
        (5, None, 0),
        (17, [6, 7, 4], 0),
        (17, [1] * 17, 0),
        (30, [3, 19], 8),
        (16, [4], 12),
        (23, [2, 3], 18),
    ],
)
def test_the_bytes_arrive_in_every_landing(
    where: str, tokens: int, chunks: list[int] | None, cached: int
) -> None:
    world = World(settings=ONE_LAYER, store=STORES[where])
    sent = world.prompt(tokens, chunks=chunks, cached_tokens=cached)
    world.expect(sent)
    world.send(sent)
    world.settle()
    answer = world.admit(sent)
    if where == "deferred":
        assert answer == Wait()
        world.settle()
        answer = world.admit(sent)
    world.take_over(sent, answer)
    world.settle()
    assert world.d.metrics.landings == {where: 1}
    blocks = -(-tokens // BLOCK_SIZE)
    assert world.p.metrics.sent_bytes == blocks * UNIT == world.d.metrics.received_bytes
    assert world.producer.status(sent.key) == SendStatus("granted", "D1")
    world.assert_nothing_is_left()


def test_with_both_buffers_tiny_the_landings_spill_over_in_order() -> None:
    world = World(d_blocks=40, store=StoreLimits(1.0, 3 * UNIT, 4 * UNIT))
    prompts = [world.prompt(11) for _ in range(4)]
    for sent in prompts:
        world.expect(sent)
        world.send(sent)
    world.settle()
    for sent in prompts:
        if (answer := world.admit(sent)) == Wait():
            world.settle()
            answer = world.admit(sent)
        world.take_over(sent, answer)
    assert world.d.metrics.landings == {"buffer": 1, "pool": 1, "deferred": 2}
    world.settle()
    world.assert_nothing_is_left()


def test_the_first_frame_leaves_before_the_last_layer_of_the_last_chunk_ran() -> None:
    world = World(settings=ONE_LAYER)
    sent = world.prompt(16, chunks=[8, 8])
    world.offer(sent)
    world.settle()
    seen: list[tuple[int, int]] = []

    def between(layer: int) -> None:
        world.settle()
        seen.append((layer, world.p.metrics.sent_bytes // LAYOUT.block_bytes))

    world.forward(sent, between=between)
    world.forward(sent, between=between)
    assert seen == [(0, 2), (1, 4), (2, 6), (0, 8), (1, 10), (2, 12)]


def test_layers_are_grouped_until_a_frame_is_worth_it() -> None:
    frames = FrameLimits(group_bytes=2 * 2 * LAYOUT.block_bytes)
    world = World(settings=KvSettings(frames=frames))
    sent = world.prompt(8)
    world.offer(sent)
    world.settle()
    sizes: list[int] = []

    def between(layer: int) -> None:
        world.settle()
        sizes.append(world.p.metrics.sent_bytes // LAYOUT.block_bytes)

    world.forward(sent, between=between)
    world.settle()
    assert [*sizes, world.p.metrics.sent_bytes // LAYOUT.block_bytes] == [0, 4, 6, 6]


def test_frames_that_were_ready_before_the_grant_wait_without_a_copy() -> None:
    world = World()
    sent = world.prompt(20, chunks=[9, 11])
    world.send(sent)
    # The request is over at P, D has not answered: the blocks are held by the transfer alone.
    assert world.p_pool.num_free == world.p_pool.num_blocks - 5
    assert world.producer.status(sent.key) == SendStatus("pending")
    world.expect(sent)
    world.settle()
    assert world.p_pool.num_free == world.p_pool.num_blocks
    world.take_over(sent, world.admit(sent))
    world.settle()
    world.assert_nothing_is_left()


@pytest.mark.parametrize("where", STORES)
def test_what_d_has_in_its_prefix_cache_is_not_sent(where: str) -> None:
    world = World(store=STORES[where])
    sent = world.prompt(18, chunks=[10, 8])
    have = world.d_pool.take(3)
    assert have is not None
    world.d_memory.fill(have, 999)
    world.d_pool.remember(sent.ids, have)
    world.d_pool.release(have)
    world.expect(sent)
    world.send(sent)
    world.settle()
    if where == "deferred":
        world.admit(sent)
        world.settle()
    answer = world.admit(sent)
    assert isinstance(answer, Landed)
    assert answer.skipped_tokens == 12
    assert list(answer.block_ids[:3]) == have
    # The cached blocks are shared: nothing was written into them.
    assert world.d_memory.holds(have, 999)
    assert world.p.metrics.sent_bytes == 2 * UNIT
    world.take_over(sent, answer)
    world.settle()
    world.assert_nothing_is_left()


@pytest.mark.parametrize("where", ["buffer", "pool"])
@pytest.mark.parametrize("cached", [0, 2])
def test_a_landing_beside_the_cache_is_adopted_behind_what_the_cache_has_by_then(
    where: str, cached: int
) -> None:
    world = World(store=STORES[where])
    sent = world.prompt(18, chunks=[10, 8])
    have = world.d_pool.take(3)
    assert have is not None
    world.d_memory.fill(have, 999)
    world.d_pool.remember(sent.ids[: cached * BLOCK_SIZE], have)
    world.expect(sent)
    world.send(sent)
    world.settle()
    # Another request has computed more of the prompt meanwhile.
    world.d_pool.remember(sent.ids[: 3 * BLOCK_SIZE], have)
    world.d_pool.release(have)
    answer = world.admit(sent)
    assert isinstance(answer, Landed)
    assert answer.skipped_tokens == 3 * BLOCK_SIZE
    assert list(answer.block_ids[:3]) == have
    assert world.d_memory.holds(have, 999)
    assert world.p.metrics.sent_bytes == (5 - cached) * UNIT
    world.take_over(sent, answer)
    world.settle()
    world.assert_nothing_is_left()


def test_a_fully_cached_prompt_still_gets_its_last_block() -> None:
    world = World()
    sent = world.prompt(16)
    have = world.d_pool.take(4)
    assert have is not None
    world.d_pool.remember(sent.ids, have)
    world.d_pool.release(have)
    world.expect(sent)
    world.send(sent)
    world.settle()
    answer = world.admit(sent)
    assert isinstance(answer, Landed)
    assert answer.skipped_tokens == 12


def test_the_server_finds_the_offered_prompt_before_the_engine_has_polled() -> None:
    world = World()
    sent = world.prompt(6)
    world.offer(sent)
    world.endpoints["P"].run_calls()
    world.dial()
    world.step_control("D")
    offered = world.consumer.offered(sent.key)
    assert offered is not None
    assert (offered.token_ids, offered.prompt_tokens) == (sent.ids, 6)


def test_kv_for_other_ids_is_refused() -> None:
    world = World()
    sent = world.prompt(12)
    world.expect(sent)
    world.send(sent)
    world.settle()
    other = (*sent.ids[:5], sent.ids[5] + 1, *sent.ids[6:])
    assert world.consumer.admit(sent.key, other, seats=1, now=world.clock.now) == NoKv("digest")
    world.settle()
    world.assert_nothing_is_left()
    assert world.d.metrics.not_received == {"digest": 1}


def test_a_request_may_know_more_ids_than_were_offered_but_not_fewer() -> None:
    world = World()
    more, fewer = world.prompt(12), world.prompt(12)
    for sent in (more, fewer):
        world.expect(sent)
        world.send(sent)
    world.settle()
    answer = world.consumer.admit(more.key, (*more.ids, 1, 2), seats=1, now=world.clock.now)
    world.take_over(more, answer)
    answer = world.consumer.admit(fewer.key, fewer.ids[:-1], seats=1, now=world.clock.now)
    assert answer == NoKv("digest")


def test_landed_is_given_once() -> None:
    world = World()
    sent = world.prompt(9)
    world.expect(sent)
    world.send(sent)
    world.settle()
    world.take_over(sent, world.admit(sent))
    assert isinstance(world.admit(sent), NoKv)


P_ADDRESS, OTHER_P = Address("127.0.0.1", 21001), Address("127.0.0.2", 21001)


def test_who_waits_for_an_offer_of_a_p_that_is_dead_computes_at_once() -> None:
    world = World()
    waiting, of_another, offered = (world.prompt(9) for _ in range(3))
    for sent, source in ((waiting, P_ADDRESS), (of_another, OTHER_P), (offered, P_ADDRESS)):
        world.consumer.expect(sent.key, wait_s=10, now=world.clock.now, source=source)
    world.send(offered)
    world.settle()
    world.clock.now += KvLimits().word_s
    world.consumer.peer_gone(P_ADDRESS)
    assert world.admit(waiting) == NoKv("peer_lost")
    assert world.admit(of_another) == Wait()
    world.take_over(offered, world.admit(offered))


def test_who_came_while_the_word_was_on_its_way_waits_a_little_for_the_next_p() -> None:
    world = World()
    begun_s = world.clock.now
    first, second = (world.prompt(9) for _ in range(2))
    for sent in (first, second):
        world.consumer.expect(sent.key, wait_s=10, now=world.clock.now, source=P_ADDRESS)
    for _ in range(2):  # two routers say it
        world.clock.now += KvLimits().word_s / 4
        world.consumer.peer_gone(P_ADDRESS)
        assert [world.admit(one) for one in (first, second)] == [Wait(), Wait()]
    world.send(first)
    world.settle()
    by_s = begun_s + 1.25 * KvLimits().word_s
    assert world.consumer.next_deadline() == by_s
    world.clock.now = by_s
    world.take_over(first, world.admit(first))
    assert world.admit(second) == NoKv("peer_lost")


def test_a_request_behind_the_word_waits_for_the_next_p_at_that_address() -> None:
    world = World()
    sent = world.prompt(9)
    world.consumer.peer_gone(P_ADDRESS)
    world.consumer.poll(world.clock.now)
    world.consumer.expect(sent.key, wait_s=10, now=world.clock.now, source=P_ADDRESS)
    assert world.admit(sent) == Wait()


def test_p_gives_up_at_once_what_waits_for_a_connection_with_a_dead_d() -> None:
    world = World()
    sent = world.prompt(12)
    world.offer(sent)
    world.endpoints["P"].run_calls()
    world.clock.now += KvLimits().word_s
    world.producer.peer_gone(D_ADDRESS)
    world.endpoints["P"].run_calls()
    world.producer.poll(world.clock.now)
    assert world.producer.status(sent.key).state == "none"
    world.finish_request(sent)
    assert not world.producer.has_work()


def test_what_waits_for_the_next_d_at_that_address_is_not_given_up_by_a_late_word() -> None:
    """Its request came while the word of the dead one was on its way: a D waits for this KV."""
    world = World()
    sent = world.prompt(12)
    world.offer(sent)
    world.endpoints["P"].run_calls()
    world.clock.now += KvLimits().word_s / 2
    world.producer.peer_gone(D_ADDRESS)
    world.endpoints["P"].run_calls()
    world.expect(sent, wait_s=10)
    while sent.chunks:
        world.forward(sent)
    world.finish_request(sent)
    world.settle()
    world.take_over(sent, world.admit(sent))


def test_a_late_offer_finds_that_its_request_has_gone_on() -> None:
    world = World()
    sent = world.prompt(9)
    world.expect(sent, wait_s=10)
    assert world.consumer.next_deadline() == world.clock.now + 10
    assert world.admit(sent) == Wait()
    world.pass_time(10)
    assert world.admit(sent) == NoKv("no_offer")
    world.settle()
    world.send(sent)
    world.settle()
    assert world.producer.status(sent.key).state == "none"
    world.assert_nothing_is_left()


def test_d_waits_from_the_later_of_the_requests_arrival_and_the_grant() -> None:
    world = World()
    sent = world.prompt(12, chunks=[6, 6])
    world.expect(sent, wait_s=10)
    world.pass_time(8)
    world.offer(sent)
    world.settle()
    world.forward(sent)
    world.settle()
    world.pass_time(9)
    assert world.admit(sent) == Wait()
    world.pass_time(1)
    assert world.admit(sent) == NoKv("timeout")
    world.settle()
    assert world.producer.is_settled(sent.key)
    world.finish_request(sent)
    world.assert_nothing_is_left()

"""P's and D's connectors over an in-memory network: cancels, deaths, deadlines and bounds."""

from __future__ import annotations

import pytest

from tests.kv.kvfakes import BLOCK_SIZE, LAYOUT
from tests.kv.kvsim import D_ADDRESS, World
from xpyd_core.errors import XpydError
from xpyd_core.request_id import Address
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.values import Landed, NoKv, Wait

UNIT = LAYOUT.bytes_per_block
STORES = {
    "direct": StoreLimits(),
    "buffer": StoreLimits(1.0, 100 * UNIT, 0),
    "pool": StoreLimits(1.0, 0, 100 * UNIT),
    "deferred": StoreLimits(1.0, 0, 0),
}
ONE_LAYER = KvSettings(frames=FrameLimits(group_bytes=1))


def test_late_kv_after_the_request_gave_up_is_refused_and_counted() -> None:
    world = World(settings=ONE_LAYER)
    sent = world.prompt(12)
    world.expect(sent, wait_s=1)
    world.offer(sent)
    world.settle()
    world.forward(sent)
    world.endpoints["P"].run_calls()
    # All frames are on the wire, D's CANCEL comes too late to stop them.
    while world.read_frame():
        pass
    world.clock.now += 1
    assert world.admit(sent) == NoKv("timeout")
    world.settle()
    assert world.d.metrics.refused_data == {"cancelled": 3}
    assert world.d.metrics.received_bytes == 0
    world.finish_request(sent)
    world.assert_nothing_is_left()


def test_cancel_before_the_grant_frees_both_sides() -> None:
    world = World()
    sent = world.prompt(12, chunks=[6, 6])
    world.offer(sent)
    world.forward(sent)
    world.producer.cancel(sent.key, "aborted")
    assert world.producer.status(sent.key).state == "none"
    world.finish_request(sent)
    world.settle()
    world.assert_nothing_is_left()


def test_cancel_after_done_takes_the_kv_back_until_it_is_adopted() -> None:
    world = World()
    unadopted, adopted = world.prompt(12), world.prompt(12)
    for sent in (unadopted, adopted):
        world.send(sent)
    world.settle()
    assert world.consumer.has_work()
    world.expect(adopted)
    world.take_over(adopted, world.admit(adopted))
    for sent in (unadopted, adopted):
        world.producer.cancel(sent.key, "ended_at_first_token")
        assert world.producer.status(sent.key).state == "none"
    world.settle()
    world.assert_nothing_is_left()
    world.expect(unadopted)
    assert world.admit(unadopted) == NoKv("cancelled")


def test_a_preempted_prompt_is_offered_again_under_the_next_epoch() -> None:
    world = World(settings=ONE_LAYER)
    sent = world.prompt(16, chunks=[8, 8])
    world.expect(sent)
    world.offer(sent)
    world.settle()
    world.forward(sent)
    world.endpoints["P"].run_calls()
    world.producer.cancel(sent.key, "preempted")
    assert not world.producer.is_settled(sent.key)
    with pytest.raises(XpydError, match="before it is settled"):
        world.offer(sent)
    world.settle()
    assert world.producer.is_settled(sent.key)
    # Other blocks, other content: the first epoch must leave no byte behind.
    world.finish_request(sent)
    again = world.prompt(16, chunks=[8, 8], uuid=sent.key.uuid)
    again.ids = sent.ids
    world.send(again)
    world.settle()
    world.take_over(again, world.admit(again))
    world.settle()
    world.assert_nothing_is_left()


@pytest.mark.parametrize("where", STORES)
def test_the_death_of_p_in_mid_transfer_frees_d_at_once(where: str) -> None:
    world = World(settings=ONE_LAYER, store=STORES[where])
    sent = world.prompt(16)
    world.expect(sent)
    world.offer(sent)
    world.settle()
    world.admit(sent)
    world.settle()
    world.forward(sent)
    world.endpoints["P"].run_calls()
    world.step_data()
    world.step_data()
    world.hang_up()
    assert world.admit(sent) == NoKv("peer_lost")
    world.finish_request(sent)
    world.settle()
    world.assert_nothing_is_left()


def test_kv_that_landed_survives_the_death_of_p() -> None:
    world = World()
    sent = world.prompt(16)
    world.send(sent)
    world.settle()
    world.hang_up()
    world.expect(sent)
    world.take_over(sent, world.admit(sent))
    world.assert_nothing_is_left()


def test_a_request_that_comes_after_its_kv_was_lost_does_not_wait() -> None:
    world = World()
    sent = world.prompt(16, chunks=[8, 8])
    world.offer(sent)
    world.settle()
    world.hang_up()
    world.consumer.poll(world.clock.now)
    assert world.consumer.offered(sent.key) is None
    world.expect(sent)
    assert world.admit(sent) == NoKv("peer_lost")


@pytest.mark.parametrize("landed", [False, True])
def test_forgetting_frees_what_was_reserved(landed: bool) -> None:
    world = World(settings=ONE_LAYER)
    sent = world.prompt(16)
    world.expect(sent)
    world.offer(sent)
    world.settle()
    world.forward(sent)
    if landed:
        world.settle()
    world.consumer.forget(sent.key)
    world.finish_request(sent)
    world.settle()
    world.assert_nothing_is_left()
    assert world.consumer.next_deadline() is None


def test_release_frees_all_prompts_of_a_uuid_and_refuses_more_for_a_minute() -> None:
    world = World()
    uuid = "c" * 32
    prompts = [world.prompt(9, index=index, uuid=uuid) for index in range(3)]
    world.send(prompts[0])
    world.offer(prompts[1])
    world.settle()
    for _ in range(2):
        world.consumer.release(uuid, world.clock.now)
    world.settle()
    assert world.d_pool.num_free == world.d_pool.num_blocks
    assert world.producer.status(prompts[1].key).state == "none"
    world.expect(prompts[0])
    assert world.admit(prompts[0]) == NoKv("released")
    world.send(prompts[2])
    world.settle()
    assert world.producer.status(prompts[2].key).state == "none"
    world.finish_request(prompts[1])
    world.assert_nothing_is_left()
    world.pass_time(61)
    late = world.prompt(9, index=3, uuid=uuid)
    world.send(late)
    world.settle()
    assert world.producer.status(late.key).state == "granted"


def test_orphans_end_with_their_lease_and_awaited_kv_does_not() -> None:
    world = World()
    orphan, awaited = world.prompt(9), world.prompt(9)
    world.expect(awaited)
    for sent in (orphan, awaited):
        world.send(sent)
    world.settle()
    world.pass_time(29)
    assert world.d_pool.num_free == world.d_pool.num_blocks - 6
    world.pass_time(2)
    assert world.d_pool.num_free == world.d_pool.num_blocks - 3
    world.pass_time(300)
    world.take_over(awaited, world.admit(awaited))
    world.settle()
    world.assert_nothing_is_left()


def test_a_deferred_offer_stays_while_its_request_waits_and_ends_without_one() -> None:
    world = World(store=STORES["deferred"])
    orphan, awaited = world.prompt(9), world.prompt(9)
    running = world.d_pool.take(64)
    assert running is not None
    world.expect(awaited)
    for sent in (orphan, awaited):
        world.send(sent)
    world.settle()
    world.pass_time(200)
    assert world.producer.status(orphan.key).state == "none"
    assert world.producer.status(awaited.key).state == "pending"
    assert world.admit(awaited) == Wait()
    world.d_pool.release(running)
    assert world.admit(awaited) == Wait()
    world.settle()
    world.take_over(awaited, world.admit(awaited))
    world.settle()
    world.assert_nothing_is_left()


def test_p_gives_up_when_d_is_silent() -> None:
    world = World()
    sent = world.prompt(9)
    world.send(sent)
    world.endpoints["P"].run_calls()
    world.dial()
    world.pass_time(5, settle=False)
    assert world.producer.status(sent.key).state == "pending"
    assert not world.producer.is_settled(sent.key)
    # CANCEL unanswered as well: the connection is closed, which proves that nothing is read.
    world.pass_time(5, settle=False)
    assert world.producer.is_settled(sent.key)
    assert world.link is None
    assert world.p_pool.num_free == world.p_pool.num_blocks


def test_an_engine_in_a_long_step_does_not_cost_the_offer() -> None:
    world = World()
    sent = world.prompt(9)
    world.expect(sent)
    world.send(sent)
    world.endpoints["P"].run_calls()
    world.dial()
    world.step_control("D")
    for _ in range(20):
        # D's engine does not poll; its I/O thread runs.
        world.clock.now += 1
        for name in ("P", "D"):
            world.endpoints[name].tick()
            while world.step_control(name):
                pass
    world.settle()
    world.take_over(sent, world.admit(sent))


@pytest.mark.parametrize(
    ("address", "reason"),
    [(Address("example.org", 21001), "address"), (Address("127.0.0.1", 80), "address")],
)
def test_an_address_that_may_not_be_dialled_fails_the_transfer_only(
    address: Address, reason: str
) -> None:
    world = World()
    sent = world.prompt(9)
    world.offer(sent, address=address)
    assert world.producer.status(sent.key).state == "none"
    assert not world.dialling
    world.forward(sent)
    world.finish_request(sent)
    world.assert_nothing_is_left()


def test_a_peer_that_cannot_be_reached_fails_the_transfer_only() -> None:
    world = World()
    sent = world.prompt(9)
    world.offer(sent)
    world.endpoints["P"].run_calls()
    world.dial(ok=False)
    world.forward(sent)
    world.finish_request(sent)
    world.settle()
    world.assert_nothing_is_left()
    assert world.producer.status(sent.key).state == "none"


def test_a_dial_that_never_ends_is_given_up() -> None:
    world = World()
    sent = world.prompt(9)
    world.offer(sent)
    world.endpoints["P"].run_calls()
    world.pass_time(5, settle=False)
    assert world.producer.is_settled(sent.key)


def test_blocks_held_for_slow_transfers_are_at_most_half_of_all() -> None:
    world = World(p_blocks=20, store=STORES["deferred"])
    prompts = [world.prompt(3 * BLOCK_SIZE) for _ in range(5)]
    for sent in prompts:
        world.send(sent)
    world.settle()
    assert [world.producer.status(s.key).state for s in prompts] == ["none"] * 2 + ["pending"] * 3
    assert world.p_pool.num_free == 20 - 9
    assert world.p.metrics.pressure_cancels == 2
    for sent in prompts[2:]:
        world.expect(sent)
        world.admit(sent)
        world.settle()
        world.take_over(sent, world.admit(sent))
    world.settle()
    world.assert_nothing_is_left()


def test_a_prompt_in_prefill_may_be_longer_than_half_of_all_blocks() -> None:
    world = World(p_blocks=20)
    sent = world.prompt(16 * BLOCK_SIZE, chunks=[12 * BLOCK_SIZE, 4 * BLOCK_SIZE])
    world.expect(sent)
    world.offer(sent)
    world.settle()
    world.forward(sent)
    world.producer.poll(world.clock.now)
    assert world.p.metrics.pressure_cancels == 0
    assert world.producer.status(sent.key).state == "granted"


def test_an_executor_that_tells_no_layers_delays_the_kv_and_loses_none() -> None:
    world = World(settings=ONE_LAYER)
    sent = world.prompt(8)
    world.expect(sent)
    world.offer(sent)
    world.p_memory.fill(sent.blocks, sent.seed)
    world.producer.stage(sent.key, sent.blocks, 8)
    world.producer.step_done()
    world.settle()
    world.take_over(sent, world.admit(sent))


def test_a_deferred_request_without_room_pins_nothing_while_it_waits() -> None:
    world = World(d_blocks=6, store=STORES["deferred"])
    sent = world.prompt(5 * BLOCK_SIZE)
    have = world.d_pool.take(3)
    assert have is not None
    world.d_pool.remember(sent.ids, have)
    world.d_pool.release(have[:2])
    running = world.d_pool.take(2)
    assert running is not None
    world.expect(sent)
    world.send(sent)
    world.settle()
    assert world.admit(sent) == Wait()
    assert world.d_pool.num_free == 6 - 2 - 1


def test_a_failed_step_cancels_the_prompts_in_it_and_no_other() -> None:
    world = World()
    good, bad = world.prompt(8), world.prompt(8)
    for sent in (good, bad):
        world.offer(sent)
    world.settle()
    world.forward(good)
    world.producer.stage(bad.key, bad.blocks, 8)
    world.producer.layer_done(0)
    world.producer.step_done(failed=True)
    world.settle()
    assert world.producer.status(good.key).state == "granted"
    assert world.producer.status(bad.key).state == "none"


def test_a_draining_d_refuses_offers_and_finishes_what_it_granted() -> None:
    world = World()
    before, after = world.prompt(9), world.prompt(9)
    world.expect(before)
    world.offer(before)
    world.settle()
    world.d.drain()
    world.settle()
    world.send(after)
    world.forward(before)
    world.finish_request(before)
    world.settle()
    assert world.producer.status(after.key).state == "none"
    world.take_over(before, world.admit(before))
    world.settle()
    world.assert_nothing_is_left()


def test_pinned_prefixes_give_way_when_a_landed_request_needs_blocks() -> None:
    world = World(d_blocks=12, store=StoreLimits(1.0, 0, 40 * UNIT))
    prompts = [world.prompt(5 * BLOCK_SIZE) for _ in range(3)]
    for sent in prompts:
        have = world.d_pool.take(4)
        assert have is not None
        world.d_memory.fill(have, sent.seed)
        world.d_pool.remember(sent.ids, have)
        world.d_pool.release(have)
        world.expect(sent)
        world.send(sent)
        world.settle()
    # All 12 blocks are pinned as prefixes, each request needs one more.
    assert world.d_pool.num_free == 0
    answers = [world.admit(sent) for sent in prompts]
    assert isinstance(answers[0], Landed)
    world.take_over(prompts[0], answers[0])
    for sent, answer in zip(prompts[1:], answers[1:], strict=True):
        if isinstance(answer, Wait):
            answer = world.admit(sent)
        if isinstance(answer, Landed):
            world.d_pool.release(answer.block_ids)
        else:
            assert answer == NoKv("prefix_evicted")
    world.settle()
    world.assert_nothing_is_left()


def test_an_offer_longer_than_ds_whole_cache_is_refused() -> None:
    world = World(d_blocks=4)
    sent = world.prompt(5 * BLOCK_SIZE)
    world.send(sent)
    world.settle()
    assert world.producer.status(sent.key).state == "none"
    world.expect(sent)
    assert world.consumer.offered(sent.key) is None
    assert world.admit(sent) == NoKv("too_long")
    world.settle()
    world.assert_nothing_is_left()


def test_n_prompts_of_one_request_are_apart() -> None:
    world = World()
    prompts = [world.prompt(5 + i, index=i, uuid="d" * 32) for i in range(4)]
    for sent in prompts:
        world.expect(sent)
        world.send(sent)
    world.settle()
    for sent in reversed(prompts):
        world.take_over(sent, world.admit(sent))
    world.settle()
    world.assert_nothing_is_left()
    assert D_ADDRESS not in world.dialling


def test_the_open_transfers_at_d_are_bounded() -> None:
    world = World(settings=KvSettings(limits=KvLimits(max_transfers=2)))
    prompts = [world.prompt(5) for _ in range(3)]
    for sent in prompts:
        world.offer(sent)
    world.settle()
    states = [world.producer.status(sent.key).state for sent in prompts]
    assert states == ["granted", "granted", "none"]

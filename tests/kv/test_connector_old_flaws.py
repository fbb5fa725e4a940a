"""What was wrong with the connector that this one replaces, flaw by flaw, as tests.

Each was seen in the connector that vLLM shipped until 0.22. R1 and R2 (the pool's size and its
waste) are with the buddy allocator, R7, R9, R10 and R13 (waits without end, junk, closing) with the
sessions' deadlines and the transport.
"""

from __future__ import annotations

from tests.kv.kvfakes import BLOCK_SIZE, LAYOUT
from tests.kv.kvsim import World
from xpyd_kv.connector.api import NoKv
from xpyd_kv.connector.build import KvSettings
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.store.landing_store import StoreLimits

UNIT = LAYOUT.bytes_per_block
BUFFER = StoreLimits(1.0, 6 * UNIT, 0)


def used(world: World) -> int:
    assert world.d.store is not None
    return world.d.store.figures().buffer_used_bytes


def test_r3_the_buffer_is_charged_until_its_bytes_are_gone_and_not_until_decoding_ends() -> None:
    world = World(store=BUFFER)
    sent = world.prompt(3 * BLOCK_SIZE)
    world.expect(sent)
    world.send(sent)
    world.settle()
    assert used(world) == 3 * UNIT
    answer = world.admit(sent)
    # The request decodes from here on; its landing is free for the next.
    assert used(world) == 0
    world.take_over(sent, answer)


def test_r3b_asking_twice_does_not_make_the_budget_negative() -> None:
    world = World(store=BUFFER)
    sent = world.prompt(3 * BLOCK_SIZE)
    world.expect(sent)
    world.send(sent)
    world.settle()
    world.take_over(sent, world.admit(sent))
    # Preempted, it comes again: it computes, and the accounts do not change.
    assert isinstance(world.admit(sent), NoKv)
    world.expect(sent)
    world.pass_time(11)
    assert isinstance(world.admit(sent), NoKv)
    assert used(world) == 0


def test_r4_an_aborted_request_gives_its_budget_back() -> None:
    world = World(store=BUFFER)
    for _ in range(5):
        sent = world.prompt(6 * BLOCK_SIZE)
        world.expect(sent)
        world.send(sent)
        world.settle()
        assert used(world) == 6 * UNIT
        world.consumer.forget(sent.key)
        assert used(world) == 0


def test_r5_kv_that_comes_after_the_end_of_its_request_does_not_stay() -> None:
    world = World(store=BUFFER)
    sent = world.prompt(6 * BLOCK_SIZE)
    world.expect(sent)
    world.consumer.forget(sent.key)
    world.settle()
    world.send(sent)
    world.settle()
    assert used(world) == 0
    world.assert_nothing_is_left()


def test_r6_nothing_grows_with_the_number_of_transfers() -> None:
    world = World(settings=KvSettings(store=BUFFER))
    for _ in range(100):
        sent = world.prompt(5)
        world.expect(sent)
        world.send(sent)
        world.settle()
        world.take_over(sent, world.admit(sent))
    world.settle()
    world.pass_time(61)
    parts = [
        world.producer,
        world.consumer,
        *(e.handler.session for e in world.endpoints.values()),  # type: ignore[attr-defined]
        world.endpoints["D"].handler.session._over,  # type: ignore[attr-defined]
        world.endpoints["D"].handler.session._arrivals,  # type: ignore[attr-defined]
    ]
    sizes = {
        f"{type(part).__name__}.{name}": len(value)
        for part in parts
        for name, value in vars(part).items()
        if hasattr(value, "__len__") and name not in ("_peers", "_metrics")
    }
    assert not any(sizes.values()), sizes
    world.assert_nothing_is_left()


def test_r8_a_full_buffer_defers_and_nothing_dies() -> None:
    world = World(store=BUFFER)
    prompts = [world.prompt(4 * BLOCK_SIZE) for _ in range(4)]
    for sent in prompts:
        world.expect(sent)
        world.send(sent)
    world.settle()
    states = [world.producer.status(sent.key).state for sent in prompts]
    assert states == ["granted", "pending", "pending", "pending"]
    for sent in prompts:
        world.admit(sent)
        world.settle()
    # The first one's landing was adopted by its admit above.
    for sent in prompts[1:]:
        world.take_over(sent, world.admit(sent))


def test_r11_kv_that_did_not_come_whole_is_not_decoded_on() -> None:
    world = World(settings=KvSettings(frames=FrameLimits(group_bytes=1)))
    sent = world.prompt(8)
    world.expect(sent)
    world.send(sent)
    for _ in range(60):
        # The second layer is broken on its way, also when it is sent once more.
        link = world.link
        broken = link is not None and bool(link.queued) and not link.on_wire
        if broken and not link.landing:
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


def test_r12_blocks_are_held_until_the_last_byte_is_away() -> None:
    world = World(settings=KvSettings(frames=FrameLimits(group_bytes=1)))
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
    assert world.p_pool.num_free == world.p_pool.num_blocks

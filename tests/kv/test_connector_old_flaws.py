"""What was wrong with the connector that this one replaces, flaw by flaw, as tests.

Each was seen in the connector that vLLM shipped until 0.22. R1 to R6 are in
test_old_flaws_memory.py; R7, R9, R10 and R13 (waits without end, junk, closing) are with the
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

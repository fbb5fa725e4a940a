"""P and D with blocks of different sizes: the connectors, step by step and over real sockets."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.kvfakes import BLOCK_SIZE, LAYOUT, with_block_size
from tests.kv.kvsim import World
from tests.kv.pods import PATIENCE_S, admitted, key_of, pod, send, until
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.transport.host.shared_memory import SharedMemory
from xpyd_kv.values import Landed

UNIT = LAYOUT.bytes_per_block
STORES = [
    StoreLimits(),
    StoreLimits(1.0, 100 * UNIT, 0),
    # Pieces of several lengths.
    StoreLimits(1.0, 0, 61 * UNIT),
    StoreLimits(1.0, 0, 0),
]
RATIOS = [(1, 2), (1, 4), (2, 1), (4, 1)]


def _world(ratio: tuple[int, int], settings: KvSettings | None = None, **options: object) -> World:
    p, d = ratio
    return World(settings=settings, d_layout=with_block_size(BLOCK_SIZE * d // p), **options)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    ratio=st.sampled_from(RATIOS),
    store=st.sampled_from(STORES),
    tokens=st.integers(1, 70),
    data=st.data(),
)
def test_d_gets_every_token_of_every_head_and_only_what_it_lacks(
    ratio: tuple[int, int], store: StoreLimits, tokens: int, data: st.DataObject
) -> None:
    frames = FrameLimits(
        data.draw(st.sampled_from([1, 200, 10**6])), data.draw(st.sampled_from([64, 300, 10**6]))
    )
    world = _world(ratio, KvSettings(frames=frames), store=store, d_blocks=100)
    size = world.d_layout.block_size
    cached = BLOCK_SIZE * data.draw(st.integers(0, (tokens - 1) // BLOCK_SIZE))
    cuts = data.draw(st.sets(st.integers(cached + 1, tokens), max_size=4)) | {tokens}
    edges = [cached, *sorted(cuts)]
    chunks = [b - a for a, b in itertools.pairwise(edges)]
    sent = world.prompt(tokens, chunks=chunks, cached_tokens=cached)
    have = data.draw(st.integers(0, tokens // size))
    blocks = world.d_pool.take(have)
    assert blocks is not None
    world.d_memory.fill(blocks, sent.seed)
    world.d_pool.remember(sent.ids, blocks)
    world.d_pool.release(blocks)
    world.expect(sent)
    world.send(sent)
    world.settle()
    answer = world.admit(sent)
    if not isinstance(answer, Landed):
        world.settle()
        answer = world.admit(sent)
    assert isinstance(answer, Landed)
    # Both sides' blocks begin where the rest begins, and at least one token is sent.
    step = max(size, BLOCK_SIZE)
    skipped = min(have * size, tokens - 1) // step * step
    sent_blocks = -(-tokens // BLOCK_SIZE) - skipped // BLOCK_SIZE
    assert world.d.metrics.skipped_tokens == skipped
    if {"buffer", "pool"} & {*world.d.metrics.landings}:
        # What landed beside the cache is copied behind all that D has.
        skipped = min(have * size, tokens - 1) // size * size
    assert answer.skipped_tokens == skipped
    assert world.p.metrics.sent_bytes == sent_blocks * UNIT
    assert world.d.metrics.received_bytes == sent_blocks * UNIT
    world.take_over(sent, answer)
    world.settle()
    world.assert_nothing_is_left()


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_broken_frame_is_sent_again_into_the_same_places(ratio: tuple[int, int]) -> None:
    world = _world(ratio, KvSettings(frames=FrameLimits(group_bytes=1)))
    sent = world.prompt(18)
    world.expect(sent)
    world.offer(sent)
    world.settle()
    world.forward(sent)
    world.finish_request(sent)
    world.endpoints["P"].run_calls()
    assert world.read_frame(corrupt=True)
    world.settle()
    assert world.d.metrics.checksum_mismatches == 1
    world.take_over(sent, world.admit(sent))
    world.settle()
    world.assert_nothing_is_left()


@pytest.mark.parametrize("transport", ["tcp", "uds", "shm"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_bytes_arrive_over_every_transport(
    tmp_path: Path, ratio: tuple[int, int], transport: str
) -> None:
    p_size, d_size = (BLOCK_SIZE * part for part in ratio)
    frames = KvSettings(frames=FrameLimits(group_bytes=300, max_frame_bytes=700))
    shared = SharedMemory(64 * 4 * UNIT) if transport == "shm" else None
    options = {"transports": (transport,), "socket_dir": tmp_path}
    with (
        pod("P", frames, layout=with_block_size(p_size), shared=shared, **options) as p,
        pod("D", frames, layout=with_block_size(d_size), **options) as d,
    ):
        for seed, tokens in enumerate([1, 16, 37, 50], start=1):
            ids = tuple(range(seed * 100, seed * 100 + tokens))
            assert d.kv.consumer is not None
            d.kv.consumer.expect(key_of(seed), wait_s=PATIENCE_S, now=time.monotonic())
            send(p, d.address, ids, seed, chunk=10)
            answer = admitted(d, key_of(seed), ids)
            assert isinstance(answer, Landed)
            assert d.memory.holds(answer.block_ids, seed, tokens=tokens)
            d.pool.release(answer.block_ids)
        until(lambda: p.kv.producer.poll(time.monotonic()) or not p.kv.producer.has_work())
        until(lambda: d.kv.consumer.poll(time.monotonic()) or not d.kv.consumer.has_work())
        assert (p.pool.num_free, d.pool.num_free) == (64, 64)
        assert d.kv.metrics.received_bytes == p.kv.metrics.sent_bytes > 0
        assert p.endpoint.counters.opened == {transport: 1}
        # Over shm nothing goes through the socket, however the sizes differ.
        shared_bytes = d.kv.metrics.received_bytes if transport == "shm" else 0
        assert d.endpoint.counters.shared_bytes == shared_bytes
    if shared is not None:
        shared.close()

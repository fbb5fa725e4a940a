"""The articles' numbers 9 to 12 and 17: buffers, overflow, whom a mode holds up, an engine's calls.

9 P needs a buffer in GET only, D in all modes; 10 buffer, then host pool, and lost KV is computed
again (among real processes, with their tokens: tests/e2e/test_burst.py); 11 the buffer is a tenth
of the memory; 12 PUT holds P's step and the others do not (how
fast each is: docs/benchmarks/kv.md); 17 what happens between a request's start and its first token,
on P and on D.
"""

from __future__ import annotations

import argparse

import pytest

from tests.kv.kvfakes import BLOCK_SIZE, LAYOUT
from tests.kv.kvsim import Sent, World
from tests.worker.engine_driver import EngineDriver, make_request, prompt_of
from tests.worker.engine_fakes import BLOCK
from xpyd_core.pod_env import PodEnv
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.values import NoKv, Wait
from xpyd_kv.wire.messages import Mode
from xpyd_worker.command import configure, read_config
from xpyd_worker.engine.request import ReceiveFrom, SendTo

UNIT = LAYOUT.bytes_per_block
KEY = TransferKey("a" * 32, 0)
PEER = Address("127.0.0.1", 21001)


MODES = pytest.mark.parametrize("mode", ["put_async", "put", "get"])


@MODES
def test_d_has_a_buffer_in_every_mode_and_p_in_get_only(mode: Mode) -> None:
    """Article fact 9."""
    world = World(settings=KvSettings(mode=mode))
    assert world.d.store is not None
    assert (world.p.store is not None) == (mode == "get")


@MODES
def test_what_waits_for_d_is_in_the_buffer_of_the_side_that_needs_one(mode: Mode) -> None:
    """Two prompts that together are more than P's cache may hold, and no request on D.

    Article fact 9.
    """
    store = StoreLimits(direct_free=1.0, buffer_bytes=12 * UNIT, pool_bytes=0)
    world = World(p_blocks=16, settings=KvSettings(mode=mode), store=store)
    for _ in range(2):
        sent = world.prompt(6 * BLOCK_SIZE)
        world.send(sent)
        world.settle()
    waits = {
        name: side.store.metrics().buffer_used_bytes // UNIT if side.store is not None else 0
        for name, side in (("P", world.p), ("D", world.d))
    }
    assert waits == ({"P": 6, "D": 0} if mode == "get" else {"P": 0, "D": 12})
    assert world.p.metrics.pressure_cancels == 0


def _sent(world: World, blocks: int) -> Sent:
    sent = world.prompt(blocks * BLOCK_SIZE)
    world.expect(sent)
    world.send(sent)
    world.settle()
    return sent


def test_kv_goes_to_the_buffer_first_and_to_the_host_pool_when_that_is_full() -> None:
    """Article fact 10."""
    world = World(store=StoreLimits(direct_free=1.0, buffer_bytes=6 * UNIT, pool_bytes=4 * UNIT))
    assert world.d.store is not None
    used: list[tuple[int, int]] = []
    prompts: list[Sent] = []
    for _ in range(5):
        prompts.append(_sent(world, 2))
        figures = world.d.store.metrics()
        used.append((figures.buffer_used_bytes // UNIT, figures.pool_used_bytes // UNIT))
    assert used == [(2, 0), (4, 0), (6, 0), (6, 2), (6, 4)]
    over = _sent(world, 2)
    assert world.d.metrics.landings == {"buffer": 3, "pool": 2}
    # None of it changes a byte, also of what had to wait at P.
    for sent in prompts:
        world.take_over(sent, world.admit(sent))
    assert world.admit(over) == Wait()
    world.settle()
    world.take_over(over, world.admit(over))
    world.settle()
    world.assert_nothing_is_left()


@pytest.mark.parametrize("buffered", [True, False], ids=["overflowed", "direct"])
def test_kv_that_is_lost_is_computed_again_by_d(buffered: bool) -> None:
    """Article fact 10."""
    store = StoreLimits(1.0, 0, 100 * UNIT) if buffered else StoreLimits()
    world = World(store=store)
    sent = world.prompt(2 * BLOCK_SIZE)
    world.expect(sent)
    world.offer(sent)
    world.settle()
    world.forward(sent, between=lambda layer: world.hang_up("lost") if layer == 0 else None)
    world.finish_request(sent)
    world.settle()
    assert world.admit(sent) == NoKv("peer_lost")
    world.settle()
    world.assert_nothing_is_left()


def test_the_buffer_is_a_tenth_of_the_memory_and_8e9_of_80_gb() -> None:
    """Article fact 11."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    configure(parser)
    flags = ["--model", "m", "--kv-cache-memory", "80e9"]
    assert read_config(parser.parse_args(flags), PodEnv()).buffer_bytes(80 * 10**9) == 8 * 10**9
    five = [*flags, "--kv-buffer-size", "5%"]
    assert read_config(parser.parse_args(five), PodEnv()).buffer_bytes(80 * 10**9) == 4 * 10**9


@MODES
def test_put_holds_ps_step_until_d_has_its_kv_and_the_others_hold_nothing(mode: Mode) -> None:
    """Article fact 12."""
    world = World(settings=KvSettings(mode=mode))
    sent = world.prompt(8)
    world.expect(sent)
    world.offer(sent)
    world.settle()
    world.forward(sent)
    assert (world.producer.held_until(world.clock.now) is not None) == (mode == "put")
    world.settle()
    assert world.producer.held_until(world.clock.now) is None
    world.finish_request(sent)


# --- 17


def test_p_looks_into_its_own_cache_then_offers_then_computes_and_waits_for_nothing() -> None:
    """Local prefix cache, OFFER (P never asks for remote KV), blocks, layers, end of the step.

    Article fact 17.
    """
    driver = EngineDriver(sends=True)
    assert driver.producer is not None
    driver.submit(make_request("warm", prompt_of(2 * BLOCK + 1), max_tokens=1))
    driver.run()
    forwards: list[tuple[int, int]] = []
    producer, layers = driver.producer, len(driver.producer.layers)
    driver.executor.during = lambda step: forwards.append(
        (step.sequences[0].start, len(producer.layers) - layers)
    )
    prompt = prompt_of(2 * BLOCK + 3)
    transfer = SendTo(KEY, PEER, len(prompt), True)
    driver.submit(make_request("a", prompt, transfer=transfer, max_tokens=1))
    driver.run()
    assert [call[0] for call in producer.calls] == ["offer", "cached", "stage"]
    # The step began behind the local hit, and no layer was reported before it.
    assert forwards == [(2 * BLOCK, 0)]
    assert producer.layers[layers:] == [0, 1]
    assert driver.consumer is None


def test_d_asks_until_the_kv_stands_and_loads_only_in_the_first_step() -> None:
    """What is cached here is not asked for; the rest is adopted once, before the first forward.

    Article fact 17.
    """
    driver = EngineDriver(receives=True)
    assert driver.consumer is not None
    driver.submit(make_request("warm", prompt_of(BLOCK + 1), max_tokens=1))
    driver.run()
    prompt = prompt_of(3 * BLOCK + 2)
    driver.consumer.arrive(KEY, prompt, "direct")
    assert driver.consumer.arrivals[KEY].skipped == BLOCK
    transfer = ReceiveFrom(KEY, 5.0)
    driver.submit(make_request("a", prompt, transfer=transfer, max_tokens=4, ignore_eos=True))
    before = len(driver.executor.steps)
    driver.turns(3)
    assert len(driver.executor.steps) == before, "computed before its KV stood"
    driver.consumer.land(KEY)
    driver.run()
    starts = [step.sequences[0].start for step in driver.executor.steps[before:]]
    assert starts == list(range(len(prompt) - 1, len(prompt) + 3))
    # Adopted once: afterwards the transfer is not known any more, and nobody asks for it.
    assert driver.consumer.calls == [("expect", KEY)]
    assert driver.consumer.arrivals == {}
    driver.assert_as_alone("a")


@pytest.mark.parametrize("role", ["p", "d"])
def test_each_role_has_its_own_half_of_the_connector_and_only_that(role: str) -> None:
    """Article fact 17."""
    half = getattr(World(), role)
    assert (half.producer is None, half.consumer is None) == (role == "d", role == "p")

"""The store of a D whose cache is on a GPU: device buffer, pinned pool, copies ended by events."""

from __future__ import annotations

import random

import pytest

from tests.kv.device_fake import DeviceFault, FakeDevice, Machine
from tests.kv.kvfakes import LAYOUT, FakePool, expected_bytes
from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.build import default_store
from xpyd_kv.memory.api import Landing
from xpyd_kv.memory.device import DeviceError, DeviceView
from xpyd_kv.memory.paged import DevicePagedMemory
from xpyd_kv.memory.store import StoreLimits

KEY = TransferKey("ab" * 16, 0)
UNIT = LAYOUT.bytes_per_block
LAYERS = len(LAYOUT.layers)


class World:
    def __init__(self, machine: Machine, *, blocks=20, buffer=0, pool=0, direct_free=1.0) -> None:
        self.machine = machine
        self.gpu: FakeDevice = machine.device("d")
        self.region = self.gpu.allocate(blocks * UNIT)
        size = blocks * LAYOUT.block_bytes
        layers = [self.region[layer * size : (layer + 1) * size] for layer in range(LAYERS)]
        self.memory = DevicePagedMemory(self.gpu, layers, layout=LAYOUT, region=self.region)
        self.pool = FakePool(blocks)
        limits = StoreLimits(direct_free, buffer * UNIT, pool * UNIT)
        self.store = default_store(limits, self.memory, self.pool)

    def write(self, landing: Landing, seed: int) -> None:
        """As if it had landed, in two ranges of blocks."""
        cut = landing.num_blocks // 2
        for layer in range(LAYERS):
            for first, end in ((0, cut), (cut, landing.num_blocks)):
                body = b"".join(expected_bytes(seed, layer, index) for index in range(first, end))
                for view in landing.views(layer, layer + 1, first, end):
                    part, body = body[: len(view)], body[len(view) :]
                    if isinstance(view, DeviceView):
                        self.gpu.fill(view, part)
                    else:
                        view[:] = part
                assert not body

    def holds(self, block_ids: list[int], seed: int) -> bool:
        return all(
            self.gpu.read(self.memory.block_view(layer, block))
            == expected_bytes(seed, layer, index)
            for layer in range(LAYERS)
            for index, block in enumerate(block_ids)
        )

    def adopted(self, landing: Landing) -> list[int]:
        for _ in range(100):
            blocks = landing.adopt()
            if blocks is not None:
                return blocks
        raise AssertionError("never adopted")

    def close(self) -> None:
        self.store.close(1.0)
        self.gpu.free(self.region)
        self.machine.check()


@pytest.fixture
def machine():
    return Machine()


def test_a_landing_of_own_blocks_or_of_the_buffer_is_device_memory_and_of_the_pool_pinned(machine):
    world = World(machine, buffer=3, pool=2, direct_free=0.8)
    kinds = {}
    while (landing := world.store.take(KEY, 2)) is not None:
        views = landing.views(0, LAYERS, 0, 2)
        kinds.setdefault(landing.kind, {type(view) for view in views})
        landing_size = sum(map(len, views))
        assert landing_size == 2 * UNIT
    assert kinds == {"direct": {DeviceView}, "buffer": {DeviceView}, "pool": {memoryview}}
    metrics = world.store.metrics()
    assert (metrics.buffer_bytes, metrics.buffer_used_bytes) == (3 * UNIT, 2 * UNIT)
    assert (metrics.pool_bytes, metrics.pool_used_bytes) == (2 * UNIT, 2 * UNIT)


@pytest.mark.parametrize("kind", ["buffer", "pool"])
def test_adopted_blocks_are_the_callers_when_the_copy_has_run(machine, kind):
    machine.latest = 0
    world = World(machine, **{kind: 7})
    landing = world.store.take(KEY, 7)
    assert landing.kind == kind
    world.write(landing, 5)
    machine.is_stalled = True
    assert landing.adopt() is None
    assert landing.is_copying
    assert landing.adopt() is None
    assert world.pool.num_free == 13
    with pytest.raises(DeviceFault):
        world.gpu.read(world.memory.block_view(0, 0))
    machine.faults.clear()
    machine.is_stalled = False
    blocks = landing.adopt()
    assert not landing.is_copying
    assert world.holds(blocks, 5)
    metrics = world.store.metrics()
    assert (metrics.leases, metrics.buffer_used_bytes, metrics.pool_used_bytes) == (0, 0, 0)
    world.close()


def test_one_launch_moves_a_landing_of_many_pieces(machine):
    world = World(machine, pool=16)
    singles = [world.store.take(KEY, 1) for _ in range(16)]
    for landing in singles[::2]:
        landing.free()
    landing = world.store.take(KEY, 8)
    world.write(landing, 9)
    assert world.holds(world.adopted(landing), 9)
    assert [s.copies for s in machine.streams.values() if not s.is_compute] == [1]


def test_blocks_that_the_model_still_reads_are_not_copied_into_before_it_is_through(machine):
    world = World(machine, buffer=2)
    landing = world.store.take(KEY, 2)
    world.write(landing, 3)
    # The engine gave these blocks back while its last step was still under way.
    world.gpu.compute(world.memory.block_view(0, 0), b"\1" * LAYOUT.block_bytes)
    assert world.holds(world.adopted(landing), 3)
    world.close()


@pytest.mark.parametrize("kind", ["buffer", "pool"])
@pytest.mark.parametrize(("seed", "is_equal"), [(3, True), (4, False)])
def test_a_landing_is_compared_with_what_the_model_still_writes(machine, kind, seed, is_equal):
    world = World(machine, **{kind: 2})
    landing = world.store.take(KEY, 2)
    world.write(landing, 3)
    for layer in range(LAYERS):
        for index, block in enumerate((5, 9)):
            view = world.memory.block_view(layer, block)
            world.gpu.compute(view, expected_bytes(seed, layer, index))
    found = landing.compare((5, 9), 2 * LAYOUT.block_size)
    assert found.is_done()
    assert (found.worst.deviation == 0.0) == is_equal
    landing.free()
    world.close()


def test_a_landing_freed_during_its_copy_gives_back_when_the_copy_has_run(machine):
    machine.latest = 0
    world = World(machine, buffer=4)
    landing = world.store.take(KEY, 3)
    world.write(landing, 1)
    machine.is_stalled = True
    assert landing.adopt() is None
    landing.free()
    world.store.poll()
    assert (world.store.metrics().leases, world.pool.num_free) == (1, 17)
    assert world.store.take(KEY, 3) is None
    machine.is_stalled = False
    world.store.poll()
    assert (world.store.metrics().leases, world.pool.num_free) == (0, 20)
    assert world.store.metrics().buffer_used_bytes == 0
    world.close()


def test_what_a_device_that_hangs_still_copies_from_is_not_freed(machine):
    world = World(machine, buffer=4)
    landing = world.store.take(KEY, 3)
    assert landing.adopt() is None or machine.latest == 0
    machine.is_stalled = True
    world.store.close(0.0)
    assert machine.faults == []


def test_a_device_that_fails_says_so_and_frees_nothing(machine):
    world = World(machine, buffer=4)
    landing = world.store.take(KEY, 3)
    machine.is_stalled = True
    landing.adopt()
    machine.broken = "gone"
    with pytest.raises(DeviceError):
        landing.adopt()
    landing.free()
    world.store.poll()
    assert world.store.metrics().leases == 1


def test_accounting_returns_to_zero_after_any_mix_of_ends(machine):
    rng = random.Random(4)
    world = World(machine, blocks=30, buffer=9, pool=13, direct_free=0.5)
    held: list[tuple[Landing, int]] = []
    for step in range(300):
        move = rng.random()
        if move < 0.5:
            landing = world.store.take(KEY, rng.randint(1, 6))
            if landing is not None:
                world.write(landing, step)
                held.append((landing, step))
        elif move < 0.6 and held:
            held.pop(rng.randrange(len(held)))[0].free()
        elif held:
            index = rng.randrange(len(held))
            landing, seed = held[index]
            blocks = landing.adopt()
            if blocks is not None:
                del held[index]
                assert world.holds(blocks, seed)
                world.pool.release(blocks)
        world.store.poll()
    for landing, _ in held:
        landing.free()
    world.store.close(1.0)
    metrics = world.store.metrics()
    assert (metrics.leases, metrics.buffer_used_bytes, metrics.pool_used_bytes) == (0, 0, 0)
    assert world.pool.num_free == 30
    world.gpu.free(world.region)
    machine.check()

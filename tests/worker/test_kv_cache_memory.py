"""The paged cache in memory that other processes may read."""

from pathlib import Path

import pytest
import torch

from xpyd_core.errors import UserError
from xpyd_kv.memory.paged import PagedMemory
from xpyd_kv.spans import Span
from xpyd_kv.transport.host.shared_memory import SharedMemory
from xpyd_worker.config import WorkerConfig
from xpyd_worker.kernels.api import KvShape
from xpyd_worker.load.engine import load
from xpyd_worker.runner.kv_cache import KvCache
from xpyd_worker.system import resident_bytes

MODEL = Path(__file__).parents[2] / "examples/demo-model"
SHAPE = KvShape(2, 4, 16, torch.bfloat16)
BLOCKS = 5


@pytest.fixture
def memory():
    memory = SharedMemory(SHAPE.block_bytes * BLOCKS * 3 + 100)
    yield memory
    memory.close()


def flat(memory):
    return torch.frombuffer(memory.buffer, dtype=torch.uint8)


def test_blocks_stand_in_the_given_memory_one_layer_behind_the_other(memory):
    cache = KvCache(SHAPE, num_layers=3, num_blocks=BLOCKS, memory=flat(memory))
    paged = PagedMemory(cache.layers, layers=(0, 1, 2))
    size = SHAPE.block_bytes
    for layer in range(3):
        for block in range(BLOCKS):
            (run,) = memory.runs_of([paged.block_view(layer, block)], at_most=1) or [None]
            assert run == Span((layer * BLOCKS + block) * size, size)


def test_what_the_model_writes_is_what_a_peer_reads(memory):
    cache = KvCache(SHAPE, num_layers=3, num_blocks=BLOCKS, memory=flat(memory))
    cache.layers[1][2] = 1.0
    cache.copy_blocks([(2, 4)])
    start = (BLOCKS + 4) * SHAPE.block_bytes
    assert memory.buffer[start : start + SHAPE.block_bytes] == b"\x80\x3f" * (
        SHAPE.block_bytes // 2
    )
    assert not any(memory.buffer[:start][: BLOCKS * SHAPE.block_bytes])


def test_without_it_nothing_is_shared(memory):
    cache = KvCache(SHAPE, num_layers=1, num_blocks=BLOCKS)
    paged = PagedMemory(cache.layers, layers=(0,))
    assert memory.runs_of([paged.block_view(0, 0)], at_most=1) is None


def test_blocks_that_were_never_written_take_no_memory():
    before = resident_bytes()
    size = 1 << 30
    cache = KvCache(SHAPE, num_layers=1, num_blocks=size // SHAPE.block_bytes)
    cache.layers[0][0] = 1.0
    assert float(cache.layers[0][-1].abs().max()) == 0.0
    assert resident_bytes() - before < size // 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_bytes": 2**62}, "^--kv-cache-memory: the system does not give .* TiB"),
        ({"kv_cache_bytes": 2**80}, "^--kv-cache-memory: the system does not give .* TiB"),
        (
            {"role": "Prefill", "kv_socket_dir": Path("/nowhere"), "kv_cache_bytes": 2**62},
            "^--kv-cache-memory: .* TiB: .* cannot be shared",
        ),
        (
            {"role": "Decode", "kv_host_pool_bytes": 2**62},
            "^--kv-host-pool-size: the system does not give .* TiB",
        ),
    ],
)
def test_more_memory_than_the_system_gives_is_refused_by_the_flags_name(options, message):
    config = WorkerConfig(**{"model": str(MODEL), "kv_cache_bytes": 1 << 24, **options})
    with pytest.raises(UserError, match=message):
        load(config, deliver=lambda _: None, keys=(b"k" * 32,), incarnation="i", make_store=None)

"""KV between ranks on GPUs, from any layout to any layout and to and from ranks on CPUs: every byte
where D's ranks look, over every transport, and nothing that events do not order."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.kv.nixl_kit import end_openers, library, needs_nixl
from tests.kv.rank_pods import PATIENCE_S, address_of, until
from tests.kv.test_ranks_pairs import IDS, LAYOUTS, engines, is_back, key_of, move
from tests.worker.rank_pair import Pair
from xpyd_kv.plan.transfers import pairs_between
from xpyd_kv.transport.settings import TRANSPORTS
from xpyd_kv.wire.messages import MODES, Mode
from xpyd_worker.config import MIB

layouts = pytest.mark.parametrize("name", LAYOUTS)


@layouts
@pytest.mark.parametrize("on_gpu", ["PD", "P", "D"])
def test_every_byte_arrives_for_any_pair_of_layouts(
    tmp_path: Path, name: str, on_gpu: str
) -> None:
    pair = Pair(tmp_path, on_gpu=on_gpu)
    with pair.of(*engines(name)) as (p, d):
        for number in range(1, 3):
            landed = move(p, d, number=number, cached=4 if number == 2 else 0)
            assert landed.tokens == len(IDS)
            assert d.holds(landed.block_ids, IDS[0], len(IDS))
            d.pool.release(landed.block_ids)
        assert is_back(p.pool)
        assert is_back(d.pool)
        assert p.kv.metrics.transfers == d.kv.metrics.transfers == {"done": 2}
        assert set(d.kv.metrics.transfer_s) == {"tcp"}


# Layers, heads and replicas divided, each in one of them.
SOME = ["tp2-pp2", "tp1-tp4 of 2 heads", "tp2xpp2-tp1", "tp4-tp2"]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("transport", ["uds", "cuda_ipc", "nccl"])
def test_each_pair_of_ranks_takes_the_way_that_was_asked_for(
    tmp_path: Path, name: str, transport: str
) -> None:
    pair = Pair(tmp_path, one_host=True)
    with pair.of(*engines(name), kv_transports=(transport,)) as (p, d):
        for number in range(1, 3):
            landed = move(p, d, number=number)
            assert d.holds(landed.block_ids, IDS[0], len(IDS))
        assert set(d.kv.metrics.transfer_s) == {transport}
        # Between all ranks that have something for each other, one connection and communicator.
        pairs = pairs_between(p.engine, d.engine, 0)
        ends = [one.part.endpoint for one in d.rank_kvs] or [d.kv.endpoint]
        opened = sum(end.counters.opened[transport] for end in ends)
        assert opened == len(pairs) + (not d.is_ranked)
    assert pair.world.made == (2 * len(pairs) if transport == "nccl" else 0)


@pytest.mark.parametrize("name", SOME)
def test_by_themselves_ranks_on_one_host_take_cuda_ipc(tmp_path: Path, name: str) -> None:
    pair = Pair(tmp_path, one_host=True)
    with pair.of(*engines(name), kv_transports=TRANSPORTS) as (p, d):
        landed = move(p, d)
        assert d.holds(landed.block_ids, IDS[0], len(IDS))
        assert set(d.kv.metrics.transfer_s) == {"cuda_ipc"}


@pytest.mark.parametrize("on_gpu", ["P", "D"])
def test_ranks_on_gpus_and_ranks_on_cpus_of_one_host_take_the_sockets(
    tmp_path: Path, on_gpu: str
) -> None:
    pair = Pair(tmp_path, on_gpu=on_gpu, one_host=True)
    with pair.of(*engines("tp2-pp2"), kv_transports=TRANSPORTS) as (p, d):
        landed = move(p, d)
        assert d.holds(landed.block_ids, IDS[0], len(IDS))
        assert set(d.kv.metrics.transfer_s) == {"uds"}


@needs_nixl
@pytest.mark.parametrize("name", ["tp2-pp2", "tp1-tp4 of 2 heads", "tp2xpp2-tp1"])
def test_nixl_reads_from_the_caches_of_ranks_on_cpus(tmp_path: Path, name: str) -> None:
    assert library() is not None
    pair = Pair(tmp_path, on_gpu="")
    with pair.of(*engines(name), kv_transports=("nixl",)) as (p, d):
        landed = move(p, d)
        assert d.holds(landed.block_ids, IDS[0], len(IDS))
        assert set(d.kv.metrics.transfer_s) == {"nixl"}
    end_openers(PATIENCE_S)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tp2-pp2", "tp1-tp4 of 2 heads", "tp2xpp2-tp1"])
def test_all_modes(tmp_path: Path, name: str, mode: Mode) -> None:
    pair = Pair(tmp_path, one_host=True)
    with pair.of(*engines(name), kv_mode=mode) as (p, d):
        landed = move(p, d)
        assert d.holds(landed.block_ids, IDS[0], len(IDS))
        d.pool.release(landed.block_ids)
        assert is_back(p.pool)
        assert is_back(d.pool)


@pytest.mark.parametrize("name", ["tp2-pp2", "tp4 of 2 heads-tp1", "tp1-pp3"])
@pytest.mark.parametrize("transport", ["tcp", "cuda_ipc", "nccl"])
@pytest.mark.parametrize("where", ["buffer", "pool", "deferred"])
def test_every_landing(tmp_path: Path, name: str, transport: str, where: str) -> None:
    sizes = {
        "kv_buffer_bytes": MIB if where == "buffer" else 0,
        "kv_host_pool_bytes": MIB if where == "pool" else 0,
    }
    pair = Pair(tmp_path, one_host=True)
    fields = {"kv_direct_free": 1.0, "kv_transports": (transport,), **sizes}
    with pair.of(*engines(name), **fields) as (p, d):
        landed = move(p, d)
        assert d.holds(landed.block_ids, IDS[0], len(IDS))
        assert d.kv.metrics.landings == {where: 1}
        d.pool.release(landed.block_ids)
        assert is_back(d.pool)
        figures = d.kv.store.figures()
        assert (figures.leases, figures.buffer_used_bytes, figures.pool_used_bytes) == (0, 0, 0)


@pytest.mark.parametrize("name", ["tp2-pp2", "tp1-tp4 of 2 heads"])
def test_smaller_blocks_of_p_go_into_larger_ones_of_a_gpu(tmp_path: Path, name: str) -> None:
    with Pair(tmp_path).of(*engines(name, (2, 4))) as (p, d):
        landed = move(p, d)
        assert d.holds(landed.block_ids, IDS[0], len(IDS))


@pytest.mark.parametrize("name", ["tp2-pp2", "tp2xpp2-tp1"])
def test_larger_blocks_of_p_are_refused_before_a_gpu_makes_room(tmp_path: Path, name: str) -> None:
    with Pair(tmp_path).of(*engines(name, (8, 4))) as (p, d):
        key = key_of(1)
        d.kv.consumer.expect(key, wait_s=20.0, now=time.monotonic())
        blocks = p.compute(key, IDS, address_of(d.kv.endpoint))
        until(lambda: p.kv.producer.is_settled(key), "the refusal")
        assert p.kv.producer.status(key).state == "none"
        p.pool.release(blocks)
        assert d.kv.metrics.landings == {}
        assert is_back(p.pool)
        assert is_back(d.pool)

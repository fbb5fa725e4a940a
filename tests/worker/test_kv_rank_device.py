"""KV between ranks on GPUs, from any layout to any layout and to and from ranks on CPUs: every byte
where D's ranks look, over every transport, and nothing that events do not order."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kv.device_fake import FakeDevice, Machine
from tests.kv.nixl_kit import end_openers, library, needs_nixl
from tests.kv.pods import PATIENCE_S, until
from tests.kv.rank_pods import address_of, layout_of
from tests.kv.test_ranks_pairs import IDS, LAYOUTS, engines, is_back, key_of, move
from tests.worker.rank_pair import Pair
from xpyd_core.errors import UserError
from xpyd_kv.memory.device import DeviceView
from xpyd_kv.memory.paged import DevicePagedMemory
from xpyd_kv.memory.space import OwnSpace
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.transfers import pairs_between
from xpyd_kv.ranks import handler as compute_gate
from xpyd_kv.session.probing import ProbeResult
from xpyd_kv.transport.settings import TRANSPORTS
from xpyd_kv.values import NoKv
from xpyd_kv.wire.messages import MODES, Mode
from xpyd_worker.config import MIB
from xpyd_worker.kv.cache import kv_overhead
from xpyd_worker.kv.rank import share_of

# Layers, heads and replicas divided, each in one of them.
SOME = ["tp2-pp2", "tp1-tp4 of 2 heads", "tp2xpp2-tp1", "tp4-tp2"]


@pytest.mark.parametrize(
    ("name", "on_gpu"),
    [*((name, "PD") for name in LAYOUTS), *itertools.product(SOME, "PD")],
)
def test_every_byte_arrives_for_any_pair_of_layouts(tmp_path: Path, name: str, on_gpu: str) -> None:
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


@pytest.mark.parametrize("name", ["tp2-pp2", "tp1-pp3", "tp2xpp2-tp1"])
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_a_self_test_between_engines_goes_through_the_socket(
    tmp_path: Path, name: str, transport: str
) -> None:
    pair = Pair(tmp_path, one_host=True)
    with pair.of(*engines(name), kv_transports=(transport,)) as (p, d):
        results: list[ProbeResult] = []
        p.kv.probe(address_of(d.kv.endpoint), results.append)
        result = until(lambda: results, "PROBED")[0]
        assert (result.ok, result.transport) == (True, "uds")
        # Each pair's, too, whatever moves its DATA.
        assert {(one.result.ok, one.result.transport) for one in result.pairs} == {(True, "uds")}


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


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        ("tp2-pp2", "tcp"),
        ("tp2-pp2", "cuda_ipc"),
        ("tp2-pp2", "nccl"),
        ("tp4 of 2 heads-tp1", "nccl"),
        ("tp1-pp3", "tcp"),
    ],
)
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
        metrics = d.kv.store.metrics()
        assert (metrics.leases, metrics.buffer_used_bytes, metrics.pool_used_bytes) == (0, 0, 0)


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


# --- what is not there yet is not sent, what fails is told


def d_until(d: Any, condition: Callable[[], Any], what: str) -> None:
    """D's engine looks after offers meanwhile, and starts no request."""
    until(lambda: d.kv.consumer.poll(time.monotonic()) or condition(), what)


def test_nothing_leaves_a_rank_that_its_gpu_has_not_computed(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    with pair.of(*engines("tp2-pp2")) as (p, d):
        machine = pair.machines["P"]
        # Nobody finds any of the model's work done who only asks.
        machine.is_slow = True
        key = key_of(1)
        d.kv.consumer.expect(key, wait_s=20.0, now=time.monotonic())
        blocks = p.compute(key, IDS, address_of(d.kv.endpoint), chunk=9)
        d_until(d, lambda: p.kv.metrics.grant_wait.count, "GRANT")
        for one in p.rank_kvs:
            turn_of(one.part.endpoint)
        assert [one.part.metrics.sent_bytes for one in p.rank_kvs] == [0, 0]
        assert d.admit(key, IDS) is None
        machine.is_slow = False
        landed = until(lambda: d.admit(key, IDS), "KV")
        assert d.holds(landed.block_ids, IDS[0], len(IDS))
        until(lambda: p.kv.producer.is_settled(key), "the end at P")
        p.pool.release(blocks)


@pytest.mark.parametrize("end", ["computed", "failed"])
def test_only_a_step_that_did_not_fail_completes_a_prompt(tmp_path: Path, end: str) -> None:
    with Pair(tmp_path).of(*engines("tp2-pp2")) as (p, d):
        key, producer = key_of(1), p.kv.producer
        d.kv.consumer.expect(key, wait_s=20.0, now=time.monotonic())
        blocks = p.pool.take(6)
        now = time.monotonic()
        address = address_of(d.kv.endpoint)
        producer.offer(key, address, IDS, prompt_tokens=len(IDS), salt=b"", now=now)
        producer.stage(key, blocks, len(IDS))
        message = producer.step_chunks()
        for rank, one in enumerate(p.rank_kvs):
            # The second rank's step fails in its last layer.
            fails = rank == 1 and end == "failed"
            one.sender.begin_step(message)
            for layer in range(3 - fails):
                p._fill_layer(rank, layer, blocks, IDS[0], range(6))
                one.sender.layer_done(layer)
            one.sender.step_done(failed=fails)
        if end == "failed":
            of_p, of_d = ([one.part.metrics for one in side.rank_kvs] for side in (p, d))
            # The first one's part is whole, and so both ranks of D have half of their heads.
            d_until(d, lambda: all(one.transfers["done"] for one in of_d), "the first rank's")
            d_until(d, lambda: 3 * of_p[1].sent_bytes >= 2 * of_p[0].sent_bytes, "two layers")
            turn_of(p.rank_kvs[1].part.endpoint)
            # What the engine does when a rank goes with such a step.
            producer.step_done(failed=True)
            until(lambda: producer.is_settled(key), "the end at P")
            assert isinstance(until(lambda: d.admit(key, IDS), "its end at D"), NoKv)
            # CANCEL came behind all that the second rank has sent: no COMMIT, no third layer.
            assert [one.transfers["done"] for one in of_d] == [1, 1]
            assert 3 * of_p[1].sent_bytes == 2 * of_p[0].sent_bytes
        else:
            producer.step_done()
            landed = until(lambda: d.admit(key, IDS), "KV")
            assert d.holds(landed.block_ids, IDS[0], len(IDS))
            until(lambda: producer.is_settled(key), "the end at P")
        p.pool.release(blocks)


def turn_of(endpoint: Any) -> None:
    """Its I/O thread has looked at all that was there."""
    for _ in range(3):
        turned = threading.Event()
        endpoint.call(turned.set)
        assert turned.wait(PATIENCE_S)


@pytest.mark.parametrize("role", ["P", "D"])
def test_a_rank_whose_gpu_fails_gives_up_and_says_so(tmp_path: Path, role: str) -> None:
    pair = Pair(tmp_path)
    with pair.of(*engines("tp2-pp2"), kv_direct_free=1.0, kv_buffer_bytes=MIB) as (p, d):
        side = {"P": p, "D": d}[role]
        machine = pair.machines[role]
        key = key_of(1)
        d.kv.consumer.expect(key, wait_s=20.0, now=time.monotonic())
        if role == "P":
            machine.broken = "unspecified launch failure"
        blocks = p.compute(key, IDS, address_of(d.kv.endpoint), chunk=9)
        if role == "D":
            # It fails in the copy of what has landed in the buffer into the cache.
            d_until(d, lambda: d.kv.metrics.transfers["done"], "the landing")
            machine.broken = "unspecified launch failure"
            assert d.admit(key, IDS) is None
        reason = until(lambda: side.given_up, "the end of a rank")[0]
        assert reason == "the GPU has failed: unspecified launch failure"
        # The instance ends now; nobody was told that KV is there.
        assert d.admit(key, IDS) is None
        machine.is_lost = True
        machine.broken = ""
        p.kv.producer.cancel(key, "aborted")
        d.kv.consumer.forget(key)
        until(lambda: p.kv.producer.is_settled(key), "the end at P")
        p.pool.release(blocks)


def test_a_copy_that_does_not_end_ends_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_gate, "LIMIT_S", 0.05)
    pair = Pair(tmp_path)
    with pair.of(*engines("pp2-pp2 cut elsewhere"), kv_direct_free=1.0) as (p, d):
        key = key_of(1)
        d.kv.consumer.expect(key, wait_s=20.0, now=time.monotonic())
        blocks = p.compute(key, IDS, address_of(d.kv.endpoint))
        d_until(d, lambda: d.kv.metrics.transfers["done"], "the landing")
        machine = pair.machines["D"]
        machine.is_stalled = machine.is_lost = True
        assert d.admit(key, IDS) is None
        reasons = until(lambda: len(d.given_up) == 2 and d.given_up, "the end of both")
        assert set(reasons) == {"the GPU does not copy KV within the cache's memory"}
        assert d.admit(key, IDS) is None
        machine.is_stalled = False
        p.pool.release(blocks)


# --- memory


def test_a_rank_keeps_its_share_of_buffer_and_pool_and_gives_all_back(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    sizes = {"kv_buffer_bytes": 10_000, "kv_host_pool_bytes": 20_000, "kv_mode": "get"}
    # Of 3 layers the first stage has one.
    with pair.of(*engines("pp2-pp2 cut elsewhere"), **sizes) as (_, d):
        block = d.engine.block_bytes
        units = 10_000 // (3 * block), 20_000 // (3 * block)
        assert [[len(r) for r in one.part.space.regions] for one in d.rank_kvs] == [
            [units[0] * layers * block, units[1] * layers * block] for layers in (1, 2)
        ]
        for one in d.rank_kvs:
            buffer, pool = one.part.space.regions
            assert isinstance(buffer, DeviceView)
            assert isinstance(pool, memoryview)
            needed = kv_overhead(d.config, share=share_of(d.config, one_stage(d, one), 3))
            assert (
                len(buffer) <= needed.size_bytes == math.ceil(10_000 * len(one_stage(d, one)) / 3)
            )
    # The machines have missed nothing.


def one_stage(side: Any, one: Any) -> Any:
    return side.engine.stages[side.rank_kvs.index(one)]


@pytest.mark.parametrize(
    ("field", "flag"),
    [("kv_buffer_bytes", "--kv-buffer-size"), ("kv_host_pool_bytes", "--kv-host-pool-size")],
)
def test_memory_that_a_rank_does_not_get_is_refused_by_its_flag(field: str, flag: str) -> None:
    class Full(FakeDevice):
        def allocate(self, size_bytes: int) -> DeviceView:
            raise UserError("out of memory")

        def allocate_pinned(self, size_bytes: int) -> memoryview:
            raise UserError("out of memory")

    size = "buffer_bytes" if "buffer" in field else "pool_bytes"
    engine = engines("tp2-pp2")[0]
    layout = layout_of(engine, 0)
    region = DeviceView(0, 0, layout.block_bytes)
    device = Full(Machine(), "d", "GPU-0", 0)
    memory = DevicePagedMemory(device, [region] * 3, layout=layout, region=region)
    limits = StoreLimits(**{size: 2**20})
    with pytest.raises(UserError, match=rf"{flag}: .* \(out of memory\)"):
        OwnSpace(memory, limits, book_unit_bytes=engine.held_bytes_per_block)

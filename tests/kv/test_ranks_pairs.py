"""KV from any P layout to any D layout, over real endpoints: every byte where D's ranks look."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.kv.pods import until
from tests.kv.rank_pods import Side, address_of, engine_of, sides
from xpyd_core.request_id import TransferKey
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvSettings
from xpyd_kv.values import Landed
from xpyd_kv.wire.messages import MODES, Mode

ONE, TWO, UNEVEN, THREE = ((0, 1, 2),), ((0, 1), (2,)), ((0,), (1, 2)), ((0,), (1,), (2,))
# (TP, stages) of P and of D, and the model's KV heads.
LAYOUTS = {
    "1-1": ((1, ONE), (1, ONE), 2),
    "tp2-pp2": ((2, ONE), (1, TWO), 2),
    "tp2xpp2-tp1": ((2, TWO), (1, ONE), 2),
    "tp1-tp4 of 2 heads": ((1, ONE), (4, ONE), 2),
    "tp4 of 2 heads-tp1": ((4, ONE), (1, ONE), 2),
    "tp1-pp3": ((1, ONE), (1, THREE), 2),
    "pp3-tp1": ((1, THREE), (1, ONE), 2),
    "tp2-tp2": ((2, ONE), (2, ONE), 4),
    "tp4-tp2": ((4, ONE), (2, ONE), 4),
    "tp2-tp4": ((2, ONE), (4, ONE), 4),
    "pp2-pp2 cut elsewhere": ((1, TWO), (1, UNEVEN), 2),
    "tp2xpp2-tp2xpp3": ((2, UNEVEN), (2, THREE), 2),
    "tp4 of 2 heads-tp2xpp2": ((4, ONE), (2, TWO), 2),
}
layouts = pytest.mark.parametrize("name", LAYOUTS)
IDS = tuple(range(10, 33))
TINY = KvSettings(frames=FrameLimits(group_bytes=1, max_frame_bytes=200))


def key_of(number: int) -> TransferKey:
    return TransferKey(f"{number:032x}", 0)


def engines(name: str, sizes: tuple[int, int] = (4, 4)):
    (p_tp, p_stages), (d_tp, d_stages), heads = LAYOUTS[name]
    return (
        engine_of(p_tp, p_stages, kv_heads=heads, block_size=sizes[0]),
        engine_of(d_tp, d_stages, kv_heads=heads, block_size=sizes[1]),
    )


def move(p: Side, d: Side, *, number: int = 1, ids=IDS, chunk: int = 9, cached: int = 0) -> Landed:
    """One prompt all the way; both pools as they were but for what the requests hold."""
    key = key_of(number)
    assert d.kv.consumer is not None
    assert p.kv.producer is not None
    d.kv.consumer.expect(key, wait_s=20.0, now=time.monotonic())
    blocks = p.compute(key, ids, address_of(d.kv.endpoint), chunk=chunk, cached=cached)
    landed = until(lambda: d.admit(key, ids), "KV")
    assert isinstance(landed, Landed), landed
    until(lambda: p.kv.producer.is_settled(key), "the end at P")
    assert p.kv.producer.status(key).state == "granted"
    p.pool.release(blocks)
    return landed


def is_back(pool, *, held: int = 0) -> bool:
    return pool.num_free == pool.num_blocks - held


@layouts
def test_every_byte_arrives_for_any_pair_of_layouts(name: str) -> None:
    with sides(*engines(name), settings=TINY) as (p, d):
        for number in range(1, 4):
            landed = move(p, d, number=number, cached=4 if number == 2 else 0)
            assert landed.tokens == len(IDS)
            assert d.holds(landed.block_ids, IDS[0], len(IDS))
            d.pool.release(landed.block_ids)
        assert is_back(p.pool)
        assert is_back(d.pool)
        assert p.kv.metrics.transfers == {"done": 3}
        assert d.kv.metrics.transfers == {"done": 3}
        # With replicas on D each layer and head goes there more than once.
        once = 3 * 6 * d.engine.replicas * p.engine.bytes_per_block
        until(lambda: p.kv.metrics.sent_bytes == once, "P's metrics")
        until(lambda: d.kv.metrics.received_bytes == once, "D's metrics")


@layouts
@pytest.mark.parametrize("sizes", [(2, 4), (8, 4)])
def test_block_sizes_may_differ_between_ranks(name: str, sizes: tuple[int, int]) -> None:
    with sides(*engines(name, sizes), settings=TINY) as (p, d):
        landed = move(p, d)
        assert d.holds(landed.block_ids, IDS[0], len(IDS))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tp2-pp2", "tp1-tp4 of 2 heads", "tp2xpp2-tp1"])
def test_all_modes(name: str, mode: Mode) -> None:
    with sides(*engines(name), settings=KvSettings(mode=mode)) as (p, d):
        landed = move(p, d)
        assert d.holds(landed.block_ids, IDS[0], len(IDS))
        d.pool.release(landed.block_ids)
        assert is_back(p.pool)
        assert is_back(d.pool)


@pytest.mark.parametrize(
    ("name", "apart"),
    [("1-1", "P"), ("1-1", "D"), ("1-1", "PD"), ("tp1-pp3", "P"), ("pp3-tp1", "D")],
)
@pytest.mark.parametrize("mode", MODES)
def test_an_only_rank_that_is_another_process_moves_the_kv(
    name: str, apart: str, mode: Mode
) -> None:
    options = {
        role: {"is_ranked": letter in apart} for role, letter in (("of_p", "P"), ("of_d", "D"))
    }
    with sides(*engines(name), settings=KvSettings(mode=mode), **options) as (p, d):
        for number in (1, 2):
            landed = move(p, d, number=number, cached=4)
            assert d.holds(landed.block_ids, IDS[0], len(IDS))
            d.pool.release(landed.block_ids)
        assert is_back(p.pool)
        assert is_back(d.pool)


@pytest.mark.parametrize("name", ["tp2-pp2", "tp4 of 2 heads-tp1", "tp1-pp3"])
@pytest.mark.parametrize(
    ("where", "store"),
    [
        ("buffer", StoreLimits(1.0, 1 << 20, 0)),
        ("pool", StoreLimits(1.0, 0, 1 << 20)),
        ("deferred", StoreLimits(1.0, 0, 0)),
    ],
)
def test_every_landing(name: str, where: str, store: StoreLimits) -> None:
    with sides(*engines(name), settings=KvSettings(store=store)) as (p, d):
        landed = move(p, d)
        assert d.holds(landed.block_ids, IDS[0], len(IDS))
        assert d.kv.metrics.landings == {where: 1}
        d.pool.release(landed.block_ids)
        assert d.kv.store is not None
        d.kv.consumer.poll(time.monotonic())
        assert is_back(d.pool)
        metrics = d.kv.store.metrics()
        assert (metrics.leases, metrics.buffer_used_bytes, metrics.pool_used_bytes) == (0, 0, 0)


@pytest.mark.parametrize("name", ["tp2-pp2", "tp1-tp4 of 2 heads"])
@pytest.mark.parametrize("sizes", [(4, 4), (8, 4)])
def test_what_came_into_ds_cache_after_the_landing_is_not_copied_there_again(
    name: str, sizes: tuple[int, int]
) -> None:
    store = StoreLimits(1.0, 0, 1 << 20)
    with sides(*engines(name, sizes), settings=KvSettings(store=store)) as (p, d):
        first = move(p, d)
        assert d.kv.consumer is not None
        d.kv.consumer.expect(key_of(2), wait_s=20.0, now=time.monotonic())
        p.pool.release(p.compute(key_of(2), IDS, address_of(d.kv.endpoint)))
        poll, done = d.kv.consumer.poll, {"done": 2}
        until(lambda: poll(time.monotonic()) or d.kv.metrics.transfers == done, "a landing")
        # Three blocks, which end within a block of eight.
        d.pool.remember(IDS[:12], first.block_ids)
        landed = until(lambda: d.admit(key_of(2), IDS), "KV")
        assert isinstance(landed, Landed)
        assert landed.skipped_tokens == 12
        assert landed.block_ids[:3] == first.block_ids[:3]
        assert d.holds(landed.block_ids, IDS[0], len(IDS))
        d.pool.release(first.block_ids)
        d.pool.release(landed.block_ids)
        d.kv.consumer.poll(time.monotonic())
        assert is_back(d.pool)


@pytest.mark.parametrize("name", ["tp2-pp2", "tp2xpp2-tp1", "tp1-tp4 of 2 heads"])
@pytest.mark.parametrize("sizes", [(4, 4), (2, 4), (8, 4)])
def test_what_d_has_cached_is_not_sent(name: str, sizes: tuple[int, int]) -> None:
    with sides(*engines(name, sizes), settings=TINY) as (p, d):
        first = move(p, d)
        d.pool.remember(IDS, first.block_ids)
        sent = p.kv.metrics.sent_bytes
        again = move(p, d, number=2)
        step = max(sizes)
        assert again.skipped_tokens == (len(IDS) - 1) // step * step
        assert d.holds(again.block_ids, IDS[0], len(IDS))
        until(lambda: 0 < p.kv.metrics.sent_bytes - sent < sent, "metrics of what was left")


@pytest.mark.parametrize("name", ["tp2-pp2", "tp1-tp4 of 2 heads", "tp4-tp2", "pp3-tp1"])
@pytest.mark.parametrize("transport", ["uds", "shm"])
def test_each_pair_takes_the_way_that_it_has(name: str, transport: str, tmp_path: Path) -> None:
    options = {"transports": (transport,), "folder": tmp_path / "kv"}
    with sides(*engines(name), settings=TINY, **options) as (p, d):
        landed = move(p, d)
        assert d.holds(landed.block_ids, IDS[0], len(IDS))
        assert set(d.kv.metrics.transfer_s) == {transport}

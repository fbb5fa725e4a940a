"""P's and D's connectors over real loopback connections, each with its I/O thread."""

from __future__ import annotations

import time

import pytest

from tests.kv.kvfakes import LAYOUT, FakeKvMemory, FakePool
from tests.kv.pods import PATIENCE_S, admitted, pods, send, until
from xpyd_core.request_id import TransferKey
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.transport.endpoint import TcpEndpoint
from xpyd_kv.values import Landed, NoKv

UNIT = LAYOUT.bytes_per_block


@pytest.mark.parametrize(
    ("where", "store"),
    [
        ("direct", StoreLimits()),
        ("buffer", StoreLimits(1.0, 60 * UNIT, 0)),
        ("pool", StoreLimits(1.0, 0, 60 * UNIT)),
        ("deferred", StoreLimits(1.0, 0, 0)),
    ],
)
def test_the_bytes_arrive_over_tcp_in_every_landing(where: str, store: StoreLimits) -> None:
    with pods(KvSettings(frames=FrameLimits(group_bytes=1), store=store)) as (p, d):
        assert d.kv.consumer is not None
        assert p.kv.producer is not None
        expected = []
        for seed, tokens in enumerate([1, 16, 37, 50], start=1):
            ids = tuple(range(seed * 100, seed * 100 + tokens))
            key = TransferKey(f"{seed:032x}", 0)
            d.kv.consumer.expect(key, wait_s=PATIENCE_S, now=time.monotonic())
            send(p, d.address, ids, seed, chunk=10)
            expected.append((key, ids, seed))
        for key, ids, seed in expected:
            answer = admitted(d, key, ids)
            assert isinstance(answer, Landed)
            assert d.memory.holds(answer.block_ids, seed)
            d.pool.release(answer.block_ids)
        assert d.kv.metrics.landings == {where: 4}
        until(lambda: p.kv.producer.poll(time.monotonic()) or not p.kv.producer.has_work())
        until(lambda: d.kv.consumer.poll(time.monotonic()) or not d.kv.consumer.has_work())
        assert p.kv.producer.status(expected[0][0]).decode_incarnation == "incarnation-D"
        assert (p.pool.num_free, d.pool.num_free) == (64, 64)
        assert d.kv.store is not None
        metrics = d.kv.store.metrics()
        assert (metrics.leases, metrics.buffer_used_bytes, metrics.pool_used_bytes) == (0, 0, 0)


def test_the_death_of_p_over_tcp_is_known_at_once() -> None:
    with pods() as (p, d):
        assert d.kv.consumer is not None
        assert p.kv.producer is not None
        ids = tuple(range(20))
        key = TransferKey("f" * 32, 0)
        d.kv.consumer.expect(key, wait_s=60, now=time.monotonic())
        p.kv.producer.offer(key, d.address, ids, prompt_tokens=20, salt=b"", now=time.monotonic())
        until(lambda: p.kv.producer.status(key).state == "granted" or d.kv.consumer.poll(0.0))
        p.kv.endpoint.close(1.0)
        assert admitted(d, key, ids) == NoKv("peer_lost")
        assert d.pool.num_free == 64


def test_a_d_that_is_not_there_fails_the_transfer_only() -> None:
    with pods() as (p, d):
        assert p.kv.producer is not None
        nobody = d.address
        d.kv.endpoint.close(1.0)
        key = send(p, nobody, tuple(range(20)), 1, chunk=20)
        until(lambda: p.kv.producer.is_settled(key))
        assert p.kv.producer.status(key).state == "none"
        assert p.pool.num_free == 64


def test_an_offer_over_ds_limit_does_not_cost_the_connection() -> None:
    with pods() as (p, d):
        assert p.kv.producer is not None
        assert d.kv.consumer is not None
        p.pool = FakePool(400)
        p.memory = FakeKvMemory(400)
        too_long = TransferKey("a" * 32, 0)
        ids = tuple(range(1001))
        p.kv.producer.offer(
            too_long, d.address, ids, prompt_tokens=1001, salt=b"", now=time.monotonic()
        )
        until(lambda: p.kv.producer.is_settled(too_long))
        assert p.kv.producer.status(too_long).state == "none"
        assert isinstance(p.kv.endpoint, TcpEndpoint)
        assert p.kv.endpoint.counters.connections == 1


def test_deadlines_are_kept_by_the_io_thread_alone() -> None:
    limits = KvLimits(lease_s=0.2)
    with pods(KvSettings(limits=limits)) as (p, d):
        assert p.kv.producer is not None
        assert d.kv.consumer is not None
        send(p, d.address, tuple(range(20)), 1, chunk=20)
        until(lambda: d.kv.consumer.poll(time.monotonic()) or d.pool.num_free < 64)
        until(lambda: d.kv.consumer.poll(time.monotonic()) or d.pool.num_free == 64)
        assert not d.kv.consumer.has_work()

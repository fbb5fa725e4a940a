"""What the endpoints of an engine's ranks count is the engine's, too: each thing once, gauges as
they are now."""

from __future__ import annotations

import socket
from dataclasses import fields

from tests.kv.pods import until
from tests.kv.rank_pods import address_of, engine_of, sides
from tests.kv.test_ranks_pairs import IDS, ONE, TWO, move
from xpyd_kv.metrics import (
    MAX_NAMES,
    REPORT_S,
    Counts,
    EndpointCounters,
    KvMetrics,
    MetricsDelta,
    MetricsReporter,
    RankCounters,
    add,
    together,
)


def test_an_engine_has_the_counts_of_its_ranks_connections() -> None:
    p_engine = engine_of(2, ONE, kv_heads=2, block_size=4)
    d_engine = engine_of(2, TWO, kv_heads=2, block_size=4)
    with sides(p_engine, d_engine) as (p, d):
        move(p, d)
        # Two shares of one stage to two stages each.
        until(lambda: d.kv.rank_counters.opened == {"tcp": 4}, "D's ranks to report")
        until(lambda: p.kv.rank_counters.connections_by == {"tcp": 4}, "P's ranks to report")
        of_ranks = [part.endpoint.counters for part in p.parts]
        until(
            lambda: p.kv.rank_counters.sent_bytes == sum(one.sent_bytes for one in of_ranks),
            "all that was sent",
        )
        assert p.kv.rank_counters.sent_bytes > len(IDS) * 3 * 2 * 8


def test_who_is_refused_by_a_rank_is_counted_without_any_transfer() -> None:
    engine = engine_of(2, ONE, kv_heads=2, block_size=4)
    with sides(engine, engine) as (_, d):
        where = address_of(d.parts[1].endpoint)
        with socket.create_connection((where.host, where.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            until(lambda: d.kv.rank_counters.junk_connections == 1, "the rank to report")
        until(lambda: d.kv.rank_counters.strangers == 0, "the stranger to be gone")


def test_what_a_rank_reports_adds_up_to_what_it_has_counted() -> None:
    own, total = EndpointCounters(), EndpointCounters()
    delta = MetricsDelta(own, EndpointCounters)
    for turn in range(3):
        own.sent_bytes += 10
        own.connections = 2 - turn
        own.connections_by["shm"] = 2 - turn
        own.opened["shm"] = turn + 1
        own.refused.add("auth")
        add(total, delta.take())
        assert total == own
    assert delta.take() == {}


def test_every_counter_of_a_rank_reaches_its_engine() -> None:
    rank, engine = KvMetrics(), KvMetrics()
    delta = MetricsDelta(rank, RankCounters)
    counted: list[object] = []
    for field in fields(RankCounters):
        before = getattr(rank, field.name)
        value = 3 if isinstance(before, int) else type(before)(a=3)
        setattr(rank, field.name, value)
        counted.append(value)
    rank.open_transfers = 1
    add(engine, delta.take())
    assert [getattr(engine, field.name) for field in fields(RankCounters)] == counted
    assert engine.open_transfers == 0


def test_names_of_many_ranks_are_bounded_together() -> None:
    ranks = [EndpointCounters() for _ in range(4)]
    for rank, one in enumerate(ranks):
        for number in range(MAX_NAMES):
            one.refused.add(f"rank {rank} factor {number}")
    total = together(ranks)
    assert len(total.refused) == MAX_NAMES + 1
    assert sum(total.refused.values()) == 4 * MAX_NAMES


def test_a_rank_reports_what_has_changed_once_in_a_period() -> None:
    reported: list[tuple[Counts, Counts]] = []
    metrics, counters = KvMetrics(), EndpointCounters()
    reporter = MetricsReporter(
        MetricsDelta(metrics, RankCounters), counters, lambda *counts: reported.append(counts)
    )
    assert reporter.tick(100.0) == 100.0 + REPORT_S
    assert not reported
    counters.silent_peers = 1
    metrics.refused_data["stale"] = 2
    assert reporter.tick(100.5) == 100.0 + REPORT_S
    assert not reported
    reporter.tick(100.0 + REPORT_S)
    expected = {"refused_data": {"stale": 2}}, {"silent_peers": 1}
    assert reported == [expected]
    reporter.tick(100.0 + 2 * REPORT_S)
    assert reported == [expected]

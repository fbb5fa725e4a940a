"""The benchmark of the operator, small: its numbers mean nothing here, its counts must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.operator import big, many, resync
from bench.operator.client import Client
from bench.operator.measure import Bench
from bench.operator.processes import Operator
from bench.operator.report import MOST_CALLS
from bench.operator.watching import Namespace
from tests.cluster.harness import Cluster

PODS = 40
FLEETS = 8


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The operator's."""
    return tmp_path / "operator.log"


@pytest.fixture
def bench(plane: Cluster, log: Path, new_namespace: Callable[[Cluster], str]) -> Iterator[Bench]:
    """An operator for all namespaces, and two of them."""
    client = Client(plane.kubeconfig)
    ours, theirs = (Namespace(client, new_namespace(plane)) for _ in range(2))
    made = Bench(plane, client, Operator(plane, log), ours, theirs)
    try:
        yield made
    finally:
        made.operator.stop()
        # Fleets that a test left have a finalizer, which is an operator's to take away.
        last = Operator(plane, log)
        try:
            plane.kubectl("-n", ours.name, "delete", "fleets", "--all", "--timeout=60s")
        finally:
            last.stop()
            client.close()


@pytest.mark.long
def test_a_fleet_and_its_peers_have_as_many_pods_and_let_them_go(bench: Bench) -> None:
    template = bench.template()
    for found in (
        big.plain_round(bench, template, PODS),
        big.fleet_round(bench, PODS),
        big.by_hand_round(bench, template, PODS),
    ):
        assert {"created", "ready", "down"} <= set(found["seconds"])
    assert bench.ours.pods() == bench.theirs.pods() == 0


@pytest.mark.long
def test_fleets_at_once_take_25_calls_each_and_none_when_nothing_changed(
    bench: Bench, log: Path
) -> None:
    mark = bench.cluster.audit_mark()
    many.fleet_round(bench, [bench.ours], 0, FLEETS)
    assert bench.ours.pods() == FLEETS * many.PODS_EACH
    resync.wait_until_quiet(bench, resync.QUIET_S)
    calls = many.calls_by_fleet(bench, mark)
    assert sorted(calls) == [many.name_of(number) for number in range(FLEETS)]
    summary = many.calls_summary(calls)
    assert summary["max"] <= MOST_CALLS, summary
    nothing = resync.restarted(bench, log, FLEETS, every_s=12.0)
    assert nothing["writes"] == 0, bench.operator.log()
    assert nothing["resync"]["turns"] >= FLEETS

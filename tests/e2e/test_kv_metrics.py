"""The KV figures on the /metrics pages of a real P and a real D, after transfers that worked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.harness import Fleet, wait_for

pytestmark = pytest.mark.slow
REQUESTS = 3
# 1P3D: each D in turn.
WORDS = "Tell me of the sea, the wind and the ships that sail. " * 8


def _sums(fleet: Fleet, role: str) -> dict[str, float]:
    total: dict[str, float] = {}
    for process in fleet.processes:
        if process.role == role:
            for name, value in process.metrics().items():
                total[name] = total.get(name, 0) + value
    return total


def _moved(before: dict[str, float], after: dict[str, float]) -> Any:
    def of(name: str) -> float:
        return after.get(f"xpyd_kv_{name}", 0) - before.get(f"xpyd_kv_{name}", 0)

    return of


def test_a_transfer_moves_the_figures_of_both_sides_and_leaves_no_gauge_up(
    fleet_1p3d: Fleet,
) -> None:
    before = {role: _sums(fleet_1p3d, role) for role in ("Prefill", "Decode")}
    for number in range(REQUESTS):
        fleet_1p3d.complete(prompt=f"{number} {WORDS}", max_tokens=2)
    wait_for("open transfers", lambda: _sums(fleet_1p3d, "Prefill")["xpyd_kv_open_transfers"] == 0)
    p = _moved(before["Prefill"], _sums(fleet_1p3d, "Prefill"))
    assert p("transfers_total{outcome=done}") == REQUESTS
    assert p("grant_wait_seconds_count") == p("after_prefill_seconds_count") == REQUESTS
    assert p("transfer_seconds_count{transport=tcp}") == REQUESTS
    assert p("transfer_seconds_bucket{le=+Inf,transport=tcp}") == REQUESTS
    assert p("transfer_seconds_sum{transport=tcp}") > 0
    assert p("sent_frames_total") >= REQUESTS
    assert 0 <= p("overlapped_bytes_total") <= p("sent_bytes_total")
    page = _sums(fleet_1p3d, "Prefill")
    assert page["xpyd_kv_overlap_ratio"] == pytest.approx(
        page["xpyd_kv_overlapped_bytes_total"] / page["xpyd_kv_sent_bytes_total"]
    )
    assert page["xpyd_kv_connections{transport=tcp}"] >= 1
    after = _sums(fleet_1p3d, "Decode")
    d = _moved(before["Decode"], after)
    assert d("transfers_total{outcome=done}") == REQUESTS
    assert d("received_frames_total") == p("sent_frames_total")
    assert d("received_bytes_total") == p("sent_bytes_total")
    assert d("transfer_seconds_count{transport=tcp}") == REQUESTS
    assert after["xpyd_kv_connections{transport=tcp}"] >= 1
    assert after["xpyd_kv_connections{transport=uds}"] == 0
    for gauge in ("open_transfers", "leases", "buffer_used_bytes", "pool_used_bytes"):
        assert after[f"xpyd_kv_{gauge}"] == 0, gauge
    for where in ("direct", "buffer", "pool"):
        assert after[f"xpyd_kv_credits_free_bytes{{where={where}}}"] > 0

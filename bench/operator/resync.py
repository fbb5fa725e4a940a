"""What it costs that nothing happens: an operator that starts, looks at all fleets, and again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.operator.many import writes
from bench.operator.measure import Bench
from bench.operator.processes import Operator
from bench.operator.watching import DEADLINE_S, POLL_S, wait_for_all

QUIET_S = 14.0
"""Statuses may wait for 12 s before they are written."""
_IDLE_S = 5.0


def wait_until_quiet(bench: Bench, quiet_s: float) -> None:
    """Until the operator has written nothing for `quiet_s`."""
    end = time.monotonic() + DEADLINE_S
    mark, since = bench.cluster.audit_mark(), time.monotonic()
    while time.monotonic() - since < quiet_s:
        time.sleep(POLL_S)
        after = bench.cluster.audit_mark()
        if writes(bench.cluster.audit_calls(user=Operator.USER, after=mark)):
            since = time.monotonic()
        mark = after
        assert time.monotonic() < end, "the operator goes on writing"


def restarted(bench: Bench, log: Path, fleets: int, *, every_s: float) -> dict[str, Any]:
    """A new operator in place of the bench's, through its start, a while of nothing, a resync.

    `every_s`: its resync period; the start must be over by then. It is stopped at the end.
    """
    bench.operator.stop()
    mark, begun = bench.cluster.audit_mark(), time.monotonic()
    operator = Operator(bench.cluster, log, f"--resync-seconds={every_s:g}")
    try:
        ready_s = time.monotonic() - begun
        _wait_for_turns(operator, fleets)
        start = {
            "seconds": {"ready": round(ready_s, 2), "looked": round(time.monotonic() - begun, 2)},
            "cpuSeconds": round(operator.cpu_s(), 2),
        }
        time.sleep(1.0)
        cpu_s, at = operator.cpu_s(), time.monotonic()
        time.sleep(_IDLE_S)
        idle = (operator.cpu_s() - cpu_s) / (time.monotonic() - at)
        late = operator.turns() > fleets
        cpu_s, turns = operator.cpu_s(), operator.turns()
        _wait_for_turns(operator, turns + fleets)
        time.sleep(1.0)
        resync = {
            "turns": operator.turns() - turns,
            "cpuSeconds": round(operator.cpu_s() - cpu_s, 2),
        }
        calls = bench.cluster.audit_calls(user=Operator.USER, after=mark)
        return {
            "start": start,
            "idleCores": round(idle, 4),
            "resync": resync,
            "startOverlapsResync": late,
            "writes": len(writes(calls)),
            "reads": len([c for c in calls if c.verb in ("get", "list")]),
            "memoryMiB": operator.memory_mib(),
        }
    finally:
        operator.stop()


def _wait_for_turns(operator: Operator, wanted: int) -> None:
    wait_for_all({"turns": lambda: (found := operator.turns()) >= wanted or found})

"""Many small fleets beside the same objects applied by hand; and the calls that each fleet took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from bench.operator.documents import ALL_FLEETS, FLEETS, PLAIN_KINDS, fleet, plain_copy
from bench.operator.measure import TEMPLATE, Bench
from bench.operator.processes import Operator
from bench.operator.watching import Namespace, exactly
from tests.cluster.harness.audit import Call

PODS_EACH = 4
"""One of each pool, and two routers."""
_READS = ("get", "list", "watch")


def by_hand_round(bench: Bench, template: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """The objects of `count` fleets, without pools and Secrets, created by a client; then gone."""
    paths = {kind: path.format(bench.theirs.name) for kind, (_, path) in PLAIN_KINDS.items()}
    copies = [
        (paths[obj["kind"]], plain_copy(obj, TEMPLATE, f"plain-{number:03}"))
        for number in range(count)
        for obj in template
    ]
    up = bench.measured(
        lambda: bench.post_all(copies),
        {"ready": exactly(bench.theirs.pods_ready, PODS_EACH * count)},
    )
    bench.delete_plain()
    return {**up, "objects": len(copies)}


def fleet_round(
    bench: Bench, spaces: Sequence[Namespace], first: int, end: int, *, routers: int = 2
) -> dict[str, Any]:
    """Fleets first to end - 1, until all that there are in the cluster are Ready; they stay.

    They are dealt out to `spaces`: what Kubernetes does for one pod grows with its namespace.
    """
    documents = [
        (
            FLEETS.format(spaces[number % len(spaces)].name),
            fleet(name_of(number), prefill=1, decode=1, routers=routers),
        )
        for number in range(first, end)
    ]

    def ready() -> int:
        return sum(row["Ready"] == "True" for row in bench.client.rows(ALL_FLEETS))

    heard, turns = bench.operator.heard(), bench.operator.turns()
    up = bench.measured(lambda: bench.post_all(documents), {"ready": exactly(ready, end)})
    return {
        **up,
        "watchEvents": dict(bench.operator.heard() - heard),
        "turns": bench.operator.turns() - turns,
        "memoryMiB": bench.operator.memory_mib(),
    }


def name_of(number: int) -> str:
    """A fleet's name; all are of one length, so that none is the beginning of another."""
    return f"fleet-{number:03}"


def calls_by_fleet(bench: Bench, after: int) -> dict[str, list[Call]]:
    """The operator's calls since a mark of the audit log, without lists and watches, by fleet."""
    found: dict[str, list[Call]] = {}
    for call in bench.cluster.audit_calls(user=Operator.USER, after=after):
        if call.namespace and call.verb not in ("list", "watch"):
            found.setdefault(call.name[: len(name_of(0))], []).append(call)
    return found


def calls_summary(calls: dict[str, list[Call]]) -> dict[str, Any]:
    """Least, middle and most calls of a fleet, and what a fleet's calls are on average."""
    counts = sorted(len(of_one) for of_one in calls.values())
    kinds = Counter(f"{c.verb} {c.resource}" for of_one in calls.values() for c in of_one)
    return {
        "min": counts[0],
        "median": median(counts),
        "max": counts[-1],
        "each": {kind: round(n / len(calls), 2) for kind, n in sorted(kinds.items())},
        "refused": sum(c.code >= 400 for of_one in calls.values() for c in of_one),
    }


def writes(calls: Iterable[Call]) -> list[Call]:
    """Those that could change something."""
    return [call for call in calls if call.verb not in _READS]

"""What all measurements share: the cluster, the operator, two namespaces, and the stop-watch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bench.operator.client import Client
from bench.operator.documents import FLEETS, PLAIN_KINDS, PLAIN_LABEL, fleet
from bench.operator.processes import Operator, cluster_cpu_s, machine_s, since
from bench.operator.watching import Namespace, exactly, wait_for_all
from tests.cluster.harness import Cluster

TEMPLATE = "templatefleet"
"""The fleet that the peers are copied from. No other text in its objects is like it."""
REST_S = 1.0
"""After a measurement, for what the controllers still do."""
_AT_ONCE = 4
"""Connections that create things, as a person with a script would have."""


@dataclass(frozen=True)
class Bench:
    """`ours` is where fleets go, `theirs` where their peers do; both exist."""

    cluster: Cluster
    client: Client
    operator: Operator
    ours: Namespace
    theirs: Namespace

    def measured(
        self, act: Callable[[], object], checks: Mapping[str, Callable[[], Any]]
    ) -> dict[str, Any]:
        """Do it, wait for the checks: seconds to each of them, and processor time of all.

        `others`: the part of the machine that programs used which belong to nothing here.
        """
        cpu, own, machine = self._cpu_s(), time.process_time(), machine_s()
        begun = time.monotonic()
        act()
        acted = time.monotonic() - begun
        times = wait_for_all(dict(checks))
        used, (total, busy) = since(cpu, self._cpu_s()), machine_s()
        measured = sum(used.values()) + time.process_time() - own
        return {
            "seconds": {name: round(acted + at, 2) for name, at in times.items()},
            "cpuSeconds": used,
            "others": round(max(0.0, busy - machine[1] - measured) / (total - machine[0]), 2),
        }

    def post_all(self, objects: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Create objects at their paths, several at once, in about this order."""
        waiting = list(reversed(list(objects)))

        def work() -> None:
            client = Client(self.cluster.kubeconfig)
            try:
                while waiting:
                    client.post(*waiting.pop())
            finally:
                client.close()

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for done in [pool.submit(work) for _ in range(_AT_ONCE)]:
                done.result()

    def template(self) -> list[dict[str, Any]]:
        """The objects of a small fleet, TEMPLATE, as the operator made them; it is gone then."""
        self.client.post(self.fleets, fleet(TEMPLATE, prefill=1, decode=1))
        wait_for_all({"ready": exactly(self.ours.fleets_ready, 1)})
        found: list[dict[str, Any]] = []
        for kind, (version, path) in PLAIN_KINDS.items():
            items = self.client.get(path.format(self.ours.name))["items"]
            mine = [item for item in items if item["metadata"].get("ownerReferences")]
            found += [{**item, "kind": kind, "apiVersion": version} for item in mine]
        self.client.delete(f"{self.fleets}/{TEMPLATE}")
        self.wait_until_empty(self.ours)
        return found

    def delete_plain(self) -> None:
        """Delete all copies of a fleet's objects and wait until their pods are gone."""
        for _, path in PLAIN_KINDS.values():
            self.client.delete(f"{path.format(self.theirs.name)}?labelSelector={PLAIN_LABEL}")
        self.wait_until_empty(self.theirs)

    def wait_until_empty(self, namespace: Namespace) -> None:
        """Until neither fleets nor pods are there, and a moment more."""
        checks = {"fleets": exactly(namespace.fleets, 0), "pods": exactly(namespace.pods, 0)}
        wait_for_all(checks)
        time.sleep(REST_S)

    @property
    def fleets(self) -> str:
        """Where fleets are created."""
        return FLEETS.format(self.ours.name)

    def _cpu_s(self) -> dict[str, float]:
        return {**cluster_cpu_s(self.cluster), "operator": self.operator.cpu_s()}

"""The workloads of a local fleet and their processes: what plan() and keep() see and act on.

Does what it is told by actions; decides nothing. Pods' numbers (the last byte of their address) are
given out here: the lowest free one, the router's is fixed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from xpyd_core.errors import UserError
from xpyd_operator.plan import (
    ROUTER,
    Drain,
    Forget,
    Kill,
    Start,
    Workload,
    WorkloadSeen,
    keep,
)
from xpyd_operator.up.pod_process import PodProcess
from xpyd_operator.up.pods import (
    LAST_NUMBER,
    ROUTER_NUMBER,
    Pod,
    Program,
    Site,
    pod_arguments,
    pod_environment,
)
from xpyd_operator.up.state import FleetState, PodRecord

_log = logging.getLogger("xpyd.up")
WorkloadKey = tuple[str, str]


class Roster:
    """Workload (pool, revision) -> its pods by ordinal."""

    def __init__(
        self, site: Site, state: FleetState, program: Program, inherit: Sequence[int]
    ) -> None:
        self.site = site
        self._state = state
        self._program = program
        self._inherit = inherit
        self._workloads: dict[WorkloadKey, Workload] = {}
        self._pods: dict[WorkloadKey, dict[int, PodProcess]] = {}

    def __iter__(self) -> Iterator[PodProcess]:
        """All pods, the router's first, then by name."""
        pods = [pod for pods in self._pods.values() for pod in pods.values()]
        return iter(sorted(pods, key=lambda p: (p.pod.pool != ROUTER, p.pod.pool, p.ordinal)))

    def seen(self) -> tuple[WorkloadSeen, ...]:
        """What plan() wants to know."""
        return tuple(
            WorkloadSeen(
                workload,
                alive=sum(pod.is_alive for pod in self._pods[key].values()),
                ready=sum(pod.is_ready for pod in self._pods[key].values()),
            )
            for key, workload in self._workloads.items()
        )

    def records(self) -> tuple[PodRecord, ...]:
        """The living pods as they go to disk."""
        return tuple(
            PodRecord(pod.pod.name, self.site.address(pod.pod.number), pod.identity)
            for pod in self
            if pod.identity is not None
        )

    def put(self, workload: Workload) -> None:
        """Create the workload or replace its replicas; keep() does the rest."""
        key = (workload.pool, workload.revision)
        self._workloads[key] = workload
        self._pods.setdefault(key, {})

    def drain_pool(self, pool: str) -> None:
        """No instance of the pool is wanted any more."""
        for key, workload in self._workloads.items():
            if workload.pool == pool:
                self._workloads[key] = replace(workload, replicas=0)

    def delete(self, pool: str, revision: str) -> None:
        """Forget a workload of which nothing lives."""
        key = (pool, revision)
        assert not any(pod.is_alive for pod in self._pods.get(key, {}).values())
        self._workloads.pop(key, None)
        self._pods.pop(key, None)

    def reap(self, now: float) -> Iterable[PodProcess]:
        """The pods whose process ended since the last call."""
        return [pod for pod in self if pod.reap(now)]

    def keep(self, now: float, drain_timeout_s: float) -> tuple[bool, float | None]:
        """Run keep() on each workload and do what it says: whether anything, and when to again."""
        acted, waits = False, list[float]()
        for key, workload in list(self._workloads.items()):
            pods = self._pods[key]
            taken = [
                p.ordinal
                for p in self
                if p.pod.pool == workload.pool and p is not pods.get(p.ordinal)
            ]
            seen = [pod.seen for pod in pods.values()]
            result = keep(workload, seen, now, drain_timeout_s=drain_timeout_s, taken=taken)
            for action in result.actions:
                acted = self._apply(action, workload, pods, now) or acted
            if result.recheck_after is not None:
                waits.append(result.recheck_after)
        return acted, min(waits, default=None)

    def kill_all(self) -> None:
        """End everything now."""
        for pod in self:
            pod.kill()

    def _apply(
        self,
        action: Start | Drain | Kill | Forget,
        workload: Workload,
        pods: dict[int, PodProcess],
        now: float,
    ) -> bool:
        """Whether it could be done."""
        match action:
            case Start(ordinal, failures):
                pod = pods.get(ordinal) or self._new_pod(workload, ordinal)
                if pod is None:
                    return False
                pods[ordinal] = pod
                argv = [*self._program(pod.pod), *pod_arguments(pod.pod, self.site)]
                environ = pod_environment(pod.pod, self.site, os.environ)
                pod.start(argv, environ, now, failures=failures, inherit=self._inherit)
                _log.info("pod %s started", pod.pod.name)
            case Drain(ordinal):
                _log.info("pod %s drains", pods[ordinal].pod.name)
                pods[ordinal].drain(now)
            case Kill(ordinal):
                _log.warning("pod %s did not drain in time and is killed", pods[ordinal].pod.name)
                pods[ordinal].kill()
            case Forget(ordinal):
                del pods[ordinal]
        return True

    def _new_pod(self, workload: Workload, ordinal: int) -> PodProcess | None:
        number = self._free_number(workload.pool)
        if number is None:
            _log.error("pool %s: no free address for another instance", workload.pool)
            return None
        name = f"{self.site.fleet}-{workload.pool}-{ordinal}"
        pod = Pod(name, workload.pool, workload.revision, number, workload.template)
        return PodProcess(pod, ordinal, self._state.log_of(name))

    def _free_number(self, pool: str) -> int | None:
        if pool == ROUTER:
            return ROUTER_NUMBER
        used = {pod.pod.number for pod in self}
        free = (n for n in range(ROUTER_NUMBER + 1, LAST_NUMBER + 1) if n not in used)
        return next(free, None)


def check_addresses(engines: int) -> None:
    """Refuse a fleet that has more engines than addresses, one kept free for a rollout."""
    most = LAST_NUMBER - ROUTER_NUMBER - 1
    if engines > most:
        raise UserError(f"{engines} engines: a local fleet has addresses for at most {most}")

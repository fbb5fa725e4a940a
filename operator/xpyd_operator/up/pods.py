"""The pods of a local fleet: the process of each, and all of them.

PodProcess is one pod through its restarts and the only owner of its Child. LocalPods holds the pods
of all workloads and applies the actions of plan() and keep(); it decides nothing. What they run is
`up.programs`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from xpyd_core.children import CANNOT_START, Child, ForkServer, Start
from xpyd_core.errors import UserError
from xpyd_operator.plan.keep import keep
from xpyd_operator.plan.values import (
    ROUTER,
    DrainInstance,
    ForgetInstance,
    InstanceSeen,
    KeepAction,
    KillInstance,
    Probe,
    RestartInstance,
    StartInstance,
    Workload,
    WorkloadSeen,
)
from xpyd_operator.status.drains import InstanceLoad, load_text
from xpyd_operator.up.folder import FleetFolder, PodRecord, ProcessId, identify
from xpyd_operator.up.logs import NO_ROOM
from xpyd_operator.up.programs import (
    LAST_NUMBER,
    ROUTER_NUMBER,
    LocalSettings,
    Pod,
    Programs,
    pod_arguments,
    pod_environment,
)

_FORKED = (sys.executable, "-P", "-m", "xpyd_core", "worker")
"""Programs that begin so are forked. A router imports little, and starts before torch is there."""
_PRELOAD = "xpyd_worker.preload:preload"


_log = logging.getLogger("xpyd.up")


class PodProcess:
    """A pod and its current process, if one runs. Times are the supervisor's clock."""

    def __init__(self, pod: Pod, ordinal: int, log: Path) -> None:
        self.pod = pod
        self.ordinal = ordinal
        self.log = log
        self.log_problem = ""
        """Why the process writes no log, for people."""
        self.restarts = -1
        self.last_exit: int | None = None
        self.hung = ""
        """Why the current process, or the last one, was ended; empty: it was not, for a probe."""
        self.probe_at = 0.0
        """When its startup or liveness probe is due."""
        self.is_healthy = False
        """/health answered 200 since this process started."""
        self.is_ready = False
        """Requests can reach it."""
        self.was_ready = False
        """Whether the pod was ready once since this process started."""
        self.load: InstanceLoad | None = None
        """As the router says; None: it says nothing, as of itself, or no router is there."""
        self.seen = InstanceSeen(ordinal, 0.0)
        self.identity: ProcessId | None = None
        self._process: Child | None = None

    @property
    def is_alive(self) -> bool:
        """Whether a process runs, or is about to."""
        return self._process is not None

    def start(
        self,
        argv: Sequence[str],
        environ: dict[str, str],
        now: float,
        *,
        failures: int,
        inherit: Sequence[int],
        forks: ForkServer,
    ) -> None:
        """Start a process in a session of its own: Ctrl-C reaches the supervisor only."""
        assert self._process is None
        self.restarts += 1
        self.probe_at = now
        self.is_healthy = self.is_ready = self.was_ready = False
        self.seen = InstanceSeen(self.ordinal, now, failures)
        try:
            with self._open_log() as log:
                start = Start(argv, environ, log.fileno(), inherit)
                if tuple(argv[: len(_FORKED)]) == _FORKED:
                    self._process = forks.start(start)
                else:
                    self._process = Child()
                    self._process.spawn(start)
        except OSError as error:
            _log.error("pod %s cannot start: %s", self.pod.name, error)
            self._process = None
            self.last_exit = CANNOT_START
            self.seen = replace(self.seen, exited_at=now)
        else:
            self._know()

    def _know(self) -> None:
        """The process' identity, once it has a pid; by it alone is it ended after our death."""
        if self._process is None or self._process.pid is None or self.identity is not None:
            return
        try:
            self.identity = identify(self._process.pid)
        except OSError as error:  # no descriptor is left to read /proc; the next turn tries again
            _log.warning("pod %s: %s", self.pod.name, error)

    def _open_log(self) -> BinaryIO:
        """The log, or nothing where the disk has no room for it: to serve comes first."""
        self.log_problem = ""
        try:
            return self.log.open("ab")
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.log_problem = f"{self.log} cannot be made: {error.strerror}; free some space"
            _log.warning("pod %s writes no log: %s", self.pod.name, self.log_problem)
            return open(os.devnull, "ab")

    def reap(self, now: float) -> bool:
        """Reap the process if it ended. True: it ended now."""
        self._know()
        if self._process is None or not self._process.has_ended():
            return False
        # An unreaped process keeps its pid, so the rest of its group can be killed safely.
        self._process.signal(signal.SIGKILL, group=True)
        self.last_exit = self._process.wait()
        self._process = None
        self.identity = None
        self.is_healthy = self.is_ready = False
        if not self.seen.killed:
            self.hung = ""
        self.seen = replace(self.seen, exited_at=now)
        return True

    def probed(self, probe: Probe, now: float, *, is_alive: bool) -> None:
        """Take the answer to a startup or liveness probe."""
        if is_alive:
            self._live(now)
            self.seen = replace(self.seen, failed_probes=0)
            return
        self.seen = replace(self.seen, failed_probes=self.seen.failed_probes + 1)
        if self.seen.lived_at is not None and self.seen.failed_probes == 1:
            _log.warning("pod %s does not answer GET %s", self.pod.name, probe.path)

    def lives(self, now: float) -> None:
        """/health was answered: the liveness probe is the one to ask from now on."""
        self.is_healthy = True
        self._live(now)

    def _live(self, now: float) -> None:
        if self.seen.lived_at is None:
            self.seen = replace(self.seen, lived_at=now, failed_probes=0)

    def is_loaded(self, load: InstanceLoad | None) -> None:
        """Take what the router says of it."""
        self.load = load
        self.seen = replace(self.seen, load=sum(load or ()))

    def leaving_text(self, now: float) -> str:
        """Of one that drains: what it still has, if anybody said, and for how long it drains."""
        assert self.seen.draining_since is not None
        what = "it ends its requests" if self.load is None else load_text(self.load)
        return f"{what}, {now - self.seen.draining_since:.0f} s"

    def drain(self, now: float) -> None:
        """Ask the process to finish and exit."""
        self.seen = replace(self.seen, draining_since=now)
        self.is_ready = False
        if self._process is not None:
            self._process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its whole group."""
        self.seen = replace(self.seen, killed=True)
        if self._process is not None:
            self._process.signal(signal.SIGKILL, group=True)

    def end_hung(self, probe: Probe) -> None:
        """Kill the process, which does not answer `probe`; a stopped one ends so, too."""
        self.hung = f"did not answer GET {probe.path} {probe.failures} times in a row: killed"
        _log.error("pod %s %s", self.pod.name, self.hung)
        self.kill()

    def exit_text(self) -> str:
        """How the last process ended, for people."""
        if self.last_exit is None:
            return ""
        if self.hung:
            return self.hung
        if self.last_exit >= 0:
            return f"exit status {self.last_exit}"
        return f"killed by signal {-self.last_exit} ({signal.strsignal(-self.last_exit)})"


WorkloadKey = tuple[str, str]


class LocalPods:
    """Workload (pool, revision) -> its pods by ordinal."""

    def __init__(
        self,
        settings: LocalSettings,
        state: FleetFolder,
        programs: Programs,
        inherit: Sequence[int],
        listeners: Sequence[socket.socket] = (),
    ) -> None:
        self.settings = settings
        self.listeners = listeners
        """Where clients connect, and who asks the admin port, also while no router runs: the next
        one finds them waiting. Empty: routers listen themselves, or the fleet is being taken down.
        See docs/adr/0044."""
        self._state = state
        self.programs = programs
        self._inherit = inherit
        self.forks = ForkServer([_PRELOAD])
        """Starts the engines; the owner of this object closes it."""
        self._workloads: dict[WorkloadKey, Workload] = {}
        self._pods: dict[WorkloadKey, dict[int, PodProcess]] = {}

    def __iter__(self) -> Iterator[PodProcess]:
        """All pods, the router's first, then by name."""
        pods = [pod for pods in self._pods.values() for pod in pods.values()]
        return iter(sorted(pods, key=lambda p: (p.pod.pool != ROUTER, p.pod.pool, p.ordinal)))

    def seen(self) -> tuple[WorkloadSeen, ...]:
        """The workloads as plan() looks at them."""
        return tuple(
            WorkloadSeen(
                workload,
                alive=sum(pod.is_alive for pod in self._pods[key].values()),
                ready=sum(pod.is_ready for pod in self._pods[key].values()),
            )
            for key, workload in self._workloads.items()
        )

    def records(self) -> tuple[PodRecord, ...]:
        """The living pods as written to disk."""
        return tuple(
            PodRecord(pod.pod.name, self.settings.address(pod.pod.number), pod.identity)
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
        self.forks.take()
        return [pod for pod in self if pod.reap(now)]

    def keep(self, now: float, drain_timeout_s: float) -> tuple[bool, float | None]:
        """Run keep() on each workload and apply its actions; whether there were any, and when to
        run again."""
        acted, waits = False, list[float]()
        for key, workload in list(self._workloads.items()):
            pods = self._pods[key]
            taken = [
                p.ordinal
                for p in self
                if p.pod.pool == workload.pool and p is not pods.get(p.ordinal)
            ]
            seen = [pod.seen for pod in pods.values()]
            result = keep(
                workload,
                seen,
                now,
                drain_timeout_s=drain_timeout_s,
                probes=self.programs.probes(workload.template),
                taken=taken,
            )
            for action in result.actions:
                acted = self._apply(action, workload, pods, now) or acted
            if result.recheck_after is not None:
                waits.append(result.recheck_after)
        return acted, min(waits, default=None)

    def stop_listening(self) -> None:
        """The last router drains: clients are refused once it takes no more of them."""
        for listener in self.listeners:
            listener.close()
        self.listeners = ()

    def kill_all(self) -> None:
        """End everything now."""
        for pod in self:
            pod.kill()

    def _apply(
        self,
        action: KeepAction,
        workload: Workload,
        pods: dict[int, PodProcess],
        now: float,
    ) -> bool:
        """Apply one action; whether it could be done."""
        match action:
            case StartInstance(ordinal, failures):
                pod = pods.get(ordinal) or self._new_pod(workload, ordinal)
                if pod is None:
                    return False
                pods[ordinal] = pod
                listeners, inherit = None, self._inherit
                if self.listeners and pod.pod.pool == ROUTER:
                    listeners = [listener.fileno() for listener in self.listeners]
                    inherit = [*inherit, *listeners]
                flags = pod_arguments(pod.pod, self.settings, listeners)
                argv = [*self.programs.program(pod.pod), *flags]
                environ = pod_environment(pod.pod, self.settings, os.environ)
                pod.start(argv, environ, now, failures=failures, inherit=inherit, forks=self.forks)
                _log.info("pod %s started", pod.pod.name)
            case DrainInstance(ordinal):
                _log.info("pod %s drains", pods[ordinal].pod.name)
                pods[ordinal].drain(now)
            case KillInstance(ordinal):
                _log.warning("pod %s did not drain in time and is killed", pods[ordinal].pod.name)
                pods[ordinal].kill()
            case RestartInstance(ordinal, probe):
                pods[ordinal].end_hung(probe)
            case ForgetInstance(ordinal):
                del pods[ordinal]
        return True

    def _new_pod(self, workload: Workload, ordinal: int) -> PodProcess | None:
        number = self._free_number(workload.pool)
        if number is None:
            _log.error("pool %s: no free address for another instance", workload.pool)
            return None
        name = f"{self.settings.fleet}-{workload.pool}-{ordinal}"
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

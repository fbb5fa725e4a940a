"""The supervisor's loop: observe the processes, plan(), keep(), apply, until the fleet is gone.

Level-triggered: every turn starts from what exists. The end of a child, a request on the control
socket and a result of a probe only wake it. There is one supervisor per fleet, and everything that
it owns is changed in its loop. Probes are short HTTP GETs in a thread; an unexpected answer counts
as not ready.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from xpyd_core.errors import UserError
from xpyd_core.pod_env import HTTP_PORT
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.fleetpool import refused_changes, refused_scale
from xpyd_operator.plan.fleet import plan, pools_wanted
from xpyd_operator.plan.keep import KILL_GRACE_S
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.plan.values import (
    MOST_REPLICAS,
    ROUTER,
    DeleteWorkload,
    DrainPool,
    Event,
    FleetProgress,
    FleetSeen,
    FleetWant,
    PoolSeen,
    Probe,
    PutWorkload,
    SetStatus,
)
from xpyd_operator.status.drains import RELAYED_QUERY, InstanceLoad, read_relayed
from xpyd_operator.status.instances import read_rows
from xpyd_operator.status.verified import NOT_LOOKED, QUERY, Counts, KvWatch, read_counts, read_seen
from xpyd_operator.up.checks import (
    check_layouts,
    draft_bytes,
    expert_bytes,
    locate_model,
    weights_bytes,
)
from xpyd_operator.up.folder import AddressClaim, FleetFolder, FleetRecord, identify
from xpyd_operator.up.logs import rotate
from xpyd_operator.up.memory import Machine, MemoryPlan, check_room, plan_memory, read_machine
from xpyd_operator.up.pods import LocalPods, PodProcess, check_addresses
from xpyd_operator.up.programs import ROUTER_HOST, LocalSettings, Programs

TIMEOUT_S = 1.0
_MAX_ANSWER_BYTES = 4 << 20


_NO_MEANS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)
"""Errors that say that this process cannot ask; they say nothing about the pod that it asks."""


def is_alive(host: str, port: int, probe: Probe) -> bool | None:
    """Whether `probe` is answered 200 in time; None where it could not be asked."""
    connection = http.client.HTTPConnection(host, port, timeout=probe.timeout_s)
    try:
        connection.request("GET", probe.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException) as error:
        return None if isinstance(error, OSError) and error.errno in _NO_MEANS else False
    finally:
        connection.close()


def get(host: str, port: int, path: str) -> bytes | None:
    """The body of a 200 answer, None for anything else."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read(_MAX_ANSWER_BYTES) if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def answers_health(host: str, port: int) -> bool:
    """Whether /health answers 200."""
    return get(host, port, "/health") is not None


class InstanceSaid(NamedTuple):
    """What the router says of an instance."""

    is_ready: bool
    load: InstanceLoad


def read_said(host: str, port: int) -> Mapping[str, InstanceSaid] | None:
    """The instances that the router has, by HTTP address; None: no router there."""
    body = get(host, port, "/instances")
    if body is None:
        return None
    rows = read_rows(body)
    if rows is None:
        return None
    return {
        one.http_address: InstanceSaid(
            one.state == "Ready", InstanceLoad(one.requests, one.load.kv_leases)
        )
        for one in rows
    }


def plan_engines(
    fleet: InferenceFleet, pools: Iterable[PoolSeen], model: str, machine: Machine
) -> MemoryPlan:
    """The memory plan for so many replicas of each pool; UserError where they do not fit."""
    replicas = [pool.replicas for pool in pools if pool.name != ROUTER]
    check_addresses(sum(replicas))
    args = fleet.spec.engine.args
    return plan_memory(
        fleet,
        replicas,
        machine,
        weights_bytes=weights_bytes(model, args) + draft_bytes(args),
        expert_bytes=expert_bytes(model, args),
    )


_NOTHING = InstanceSaid(is_ready=False, load=InstanceLoad(0, 0))
_log = logging.getLogger("xpyd.up")
_TURN_AT_LEAST_S = 1.0
_PROBE_STARTING_S = 0.2
_PROBE_READY_S = 1.0
_READ_KV_EVERY_S = 5.0
_ROTATE_EVERY_S = 5.0
_WATCH_EVERY_S = 0.25


class Supervisor:
    """Keeps one fleet running until `stop`."""

    def __init__(
        self,
        *,
        fleet: InferenceFleet,
        folder: Path,
        state: FleetFolder,
        settings: LocalSettings,
        claim: AddressClaim,
        listeners: Sequence[socket.socket],
        programs: Programs,
    ) -> None:
        self.fleet = fleet
        self.state = state
        self.pods = LocalPods(settings, state, programs, claim.descriptors, listeners)
        self.status: FleetProgress | None = None
        self._want = fleet_want(fleet, model=locate_model(fleet.spec.model, folder))
        self._pools: dict[str, PoolSeen] = {}
        self._drain_timeout_s = float(fleet.spec.drain.timeout_seconds)
        self.identity = identify(os.getpid())
        self._record: FleetRecord | None = None
        self._wake = asyncio.Event()
        self._rotated_at = 0.0
        self._problems: dict[str, str] = {}
        self._kv_watch = KvWatch()
        # The router is ours: all that it counts is news.
        self._kv_watch.look({ROUTER: {}}, time.monotonic())
        self.kv = NOT_LOOKED
        """Whether KV arrives."""
        self.kv_counts: Counts = {}
        """What the router counted of it."""

    async def run(self) -> None:
        """Run until the fleet is stopped and none of its processes lives."""
        probes = asyncio.gather(
            self._probe_for_ever(), self._watch_for_ever(), self._read_kv_for_ever()
        )
        loop = asyncio.get_running_loop()
        loop.add_reader(self.pods.forks, self.wake)
        try:
            while not self._is_over():
                wait_s = self._turn(time.monotonic())
                await self._sleep(wait_s)
        finally:
            probes.cancel()
            await asyncio.gather(probes, return_exceptions=True)
            self.pods.kill_all()
            loop.remove_reader(self.pods.forks)
            self.pods.forks.close()

    # Requests from the control socket and from signals.

    def wake(self) -> None:
        """Begin the next turn now."""
        self._wake.set()

    @property
    def problems(self) -> tuple[str, ...]:
        """What people should mend, though the fleet serves; a sentence each."""
        found = (*self._problems.values(), *(pod.log_problem for pod in self.pods))
        return tuple(problem for problem in found if problem)

    @property
    def is_stopping(self) -> bool:
        """Whether the fleet is being taken down."""
        return self._want.stopping

    def stop(self, timeout_s: float | None = None) -> None:
        """Drain everything, the router first. `timeout_s`: kill what is left of a pod by then."""
        self._want = replace(self._want, stopping=True)
        if timeout_s is not None:
            self._drain_timeout_s = timeout_s - KILL_GRACE_S
        self.wake()

    def kill(self) -> None:
        """End everything now."""
        self.stop(0.0)
        self.pods.kill_all()

    def scale(self, pool: str, replicas: int) -> str:
        """Give a pool so many replicas until its document declares others; a line for people."""
        self._refuse_if_stopping()
        before = self._pools.get(pool)
        if pool == ROUTER:
            raise UserError("a local fleet has one router; scale a pool of engines")
        if before is None:
            names = ", ".join(name for name in self._pools if name != ROUTER)
            raise UserError(f"fleet {self.fleet.name} has no pool {pool!r}; it has {names}")
        if not 0 <= replicas <= MOST_REPLICAS:
            raise UserError(f"--replicas {replicas}: expected 0 to {MOST_REPLICAS}")
        if refusal := refused_scale(self.fleet, pool, replicas):
            raise UserError(refusal)
        sizes = {p.name: p.replicas for p in self._pools.values() if p.name != ROUTER}
        check_addresses(sum((sizes | {pool: replicas}).values()))
        if replicas > before.replicas:
            check_room(self.pods.settings.memory, pool, replicas - before.replicas, read_machine())
        self._pools[pool] = replace(before, replicas=replicas)
        self._turn_now()
        return f"{self.fleet.name}-{pool}: {before.replicas} -> {replicas} replicas"

    def apply(self, fleet: InferenceFleet, folder: Path) -> list[str]:
        """Take a changed document; the lines say which pools change."""
        self._refuse_if_stopping()
        if wrong := refused_changes(self.fleet, fleet):
            raise UserError("\n".join(wrong))
        model = locate_model(fleet.spec.model, folder)
        check_layouts(fleet, model)
        want = fleet_want(fleet, model=model)
        memory = self._plan_memory(fleet, want, model)
        old = {pool.name: pool for pool in self._want.pools}
        lines: list[str] = []
        for pool in want.pools:
            before = old.pop(pool.name, None)
            if before is None:
                lines.append(f"pool {pool.name}: new")
            elif before.revision != pool.revision:
                lines.append(f"pool {pool.name}: revision {before.revision} -> {pool.revision}")
            elif before.replicas != pool.replicas:
                lines.append(f"pool {pool.name}: {before.replicas} -> {pool.replicas} declared")
        lines += [f"pool {name}: removed" for name in old]
        self.fleet, self._want = fleet, want
        self.pods.settings = replace(self.pods.settings, memory=memory)
        self._drain_timeout_s = float(fleet.spec.drain.timeout_seconds)
        self._turn_now()
        return lines or ["nothing changed"]

    def _plan_memory(self, fleet: InferenceFleet, want: FleetWant, model: str) -> MemoryPlan:
        """The plan of a changed document, with the memory of the running engines counted as
        free."""
        machine = read_machine()
        running = sum(
            self.pods.settings.memory.of(pod.pod.pool).total_bytes
            for pod in self.pods
            if pod.is_alive and pod.pod.pool != ROUTER
        )
        room = replace(machine, available_bytes=machine.available_bytes + running)
        return plan_engines(fleet, pools_wanted(want, self._pools.values()), model, room)

    def _refuse_if_stopping(self) -> None:
        if self.is_stopping:
            raise UserError(f"fleet {self.fleet.name} is being taken down")

    # One turn of the loop.

    def _is_over(self) -> bool:
        return self.is_stopping and not self.pods.seen()

    def _turn_now(self) -> None:
        """Run a turn before the answer is sent: the next `status` must show no outdated Ready."""
        self._turn(time.monotonic())
        self.wake()

    def _turn(self, now: float) -> float:
        """Observe, decide, apply; seconds until the next turn."""
        try:
            wait_s = self._act(now)
        except OSError as error:  # such as no free descriptor: no reason to end what serves
            self._report("act", f"the supervisor could not act: {error}; it tries again")
            return _TURN_AT_LEAST_S
        self._report("act", "")
        # Room first, for what is written then.
        if now - self._rotated_at > _ROTATE_EVERY_S:
            self._rotated_at = now
            limit = self.pods.settings.log_limit
            for pod in self.pods:
                rotate(pod.log, limit)
            rotate(self.state.supervisor_log, limit)
        self._write_record()
        return wait_s

    def _act(self, now: float) -> float:
        for pod in self.pods.reap(now):
            leaving = pod.seen.draining_since is not None
            level = logging.INFO if leaving else logging.WARNING
            _log.log(level, "pod %s ended: %s", pod.pod.name, pod.exit_text())
        seen = FleetSeen(tuple(self._pools.values()), self.pods.seen(), self.status)
        planned = plan(self._want, seen, now)
        for action in planned.actions:
            self._apply(action)
        acted, keep_s = self.pods.keep(now, self._drain_timeout_s)
        if self.is_stopping and self._is_router_leaving():
            self.pods.stop_listening()
        if planned.actions or acted:
            return 0.0
        waits = [_TURN_AT_LEAST_S, keep_s, planned.recheck_after]
        return min(wait for wait in waits if wait is not None)

    def _is_router_leaving(self) -> bool:
        return any(
            pod.pod.pool == ROUTER and pod.seen.draining_since is not None for pod in self.pods
        )

    def _apply(self, action: PutWorkload | DrainPool | DeleteWorkload | SetStatus | Event) -> None:
        match action:
            case PutWorkload(workload):
                self.pods.put(workload)
            case DrainPool(pool):
                self.pods.drain_pool(pool)
            case DeleteWorkload(pool, revision):
                self.pods.delete(pool, revision)
            case SetStatus(status):
                self._publish(status)
            case Event(reason, message):
                _log.info("%s: %s", reason, message)

    def _publish(self, status: FleetProgress) -> None:
        was_ready = self.status is not None and self.status.ready
        self.status = status
        self._pools = {p.name: PoolSeen(p.name, p.replicas, p.declared) for p in status.pools}
        if status.ready and not was_ready:
            _log.info("fleet %s is ready: %s", self.fleet.name, self.pods.settings.endpoint)

    def _write_record(self) -> None:
        record = FleetRecord(
            self.fleet.name,
            self.pods.settings.endpoint,
            self.identity,
            self._drain_timeout_s,
            self.pods.records(),
        )
        if record == self._record:
            return
        try:
            self.state.write_record(record)
        except OSError as error:
            # The next turn tries again, in a second at the latest.
            self._report(
                "record",
                f"{self.state.record} cannot be written: {error.strerror or error}; it is tried"
                " again until there is room. Until then `xpyd down` would not find the pods of a"
                " supervisor that dies",
            )
        else:
            self._report("record", "")
            self._record = record

    def _report(self, what: str, problem: str) -> None:
        """Say in the log that there is a problem, or, where it is empty, that it is over."""
        before = self._problems.pop(what, "")
        if problem:
            self._problems[what] = problem
        if problem and problem != before:
            _log.error("%s", problem)
        elif before and not problem:
            _log.info("no more: %s", before)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    # Readiness.

    async def _probe_for_ever(self) -> None:
        while True:
            try:
                await self._probe()
            except Exception:  # a task's edge: a failed probe must not end the fleet
                _log.exception("probe")
            starting = any(pod.is_alive and not pod.is_ready for pod in self.pods)
            await asyncio.sleep(_PROBE_STARTING_S if starting else _PROBE_READY_S)

    async def _watch_for_ever(self) -> None:
        """Ask the startup and liveness probes that are due; keep() ends a pod that fails."""
        while True:
            now = time.monotonic()
            due = [pod for pod in self.pods if pod.is_alive and pod.probe_at <= now]
            # A task's edge: a failed probe must not end the fleet.
            for error in await asyncio.gather(
                *(self._watch(pod, now) for pod in due), return_exceptions=True
            ):
                if isinstance(error, Exception):
                    _log.error("liveness probe: %r", error)
            await asyncio.sleep(_WATCH_EVERY_S)

    async def _read_kv_for_ever(self) -> None:
        """Read what the router counts of KV."""
        port = self.pods.settings.admin_port
        while True:
            await asyncio.sleep(_READ_KV_EVERY_S)
            body = await asyncio.to_thread(get, ROUTER_HOST, port, QUERY)
            found: dict[str, Counts] = {}
            if body is not None:
                self.kv_counts = found[ROUTER] = read_counts(body.decode("utf-8", "replace"))
            said = await asyncio.to_thread(get, ROUTER_HOST, port, "/instances")
            seen = None if said is None else read_seen([said])
            self.kv = self._kv_watch.look(found, time.monotonic(), seen=seen)
            is_lost = self.kv.status is False
            self._report("kv", f"{self.kv.reason}: {self.kv.message}" if is_lost else "")

    async def _watch(self, pod: PodProcess, now: float) -> None:
        probe = self.pods.programs.probes(pod.pod.template).now(pod.seen)
        pod.probe_at = now + probe.period_s
        process = pod.identity
        alive = await asyncio.to_thread(is_alive, *self._http_of(pod), probe)
        if alive is not None and process is not None and pod.identity == process:
            pod.probed(probe, now, is_alive=alive)
            self.wake()

    async def _probe(self) -> None:
        """An engine is ready when it is healthy and the router picks it."""
        pods = [pod for pod in self.pods if pod.identity is not None]
        before = {pod: pod.identity for pod in pods}
        port = self.pods.settings.admin_port
        said = await asyncio.to_thread(read_said, ROUTER_HOST, port)
        relayed = None
        if self._is_router_leaving():
            relayed = read_relayed(await asyncio.to_thread(get, ROUTER_HOST, port, RELAYED_QUERY))
        unknown = [pod for pod in pods if not pod.is_healthy]
        healthy = await asyncio.gather(*(self._is_healthy(pod) for pod in unknown))
        now = time.monotonic()
        for pod, is_healthy in zip(unknown, healthy, strict=True):
            if is_healthy and pod.identity == before[pod]:
                pod.lives(now)
        for pod in pods:
            if pod.pod.pool == ROUTER:
                ready = pod.is_healthy and said is not None
                pod.is_loaded(relayed)
            else:
                address = f"{self.pods.settings.address(pod.pod.number)}:{HTTP_PORT}"
                found = (said or {}).get(address, _NOTHING)
                pod.is_loaded(None if said is None else found.load)
                ready = pod.is_healthy and found.is_ready
            self._set_ready(pod, ready and pod.seen.draining_since is None)

    async def _is_healthy(self, pod: PodProcess) -> bool:
        return await asyncio.to_thread(answers_health, *self._http_of(pod))

    def _http_of(self, pod: PodProcess) -> tuple[str, int]:
        settings = self.pods.settings
        if pod.pod.pool == ROUTER:
            # The admin port never speaks TLS, and answers for the same process.
            port = settings.router_port if settings.certificate is None else settings.admin_port
            return ROUTER_HOST, port
        return self.pods.settings.address(pod.pod.number), HTTP_PORT

    def _set_ready(self, pod: PodProcess, ready: bool) -> None:
        if ready == pod.is_ready:
            return
        pod.is_ready = ready
        pod.was_ready = pod.was_ready or ready
        _log.info("pod %s is %s", pod.pod.name, "ready" if ready else "not ready")
        self.wake()

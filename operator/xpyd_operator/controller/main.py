"""The operator as a program: makes the parts, starts and stops them, owns their tasks.

start: HTTP -> wait for the CRDs -> watches -> first lists are in -> workers -> /readyz
stop:  no new turns, those under way end, watches and connections close; a few seconds in all

A loop that ends, or a watch that nothing revives, ends the program within seconds: a new process
starts with nothing but the cluster's objects. See docs/adr/0042.

The HTTP port serves /healthz and /readyz for the kubelet and /metrics for Prometheus.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from xpyd_core.errors import XpydError
from xpyd_operator.controller.client import Api, Login, find_login
from xpyd_operator.controller.decision.cache import (
    Cache,
    Feed,
    FleetKey,
    Message,
    Missing,
    Unlisted,
)
from xpyd_operator.controller.decision.election import Election, Terms
from xpyd_operator.controller.decision.errors import KubeError
from xpyd_operator.controller.decision.kinds import ALWAYS, FLEET, FLEET_LABEL, OPTIONAL, POOL, Kind
from xpyd_operator.controller.downloads import DownloadReader
from xpyd_operator.controller.events import EventPoster
from xpyd_operator.controller.leader import Leader, Releases, place_of
from xpyd_operator.controller.nodes import NodeReader
from xpyd_operator.controller.probes import ProbeServer
from xpyd_operator.controller.reconcile import Reconciler, TurnFailed
from xpyd_operator.controller.routers import RouterReader
from xpyd_operator.controller.watch import Inbox, Watcher, listed
from xpyd_operator.controller.workqueue import FleetQueue
from xpyd_operator.manifests.names import Settings
from xpyd_operator.status.children import condition, text

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class OperatorMetrics:
    """The operator's metrics, one set per operator in its own CollectorRegistry. prometheus_client
    locks: any thread."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"xpyd_operator_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"xpyd_operator_{name}", text, labels, registry=registry)

        self.reconciles = counter("reconciles", "Turns of fleets that ended", "result")
        self.reconcile_seconds = Histogram(
            "xpyd_operator_reconcile_seconds",
            "A turn, with its calls",
            registry=registry,
            buckets=_SECONDS,
        )
        self._api_calls = counter(
            "api_calls", "Requests to the API server", "verb", "resource", "code"
        )
        self._watch_events = counter("watch_events", "Changes heard of", "kind")
        self._queue_depth = gauge("queue_depth", "Fleets that are due and wait for a worker")
        self._fleets = gauge("fleets", "Fleets there are")
        # Not `namespace`: a scrape sets that to the operator's own.
        self._lost_roles = gauge(
            "lost_roles", "1: the fleet's RolesReady is False", "fleet_namespace", "fleet", "reason"
        )
        self._drains_cut = counter(
            "drains_cut",
            "Instances that were ended when their drain had taken as long as it may",
            *("namespace", "fleet", "pool"),
        )
        self.events_dropped = counter("events_dropped", "Events that were not posted")

    def count_call(self, verb: str, resource: str, code: str) -> None:
        """Count a request that ended; code: HTTP status, or "error" where there was no answer."""
        self._api_calls.labels(verb, resource, code).inc()

    def count_watch_event(self, kind: str) -> None:
        """A watch delivered a change."""
        self._watch_events.labels(kind).inc()

    def count_cut(self, fleet: FleetKey, pool: str) -> None:
        """An instance was cut when its time to drain was over."""
        self._drains_cut.labels(*fleet, pool).inc()

    def render(
        self, *, queue_depth: int, fleets: int, lost: Iterable[tuple[str, str, str]] = ()
    ) -> bytes:
        """The text exposition. `lost`: namespace, name and reason of fleets that lack a role."""
        self._lost_roles.clear()
        for labels in lost:
            self._lost_roles.labels(*labels).set(1)
        self._queue_depth.set(queue_depth)
        self._fleets.set(fleets)
        return generate_latest(self._registry)


logger = logging.getLogger(__name__)

_CRD_POLL_S = 3.0
_OPTIONAL_POLL_S = 30.0
"""How soon a kind that is installed later is noticed; a call each for two small answers."""
_RESYNC_SPREAD_S = 0.02
"""Between two fleets of a resync: five hundred take ten seconds, and not all workers."""
_TURN_TIMEOUT_S = 300.0
"""Far more than a turn's calls take with all their attempts; it ends a turn that hangs."""
_STOP_TIMEOUT_S = 5.0
_WATCHDOG_S = 1.0


class OperatorBroken(XpydError):
    """A part of the operator ended by itself; another process may do better."""


@dataclass(frozen=True)
class OperatorConfig:
    """The flags of `xpyd operator`, complete. `namespaces` empty: all of them."""

    settings: Settings
    namespaces: tuple[str, ...] = ()
    workers: int = 8
    http_host: str = "0.0.0.0"
    http_port: int = 8080
    resync_s: float = 600.0
    release: str = ""
    """NAMESPACE/NAME of the Lease by which one replica of the release leads, and the mark on its
    fleets; "": it neither asks who leads nor marks fleets."""
    lease_s: float = 15.0
    upgrade_fleets: int = 0
    reads_nodes: bool = True


def run_operator(config: OperatorConfig) -> int:
    """Run until SIGTERM or SIGINT; the exit status. UserError: no way to the API server."""
    level = logging.getLogger().level
    if level > logging.DEBUG:
        logging.getLogger("kopf").setLevel(max(logging.WARNING, level))
        # kopf warns that it does not handle signals, as intended.
        logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    try:
        asyncio.run(_until_signalled(config))
    except OperatorBroken as error:
        logger.critical("%s", error)
        return 1
    return 0


async def _until_signalled(config: OperatorConfig) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # A wrong kubeconfig ends the program here, before anything waits for a login.
    await find_login()
    await Operator(config).run(stop)


class Operator:
    """The operator. `run` it once, in the loop that it is made in."""

    def __init__(
        self,
        config: OperatorConfig,
        *,
        find_login: Callable[[], Awaitable[Login]] = find_login,
    ) -> None:
        self._config = config
        self._find_login = find_login
        self.metrics = OperatorMetrics()
        self._leader: Leader | None = None
        # Not under the Lease, which it is for.
        self._lease_api = Api(find_login, count=self.metrics.count_call)
        if config.release:
            identity = f"{socket.gethostname()}_{token_hex(4)}"
            election = Election(identity, *place_of(config.release), Terms(config.lease_s))
            self._leader = Leader(self._lease_api, election, clock=time.monotonic)
        self._api = Api(find_login, count=self.metrics.count_call, write_s=self._write_s)
        self._cache = Cache()
        self._queue = FleetQueue(time.monotonic)
        self._poster = EventPoster(self._api, dropped=self.metrics.events_dropped.inc)
        self._routers = RouterReader(self._cache, self._queue.wake, clock=time.monotonic)
        self._nodes = NodeReader(self._api, self._cache, self._queue.wake, may=config.reads_nodes)
        self._downloads = DownloadReader(self._cache, self._queue.wake)
        self._reconciler = Reconciler(
            self._api,
            self._cache,
            self._poster,
            settings=config.settings,
            clock=time.monotonic,
            verdict=self._routers.verdict,
            has_pair=self._routers.has_pair,
            progress=self._downloads.progress,
            keys=self._routers.keys,
            loads=self._routers.loads,
            canary=self._routers.canary,
            gates=self._routers.gates,
            replicas=self._routers.replicas,
            ask_loads=self._routers.ask_loads,
            cordoned=self._nodes.cordoned,
            count_cut=self.metrics.count_cut,
            releases=Releases(self._lease_api, config.release, clock=time.monotonic),
            upgrade_fleets=config.upgrade_fleets,
        )
        self._feed = Feed(self._cache, lambda key, urgent: self._queue.wake(key, urgent=urgent))
        self._inbox = Inbox(self._receive)
        self._watchers: dict[tuple[Kind, ...], Watcher] = {}
        self._watched: set[Kind] = set()
        self._waits_for = "the API server"
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._turns = 0
        self.port = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set. Raises OperatorBroken when a part of it has ended."""
        probes = ProbeServer(
            unhealthy=self.unhealthy,
            unready=self.complaints,
            metrics=self._metrics_text,
            words=self._words,
        )
        self.port = await probes.start(self._config.http_host, self._config.http_port)
        logger.info("HTTP on port %d", self.port)
        starting = self._spawn(self._start(), "start")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        watchdog = asyncio.create_task(self._find_fault(), name="watchdog")
        try:
            await asyncio.wait((stopped, watchdog), return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                raise OperatorBroken(f"the operator ends: {watchdog.result()}")
        finally:
            logger.info("stopping")
            stopped.cancel()
            watchdog.cancel()
            starting.cancel()
            await self._stop()
            await probes.stop()

    async def _find_fault(self) -> str:
        """Returns when something is broken: what."""
        while True:
            # Threads and open streams report nothing: they are looked at.
            await asyncio.sleep(_WATCHDOG_S)
            if complaints := self.unhealthy():
                return "; ".join(complaints)

    async def _start(self) -> None:
        optional = await self._wait_for_kinds()
        self._watch(ALWAYS)
        for kind in optional:
            self._watch([kind])
        self._spawn(self._watch_for_kinds(), "kinds")
        if self._leader is None:
            self._begin()
        else:
            self._spawn(self._leader.run(self._begin), "leader")

    def _begin(self) -> None:
        """This operator works: it leads, or nobody else may."""
        for _ in range(self._config.workers):
            self._spawn(self._work(), "worker")
        self._spawn(self._poster.run(), "events")
        self._spawn(self._resync(), "resync")
        self._spawn(self._routers.run(), "routers")
        self._spawn(self._downloads.run(), "downloads")
        self._spawn(self._nodes.run(), "nodes")

    async def _stop(self) -> None:
        self._stopping = True
        workers = [task for task in self._tasks if task.get_name() == "worker" and not task.done()]
        # A worker that waits for a fleet has nothing to finish.
        for task in self._tasks:
            if task not in workers:
                task.cancel()
        watchers = [watcher.stop() for watcher in self._watchers.values()]
        self._queue.close()
        if workers:
            await asyncio.wait(workers, timeout=_STOP_TIMEOUT_S)
        for task in workers:
            task.cancel()
        await asyncio.gather(*watchers)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._leader is not None:
            await self._leader.resign()
        await self._api.close()
        await self._lease_api.close()

    def _write_s(self) -> float:
        return math.inf if self._leader is None else self._leader.write_s()

    def _words(self) -> str:
        if self._leader is None or self._leader.leads():
            return "ok"
        return f"standby: {self._leader.holder or 'nobody'} leads"

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        return task

    # Kinds

    async def _wait_for_kinds(self) -> list[Kind]:
        """Wait until our CRDs are there; the optional kinds that are."""
        while True:
            try:
                served = await self._api.resources(FLEET.api_version)
                if {FLEET.plural, POOL.plural} <= served:
                    return [kind for kind in OPTIONAL if await self._may_be_served(kind)]
                waits_for = f"the CRDs of {FLEET.api_version}: kubectl apply -f crds/"
            except KubeError as error:
                waits_for = f"the API server: {error}"
            if waits_for != self._waits_for:
                logger.warning("waiting for %s", waits_for)
            self._waits_for = waits_for
            await asyncio.sleep(_CRD_POLL_S)

    async def _may_be_served(self, kind: Kind) -> bool:
        """False only where the server says so: what is unknown, the watch of the kind finds out."""
        try:
            return await self._is_served(kind)
        except KubeError:
            return True

    async def _is_served(self, kind: Kind) -> bool:
        return kind.plural in await self._api.resources(kind.api_version)

    async def _watch_for_kinds(self) -> None:
        """Notice optional kinds that are installed later. Each has a watcher of its own: kopf
        ends all streams when one kind is removed.
        """
        while True:
            await asyncio.sleep(_OPTIONAL_POLL_S)
            for kind in [kind for kind in OPTIONAL if kind not in self._watched]:
                try:
                    if await self._is_served(kind):
                        logger.info("%s is installed now", kind.name)
                        self._watch([kind])
                except KubeError as error:
                    logger.debug("is %s installed? %s", kind.name, error)

    def _watch(self, kinds: Sequence[Kind]) -> None:
        self._watched.update(kinds)
        self._feed.expect(kinds, self._places())
        watcher = Watcher(
            kinds,
            self._config.namespaces,
            find_login=self._find_login,
            send=self._inbox.send,
            count=self.metrics.count_call,
            count_event=self.metrics.count_watch_event,
        )
        self._watchers[tuple(kinds)] = watcher
        watcher.start()

    def _unwatch(self, kind: Kind) -> None:
        """An optional kind was removed from the server."""
        watcher = self._watchers.pop((kind,), None)
        if watcher is None:
            return
        logger.warning("%s is not installed any more", kind.name)
        self._watched.discard(kind)
        self._feed.forget(kind)
        self._spawn(watcher.stop(), "watches")

    def _await_kind(self, kind: Kind) -> None:
        """A kind that is always needed was removed. Its watch goes on trying, and no fleet has a
        turn before the kind is back and listed."""
        if kind.plural not in self._feed.missing():
            logger.warning("%s is not installed any more; waiting for it", kind.name)
        self._feed.expect([kind], self._places())

    def _places(self) -> Sequence[str | None]:
        return self._config.namespaces or (None,)

    def _receive(self, message: Message) -> None:
        match message:
            case Missing(kind) if kind.optional:
                self._unwatch(kind)
            case Missing(kind):
                self._await_kind(kind)
            case Unlisted(kind):
                self._feed.waive(kind)
            case _:
                self._feed.receive(message)

    # Work

    async def _work(self) -> None:
        await self._nodes.asked()
        while (key := await self._queue.take()) is not None:
            begun = time.monotonic()
            result = "error"
            try:
                async with asyncio.timeout(_TURN_TIMEOUT_S):
                    recheck_after = await self._reconciler.turn(key, self._feed.listed)
                result = "done"
                took_s = time.monotonic() - begun
                self._queue.done(key, took_s=took_s, recheck_after=recheck_after)
            except TurnFailed as error:
                result = "failed"
                wait_s = self._queue.failed(key, at_least=error.retry_after_s)
                logger.warning("%s: %s; again in %g s", key, error, wait_s)
            except Exception:
                # A worker survives a fault in one fleet's turn.
                wait_s = self._queue.failed(key)
                logger.exception("%s: the turn broke; again in %g s", key, wait_s)
            if self._cache.document(key) is None:
                self._queue.forget(key)
            self._turns += 1
            self.metrics.reconciles.labels(result).inc()
            self.metrics.reconcile_seconds.observe(time.monotonic() - begun)

    async def _resync(self) -> None:
        """List everything and wake every fleet at intervals, to find what a watch missed."""
        while True:
            await asyncio.sleep(self._config.resync_s)
            for kind in sorted(self._watched, key=lambda kind: kind.name):
                for place in self._places():
                    try:
                        await self._list(kind, place)
                    except KubeError as error:
                        logger.warning("resync: %s were not listed: %s", kind.plural, error)
            if self._feed.is_synced:
                for number, key in enumerate(list(self._cache.documents())):
                    self._queue.wake(key, after=number * _RESYNC_SPREAD_S)

    async def _list(self, kind: Kind, place: str | None) -> None:
        selector = FLEET_LABEL if kind.labelled else ""
        parts = [
            listed(kind, place, page, first=True)
            async for page in self._api.pages(kind, place, selector=selector)
        ]
        # As one message: it must not mix with a list that the watch makes at the same time.
        objects = [obj for part in parts for obj in part.objects]
        self._feed.receive(replace(parts[0], objects=objects, last=True))

    # For HTTP

    def turns(self) -> int:
        """Turns that ended so far."""
        return self._turns

    def complaints(self) -> list[str]:
        """What the operator still waits for before it works; empty: nothing."""
        if not self._watched:
            return [f"waiting for {self._waits_for}"]
        kinds = self._feed.missing()
        return [*([f"not yet listed: {', '.join(kinds)}"] if kinds else []), *self.unhealthy()]

    def unhealthy(self) -> list[str]:
        """Faults that a restart may cure; empty: none."""
        now = time.monotonic()
        silent = sorted(
            {name for watcher in self._watchers.values() for name in watcher.silent(now)}
        )
        complaints = [f"watches that do nothing: {', '.join(silent)}"] if silent else []
        if self._leader is not None and self._leader.is_lost() and not self._stopping:
            complaints.append("the Lease could not be renewed, or another operator holds it")
        ended = sorted({t.get_name() for t in self._tasks if not self._stopping and _ended(t)})
        return [*complaints, *([f"tasks that ended: {', '.join(ended)}"] if ended else [])]

    def _metrics_text(self) -> bytes:
        fleets = self._cache.documents()
        roles = [(key, condition(self._cache.document(key), "RolesReady")) for key in fleets]
        return self.metrics.render(
            queue_depth=self._queue.depth(),
            fleets=len(roles),
            lost=[
                (key.namespace, key.name, text(found, "reason"))
                for key, found in roles
                if text(found, "status") == "False"
            ],
        )


_LOOPS = ("worker", "events", "resync", "kinds", "nodes")
"""Tasks that end only when the operator stops."""


def _ended(task: asyncio.Task[None]) -> bool:
    has_failed = task.done() and (task.cancelled() or task.exception() is not None)
    return has_failed or (task.done() and task.get_name() in _LOOPS)

"""Probes the instances that are due, and lets the fleet's time pass.

One task per router. Probes run concurrently up to a bound; `fleet.health` says which instance is
due when. An instance that comes into doubt is probed at once. A probe is GET /health on a
connection of its own, which shows whether the port still accepts; an engine without /health
answers 404, which shows as much.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
from collections.abc import Awaitable, Callable
from typing import cast

from xpyd_core.request_id import Address
from xpyd_router.fleet.health import ProbeResult
from xpyd_router.fleet.instances import Instance, Standing
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.upstream.client import Dialer

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})")
_STATUS_LINE_BYTES = 12
_OWN_FAULTS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)
"""A lack of files or ports here proves no fault of the instance."""


class _StatusReader(asyncio.Protocol):
    """Sends the request, reads the status line, ends."""

    def __init__(self, request: bytes, done: asyncio.Future[ProbeResult]) -> None:
        self._request = request
        self._done = done
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._read += data[:_STATUS_LINE_BYTES]
        if len(self._read) >= _STATUS_LINE_BYTES:
            found = _STATUS_LINE.match(self._read)
            is_answer = found is not None and int(found[1]) < 500
            self._end("ok" if is_answer else "status")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("reset")

    def _end(self, result: ProbeResult) -> None:
        if not self._done.done():
            self._done.set_result(result)


async def probe_http(to: Address, timeout_s: float, dialer: Dialer | None = None) -> ProbeResult:
    """Probe `to`, within `timeout_s`."""
    dialer = dialer or Dialer()
    loop = asyncio.get_running_loop()
    request = f"GET /health HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n".encode("ascii")
    done: asyncio.Future[ProbeResult] = loop.create_future()
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(
                lambda: _StatusReader(request, done),
                *(to.host, to.port),
                **dialer.options(to),
            )
            return await done
    except TimeoutError:
        return "timeout"
    except OSError as error:
        dialer.complain(to, error)
        return "void" if error.errno in _OWN_FAULTS else "connect"
    finally:
        if transport is not None:
            transport.abort()


logger = logging.getLogger(__name__)
_TICK_S = 0.25
_MAX_RUNNING = 64
_STALL_S = 0.5
"""A deadline noticed this late: the router itself did not run, so no instance had its time."""


class Prober:
    """See the module. `probe` asks one address within a deadline."""

    def __init__(
        self,
        fleet: FleetView,
        metrics: RouterMetrics,
        probe: Callable[[Address, float], Awaitable[ProbeResult]],
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._probe = probe
        self._timeout_s = fleet.rules.probe_timeout_s
        self._wake = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        fleet.on_standing(self._log_standing)

    async def run(self) -> None:
        """Probe until cancelled; then no probe is left."""
        try:
            while True:
                self._fleet.tick()
                for instance in self._fleet.take_probes(_MAX_RUNNING - len(self._running)):
                    task = asyncio.create_task(self._run_probe(instance))
                    self._running.add(task)
                    task.add_done_callback(self._ended)
                wait_s = min(_TICK_S, self._fleet.next_probe_s)
                if len(self._running) >= _MAX_RUNNING:
                    wait_s = _TICK_S
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _run_probe(self, instance: Instance) -> None:
        began_s = self._fleet.now_s
        result: ProbeResult = "void"
        try:
            result = await self._probe(instance.http, self._timeout_s)
            if result == "timeout" and self._fleet.now_s - began_s > self._timeout_s + _STALL_S:
                result = "void"
        except Exception:  # the task's edge: the instance must be probed again
            logger.exception("probe failed", extra={"instance": instance.name})
        self._metrics.probes.labels(result).inc()
        self._fleet.probed(instance, result, began_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._wake.set()

    def _log_standing(self, instance: Instance, before: Standing, cause: str) -> None:
        """A line and a count for what happens to an instance."""
        extra = {"instance": instance.name}
        match instance.standing:
            case "Ejected":
                self._metrics.ejections.labels(cause).inc()
                logger.warning("ejected: %s", cause, extra=extra)
                self._wake.set()
            case "Open":
                self._metrics.breaker_openings.inc()
                logger.warning("circuit breaker opened", extra=extra)
            case "Good":
                logger.info("is called again, was %s", before, extra=extra)
            case "HalfOpen" | "Trial":
                pass

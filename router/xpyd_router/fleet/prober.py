"""Probes who is due, and lets the fleet's time pass. The asyncio side of `health`.

One task per router, beside `discovery`. Probes run side by side up to a bound; whom to probe when
is `probe_plan`'s. Who comes into doubt is probed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from xpyd_core.request_id import Address
from xpyd_router.fleet.health import ProbeResult
from xpyd_router.fleet.registry import Instance, Standing
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_MAX_RUNNING = 64
_STALL_S = 0.5
"""A deadline noticed this late: the router itself did not run, so nobody was given his time."""


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
        fleet.on_standing(self._tell)

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

    def _tell(self, instance: Instance, before: Standing, cause: str) -> None:
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

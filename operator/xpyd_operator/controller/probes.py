"""The operator's own HTTP: /healthz and /readyz for kubelet, /metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

Check = Callable[[], list[str]]
"""What speaks against it; empty: nothing does."""

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ProbeServer:
    """Answers while the loop turns; that it answers at all is part of being healthy."""

    def __init__(self, *, unhealthy: Check, unready: Check, metrics: Callable[[], bytes]) -> None:
        self._unhealthy = unhealthy
        self._unready = unready
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the port, which `port` 0 leaves to the system."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._serve_metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return _answer(self._unhealthy())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _answer(self._unready())

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": _METRICS_TYPE})


def _answer(complaints: list[str]) -> web.Response:
    if complaints:
        return web.Response(status=503, text="\n".join(complaints) + "\n")
    return web.Response(text="ok\n")

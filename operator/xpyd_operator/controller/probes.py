"""The operator's HTTP port: /healthz and /readyz for the kubelet, /metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

Check = Callable[[], list[str]]
"""The reasons against it; empty: none."""

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ProbeServer:
    """Answers as long as the loop runs; an answer at all is part of being healthy."""

    def __init__(
        self,
        *,
        unhealthy: Check,
        unready: Check,
        metrics: Callable[[], bytes],
        words: Callable[[], str] = lambda: "ok",
    ) -> None:
        """`words`: what /readyz says where nothing is against it."""
        self._words = words
        self._unhealthy = unhealthy
        self._unready = unready
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the port, which `port` 0 leaves to the system."""
        app = web.Application()
        app.router.add_get("/healthz", _answering(self._unhealthy))
        app.router.add_get("/readyz", _answering(self._unready, self._words))
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

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": _METRICS_TYPE})


def _answering(
    check: Check, words: Callable[[], str] = lambda: "ok"
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        complaints = check()
        return web.Response(
            status=503 if complaints else 200, text="\n".join(complaints or [words()]) + "\n"
        )

    return answer

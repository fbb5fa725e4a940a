"""Puts the router together, serves, drains at SIGTERM or SIGINT.

At the first signal /readiness turns 503 while requests are still taken for `drain_s`; then no more
are accepted, running ones finish, and the exit status is 0. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import random
import signal
import socket
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from functools import partial

import uvicorn
import uvloop

from xpyd_core.errors import UserError
from xpyd_core.keys import fleet_keys, read_keys
from xpyd_core.listen import listen
from xpyd_router.admission.admission import Admission
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.discovery import Discovery
from xpyd_router.fleet.http_probe import probe_http
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.prober import Prober
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.policy.base import NO_SLO, Policy
from xpyd_router.policy.catalogue import build_policy
from xpyd_router.requests.draws import Draws
from xpyd_router.requests.flow import Flow
from xpyd_router.requests.objectives import Objectives
from xpyd_router.requests.picker import Picker
from xpyd_router.requests.releases import Releases
from xpyd_router.serving.access_log import AccessLog
from xpyd_router.serving.app import build_app
from xpyd_router.serving.http_protocol import ClientProtocol
from xpyd_router.serving.surface import Surface
from xpyd_router.tokens.service import Tokens
from xpyd_router.upstream.client import UpstreamClient

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_GC_THRESHOLD = 20_000
"""Requests make next to no cycles: collecting every 700 objects cost a twentieth of the time."""
_KEEP_ALIVE_S = 75
"""Longer than what clients and load balancers keep idle connections, so that they close first."""


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: `main` has the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _listen(config: RouterConfig) -> list[socket.socket]:
    try:
        return listen(config.host, config.port, backlog=_BACKLOG)
    except OSError as error:
        where = f"{config.host}:{config.port}"
        raise UserError(f"HTTP on {where}: {error.strerror or error}") from error


def _source_host(config: RouterConfig) -> str | None:
    """The pod's own loopback address, where it has one: then the engines see who calls."""
    for host in (config.discovery_host, config.host):
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(host)
            if address.version == 4 and address.is_loopback and host != "127.0.0.1":
                return host
    return None


def _protocol(config: RouterConfig) -> type[ClientProtocol]:
    """uvicorn makes the connections, with no word of ours: so the figure is the class's."""

    class Protocol(ClientProtocol):
        stall_s = config.request_timeout_s

    return Protocol


def _tokens(config: RouterConfig, fleet: FleetView, metrics: RouterMetrics) -> Tokens | None:
    """Who counts tokens, where a flag asks for it."""
    if not config.exact_prefixes:
        return None
    from xpyd_router.tokens.fetch import AiohttpFetch  # some megabytes that others do without

    fetch = AiohttpFetch(_source_host(config))
    return Tokens(fleet=fleet, fetch=fetch, metrics=metrics, clock=time.monotonic)


def _objectives(
    config: RouterConfig, policy: Policy, fleet: FleetView, loads: LoadTable, metrics: RouterMetrics
) -> Objectives | None:
    """Who learns how fast instances are, where a policy or an objective asks for it."""
    if not policy.needs_paces and config.slo == NO_SLO:
        return None
    return Objectives(
        config.slo,
        fleet=fleet,
        loads=loads,
        figures=metrics.instances,
        table=metrics.objectives,
        clock=time.monotonic,
    )


@dataclass
class RunningRouter:
    """A router that serves until `run` returns. Ports are the real ones."""

    surface: Surface
    http_port: int
    discovery_port: int
    _server: _Server
    _listeners: list[socket.socket]
    _drain_s: float
    _stop: asyncio.Event
    _force: asyncio.Event

    def stop(self) -> None:
        """Begin the drain; a second call ends at once."""
        if self._stop.is_set():
            self._server.force_exit = True
            self._force.set()
        self.surface.is_draining = True
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop`, then drain."""
        serving = asyncio.create_task(self._server.serve(sockets=self._listeners))
        stopping = asyncio.create_task(self._drain())
        done, _ = await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving in done:
            stopping.cancel()
        await serving

    async def _drain(self) -> None:
        await self._stop.wait()
        logger.info("draining: accepting for %g s more", self._drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                await self._force.wait()
        self._server.should_exit = True


@contextlib.asynccontextmanager
async def open_router(
    config: RouterConfig, protocol: type[asyncio.Protocol] | None = None
) -> AsyncGenerator[RunningRouter]:
    """A router with its ports bound and discovery running; leaving frees everything.

    `protocol` is uvicorn's `http`; None: ours, whose answers go straight to the transport.

    Raises UserError for a port that cannot be had and for an unusable key file.
    """
    keys = fleet_keys(config.kv_key_file, insecure=config.kv_insecure)
    admin_keys = ()
    if config.admin_key_file is not None:
        admin_keys = read_keys(config.admin_key_file, "--admin-key-file")
    if config.kv_insecure:
        logger.warning("--kv-insecure: whoever reaches the engines may read and write their KV")
    clock = time.monotonic
    metrics = RouterMetrics(clock)
    registry = Registry(
        period_s=config.heartbeat_interval_s,
        missed_beats=config.missed_beats,
        decode_alone=config.on_no_prefill == "PrefillOnDecode",
    )
    loads = LoadTable()
    policy = build_policy(config, loads=loads, random=random.random)
    fleet = FleetView(registry, clock, loads, config.health)
    fleet.on_gone(policy.forget)
    with contextlib.ExitStack() as sockets:
        listeners = [sockets.enter_context(listener) for listener in _listen(config)]
        discovery = Discovery(
            fleet,
            metrics,
            host=config.discovery_host,
            port=config.discovery_port,
            name=config.fleet,
            keys=keys,
            accepts_unsigned=config.kv_insecure or config.accept_unsigned_beats,
        )
        upstream = UpstreamClient(_source_host(config))
        tokens = _tokens(config, fleet, metrics)
        objectives = _objectives(config, policy, fleet, loads, metrics)
        fleet.on_lost(upstream.lose)
        access_log = AccessLog(
            is_json=config.logs_json, wall_clock=time.time, is_on=config.access_log
        )
        releases = Releases(upstream, metrics, keys[0])
        picker = Picker(config=config, fleet=fleet, policy=policy, metrics=metrics, clock=clock)
        flow = Flow(
            config=config,
            fleet=fleet,
            loads=loads,
            policy=policy,
            picker=picker,
            upstream=upstream,
            releases=releases,
            metrics=metrics,
            clock=clock,
            wall_clock=time.time,
            random_bytes=Draws(os.urandom),
            tokens=tokens,
            objectives=objectives,
        )
        surface = Surface(
            config=config,
            fleet=fleet,
            admission=Admission(config.limits, metrics, clock),
            flow=flow,
            metrics=metrics,
            access_log=access_log,
            clock=clock,
            created=int(time.time()),
            admin_keys=admin_keys,
        )
        server = _Server(
            uvicorn.Config(
                build_app(surface),
                http=protocol or _protocol(config),
                ws="none",
                lifespan="off",
                backlog=_BACKLOG,
                access_log=False,
                log_config=None,
                proxy_headers=False,  # nothing asks who the client is
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        prober = Prober(fleet, metrics, partial(probe_http, local_host=_source_host(config)))
        watching = [
            asyncio.create_task(work.run())
            for work in (discovery, prober, tokens, objectives)
            if work is not None
        ]
        for task in watching:
            task.add_done_callback(_report_death)
        try:
            yield RunningRouter(
                surface=surface,
                http_port=listeners[0].getsockname()[1],
                discovery_port=discovery.port,
                _server=server,
                _listeners=listeners,
                _drain_s=config.drain_s,
                _stop=asyncio.Event(),
                _force=asyncio.Event(),
            )
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await asyncio.gather(releases.close(), *([tokens.close()] if tokens else []))
            await upstream.close()
            access_log.flush()
            discovery.close()


def _report_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("discovery, probing, counting or sampling stopped: %r", error)


async def _serve(config: RouterConfig) -> None:
    async with open_router(config) as router:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, router.stop)
        logger.info(
            "router listens on http://%s:%d, discovery on %s:%d",
            *(config.host, router.http_port, config.discovery_host, router.discovery_port),
        )
        await router.run()
    logger.info("drained, bye")


def run_router(config: RouterConfig) -> int:
    """Serve until a signal; the exit status."""
    # What is imported stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 50)
    # uvicorn's start and stop lines say what ours say; its warnings are of single requests that are
    # no HTTP, of which anybody may send any number.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))
    return 0

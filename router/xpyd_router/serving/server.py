"""One process that serves: of what it knows of the fleet a server that runs until it has drained.

`main` and `processes.worker` make one, each with its own kind of fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import random
import socket
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import uvicorn

from xpyd_router.admission.admission import Admission
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.policy.base import NO_SLO, Policy
from xpyd_router.policy.catalogue import build_policy
from xpyd_router.requests.draws import Draws
from xpyd_router.requests.flow import Flow
from xpyd_router.requests.objectives import Objectives
from xpyd_router.requests.picker import Picker
from xpyd_router.requests.releases import Releases
from xpyd_router.serving.accepting import Acceptor
from xpyd_router.serving.access_log import AccessLog
from xpyd_router.serving.app import build_app
from xpyd_router.serving.http_protocol import ClientProtocol
from xpyd_router.serving.surface import Surface
from xpyd_router.serving.trimming import trim_after_bursts, trimmer
from xpyd_router.serving.whole import Whole
from xpyd_router.tokens.service import Tokens
from xpyd_router.upstream.client import UpstreamClient

logger = logging.getLogger(__name__)

BACKLOG = 4096
_KEEP_ALIVE_S = 75
"""Longer than what clients and load balancers keep idle connections, so that they close first."""


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, for `Serving` has the drain, and with our way to
    take connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        acceptors = [Acceptor(one, self._make_protocol) for one in sockets or ()]
        self.servers = cast("list[asyncio.Server]", acceptors)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        try:
            await super().serve(sockets)
        finally:
            # uvloop cannot close a loop in which somebody still waits for a file.
            for one in self.servers:
                one.close()

    def _make_protocol(self) -> asyncio.Protocol:
        # uvicorn's type says only that it is an asyncio.Protocol.
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        state = self.lifespan.state
        return make(config=self.config, server_state=self.server_state, app_state=state)


@dataclass
class Parts:
    """What a process serves with. `policy` is what Flow asks."""

    config: RouterConfig
    fleet: FleetView
    loads: LoadTable
    policy: Policy
    metrics: RouterMetrics
    whole: Whole
    admission: Admission
    access_log: AccessLog
    keys: tuple[bytes, ...] = field(repr=False)
    admin_keys: tuple[bytes, ...] = field(repr=False)
    created: int
    clock: Callable[[], float] = time.monotonic


class Serving:
    """A server that runs until `stop`; it then accepts for `drain_s` more and finishes."""

    def __init__(
        self, surface: Surface, server: _Server, listeners: Sequence[socket.socket]
    ) -> None:
        self.surface = surface
        self.http_port: int = listeners[0].getsockname()[1]
        self._server = server
        self._listeners = list(listeners)
        self._stop = asyncio.Event()
        self._force = asyncio.Event()

    def stop(self) -> None:
        """Begin the drain; a second call ends at once."""
        if self._stop.is_set():
            self._server.force_exit = True
            self._force.set()
        self.surface.is_draining = True
        self._stop.set()

    def close_ports(self) -> None:
        """Begin the drain, and accept no more from now on."""
        self.stop()
        self._force.set()

    async def run(self) -> None:
        """Serve until `stop`, then drain."""
        serving = asyncio.create_task(self._server.serve(sockets=self._listeners))
        stopping = asyncio.create_task(self._drain())
        done, _ = await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving in done:
            stopping.cancel()
        await serving

    async def _drain(self) -> None:
        drain_s = self.surface.config.drain_s
        await self._stop.wait()
        logger.info("draining: accepting for %g s more", drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._force.wait()
        self._server.should_exit = True


@contextlib.asynccontextmanager
async def open_serving(
    parts: Parts,
    listeners: Sequence[socket.socket],
    protocol: type[asyncio.Protocol] | None = None,
    works: Iterable[Coroutine[None, None, None]] = (),
) -> AsyncGenerator[Serving]:
    """A server on `listeners`, with `works` running beside it; leaving frees everything of it.

    `protocol` is uvicorn's `http`; None: ours, whose answers go straight to the transport.
    """
    config, fleet = parts.config, parts.fleet
    upstream = UpstreamClient(source_host(config))
    tokens, objectives = _tokens(parts), _objectives(parts)
    fleet.on_lost(upstream.lose)
    releases = Releases(upstream, parts.metrics, parts.keys[0])
    surface = _surface(parts, upstream, releases, tokens, objectives)
    server = _Server(
        uvicorn.Config(
            build_app(surface),
            http=protocol or _protocol(config),
            ws="none",
            lifespan="off",
            backlog=BACKLOG,
            access_log=False,
            log_config=None,
            proxy_headers=False,  # nothing asks who the client is
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
    )
    own = [one.run() for one in (tokens, objectives) if one is not None]
    if (trim := trimmer()) is not None:
        own.append(trim_after_bursts(lambda: parts.metrics.requests.in_flight, trim))
    watching = [asyncio.create_task(work) for work in (*works, *own)]
    for task in watching:
        task.add_done_callback(_report_death)
    try:
        yield Serving(surface, server, listeners)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await asyncio.gather(releases.close(), *([tokens.close()] if tokens else []))
        await upstream.close()
        parts.access_log.flush()


def _surface(
    parts: Parts,
    upstream: UpstreamClient,
    releases: Releases,
    tokens: Tokens | None,
    objectives: Objectives | None,
) -> Surface:
    picker = Picker(
        config=parts.config,
        fleet=parts.fleet,
        policy=parts.policy,
        metrics=parts.metrics,
        clock=parts.clock,
    )
    flow = Flow(
        config=parts.config,
        fleet=parts.fleet,
        loads=parts.loads,
        policy=parts.policy,
        picker=picker,
        upstream=upstream,
        releases=releases,
        metrics=parts.metrics,
        clock=parts.clock,
        wall_clock=time.time,
        random_bytes=Draws(os.urandom),
        tokens=tokens,
        objectives=objectives,
    )
    return Surface(
        config=parts.config,
        fleet=parts.fleet,
        admission=parts.admission,
        flow=flow,
        metrics=parts.metrics,
        whole=parts.whole,
        access_log=parts.access_log,
        clock=parts.clock,
        created=parts.created,
        admin_keys=parts.admin_keys,
    )


def make_policy(
    config: RouterConfig, fleet: FleetView, loads: LoadTable, first_turn: int = 0
) -> Policy:
    """The policy that `config` names, told of those that leave."""
    policy = build_policy(config, loads=loads, random=random.random, first_turn=first_turn)
    fleet.on_gone(policy.forget)
    return policy


def source_host(config: RouterConfig) -> str | None:
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


def _tokens(parts: Parts) -> Tokens | None:
    """Who counts tokens, where a flag asks for it."""
    if not parts.config.exact_prefixes:
        return None
    from xpyd_router.tokens.fetch import AiohttpFetch  # some megabytes that others do without

    fetch = AiohttpFetch(source_host(parts.config))
    return Tokens(fleet=parts.fleet, fetch=fetch, metrics=parts.metrics, clock=parts.clock)


def _objectives(parts: Parts) -> Objectives | None:
    """Who learns how fast instances are, where a policy or an objective asks for it."""
    if not parts.policy.needs_paces and parts.config.slo == NO_SLO:
        return None
    return Objectives(
        parts.config.slo,
        fleet=parts.fleet,
        loads=parts.loads,
        figures=parts.metrics.instances,
        table=parts.metrics.objectives,
        clock=parts.clock,
    )


def _report_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("discovery, probing, counting or sampling stopped: %r", error)

"""The HTTP server of one process: from its view of the fleet to a uvicorn server that drains.

`router` and `processes.worker` make one, each with its own kind of fleet view. `Acceptor` takes new
connections in place of asyncio's server: uvloop takes one connection in a turn of the loop (libuv
does since 1.45), and a turn of a busy router is long, so of clients that connect together the last
would wait until the first had been served hundreds of times. `trim_after_bursts` gives freed memory
back to the system: the C library keeps what is freed in the middle of its heap, and after 256
clients with prompts of 32 KiB a router would stay at twice the size that it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from xpyd_core.tls import WatchedContext
from xpyd_core.tls_connection import TlsServer
from xpyd_router.app_state import AppState
from xpyd_router.canary import CanaryWatch
from xpyd_router.config import RouterConfig
from xpyd_router.cross_site import CrossSite
from xpyd_router.http.app import admin_app, build_app
from xpyd_router.http.asgi import AsgiApp
from xpyd_router.http.origins import OriginGuard
from xpyd_router.http.patience import Places
from xpyd_router.http.protocol import ClientProtocol
from xpyd_router.metrics import RouterMetrics
from xpyd_router.policy.base import NO_SLO
from xpyd_router.request.flow import Flow
from xpyd_router.request.objectives import Objectives
from xpyd_router.request.releases import Releases
from xpyd_router.tokens.service import Tokens, fetch
from xpyd_router.upstream.client import Dialer, UpstreamClient

logger = logging.getLogger(__name__)
_MOST_AT_ONCE = 128
"""A turn in which so many begin takes some milliseconds."""
_REST_S = 1.0
"""Between two tries where there is no file or memory for a connection."""
_CLOSING_S = 0.001
"""A file is free some turns of the loop after its connection was closed."""
_CROWDED_S = 0.1
"""Between two where each connection is served a request: who comes waits in the kernel's queue."""


class Acceptor:
    """Accepts on `listener`, which it owns, until `close`. It takes the place of uvicorn's
    asyncio.Server, and has what uvicorn asks of one. `places`: what clients may take; None: all.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        places: Places | None = None,
    ) -> None:
        self._listener = listener
        self._places = places
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._rest: asyncio.TimerHandle | None = None
        self._is_closed = False
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._rest is not None:
            self._rest.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    async def wait_closed(self) -> None:
        """Wait until no connection is being made."""
        if self._beginning:
            await asyncio.wait(self._beginning)

    def _accept(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # it left while it waited
            except OSError as error:
                if self._makes_room():
                    return
                logger.error("cannot accept connections, next try in %g s: %s", _REST_S, error)
                self._pause(_REST_S)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)
            if self._places is not None and self._places.is_crowded(connection.fileno()):
                if not self._makes_room():
                    self._pause(_CROWDED_S)
                return

    def _makes_room(self) -> bool:
        """Whether connections are closing; then it goes on when their files are free."""
        if self._places is None or not self._places.make_room():
            return False
        self._pause(_CLOSING_S)
        return True

    def _pause(self, rest_s: float) -> None:
        self._loop.remove_reader(self._listener)
        self._rest = self._loop.call_later(rest_s, self._go_on)

    def _go_on(self) -> None:
        self._rest = None
        if self._places is not None and self._is_crowded(self._places):
            self._pause(_CROWDED_S)
        else:
            self._loop.add_reader(self._listener, self._accept)

    def _is_crowded(self, places: Places) -> bool:
        """Whether the next connection would be one too many, and none makes room for it."""
        try:
            with self._listener.dup() as newest:
                number = newest.fileno()
        except OSError:
            return not places.make_room()  # no file is left
        return places.is_crowded(number) and not places.make_room()

    async def _begin(self, connection: socket.socket) -> None:
        try:
            _, protocol = await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError as error:
            logger.debug("a connection did not begin: %s", error)
            connection.close()
            return
        if self._is_closed:
            # The other connections were closed before this one existed.
            cast(HttpToolsProtocol, protocol).shutdown()  # TlsConnection has it, too


_LOOK_S = 1.0
_LEAST_REQUESTS = 32
"""Fewer in flight leave nothing that is worth a look at the whole heap."""
_FALLEN_TO = 8
"""A burst is over when this part of it is left."""


class BurstEnd:
    """Tells when the requests in flight have fallen. Pure."""

    def __init__(self) -> None:
        self._most = 0

    def is_over(self, in_flight: int) -> bool:
        """Whether a burst that was seen before is over, which is said once."""
        self._most = max(self._most, in_flight)
        if self._most < _LEAST_REQUESTS or in_flight * _FALLEN_TO > self._most:
            return False
        self._most = in_flight
        return True


def trimmer() -> Callable[[], None] | None:
    """Gives free pages back, in some milliseconds; None where the C library cannot (only glibc has
    malloc_trim).
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    return partial(trim, 0)


async def trim_after_bursts(
    in_flight: Callable[[], int], trim: Callable[[], None], look_s: float = _LOOK_S
) -> None:
    """Call `trim` after each burst, for ever."""
    burst_end = BurstEnd()
    while True:
        await asyncio.sleep(look_s)
        if burst_end.is_over(in_flight()):
            trim()


BACKLOG = 4096
_KEEP_ALIVE_S = 75
"""Longer than what clients and load balancers keep idle connections, so that they close first."""


_LAST_ANSWERS_S = 2.0
"""For what is still asked at the admin port when the last client has its answer."""


class Listeners(NamedTuple):
    """Listening sockets: the port of clients, and that of metrics, instances and the admin API. Of
    each the first has the port that is meant."""

    clients: Sequence[socket.socket]
    admin: Sequence[socket.socket]


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, for `Serving` has the drain, and with our way to
    take connections. Connections to the listeners of `admin` get that application, until the last
    request of a client has ended: who waits for a drain reads there what is left (docs/adr/0108).
    Those of clients are made by `tls`, where there is one.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        admin: uvicorn.Config,
        listeners: Listeners,
        tls: TlsServer | None,
        count: Callable[[int], object],
    ) -> None:
        """`count` is told how many connections made room for others."""
        super().__init__(config)
        self._count = count
        self._admin = admin
        self._admin_state = ServerState()
        self._admin_acceptors: list[Acceptor] = []
        self._listeners = listeners
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        make, tls = partial(self._make_protocol, self.config, self.server_state), self._tls
        make_admin = partial(self._make_protocol, self._admin, self._admin_state)
        open_ones = self.server_state.connections, self._admin_state.connections
        places = Places(open_ones, self._count, tls)
        wrapped = make if tls is None else partial(tls.wrap, make)
        clients = [Acceptor(one, wrapped, places) for one in self._listeners.clients]
        self.servers = cast("list[asyncio.Server]", clients)
        self._admin_acceptors = [Acceptor(one, make_admin) for one in self._listeners.admin]

    async def on_tick(self, counter: int) -> bool:
        is_over = await super().on_tick(counter)
        self._admin_state.default_headers = self.server_state.default_headers
        return is_over

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self.close_admin()
        state = self._admin_state
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ANSWERS_S):
                for one in self._admin_acceptors:
                    await one.wait_closed()
                # As uvicorn does: what is waited for has no event.
                while (state.connections or state.tasks) and not self.force_exit:  # noqa: ASYNC110
                    await asyncio.sleep(_CLOSING_S)

    def close_admin(self) -> None:
        """Take no more connections to the admin port."""
        for one in self._admin_acceptors:
            one.close()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        try:
            await super().serve(sockets)
        finally:
            # uvloop cannot close a loop in which a file is still watched.
            for one in self.servers:
                one.close()
            self.close_admin()
            if self._tls is not None:
                self._tls.close()

    def _make_protocol(self, config: uvicorn.Config, state: ServerState) -> asyncio.Protocol:
        # uvicorn's type says only that it is an asyncio.Protocol.
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(config=config, server_state=state, app_state=self.lifespan.state)


class Serving:
    """A server that runs until `stop`; it then accepts for `drain_s` more and finishes."""

    def __init__(self, state: AppState, server: _Server) -> None:
        self.state = state
        self.discovery_port = 0
        """Where engines beat to, if to this process."""
        self._server = server
        self._stop = asyncio.Event()
        self._force = asyncio.Event()

    @property
    def http_port(self) -> int:
        """Where clients connect."""
        return self.state.http_port

    @property
    def admin_port(self) -> int:
        """Where metrics, instances and the admin API are."""
        return self.state.admin_port

    def stop(self) -> None:
        """Begin the drain; a second call ends at once."""
        if self._stop.is_set():
            self._server.force_exit = True
            self._force.set()
        self.state.is_draining = True
        self.state.fleet.wake()  # what waits for an instance that will not come ends
        self._stop.set()

    def close_ports(self) -> None:
        """Begin the drain, and accept no more from now on, on neither port: whoever comes in this
        process' place needs them."""
        self.stop()
        self._server.close_admin()
        self._force.set()

    async def run(self) -> None:
        """Serve until `stop`, then drain."""
        serving = asyncio.create_task(self._server.serve())
        stopping = asyncio.create_task(self._drain())
        done, _ = await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving in done:
            stopping.cancel()
        await serving

    async def _drain(self) -> None:
        drain_s = self.state.config.drain_s
        await self._stop.wait()
        logger.info("draining: accepting for %g s more", drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._force.wait()
        self._server.should_exit = True


@contextlib.asynccontextmanager
async def open_serving(
    state: AppState,
    listeners: Listeners,
    protocol: type[asyncio.Protocol] | None = None,
    works: Iterable[Coroutine[None, None, None]] = (),
    tls: TlsServer | None = None,
    dialer: Dialer | None = None,
) -> AsyncGenerator[Serving]:
    """A server on `listeners`, over `tls` where there is one, with `works` running as tasks;
    leaving frees everything of it.

    `protocol` is uvicorn's `http`; None: ours, whose answers go straight to the transport.
    """
    config, fleet = state.config, state.fleet
    dialer = dialer or make_dialer(config, state.metrics)
    upstream = UpstreamClient(dialer)
    tokens, objectives = _tokens(state, dialer), _objectives(state)
    fleet.on_lost(upstream.lose)
    releases = Releases(upstream, state.metrics, state.keys)
    flow = Flow(state, upstream, releases, tokens=tokens, objectives=objectives)
    reader = ThreadPoolExecutor(1, thread_name_prefix="bodies")  # starts with the first long one
    state.http_port, state.admin_port = (sockets[0].getsockname()[1] for sockets in listeners)
    configure = partial(
        uvicorn.Config,
        http=protocol or _protocol(config),
        ws="none",
        lifespan="off",
        backlog=BACKLOG,
        access_log=False,
        log_config=None,
        proxy_headers=False,  # the client's address is not used
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    rules, admin = config.cross_site, cast(AsgiApp, admin_app(state))
    app = OriginGuard(build_app(state, flow, upstream, reader), rules, listeners.clients)
    # No page has business with the admin port, but it has the same names.
    admin = OriginGuard(admin, CrossSite(hosts=rules.hosts), listeners.admin)
    count = state.metrics.displaced_connections.inc
    server = _Server(configure(app), configure(admin), listeners, tls, count)
    own = [one.run() for one in (tokens, objectives) if one is not None]
    if state.client_keys is not None:
        own.append(state.client_keys.watch.run())
    if config.canary_file is not None:
        canary = CanaryWatch(config.canary_file, state.policy, state.metrics.canary)
        canary.look()
        own.append(canary.run())
    own += [one.watch() for one in (tls and tls.context, dialer.tls) if one is not None]
    if (trim := trimmer()) is not None:
        own.append(trim_after_bursts(lambda: state.metrics.requests.in_flight, trim))
    try:
        async with running(*works, *own):
            yield Serving(state, server)
    finally:
        await asyncio.gather(releases.close(), *([tokens.close()] if tokens else []))
        await upstream.close()
        if state.client_keys is not None:
            state.client_keys.ring.close()
        reader.shutdown(wait=False, cancel_futures=True)
        state.access_log.flush()


@contextlib.asynccontextmanager
async def running(*works: Coroutine[None, None, None]) -> AsyncGenerator[None]:
    """`works` run as tasks meanwhile. One that ends by an error is logged."""
    tasks = [asyncio.create_task(work) for work in works]
    for task in tasks:
        task.add_done_callback(_report_death)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def source_host(config: RouterConfig) -> str | None:
    """The pod's own loopback address, where it has one: then engines see which router calls."""
    for host in (config.discovery_host, config.host):
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(host)
            if address.version == 4 and address.is_loopback and host != "127.0.0.1":
                return host
    return None


def _protocol(config: RouterConfig) -> type[ClientProtocol]:
    """uvicorn makes the connections without a parameter of ours: so the limit is the class's."""

    class Protocol(ClientProtocol):
        stall_s = config.request_timeout_s

    return Protocol


def make_tls(config: RouterConfig, metrics: RouterMetrics) -> TlsServer | None:
    """What makes the connections of the HTTP port, where they are TLS. UserError for unusable
    certificates."""
    if config.tls is None:
        return None
    context = WatchedContext(config.tls, "--ssl-certfile")
    metrics.watch_certificate(context, "server")
    return TlsServer(context, lambda result: metrics.tls_handshakes.labels(result).inc())


def make_dialer(config: RouterConfig, metrics: RouterMetrics) -> Dialer:
    """How this process connects to engines. UserError for unusable certificates."""
    context = None
    if config.engine_tls is not None:
        context = WatchedContext(config.engine_tls, "--engine-ca-file")
        if config.engine_tls.certificate is not None:
            metrics.watch_certificate(context, "client")
    return Dialer(source_host(config), context, config.engine_server_name)


def _tokens(state: AppState, dialer: Dialer) -> Tokens | None:
    """The token counter, where a flag asks for it."""
    if not state.config.exact_prefixes:
        return None
    own_fetch = partial(fetch, dialer=dialer)
    return Tokens(fleet=state.fleet, fetch=own_fetch, metrics=state.metrics, clock=state.clock)


def _objectives(state: AppState) -> Objectives | None:
    """The objectives, where a policy or an objective needs the paces of instances."""
    if not state.policy.needs_paces and state.config.slo == NO_SLO:
        return None
    return Objectives(
        state.config.slo,
        fleet=state.fleet,
        loads=state.loads,
        instance_metrics=state.metrics.instances,
        table=state.metrics.objectives,
        clock=state.clock,
    )


def _report_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("%s stopped: %r", task.get_coro(), error)

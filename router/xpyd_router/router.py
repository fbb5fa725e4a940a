"""Puts the router together, serves, drains at SIGTERM or SIGINT.

At the first signal /readiness turns 503 while requests are still taken for `drain_s`; then no more
are accepted, running ones finish, and the exit status is 0; the admin port closes last. Requests
that no instance will serve any more get 503 at once. A second signal ends at once, one that
comes before it listens ends the start. `http.server` is the half that serves; with several
processes `processes.parent` takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import uvloop

from xpyd_core.errors import UserError
from xpyd_core.keys import FleetKeys, Keys, fleet_keys
from xpyd_core.listen import inherited, listen
from xpyd_core.request_id import Address
from xpyd_router.access_log import AccessLog
from xpyd_router.admission import Admission
from xpyd_router.app_state import AppState, LocalControl, make_policy, open_keys
from xpyd_router.config import RouterConfig
from xpyd_router.discovery.asker import Asker
from xpyd_router.discovery.discovery import Discovery
from xpyd_router.discovery.prober import Prober, probe_http
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView
from xpyd_router.http.server import (
    BACKLOG,
    Listeners,
    Serving,
    make_dialer,
    make_tls,
    open_serving,
)
from xpyd_router.metrics import RouterMetrics
from xpyd_router.request.introductions import Introducer
from xpyd_router.request.pair_probes import PairProber
from xpyd_router.upstream.client import Dialer

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""The signals that end a router."""
_GC_THRESHOLD = 20_000
"""Requests make next to no cycles: collecting every 700 objects cost a twentieth of the time."""


def read_secrets(config: RouterConfig) -> tuple[Keys, Keys]:
    """The fleet's keys and the admin API's. UserError for an unusable file."""
    keys = fleet_keys(config.kv_key_file, insecure=config.kv_insecure)
    admin_keys = open_admin_keys(config)
    if config.kv_insecure:
        logger.warning("--kv-insecure: any host that reaches engines may read and write their KV")
    return keys, admin_keys


def open_admin_keys(config: RouterConfig, known: Keys = ()) -> Keys:
    """The keys of the admin API, which follow their file; `known`: see FleetKeys."""
    path = config.admin_key_file
    return () if path is None else FleetKeys(path, known=known, what="--admin-key-file")


def make_registry(config: RouterConfig) -> Registry:
    """An empty one with the rules of `config`."""
    return Registry(
        period_s=config.heartbeat_interval_s,
        missed_beats=config.missed_beats,
        decode_alone=config.without_pair.on_no_prefill == "PrefillOnDecode",
        prefill_alone=config.without_pair.on_no_decode == "DecodeOnPrefill",
        same_revision=config.pairing == "SameRevision",
        only_verified=config.kv_verify == "strict",
    )


def make_discovery(
    config: RouterConfig, fleet: FleetView, metrics: RouterMetrics, keys: Keys
) -> Discovery:
    """The bound discovery port. UserError where it cannot be had."""
    return Discovery(
        fleet,
        metrics,
        host=config.discovery_host,
        port=config.discovery_port,
        name=config.fleet,
        keys=keys,
        accepts_unsigned=config.kv_insecure or config.accept_unsigned_beats,
    )


def make_prober(fleet: FleetView, metrics: RouterMetrics, dialer: Dialer) -> Prober:
    """The prober of the instances of `fleet`."""
    return Prober(fleet, metrics, partial(probe_http, dialer=dialer))


def make_asker(config: RouterConfig, fleet: FleetView, dialer: Dialer) -> Asker:
    """What asks the instances of the list."""
    return Asker(
        fleet,
        config.static_instances,
        period_s=config.heartbeat_interval_s,
        dialer=dialer,
    )


def make_introducer(
    fleet: FleetView, metrics: RouterMetrics, keys: Keys, dialer: Dialer
) -> Introducer:
    """What introduces Ps and Ds of different engines."""
    return Introducer(fleet, metrics, keys=keys, dialer=dialer)


def make_pair_prober(
    config: RouterConfig, fleet: FleetView, metrics: RouterMetrics, keys: Keys, dialer: Dialer
) -> PairProber:
    """What probes the way from each P to each D."""
    return PairProber(
        fleet,
        metrics,
        keys=keys,
        random=random.random,
        period_s=config.kv_probe_s,
        dialer=dialer,
    )


@dataclass(frozen=True)
class Port:
    """One of the two HTTP ports, as its flags say. `descriptor`: an inherited socket, in place of
    the address."""

    host: str
    number: int
    flag: str
    descriptor: int | None

    def inherit(self) -> socket.socket | None:
        """The inherited socket, if there is one. UserError where it is none."""
        if self.descriptor is None:
            return None
        try:
            return inherited(self.descriptor)
        except OSError as error:
            flag = self.flag.replace("port", "listen-fd")
            raise UserError(f"{flag} {self.descriptor}: {error.strerror or error}") from error

    def taken(self, error: OSError) -> UserError:
        """Why the port cannot be had."""
        where = f"{self.host}:{self.number}"
        return UserError(f"{self.flag}: HTTP on {where}: {error.strerror or error}")


def http_ports(config: RouterConfig) -> tuple[Port, Port]:
    """The port of clients, and the admin port."""
    return (
        Port(config.host, config.port, "--port", config.listen_fd),
        Port(config.host, config.admin_port, "--admin-port", config.admin_listen_fd),
    )


def _listen(port: Port) -> list[socket.socket]:
    if (found := port.inherit()) is not None:
        return [found]
    try:
        return listen(port.host, port.number, backlog=BACKLOG)
    except OSError as error:
        raise port.taken(error) from error


@contextlib.asynccontextmanager
async def open_router(
    config: RouterConfig, protocol: type[asyncio.Protocol] | None = None
) -> AsyncGenerator[Serving]:
    """A router of one process with its ports bound and discovery running; leaving frees everything.

    `protocol` is uvicorn's `http`; None: ours, whose answers go straight to the transport.

    Raises UserError for a port that cannot be had and for unusable files of keys or certificates.
    """
    keys, admin_keys = read_secrets(config)
    clock = time.monotonic
    metrics = RouterMetrics(clock)
    tls, dialer = make_tls(config, metrics), make_dialer(config, metrics)
    loads = LoadTable()
    fleet = FleetView(make_registry(config), clock, loads, config.health)
    client_keys = open_keys(config, metrics, clock)
    if client_keys is not None:
        client_keys.watch.load()
    state = AppState(
        config=config,
        fleet=fleet,
        loads=loads,
        policy=make_policy(config, fleet, loads),
        metrics=metrics,
        control=LocalControl(fleet, metrics),
        admission=Admission(config.limits, metrics, clock, keeps_spare=config.needs_keys),
        access_log=AccessLog(
            is_json=config.logs_json, wall_clock=time.time, is_on=config.access_log
        ),
        keys=keys,
        admin_keys=admin_keys,
        client_keys=client_keys,
        created=int(time.time()),
        started_s=clock(),
        clock=clock,
    )
    with contextlib.ExitStack() as stack:
        opened = [[stack.enter_context(one) for one in _listen(p)] for p in http_ports(config)]
        discovery = make_discovery(config, fleet, metrics, keys)
        stack.callback(discovery.close)
        prober = make_prober(fleet, metrics, dialer)
        introducer = make_introducer(fleet, metrics, keys, dialer)
        asker = make_asker(config, fleet, dialer)
        pair_prober = make_pair_prober(config, fleet, metrics, keys, dialer)
        works = (discovery.run(), prober.run(), asker.run(), introducer.run(), pair_prober.run())
        async with open_serving(
            state, Listeners(*opened), protocol, works, tls=tls, dialer=dialer
        ) as serving:
            serving.discovery_port = discovery.port
            yield serving


class Running(Protocol):
    """A router that is served by one process, or the parent of several. Ports are the real ones."""

    @property
    def http_port(self) -> int: ...
    @property
    def admin_port(self) -> int: ...
    @property
    def discovery_port(self) -> int: ...
    def stop(self) -> None: ...
    async def run(self) -> None: ...


async def serve_until_signal(
    opening: contextlib.AbstractAsyncContextManager[Running], config: RouterConfig
) -> None:
    """Open a router and run it; the first signal drains it, the second ends it. One that comes
    before it is open cancels `opening`, which frees what it has.
    """
    task = asyncio.current_task()
    assert task is not None

    def leave() -> None:
        if not task.cancelling():  # a second one does not cut short what is freed
            task.cancel()

    _on_signals(leave)
    async with contextlib.AsyncExitStack() as stack:
        try:
            router = await stack.enter_async_context(opening)
        except asyncio.CancelledError:
            logger.info("stopped before it listened")
            return
        _on_signals(router.stop)
        logger.info(
            "router listens on %s://%s, admin port http://%s, discovery on %s",
            "http" if config.tls is None else "https",
            Address(config.host, router.http_port),
            Address(config.host, router.admin_port),
            Address(config.discovery_host, router.discovery_port),
        )
        await router.run()
        logger.info("drained")


def _on_signals(act: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, act)


def tune_process() -> None:
    """Settings of a process that serves."""
    # What is imported stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 50)
    # uvicorn's own start and stop lines say what ours say.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def run_router(config: RouterConfig) -> int:
    """Serve with one process until a signal; the exit status."""
    tune_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_until_signal(open_router(config), config))
    return 0

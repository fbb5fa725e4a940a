"""The HTTP client for engines: connections kept per engine, deadlines, calls to lost engines ended.

`request` calls engines through it. A connection is kept for less time than engines keep theirs; one
that an engine closed all the same, before a byte of the answer, costs one fresh try. In a local
fleet the router is a pod with a loopback address of its own, by which engines see which router
calls (`Dialer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Iterable
from functools import cache
from typing import TypedDict

from xpyd_core.bodies import LongBody
from xpyd_core.request_id import Address, TlsAddress
from xpyd_core.tls import WatchedContext
from xpyd_router.errors import CallFailed
from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.upstream.connection import EngineConnection, Exchange

logger = logging.getLogger(__name__)
_MAX_COMPLAINTS = 256


class DialOptions(TypedDict):
    """What asyncio's `create_connection` gets besides host and port."""

    local_addr: tuple[str, int] | None
    ssl: ssl.SSLContext | None
    server_hostname: str | None


class Dialer:
    """How engines are connected to: from which address, and over TLS where they serve it.

    `local_host` is the router's own loopback address, where it has one. `tls` are the authorities
    that engines' certificates must come from, and the router's own certificate; None: the system's
    authorities, and no certificate. `server_name` is a name that is in every engine's certificate;
    None: the certificate has the engine's address. See docs/adr/0083.
    """

    def __init__(
        self,
        local_host: str | None = None,
        tls: WatchedContext | None = None,
        server_name: str | None = None,
    ) -> None:
        self._local_host = local_host
        self.tls = tls
        self._server_name = server_name
        self._complaints: set[str] = set()

    def options(self, to: Address) -> DialOptions:
        """For a connection to `to`."""
        if not isinstance(to, TlsAddress):
            return DialOptions(local_addr=self.source(to), ssl=None, server_hostname=None)
        return DialOptions(
            local_addr=self.source(to),
            ssl=_system_context() if self.tls is None else self.tls.current,
            server_hostname=self._server_name or to.host,
        )

    def source(self, to: Address) -> tuple[str, int] | None:
        """asyncio's `local_addr`: the router's own loopback address, one of IPv4, where `to` is
        one, too; else None, and the system chooses.
        """
        if self._local_host is None:
            return None
        try:
            address = ipaddress.IPv4Address(to.host)
        except ValueError:
            return None
        return (self._local_host, 0) if address.is_loopback else None

    def complain(self, to: Address, error: Exception) -> None:
        """Log why an engine is not connected to, where that is TLS; each reason once."""
        if not isinstance(error, ssl.SSLError):
            return
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        line = f"TLS with the engine at {to}: {reason}"
        if line not in self._complaints and len(self._complaints) < _MAX_COMPLAINTS:
            self._complaints.add(line)
            logger.warning("%s (see --engine-ca-file and --engine-server-name)", line)


@cache
def _system_context() -> ssl.SSLContext:
    return ssl.create_default_context()


CONNECT_TIMEOUT_S = 2.0
_IDLE_S = 4.0
"""Engines under uvicorn close an idle connection after 5 s: ours must be given up before."""
_MAX_IDLE = 1024
"""Kept connections per engine."""
_SWEEP_S = 0.1
_STALE_S = 0.1
"""Within this time after sending a reset means a connection that was closed while it was idle."""


class UpstreamClient:
    """See the module. Used in one event loop; closed by its owner."""

    def __init__(self, dialer: Dialer | None = None) -> None:
        self._dialer = dialer or Dialer()
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Address, list[EngineConnection]] = {}
        self._connections: set[EngineConnection] = set()
        self._active: set[Exchange] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def open_connections(self) -> int:
        """Connections to engines, idle ones included."""
        return len(self._connections)

    async def close(self) -> None:
        """Close every connection."""
        self._is_closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        for connection in tuple(self._connections):
            connection.abort()
        self._idle.clear()
        # Transports close in the loop's next turn.
        await asyncio.sleep(0)

    async def start(
        self,
        to: Address,
        head: bytes,
        body: bytes | LongBody,
        *,
        instance: InstanceKey | None,
        timeout_s: float,
    ) -> Exchange:
        """Send a request; the exchange, whose answer's head has come.

        `head` is everything of the request before its body; `instance` is the one called, so that
        `lose` finds the call; `timeout_s` counts until the head. The caller must `close` the
        exchange. Raises CallFailed: `connect` when nothing was sent, `timeout`, `lost`, `reset`.
        """
        sent_s = self._loop.time()
        due_s = sent_s + timeout_s
        if (idle := self._take_idle(to, sent_s - _IDLE_S)) is not None:
            exchange = self._send(idle, head, body, instance, due_s)
            try:
                await exchange.begun()
                exchange.check()
                return exchange
            except CallFailed as failure:
                self.end(exchange)
                # Closed as we sent: the engine has seen nothing of the request. Later it may have
                # died of it.
                is_stale = self._loop.time() - sent_s < _STALE_S
                if failure.cause != "reset" or exchange.has_answered or not is_stale:
                    raise
                stale = failure
            except BaseException:
                self.end(exchange)
                raise
            try:
                connection = await self._connect(to, timeout_s)
            except CallFailed:
                raise stale from None
        else:
            connection = await self._connect(to, timeout_s)
        exchange = self._send(connection, head, body, instance, due_s)
        try:
            await exchange.begun()
            exchange.check()
        except BaseException:
            self.end(exchange)
            raise
        return exchange

    def _send(
        self,
        connection: EngineConnection,
        head: bytes,
        body: bytes | LongBody,
        instance: InstanceKey | None,
        due_s: float,
    ) -> Exchange:
        exchange = Exchange(instance, self._loop, due_s)
        self._active.add(exchange)
        if self._sweep_timer is None:
            self._arm()
        connection.send(exchange, head, body)
        return exchange

    def end(self, exchange: Exchange) -> None:
        """Close `exchange` and forget it. Idempotent."""
        self._active.discard(exchange)
        exchange.close()

    def lose(self, instances: Iterable[InstanceKey]) -> None:
        """End every call to `instances`: they died or vanished."""
        gone = frozenset(instances)
        for exchange in tuple(self._active):
            if exchange.instance in gone:
                exchange.fail("lost")

    def _take_idle(self, to: Address, oldest_s: float) -> EngineConnection | None:
        """A kept connection; the youngest, so that the others may go."""
        idle = self._idle.get(to)
        while idle:
            connection = idle.pop()
            if connection.is_usable and connection.idle_since_s >= oldest_s:
                return connection
            connection.abort()
        return None

    async def _connect(self, to: Address, timeout_s: float) -> EngineConnection:
        def on_free(connection: EngineConnection) -> None:
            idle = self._idle.setdefault(to, [])
            if len(idle) >= _MAX_IDLE or self._is_closed:
                connection.abort()
                return
            connection.idle_since_s = self._loop.time()
            idle.append(connection)
            if self._sweep_timer is None:
                self._arm()

        def on_lost(connection: EngineConnection) -> None:
            self._connections.discard(connection)
            if idle := self._idle.get(to):
                with contextlib.suppress(ValueError):
                    idle.remove(connection)

        def make() -> EngineConnection:
            connection = EngineConnection(on_free, on_lost)
            self._connections.add(connection)
            return connection

        try:
            async with asyncio.timeout(min(CONNECT_TIMEOUT_S, timeout_s)):
                transport, connection = await self._loop.create_connection(
                    make, to.host, to.port, **self._dialer.options(to)
                )
        except (OSError, TimeoutError) as error:
            self._dialer.complain(to, error)
            raise CallFailed("connect") from error
        if sock := transport.get_extra_info("socket"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _arm(self) -> None:
        if self._sweep_timer is None and not self._is_closed:
            self._sweep_timer = self._loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Fail what is overdue, close what was idle too long; runs while there is either."""
        self._sweep_timer = None
        now_s = self._loop.time()
        for exchange in tuple(self._active):
            if exchange.is_due(now_s):
                exchange.fail("timeout")
        oldest_s = now_s - _IDLE_S
        for to, idle in tuple(self._idle.items()):
            # Given back in order of time: the oldest come first.
            while idle and idle[0].idle_since_s < oldest_s:
                idle.pop(0).abort()
            if not idle:
                del self._idle[to]
        if self._active or self._idle:
            self._arm()

"""The HTTP client for engines: connections kept per engine, deadlines, calls to lost engines ended.

`request` calls engines through it. A connection is kept for less time than engines keep theirs; one
that an engine closed all the same, before a byte of the answer, costs one fresh try. In a local
fleet the router is a pod with a loopback address of its own, by which engines see which router
calls (`source_for`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterable

from xpyd_core.bodies import LongBody
from xpyd_core.request_id import Address
from xpyd_router.errors import CallFailed
from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.upstream.connection import EngineConnection, Exchange


def source_for(to: Address, local_host: str | None) -> tuple[str, int] | None:
    """asyncio's `local_addr` for a connection to `to`: `local_host`, a loopback address of IPv4,
    where `to` is one, too; else None, and the system chooses.
    """
    if local_host is None:
        return None
    try:
        address = ipaddress.IPv4Address(to.host)
    except ValueError:
        return None
    return (local_host, 0) if address.is_loopback else None


CONNECT_TIMEOUT_S = 2.0
_IDLE_S = 4.0
"""Engines under uvicorn close an idle connection after 5 s: ours must be given up before."""
_MAX_IDLE = 1024
"""Kept connections per engine."""
_SWEEP_S = 0.1
_STALE_S = 0.1
"""Within this time after sending a reset means a connection that was closed while it was idle."""


class UpstreamClient:
    """See the module. Used in one event loop; closed by its owner.

    `local_host` is the router's own loopback address, where it has one (see source_for).
    """

    def __init__(self, local_host: str | None = None) -> None:
        self._local_host = local_host
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
                    make, to.host, to.port, local_addr=source_for(to, self._local_host)
                )
        except (OSError, TimeoutError) as error:
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

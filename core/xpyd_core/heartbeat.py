"""Heartbeats to every router replica: ZMQ DEALER -> ROUTER, one msgpack map per beat, and its
signature in a second frame, which routers that know no signatures do not read.

A name with several addresses means all routers behind it and is looked up again at each beat, so
that a replica that moved is found. Nothing here waits for a router: each socket keeps a few beats,
the newest among them, until its router can be reached.

See docs/adr/0009.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from ipaddress import ip_address

import msgspec
import zmq

from xpyd_core.keys import Keys, beat_mac, key_ids
from xpyd_core.messages import Heartbeat, encode_heartbeat
from xpyd_core.request_id import Address

_log = logging.getLogger(__name__)
_LINGER_MS = 500
_RECONNECT_MS = 100
_MAX_RECONNECT_MS = 3000
_LOOKUP_TIMEOUT_S = 2.0
# A headless service never has so many replicas; a broken resolver may return anything.
_MAX_ROUTERS = 64
# Room for beats of quick changes of state. (ZMQ_CONFLATE would keep the newest only, but it loses
# the last message of a socket that is closed, which is the goodbye.)
_QUEUED_BEATS = 4


class HeartbeatSender:
    """Sends `make()`'s beat every `period_s` and whenever `beat_now` is called. Loop only."""

    def __init__(
        self,
        routers: Sequence[Address],
        *,
        identity: str,
        source_host: str,
        period_s: float,
        make: Callable[[], Heartbeat],
        keys: Keys,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`identity` is unique per process start; each socket adds its number (see `_connect`).

        The first of `keys` signs; none: an instance without a key, whose beats only some routers
        take.
        """
        self._routers = tuple(routers)
        self._identity = identity
        self._opened = 0
        self._source_host = source_host
        self._period_s = period_s
        self._make = make
        self._keys = keys
        self._wall_clock_ns = wall_clock_ns
        self._sent_us = 0
        self._context = zmq.Context(io_threads=1)
        self._sockets: dict[Address, zmq.Socket[bytes]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to beat."""
        if self._routers:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await self._follow_routers()
                self.beat_now()
            except Exception:  # the task's edge: a lost beat must not end all later ones
                _log.exception("heartbeat failed")
            await asyncio.sleep(self._period_s)

    def beat_now(self) -> None:
        """Send one beat to every known router; never waits."""
        if not self._sockets:
            return
        frames = self._frames()
        for address in self._sockets:
            if not self._send(address, frames):
                # The router has been away: a new socket forgets the old beats for the newest.
                self._sockets[address].close(0)
                self._sockets[address] = self._connect(address)
                self._send(address, frames)

    def _frames(self) -> list[bytes]:
        # It grows even when the clock is set back: routers drop what is older than what they have.
        self._sent_us = max(self._sent_us + 1, self._wall_clock_ns() // 1000)
        # As they are now: the beat is signed with the one that it names first.
        keys = tuple(self._keys)
        frame = encode_heartbeat(
            msgspec.structs.replace(self._make(), sent_us=self._sent_us, key_ids=key_ids(keys))
        )
        return [frame, beat_mac(keys[0], frame)] if keys else [frame]

    def _send(self, address: Address, frames: list[bytes]) -> bool:
        try:
            self._sockets[address].send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def close(self) -> None:
        """End; the last beat gets half a second to leave."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for sock in self._sockets.values():
            sock.close(_LINGER_MS)
        self._sockets.clear()
        await asyncio.to_thread(self._context.term)

    async def _follow_routers(self) -> None:
        """Open a socket to each address that the names mean now, close those that are gone."""
        found: dict[Address, None] = {}
        is_complete = True
        for router in self._routers:
            addresses = await self._look_up(router)
            is_complete = is_complete and addresses is not None
            found.update(dict.fromkeys(addresses or ()))
        for address in list(found)[:_MAX_ROUTERS]:
            if address not in self._sockets:
                self._sockets[address] = self._connect(address)
        if is_complete:  # a resolver that failed does not say which routers are gone
            for address in self._sockets.keys() - found.keys():
                self._sockets.pop(address).close(0)

    async def _look_up(self, router: Address) -> list[Address] | None:
        try:
            ip_address(router.host)
        except ValueError:
            pass
        else:
            return [router]
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_LOOKUP_TIMEOUT_S):
                found = await loop.getaddrinfo(
                    router.host, router.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
                )
        except (OSError, TimeoutError) as error:
            _log.warning("cannot look up router %s: %s", router.host, error or "timeout")
            return None
        return [Address(str(where[0]), router.port) for *_, where in found]

    def _connect(self, address: Address) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        # Of two connections with one identity a ROUTER drops one, or hands the name over and
        # forgets what the other sent. A closed socket can still be connecting: no name twice.
        self._opened += 1
        sock.setsockopt(zmq.IDENTITY, f"{self._identity}/{self._opened}".encode())
        sock.setsockopt(zmq.SNDHWM, _QUEUED_BEATS)
        sock.setsockopt(zmq.LINGER, _LINGER_MS)
        sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        sock.setsockopt(zmq.IPV6, int(":" in address.host))
        sock.connect(f"tcp://{self._source(address)}{address}")
        return sock

    def _source(self, address: Address) -> str:
        """On loopback each pod speaks from its own address, as a pod does in a cluster."""
        if address.host.startswith("127.") and self._source_host.startswith("127."):
            return f"{self._source_host}:0;"
        return ""

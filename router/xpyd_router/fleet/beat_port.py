"""The sockets of the discovery port: who may stay connected, at what pace, and for how long.

`discovery` gets each message with the connection that it came by, and says whether it was good.
What a stranger does costs its own connection: all of them together hold a bounded number of
bytes and of file descriptors, and none of them takes the place of an instance that beats.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from xpyd_core.errors import ProtocolError
from xpyd_core.messages import MAX_HEARTBEAT_BYTES
from xpyd_router.fleet.registry import MAX_INSTANCES
from xpyd_router.fleet.zmtp import Message, Receiver

_MAX_CONNECTIONS = 2 * MAX_INSTANCES
_MIN_CONNECTIONS = 64
_SWEEP_S = 0.25
_PAUSE_S = 0.25
_MAX_UNSENT_BYTES = 4096


@dataclass(frozen=True)
class PortLimits:
    """What strangers may take."""

    connections: int = _MAX_CONNECTIONS
    held_bytes: int = 32 * 1024 * 1024
    """Of messages that have not ended, over all connections."""
    handshake_s: float = 5.0
    message_s: float = 5.0
    """For the rest of a message that has begun."""
    silence_s: float = 200.0
    """Without one good beat; the longest period is 60 s."""
    burst: int = 512
    """Messages that one connection may send at once: a rig may beat for many through one socket."""
    per_second: float = 512.0
    """Messages of one connection from then on."""
    bad: int = 16
    """Messages in a row that are no good beats, after which a connection ends."""


Take = Callable[[tuple[bytes, ...], str], bool]
"""Takes one message's frames and its sender's address; whether it was a good beat."""


def port_limits() -> PortLimits:
    """The defaults, with no more connections than half of the files that this process may open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return PortLimits()
    most = min(_MAX_CONNECTIONS, max(_MIN_CONNECTIONS, files // 2))
    return PortLimits(connections=most)


class BeatPort:
    """Owner of the connections. In one event loop; `dropped` hears why one was ended."""

    def __init__(self, take: Take, dropped: Callable[[str], None], limits: PortLimits) -> None:
        self.take = take
        self.dropped = dropped
        self.limits = limits
        self.held_bytes = 0
        self._open: dict[Connection, None] = {}
        self._strangers: dict[Connection, None] = {}
        """Those without a good beat so far, the oldest first."""
        self._next_sweep_s = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def accept(self) -> Connection:
        """The protocol of a connection that came."""
        return Connection(self)

    def opened(self, connection: Connection) -> None:
        """Where there are too many, the oldest stranger goes; without one, who came."""
        self._open[connection] = self._strangers[connection] = None
        if len(self._open) > self.limits.connections:
            next(iter(self._strangers)).drop("too many connections")

    def proven(self, connection: Connection) -> None:
        """It sent a good beat: no stranger's connection replaces it any more."""
        self._strangers.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """Forget it."""
        self._open.pop(connection, None)
        self._strangers.pop(connection, None)

    def sweep(self, now_s: float) -> None:
        """Drop who takes too long for a handshake, a message or its next beat."""
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + _SWEEP_S
        for connection in list(self._open):
            connection.check(now_s)

    def close(self) -> None:
        """Drop everyone."""
        for connection in list(self._open):
            connection.abort()


class Connection(asyncio.Protocol):
    """One TCP connection to the port."""

    def __init__(self, port: BeatPort) -> None:
        self._port = port
        self._limits = port.limits
        self._loop = asyncio.get_running_loop()
        self._receiver = Receiver(MAX_HEARTBEAT_BYTES)
        self._transport: asyncio.Transport | None = None
        self._held_bytes = 0
        self._opened_s = self._good_s = self._loop.time()
        self._begun_s: float | None = None
        """Since when a message has begun and not ended."""
        self._credit = float(port.limits.burst)
        self._credited_s = self._opened_s
        self._bad = 0
        self._resume: asyncio.TimerHandle | None = None
        self._peer = "?"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if peer else "?"
        self._transport.write(Receiver.HELLO)
        self._port.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._resume is not None:
            self._resume.cancel()
        self._hold(0)
        self._port.closed(self)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._receiver.feed(data)
        if self._resume is None:
            self._read()

    def _read(self) -> None:
        now_s = self._loop.time()
        earned = (now_s - self._credited_s) * self._limits.per_second
        self._credit = min(self._limits.burst, self._credit + earned)
        self._credited_s = now_s
        try:
            while self._transport is not None and self._credit >= 1:
                event = self._receiver.next()
                if event is None:
                    break
                self._credit -= 1
                self._begun_s = None
                if isinstance(event, Message):
                    self._take(event, now_s)
                elif event.answer:
                    self._say(event.answer)
        except ProtocolError as error:
            self.drop(str(error))
            return
        if self._transport is None:
            return
        self._hold(self._receiver.held_bytes)
        if self._credit < 1:
            self._pause()
        elif self._held_bytes and self._begun_s is None:
            self._begun_s = now_s

    def _take(self, message: Message, now_s: float) -> None:
        if self._port.take(message.frames, self._peer):
            self._good_s, self._bad = now_s, 0
            self._port.proven(self)
            return
        self._bad += 1
        if self._bad >= self._limits.bad:
            self.drop(f"{self._bad} messages in a row that are no good beats")

    def _say(self, data: bytes) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self.drop("it does not read")
            return
        self._transport.write(data)

    def _pause(self) -> None:
        """It sends faster than anyone who beats: the rest waits, in its own socket."""
        assert self._transport is not None
        self._transport.pause_reading()
        self._resume = self._loop.call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._resume = None
        self._read()
        if self._transport is not None and self._resume is None:
            self._transport.resume_reading()

    def _hold(self, held_bytes: int) -> None:
        self._port.held_bytes += held_bytes - self._held_bytes
        self._held_bytes = held_bytes
        if held_bytes and self._port.held_bytes > self._limits.held_bytes:
            self.drop("too much is held of messages that have not ended")

    def check(self, now_s: float) -> None:
        """Drop it where a deadline has passed."""
        if not self._receiver.is_ready:
            if now_s > self._opened_s + self._limits.handshake_s:
                self.drop("no ZMQ handshake in time")
        elif self._begun_s is not None and now_s > self._begun_s + self._limits.message_s:
            self.drop("the rest of a message does not come")
        elif now_s > self._good_s + self._limits.silence_s:
            self.abort()

    def drop(self, why: str) -> None:
        """End it, and say so."""
        self._port.dropped(f"{self._peer}: {why}")
        self.abort()

    def abort(self) -> None:
        """End it at once."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._port.closed(self)

"""The discovery port: connections of engines, and their heartbeats into the fleet's view.

It replies to those that drain, and says who died (`messages.RouterWord`). What is not a heartbeat,
or not one of this fleet's, is counted and dropped; junk costs only its sender (ADR 0025, ADR 0026).
`BeatPort` has the connections, `zmtp` their wire, `fleet.registry` decides what follows from beats.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

from xpyd_core.errors import ProtocolError, UserError
from xpyd_core.keys import BEAT_MAC_BYTES, INSECURE_KEYS, Keys, is_beat_mac, word_mac
from xpyd_core.messages import (
    MAX_HEARTBEAT_BYTES,
    DrainAck,
    Heartbeat,
    PeerGone,
    RouterWord,
    decode_heartbeat,
    encode_word,
)
from xpyd_router.discovery.zmtp import Message, Receiver, message
from xpyd_router.fleet.instances import MAX_INSTANCES, InstanceKey, leaving_places
from xpyd_router.fleet.registry import key_of
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics

_MAX_CONNECTIONS = 2 * MAX_INSTANCES
_MIN_CONNECTIONS = 64
_SWEEP_S = 0.25
_PAUSE_S = 0.25
_MAX_UNSENT_BYTES = 4096
_MAX_WORD_BYTES = 255


@dataclass(frozen=True)
class PortLimits:
    """Bounds on what strangers may take."""

    connections: int = _MAX_CONNECTIONS
    held_bytes: int = 32 * 1024 * 1024
    """The bound on bytes of messages that have not ended, over all connections."""
    handshake_s: float = 5.0
    message_s: float = 5.0
    """Deadline for the rest of a message that has begun."""
    silence_s: float = 200.0
    """How long a connection may stay without one good beat; the longest period is 60 s."""
    burst: int = 512
    """Messages that one connection may send at once: a rig may beat for many through one socket."""
    per_second: float = 512.0
    """Messages of one connection from then on."""
    bad: int = 16
    """Messages in a row that are no good beats, after which a connection ends."""


Say = Callable[[bytes], None]
Take = Callable[[tuple[bytes, ...], str, Say], bool | None]
"""Takes one message's frames and its sender's address, and may say something back to it; whether it
was a good beat. None: one that came before, by another way or from somebody who recorded it: it
proves nothing of its sender."""


def port_limits() -> PortLimits:
    """The defaults, with no more connections than half of the files that this process may open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return PortLimits()
    most = min(_MAX_CONNECTIONS, max(_MIN_CONNECTIONS, files // 2))
    return PortLimits(connections=most)


class BeatPort:
    """Owner of the connections: which may stay, at what pace, and for how long.

    What a stranger does costs its own connection: all strangers together hold a bounded number of
    bytes and of file descriptors, and none takes the place of an instance that beats. In one event
    loop; `dropped` gets the reason when one is closed.
    """

    def __init__(self, take: Take, dropped: Callable[[str], None], limits: PortLimits) -> None:
        self.take = take
        self.dropped = dropped
        self.limits = limits
        self.held_bytes = 0
        self._open: dict[BeatConnection, None] = {}
        self._strangers: dict[BeatConnection, None] = {}
        """The connections without a good beat so far, the oldest first."""
        self._next_sweep_s = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def accept(self) -> BeatConnection:
        """The protocol of a connection that came."""
        return BeatConnection(self)

    def opened(self, connection: BeatConnection) -> None:
        """If there are too many connections, close the oldest stranger, else the new connection."""
        self._open[connection] = self._strangers[connection] = None
        if len(self._open) > self.limits.connections:
            next(iter(self._strangers)).drop("too many connections")

    def proven(self, connection: BeatConnection) -> None:
        """`connection` sent a good beat: no stranger's connection replaces it any more."""
        self._strangers.pop(connection, None)

    def tell(self, data: bytes) -> None:
        """Say `data` to everybody who has sent a good beat."""
        for connection in list(self._open):
            if connection not in self._strangers:
                connection.say(data)

    def closed(self, connection: BeatConnection) -> None:
        """Forget it."""
        self._open.pop(connection, None)
        self._strangers.pop(connection, None)

    def sweep(self, now_s: float) -> None:
        """Close connections that take too long for a handshake, a message or the next beat."""
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + _SWEEP_S
        for connection in list(self._open):
            connection.check(now_s)

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open):
            connection.abort()


class BeatConnection(asyncio.Protocol):
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
                    self.say(event.answer)
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
        is_good = self._port.take(message.frames, self._peer, self.say)
        if is_good:
            self._good_s, self._bad = now_s, 0
            self._port.proven(self)
        if is_good is not False:
            return
        self._bad += 1
        if self._bad >= self._limits.bad:
            self.drop(f"{self._bad} messages in a row that are no good beats")

    def say(self, data: bytes) -> None:
        """Write, to one that reads."""
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self.drop("it does not read")
            return
        self._transport.write(data)

    def _pause(self) -> None:
        """Stop reading: the peer sends faster than any engine beats."""
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


logger = logging.getLogger(__name__)
_EXPIRY_CHECK_S = 0.2
_MAX_LATE_CHECKS = 16
"""A process that never keeps time must not keep the dead in the registry."""
_QUIET_S = 10.0
_BACKLOG = 1024
_GOOD = frozenset({"new", "refreshed", "replaced", "gone", "repeated"})
_TOLD = frozenset({"new", "replaced", "gone"})


class Discovery:
    """Binds at once (UserError when it cannot); `run` serves until cancelled.

    `name`: the fleet whose instances are taken; empty: any. `keys`: the fleet's, one of which signs
    the beats that are taken. `accepts_unsigned`: others are taken, too, but never for an instance
    that signs.
    `limits`: None for what this process may have.
    """

    def __init__(
        self,
        fleet: FleetView,
        metrics: RouterMetrics,
        *,
        host: str,
        port: int,
        name: str = "",
        keys: Keys = INSECURE_KEYS,
        accepts_unsigned: bool = True,
        wall_clock: Callable[[], float] = time.time,
        limits: PortLimits | None = None,
    ) -> None:
        self._fleet = fleet
        self._name = name
        self._keys = keys
        self._accepts_unsigned = accepts_unsigned
        self._wall_clock = wall_clock
        self._metrics = metrics
        self._kv: dict[InstanceKey, frozenset[str]] = {}
        """The KV addresses of each instance: of those of its replicas that serve."""
        self._quiet_until_s = 0.0
        self._dropped = 0
        self.beats = BeatPort(self._take, self._end, limits or port_limits())
        """How many connections there are."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            where = f"[{host}]" if ":" in host else host
            reason = error.strerror or error
            raise UserError(f"discovery on {where}:{port}: {reason}") from error
        self._listener.setblocking(False)
        fleet.on_lost(self._tell_gone)
        fleet.on_gone(self._forget)
        self.port: int = self._listener.getsockname()[1]

    def close(self) -> None:
        """Free the port."""
        self.beats.close()
        self._listener.close()

    async def run(self) -> None:
        """Take beats and remove silent instances, for ever."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self.beats.accept, sock=self._listener, backlog=_BACKLOG)
        try:
            late = 0
            while True:
                due_s = loop.time() + _EXPIRY_CHECK_S
                await asyncio.sleep(_EXPIRY_CHECK_S)
                # After a pause of the whole router beats wait to be read, and prove that the
                # instances live: they are taken before anyone expires.
                is_late = loop.time() > due_s + _EXPIRY_CHECK_S
                late = late + 1 if is_late else 0
                if late % _MAX_LATE_CHECKS:
                    continue
                for key in self._fleet.expire():
                    logger.warning("instance %s missed its beats: removed", key.http)
                self.beats.sweep(loop.time())
        finally:
            server.close()
            self.beats.close()

    def _take(self, frames: tuple[bytes, ...], peer: str, say: Say) -> bool | None:
        """One message; see Take."""
        name, beat = "", None
        try:
            is_signed = _has_mac(frames) and is_beat_mac(self._keys, *frames)
            if is_signed or self._accepts_unsigned:
                beat = decode_heartbeat(frames[0])
                name = beat.instance or beat.http_address
                outcome = self._apply(beat, is_signed=is_signed)
            else:
                outcome = "forged" if _has_mac(frames) else "unsigned"
        except ProtocolError as error:
            self._count("malformed")
            self._complain(f"{peer}: {error}")
            return False
        self._count(outcome)
        if beat is not None and outcome in _GOOD:
            self._acknowledge(beat, say)
        if beat is not None and outcome in ("new", "replaced", "refreshed"):
            self._follow_kv(beat)
        if beat is not None and outcome in _TOLD:
            logger.info("instance %s: %s", name, outcome, extra={"type": beat.type})
        elif outcome not in _GOOD:
            reason = "imposed" if outcome == "unsigned" and self._accepts_unsigned else outcome
            self._complain(f"{peer} {name}".rstrip() + f": {_WHY[reason]}")
        return None if outcome == "repeated" else outcome in _GOOD

    def _apply(self, beat: Heartbeat, *, is_signed: bool) -> str:
        # vLLM names no fleet: its engines mean the fleet of the port that they dial.
        if self._name and beat.fleet and beat.fleet != self._name:
            return "foreign"
        age_s = self._wall_clock() - beat.sent_us / 1e6 if is_signed else None
        return self._fleet.apply(beat, age_s)

    def _acknowledge(self, beat: Heartbeat, say: Say) -> None:
        """What leaves may go once nothing of ours is there; nothing is said before all processes
        of this router know of it: the next beat asks again."""
        leaving = leaving_places(key_of(beat), beat)
        in_flight = self._fleet.in_flight(leaving) if leaving else None
        if in_flight is None:
            return
        ack = DrainAck(incarnation=beat.incarnation, sent_us=beat.sent_us, in_flight=in_flight)
        self._say(ack, say)

    def _tell_gone(self, keys: Iterable[InstanceKey]) -> None:
        """Others need not wait for what these would have sent or taken."""
        for key in keys:
            self._tell_addresses_gone(key, self._kv.get(key, frozenset()))

    def _follow_kv(self, beat: Heartbeat) -> None:
        """Replicas that serve no more are gone for their peers, as instances are."""
        key, now = key_of(beat), frozenset((beat.zmq_address,))
        if beat.replicas:
            now = frozenset(one.zmq_address for one in beat.replicas if one.serving)
        before = self._kv.get(key, now)
        self._kv[key] = now
        self._tell_addresses_gone(key, before - now)

    def _tell_addresses_gone(self, key: InstanceKey, addresses: Iterable[str]) -> None:
        now_us = int(self._wall_clock() * 1e6)
        for kv in sorted(addresses):
            gone = PeerGone(zmq_address=kv, incarnation=key.incarnation, sent_us=now_us)
            self._say(gone, self.beats.tell)

    def _say(self, word: RouterWord, say: Say) -> None:
        frame = encode_word(word)
        if len(frame) <= _MAX_WORD_BYTES:  # names of ours are far shorter
            keys = tuple(self._keys)
            say(message([frame, word_mac(keys[0], frame)] if keys else [frame]))

    def _forget(self, key: InstanceKey) -> None:
        self._kv.pop(key, None)

    def _count(self, result: str) -> None:
        self._metrics.heartbeats.labels(result).inc()

    def _end(self, why: str) -> None:
        """A connection was ended."""
        self._count("closed")
        self._complain(why)

    def _complain(self, what: str) -> None:
        """At most one line per ten seconds: strangers must not fill the log."""
        self._dropped += 1
        now = time.monotonic()
        if now >= self._quiet_until_s:
            logger.warning("discovery port: %s (%d so far dropped)", what, self._dropped)
            self._quiet_until_s = now + _QUIET_S


def _has_mac(frames: tuple[bytes, ...]) -> bool:
    """Whether there is a signature; a frame of another length is none of this protocol."""
    return len(frames) > 1 and len(frames[1]) == BEAT_MAC_BYTES


_WHY = {
    "forged": "a beat signed with another key; is the key file the same on both sides?",
    "unsigned": "a beat without signature; give the engine the fleet's key, or the router "
    "--accept-unsigned-beats",
    "imposed": "a beat without the router's key, where an instance with it is at that address; is "
    "the key file the same on both sides?",
    "foreign": "an instance of another fleet beats here",
    "stale": "a beat older than one that came before, or of an instance that was replaced; do two "
    "engines have one HTTP address?",
    "skewed": "a beat that is minutes old, or ahead of time; are the clocks right?",
    "conflict": "its KV address is another instance's; give each engine its own",
    "full": "the registry is full",
}

"""Heartbeats to every router replica: ZMQ DEALER -> ROUTER, one msgpack map per beat, and its
signature in a second frame, which routers that know no signatures do not read.

A name with several addresses means all routers behind it and is looked up again at each beat, so
that a replica that moved is found. Nothing here waits for a router: each socket keeps a few beats,
the newest among them, until its router can be reached. `part` alone waits: an instance that leaves,
or of which replicas do, asks each router whether it has taken that in, and what it still has there.
What routers say of others that died is read four times a second.

See docs/adr/0009, docs/adr/0098 and docs/adr/0099.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import NamedTuple

import msgspec
import zmq

from xpyd_core.errors import ProtocolError
from xpyd_core.keys import Keys, beat_mac, is_word_mac, key_ids
from xpyd_core.messages import (
    MISSED_BEATS,
    DrainAck,
    Heartbeat,
    decode_word,
    encode_heartbeat,
)
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
# Between two beats of an instance that waits for its routers: what a drain takes longer at most.
_PARTING_S = 0.25
_READ_S = 0.25
# As old as a word of another clock may be: a recorded one must not count for ever.
_MAX_SKEW_US = 120_000_000
_READS_PER_TURN = 64
_DIAL_S = 1.0


class Parting(NamedTuple):
    """What routers have of an instance, or of replicas of it, that leaves."""

    silent: tuple[Address, ...] = ()
    """Routers that did not say that they pick it no more."""
    in_flight: int = 0
    """Requests of the other routers that were given it, and are not over."""


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
        on_gone: Callable[[Address], None] = lambda _: None,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`identity` is unique per process start; each socket adds its number (see `_connect`).
        `on_gone` gets the KV address of another instance that a router says is dead.

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
        self._on_gone = on_gone
        self._wall_clock_ns = wall_clock_ns
        self._sent_us = 0
        self._context = zmq.Context(io_threads=1)
        self._sockets: dict[Address, zmq.Socket[bytes]] = {}
        self._parting_us: int | None = None
        """Beats since then say that the instance leaves, or replicas of it; None: all stay."""
        self._incarnation = ""
        self._acks: dict[Address, tuple[DrainAck, float]] = {}
        """The last one of each router, and when it came."""
        self._absent: set[Address] = set()
        """Addresses at which no router listens any more."""
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
            due_s = asyncio.get_running_loop().time() + self._period_s
            while (left_s := due_s - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(min(left_s, _READ_S))
                self._read()

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
        beat = self._make()
        self._incarnation = beat.incarnation
        sent = msgspec.structs.replace(
            beat, sent_us=self._sent_us, key_ids=key_ids(keys), routers=len(self._sockets)
        )
        frame = encode_heartbeat(sent)
        return [frame, beat_mac(keys[0], frame)] if keys else [frame]

    def _send(self, address: Address, frames: list[bytes]) -> bool:
        try:
            self._sockets[address].send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # --- the end

    async def part(self, timeout_s: float) -> Parting:
        """Beat, by now as one that drains or of which replicas do, until every router has said that
        it picks these no more and that none of its requests is there; or for `timeout_s`.

        A router that does not answer is waited for as long as it would take an instance that is
        silent for alive; one at whose address nobody listens any more, not at all.
        """
        loop = asyncio.get_running_loop()
        self._parting_us = self._sent_us
        # Of replicas that left before: they say nothing of those that leave now.
        self._acks.clear()
        self._absent.clear()
        begun_s = loop.time()
        patience_s = MISSED_BEATS * self._period_s
        while True:
            self.beat_now()
            await asyncio.sleep(_PARTING_S)
            now_s = loop.time()
            left = self._hear(now_s, patience_s)
            is_patient = now_s < begun_s + patience_s
            is_over = not left.in_flight and not (left.silent and is_patient)
            if is_over or now_s >= begun_s + timeout_s:
                return left
            if is_patient:
                await self._dial()

    def _hear(self, now_s: float, patience_s: float) -> Parting:
        """Read what routers answer; how they stand now."""
        self._read()
        acks = {
            address: ack
            for address, (ack, at_s) in self._acks.items()
            if address in self._sockets and now_s < at_s + patience_s
        }
        silent = sorted(self._sockets.keys() - acks.keys() - self._absent)
        return Parting(tuple(silent), sum(ack.in_flight for ack in acks.values()))

    def _read(self) -> None:
        for address, sock in self._sockets.items():
            for _ in range(_READS_PER_TURN):
                try:
                    frames = sock.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(address, frames)

    def _take(self, address: Address, frames: Sequence[bytes]) -> None:
        keys = tuple(self._keys)
        try:
            word = decode_word(frames[0])
        except ProtocolError as error:
            _log.debug("router %s: %s", address, error)
            return
        if keys and not (len(frames) > 1 and is_word_mac(keys, *frames[:2])):
            _log.debug("router %s: a word without the fleet's key", address)
        elif isinstance(word, DrainAck):
            self._take_ack(address, word)
        elif (
            word.incarnation != self._incarnation
            and abs(word.sent_us - self._wall_clock_ns() // 1000) <= _MAX_SKEW_US
        ):
            self._on_gone(word.kv)

    def _take_ack(self, address: Address, ack: DrainAck) -> None:
        is_ours = ack.incarnation == self._incarnation
        # An answer to an earlier state, or one that was recorded, proves nothing.
        is_new = self._parting_us is not None and ack.sent_us > self._parting_us
        known = self._acks.get(address)
        if is_ours and is_new and (known is None or ack.sent_us > known[0].sent_us):
            self._acks[address] = ack, asyncio.get_running_loop().time()

    async def _dial(self) -> None:
        """Look where nobody listens: a router that starts there later knows of the instance by its
        beats alone, which say that it drains."""
        silent = [address for address in self._sockets if address not in self._acks]
        refused = await asyncio.gather(*(_is_refused(address) for address in silent))
        self._absent = {one for one, is_gone in zip(silent, refused, strict=True) if is_gone}

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


async def _is_refused(address: Address) -> bool:
    try:
        async with asyncio.timeout(_DIAL_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False

"""The discovery port: heartbeats into the fleet's view.

Never replies. What is not a heartbeat, or not one of this fleet's, is counted and dropped; junk
costs its sender, nobody else. `beat_port` has the connections, `zmtp` their wire, `registry` what
follows from a beat.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from xpyd_core.errors import ProtocolError, UserError
from xpyd_core.keys import BEAT_MAC_BYTES, INSECURE_KEYS, is_beat_mac
from xpyd_core.messages import Heartbeat, decode_heartbeat
from xpyd_router.fleet.beat_port import BeatPort, PortLimits, port_limits
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics

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
        keys: tuple[bytes, ...] = INSECURE_KEYS,
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
        self._quiet_until_s = 0.0
        self._dropped = 0
        self.beats = BeatPort(self._take, self._end, limits or port_limits())
        """Who is connected."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            where = f"[{host}]" if ":" in host else host
            reason = error.strerror or error
            raise UserError(f"discovery on {where}:{port}: {reason}") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    def close(self) -> None:
        """Free the port."""
        self.beats.close()
        self._listener.close()

    async def run(self) -> None:
        """Take beats and remove who is silent, for ever."""
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

    def _take(self, frames: tuple[bytes, ...], peer: str) -> bool:
        """One message; whether it was a beat of this fleet's."""
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
        if beat is not None and outcome in _TOLD:
            logger.info("instance %s: %s", name, outcome, extra={"type": beat.type})
        elif outcome not in _GOOD:
            reason = "imposed" if outcome == "unsigned" and self._accepts_unsigned else outcome
            self._complain(f"{peer} {name}".rstrip() + f": {_WHY[reason]}")
        return outcome in _GOOD

    def _apply(self, beat: Heartbeat, *, is_signed: bool) -> str:
        # vLLM names no fleet: who dials this port then means this one.
        if self._name and beat.fleet and beat.fleet != self._name:
            return "foreign"
        age_s = self._wall_clock() - beat.sent_us / 1e6 if is_signed else None
        return self._fleet.apply(beat, age_s)

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
    """Whether there is a signature; a frame of another length is somebody else's."""
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

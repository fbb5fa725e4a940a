"""The discovery port: heartbeats from a ZMQ ROUTER socket into the fleet's view.

Never replies. What is not a heartbeat is counted and dropped; junk costs its sender, nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import cast

import zmq
import zmq.asyncio

from xpyd_core.errors import ProtocolError, UserError
from xpyd_core.messages import MAX_HEARTBEAT_BYTES, decode_heartbeat
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_EXPIRY_CHECK_S = 0.2
_MAX_PER_TURN = 256
_MAX_BUSY_TURNS = 16
"""A flood of junk must not keep the dead in the registry."""
_QUIET_S = 10.0
_HANDSHAKE_MS = 5_000


class Discovery:
    """Binds at once (UserError when it cannot); `run` serves until cancelled.

    `name`: the fleet whose instances are taken; empty: any.
    """

    def __init__(
        self, fleet: FleetView, metrics: RouterMetrics, *, host: str, port: int, name: str = ""
    ) -> None:
        self._fleet = fleet
        self._name = name
        self._metrics = metrics
        self._quiet_until_s = 0.0
        self._dropped = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        options = {
            zmq.ROUTER_HANDOVER: 1,  # a restarted engine may come with its old identity
            zmq.MAXMSGSIZE: MAX_HEARTBEAT_BYTES,
            zmq.RCVHWM: _MAX_PER_TURN,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
            zmq.LINGER: 0,
            zmq.IPV6: int(":" in host),
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        where = f"[{host}]" if ":" in host else host
        try:
            self._socket.bind(f"tcp://{where}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise UserError(f"discovery on {where}:{port}: {error.strerror}") from error
        endpoint = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        self.port = int(endpoint.rpartition(":")[2])

    def close(self) -> None:
        """Free the port."""
        self._socket.close()
        self._context.term()

    async def run(self) -> None:
        """Take beats and remove who is silent, for ever.

        Beats that wait are taken before anything expires: after a pause of the whole router they
        prove that the instances live.
        """
        busy_turns = 0
        while True:
            if await self._socket.poll(round(_EXPIRY_CHECK_S * 1000)):
                busy_turns = 0 if await self._take_waiting() else busy_turns + 1
                if busy_turns % _MAX_BUSY_TURNS:
                    await asyncio.sleep(0)
                    continue
            for key in self._fleet.expire():
                logger.warning("instance %s missed its beats: removed", key.http)

    async def _take_waiting(self) -> bool:
        """Take what has come, at most one turn's worth; whether nothing is left."""
        for _ in range(_MAX_PER_TURN):
            try:
                parts = await self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._take(parts)
        return False

    def _take(self, parts: list[bytes]) -> None:
        """One message: identity, then the beat; what is behind it is ignored."""
        try:
            if len(parts) < 2:
                raise ProtocolError("heartbeat: no payload")
            beat = decode_heartbeat(parts[1])
            # vLLM names no fleet: who dials this port then means this one.
            foreign = bool(self._name and beat.fleet and beat.fleet != self._name)
            outcome = "foreign" if foreign else self._fleet.apply(beat)
        except ProtocolError as error:
            self._metrics.heartbeats.labels("malformed").inc()
            self._complain(str(error))
            return
        self._metrics.heartbeats.labels(outcome).inc()
        if outcome in ("new", "replaced", "gone"):
            name = beat.instance or beat.http_address
            logger.info("instance %s: %s", name, outcome, extra={"type": beat.type})
        elif outcome == "full":
            self._complain("the registry is full")
        elif outcome == "foreign":
            self._complain(f"an instance of fleet {beat.fleet} beats here")

    def _complain(self, what: str) -> None:
        """At most one line per ten seconds: strangers must not fill the log."""
        self._dropped += 1
        now = time.monotonic()
        if now >= self._quiet_until_s:
            logger.warning("%d messages dropped on the discovery port: %s", self._dropped, what)
            self._quiet_until_s = now + _QUIET_S
            self._dropped = 0

"""One end of the socket pair between parent and worker: events in, events out, in order.

What is sent in one turn of the loop is written at once. What the other side does not read is held
up to a bound, and where there is a deadline, no longer: then the other side counts as stuck.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from xpyd_core.errors import ProtocolError
from xpyd_router.processes.events import MAX_FRAME_BYTES, Splitter, ToParent, ToWorker, frame

logger = logging.getLogger(__name__)

READ_DEADLINE_S = 10.0
MAX_UNREAD_BYTES = 2 * MAX_FRAME_BYTES

E = TypeVar("E", ToWorker, ToParent)


class Channel(asyncio.Protocol, Generic[E]):
    """`take` gets each event. `lost` is called once: at the other side's end, when it is stuck, or
    after `close`.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[E],
        take: Callable[[E], None],
        lost: Callable[[], None],
        *,
        read_deadline_s: float | None,
    ) -> None:
        self._read_deadline_s = read_deadline_s
        self._decoder = decoder
        self._take = take
        self._lost = lost
        self._splitter = Splitter()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._deadline: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[E],
        take: Callable[[E], None],
        lost: Callable[[], None],
        *,
        read_deadline_s: float | None = READ_DEADLINE_S,
    ) -> Channel[E]:
        """The channel over `sock`, which it owns from now on."""

        def make() -> Channel[E]:
            return cls(decoder, take, lost, read_deadline_s=read_deadline_s)

        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(make, sock=sock)
        return channel

    def send(self, event: ToWorker | ToParent) -> None:
        """Have it written; nothing happens when the other side is gone."""
        self.send_frame(frame(event))

    def send_frame(self, data: bytes) -> None:
        """Send what `frame` made: one encoding serves several channels."""
        if self._transport is None:
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)

    def close(self) -> None:
        """End it, without what is not written."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._unsent.clear()
        self.resume_writing()
        self._lost()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._splitter.feed(data):
                self._take(self._decoder.decode(body))
        except (ProtocolError, msgspec.DecodeError):
            logger.exception("the other process speaks another language")
            self.close()

    def pause_writing(self) -> None:
        if self._read_deadline_s is not None:
            self._deadline = self._loop.call_later(self._read_deadline_s, self._give_up)

    def resume_writing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() + len(data) > MAX_UNREAD_BYTES:
            self._give_up()
            return
        self._transport.write(data)

    def _give_up(self) -> None:
        logger.error("a process of the router does not read what the others send")
        self.close()

"""New connections, many in one turn of the event loop.

uvloop takes one connection in a turn (libuv does since 1.45). A turn of a busy router is long: all
that came for its open connections. Of clients that come together the last ones would then wait
until the first ones had been served hundreds of times. `server` takes connections by an Acceptor.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol, cast

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 128
"""A turn in which so many begin takes some milliseconds."""
_REST_S = 1.0
"""Between two tries where there is no file or memory for a connection."""


class ServedConnection(Protocol):
    """What uvicorn's protocols have."""

    def shutdown(self) -> None:
        """Close it when it has answered what it was asked."""
        ...


class Acceptor:
    """Accepts on `listener`, which it owns, until `close`. It stands where uvicorn has an
    asyncio.Server, and has what uvicorn asks of one.
    """

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._rest: asyncio.TimerHandle | None = None
        self._is_closed = False
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._rest is not None:
            self._rest.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    async def wait_closed(self) -> None:
        """Until nobody begins any more."""
        if self._beginning:
            await asyncio.wait(self._beginning)

    def _accept(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # it left while it waited
            except OSError as error:
                logger.error("cannot accept connections, next try in %g s: %s", _REST_S, error)
                self._loop.remove_reader(self._listener)
                self._rest = self._loop.call_later(_REST_S, self._go_on)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    def _go_on(self) -> None:
        self._rest = None
        self._loop.add_reader(self._listener, self._accept)

    async def _begin(self, connection: socket.socket) -> None:
        try:
            _, protocol = await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError as error:
            logger.debug("a connection did not begin: %s", error)
            connection.close()
            return
        if self._is_closed:
            # The others were told before it was there.
            cast(ServedConnection, protocol).shutdown()

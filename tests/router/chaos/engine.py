"""A mock engine as a process: `python -m tests.router.chaos.engine --kind P ...`.

One event loop; HTTP by httptools; beats to the router's discovery port. It answers by the model of
truth.py in the words of wire.py, and misbehaves as `POST /chaos` tells it. SIGTERM drains as an
engine of ours does. Each call is a line in its call log; a broken contract is a line in there, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any, cast

import httptools
import orjson
import uvloop
import zmq

from tests.router.chaos.answering import Answer, Book, Host
from tests.router.chaos.asks import MODEL
from tests.router.chaos.moods import Mood
from tests.router.chaos.truth import CONTEXT
from tests.router.chaos.wire import Call
from xpyd_core.keys import beat_mac, call_mac
from xpyd_core.messages import Heartbeat, encode_heartbeat

_KEEP_ALIVE_S = 5.0
"""As uvicorn's: routers must not rely on a longer one."""
_DRAIN_AT_LEAST_S = 1.0
"""A drained engine refuses for so long before it leaves: who picked it a moment ago is told."""


class Engine:
    """The process' one engine: its mood, its book, its beats."""

    def __init__(self, flags: argparse.Namespace, log: IO[str]) -> None:
        self.flags = flags
        self.host = Host(Book(log), random.Random(flags.seed), flags.pace)
        self.key = Path(flags.key_file).read_bytes().strip()
        self.incarnation = os.urandom(8).hex()
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(f"tcp://{flags.discovery}")

    def beat(self, state: Any = None) -> None:
        """One beat, now."""
        flags = self.flags
        state = state or ("Draining" if self.host.is_draining else "Ready")
        message = Heartbeat(
            type=flags.kind,
            http_address=f"{flags.host}:{flags.port}",
            zmq_address=f"{flags.host}:{flags.port + 1000}",
            instance=flags.name,
            incarnation=self.incarnation,
            compatibility="k",
            models=(MODEL,),
            max_model_len=CONTEXT,
            continuation=1,
            state=state,
            period_ms=flags.period_ms,
            running=self.host.book.open_calls,
            free_blocks=1000,
            total_blocks=1000,
            sent_us=time.time_ns() // 1000,
        )
        frame = encode_heartbeat(message)
        self._socket.send_multipart([frame, beat_mac(self.key, frame)], zmq.NOBLOCK)

    async def serve(self) -> None:
        """Until SIGTERM, then drain."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        server = await loop.create_server(
            lambda: Connection(self, loop), self.flags.host, self.flags.port, backlog=1024
        )
        period_s = self.flags.period_ms / 1000
        while not stop.is_set():
            self.beat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await stop.wait()
        self.host.is_draining = True
        leave_at_s = loop.time() + _DRAIN_AT_LEAST_S
        while self.host.book.open_calls or loop.time() < leave_at_s:
            self.beat()
            await asyncio.sleep(period_s)
        self.beat("Gone")
        server.close()
        self._socket.close()
        self._context.term()

    def state(self) -> dict[str, Any]:
        """For the judge."""
        book = self.host.book
        return {
            "incarnation": self.incarnation,
            "calls": book.calls,
            "open_calls": book.open_calls,
            "answered": book.answered,
            "releases": book.releases,
            "connections": book.connections,
        }


class Connection(asyncio.Protocol):
    """One connection; requests on it come one after another."""

    transport: asyncio.Transport

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._answer: Answer | None = None
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are no subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        self._engine.host.book.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.host.book.connections -= 1
        self._disarm()
        if self._answer is not None:
            self._answer.abandon()

    def data_received(self, data: bytes) -> None:
        self._disarm()
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        url, headers, body = self._url.decode(), self._headers, b"".join(self._body)
        self._url, self._headers, self._body = b"", {}, []
        if url.startswith("/v1/"):
            request_id = headers[b"x-request-id"].decode()
            call = Call.of(self._engine.flags.kind, url[4:], request_id, body)
            self._answer = Answer(self._engine.host, call, self, self._loop)
            self._answer.begin()
        elif url == "/kv/release":
            self._release(headers, body)
        elif url == "/chaos":
            if body:
                self._engine.host.mood = Mood(**orjson.loads(body))
            self.reply(200, orjson.dumps(self._engine.state()))
        else:
            self.reply(404, b"{}")

    def _release(self, headers: dict[bytes, bytes], body: bytes) -> None:
        uuid = orjson.loads(body)["uuid"]
        right = call_mac(self._engine.key, "kv-release", uuid)
        self._engine.host.book.releases += 1
        if headers.get(b"x-xpyd-mac", b"").decode() != right:
            self._engine.host.book.log.write(f"{time.time():.4f} VIOLATION {uuid} - release mac\n")
        self.reply(200, b"{}")

    def reply(self, status: int, body: bytes, extra: bytes = b"") -> None:
        """A whole answer."""
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n" % status
        length = b"content-length: %d\r\n" % len(body)
        self.transport.write(head + length + extra + b"\r\n" + body)
        self.rest()

    def rest(self) -> None:
        """The answer is out: wait for the next request, as long as uvicorn does."""
        self._answer = None
        self._idle = self._loop.call_later(_KEEP_ALIVE_S, self.transport.close)

    def _disarm(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    for name in ("--kind", "--name", "--host", "--discovery", "--key-file", "--calls"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--period-ms", type=int, default=200)
    parser.add_argument("--pace", type=float, default=1.0)
    flags = parser.parse_args()
    with (
        Path(flags.calls).open("a", buffering=1) as log,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(Engine(flags, log).serve())


if __name__ == "__main__":
    sys.exit(main())

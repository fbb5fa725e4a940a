"""The client's side of a translated stream: its head, its pings, its end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from tests.router.fakes import Loop, run
from xpyd_router.access_log import Trace
from xpyd_router.http.translated import TranslatedStream
from xpyd_router.request.answers import DONE
from xpyd_router.translations.messages_answers import MessageEvents

ROLE = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n'
TEXT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


class Sink:
    """Takes what the stream writes."""

    write_frame = cast(Any, print)  # it could take frames, which a translation never writes
    is_paused = False

    def __init__(self) -> None:
        self.got = b""
        self.heads = self.ends = 0

    def start(self, status: int, headers: Any) -> None:
        self.heads += 1

    def write(self, data: bytes) -> None:
        self.got += data

    def end(self) -> None:
        self.ends += 1

    @property
    def pings(self) -> int:
        return self.got.count(b"event: ping\n")


def stream_to(sink: Sink) -> TranslatedStream:
    state = cast(Any, SimpleNamespace(trace=Trace("messages", 0.0), sent=None))
    clock = asyncio.get_running_loop().time
    return TranslatedStream(cast(Any, sink), (), state, clock, events=MessageEvents(), ping_s=10)


def test_pings_come_while_nothing_else_does(virtual_loop: Loop) -> None:
    async def work() -> None:
        sink = Sink()
        stream = stream_to(sink)
        await asyncio.sleep(100)
        assert not sink.got  # no ping before the answer: its status may still be an error's
        stream.write(ROLE)
        assert sink.pings == 1  # as Anthropic's own streams begin
        await asyncio.sleep(35)
        assert sink.pings == 4
        for _ in range(20):
            stream.write(TEXT)
            await asyncio.sleep(5)
        assert sink.pings == 4
        sink.is_paused = True
        await asyncio.sleep(100)
        assert sink.pings == 4
        sink.is_paused = False
        await asyncio.sleep(11)
        assert sink.pings == 5
        stream.write(DONE)
        stream.end()
        await asyncio.sleep(100)
        assert (sink.pings, sink.heads, sink.ends) == (5, 1, 1)
        assert stream.sent_bytes == len(sink.got)

    run(work(), virtual_loop, None)


def test_no_ping_comes_behind_a_request_that_is_over(virtual_loop: Loop) -> None:
    async def work() -> None:
        sink = Sink()
        stream = stream_to(sink)
        stream.write(ROLE)
        stream.close()
        await asyncio.sleep(100)
        assert sink.pings == 1
        assert not stream.takes_frames

    run(work(), virtual_loop, None)

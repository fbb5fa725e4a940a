"""A stream's chunks that are passed on as they came are those that an HTTP parser would find."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.test_router_upstream_bytes import Parsed
from xpyd_router.access_log import Trace
from xpyd_router.http.direct import DirectSink, UnframedSink
from xpyd_router.request.answers import scrub
from xpyd_router.request.relay import CHUNK_LINES, KNOWN_LINES, ClientStream, Relay, size_in
from xpyd_router.upstream.connection import EngineConnection, Exchange

UUID, PUBLIC = b"0123456789abcdef0123456789abcdef", b"f" * 32
SECRET = b"___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:1_" + UUID
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


class Wire:
    """Both transports: what the client gets is `sent`, in pieces."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.common_head, self.keeps_alive, self.transport = b"", True, self

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None: ...

    def answered(self) -> None: ...


class Seen:
    """The call's figures: chunks and bytes."""

    def __init__(self) -> None:
        self.chunks = self.size_bytes = 0

    def streamed(self, chunks: int, size_bytes: int) -> None:
        self.chunks += chunks
        self.size_bytes += size_bytes


class FramingSink(DirectSink):
    """One that takes no frames, but makes its own."""

    @property
    def write_frame(self) -> None:
        return None


class Stream:
    """An engine's stream on its way: connection, exchange, relay, client stream, sink; all real."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, is_framed: bool = True, takes_frames: bool = True
    ) -> None:
        self.client, self.seen = Wire(), Seen()
        kind = DirectSink if is_framed else UnframedSink
        if is_framed and not takes_frames:
            kind = FramingSink
        sink = kind(self.client)  # type: ignore[arg-type]  # what the sink uses of it
        self.trace = Trace("completions", 0.0)
        self.client_stream = ClientStream(sink, [], self.trace, lambda: 1.0)
        attempt: Any = SimpleNamespace(
            running=self.seen,
            secret=SECRET,
            uuid_bytes=UUID,
            public_bytes=PUBLIC,
            instances=(SimpleNamespace(dialect="pair-id"),),
            owes_release=True,
        )
        attempt.scrubbed = lambda data: scrub(data, (SECRET, UUID), PUBLIC)
        request_state: Any = SimpleNamespace(
            request=SimpleNamespace(wants_token_ids=False),
            has_decode_begun=False,
            sent=None,
            trace=self.trace,
        )
        self.relay = Relay(request_state, attempt, self.client_stream, sent=None)
        self.taken = 0
        self.exchange = Exchange(None, loop, 10.0)
        self.engine = EngineConnection(lambda _: None, lambda _: None)
        self.engine.connection_made(Wire())  # type: ignore[arg-type]  # no transport
        self.engine.send(self.exchange, b"POST", b"")

    def _take(self, frame: bytes) -> bool:
        taken = self.relay.take_frame(frame)
        self.taken += taken
        return taken

    async def run(self, pieces: list[bytes]) -> bytes:
        """The client's bytes when the engine has sent `pieces`."""
        self.engine.data_received(HEAD)
        take = self._take if self.relay.passes_frames else None
        relaying = asyncio.ensure_future(self.exchange.relay(self.relay.feed, take))
        await asyncio.sleep(0)
        for piece in pieces:
            self.engine.data_received(piece)
        async with asyncio.timeout(10):
            await relaying
        return b"".join(self.client.sent)


def run(pieces: list[bytes], **options: bool) -> tuple[Stream, bytes]:
    async def work() -> tuple[Stream, bytes]:
        stream = Stream(asyncio.get_running_loop(), **options)
        return stream, await stream.run(pieces)

    return asyncio.run(work())


def event(size: int, secret: bytes = SECRET, text: bytes = b"") -> bytes:
    """A chunk of a completion with so many bytes."""
    start = b'data: {"id":"cmpl-' + secret + b'","text":"' + text
    return start + b"x" * (size - len(start) - 4) + b'"}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def body_of(answer: bytes) -> bytes:
    parsed = Parsed(answer)
    assert parsed.is_whole
    return parsed.body


SIZES = (160, 254, 255, 256, 257, 4094, 4095, 4096, 4097, 9000)


def test_events_of_all_sizes_pass_with_the_clients_id() -> None:
    events = [event(200), *(event(size) for size in SIZES for _ in range(2)), DONE]
    stream, answer = run([*map(chunk, events), b"0\r\n\r\n"])
    assert body_of(answer) == b"".join(events).replace(SECRET, PUBLIC)
    # All but the first, by which the form is learned, the longest ones, and [DONE].
    assert stream.taken == 14
    assert stream.seen.chunks == len(events) - 1
    assert stream.seen.size_bytes == sum(map(len, events))
    assert stream.client_stream.sent_bytes == len(body_of(answer))


def test_the_chunk_with_the_usage_is_read() -> None:
    usage = b'data: {"id":"cmpl-' + SECRET + b'","choices":[],"usage":{"prompt_tokens":5,'
    usage += b'"completion_tokens":7}}\n\n'
    stream, answer = run([*map(chunk, [event(200), event(200), usage, DONE]), b"0\r\n\r\n"])
    assert stream.taken == 1
    assert (stream.trace.prompt_tokens, stream.trace.output_tokens) == (5, 7)
    assert usage.replace(SECRET, PUBLIC) in body_of(answer)


def test_a_sink_without_frames_gets_the_same() -> None:
    events = [event(200) for _ in range(5)]
    pieces = [*map(chunk, [*events, DONE]), b"0\r\n\r\n"]
    (one, direct), (other, plain) = run(pieces), run(pieces, takes_frames=False)
    assert (one.taken, other.taken) == (4, 0)
    assert direct == plain


def test_a_client_without_chunks_gets_none() -> None:
    events = [event(200) for _ in range(5)]
    stream, answer = run([*map(chunk, [*events, DONE]), b"0\r\n\r\n"], is_framed=False)
    assert stream.taken == 0
    assert answer.endswith(b"\r\n\r\n" + b"".join([*events, DONE]).replace(SECRET, PUBLIC))


@pytest.mark.parametrize(
    "odd",
    [
        chunk(event(200) + event(200)),
        chunk(event(200)) + chunk(event(210)),
        chunk(event(200, text=SECRET)),
        chunk(event(200, text=UUID)),
        chunk(event(200, secret=b"another")),
        chunk(b": ping\n\n"),
        chunk(event(200)[:-1]) + chunk(b"\n"),
        b"0" + chunk(event(300)),
        b"%X\r\n%s\r\n" % (0xAB, event(0xAB)),
        b"c8;x=y\r\n" + event(200) + b"\r\n",
        chunk(b"data: x\n\n" + event(200)),
        chunk(event(200)[:-2] + b"\r\n\r\n"),
    ],
)
def test_what_is_not_of_the_usual_form_is_read_in_full(odd: bytes) -> None:
    pieces = [chunk(event(200)), odd, chunk(event(200)), chunk(DONE), b"0\r\n\r\n"]
    stream, answer = run(pieces)
    body = body_of(answer)
    assert stream.taken == 1
    assert SECRET not in body
    assert UUID not in body
    assert body == body_of(run(pieces, takes_frames=False)[1])


@pytest.mark.parametrize("size", [160, 255, 256, 300])
@pytest.mark.parametrize("wrong", [-1, 1])
async def test_a_length_that_is_not_the_chunks_is_never_passed(size: int, wrong: int) -> None:
    lie = b"%x\r\n%s\r\n" % (size + wrong, event(size))

    stream = Stream(asyncio.get_running_loop())
    stream.engine.data_received(HEAD)
    relaying = asyncio.ensure_future(stream.exchange.relay(stream.relay.feed, stream._take))
    await asyncio.sleep(0)
    for piece in (chunk(event(200)), lie):
        stream.engine.data_received(piece)
    relaying.cancel()
    assert stream.taken == 0


@pytest.mark.parametrize("seed", range(6))
def test_in_any_cut_the_client_gets_what_the_engine_sent(seed: int) -> None:
    chance = random.Random(seed)
    texts = (b"", b"", b"", UUID, SECRET, b"\\n")
    events = [
        event(chance.choice((180, 255, 256, 400, 4096)), text=chance.choice(texts))
        for _ in range(60)
    ]
    pieces: list[bytes] = []
    for one in map(chunk, [*events, DONE]):
        at = chance.randrange(1, len(one)) if chance.random() < 0.2 else len(one)
        pieces += [one[:at], one[at:]] if at < len(one) else [one]
    glued = [pieces[0]]
    for piece in pieces[1:]:
        if chance.random() < 0.2:
            glued[-1] += piece
        else:
            glued.append(piece)
    stream, answer = run([*glued, b"0\r\n\r\n"])
    expected = b"".join([*events, DONE]).replace(SECRET, PUBLIC).replace(UUID, PUBLIC)
    assert body_of(answer) == expected
    assert stream.taken > 5


async def test_after_a_failure_nothing_is_taken() -> None:
    stream = Stream(asyncio.get_running_loop())
    stream.engine.data_received(HEAD)
    relaying = asyncio.ensure_future(stream.exchange.relay(stream.relay.feed, stream._take))
    await asyncio.sleep(0)
    stream.engine.data_received(chunk(event(200)))
    stream.exchange.fail("timeout")
    stream.engine.data_received(chunk(event(200)))
    relaying.cancel()
    assert stream.taken == 0
    assert stream.seen.chunks == 1


def test_the_size_in_a_frame_is_what_its_length_line_says() -> None:
    for size in range(16, KNOWN_LINES):
        assert size_in(len(CHUNK_LINES[size]) + size + 2) == size

"""The stream of D on its way to the client: the hot path of every token.

`flow` makes one Relay per streamed call. The exchange feeds it inside the event loop's read
callback; it writes to the ClientStream, which writes to a Sink of `http`. What the client has
(ids per choice, ended choices) is noted in the request's state, so that another D can continue.
Whole HTTP chunks of the usual form are passed on without being parsed (ADR 0027, ADR 0028).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import orjson

from xpyd_core.errors import ProtocolError
from xpyd_router.access_log import Trace
from xpyd_router.errors import ABORTED, CallFailed
from xpyd_router.request.answers import (
    DONE,
    EventSplitter,
    behind_ids,
    chunk_of,
    failure_in,
    text_in,
    tokens_in,
    without_token_ids,
)
from xpyd_router.request.attempt import Attempt
from xpyd_router.request.state import RequestState, Sent, begin_alone
from xpyd_router.upstream.connection import Exchange

KNOWN_LINES = 4096
CHUNK_LINES: tuple[bytes, ...] = tuple(b"%x\r\n" % size for size in range(KNOWN_LINES))
"""Length lines by a chunk's size: a look-up takes a tenth of the time that formatting takes."""
_LONGEST_OF_TWO_DIGITS = 255 + 6


def size_in(frame_bytes: int) -> int:
    """The payload's size in a frame that is one chunk of 16 to 4,095 bytes, which two or three
    digits tell. Of other frames it is wrong, and then not what their length line says.
    """
    return frame_bytes - 6 if frame_bytes <= _LONGEST_OF_TWO_DIGITS else frame_bytes - 7


Header = tuple[bytes, bytes]


class Sink(Protocol):
    """The client's side of one request. All methods return at once; after `on_lost` they do
    nothing.
    """

    on_pause: Callable[[], None]
    """Called when the client's buffer is full."""
    on_resume: Callable[[], None]
    """Called when it has room again."""
    is_paused: bool
    is_lost: bool
    """The client is gone."""

    @property
    def write_frame(self) -> Callable[[bytes], None] | None:
        """Like `write`, of a piece that is an HTTP chunk already; None where the sink cannot."""
        ...

    def whole(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """The whole answer."""
        ...

    def start(self, status: int, headers: Sequence[Header]) -> None:
        """The head of an answer whose body follows by `write`."""
        ...

    def write(self, data: bytes) -> None:
        """A piece of the body, not empty."""
        ...

    def end(self) -> None:
        """The body is whole."""
        ...

    def cut(self) -> None:
        """Close the connection: what was sent is not whole."""
        ...


class ClientStream:
    """The client's side of a streamed answer: writes the head with the first bytes, notes the time
    of these in the trace, and knows whether anything was sent. `clock` is monotonic seconds.
    """

    def __init__(
        self,
        sink: Sink,
        headers: Sequence[Header],
        trace: Trace,
        clock: Callable[[], float],
    ) -> None:
        self.sink = sink
        self._headers = headers
        self._trace = trace
        self._clock = clock
        self.has_begun = False
        """Something is on the client's wire: errors are events from here on."""
        self.sent_bytes = 0
        self.takes_frames = sink.write_frame is not None
        self._write_frame = sink.write_frame or sink.write

    def write(self, data: bytes) -> None:
        """Send `data`, which may be empty."""
        if not data:
            return
        if not self.has_begun:
            self.has_begun = True
            trace = self._trace
            trace.first_s = self._clock() - trace.started_s
            self.sink.start(200, self._headers)
        self.sent_bytes += len(data)
        self.sink.write(data)

    def write_frame(self, frame: bytes, size_bytes: int) -> None:
        """Send an HTTP chunk with `size_bytes` in it, where something was sent before and the sink
        has `write_frame`.
        """
        self.sent_bytes += size_bytes
        self._write_frame(frame)

    def end(self) -> None:
        """The answer is whole."""
        self.sink.end()

    def close(self) -> None:
        """The request is over, answered or not."""


_BODY_END_S = 1.0
"""Deadline for the end of an engine's body behind its last event; later the connection is closed.
"""
_CHUNK = b'data: {"id"'
_LINE_END = b"}\n\n"
_FRAME_END = _LINE_END + b"\r\n"
_BRACE = ord("}")
"""Before the last one in a chunk with the stream's usage."""
_IDS = b',"token_ids":['
_ERROR = b'data: {"error"'
_NO_CHOICES = b'"choices":[]'
"""The chunk that counts a stream's tokens."""


class Relay:
    """See the module. `sent` is None where the engine gives no token ids: then its chunks pass as
    they are, and no other instance can continue behind them.
    """

    def __init__(
        self, state: RequestState, attempt: Attempt, client: ClientStream, *, sent: Sent | None
    ) -> None:
        self._state = state
        self._attempt = attempt
        self._call = attempt.running
        self._secret = attempt.secret
        self._uuid = attempt.uuid_bytes
        self._public = attempt.public_bytes
        self._id_at: int = -1
        self._client = client
        self._sent = sent
        self._keeps_ids = state.request.wants_token_ids
        self._is_single = sent is not None and len(sent.token_ids) == 1
        self._splitter = EventSplitter()
        self.passes_frames = sent is None and client.takes_frames
        """Chunks of the engine can be chunks of the answer, with another id in them."""
        self._may_abort = attempt.instances[-1].dialect != "xpyd"
        self._came = self._goes = b""
        """How events begin, up to the id and with it: from the engine, and to the client."""
        self._is_flowing = False
        """The stream has begun, and what comes next begins an event."""
        self.is_done = False
        """The engine's last event has come, and the answer was ended."""
        self._exchange: Exchange | None = None

    async def run(self, exchange: Exchange, gap_s: float) -> None:
        """Relay the answer of `exchange` until [DONE]; CallFailed where it ends without it. Each
        gap in it may take `gap_s`. The engine is not read from while the client does not read.
        """
        self._exchange, sink = exchange, self._client.sink
        exchange.bound_gaps(gap_s)
        sink.on_pause, sink.on_resume = exchange.pause, self._resume
        if sink.is_paused:
            exchange.pause()
        try:
            await exchange.relay(self.feed, self.take_frame if self.passes_frames else None)
        except CallFailed:
            if not self.is_done:
                raise
        finally:
            sink.on_pause = sink.on_resume = do_nothing
        if not self.is_done:
            raise CallFailed("incomplete")

    def take_frame(self, frame: bytes) -> bool:
        """Pass on what was read where an HTTP chunk begins, if it is one chunk with one event of
        the usual form. Nothing is taken out of the frame but its beginning; all else is `feed`'s.
        """
        came = self._came
        if not came or not self._is_flowing:
            return False
        frame_bytes = len(frame)
        size = size_in(frame_bytes)
        if size >= KNOWN_LINES:
            return False
        line = CHUNK_LINES[size]
        at = len(line) + len(came)
        if (
            len(line) + size + 2 != frame_bytes
            or not frame.startswith(line)
            or not frame.startswith(came, len(line))
            or frame.find(b"\n", at) != frame_bytes - 4
            or not frame.endswith(_FRAME_END)
            or frame[-6] == _BRACE
            or frame.find(self._uuid, at) >= 0
            or (self._may_abort and frame.find(ABORTED, at) >= 0)
        ):
            return False
        if self._call is not None:
            self._call.streamed(1, size)
        goes = self._goes
        size += len(goes) - len(came)
        self._client.write_frame(b"".join((CHUNK_LINES[size], goes, frame[at:])), size)
        return True

    def feed(self, data: bytes) -> None:
        """Bytes of the stream, in any cut. Raises CallFailed when another engine should go on."""
        if self._is_flowing and data.startswith(_CHUNK):
            end = data.find(b"\n")
            is_whole = end == len(data) - 2 and data.endswith(_LINE_END)
            if is_whole and not (self._may_abort and data.find(ABORTED) >= 0):
                # What nearly every piece is: one chunk, of one token.
                if self._call is not None:
                    self._call.streamed(1, end + 2)
                is_plain = self._sent is None and data[-4] != _BRACE
                shown = data if is_plain else self._shown(data)
                if shown is not None:
                    self._client.write(self._scrubbed(shown))
                return
        if self.is_done:
            return
        owed, self._attempt.owes_release = self._attempt.owes_release, False
        self._feed_events(data, owed=owed)
        self._is_flowing = (
            self._splitter.is_empty and self._state.has_decode_begun and not self.is_done
        )

    def _scrubbed(self, event: bytes) -> bytes:
        """`event` without the internal id.

        The id is at the same place in all chunks of a stream: to look there, and only for its
        uuid behind it, takes a third of a search for all of it.
        """
        at, secret = self._id_at, self._secret
        if at > 0 and event.startswith(secret, at):
            event = event[:at] + self._public + event[at + len(secret) :]
            if event.find(self._uuid) < 0:
                return event
        elif event.find(self._uuid) < 0:
            return event
        else:
            self._learn(event)
        return self._attempt.scrubbed(event)

    def _learn(self, event: bytes) -> None:
        self._id_at = at = event.find(self._secret)
        is_usual = event.startswith(_CHUNK) and at > 0 and len(self._public) <= len(self._secret)
        if self.passes_frames and is_usual:
            self._came, self._goes = event[:at] + self._secret, event[:at] + self._public

    def _feed_events(self, data: bytes, *, owed: bool) -> None:
        """Pieces of events, several at once, and the last one. `owed`: nothing of D came before."""
        try:
            events = self._splitter.push(data)
        except ProtocolError as error:
            raise CallFailed("too_large") from error
        if self._call is not None:
            self._call.streamed(len(events) - (DONE in events[-1:]), len(data))
        kept: list[bytes] = []
        try:
            for event in events:
                if event == DONE or event.startswith(_ERROR):
                    kept.append(event if event == DONE else self._error(event))
                    self.is_done = True
                    break
                if self._may_abort and event.find(ABORTED) >= 0:
                    # Where it is D's first event, D has not had the request.
                    self._attempt.owes_release = owed and not self._state.has_decode_begun
                    raise CallFailed("refused")
                if (shown := self._shown(event)) is not None:
                    kept.append(self._scrubbed(shown))
        finally:
            # Also before a failure: what is noted as sent has to be.
            self._client.write(b"".join(kept))
        if self.is_done:
            self._client.end()
            if self._exchange is not None:
                self._exchange.end_within(_BODY_END_S)

    def _resume(self) -> None:
        self.interrupted()
        if self._exchange is not None:
            self._exchange.resume()

    def interrupted(self) -> None:
        """The client had not taken what came, and does now."""
        self._state.was_interrupted = True
        if self._call is not None:
            self._call.interrupted()

    def _error(self, event: bytes) -> bytes:
        may_go_on = self._sent is not None or not self._state.has_decode_begun
        if may_go_on and (cause := failure_in(event)):
            raise CallFailed(cause)
        return self._attempt.scrubbed_error(event)

    def _shown(self, event: bytes) -> bytes | None:
        """What the client gets of a chunk."""
        sent = self._sent
        if not self._state.has_decode_begun:
            self._state.has_decode_begun = True
            if sent is not None and self._state.sent is None:
                self._client.write(begin_alone(self._state, sent, event))
        if sent is None:
            if event.find(_NO_CHOICES) >= 0:
                trace = self._state.trace
                trace.prompt_tokens, trace.output_tokens = tokens_in(event)
            return event
        start = event.find(_IDS)
        if start < 0:
            if event.find(_NO_CHOICES) >= 0:
                sent.has_usage = True
            return event
        # Inside a JSON string the quotes would be escaped: this is a key.
        end = event.find(b"]", start)
        is_plain = (
            self._is_single
            and event.find(b'"finish_reason":null') >= 0
            and event.find(b'""') < 0
            and event.find(b"[", end) < 0
        )
        if not is_plain:
            return self._shown_carefully(event, sent)
        sent.token_ids[0].extend(orjson.loads(event[start + len(_IDS) - 1 : end + 1]))
        return event if self._keeps_ids else event[:start] + event[end + 1 :]

    def _shown_carefully(self, event: bytes, sent: Sent) -> bytes | None:
        """The same for chunks of several choices, those that end a choice, and silent ones."""
        chunk = chunk_of(event)
        if chunk is None:
            return event
        kept = [choice for choice in chunk["choices"] if sent.note(choice)]
        if len(kept) < len(chunk["choices"]):
            if not kept:
                return None
            chunk["choices"] = kept
        return without_token_ids(chunk, keep=self._keeps_ids)


class IdsRelay(Relay):
    """The stream of a D that takes all ids so far for its prompt: chunks are rewritten, so that a
    client sees one response. `sent` has the prompt's ids."""

    def __init__(
        self, state: RequestState, attempt: Attempt, client: ClientStream, *, sent: Sent
    ) -> None:
        super().__init__(state, attempt, client, sent=sent)
        self._behind = sent
        self._before = len(sent.token_ids[0])
        """Tokens that are prompt to D, and output to the client."""

    def _shown(self, event: bytes) -> bytes | None:
        """See Relay."""
        state, sent = self._state, self._behind
        if not state.has_decode_begun:
            state.has_decode_begun = True
            if state.sent is None:
                self._client.write(begin_alone(state, sent, event))
        chunk = chunk_of(event)
        if chunk is None:
            return event
        for choice in chunk["choices"]:
            sent.note(choice)
            text = text_in(choice)
            if text is None or (text and not choice.get("token_ids")):
                state.sent = None  # what cannot be repeated: no other engine goes on behind it
            elif text and not text.endswith("\ufffd"):
                sent.settled = len(sent.token_ids[0])
        if not chunk["choices"]:
            sent.has_usage = True
        return behind_ids(chunk, state.head, sent.usage, self._before)


def do_nothing() -> None:
    """What a sink calls that has no source yet."""

"""The Endpoint of one simulated process: the turns of the real I/O loop, over pipes.

A turn is what xpyd_kv.transport.endpoint does in one: read what has come, run the calls of other
threads, timers, the session's tick, then write and carry out what ends. The session is called as
there: never nested, `done(False)` of unsent frames before `peer_down`, control frames before DATA,
a new connection of an instance before the end of its older one. An error of the session is not
contained here: between honest sides there is none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tests.kv.simulation.link import Begin, Close, Control, Item, Open, Part
from tests.kv.simulation.memory import SourceView, joined, written
from tests.kv.simulation.stream import Checksum, SimStream, write_into
from xpyd_core.request_id import Address
from xpyd_kv.transport.api import Done, Handler
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.frames import encode

if TYPE_CHECKING:
    from tests.kv.simulation.process import Process

# As the real one: a PING after 2 s of silence, and the end after 3 unanswered ones.
SILENCE_S = 8.0
# A close flushes for so long.
FLUSH_S = 1.0
# Virtual time goes on from one turn to the next.
_LEAST_S = 1e-6


class SimEndpoint:
    """See xpyd_kv.transport.api.Endpoint."""

    def __init__(self, handler: Handler, process: Process) -> None:
        self.handler = handler
        self.process = process
        self.world = process.world
        self.streams: dict[SimStream, None] = {}
        self.by_address: dict[Address, SimStream] = {}
        self.by_instance: dict[str, SimStream] = {}
        self.dialling: set[Address] = set()
        self.calls: deque[Callable[[], None]] = deque()
        self.arrived: deque[Callable[[], None]] = deque()
        self._later: deque[Callable[[], None]] = deque()
        self._to_close: deque[SimStream] = deque()
        self._dirty: dict[SimStream, None] = {}
        self._turn_at = math.inf
        self._tick_at = math.inf
        self._ran = False
        self._flush_by: float | None = None

    # --- Endpoint

    def start(self) -> None: ...

    def close(self, deadline_s: float) -> None: ...

    def call(self, function: Callable[[], None]) -> None:
        self.calls.append(function)
        self.wake()

    def connect(self, address: Address, *, data: bool = False) -> SimStream | None:
        stream = self.by_address.get(address)
        if stream is None and address not in self.dialling:
            if self._flush_by is not None:
                self._later.append(partial(self.handler.dial_failed, address, "closed"))
            else:
                self.dialling.add(address)
                self.world.dial(self, address)
        return stream

    def disconnect(self, peer: SimStream, reason: str) -> None:
        self.world.note(self.process, "disconnects", peer.link.name, reason)
        assert not self.world.is_calm, "a connection is given up though nothing has befallen it"
        self.end(peer, reason)

    def send(self, peer: SimStream, message: wire.Message, body: bytes = b"") -> None:
        self.world.watch.on_send(self, peer, message)
        if peer.closing is None:
            encode(message, len(body))
            peer.control.append(Control(message, body))
            self.touch(peer)

    def send_data(
        self,
        peer: SimStream,
        make_header: Callable[[], wire.Data | None],
        views: Sequence[SourceView],
        done: Done,
    ) -> None:
        if peer.closing is not None:
            self._later.append(partial(done, None))
            self.wake()
            return
        peer.data.append((make_header, views, done))
        self.touch(peer)

    # --- the loop

    def wake(self) -> None:
        self.wake_at(self.world.schedule.now + self.world.jitter())

    def wake_at(self, time: float) -> None:
        if time < self._turn_at:
            self._turn_at = time
            self.process.at(time, self._turn_if_due)

    def touch(self, stream: SimStream) -> None:
        """`stream` may have something to write."""
        self._dirty[stream] = None
        self.wake()

    def _turn_if_due(self) -> None:
        if self.world.schedule.now >= self._turn_at:
            self._turn_at = math.inf
            self._turn()

    def _turn(self) -> None:
        now = self.world.schedule.now
        for stream in list(self.streams):
            self._read(stream)
            if not self.process.is_alive:
                return
        for queue in (self.arrived, self.calls, self._later):
            for _ in range(len(queue)):
                self._ran = True
                queue.popleft()()
        if self._ran or now >= self._tick_at:
            self._ran = False
            tick_at = self.handler.tick(now)
            self._tick_at = math.inf if tick_at is None else tick_at
        self._settle()
        if self._ran or self._later or self._to_close or self._dirty:
            self.wake()
        for stream in self.streams:
            stream.pipe_in.stir()
        for time in (self._tick_at, self._flush_by or math.inf):
            if time < math.inf:
                self.wake_at(max(time, now + _LEAST_S))
        self._end_if_flushed()

    # --- reading

    def _read(self, stream: SimStream) -> None:
        pipe, world = stream.pipe_in, self.world
        for _ in range(world.plan.turn_items):
            item = pipe.head()
            if item is None or stream.closing is not None:
                return
            if not isinstance(item, Close):
                world.boundary(stream.link, pipe, "before")
                if not self.process.is_alive or pipe.head() is not item:
                    return
            pipe.pop()
            stream.heard_at = world.schedule.now
            self._deliver(stream, item)
            if not isinstance(item, Close):
                world.boundary(stream.link, pipe, "after")
                if not self.process.is_alive:
                    return

    def _deliver(self, stream: SimStream, item: Item) -> None:
        self._ran = True
        match item:
            case Open():
                self._opened(stream, item.hello)
            case Control():
                self.world.note(self.process, "reads", stream.link.name, item.message)
                self.process.touched(item.message)
                self.world.watch.on_read(self.process, item.message)
                self.handler.message(stream, item.message, item.body)
            case Begin():
                self.process.touched(item.header)
                views = self.handler.data_begin(stream, item.header, item.length)
                self.world.note(self.process, "begins", stream.link.name, item.header)
                assert views is None or sum(map(len, views)) == item.length, "room for a frame"
                stream.header, stream.views, stream.written = item.header, views, 0
                stream.count_writer(1)
            case Part():
                self._write_part(stream, item)
            case Close():
                self.end(stream, item.reason)

    def _opened(self, stream: SimStream, hello: wire.Hello) -> None:
        stream.hello = hello
        older = self.by_instance.get(hello.engine_id)
        self.by_instance[hello.engine_id] = stream
        if older is not None:
            self.end(older, "replaced")
            self.by_instance[hello.engine_id] = stream
        stream.is_up = True
        self.world.note(self.process, "has peer", stream.link.name, hello.incarnation)
        self.handler.peer_up(stream)

    def _write_part(self, stream: SimStream, part: Part) -> None:
        header, views = stream.header, stream.views
        assert header is not None
        if views is not None:
            write_into(views, stream.written, part.data)
            stream.written += len(part.data)
        if not part.is_last:
            return
        stored = views is not None
        assert part.checksum is not None
        intact = stored and self.world.is_intact(written(views), part.checksum)
        stream.count_writer(-1)
        stream.header = stream.views = None
        self.process.touched(header)
        self.handler.data_end(stream, header, part.checksum, stored=stored, intact=intact)

    # --- writing

    def _settle(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for stream in dirty:
            self._write(stream)
        for _ in range(len(self._to_close)):
            self._close(self._to_close.popleft())

    def _write(self, stream: SimStream) -> None:
        for _ in range(self.world.plan.turn_parts):
            if stream.closing is not None:
                return
            if stream.sending is not None:
                if not self._write_next_part(stream):
                    return
            elif stream.control:
                while stream.control:
                    stream.pipe_out.push(stream.control.popleft())
            elif stream.data:
                self._begin_frame(stream)
            else:
                return
        self.touch(stream)

    def _begin_frame(self, stream: SimStream) -> None:
        make_header, views, done = stream.data.popleft()
        self._ran = True
        header = make_header()
        if header is None:
            done(None)
            return
        self.world.watch.on_data(stream, header)
        stream.sending, stream.sum = (make_header, views, done), Checksum()
        step = max(1, -(-len(views) // self.world.plan.frame_parts))
        stream.parts.extend(views[at : at + step] for at in range(0, len(views), step))
        stream.pipe_out.push(Begin(header, sum(map(len, views))))
        self.process.touched(header)

    def _write_next_part(self, stream: SimStream) -> bool:
        if not stream.pipe_out.has_room:
            return False
        now = self.world.schedule.now
        if now < stream.next_part_at:
            self.process.at(stream.next_part_at, partial(self.touch, stream))
            return False
        stream.next_part_at = now + stream.part_s
        data = joined(stream.parts.popleft())
        stream.sum.update(data)
        stream.pipe_out.push(Part(data, None if stream.parts else stream.sum.digest()))
        if not stream.parts:
            assert stream.sending is not None
            _, _, done = stream.sending
            stream.sending = None
            self._ran = True
            done(stream.sum.digest())
        return True

    # --- ends

    def end(self, stream: SimStream, reason: str) -> None:
        """From here on `stream` is nobody's peer."""
        if stream.closing is not None:
            return
        stream.closing = reason
        del self.streams[stream]
        for registry in (self.by_address, self.by_instance):
            for name in [name for name, one in registry.items() if one is stream]:
                del registry[name]
        self._to_close.append(stream)
        self.wake()

    def _close(self, stream: SimStream) -> None:
        while stream.control and stream.sending is None:
            stream.pipe_out.push(stream.control.popleft())
        stream.pipe_out.push(Close("closed_by_peer"))
        stream.pipe_out.is_cut = stream.pipe_in.is_cut = True
        stream.pipe_in.items.clear()
        stream.count_writer(-1)
        stream.views = None
        frames = [stream.sending] if stream.sending is not None else []
        frames += stream.data
        stream.sending = None
        stream.data.clear()
        stream.parts.clear()
        for _, _, done in frames:
            done(None)
        self.world.note(self.process, "has lost", stream.link.name, stream.closing)
        if stream.is_up:
            self.handler.peer_down(stream, stream.closing or "")
        self._ran = True

    def watch_silence(self, stream: SimStream) -> None:
        """Something has made the peer silent: look again when the PINGs would have failed."""
        stream.heard_at = self.world.schedule.now
        self._look_for_silence(stream)

    def _look_for_silence(self, stream: SimStream) -> None:
        self.process.at(stream.heard_at + SILENCE_S, partial(self._give_up_if_silent, stream))

    def _give_up_if_silent(self, stream: SimStream) -> None:
        now = self.world.schedule.now
        if stream.closing is not None or not self.world.is_silent(stream):
            return
        stream.heard_at = max(stream.heard_at, self.process.thawed_at)
        if now >= stream.heard_at + SILENCE_S - 1e-9:
            self.end(stream, "timeout")
        else:
            self._look_for_silence(stream)

    def begin_close(self) -> None:
        """GOAWAY to all, what is queued goes out, then the end."""
        self._flush_by = self.world.schedule.now + FLUSH_S
        for stream in list(self.streams):
            if stream.is_up:
                self.send(stream, wire.Goaway(reason="closing"))
            else:
                self.end(stream, "closed")
        self.wake()

    def _end_if_flushed(self) -> None:
        if self._flush_by is None or self._to_close:
            return
        flushed = not any(stream.has_output for stream in self.streams)
        if self.streams and (flushed or self.world.schedule.now >= self._flush_by):
            for stream in list(self.streams):
                self.end(stream, "closed")
        elif not self.streams:
            self.process.exited()

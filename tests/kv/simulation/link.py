"""One connection: two pipes. Ordered and reliable until it is cut; nothing comes after a cut.

Either side learns of the end by a Close behind what still arrives, or, when the pipe is mute,
by silence: its endpoint gives up after as long as the real one's PINGs take. Beyond what TCP
does, a pipe can be told to lose, repeat or delay a frame: what a defective peer, or a transport of
several connections, would look like. PINGs pass all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tests.kv.simulation.schedule import Schedule
from xpyd_kv.wire import messages as wire

if TYPE_CHECKING:
    from tests.kv.simulation.stream import SimStream

# DATA parts that the kernels of both sides hold before the writer has to wait.
ROOM_PARTS = 4
_LEAST_S = 1e-6
# A frame that is delayed comes behind the next one, or after so long; one that lingers then.
_LATE_S = 0.01


class Open(NamedTuple):
    """The dialler's side of the handshake is done."""

    hello: wire.Hello


class Control(NamedTuple):
    """A control frame."""

    message: wire.Message
    body: bytes


class Begin(NamedTuple):
    """A DATA frame's header."""

    header: wire.Data
    length: int


class Part(NamedTuple):
    """Some of its body; behind the last of it the checksum."""

    data: bytes
    checksum: bytes | None

    @property
    def is_last(self) -> bool:
        return self.checksum is not None


class Close(NamedTuple):
    """FIN or RST."""

    reason: str


Item = Open | Control | Begin | Part | Close


class Pipe:
    """One direction."""

    def __init__(self, schedule: Schedule, latency: Callable[[], float]) -> None:
        self.items: deque[tuple[float, Item]] = deque()
        self.held_until = 0.0
        self.is_cut = False
        self.corrupt_next = 0
        self.writer: SimStream | None = None
        self.reader: SimStream | None = None
        self._schedule = schedule
        self._latency = latency
        self.tricks: deque[str] = deque()
        self.is_deaf = False
        self._last_arrival = 0.0
        self._parts = 0
        # A frame that a trick is played on, and one that comes behind the next frame.
        self._trick = ""
        self._aside: list[Item] = []
        self._late: list[Item] = []
        self._is_mid_frame = False

    @property
    def has_room(self) -> bool:
        return self._parts < ROOM_PARTS

    @property
    def is_mute(self) -> bool:
        """Nothing comes out of it now."""
        return self.held_until > self._schedule.now

    def push(self, item: Item) -> None:
        if self.is_cut:
            return
        if isinstance(item, Part) and self.corrupt_next:
            self.corrupt_next -= 1
            item = Part(bytes([item.data[0] ^ 0xFF]) + item.data[1:], item.checksum)
        if isinstance(item, Control | Begin) and (self.is_deaf or self.tricks):
            self._trick = "lose" if self.is_deaf else self.tricks.popleft()
        is_last = isinstance(item, Control) or (isinstance(item, Part) and item.is_last)
        if self._trick:
            self._aside.append(item)
            if is_last:
                self._play()
            return
        self._append(item)
        if is_last:
            self._append_late()

    def _play(self) -> None:
        """The whole frame is here."""
        trick, self._trick = self._trick, ""
        frame, self._aside = self._aside, []
        if trick == "linger":
            self._schedule.after(_LATE_S, partial(self._append_lingering, frame))
        if trick == "delay":
            self._append_late()
            self._late = frame
            self._schedule.after(_LATE_S, self._append_late)
        for _ in range({"lose": 0, "repeat": 2}.get(trick, 0)):
            for item in frame:
                self._append(item)

    def _append_late(self) -> None:
        # Never between the parts of another frame: behind its last one.
        if self._is_mid_frame:
            return
        late, self._late = self._late, []
        for item in () if self.is_cut else late:
            self._append(item)

    def _append_lingering(self, frame: list[Item]) -> None:
        self._late = [*self._late, *frame]
        self._append_late()

    def _append(self, item: Item) -> None:
        self._parts += isinstance(item, Part)
        self._is_mid_frame = isinstance(item, Begin) or (
            isinstance(item, Part) and not item.is_last
        )
        self._last_arrival = max(self._last_arrival, self._schedule.now + self._latency())
        self.items.append((self._last_arrival, item))
        self.stir()

    def stir(self) -> None:
        """Have the reader look when there will be something to see."""
        if self.items and self.reader is not None:
            at = max(self.items[0][0], self.held_until, self._schedule.now + _LEAST_S)
            self.reader.endpoint.wake_at(at)

    def head(self) -> Item | None:
        """What can be read now."""
        now = self._schedule.now
        if not self.items or self.items[0][0] > now or self.held_until > now:
            return None
        return self.items[0][1]

    def pop(self) -> None:
        _, item = self.items.popleft()
        if isinstance(item, Part):
            self._parts -= 1
            if self.writer is not None:
                self.writer.endpoint.touch(self.writer)

    def hold(self, seconds: float) -> None:
        """Nothing comes out for so long."""
        self.held_until = max(self.held_until, self._schedule.now + seconds)
        self._schedule.at(self.held_until, self.stir)

    def cut(self, keep: int, reason: str | None) -> None:
        """Only the first `keep` items arrive, then Close; no Close where `reason` is None."""
        if self.is_cut:
            return
        while len(self.items) > keep:
            self.items.pop()
        if reason is not None:
            self.push(Close(reason))
        self.is_cut = True


@dataclass(eq=False)
class Link:
    """A connection between a P and a D, by name."""

    name: str
    p_name: str
    d_name: str
    to_d: Pipe
    to_p: Pipe

    @property
    def pipes(self) -> tuple[Pipe, Pipe]:
        return self.to_d, self.to_p

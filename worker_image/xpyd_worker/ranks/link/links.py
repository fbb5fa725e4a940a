"""Sockets between the engine's process and its ranks, or other pods: frames, on a thread of theirs.

`Links` owns the thread. A `Link` is one stream socket: any thread posts to it, and what comes is
handed on by the links' thread. A link is lost once, by the other side's end or by what it sends;
so is one whose other side does not read what is posted: nothing here grows without bound.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable

from xpyd_core.errors import ProtocolError
from xpyd_worker.ranks.link.frames import Frame, FrameReader, Kind, encode_frame

_log = logging.getLogger(__name__)
MAX_UNSENT_BYTES = 128 << 20
"""Twice the longest frame."""
_READ_BYTES = 256 << 10
_MOST_EARLY = 64

TakeFrame = Callable[[Frame], None]
Lose = Callable[[str], None]


class Link:
    """One socket of a Links' thread."""

    def __init__(
        self, sock: socket.socket, wake: Callable[[], None], take: TakeFrame, lose: Lose
    ) -> None:
        """`take` and `lose` are called by the links' thread, `lose` once, with the reason. Neither
        may block."""
        sock.setblocking(False)
        self.socket = sock
        self._wake = wake
        self._take = take
        self._lose = lose
        self._reader = FrameReader()
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._broken = ""

    def post(self, frame: Frame) -> None:
        """Send it, behind what was posted before. Any thread; does not wait. What is posted to a
        link that is lost goes nowhere."""
        data = encode_frame(frame)
        with self._lock:
            if self._broken:
                return
            if self._unsent_bytes + len(data) > MAX_UNSENT_BYTES:
                self._broken = f"it does not read: {self._unsent_bytes} bytes wait for it"
            else:
                self._unsent.append(memoryview(data))
                self._unsent_bytes += len(data)
            self._wake()

    # --- the links' thread

    @property
    def wants_to_send(self) -> bool:
        """Whether something waits to be sent, or the loss to be reported."""
        return bool(self._unsent) or bool(self._broken)

    def send(self) -> None:
        """What the socket takes. OSError, ProtocolError when the link is lost."""
        while True:
            with self._lock:
                if self._broken:
                    raise ProtocolError(self._broken)
                if not self._unsent:
                    return
                head = self._unsent[0]
            try:
                sent = self.socket.send(head)
            except BlockingIOError:
                return
            with self._lock:
                self._unsent_bytes -= sent
                if sent == len(head):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = head[sent:]

    def receive(self) -> None:
        """Hand on what has come. OSError, ProtocolError when the link is lost."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ProtocolError("it has ended")
        for frame in self._reader.receive(data):
            self._take(frame)

    def close(self, reason: str) -> None:
        """What is posted from here on goes nowhere."""
        with self._lock:
            self._broken = self._broken or reason
            self._unsent.clear()
        self.socket.close()

    def lost(self, reason: str) -> None:
        """Close it and say so."""
        self.close(reason)
        self._lose(reason)


class Links:
    """The thread and its sockets."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._waker, selectors.EVENT_READ, None)
        self._links: list[Link] = []
        self._new: deque[Link] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def thread_ident(self) -> int:
        """The thread's threading.get_ident()."""
        return self._thread.ident or 0

    def add(self, sock: socket.socket, take: TakeFrame, lose: Lose) -> Link:
        """A link over `sock`, which belongs to it from here on. Frames may be taken before this
        returns; see `make`."""
        link = self.make(sock, take, lose)
        self.serve(link)
        return link

    def make(self, sock: socket.socket, take: TakeFrame, lose: Lose) -> Link:
        """As `add`, but that nothing is taken before `serve`: for who answers over the link."""
        return Link(sock, self.wake, take, lose)

    def serve(self, link: Link) -> None:
        """Begin with what `make` made."""
        self._new.append(link)
        self.wake()

    def wake(self) -> None:
        """Have the thread look at what was posted."""
        os.eventfd_write(self._waker, 1)

    def close(self, deadline_s: float) -> None:
        """Send what can be sent at once, close all sockets without a word to `lose`, end the
        thread."""
        self._is_closing = True
        self.wake()
        self._thread.join(deadline_s)
        if not self._thread.is_alive():
            os.close(self._waker)

    def _run(self) -> None:
        while True:
            self._take_new()
            for link in self._links:
                is_writing = selectors.EVENT_WRITE if link.wants_to_send else 0
                self._selector.modify(link.socket, selectors.EVENT_READ | is_writing, link)
            is_closing = self._is_closing
            for key, events in self._selector.select(0 if is_closing else None):
                if key.data is None:
                    os.eventfd_read(self._waker)
                else:
                    self._serve(key.data, events)
            if is_closing:
                break
        for link in (*self._links, *self._new):
            link.close("it was closed")
        self._selector.close()

    def _take_new(self) -> None:
        while self._new:
            link = self._new.popleft()
            self._links.append(link)
            self._selector.register(link.socket, selectors.EVENT_READ, link)

    def _serve(self, link: Link, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                link.send()
            if events & selectors.EVENT_READ:
                link.receive()
        except (OSError, ProtocolError) as error:
            self._drop(link, str(error))
        except Exception as error:  # the thread's edge: a handler's bug must not silence the rest
            _log.exception("a link's handler failed")
            self._drop(link, repr(error))

    def _drop(self, link: Link, reason: str) -> None:
        self._selector.unregister(link.socket)
        self._links.remove(link)
        link.lost(reason)


class LinkChannel:
    """xpyd_kv.ranks.api.Channel over a link: frames of kind CHANNEL of one rank."""

    def __init__(self, rank: int, post: TakeFrame) -> None:
        self._rank = rank
        self._post = post
        self._early: deque[bytes] = deque()
        self._handle: Callable[[bytes], None] | None = None
        self._lock = threading.Lock()

    def post(self, message: bytes) -> None:
        """See Channel."""
        self._post(Frame(Kind.CHANNEL, self._rank, message))

    def listen(self, handle: Callable[[bytes], None]) -> None:
        """See Channel."""
        with self._lock:
            while self._early:
                handle(self._early.popleft())
            self._handle = handle

    def take(self, message: bytes) -> None:
        """What has come; the links' thread. Kept where there is no listener yet, a few only."""
        with self._lock:
            if self._handle is None:
                if len(self._early) == _MOST_EARLY:
                    raise ProtocolError("messages for a channel without a listener")
                self._early.append(message)
                return
        self._handle(message)

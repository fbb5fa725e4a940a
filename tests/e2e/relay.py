"""The network between P and D: a relay over TCP and Unix sockets that can stop, and that can be
watched.

Several Ps may come through one relay. Descriptors that come with bytes (shared memory) go with
them. It runs in a thread of the test; with `watch` it hands over all that passes (see `tap`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Watch = Callable[[int, bool, bytes], None]
"""Gets the connection's number, whether the dialler (P) speaks, and the bytes."""

# The frames that bring KV: DATA, and SHARED of shared memory.
_KV_FRAMES = (b"XKV1\x07", b"XKV1\x13")
_CUT_BYTES = 100
_CHUNK_BYTES = 65_536
_SLOW_CHUNK_BYTES = 4096
_MOST_DESCRIPTORS = 8


@dataclass(eq=False)
class _Pipe:
    """One direction of one connection. What is held waits for the receiver or for `resume`."""

    source: socket.socket
    target: socket.socket
    from_dialler: bool
    link: int
    held: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list[int])
    stops_behind: int | None = None
    """So many of the held bytes may still go; None: all."""

    @property
    def may_send(self) -> int:
        return len(self.held) if self.stops_behind is None else self.stops_behind


class Relay:
    """Listens on `host:port` and dials `target` for each connection. With `sockets` also between
    two folders as `--kv-socket-dir` names them: P's has a socket of `host:port`, D's one of
    `target`. From a dialler no more than `bytes_per_s` pass, where it is given.

    `stall_in_data()` holds everything behind the first 100 bytes of the next frame with KV, on its
    connection and in its direction; `stall()` all bytes, wherever they are; `resume()` ends both.
    """

    def __init__(
        self,
        host: str,
        port: int,
        target: tuple[str, int],
        *,
        sockets: tuple[Path, Path] | None = None,
        watch: Watch | None = None,
        bytes_per_s: float | None = None,
    ) -> None:
        self._target = target
        self._bytes_per_s = bytes_per_s
        self._watch = watch
        self._stop = threading.Event()
        self._armed = threading.Event()
        self._stalled = threading.Event()
        self._resumed = threading.Event()
        self._links = 0
        self._pipes: list[_Pipe] = []
        self._selector = selectors.DefaultSelector()
        self._paths: list[Path] = []
        self._unix_target = ""
        listeners = [socket.create_server((host, port))]
        if sockets is not None:
            ours, theirs = sockets
            ours.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._paths = [ours / f"{host}-{port}"]
            self._unix_target = str(theirs / f"{target[0]}-{target[1]}")
            listeners.append(socket.socket(socket.AF_UNIX))
            listeners[-1].bind(str(self._paths[0]))
            listeners[-1].listen()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._listeners = listeners
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def stall_in_data(self) -> None:
        self._armed.set()

    def stall(self) -> None:
        self._stalled.set()

    def resume(self) -> None:
        self._armed.clear()
        self._stalled.clear()
        self._resumed.set()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        for path in self._paths:
            path.unlink()

    def _run(self) -> None:
        with self._selector, contextlib.ExitStack() as stack:
            for listener in self._listeners:
                stack.enter_context(listener)
            while not self._stop.is_set():
                if self._resumed.is_set():
                    self._resumed.clear()
                    for pipe in self._pipes:
                        pipe.stops_behind = None
                self._want()
                for key, _ in self._selector.select(0.02):
                    if key.fileobj in self._listeners:
                        self._accept(key.fileobj)
                    else:
                        self._turn(key.fileobj)
            for pipe in [*self._pipes]:
                self._hang_up(pipe)

    def _want(self) -> None:
        """Ask for what may happen now: a stopped pipe is neither read nor written."""
        for pipe in self._pipes:
            back = next(p for p in self._pipes if p.source is pipe.target)
            is_stalled = self._stalled.is_set()
            reads = not is_stalled and len(pipe.held) < _CHUNK_BYTES
            writes = not is_stalled and back.may_send > 0
            events = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * writes
            if pipe.source in self._selector.get_map():
                self._selector.unregister(pipe.source)
            if events:
                self._selector.register(pipe.source, events)

    def _turn(self, sock: Any) -> None:
        """Write what waits for `sock`, read what it has to say and pass that on."""
        for pipe in [p for p in self._pipes if sock in (p.source, p.target)]:
            steps = (self._read, self._write) if pipe.source is sock else (self._write,)
            for step in steps:
                try:
                    step(pipe)
                except BlockingIOError:
                    continue
                except OSError:  # One side hung up: so does the relay on the other.
                    self._hang_up(pipe)
                    return

    def _accept(self, listener: Any) -> None:
        client, _ = listener.accept()
        try:
            server = socket.socket(listener.family)
            is_unix = listener.family == socket.AF_UNIX
            server.settimeout(1)
            server.connect(self._unix_target if is_unix else self._target)
        except OSError:  # D is not there: neither is the relay.
            server.close()
            client.close()
            return
        self._links += 1
        pairs = ((client, server, True), (server, client, False))
        for source, target, from_dialler in pairs:
            source.setblocking(False)
            self._pipes.append(_Pipe(source, target, from_dialler, self._links))

    def _read(self, pipe: _Pipe) -> None:
        if len(pipe.held) >= _CHUNK_BYTES:
            return
        descriptors: list[int] = []
        if pipe.source.family == socket.AF_UNIX:
            chunk, descriptors, _, _ = socket.recv_fds(pipe.source, _CHUNK_BYTES, _MOST_DESCRIPTORS)
        else:
            chunk = pipe.source.recv(_CHUNK_BYTES)
        if not chunk:
            raise ConnectionError("closed")
        if self._watch is not None:
            self._watch(pipe.link, pipe.from_dialler, chunk)
        if descriptors:
            # They go with the first byte of what they came with; nothing else is held then.
            assert not pipe.descriptors
            pipe.descriptors = descriptors
        if pipe.from_dialler and self._armed.is_set() and pipe.stops_behind is None:
            start = max(chunk.find(magic) for magic in _KV_FRAMES)
            if start >= 0:
                self._armed.clear()
                pipe.stops_behind = len(pipe.held) + start + _CUT_BYTES
        pipe.held += chunk

    def _write(self, pipe: _Pipe) -> None:
        while count := min(pipe.may_send, len(pipe.held)):
            if self._bytes_per_s is not None:
                count = min(count, _SLOW_CHUNK_BYTES)
            piece = pipe.held[:count]
            if pipe.descriptors:
                sent = socket.send_fds(pipe.target, [piece], pipe.descriptors)
                self._close_descriptors(pipe)
            else:
                sent = pipe.target.send(piece)
            del pipe.held[:sent]
            if self._bytes_per_s is not None and pipe.from_dialler:
                self._stop.wait(sent / self._bytes_per_s)
            if pipe.stops_behind is not None:
                pipe.stops_behind -= sent

    def _close_descriptors(self, pipe: _Pipe) -> None:
        for descriptor in pipe.descriptors:
            os.close(descriptor)
        pipe.descriptors.clear()

    def _hang_up(self, pipe: _Pipe) -> None:
        for one in [p for p in self._pipes if p.link == pipe.link]:
            self._pipes.remove(one)
            self._close_descriptors(one)
            if one.source in self._selector.get_map():
                self._selector.unregister(one.source)
            one.source.close()

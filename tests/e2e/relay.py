"""A TCP relay that can stop in the middle of a KV transfer: the network between P and D."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

_DATA = b"XKV1\x07"


class Relay:
    """Listens on `host:port`, dials `target` for each connection, passes bytes both ways.

    After `stall_in_data()` it holds everything behind the first 100 bytes of the next DATA frame
    that the dialler sends, until `resume()`. One connection at a time: one P and one D.
    """

    def __init__(self, host: str, port: int, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server((host, port))
        self._stop = threading.Event()
        self._armed = threading.Event()
        self._stalled = threading.Event()
        self._held = bytearray()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stall_in_data(self) -> None:
        self._armed.set()

    def resume(self) -> None:
        self._armed.clear()
        self._stalled.clear()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        self._listener.close()

    def _run(self) -> None:
        self._listener.settimeout(0.05)
        while not self._stop.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            with client, socket.create_connection(self._target, timeout=5) as server:
                with contextlib.suppress(OSError):  # one side hung up: the next may connect
                    self._relay(client, server)
                self.resume()

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        self._held.clear()
        client.settimeout(5)
        server.settimeout(5)
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ)
            selector.register(server, selectors.EVENT_READ)
            while not self._stop.is_set():
                if self._held and not self._stalled.is_set():
                    server.sendall(bytes(self._held))
                    self._held.clear()
                for key, _ in selector.select(0.02):
                    source = client if key.fileobj is client else server
                    chunk = source.recv(65536)
                    if not chunk:
                        return
                    if source is server:
                        client.sendall(chunk)
                    else:
                        self._forward(chunk, server)

    def _forward(self, chunk: bytes, server: socket.socket) -> None:
        if self._stalled.is_set():
            self._held += chunk
            return
        start = chunk.find(_DATA) if self._armed.is_set() else -1
        if start >= 0:
            self._stalled.set()
            cut = start + 100
            self._held += chunk[cut:]
            chunk = chunk[:cut]
        server.sendall(chunk)

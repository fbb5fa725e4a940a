"""Reads the API without kubectl.

A wait asks many times, and each start of kubectl costs a tenth of a second of CPU that the
cluster needs itself. A new connection costs both ends and the forwarder between them a TLS
handshake, so connections are kept.
"""

from __future__ import annotations

import http.client
import json
import ssl
import weakref
from typing import Any

_TIMEOUT_S = 10.0


class ApiReader:
    """GETs as the administrator, from outside of the cluster's network. For any thread."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._port = port
        self._context = context
        self._idle: list[http.client.HTTPSConnection] = []
        """At most one for each thread that has asked."""
        weakref.finalize(self, _close, self._idle)

    def get(
        self, path: str, timeout_s: float = _TIMEOUT_S, *, tried: str | None = None
    ) -> tuple[int, bytes]:
        """The status and body of the answer; `tried`: to a POST of this JSON, a dry run. Raises
        OSError when there is none."""
        while self._idle:
            try:
                return self._ask(self._idle.pop(), path, timeout_s, tried)
            except TimeoutError:
                raise
            except (IndexError, OSError):
                # Another thread took the last one, or the server ended it meanwhile.
                continue
        fresh = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._context)
        return self._ask(fresh, path, timeout_s, tried)

    def _ask(
        self,
        connection: http.client.HTTPSConnection,
        path: str,
        timeout_s: float,
        tried: str | None,
    ) -> tuple[int, bytes]:
        """Ask there, and keep the connection when the answer is whole."""
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        try:
            if tried is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, tried, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = answer.status, answer.read()
        except BaseException as error:
            connection.close()
            if isinstance(error, http.client.HTTPException):
                raise OSError(f"GET {path}: {error!r}") from error
            raise
        self._idle.append(connection)
        return found

    def ok(self, path: str) -> bool:
        """Whether there is an answer, and it is 200."""
        try:
            return self.get(path)[0] == 200
        except OSError:
            return False

    def object(self, path: str) -> dict[str, Any] | None:
        """The object or list at an API path; None when it does not exist.

        Raises OSError for every other answer.
        """
        status, body = self.get(path)
        if status == 404:
            return None
        if status != 200:
            raise OSError(f"GET {path}: {status} {body[:500].decode(errors='replace')}")
        return json.loads(body)

    def refusal(self, path: str, obj: dict[str, Any]) -> str:
        """What the API server says against an object that is to be created at an API path, which
        it is not; empty: nothing. Raises OSError when there is no answer."""
        query = "dryRun=All&fieldValidation=Strict"
        status, body = self.get(f"{path}?{query}", tried=json.dumps(obj))
        return "" if status == 201 else json.loads(body)["message"]


def _close(connections: list[http.client.HTTPSConnection]) -> None:
    while connections:
        connections.pop().close()

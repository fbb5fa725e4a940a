"""Reads the API without kubectl.

A wait asks many times, and each start of kubectl costs a tenth of a second of CPU that the
cluster needs itself.
"""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any

_TIMEOUT_S = 10.0


class ApiReader:
    """GETs as the administrator, from outside of the cluster's network."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._port = port
        self._context = context

    def get(self, path: str, timeout_s: float = _TIMEOUT_S) -> tuple[int, bytes]:
        """The status and body of the answer. Raises OSError when there is none."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._port, timeout=timeout_s, context=self._context
        )
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except http.client.HTTPException as error:
            raise OSError(f"GET {path}: {error!r}") from error
        finally:
            connection.close()

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

"""Requests of web pages, and requests by other names, before the application: `cross_site`'s rules.

A preflight is answered here, before any key is asked for. Requests without an Origin, by a right
Host, pass without this application where they go the short way: see `ClientProtocol`.
See docs/adr/0084.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence

from xpyd_core.errors import ApiError
from xpyd_router.cross_site import CrossSite, Header, Origins, Refused
from xpyd_router.errors import Answer
from xpyd_router.http.asgi import AsgiApp, Message, Receive, Scope, Send, send_answer
from xpyd_router.http.inference import Inference

_MAX_KNOWN_HOSTS = 256
_BEFORE_ANSWER = frozenset((b"transfer-encoding", b"expect", b"upgrade", b"origin"))
"""Headers with which a request does not go the short way."""
_METHOD, _WANTED = b"access-control-request-method", b"access-control-request-headers"
_READ = frozenset((b"host", b"origin", _METHOD, _WANTED))


def is_local(listeners: Iterable[socket.socket]) -> bool:
    """Whether only this machine can connect."""
    return all(ipaddress.ip_address(one.getsockname()[0]).is_loopback for one in listeners)


class OriginGuard:
    """The application that uvicorn gets: `app`, behind the rules. `unusual` are the headers with
    which a request comes here, but for a `host` that `is_right`.
    """

    def __init__(self, app: AsgiApp, rules: CrossSite, listeners: Sequence[socket.socket]) -> None:
        self._app = app
        self.inference = app if isinstance(app, Inference) else None
        self._origins = Origins(rules, is_local=is_local(listeners))
        self._known_hosts: set[bytes] = set()
        """Values of Host that are right; bounded, for a name may have many ports and spellings."""
        hosts: frozenset[bytes] = (
            frozenset((b"host",)) if self._origins.checks_hosts else frozenset()
        )
        self.unusual = _BEFORE_ANSWER | hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        headers: list[Header] = []
        if scope["type"] == "http":
            found = {name: value for name, value in scope["headers"] if name in _READ}
            try:
                self._check_host(found.get(b"host", b""))
                if b"origin" in found:
                    is_question = scope["method"] == "OPTIONS" and _METHOD in found
                    headers = self._headers(found, is_question=is_question)
                    if is_question:
                        await send_answer(send, Answer(200, b"", ""), headers)
                        return
            except Refused as refused:
                error = ApiError(403, str(refused))
                kind = [(b"content-type", b"application/json")]
                await send_answer(send, Answer(403, error.body(), ""), kind)
                return
        await self._app(scope, receive, _with_headers(send, headers) if headers else send)

    def is_right(self, host: bytes) -> bool:
        """Whether a request may come by this name."""
        try:
            self._check_host(host)
        except Refused:
            return False
        return True

    def _check_host(self, host: bytes) -> None:
        if host not in self._known_hosts:
            self._origins.check_host(host.decode("latin-1"))
            if len(self._known_hosts) < _MAX_KNOWN_HOSTS:
                self._known_hosts.add(host)

    def _headers(self, found: dict[bytes, bytes], *, is_question: bool) -> list[Header]:
        """What the answer to a page has, or to the question of its browser. Raises Refused."""
        origin = found[b"origin"].decode("latin-1")
        if is_question:
            method, wanted = found[_METHOD], found.get(_WANTED, b"")
            return self._origins.preflight(
                origin, method.decode("latin-1"), wanted.decode("latin-1")
            )
        self._origins.check_origin(origin, found.get(b"host", b"").decode("latin-1"))
        return self._origins.headers(origin) if self._origins.is_allowed(origin) else []


def _with_headers(send: Send, headers: list[Header]) -> Send:
    """`send`, whose answers have `headers`, too."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return send_with_headers

"""The one place that calls the Kubernetes API: JSON in, JSON out, errors of `decision.errors`.

The client knows paths, verbs, deadlines and retries, and nothing of fleets. Objects stay plain
dicts: models would cost memory and lose fields that they do not know. kopf makes the watches.

A login is the pod's own account, else a kubeconfig. The client and kopf each open a session of
their own, because kopf closes its session when it signs in again. `kubernetes` is imported only for
a kubeconfig, which may need an exec plugin or an OIDC refresh; a pod has a token and a CA file.
kubernetes.aio is untyped, so its configuration is read here into a frozen value and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import aiohttp
from aiohttp.client_middlewares import ClientHandlerType, ClientMiddlewareType

from xpyd_core import __version__
from xpyd_core.cli import EXIT_USAGE
from xpyd_core.errors import UserError, XpydError
from xpyd_operator.controller.decision.errors import (
    NotFound,
    Throttled,
    Unavailable,
    error_of,
)
from xpyd_operator.controller.decision.kinds import Kind, Obj, kind_of, measured, parse

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_KUBECONFIG = Path("~/.kube/config")
_TOKEN_MAX_AGE_S = 60.0
"""The kubelet replaces the token's file at 80 % of its life, which is an hour or so."""
_LOGIN_TIMEOUT_S = 30.0
"""An exec plugin may ask a cloud's API."""


@dataclass(frozen=True)
class Login:
    """A server and a way in. `header` is fixed; `token_file`, where set, is read again and again.

    repr() shows neither.
    """

    server: str
    tls: ssl.SSLContext | None
    header: str = field(default="", repr=False)
    token_file: Path | None = None
    proxy: str | None = field(default=None, repr=False)


async def find_login() -> Login:
    """The pod's own account, else KUBECONFIG (or ~/.kube/config); UserError if neither works."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT")
    token, ca = _ACCOUNT / "token", _ACCOUNT / "ca.crt"
    if host and port and token.is_file():
        host = f"[{host}]" if ":" in host else host
        context = ssl.create_default_context(cafile=str(ca))
        return Login(f"https://{host}:{port}", context, token_file=token)
    return await asyncio.wait_for(_from_kubeconfig(), _LOGIN_TIMEOUT_S)


async def _from_kubeconfig() -> Login:
    from kubernetes.aio import config
    from kubernetes.aio.client import Configuration

    found: Any = Configuration()
    load: Any = cast("Any", config).load_kube_config
    # Passed explicitly: the library reads KUBECONFIG when it is imported.
    file = os.environ.get("KUBECONFIG") or str(_KUBECONFIG)
    try:
        await load(config_file=file, client_configuration=found)
    except config.ConfigException as error:
        raise UserError(f"no access to Kubernetes: not in a pod, and {error}") from error
    header: str | None = await found.get_api_key_with_prefix("BearerToken")
    if not header and found.username:
        header = found.get_basic_auth_token()
    context: ssl.SSLContext | None = None
    if str(found.host).startswith("https:"):
        context = ssl.create_default_context(cafile=found.ssl_ca_cert)
        if found.cert_file:
            context.load_cert_chain(found.cert_file, keyfile=found.key_file)
        if not found.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
    return Login(
        str(found.host).rstrip("/"),
        context,
        header=header or "",
        proxy=found.proxy,
    )


def open_session(
    login: Login, middlewares: Sequence[ClientMiddlewareType] = (), *, connections: int
) -> aiohttp.ClientSession:
    """A session that signs each request. `connections`: the most at once, 0 for no limit."""
    connector = aiohttp.TCPConnector(
        limit=connections, ssl=login.tls if login.tls is not None else False
    )
    return aiohttp.ClientSession(
        connector=connector,
        headers={"User-Agent": f"xpyd-operator/{__version__}", "Accept": "application/json"},
        middlewares=(*middlewares, _Signer(login)),
        proxy=login.proxy,
    )


class _Signer:
    """Middleware: the Authorization header, from the token's file as it is now."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._header = login.header
        self._read_at = float("-inf")

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: ClientHandlerType
    ) -> aiohttp.ClientResponse:
        file = self._login.token_file
        if file is not None and time.monotonic() - self._read_at > _TOKEN_MAX_AGE_S:
            # A few hundred bytes on a tmpfs: no thread for that.
            self._header = f"Bearer {file.read_text().strip()}"
            self._read_at = time.monotonic()
        if self._header:
            request.headers["Authorization"] = self._header
        return await handler(request)


logger = logging.getLogger(__name__)

FIELD_MANAGER = "xpyd-operator"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
"""Merges lists by their keys, such as conditions by type; kinds of CRDs do not take it."""
PAGE = 250
"""Objects per answer to a list: bounds the memory that thousands of pods take for a moment."""
NEVER_CURRENT = "1"
"""A resourceVersion that no object has: an apply that carries it creates, or is a Conflict."""

_ATTEMPT_TIMEOUT_S = 10.0
_CONNECTIONS = 32
_BACKOFFS_S = (0.2, 0.5, 1.0, 2.0)
"""Waits between attempts. What still fails then gets the fleet's own, longer back-off."""
_MAX_RETRY_AFTER_S = 5.0
"""A longer Retry-After is left to the fleet's back-off."""

Verb = Literal["get", "list", "create", "apply", "patch", "delete"]
Count = Callable[[str, str, str], None]
"""Called for each attempt: verb, resource, HTTP status or "error"."""


@dataclass(frozen=True)
class _Request:
    verb: Verb
    resource: str
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    content_type: str = "application/json"
    query: Mapping[str, str] | None = None


class Api:
    """Calls as one identity. Made inside the loop that uses it; `close` it there.

    `find_login` is asked at the first call and again after a 401. Every call ends within about
    five attempts of 10 s each, and raises KubeError where it does not succeed.
    """

    def __init__(
        self,
        find_login: Callable[[], Awaitable[Login]],
        *,
        count: Count = lambda _verb, _resource, _code: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        write_s: Callable[[], float] = lambda: _ATTEMPT_TIMEOUT_S,
    ) -> None:
        """`write_s`: seconds within which a write that begins now must be over; 0: none may."""
        self._write_s = write_s
        self._find_login = find_login
        self._count = count
        self._sleep = sleep
        self._session: aiohttp.ClientSession | None = None
        self._server = ""
        self._signing_in = asyncio.Lock()

    async def close(self) -> None:
        """Close the connections; calls under way fail."""
        if self._session is not None:
            await self._session.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Obj:
        """The object as it is now; NotFound."""
        path = kind.path(namespace, name)
        return await self._call(_Request("get", kind.plural, "GET", path))

    async def list(
        self, kind: Kind, namespace: str | None, *, selector: str = "", fields: str = ""
    ) -> Obj:
        """The whole list in one answer."""
        query = {"labelSelector": selector, "fieldSelector": fields}
        query = {name: value for name, value in query.items() if value}
        path = kind.path(namespace)
        return await self._call(_Request("list", kind.plural, "GET", path, query=query))

    async def pages(
        self, kind: Kind, namespace: str | None, *, selector: str = ""
    ) -> AsyncIterator[Obj]:
        """A list in parts of at most PAGE objects, each with the list's own metadata."""
        query = {"limit": str(PAGE)}
        if selector:
            query["labelSelector"] = selector
        while True:
            request = _Request("list", kind.plural, "GET", kind.path(namespace), query=query)
            page = await self._call(request)
            yield page
            rest: str = page["metadata"].get("continue", "")
            if not rest:
                return
            query["continue"] = rest

    async def resources(self, api_version: str) -> frozenset[str]:
        """Plural names that the server has under `api_version`; empty: it is not installed."""
        base = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        try:
            found = await self._call(_Request("get", "apis", "GET", base))
        except NotFound:
            return frozenset()
        return frozenset(str(item["name"]) for item in found.get("resources") or ())

    async def apply(self, obj: Obj) -> Obj:
        """Server-side apply, by force, as our field manager.

        With metadata.resourceVersion it is a Conflict where the object is another one by now. With
        NEVER_CURRENT there it creates the object or is a Conflict: what exists is not touched.
        """
        kind, name = kind_of(obj), str(obj["metadata"]["name"])
        path = kind.path(obj["metadata"]["namespace"], name)
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._call(_Request("apply", kind.plural, "PATCH", path, obj, APPLY, query))

    async def create(self, obj: Obj, *, dry_run: bool = False, attempts: int | None = None) -> Obj:
        """POST; Conflict where it exists. With `dry_run` nothing is stored."""
        kind = kind_of(obj)
        path = kind.path(obj["metadata"]["namespace"])
        query = {"fieldManager": FIELD_MANAGER, **({"dryRun": "All"} if dry_run else {})}
        request = _Request("create", kind.plural, "POST", path, obj, query=query)
        return await self._call(request, attempts=attempts)

    async def patch(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        body: Mapping[str, Any],
        *,
        sub: str = "",
        how: str = MERGE,
    ) -> Obj:
        """Merge patch of the object or of its subresource `sub`; `how`: MERGE or STRATEGIC."""
        path = kind.path(namespace, name, sub)
        query = {"fieldManager": FIELD_MANAGER}
        resource = f"{kind.plural}/{sub}" if sub else kind.plural
        return await self._call(_Request("patch", resource, "PATCH", path, body, how, query))

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str = "", resource_version: str = ""
    ) -> None:
        """Delete exactly that object, without `uid` whichever has the name; what it owns follows.

        NotFound where the server says that there is none, which need not be so. Conflict where the
        name is another object's by now, or, with `resource_version`, where it changed.
        """
        conditions = {"uid": uid} if uid else {}
        if resource_version:
            conditions["resourceVersion"] = resource_version
        body = {"propagationPolicy": "Background", "preconditions": conditions}
        path = kind.path(namespace, name)
        await self._call(_Request("delete", kind.plural, "DELETE", path, body))

    async def _call(self, request: _Request, attempts: int | None = None) -> Obj:
        waits = _BACKOFFS_S if attempts is None else _BACKOFFS_S[: attempts - 1]
        for wait_s in (*waits, None):
            try:
                return await self._attempt(request)
            except Unavailable as error:
                delay = _delay(error, wait_s)
                if delay is None:
                    raise
                logger.debug("%s %s: %s; again", request.method, request.path, error)
                await self._sleep(delay)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(self, request: _Request) -> Obj:
        for signed_in_before in (True, False):
            session = self._session or await self._sign_in(None)
            status, headers, body = await self._send(session, request)
            self._count(request.verb, request.resource, str(status))
            if status == 401 and signed_in_before:
                await self._sign_in(session)
                continue
            if status >= 400:
                raise error_of(status, body, headers.get("Retry-After"))
            return _read(body)
        raise AssertionError("unreachable: the second round returns or raises")

    async def _send(
        self, session: aiohttp.ClientSession, request: _Request
    ) -> tuple[int, Mapping[str, str], bytes]:
        data = None if request.body is None else json.dumps(request.body).encode()
        timeout_s = _ATTEMPT_TIMEOUT_S
        if request.method != "GET":
            timeout_s = min(timeout_s, self._write_s())
            if timeout_s <= 0:
                raise Unavailable("this operator does not lead: it writes nothing")
        try:
            async with session.request(
                request.method,
                self._server + request.path,
                params=request.query,
                data=data,
                headers={"Content-Type": request.content_type} if data is not None else None,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as answer:
                return answer.status, answer.headers, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._count(request.verb, request.resource, "error")
            text = str(error) or type(error).__name__
            raise Unavailable(f"no answer from the API server: {text}") from error

    async def _sign_in(self, refused: aiohttp.ClientSession | None) -> aiohttp.ClientSession:
        async with self._signing_in:
            if self._session is not None and self._session is not refused:
                return self._session
            try:
                login = await self._find_login()
            except (UserError, OSError) as error:
                if self._session is None:
                    raise  # There is no access to any cluster: the user must know.
                # It worked before: the token's file may be about to be replaced.
                raise Unavailable(f"cannot sign in: {error}") from error
            before, self._server = self._session, login.server
            self._session = open_session(login, connections=_CONNECTIONS)
            if before is not None:
                await before.close()
            return self._session


def run_job(work: Coroutine[Any, Any, None]) -> int:
    """Run a job of the chart, a program of a few calls; its exit status, the error on stderr."""
    try:
        asyncio.run(work)
    except XpydError as error:
        sys.stderr.write(f"xpyd: {error}\n")
        return EXIT_USAGE if isinstance(error, UserError) else 1
    return 0


def say_line(line: str) -> None:
    """A line of a job's progress, on standard output at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _delay(error: Unavailable, wait_s: float | None) -> float | None:
    """Seconds until the next attempt, None: no more."""
    if wait_s is None:
        return None
    if isinstance(error, Throttled):
        longest = max(wait_s, error.retry_after_s)
        return longest if longest <= _MAX_RETRY_AFTER_S else None
    return wait_s


def _read(body: bytes) -> Obj:
    try:
        parsed: object = parse(body, measured) if body else {}
    except ValueError as error:
        raise Unavailable("the API server's answer is not JSON") from error
    if not isinstance(parsed, dict):
        raise Unavailable("the API server's answer is not an object")
    return parsed  # pyright: ignore[reportUnknownVariableType]  # JSON: keys are strings

"""Where the API server is and who we are there: in-cluster files, else a kubeconfig.

Both of our users, the client and kopf, get an aiohttp session from here, each its own: kopf closes
its session when it signs in again. `kubernetes` is imported only for a kubeconfig, which may need
an exec plugin or an OIDC refresh; a pod has a token and a CA file, and saves the memory.

kubernetes.aio is untyped: its configuration object is read here, into a frozen value, and nowhere
else.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
from aiohttp.client_middlewares import ClientHandlerType, ClientMiddlewareType

from xpyd_core import __version__
from xpyd_core.errors import UserError

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
    # Said here: the library reads KUBECONFIG when it is imported.
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

"""Which web pages may use the router: CORS, and names by which a local router is reached. Pure.

A browser lets a page of any site send requests to any address, with `Origin`, and read an answer
only where the answer allows that origin. So answers get CORS headers for the origins of
`--allowed-origins` and no others.

A router on a loopback address has clients of its own machine alone, and mostly no keys. There a
page could still send prompts, and read the answers by DNS rebinding: its own name then leads to the
loopback address, so that the page and the router are one origin to the browser. So a local router
refuses a `Host` that is no name of the loopback, and an `Origin` of another host.

`http.origins` asks here. See docs/adr/0084.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from xpyd_core.errors import UserError

_MAX_AGE = b"600"
"""Seconds that a browser may keep what a preflight says: vLLM's."""
_EXPOSED = b", ".join(
    (
        *(b"x-request-id", b"request-id", b"retry-after"),
        *(
            b"x-ratelimit-%b-%b" % (what, of)
            for of in (b"requests", b"tokens")
            for what in (b"limit", b"remaining", b"reset")
        ),
    )
)
"""Headers of answers that pages may read, besides the few that they always may."""
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
Header = tuple[bytes, bytes]


class Refused(Exception):
    """Why a request may not be sent, with the flag that would let it."""


@dataclass(frozen=True)
class CrossSite:
    """The flags: what other sites may do."""

    origins: tuple[str, ...] = ()
    """As browsers write them, `https://chat.example.com`; `*`: all."""
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    allows_credentials: bool = False
    """Whether requests may have cookies, or what a proxy asks for."""
    hosts: tuple[str, ...] = ()
    """Names by which clients reach the router, besides those of the loopback. `*.example.com`: all
    names below."""


def read_list(flag: str, given: Iterable[str]) -> tuple[str, ...]:
    """A flag that is a JSON list, as vLLM has it, or repeated."""
    found: list[str] = []
    for text in given:
        if not text.startswith("["):
            found.append(text)
            continue
        try:
            items: object = json.loads(text)
        except ValueError as error:
            raise UserError(f"{flag}: expected a JSON list, such as '[\"a\"]': {error}") from error
        if not isinstance(items, list) or not all(
            isinstance(one, str) for one in cast("list[object]", items)
        ):
            raise UserError(f"{flag}: expected a JSON list of texts")
        found += cast("list[str]", items)
    return tuple(found)


def check_cross_site(rules: CrossSite) -> CrossSite:
    """`rules` as they are compared. UserError names the wrong flag."""
    for origin in rules.origins:
        parts = urlsplit(origin)
        if origin != "*" and (not parts.netloc or parts.path or parts.query or parts.fragment):
            raise UserError(
                f"--allowed-origins {origin!r}: expected SCHEME://HOST[:PORT] without a path, or *"
            )
    if "*" in rules.origins and rules.allows_credentials:
        raise UserError(
            "--allow-credentials: with --allowed-origins '*' every site could use a client's "
            "cookies; name the origins"
        )
    if rules.allows_credentials and not rules.origins:
        raise UserError("--allow-credentials: needs --allowed-origins")
    for flag, texts in (("methods", rules.methods), ("headers", rules.headers)):
        for text in texts:
            if text != "*" and not _TOKEN.fullmatch(text):
                raise UserError(f"--allowed-{flag} {text!r}: expected a name, or *")
    for host in rules.hosts:
        if not _HOST.fullmatch(host) and not _is_address(host):
            raise UserError(
                f"--allowed-hosts {host!r}: expected a name such as router.example.com, without a"
                " port, or *.example.com for all names below"
            )
    return CrossSite(
        tuple(_as_sent(one.lower()) for one in rules.origins),
        tuple(one.upper() for one in rules.methods),
        tuple(one.lower() for one in rules.headers),
        rules.allows_credentials,
        tuple(one.lower() for one in rules.hosts),
    )


def _as_sent(origin: str) -> str:
    """The origin as browsers write it: a scheme's own port is left out."""
    for scheme, port in (("http://", ":80"), ("https://", ":443")):
        if origin.startswith(scheme):
            return origin.removesuffix(port)
    return origin


def host_of(text: str) -> str:
    """The host of a `Host` header, or of what is behind an origin's `://`; without its port."""
    if text.startswith("["):
        return text[1:].partition("]")[0].lower()
    return text.partition(":")[0].lower().rstrip(".")


def is_loopback_name(host: str) -> bool:
    """Whether the name or address can only be this machine: no DNS server says what it is."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Origins:
    """The rules of a router, pure. `is_local`: only this machine can connect to it."""

    def __init__(self, rules: CrossSite, *, is_local: bool) -> None:
        self._rules = rules
        self._is_local = is_local
        self.checks_hosts = is_local or bool(rules.hosts)

    def check_host(self, host: str) -> None:
        """Raises Refused where a request may not come by this name."""
        name = host_of(host)
        if not self.checks_hosts or not host or self._is_named(name) or is_loopback_name(name):
            return
        # Probes have a pod's address, and no DNS server leads an address elsewhere.
        if self._is_local or not _is_address(name):
            raise Refused(
                f"Host {host[:200]!r} is no name of this router: add it by --allowed-hosts"
            )

    def check_origin(self, origin: str, host: str) -> None:
        """Raises Refused where a page of this origin may not send the request."""
        if not self._is_local or self.is_allowed(origin):
            return
        name = host_of(origin.partition("://")[2])
        if not name or (name != host_of(host) and not is_loopback_name(name)):
            raise self._refused(origin)

    def is_allowed(self, origin: str) -> bool:
        """Whether pages of this origin may read answers."""
        return "*" in self._rules.origins or origin.lower() in self._rules.origins

    def headers(self, origin: str) -> list[Header]:
        """What an answer to a page of an allowed origin has."""
        is_any = "*" in self._rules.origins
        shown = b"*" if is_any else origin.encode("latin-1")
        found: list[Header] = [(b"access-control-allow-origin", shown)]
        if not is_any:
            found.append((b"vary", b"Origin"))
        if self._rules.allows_credentials:
            found.append((b"access-control-allow-credentials", b"true"))
        found.append((b"access-control-expose-headers", _EXPOSED))
        return found

    def preflight(self, origin: str, method: str, wanted: str) -> list[Header]:
        """The headers that tell a browser what a request may have. Raises Refused."""
        rules = self._rules
        if not self.is_allowed(origin):
            raise self._refused(origin)
        if "*" not in rules.methods and method.upper() not in rules.methods:
            raise Refused(f"method {method[:40]!r} is not allowed: add it by --allowed-methods")
        names = [name.strip() for name in wanted.lower().split(",") if name.strip()]
        if "*" not in rules.headers and (missing := sorted({*names} - {*rules.headers})):
            name = missing[0][:80]
            raise Refused(f"header {name!r} is not allowed: add it by --allowed-headers")
        allowed: list[Header] = [
            *self.headers(origin),
            (b"access-control-allow-methods", method.encode("latin-1")),
            (b"access-control-max-age", _MAX_AGE),
        ]
        if names:
            # The names themselves: a browser does not take * for Authorization.
            allowed.append((b"access-control-allow-headers", ", ".join(names).encode("latin-1")))
        return allowed

    def _is_named(self, name: str) -> bool:
        return any(
            name.endswith(one[1:]) if one.startswith("*.") else name == one
            for one in self._rules.hosts
        )

    def _refused(self, origin: str) -> Refused:
        return Refused(f"Origin {origin[:200]!r} is not allowed: add it by --allowed-origins")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

"""Who may ask `POST /drain` of this instance. Pure.

It ends the process, so it is no call for whoever can send requests. In a fleet with a secret the
caller proves to have it, for this one process: the MAC is over its incarnation, which /load and the
heartbeats name, so that what was overheard drains nothing else and no later start. Without a secret
only this machine may ask, and no browser page or proxy on it in the name of somebody else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from xpyd_core.errors import ApiError
from xpyd_core.keys import INSECURE_KEYS, is_drain_mac
from xpyd_worker.server.fields import bad

# Set by browsers on every cross-site POST, and by proxies that speak for others.
FOREIGN_HEADERS = ("Origin", "Forwarded", "X-Forwarded-For", "Via")


@dataclass(frozen=True)
class Caller:
    """Where a call comes from: the peer's ip and the own one that it connected to (None: not
    known), the MAC it sent, and the names of its headers, lower case."""

    peer: str | None
    own: str | None
    mac: str
    headers: Collection[str]


def check_may_drain(
    caller: Caller, body: Mapping[str, Any], *, keys: tuple[bytes, ...], incarnation: str
) -> None:
    """ApiError 400, 403 or 409 (the incarnation of another process) unless `caller` may."""
    if not keys or keys == INSECURE_KEYS:
        if not _is_local(caller):
            message = "without a key file only this machine may drain, and not through a proxy"
            raise ApiError(403, message, code="not_local")
        return
    given = body.get("incarnation")
    if not isinstance(given, str):
        raise bad("incarnation", "expected this process' own, which GET /load shows")
    if not is_drain_mac(keys, given, caller.mac):
        raise ApiError(403, "X-Xpyd-Mac is not the MAC of this incarnation", code="wrong_mac")
    if given != incarnation:
        message = "this is another process than the one that was meant"
        raise ApiError(409, message, param="incarnation", code="other_incarnation")


def _is_local(caller: Caller) -> bool:
    if any(name.lower() in caller.headers for name in FOREIGN_HEADERS):
        return False
    if caller.peer is None:
        return False
    return caller.peer == caller.own or ip_address(caller.peer).is_loopback

"""Who may ask `POST /drain` and `POST /reset_prefix_cache` of this instance. Pure.

The first ends the process, the second makes all others' prompts slow: no calls for whoever can send
requests. In a fleet with a secret the caller proves to have it, for this one process: the MAC is
over the call and its incarnation, which /load and the heartbeats name, so that what was overheard
is good for nothing else and no later start. Without a secret only this machine may ask, and no
browser page or proxy on it in the name of somebody else. A proxy here that does not say that it is
one cannot be told from its machine: docs/engine.md says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from xpyd_core.errors import ApiError
from xpyd_core.keys import INSECURE_KEYS
from xpyd_worker.server.fields import bad

# Set by browsers on every cross-site POST, and by proxies that speak for others; lower case, as
# they begin.
_FOREIGN = ("origin", "sec-fetch-", "forwarded", "x-forwarded", "via", "x-real-ip", "x-envoy-")
IsMac = Callable[[tuple[bytes, ...], str, str], bool]
"""Whether one of the keys made this MAC of this incarnation: keys.is_drain_mac, for example."""


@dataclass(frozen=True)
class Caller:
    """Where a call comes from: the peer's ip and the own one that it connected to (None: not
    known), the MAC it sent, and the names of its headers, lower case."""

    peer: str | None
    own: str | None
    mac: str
    headers: Collection[str]


def check_caller(
    caller: Caller,
    body: Mapping[str, Any],
    *,
    is_mac: IsMac,
    keys: tuple[bytes, ...],
    incarnation: str,
) -> None:
    """ApiError 400, 403 or 409 (the incarnation of another process) unless `caller` may make the
    call that `is_mac` is for."""
    if not keys or keys == INSECURE_KEYS:
        if not _is_local(caller):
            message = "without a key file only this machine may ask, and not through a proxy"
            raise ApiError(403, message, code="not_local")
        return
    given = body.get("incarnation")
    if not isinstance(given, str):
        raise bad("incarnation", "expected this process' own, which GET /load shows")
    if not is_mac(keys, given, caller.mac):
        message = "X-Xpyd-Mac is not the MAC of this call and incarnation"
        raise ApiError(403, message, code="wrong_mac")
    if given != incarnation:
        message = "this is another process than the one that was meant"
        raise ApiError(409, message, param="incarnation", code="other_incarnation")


def _is_local(caller: Caller) -> bool:
    if any(name.startswith(_FOREIGN) for name in caller.headers):
        return False
    if caller.peer is None:
        return False
    return caller.peer == caller.own or ip_address(caller.peer).is_loopback

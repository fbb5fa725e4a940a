"""The calls by which a fleet's programs control an engine: who may make them, what they must say.
Pure; an engine's HTTP server hands a call in and gets its content, or an ApiError.

`POST /drain` ends the process, `POST /reset_prefix_cache` makes all others' prompts slow, `POST
/scale_elastic_ep` takes replicas away. In a fleet with a secret the caller proves to have it, for
this one process: the MAC covers the call and the incarnation, which GET /load (of a vLLM GET /live)
and the heartbeats name, so that an overheard MAC is good for nothing else and no later start.
Without a secret only this machine may call, and no browser page or proxy on it. A proxy here that
sends no proxy header cannot be recognised from its machine: docs/engine.md says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from xpyd_core.bodies import refuse
from xpyd_core.errors import ApiError, UserError
from xpyd_core.keys import INSECURE_KEYS, Keys, Purpose, is_call_mac
from xpyd_core.request_id import Address, is_dialable, is_uuid, parse_address

# Set by browsers on every cross-site POST, and by proxies that speak for others; lower case, as
# they begin.
_FOREIGN = ("origin", "sec-fetch-", "forwarded", "x-forwarded", "via", "x-real-ip", "x-envoy-")


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
    purpose: Purpose,
    keys: Keys,
    incarnation: str,
    content: str = "",
) -> None:
    """ApiError 400, 403 or 409 (the incarnation of another process) unless `caller` may make the
    call of this `purpose`. `content`: what the call says besides; the MAC is over it, too."""
    if not keys or keys == INSECURE_KEYS:
        if not _is_local(caller):
            message = "without a key file only this machine may ask, and not through a proxy"
            raise ApiError(403, message, code="not_local")
        return
    given = body.get("incarnation")
    if not isinstance(given, str):
        raise refuse("incarnation", "expected this process' own, which GET /load shows")
    if not is_call_mac(keys, purpose, f"{given}{content}", caller.mac):
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


def check_release(body: Mapping[str, Any], mac: str, *, keys: Keys) -> str:
    """The uuid of a request whose KV is to be freed. ApiError 400, 403."""
    uuid = body.get("uuid")
    if not isinstance(uuid, str) or not is_uuid(uuid):
        raise refuse("uuid", "expected 32 lower-case hex digits")
    if not is_call_mac(keys, "kv-release", uuid, mac):
        raise ApiError(403, "X-Xpyd-Mac is not the MAC of this uuid", code="wrong_mac")
    return uuid


_NOT_P = "only a Prefill instance dials and probes; this one is {}: ask a Prefill instance"


def check_probe(body: Mapping[str, Any], mac: str, *, keys: Keys, role: str) -> Address:
    """The KV address of the D that an instance of this `role` is to dial. ApiError: 400, 403, 409
    (no P)."""
    text = body.get("address")
    if not isinstance(text, str):
        raise refuse("address", "expected the KV address of a Decode instance, ip:port")
    try:
        address = parse_address(text)
    except UserError as error:
        raise refuse("address", str(error)) from error
    if not is_dialable(address):
        raise refuse("address", "expected a literal ip and a port of at least 1024")
    if not is_call_mac(keys, "kv-probe", text, mac):
        raise ApiError(403, "X-Xpyd-Mac is not the MAC of this address", code="wrong_mac")
    if role != "Prefill":
        raise ApiError(409, _NOT_P.format(role), code="not_prefill")
    return address


def check_probe_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """What a probe found. ApiError 429 where it was not tried."""
    if answer["reason"] == "busy" and "pairs" not in answer:
        message = "another probe to this address is under way, or too many were asked lately"
        raise ApiError(429, message, code="probe_busy", retry_after_s=1)
    return answer

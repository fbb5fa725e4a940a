"""`POST /kv/probe`: a P sends a block to a D and says what came back. Signed with the fleet's key,
since whoever may ask makes this process dial.

200 whenever the probe was carried out, also where it failed: `ok` and `reason` say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from xpyd_core.errors import ApiError, UserError
from xpyd_core.keys import is_probe_mac
from xpyd_core.request_id import Address, is_dialable, parse_address
from xpyd_kv.session.probing import BUSY, ProbeResult
from xpyd_worker.server.fields import bad
from xpyd_worker.server.service import Service

# Over the probe's own deadline: only a process that stands still needs so long.
_ANSWER_S = 15.0
_NOT_P = "only a Prefill instance dials and probes; this one is {}: ask a Prefill instance"


async def answer_probe(service: Service, body: Mapping[str, Any], mac: str) -> dict[str, Any]:
    """The answer to `body`. ApiError: 400, 403, 409 (no P), 429 (too many), 503 (no answer)."""
    text = body.get("address")
    if not isinstance(text, str):
        raise bad("address", "expected the KV address of a Decode instance, ip:port")
    address = _address(text)
    if not is_probe_mac(service.place.keys, text, mac):
        raise ApiError(403, "X-Xpyd-Mac is not the MAC of this address", code="wrong_mac")
    if service.probe is None:
        raise ApiError(409, _NOT_P.format(service.place.role), code="not_prefill")
    result = await _ask(service, address)
    if result.reason == BUSY and not result.pairs:
        message = "another probe to this address is under way, or too many were asked lately"
        raise ApiError(429, message, code="probe_busy", retry_after_s=1)
    answer = _written(result)
    if result.pairs:
        answer["pairs"] = [
            {
                "from_rank": pair.source,
                "to_rank": pair.destination,
                "address": str(pair.address),
                **_written(pair.result),
            }
            for pair in result.pairs
        ]
    return answer


def _written(result: ProbeResult) -> dict[str, Any]:
    return {
        "ok": result.ok,
        "transport": result.transport,
        "bytes": result.num_bytes,
        "seconds": round(result.seconds, 6),
        "digest_matches": result.digest_matches,
        "reason": result.reason,
    }


def _address(text: str) -> Address:
    try:
        address = parse_address(text)
    except UserError as error:
        raise bad("address", str(error)) from error
    if not is_dialable(address):
        raise bad("address", "expected a literal ip and a port of at least 1024")
    return address


async def _ask(service: Service, address: Address) -> ProbeResult:
    assert service.probe is not None
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ProbeResult] = loop.create_future()

    def settle(result: ProbeResult) -> None:
        if not future.done():
            future.set_result(result)

    def done(result: ProbeResult) -> None:  # On the I/O thread.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result)

    service.probe(address, done)
    try:
        return await asyncio.wait_for(future, _ANSWER_S)
    except TimeoutError as error:
        raise ApiError(503, "the KV thread does not answer", retry_after_s=1) from error

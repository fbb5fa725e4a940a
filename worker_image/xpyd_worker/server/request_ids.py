"""What `X-Request-Id` says, and what of it goes back to the caller.

The router's pair id holds addresses and the uuid that keys KV: it is parsed and never echoed. P
dials the address in it, and D reserves memory for it, so it counts only with the router's MAC (ADR
0040); without one the instance serves the request alone. Any other id is the caller's own name for
a request that this instance serves alone: it is in the answer's header and id and in the log.
Without one, or with one that no log line should hold, a fresh id takes its place.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace

from quart import Quart, Response, g, request

from xpyd_core.keys import PAIR_MAC_HEADER, Keys, is_call_mac
from xpyd_core.request_id import PairId, parse_pair_id

_log = logging.getLogger(__name__)
HEADER = "X-Request-Id"
_REPLICA_HEADER = "X-data-parallel-rank"
# Long enough for a W3C traceparent or two uuids. No spaces or quotes: it is part of log lines.
_OWN = re.compile(r"[A-Za-z0-9_.:+=/@-]{1,128}")


@dataclass(frozen=True)
class RequestId:
    """What X-Request-Id says. `pair` None: this instance serves the request alone. `log_id`: what
    log lines carry, the pair's uuid or `alone`. `alone`: the caller's own id. `is_unsigned`: it was
    a pair's without the router's MAC. `replica`: the one that the client names
    by vLLM's X-data-parallel-rank, in its words."""

    log_id: str
    pair: PairId | None = None
    alone: str | None = None
    is_unsigned: bool = False
    replica: str | None = None


def read_request_id(header: str | None, mac: str = "", signed_by: Keys | None = None) -> RequestId:
    """An id that cannot be parsed means: alone; so does a pair id whose `mac` none of the keys
    `signed_by` made. None: every pair id counts."""
    pair = parse_pair_id(header) if header else None
    if pair is not None and header is not None:
        if signed_by is None or is_call_mac(signed_by, "pair", header, mac):
            return RequestId(pair.uuid, pair)
        return RequestId(os.urandom(16).hex(), is_unsigned=True)
    # One that looks like a pair's and is none has addresses all the same: it is not echoed.
    if header and _OWN.fullmatch(header) and "_addr_" not in header:
        return RequestId(header, alone=header)
    return RequestId(os.urandom(16).hex())


def current() -> RequestId:
    """The id of the request whose handler calls."""
    return g.request_id


def register_request_ids(app: Quart, signed_by: Keys | None) -> None:
    """Give every request of `app` its id, and every answer the header. `signed_by`: see
    read_request_id."""

    async def read() -> None:
        headers = request.headers
        found = read_request_id(headers.get(HEADER), headers.get(PAIR_MAC_HEADER, ""), signed_by)
        if found.is_unsigned:
            _log.warning(
                "a pair id without the router's MAC: the request is served alone",
                extra={"request": found.log_id},
            )
        g.request_id = replace(found, replica=headers.get(_REPLICA_HEADER))

    async def echo(response: Response) -> Response:
        request_id: RequestId | None = getattr(g, "request_id", None)
        if request_id is not None and request_id.pair is None:
            response.headers[HEADER] = request_id.log_id
        return response

    app.before_request(read)
    app.after_request(echo)

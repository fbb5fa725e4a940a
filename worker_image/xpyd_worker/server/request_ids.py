"""What `X-Request-Id` says, and what of it goes back to the caller.

The router's pair id holds addresses and the uuid that keys KV: it is parsed and never echoed. Any
other id is the caller's own name for a request that this instance serves alone: it is in the
answer's header and id and in the log. Without one, or with one that no log line should hold, a
fresh id takes its place.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from quart import Quart, Response, g, request

from xpyd_core.request_id import PairId, parse_pair_id

HEADER = "X-Request-Id"
# Long enough for a W3C traceparent or two uuids. No spaces or quotes: it is part of log lines.
_OWN = re.compile(r"[A-Za-z0-9_.:+=/@-]{1,128}")


@dataclass(frozen=True)
class RequestId:
    """What X-Request-Id says. `pair` None: this instance serves the request alone. `log_id`: what
    log lines carry, the pair's uuid or `alone`. `alone`: the caller's own id."""

    log_id: str
    pair: PairId | None = None
    alone: str | None = None


def read_request_id(header: str | None) -> RequestId:
    """An id that cannot be parsed means: alone."""
    pair = parse_pair_id(header) if header else None
    if pair is not None:
        return RequestId(pair.uuid, pair)
    # One that looks like a pair's and is none has addresses all the same: it is not echoed.
    if header and _OWN.fullmatch(header) and "_addr_" not in header:
        return RequestId(header, alone=header)
    return RequestId(os.urandom(16).hex())


def current() -> RequestId:
    """The id of the request whose handler calls."""
    return g.request_id


def register_request_ids(app: Quart) -> None:
    """Give every request of `app` its id, and every answer the header."""

    async def read() -> None:
        g.request_id = read_request_id(request.headers.get(HEADER))

    async def echo(response: Response) -> Response:
        request_id: RequestId | None = getattr(g, "request_id", None)
        if request_id is not None and request_id.pair is None:
            response.headers[HEADER] = request_id.log_id
        return response

    app.before_request(read)
    app.after_request(echo)

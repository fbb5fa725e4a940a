"""HTTP handlers besides inference: probes, load, metrics, tokens, drain, cache reset, KV calls.

Also which callers may `POST /drain` and `POST /reset_prefix_cache`: the first ends the process, the
second makes all others' prompts slow. In a fleet with a secret the caller proves to have it, for
this one process: the MAC covers the call and the incarnation, which /load and the heartbeats name,
so that an overheard MAC is good for nothing else and no later start. Without a secret only this
machine may call, and no browser page or proxy on it. A proxy here that sends no proxy header cannot
be recognised from its machine: docs/engine.md says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any, cast

from quart import Response, request

from xpyd_core import __version__
from xpyd_core.bodies import refuse
from xpyd_core.errors import ApiError, UserError
from xpyd_core.keys import INSECURE_KEYS, Purpose, is_call_mac
from xpyd_core.request_id import Address, is_dialable, is_uuid, parse_address
from xpyd_kv.session.probing import BUSY, ProbeResult
from xpyd_worker.engine.request import EngineStats
from xpyd_worker.server.bridge import called_back
from xpyd_worker.server.http.bodies import json_body, json_response, parsed_body
from xpyd_worker.server.http.inference import Api
from xpyd_worker.server.openai.prompts import (
    detokenize,
    parse_detokenize,
    parse_tokenize,
    tokenize,
)
from xpyd_worker.server.service import Service, tokenizer_files_response
from xpyd_worker.server.telemetry.metrics import ServerMetrics

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
    keys: tuple[bytes, ...],
    incarnation: str,
) -> None:
    """ApiError 400, 403 or 409 (the incarnation of another process) unless `caller` may make the
    call of this `purpose`."""
    if not keys or keys == INSECURE_KEYS:
        if not _is_local(caller):
            message = "without a key file only this machine may ask, and not through a proxy"
            raise ApiError(403, message, code="not_local")
        return
    given = body.get("incarnation")
    if not isinstance(given, str):
        raise refuse("incarnation", "expected this process' own, which GET /load shows")
    if not is_call_mac(keys, purpose, given, caller.mac):
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


# Over the probe's own deadline: only a process that is stuck needs so long.
_ANSWER_S = 15.0
_NOT_P = "only a Prefill instance dials and probes; this one is {}: ask a Prefill instance"


async def answer_probe(service: Service, body: Mapping[str, Any], mac: str) -> dict[str, Any]:
    """The answer to `body`. ApiError: 400, 403, 409 (no P), 429 (too many), 503 (no answer)."""
    text = body.get("address")
    if not isinstance(text, str):
        raise refuse("address", "expected the KV address of a Decode instance, ip:port")
    address = _address(text)
    if not is_call_mac(service.instance.keys, "kv-probe", text, mac):
        raise ApiError(403, "X-Xpyd-Mac is not the MAC of this address", code="wrong_mac")
    if service.probe is None:
        raise ApiError(409, _NOT_P.format(service.instance.role), code="not_prefill")
    result = await called_back(
        partial(service.probe, address), within_s=_ANSWER_S, late="the KV thread does not answer"
    )
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
        raise refuse("address", str(error)) from error
    if not is_dialable(address):
        raise refuse("address", "expected a literal ip and a port of at least 1024")
    return address


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrainState:
    """What is left of a drain. `is_idle`: no request is here, and no KV is held for or on its way
    to an instance."""

    seconds_left: float
    is_idle: bool


@dataclass(frozen=True)
class Process:
    """This process as its administrators see it. `drain` begins to drain, or goes on, and says what
    is left; `keys` and `incarnation` are the fleet's and the process' own."""

    keys: tuple[bytes, ...]
    incarnation: str
    drain: Callable[[], DrainState]


class Admin:
    """Handlers that do not run the model."""

    def __init__(self, api: Api, metrics: ServerMetrics, process: Process) -> None:
        self._api = api
        self._lifecycle = api.lifecycle
        self._metrics = metrics
        self._process = process

    async def health(self) -> Response:
        """GET /health, GET and POST /ping: 200 while requests are worked on."""
        status = 200 if self._lifecycle.is_serving else 503
        return json_response(
            {"status": "failed" if self._lifecycle.failed else self._lifecycle.state}, status
        )

    async def live(self) -> Response:
        """GET /live: 200 while this process works, also while it loads or drains."""
        return json_response(
            {"status": self._lifecycle.state}, 503 if self._lifecycle.failed else 200
        )

    async def version(self) -> Response:
        """GET /version."""
        return json_response({"version": __version__})

    async def load(self) -> Response:
        """GET /load: vLLM's `server_load`, and what the heartbeats say."""
        return json_response({"server_load": self._api.admission.requests, **self._load()})

    def _load(self) -> dict[str, Any]:
        service = self._api.service
        stats = service.bridge.stats() if service is not None else EngineStats()
        return {
            "state": self._lifecycle.state,
            "running": stats.running,
            "waiting": stats.waiting,
            "free_blocks": stats.blocks_free,
            "total_blocks": stats.blocks_total,
            "incarnation": self._process.incarnation,
        }

    async def show_metrics(self) -> Response:
        """GET /metrics, in Prometheus' text format."""
        body, content_type = self._metrics.render()
        return Response(body, content_type=content_type)

    async def tokenize(self) -> Response:
        """POST /tokenize."""
        service = self._api.ready_service()
        asked = await parsed_body(service.threads, parse_tokenize)
        return json_response(await tokenize(service, asked))

    async def detokenize(self) -> Response:
        """POST /detokenize."""
        service = self._api.ready_service()
        asked = await parsed_body(service.threads, parse_detokenize)
        return json_response(await detokenize(service, asked))

    async def tokenizer_files(self) -> Response:
        """GET /tokenizer: by which a router counts tokens and hashes blocks as this engine does."""
        files = self._api.ready_service().model.files
        if files is None:
            raise ApiError(404, "this instance gives no tokenizer files")
        return tokenizer_files_response(files, request.headers.get("If-None-Match", ""))

    async def reset_prefix_cache(self) -> Response:
        """POST /reset_prefix_cache: forget cached prefixes that no request holds."""
        service, body = self._api.ready_service(), await json_body(may_be_empty=True)
        self._check_caller(body, "reset_prefix_cache")
        success = await service.bridge.reset_prefix_cache()
        _log.info("the prefix cache was reset", extra={"success": success})
        return json_response({"success": success})

    async def drain(self) -> Response:
        """POST /drain: what SIGTERM does, and what is left of it. Idempotent."""
        body = await json_body(may_be_empty=True)
        self._check_caller(body, "drain")
        left = self._process.drain()
        service = self._api.service
        answer = {
            **self._load(),
            "requests": service.bridge.open_requests if service is not None else 0,
            "idle": left.is_idle,
            "seconds_left": round(left.seconds_left, 1),
        }
        return json_response(answer, 202)

    def _check_caller(self, body: Mapping[str, Any], purpose: Purpose) -> None:
        process = self._process
        check_caller(
            _caller(), body, purpose=purpose, keys=process.keys, incarnation=process.incarnation
        )

    async def release(self) -> Response:
        """POST /kv/release: the router gave a request up; free its KV. Idempotent."""
        service = self._api.ready_service()
        uuid = (await json_body()).get("uuid")
        if not isinstance(uuid, str) or not is_uuid(uuid):
            raise refuse("uuid", "expected 32 lower-case hex digits")
        mac = request.headers.get("X-Xpyd-Mac", "")
        if not is_call_mac(service.instance.keys, "kv-release", uuid, mac):
            raise ApiError(403, "X-Xpyd-Mac is not the MAC of this uuid", code="wrong_mac")
        service.bridge.release(uuid)
        _log.info("released", extra={"request": uuid})
        return json_response({"released": uuid})

    async def probe(self) -> Response:
        """POST /kv/probe: does KV get from here to that D?"""
        service, body = self._api.ready_service(), await json_body()
        return json_response(
            await answer_probe(service, body, request.headers.get("X-Xpyd-Mac", ""))
        )


def _caller() -> Caller:
    # Quart's type of an ASGI scope is partly unknown.
    scope = cast("Mapping[str, tuple[str, int] | None]", request.scope)
    peer, own = scope.get("client"), scope.get("server")
    return Caller(
        peer=peer[0] if peer else None,
        own=own[0] if own else None,
        mac=request.headers.get("X-Xpyd-Mac", ""),
        headers={name.lower() for name, _ in request.headers},
    )

"""HTTP handlers besides inference: probes, load, metrics, tokens, drain, replicas, cache, KV calls.

Who may make the calls that change something: xpyd_core.calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from quart import Response, request

from xpyd_core import __version__
from xpyd_core.bodies import refuse
from xpyd_core.calls import Caller, check_caller, check_probe, check_probe_answer, check_release
from xpyd_core.errors import ApiError
from xpyd_core.keys import Keys, Purpose
from xpyd_worker.config_check import MAX_PARALLEL
from xpyd_worker.engine.request import EngineStats
from xpyd_worker.server.bridge import called_back
from xpyd_worker.server.http.bodies import json_body, json_response, parsed_body
from xpyd_worker.server.http.inference import Api
from xpyd_worker.server.http.scaling import Scaling
from xpyd_worker.server.openai.jobs import replica_of
from xpyd_worker.server.openai.prompts import (
    detokenize,
    parse_detokenize,
    parse_tokenize,
    tokenize,
)
from xpyd_worker.server.request_ids import current
from xpyd_worker.server.service import Service, tokenizer_files_response
from xpyd_worker.server.telemetry.metrics import ServerMetrics

_DRAIN_S, _MOST_DRAIN_S = 120, 3600
# Over the probe's own deadline: only a process that is stuck needs so long.
_ANSWER_S = 15.0


async def answer_probe(
    service: Service, body: Mapping[str, Any], mac: str, replica: int | None = None
) -> dict[str, Any]:
    """The answer to `body`, by the P's `replica` where one is named. ApiError: 400, 403, 409 (no
    P), 429 (too many), 503 (no answer)."""
    instance = service.instance
    address = check_probe(body, mac, keys=instance.keys, role=instance.role)
    places, probe = service.kv_places(), service.probe
    if replica is not None and places:
        # One that has left may still be named.
        probe = places[replica].probe if replica < len(places) else None
    if probe is None:
        raise ApiError(503, "the replica is gone", code="replica_lost", retry_after_s=1)
    result = await called_back(
        partial(probe, address), within_s=_ANSWER_S, late="the KV thread does not answer"
    )
    return check_probe_answer(result.document())


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

    keys: Keys
    incarnation: str
    drain: Callable[[], DrainState]
    scaling: Scaling


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

    async def scale(self) -> Response:
        """POST /scale_elastic_ep: have so many replicas; answers when it is done."""
        self._api.ready_service()
        body = await json_body()
        size = _whole(body, "new_data_parallel_size", None, 1, MAX_PARALLEL)
        drain_s = _whole(body, "drain_timeout", _DRAIN_S, 0, _MOST_DRAIN_S)
        content = f"/{size}/{drain_s}" if "drain_timeout" in body else f"/{size}"
        self._check_caller(body, "scale", content)
        cut = await self._process.scaling.scale(size, drain_s)
        return json_response({"message": f"Scaled to {size} data parallel engines", "cut": cut})

    async def is_scaling(self) -> Response:
        """POST /is_scaling_elastic_ep."""
        return json_response({"is_scaling_elastic_ep": self._process.scaling.is_scaling})

    def _check_caller(self, body: Mapping[str, Any], purpose: Purpose, content: str = "") -> None:
        process = self._process
        check_caller(
            _caller(),
            body,
            purpose=purpose,
            keys=process.keys,
            incarnation=process.incarnation,
            content=content,
        )

    async def release(self) -> Response:
        """POST /kv/release: the router gave a request up; free its KV. Idempotent."""
        service = self._api.ready_service()
        mac = request.headers.get("X-Xpyd-Mac", "")
        uuid = check_release(await json_body(), mac, keys=service.instance.keys)
        service.bridge.release(uuid)
        _log.info("released", extra={"request": uuid})
        return json_response({"released": uuid})

    async def probe(self) -> Response:
        """POST /kv/probe: does KV get from here to that D?"""
        service, body = self._api.ready_service(), await json_body()
        mac, replica = request.headers.get("X-Xpyd-Mac", ""), replica_of(service, current())
        return json_response(await answer_probe(service, body, mac, replica))


def _whole(body: Mapping[str, Any], name: str, default: int | None, least: int, most: int) -> int:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise refuse(name, f"expected a whole number from {least} to {most}")
    return value


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

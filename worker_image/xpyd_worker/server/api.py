"""The HTTP surface of one engine: routes, limits, errors in OpenAI's format. Quart on uvicorn.

A handler's task owns its Generation: when the task ends, also by the client's leaving, what still
runs in the engine is aborted. Decisions live in the modules beside this one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from quart import Quart, Response, request

from xpyd_core.errors import ApiError
from xpyd_core.keys import is_release_mac
from xpyd_core.request_id import is_uuid
from xpyd_worker.server.answers import (
    AnswerId,
    Format,
    answer_id,
    collect,
    prefill_params,
    usage_json,
)
from xpyd_worker.server.chat import ChatFormat
from xpyd_worker.server.completions import CompletionFormat
from xpyd_worker.server.fields import bad
from xpyd_worker.server.generation import ChoiceDelta, Generation, ending_of
from xpyd_worker.server.jobs import (
    COMPLETION_DEFAULT_TOKENS,
    Job,
    RequestId,
    keys_of,
    make_jobs,
    offered_ids,
    read_request_id,
)
from xpyd_worker.server.lifecycle import Lifecycle
from xpyd_worker.server.metrics import ServerMetrics
from xpyd_worker.server.openai_types import (
    CompletionCall,
    Options,
    parse_chat,
    parse_completion,
)
from xpyd_worker.server.probe import answer_probe
from xpyd_worker.server.prompts import bad_word_ids, chat_ids, completion_ids
from xpyd_worker.server.responses import json_body, json_response, register_errors
from xpyd_worker.server.service import Service
from xpyd_worker.server.stream import events

_log = logging.getLogger(__name__)
# Above the router's own bound (32 MiB), since it adds a continuation's ids to the body.
MAX_BODY_BYTES = 48 * 1024 * 1024


class Api:
    """Handlers over one Service, which main sets when the model is loaded."""

    def __init__(self, lifecycle: Lifecycle, metrics: ServerMetrics) -> None:
        self.lifecycle = lifecycle
        self.metrics = metrics
        self.service: Service | None = None

    def ready_service(self) -> Service:
        """The service, or 503 while there is none."""
        if self.service is None or not self.lifecycle.is_serving:
            self.lifecycle.admit(lambda: False)
        if self.service is None:
            raise ApiError(503, "this instance is starting", retry_after_s=1)
        return self.service

    def _admit(self, service: Service, request_id: RequestId, prompts: int) -> None:
        """503 while draining or full, but not to a request whose KV was granted here."""

        def is_expected() -> bool:
            if service.place.role != "Decode":
                return False
            keys = keys_of(request_id, prompts)
            return any(service.bridge.offered(key) is not None for key in keys)

        self.lifecycle.admit(is_expected)
        if service.bridge.open_requests + prompts > service.max_requests and not is_expected():
            raise ApiError(503, "too many requests are waiting", retry_after_s=1)

    # --- inference

    async def completions(self) -> Response:
        """POST /v1/completions."""
        service = self.ready_service()
        call = parse_completion(await json_body())
        options = call.options
        model = service.model.name_for(options.model)
        request_id = read_request_id(request.headers.get("X-Request-Id"))
        self._admit(service, request_id, len(call.prompts))
        jobs = await _completion_jobs(service, request_id, call)
        generation = Generation(service, jobs, ending_of(service, options))
        return await self._answer(
            service,
            request_id,
            options,
            generation,
            CompletionFormat(service.model.tokenizer, options, generation),
            answer_id("cmpl", options, model, alone=request_id.alone),
        )

    async def chat(self) -> Response:
        """POST /v1/chat/completions."""
        service = self.ready_service()
        call = parse_chat(await json_body())
        options = call.options
        model = service.model.name_for(options.model)
        request_id = read_request_id(request.headers.get("X-Request-Id"))
        self._admit(service, request_id, 1)
        ids = offered_ids(service, request_id, options, 0)
        if ids is None:
            ids = await chat_ids(service.model, call.messages)
        jobs = make_jobs(
            service,
            request_id,
            options,
            [ids],
            default_max_tokens=None,
            bad_words=await bad_word_ids(service.model, options.rules.bad_words),
            name="messages",
        )
        generation = Generation(service, jobs, ending_of(service, options))
        return await self._answer(
            service,
            request_id,
            options,
            generation,
            ChatFormat(service.model.tokenizer, options, generation),
            answer_id("chatcmpl", options, model, alone=request_id.alone),
        )

    async def _answer(
        self,
        service: Service,
        request_id: RequestId,
        options: Options,
        generation: Generation,
        format_: Format,
        head: AnswerId,
    ) -> Response:
        _close_with_this_task(generation, request_id)
        generation.start()
        steps = generation.steps()
        if options.stream:
            # What goes wrong before the first token is a status, so that a router can retry.
            first = await anext(steps, None) or []
            body = events(
                generation,
                steps,
                first,
                format_=format_,
                head=head,
                options=options,
            )
            response = Response(body, content_type="text/event-stream; charset=utf-8")
            response.headers["Cache-Control"] = "no-cache"
            return response
        gained: dict[int, ChoiceDelta] = {}
        async for deltas in steps:
            collect(gained, deltas)
        answer: dict[str, Any] = {
            "id": head.id,
            "object": format_.whole_object,
            "created": head.created,
            "model": head.model,
            "choices": [format_.whole(gained[index]) for index in sorted(gained)],
            "usage": usage_json(generation.usage),
            **format_.extras(continued=False),
        }
        if service.place.role == "Prefill" and request_id.pair is not None:
            answer["kv_transfer_params"] = prefill_params(generation)
        return json_response(answer)

    # --- the rest

    async def models(self) -> Response:
        """GET /v1/models."""
        service = self.ready_service()
        cards = [_model_card(service, name) for name in service.model.names]
        return json_response({"object": "list", "data": cards})

    async def model(self, name: str) -> Response:
        """GET /v1/models/NAME."""
        service = self.ready_service()
        return json_response(_model_card(service, service.model.name_for(name)))

    async def health(self) -> Response:
        """GET /health: 200 while requests are worked on."""
        status = 200 if self.lifecycle.is_serving else 503
        return json_response(
            {"status": "failed" if self.lifecycle.failed else self.lifecycle.state}, status
        )

    async def live(self) -> Response:
        """GET /live: 200 while this process works, also while it loads or drains."""
        return json_response(
            {"status": self.lifecycle.state}, 503 if self.lifecycle.failed else 200
        )

    async def show_metrics(self) -> Response:
        """GET /metrics, in Prometheus' text format."""
        body, content_type = self.metrics.render()
        return Response(body, content_type=content_type)

    async def release(self) -> Response:
        """POST /kv/release: the router gave a request up; free its KV. Idempotent."""
        service = self.ready_service()
        uuid = (await json_body()).get("uuid")
        if not isinstance(uuid, str) or not is_uuid(uuid):
            raise bad("uuid", "expected 32 lower-case hex digits")
        mac = request.headers.get("X-Xpyd-Mac", "")
        if not is_release_mac(service.place.keys, uuid, mac):
            raise ApiError(403, "X-Xpyd-Mac is not the MAC of this uuid", code="wrong_mac")
        service.bridge.release(uuid)
        _log.info("released", extra={"request": uuid})
        return json_response({"released": uuid})

    async def reset_prefix_cache(self) -> Response:
        """POST /reset_prefix_cache: forget cached prefixes that nobody holds."""
        success = await self.ready_service().bridge.reset_prefix_cache()
        _log.info("the prefix cache was reset", extra={"success": success})
        return json_response({"success": success})

    async def probe(self) -> Response:
        """POST /kv/probe: does KV get from here to that D?"""
        service, body = self.ready_service(), await json_body()
        return json_response(
            await answer_probe(service, body, request.headers.get("X-Xpyd-Mac", ""))
        )


async def _completion_jobs(
    service: Service, request_id: RequestId, call: CompletionCall
) -> list[Job]:
    options = call.options
    prompts: list[tuple[int, ...]] = []
    for index, prompt in enumerate(call.prompts):
        ids = offered_ids(service, request_id, options, index)
        prompts.append(ids or await completion_ids(service.model, prompt))
    echo_texts = None
    if call.echo:
        decode, skip = service.model.tokenizer.decode, options.skip_special_tokens
        echo_texts = [
            prompt if isinstance(prompt, str) else decode(prompt, skip_special_tokens=skip)
            for prompt in call.prompts
        ]
    return make_jobs(
        service,
        request_id,
        options,
        prompts,
        default_max_tokens=COMPLETION_DEFAULT_TOKENS,
        bad_words=await bad_word_ids(service.model, options.rules.bad_words),
        echo_texts=echo_texts,
    )


def _close_with_this_task(generation: Generation, request_id: RequestId) -> None:
    """Abort what runs when the handler's task ends: answered, failed or cancelled."""
    task = asyncio.current_task()
    assert task is not None, "handlers run in a task"
    jobs = generation.jobs
    kind = type(jobs[0].request.transfer).__name__ if jobs[0].request.transfer else "alone"

    def close(task: asyncio.Task[Any]) -> None:
        outcome = "request done" if generation.is_finished else "request failed"
        generation.close()
        usage = generation.usage
        _log.info(
            "client left" if task.cancelled() else outcome,
            extra={
                "request": request_id.log_id,
                "transfer": kind,
                "prompt_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
            },
        )

    task.add_done_callback(close)


def _model_card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "xpyd",
        "max_model_len": service.model.max_model_len,
    }


def create_app(api: Api) -> Quart:
    """The Quart app over `api`."""
    app = Quart("xpyd_worker", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    # A stream may take longer than any fixed time; what is bounded is each write (asgi.py).
    app.config["RESPONSE_TIMEOUT"] = None
    register_errors(app)
    app.add_url_rule("/v1/completions", view_func=api.completions, methods=["POST"])
    app.add_url_rule("/v1/chat/completions", view_func=api.chat, methods=["POST"])
    app.add_url_rule("/v1/models", view_func=api.models, methods=["GET"])
    app.add_url_rule("/v1/models/<path:name>", view_func=api.model, methods=["GET"])
    app.add_url_rule("/health", view_func=api.health, methods=["GET"])
    app.add_url_rule("/live", view_func=api.live, methods=["GET"])
    app.add_url_rule("/metrics", "metrics", view_func=api.show_metrics, methods=["GET"])
    app.add_url_rule("/kv/release", view_func=api.release, methods=["POST"])
    app.add_url_rule("/reset_prefix_cache", view_func=api.reset_prefix_cache, methods=["POST"])
    app.add_url_rule("/kv/probe", view_func=api.probe, methods=["POST"])
    return app

"""The HTTP surface of one engine: completions, chats, models. What is no inference: admin.py.

A handler's task owns its Generation: when the task ends, also by the client's leaving, what still
runs in the engine is aborted. Decisions live in the other modules of the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from quart import Response, request

from xpyd_core.errors import ApiError
from xpyd_core.kv_outcome import HEADER as KV_HEADER
from xpyd_core.kv_outcome import header_of, read_header
from xpyd_worker.parsers.registry import FALLBACK
from xpyd_worker.runner.tokenizer import Tokenizer
from xpyd_worker.server.http.admission import Admitted, Lifecycle, RequestGate
from xpyd_worker.server.http.bodies import JSON, error_response, json_response, parsed_body
from xpyd_worker.server.openai.answers import (
    INLINE_SCORES,
    AnswerId,
    Format,
    answer_id,
    collect,
    events,
    prefill_params,
    usage_json,
)
from xpyd_worker.server.openai.chats import chat_grammar, check_tools
from xpyd_worker.server.openai.formats import CallIds, ChatFormat, CompletionFormat
from xpyd_worker.server.openai.generation import ChoiceDelta, Generation, ending_of
from xpyd_worker.server.openai.jobs import Job, constrained, make_jobs, offered_ids
from xpyd_worker.server.openai.params import (
    COMPLETION_MAX_TOKENS,
    ChatCall,
    CompletionCall,
    Options,
    parse_chat,
    parse_completion,
)
from xpyd_worker.server.openai.prompts import bad_word_ids, chat_ids, completion_ids, prompt_texts
from xpyd_worker.server.request_ids import RequestId, current
from xpyd_worker.server.service import Service
from xpyd_worker.server.telemetry.tracing import Operation, Outcome, RequestTrace

if TYPE_CHECKING:
    # Its packages are an extra.
    from xpyd_worker.server.telemetry.otel import OtlpTracer

_log = logging.getLogger(__name__)
_INLINE_TOOLS_BYTES = 256 * 1024
"""A chat's body up to which its tools become a grammar's parts on the loop: a millisecond."""


@dataclass(frozen=True)
class _Call:
    """One request that was let in, with what its body asks for."""

    service: Service
    request_id: RequestId
    admitted: Admitted
    trace: RequestTrace | None
    operation: Operation


class Api:
    """Handlers over one Service, which main sets when the model is loaded."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.admission = RequestGate(lifecycle)
        self.service: Service | None = None
        self.tracer: OtlpTracer | None = None

    def ready_service(self) -> Service:
        """The service, or 503 while there is none."""
        if self.service is None or not self.lifecycle.is_serving:
            self.lifecycle.admit(lambda: False)
        if self.service is None:
            raise ApiError(503, "this instance is starting", retry_after_s=1)
        return self.service

    # --- inference

    def _enter(self, operation: Operation) -> _Call:
        """Let the request in to have its body read."""
        service, request_id = self.ready_service(), current()
        admitted = self.admission.enter(service, request_id)
        trace = None
        if self.tracer is not None:
            trace = RequestTrace.begin(
                operation,
                request_id.log_id,
                parent=request.headers.get("traceparent", ""),
                state=request.headers.get("tracestate", ""),
            )
        return _Call(service, request_id, admitted, trace, operation)

    async def completions(self) -> Response:
        """POST /v1/completions."""
        call = self._enter("text_completion")
        service = call.service
        model = service.model
        parse = partial(
            parse_completion, max_model_len=model.max_model_len, defaults=model.defaults
        )
        body = await parsed_body(service.threads, parse)
        model = service.model.name_for(body.options.model)
        call.admitted.prepare(len(body.prompts))
        jobs = await _completion_jobs(service, call.request_id, body)
        head = answer_id("cmpl", body.options, model, alone=call.request_id.alone)
        return await self._answer(call, body.options, jobs, CompletionFormat, head)

    async def chat(self) -> Response:
        """POST /v1/chat/completions."""
        call = self._enter("chat")
        service = call.service
        parse = partial(parse_chat, defaults=service.model.defaults)
        body = await parsed_body(service.threads, parse)
        model = service.model.name_for(body.options.model)
        call.admitted.prepare(1)
        assert body.options.chat is not None, "set by parse_chat"
        check_tools(service.model.parsers, body.options.chat)
        jobs = await _chat_jobs(service, call.request_id, body)
        head = answer_id("chatcmpl", body.options, model, alone=call.request_id.alone)
        family = service.model.parsers.tools or FALLBACK
        make = partial(ChatFormat, ids=CallIds(head.id, family.id_characters))
        return await self._answer(call, body.options, jobs, make, head)

    async def _answer(
        self,
        call: _Call,
        options: Options,
        jobs: list[Job],
        make_format: Callable[[Tokenizer, Options, Generation], Format],
        head: AnswerId,
    ) -> Response:
        generation = Generation(call.service, jobs, ending_of(call.service, options))
        format_ = make_format(call.service.model.tokenizer, options, generation)
        self._close_with_this_task(call, options, generation, head)
        generation.start()
        call.admitted.submitted()
        try:
            response = await self._response(call, options, generation, format_, head)
        except ApiError as error:
            if not generation.failed_for_kv:
                raise
            response = error_response(error)
        return _said_of_kv(response, call, options, generation)

    async def _response(
        self,
        call: _Call,
        options: Options,
        generation: Generation,
        format_: Format,
        head: AnswerId,
    ) -> Response:
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
                threads=call.service.threads,
            )
            response = Response(body, content_type="text/event-stream; charset=utf-8")
            response.headers["Cache-Control"] = "no-cache"
            return response
        gained: dict[int, ChoiceDelta] = {}
        async for deltas in steps:
            collect(gained, deltas)
        write = partial(_whole_answer, call, generation, format_, head, gained)
        is_short = format_.scores(list(gained.values())) <= INLINE_SCORES
        text = write() if is_short else await call.service.threads.finish(write)
        return Response(text, content_type=JSON)

    def _close_with_this_task(
        self, call: _Call, options: Options, generation: Generation, head: AnswerId
    ) -> None:
        """Abort what runs when the handler's task ends: answered, failed or cancelled."""
        task = asyncio.current_task()
        assert task is not None, "handlers run in a task"
        tracer, trace = self.tracer, call.trace

        def close(task: asyncio.Task[Any]) -> None:
            outcome: Outcome = "request done" if generation.is_finished else "request failed"
            if task.cancelled():
                outcome = "client left"
            generation.close()
            _log_end(outcome, call.request_id, generation)
            if tracer is not None and trace is not None:
                tracer.record(trace.end(outcome, options, generation, head))

        task.add_done_callback(close)

    # --- models

    async def models(self) -> Response:
        """GET /v1/models."""
        service = self.ready_service()
        cards = [_model_card(service, name) for name in service.model.names]
        return json_response({"object": "list", "data": cards})

    async def model(self, name: str) -> Response:
        """GET /v1/models/NAME."""
        service = self.ready_service()
        return json_response(_model_card(service, service.model.name_for(name)))


async def _completion_jobs(
    service: Service, request_id: RequestId, call: CompletionCall
) -> list[Job]:
    options = call.options
    known = [
        offered_ids(service, request_id, options, index) or prompt
        for index, prompt in enumerate(call.prompts)
    ]
    prompts = await completion_ids(service, known, truncate=options.truncate)
    echo_texts = None
    if call.echo:
        echo_texts = await prompt_texts(
            service,
            call.prompts if options.truncate is None else prompts,
            skip_special_tokens=options.skip_special_tokens,
        )
    jobs = make_jobs(
        service,
        request_id,
        options,
        prompts,
        default_max_tokens=COMPLETION_MAX_TOKENS,
        bad_words=await bad_word_ids(service, options.bad_words),
        echo_texts=echo_texts,
    )
    return await constrained(service, options, jobs)


async def _chat_jobs(service: Service, request_id: RequestId, call: ChatCall) -> list[Job]:
    options = call.options
    ids = offered_ids(service, request_id, options, 0)
    if ids is None:
        ids = await chat_ids(service, call.conversation, truncate=options.truncate)
    if options.chat is not None:
        end, parsers = service.model.prompt_end(ids), service.model.parsers
        read = partial(chat_grammar, options.chat, parsers, end, options.grammar)
        is_short = 0 < (request.content_length or 0) <= _INLINE_TOOLS_BYTES
        grammar = await service.threads.run(read, is_short=is_short)
        options = replace(options, grammar=grammar)
    jobs = make_jobs(
        service,
        request_id,
        options,
        [ids],
        default_max_tokens=None,
        bad_words=await bad_word_ids(service, options.bad_words),
        name="messages",
    )
    return await constrained(service, options, jobs)


def _whole_answer(
    call: _Call,
    generation: Generation,
    format_: Format,
    head: AnswerId,
    gained: Mapping[int, ChoiceDelta],
) -> bytes:
    """The body of an answer that is not streamed. Any thread: nothing of the request changes."""
    answer: dict[str, Any] = {
        "id": head.id,
        "object": format_.whole_object,
        "created": head.created,
        "model": head.model,
        "choices": [format_.whole(gained[index]) for index in sorted(gained)],
        "usage": usage_json(generation.usage),
        **format_.extras(continued=False),
    }
    if call.service.instance.role == "Prefill" and call.request_id.pair is not None:
        answer["kv_transfer_params"] = prefill_params(generation)
    return orjson.dumps(answer)


def _said_of_kv(
    response: Response, call: _Call, options: Options, generation: Generation
) -> Response:
    """D's answer to a router's request, with what became of the KV: known when the first token is
    there or the request fails, so before any head is sent (ADR 0043)."""
    request_id, service = call.request_id, call.service
    if service.instance.role != "Decode":
        return response
    if request_id.is_unsigned:
        response.headers[KV_HEADER] = header_of("unsigned")
    elif request_id.pair is not None:
        scores = options.prompt_logprobs is not None
        if said := generation.kv or (header_of("prompt_logprobs") if scores else ""):
            response.headers[KV_HEADER] = said
            service.kv_peers.count(str(request_id.pair.prefill), read_header(said).reason)
    return response


def _log_end(outcome: str, request_id: RequestId, generation: Generation) -> None:
    transfer, usage = generation.jobs[0].request.transfer, generation.usage
    _log.info(
        outcome,
        extra={
            "request": request_id.log_id,
            "transfer": type(transfer).__name__ if transfer else "alone",
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            **_spans(generation),
        },
    )


def _spans(generation: Generation) -> dict[str, float]:
    """Seconds from the submit of the first prompt to the first step, the first token and now;
    what a request did not come to is not there. `xpyd trace` reads them."""
    times = generation.times
    if not times:
        return {}
    begin = min(one.submitted_s for one in times)
    starts = [one.started_s for one in times if one.started_s is not None]
    firsts = [one.first_token_s for one in times if one.first_token_s is not None]
    found = {"seconds": round(time.monotonic() - begin, 4)}
    if starts:
        found["queue_seconds"] = round(max(0.0, min(starts) - begin), 4)
    if firsts:
        found["first_token_seconds"] = round(max(0.0, min(firsts) - begin), 4)
    return found


def _model_card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "xpyd",
        "max_model_len": service.model.max_model_len,
    }

"""One request's life: pick, prefill on P, decode on D, try again elsewhere.

`app` calls `whole` or `stream`. A try is an Attempt under its own uuid; what a request keeps over
its tries is a Course. Nothing that the client already has is sent again: once P's first token is on
the wire, a later try continues behind it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xpyd_core.errors import ApiError, ProtocolError
from xpyd_router.answers import (
    Head,
    PrefillAnswer,
    content_chunks,
    error_event,
    finish_chunks,
    parse_prefill_answer,
    role_chunks,
    strip_token_ids,
    whole_answer,
)
from xpyd_router.attempt import Attempt
from xpyd_router.bodies import Ask, prefill_body, splice
from xpyd_router.config import RouterConfig
from xpyd_router.errors import Answer, CallFailed, EngineRefused
from xpyd_router.fleet_view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.picker import Picker
from xpyd_router.policy import Alone, Pair, Want
from xpyd_router.registry import InstanceKey
from xpyd_router.releases import Releases
from xpyd_router.sse import DONE, EventSplitter
from xpyd_router.trace import Trace
from xpyd_router.upstream import Upstream, UpstreamStream

logger = logging.getLogger(__name__)

MAX_TRIES = 3
# A refusal (503) costs its engine nothing, so a rolling restart may give several in a row.
_MAX_REFUSALS = 16
_SUSPENDING = frozenset({"connect", "reset", "incomplete", "draining"})


class Sent(NamedTuple):
    """What the client has of a stream: token ids per choice, in OpenAI's order (i*n+j)."""

    token_ids: tuple[tuple[int, ...], ...]
    compatibility: str
    """Only instances of this key give these ids the same meaning."""
    usage: dict[str, Any]
    """P's first usage: it counts the prompt."""


@dataclass
class Course:
    """What one request keeps over its tries. One owner: the task that serves it."""

    ask: Ask
    trace: Trace
    head: Head
    public: str
    seed: int
    deadline_s: float
    exclude: set[InstanceKey] = field(default_factory=set[InstanceKey])
    failures: int = 0
    refusals: int = 0
    last_cause: str = ""
    sent: Sent | None = None
    attempt: Attempt | None = None
    has_emitted: bool = False
    """Something is on the client's wire: errors are events from here on."""
    has_decode_begun: bool = False
    """The stream of D (or of the instance alone) has begun: it cannot be had again."""


class _Prefilled(NamedTuple):
    """P's answer and what it is to the client."""

    answer: PrefillAnswer
    token_ids: tuple[tuple[int, ...], ...]
    """All ids of each choice that D must know of."""
    is_news: bool
    """Whether the answer's tokens are the client's; else P only made the KV."""


class Flow:
    """Serves requests. `clock` is monotonic seconds, `wall_clock` Unix seconds, `random_bytes` the
    source of ids and seeds.
    """

    def __init__(
        self,
        *,
        config: RouterConfig,
        fleet: FleetView,
        picker: Picker,
        upstream: Upstream,
        releases: Releases,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._picker = picker
        self._upstream = upstream
        self._releases = releases
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._random_bytes = random_bytes

    def begin(self, ask: Ask, trace: Trace) -> Course:
        """A course for `ask`, with the response's id; no engine is called."""
        public = self._random_bytes(16).hex()
        prefix = "chatcmpl-" if ask.is_chat else "cmpl-"
        drawn = int.from_bytes(self._random_bytes(8), "big") >> 1
        trace.response_id = prefix + public
        return Course(
            ask=ask,
            trace=trace,
            head=Head(trace.response_id, int(self._wall_clock())),
            public=public,
            seed=drawn if ask.seed is None else ask.seed,
            deadline_s=trace.started_s + self._config.request_timeout_s,
        )

    async def whole(self, course: Course) -> Answer:
        """The whole answer. Raises ApiError, or EngineRefused with an engine's 4xx."""
        while True:
            try:
                async with self._attempt(course) as attempt:
                    return await self._try_whole(course, attempt)
            except CallFailed as failure:
                self._after_failure(course, failure)

    async def stream(self, course: Course) -> AsyncGenerator[bytes]:
        """The events of a streamed answer.

        Raises as `whole` before the first event; after it an error is the last event.
        """
        try:
            async with aclosing(self._events(course)) as events:
                async for data in events:
                    course.has_emitted = True
                    yield data
            return
        except (ApiError, EngineRefused) as error:
            if not course.has_emitted:
                raise
            body = error.body() if isinstance(error, ApiError) else error.answer.body
        yield error_event(body)

    async def _events(self, course: Course) -> AsyncGenerator[bytes]:
        while True:
            try:
                async with self._attempt(course) as attempt:
                    async with aclosing(self._try_stream(course, attempt)) as events:
                        async for data in events:
                            yield data
                    return
            except CallFailed as failure:
                self._after_failure(course, failure)

    @asynccontextmanager
    async def _attempt(self, course: Course) -> AsyncGenerator[Attempt]:
        want = Want(
            course.ask.model,
            alone=None if course.sent else course.ask.alone,
            exclude=frozenset(course.exclude),
            continue_at=course.sent.compatibility if course.sent else None,
        )
        choice = await self._picker.pick(want, course.deadline_s, lambda: _gave_up(course))
        attempt = course.attempt = Attempt(
            choice,
            uuid=self._random_bytes(16).hex(),
            public=course.public,
            fleet=self._fleet,
            upstream=self._upstream,
        )
        trace = course.trace
        trace.request, trace.tries = attempt.uuid, trace.tries + 1
        trace.prefill, trace.decode = attempt.instances[0].name, attempt.instances[-1].name
        try:
            yield attempt
        finally:
            if attempt.owes_release and isinstance(choice, Pair):
                self._releases.send(choice.decode, attempt.uuid)

    async def _try_whole(self, course: Course, attempt: Attempt) -> Answer:
        ask, choice = course.ask, attempt.choice
        body = ask.raw
        if isinstance(choice, Alone):
            answer = await attempt.call(choice.instance, ask, body, self._decode_s(course))
            return answer._replace(body=attempt.scrubbed(answer.body))
        prefilled = await self._prefill(course, attempt, choice)
        if prefilled is not None:
            first = prefilled.answer
            if first.is_over:  # P itself cancels the transfer
                attempt.owes_release = False
                return Answer(200, whole_answer(ask, course.head, first))
            params = self._decode_params(course, prefilled, [0] * len(first.choices))
            params["first_logprobs"] = [choice.logprobs for choice in first.choices]
            body = splice(body, params)
        answer = await attempt.call(choice.decode, ask, body, self._decode_s(course))
        attempt.owes_release = False
        return answer._replace(body=attempt.scrubbed(answer.body))

    async def _try_stream(self, course: Course, attempt: Attempt) -> AsyncGenerator[bytes]:
        ask, choice = course.ask, attempt.choice
        body = ask.raw
        if isinstance(choice, Pair):
            prefilled = await self._prefill(course, attempt, choice)
            if prefilled is not None:
                is_over = prefilled.is_news and prefilled.answer.is_over
                if is_over:
                    attempt.owes_release = False
                if first := self._first_events(course, prefilled, is_over):
                    yield first
                if is_over:
                    return
                emit_from = [len(ids) for ids in prefilled.token_ids]
                body = splice(body, self._decode_params(course, prefilled, emit_from))
        source = attempt.instances[-1]
        async with attempt.open(source, ask, body, self._decode_s(course)) as stream:
            async for data in self._relay(course, attempt, stream):
                yield data

    async def _prefill(self, course: Course, attempt: Attempt, pair: Pair) -> _Prefilled | None:
        """P's answer, or None where the pair does not continue (then it is dropped)."""
        ask, sent = course.ask, course.sent
        params: dict[str, Any] | None = None
        is_news = True
        if pair.is_continuing:
            params = {"seed": course.seed, "client_max_tokens": ask.max_tokens}
            if sent is not None and _may_extend(ask, sent):
                params["continue_from"] = sent.token_ids
            elif sent is not None:
                is_news = False
                del params["client_max_tokens"]
        attempt.owes_release = True
        started_s = self._clock()
        try:
            raw = await attempt.call(
                pair.prefill, ask, prefill_body(ask, params), self._prefill_s(course)
            )
        except (CallFailed, EngineRefused) as error:
            # P never began to send: there is nothing to release.
            if isinstance(error, EngineRefused) or error.cause in ("connect", "draining"):
                attempt.owes_release = False
            raise
        course.trace.prefill_s = self._clock() - started_s
        if params is None:
            return None
        try:
            answer = parse_prefill_answer(ask, raw.body)
        except ProtocolError as error:
            logger.warning("%s", error, extra={"request": attempt.uuid})
            raise CallFailed("answer") from error
        if not is_news and sent is not None:
            return _Prefilled(answer, sent.token_ids, is_news)
        before = sent.token_ids if sent else ((),) * len(answer.choices)
        if len(before) != len(answer.choices):
            raise CallFailed("answer")
        ids = tuple(old + new.token_ids for old, new in zip(before, answer.choices, strict=True))
        return _Prefilled(answer, ids, is_news)

    def _first_events(self, course: Course, prefilled: _Prefilled, is_over: bool) -> bytes:
        """What the client gets of P's answer; from here on it is sent."""
        if not prefilled.is_news:
            return b""
        ask, head, answer = course.ask, course.head, prefilled.answer
        events: list[bytes] = []
        usage = answer.usage
        if course.sent is None:
            events += role_chunks(ask, head, answer)
        else:
            usage = course.sent.usage
        pair = course.attempt.choice if course.attempt else None
        key = pair.decode.beat.compatibility if isinstance(pair, Pair) else ""
        course.sent = Sent(prefilled.token_ids, key, usage)
        events += content_chunks(ask, head, answer)
        if is_over:
            generated = sum(len(ids) for ids in prefilled.token_ids)
            events += finish_chunks(ask, head, answer, usage, generated)
        return b"".join(events)

    def _decode_params(
        self, course: Course, prefilled: _Prefilled, emit_from: Sequence[int]
    ) -> dict[str, Any]:
        return {
            "seed": course.seed,
            "continue_from": prefilled.token_ids,
            "emit_from": emit_from,
            "response_id": course.head.response_id,
            "created": course.head.created,
            **prefilled.answer.transfer,
        }

    async def _relay(
        self, course: Course, attempt: Attempt, stream: UpstreamStream
    ) -> AsyncGenerator[bytes]:
        """The engine's events until [DONE]; CallFailed when they end without it."""
        ask = course.ask
        strip = isinstance(attempt.choice, Pair) and not ask.wants_token_ids
        splitter = EventSplitter()
        is_done = False
        while not is_done:
            data = await stream.read()
            if not data:
                raise CallFailed("incomplete")
            course.has_decode_begun = True
            attempt.owes_release = False
            try:
                events = splitter.push(data)
            except ProtocolError as error:
                raise CallFailed("too_large") from error
            kept: list[bytes] = []
            for event in events:
                is_done = event == DONE or event.startswith(b'data: {"error"')
                shown = strip_token_ids(event) if strip else event
                if shown is not None:
                    kept.append(shown)
                if is_done:
                    break
            if kept:
                joined = b"".join(kept)
                is_error = b'"error"' in joined
                yield attempt.scrubbed_error(joined) if is_error else attempt.scrubbed(joined)

    def _prefill_s(self, course: Course) -> Callable[[], float]:
        most_s = self._config.prefill_timeout_s
        return lambda: min(most_s, course.deadline_s - self._clock())

    def _decode_s(self, course: Course) -> Callable[[], float]:
        """Until a stream begins the request's deadline counts, from then on the gap in it."""
        gap_s = self._config.request_timeout_s
        return lambda: gap_s if course.has_decode_begun else course.deadline_s - self._clock()

    def _after_failure(self, course: Course, failure: CallFailed) -> None:
        """Count, tell and remember it; returns when another try is due, else raises ApiError."""
        attempt = course.attempt
        assert attempt is not None
        instance, cause = attempt.called, failure.cause
        phase = {"P": "prefill", "D": "decode", "A": "aggregated"}[instance.beat.type]
        self._metrics.errors.labels(phase, cause).inc()
        course.trace.events.append(f"{phase}:{cause}")
        course.last_cause = cause
        if cause in _SUSPENDING:
            self._fleet.suspend(instance)
        extra = {"request": attempt.uuid, "instance": instance.name, "try": course.trace.tries}
        logger.warning("%s call failed: %s", phase, cause, extra=extra)
        if course.has_decode_begun:
            raise ApiError(
                502, "the instance that generated the answer failed", code="decode_failed"
            )
        course.exclude.add(instance.key)
        if cause == "draining":
            course.refusals += 1
        else:
            course.failures += 1
        is_late = self._clock() >= course.deadline_s
        if course.failures >= MAX_TRIES or course.refusals >= _MAX_REFUSALS or is_late:
            raise _gave_up(course)
        self._metrics.retries.inc()


def _may_extend(ask: Ask, sent: Sent) -> bool:
    """Whether P' may add a token to what was sent: one choice, and not the last one allowed.

    At the client's last token P' may not know whether to hold text back, so D' writes that one.
    """
    if len(sent.token_ids) != 1:
        return False
    return ask.max_tokens is None or len(sent.token_ids[0]) + 1 < ask.max_tokens


def _gave_up(course: Course) -> ApiError:
    """The last word of a request that failed wherever it was tried; names no instance."""
    tries = f"after {course.trace.tries} tries"
    if course.last_cause == "timeout":
        return ApiError(504, f"the instances did not answer in time, {tries}", code="timeout")
    if course.last_cause == "draining":
        return ApiError(503, f"the instances take no requests, {tries}", retry_after_s=1)
    return ApiError(502, f"the instances failed, {tries}", code="upstream_failed")

"""One request's life: pick, prefill on P, decode on D, try again elsewhere, go on where D died.

`serving.inference` calls `whole` or `stream`. A try is an Attempt under its own uuid; what a
request keeps over its tries is a Course.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from xpyd_core.errors import ApiError, ProtocolError
from xpyd_router.access_log import Trace
from xpyd_router.config import RouterConfig
from xpyd_router.errors import Answer, CallFailed, EngineRefused
from xpyd_router.policy.base import NO_SLO
from xpyd_router.policy.pairs import Alone, Pair, Policy
from xpyd_router.request.answers import Head, error_event, tokens_in, whole_answer
from xpyd_router.request.attempt import Attempt, Attempts
from xpyd_router.request.client_request import Ask, ClientHead
from xpyd_router.request.failures import Failures
from xpyd_router.request.objectives import Objectives
from xpyd_router.request.prefixes import hash_marks, session_in, text_marks
from xpyd_router.request.relay import Outlet, Relay
from xpyd_router.request.state import (
    Course,
    Prefilled,
    alone_params,
    can_go_on_alone,
    decode_params,
    first_events,
    last_events,
    prefill_body,
    prefill_params,
    sent_alone,
    splice,
    take_prefill,
)
from xpyd_router.tokens.service import Tokens

_DRAW_BYTES = 8192


class Draws:
    """`source` gives n random bytes (os.urandom): a call of it costs more than what it gives."""

    def __init__(self, source: Callable[[int], bytes]) -> None:
        self._source = source
        self._drawn = b""
        self._at = 0

    def __call__(self, size: int) -> bytes:
        """`size` bytes, at most 8192, that were given to nobody else."""
        end = self._at + size
        if end > len(self._drawn):
            self._drawn = self._source(_DRAW_BYTES)
            self._at, end = 0, size
        drawn = self._drawn[self._at : end]
        self._at = end
        return drawn


logger = logging.getLogger(__name__)


class Flow:
    """Serves requests. `clock` is monotonic seconds, `wall_clock` Unix seconds, `random_bytes` the
    source of ids and seeds.
    """

    def __init__(
        self,
        *,
        config: RouterConfig,
        policy: Policy,
        attempts: Attempts,
        failures: Failures,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
        tokens: Tokens | None = None,
        objectives: Objectives | None = None,
    ) -> None:
        self._config = config
        self._policy = policy
        self._attempts = attempts
        self._failures = failures
        self._clock = clock
        self._wall_clock = wall_clock
        self._random_bytes = random_bytes
        self._tokens = tokens
        self.counts_tokens = tokens is not None
        self._objectives = objectives

    def begin(self, ask: Ask, trace: Trace, client: ClientHead) -> Course:
        """A course for `ask` under the head `client`, with the response's id; no engine is called.

        ApiError for a request that engines died of lately.
        """
        trace.model = ask.model
        if self._failures.refused:
            self._failures.refuse(ask)
        policy = self._policy
        drawn = self._random_bytes(24)
        public = drawn[:16].hex()
        trace.response_id = ("chatcmpl-" if ask.is_chat else "cmpl-") + public
        # The router draws a seed where the client gave none: P, D and a retry then draw alike.
        seed = int.from_bytes(drawn[16:], "big") >> 1 if ask.seed is None else ask.seed
        return Course(
            ask=ask,
            trace=trace,
            head=Head(trace.response_id, int(self._wall_clock())),
            public=public,
            seed=seed,
            deadline_s=trace.started_s + self._config.request_timeout_s,
            forwarded=client.forwarded,
            prompt_tokens=ask.prompt_tokens,
            session=client.session or (session_in(ask.fields) if policy.needs_session else ""),
            marks=text_marks(ask.fields, is_chat=ask.is_chat) if policy.needs_marks else (),
            slo=self._objectives.of(client.slo) if self._objectives else NO_SLO,
        )

    async def count(self, course: Course) -> None:
        """Have the engines' own count and hashes of the prompt for estimate and marks, in bounded
        time. Need only be called where `counts_tokens`, before what goes by them.
        """
        if self._tokens is None:
            return
        ask = course.ask
        counted = await self._tokens.count(ask.model, ask.raw, ask.fields, is_chat=ask.is_chat)
        course.prompt_tokens = counted.tokens
        if counted.hashes:
            course.marks = hash_marks(counted.hashes, counted.block_tokens)

    async def whole(self, course: Course) -> Answer:
        """The whole answer. Raises ApiError, or EngineRefused with an engine's 4xx."""
        while True:
            attempt = await self._attempts.begin(course)
            try:
                answer = await self._try_whole(course, attempt)
                course.trace.prompt_tokens, course.trace.output_tokens = tokens_in(answer.body)
                if self._failures.refused:
                    self._failures.served(course.ask)
                # Else P ended it, and D was not called.
                if self._objectives is not None and attempt.called is attempt.instances[-1]:
                    self._objectives.answered(
                        course,
                        attempt.load,
                        attempt.waiting_tokens,
                        attempt.call_s,
                        is_prefill=attempt.called.beat.type == "P",
                    )
                return answer
            except CallFailed as failure:
                await self._failures.after(course, attempt, failure)
            finally:
                self._attempts.end(course, attempt)

    async def stream(self, course: Course, outlet: Outlet) -> None:
        """Write a streamed answer to its end.

        Raises as `whole` while nothing has been written; later an error is the last event.
        """
        is_whole = is_refused = False
        try:
            await self._stream(course, outlet)
            is_whole = True
        except (ApiError, EngineRefused) as error:
            is_refused = isinstance(error, EngineRefused)
            if not outlet.has_begun:
                raise
            body = error.body() if isinstance(error, ApiError) else error.answer.body
            outlet.write(error_event(body))
            outlet.end()
        finally:
            if self._objectives is not None and not is_refused:
                self._objectives.judge(course, is_whole=is_whole)

    async def _stream(self, course: Course, outlet: Outlet) -> None:
        while True:
            attempt = await self._attempts.begin(course)
            try:
                await self._try_stream(course, attempt, outlet)
                if self._failures.refused:
                    self._failures.served(course.ask)
                return
            except CallFailed as failure:
                await self._failures.after(course, attempt, failure)
            finally:
                self._attempts.end(course, attempt)
            if last := last_events(course):
                outlet.write(last)
                outlet.end()
                return

    async def _try_whole(self, course: Course, attempt: Attempt) -> Answer:
        ask, choice = course.ask, attempt.choice
        body = ask.raw
        if isinstance(choice, Pair):
            prefilled = await self._prefill(course, attempt, choice)
            if prefilled is not None:
                if prefilled.is_over:
                    return Answer(200, whole_answer(ask, course.head, prefilled.answer))
                body = splice(body, decode_params(course, prefilled, is_stream=False))
        answer = await attempt.call(attempt.instances[-1], ask, body, self._left_s(course))
        attempt.succeeded()
        attempt.owes_release = False
        body = attempt.scrubbed(answer.body)
        return Answer(answer.status, body, answer.content_type, answer.retry_after)

    async def _try_stream(self, course: Course, attempt: Attempt, outlet: Outlet) -> None:
        ask, choice = course.ask, attempt.choice
        body = ask.raw
        goes_on = False
        if isinstance(choice, Alone):
            if goes_on := can_go_on_alone(course, choice.instance):
                body = splice(body, alone_params(course))
        else:
            prefilled = await self._prefill(course, attempt, choice)
            if prefilled is not None:
                outlet.write(first_events(course, prefilled, choice))
                if prefilled.is_over:
                    outlet.end()
                    return
                goes_on = True
                body = splice(body, decode_params(course, prefilled, is_stream=True))
        instance = attempt.instances[-1]
        exchange = await attempt.open(instance, ask, body, self._left_s(course))
        try:
            sent = (course.sent or sent_alone(course, instance)) if goes_on else None
            await Relay(course, attempt, outlet, sent=sent).run(
                exchange, self._config.request_timeout_s
            )
            attempt.succeeded()
        finally:
            attempt.end(exchange)
        if self._objectives is not None and isinstance(choice, Alone):
            self._objectives.streamed(course, attempt.load, attempt.waiting_tokens, attempt.call_s)

    async def _prefill(self, course: Course, attempt: Attempt, pair: Pair) -> Prefilled | None:
        """P's answer, or None where the pair does not continue: then it is dropped."""
        ask = course.ask
        params = prefill_params(course, pair) if pair.is_continuing else None
        body = prefill_body(ask, params)
        attempt.owes_release = True
        load = attempt.prefill_load
        load.begin(attempt.prefill_tokens)
        waiting_tokens = load.queued_tokens
        try:
            answer = await attempt.call(
                pair.prefill,
                ask,
                body,
                min(self._config.prefill_timeout_s, self._left_s(course)),
            )
            course.trace.prefill_s = attempt.call_s
            if self._objectives is not None and attempt.call_s is not None:
                load.pace.first.observe(waiting_tokens, attempt.call_s)
            prefilled = take_prefill(course, answer.body) if params is not None else None
            attempt.succeeded()
        except ProtocolError as error:
            logger.warning("%s", error, extra={"request": attempt.uuid})
            raise CallFailed("answer") from error
        except (CallFailed, EngineRefused) as error:
            # P never began to send: there is nothing to release.
            if isinstance(error, EngineRefused) or error.cause in ("connect", "refused"):
                attempt.owes_release = False
            raise
        finally:
            load.end(attempt.prefill_tokens)
        if prefilled is not None and prefilled.is_over:  # P itself cancels the transfer
            attempt.owes_release = False
        return prefilled

    def _left_s(self, course: Course) -> float:
        """Until a stream begins the request's deadline counts, from then on the gap in it."""
        if course.has_decode_begun:
            return self._config.request_timeout_s
        return course.deadline_s - self._clock()

"""The life of one request: prefill on P, decode on D, new attempts after failures, continuation.

`http.inference` calls `begin`, then `whole` or `stream`. Each attempt has its own uuid (`Attempt`);
what a request keeps over its attempts is in its RequestState. P comes first, then D (ADR 0002).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from xpyd_core.bodies import LongBody
from xpyd_core.errors import ApiError, ProtocolError
from xpyd_router.access_log import Trace
from xpyd_router.app_state import AppState
from xpyd_router.errors import Answer, CallFailed, EngineRefused
from xpyd_router.policy.base import NO_SLO
from xpyd_router.policy.pairs import Alone, Pair
from xpyd_router.request.answers import (
    Head,
    error_event,
    tokens_in,
    whole_answer,
)
from xpyd_router.request.attempt import Attempt, Attempts
from xpyd_router.request.client_request import (
    ClientHead,
    InferenceRequest,
    hash_marks,
    session_in,
    text_marks,
)
from xpyd_router.request.dialects import dialect_between, may_leave_to_decode, without_kv_params
from xpyd_router.request.failures import Failures
from xpyd_router.request.objectives import Objectives
from xpyd_router.request.relay import ClientStream, IdsRelay, Relay
from xpyd_router.request.releases import Releases
from xpyd_router.request.state import (
    Prefilled,
    RequestState,
    alone_params,
    can_go_on_alone,
    first_events,
    last_events,
    sent_alone,
    sent_by_decode,
    splice,
)
from xpyd_router.tokens.service import Tokens
from xpyd_router.upstream.client import UpstreamClient

_DRAW_BYTES = 8192


class RandomPool:
    """`source` gives n random bytes (os.urandom): a call of it costs more than what it gives."""

    def __init__(self, source: Callable[[int], bytes]) -> None:
        self._source = source
        self._drawn = b""
        self._at = 0

    def __call__(self, size: int) -> bytes:
        """`size` bytes, at most 8192, each given out once."""
        end = self._at + size
        if end > len(self._drawn):
            self._drawn = self._source(_DRAW_BYTES)
            self._at, end = 0, size
        drawn = self._drawn[self._at : end]
        self._at = end
        return drawn


logger = logging.getLogger(__name__)


async def ask_prefill(
    state: RequestState, attempt: Attempt, pair: Pair, timeout_s: float
) -> Prefilled | None:
    """Have P compute the prompt: its answer, or None where the pair does not continue: then it is
    dropped. Raises CallFailed, EngineRefused; `attempt.owes_release` is right in any case.
    """
    dialect = dialect_between(pair)
    body = dialect.prefill_body(state, pair, attempt.mac_for(pair.prefill))
    is_leased = dialect.gives_back == "lease"
    attempt.owes_release = not is_leased
    try:
        answer = await attempt.call(pair.prefill, state.request, body, timeout_s)
        prefilled = dialect.take_prefill(state, pair, answer.body)
    except ProtocolError as error:
        logger.warning("%s", error, extra={"request": attempt.uuid})
        raise CallFailed("answer") from error
    except (CallFailed, EngineRefused) as error:
        # P never began to send: there is nothing to release.
        began = not isinstance(error, EngineRefused) and error.cause not in ("connect", "refused")
        if not began and not _is_for_decode(error, state, pair):
            attempt.owes_release = False
        raise
    attempt.prefilled = prefilled
    if is_leased:
        attempt.owes_release = prefilled is not None and bool(prefilled.answer.transfer)
    elif prefilled is not None and prefilled.is_over:  # P itself cancels the transfer
        attempt.owes_release = False
    return prefilled


def _is_for_decode(error: CallFailed | EngineRefused, state: RequestState, pair: Pair) -> bool:
    """Whether P answered with an error that D may not have."""
    is_answer = isinstance(error, EngineRefused) or error.cause == "status"
    return is_answer and may_leave_to_decode(state, pair)


def body_behind(
    state: RequestState, attempt: Attempt, pair: Pair, *, is_stream: bool
) -> bytes | LongBody:
    """What D is sent once P has answered the attempt."""
    mac = attempt.mac_for(pair.decode)
    return dialect_between(pair).decode_body(
        state, attempt.prefilled, is_stream=is_stream, pair_mac=mac
    )


class Flow:
    """Serves the requests of one process."""

    def __init__(
        self,
        app_state: AppState,
        upstream: UpstreamClient,
        releases: Releases,
        *,
        tokens: Tokens | None,
        objectives: Objectives | None,
    ) -> None:
        self._config = app_state.config
        self._policy = app_state.policy
        self._clock = app_state.clock
        self._random_bytes = random_bytes = RandomPool(os.urandom)
        self._attempts = Attempts(app_state, upstream, releases, random_bytes, objectives)
        self._failures = Failures(app_state)
        self._tokens = tokens
        self.counts_tokens = tokens is not None
        self._objectives = objectives

    def begin(self, request: InferenceRequest, trace: Trace, client: ClientHead) -> RequestState:
        """The state of `request`, whose head is `client`; no engine is called yet.

        ApiError for a request that engines died of lately.
        """
        trace.model = request.model
        if self._failures.refused:
            self._failures.refuse(request)
        policy = self._policy
        drawn = self._random_bytes(24)
        public = drawn[:16].hex()
        trace.response_id = ("chatcmpl-" if request.is_chat else "cmpl-") + public
        # The router draws a seed where the client gave none: P, D and a retry then draw alike.
        seed = int.from_bytes(drawn[16:], "big") >> 1 if request.seed is None else request.seed
        return RequestState(
            request=request,
            trace=trace,
            head=Head(trace.response_id, int(time.time())),
            public=public,
            seed=seed,
            deadline_s=trace.started_s + self._config.request_timeout_s,
            forwarded=client.forwarded,
            prompt_tokens=request.prompt_tokens,
            session=client.session or (session_in(request.members) if policy.needs_session else ""),
            marks=text_marks(request.members) if policy.needs_marks else (),
            slo=self._objectives.of(client.slo) if self._objectives else NO_SLO,
        )

    async def count(self, state: RequestState) -> None:
        """Have the engines' own count and hashes of the prompt for estimate and marks, in bounded
        time. Need only be called where `counts_tokens`, before what goes by them.
        """
        if self._tokens is None:
            return
        request = state.request
        counted = await self._tokens.count(
            request.model, request.raw, request.prompt, request.shape
        )
        state.prompt_tokens = counted.tokens
        if counted.hashes:
            state.marks = hash_marks(counted.hashes, counted.block_tokens)

    async def whole(self, state: RequestState) -> Answer:
        """The whole answer. Raises ApiError, or EngineRefused with an engine's 4xx."""
        while True:
            attempt = await self._attempts.begin(state)
            try:
                answer = await self._try_whole(state, attempt)
                if attempt.figures is not None:
                    attempt.figures.answered(state.trace)
                state.trace.prompt_tokens, state.trace.output_tokens = tokens_in(answer.body)
                if self._failures.refused:
                    self._failures.served(state.request)
                if state.drain_cuts:
                    self._failures.continued(state)
                # Else P ended it, and D was not called.
                if self._objectives is not None and attempt.called is attempt.instances[-1]:
                    self._objectives.answered(
                        state,
                        attempt.load,
                        attempt.waiting_tokens,
                        attempt.call_s,
                        is_prefill=attempt.called.beat.type == "P",
                    )
                return answer
            except CallFailed as failure:
                await self._failures.after(state, attempt, failure)
            except EngineRefused:
                if attempt.figures is not None:
                    attempt.figures.refused += 1
                raise
            finally:
                self._attempts.end(state, attempt)

    async def stream(self, state: RequestState, client: ClientStream) -> None:
        """Write a streamed answer to its end.

        Raises as `whole` while nothing has been written; later an error is the last event.
        """
        is_whole = is_refused = False
        try:
            await self._stream(state, client)
            is_whole = True
        except (ApiError, EngineRefused) as error:
            is_refused = isinstance(error, EngineRefused)
            if not client.has_begun:
                raise
            body = error.body() if isinstance(error, ApiError) else error.answer.body
            client.write(error_event(body))
            client.end()
        finally:
            if self._objectives is not None and not is_refused:
                self._objectives.judge(state, is_whole=is_whole)

    async def _stream(self, state: RequestState, client: ClientStream) -> None:
        while True:
            attempt = await self._attempts.begin(state)
            try:
                await self._try_stream(state, attempt, client)
                if attempt.figures is not None:
                    attempt.figures.streamed(state.trace)
                if self._failures.refused:
                    self._failures.served(state.request)
                if state.drain_cuts:
                    self._failures.continued(state)
                return
            except CallFailed as failure:
                await self._failures.after(state, attempt, failure)
            except EngineRefused:
                if attempt.figures is not None:
                    attempt.figures.refused += 1
                raise
            finally:
                self._attempts.end(state, attempt)
            if last := last_events(state):
                client.write(last)
                client.end()
                if state.drain_cuts:
                    self._failures.continued(state)
                return

    async def _try_whole(self, state: RequestState, attempt: Attempt) -> Answer:
        request, choice = state.request, attempt.choice
        body = request.raw
        if isinstance(choice, Pair):
            prefilled = await self._prefill(state, attempt, choice)
            if prefilled is not None and prefilled.is_over:
                self._attempts.answered(state, attempt, "")
                return Answer(200, whole_answer(request, state.head, prefilled.answer))
            body = body_behind(state, attempt, choice, is_stream=False)
        answer = await attempt.call(attempt.instances[-1], request, body, self._left_s(state))
        attempt.fleet.succeeded(attempt.called)
        attempt.owes_release = False
        self._attempts.answered(state, attempt, answer.kv)
        body = without_kv_params(attempt.scrubbed(answer.body))
        return Answer(answer.status, body, answer.content_type, answer.retry_after)

    async def _try_stream(
        self, state: RequestState, attempt: Attempt, client: ClientStream
    ) -> None:
        request, choice = state.request, attempt.choice
        body = request.raw
        goes_on = False
        prefilled: Prefilled | None = None
        if isinstance(choice, Alone):
            if goes_on := can_go_on_alone(state, choice.instance):
                body = splice(body, {"kv_transfer_params": alone_params(state)})
        else:
            prefilled = await self._prefill(state, attempt, choice)
            if prefilled is not None:
                client.write(first_events(state, prefilled, choice))
                if prefilled.is_over:
                    self._attempts.answered(state, attempt, "")
                    client.end()
                    return
                goes_on = prefilled.goes_on
            body = body_behind(state, attempt, choice, is_stream=True)
        instance = attempt.instances[-1]
        exchange = await attempt.open(instance, request, body, self._left_s(state))
        try:
            self._attempts.answered(state, attempt, exchange.kv)
            relay = self._relay(state, attempt, client, prefilled if goes_on else None, goes_on)
            await relay.run(exchange, self._config.request_timeout_s)
            attempt.fleet.succeeded(attempt.called)
        finally:
            attempt.end(exchange)
        if self._objectives is not None and isinstance(choice, Alone):
            self._objectives.streamed(state, attempt.load, attempt.waiting_tokens, attempt.call_s)

    async def _prefill(self, state: RequestState, attempt: Attempt, pair: Pair) -> Prefilled | None:
        """See `ask_prefill`; P's load and pace are noted."""
        load = attempt.prefill_load
        load.begin(attempt.prefill_tokens)
        waiting_tokens = load.queued_tokens
        timeout_s = min(self._config.prefill_timeout_s, self._left_s(state))
        try:
            prefilled = await ask_prefill(state, attempt, pair, timeout_s)
        except (CallFailed, EngineRefused) as error:
            if not _is_for_decode(error, state, pair):
                raise
            logger.info("decode is asked what P refused", extra={"request": attempt.uuid})
            return None
        finally:
            load.end(attempt.prefill_tokens)
        state.trace.prefill_s = attempt.call_s
        if self._objectives is not None and attempt.call_s is not None:
            load.pace.first.observe(waiting_tokens, attempt.call_s)
        attempt.fleet.succeeded(pair.prefill)
        return prefilled

    @staticmethod
    def _relay(
        state: RequestState,
        attempt: Attempt,
        client: ClientStream,
        prefilled: Prefilled | None,
        goes_on: bool,
    ) -> Relay:
        """What passes on the stream of the attempt's last instance, `prefilled` behind a P."""
        if not goes_on:
            return Relay(state, attempt, client, sent=None)
        choice, sent = attempt.choice, state.sent
        if prefilled is not None and prefilled.prompt_ids and isinstance(choice, Pair):
            return IdsRelay(
                *(state, attempt, client), sent=sent or sent_by_decode(state, prefilled, choice)
            )
        sent = sent or sent_alone(state, attempt.instances[-1])
        return Relay(state, attempt, client, sent=sent)

    def _left_s(self, state: RequestState) -> float:
        """The time left: of the request's deadline until a stream begins, then of the gap in it."""
        if state.has_decode_begun:
            return self._config.request_timeout_s
        return state.deadline_s - self._clock()

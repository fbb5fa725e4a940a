"""One attempt to serve a request: its instances, its calls, KV that D may have to release.

`Attempts` begins and ends the attempts of all requests: it asks the policy for instances, and where
there is no pair it waits for one, as long as the queue's deadline says (ADR 0041). The load of an
attempt counts from its begin to its end.
All calls of an attempt go through `Attempt`: a failure is a CallFailed, each wait has a deadline,
and internal ids and addresses stay inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

from msgspec.structs import replace

from xpyd_core.bodies import LongBody
from xpyd_core.errors import ApiError
from xpyd_core.keys import PAIR_MAC_HEADER, call_mac
from xpyd_core.kv_outcome import Cause, Outcome, cause_of
from xpyd_core.request_id import pair_id_text
from xpyd_router.access_log import Trace
from xpyd_router.app_state import AppState
from xpyd_router.canary import SideFigures
from xpyd_router.errors import (
    ABORTED,
    BROKEN,
    TAKES_NO_MORE,
    TRANSFER_FAILED,
    Answer,
    CallFailed,
    EngineRefused,
    error_in,
    unknown_model,
)
from xpyd_router.fleet.instances import Instance, InstanceKey, Snapshot
from xpyd_router.fleet.loads import Load, LoadTable
from xpyd_router.fleet.view import FleetView
from xpyd_router.policy.base import NO_SLO, Want
from xpyd_router.policy.pairs import Alone, Pair
from xpyd_router.request.answers import scrub
from xpyd_router.request.client_request import InferenceRequest
from xpyd_router.request.dialects import served_by, why_alone
from xpyd_router.request.objectives import Objectives
from xpyd_router.request.releases import Releases
from xpyd_router.request.state import Prefilled, RequestState, gave_up, pair_outcome
from xpyd_router.request_metrics import CallMetrics, InstanceTable
from xpyd_router.upstream.client import UpstreamClient
from xpyd_router.upstream.connection import Exchange


def pair_deadline_s(
    now_s: float, waited_s: float, *, wait_s: float, request_ends_s: float
) -> float:
    """Until when a request waits for a pair: `wait_s` in all, of which it has waited `waited_s` for
    its place under the limits. A try after a failure has its own wait: `waited_s` is 0.
    """
    return min(now_s + max(0.0, wait_s - waited_s), request_ends_s)


_ASK_AGAIN_S = 0.5
_MAX_REMEMBERED = 256
_NOBODY: frozenset[InstanceKey] = frozenset()


class Attempt:
    """One attempt. `key` signs the pair's id; `public` is the hex part of the response id, and
    replaces internal ids.
    `forwarded`: the client's header lines that engines get, each with its end of line.
    """

    prefilled: Prefilled | None = None
    """P's answer, of a pair that continues."""
    figures: SideFigures | None = None
    """Where it counts, of a canary."""

    def __init__(
        self,
        choice: Pair | Alone,
        *,
        loads: LoadTable,
        key: bytes,
        uuid: str,
        public: str,
        forwarded: str,
        fleet: FleetView,
        upstream: UpstreamClient,
        instance_metrics: InstanceTable,
    ) -> None:
        self.choice = choice
        self.uuid = uuid
        self.fleet = fleet
        self._upstream = upstream
        self._instance_metrics = instance_metrics
        self._forwarded = forwarded
        self.public_bytes = public.encode()
        self.uuid_bytes = uuid.encode()
        self.request_id = uuid
        self.instances: tuple[Instance, ...]
        self.prefill_load: Load
        """The load of the attempt's first instance."""
        self.load: Load
        """The load of the attempt's last instance."""
        if isinstance(choice, Pair):
            self.request_id = pair_id_text(choice.prefill.kv_text, choice.decode.kv_text, uuid)
            self.instances = (choice.prefill, choice.decode)
            self.prefill_load = loads.of(choice.prefill.place)
            self.load = loads.of(choice.decode.place)
        else:
            self.instances = (choice.instance,)
            self.prefill_load = self.load = loads.of(choice.instance.place)
        self._key = key
        self.secret = self.request_id.encode()
        """The internal id: holds the addresses of both."""
        self.called = self.instances[0]
        """The instance that was called last."""
        self.is_suspect = False
        """Whether an instance died under an earlier try of its request."""
        self.prefill_tokens = 0
        """About how many tokens of the prompt the first instance has to compute."""
        self.waiting_tokens = 0.0
        """Prompt tokens on the last instance when it was picked, this request's included."""
        self.owes_release = False
        """Whether P was called, and D may hold or get KV that no call will ask for."""
        self.running: CallMetrics | None = None
        """The call that runs: one at a time."""
        self.call_s: float | None = None
        """How long the last call took."""

    @cached_property
    def pair_mac(self) -> str:
        """The MAC of a pair's id, by which engines know that a router of the fleet made it; empty
        where one instance serves the request alone."""
        is_pair = isinstance(self.choice, Pair)
        return call_mac(self._key, "pair", self.request_id) if is_pair else ""

    async def open(
        self,
        instance: Instance,
        request: InferenceRequest,
        body: bytes | LongBody,
        timeout_s: float,
    ) -> Exchange:
        """POST `body`; the exchange of a 2xx answer, whose body is still to be read. The caller
        closes it by `end`.

        `timeout_s` counts until the answer's head. Raises CallFailed for what may succeed
        elsewhere, EngineRefused for any other 4xx.
        """
        self.called = instance
        if self.fleet.is_lost(instance.key):
            raise CallFailed("connect")  # it does not exist any more, and did not get the request
        gaps_s = self.figures.itl_s if self.figures is not None else None
        self.running = self._instance_metrics.call(instance, len(body), gaps_s)
        try:
            exchange = await self._upstream.start(
                instance.http,
                self._head(instance, request, len(body)),
                body,
                instance=instance.key,
                timeout_s=timeout_s,
            )
        except BaseException:
            self._end_call()
            raise
        if exchange.status >= 300:
            try:
                self._refuse(await exchange.read())
            finally:
                self.end(exchange)
        return exchange

    def end(self, exchange: Exchange) -> None:
        """Free what `open` gave. Idempotent."""
        self._upstream.end(exchange)
        self._end_call()

    async def call(
        self,
        instance: Instance,
        request: InferenceRequest,
        body: bytes | LongBody,
        timeout_s: float,
    ) -> Answer:
        """POST `body` and read the whole answer within `timeout_s`; raises as `open`."""
        exchange = await self.open(instance, request, body, timeout_s)
        try:
            answer = exchange.answer if exchange.is_whole else await exchange.read()
            if answer.body.find(ABORTED) >= 0:
                raise CallFailed("refused")
            if self.running is not None:
                is_first_token = instance.beat.type == "P"
                self.running.answered(len(answer.body), is_first_token=is_first_token)
            return answer
        finally:
            self.end(exchange)

    def mac_for(self, instance: Instance) -> str:
        """The pair's MAC for the body of a call to `instance`; none for an engine that beats as
        vLLM's own connector does, which takes nothing more than its protocol has."""
        return self.pair_mac if instance.beat.incarnation or instance.beat.dialect else ""

    def pair_outcome(self, pair: Pair, said: str) -> tuple[Outcome, Cause]:
        """What became of the pair's KV, by D's header `said` and what P answered and beat last."""
        outcome, cause = pair_outcome(self.prefilled, said)
        if cause == "no_offer":
            latest = (one for one in self.fleet.instances if one.key == pair.prefill.key)
            peers = (peer for one in latest for peer in one.beat.kv_peers)
            last = next((peer.last for peer in peers if peer.peer == str(pair.decode.kv)), "")
            cause = cause_of(last) if last else cause
        return outcome, cause

    def scrubbed(self, data: bytes) -> bytes:
        """`data` without the internal ids."""
        if data.find(self.uuid_bytes) < 0:
            return data
        return scrub(data, (self.secret, self.uuid_bytes), self.public_bytes)

    def scrubbed_error(self, body: bytes) -> bytes:
        """An engine's error without internal ids and without engine addresses."""
        addresses = [str(a).encode() for i in self.instances for a in (i.http, i.kv)]
        return scrub(self.scrubbed(body), addresses, b"engine")

    def _end_call(self) -> None:
        running, self.running = self.running, None
        if running is not None:
            self.call_s = running.end()

    def _head(self, instance: Instance, request: InferenceRequest, length: int) -> bytes:
        mac = f"{PAIR_MAC_HEADER}: {self.pair_mac}\r\n" if self.pair_mac else ""
        return (
            f"POST /v1/{request.endpoint} HTTP/1.1\r\nHost: {instance.key.http}\r\n"
            f"Content-Type: application/json\r\nX-Request-Id: {self.request_id}\r\n"
            f"{mac}{instance.replica_line}{self._forwarded}Content-Length: {length}\r\n\r\n"
        ).encode("latin-1")

    def _refuse(self, answer: Answer) -> None:
        error = error_in(answer.body)
        is_full = answer.status in TAKES_NO_MORE
        if is_full or not 400 <= answer.status < 500:
            if error is not None and error.get("code") == TRANSFER_FAILED:
                raise CallFailed("transfer", answer.kv)
            raise CallFailed("refused" if is_full else "status")
        body = self.scrubbed_error(answer.body)
        if error is None:
            body = ApiError(answer.status, "the engine refused the request").body()
        raise EngineRefused(answer._replace(body=body, content_type="application/json"))


class Attempts:
    """Begins and ends the attempts of all requests. Ids are made of `random_bytes`."""

    def __init__(
        self,
        app_state: AppState,
        upstream: UpstreamClient,
        releases: Releases,
        random_bytes: Callable[[int], bytes],
        objectives: Objectives | None,
    ) -> None:
        self._app_state = app_state
        self._config = app_state.config
        self._without_pair = self._config.without_pair
        self._keys = app_state.keys
        self._fleet = app_state.fleet
        self._loads = app_state.loads
        self._policy = app_state.policy
        self._metrics = app_state.metrics
        self._clock = app_state.clock
        self._upstream = upstream
        self._releases = releases
        self._random_bytes = random_bytes
        self._objectives = objectives
        self._waiting = 0
        self._waiting_bytes = 0
        self._served_s: dict[str, float] = {}

    async def begin(self, state: RequestState) -> Attempt:
        """Pick the instances, waiting for a pair where there is none, and count the load. Raises
        ApiError as `_pick`.
        """
        want = Want(
            state.request.model,
            alone=None if state.sent else state.request.alone,
            exclude=frozenset(state.exclude) if state.exclude else _NOBODY,
            continue_at=state.sent.compatibility if state.sent else None,
            prompt_tokens=state.prompt_tokens,
            session=state.session,
            marks=state.marks,
            output_tokens=state.request.output_tokens,
            slo=self._objectives.left(state) if self._objectives else NO_SLO,
            share=state.share,
        )
        trace = state.trace
        trace.kv = trace.kv_cause = trace.stands_in = ""
        choice = None if state.shunned else self._pick_at_once(want)
        if choice is None:
            give_up = None if state.last_cause == "refused" else lambda: gave_up(state)
            asked_s = self._clock()
            choice = await self._pick(
                want,
                self._pick_deadline_s(state, asked_s),
                give_up,
                body_bytes=len(state.request.raw),
                shunned=state.shunned,
                may_repeat=state.last_cause in BROKEN,
                trace=trace,
            )
            trace.queue_s += self._clock() - asked_s
        choice = served_by(choice, state.request)
        attempt = Attempt(
            choice,
            loads=self._loads,
            key=self._keys[0],
            uuid=self._random_bytes(16).hex(),
            public=state.public,
            forwarded=state.forwarded,
            fleet=self._fleet,
            upstream=self._upstream,
            instance_metrics=self._metrics.instances,
        )
        if self._policy.canary is not None:
            state.share = self._policy.share_of(choice)
            attempt.figures = self._metrics.canary.of(state.share)
        attempt.prefill_tokens = self._policy.placed(choice, want)
        if self._objectives is not None:
            self._objectives.placed(state, choice, attempt.prefill_tokens)
        # From now on, also while P computes: D keeps room for what it will be sent.
        attempt.load.begin(state.prompt_tokens, state.request.output_tokens)
        attempt.waiting_tokens = attempt.load.queued_tokens
        self._fleet.began(attempt.instances)
        if state.breaks:
            # A request that met a death is tried there, until `end`.
            attempt.is_suspect = True
            self._loads.suspect(one.place for one in attempt.instances)
        if isinstance(choice, Pair):
            self._metrics.instances.paired(choice.prefill, choice.decode)
        trace.request, trace.tries = attempt.uuid, trace.tries + 1
        trace.prefill, trace.decode = attempt.instances[0].name, attempt.instances[-1].name
        trace.prefill_s = trace.decode_s = None
        return attempt

    def _pick_deadline_s(self, state: RequestState, now_s: float) -> float:
        config = self._config
        ends_s = now_s + config.request_timeout_s if state.has_decode_begun else state.deadline_s
        waited_s = 0.0 if state.trace.tries else state.trace.queue_s
        return pair_deadline_s(now_s, waited_s, wait_s=config.pair_wait_s, request_ends_s=ends_s)

    def answered(self, state: RequestState, attempt: Attempt, said: str) -> None:
        """An engine answers the attempt: note what became of the KV. `said`: its header."""
        choice, prefilled, trace = attempt.choice, attempt.prefilled, state.trace
        if isinstance(choice, Alone):
            outcome: Outcome = "alone"
            cause: Cause = trace.stands_in or why_alone(choice, state)
            instances = attempt.instances
        elif prefilled is not None and prefilled.is_over:
            outcome, cause, instances = "alone", "first_token", attempt.instances[:1]
        else:
            outcome, cause = attempt.pair_outcome(choice, said)
            instances = attempt.instances
        trace.kv, trace.kv_cause = outcome, cause
        self._metrics.kv.count(instances, outcome, cause)

    def end(self, state: RequestState, attempt: Attempt) -> None:
        """However the attempt ended: note it, free its place, and have D release KV that no call
        will ask for.
        """
        attempt.load.end(state.prompt_tokens, state.request.output_tokens)
        if attempt.is_suspect:
            self._loads.clear(one.place for one in attempt.instances)
        if attempt.called.beat.type == "P":
            state.trace.prefill_s = attempt.call_s
        else:
            state.trace.decode_s = attempt.call_s
        if state.sent is not None:
            state.trace.output_tokens = sum(map(len, state.sent.token_ids))
            state.trace.prompt_tokens = state.sent.usage.get("prompt_tokens")
        if attempt.owes_release and isinstance(attempt.choice, Pair):
            self._releases.send(attempt.choice, attempt.uuid)

    def _pick_at_once(self, want: Want) -> Pair | Alone | None:
        """What nearly every request gets: a choice of the policy's, without waiting."""
        if choice := self._policy.pick(self._fleet.snapshot, want):
            self._remember(want.model)
        return choice

    async def _pick(
        self,
        want: Want,
        deadline_s: float,
        give_up: Callable[[], ApiError] | None,
        *,
        body_bytes: int = 0,
        shunned: Sequence[frozenset[InstanceKey]] = (),
        may_repeat: bool = False,
        trace: Trace,
    ) -> Pair | Alone:
        """A choice, at latest at `deadline_s`; without the first of `shunned` that leaves one.

        Raises ApiError: 404 for an unknown model, 503 where no instance is ready in time, or will
        be before the router ends, `give_up()` where only those that failed are left. Without it
        they are waited for as well: they refused, because they are being replaced. With
        `may_repeat` they are tried again at once.
        """
        for some in shunned:
            fewer = replace(want, exclude=want.exclude | some)
            if choice := self._policy.pick(self._fleet.snapshot, fewer):
                return choice
        has_waited = False
        while True:
            snapshot = self._fleet.snapshot
            if choice := self._policy.pick(snapshot, want):
                self._remember(want.model)
                return choice
            lost = snapshot.of_model(want.model).lost
            if choice := self._second_choice(snapshot, want):
                trace.stands_in = self._metrics.stands_in(choice[-1], lost)
                self._remember(want.model)
                return choice
            everyone = replace(want, exclude=frozenset())
            only_tried = bool(want.exclude) and self._has_any(snapshot, everyone)
            if only_tried and may_repeat:
                want = everyone
                continue
            if only_tried and give_up:
                raise give_up()
            left_s = deadline_s - self._clock()
            rejects = self._without_pair.rejects(lost) and not only_tried
            if rejects:
                left_s = min(left_s, self._app_state.new_until_s - self._clock())
            may_come = self._may_come(snapshot, want.model)
            if left_s <= 0 or not may_come or not self._may_wait(body_bytes):
                if rejects:
                    self._metrics.no_pair.labels(lost, "rejected").inc()
                raise self._unavailable(want.model)
            if not only_tried and not has_waited:
                has_waited = True
                self._metrics.no_pair.labels(lost, "waited").inc()
            # An instance that refused may be full, not leaving: no beat says when it has room
            # again.
            await self._wait(min(left_s, _ASK_AGAIN_S) if only_tried else left_s, body_bytes)
            # An instance that is back came back with a beat: it may be tried again.
            want = everyone

    def _second_choice(self, snapshot: Snapshot, want: Want) -> Pair | Alone | None:
        picks = (self._policy.pick(snapshot, one) for one in self._without_pair.wishes(want))
        return next(filter(None, picks), None)

    def _has_any(self, snapshot: Snapshot, want: Want) -> bool:
        return bool(self._policy.pick(snapshot, want) or self._second_choice(snapshot, want))

    def _may_come(self, snapshot: Snapshot, model: str) -> bool:
        """Whether an instance that serves `model` may come. Of a fleet without instances no router
        knows the models; in another fleet the model is one of its instances', or was lately."""
        if self._app_state.is_over:
            return False
        served_s = self._served_s.get(model, -math.inf)
        was_served = self._clock() < served_s + self._config.pair_wait_s
        return snapshot.is_empty or snapshot.knows(model) or was_served

    def _may_wait(self, body_bytes: int) -> bool:
        """Whether the queue has room."""
        limits = self._config.limits
        has_room = self._waiting_bytes + body_bytes <= limits.queue_bytes
        return has_room and self._waiting < limits.queue_entries

    async def _wait(self, timeout_s: float, body_bytes: int) -> None:
        self._waiting += 1
        self._waiting_bytes += body_bytes
        self._metrics.waiting.inc()
        try:
            await self._fleet.wait_change(timeout_s)
        finally:
            self._waiting -= 1
            self._waiting_bytes -= body_bytes
            self._metrics.waiting.dec()

    def _unavailable(self, model: str) -> ApiError:
        snapshot = self._fleet.snapshot
        if not snapshot.is_empty and not snapshot.knows(model):
            return unknown_model(model, snapshot.known_models)
        return ApiError(
            503,
            "no prefill and decode instances are ready for this model",
            code="no_instances",
            retry_after_s=max(1, math.ceil(self._config.heartbeat_interval_s)),
        )

    def _remember(self, model: str) -> None:
        self._served_s.pop(model, None)
        self._served_s[model] = self._clock()
        if len(self._served_s) > _MAX_REMEMBERED:
            del self._served_s[next(iter(self._served_s))]

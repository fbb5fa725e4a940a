"""Introductions: the router's own prompts through pairs of two engines, before clients' go there.

A D uses KV of a P of another engine only when it has compared that of one prompt with its own
(docs/adr/0055). So that no client pays for that, and no request goes to a pair without KV, the
router sends such pairs short prompts until D has said `moved`: then the pair is one; or that it
never will use the KV. One Introducer per router, in the process that takes heartbeats. Its calls
count for no breaker, no load and no metric of requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from xpyd_core.errors import ProtocolError
from xpyd_core.kv_outcome import cause_of, read_header
from xpyd_router.access_log import Trace
from xpyd_router.errors import CallFailed, EngineRefused
from xpyd_router.fleet.instances import Instance, InstanceKey
from xpyd_router.fleet.introductions import Verdict, common_model
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.policy.pairs import Pair
from xpyd_router.request.answers import Head
from xpyd_router.request.attempt import Attempt
from xpyd_router.request.client_request import parse_request
from xpyd_router.request.dialects import dialect_between
from xpyd_router.request.releases import Releases
from xpyd_router.request.state import RequestState
from xpyd_router.request_metrics import InstanceTable
from xpyd_router.upstream.client import UpstreamClient

logger = logging.getLogger(__name__)
_MOST_RUNNING = 8
"""Introductions at once. Each P and each D has one at a time."""
_TICK_S = 0.1
_IDLE_S = 30.0
_FIRST_PAUSE_S = 0.25
"""After the first prompt, and the first that D may have compared. Each further pause is twice the
one before."""
_LONGEST_PAUSE_S = 30.0
_CALL_S = 60.0
"""Deadline of each call: a busy engine queues it."""
_BEATS = 2
"""So many of D's periods, and a bit, are waited for a beat that says what became of the KV."""
_BEAT_SLACK_S = 2.0
_LONG_S = 60.0
"""A pair without a verdict for so long is in the log, and again each time it has doubled."""
_WORDS = 64
"""Of a prompt: at least as many tokens; D needs 16. At most 4 bytes each."""
_LEAST_WORDS = 20
_MAX_ANSWER_TEXT = 200
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ANSWER_TOKENS = 2


class Said(NamedTuple):
    """What one prompt has shown: a verdict, or a word for why there is none."""

    verdict: Verdict | None
    word: str = ""
    is_failure: bool = False
    """A call failed, or D says nothing."""


def words(random: bytes) -> str:
    """A text that no cache has seen: a word of three letters for each two bytes."""
    pairs = zip(random[::2], random[1::2], strict=True)
    return " ".join(_LETTERS[a % 26] + _LETTERS[b % 26] + _LETTERS[(a ^ b) % 26] for a, b in pairs)


def words_for(context_tokens: int) -> int:
    """How many words a prompt has where both engines hold so many tokens; 0: unknown."""
    if not context_tokens:
        return _WORDS
    return max(_LEAST_WORDS, min(_WORDS, context_tokens // 4 - _ANSWER_TOKENS))


def judged(word: str) -> Said:
    """What D's word, or P's, means: '' for KV that moved. KV whose layout, dtype or values are not
    D's is never used; what may pass is tried again."""
    if not word:
        return Said("met")
    is_for_good = cause_of(word) == "incompatible" and not word.startswith("refused:")
    return Said("refused" if is_for_good else None, word)


class Counted(NamedTuple):
    """What D counted with one P, by its last beat."""

    total: int = 0
    last: str = ""
    """The cause of what was counted last; '' for KV that moved."""


def counted_with(decode: Instance, peer: str) -> Counted:
    """What D counted with the P of this KV address."""
    for one in decode.beat.kv_peers:
        if one.peer == peer:
            return Counted(one.moved + sum(one.failed.values()), one.last)
    return Counted()


@dataclass
class _Waiting:
    """A pair without a verdict."""

    since_s: float
    due_s: float
    pause_s: float = _FIRST_PAUSE_S
    tries: int = 0
    was_unverified: bool = False
    warn_after_s: float = _LONG_S


class Introducer:
    """See the module. `key` signs pair ids; `local_host` as of `source_for`."""

    def __init__(
        self,
        fleet: FleetView,
        metrics: RouterMetrics,
        *,
        key: bytes,
        local_host: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._key = key
        self._local_host = local_host
        self._clock = clock
        self._waiting: dict[tuple[InstanceKey, InstanceKey], _Waiting] = {}
        self._busy: set[InstanceKey] = set()
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Introduce until cancelled; then no call is left."""
        upstream = UpstreamClient(self._local_host)
        self._fleet.on_lost(upstream.lose)
        releases = Releases(upstream, self._metrics, self._key)
        try:
            while True:
                wait_s = self._start_due(upstream, releases)
                await self._fleet.wait_change(wait_s)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await releases.close()
            await upstream.close()

    def _start_due(self, upstream: UpstreamClient, releases: Releases) -> float:
        """Begin what is due and has a place; after how long to look again."""
        strangers = self._fleet.strangers()
        if not strangers and not self._running:
            self._waiting.clear()
            return _IDLE_S
        now = self._clock()
        known = self._waiting
        self._waiting = {
            (p.key, d.key): known.get((p.key, d.key)) or _Waiting(now, now) for p, d in strangers
        }
        next_s = now + _IDLE_S
        # `strangers` has those first whose D has the fewest partners; the sort keeps that order.
        for p, d in sorted(strangers, key=lambda pair: self._of(pair).tries):
            if len(self._running) >= _MOST_RUNNING:
                break
            waiting = self._of((p, d))
            if waiting.due_s > now or p.key in self._busy or d.key in self._busy:
                next_s = min(next_s, waiting.due_s)
                continue
            self._busy |= {p.key, d.key}
            work = self._introduce(Pair(p, d), waiting, upstream, releases)
            task = asyncio.create_task(work)
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return _TICK_S if self._running else max(next_s - now, _TICK_S)

    def _of(self, pair: tuple[Instance, Instance]) -> _Waiting:
        return self._waiting[pair[0].key, pair[1].key]

    async def _introduce(
        self, pair: Pair, waiting: _Waiting, upstream: UpstreamClient, releases: Releases
    ) -> None:
        """Send one prompt, and note what it has shown."""
        said = Said(None, "the router failed", is_failure=True)
        try:
            said = await self._send(pair, upstream, releases)
        except CallFailed as failure:
            said = Said(None, f"{failure.cause} {failure}".strip(), is_failure=True)
        except EngineRefused as refusal:
            text = refusal.answer.body[:_MAX_ANSWER_TEXT].decode(errors="replace")
            said = Said(None, f"status {refusal.answer.status} {text}", is_failure=True)
        except ProtocolError as error:
            said = Said(None, str(error), is_failure=True)
        except Exception:  # the task's edge: the pair must be tried again
            logger.exception("introduction failed")
        finally:
            self._busy -= {pair.prefill.key, pair.decode.key}
        self._note(pair, waiting, said)

    def _note(self, pair: Pair, waiting: _Waiting, said: Said) -> None:
        now = self._clock()
        result = said.verdict or ("failed" if said.is_failure else "unverified")
        self._metrics.introductions.labels(result).inc()
        waiting.tries += 1
        if result == "unverified" and not waiting.was_unverified:
            waiting.was_unverified, waiting.pause_s = True, _FIRST_PAUSE_S
        waiting.due_s = now + waiting.pause_s
        waiting.pause_s = min(2 * waiting.pause_s, _LONGEST_PAUSE_S)
        names = (
            *(pair.prefill.name, pair.prefill.beat.engine or "xpyd"),
            *(pair.decode.name, pair.decode.beat.engine or "xpyd"),
        )
        if said.verdict is not None:
            if not self._fleet.introduced(pair.prefill.key, pair.decode.key, said.verdict):
                return
            if said.verdict == "met":
                logger.info("P %s (%s) and D %s (%s) have met: they are a pair", *names)
            else:
                logger.error(
                    "P %s (%s) and D %s (%s) are never a pair: %s; see `first contact` in D's log",
                    *(*names, said.word),
                )
        elif now - waiting.since_s >= waiting.warn_after_s:
            waiting.warn_after_s *= 2
            logger.warning(
                "P %s (%s) and D %s (%s) are no pair after %d prompts in %.0f s: %s",
                *(*names, waiting.tries, now - waiting.since_s, said.word),
            )

    async def _send(self, pair: Pair, upstream: UpstreamClient, releases: Releases) -> Said:
        """Send one prompt through `pair`; raises CallFailed, EngineRefused, ProtocolError."""
        latest = self._fleet.find(pair.decode.key) or pair.decode
        before = counted_with(latest, pair.prefill.kv_text).total
        state = self._state(pair)
        attempt = Attempt(
            pair,
            # Of its own: what it counts is no client's.
            loads=LoadTable(),
            instance_metrics=InstanceTable(self._clock),
            key=self._key,
            uuid=os.urandom(16).hex(),
            public=state.public,
            forwarded="",
            fleet=self._fleet,
            upstream=upstream,
        )
        dialect = dialect_between(pair)
        p, d = pair.prefill, pair.decode
        attempt.owes_release = True
        try:
            body = dialect.prefill_body(state, pair, attempt.mac_for(p))
            answer = await attempt.call(p, state.request, body, _CALL_S)
            prefilled = dialect.take_prefill(state, pair, answer.body)
            body = dialect.decode_body(
                state, prefilled, is_stream=False, pair_mac=attempt.mac_for(d)
            )
            answer = await attempt.call(d, state.request, body, _CALL_S)
            attempt.owes_release = False
        finally:
            if attempt.owes_release:
                releases.send(pair, attempt.uuid)
        said = read_header(answer.kv)
        not_sent = prefilled.answer.not_sent if prefilled is not None else ()
        if not_sent and said.reason in ("", "not_sent"):
            return judged(not_sent[0])
        if said.outcome == "unreported":
            return await self._wait_for_beat(pair, before)
        return judged(said.reason)

    def _state(self, pair: Pair) -> RequestState:
        """The request: a text that is new each time."""
        said = [one.beat.max_model_len for one in pair if one.beat.max_model_len]
        text = words(os.urandom(2 * words_for(min(said, default=0))))
        body = {
            "model": common_model(pair.prefill, pair.decode),
            "prompt": text,
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
        }
        request = parse_request("completions", orjson.dumps(body))
        public, now = os.urandom(16).hex(), self._clock()
        return RequestState(
            request=request,
            trace=Trace(request.endpoint, now),
            head=Head(f"cmpl-{public}", int(time.time())),
            public=public,
            seed=0,
            deadline_s=now + 2 * _CALL_S,
            prompt_tokens=request.prompt_tokens,
        )

    async def _wait_for_beat(self, pair: Pair, before: int) -> Said:
        """What D's beats say of the KV, where its answer does not (vLLM's)."""
        until_s = self._clock() + _BEATS * pair.decode.period_s + _BEAT_SLACK_S
        while self._clock() < until_s:
            latest = self._fleet.find(pair.decode.key)
            if latest is None:
                break
            if (said := counted_with(latest, pair.prefill.kv_text)).total > before:
                return judged(said.last)
            await asyncio.sleep(_TICK_S)
        return Said(None, "D's heartbeats do not say what became of the KV", is_failure=True)

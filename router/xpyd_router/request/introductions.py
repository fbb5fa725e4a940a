"""Introductions: the router's own prompts through pairs of two engines, before clients' go there.

A D uses KV of a P of another engine only when it has compared that of one prompt with its own
(docs/adr/0055). So that no client pays for that, and no request goes to a pair without KV, the
router sends such pairs short prompts until D's answer says `moved`: then the pair is one; or that
it never will use the KV. One Introducer per router, in the process that takes heartbeats. Its calls
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

from xpyd_core.keys import Keys
from xpyd_core.kv_outcome import HEADER, Said, cause_of, read_header
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
from xpyd_router.request.flow import ask_prefill, body_behind
from xpyd_router.request.releases import Releases
from xpyd_router.request.state import RequestState, common_context, said_of_pair
from xpyd_router.request_metrics import InstanceTable
from xpyd_router.upstream.client import Dialer, UpstreamClient

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
_LONG_S = 60.0
"""A pair without a verdict for so long is in the log, and again each time it has doubled."""
_TOKENS = 64
"""Of a prompt, where they fit."""
_LEAST_TOKENS = 16
"""D compares no shorter prompt."""
_ANSWER_TOKENS = 2
_MAX_BEGIN_TOKENS = 1
"""Put before a text by tokenizers."""
_MAX_WORD_TOKENS = 4
"""Three letters and a blank, where each byte is a token."""
_MAX_ANSWER_TEXT = 200
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_IDS = range(32, 128)
"""Each vocabulary has them; bytes' are those of ASCII's characters."""
_FIXES = {
    "unverified": "D has not compared it yet; where its log says so, give it a buffer or a pool",
    "incompatible:kv_values": "see `first contact` in D's log",
    "incompatible:engine": "a D of an older version compares KV only in a cache on a CPU",
}
"""By D's word."""


class Shown(NamedTuple):
    """What one prompt has shown: a verdict, or a word for why there is none."""

    verdict: Verdict | None
    word: str = ""
    is_failure: bool = False
    """A call failed, or D says nothing."""


_TOO_SHORT = Shown(
    "refused",
    f"D compares KV of {_LEAST_TOKENS} tokens or more, and one of the two holds fewer than "
    f"{_LEAST_TOKENS + _ANSWER_TOKENS}: start it with a larger --max-model-len",
)
_SILENT = Shown(
    None,
    f"D's answers have no {HEADER}: a vLLM needs VLLM_PLUGINS=xpyd, of this version",
    is_failure=True,
)


def words(random: bytes) -> str:
    """A text that no cache has seen: a word of three letters for each two bytes."""
    pairs = zip(random[::2], random[1::2], strict=True)
    return " ".join(_LETTERS[a % 26] + _LETTERS[b % 26] + _LETTERS[(a ^ b) % 26] for a, b in pairs)


def prompt_for(
    context: int, random: Callable[[int], bytes], *, by_ids: bool = False
) -> str | list[int] | None:
    """A prompt that no cache has seen, for engines that both hold `context` tokens; 0: it is not
    known how many. None: they hold none that D compares.

    A text, as clients send it; token ids where the text may be too long, or `by_ids`. Some of the
    ids may mean more than text to a model, such as the place of an image.
    """
    room = context - _ANSWER_TOKENS if context else _MAX_WORD_TOKENS * _TOKENS + _MAX_BEGIN_TOKENS
    count = min(_TOKENS, (room - _MAX_BEGIN_TOKENS) // _MAX_WORD_TOKENS)
    if count >= _LEAST_TOKENS and not by_ids:
        return words(random(2 * count))
    count = min(_TOKENS, room)
    if count < _LEAST_TOKENS:
        return None
    return [_IDS[byte % len(_IDS)] for byte in random(count)]


def judged(said: Said) -> Shown:
    """What D's word, or P's, means. KV whose layout, dtype or values are not D's is never used;
    what may pass is tried again."""
    outcome, word = said
    if outcome == "moved":
        return Shown("met")
    if outcome == "unreported":
        return _SILENT
    is_for_good = cause_of(word) == "incompatible" and not word.startswith("refused:")
    fix = _FIXES.get(word) or ("their logs say what differs" if is_for_good else "")
    return Shown("refused" if is_for_good else None, f"{word}: {fix}" if fix else word)


@dataclass
class _Waiting:
    """A pair without a verdict."""

    since_s: float
    due_s: float
    pause_s: float = _FIRST_PAUSE_S
    tries: int = 0
    was_unverified: bool = False
    by_ids: bool = False
    """The next prompt is token ids: an engine has refused a text."""
    warn_after_s: float = _LONG_S


class Introducer:
    """See the module. The first of `keys` signs pair ids."""

    def __init__(
        self,
        fleet: FleetView,
        metrics: RouterMetrics,
        *,
        keys: Keys,
        dialer: Dialer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._keys = keys
        self._dialer = dialer
        self._clock = clock
        self._waiting: dict[tuple[InstanceKey, InstanceKey], _Waiting] = {}
        self._busy: set[InstanceKey] = set()
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Introduce until cancelled; then no call is left."""
        upstream = UpstreamClient(self._dialer)
        self._fleet.on_lost(upstream.lose)
        releases = Releases(upstream, self._metrics, self._keys)
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
        shown = Shown(None, "the router failed", is_failure=True)
        try:
            shown = await self._send(pair, waiting, upstream, releases)
        except CallFailed as failure:
            # A D that does not compute (`onFailure: Fail`) fails the call with its word.
            said = read_header(failure.kv)
            shown = judged(said) if said.reason else Shown(None, failure.cause, is_failure=True)
        except EngineRefused as refusal:
            waiting.by_ids = not waiting.by_ids
            text = refusal.answer.body[:_MAX_ANSWER_TEXT].decode(errors="replace")
            shown = Shown(None, f"status {refusal.answer.status} {text}", is_failure=True)
        except Exception:  # the task's edge: the pair must be tried again
            logger.exception("introduction failed")
        finally:
            self._busy -= {pair.prefill.key, pair.decode.key}
        self._note(pair, waiting, shown)

    def _note(self, pair: Pair, waiting: _Waiting, shown: Shown) -> None:
        now = self._clock()
        result = shown.verdict or ("failed" if shown.is_failure else "unverified")
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
        if shown.verdict is not None:
            if not self._fleet.introduced(pair.prefill.key, pair.decode.key, shown.verdict):
                return
            if shown.verdict == "met":
                logger.info("P %s (%s) and D %s (%s) have met: they are a pair", *names)
            else:
                logger.error(
                    "P %s (%s) and D %s (%s) are never a pair, and a D without another P gets "
                    "requests only with --on-no-prefill PrefillOnDecode: %s",
                    *(*names, shown.word),
                )
        elif now - waiting.since_s >= waiting.warn_after_s:
            waiting.warn_after_s *= 2
            logger.warning(
                "P %s (%s) and D %s (%s) are no pair after %d prompts in %.0f s: %s",
                *(*names, waiting.tries, now - waiting.since_s, shown.word),
            )

    async def _send(
        self, pair: Pair, waiting: _Waiting, upstream: UpstreamClient, releases: Releases
    ) -> Shown:
        """Send one prompt through `pair`; raises CallFailed, EngineRefused."""
        prompt = prompt_for(common_context(pair), os.urandom, by_ids=waiting.by_ids)
        if prompt is None:
            return _TOO_SHORT
        state = self._state(pair, prompt)
        attempt = Attempt(
            pair,
            # Of its own: what it counts is no client's.
            loads=LoadTable(),
            instance_metrics=InstanceTable(self._clock),
            key=self._keys[0],
            uuid=os.urandom(16).hex(),
            public=state.public,
            forwarded="",
            fleet=self._fleet,
            upstream=upstream,
        )
        try:
            await ask_prefill(state, attempt, pair, _CALL_S)
            body = body_behind(state, attempt, pair, is_stream=False)
            answer = await attempt.call(pair.decode, state.request, body, _CALL_S)
            attempt.owes_release = False
        finally:
            if attempt.owes_release:
                releases.send(pair, attempt.uuid)
        return judged(said_of_pair(attempt.prefilled, answer.kv))

    def _state(self, pair: Pair, prompt: str | list[int]) -> RequestState:
        """The request."""
        body = {
            "model": common_model(pair.prefill, pair.decode),
            "prompt": prompt,
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

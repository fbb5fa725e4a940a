"""Between the engine's thread and the server's event loop: requests in, outputs and their times
out.

The engine's thread calls `EngineBridge.deliver` once per step: one wake-up of the loop. All other
code of this module runs on the loop. A mailbox belongs to one HTTP request; while its client does
not read, its outputs collect there (at most the request's own tokens) and are taken together.

TTFT: submit to first token. ITL: gap of two consecutive tokens. TPOT: mean ITL over the output
tokens of a choice. E2E: submit to last token. Of a request with one choice and n tokens therefore
E2E - TTFT = sum of its ITL = TPOT x (n - 1). Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from xpyd_core.distribution import Distribution
from xpyd_core.errors import ApiError
from xpyd_core.request_id import TransferKey
from xpyd_kv.values import OfferedPrompt
from xpyd_worker.engine.request import EngineOutput, EngineRequest, EngineStats, ErrorKind

T = TypeVar("T")
# From a token of a small model to a long answer, or a long queue, on a CPU.
REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
)
REQUEST_TOKENS = tuple(float(2**power) for power in range(18))


class RequestMetrics:
    """Distributions and sums over requests. A request is one prompt; ITL and TPOT are of each of
    its choices. Requests that failed or were aborted count up to there and have no TPOT and E2E.
    """

    def __init__(self) -> None:
        self.ttft = Distribution(REQUEST_SECONDS)
        self.itl = Distribution(TOKEN_SECONDS)
        self.tpot = Distribution(TOKEN_SECONDS)
        self.e2e = Distribution(REQUEST_SECONDS)
        self.queue = Distribution(REQUEST_SECONDS)
        self.request_prompt_tokens = Distribution(REQUEST_TOKENS)
        self.request_output_tokens = Distribution(REQUEST_TOKENS)
        self.prompt_tokens = 0
        self.output_tokens = 0


class _ChoiceTimes:
    """The first and last token of one choice, and how many there were."""

    __slots__ = ("first_s", "last_s", "tokens")

    def __init__(self, now_s: float) -> None:
        self.first_s = now_s
        self.last_s = now_s
        self.tokens = 0


class RequestTimes:
    """When the tokens of one prompt's choices came. Feeds `metrics` as they arrive."""

    def __init__(self, metrics: RequestMetrics, *, submitted_s: float, prompt_tokens: int) -> None:
        self.submitted_s = submitted_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._choices: dict[int, _ChoiceTimes] = {}

    def take(self, output: EngineOutput, now_s: float) -> None:
        """The step that gave `output` ended at `now_s`."""
        if self.started_s is None and output.started_s is not None:
            self.started_s = output.started_s
            self._metrics.queue.observe(max(0.0, output.started_s - self.submitted_s))
        for choice in output.choices:
            if choice.tokens:
                self._take_tokens(choice.choice, len(choice.tokens), now_s)

    def _take_tokens(self, index: int, count: int, now_s: float) -> None:
        metrics = self._metrics
        if self.first_token_s is None:
            self.first_token_s = now_s
            metrics.ttft.observe(now_s - self.submitted_s)
            metrics.prompt_tokens += self._prompt_tokens
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _ChoiceTimes(now_s)
        else:
            metrics.itl.observe(now_s - choice.last_s)
            choice.last_s = now_s
        # The tokens of one step came together.
        for _ in range(count - 1):
            metrics.itl.observe(0.0)
        choice.tokens += count
        self.last_token_s = now_s
        metrics.output_tokens += count

    def finish(self) -> None:
        """The request has its last token: TPOT, E2E and its sizes. Once."""
        metrics = self._metrics
        if self.last_token_s is None:
            return
        metrics.e2e.observe(self.last_token_s - self.submitted_s)
        for choice in self._choices.values():
            if choice.tokens > 1:
                metrics.tpot.observe((choice.last_s - choice.first_s) / (choice.tokens - 1))
        metrics.request_prompt_tokens.observe(self._prompt_tokens)
        metrics.request_output_tokens.observe(self.output_tokens)

    @property
    def output_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(choice.tokens for choice in self._choices.values())


async def called_back(
    begin: Callable[[Callable[[T], None]], None], *, within_s: float, late: str
) -> T:
    """What `begin` calls back with, on whatever thread. ApiError 503, `late`, where it does not in
    time."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T) -> None:
        if not answer.done():
            answer.set_result(value)

    def done(value: T) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value)

    begin(done)
    try:
        return await asyncio.wait_for(answer, within_s)
    except TimeoutError as error:
        raise ApiError(503, late, retry_after_s=1) from error


# The engine takes it in between two steps; one of a large prompt takes seconds on a CPU.
_RESET_S = 30.0


class Mailbox:
    """Outputs of one HTTP request's prompts that were not taken yet. Loop only."""

    def __init__(self) -> None:
        self._outputs: list[EngineOutput] = []
        self._event = asyncio.Event()
        self._failed = False

    def put(self, output: EngineOutput) -> None:
        """Add one output."""
        self._outputs.append(output)
        self._event.set()

    def fail(self) -> None:
        """Note that no output will come any more: the engine is gone."""
        self._failed = True
        self._event.set()

    async def take(self) -> list[EngineOutput]:
        """Wait for and return all outputs since the last call, at least one. ApiError 500 when the
        engine is gone."""
        await self._event.wait()
        if not self._outputs and self._failed:
            raise engine_gone()
        outputs, self._outputs = self._outputs, []
        if not self._failed:
            self._event.clear()
        return outputs


def engine_gone() -> ApiError:
    """The client's answer when the engine's thread has ended by itself."""
    return ApiError(500, "the engine failed; this instance is going down", code="engine_failed")


_CANNOT_GO_ON = """the answer cannot go on as the schema, pattern or rules want it: \
they ask too much at this place, or for what no text fits; make them smaller"""


def failure_answer(kind: ErrorKind, grammar_field: str = "") -> ApiError:
    """The client's answer to an engine's error: no internals. `grammar_field`: see Job."""
    match kind:
        case "busy":
            return ApiError(503, "too many requests are waiting", retry_after_s=1)
        case "too_long":
            message = "the request needs more KV cache than this instance has"
            return ApiError(400, message, code="context_length_exceeded")
        case "kv_failed":
            message = "the KV cache of this request did not arrive"
            return ApiError(503, message, code="kv_transfer_failed", retry_after_s=1)
        case "grammar":
            message = f"{grammar_field}: {_CANNOT_GO_ON}"
            return ApiError(400, message, param=grammar_field, code="grammar_failed")
        case "replica_lost":
            message = "the replica that had the request was lost; another one can serve it"
            return ApiError(503, message, code="replica_lost", retry_after_s=1)
        case "internal":
            return ApiError(500, "the engine could not run this request", code="engine_failed")
        case "":
            return ApiError(503, "this instance is stopping", retry_after_s=1)


class ServedEngine(Protocol):
    """What serves requests: an EngineCore, or several behind a ReplicatedEngine, whose docstrings
    say what each call does. Any thread."""

    def submit(self, request: EngineRequest) -> None: ...

    def abort(self, request_id: str, choices: tuple[int, ...] | None = None) -> None: ...

    def kv_offered(self, key: TransferKey) -> OfferedPrompt | None: ...

    def kv_release(self, uuid: str) -> None: ...

    def reset_prefix_cache(self, done: Callable[[bool], None]) -> None: ...

    def stats(self) -> EngineStats: ...


class _Open(NamedTuple):
    """A request in the engine: where its outputs go, and when they came."""

    mailbox: Mailbox
    times: RequestTimes


class EngineBridge:
    """Requests to the engine, outputs back to the request's mailbox."""

    def __init__(
        self, metrics: RequestMetrics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Call `bind` before the engine starts. `clock` is the engine's, and safe on any thread."""
        self._metrics = metrics
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._engine: ServedEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gone = False

    def bind(self, engine: ServedEngine) -> None:
        """Serve `engine` on the running loop."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    @property
    def engine(self) -> ServedEngine:
        """The engine bound."""
        if self._engine is None:
            raise RuntimeError("EngineBridge.bind was not called")
        return self._engine

    @property
    def open_requests(self) -> int:
        """Prompts handed to the engine that have not finished."""
        return len(self._open)

    def deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """Called by the engine, on its thread."""
        if self._loop is not None and not self._loop.is_closed():
            # Stamped here: the loop may be late, and then the gaps would be its own.
            self._loop.call_soon_threadsafe(self._receive, tuple(outputs), self._clock())

    def _receive(self, outputs: Sequence[EngineOutput], now_s: float) -> None:
        for output in outputs:
            request = self._open.get(output.request_id)
            if request is None:  # aborted meanwhile
                continue
            request.times.take(output, now_s)
            if output.finished:
                if not output.error:
                    request.times.finish()
                del self._open[output.request_id]
            request.mailbox.put(output)

    def submit(self, request: EngineRequest, mailbox: Mailbox) -> RequestTimes:
        """Queue `request`; its outputs go to `mailbox`. ApiError 500 when the engine is gone."""
        if self._gone:
            raise engine_gone()
        times = RequestTimes(
            self._metrics, submitted_s=self._clock(), prompt_tokens=len(request.prompt)
        )
        self._open[request.request_id] = _Open(mailbox, times)
        self.engine.submit(request)
        return times

    def end(self, request_id: str, choices: tuple[int, ...]) -> None:
        """A request's last choices ended in their text (a stop string): it counts as stopped. No
        output of it reaches its mailbox any more."""
        request = self._open.pop(request_id, None)
        if request is not None and not self._gone:
            request.times.finish()
            self.engine.abort(request_id, choices)

    def abort(self, request_id: str) -> None:
        """End a request; no output of it reaches its mailbox any more."""
        if self._open.pop(request_id, None) is not None and not self._gone:
            self.engine.abort(request_id)

    def abort_choices(self, request_id: str, choices: tuple[int, ...]) -> None:
        """End some choices of a request; on P also such as ended by length here."""
        if not self._gone:
            self.engine.abort(request_id, choices)

    def fail(self) -> None:
        """The engine's thread has ended: wake all waiters, refuse what comes."""
        self._gone = True
        for request in self._open.values():
            request.mailbox.fail()
        self._open.clear()

    def offered(self, key: TransferKey) -> OfferedPrompt | None:
        """The prompt that P offered under `key`."""
        return None if self._gone else self.engine.kv_offered(key)

    def release(self, uuid: str) -> None:
        """Free KV received for `uuid`."""
        if not self._gone:
            self.engine.kv_release(uuid)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes that no request holds; whether none is left. ApiError 503 when the
        engine does not get to it in time, 500 when it is gone."""
        if self._gone:
            raise engine_gone()
        late = "the engine is busy with a step"
        return await called_back(self.engine.reset_prefix_cache, within_s=_RESET_S, late=late)

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self.engine.stats()

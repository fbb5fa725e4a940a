"""Between the engine's thread and the server's event loop: outputs in, mailboxes out.

The engine's thread calls `deliver` once per step; that is one wake-up of the loop. All else here
runs on the loop. A mailbox belongs to one HTTP request; while its client does not read, its outputs
pile up in it (at most the request's own tokens) and are taken together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from xpyd_core.errors import ApiError
from xpyd_core.request_id import TransferKey
from xpyd_kv.values import OfferedPrompt
from xpyd_worker.engine.api import Engine
from xpyd_worker.engine.request import EngineRequest, EngineStats, RequestOutput
from xpyd_worker.server.latency import RequestFigures, RequestTimes

# The engine takes it in between two steps; one of a large prompt takes seconds on a CPU.
_RESET_S = 30.0


class Mailbox:
    """Outputs of one HTTP request's prompts that were not taken yet. Loop only."""

    def __init__(self) -> None:
        self._outputs: list[RequestOutput] = []
        self._event = asyncio.Event()
        self._failed = False

    def put(self, output: RequestOutput) -> None:
        """Add one output."""
        self._outputs.append(output)
        self._event.set()

    def fail(self) -> None:
        """No output will come any more: the engine is gone."""
        self._failed = True
        self._event.set()

    async def take(self) -> list[RequestOutput]:
        """All outputs since the last call, at least one. ApiError 500 when the engine is gone."""
        await self._event.wait()
        if not self._outputs and self._failed:
            raise engine_gone()
        outputs, self._outputs = self._outputs, []
        if not self._failed:
            self._event.clear()
        return outputs


def engine_gone() -> ApiError:
    """What a client is told when the engine's thread has ended by itself."""
    return ApiError(500, "the engine failed; this instance is going down", code="engine_failed")


class _Open:
    """A request in the engine: where its outputs go, and when they came."""

    __slots__ = ("mailbox", "times")

    def __init__(self, mailbox: Mailbox, times: RequestTimes) -> None:
        self.mailbox = mailbox
        self.times = times


class EngineBridge:
    """Requests to the engine, outputs back to the request's mailbox."""

    def __init__(
        self, figures: RequestFigures, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Call `bind` before the engine starts. `clock` is the engine's, and safe on any thread."""
        self._figures = figures
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gone = False

    def bind(self, engine: Engine) -> None:
        """Serve `engine` on the running loop."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    @property
    def engine(self) -> Engine:
        """The engine bound."""
        if self._engine is None:
            raise RuntimeError("EngineBridge.bind was not called")
        return self._engine

    @property
    def open_requests(self) -> int:
        """Prompts handed to the engine that have not finished."""
        return len(self._open)

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Called by the engine, on its thread."""
        if self._loop is not None and not self._loop.is_closed():
            # Stamped here: the loop may be late, and then the gaps would be its own.
            self._loop.call_soon_threadsafe(self._receive, tuple(outputs), self._clock())

    def _receive(self, outputs: Sequence[RequestOutput], now_s: float) -> None:
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
            self._figures, submitted_s=self._clock(), prompt_tokens=len(request.prompt)
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
        """The engine's thread has ended: wake all who wait, refuse what comes."""
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
        """Forget cached prefixes that nobody holds; whether none is left. ApiError 503 when the
        engine does not get to it in time, 500 when it is gone."""
        if self._gone:
            raise engine_gone()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool] = loop.create_future()

        def settle(empty: bool) -> None:
            if not answer.done():
                answer.set_result(empty)

        def done(empty: bool) -> None:  # On the engine's thread.
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, empty)

        self.engine.reset_prefix_cache(done)
        try:
            return await asyncio.wait_for(answer, _RESET_S)
        except TimeoutError as error:
            raise ApiError(503, "the engine is busy with a step", retry_after_s=1) from error

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self.engine.stats()

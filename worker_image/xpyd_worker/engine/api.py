"""The seam between the server (asyncio) and the engine (its own thread). Documented here only.

Every method may be called from any thread and returns at once, but for `start` and `stop`. Outputs
are handed to `deliver`, once per step, on the engine's thread: the server moves them to its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from xpyd_core.request_id import TransferKey
from xpyd_kv.values import OfferedPrompt
from xpyd_worker.engine.request import EngineRequest, EngineStats, RequestOutput

Deliver = Callable[[Sequence[RequestOutput]], None]


class Engine(Protocol):
    """One engine: its queue, its loop, its KV cache."""

    def start(self) -> None:
        """Start the engine's thread."""
        ...

    def stop(self, deadline_s: float) -> None:
        """Abort what runs and end the thread within `deadline_s`."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Its last output has `finished` set, whatever happens."""
        ...

    def abort(self, request_id: str, choices: tuple[int, ...] | None = None) -> None:
        """End a request, or some of its choices (a stop string was found; they count as `stop`).
        No output follows for them, but those of steps that already ran. When no choice is left a
        last output without choices has `finished` set; it does not come when the whole request is
        aborted. Unknown requests are ignored. On P, choices that ended by `length` may still be
        named: when all are, and `cancel_when_done` was set, their transfer is cancelled."""
        ...

    def kv_offered(self, key: TransferKey) -> OfferedPrompt | None:
        """The prompt that P offered under `key`, if its OFFER has come."""
        ...

    def kv_release(self, uuid: str) -> None:
        """Free KV received for `uuid` and refuse more of it (docs: release)."""
        ...

    def reset_prefix_cache(self, done: Callable[[bool], None]) -> None:
        """Forget cached prefixes that no request and no transfer holds, before the next step.
        `done` is told whether none is left, on the engine's thread; False at once, on the caller's,
        when the engine has ended."""
        ...

    def stats(self) -> EngineStats:
        """A copy of the counters and gauges."""
        ...

    def is_idle(self) -> bool:
        """No request is queued or running, no KV is held for or on its way to an instance."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """Why the engine's thread ended by itself; None while it runs. The process then exits."""
        ...

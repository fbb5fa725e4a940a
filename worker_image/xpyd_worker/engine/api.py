"""The seam between the server (asyncio) and the engine (its own thread). Documented here only.

Every method may be called from any thread and returns at once, but for `start` and `stop`. Outputs
are handed to `deliver`, once per step, on the engine's thread: the server moves them to its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.api import OfferedPrompt
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
        """End a request, or some of its choices (a stop string was found). No output follows for
        them; unknown or finished ones are ignored."""
        ...

    def kv_offered(self, key: TransferKey) -> OfferedPrompt | None:
        """The prompt that P offered under `key`, if its OFFER has come."""
        ...

    def kv_release(self, uuid: str) -> None:
        """Free KV received for `uuid` and refuse more of it (docs: release)."""
        ...

    def stats(self) -> EngineStats:
        """A copy of the counters and gauges."""
        ...

    def is_idle(self) -> bool:
        """No request is queued or running and no KV is held for or on its way to another instance."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """Why the engine's thread ended by itself; None while it runs. The process then exits."""
        ...

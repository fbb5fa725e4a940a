"""What P does while D's slowness costs it too much of its cache. Engine thread only.

Blocks of computed prompts whose transfers are not over may be at most a share of all. Over that,
in GET, the oldest prompt that D has not pulled moves to memory beside the cache and is sent from
there; where that is full, and in the other modes, the oldest is given up and D computes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.api import BlockPool
from xpyd_kv.connector.offered import Prompt
from xpyd_kv.device.api import Event
from xpyd_kv.session.limits import KvLimits
from xpyd_kv.session.metrics import KvMetrics
from xpyd_kv.session.sending import SendSession
from xpyd_kv.store.api import Store


class Pressure:
    """Keeps the bound. `store` None: there is no memory beside the cache to move to. `call_after`:
    to the session, for that prompt, when a device is through with what the event says."""

    def __init__(
        self,
        *,
        call_after: Callable[[Event | None, Prompt, Callable[[], None]], None],
        session: SendSession,
        pool: BlockPool,
        limits: KvLimits,
        store: Store | None,
        metrics: KvMetrics,
    ) -> None:
        self._call_after = call_after
        self._session = session
        self._pool = pool
        self._limits = limits
        self._store = store
        self._metrics = metrics

    def relieve(
        self, prompts: Iterable[Prompt], cancel: Callable[[TransferKey, str], None]
    ) -> None:
        """Bring the held blocks under the bound. `prompts`: all that are not settled, the oldest
        first."""
        if self._store is not None:
            self._store.poll()
        waiting = [p for p in prompts if p.computed and not p.cancelled and not p.stash]
        holders = Counter(block for prompt in waiting for block in prompt.held)
        limit = int(self._pool.num_blocks * self._limits.max_held_share)
        while waiting and len(holders) > limit:
            leaving = self._spill(waiting)
            if leaving is None:
                leaving = waiting[0]
                self._metrics.pressure_cancels += 1
                cancel(leaving.key, "pressure")
            waiting.remove(leaving)
            # Its blocks come back when the session has answered.
            holders -= Counter(leaving.held)

    def on_stashed(self, prompt: Prompt, *, taken: bool) -> None:
        """The session's answer."""
        if taken:
            held, prompt.held = prompt.held, []
            self._pool.release(held)
            if prompt.stash is not None:
                self._metrics.spilled[prompt.stash.kind] += 1
                self._metrics.spilled_bytes += prompt.stash.size_bytes
        elif prompt.stash is not None:
            prompt.stash.free()
            prompt.stash = None
            prompt.stays = True

    def _spill(self, waiting: Sequence[Prompt]) -> Prompt | None:
        """Copy the oldest prompt that D has not pulled; None when there is none, or no room."""
        prompt = next((p for p in waiting if not (p.granted or p.stays)), None)
        if prompt is None or self._store is None:
            return None
        stash = self._store.take_beside(prompt.key, prompt.num_blocks)
        if stash is None:
            return None
        prompt.stash = stash
        event = stash.fill(prompt.held)
        stashed = partial(self._session.stash, prompt.key, prompt.epoch, stash)
        self._call_after(event, prompt, stashed)
        return prompt

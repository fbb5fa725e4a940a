"""The registry as the asyncio side uses it: changes can be waited for, calls to the dead end.

One object per router, used in one event loop. `discovery` writes, `flow` reads.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from xpyd_core.messages import Heartbeat
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.registry import Instance, InstanceKey, Outcome, Registry, Snapshot

_MAX_LOST = 1024


class FleetView:
    """Owner of the registry. `clock` is monotonic seconds. Beats write into `loads`."""

    def __init__(
        self, registry: Registry, clock: Callable[[], float], loads: LoadTable | None = None
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._loads = LoadTable() if loads is None else loads
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[Iterable[InstanceKey]], None]] = []
        self._forgetting: list[Callable[[InstanceKey], None]] = []
        self._lost: OrderedDict[InstanceKey, None] = OrderedDict()

    @property
    def snapshot(self) -> Snapshot:
        """Who can be picked now."""
        return self._registry.snapshot

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Everyone, with the figures of the last beat."""
        return self._registry.instances

    @property
    def now_s(self) -> float:
        """The clock that beats are measured with."""
        return self._clock()

    def apply(self, beat: Heartbeat) -> Outcome:
        """Take one beat; ProtocolError for one with an unusable address."""
        before = self._registry.snapshot
        outcome, dead = self._registry.apply(beat, self._clock())
        key = InstanceKey(str(beat.http), beat.incarnation)
        if outcome == "new":
            self._lost.pop(key, None)
        if outcome in ("new", "refreshed", "replaced"):
            self._loads.take(key, beat)
        self._lose(dead)
        self._tell(before)
        return outcome

    def expire(self) -> tuple[InstanceKey, ...]:
        """Remove who missed its beats, and end the calls that wait for it."""
        before = self._registry.snapshot
        gone = self._registry.expire(self._clock())
        self._lose(gone)
        self._tell(before)
        return gone

    def suspend(self, instance: Instance) -> bool:
        """Pick it no more until its next beat; whether that changed anything."""
        before = self._registry.snapshot
        changed = self._registry.suspend(instance.key)
        self._tell(before)
        return changed

    async def wait_change(self, timeout_s: float) -> bool:
        """Wait until the snapshot is another one; False when `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def is_lost(self, key: InstanceKey) -> bool:
        """Whether the instance died or vanished a while ago."""
        return key in self._lost

    def on_lost(self, listener: Callable[[Iterable[InstanceKey]], None]) -> None:
        """Have `listener` called with those that die or vanish: calls to them will not end."""
        self._listeners.append(listener)

    def on_gone(self, forget: Callable[[InstanceKey], None]) -> None:
        """Have `forget` called with each that left the fleet, for whatever reason."""
        self._forgetting.append(forget)

    def _lose(self, keys: Sequence[InstanceKey]) -> None:
        if not keys:
            return
        for key in keys:
            self._lost[key] = None
            if len(self._lost) > _MAX_LOST:
                self._lost.popitem(last=False)
        for listener in self._listeners:
            listener(keys)

    def _tell(self, before: Snapshot) -> None:
        if self._registry.snapshot is before:
            return
        for key in self._loads.keep({instance.key for instance in self._registry.instances}):
            for forget in self._forgetting:
                forget(key)
        self._changed.set()
        self._changed = asyncio.Event()

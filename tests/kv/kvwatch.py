"""A store whose landings notice that they are given back while a write may land."""

from __future__ import annotations

from typing import Any

from xpyd_core.request_id import TransferKey
from xpyd_kv.memory.api import Landing
from xpyd_kv.memory.store import LandingStore


class WatchedStore(LandingStore):
    """Knows which views belong to a landing that was given back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ended: set[int] = set()

    def take(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        return self._watch(super().take(owner, num_blocks))

    def take_direct(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        return self._watch(super().take_direct(owner, num_blocks))

    def _watch(self, landing: Landing | None) -> Landing | None:
        # take() calls take_direct(): watched once.
        return landing if landing is None or isinstance(landing, Watched) else Watched(landing)


class Watched:
    def __init__(self, landing: Landing) -> None:
        self.inner = landing
        self.kind = landing.kind
        self.is_copying = False
        self.num_blocks = landing.num_blocks
        self.size_bytes = landing.size_bytes
        self.is_over = False
        self.writers = 0

    def views(self, *area: int) -> list[memoryview]:
        return [WatchedView.of(view, self) for view in self.inner.views(*area)]

    def adopt(self) -> list[int] | None:
        blocks = self.inner.adopt()
        if blocks is not None:
            self._over()
        return blocks

    def free(self) -> None:
        self.inner.free()
        self._over()

    def _over(self) -> None:
        assert not self.writers, "a landing was given back while a write may land"
        self.is_over = True


class WatchedView:
    """A view that remembers its landing: the sim tells it when a write begins and ends."""

    def __init__(self, view: memoryview, landing: Watched) -> None:
        self.view, self.landing = view, landing

    @staticmethod
    def of(view: memoryview, landing: Watched) -> Any:
        return WatchedView(view, landing)

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, part: slice) -> Any:
        return WatchedView(self.view[part], self.landing)

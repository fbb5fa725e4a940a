"""Memory that knows who may touch it: P's cache as a source, D's landings as targets.

A read of a block that P's pool has taken back, or of a spill that P has given back, and a write
into a landing that D has given back, end the run. So does giving a landing back while a frame is
being written into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.kv.kvfakes import FakeKvMemory, FakePool, is_expected
from xpyd_core.request_id import TransferKey
from xpyd_kv.memory.api import KvMemory, Landing
from xpyd_kv.memory.space import OwnSpace
from xpyd_kv.memory.store import LandingStore, StagedLanding, StoreLimits
from xpyd_kv.values import BlockPool, KvLayout


class SourceView:
    """One block of one layer of P's cache, as the endpoint reads it."""

    def __init__(self, view: memoryview, block: int, pool: FakePool) -> None:
        self._view, self._block, self._pool = view, block, pool

    def __len__(self) -> int:
        return len(self._view)

    def read(self) -> memoryview:
        assert self._pool.references[self._block], f"P reads block {self._block}, which is free"
        return self._view


class SourceMemory:
    """KvMemory of a P; what it hands out checks each read."""

    def __init__(self, num_blocks: int, pool: FakePool) -> None:
        self.bytes = FakeKvMemory(num_blocks)
        self.layout = self.bytes.layout
        self.device = None
        self._pool = pool

    def block_view(self, layer: int, block_id: int) -> SourceView:
        return SourceView(self.bytes.block_view(layer, block_id), block_id, self._pool)

    def views(self, layers: Sequence[int], block_ids: Sequence[int]) -> list[SourceView]:
        return [self.block_view(layer, block) for layer in layers for block in block_ids]

    def written(self) -> None:
        """Always."""


class SpillView:
    """Part of a spill, as the endpoint reads it."""

    def __init__(self, view: memoryview, spill: WatchedSpill) -> None:
        self._view, self._spill = view, spill

    def __len__(self) -> int:
        return len(self._view)

    def read(self) -> memoryview:
        assert not self._spill.is_over, f"P reads a spill of {self._spill.owner} that is given back"
        return self._view


class TargetView:
    """Part of a landing, as the endpoint writes it."""

    def __init__(self, view: memoryview, landing: WatchedLanding) -> None:
        self.view, self.landing = view, landing

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, part: slice) -> TargetView:
        return TargetView(self.view[part], self.landing)


class WatchedLanding:
    """A landing, and what has become of it. `tag` names the KV that was granted to land here: of a
    prompt of `tokens`, from the block `first_block` on."""

    def __init__(
        self, inner: Landing, owner: TransferKey, layout: KvLayout, on_over: Callable[[], None]
    ) -> None:
        self.inner = inner
        self.owner = owner
        self.kind = inner.kind
        self.num_blocks = inner.num_blocks
        self.size_bytes = inner.size_bytes
        self.is_copying = False
        self.is_over = False
        self.is_adopted = False
        self.writers = 0
        self.epoch = -1
        self.tag: int | None = None
        self.first_block = 0
        self.tokens = 0
        self._layout = layout
        self._on_over = on_over

    def views(self, *area: int) -> list[TargetView]:
        return [TargetView(view, self) for view in self.inner.views(*area)]

    def holds(self, tag: int) -> bool:
        """Whether every byte of the prompt's tokens is of the KV named `tag`."""
        return all(
            is_expected(
                b"".join(self.inner.views(layer, layer + 1, at, at + 1)),
                tag,
                layer,
                self.first_block + at,
                self._layout,
                self.tokens,
            )
            for layer in range(len(self._layout.layers))
            for at in range(self.num_blocks)
        )

    def adopt(self, skip_blocks: int = 0) -> list[int] | None:
        self._check()
        blocks = self.inner.adopt(skip_blocks)
        if blocks is not None:
            self.is_adopted = True
            self._over()
        return blocks

    def free(self) -> None:
        self._check()
        self.inner.free()
        self._over()

    def _check(self) -> None:
        assert not self.writers, f"the landing of {self.owner} is given back during a write"

    def _over(self) -> None:
        self.is_over = True
        self._on_over()


class WatchedSpill:
    """KV that P has moved out of its blocks."""

    def __init__(self, inner: StagedLanding, owner: TransferKey, store: WatchedStore) -> None:
        self.inner = inner
        self.owner = owner
        self.kind = inner.kind
        self.num_blocks = inner.num_blocks
        self.size_bytes = inner.size_bytes
        self.is_over = False
        self._store = store
        store.spills[self] = None
        store.on_spilled()

    def fill(self, block_ids: Sequence[int]) -> None:
        references = self._store.block_pool.references
        assert len(block_ids) == self.num_blocks
        assert all(references[block] for block in block_ids), "P spills a block that is free"
        self.inner.fill(block_ids)

    def views(self, *area: int) -> list[SpillView]:
        return [SpillView(view, self) for view in self.inner.views(*area)]

    def free(self) -> None:
        self.inner.free()
        self.is_over = True
        del self._store.spills[self]


class WatchedStore(LandingStore):
    """The real store; remembers the landings and spills that are out."""

    def __init__(self, limits: StoreLimits, memory: KvMemory, pool: BlockPool) -> None:
        # A spill copies bytes; that their blocks are held is checked by WatchedSpill.
        self._is_p = isinstance(memory, SourceMemory)
        bytes_ = memory.bytes if isinstance(memory, SourceMemory) else memory
        super().__init__(limits, pool=pool, space=OwnSpace(bytes_, limits))
        assert isinstance(pool, FakePool)
        self.block_pool = pool
        self.layout = memory.layout
        self.out: dict[WatchedLanding, None] = {}
        self.spills: dict[WatchedSpill, None] = {}
        self.last_adopted: WatchedLanding | None = None
        self.on_taken: Callable[[TransferKey], None] = lambda owner: None
        self.on_spilled: Callable[[], None] = lambda: None
        self.on_given_back: Callable[[WatchedLanding], None] = lambda landing: None

    def take_staged(self, owner: TransferKey, num_blocks: int) -> Any:
        """Of a P, which alone asks for it, a spill."""
        inner = super().take_staged(owner, num_blocks)
        return WatchedSpill(inner, owner, self) if inner is not None and self._is_p else inner

    def take(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        return self._watch(super().take(owner, num_blocks), owner)

    def take_direct(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        return self._watch(super().take_direct(owner, num_blocks), owner)

    def youngest(self, owner: TransferKey) -> WatchedLanding | None:
        """The landing that was taken last for `owner` and is still out."""
        return next((one for one in reversed(self.out) if one.owner == owner), None)

    def _watch(self, landing: Landing | None, owner: TransferKey) -> Landing | None:
        # take() calls take_direct(): watched once.
        if landing is None or isinstance(landing, WatchedLanding):
            return landing

        def on_over() -> None:
            del self.out[watched]
            self.on_given_back(watched)
            if watched.is_adopted:
                self.last_adopted = watched

        watched = WatchedLanding(landing, owner, self.layout, on_over)
        self.out[watched] = None
        self.on_taken(owner)
        return watched  # type: ignore[return-value]


def joined(views: Sequence[SourceView | SpillView]) -> bytes:
    """The bytes of a DATA body, read now."""
    return b"".join(view.read() for view in views)


def written(views: Sequence[TargetView | memoryview]) -> bytes:
    """The bytes of a DATA body, where they landed."""
    return b"".join(view.view if isinstance(view, TargetView) else view for view in views)

"""An engine whose cache is divided over ranks, as its process sees it, and the seams to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from xpyd_core.errors import XpydError
from xpyd_core.request_id import Address
from xpyd_kv.memory.device import View
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.values import KvLayout
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.fit import wire_layout


class Channel(Protocol):
    """Ordered messages between the engine's process and one rank, lost only when one of the two has
    ended: then so does the instance."""

    def post(self, message: bytes) -> None:
        """From any thread; does not wait."""
        ...

    def listen(self, handle: Callable[[bytes], None]) -> None:
        """Call `handle` with each message of the other side, in order, on the channel's thread;
        once, before any `post` of the other side that matters. It must not block."""
        ...


@dataclass(frozen=True, kw_only=True)
class RankedEngine:
    """An engine whose cache is in other processes, its ranks, be it one. `layout` is all of the
    cache's, `channels` lead to the ranks, by their numbers. `on_device`: whether their caches are
    on GPUs."""

    layout: EngineLayout
    channels: Sequence[Channel]
    dtype: str
    head_dim: int
    on_device: bool = False


class RankedMemory:
    """A KvMemory of numbers only: what all ranks hold together, each layer and head once."""

    device = None

    def __init__(self, engine: RankedEngine) -> None:
        layout = engine.layout
        self.layout = KvLayout(
            layers=tuple(sorted(layer for stage in layout.stages for layer in stage)),
            kv_heads=layout.heads,
            head_dim=engine.head_dim,
            block_size=layout.block_size,
            dtype=engine.dtype,
            block_bytes=layout.heads * layout.block_size * layout.row_bytes,
        )

    def block_view(self, layer: int, block_id: int) -> View:
        """Raise XpydError: the bytes are in the processes of the ranks."""
        raise XpydError("the bytes are on the ranks")

    def views(self, layers: Sequence[int], block_ids: Sequence[int]) -> Sequence[View]:
        """Raise XpydError: the bytes are in the processes of the ranks."""
        raise XpydError("the bytes are on the ranks")

    def written(self) -> None:
        """Return None: each rank waits for its own model."""


def engine_of(layout: KvLayout, *, is_mla: bool = False) -> EngineLayout:
    """The engine of one rank that has this cache."""
    return EngineLayout(
        kv_heads=layout.kv_heads,
        tp=1,
        stages=(layout.layers,),
        block_size=layout.block_size,
        row_bytes=layout.block_bytes // (layout.kv_heads * layout.block_size),
        is_mla=is_mla,
    )


def engine_wire_layout(
    engine: RankedEngine,
    *,
    factors: dict[str, str],
    max_tokens: int,
    ranks: tuple[Address, ...] = (),
) -> wire.Layout:
    """Return the LAYOUT of the engine's process: its first rank's cache, and how all of it is
    divided."""
    layout = engine.layout
    of_first = KvLayout(
        layers=layout.layers_of(0),
        kv_heads=layout.heads_per_rank,
        head_dim=engine.head_dim,
        block_size=layout.block_size,
        dtype=engine.dtype,
        block_bytes=layout.block_bytes,
    )
    said = wire_layout(of_first, factors=factors, max_tokens=max_tokens, engine=layout, ranks=ranks)
    return msgspec.structs.replace(said, is_ranked=True)

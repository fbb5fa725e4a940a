"""Which two LAYOUTs go together, and what moves between the two sides of a connection. Pure.

What is to be equal beside the compatibility factors is the model's part of the shape: layers, KV
heads, the bytes of a token. How an engine cuts it is its own matter: the block size, and tensor and
pipeline ranks. Where the cache of one of two engines is in other processes, its ranks (be it one),
the first connection between the engines, the control connection, is their own: DATA goes over
connections between their ranks.
"""

from __future__ import annotations

import msgspec

from xpyd_core.request_id import Address
from xpyd_kv.plan.engine_layout import EngineLayout, LayoutError
from xpyd_kv.plan.pairs import Pair, pair_of
from xpyd_kv.plan.transfers import check_fit
from xpyd_kv.values import KvLayout
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.messages import Hello, Layout

_EQUAL = ("head_dim", "dtype")


def engines_of(source: Layout, destination: Layout) -> tuple[EngineLayout, EngineLayout]:
    """P's engine and D's. LayoutError names the field of LAYOUT by which the two do not fit."""
    for name in _EQUAL:
        if getattr(source, name) != getattr(destination, name):
            raise LayoutError(name, "P's and D's differ")
    engines = engine_layout_of(source), engine_layout_of(destination)
    check_fit(*engines)
    if destination.ranks and len(destination.ranks) != engines[1].num_ranks:
        text = f"{len(destination.ranks)} addresses for {engines[1].num_ranks} ranks"
        raise LayoutError("ranks", text)
    return engines


def is_ranked(source: Layout, destination: Layout) -> bool:
    """Whether DATA of these two engines goes between their ranks."""
    return _has_ranks(source) or _has_ranks(destination)


def _has_ranks(layout: Layout) -> bool:
    """Whether the cache is in other processes than the one that says LAYOUT."""
    return layout.is_ranked or layout.tp > 1 or len(layout.stages) > 1


def pair_on(source: Layout, destination: Layout, *, dialler: Hello, acceptor: Hello) -> Pair | None:
    """Return the pair of ranks whose DATA moves on a connection of these two; None on a control
    connection, which has none. LayoutError where they do not fit."""
    engines = engines_of(source, destination)
    if not dialler.data:
        if is_ranked(source, destination):
            if _has_ranks(destination) and not destination.ranks:
                raise LayoutError("ranks", "D's take DATA, and D says nothing of where they are")
            return None
        return pair_of(*engines, source_rank=0, destination_rank=0)
    pair = pair_of(*engines, source_rank=dialler.rank, destination_rank=acceptor.rank)
    for engine, rank, layout in (
        (engines[0], dialler.rank, source),
        (engines[1], acceptor.rank, destination),
    ):
        if layout.layers != engine.layers_of(rank):
            raise LayoutError("rank", f"the layers are not those of rank {rank}")
    return pair


def engine_layout_of(layout: Layout) -> EngineLayout:
    """The engine behind a rank's LAYOUT; LayoutError for fields that do not go together."""
    row_bytes, rest = divmod(layout.block_bytes, max(1, layout.kv_heads * layout.block_size))
    if rest or not row_bytes:
        raise LayoutError("block_bytes", f"{layout.block_bytes}; must be a multiple of its rows")
    stages = layout.stages or (layout.layers,)
    engine = EngineLayout(
        kv_heads=layout.total_kv_heads or layout.kv_heads,
        tp=layout.tp,
        stages=stages,
        block_size=layout.block_size,
        row_bytes=row_bytes,
        is_mla=layout.is_mla,
    )
    if layout.kv_heads != engine.heads_per_rank:
        text = f"{layout.kv_heads} on a rank; {engine.heads} over {engine.tp} ranks are others"
        raise LayoutError("kv_heads", text)
    if layout.layers not in stages:
        raise LayoutError("layers", "those of the rank are no stage of its engine")
    return engine


def wire_layout(
    layout: KvLayout,
    *,
    factors: dict[str, str],
    max_tokens: int,
    max_data_bytes: int = wire.DEFAULT_MAX_DATA_BYTES,
    engine: EngineLayout | None = None,
    ranks: tuple[Address, ...] = (),
) -> wire.Layout:
    """The LAYOUT frame for a rank's cache: what an endpoint says of it. `max_tokens`: longest
    prompt; `max_data_bytes`: longest frame that it takes; `engine`: of a rank that is not the only
    one; `ranks`: where a D's are."""
    said = wire.Layout(
        factors=factors,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
        block_bytes=layout.block_bytes,
        max_tokens=max_tokens,
        max_data_bytes=max_data_bytes,
        ranks=tuple(map(str, ranks)),
    )
    if engine is None:
        return said
    return msgspec.structs.replace(
        said,
        total_kv_heads=engine.kv_heads,
        tp=engine.tp,
        stages=engine.stages,
        is_mla=engine.is_mla,
    )

"""What an endpoint says of its cache: LAYOUT, of the only rank, of one of several, of an engine."""

from __future__ import annotations

import msgspec

from xpyd_core.request_id import Address
from xpyd_kv.connector.api import KvLayout
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.ranks.engine import RankedEngine
from xpyd_kv.wire import messages as wire


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


def engine_wire_layout(
    engine: RankedEngine,
    *,
    factors: dict[str, str],
    max_tokens: int,
    ranks: tuple[Address, ...] = (),
) -> wire.Layout:
    """What the engine's process says: its first rank's cache, and how all of it is divided."""
    layout = engine.layout
    of_first = KvLayout(
        layers=layout.layers_of(0),
        kv_heads=layout.heads_per_rank,
        head_dim=engine.head_dim,
        block_size=layout.block_size,
        dtype=engine.dtype,
        block_bytes=layout.block_bytes,
    )
    return wire_layout(of_first, factors=factors, max_tokens=max_tokens, engine=layout, ranks=ranks)

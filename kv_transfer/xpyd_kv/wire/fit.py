"""Which two LAYOUTs go together, and the plan between them. Pure.

What is to be equal beside the compatibility factors is the model's part of the shape: layers, KV
heads, the bytes of a token. How an engine cuts it is its own matter: the block size, and tensor and
pipeline ranks, which this version can describe but not yet connect.
"""

from __future__ import annotations

from xpyd_kv.plan.engine_layout import EngineLayout, LayoutError
from xpyd_kv.plan.transfers import TransferPlan, plan_transfers
from xpyd_kv.wire.messages import Layout

_EQUAL = ("head_dim", "dtype")


def plan_between(source: Layout, destination: Layout) -> TransferPlan:
    """The plan from P's rank to D's. LayoutError names the field of LAYOUT by which the two do not
    fit."""
    for name in _EQUAL:
        if getattr(source, name) != getattr(destination, name):
            raise LayoutError(name, "P's and D's differ")
    engines = engine_layout_of(source), engine_layout_of(destination)
    plan = plan_transfers(*engines)
    for engine in engines:
        if engine.num_ranks > 1:
            name = "tp" if engine.tp > 1 else "stages"
            raise LayoutError(name, f"{engine.num_ranks} ranks; this version connects one to one")
    return plan


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

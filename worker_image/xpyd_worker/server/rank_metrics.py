"""The ranks of an engine as samples for `/metrics`. One that is a single process shows none."""

from __future__ import annotations

from collections.abc import Iterable

from xpyd_worker.ranks.metrics import RankFigures
from xpyd_worker.server.samples import Sample

_PREFIX = "xpyd_engine_rank_"


def rank_samples(ranks: Iterable[RankFigures]) -> Iterable[Sample]:
    """All `xpyd_engine_rank_*`."""
    for one in ranks:
        labels = (("rank", str(one.rank)), ("stage", str(one.stage)), ("tensor", str(one.tensor)))
        for name, kind, text, value in (
            ("up", "gauge", "1 while the rank gives signs of life", one.is_up),
            ("steps", "counter", "Steps that it has launched", one.steps),
            ("processor_seconds", "counter", "What its threads computed", one.processor_s),
            ("weight_bytes", "gauge", "Its weights", one.weight_bytes),
            ("kv_cache_bytes", "gauge", "Its KV cache", one.cache_bytes),
            ("kv_blocks_fit", "gauge", "KV blocks that it has room for", one.blocks_fit),
        ):
            yield Sample(_PREFIX + name, kind, text, float(value), labels)

"""KV between ranks on GPUs, from any layout to any layout and to and from ranks on CPUs: every byte
where D's ranks look, over every transport, and nothing that events do not order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kv.test_ranks_pairs import IDS, LAYOUTS, engines, is_back, move
from tests.worker.rank_pair import Pair

layouts = pytest.mark.parametrize("name", LAYOUTS)


@layouts
@pytest.mark.parametrize("on_gpu", ["PD", "P", "D"])
def test_every_byte_arrives_for_any_pair_of_layouts(
    tmp_path: Path, name: str, on_gpu: str
) -> None:
    pair = Pair(tmp_path, on_gpu=on_gpu)
    with pair.of(*engines(name), kv_direct_free=0.0) as (p, d):
        for number in range(1, 3):
            landed = move(p, d, number=number, cached=4 if number == 2 else 0)
            assert landed.tokens == len(IDS)
            assert d.holds(landed.block_ids, IDS[0], len(IDS))
            d.pool.release(landed.block_ids)
        assert is_back(p.pool)
        assert is_back(d.pool)
        assert p.kv.metrics.transfers == d.kv.metrics.transfers == {"done": 2}
        assert set(d.kv.metrics.transfer_s) == {"tcp"}

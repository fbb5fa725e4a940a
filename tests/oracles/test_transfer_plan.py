"""The articles' numbers 7, 8, 14, 15 and 16 as far as the transfer plan has them.

7 one communicator per P rank and D rank of the same place, and a second transfer makes no new one;
8 how many a device holds in 96P144D; 14 to 16 the bytes of a prompt's KV and of a block.
"""

from __future__ import annotations

import pytest

from tests.kv.plan_oracle import plan_transfers
from xpyd_kv.plan.engine_layout import EngineLayout

LLAMA_70B = 80
LLAMA_8B = 32
GB = 10**9


def _llama(
    layers: int, *, tp: int = 1, pp: int = 1, block_size: int = 16, is_mla: bool = False
) -> EngineLayout:
    """8 KV heads, 128 wide, 16 bit."""
    per_stage = layers // pp
    stages = tuple(tuple(range(s * per_stage, (s + 1) * per_stage)) for s in range(pp))
    return EngineLayout(
        kv_heads=8,
        tp=tp,
        stages=stages,
        block_size=block_size,
        row_bytes=2 * 128 * 2,
        is_mla=is_mla,
    )


def _rank_pairs(p: EngineLayout, d: EngineLayout, transfers: int) -> set[tuple[int, int]]:
    """The pairs of ranks that talk in so many transfers: each needs one communicator."""
    plans = [plan_transfers(p, d, salt=salt) for salt in range(transfers)]
    return {(s.source, s.destination) for plan in plans for s in plan.segments}


@pytest.mark.parametrize(
    ("p", "d", "tp", "groups"), [(1, 2, 2, 7), (1, 3, 1, 3), (3, 1, 1, 3), (2, 2, 8, 36)]
)
@pytest.mark.parametrize("is_mla", [False, True], ids=["gqa", "mla"])
def test_a_communicator_for_each_pair_of_ranks_of_one_place_and_later_transfers_make_none(
    p: int, d: int, tp: int, groups: int, is_mla: bool
) -> None:
    """Article fact 7."""
    engine = _llama(LLAMA_8B, tp=tp, is_mla=is_mla)
    pairs = _rank_pairs(engine, engine, transfers=100)
    assert pairs == {(place, place) for place in range(tp)}
    tp_groups = p + d if tp > 1 else 0
    assert p * d * len(pairs) + tp_groups == groups


def test_in_96p144d_a_p_device_holds_144_communicators_and_a_d_device_96() -> None:
    """Article fact 8."""
    pairs = _rank_pairs(_llama(LLAMA_8B), _llama(LLAMA_8B), transfers=100)
    of_p = 144 * len({d for s, d in pairs if s == 0})
    of_d = 96 * len({s for s, d in pairs if d == 0})
    assert (of_p, of_d, 96 * 144 * len(pairs)) == (144, 96, 13_824)


@pytest.mark.parametrize(
    ("tp_p", "pp_p", "tp_d", "pp_d"), [(1, 1, 1, 1), (8, 1, 2, 4), (2, 2, 8, 1)]
)
@pytest.mark.parametrize(
    ("layers", "tokens", "prompt_bytes"),
    [
        (LLAMA_70B, 1_000, 327_680_000),
        (LLAMA_8B, 1_024, 134_217_728),
        (LLAMA_8B, 10_000, 1_310_720_000),
    ],
)
def test_the_planned_bytes_of_a_prompt_are_the_same_for_any_split(
    tp_p: int, pp_p: int, tp_d: int, pp_d: int, layers: int, tokens: int, prompt_bytes: int
) -> None:
    """Article facts 14 and 16."""
    p = _llama(layers, tp=tp_p, pp=pp_p, block_size=8)
    plan = plan_transfers(p, _llama(layers, tp=tp_d, pp=pp_d))
    everything = plan.unit_bytes
    assert len(plan.units(tokens)) * everything == prompt_bytes


def test_bytes_per_token_and_what_they_make_of_a_link_and_a_buffer() -> None:
    """Article facts 14 and 16."""
    big, small = (
        plan_transfers(_llama(layers, block_size=1), _llama(layers)).unit_bytes
        for layers in (LLAMA_70B, LLAMA_8B)
    )
    assert (big, small) == (327_680, 131_072)
    assert round(1_000 * big / (12.5 * GB) * 1_000, 1) == 26.2
    assert 8 * GB // small == 61_035


def test_a_block_of_one_layer_has_65536_bytes() -> None:
    """Article fact 15."""
    assert _llama(LLAMA_8B).block_bytes == 65_536

"""Which rank of P sends what to which rank of D, against the brute-force oracle."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.plan_oracle import (
    TransferPlan,
    holdings,
    layout_pairs,
    plan_transfers,
    planned_cells,
    planned_heads,
    source_load,
    wanted_cells,
)
from xpyd_core.request_id import TransferKey
from xpyd_kv.plan.engine_layout import MAX_RANKS, EngineLayout, LayoutError
from xpyd_kv.plan.transfers import transfer_salt
from xpyd_kv.wire.messages import Layout

Pair = tuple[EngineLayout, EngineLayout]
SALTS = st.integers(0, 2**128 + 65535)


def between(plan: TransferPlan, source: int, destination: int) -> frozenset[int]:
    """Indices of the segments of a pair of ranks. Empty: 0 expected, and no connection."""
    return plan.leaving(source) & plan.arriving(destination)


def _engine(
    tp: int = 1,
    *,
    kv_heads: int = 8,
    stages: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),),
    block_size: int = 16,
    row_bytes: int = 512,
    is_mla: bool = False,
) -> EngineLayout:
    return EngineLayout(
        kv_heads=kv_heads,
        tp=tp,
        stages=stages,
        block_size=block_size,
        row_bytes=row_bytes,
        is_mla=is_mla,
    )


def _cut(layers: int, stages: int, *, uneven: bool) -> tuple[tuple[int, ...], ...]:
    """As a PP partition cuts them; uneven: the first stage has one more, the last one less."""
    counts = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    if uneven and stages > 1:
        counts[0] += 1
        counts[-1] -= 1
    edges = [0, *itertools.accumulate(counts)]
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges))


# --- coverage


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_every_layer_and_head_comes_once_from_an_owner_in_800_layouts_of_powers_of_two(
    kv_heads: int,
) -> None:
    degrees, depths = (1, 2, 4, 8, 16), (1, 2, 3, 4)
    seen = 0
    for tp_p, tp_d, pp_p, pp_d, uneven in itertools.product(
        degrees, degrees, depths, depths, (False, True)
    ):
        p = _engine(tp_p, kv_heads=kv_heads, stages=_cut(13, pp_p, uneven=uneven))
        d = _engine(tp_d, kv_heads=kv_heads, stages=_cut(13, pp_d, uneven=False))
        plan = plan_transfers(p, d, salt=seen)
        assert planned_heads(plan) == wanted_cells(d, range(1))
        if tp_d >= tp_p:
            # Equally much from each rank of a stage: max / mean of the source load is 1.
            load = [
                sent / len(layers)
                for sent, (layers, _) in zip(source_load(plan), holdings(p), strict=True)
            ]
            assert max(load) == min(load)
        seen += 1
    assert seen == 800


@settings(max_examples=300, deadline=None)
@given(pair=layout_pairs(), salt=SALTS, data=st.data())
def test_every_token_of_every_head_and_layer_comes_once_from_an_owner(
    pair: Pair, salt: int, data: st.DataObject
) -> None:
    p, d = pair
    unit = min(p.block_size, d.block_size)
    tokens = data.draw(st.integers(1, 5 * unit))
    skip = unit * data.draw(st.integers(0, (tokens - 1) // unit))
    end = -(-tokens // unit) * unit
    plan = plan_transfers(p, d, salt=salt)
    assert planned_cells(plan, tokens, skip) == wanted_cells(d, range(skip, end))


@given(pair=layout_pairs())
def test_a_rank_of_the_layout_holds_what_the_tables_say(pair: Pair) -> None:
    for side in pair:
        announced = [(side.layers_of(r), list(side.heads_of(r))) for r in range(side.num_ranks)]
        assert announced == holdings(side)


@given(pair=layout_pairs(), salt=SALTS)
def test_each_segment_is_of_one_pair_of_ranks_and_each_rank_of_d_waits_for_some(
    pair: Pair, salt: int
) -> None:
    p, d = pair
    plan = plan_transfers(p, d, salt=salt)
    assert all(plan.arriving(rank) for rank in range(d.num_ranks))
    shares = {(s, r): between(plan, s, r) for s in range(p.num_ranks) for r in range(d.num_ranks)}
    assert Counter(i for share in shares.values() for i in share) == Counter(
        dict.fromkeys(range(len(plan.segments)), 1)
    )
    for (source, destination), share in shares.items():
        meets = set(p.layers_of(source)) & set(d.layers_of(destination))
        assert not share or meets


@given(pair=layout_pairs(), salt=SALTS)
def test_both_sides_make_the_same_plan_and_the_salt_counts_modulo_the_replicas(
    pair: Pair, salt: int
) -> None:
    p, d = pair
    plan = plan_transfers(p, d, salt=salt)
    assert plan == plan_transfers(replace(p), replace(d), salt=salt % p.replicas)


@given(pair=layout_pairs(), salt=SALTS)
def test_adjacent_heads_of_one_rank_are_one_segment(pair: Pair, salt: int) -> None:
    p, d = pair
    plan = plan_transfers(p, d, salt=salt)
    for source, destination in itertools.product(range(p.num_ranks), range(d.num_ranks)):
        assert len(between(plan, source, destination)) <= 1


# --- load and connections


@given(pair=layout_pairs(), salt=SALTS)
def test_no_rank_sends_more_than_an_even_deal_of_the_replicas_makes_it(
    pair: Pair, salt: int
) -> None:
    p, d = pair
    load = source_load(plan_transfers(p, d, salt=salt))
    times = -(-d.replicas // p.replicas)
    for sent, (layers, heads) in zip(load, holdings(p), strict=True):
        assert sent <= times * len(layers) * len(heads)


@given(pair=layout_pairs())
def test_over_all_salts_every_rank_of_a_stage_sends_equally_much(pair: Pair) -> None:
    p, d = pair
    loads = [source_load(plan_transfers(p, d, salt=salt)) for salt in range(p.replicas)]
    total = [sum(load) for load in zip(*loads, strict=True)]
    for stage in range(len(p.stages)):
        of_stage = total[stage * p.tp : (stage + 1) * p.tp]
        assert min(of_stage) == max(of_stage) > 0


def _pairs_ever(p: EngineLayout, d: EngineLayout) -> set[tuple[int, int]]:
    plans = [plan_transfers(p, d, salt=salt) for salt in range(p.replicas)]
    return {(s.source, s.destination) for plan in plans for s in plan.segments}


@pytest.mark.parametrize(
    ("tp_p", "tp_d", "pairs"),
    [(8, 8, 8), (8, 2, 8), (8, 1, 8), (2, 8, 8), (1, 8, 8), (3, 2, 6), (2, 3, 6)],
)
def test_no_more_pairs_of_ranks_ever_talk_than_even_load_needs(
    tp_p: int, tp_d: int, pairs: int
) -> None:
    p, d = _engine(tp_p, is_mla=True), _engine(tp_d, is_mla=True)
    assert len(_pairs_ever(p, d)) == pairs


def test_replicas_that_are_not_chosen_have_nothing_to_send() -> None:
    plan = plan_transfers(_engine(4, is_mla=True), _engine(1, is_mla=True), salt=6)
    assert [len(plan.leaving(rank)) for rank in range(4)] == [0, 0, 1, 0]
    assert between(plan, 0, 0) == frozenset()


def test_the_salt_is_of_the_transfer_and_differs_between_prompts_of_a_request() -> None:
    uuid = "93923d63113b4b338973f24d19d4bf11"
    salts = [transfer_salt(TransferKey(uuid, index)) for index in range(8)]
    assert {salt % 8 for salt in salts} == set(range(8))
    assert salts[0] == int(uuid, 16)


# --- examples that can be checked by eye


@pytest.mark.parametrize(
    ("kv_heads", "tp_p", "tp_d", "moves"),
    [
        (8, 2, 8, [(0, d, d, 0, 1) for d in range(4)] + [(1, d, d - 4, 0, 1) for d in range(4, 8)]),
        (8, 4, 1, [(s, 0, 0, 2 * s, 2) for s in range(4)]),
        (12, 4, 6, [(0, 0, 0, 0, 2), (0, 1, 2, 0, 1), (1, 1, 0, 1, 1), (1, 2, 1, 0, 2),
                    (2, 3, 0, 0, 2), (2, 4, 2, 0, 1), (3, 4, 0, 1, 1), (3, 5, 1, 0, 2)]),
        (2, 8, 4, [(0, 0, 0, 0, 1), (2, 1, 0, 0, 1), (4, 2, 0, 0, 1), (6, 3, 0, 0, 1)]),
    ],
)  # fmt: skip
def test_segments_of_known_layouts(
    kv_heads: int, tp_p: int, tp_d: int, moves: list[tuple[int, ...]]
) -> None:
    plan = plan_transfers(_engine(tp_p, kv_heads=kv_heads), _engine(tp_d, kv_heads=kv_heads))
    got = [
        (s.source, s.destination, s.source_head, s.destination_head, s.heads) for s in plan.segments
    ]
    assert got == moves


def test_unequal_stages_exchange_the_layers_that_both_hold() -> None:
    p = _engine(stages=((0, 1, 2), (3, 4, 5), (6,)))
    d = _engine(stages=((0, 1, 2, 3), (4, 5, 6)))
    plan = plan_transfers(p, d)
    got = [(s.source, s.destination, s.layers) for s in plan.segments]
    assert got == [(0, 0, (0, 1, 2)), (1, 0, (3,)), (1, 1, (4, 5)), (2, 1, (6,))]
    assert between(plan, 0, 1) == frozenset()


def test_a_unit_is_the_smaller_block_and_the_last_is_whole() -> None:
    plan = plan_transfers(_engine(block_size=64), _engine(block_size=16))
    units = plan.units(70, skip_tokens=48)
    assert [tuple(unit) for unit in units] == [(16, 0, 48, 3, 0), (16, 1, 0, 4, 0)]


# --- what announces a layout, what refuses one


def test_what_a_rank_announces_in_layout_makes_its_engine() -> None:
    engine = _engine(4, kv_heads=8, row_bytes=512)
    announced = Layout(
        factors={},
        layers=engine.layers_of(3),
        kv_heads=engine.heads_per_rank,
        head_dim=128,
        block_size=engine.block_size,
        dtype="bfloat16",
        block_bytes=engine.block_bytes,
        max_tokens=10_000,
    )
    row_bytes = announced.block_bytes // (announced.kv_heads * announced.block_size)
    again = _engine(
        4, stages=(announced.layers,), block_size=announced.block_size, row_bytes=row_bytes
    )
    assert again == engine
    assert row_bytes == 2 * announced.head_dim * 2


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"block_size": 24}, "block_size"),
        ({"kv_heads": 4}, "kv_heads"),
        ({"row_bytes": 256}, "block_bytes"),
        ({"is_mla": True}, "is_mla"),
        ({"stages": ((0, 1, 2),)}, "layers"),
        ({"stages": ((0, 1, 2, 3, 4),)}, "layers"),
        ({"stages": ((0, 1), (2, 4))}, "layers"),
    ],
)
def test_two_sides_that_do_not_fit_are_refused_by_the_factor(
    changes: dict[str, object], factor: str
) -> None:
    ours, theirs = _engine(), replace(_engine(), **changes)
    for p, d in ((ours, theirs), (theirs, ours)):
        with pytest.raises(LayoutError, match=f"^{factor}: ") as caught:
            plan_transfers(p, d)
        assert caught.value.factor == factor


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"tp": 3}, "tp"),
        ({"tp": 12}, "tp"),
        ({"tp": 0}, "tp"),
        ({"tp": 2 * MAX_RANKS}, "tp"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"block_size": 0}, "block_size"),
        ({"row_bytes": 0}, "row_bytes"),
        ({"stages": ()}, "layers"),
        ({"stages": ((0, 1, 2, 3), ())}, "layers"),
        ({"stages": ((0, 1), (1, 2, 3))}, "layers"),
        ({"stages": ((0, 2, 1, 3),)}, "layers"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_the_field(
    changes: dict[str, object], factor: str
) -> None:
    with pytest.raises(LayoutError, match=f"^{factor}: ") as caught:
        replace(_engine(), **changes)
    assert caught.value.factor == factor


def test_mla_counts_as_one_head_whatever_the_model_says_of_heads() -> None:
    engine = _engine(3, kv_heads=128, is_mla=True)
    assert (engine.heads, engine.replicas, engine.heads_per_rank) == (1, 3, 1)
    assert plan_transfers(engine, _engine(kv_heads=1, is_mla=True)).segments


@pytest.mark.parametrize(("tokens", "skip"), [(64, 8), (64, 64), (64, 80), (0, 0), (64, -16)])
def test_a_skip_that_is_not_of_whole_units_or_leaves_nothing_is_an_error(
    tokens: int, skip: int
) -> None:
    with pytest.raises(ValueError, match="skip_tokens"):
        plan_transfers(_engine(), _engine(block_size=32)).units(tokens, skip_tokens=skip)

"""Article facts 7, 8, 14, 16, 32, 33, 39, 46, 47, 54 and 55 as `xpyd advise` computes them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.tools.advice import GB, advice, devices, facts
from xpyd_tools.advise.arithmetic import (
    LINKS,
    all_reduce_bytes,
    all_reduces,
    all_to_all_bytes,
    batch_s,
    boundary_bytes,
    bubble,
    communicators,
    experts_of_a_rank,
    kv_bytes_per_token,
    launches_s,
    ring_factor,
    stage_start_s,
    transfer_s,
)
from xpyd_tools.advise.layout import moves_of, step_of
from xpyd_tools.advise.trees import Layout

KIB, MIB = 1024, 1024**2
LINK_100G = 12_500_000_000
US, MS = 1e-6, 1e-3


@pytest.mark.parametrize(
    ("p", "d", "tp", "transfer", "groups"),
    [(1, 2, 2, 4, 3), (1, 3, 1, 3, 0), (3, 1, 1, 3, 0), (96, 144, 1, 13_824, 0)],
)
def test_communicators_of_a_fleet(p: int, d: int, tp: int, transfer: int, groups: int) -> None:
    """Article fact 7."""
    found = communicators(p, d, tp)
    assert (found.transfer, found.tensor_groups) == (transfer, groups)
    assert found.total == transfer + groups


@pytest.mark.parametrize(("peers", "of_16", "of_8"), [(1, 0.1, 0.052), (144, 14.4, 7.488)])
def test_nccl_takes_100_or_52_mb_of_a_device_for_each_peer(
    peers: int, of_16: float, of_8: float
) -> None:
    """Article fact 8."""
    moves = moves_of(1, devices(1, 8), peers)
    assert [(channels, size / GB) for channels, size in moves.nccl_bytes] == [
        (16, of_16),
        (8, of_8),
    ]


def test_kv_of_a_prompt_of_llama_70b() -> None:
    """Article fact 14."""
    found = advice(facts("llama-70b"), devices(1, 8, between="eth"), context=1000, role="Prefill")
    assert found.kv_token_bytes == 327_680
    assert found.moves is not None
    assert found.moves.prompt_bytes == 327_680_000
    assert round(found.moves.prompt_bytes / 1e6) == 328
    assert round(found.moves.seconds / MS, 1) == 26.2


def test_kv_of_llama_8b() -> None:
    """Article fact 16."""
    token = kv_bytes_per_token(32, facts("llama-8b").kv_numbers, 2)
    assert token == 131_072
    assert token * 1024 == 134_217_728
    assert round(token * 10_000 / GB, 2) == 1.31
    assert int(8e9) // token == 61_035


def test_all_reduces_of_a_step() -> None:
    """Article fact 32."""
    assert all_reduce_bytes(1, 8192, 2) == 16_384
    assert all_reduces(80) == 160
    assert all_reduces(80) * all_reduce_bytes(1, 8192, 2) == 2_621_440
    assert launches_s(LINKS["nvlink"], 160) == pytest.approx((160 * US, 320 * US))
    assert launches_s(LINKS["ib"], 160) == pytest.approx((1.6 * MS, 8 * MS))
    step = step_of(facts("llama-70b"), Layout(tensor=8), devices(1, 8), 1)
    assert step.all_reduces is not None
    assert step.all_reduces.count * step.all_reduces.each_bytes == 2_621_440
    assert step.boundaries is None
    assert step.all_to_alls is None


def test_a_ring_sends_almost_twice_the_tensor() -> None:
    """Article fact 33."""
    assert ring_factor(8) == Fraction(7, 4)
    assert ring_factor(2) == 1
    step = step_of(facts("llama-70b"), Layout(tensor=8), devices(1, 8), 1)
    assert step.all_reduces is not None
    assert step.all_reduces.sent_bytes == 2_621_440 * 7 // 4


def test_hidden_states_and_residual_go_between_stages() -> None:
    """Article fact 39."""
    assert boundary_bytes(32 * 512, 8192, 2) == 512 * MIB
    assert boundary_bytes(256, 8192, 2) == 8 * MIB
    assert transfer_s(8 * MIB, LINKS["nvlink"].bytes_per_s) == pytest.approx(9.3 * US, rel=0.01)
    assert transfer_s(8 * MIB, LINK_100G) == pytest.approx(671 * US, rel=0.01)
    # With TP each rank sends its share.
    assert boundary_bytes(256, 8192, 2, tensor=8) == MIB
    step = step_of(facts("llama-70b"), Layout(8, 3), devices(3, 8), 256)
    assert step.boundaries is not None
    assert (step.boundaries.count, step.boundaries.each_bytes) == (2, MIB)
    assert step.boundaries.link is LINKS["ib"]
    inside = step_of(facts("llama-70b"), Layout(2, 3), devices(1, 8), 256)
    assert inside.boundaries is not None
    assert inside.boundaries.link is LINKS["nvlink"]


@pytest.mark.parametrize(
    ("stages", "batches", "percent"),
    [(4, 1, 75.0), (4, 4, 42.9), (4, 8, 27.3), (4, 16, 15.8), (8, 1, 87.5), (1, 1, 0.0)],
)
def test_bubble_of_a_pipeline(stages: int, batches: int, percent: float) -> None:
    """Article fact 46."""
    assert round(float(bubble(stages, batches)) * 100, 1) == percent


def test_the_timeline_of_four_batches_through_four_stages() -> None:
    """Article fact 46."""
    ends = [stage_start_s(3, batch, 10) + 10 for batch in range(4)]
    assert ends == [40, 50, 60, 70]
    assert stage_start_s(2, 1, 10) == 30
    busy = 4 * 10
    assert 1 - busy / ends[-1] == pytest.approx(float(bubble(4, 4)))
    assert batch_s(4, 10, 1) == 43


def test_stages_send_a_fortieth_of_what_tensor_groups_send() -> None:
    """Article fact 47."""
    # Hidden states alone: three boundaries, and as much again for what comes back.
    hidden_states = boundary_bytes(1, 8192, 2) // 2
    assert hidden_states == 16 * KIB
    assert 4 * hidden_states == 64 * KIB
    assert all_reduces(80) * all_reduce_bytes(1, 8192, 2) == 40 * 4 * hidden_states


def test_a_rank_has_32_of_256_experts() -> None:
    """Article fact 54."""
    experts = facts("deepseek-v3").experts
    assert experts is not None
    assert experts_of_a_rank(experts.count, 8) == 32
    assert experts_of_a_rank(256, 7) == 37
    step = step_of(facts("deepseek-v3"), Layout(8, 2, 8), devices(2, 8), 32)
    assert step.all_to_alls is not None
    assert step.all_to_alls.count == 2 * experts.layers


def test_all_to_alls_of_a_step() -> None:
    """Article fact 55."""
    assert all_to_all_bytes(32, 7168, 1, 8) == 1_835_008
    step = step_of(facts("deepseek-v3"), Layout(8, 2, 8), devices(2, 8), 32)
    assert step.all_to_alls is not None
    assert step.all_to_alls.each_bytes == 1_835_008
    assert 2 * step.all_to_alls.each_bytes == 3_670_016
    assert step.all_to_alls.sent_bytes == 212_860_928
    assert step.all_to_alls.link is LINKS["nvlink"]
    assert step.all_to_alls.seconds == pytest.approx(0.24 * MS, rel=0.02)
    assert transfer_s(212_860_928, LINKS["ib"].bytes_per_s) == pytest.approx(4.3 * MS, rel=0.02)

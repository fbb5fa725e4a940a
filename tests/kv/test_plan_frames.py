"""Which part of a prompt travels in which frame."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_kv.plan.frames import Area, FrameLimits, frames, layer_groups, split

KIB = 1024
MIB = 1024 * KIB


@pytest.mark.parametrize(
    ("layers", "layer_bytes", "group_bytes", "sizes"),
    [
        (32, 4 * MIB, 4 * MIB, [1] * 32),
        (32, 1 * MIB, 4 * MIB, [4] * 8),
        (32, 1 * MIB + 1, 4 * MIB, [4] * 8),
        (32, 1 * MIB - 1, 4 * MIB, [5] * 6 + [2]),
        (4, 1, 4 * MIB, [4]),
        (4, 1, 1, [1, 1, 1, 1]),
        (3, 10 * MIB, 4 * MIB, [1, 1, 1]),
    ],
)
def test_a_group_is_the_fewest_layers_that_reach_the_group_bytes(
    layers: int, layer_bytes: int, group_bytes: int, sizes: list[int]
) -> None:
    groups = layer_groups(layers, layer_bytes, group_bytes)
    assert [end - first for first, end in groups] == sizes
    assert groups[0][0] == 0
    assert groups[-1][1] == layers


@given(
    layers=st.integers(1, 12),
    first=st.integers(0, 20),
    blocks=st.integers(1, 20),
    block_bytes=st.integers(1, 64),
    group_bytes=st.integers(1, 2000),
    max_frame_bytes=st.integers(1, 1000),
)
def test_frames_cover_every_block_of_every_layer_once_within_the_limit(
    layers: int, first: int, blocks: int, block_bytes: int, group_bytes: int, max_frame_bytes: int
) -> None:
    limits = FrameLimits(group_bytes, max_frame_bytes)
    areas = frames(layers, first, first + blocks, block_bytes=block_bytes, limits=limits)
    cells = [
        (layer, block)
        for area in areas
        for layer in range(area.first_layer, area.end_layer)
        for block in range(area.first_block, area.end_block)
    ]
    assert sorted(cells) == [
        (layer, block) for layer in range(layers) for block in range(first, first + blocks)
    ]
    limit = max(max_frame_bytes, block_bytes)
    assert all(0 < area.cells * block_bytes <= limit for area in areas)
    assert [area.first_layer for area in areas] == sorted(area.first_layer for area in areas)


def test_an_area_that_is_too_long_for_a_frame_is_cut_between_layers_first() -> None:
    parts = split(Area(0, 4, 0, 8), block_bytes=10, max_frame_bytes=160)
    assert parts == [Area(0, 2, 0, 8), Area(2, 4, 0, 8)]
    parts = split(Area(0, 1, 0, 8), block_bytes=10, max_frame_bytes=30)
    assert [p.end_block - p.first_block for p in parts] == [3, 3, 2]


@pytest.mark.parametrize(
    ("block", "part"), [(0, (2, 5)), (2, (2, 5)), (3, (3, 5)), (5, None), (9, None)]
)
def test_what_d_has_already_is_cut_off(block: int, part: tuple[int, int] | None) -> None:
    rest = Area(0, 4, 2, 5).behind(block)
    assert (rest and (rest.first_block, rest.end_block)) == part

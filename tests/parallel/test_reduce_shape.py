"""What the GPU's own all-reduce takes, and how it cuts it. Article fact 34."""

from __future__ import annotations

import pytest

from xpyd_worker.kernels.gpu.reduce_shape import MOST_BYTES, MOST_RANKS, ReduceShape

SHAPE = ReduceShape()


@pytest.mark.parametrize("ranks", range(1, 18))
def test_custom_all_reduce_takes_only_numbers_of_ranks_it_was_written_for(ranks: int) -> None:
    """Article fact 34."""
    takes = SHAPE.takes(ranks=ranks, size_bytes=4096, is_contiguous=True)
    assert takes == (ranks in {2, 4, 6, 8})
    assert MOST_RANKS == 8


@pytest.mark.parametrize(
    ("size_bytes", "takes"),
    [(0, False), (2, True), (8_388_608, True), (8_388_610, False), (1 << 30, False)],
)
def test_custom_all_reduce_takes_only_sizes_up_to_its_bound(size_bytes: int, takes: bool) -> None:
    """Article fact 34."""
    assert SHAPE.takes(ranks=2, size_bytes=size_bytes, is_contiguous=True) == takes


def test_custom_all_reduce_takes_512_tokens_of_8192_numbers_of_16_bits() -> None:
    """Article fact 34."""
    assert [
        SHAPE.takes(ranks=8, size_bytes=tokens * 8192 * 2, is_contiguous=True)
        for tokens in (512, 513)
    ] == [True, False]


def test_custom_all_reduce_takes_only_contiguous_tensors() -> None:
    """Article fact 34."""
    assert not SHAPE.takes(ranks=2, size_bytes=4096, is_contiguous=False)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize(
    "size_bytes", [4, 4096, 8192, 8196, 16384, 262_144, 262_148, 300_000, 524_288, MOST_BYTES]
)
def test_every_element_is_in_one_part_and_in_one_ranks_share(
    ranks: int, element_bytes: int, size_bytes: int
) -> None:
    elements = size_bytes // element_bytes
    cut = SHAPE.cut(elements, element_bytes, ranks)
    assert 1 <= cut.programs <= SHAPE.programs
    # No program has nothing to do, and what it has fits its place.
    assert (cut.programs - 1) * cut.part < elements <= cut.programs * cut.part
    assert cut.part * element_bytes <= SHAPE.part_bytes
    assert cut.part % (SHAPE.tile_bytes // element_bytes) == 0
    assert ranks * cut.share >= cut.part
    assert cut.share % 16 == 0


@pytest.mark.parametrize(
    ("ranks", "two_from_kib"), [(2, None), (4, 512), (6, 256), (8, 256)], ids=str
)
def test_large_tensors_go_in_two_shots_where_that_reads_less(
    ranks: int, two_from_kib: int | None
) -> None:
    cuts = {kib: SHAPE.cut(kib * 512, 2, ranks).in_two for kib in (16, 255, 256, 511, 512, 8192)}
    assert cuts == {kib: two_from_kib is not None and kib >= two_from_kib for kib in cuts}


def test_a_trial_goes_all_ways() -> None:
    for ranks in (2, 4, 6, 8):
        ways = {SHAPE.cut(size // 2, 2, ranks).in_two for size in SHAPE.trial_bytes(ranks)}
        assert ways == ({False} if ranks == 2 else {False, True})

"""Who fills a mask: a thread where it takes long, its reader where that is quicker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from xpyd_worker.grammar.matcher import MaskFiller, Matcher, Start


class Library:
    """llguidance's matcher as far as it is asked here: its masks take `takes_s`, and it knows on
    which threads they were computed."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.threads: list[int] = []

    def compute_bitmask(self) -> bytes:
        """All tokens of a word."""
        self.threads.append(threading.get_ident())
        if self.takes_s:
            time.sleep(self.takes_s)
        return b"\xff\xff\xff\xff"

    def is_error(self) -> bool:
        """Never."""
        return False

    def deep_copy(self) -> Library:
        """Itself: what it counts is of all."""
        return self

    def consume_tokens(self, ids: list[int]) -> bool:
        """Any."""
        return bool(ids)


@pytest.fixture
def filler() -> Iterator[MaskFiller]:
    made = MaskFiller()
    yield made
    made.close()


def matcher_of(library: Library) -> Matcher:
    return Start(lambda: library).matcher()  # type: ignore[arg-type,return-value]


def steps(filler: MaskFiller, library: Library, count: int) -> list[bool]:
    """Whether the mask of each step was computed by its reader."""
    matcher = matcher_of(library)
    for _ in range(count):
        mask = matcher.mask()
        filler.begin([mask, None])
        assert mask.words() == b"\xff\xff\xff\xff"
        assert matcher.accept((1,))
    return [thread == threading.get_ident() for thread in library.threads]


def test_a_mask_behind_a_slow_one_is_filled_by_a_thread(filler: MaskFiller) -> None:
    assert steps(filler, Library(0.005), 3) == [False, False, False]


def test_a_mask_behind_a_quick_one_is_filled_by_its_reader(filler: MaskFiller) -> None:
    """A busy machine may make a quick one slow: of many some are behind a quick one."""
    found = steps(filler, Library(0.0), 200)
    assert not found[0]
    assert any(found)


def test_a_mask_is_computed_once(filler: MaskFiller) -> None:
    library = Library(0.0)
    mask = matcher_of(library).mask()
    filler.begin([mask])
    assert mask.words() is mask.words()
    assert len(library.threads) == 1

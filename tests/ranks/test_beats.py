"""A main process that stops, as its ranks see it: by the number of looks, not by seconds."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.ranks.kit.instances import started
from tests.ranks.kit.worker import wait_for
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.ranks.watch.beats import SILENT_LOOKS, BeatPage, MainWatch, Maker, kill

PID = 4711


class Main:
    """What is seen of a main process, and a rank that looks. `ended`: whom that has ended."""

    def __init__(self, pid: int = PID, place: int = 0) -> None:
        self.seen = Maker(0, pid)
        self.ended: list[int] = []
        self.watch = MainWatch(lambda: self.seen, place, self.ended.append)

    def look(self, times: int, *, lives: bool = False, is_serving: bool = True) -> None:
        for _ in range(times):
            if lives:
                self.seen = self.seen._replace(looks=self.seen.looks + 1)
            self.watch.look(is_serving=is_serving)


@pytest.mark.parametrize("place", [0, 3])
def test_a_main_process_that_stops_is_ended_after_so_many_looks(
    place: int, caplog: pytest.LogCaptureFixture
) -> None:
    main = Main(place=place)
    main.look(5, lives=True)
    main.look(SILENT_LOOKS + place - 1)
    assert not main.ended
    main.look(1)
    assert main.ended == [PID]
    assert f"its main process (pid {PID}) has given no sign of life for 8" in caplog.text


def test_a_main_process_that_runs_is_left_alone() -> None:
    main = Main()
    for _ in range(3):
        main.look(SILENT_LOOKS - 1)
        main.look(1, lives=True)
    assert not main.ended


def test_a_program_that_starts_or_ends_or_is_no_main_process_is_left_alone() -> None:
    main, other = Main(), Main(pid=0)
    main.look(3 * SILENT_LOOKS, is_serving=False)
    other.look(3 * SILENT_LOOKS)
    assert not main.ended + other.ended


def test_a_main_process_that_is_gone_needs_no_end() -> None:
    process = subprocess.Popen(["sleep", "600"])
    kill(process.pid)
    assert process.wait(60) == -signal.SIGKILL
    kill(process.pid)


def test_ranks_see_that_their_page_s_maker_looks_at_them() -> None:
    page = BeatPage(2)
    rank = BeatPage(2, os.dup(page.descriptor))
    assert rank.maker() == Maker(0, 0)
    page.live()
    page.watch_maker()
    assert rank.maker() == Maker(1, os.getpid())
    slot = rank.slot(1)
    slot.begin()
    assert page.look(1).is_working
    assert rank.maker() == Maker(1, os.getpid())
    del slot
    rank.close()
    page.close()


def test_the_watcher_of_ranks_shows_itself_to_them() -> None:
    with started(Sizes(pipeline=2)) as instance:
        page = instance._pod._page  # pyright: ignore[reportPrivateUsage]
        before = page.maker()
        assert before.pid == 0, "it may be anybody's program"
        instance.be_watched()
        assert page.maker().pid == os.getpid()
        wait_for(lambda: page.maker().looks > before.looks + 1)

"""What routers count of a canary, as the operator reads it, and what it says of both sides."""

from __future__ import annotations

import re

import pytest

from xpyd_operator.document.rollout import Canary
from xpyd_operator.status.canary_figures import (
    QUERY,
    Key,
    RouterWord,
    SideFigures,
    Tally,
    compared,
    figures_of,
    read_word,
)
from xpyd_router.canary import CanaryTable
from xpyd_router.request_metrics import Exposition

RULES = Canary.model_validate(
    {"weightPercent": 10, "analysis": {"errorPercent": 1, "minRequests": 100}}
)


@pytest.mark.parametrize(
    ("new", "old", "broken", "is_known"),
    [
        # All of it, of a fleet whose KV comes.
        ((100, 0, 100), (900, 0, 0), "100 % of its requests were computed again by D", True),
        ((100, 0, 10), (900, 0, 20), "of the old revision's 2.22 %, the limit is 1 % more", True),
        # The cluster's network does it to both.
        ((100, 0, 100), (900, 0, 900), "", True),
        ((100, 0, 20), (900, 0, 180), "", True),
        # 8 % and 5 %, of so few that chance does it.
        ((100, 0, 8), (900, 0, 45), "", True),
        # The new revision has mended it.
        ((100, 0, 0), (900, 0, 900), "", True),
        # Of those that were served: what the old side failed had no KV to wait for.
        ((100, 0, 100), (1800, 900, 900), "", True),
        # Too few to compare with, and it matters or not.
        ((100, 0, 20), (99, 0, 0), "", False),
        ((100, 0, 1), (99, 0, 0), "", True),
        ((99, 0, 99), (900, 0, 0), "", False),
        # Routers that do not count it.
        ((100, 0, 0), (0, 0, 0), "", True),
    ],
)
def test_prompts_computed_again_are_compared_with_those_of_the_old_revision(
    new: tuple[int, int, int], old: tuple[int, int, int], broken: str, is_known: bool
) -> None:
    """Each side: requests, failed, computed again."""
    sides = [SideFigures(n, failed, recomputed=again) for n, failed, again in (new, old)]
    found = compared(RULES, *sides)
    assert found.is_known == is_known
    assert [broken in what for what in found.broken] == ([True] if broken else [])


def test_both_parts_that_are_above_the_old_ones_are_named() -> None:
    found = compared(RULES, SideFigures(200, refused=100, recomputed=200), SideFigures(900))
    assert [what.partition(",")[0] for what in found.broken] == [
        "33.3 % of its requests were refused with a 4xx",
        "100 % of its requests were computed again by D (their KV did not come)",
    ]


def exposition(table: CanaryTable) -> str:
    out = Exposition()
    table.write(out)
    return out.text().decode()


def test_the_operator_reads_what_routers_write() -> None:
    table = CanaryTable()
    table.begin("abc-1")
    side = table.of("new")
    assert side is not None
    side.served, side.failed, side.refused, side.recomputed = 8, 2, 10, 3
    for _ in range(20):
        side.ttft_s.observe(0.2)
        side.itl_s.observe(0.01)
    word = read_word(exposition(table))
    assert word.name == "abc-1"
    found = figures_of(word.counts)
    assert (found.requests, found.failed, found.error_percent) == (10, 2, 20)
    assert (found.refused, found.recomputed) == (10, 3)
    asked = {part.removeprefix("name[]=") for part in QUERY.partition("?")[2].split("&")}
    assert set(re.findall(r"^# TYPE (\S+)", exposition(table), re.M)) <= asked
    assert found.ttft_ms == pytest.approx(200, rel=0.25)
    assert found.itl_ms == pytest.approx(10, rel=0.25)
    assert figures_of(word.counts, "old").ttft_ms is None
    assert read_word(exposition(table) + "xpyd_router_workers 2\n").name == "", (
        "one has not read it"
    )
    assert read_word("junk{") == RouterWord()
    assert read_word('xpyd_router_canary{canary="a-0"} NaN\n').name == ""


def test_sums_hold_over_restarts_of_routers_and_begin_anew_with_a_step() -> None:
    key, tally = Key("new", "_served_total"), Tally()

    def word(count: int, name: str = "c-0") -> RouterWord:
        return RouterWord(name, {key: count})

    assert tally.take("c-0", {"a": word(5), "b": word(7)})[key] == 12
    assert tally.take("c-0", {"a": word(6)})[key] == 13, "b does not answer now"
    assert tally.take("c-0", {"a": word(2), "b": word(7)})[key] == 15, "a began anew"
    assert tally.take("c-0", {"a": word(3), "b": word(9, "c-1")})[key] == 16
    assert tally.take("c-1", {"a": word(1, "c-1"), "b": word(2, "c-1")})[key] == 3

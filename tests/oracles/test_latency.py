"""The articles' number 29: TTFT, ITL, TPOT and E2E, and what follows from their definitions.

TTFT = submit to first token; ITL = gap of consecutive tokens; TPOT = mean ITL over a request's
output tokens; E2E = submit to last token = TTFT + sum of ITL. Hence E2E - TTFT = sum of ITL and
TPOT x (n - 1) = E2E - TTFT. Throughput is tokens or requests by time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.server_fakes import ScriptedEngine
from xpyd_core.distribution import Distribution
from xpyd_worker.engine.request import (
    ChoiceOutput,
    EngineOutput,
    EngineRequest,
    SampledToken,
    SamplingParams,
)
from xpyd_worker.server.bridge import EngineBridge, Mailbox, RequestMetrics, RequestTimes

GAPS = st.lists(st.floats(0.0005, 200, allow_nan=False), min_size=1, max_size=40)
SUBMITTED_S = 1000.0


def step(choices: Sequence[int], *, tokens: int = 1, finished: bool = False) -> EngineOutput:
    token = SampledToken(7)
    return EngineOutput(
        "r", tuple(ChoiceOutput(c, (token,) * tokens) for c in choices), finished, started_s=1000.2
    )


def measured(gaps: Sequence[float], *, tokens: int = 1) -> RequestMetrics:
    """One request with one choice; `gaps` lie before its steps."""
    figures = RequestMetrics()
    times = RequestTimes(figures, submitted_s=SUBMITTED_S, prompt_tokens=5)
    now_s = SUBMITTED_S
    for gap in gaps:
        now_s += gap
        times.take(step([0], tokens=tokens), now_s)
    times.finish()
    return figures


def near(value: float) -> float:
    return pytest.approx(value, rel=1e-9, abs=1e-6)


def test_latencies_of_one_request_computed_by_hand() -> None:
    """Article fact 29."""
    figures = measured([0.5, 0.02, 0.04, 0.03])
    assert figures.ttft.sum == near(0.5)
    assert (figures.itl.count, figures.itl.sum) == (3, near(0.09))
    assert figures.tpot.sum == near(0.03)
    assert figures.e2e.sum == near(0.59)
    assert figures.queue.sum == near(0.2)
    assert (figures.prompt_tokens, figures.output_tokens) == (5, 4)


@given(GAPS)
def test_e2e_is_ttft_and_the_sum_of_itl(gaps: list[float]) -> None:
    """Article fact 29."""
    figures = measured(gaps)
    assert figures.e2e.count == figures.ttft.count == 1
    assert figures.itl.count == len(gaps) - 1
    assert figures.e2e.sum - figures.ttft.sum == near(figures.itl.sum)


@given(GAPS, st.integers(1, 4))
def test_tpot_times_the_gaps_is_what_is_left_of_e2e(gaps: list[float], tokens: int) -> None:
    """Article fact 29."""
    figures = measured(gaps, tokens=tokens)
    n = len(gaps) * tokens
    assert figures.output_tokens == n
    assert figures.itl.count == n - 1
    assert figures.tpot.count == (1 if n > 1 else 0)
    assert figures.tpot.sum * (n - 1) == near(figures.e2e.sum - figures.ttft.sum)


@given(st.lists(GAPS, min_size=1, max_size=6))
def test_the_identities_hold_for_the_sums_of_many_requests(requests: list[list[float]]) -> None:
    """What a dashboard can check: the histograms' sums and counts. (Article fact 29.)"""
    all_figures = [measured(gaps) for gaps in requests]

    def total(name: str) -> float:
        return math.fsum(getattr(figures, name).sum for figures in all_figures)

    assert total("e2e") - total("ttft") == near(total("itl"))
    gaps = sum(figures.itl.count for figures in all_figures)
    assert gaps == sum(f.output_tokens for f in all_figures) - len(requests)


def test_each_choice_has_its_own_gaps() -> None:
    """Article fact 29."""
    figures = RequestMetrics()
    times = RequestTimes(figures, submitted_s=SUBMITTED_S, prompt_tokens=5)
    for now_s, choices in ((1001, [0, 1]), (1003, [0]), (1004, [1]), (1008, [0])):
        times.take(step(choices), float(now_s))
    times.finish()
    assert (figures.ttft.count, figures.ttft.sum) == (1, 1.0)
    assert figures.itl.sum == (3 - 1) + (4 - 1) + (8 - 3)
    assert figures.tpot.sum == near((8 - 1) / 2 + (4 - 1) / 1)
    assert figures.e2e.sum == 8.0


def test_what_failed_or_was_aborted_has_no_end() -> None:
    """Article fact 29."""
    figures = RequestMetrics()
    times = RequestTimes(figures, submitted_s=SUBMITTED_S, prompt_tokens=5)
    times.take(step([0]), 1001.0)
    assert (figures.ttft.count, figures.e2e.count, figures.tpot.count) == (1, 0, 0)
    never = RequestTimes(figures, submitted_s=SUBMITTED_S, prompt_tokens=5)
    never.finish()
    assert figures.e2e.count == 0


def test_times_are_those_of_the_engines_thread_not_of_a_late_loop() -> None:
    """Two steps are over before the loop runs at all: the gap between them is still their own.

    Article fact 29.
    """

    async def test() -> None:
        now_s = [SUBMITTED_S]
        figures = RequestMetrics()
        bridge = EngineBridge(figures, clock=lambda: now_s[0])
        bridge.bind(ScriptedEngine(silent=True))
        mailbox = Mailbox()
        bridge.submit(EngineRequest("r", "r", (1, 2), SamplingParams(4, 0)), mailbox)
        for at_s, is_last in ((1000.5, False), (1000.75, True)):
            now_s[0] = at_s
            bridge.deliver([step([0], finished=is_last)])
        now_s[0] = 2000.0
        await mailbox.take()
        assert (figures.ttft.sum, figures.itl.sum, figures.e2e.sum) == (0.5, 0.25, 0.75)
        assert bridge.open_requests == 0

    asyncio.run(test())


def test_buckets_reach_from_a_millisecond_to_minutes() -> None:
    """Article fact 29."""
    figures = RequestMetrics()
    for values in (figures.ttft, figures.itl, figures.tpot, figures.e2e, figures.queue):
        assert isinstance(values, Distribution)
        assert values.bounds[0] <= 0.001
        assert values.bounds[-1] >= 60
        steps = zip(values.bounds, values.bounds[1:], strict=False)
        assert all(low < high for low, high in steps)

"""The articles' number 13: random 1,024 in and 1,024 out, 3 requests/s, 1,000 requests, burstiness
100, EOS ignored, the 90th, 95th and 99th percentile of ttft, tpot, itl and e2el.

How long it takes is not judged: that it ends, that each request has all of its tokens, and that the
figures are what their definitions say. The short form has the same shape and a 125th of the
requests; `make soak` runs the whole.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
import pytest

from tests.e2e.harness import Fleet, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long]

TOKENS_IN = TOKENS_OUT = 1024
PER_SECOND = 3.0
BURSTINESS = 100.0
PERCENTILES = (90, 95, 99)
VOCABULARY = 3072
DEADLINE_S = 1800.0


@dataclass
class Timed:
    """When a request was sent, and when each of its tokens came."""

    sent_s: float
    tokens_s: list[float] = field(default_factory=list[float])

    @property
    def ttft(self) -> float:
        return self.tokens_s[0] - self.sent_s

    @property
    def itl(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.tokens_s)]

    @property
    def tpot(self) -> float:
        return statistics.fmean(self.itl)

    @property
    def e2el(self) -> float:
        return self.tokens_s[-1] - self.sent_s


async def _ask(
    session: aiohttp.ClientSession, url: str, prompt: list[int], delay_s: float
) -> Timed:
    await asyncio.sleep(delay_s)
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": TOKENS_OUT,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    timed = Timed(time.monotonic())
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                count = sum(len(c.get("token_ids") or ()) for c in event["choices"])
                timed.tokens_s += [time.monotonic()] * count
    return timed


async def _run(url: str, requests: int, seed: int) -> list[Timed]:
    rng = random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    # Gamma gaps whose mean is the rate's: the larger the shape, the more even.
    gaps = [rng.gammavariate(BURSTINESS, 1 / (PER_SECOND * BURSTINESS)) for _ in range(requests)]
    starts = [sum(gaps[: number + 1]) for number in range(requests)]
    prompts = [rng.choices(range(10, VOCABULARY), k=TOKENS_IN) for _ in range(requests)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        asked = [_ask(session, url, p, s) for p, s in zip(prompts, starts, strict=True)]
        return await asyncio.gather(*asked)


def _judge(fleet: Fleet, requests: int) -> None:
    engines = [p for p in fleet.processes if p.role == "Decode"]
    recomputed = [d.metric("xpyd_kv_recomputed_requests_total") for d in engines]
    done = asyncio.run(_run(fleet.router.url, requests, seed=1024))
    assert [len(timed.tokens_s) for timed in done] == [TOKENS_OUT] * requests
    for timed in done:
        assert timed.e2el == pytest.approx(timed.ttft + sum(timed.itl))
        assert timed.e2el - timed.ttft == pytest.approx(timed.tpot * (TOKENS_OUT - 1))
    figures = {
        "ttft": [timed.ttft for timed in done],
        "tpot": [timed.tpot for timed in done],
        "itl": [gap for timed in done for gap in timed.itl],
        "e2el": [timed.e2el for timed in done],
    }
    for name, values in figures.items():
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        said = {percent: round(1000 * cuts[percent - 1], 1) for percent in PERCENTILES}
        print(f"{name}: {said} ms")  # noqa: T201
    assert [d.metric("xpyd_kv_recomputed_requests_total") for d in engines] == recomputed
    wait_for("all at rest", lambda: not any(d.metric("xpyd_kv_leases") for d in engines))


def test_the_reference_run_in_little(fleet_1p3d: Fleet) -> None:
    """Article fact 13."""
    _judge(fleet_1p3d, 8)


@pytest.mark.soak
def test_the_reference_run(fleet_1p3d: Fleet) -> None:
    """Article fact 13."""
    _judge(fleet_1p3d, 1000)

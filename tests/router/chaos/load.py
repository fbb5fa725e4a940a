"""Clients that ask what asks.py draws, one request after another, and have each answer judged."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from tests.router.chaos.asks import Ask, draw
from tests.router.chaos.script import Exposure
from tests.router.chaos.verdict import Answer, complaints, hexes

HUNG_S = 75.0
"""Longer than every deadline of the router: who waits longer waits for ever."""


@dataclass(frozen=True)
class Failure:
    """A request that did not get the right answer."""

    ask: Ask
    lines: list[str]
    start_s: float
    end_s: float


@dataclass
class Outcome:
    """What became of all requests."""

    answered: int = 0
    failures: list[Failure] = field(default_factory=list[Failure])
    seen: set[bytes] = field(default_factory=set[bytes])
    """All words of 32 hex digits that clients saw."""
    hits: int = 0
    """Calls to engines that the script broke."""

    def count(self, kind: str) -> int:
        return sum(any(line.startswith(kind) for line in f.lines) for f in self.failures)


class Load:
    """`clients` of them against the router at `url`, until `is_enough`; they ask what `draw` gives
    for a request's number."""

    def __init__(
        self,
        url: str,
        *,
        seed: int,
        clients: int,
        exposure: Exposure,
        is_enough: Callable[[int], bool],
        draw: Callable[[random.Random, int], Ask] = draw,
    ) -> None:
        self._url = url
        self._seed = seed
        self._clients = clients
        self._exposure = exposure
        self._is_enough = is_enough
        self._draw = draw
        self._next = 0
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Until enough requests were made; the outcome."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=HUNG_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await asyncio.gather(*(self._client(session) for _ in range(self._clients)))
        return self.outcome

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while not self._is_enough(self._next):
            number, self._next = self._next, self._next + 1
            ask = self._draw(random.Random(f"{self._seed}/{number}"), number)
            self._exposure.begin_request(number)
            start_s = time.time()
            try:
                lines = await self._ask(session, ask)
            finally:
                self._exposure.end_request(number)
            self.outcome.answered += 1
            if lines:
                self.outcome.failures.append(Failure(ask, lines, start_s, time.time()))

    async def _ask(self, session: aiohttp.ClientSession, ask: Ask) -> list[str]:
        url = f"{self._url}/v1/{ask.endpoint}"
        body = b""
        try:
            async with session.post(url, data=json.dumps(ask.body)) as response:
                async for chunk in response.content.iter_any():
                    body += chunk
                headers = {name.lower(): value for name, value in response.headers.items()}
                answer = Answer(response.status, headers, body)
        except TimeoutError:
            return [f"hung: {HUNG_S} s, {body[-200:]!r}"]
        except aiohttp.ClientError as error:
            return [f"lost: {type(error).__name__} {error}, {body[-200:]!r}"]
        self.outcome.seen |= hexes(answer)
        return complaints(ask, answer)

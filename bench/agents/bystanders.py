"""Plain streams while others ask for schemas that cost much, or are wrong.

Two plain streams run without a pause. Meanwhile requests come at a fixed pace: none, with a schema
that costs nothing, and with each of the bad ones. What a bad schema does to the streams is the
second to the third: both have as many requests of as many tokens beside them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.agents.schemas import bad_ones, harmless
from bench.agents.structured import Answer, ask
from bench.engine.contender import ContenderFailed, Server

STREAMS = 2
KINDS = ("none", "harmless", "bad")
_PAUSE_S = 0.25
_DEADLINE_S = 10.0
_TOKENS = 16
"""Of the answers of those that ask beside the streams."""
_STREAM_TOKENS = 400
_ASKERS = 4


@dataclass(frozen=True)
class Beside:
    """What the streams' clients saw meanwhile, and, by its name, what became of each request."""

    kind: str
    number: int
    gaps_s: list[float]
    answers: dict[str, Answer]


def measure(
    server: Server, number: int, say: Callable[[str], None], kinds: Sequence[str] = KINDS
) -> list[Beside]:
    """Each kind once, another first in each round."""
    shift = number % len(kinds)
    found: list[Beside] = []
    for kind in (*kinds[shift:], *kinds[:shift]):
        one = _measure(server, kind, number)
        found.append(one)
        slowest = max((answer.total_s for answer in one.answers.values()), default=0.0)
        say(f"round {number + 1}, {kind}: {len(one.gaps_s)} gaps, slowest answer {slowest:.2f} s")
    return found


def _asked(kind: str, number: int) -> dict[str, Mapping[str, Any]]:
    bad = bad_ones(number)
    if kind == "bad":
        return {**bad}
    return {name: harmless(n + 1000 * number) for n, name in enumerate(bad)}


def _measure(server: Server, kind: str, number: int) -> Beside:
    over = threading.Event()
    asked = _asked(kind, number)
    with ThreadPoolExecutor(STREAMS) as streams, ThreadPoolExecutor(_ASKERS) as askers:
        gaps = [streams.submit(_stream, server, over, seed) for seed in range(STREAMS)]
        coming: dict[str, Any] = {}
        try:
            for name, members in asked.items():
                time.sleep(_PAUSE_S)
                if kind != "none":
                    coming[name] = askers.submit(_ask, server, members)
            answers: dict[str, Answer] = {name: one.result() for name, one in coming.items()}
        finally:
            over.set()
        return Beside(kind, number, [gap for one in gaps for gap in one.result()], answers)


def _ask(server: Server, members: Mapping[str, Any]) -> Answer:
    """One that is not answered in time has failed, and is no reason to end."""
    try:
        bounds = {"max_tokens": _TOKENS, "temperature": 0}
        return ask(server.port, {**bounds, **members}, deadline_s=_DEADLINE_S)
    except ContenderFailed as error:
        return Answer(error=str(error), total_s=_DEADLINE_S)


def _stream(server: Server, over: threading.Event, seed: int) -> list[float]:
    """Times between two texts of plain streams, one stream after the other."""
    gaps: list[float] = []
    members = {"max_tokens": _STREAM_TOKENS, "ignore_eos": True, "seed": seed}
    while not over.is_set():
        at_s = ask(server.port, members).at_s
        gaps += [after - before for before, after in pairwise(at_s)]
    return gaps

"""The modes end to end: one 1P1D fleet of real processes with the demo model for each, under load.

All fleets are up at the same time and take turns. A client is a thread that asks again as soon as
its answer is complete; with more clients than P has room for in a step, P is never idle, so that
the time for one of its steps is the time that passed by the steps that it made.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.harness import Fleet, fleet

MODES = {mode: ("--kv-mode", mode) for mode in ("put-async", "get", "put")}
"""Each with the flags that make it."""
_VOCABULARY = 3000
_ANSWER_S = 120.0


@dataclass(frozen=True)
class Load:
    """What one turn asks of a fleet."""

    seconds: float = 8.0
    rounds: int = 3
    clients: int = 6
    prompt_tokens: int = 1024
    max_tokens: int = 24


@dataclass
class Turn:
    """What one fleet did in its turns."""

    ttft_s: list[float] = field(default_factory=list[float])
    tokens: int = 0
    seconds: float = 0.0
    steps: float = 0.0
    recomputed: float = 0.0


def measure(folder: Path, load: Load, say: Callable[[str], None]) -> dict[str, Turn]:
    """A Turn for each mode."""
    found = {mode: Turn() for mode in MODES}
    with ExitStack() as stack:
        fleets: dict[str, Fleet] = {}
        for mode, own_flags in MODES.items():
            say(f"fleet {mode}")
            place = folder / mode
            place.mkdir()
            # The prompts in one forward each, so that a mode waits once per prompt.
            step = ("--max-num-batched-tokens", "2048")
            flags = (*own_flags, *step, "--kv-transport", "tcp", "--no-enable-prefix-caching")
            running = stack.enter_context(fleet(place, prefill=1, decode=1, flags=flags))
            fleets[mode] = running
            _ask(running, found[mode], Load(seconds=1.0))
        found = {mode: Turn() for mode in MODES}
        modes = list(MODES)
        for round_ in range(load.rounds):
            first = round_ % len(modes)
            for mode in modes[first:] + modes[:first]:
                say(f"fleet {mode}, round {round_ + 1} of {load.rounds}")
                _ask(fleets[mode], found[mode], load)
    return found


def _ask(running: Fleet, turn: Turn, load: Load) -> None:
    """Keep `clients` busy for a while and add what came of it."""
    p = next(process for process in running.processes if process.role == "Prefill")
    d = next(process for process in running.processes if process.role == "Decode")
    steps, recomputed = (_steps(p), _recomputed(d))
    start = time.monotonic()
    until = start + load.seconds
    lock, seeds, faults = threading.Lock(), itertools.count(int(start * 1000)), []

    def client() -> None:
        try:
            while time.monotonic() < until:
                with lock:
                    seed = next(seeds)
                first = _stream(running, seed, load)
                with lock:
                    turn.ttft_s.append(first)
                    turn.tokens += load.max_tokens
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=client) for _ in range(load.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    turn.seconds += time.monotonic() - start
    turn.steps += _steps(p) - steps
    turn.recomputed += _recomputed(d) - recomputed


def _stream(running: Fleet, seed: int, load: Load) -> float:
    """One streamed request, to its end: seconds to its first token."""
    prompt = random.Random(seed).choices(range(10, _VOCABULARY), k=load.prompt_tokens)
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    host, _, port = running.router.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_ANSWER_S)
    start, first = time.monotonic(), 0.0
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read()[:200]!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.monotonic() - start
    finally:
        connection.close()
    return first


def _steps(p: Any) -> float:
    return p.metric("xpyd_engine_forward_total")


def _recomputed(d: Any) -> float:
    return d.metric("xpyd_kv_recomputed_requests_total")

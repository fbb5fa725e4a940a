"""One row under one load: the load generator's figures and the router's processor time."""

from __future__ import annotations

import json
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process import Processes
from bench.router.routers import ContenderFailed
from bench.router.shape import TOKENS_PER_S, Case, Times

_MORE_S = 90.0
"""More than the load generator waits for the ends of streams."""


@dataclass(frozen=True)
class Turn:
    """What was seen between the load's begin and end. Times in microseconds."""

    seconds: float
    answered: int
    tokens: int
    cpu_s: float
    latency_us: dict[str, float] | None
    """Of whole answers: p50, p90, p99, max."""
    ttft_us: dict[str, float] | None
    """Of streams, from the request to the first token: the engine's own pace is in it."""
    relay_us: dict[str, float] | None
    """Of tokens, from the engine's writing to the client's reading."""

    @property
    def cpu_us_per_request(self) -> float | None:
        """Of the router; None where nothing was answered."""
        return self.cpu_s * 1e6 / self.answered if self.answered else None

    @property
    def cpu_us_per_token(self) -> float | None:
        """Of the router; None where no token came."""
        return self.cpu_s * 1e6 / self.tokens if self.tokens else None

    @property
    def said(self) -> str:
        """For whoever waits."""
        if self.latency_us is None:
            rate, spread, cost = self.tokens, self.relay_us, self.cpu_us_per_token
        else:
            rate, spread, cost = self.answered, self.latency_us, self.cpu_us_per_request
        if spread is None or cost is None:
            return "nothing answered in time"
        p50, p99 = spread["p50"] / 1e3, spread["p99"] / 1e3
        return f"{rate / self.seconds:.0f}/s, p50 {p50:.2f} p99 {p99:.2f} ms, CPU {cost:.1f} us"


def load_words(case: Case, port: int, times: Times) -> list[str]:
    """The load generator's arguments."""
    words: list[object] = [port, case.kind, case.count, case.prompt_bytes]
    if case.kind == "closed":
        return list(map(str, [*words, times.warm_s, times.seconds]))
    # All streams are open while it counts, and end soon after.
    tokens = round((times.ramp_s + times.warm_s + times.seconds) * TOKENS_PER_S)
    return list(map(str, [*words, times.ramp_s, times.warm_s, times.seconds, tokens]))


def turn(load: Path, case: Case, port: int, times: Times, router: Processes | None = None) -> Turn:
    """Run the load against 127.0.0.1:port. ContenderFailed where an answer was not as asked."""
    process = subprocess.Popen(
        [str(load), *load_words(case, port, times)], stdout=subprocess.PIPE, text=True
    )
    limit = threading.Timer(times.ramp_s + times.warm_s + times.seconds + _MORE_S, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        at: dict[str, float] = {}
        last = ""
        for line in process.stdout:
            last = line.strip()
            at[last] = router.cpu_s() if router is not None else 0.0
    finally:
        limit.cancel()
        process.kill()
        process.communicate()
    if not last.startswith("{"):
        raise ContenderFailed(f"the load generator ended after {last!r}")
    found = json.loads(last)
    if found["errors"]:
        raise ContenderFailed(f"{found['errors']} errors; the first: {found['firstError']}")
    return _turn(found, at["end"] - at["begin"])


def _turn(found: dict[str, Any], cpu_s: float) -> Turn:
    return Turn(
        seconds=found["seconds"],
        answered=found["answered"],
        tokens=found["tokens"],
        cpu_s=cpu_s,
        latency_us=found["latencyUs"],
        ttft_us=found["ttftUs"],
        relay_us=found["relayUs"],
    )

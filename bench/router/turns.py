"""One row under one load: the load generator's figures and the router's processor time."""

from __future__ import annotations

import http.client
import json
import os
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
_LONG_S = 60.0
_PAUSE_S = 0.1


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


def turn(
    load: Path,
    case: Case,
    port: int,
    times: Times,
    router: Processes | None = None,
    *,
    key: str = "",
) -> Turn:
    """Run the load, with the client's key, against 127.0.0.1:port. ContenderFailed where an answer
    was not as asked."""
    environ = {**os.environ, "XPYD_API_KEY": key} if key else None
    process = subprocess.Popen(
        [str(load), *load_words(case, port, times)], stdout=subprocess.PIPE, text=True, env=environ
    )
    beside = Beside(port, case.beside_bytes, key) if case.beside_bytes else None
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
        if beside is not None:
            beside.end()
    if beside is not None and beside.fault:
        raise ContenderFailed(f"a body of {case.beside_bytes >> 20} MiB: {beside.fault}")
    if not last.startswith("{"):
        raise ContenderFailed(f"the load generator ended after {last!r}")
    found = json.loads(last)
    if found["errors"]:
        raise ContenderFailed(f"{found['errors']} errors; the first: {found['firstError']}")
    return _turn(found, at["end"] - at["begin"])


class Beside:
    """A client that sends long bodies, one after another, until `end`: a member that no engine
    knows, with millions of empty objects."""

    def __init__(self, port: int, size: int, key: str = "") -> None:
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        before, after = b'{"model":"m","prompt":"a","max_tokens":1,"x":[{}', b"]}"
        self._body = before + b",{}" * ((size - len(before) - len(after)) // 3) + after
        self._port = port
        self._over = threading.Event()
        self.fault = ""
        """Why a body was not answered with 200."""
        self._thread = threading.Thread(target=self._run, name="beside")
        self._thread.start()

    def end(self) -> None:
        """Wait for the last answer."""
        self._over.set()
        self._thread.join(2 * _LONG_S)

    def _run(self) -> None:
        while not (self._over.wait(_PAUSE_S) or self.fault):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_LONG_S)
            try:
                connection.request("POST", "/v1/completions", self._body, self._headers)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status != 200:
                    self.fault = f"{answer.status} {text[:200]!r}"
            except (OSError, http.client.HTTPException) as error:
                self.fault = f"{type(error).__name__}: {error}"
            finally:
                connection.close()


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

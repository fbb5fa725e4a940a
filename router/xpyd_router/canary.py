"""A revision on trial: the file that says so, and how its requests go beside those of the old one.

The operator writes the file into a ConfigMap that routers mount, so a router that starts anew has
it again, and a change is here within the kubelet's minute. It reads the figures from /metrics and
decides by them (docs/adr/0105). Each process of a router reads the file and counts by itself.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from xpyd_core.distribution import Distribution
from xpyd_router.access_log import Trace
from xpyd_router.policy.canary import Canary, Share
from xpyd_router.policy.pairs import PairPolicy
from xpyd_router.request_metrics import Exposition, labels_of

logger = logging.getLogger(__name__)
_LOOK_S = 1.0
_MOST_BYTES = 64 * 1024
_SECONDS = tuple(round(0.001 * 1.25**power, 6) for power in range(61))
"""Up to 650 s, each a quarter more: a quantile is not off by more than that."""


@dataclass(eq=False, slots=True)
class SideFigures:
    """How the requests of one side went. A request that is tried again counts once for each try."""

    served: int = 0
    failed: int = 0
    """Calls that failed and streams that broke; what an engine refuses with a 4xx is no failure,
    nor that it takes no more (429, 503): its request is tried elsewhere."""
    refused: int = 0
    """Requests whose clients got an engine's 4xx."""
    recomputed: int = 0
    """Those of `served` whose prompt D computed again because its KV did not come (ADR 0132)."""
    ttft_s: Distribution = field(default_factory=lambda: Distribution(_SECONDS))
    """From the pick to the first byte of a stream, of requests that needed one try."""
    itl_s: Distribution = field(default_factory=lambda: Distribution(_SECONDS))
    """Gaps between two chunks of a stream."""

    def answered(self, trace: Trace) -> None:
        """A request was served to its end."""
        self.served += 1
        # Of a prompt whose logprobs the client wants D uses no KV, whatever comes.
        if trace.kv == "recomputed" and trace.kv_cause != "prompt_logprobs":
            self.recomputed += 1

    def streamed(self, trace: Trace) -> None:
        """A stream came to its end."""
        self.answered(trace)
        if trace.tries == 1 and trace.first_s is not None:
            self.ttft_s.observe(max(0.0, trace.first_s - trace.queue_s))


class CanaryTable:
    """The figures of the canary of now. Another one, or its next step, counts from 0: what began
    before is counted nowhere."""

    def __init__(self) -> None:
        self._name = ""
        self._sides: dict[Share, SideFigures] = {}

    def begin(self, name: str) -> None:
        """Requests count for the canary of this name from now on; "": there is none."""
        self._name = name
        self._sides = {"new": SideFigures(), "old": SideFigures()} if name else {}

    def of(self, share: Share) -> SideFigures | None:
        """Where a request of this side counts; None: nowhere."""
        return self._sides.get(share)

    def write(self, out: Exposition) -> None:
        """All of it as metrics; nothing without a canary."""
        if not self._name:
            return
        known = labels_of({"canary": self._name})
        out.numbers(
            "xpyd_router_canary", "gauge", "1: a process divides requests by it", [(known, 1)]
        )
        sides = [
            (labels_of({"canary": self._name, "revision": share}), side)
            for share, side in self._sides.items()
        ]
        for name, meaning, values in (
            ("served", "Requests that a side answered", [side.served for _, side in sides]),
            ("failed", "Tries that failed on a side", [side.failed for _, side in sides]),
            ("refused", "Requests that a side refused", [side.refused for _, side in sides]),
            ("recomputed", "Served without their KV", [side.recomputed for _, side in sides]),
        ):
            samples = zip([labels for labels, _ in sides], values, strict=True)
            out.numbers(f"xpyd_router_canary_{name}_total", "counter", meaning, samples)
        for name, meaning, times in (
            ("ttft", "From the pick to the first byte", [side.ttft_s for _, side in sides]),
            ("itl", "Gap between two chunks of a stream", [side.itl_s for _, side in sides]),
        ):
            samples = zip([labels for labels, _ in sides], times, strict=True)
            out.histograms(f"xpyd_router_canary_{name}_seconds", meaning, samples)


class CanaryWatch:
    """Follows the file for one process of a router."""

    def __init__(self, path: Path, policy: PairPolicy, table: CanaryTable) -> None:
        self._path = path
        self._policy = policy
        self._table = table
        self._text = b""

    def look(self) -> None:
        """Read the file, and go by it where it has changed. What cannot be read changes nothing."""
        text = _read(self._path)
        if text is None or text == self._text:
            return
        self._text = text
        try:
            canary = msgspec.json.decode(text, type=Canary) if text.strip() else None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            logger.error("%s: %s; the canary stays as it was", self._path, error)
            return
        before = self._policy.canary
        self._policy.canary = canary
        if (before and before.name) != (canary and canary.name):
            self._table.begin(canary.name if canary else "")
        if canary is None:
            logger.info("no canary: all instances serve all requests")
        else:
            logger.info("canary %s: %d %% of requests", canary.name, canary.weight_percent)

    async def run(self) -> None:
        """Look at it until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()


def _read(path: Path) -> bytes | None:
    """A missing file is an empty one; None where it cannot be read now."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        logger.error("%s: %s", path, error.strerror or error)
        return None

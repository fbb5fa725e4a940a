"""The load, the changes under it, and the routers' own words meanwhile.

A request belongs to each change during which it ran, so that one that began just before is not
missed; in the sum it counts once. What routers can send requests to is asked of all ready routers,
and the one that knows fewest instances counts.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bench.change.changes import CHANGES
from bench.change.site import Site, is_ready
from bench.report import say
from tests.cluster.fleetkit import FleetClient
from tests.cluster.harness import ClusterError, NotInTime
from tests.e2e.oracle import Case

QUIET_S = 2.0
"""Between two changes."""
_LOOK_S = 0.4
_ANSWER_S = 2.0
_ROUTERS = 8
"""That are asked at once."""
_PAIRS = "xpyd_router_pair_revisions_total"
_SAMPLE = re.compile(rf'^{_PAIRS}{{[^}}]*revisions="(\w+)"[^}}]*}} (\S+)$', re.MULTILINE)
HUNG = "timeout"
WRONG = "wrong tokens"
"""As load_client.py counts them."""


@dataclass(frozen=True)
class Look:
    """What the ready routers said at one time (time.time())."""

    at_s: float
    prefill: int
    decode: int
    mixed_pairs: int
    """Since the start, of all routers that there were."""
    pairs: int


@dataclass
class Window:
    """One change."""

    name: str
    began_s: float
    ended_s: float = 0.0
    complaint: str = ""
    """Why it failed."""


@dataclass
class Found:
    """All that a run has measured."""

    windows: list[Window] = field(default_factory=list[Window])
    looks: list[Look] = field(default_factory=list[Look])
    requests: list[tuple[float, float, str]] = field(default_factory=list[tuple[float, float, str]])
    failures: list[str] = field(default_factory=list[str])
    """The first that were not answered right, in words."""


class RouterWatch(threading.Thread):
    """Asks all routers, again and again, until `end`. A router's last look is before it ends: one
    that leaves chooses no pair any more, for seconds."""

    def __init__(self, fleet: FleetClient) -> None:
        super().__init__(daemon=True)
        self._fleet = fleet
        self._ended = threading.Event()
        self._pairs: dict[str, dict[str, int]] = {}
        # One that has just ended keeps the API server waiting, but not the looks at the others.
        self._askers = ThreadPoolExecutor(_ROUTERS)
        self.looks: list[Look] = []

    def run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                self.look()
            except OSError as error:
                # Of the API server itself; a router that does not answer is no error.
                say(f"no look at the routers: {error}")

    def end(self) -> None:
        """Look no more."""
        self._ended.set()
        self.join(30)
        self._askers.shutdown(wait=False)

    def look(self) -> None:
        """Once."""
        label = f"xpyd.dev/fleet={self._fleet.name},xpyd.dev/pool=router"
        pods = self._fleet.find("pods", labels=label)
        asked = [self._askers.submit(self._ask, pod["metadata"]) for pod in pods]
        known: list[tuple[int, int]] = []
        for pod, one in zip(pods, asked, strict=True):
            counts = one.result()
            if not is_ready(pod) or "deletionTimestamp" in pod["metadata"]:
                continue
            if counts is None:
                return  # It may have ended since; what it knew is not known.
            known.append(counts)
        prefill, decode = (min((one[side] for one in known), default=0) for side in (0, 1))
        other, same = (sum(c.get(w, 0) for c in self._pairs.values()) for w in ("other", "same"))
        self.looks.append(Look(time.time(), prefill, decode, other, other + same))

    def _ask(self, pod: dict[str, Any]) -> tuple[int, int] | None:
        """How many P and D the router knows; None: it does not answer."""
        place = f"/api/v1/namespaces/{self._fleet.namespace}/pods/{pod['name']}:10002/proxy"
        read = self._fleet.cluster.read
        try:
            text = read(f"{place}/metrics?name[]={_PAIRS}", timeout_s=_ANSWER_S)
            # Of one that ended, the last counts stay.
            self._pairs[pod["uid"]] = {w: int(float(n)) for w, n in _SAMPLE.findall(text)}
            said = json.loads(read(f"{place}/instances", timeout_s=_ANSWER_S))
        except (OSError, ValueError):
            return None
        ready = [one["type"] for one in said["instances"] if one["state"] == "Ready"]
        return ready.count("P"), ready.count("D")


def run(
    site: Site, cases: Sequence[Case], *, requests: int, rate: float, names: Sequence[str]
) -> Found:
    """Change after change, each at least once, until so many requests have been sent."""
    found, watch = Found(), RouterWatch(site.fleet)
    watch.start()
    try:
        with site.fleet.under_load(cases, rate=rate) as report:
            began_s, number = time.monotonic(), 0
            time.sleep(QUIET_S)
            while number < len(names) or (time.monotonic() - began_s) * rate < requests:
                window = _change(site, names[number % len(names)])
                found.windows.append(window)
                if window.complaint:
                    break
                number += 1
                time.sleep(QUIET_S)
        found.requests = site.fleet.requests_over()
    finally:
        watch.end()
    found.failures = report["first_failures"]
    found.looks = watch.looks
    return found


def _change(site: Site, name: str) -> Window:
    window = Window(name, time.time())
    try:
        CHANGES[name](site)
    except (AssertionError, ClusterError, NotInTime, OSError) as error:
        window.complaint = f"{type(error).__name__}: {error}"
    window.ended_s = time.time()
    say(f"{name}: {window.ended_s - window.began_s:.1f} s {window.complaint}".rstrip())
    return window

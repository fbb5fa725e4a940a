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
from dataclasses import asdict, dataclass, field
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

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


class RouterWatch(threading.Thread):
    """Asks all routers, again and again, until `end`. A router's last look is before it ends: one
    that leaves chooses no pair any more, for seconds."""

    def __init__(self, fleet: FleetClient) -> None:
        super().__init__(daemon=True)
        self._fleet = fleet
        self._ended = threading.Event()
        self._pairs: dict[str, dict[str, float]] = {}
        self.looks: list[Look] = []

    def run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                self._look()
            except OSError as error:
                # Of the API server itself; a router that does not answer is no error.
                say(f"no look at the routers: {error}")

    def end(self) -> None:
        """Look no more."""
        self._ended.set()
        self.join(30)

    def _look(self) -> None:
        known: list[tuple[int, int]] = []
        label = f"xpyd.dev/fleet={self._fleet.name},xpyd.dev/pool=router"
        for pod in self._fleet.find("pods", labels=label):
            leaves = "deletionTimestamp" in pod["metadata"]
            counts = self._ask(pod["metadata"]["name"], pod["metadata"]["uid"])
            if counts is not None and is_ready(pod) and not leaves:
                known.append(counts)
        if not known:
            known = [(0, 0)]
        both = [sum(c.get(word, 0) for c in self._pairs.values()) for word in ("other", "same")]
        lowest = min(p for p, _ in known), min(d for _, d in known)
        self.looks.append(Look(time.time(), *lowest, int(both[0]), int(sum(both))))

    def _ask(self, name: str, uid: str) -> tuple[int, int] | None:
        place = f"/api/v1/namespaces/{self._fleet.namespace}/pods/{name}:10002/proxy"
        try:
            said = json.loads(self._fleet.cluster.read(f"{place}/instances"))
            text = self._fleet.cluster.read(f"{place}/metrics?name[]={_PAIRS}")
        except (OSError, ValueError):
            return None
        self._pairs[uid] = {word: float(value) for word, value in _SAMPLE.findall(text)}
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

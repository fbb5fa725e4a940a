"""What a failing test shows: the seed, the first failures, what was done around them, and what
router and engines said of them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.router.chaos.load import Failure, Outcome
from tests.router.chaos.script import Timeline

_SHOWN = 3
_MAX_LINES = 25


def calls_of(calls_path: Path, tag: str) -> list[str]:
    """The engines' lines for one request."""
    return [line for line in calls_path.read_text().splitlines() if f" {tag} " in line]


def _about(failure: Failure, timeline: Timeline, calls_path: Path, router_log: str) -> str:
    calls = calls_of(calls_path, failure.ask.tag)
    uuids = set(re.findall(r"[0-9a-f]{32}", "\n".join(calls)))
    lines = [line for line in router_log.splitlines() if any(uuid in line for uuid in uuids)]
    return "\n".join(
        [
            f"request {failure.ask.tag}, {failure.start_s:.3f} to {failure.end_s:.3f}",
            f"  /v1/{failure.ask.endpoint} {failure.ask.body}",
            *(f"  ! {line[:600]}" for line in failure.lines[:5]),
            "the script around it:",
            timeline.around(failure.start_s, failure.end_s),
            "the engines' calls:",
            *(f"  {line}" for line in calls[:_MAX_LINES]),
            "the router's lines:",
            *(f"  {line}" for line in lines[:_MAX_LINES]),
        ]
    )


def report(
    outcome: Outcome, *, seed: int, timeline: Timeline, calls_path: Path, router_log: str
) -> str:
    """Everything that helps to find the first failures."""
    failures = outcome.failures
    lost, hung = outcome.count("lost"), outcome.count("hung")
    head = (
        f"seed {seed}: of {outcome.answered} requests {lost} lost, {hung} hung, "
        f"{len(failures) - lost - hung} wrong"
    )
    tally = Counter(re.sub(r"[0-9.]+", "#", f.lines[0])[:110] for f in failures)
    kinds = [f"{count} x {line}" for line, count in tally.most_common(8)]
    first = [_about(f, timeline, calls_path, router_log) for f in failures[:_SHOWN]]
    return "\n\n".join(["\n".join([head, *kinds]), *first])

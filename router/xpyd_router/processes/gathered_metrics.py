"""One /metrics of all processes: each gives its text within a deadline, the texts are summed.

Counters, histograms and most gauges are shares of a whole: they are summed. Gauges that every
process knows alike are taken once, from the parent. When a process ends, what it had counted stays
in the sums: a scraper takes a counter that falls for one that began anew, and counts it twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from xpyd_router.processes.events import GiveText, Text
from xpyd_router.processes.worker_processes import WorkerProcess

PARENTS_ALONE = frozenset(
    {
        "xpyd_router_instances",
        "xpyd_router_has_pair",
        "xpyd_router_kv_pairs",
        "xpyd_router_workers",
        "xpyd_router_tls_not_after_seconds",
        "xpyd_router_tls_reloads_total",
    }
)
"""Gauges of which every process has the whole."""
_LASTING = frozenset({"counter", "histogram"})
_CREATED = "_created"
MAX_PAST_SERIES = 200_000
"""Kept of processes that ended; more are forgotten, and counters begin anew."""


@dataclass
class Family:
    """One metric: its lines of explanation, its kind, its samples by name and labels."""

    head: list[str] = field(default_factory=list[str])
    kind: str = "untyped"
    samples: dict[str, float] = field(default_factory=dict[str, float])


Families = dict[str, Family]


def parse(text: bytes) -> Families:
    """The text exposition of one process."""
    families: Families = {}
    family = Family()
    for line in text.decode().splitlines():
        if line.startswith("# "):
            _, word, name, *rest = line.split(" ", 3)
            family = families.setdefault(name, Family())
            family.head.append(line)
            if word == "TYPE":
                family.kind = rest[0]
        elif line:
            name, _, value = line.rpartition(" ")
            family.samples[name] = float(value)
    return families


def merge(parents: Families, workers: Iterable[Families], past: Families | None = None) -> bytes:
    """The whole router's text. `past` is of those that ended."""
    whole: Families = {}
    _add(whole, parents)
    for families in workers:
        _add(whole, {name: f for name, f in families.items() if name not in PARENTS_ALONE})
    if past:
        _add(whole, past)
    return _text(whole)


def retire(past: Families, ended: Families) -> Families:
    """`past` with that of a process that ended and had counted `ended`; what was given stays as it
    is, since another thread may be merging it.
    """
    kept: Families = {}
    if sum(len(family.samples) for family in past.values()) <= MAX_PAST_SERIES:
        _add(kept, past)
    _add(
        kept,
        {n: f for n, f in ended.items() if f.kind in _LASTING and n not in PARENTS_ALONE},
    )
    return kept


def _add(whole: Families, part: Families) -> None:
    for name, family in part.items():
        into = whole.get(name)
        if into is None:
            into = whole[name] = Family(family.head, family.kind)
        samples = into.samples
        if name.endswith(_CREATED):
            for sample, value in family.samples.items():
                samples[sample] = min(value, samples.get(sample, value))
        else:
            for sample, value in family.samples.items():
                samples[sample] = samples.get(sample, 0) + value


def _text(families: Families) -> bytes:
    lines: list[str] = []
    for family in families.values():
        lines += family.head
        lines += [f"{name} {_number(value)}" for name, value in family.samples.items()]
    return "\n".join([*lines, ""]).encode()


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


_GATHER_S = 2.0
"""Deadline of one answer; a worker waits 5 s, a scraper 10 s."""


class MetricsGatherer:
    """The parent's. `own` gives the parent's own text. A worker that does not answer in time counts
    with what it said last.
    """

    def __init__(self, own: Callable[[], bytes]) -> None:
        self._own = own
        self._numbers = count(1)
        self._open: dict[tuple[int, WorkerProcess], asyncio.Future[bytes]] = {}
        self._last: dict[WorkerProcess, Families] = {}
        self._past: Families = {}

    def take(self, worker: WorkerProcess, event: Text) -> None:
        """A worker's answer."""
        answer = self._open.get((event.ask, worker))
        if answer is not None and not answer.done():
            answer.set_result(event.text)

    def retire(self, worker: WorkerProcess) -> None:
        """The worker's process ended: its counts, as far as they were scraped, remain."""
        last = self._last.pop(worker, None)
        if last is not None:
            self._past = retire(self._past, last)

    async def gather(self, workers: list[WorkerProcess]) -> bytes:
        """The whole router's metrics."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        asked = {one: loop.create_future() for one in workers if one.is_ready}
        processes = {one: one.process for one in asked}
        for worker, answer in asked.items():
            self._open[number, worker] = answer
            worker.send(GiveText(number))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await asyncio.gather(*asked.values())
        finally:
            for worker in asked:
                del self._open[number, worker]
        texts = {
            worker: answer.result()
            for worker, answer in asked.items()
            if answer.done() and not answer.cancelled() and worker.process is processes[worker]
        }
        # Some megabytes in a large fleet: beats are heard meanwhile.
        parsed = await asyncio.to_thread(lambda: {w: parse(text) for w, text in texts.items()})
        for worker, families in parsed.items():
            if worker.process is processes[worker]:
                self._last[worker] = families
        shown, past, own = list(self._last.values()), self._past, self._own()
        return await asyncio.to_thread(lambda: merge(parse(own), shown, past))

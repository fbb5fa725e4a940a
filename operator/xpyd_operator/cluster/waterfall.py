"""`xpyd trace`: one request's waterfall, from the lines that router and engines logged of it.

The router's line has its own times, which follow each other. An engine's line has those since the
request came to it: they are put within the router's call to it, so that clocks need not agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from xpyd_operator.cluster.page import WIDTH, wrapped
from xpyd_operator.status.children import short

Json = dict[str, Any]

ROUTER_LOGGER = "xpyd_router.access"
ENGINE_LOGGER = "xpyd_worker.server.http.inference"
LEAST_ID = 4
"""Characters of an id, below which it is found in too many lines."""
_BAR = 40
_LINE = re.compile(r"(\S+) +[A-Z]+ +([\w.]+): (.*)")
_FIELD = re.compile(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|\S*)')
_ID_FIELDS = ("request", "response", "client_id", "trace")


@dataclass(frozen=True)
class Record:
    """One line of a log. `pod`: whose."""

    pod: str
    time: str
    logger: str
    message: str
    fields: Mapping[str, str]

    def number(self, name: str) -> float | None:
        """The field's number, None where it has none."""
        try:
            return float(self.fields[name])
        except (KeyError, ValueError):
            return None


def read_records(pod: str, lines: Iterable[str], wanted: str) -> list[Record]:
    """The lines of routers' access and engines' requests in which the text `wanted` is."""
    found: list[Record] = []
    for line in lines:
        if wanted in line and (ROUTER_LOGGER in line or ENGINE_LOGGER in line):
            record = _of_json(pod, line) if line.lstrip().startswith("{") else _of_text(pod, line)
            if record is not None and record.logger in (ROUTER_LOGGER, ENGINE_LOGGER):
                found.append(record)
    return found


def _of_text(pod: str, line: str) -> Record | None:
    match = _LINE.search(line)
    if match is None:
        return None
    fields = {name: _word(value) for name, value in _FIELD.findall(match[3])}
    message = match[3].partition(" request=")[0]
    return Record(pod, match[1], match[2], message, fields)


def _word(value: str) -> str:
    """The value of a field; one with spaces is a JSON string."""
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:
        return value


def _of_json(pod: str, line: str) -> Record | None:
    try:
        entry: object = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    every = {str(k): str(v) for k, v in cast("dict[object, object]", entry).items()}
    names = ("time", "logger", "message")
    rest = {name: value for name, value in every.items() if name not in names}
    time, logger, message = (every.get(name, "") for name in names)
    return Record(pod, time, logger, message, rest)


def requests_of(records: Iterable[Record], wanted: str) -> list[Record]:
    """The routers' lines of requests with that id, oldest first."""
    found = [
        one
        for one in records
        if one.logger == ROUTER_LOGGER
        and any(one.fields.get(name) == wanted for name in _ID_FIELDS)
    ]
    return sorted(found, key=lambda one: one.time)


@dataclass(frozen=True)
class Phase:
    """A bar; one that took no time is a moment. `start_s`: since the request came."""

    name: str
    where: str
    start_s: float
    took_s: float
    note: str = ""


@dataclass(frozen=True)
class Waterfall:
    """A request. `seconds`: the whole; `lost`: logs in which nothing of it was found."""

    id: str
    head: str
    seconds: float
    phases: tuple[Phase, ...]
    lost: tuple[str, ...] = ()


def waterfall_of(router: Record | None, engines: Sequence[Record], wanted: str) -> Waterfall | None:
    """The request of the router's line; without one, what its engines logged. None: nothing."""
    if router is None:
        return _of_engines(engines, wanted)
    total = router.number("seconds") or 0.0
    queue, prefill = router.number("queue_seconds") or 0.0, router.number("prefill_seconds")
    decode = router.number("decode_seconds")
    names = router.fields.get("prefill", "-"), router.fields.get("decode", "-")
    called = (prefill or 0.0) + (decode or 0.0)
    begin = max(queue, total - called)
    phases = [Phase("queue", router.pod, 0.0, queue)]
    if (gap := begin - queue) > 0:
        tries = int(router.number("tries") or 1)
        failed = router.fields.get("failures", "")
        name = "earlier tries" if tries > 1 else "pick P and D"
        phases.append(Phase(name, router.pod, queue, gap, failed))
    lost: list[str] = []
    for name, call_s, instance in zip(("P", "D"), (prefill, decode), names, strict=True):
        if call_s is None:
            continue
        mine = _line_at(instance, engines, "SendTo" if name == "P" else "ReceiveFrom")
        if mine is None:
            lost.append(instance)
        phases += _of_call(name, instance, begin, call_s, mine, router.fields.get("kv", ""))
        begin += call_s
    if (first := router.number("first_byte_seconds")) is not None:
        phases.append(Phase("first byte", "to the client", first, 0.0))
    phases.append(Phase("last byte", "to the client", total, 0.0))
    return Waterfall(
        router.fields.get("request", wanted), _head(router), total, tuple(phases), tuple(lost)
    )


def _line_at(instance: str, engines: Sequence[Record], transfer: str) -> Record | None:
    """The engine's line: by the pod's name, else by what it did with the KV."""
    by_name = [one for one in engines if one.pod == instance]
    by_kind = [one for one in engines if one.fields.get("transfer") == transfer]
    found = by_name or by_kind
    return found[-1] if found else None


def _of_call(
    name: str, instance: str, begin: float, call_s: float, line: Record | None, kv: str
) -> list[Phase]:
    """The router's call to an engine, and what the engine did in it."""
    what = "prefill" if name == "P" else "decode"
    phases = [Phase(f"{what} call", instance, begin, call_s)]
    if line is None:
        return phases
    took = line.number("seconds")
    if took is None:  # of an older version
        return phases
    at = begin + max(0.0, call_s - took) / 2
    queue = line.number("queue_seconds")
    first = line.number("first_token_seconds")
    tokens = line.fields.get("output_tokens", "")
    if name == "P":
        phases.append(Phase("  queue", line.pod, at, queue if queue is not None else took))
        if queue is not None and first is not None:
            phases.append(Phase("  prefill", line.pod, at + queue, max(0.0, first - queue)))
        if first is not None:
            phases.append(Phase("  first token", line.pod, at + first, 0.0))
        return phases
    note = f"kv={kv}" if kv else ""
    waited = queue if queue is not None else took
    phases.append(Phase("  KV from P", line.pod, at, waited, note))
    if queue is not None and first is not None:
        phases.append(Phase("  next token", line.pod, at + queue, max(0.0, first - queue)))
        phases.append(
            Phase(
                "  other tokens", line.pod, at + first, max(0.0, took - first), f"{tokens} tokens"
            )
        )
    return phases


def _of_engines(engines: Sequence[Record], wanted: str) -> Waterfall | None:
    phases: list[Phase] = []
    for one in engines:
        name = {"SendTo": "P", "ReceiveFrom": "D"}.get(one.fields.get("transfer", ""), "D")
        phases += _of_call(name, one.pod, 0.0, one.number("seconds") or 0.0, one, "")
    if not phases:
        return None
    seconds = max(one.start_s + one.took_s for one in phases)
    head = "no router's line of it was found: the engines' own times, each from its own begin"
    return Waterfall(wanted, head, seconds, tuple(phases), ("router",))


def _head(router: Record) -> str:
    fields = router.fields
    parts = [router.message, f"{router.number('seconds') or 0.0:.4f} s"]
    names = ("model", "tries", "kv", "kv_cause", "prompt_tokens", "output_tokens", "response")
    parts += [f"{name}={fields[name]}" for name in names if fields.get(name)]
    return f"{router.time} {' '.join(parts)}"


def waterfall_json(found: Waterfall) -> Json:
    """For machines."""
    return {
        "request": found.id,
        "line": found.head,
        "seconds": found.seconds,
        "phases": [
            {
                "name": one.name.strip(),
                "where": one.where,
                "startSeconds": round(one.start_s, 4),
                "seconds": round(one.took_s, 4),
                "note": one.note,
            }
            for one in found.phases
        ],
        "notFoundAt": list(found.lost),
    }


def waterfall_text(found: Waterfall) -> str:
    """A bar chart."""
    parts = [wrapped(f"request {found.id}", "", "    "), wrapped(found.head, "  ", "    ")]
    wide = max(len(one.where) for one in found.phases)
    wide = min(wide, 34)
    for one in found.phases:
        bar = _bar(one, found.seconds)
        line = f"{one.name:<15} {short(one.where, wide):<{wide}} |{bar:<{_BAR}}| {one.start_s:8.4f}"
        line += f" +{one.took_s:.4f}" if one.took_s else ""
        line += f" {one.note}" if one.note else ""
        parts.append(f"{line[:WIDTH].rstrip()}\n")
    parts += [wrapped(f"nothing of it in the log of {one}", "  ", "    ") for one in found.lost]
    return "".join(parts)


def _bar(one: Phase, total: float) -> str:
    scale = _BAR / total if total > 0 else 0.0
    start = min(_BAR - 1, max(0, int(one.start_s * scale + 0.01)))
    if one.took_s <= 0:
        return " " * start + ">"
    end = min(_BAR, max(start + 1, round((one.start_s + one.took_s) * scale)))
    return " " * start + "#" * (end - start)

"""What `xpyd status`, `scale`, `logs` and `down` do; each a short client of the supervisor."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from xpyd_core.errors import UserError
from xpyd_operator.up import control
from xpyd_operator.up.console import PrefixWriter, Progress, Streamer
from xpyd_operator.up.podlogs import line_time, lines_since
from xpyd_operator.up.service import orphan_view
from xpyd_operator.up.state import FleetState, PodRecord, find_fleet, find_fleets, state_root
from xpyd_operator.up.views import FleetView, view_json, view_tables
from xpyd_operator.up.wait import read_view, take_down, wait_settled

_FOLLOW_EVERY_S = 0.2
_EPOCH = datetime.fromtimestamp(0, UTC)


def show_status(name: str | None, *, as_json: bool) -> int:
    """Print the fleet; 1 where only orphans of it are left."""
    state = find_fleet(state_root(), name)
    view = current_view(state)
    sys.stdout.write((view_json(view) if as_json else view_tables(view)) + "\n")
    return 1 if view.reason == "Orphaned" else 0


def current_view(state: FleetState) -> FleetView:
    """The supervisor's view, or what is left without one."""
    view = read_view(state)
    if view is not None:
        return view
    record, orphans = state.read_record(), state.orphans()
    if record is not None and orphans:
        return orphan_view(record, orphans)
    raise UserError(
        f"fleet {state.fleet}: its supervisor does not answer; is it starting or stopping? See "
        f"{state.supervisor_log}"
    )


def scale(target: str, replicas: int, *, timeout_s: float) -> int:
    """Scale the pool `target`, FLEET-POOL, and wait until it is so."""
    state, pool = _find_pool(target)
    answer = control.ask(state.socket, control.AskScale(pool, replicas))
    sys.stdout.writelines(f"{line}\n" for line in answer.lines)
    sys.stdout.flush()
    view = wait_settled(state, timeout_s=timeout_s)
    ready = next(row.ready for row in view.pools if row.name == pool)
    sys.stdout.write(f"{target}: {ready} ready\n")
    return 0


def _find_pool(target: str) -> tuple[FleetState, str]:
    """FLEET-POOL may be read in several ways; the pool that exists is meant."""
    found: list[tuple[FleetState, str]] = []
    known: list[str] = []
    for state in find_fleets(state_root()):
        view = read_view(state)
        names = [row.name for row in view.pools] if view else []
        known += [f"{state.fleet}-{name}" for name in names if name != "router"]
        found += [(state, name) for name in names if f"{state.fleet}-{name}" == target]
    if len(found) == 1:
        return found[0]
    if found:
        fleets = " and ".join(state.fleet for state, _ in found)
        raise UserError(f"{target!r} is a pool of {fleets}; take one of them down first")
    raise UserError(f"no pool {target!r}; there is {', '.join(known) or 'no running fleet'}")


def take_fleet_down(name: str | None, timeout_s: float | None) -> int:
    """Drain the fleet, or what a dead supervisor left of it, and remove its runtime files."""
    state = find_fleet(state_root(), name)
    orphans = state.orphans()
    if orphans:
        record = state.read_record()
        default_s = record.drain_timeout_s if record else 0.0
        sys.stdout.write(f"fleet {state.fleet}: {len(orphans)} orphans of a dead supervisor\n")
        _end_orphans(orphans, default_s if timeout_s is None else timeout_s)
        state.forget()
    else:
        take_down(state, timeout_s)
    sys.stdout.write(f"fleet {state.fleet} is down; its logs are in {state.logs}\n")
    return 0


def _end_orphans(orphans: Sequence[PodRecord], timeout_s: float) -> None:
    """Engines first: the router still carries their answers."""
    routers = [pod for pod in orphans if "-router-" in pod.name]
    engines = [pod for pod in orphans if pod not in routers]
    for group in (engines, routers):
        progress = Progress()
        for pod in group:
            pod.process.signal(signal.SIGTERM)
        while left := [pod for pod in group if pod.process.is_alive()]:
            if progress.elapsed_s > timeout_s:
                for pod in left:
                    pod.process.signal(signal.SIGKILL, group=True)
            progress.say(f"{', '.join(pod.name for pod in left)} draining")
            time.sleep(_FOLLOW_EVERY_S)
        progress.end()


def show_logs(
    pods: Sequence[str], *, fleet: str | None, follow: bool, since: timedelta | None
) -> int:
    """Print what the pods logged, merged by time; with `follow` go on until Ctrl-C."""
    state = _fleet_with_logs(fleet)
    wanted = _choose(state, pods)
    start = None if since is None else datetime.now(UTC) - since
    writer = PrefixWriter(sys.stdout, max((len(name) for name, _ in wanted), default=0))
    streamer = Streamer(writer, from_end=True)
    if follow:
        streamer.poll(wanted)  # first mark the ends, so that no line falls between
    for name, line in _merged(wanted, start):
        writer.write(name, [line])
    while follow:
        # Also pods that were started later.
        streamer.poll(_choose(state, pods))
        time.sleep(_FOLLOW_EVERY_S)
    return 0


def _merged(wanted: Sequence[tuple[str, Path]], start: datetime | None) -> list[tuple[str, str]]:
    """(pod, line) of all files by time; a line without one stays behind the one before it."""
    rows: list[tuple[datetime, str, str]] = []
    for name, log in wanted:
        time_ = _EPOCH
        for line in lines_since(log, start):
            time_ = line_time(line) or time_
            rows.append((time_, name, line))
    rows.sort(key=lambda row: row[0])
    return [(name, line) for _, name, line in rows]


def _fleet_with_logs(name: str | None) -> FleetState:
    """The named fleet, also one that is down, or the only running one."""
    if name is not None:
        state = FleetState(state_root() / name)
        if not state.logs.is_dir():
            raise UserError(f"fleet {name!r} has no logs in {state.logs}")
        return state
    return find_fleet(state_root(), None)


def _choose(state: FleetState, pods: Sequence[str]) -> list[tuple[str, Path]]:
    """Logs of the named pods, or of pools, or all; a name may leave the fleet's out."""
    logs = {path.name.removesuffix(".log"): path for path in sorted(state.logs.glob("*.log"))}
    if not pods:
        return list(logs.items())
    chosen: dict[str, Path] = {}
    for pod in pods:
        full = pod if pod.startswith(f"{state.fleet}-") else f"{state.fleet}-{pod}"
        found = {n: p for n, p in logs.items() if n == full or n.rpartition("-")[0] == full}
        if not found:
            names = ", ".join(logs) or "none"
            raise UserError(f"no pod {pod!r} in fleet {state.fleet}; its logs: {names}")
        chosen |= found
    return list(chosen.items())

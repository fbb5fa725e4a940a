"""`xpyd status`, `scale`, `logs` and `down`: short clients of a fleet's supervisor.

They ask over the control socket and wait, with a line of progress and a deadline, until the fleet
is as asked, or say why it is not.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from xpyd_core.cli import EXIT_USAGE
from xpyd_core.errors import UserError, XpydError
from xpyd_core.pod_env import HTTP_PORT
from xpyd_operator.up import control
from xpyd_operator.up.control import FleetView, PodView, view_json, view_tables
from xpyd_operator.up.folder import (
    FleetFolder,
    FleetRecord,
    PodRecord,
    find_fleet,
    find_fleets,
    state_root,
)
from xpyd_operator.up.logs import LogStreamer, PrefixWriter, Progress, line_time, lines_since, tail

_EVERY_S = 0.1
_MAX_FAILURES = 3
_TAIL_LINES = 15


class FleetFailed(XpydError):
    """The fleet did not become ready; the text says why."""


def read_view(state: FleetFolder) -> FleetView | None:
    """The supervisor's view, None while it does not answer."""
    try:
        return control.send_request(state.socket, control.StatusRequest()).view
    except control.NotRunning:
        return None


def wait_settled(
    state: FleetFolder, *, timeout_s: float, has_ended: Callable[[], bool] = lambda: False
) -> FleetView:
    """Wait until the fleet is ready. FleetFailed with the reason: it ended, it fails, it took too
    long.

    `has_ended`: whether the supervisor that was just started is gone again.
    """
    with Progress() as progress:
        return _wait_settled(state, progress, timeout_s=timeout_s, has_ended=has_ended)


def _wait_settled(
    state: FleetFolder, progress: Progress, *, timeout_s: float, has_ended: Callable[[], bool]
) -> FleetView:
    while True:
        view = read_view(state)
        if view is not None and view.ready:
            return view
        if has_ended():
            raise FleetFailed(_with_tail("the supervisor ended", state.supervisor_log))
        # A pod that serves again is not what is waited for, also where its exits still count.
        pods = [pod for pod in (view.pods if view else ()) if pod.state != "Ready"]
        failed = [pod for pod in pods if pod.failures]
        for pod in failed:
            # Wrong input stays wrong: another start would end in the same way.
            if pod.exit_status == EXIT_USAGE:
                what = f"pod {pod.name} ended (exit status {EXIT_USAGE})"
            elif pod.failures >= _MAX_FAILURES:
                what = f"pod {pod.name} keeps ending ({pod.reason})"
            else:
                continue
            raise FleetFailed(_with_tail(what, Path(pod.log)))
        text = describe(view)
        if progress.elapsed_s > timeout_s:
            what = f"not ready after {timeout_s:.0f} s: {text}"
            raise FleetFailed(_with_tail(what, Path(failed[0].log)) if failed else what)
        progress.say(text)
        time.sleep(_EVERY_S)


def wait_gone(state: FleetFolder, *, timeout_s: float) -> bool:
    """Wait until no supervisor has the fleet's lock; False: the time is over."""
    with Progress() as progress:
        while state.is_supervised():
            if progress.elapsed_s > timeout_s:
                return False
            progress.say(describe(read_view(state)))
            time.sleep(_EVERY_S)
        return True


def describe(view: FleetView | None) -> str:
    """What is being waited for, in one line."""
    if view is None:
        return "the supervisor starts"
    busy: dict[str, list[str]] = {}
    for pod in view.pods:
        if pod.state != "Ready":
            what = f"{pod.state.lower()} ({pod.reason})" if pod.reason else pod.state.lower()
            busy.setdefault(what, []).append(pod.name.removeprefix(f"{view.fleet}-"))
    parts = [f"{what}: {', '.join(names)}" for what, names in busy.items()]
    return "; ".join(parts) or view.message or view.reason


def _with_tail(what: str, log: Path) -> str:
    lines = tail(log, _TAIL_LINES)
    if not lines:
        return what
    return "\n  ".join([f"{what}; the end of {log}:", *lines])


def take_down(state: FleetFolder, timeout_s: float | None) -> None:
    """Ask the supervisor to drain, and wait. UserError: it is still there after the deadline."""
    try:
        control.send_request(state.socket, control.DownRequest(timeout_s))
    except control.NotRunning:
        if not state.is_supervised():
            return
        raise UserError(
            f"fleet {state.fleet}: its supervisor does not answer; see {state.supervisor_log}"
        ) from None
    limit_s = 86400.0 if timeout_s is None else 2 * timeout_s + 30
    if not wait_gone(state, timeout_s=limit_s):
        sys.stderr.write(f"fleet {state.fleet} is still draining\n")


_FOLLOW_EVERY_S = 0.2
_EPOCH = datetime.fromtimestamp(0, UTC)


def show_status(name: str | None, *, as_json: bool) -> int:
    """Print the fleet; 1 where only orphans of it are left."""
    state = find_fleet(state_root(), name)
    view = current_view(state)
    sys.stdout.write((view_json(view) if as_json else view_tables(view)) + "\n")
    return 1 if view.reason == "Orphaned" else 0


def current_view(state: FleetFolder) -> FleetView:
    """The supervisor's view, or that of orphans where the supervisor died."""
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


def orphan_view(record: FleetRecord, pods: Sequence[PodRecord]) -> FleetView:
    """The status of a fleet whose supervisor died: the processes that still run."""
    return FleetView(
        fleet=record.fleet,
        endpoint=record.endpoint,
        ready=False,
        reason="Orphaned",
        message=f"its supervisor died; `xpyd down {record.fleet}` ends what is left",
        supervisor_pid=0,
        pods=tuple(
            PodView(
                name=pod.name,
                pool="",
                role="",
                state="Orphaned",
                address=pod.address,
                http=f"{pod.address}:{HTTP_PORT}",
                kv="",
                pid=pod.process.pid,
                restarts=0,
                failures=0,
                age_s=0.0,
                revision="",
            )
            for pod in pods
        ),
    )


def scale(target: str, replicas: int, *, timeout_s: float) -> int:
    """Scale the pool `target`, FLEET-POOL, and wait until it is so."""
    state, pool = _find_pool(target)
    answer = control.send_request(state.socket, control.ScaleRequest(pool, replicas))
    sys.stdout.writelines(f"{line}\n" for line in answer.lines)
    sys.stdout.flush()
    view = wait_settled(state, timeout_s=timeout_s)
    ready = next(row.ready for row in view.pools if row.name == pool)
    sys.stdout.write(f"{target}: {ready} ready\n")
    return 0


def _find_pool(target: str) -> tuple[FleetFolder, str]:
    """FLEET-POOL may be split in several ways; the pool that exists is meant."""
    found: list[tuple[FleetFolder, str]] = []
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
    """The router first: it finishes what it has while all engines serve."""
    routers = [pod for pod in orphans if "-router-" in pod.name]
    engines = [pod for pod in orphans if pod not in routers]
    for group in (routers, engines):
        for pod in group:
            pod.process.signal(signal.SIGTERM)
        with Progress() as progress:
            while left := [pod for pod in group if pod.process.is_alive()]:
                if progress.elapsed_s > timeout_s:
                    for pod in left:
                        pod.process.signal(signal.SIGKILL, group=True)
                progress.say(f"{', '.join(pod.name for pod in left)} draining")
                time.sleep(_FOLLOW_EVERY_S)


def show_logs(
    pods: Sequence[str], *, fleet: str | None, follow: bool, since: timedelta | None
) -> int:
    """Print what the pods logged, merged by time; with `follow` go on until Ctrl-C."""
    state = _fleet_with_logs(fleet)
    wanted = _choose(state, pods)
    start = None if since is None else datetime.now(UTC) - since
    writer = PrefixWriter(sys.stdout, max((len(name) for name, _ in wanted), default=0))
    streamer = LogStreamer(writer, from_end=True)
    if follow:
        streamer.poll(wanted)  # mark the ends first, so that no line is lost in between
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


def _fleet_with_logs(name: str | None) -> FleetFolder:
    """The named fleet, also one that is down, or the only running one."""
    if name is not None:
        state = FleetFolder(state_root() / name)
        if not state.logs.is_dir():
            raise UserError(f"fleet {name!r} has no logs in {state.logs}")
        return state
    return find_fleet(state_root(), None)


def _choose(state: FleetFolder, pods: Sequence[str]) -> list[tuple[str, Path]]:
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

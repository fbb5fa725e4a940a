"""What `xpyd status` shows, as values: the answer of the control socket and `--output json`.

Field names are stable between versions; new ones are only added.
"""

from __future__ import annotations

import msgspec

ONE_RANK = "TP1xPP1"


class PodView(msgspec.Struct, frozen=True):
    """One instance. `state`: Starting, Ready, NotReady, Draining, Restarting or Orphaned.

    `http` and `kv` are its addresses (`kv` empty for the router), `reason` says why it is not
    Ready, `failures` counts exits in a row, `restarts` all of them; `exit_status` is the last
    process's (negative: the signal that killed it), null before a first exit. `layout`: how it
    splits the model, such as TP2xPP2; empty for the router.
    """

    name: str
    pool: str
    role: str
    state: str
    address: str
    http: str
    kv: str
    pid: int
    restarts: int
    failures: int
    age_s: float
    revision: str
    reason: str = ""
    log: str = ""
    exit_status: int | None = None
    layout: str = ""


class PoolView(msgspec.Struct, frozen=True):
    """One pool; `desired` and `ready` count instances, `layout` is that of new ones."""

    name: str
    role: str
    desired: int
    ready: int
    revision: str
    layout: str = ""


class FleetView(msgspec.Struct, frozen=True):
    """One fleet. `reason`: Ready, Progressing, Draining, Stopped or Orphaned."""

    fleet: str
    endpoint: str
    ready: bool
    reason: str
    message: str
    supervisor_pid: int
    pools: tuple[PoolView, ...] = ()
    pods: tuple[PodView, ...] = ()


def view_json(view: FleetView) -> str:
    """For `--output json`."""
    return msgspec.json.format(msgspec.json.encode(view), indent=2).decode()


def view_tables(view: FleetView) -> str:
    """For people."""
    state = view.reason if not view.message else f"{view.reason} ({view.message})"
    pools = [("POOL", "ROLE", "DESIRED", "READY", "REVISION")]
    pools += [(p.name, p.role, str(p.desired), str(p.ready), p.revision) for p in view.pools]
    # A fleet whose instances are one rank each has nothing to tell apart here.
    has_layouts = any(pod.layout not in ("", ONE_RANK) for pod in view.pods)
    layout = ("LAYOUT",) if has_layouts else ()
    pods: list[tuple[str, ...]] = [
        ("POD", "ROLE", *layout, "STATE", "HTTP", "PID", "RESTARTS", "AGE")
    ]
    for pod in view.pods:
        shown = f"{pod.state} ({pod.reason})" if pod.reason else pod.state
        pid = str(pod.pid) if pod.pid else "-"
        restarts = str(pod.restarts)
        layout = (pod.layout or "-",) if has_layouts else ()
        rest = (shown, pod.http, pid, restarts, age(pod.age_s))
        pods.append((pod.name, pod.role, *layout, *rest))
    parts = [f"fleet {view.fleet}  {state}  {view.endpoint}"]
    parts += [table(rows) for rows in (pools, pods) if len(rows) > 1]
    return "\n\n".join(parts)


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def age(seconds: float) -> str:
    """12s, 5m, 3h, 2d"""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"

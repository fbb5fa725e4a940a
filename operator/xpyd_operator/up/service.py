"""What the control socket can ask of a supervisor, and the view of a fleet that `status` shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xpyd_core.errors import UserError
from xpyd_core.pod_env import HTTP_PORT
from xpyd_operator.document import parse_fleet
from xpyd_operator.plan import ROUTER, layout_of
from xpyd_operator.plan.keep import backoff_s
from xpyd_operator.up.cluster_only import check_local
from xpyd_operator.up.control import Answer, Ask, AskApply, AskDown, AskScale, AskStatus
from xpyd_operator.up.pod_process import PodProcess
from xpyd_operator.up.pods import ROUTER_HOST, Site
from xpyd_operator.up.state import FleetRecord, PodRecord
from xpyd_operator.up.supervisor import Supervisor
from xpyd_operator.up.views import FleetView, PodView, PoolView


def handle(supervisor: Supervisor, ask: Ask, now: float) -> Answer:
    """Do what was asked. UserError: it was refused."""
    match ask:
        case AskStatus():
            return Answer(view=view_of(supervisor, now))
        case AskScale(pool, replicas):
            return Answer(lines=(supervisor.scale(pool, replicas),))
        case AskApply(document, source, folder):
            fleet = parse_fleet(document.encode(), source=source, local=True)
            check_local(fleet, source=source)
            if fleet.name != supervisor.fleet.name:
                raise UserError(f"{source}: metadata.name is not {supervisor.fleet.name!r}")
            return Answer(lines=tuple(supervisor.apply(fleet, Path(folder))))
        case AskDown(timeout_s):
            supervisor.stop(timeout_s)
            return Answer()


def view_of(supervisor: Supervisor, now: float) -> FleetView:
    """The fleet as it is now; `now` in the supervisor's clock."""
    status, site = supervisor.status, supervisor.roster.site
    layouts = {pool.name: pool.parallelism.layout for pool in supervisor.fleet.spec.pools}
    return FleetView(
        fleet=site.fleet,
        endpoint=site.endpoint,
        ready=status is not None and status.ready,
        reason=status.reason if status else "Progressing",
        message=status.message if status else "",
        supervisor_pid=supervisor.identity.pid,
        pools=tuple(
            PoolView(
                p.name, _role(p.role), p.replicas, p.ready, p.revision, layouts.get(p.name, "")
            )
            for p in (status.pools if status else ())
        ),
        pods=tuple(_pod_view(pod, site, now) for pod in supervisor.roster),
    )


def orphan_view(record: FleetRecord, pods: Sequence[PodRecord]) -> FleetView:
    """A fleet whose supervisor died: what still runs of it."""
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


def _role(role: str) -> str:
    return "Router" if role == ROUTER else role


def _pod_view(pod: PodProcess, site: Site, now: float) -> PodView:
    is_router = pod.pod.pool == ROUTER
    address = site.address(pod.pod.number)
    state, reason = _state(pod, now)
    since = pod.seen.started_at if pod.is_alive else pod.seen.exited_at or now
    return PodView(
        name=pod.pod.name,
        pool=pod.pod.pool,
        role=_role(pod.pod.template.role),
        state=state,
        address=address,
        http=f"{ROUTER_HOST}:{site.router_port}" if is_router else f"{address}:{HTTP_PORT}",
        kv="" if is_router else f"{address}:{pod.pod.kv_port}",
        pid=pod.identity.pid if pod.identity else 0,
        restarts=max(0, pod.restarts),
        failures=pod.seen.failures + (not pod.is_alive),
        age_s=round(now - since, 1),
        revision=pod.pod.revision,
        reason=reason,
        log=str(pod.log),
        exit_status=pod.last_exit,
        layout=layout_of(pod.pod.template),
    )


def _state(pod: PodProcess, now: float) -> tuple[str, str]:
    if pod.seen.draining_since is not None:
        return "Draining", ""
    if pod.seen.exited_at is not None:
        delay_s, _ = backoff_s(pod.seen)
        left_s = max(0.0, pod.seen.exited_at + delay_s - now)
        return "Restarting", f"{pod.exit_text()}, again in {left_s:.0f} s"
    if pod.is_ready:
        return "Ready", ""
    return ("NotReady", "") if pod.was_ready else ("Starting", pod.exit_text())

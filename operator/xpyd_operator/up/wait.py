"""Waiting for a supervisor's fleet from another process: progress, a deadline, and the reason."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from xpyd_core.cli import EXIT_USAGE
from xpyd_core.errors import UserError, XpydError
from xpyd_operator.up import control
from xpyd_operator.up.console import Progress
from xpyd_operator.up.podlogs import tail
from xpyd_operator.up.state import FleetState
from xpyd_operator.up.views import FleetView

_EVERY_S = 0.1
_MAX_FAILURES = 3
_TAIL_LINES = 15


class FleetFailed(XpydError):
    """The fleet did not come up; the text says why."""


def read_view(state: FleetState) -> FleetView | None:
    """The supervisor's view, None while it does not answer."""
    try:
        return control.ask(state.socket, control.AskStatus()).view
    except control.NotRunning:
        return None


def wait_settled(
    state: FleetState, *, timeout_s: float, has_ended: Callable[[], bool] = lambda: False
) -> FleetView:
    """Until the fleet is ready. FleetFailed with the reason: it ended, it fails, it took too long.

    `has_ended`: whether the supervisor that was just started is gone again.
    """
    progress = Progress()
    try:
        return _wait_settled(state, progress, timeout_s=timeout_s, has_ended=has_ended)
    finally:
        progress.end()


def _wait_settled(
    state: FleetState, progress: Progress, *, timeout_s: float, has_ended: Callable[[], bool]
) -> FleetView:
    while True:
        view = read_view(state)
        if view is not None and view.ready:
            return view
        if has_ended():
            raise FleetFailed(_with_tail("the supervisor ended", state.supervisor_log))
        failed = [pod for pod in (view.pods if view else ()) if pod.failures]
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


def wait_gone(state: FleetState, *, timeout_s: float) -> bool:
    """Until no supervisor has the fleet's lock; False: not in time."""
    progress = Progress()
    try:
        while state.is_supervised():
            if progress.elapsed_s > timeout_s:
                return False
            progress.say(describe(read_view(state)))
            time.sleep(_EVERY_S)
        return True
    finally:
        progress.end()


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


def take_down(state: FleetState, timeout_s: float | None) -> None:
    """Ask the supervisor to drain, and wait. UserError: it is still there after the deadline."""
    try:
        control.ask(state.socket, control.AskDown(timeout_s))
    except control.NotRunning:
        if not state.is_supervised():
            return
        raise UserError(
            f"fleet {state.fleet}: its supervisor does not answer; see {state.supervisor_log}"
        ) from None
    limit_s = 86400.0 if timeout_s is None else 2 * timeout_s + 30
    if not wait_gone(state, timeout_s=limit_s):
        sys.stderr.write(f"fleet {state.fleet} is still draining\n")

"""Children of a worker that died become those of a container's first process: the owner, mostly.

A worker with --exact-prefixes has a process that counts tokens, which dies with it; somebody has to
ask for its status, or it stays a zombie for as long as the container lives.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection

_EVERY_S = 1.0


async def reap_orphans(own: Callable[[], Collection[int | None]]) -> None:
    """Until cancelled. `own` gives the children that somebody else waits for; all others that have
    ended are forgotten. For a process that has no further children.
    """
    while True:
        _reap(own)
        await asyncio.sleep(_EVERY_S)


def _reap(own: Callable[[], Collection[int | None]]) -> None:
    while (pid := _ended()) is not None and pid not in own():
        os.waitpid(pid, 0)


def _ended() -> int | None:
    """A child that has ended, left as it is; None where there is none."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None

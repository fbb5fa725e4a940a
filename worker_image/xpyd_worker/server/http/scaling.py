"""Replicas come and go while the instance serves: what HTTP asks, and what requests may name then.

The engine does it (load/replicated_engine.py), which waits for routers to let go of replicas that
leave (docs/adr/0133); the service, which each request has as it was at its start, says which
replicas may be named and for how many requests there is room. Loop only.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from xpyd_core.errors import ApiError, UserError, XpydError
from xpyd_core.heartbeat import Parting
from xpyd_core.messages import ReplicaBeat
from xpyd_core.parallel.checks import DATA_FILE, ELASTIC
from xpyd_worker.config_check import MAX_PARALLEL
from xpyd_worker.ranks.loss import RankLostError
from xpyd_worker.server.http.inference import Api

_log = logging.getLogger(__name__)
Part = Callable[[float], Awaitable[Parting]]
"""See HeartbeatSender.part."""
_WAITING_REQUESTS = 1024
_LOOK_S = 0.5
_REST_S = 30.0
"""Between two tries of a number that could not be had."""
_MOST_LETTERS = 400


class Scalable(Protocol):
    """See ReplicatedEngine."""

    @property
    def size(self) -> int:
        """How many replicas there are that stay."""
        ...

    def scale(self, size: int, *, drain_s: float, let_go: Callable[[float], Future[None]]) -> int:
        """Have `size` replicas."""
        ...


class Scaling:
    """The number of replicas, as HTTP asks for it. `max_num_seqs`: of each replica."""

    def __init__(self, api: Api, max_num_seqs: int) -> None:
        self._api = api
        self._max_num_seqs = max_num_seqs
        self._engine: Scalable | None = None
        self._part: Part | None = None
        self._work: asyncio.Task[int] | None = None
        self._following: asyncio.Task[None] | None = None
        self.problem = ""
        """Why the number in the file could not be had."""

    def why_fewer(self, replicas: Sequence[ReplicaBeat]) -> str:
        """Why fewer of these serve than should, for heartbeats; "": as many do, or more are about
        to come. One that is lost counts as there when a file is followed."""
        lost = [str(n) for n, one in enumerate(replicas) if not (one.serving or one.draining)]
        if self.problem or not lost:
            return self.problem
        return f"of {len(replicas)} replicas these were lost: {', '.join(lost)}"

    def bind(self, engine: Scalable, part: Part) -> None:
        """The engine, once loaded, whose replicas may come and go."""
        self._engine, self._part = engine, part

    def follow(self, size_file: Path, drain_s: float) -> None:
        """Have as many as the file says, from now on; those that leave have `drain_s`."""
        assert self._engine is not None, "bound before"
        self._following = asyncio.create_task(self._follow(self._engine, size_file, drain_s))

    def close(self) -> None:
        """Follow no file any more."""
        if self._following is not None:
            self._following.cancel()

    @property
    def is_scaling(self) -> bool:
        """Whether replicas come or go just now."""
        return self._work is not None and not self._work.done()

    def most_requests(self, replicas: int) -> int:
        """Over how many prompts in so many replicas 503 is given."""
        return replicas * self._max_num_seqs + _WAITING_REQUESTS

    async def scale(self, replicas: int, drain_s: float) -> int:
        """Have so many; how many requests were cut. ApiError 409: it cannot be, or not now; nothing
        has changed. It goes on when the caller does not wait for it."""
        if self._engine is None or self._part is None:
            message = f"this instance was started without {ELASTIC}: its replicas stay as they are"
            raise ApiError(409, message, code="cannot_scale")
        if self.is_scaling:
            message = "the replicas are being changed already: try again when that is done"
            raise ApiError(409, message, code="is_scaling", retry_after_s=1)
        work = self._scale(self._engine, self._part, replicas, drain_s)
        self._work = asyncio.create_task(work)
        return await asyncio.shield(self._work)

    async def _follow(self, engine: Scalable, size_file: Path, drain_s: float) -> None:
        """Have as many as the file says, whatever else has changed that. What cannot be is tried
        again."""
        tried, rest_until_s = 0, 0.0
        loop = asyncio.get_running_loop()
        while True:
            try:
                wanted = await asyncio.to_thread(_read_size, size_file)
                is_due = wanted != tried or loop.time() >= rest_until_s
                if wanted is not None and is_due and not self.is_scaling:
                    tried = wanted
                    if wanted != engine.size:
                        await self.scale(wanted, drain_s)
                    tried, self.problem = 0, ""
            except Exception as error:  # the task's edge: a later number may work
                rest_until_s = loop.time() + _REST_S
                self._failed(size_file, error)
            await asyncio.sleep(_LOOK_S)

    def _failed(self, size_file: Path, error: Exception) -> None:
        """Say why there are not as many as the file says, once."""
        is_known = isinstance(error, ApiError | UserError)
        problem = " ".join((str(error) if is_known else repr(error)).split())[:_MOST_LETTERS]
        if not is_known:
            _log.error("%s was not followed", size_file, exc_info=error)
        elif problem != self.problem:
            _log.warning("%s: %s", size_file, problem)
        self.problem = problem

    async def _scale(self, engine: Scalable, part: Part, replicas: int, drain_s: float) -> int:
        loop = asyncio.get_running_loop()

        def let_go(timeout_s: float) -> Future[None]:  # on the engine's caller's thread
            return asyncio.run_coroutine_threadsafe(_let_go(part, timeout_s), loop)

        try:
            cut = await asyncio.to_thread(engine.scale, replicas, drain_s=drain_s, let_go=let_go)
        except (XpydError, RankLostError) as error:
            raise ApiError(409, str(error), code="cannot_scale") from error
        service = self._api.service
        if service is not None:
            limit = self.most_requests(replicas)
            # A router may still name one that has left: the engine answers 503, which it tries
            # elsewhere; 400 would be the client's.
            known = max(service.replicas, replicas)
            self._api.service = replace(service, replicas=known, max_requests=limit)
        return cut


async def _let_go(part: Part, timeout_s: float) -> None:
    left = await part(timeout_s)
    if left.silent:
        silent = ", ".join(map(str, left.silent))
        _log.warning("no word of %s: these routers may still name replicas that leave", silent)
    if left.in_flight:
        _log.warning("routers have %d requests for replicas that leave", left.in_flight)


def _read_size(path: Path) -> int | None:
    """The number in the file; None: it is not there yet, or empty. UserError for what is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{DATA_FILE}: {path}: {error.strerror or error}") from error
    if not text:
        return None
    if not re.fullmatch("[1-9][0-9]?", text) or int(text) > MAX_PARALLEL:
        raise UserError(f"{DATA_FILE}: {path}: expected 1 to {MAX_PARALLEL}, got {text[:20]!r}")
    return int(text)

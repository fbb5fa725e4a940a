"""The worker processes: started, watched, replaced, ended. The parent has one WorkerProcesses.

A worker that ends unasked is replaced: at once where it had served for a while, else after 1, 2, 4,
... 30 s. One that does not answer pings, or does not read what it is sent, is killed first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xpyd_core.errors import UserError
from xpyd_router.metrics import RouterMetrics
from xpyd_router.processes.channel import Channel
from xpyd_router.processes.events import (
    Drain,
    Ping,
    Pong,
    ToParent,
    ToWorker,
    WorkerReady,
    frame,
    to_parent,
)
from xpyd_router.router import SIGNALS

logger = logging.getLogger(__name__)
_START_S = 60.0
"""Deadline of a worker from its start until it listens."""
_PING_S = 1.0
MAX_MISSES = 15
"""Pings without an answer, a second apart, after which a worker is stuck. It answers between two
requests; 15 s are more than any of them holds it up. Seconds in which the parent itself did not run
do not count."""
_SETTLED_S = 10.0
_LONGEST_BACKOFF_S = 30.0
_FORCED_S = 5.0
_CLOSING_S = 2.0


@dataclass(eq=False)
class WorkerProcess:
    """One place for a worker, and the process in it now."""

    number: int
    """The worker's number from 0, which is its row of counters."""
    is_ready: bool = False
    channel: Channel[ToParent] | None = None
    process: subprocess.Popen[bytes] | None = None
    misses: int = 0
    answered: int = 0
    """The number of the last ping that the process answered; 0: none."""

    @property
    def pid(self) -> int | None:
        """The id of the process."""
        return self.process.pid if self.process is not None else None

    def send_frame(self, data: bytes) -> None:
        """Send `data` to the process, where there is one."""
        if self.channel is not None:
            self.channel.send_frame(data)

    def send(self, event: ToWorker) -> None:
        """Send `event` to the worker."""
        self.send_frame(frame(event))

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


class WorkerProcesses:
    """See the module. `listeners`: of the port of clients and of the admin port, a listening socket
    that all workers accept from; None: each opens its own. `port` is for who reads the command
    line. `greet` gives the first events of a new worker; `take` gets
    events but those of life; `ended` is called with each worker that is gone.
    """

    def __init__(
        self,
        *,
        processes: int,
        port: int,
        listeners: Sequence[int | None] = (None, None),
        memory: int,
        metrics: RouterMetrics,
        greet: Callable[[], Sequence[ToWorker]],
        take: Callable[[WorkerProcess, ToParent], None],
        ended: Callable[[WorkerProcess], None],
    ) -> None:
        self.workers = [WorkerProcess(number) for number in range(processes)]
        self._port = port
        self._listeners = listeners
        self._memory = memory
        self._metrics = metrics
        self._greet = greet
        self._take = take
        self._ended = ended
        self._ready = asyncio.Event()
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        self._deaths = 0
        self._pings = 0
        metrics.workers.set_function(lambda: sum(worker.is_ready for worker in self.workers))

    async def open(self) -> None:
        """Start all; returns when all listen. UserError where one cannot."""
        self._tasks = [asyncio.create_task(self._keep(worker)) for worker in self.workers]
        self._watching = asyncio.create_task(self._watch())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_S):
                await self._ready.wait()
        if self._deaths or not all(worker.is_ready for worker in self.workers):
            raise UserError("a process of the router did not start; its lines above say why")

    async def close(self) -> None:
        """Kill the processes that are left, and wait until all have ended."""
        self._ending.set()
        self._kill_all()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    def broadcast(self, event: ToWorker) -> None:
        """Send `event` to all workers."""
        data = frame(event)
        for worker in self.workers:
            worker.send_frame(data)

    def ping(self) -> int:
        """Ping all workers; the ping's number, for `have_taken`."""
        self._pings += 1
        self.broadcast(Ping(self._pings))
        return self._pings

    def have_taken(self, ping: int) -> bool:
        """Whether every worker has what was sent before this ping. A process that starts later
        begins with the present state."""
        return all(one.channel is None or one.answered >= ping for one in self.workers)

    def drain(self) -> None:
        """Have all finish and end; a second call has them end at once."""
        if self._ending.is_set():
            asyncio.get_running_loop().call_later(_FORCED_S, self._kill_all)
        self._ending.set()
        self.broadcast(Drain())

    async def wait(self) -> None:
        """Wait until all workers have ended, after `drain`."""
        await asyncio.wait(self._tasks)

    async def _keep(self, worker: WorkerProcess) -> None:
        """Have a process in this place until the router drains."""
        loop, backoff_s = asyncio.get_running_loop(), 0.0
        while not self._ending.is_set():
            began_s = loop.time()
            try:
                status = await self._run(worker)
            except OSError as error:
                logger.error("worker %d cannot be started: %s", worker.number + 1, error)
                status = -1
            was_ready, worker.is_ready = worker.is_ready, False
            worker.channel = worker.process = None
            self._ended(worker)
            if self._ending.is_set():
                return
            self._deaths += 1
            self._metrics.worker_deaths.inc()
            if not was_ready:
                self._ready.set()  # `open` need not wait longer for this one
            has_settled = was_ready and loop.time() - began_s >= _SETTLED_S
            backoff_s = 0.0 if has_settled else min(max(1.0, 2 * backoff_s), _LONGEST_BACKOFF_S)
            how = f"signal {-status}" if status < 0 else f"status {status}"
            logger.error(
                "worker %d ended with %s: another follows in %g s",
                *(worker.number + 1, how, backoff_s),
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._ending.wait()

    async def _run(self, worker: WorkerProcess) -> int:
        """Run one process from start to end; returns its exit status."""
        ours, theirs = socket.socketpair()
        with theirs:
            worker.misses = worker.answered = 0
            worker.process = process = self._start(worker, theirs)
        loop = asyncio.get_running_loop()

        def lost() -> None:
            # A worker that closed the channel is about to end, or of no use.
            loop.call_later(_CLOSING_S, _kill, process)

        worker.channel = await Channel[ToParent].open(
            ours, to_parent, lambda event: self._receive(worker, event), lost
        )
        for event in self._greet():
            worker.channel.send(event)
        if self._ending.is_set():
            worker.send(Drain())
        channel = worker.channel
        try:
            return await _end_of(process)
        finally:
            channel.close()

    def _start(self, worker: WorkerProcess, channel: socket.socket) -> subprocess.Popen[bytes]:
        descriptors, listen = [channel.fileno(), self._memory], list[str]()
        for flag, one in zip(("--listener", "--admin-listener"), self._listeners, strict=True):
            if one is not None:
                descriptors.append(one)
                listen += [flag, str(one)]
        # Ctrl-C is for all processes of a terminal: the worker sets free what it inherits blocked
        # when it ignores it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "xpyd_router.processes.worker"),
                    *("--worker", str(worker.number + 1), "--of", str(len(self.workers))),
                    *("--port", str(self._port)),
                    *("--channel", str(descriptors[0]), "--memory", str(descriptors[1])),
                    *listen,
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _receive(self, worker: WorkerProcess, event: ToParent) -> None:
        match event:
            case Pong(number):
                worker.misses, worker.answered = 0, number
            case WorkerReady():
                worker.is_ready = True
                if all(one.is_ready for one in self.workers):
                    self._ready.set()
            case _:
                self._take(worker, event)

    async def _watch(self) -> None:
        """Ping all workers; kill one that is stuck, also while it starts or drains."""
        while True:
            for worker in self.workers:
                worker.misses += 1
                may_miss = MAX_MISSES if worker.is_ready else _START_S / _PING_S
                if worker.process is not None and worker.misses > may_miss:
                    logger.error("worker %d is stuck: killed", worker.number + 1)
                    worker.kill()
            self.ping()
            await asyncio.sleep(_PING_S)

    def _kill_all(self) -> None:
        for worker in self.workers:
            worker.kill()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process; its exit status, below 0 for a signal."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()

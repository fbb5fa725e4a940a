"""The parent of a router of several processes: discovery, probes, health, and the workers.

It serves no request. What a worker reports of its calls changes the fleet here, and every change
is sent to all workers. It reserves the HTTP ports on which each worker listens, and reaps children
of workers that died: they become children of a container's first process, which is mostly this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from dataclasses import replace

import uvloop

from xpyd_core.listen import other_loopback
from xpyd_router.config import RouterConfig
from xpyd_router.http.server import Listeners, make_dialer, make_tls, running
from xpyd_router.keys.watch import keys_of, read_key_file
from xpyd_router.metrics import RouterMetrics
from xpyd_router.processes.events import (
    AskMetrics,
    Cordon,
    Done,
    Metrics,
    Present,
    Text,
    ToParent,
    ToWorker,
    Welcome,
    encode_config,
)
from xpyd_router.processes.gathered_metrics import MetricsGatherer
from xpyd_router.processes.parent_view import ParentView
from xpyd_router.processes.shared_loads import make_memory, map_rows
from xpyd_router.processes.worker_processes import WorkerProcess, WorkerProcesses
from xpyd_router.router import (
    Port,
    http_ports,
    make_asker,
    make_discovery,
    make_introducer,
    make_pair_prober,
    make_prober,
    make_registry,
    read_secrets,
    serve_until_signal,
)


def reserve(port: Port) -> list[socket.socket]:
    """Sockets that keep `port` (0: a free one) on its host, and on the loopback address as well,
    without listening; or the inherited one. UserError where another program has it.
    """
    if (found := port.inherit()) is not None:
        return [found]
    host, number = port.host, port.number
    try:
        if number:
            # A socket that shares would not notice another router that shares as well.
            with _bound(host, number, reuse_port=False):
                pass
        first = _bound(host, number, reuse_port=True)
    except OSError as error:
        raise port.taken(error) from error
    reserved = [first]
    loopback = other_loopback(host)
    if loopback is not None:
        with contextlib.suppress(OSError):  # the workers say so when they listen
            reserved.append(_bound(loopback, first.getsockname()[1], reuse_port=True))
    return reserved


def _bound(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # Connections of a router that just ended do not hold its port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


_EVERY_S = 1.0


async def reap_orphans(own: Callable[[], Collection[int | None]]) -> None:
    """Reap ended children until cancelled, but those of `own`, which have a task that waits for
    them. For a process that has no further children.
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


logger = logging.getLogger(__name__)
_MAX_ANSWERING = 4096
"""Questions of all workers under way; further ones get no answer."""


class ParentProcess:
    """See the module. Ports are the real ones."""

    def __init__(self, config: RouterConfig, memory: int, reserved: Listeners) -> None:
        self.http_port, self.admin_port = (sockets[0].getsockname()[1] for sockets in reserved)
        self.metrics = RouterMetrics(time.monotonic)
        self._config = replace(config, port=self.http_port, admin_port=self.admin_port)
        inherits = [port.descriptor is not None for port in http_ports(config)]
        self._inherited = [
            sockets[0] if is_inherited else None
            for sockets, is_inherited in zip(reserved, inherits, strict=True)
        ]
        self._keys, self._admin_keys = read_secrets(config)
        if config.api_key_file is not None:  # the workers read it; a mistake ends the start
            keys_of(read_key_file(config.api_key_file), config.api_keys, config.api_key_file)
        # Workers serve with it; here it is checked, and shown once.
        tls, self._dialer = make_tls(config, self.metrics), make_dialer(config, self.metrics)
        self._contexts = [one for one in (tls and tls.context, self._dialer.tls) if one is not None]
        self._created, self._started_s = int(time.time()), time.monotonic()
        self._rows = map_rows(memory, config.processes)
        self.fleet = ParentView(
            make_registry(config), time.monotonic, config.health, self._publish, self
        )
        self.worker_processes = WorkerProcesses(
            processes=config.processes,
            port=self.http_port,
            listeners=[None if one is None else one.fileno() for one in self._inherited],
            memory=memory,
            metrics=self.metrics,
            greet=self._greeting,
            take=self._take,
            ended=self._ended,
        )
        self._gatherer = MetricsGatherer(
            lambda: self.metrics.render(self.fleet.instances, has_pair=self.fleet.has_pair)
        )
        self._answering: set[asyncio.Task[None]] = set()
        self._discovery = make_discovery(config, self.fleet, self.metrics, self._keys)
        self._prober = make_prober(self.fleet, self.metrics, self._dialer)

    @property
    def discovery_port(self) -> int:
        """Where engines beat to."""
        return self._discovery.port

    def stop(self) -> None:
        """Have all workers drain; a second call ends them at once."""
        for listener in self._inherited:
            if listener is not None:
                listener.close()  # else clients would wait there after the workers left
        self.worker_processes.drain()

    async def run(self) -> None:
        """Wait until all workers have drained, after `stop`."""
        await self.worker_processes.wait()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Everything runs within; UserError where a worker does not start."""
        try:
            asker = make_asker(self._config, self.fleet, self._dialer)
            introducer = make_introducer(self.fleet, self.metrics, self._keys, self._dialer)
            pair_prober = make_pair_prober(
                self._config, self.fleet, self.metrics, self._keys, self._dialer
            )
            works = [self._discovery.run(), self._prober.run(), asker.run(), introducer.run()]
            works.append(pair_prober.run())
            works += [one.watch() for one in self._contexts]
            async with running(*works):
                try:
                    await self.worker_processes.open()
                    yield
                finally:
                    await self.worker_processes.close()
        finally:
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)
            self._discovery.close()

    def ping(self) -> int:
        """See Workers."""
        return self.worker_processes.ping()

    def have_taken(self, ping: int) -> bool:
        """See Workers."""
        return self.worker_processes.have_taken(ping)

    def requests_at(self, slot: int) -> int:
        """See Workers."""
        return self._rows.total(slot).requests

    def _publish(self, event: ToWorker) -> None:
        self.worker_processes.broadcast(event)

    def _greeting(self) -> list[ToWorker]:
        welcome = Welcome(
            encode_config(self._config),
            tuple(self._keys),
            tuple(self._admin_keys),
            self.fleet.secret,
            self._created,
            self._started_s,
            logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower(),
        )
        return [welcome, *self.fleet.present(), Present()]

    def _ended(self, worker: WorkerProcess) -> None:
        self._rows.zero(worker.number)
        self._gatherer.retire(worker)

    def _take(self, worker: WorkerProcess, event: ToParent) -> None:
        """What a worker reports or asks."""
        match event:
            case Cordon(ask, key, is_cordoned):
                self.fleet.cordon(key, is_cordoned=is_cordoned)
                worker.send(Done(ask))
            case Text():
                self._gatherer.take(worker, event)
            case AskMetrics(ask):
                self._answer(self._gather(worker, ask))
            case _:
                for health in self.fleet.take(event):
                    worker.send(health)

    def _answer(self, work: Coroutine[None, None, None]) -> None:
        if len(self._answering) >= _MAX_ANSWERING:
            work.close()
            return
        task = asyncio.create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _gather(self, worker: WorkerProcess, ask: int) -> None:
        worker.send(Metrics(ask, await self._gatherer.gather(self.worker_processes.workers)))


@contextlib.asynccontextmanager
async def open_parent(config: RouterConfig) -> AsyncGenerator[ParentProcess]:
    """A router of several processes, with all of them listening; leaving ends them.

    Raises UserError for a port that cannot be had and for an unusable key file.
    """
    with contextlib.ExitStack() as stack:
        kept = [[stack.enter_context(one) for one in reserve(port)] for port in http_ports(config)]
        memory = make_memory(config.processes)
        stack.callback(os.close, memory)
        parent = ParentProcess(config, memory, Listeners(*kept))
        async with parent.open():
            yield parent


@contextlib.asynccontextmanager
async def _open_process(config: RouterConfig) -> AsyncGenerator[ParentProcess]:
    """`open_parent`, in a process that has no other children."""
    async with open_parent(config) as parent:
        workers = parent.worker_processes.workers
        async with running(reap_orphans(lambda: [worker.pid for worker in workers])):
            yield parent


def run_parent(config: RouterConfig) -> int:
    """Serve until a signal; the exit status."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_until_signal(_open_process(config), config))
    return 0

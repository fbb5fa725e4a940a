"""A worker: `python -m xpyd_router.processes.worker`, started by the parent.

It serves HTTP on the shared ports. Signals go to the parent; when the parent ends, this process
stops accepting at once, finishes its requests within a deadline, and ends. `ParentControl` asks the
parent for what concerns the whole router.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import uvloop

from xpyd_core.errors import ApiError
from xpyd_core.keys import fleet_keys
from xpyd_core.listen import inherited, listen
from xpyd_core.logs import set_up_logging
from xpyd_router.access_log import AccessLog, write_stderr
from xpyd_router.admission import Admission
from xpyd_router.app_state import AppState, Keys, make_policy, open_keys
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.http.server import (
    BACKLOG,
    Listeners,
    Serving,
    make_tls,
    open_serving,
)
from xpyd_router.metrics import RouterMetrics
from xpyd_router.processes.channel import Channel
from xpyd_router.processes.events import (
    AskMetrics,
    Cordon,
    Done,
    Drain,
    GiveText,
    Metrics,
    Ping,
    Pong,
    Present,
    Text,
    ToParent,
    ToWorker,
    Welcome,
    WorkerReady,
    decode_config,
    to_worker,
)
from xpyd_router.processes.shared_loads import SharedLoadTable, map_rows
from xpyd_router.processes.worker_view import WorkerView
from xpyd_router.router import SIGNALS, make_registry, open_admin_keys, tune_process

_ANSWER_S = 5.0
_MAX_OPEN = 4096
SILENCE_S = 10.0
"""The parent is stuck if no ping comes for this time; pings come every second."""
Answer = Metrics | Done


class ParentControl:
    """The RouterControl of a worker: asks the parent and waits, within a deadline. `is_current`:
    whether the parent's pings come. `send` sends to the parent.
    """

    def __init__(self, send: Callable[[ToParent], None], clock: Callable[[], float]) -> None:
        self._send = send
        self._clock = clock
        self._heard_s = clock()
        self._numbers = count(1)
        self._open: dict[int, asyncio.Future[Answer]] = {}

    @property
    def is_current(self) -> bool:
        """See RouterControl."""
        return self._clock() - self._heard_s < SILENCE_S

    def take(self, event: ToWorker) -> None:
        """Take an answer or a ping; other events are ignored."""
        if isinstance(event, Ping):
            self._heard_s = self._clock()
            self._send(Pong(event.number))
        elif isinstance(event, Metrics | Done):
            answer = self._open.get(event.ask)
            if answer is not None and not answer.done():
                answer.set_result(event)

    async def metrics(self) -> bytes:
        """See RouterControl."""
        answer = await self._ask(AskMetrics, _ANSWER_S)
        assert isinstance(answer, Metrics)
        return answer.text

    async def cordon(self, key: InstanceKey, *, is_cordoned: bool) -> None:
        """See RouterControl."""
        await self._ask(lambda ask: Cordon(ask, key, is_cordoned), _ANSWER_S)

    async def _ask(self, question: Callable[[int], ToParent], deadline_s: float) -> Answer:
        number = next(self._numbers)
        if len(self._open) >= _MAX_OPEN:
            raise _no_answer()
        self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(number))
            async with asyncio.timeout(deadline_s):
                return await self._open[number]
        except TimeoutError as error:
            raise _no_answer() from error
        finally:
            del self._open[number]


def _no_answer() -> ApiError:
    return ApiError(503, "the router's processes do not answer each other; try again")


MOST_BYTES = 4096
"""Linux' PIPE_BUF: a write of so much to a pipe comes out in one piece."""


def pieces(data: bytes) -> Iterator[bytes]:
    """`data`, which ends with a line's end, in whole lines of at most MOST_BYTES together. A longer
    line is a piece of its own.
    """
    begin = 0
    while begin < len(data):
        end = data.rfind(b"\n", begin, begin + MOST_BYTES) + 1
        if not end:
            end = data.find(b"\n", begin) + 1 or len(data)
        yield data[begin:end]
        begin = end


logger = logging.getLogger("xpyd_router.processes.worker")
_PR_SET_PDEATHSIG = 1
_WELCOME_S = 30.0
ORPHAN_S = 30.0
"""Deadline for the requests of a worker without its parent: nothing replaces it, and instances
leave.
"""


class Worker:
    """A worker process, from its first event on. `send` sends to the parent."""

    def __init__(
        self,
        number: int,
        processes: int,
        memory: int,
        listeners: Sequence[int | None] = (None, None),
    ) -> None:
        self._number = number
        self._listeners = listeners
        self._rows = map_rows(memory, processes)
        self._early: deque[ToWorker] = deque()
        self._has_come = asyncio.Event()
        self._take: Callable[[ToWorker], None] | None = None
        self._serving: Serving | None = None
        self._is_orphan = False
        self._is_draining = False
        self._is_over = False
        self._send: Callable[[ToParent], None] = lambda _: None

    def take(self, event: ToWorker) -> None:
        """An event of the parent's."""
        if self._take is None:
            self._early.append(event)
            self._has_come.set()
        else:
            self._take(event)

    def lose_parent(self) -> None:
        """The parent ended, or does not read."""
        if self._is_over:
            return
        self._is_orphan = True
        self._has_come.set()
        if self._serving is not None:
            logger.error("the router's parent is gone: finishing what runs, for %g s", ORPHAN_S)
            self._serving.close_ports()
            asyncio.get_running_loop().call_later(ORPHAN_S, os._exit, 1)

    async def run(self, sock: socket.socket) -> int:
        """Serve until the parent says Drain, or is gone; the exit status."""
        # A parent that is stuck may go on: it is not left for what it does not read.
        channel = await Channel[ToWorker].open(
            sock, to_worker, self.take, self.lose_parent, read_deadline_s=None
        )
        self._send = channel.send
        try:
            async with asyncio.timeout(_WELCOME_S):
                await self._has_come.wait()
            if self._is_orphan:
                return 1
            welcome = self._early.popleft()
            assert isinstance(welcome, Welcome)
            await self._serve(welcome)
        finally:
            self._is_over = True
            channel.close()
        return 1 if self._is_orphan else 0

    def _open_keys(self, config: RouterConfig, metrics: RouterMetrics) -> Keys | None:
        rows = (self._rows.keys(self._number), self._rows.other_keys(self._number))
        client_keys = open_keys(config, metrics, time.monotonic, rows)
        if client_keys is not None:
            # Where the file has become unusable since the parent saw it, requests get a 503.
            client_keys.watch.try_load()
        return client_keys

    async def _serve(self, welcome: Welcome) -> None:
        config = decode_config(welcome.config)
        set_up_logging(welcome.log_level, "json" if config.logs_json else "text")
        tune_process()
        metrics = RouterMetrics(time.monotonic)
        loads = SharedLoadTable(self._rows, self._number)
        control = ParentControl(self._send, time.monotonic)
        fleet = WorkerView(
            make_registry(config),
            time.monotonic,
            loads,
            config.health,
            secret=welcome.secret,
            send=self._send,
        )
        admission = Admission(
            config.limits,
            metrics,
            time.monotonic,
            row=self._rows.admission(self._number),
            others=self._rows.other_admissions(self._number),
            keeps_spare=config.needs_keys,
        )
        state = AppState(
            config=config,
            fleet=fleet,
            loads=loads,
            policy=make_policy(config, fleet, loads, first_turn=self._number),
            metrics=metrics,
            control=control,
            admission=admission,
            access_log=AccessLog(
                is_json=config.logs_json,
                wall_clock=time.time,
                is_on=config.access_log,
                write=_write_lines,
            ),
            keys=fleet_keys(config.kv_key_file, insecure=config.kv_insecure, known=welcome.keys),
            admin_keys=open_admin_keys(config, known=welcome.admin_keys),
            client_keys=self._open_keys(config, metrics),
            created=welcome.created,
            started_s=welcome.started_s,
        )
        present = asyncio.Event()

        def take(event: ToWorker) -> None:
            match event:
                case GiveText(ask):
                    self._send(Text(ask, metrics.render(fleet.instances, has_pair=fleet.has_pair)))
                case Present():
                    present.set()
                case Drain():
                    self._is_draining = True
                    if self._serving is not None:
                        self._serving.stop()
                case _:
                    control.take(event)
                    fleet.take(event)

        while self._early:
            take(self._early.popleft())
        self._take = take
        async with asyncio.timeout(_WELCOME_S):
            await present.wait()
        if self._is_orphan or self._is_draining:
            return
        opened = [
            listen(config.host, port, backlog=BACKLOG, reuse_port=True)
            if descriptor is None
            else [inherited(descriptor)]
            for port, descriptor in zip(
                (config.port, config.admin_port), self._listeners, strict=True
            )
        ]
        tls = make_tls(config, metrics)
        async with open_serving(state, Listeners(*opened), tls=tls) as serving:
            self._serving = serving
            self._send(WorkerReady())
            await serving.run()


def _write_lines(data: bytes) -> None:
    """Write `data` to standard error, which the other processes share."""
    for piece in pieces(data):
        write_stderr(piece)


def _wake_with_parent() -> None:
    """Have the kernel continue this process, where it is stopped, when the parent's ends: else its
    port would stay open, and no process would serve it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def main() -> int:
    """Serve; the exit status."""
    parser = argparse.ArgumentParser(prog="xpyd router worker")
    parser.add_argument("--worker", type=int, required=True, help="its number, from 1")
    parser.add_argument("--of", type=int, required=True, help="how many there are")
    parser.add_argument("--port", type=int, required=True, help="that it serves")
    parser.add_argument("--channel", type=int, required=True, help="descriptor, to the parent")
    parser.add_argument("--memory", type=int, required=True, help="descriptor, of the counters")
    parser.add_argument("--listener", type=int, help="descriptor, in place of a port of its own")
    parser.add_argument("--admin-listener", type=int, help="descriptor, the same of the admin port")
    args = parser.parse_args()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _wake_with_parent()
    for descriptor in (args.channel, args.memory):
        os.set_inheritable(descriptor, False)
    sock = socket.socket(fileno=args.channel)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        listeners = args.listener, args.admin_listener
        return runner.run(Worker(args.worker - 1, args.of, args.memory, listeners).run(sock))


if __name__ == "__main__":
    sys.exit(main())

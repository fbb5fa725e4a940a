"""A router of several real processes and fake engines; its parent runs in the test's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import aiohttp

from bench.process import free_port
from tests.router.fakes import PATIENCE_S, Fleet, HttpEngine, beating, replace_beat
from xpyd_core.messages import encode_heartbeat
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.health import HealthRules
from xpyd_router.http.server import Serving
from xpyd_router.metrics import RouterMetrics
from xpyd_router.processes.parent import ParentProcess, open_parent
from xpyd_router.processes.worker_processes import WorkerProcess


async def when(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until `holds` gives true; the test's deadline bounds it."""
    while not await holds():  # noqa: ASYNC110 - another process has no event of ours
        await asyncio.sleep(0.02)


@dataclass
class _State:
    metrics: RouterMetrics


@dataclass
class _Router:
    """What Fleet uses of a Serving."""

    parent: ParentProcess

    @property
    def http_port(self) -> int:
        return self.parent.http_port

    @property
    def admin_port(self) -> int:
        return self.parent.admin_port

    @property
    def discovery_port(self) -> int:
        return self.parent.discovery_port

    @property
    def state(self) -> _State:
        return _State(self.parent.metrics)


def _holder(pids: list[int], port: int, peer_port: int) -> int | None:
    """The process that has accepted the connection, as the kernel tells."""
    want = f" 0100007F:{port:04X} 0100007F:{peer_port:04X} "
    for line in Path("/proc/net/tcp").read_text().splitlines():
        if want in line:
            link = f"socket:[{line.split()[9]}]"
            for pid in pids:
                for entry in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        if os.readlink(entry) == link:
                            return pid
    return None


@dataclass
class Client:
    """One connection to one worker, and one to its admin port."""

    base: str
    http: aiohttp.ClientSession
    admin: str
    admin_http: aiohttp.ClientSession

    async def post(self, **body: Any) -> aiohttp.ClientResponse:
        """POST a completion."""
        content = {"model": "m", "prompt": "San Francisco is a", "max_tokens": 4, **body}
        return await self.http.post(f"{self.base}/v1/completions", json=content)

    async def status(self, **body: Any) -> int:
        """The status of one, read to its end."""
        async with await self.post(**body) as response:
            await response.read()
            return response.status

    async def get(self, path: str) -> Any:
        """GET JSON of the admin port."""
        async with self.admin_http.get(f"{self.admin}{path}") as response:
            return await response.json()

    async def states(self) -> dict[str, str]:
        """The state of each instance by name."""
        return {
            one["instance"]: one["state"] for one in (await self.get("/instances"))["instances"]
        }

    async def knows(self, names: set[str]) -> bool:
        """Whether these are the instances."""
        return set(await self.states()) == names

    async def has_state(self, engine: HttpEngine, state: str) -> bool:
        """Whether an instance is in this state."""
        return (await self.states()).get(engine.beat.instance) == state

    async def samples(self) -> dict[str, float]:
        """/metrics."""
        async with self.admin_http.get(f"{self.admin}/metrics") as response:
            assert response.status == 200
            text = await response.text()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}


class Several(Fleet):
    """A Fleet whose router has several processes."""

    @property
    def parent(self) -> ParentProcess:
        return cast(_Router, self.router).parent

    @property
    def workers(self) -> list[WorkerProcess]:
        return self.parent.worker_processes.workers

    async def client(self, number: int) -> Client:
        """New connections to worker `number`, counted from 0."""
        return Client(
            self.base,
            await self._connected(number, self.parent.http_port),
            self.admin,
            await self._connected(number, self.parent.admin_port),
        )

    async def _connected(self, number: int, to: int) -> aiohttp.ClientSession:
        """A session of one connection to that worker, on the port `to`."""
        pids = [worker.pid for worker in self.workers if worker.pid is not None]
        opened: list[socket.socket] = []

        def make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
            opened.append(socket.socket(*address[:3]))
            opened[-1].setblocking(False)
            return opened[-1]

        while True:
            connector = aiohttp.TCPConnector(
                limit=1, keepalive_timeout=2 * PATIENCE_S, socket_factory=make_socket
            )
            http = aiohttp.ClientSession(connector=connector)
            self.stack.push_async_callback(http.close)
            async with http.get(f"http://127.0.0.1:{to}/health") as response:
                await response.read()  # else the connection is not kept
            port = opened[-1].getsockname()[1]
            pid = await asyncio.to_thread(_holder, pids, to, port)
            if pid == self.workers[number].pid:
                return http
            await http.close()

    async def clients(self) -> list[Client]:
        """One connection to each worker."""
        return [await self.client(number) for number in range(len(self.workers))]

    async def known_to_all(self, clients: list[Client]) -> None:
        """Until every worker knows every engine."""
        names = {engine.beat.instance for engine in self.engines}
        for client in clients:
            await when(lambda c=client: c.knows(names))


@contextlib.asynccontextmanager
async def several(processes: int = 2, **config: Any) -> AsyncGenerator[Several]:
    """A router of so many workers on free ports of 127.0.0.1, serving, with no engines yet."""
    defaults = RouterConfig(
        processes=processes,
        health=HealthRules(slow_start_s=0.0),
        port=0,
        admin_port=0,
        discovery_port=0,
        kv_insecure=True,
        heartbeat_interval_s=PATIENCE_S,  # engines beat once
        pair_wait_s=0.0,
        drain_s=0.0,
        request_timeout_s=PATIENCE_S,
    )
    async with contextlib.AsyncExitStack() as stack:
        parent = await stack.enter_async_context(open_parent(replace(defaults, **config)))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        dealer = beating(stack, parent.discovery_port)
        yield Several(cast(Serving, _Router(parent)), http, dealer, stack, None)


class Elsewhere(Fleet):
    """A Fleet whose router is another process: nobody tells when a beat was taken."""

    async def beat(self, engine: HttpEngine, **changes: Any) -> None:
        """Send one beat."""
        engine.beat = replace_beat(engine.beat, changes)
        await self.dealer.send(encode_heartbeat(engine.beat))


@dataclass
class _Ports:
    http_port: int
    admin_port: int


_MAIN = "import sys; from xpyd_core.cli import main; sys.exit(main())"


@contextlib.asynccontextmanager
async def process(
    *argv: str, prelude: str = "", inherit: Sequence[int] = ()
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str, str]]:
    """A real `xpyd router` without a secret as a process, and its URLs once it says so: that of
    clients, and its admin port's. `prelude` is Python that it runs first, `inherit` are descriptors
    that it gets.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"{prelude}\n{_MAIN}"),
        *("router", "--kv-insecure", *argv),
        stderr=asyncio.subprocess.PIPE,
        pass_fds=inherit,
    )
    assert child.stderr is not None
    try:
        said = b""
        while b"listens on " not in said:
            said = await child.stderr.readline()
            assert said, "the router ended before it listened"
        reading = asyncio.create_task(child.stderr.read())
        url, admin = said.decode().split("listens on ")[1].split(", admin port ")
        yield child, url, admin.split(",")[0]
    finally:
        if child.returncode is None:
            child.terminate()
            child.send_signal(signal.SIGCONT)  # where a test that failed has stopped it
        await child.wait()
    await reading


@contextlib.asynccontextmanager
async def routed(
    *argv: str, prelude: str = ""
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, Elsewhere]]:
    """A `process` of two workers, with no engines yet."""
    ports = free_port(), free_port(), free_port()
    flags = ("--processes", "2", "--drain-seconds", "0", *argv)
    flags = (*flags, "--port", str(ports[0]), "--discovery-port", str(ports[1]))
    flags = (*flags, "--admin-port", str(ports[2]))
    async with contextlib.AsyncExitStack() as stack:
        child, _, __ = await stack.enter_async_context(process(*flags, prelude=prelude))
        dealer = beating(stack, ports[1])
        http = await stack.enter_async_context(aiohttp.ClientSession())
        router = cast(Serving, _Ports(ports[0], ports[2]))
        yield child, Elsewhere(router, http, dealer, stack, None)


def children(pid: int) -> list[int]:
    """The process's own."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]

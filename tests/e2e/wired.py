"""Fleets with a relay before each D, whose Ps each have their own mode and transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.e2e.harness import Fleet, Process, fleet, listens, wait_for
from tests.e2e.relay import Relay

MODES = ("put-async", "put", "get")
TRANSPORTS = ("tcp", "uds", "shm")
HELD = (
    "xpyd_kv_buffer_used_bytes",
    "xpyd_kv_pool_used_bytes",
    "xpyd_kv_leases",
    "xpyd_engine_requests_running",
    "xpyd_engine_requests_waiting",
)
# What an engine may have more than before: a connection to a peer that was down then, one of HTTP.
SLACK = 3


class Way(NamedTuple):
    """How one P moves KV."""

    mode: str
    transport: str


class Size(NamedTuple):
    """What a process holds of the system."""

    files: int
    threads: int


@dataclass
class Wired:
    """Use through `wired()`. `ps` and `ds` are those that take part."""

    fleet: Fleet
    folder: Path
    flags: tuple[str, ...]
    ps: list[Process] = field(default_factory=list[Process])
    ways: dict[str, Way] = field(default_factory=dict[str, Way])
    """Of each P, by its name."""
    ds: list[Process] = field(default_factory=list[Process])
    relays: list[Relay] = field(default_factory=list[Relay])

    @property
    def engines(self) -> list[Process]:
        return [*self.ps, *self.ds]

    def become(self, ways: list[Way], *, ds: int) -> None:
        """These Ps and so many Ds, ready. Who is there already stays as it is."""
        wanted = list(ways)
        leaving: list[Process] = []
        for p in self.ps:
            if self.ways[p.name] in wanted:
                wanted.remove(self.ways[p.name])
            else:
                leaving.append(p)
        self._stop([*leaving, *self.ds[ds:]])
        new = [self._start_d() for _ in range(ds - len(self.ds))]
        new += [self._start_p(way) for way in wanted]
        self.fleet.wait_ready(*new)

    def _start_p(self, way: Way) -> Process:
        mine = ("--kv-mode", way.mode, "--kv-transport", way.transport)
        folder = ("--kv-socket-dir", str(self.folder / "of-p"))
        self.ps.append(self.fleet.start_engine("Prefill", *mine, *folder, *self.flags))
        self.ways[self.ps[-1].name] = way
        return self.ps[-1]

    def _start_d(self) -> Process:
        number = next(self.fleet.hosts)
        ip, relay_ip = (f"{self.fleet.subnet}.{n}" for n in (number, number + 100))
        ps, ds = self.folder / "of-p", self.folder / "of-d"
        through = ("--kv-advertise", f"{relay_ip}:21001", "--kv-socket-dir", str(ds))
        self.ds.append(self.fleet.start_engine("Decode", *through, *self.flags, ip=ip))
        wait_for("D's KV port", lambda: listens(ip, 21001), 120)
        self.relays.append(Relay(relay_ip, 21001, (ip, 21001), sockets=(ps, ds)))
        return self.ds[-1]

    def _stop(self, leaving: list[Process]) -> None:
        for engine in leaving:
            engine.popen.terminate()
        for engine in leaving:
            engine.stop()
            wait_for("the router forgot it", lambda e=engine: e.name not in self.fleet.states())
        for number, d in reversed([*enumerate(self.ds)]):
            if d in leaving:
                self.relays.pop(number).close()
        self.ps = [p for p in self.ps if p not in leaving]
        self.ds = [d for d in self.ds if d not in leaving]

    def wait_at_rest(self) -> None:
        """Nothing runs, waits or is held: buffers and pools are empty, all blocks are free."""
        for engine in self.engines:

            def is_at_rest(engine: Process = engine) -> bool:
                samples = engine.metrics()
                free = samples["xpyd_engine_kv_blocks_free"]
                all_free = free == samples["xpyd_engine_kv_blocks_total"]
                return all_free and not any(samples[name] for name in HELD)

            wait_for(f"{engine.name} is at rest", is_at_rest, 60)

    def sizes(self) -> dict[str, Size]:
        """Of all processes, the router's too."""
        return {
            process.name: Size(process.open_files(), process.threads())
            for process in (self.fleet.router, *self.engines)
        }

    def wait_no_larger(self, before: dict[str, Size]) -> None:
        """No process has more files or threads than before, but for SLACK."""
        for process in (self.fleet.router, *self.engines):
            most = before[process.name]
            wait_for(
                f"{process.name} has closed what it had opened: {most}",
                lambda p=process, m=most: (
                    p.open_files() <= m.files + SLACK and p.threads() <= m.threads + SLACK
                ),
                60,
            )


@contextmanager
def wired(folder: Path, *flags: str) -> Iterator[Wired]:
    """No engines yet; those that come get `flags`."""
    with fleet(folder) as running:
        scene = Wired(running, folder, flags)
        try:
            yield scene
        finally:
            # Before the engines end, or a stalled relay would keep them waiting.
            for relay in scene.relays:
                relay.close()

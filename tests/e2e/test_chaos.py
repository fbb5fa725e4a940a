"""Chaos on a local 2P2D fleet: an action every three seconds under an open loop of greedy requests.

Engines are killed and stopped, pools scaled, the router is killed, the disk of the state folder
fills, file descriptors run out. No answer is wrong, none hangs, and nothing is lost but what a
killed router held. All of it follows from a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.harness import free_port, http, wait_for
from tests.e2e.oracle import Asked, Case, open_loop
from tests.e2e.test_local_fleet import DOCUMENT, Local
from tests.small_disk import fill, free, mounted

KINDS = ("kill engine", "stop engine", "scale", "kill router", "full disk", "few files")
EVERY_S = 3.0
RATE_PER_S = 4.0
HANGS_S = 60.0
FEW_FILES = 256
HELD = ("xpyd_kv_buffer_used_bytes", "xpyd_kv_pool_used_bytes", "xpyd_kv_leases")


class Chaos:
    """Acts in a thread until `stop`; what it did, when, is in `done`."""

    def __init__(self, local: Local, disk: Path, seed: int) -> None:
        self._local = local
        self._disk = disk
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos")
        self._bag: list[str] = []
        self.done: list[tuple[float, str]] = []
        self.router_kills_s: list[float] = []
        self.failed: list[str] = []

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive(), "an action hangs"

    def _run(self) -> None:
        actions: dict[str, Callable[[], str]] = {
            "kill engine": self._kill_engine,
            "stop engine": self._stop_engine,
            "scale": self._scale,
            "kill router": self._kill_router,
            "full disk": self._fill_disk,
            "few files": self._limit_files,
        }
        while not self._stop.wait(EVERY_S):
            if not self._bag:  # each kind comes as often as the others
                self._bag = self._rng.sample(KINDS, k=len(KINDS))
            kind = self._bag.pop()
            try:
                self.done.append((time.monotonic(), f"{kind}: {actions[kind]()}"))
            except Exception as error:
                self.failed.append(f"{kind}: {error!r}")

    def _pick(self, *roles: str) -> tuple[str, int]:
        """A pod of one of these roles that has a process."""
        pods = [p for p in self._local.status()["pods"] if p["role"] in roles and p["pid"]]
        pod = self._rng.choice(sorted(pods, key=lambda pod: pod["name"]))
        return pod["name"], pod["pid"]

    def _kill_engine(self) -> str:
        name, pid = self._pick("Prefill", "Decode")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return name

    def _stop_engine(self) -> str:
        name, pid = self._pick("Prefill", "Decode")
        lasts_s = self._rng.uniform(0.2, 8.0)
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            return f"{name} was gone"
        try:
            # By descriptor: the pid may belong to another process once the supervisor killed it.
            signal.pidfd_send_signal(process, signal.SIGSTOP)
            self._stop.wait(lasts_s)
            signal.pidfd_send_signal(process, signal.SIGCONT)
        except ProcessLookupError:
            return f"{name}, killed while it was stopped"
        finally:
            os.close(process)
        return f"{name} for {lasts_s:.1f} s"

    def _scale(self) -> str:
        pool, replicas = self._rng.choice(("prefill", "decode")), self._rng.randint(1, 3)
        self._local.xpyd("scale", f"{self._local.name}-{pool}", "--replicas", str(replicas))
        return f"{pool} to {replicas}"

    def _kill_router(self) -> str:
        name, pid = self._pick("Router")
        self.router_kills_s.append(time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return name

    def _fill_disk(self) -> str:
        fill(self._disk)
        try:
            self._stop.wait(EVERY_S)
        finally:
            free(self._disk)
        return f"for {EVERY_S} s"

    def _limit_files(self) -> str:
        """A process may have few files open while more connections than that come to it."""
        name, pid = self._pick("Router")
        url = urlsplit(self._local.status()["endpoint"])
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        held: list[socket.socket] = []
        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (FEW_FILES, before[1]))
            for _ in range(FEW_FILES + 50):
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection((url.hostname, url.port), timeout=1))
            self._stop.wait(EVERY_S)
        finally:
            for one in held:
                one.close()
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        return f"{name} with {len(held)} idle connections"


@contextlib.contextmanager
def _fleet(folder: Path, disk: Path) -> Iterator[Local]:
    file = folder / "fleet.yaml"
    file.write_text(DOCUMENT.replace("NAME", "chaos"))
    local = Local("chaos", disk)
    try:
        local.xpyd("up", "-f", str(file), "--detach", "--port", str(free_port()))
        yield local
    finally:
        local.xpyd("down", "chaos")


def _nothing_is_held(local: Local) -> bool:
    """Each engine has all of its blocks back, and no lease of buffer or pool."""
    for pod in local.status()["pods"]:
        if pod["role"] == "Router":
            continue
        lines = http(f"http://{pod['http']}/metrics")[1].decode().splitlines()
        samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        value = {name.partition("{")[0]: float(text) for name, text in samples.items()}
        free_blocks = value["xpyd_engine_kv_blocks_free"]
        if free_blocks != value["xpyd_engine_kv_blocks_total"]:
            return False
        if any(value.get(name, 0.0) for name in HELD):
            return False
    return True


def _wreak(tmp_path: Path, cases: list[Case], *, seed: int, seconds: float) -> None:
    with mounted(tmp_path / "disk", "24m") as disk, _fleet(tmp_path, disk) as local:
        supervisor = local.status()["supervisor_pid"]
        endpoint = local.status()["endpoint"]
        start_s = time.monotonic()
        with Chaos(local, disk, seed) as chaos:
            load = open_loop(endpoint, cases, rate=RATE_PER_S, seconds=seconds, timeout_s=HANGS_S)
            asked = asyncio.run(load)
        did = "\n".join(f"{at_s - start_s:.1f} s {what}" for at_s, what in chaos.done)
        lost = [
            f"{one.began_s - start_s:.1f} s, for {one.ended_s - one.began_s:.1f} s: {one.what}"
            for one in asked
            if one.what and (one.what[0] == "wrong" or not _was_held(one, chaos))
        ]
        assert not lost, "\n".join([did, f"{len(lost)} of {len(asked)} lost:", *lost])
        assert not chaos.failed, did
        assert len(chaos.done) > seconds / 20, did  # an action may take its time, but they go on
        assert sum(one.what is None for one in asked) > len(asked) / 2
        local.wait_ready()
        assert local.status()["supervisor_pid"] == supervisor, "the supervisor ended"
        wait_for("all KV memory free", lambda: _nothing_is_held(local))


def _was_held(asked: Asked, chaos: Chaos) -> bool:
    """Whether the router was killed while it had this request."""
    return any(asked.began_s <= at_s <= asked.ended_s for at_s in chaos.router_kills_s)


@pytest.mark.slow
@pytest.mark.long
def test_a_minute_of_chaos_loses_nothing_but_what_a_killed_router_held(
    tmp_path: Path, cases: list[Case]
) -> None:
    _wreak(tmp_path, cases, seed=1, seconds=60)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2])
def test_ten_minutes_of_chaos(tmp_path: Path, cases: list[Case], seed: int) -> None:
    _wreak(tmp_path, cases, seed=seed, seconds=600)

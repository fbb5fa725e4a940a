"""Real processes on loopback for end-to-end tests: routers and engines, each on its own address.

`Fleet` starts `xpyd router` and `xpyd worker` (or a stand-in for it) with the environment a pod
has, keeps their logs, reads their metrics and ends them. Every wait has a deadline. It knows
the programs only from outside: flags, HTTP, signals.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.oracle import Case
from tests.warm_start import WarmProcess, start_warm
from xpyd_core.pod_env import ROUTER_ADMIN_PORT

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "examples/demo-model"
START_TIMEOUT_S = 90.0
HELD = ("xpyd_kv_buffer_used_bytes", "xpyd_kv_pool_used_bytes", "xpyd_kv_leases")
"""Gauges of what an engine holds for transfers."""
_subnets = itertools.count(1)


def wait_for(what: str, probe: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Ask `probe` until it answers something true; AssertionError names `what` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = probe()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def http(
    url: str, body: Any = None, *, headers: dict[str, str] | None = None, timeout_s: float = 60.0
) -> tuple[int, bytes]:
    """One request, POST when there is a body (bytes go as they are): (status, body), 4xx too."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data=data, headers={"Content-Type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def listens(ip: str, port: int) -> bool:
    """Whether somebody accepts TCP connections there."""
    try:
        socket.create_connection((ip, port), timeout=1).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    """A port of 127.0.0.1 for `xpyd up --port`: two of these that start at once, in two of the
    tests' processes, may else find the same one free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Process:
    """One started program and its log."""

    name: str
    ip: str
    popen: WarmProcess
    log_path: Path
    http_port: int
    start: Callable[[], WarmProcess]
    """The same once more: name, address, flags and log."""
    role: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.ip}:{self.http_port}"

    @property
    def admin(self) -> str:
        """Where metrics are: an engine has one port, a router two."""
        return self.url if self.role else f"http://{self.ip}:{ROUTER_ADMIN_PORT}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics; labels are part of the name: `name{a=b,c=d}`."""
        _, body = http(f"{self.admin}/metrics", timeout_s=10)
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def metric(self, name: str) -> float:
        """One sample, or the sum over its labels when `name` has none; 0 when absent."""
        samples = self.metrics()
        if name in samples:
            return samples[name]
        return sum(value for key, value in samples.items() if key.split("{")[0] == name)

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.popen.pid}/fd"))

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.popen.pid}/task"))

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM and wait; the exit status. SIGKILL at the deadline."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(10)
        return self.popen.returncode

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(10)

    def restart(self) -> None:
        """Kill -9, and start it again at once, as whatever watches over it does."""
        self.kill()
        self.popen = self.start()


def ranks_of(engine: Process) -> list[int]:
    """The processes of its ranks, all of them children of the first."""
    main = Path(f"/proc/{engine.popen.pid}/task")
    pids = [pid for one in main.iterdir() for pid in (one / "children").read_text().split()]
    named = {Path(f"/proc/{pid}/comm").read_text().strip(): int(pid) for pid in pids}
    return [named[name] for name in sorted(named) if name.startswith("xpyd-rank-")]


def rank_steps(engine: Process) -> list[float]:
    """Of each rank, all replicas'."""
    found = engine.metrics().items()
    return [value for name, value in found if name.startswith("xpyd_engine_rank_steps_total")]


@dataclass
class Fleet:
    """A router and engines on 127.x.y.n; use through `fleet()`."""

    folder: Path
    subnet: str
    processes: list[Process] = field(default_factory=list[Process])
    hosts: Iterator[int] = field(default_factory=lambda: itertools.count(2))
    heartbeat_ms: int = 500

    @property
    def router(self) -> Process:
        return next(p for p in self.processes if p.name == "router-0")

    def engine(self, role: str) -> Process:
        """The first engine of that role."""
        return next(p for p in self.processes if p.role == role)

    @property
    def engines(self) -> list[Process]:
        """Those that run."""
        return [p for p in self.processes if p.role and p.popen.poll() is None]

    @property
    def key_file(self) -> Path:
        path = self.folder / "key"
        if not path.exists():
            path.write_text(secrets.token_hex(32))
            path.chmod(0o600)
        return path

    def _spawn(self, name: str, ip: str, argv: Sequence[str], env: dict[str, str]) -> Process:
        log_path = self.folder / f"{name}.log"

        def start() -> WarmProcess:
            with log_path.open("ab") as log:
                return start_warm(argv, stderr=log, env={**os.environ, **env})

        process = Process(name, ip, start(), log_path, int(env["XPYD_HTTP_PORT"]), start)
        self.processes.append(process)
        return process

    def start_router(self, *flags: str, env: dict[str, str] | None = None) -> Process:
        ip = f"{self.subnet}.1"
        timing = ["--heartbeat-interval-ms", str(self.heartbeat_ms), "--missed-beats", "4"]
        address = ["--host", ip, "--port", "10001", "--discovery-host", ip]
        # By turns, so that a test knows that every instance is asked.
        turns = ("--policy", "RoundRobin", "--slow-start-seconds", "0")
        argv = ["xpyd_core", "router", *address, *timing, "--drain-seconds", "0.2", *turns, *flags]
        pod = {"XPYD_HTTP_PORT": "10001", "XPYD_KV_KEY_FILE": str(self.key_file), **(env or {})}
        process = self._spawn("router-0", ip, argv, pod)
        wait_for("router health", lambda: self._answers(process, "/health"), START_TIMEOUT_S)
        return process

    def start_engine(
        self,
        role: str,
        *flags: str,
        name: str = "",
        ip: str = "",
        module: Sequence[str] = ("xpyd_core", "worker"),
        model: Path = DEMO_MODEL,
        env: dict[str, str] | None = None,
    ) -> Process:
        """Start an engine and return at once; `wait_ready` waits until the router has it."""
        number = next(self.hosts)
        ip = ip or f"{self.subnet}.{number}"
        name = name or f"{role.lower()}-{number}"
        argv = [
            *module,
            *("--model", str(model), "--served-model-name", "demo", "--dtype", "float32"),
            *("--heartbeat-period-ms", str(self.heartbeat_ms), "--threads", "1"),
            *("--kv-cache-memory", "64Mi", "--kv-buffer-size", "16Mi"),
            *("--kv-host-pool-size", "32Mi", *flags),
        ]
        pod = {
            "XPYD_ROLE": role,
            "XPYD_POD_IP": ip,
            "XPYD_HTTP_PORT": "20001",
            "XPYD_KV_PORT": "21001",
            "XPYD_DISCOVERY": f"{self.subnet}.1:30001",
            "XPYD_KV_KEY_FILE": str(self.key_file),
            "XPYD_INSTANCE": name,
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        process = self._spawn(name, ip, argv, pod)
        process.role = role
        return process

    @staticmethod
    def _answers(process: Process, path: str) -> bool:
        assert process.popen.poll() is None, f"{process.name} ended:\n{process.log[-3000:]}"
        try:
            return http(f"{process.url}{path}", timeout_s=5)[0] == 200
        except OSError:
            return False

    def instances(self) -> list[dict[str, Any]]:
        return json.loads(http(f"{self.router.admin}/instances", timeout_s=5)[1])["instances"]

    def states(self) -> dict[str, str]:
        """Instance name -> state, as the router sees it."""
        return {i["instance"]: i["state"] for i in self.instances()}

    def wait_healthy(self, *engines: Process, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until each answers /health with 200, whether or not a router knows it."""
        for engine in engines:
            wait_for(
                f"health of {engine.name}", lambda e=engine: self._answers(e, "/health"), timeout_s
            )

    def wait_ready(self, *engines: Process, timeout_s: float = START_TIMEOUT_S) -> None:
        for engine in engines:
            self.wait_healthy(engine, timeout_s=timeout_s)
            wait_for(
                f"{engine.name} in the router",
                lambda e=engine: self.states().get(e.name) == "Ready",
                timeout_s,
            )

    def complete(self, **body: Any) -> dict[str, Any]:
        """POST /v1/completions through the router, greedy; the answer, which must be a 200."""
        request = {"model": "demo", "temperature": 0, **body}
        status, answer = http(f"{self.router.url}/v1/completions", request)
        assert status == 200, answer
        return json.loads(answer)

    def answer(self, case: Case) -> tuple[int, ...]:
        """What the fleet answers to the case's prompt: as many tokens as the case has."""
        answer = self.complete(
            prompt=list(case.prompt),
            max_tokens=len(case.ids),
            ignore_eos=True,
            return_token_ids=True,
        )
        return tuple(answer["choices"][0]["token_ids"])

    def holds_nothing(self) -> bool:
        """Whether each engine has all of its blocks back, and no lease of buffer or pool."""
        for engine in self.engines:
            samples = engine.metrics()
            free_blocks = samples["xpyd_engine_kv_blocks_free"]
            if free_blocks != samples["xpyd_engine_kv_blocks_total"]:
                return False
            if any(samples.get(name, 0.0) for name in HELD):
                return False
        return True

    def stop(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.terminate()
        for process in self.processes:
            process.stop(15)


@contextmanager
def empty_fleet(folder: Path) -> Iterator[Fleet]:
    """A fleet in which nothing runs yet; ended on leaving."""
    subnet = f"127.{60 + os.getpid() % 150}.{next(_subnets) % 250}"
    running = Fleet(folder, subnet)
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def fleet(
    folder: Path, *, prefill: int = 0, decode: int = 0, flags: Sequence[str] = ()
) -> Iterator[Fleet]:
    """A fleet of `prefill` + `decode` ready engines that get `flags`; ended on leaving."""
    with empty_fleet(folder) as running:
        running.start_router()
        engines = [running.start_engine("Prefill", *flags) for _ in range(prefill)]
        engines += [running.start_engine("Decode", *flags) for _ in range(decode)]
        running.wait_ready(*engines)
        yield running

"""The programs that are measured: how each is started, and when it is ready."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.environments import NotHere, cache, environment
from bench.process import Processes, free_port
from bench.router.interpreter import own_path
from bench.router.mocks import Mocks, beating, beats
from bench.router.programs import programs
from bench.router.shape import Program, Row
from bench.router.tls import behind_nginx, certificate, nginx

ROOT = Path(__file__).parents[2]
PEERS: dict[Program, str] = {"vllm-router": "0.1.17", "smg": "1.13.0"}
_INSTALL_S = 300.0
_START_S = 60.0
_ASK_S = 5.0
_POLL_S = 0.05
_LOOPBACK = ("--host", "127.0.0.1")
_FEATURES = ("--policy", "LeastLoaded")
"""What our rows are to carry with them. What is on by default is not named."""
_OWN_ARGS = (
    *("--kv-insecure", "--drain-seconds", "0"),
    # Engines stay known while it is stopped, for as long as all others may take in a case. The
    # peers' deadlines are fixed: they learn of the engines anew before their turn begins.
    *("--heartbeat-interval-ms", "10000", "--missed-beats", "100"),
)


class ContenderFailed(Exception):
    """It did not start, ended, or did not answer as asked; says why."""


@dataclass(frozen=True)
class Ports:
    """Of one router; a program takes those that it knows."""

    http: int = field(default_factory=free_port)
    discovery: int = field(default_factory=free_port)
    metrics: int = field(default_factory=free_port)
    inner: int = field(default_factory=free_port)
    """Of a router behind nginx."""


class Router(Processes):
    """A running router; `row` says which."""

    def __init__(self, row: Row, process: subprocess.Popen[bytes], log: Path, port: int) -> None:
        super().__init__(process, log)
        self.row = row
        self.port = port

    def forget_log(self) -> None:
        """Empty its log: it may grow by megabytes a second."""
        os.truncate(self._log, 0)

    def wait_ready(self) -> None:
        """Until it answers a request out of an engine. ContenderFailed."""
        until_s = time.monotonic() + _START_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > until_s:
                how = "ended" if self.process.poll() is not None else "did not start"
                raise ContenderFailed(f"{self.row.name} {how}: {self.complaint()}")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        body = json.dumps({"model": "m", "prompt": "is it ready?", "max_tokens": 16})
        connection = connect(self.port, is_tls=self.row.is_tls, timeout_s=_ASK_S)
        try:
            headers = {"Content-Type": "application/json", **_authorization(self.row)}
            connection.request("POST", "/v1/completions", body, headers)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def connect(port: int, *, is_tls: bool, timeout_s: float) -> http.client.HTTPConnection:
    """A client of a router here."""
    if not is_tls:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    anyone = ssl._create_unverified_context()  # pyright: ignore[reportPrivateUsage]
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=timeout_s, context=anyone)


def _authorization(row: Row) -> dict[str, str]:
    return {"Authorization": f"Bearer {row.key}"} if row.key else {}


def peer_environment() -> Path:
    """The peers' environment, made if it is not there. NotHere."""
    pins = [f"{name}=={number}" for name, number in PEERS.items()]
    return environment(
        cache() / "bench-router" / "-".join(PEERS.values()), *pins, timeout_s=_INSTALL_S
    )


def absent(row: Row) -> str:
    """Why this row cannot be measured here; empty where it can."""
    if row.program in PEERS:
        try:
            peer_environment()
        except NotHere as error:
            return str(error)
    if row.is_tls:
        try:
            programs(tls=True)
            if row.program in PEERS:
                nginx()
        except NotHere as error:
            return str(error)
    if row.processes > 1 and "--processes" not in _own_flags():
        return "`xpyd router` has no --processes"
    return ""


def _own_flags() -> str:
    argv = [str(ROOT / ".venv/bin/xpyd"), "router", "--help"]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_START_S).stdout


def argv_of(
    row: Row,
    ports: Ports,
    mocks: Mocks,
    own_args: Sequence[str] = (),
    *,
    python: str,
    folder: Path = Path(),
) -> list[str]:
    """The command line; `python` runs ours, `folder` is for certificates. The peers take the policy
    that costs them least: round robin.
    """
    if row.is_tls and row.program in PEERS:
        behind = replace(ports, http=ports.inner)
        argv = argv_of(replace(row, is_tls=False), behind, mocks, python=python)
        return behind_nginx(argv, folder, port=ports.http, inner=ports.inner)
    http = [*_LOOPBACK, "--port", str(ports.http)]
    if row.program == "xpyd":
        own = [
            python,
            "-P",
            "-m",
            "xpyd_core",
            "router",
            *http,
            "--admin-port=0",
            *_OWN_ARGS,
            *_FEATURES,
        ]
        processes = ["--processes", str(row.processes)] if row.processes > 1 else []
        key = ["--api-key", row.key] if row.key else []
        if row.is_tls:
            shown, private = certificate(folder)
            key += ["--ssl-certfile", str(shown), "--ssl-keyfile", str(private)]
        return [*own, "--discovery-port", str(ports.discovery), *processes, *key, *own_args]
    program = str(peer_environment() / "bin" / row.program)
    common = [*http, "--policy", "round_robin", "--prometheus-port", str(ports.metrics)]
    if row.program == "vllm-router":
        discovery = f"127.0.0.1:{ports.discovery}"
        found = ["--vllm-pd-disaggregation", "--vllm-discovery-address", discovery]
        return [program, *common, *found]
    return [program, "launch", *common, "--pd-disaggregation", *_static(mocks)]


def _static(mocks: Mocks) -> Iterable[str]:
    for number, port in enumerate(mocks.prefills):
        yield from ("--prefill", f"http://127.0.0.1:{port}", str(8998 + number))
    for port in mocks.decodes:
        yield from ("--decode", f"http://127.0.0.1:{port}")


@contextmanager
def running(
    row: Row,
    mocks: Mocks,
    folder: Path,
    *,
    cores: str,
    python: str = sys.executable,
    own_args: Sequence[str] = (),
) -> Generator[Router]:
    """The router while the block runs, ready; `python` runs ours. ContenderFailed."""
    ports = Ports()
    log = folder / f"{row.name}.log"
    is_ours = row.program == "xpyd"
    argv = argv_of(row, ports, mocks, own_args, python=python, folder=folder)
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["taskset", "-c", cores, *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env={**os.environ, "NO_COLOR": "1", **({"PYTHONPATH": own_path()} if is_ours else {})},
        )
    router = Router(row, process, log, ports.http)
    try:
        with beating(beats(mocks, row), ports.discovery):
            router.wait_ready()
            yield router
    finally:
        router.end()

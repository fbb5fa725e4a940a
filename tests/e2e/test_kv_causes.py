"""Ten reasons for which KV does not move, each put into a fleet of real processes: the condition
KVTransferVerified names the cause, the instances and the fix within 60 s.

The condition is the operator's: its RouterReader reads the routers at its own intervals, and finds
them and the engines' pods as it does in a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import DEMO_MODEL, Fleet, Process, empty_fleet, http, wait_for
from tests.e2e.relay import Relay
from tests.operator.kube_objects import KEY, REVISION, RoutersWorld, ready_pod
from xpyd_core.pod_env import ROUTER_ADMIN_PORT
from xpyd_operator.controller.decision.kinds import POD
from xpyd_operator.status.verified import KvVerdict

pytestmark = pytest.mark.slow
WITHIN_S = 60.0
"""From the cause on, until the condition names it."""
PROMPT = "San Francisco is a city that "
_namespaces = itertools.count(1)


@dataclass
class Watched:
    """A fleet, and the operator's condition of it."""

    fleet: Fleet
    world: RoutersWorld
    _started: threading.Event = field(default_factory=threading.Event)

    @property
    def verdict(self) -> KvVerdict:
        return self.world.reader.verdict(KEY)

    def has_pod(self, engine: Process, role: str = "") -> None:
        """The engine is a ready pod of a pool of `role`, as far as the API server knows."""
        role = role or engine.role
        owner = f"chat-{role.lower()}-{REVISION}-5d9c7b8f4d"
        self.world.cache.put(POD, ready_pod(engine.name, role=role, ip=engine.ip, owner=owner))

    def start(self, role: str, *flags: str, **more: Any) -> Process:
        engine = self.fleet.start_engine(role, *flags, **more)
        self.has_pod(engine)
        return engine

    def wait_named(self, reason: str, *texts: str) -> None:
        """Until the condition is False for `reason`, with all of `texts` in its message."""
        verdicts: list[KvVerdict] = []

        def is_named() -> bool:
            verdicts.append(self.verdict)
            verdict = verdicts[-1]
            return verdict[:2] == (False, reason) and all(t in verdict.message for t in texts)

        try:
            wait_for(f"{reason} with {texts}", is_named, WITHIN_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; said last: {verdicts[-1]}") from None

    def wait_verified(self) -> None:
        wait_for("the condition is True", lambda: self.verdict.status is True, WITHIN_S)

    def ask(self, times: int = 1, **body: Any) -> None:
        for _ in range(times):
            self.fleet.complete(prompt=PROMPT + secrets.token_hex(8), max_tokens=4, **body)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with empty_fleet(tmp_path) as running:
        router = ready_pod("router-0", ip=f"{running.subnet}.1")
        made = Watched(running, RoutersWorld(ROUTER_ADMIN_PORT, router, clock=time.monotonic))
        loop = asyncio.new_event_loop()
        reading = loop.create_task(made.world.reader.run())
        thread = threading.Thread(target=_run, args=(loop, reading), daemon=True)
        thread.start()
        try:
            yield made
        finally:
            loop.call_soon_threadsafe(reading.cancel)
            thread.join(10)
            loop.close()


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(task)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@dataclass(frozen=True)
class Link:
    """A network namespace at the other end of a veth pair."""

    namespace: str
    here: str
    there: str

    def drop(self, port: int) -> None:
        """A rule there: what comes to `port` is dropped, as a firewall does it."""
        rule = ("iptables", "-A", "INPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP")
        _ip("netns", "exec", self.namespace, *rule)

    def pass_all(self) -> None:
        _ip("netns", "exec", self.namespace, "iptables", "-F", "INPUT")


@pytest.fixture
def link() -> Iterator[Link]:
    number = next(_namespaces) + 10 * (os.getpid() % 25)
    name = f"xpyd{os.getpid()}x{number}"
    found = Link(name, f"10.213.{number % 250}.1", f"10.213.{number % 250}.2")
    if os.geteuid() or not (shutil.which("ip") and shutil.which("iptables")):
        pytest.skip("a network namespace needs root, ip and iptables")
    near, far = f"xk{number}a", f"xk{number}b"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace here: {error.stderr.decode()}")
    try:
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _ip("address", "add", f"{found.here}/24", "dev", near)
        _ip("link", "set", near, "up")
        for words in (
            ("address", "add", f"{found.there}/24", "dev", far),
            ("link", "set", far, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", name, *words)
        yield found
    finally:
        _ip("netns", "delete", name)


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_firewall_is_named_and_so_is_that_it_opened(
    watched: Watched, link: Link, is_connected: bool
) -> None:
    """Also where it comes between two that have a connection."""
    fleet = watched.fleet
    fleet.start_router("--discovery-host", link.here, "--kv-verify", "strict")
    beats = {"XPYD_DISCOVERY": f"{link.here}:30001"}
    p = watched.start("Prefill", ip=link.here, env=beats)
    if not is_connected:
        link.drop(21001)
    worker = ("tests.e2e.netns_worker", link.namespace)
    d = watched.start("Decode", ip=link.there, env=beats, module=worker)
    fleet.wait_ready(p, d)
    if is_connected:
        watched.wait_verified()
        link.drop(21001)
    address = f"no_answer at {link.there}:21001"
    watched.wait_named("NoAnswer", f"{p.name} to {d.name}", address, "a firewall or NetworkPolicy")
    assert fleet.router.metric("xpyd_router_has_pair") == 0
    link.pass_all()
    wait_for("the pair is back", lambda: fleet.router.metric("xpyd_router_has_pair") == 1, WITHIN_S)
    watched.ask()


def test_a_wrong_key_is_named(watched: Watched, tmp_path: Path) -> None:
    """D has the second key of a rotation alone, as where its pods were forgotten."""
    ours, other = secrets.token_hex(32), secrets.token_hex(32)
    for name, keys in (("both", (ours, other)), ("ours", (ours,)), ("other", (other,))):
        (tmp_path / name).write_text("\n".join(keys))
        (tmp_path / name).chmod(0o600)
    env = {name: {"XPYD_KV_KEY_FILE": str(tmp_path / name)} for name in ("both", "ours", "other")}
    watched.fleet.start_router(env=env["both"])
    p, d = watched.start("Prefill", env=env["ours"]), watched.start("Decode", env=env["other"])
    watched.fleet.wait_ready(p, d)
    watched.wait_named("KeyMismatch", f"{p.name} to {d.name}: key", "kvTransfer.keySecretRef")


@pytest.mark.long
def test_an_engine_of_another_key_than_the_routers_is_named(
    watched: Watched, tmp_path: Path
) -> None:
    (tmp_path / "other").write_text(secrets.token_hex(32))
    (tmp_path / "other").chmod(0o600)
    watched.fleet.start_router()
    p = watched.start("Prefill")
    d = watched.start("Decode", env={"XPYD_KV_KEY_FILE": str(tmp_path / "other")})
    watched.fleet.wait_ready(p)
    watched.fleet.wait_healthy(d)
    watched.wait_named("KeyMismatch", d.name, "kvTransfer.keySecretRef")


@pytest.mark.long
def test_a_p_that_is_never_asked_is_named(watched: Watched) -> None:
    """Its heartbeats reach no router: D serves all requests alone, and all answers are right."""
    watched.fleet.start_router("--on-no-prefill", "PrefillOnDecode")
    p = watched.start("Prefill", env={"XPYD_DISCOVERY": "127.0.0.1:9"})
    d = watched.start("Decode")
    watched.fleet.wait_healthy(p)
    watched.fleet.wait_ready(d)
    watched.wait_named("NoHeartbeats", p.name, "XPYD_DISCOVERY")
    watched.ask(3)
    watched.wait_named("PrefillIdle", p.name, "XPYD_DISCOVERY")


@pytest.mark.long
def test_missing_shared_memory_is_named(watched: Watched, tmp_path: Path) -> None:
    """The two have not the same folder, as in pods without sameHostPath, or on two nodes."""
    watched.fleet.start_router()
    flags = ("--kv-transport", "shm", "--kv-socket-dir")
    p = watched.start("Prefill", *flags, str(tmp_path / "p"))
    d = watched.start("Decode", *flags, str(tmp_path / "d"))
    watched.fleet.wait_ready(p, d)
    watched.wait_named("NoSharedMemory", f"{p.name} to {d.name}", "kvTransfer.sameHostPath")


@pytest.mark.parametrize(
    ("factor", "fix"),
    [
        ("kv_dtype", "one dtype of the KV cache"),
        ("revision", "one revision of the model"),
        ("tokenizer", "the tokenizer files of one checkpoint"),
    ],
)
@pytest.mark.long
def test_what_p_and_d_do_not_share_is_named_with_both_values(
    factor: str, fix: str, watched: Watched, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    watched.fleet.start_router("--on-no-prefill", "PrefillOnDecode")
    p = watched.start("Prefill", model=model)
    watched.fleet.wait_ready(p)
    if factor == "tokenizer":
        path = model / "tokenizer.json"
        path.write_text(path.read_text() + "\n")
    elif factor == "revision":
        [path] = model.glob("*.safetensors")
        path.write_bytes(path.read_bytes()[:-2] + b"\x3f\x3f")
    flags = ("--dtype", "bfloat16") if factor == "kv_dtype" else ()
    d = watched.start("Decode", *flags, model=model)
    watched.fleet.wait_ready(d)
    watched.ask(2)
    watched.wait_named(
        "Incompatible",
        f"{p.name} to {d.name}: incompatible (incompatible:{factor} at {d.ip}:21001: {factor}: P",
        ", D has ",
        fix,
    )


@pytest.mark.long
def test_a_wrong_role_is_named(watched: Watched) -> None:
    watched.fleet.start_router("--on-no-prefill", "PrefillOnDecode")
    wrong = watched.fleet.start_engine("Decode", name="prefill-0")
    watched.has_pod(wrong, role="Prefill")
    d = watched.start("Decode")
    watched.fleet.wait_ready(wrong, d)
    watched.wait_named("WrongRole", "prefill-0 of a Prefill pool", "it is Decode", "XPYD_ROLE")


@pytest.mark.long
def test_a_d_without_room_is_named_with_its_numbers(watched: Watched) -> None:
    """A D that computes slowly: it runs for a twentieth of the time, so that requests stay."""
    watched.fleet.heartbeat_ms = 1000
    watched.fleet.start_router("--kv-probe-seconds", "0")
    p = watched.start("Prefill")
    # Some three requests.
    d = watched.start("Decode", "--kv-cache-memory", "6Mi", "--kv-buffer-size", "0")
    watched.fleet.wait_ready(p, d)
    over = threading.Event()
    body = {"model": "demo", "max_tokens": 1400, "ignore_eos": True, "temperature": 0}

    def ask(number: int) -> None:
        prompt = [10 + number] * 600
        with contextlib.suppress(OSError):
            http(f"{watched.fleet.router.url}/v1/completions", {**body, "prompt": prompt})

    def slow() -> None:
        while not over.wait(0.02):
            d.popen.send_signal(signal.SIGSTOP)
            over.wait(0.38)
            d.popen.send_signal(signal.SIGCONT)

    with ThreadPoolExecutor(9) as pool:
        pool.submit(slow)
        for number in range(8):
            pool.submit(ask, number)
        try:
            watched.wait_named("NoRoom", f"{d.name} has ", " blocks free", "kvTransfer.bufferSize")
        finally:
            over.set()
            d.kill()
            p.kill()
            watched.fleet.router.kill()


@pytest.mark.long
def test_a_wait_that_is_too_short_is_named_with_what_a_probe_takes(watched: Watched) -> None:
    """A network of 60 KB/s, over which a probe takes a second, and KV of a prompt much more."""
    fleet = watched.fleet
    fleet.start_router()
    p = watched.start("Prefill")
    number = 200
    relay = Relay(
        f"{fleet.subnet}.{number}",
        21001,
        (f"{fleet.subnet}.{number + 1}", 21001),
        bytes_per_s=60_000,
    )
    try:
        d = watched.start(
            "Decode",
            *("--kv-advertise", f"{fleet.subnet}.{number}:21001", "--kv-wait-seconds", "1"),
            ip=f"{fleet.subnet}.{number + 1}",
        )
        fleet.wait_ready(p, d)
        watched.wait_verified()
        for _ in range(3):
            fleet.complete(prompt=[secrets.randbelow(900) + 10] * 300, max_tokens=4)
        watched.wait_named(
            "WaitTooShort", f"{p.name} to {d.name}: ", "64 KiB took up to", "waitSeconds"
        )
    finally:
        relay.close()


def test_a_fleet_without_a_fault_is_verified_and_names_none(watched: Watched) -> None:
    watched.fleet.start_router("--kv-verify", "strict")
    p, d = watched.start("Prefill"), watched.start("Decode")
    watched.fleet.wait_ready(p, d)
    watched.ask(2)
    watched.wait_verified()
    status, body = http(f"{watched.fleet.router.admin}/instances")
    assert status == 200
    said = json.loads(body)
    assert said["kv_problems"] == []
    assert said["kv_slowest"]["prefill"] == p.name

"""`xpyd up` and its sisters with real engines: scaling, crashes, Ctrl-C."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import quick_probes
from tests.e2e.harness import DEMO_MODEL, ROOT, free_port, http, wait_for
from tests.e2e.oracle import Case, load, open_loop

pytestmark = pytest.mark.slow

DOCUMENT = f"""
apiVersion: xpyd.dev/v1alpha1
kind: InferenceFleet
metadata: {{name: NAME}}
spec:
  model: {{uri: "file://{DEMO_MODEL}", servedNames: [demo]}}
  engine: {{args: [--dtype=float32, --kv-cache-memory=64Mi]}}
  pools:
  - {{name: prefill, role: Prefill, replicas: 2, resources: {{gpus: 0}}}}
  - {{name: decode, role: Decode, replicas: 2, resources: {{gpus: 0}}}}
  kvTransfer: {{bufferSize: 16Mi, hostPoolSize: 32Mi}}
  heartbeat: {{intervalMilliseconds: 500, missedBeats: 4}}
"""


@dataclass
class Local:
    """A fleet that `xpyd` runs, seen through its command."""

    name: str
    state: Path

    def start(self, *arguments: str, module: str = "xpyd_core") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, "XDG_STATE_HOME": str(self.state)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def xpyd(self, *arguments: str, status: int = 0, module: str = "xpyd_core") -> str:
        process = self.start(*arguments, module=module)
        out, err = process.communicate(timeout=150)
        assert process.returncode == status, f"{arguments}: {out}\n{err}"
        return out + err

    def status(self) -> dict[str, Any]:
        return json.loads(self.xpyd("status", self.name, "--output", "json"))

    def pods(self) -> dict[str, dict[str, Any]]:
        return {pod["name"]: pod for pod in self.status()["pods"]}

    def pids(self) -> dict[str, int]:
        return {name: pod["pid"] for name, pod in self.pods().items()}

    def wait_ready(self) -> None:
        wait_for(f"{self.name} ready", lambda: self.status()["ready"], 90)


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("local")
    file = folder / "fleet.yaml"
    file.write_text(DOCUMENT.replace("NAME", "pair"))
    local = Local("pair", folder / "state")
    try:
        local.xpyd(str(file), str(free_port()), module=quick_probes.__name__)
        yield local
    finally:
        local.xpyd("down", "pair")


def _ask(endpoint: str) -> str:
    body = {"model": "demo", "prompt": "Return a", "max_tokens": 8, "temperature": 0}
    status, raw = http(f"{endpoint}/v1/completions", body)
    assert status == 200, raw
    return json.loads(raw)["choices"][0]["text"]


def test_each_pod_has_its_own_address_with_a_pods_ports(two_by_two: Local) -> None:
    pods = two_by_two.pods()
    engines = [pod for pod in pods.values() if pod["role"] in ("Prefill", "Decode")]
    assert len({pod["address"] for pod in pods.values()}) == 5
    assert all(pod["address"].startswith("127.1.") for pod in pods.values())
    assert {pod["http"].rsplit(":")[-1] for pod in engines} == {"20001"}


def _is_forked(pid: int) -> bool:
    """Its first environment is that of the fork server, which has nothing of a pod."""
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    line = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"xpyd_core\0worker\0" in line
    return b"XPYD_POD_IP" not in environ


def _fork_server(supervisor: int) -> int:
    found = [pid for pid in _children(supervisor) if _name(pid) == "xpyd-forkserver"]
    assert len(found) == 1
    return found[0]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.mark.parametrize(("pool", "how"), [("decode", "SIGKILL"), ("prefill", "SIGSTOP")])
@pytest.mark.long
def test_a_restarted_engine_is_forked_again_also_where_the_fork_server_ends_or_hangs(
    two_by_two: Local, pool: str, how: str
) -> None:
    two_by_two.wait_ready()
    before = two_by_two.pids()
    supervisor = two_by_two.status()["supervisor_pid"]
    engines = [name for name in before if "router" not in name]
    assert all(_is_forked(before[name]) for name in engines)
    first = _fork_server(supervisor)

    one, other = f"pair-{pool}-0", f"pair-{pool}-1"
    _kill(two_by_two, one)
    assert _is_forked(two_by_two.pids()[one])
    assert _fork_server(supervisor) == first

    os.kill(first, signal.Signals[how])
    _kill(two_by_two, other)
    after = two_by_two.pids()
    assert {name for name in before if before[name] != after[name]} == {one, other}
    assert not _runs_still(first)
    _kill(two_by_two, other)
    assert _is_forked(two_by_two.pids()[other])
    assert _fork_server(supervisor) != first


def _kill(local: Local, engine: str) -> None:
    """Kill it, and wait for its restart."""
    pid = local.pids()[engine]
    os.kill(pid, signal.SIGKILL)
    wait_for("its restart", lambda: local.pids()[engine] not in (0, pid))
    local.wait_ready()


@pytest.mark.parametrize(("role", "pool"), [("P", "prefill"), ("D", "decode")])
def test_kill_9_under_load_loses_no_request_and_the_process_returns(
    two_by_two: Local, cases: list[Case], role: str, pool: str
) -> None:
    two_by_two.wait_ready()
    endpoint = two_by_two.status()["endpoint"]
    before = two_by_two.pids()
    victim = f"pair-{pool}-0"
    result = asyncio.run(
        load(endpoint, cases, seconds=6, at_half=lambda: os.kill(before[victim], signal.SIGKILL))
    )
    assert not result.wrong
    assert not result.errors
    assert result.agreed > 0
    # Only streams that ran on the dead D may break: at most one for each client.
    assert len(result.broken_streams) <= (0 if role == "P" else 32)

    two_by_two.wait_ready()
    after = two_by_two.pids()
    assert after.pop(victim) != before.pop(victim)
    assert after == before
    metrics = f"http://{two_by_two.pods()[victim]['http']}/metrics"

    def served() -> bool:
        _ask(endpoint)
        return any(
            line.startswith("xpyd_engine_requests_total") and not line.endswith(" 0.0")
            for line in http(metrics)[1].decode().splitlines()
        )

    wait_for(f"{victim} takes part again", served)


@pytest.mark.long
def test_an_engine_that_is_stopped_under_load_is_killed_and_started_again(
    two_by_two: Local, cases: list[Case]
) -> None:
    two_by_two.wait_ready()
    endpoint, before = two_by_two.status()["endpoint"], two_by_two.pods()
    victim = "pair-prefill-1"
    stopped = before[victim]["pid"]

    def stop() -> None:
        os.kill(stopped, signal.SIGSTOP)
        wait_for("its restart", lambda: two_by_two.pids()[victim] not in (0, stopped))

    asked = asyncio.run(open_loop(endpoint, cases, rate=4, seconds=5, disturb=stop))
    assert [one.what for one in asked if one.what is not None] == []
    two_by_two.wait_ready()
    assert not _runs_still(stopped)
    after = two_by_two.pods()
    assert after[victim]["restarts"] == before[victim]["restarts"] + 1
    assert after[victim]["last_exit"] == quick_probes.HUNG
    assert _is_forked(after[victim]["pid"])
    assert {name for name in after if after[name]["pid"] != before[name]["pid"]} == {victim}


@pytest.mark.long
def test_kill_9_of_the_router_refuses_no_connection_and_loses_only_what_it_held(
    two_by_two: Local, cases: list[Case]
) -> None:
    two_by_two.wait_ready()
    endpoint, before = two_by_two.status()["endpoint"], two_by_two.pids()
    gone_s = math.nan

    def kill() -> None:
        nonlocal gone_s
        time.sleep(3)  # under load
        pid = before["pair-router-0"]
        os.kill(pid, signal.SIGKILL)
        wait_for("its end", lambda: not _runs_still(pid))
        gone_s = time.monotonic()

    asked = asyncio.run(open_loop(endpoint, cases, rate=8, seconds=12, disturb=kill))
    failed = [one for one in asked if one.what is not None]
    assert [one.what for one in failed if one.began_s > gone_s] == []
    assert all(kind != "wrong" for one in failed if one.what for kind in one.what[:1])
    assert len([one for one in asked if one.began_s > gone_s]) > 30
    after = two_by_two.pids()
    assert after.pop("pair-router-0") != before.pop("pair-router-0")
    assert after == before
    two_by_two.wait_ready()


def _runs_still(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_status_shows_that_kv_moves(two_by_two: Local) -> None:
    two_by_two.wait_ready()
    endpoint = two_by_two.status()["endpoint"]

    def moved() -> list[dict[str, Any]]:
        _ask(endpoint)
        found = two_by_two.status()["kv"]
        return [row for row in found["outcomes"] if found["verified"] == "True"]

    rows = wait_for("the router's counts", moved)
    assert {row["outcome"] for row in rows} >= {"moved"}
    assert {row["prefill"] for row in rows} <= {"pair-prefill-0", "pair-prefill-1"}


def test_scaling_a_pool_restarts_no_other_instance(two_by_two: Local) -> None:
    two_by_two.wait_ready()
    endpoint, before = two_by_two.status()["endpoint"], two_by_two.pids()
    two_by_two.xpyd("scale", "pair-decode", "--replicas", "3")
    wait_for("the third", lambda: "pair-decode-2" in two_by_two.pids(), 30)
    two_by_two.wait_ready()
    _ask(endpoint)
    assert {k: v for k, v in two_by_two.pids().items() if k != "pair-decode-2"} == before
    two_by_two.xpyd("scale", "pair-decode", "--replicas", "2")
    wait_for("it leaves", lambda: two_by_two.pids() == before, 60)
    _ask(endpoint)


def test_logs_and_chat_work_on_the_running_fleet(two_by_two: Local) -> None:
    two_by_two.wait_ready()
    answer = two_by_two.xpyd("chat", "pair", "--max-tokens", "8", "What does str.split do?")
    assert answer.strip()
    logs = two_by_two.xpyd("logs", "pair", "--since", "10m")
    assert "pair-router-0" in logs
    assert "pair-decode-0" in logs
    # Processes of one machine, whose folder for sockets is in the state folder.
    ups = [line for line in logs.splitlines() if " is up over " in line]
    assert {line.rpartition(" ")[2] for line in ups} == {"shm"}


@pytest.mark.long
def test_3p1d_behind_two_processes_serves_in_the_foreground_and_ctrl_c_drains_it(
    tmp_path: Path,
) -> None:
    local = Local("three", tmp_path / "state")
    document = DOCUMENT.replace("NAME", "three")
    document = document.replace("Prefill, replicas: 2", "Prefill, replicas: 3")
    document = document.replace("Decode, replicas: 2", "Decode, replicas: 1")
    document += "  router: {processes: 2}\n"
    (tmp_path / "fleet.yaml").write_text(document)
    process = local.start("up", "-f", str(tmp_path / "fleet.yaml"), "--port", str(free_port()))
    try:
        socket = local.state / "xpyd" / "three"
        wait_for("its state", socket.exists, 30)
        wait_for("its supervisor", lambda: _runs(local), 30)
        local.wait_ready()
        status, pids = local.status(), [*local.pids().values()]
        endpoint = status["endpoint"]
        assert b"\nxpyd_router_workers 2\n" in http(f"{status['admin']}/metrics")[1]
        workers = _children(local.pids()["three-router-0"])
        assert len(workers) == 2
        assert len({_ask(endpoint) for _ in range(6)}) == 1
        roles = [pod["role"] for pod in local.pods().values()]
        assert (roles.count("Prefill"), roles.count("Decode")) == (3, 1)
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "three-decode-0 |" in " ".join((out + err).split())
    assert not [pid for pid in (*pids, *workers) if Path(f"/proc/{pid}").exists()]


def _samples(local: Local, name: str) -> dict[str, float]:
    """A metric of the router: its labels as text -> value."""
    lines = http(f"{local.status()['admin']}/metrics")[1].decode().splitlines()
    found = [line.removeprefix(name).rpartition(" ") for line in lines if line.startswith(name)]
    return {labels: float(value) for labels, _, value in found}


@pytest.mark.long
def test_a_rollout_under_load_loses_nothing_and_pairs_no_p_with_a_d_of_another_revision(
    tmp_path: Path, cases: list[Case]
) -> None:
    """First of both pools, then of D alone, which the old P serves with on and on."""
    local, file = Local("turn", tmp_path / "state"), tmp_path / "fleet.yaml"
    document = DOCUMENT.replace("NAME", "turn")
    file.write_text(document)
    edits = {
        "--kv-cache-memory=64Mi": "--kv-cache-memory=65Mi",
        "bufferSize: 16Mi": "bufferSize: 17Mi",
    }
    try:
        local.xpyd("up", "-f", str(file), "--detach", "--port", str(free_port()))
        for index, (old, new) in enumerate(edits.items()):
            local.wait_ready()
            before = local.pids()
            document = document.replace(old, new)
            file.write_text(document)

            def roll_out() -> None:
                local.xpyd("up", "-f", str(file), "--detach")
                local.wait_ready()

            endpoint = local.status()["endpoint"]
            asked = asyncio.run(open_loop(endpoint, cases, rate=8, seconds=20, disturb=roll_out))
            assert [one.what for one in asked if one.what] == []
            after = local.pids()
            assert not {p for n, p in before.items() if "decode" in n} & set(after.values())
            stayed = {p for n, p in before.items() if "prefill" in n} & set(after.values())
            assert len(stayed) == (0 if index == 0 else 2), "a pool that is the same is untouched"
            counts = _samples(local, "xpyd_router_pair_revisions_total")
            assert counts['{revisions="same"}'] >= len(asked) / 2 * (index + 1)
            assert counts['{revisions="other"}'] == counts['{revisions="unknown"}'] == 0
    finally:
        local.xpyd("down", "turn")


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def _runs(local: Local) -> bool:
    process = local.start("status", local.name, "--output", "json")
    process.communicate(timeout=30)
    return process.returncode == 0


def test_a_bad_document_is_refused_with_all_its_mistakes_before_anything_starts(
    tmp_path: Path,
) -> None:
    local = Local("bad", tmp_path / "state")
    document = DOCUMENT.replace("NAME", "Bad_Name").replace("role: Decode", "role: Dekode")
    document += "  router: {policy: Psychic}\n  surprise: 1\n"
    (tmp_path / "fleet.yaml").write_text(document)
    said = local.xpyd("up", "-f", str(tmp_path / "fleet.yaml"), "--detach", status=2)
    for path in ("metadata.name", "spec.pools[1].role", "spec.router.policy", "spec.surprise"):
        assert path in said
    assert not (tmp_path / "state" / "xpyd" / "bad").exists()

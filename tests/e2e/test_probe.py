"""`xpyd kv-probe` and `POST /kv/probe` between real processes, and against what does not work."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import START_TIMEOUT_S, Fleet, Process, empty_fleet, http, wait_for
from xpyd_core.keys import call_mac, read_keys

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A P with a socket folder; a D with it, a D without, and one that has another key."""
    folder = tmp_path_factory.mktemp("probe")
    with empty_fleet(folder) as running:
        # Its own probes would be among those that are counted, and be in their way.
        running.start_router("--kv-probe-seconds", "0")
        shared = ("--kv-socket-dir", str(folder / "kv"))
        engines = [
            running.start_engine("Prefill", *shared),
            running.start_engine("Decode", *shared),
            running.start_engine("Decode"),
        ]
        # No router's business: a pair with it would only cost time.
        env = {"XPYD_KV_KEY_FILE": str(_wrong_key(folder)), "XPYD_DISCOVERY": "127.0.0.1:9"}
        stranger = running.start_engine("Decode", env=env)
        running.wait_ready(*engines)
        wait_for("the stranger", lambda: _is_healthy(stranger), START_TIMEOUT_S)
        yield running


def _is_healthy(process: Process) -> bool:
    with contextlib.suppress(OSError):
        return http(f"{process.url}/health", timeout_s=5)[0] == 200
    return False


def _wrong_key(folder: Path) -> Path:
    path = folder / "wrong"
    path.write_text(secrets.token_hex(32))
    return path


def _engines(running: Fleet) -> list[Process]:
    return [process for process in running.processes if process.role]


def _command(engine: Process, peer: str, key_file: Path, *more: str) -> tuple[int, str, str]:
    argv = [sys.executable, "-m", "xpyd_core", "kv-probe", "--engine", engine.url, "--peer", peer]
    done = subprocess.run(
        [*argv, "--kv-key-file", str(key_file), *more],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def _ask(running: Fleet, engine: Process, peer: str) -> dict[str, Any]:
    mac = call_mac(read_keys(running.key_file)[0], "kv-probe", peer)
    status, body = http(
        f"{engine.url}/kv/probe", {"address": peer}, headers={"X-Xpyd-Mac": mac}, timeout_s=60
    )
    assert status == 200, body
    return json.loads(body)


def test_the_command_says_over_what_the_block_arrived(running: Fleet) -> None:
    p, near, far, _ = _engines(running)
    for d, transport in ((near, "shm"), (far, "tcp")):
        peer = f"{d.ip}:21001"
        status, out, _ = _command(p, peer, running.key_file, "--output", "json")
        answer = json.loads(out)
        assert status == 0
        assert answer.pop("seconds") > 0
        assert answer == {
            "ok": True,
            "transport": transport,
            "bytes": 65536,
            "digest_matches": True,
            "reason": "",
        }
        status, out, _ = _command(p, peer, running.key_file)
        assert status == 0
        assert out.startswith(f"{peer}: 65536 bytes arrived over {transport} in ")
    assert p.metric("xpyd_kv_probes_total{outcome=ok}") == 4
    # A probe is no KV, and requests go on.
    assert near.metric("xpyd_kv_received_bytes_total") == near.metric("xpyd_kv_leases") == 0
    for _ in range(3):
        running.complete(prompt="San Francisco is a", max_tokens=4)
    assert near.metric("xpyd_kv_shared_bytes_total") > 0


def test_a_wrong_key_and_a_decode_instance_are_refused_with_words(
    running: Fleet, tmp_path: Path
) -> None:
    p, near, *_ = _engines(running)
    peer = f"{near.ip}:21001"
    status, _, err = _command(p, peer, _wrong_key(tmp_path))
    assert (status, "X-Xpyd-Mac" in err) == (2, True)
    status, _, err = _command(near, peer, running.key_file)
    assert (status, "ask a Prefill instance" in err) == (2, True)


def test_who_does_not_answer_refuses_or_is_no_d_has_a_name(running: Fleet) -> None:
    p, near, *_ = _engines(running)
    assert _ask(running, p, f"{near.ip}:21099")["reason"] == "unreachable"
    # An HTTP server is no D: it breaks the protocol.
    assert _ask(running, p, f"{near.ip}:20001")["reason"] in ("protocol", "unreachable", "lost")
    with socket.create_server((near.ip, 21098)):  # Accepts by backlog and says nothing.
        answer = _ask(running, p, f"{near.ip}:21098")
    assert (answer["ok"], answer["reason"]) == (False, "timeout")


def test_a_d_with_another_key_is_named_and_logged_once(running: Fleet) -> None:
    p, *_, stranger = _engines(running)
    for _ in range(3):
        assert _ask(running, p, f"{stranger.ip}:21001")["reason"] == "auth"
    assert p.metric("xpyd_kv_handshake_refused_total{factor=auth}") == 1
    assert stranger.metric("xpyd_kv_handshake_refused_total{factor=auth}") == 1
    for process in (p, stranger):
        assert process.log.count("refused: auth") + process.log.count("refuses: auth") == 1


def test_a_stopped_d_costs_the_deadline_and_only_one_probe_at_a_time(running: Fleet) -> None:
    p, _, far, _ = _engines(running)
    peer = f"{far.ip}:21001"
    assert _ask(running, p, peer)["ok"]
    mac = {"X-Xpyd-Mac": call_mac(read_keys(running.key_file)[0], "kv-probe", peer)}

    def ask(_: int) -> tuple[int, bytes]:
        return http(f"{p.url}/kv/probe", {"address": peer}, headers=mac, timeout_s=60)

    far.popen.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(4) as pool:
            answers = sorted(pool.map(ask, range(4)))
    finally:
        far.popen.send_signal(signal.SIGCONT)
    assert [status for status, _ in answers] == [200, 429, 429, 429]
    answer = json.loads(answers[0][1])
    # The router may say before the deadline that D is dead: it has missed its beats.
    assert (answer["ok"], answer["reason"]) in ((False, "timeout"), (False, "unreachable"))
    running.wait_ready(far)
    assert _ask(running, p, peer)["ok"]

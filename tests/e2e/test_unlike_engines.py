"""Fleets without a secret, and engines of two revisions that cannot move KV to each other."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, empty_fleet
from tests.e2e.oracle import Case

pytestmark = [pytest.mark.slow, pytest.mark.long]
CASES = 6
KEYLESS = {"XPYD_KV_KEY_FILE": ""}
SHORT_WAIT = ("--kv-wait-seconds", "1")
WARNING = "--kv-insecure: any host that reaches"


def answers(running: Fleet, cases: list[Case]) -> list[tuple[int, ...]]:
    return [running.answer(case) for case in cases[:CASES]]


def wanted(cases: list[Case]) -> list[tuple[int, ...]]:
    return [case.ids for case in cases[:CASES]]


def test_a_fleet_without_secret_moves_kv_and_each_process_warns_once(
    tmp_path: Path, cases: list[Case]
) -> None:
    with empty_fleet(tmp_path) as running:
        router = running.start_router("--kv-insecure", env=KEYLESS)
        p = running.start_engine("Prefill", "--kv-insecure", env=KEYLESS)
        d = running.start_engine("Decode", "--kv-insecure", "--kv-on-failure", "fail", env=KEYLESS)
        running.wait_ready(p, d)
        assert answers(running, cases) == wanted(cases)
        assert d.metric("xpyd_kv_received_bytes_total") > 0
        argv = ["kv-probe", "--kv-insecure", "--engine", p.url, "--peer", f"{d.ip}:21001"]
        told = subprocess.run(
            [sys.executable, "-m", "xpyd_core", *argv], capture_output=True, text=True, timeout=60
        )
        assert "65536 bytes arrived over tcp" in told.stdout, told
        assert [each.log.count(WARNING) for each in (router, p, d)] == [1, 1, 1]


def test_engines_that_cannot_move_kv_to_each_other_give_right_answers(
    tmp_path: Path, cases: list[Case]
) -> None:
    """As in a rollout that takes the secret away, or that changes the transport."""
    with empty_fleet(tmp_path) as running:
        running.start_router("--accept-unsigned-beats")
        p = running.start_engine("Prefill", "--kv-transport", "tcp")
        keyless = running.start_engine("Decode", *SHORT_WAIT, "--kv-insecure", env=KEYLESS)
        folder = ("--kv-socket-dir", str(tmp_path / "kv"))
        other = running.start_engine("Decode", *SHORT_WAIT, "--kv-transport", "shm", *folder)
        running.wait_ready(p, keyless, other)
        assert answers(running, cases) == wanted(cases)
        for reason in ("auth", "refused:transport"):
            assert p.metric(f"xpyd_kv_failed_total{{reason={reason}}}") == CASES / 2
        for d in (keyless, other):
            assert d.metric("xpyd_kv_received_bytes_total") == 0
        assert other.metric("xpyd_kv_recomputed_requests_total") == CASES / 2
        # It has not the router's key, so it serves each request alone.
        assert keyless.log.count("a pair id without the router's MAC") == CASES / 2
        assert keyless.metric("xpyd_kv_auth_failed_total") == 1  # then P leaves it alone
        assert "is not sent: " in p.log

"""Real engines that serve HTTPS, behind a real router: the same tokens, and KV that moves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import START_TIMEOUT_S, empty_fleet, wait_for
from tests.e2e.oracle import Case
from tests.tls_kit import authority, write_ca, write_pair

pytestmark = pytest.mark.slow
NAME = "engines.test"


def test_a_pair_over_tls_answers_as_without(tmp_path: Path, cases: list[Case]) -> None:
    shown = write_pair(tmp_path / "engine", NAME, ca=authority("engines"))
    own = write_pair(tmp_path / "router", "router", ca=authority("routers"))
    asks = write_ca(tmp_path / "routers.crt", authority("routers"))
    trusted = write_ca(tmp_path / "engines.crt", authority("engines"))

    with empty_fleet(tmp_path) as fleet:
        fleet.start_router(
            *("--engine-ca-file", str(trusted), "--engine-server-name", NAME),
            *("--engine-certfile", str(own.certificate), "--engine-keyfile", str(own.key)),
        )
        flags = (
            *("--ssl-certfile", str(shown.certificate), "--ssl-keyfile", str(shown.key)),
            *("--ssl-ca-certs", str(asks), "--ssl-open-probes"),
        )
        engines = [fleet.start_engine(role, *flags) for role in ("Prefill", "Decode")]
        wait_for(
            "both in the router",
            lambda: [*fleet.states().values()] == ["Ready", "Ready"],
            START_TIMEOUT_S,
        )
        for case in cases[:3]:
            assert fleet.answer(case) == case.ids
        assert fleet.router.metric("xpyd_router_kv_outcomes_total") >= 3
        p, d = engines
        peer = f"{d.ip}:21001"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "xpyd_core", "kv-probe", "--peer", peer),
                *("--engine", p.url.replace("http:", "https:")),
                *("--kv-key-file", str(fleet.key_file)),
                *("--engine-ca-file", str(trusted), "--engine-server-name", NAME),
                *("--engine-certfile", str(own.certificate), "--engine-keyfile", str(own.key)),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert f"{peer}: 65536 bytes arrived over" in done.stdout, done.stderr
        assert all("https://" in engine.log for engine in engines)
        assert [engine.stop() for engine in engines] == [0, 0]

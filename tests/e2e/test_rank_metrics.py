"""Engines of several ranks show each of them on /metrics, count what their own connections do, and
probe every pair."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import empty_fleet, wait_for
from tests.e2e.test_families import ask, make_requests
from tests.e2e.test_parallel import flags, make_model, start_pair

pytestmark = pytest.mark.slow
RANK = "xpyd_engine_rank_"


def test_ranks_are_probed_and_shown(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    with empty_fleet(tmp_path) as running:
        pair = start_pair(running, model, flags((2, 1)), flags((1, 2)), "--kv-transport", "tcp")
        key = ("--kv-key-file", str(running.key_file))
        ways = ("--engine", pair[0].url, "--peer", f"{pair[1].ip}:21001")
        done = subprocess.run(
            [sys.executable, "-m", "xpyd_core", "kv-probe", *ways, *key],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        lines = [line.split(":")[0].strip() for line in done.stdout.splitlines()[1:]]
        assert lines == [f"rank {p} to rank {d} at {pair[1].ip}" for p in (0, 1) for d in (0, 1)]
        assert done.stdout.count("65536 bytes arrived over tcp") == 1 + 2 * 2
        prompt, new = make_requests()[0]
        ask(running.router, [prompt], new)
        for engine, places in zip(pair, (((0, 0), (0, 1)), ((0, 0), (1, 0))), strict=True):
            found = engine.metrics()
            for rank, (stage, tensor) in enumerate(places):
                labels = f"{{rank={rank},stage={stage},tensor={tensor}}}"
                assert found[f"{RANK}up{labels}"] == 1
                assert found[f"{RANK}weight_bytes{labels}"] > 0
                assert found[f"{RANK}kv_cache_bytes{labels}"] > 0
                assert found[f"{RANK}processor_seconds_total{labels}"] > 0
            fits = [value for name, value in found.items() if name.startswith(f"{RANK}kv_blocks_")]
            assert len(fits) == 2
            assert found["xpyd_engine_kv_blocks_total"] == min(fits)
            info = next(name for name in found if name.startswith("vllm:cache_config_info"))
            assert f"num_gpu_blocks={min(fits):.0f}" in info
            # Each rank of P is connected with each of D, and the engines with each other.
            name = "xpyd_kv_peers_total{transport=tcp}"
            wait_for("the ranks' connections", lambda e=engine, n=name: e.metric(n) == 2 * 2 + 1)
            steps = f"{RANK}steps_total"
            wait_for(
                "the ranks' steps",
                lambda e=engine, s=steps: e.metric(s) == 2 * e.metric("xpyd_engine_forward_total"),
            )

"""A router, a P and a D as processes, both engines on the first GPU: what tests/e2e runs on CPUs.

Beside what the other tests here need, this takes the packages of a router and a worker, and
transformers for the reference; without them it is skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
for needed in ("aiohttp", "llguidance", "quart", "transformers", "uvicorn", "zmq"):
    pytest.importorskip(needed)

# Behind the check: these import such packages.
from tests.e2e.harness import DEMO_MODEL, empty_fleet  # noqa: E402
from tests.e2e.oracle import Case, make_cases  # noqa: E402

# Two engines share the device, and the reference is made in plain float32.
FLAGS = ("--device", "cuda:0", "--gpu-memory-utilization", "0.3")
RECOMPUTED = "xpyd_kv_recomputed_requests_total"


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Prompts with the greedy tokens of transformers on the CPU."""
    return make_cases(DEMO_MODEL, count=12)


@pytest.mark.parametrize("transport", ["cuda_ipc", "uds", "tcp"])
def test_p_and_d_on_a_gpu_answer_as_transformers_does(
    transport: str, cases: list[Case], tmp_path: Path
) -> None:
    with empty_fleet(tmp_path) as fleet:
        fleet.start_router()
        # One after the other: a start measures what memory is free.
        flags = (*FLAGS, "--kv-transport", transport, "--kv-socket-dir", str(tmp_path))
        for role in ("Prefill", "Decode"):
            fleet.wait_ready(fleet.start_engine(role, *flags))
        p, d = fleet.engine("Prefill"), fleet.engine("Decode")
        for case in cases:
            assert fleet.answer(case) == case.ids
        assert p.metrics()[f"xpyd_kv_peers_total{{transport={transport}}}"] == 1
        assert p.metric("xpyd_kv_sent_bytes_total") > 0
        assert d.metric(RECOMPUTED) == 0

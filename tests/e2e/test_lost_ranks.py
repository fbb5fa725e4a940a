"""A fleet whose P and D have several ranks loses one of them under load: the others take over, no
answer is wrong, the instance comes back, and nothing stays held."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.harness import DEMO_MODEL, free_port, http, wait_for
from tests.e2e.oracle import Case, load
from tests.e2e.test_local_fleet import Local
from tests.ranks.kit.instances import is_alive

DOCUMENT = f"""
apiVersion: xpyd.dev/v1alpha1
kind: InferenceFleet
metadata: {{name: lost}}
spec:
  model: {{uri: "file://{DEMO_MODEL}", servedNames: [demo]}}
  engine: {{args: [--dtype=float32, --kv-cache-memory=64Mi, --threads=1]}}
  pools:
  - {{name: prefill, role: Prefill, replicas: 1, parallelism: {{tensor: 2}},
     resources: {{gpus: 0}}}}
  - {{name: decode, role: Decode, replicas: 1, parallelism: {{pipeline: 2}},
     resources: {{gpus: 0}}}}
  - {{name: spare-p, role: Prefill, replicas: 1, resources: {{gpus: 0}}}}
  - {{name: spare-d, role: Decode, replicas: 1, resources: {{gpus: 0}}}}
  kvTransfer: {{bufferSize: 16Mi, hostPoolSize: 32Mi}}
  heartbeat: {{intervalMilliseconds: 500, missedBeats: 4}}
"""
LOAD_S = 12
CLIENTS = 24
START_S = 300
# All but the blocks of the cache, which must all be free.
HELD = (
    *("xpyd_kv_open_transfers", "xpyd_kv_leases"),
    *("xpyd_kv_buffer_used_bytes", "xpyd_kv_pool_used_bytes"),
)
QUICK = ("prefill", 1, signal.SIGKILL), ("decode", 0, signal.SIGSTOP)
CASES = [
    pytest.param(*case, marks=pytest.mark.slow if case in QUICK else pytest.mark.soak)
    for case in itertools.product(("prefill", "decode"), (0, 1), (signal.SIGKILL, signal.SIGSTOP))
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("lost")
    file = folder / "fleet.yaml"
    file.write_text(DOCUMENT)
    local = Local("lost", folder / "state")
    trees: list[int] = []
    try:
        local.xpyd("up", "-f", str(file), "--detach", "--port", str(free_port()))
        yield local
        trees = [pid for main in local.pids().values() for pid in (main, *below(main))]
        assert len(trees) >= 5 + 4
    finally:
        local.xpyd("down", "lost")
    assert not any(map(is_alive, trees))


def below(main: int) -> list[int]:
    """All processes below one."""
    found: list[int] = []
    left = [main]
    while left:
        for task in Path(f"/proc/{left.pop()}/task").iterdir():
            pids = [int(pid) for pid in (task / "children").read_text().split()]
            found += pids
            left += pids
    return found


def named(pids: list[int], name: str) -> int:
    """The process of that name."""
    return next(pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == name)


def metrics(pod: dict[str, Any]) -> dict[str, float]:
    """Sums by name."""
    found: dict[str, float] = {}
    text = http(f"http://{pod['http']}/metrics", timeout_s=10)[1].decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def holds_nothing(pod: dict[str, Any]) -> bool:
    found = metrics(pod)
    is_free = found["xpyd_engine_kv_blocks_free"] == found["xpyd_engine_kv_blocks_total"]
    return is_free and not any(found[name] for name in HELD)


@pytest.mark.parametrize(("pool", "rank", "number"), CASES)
@pytest.mark.long
def test_a_lost_rank_costs_no_answer_and_the_instance_comes_back(
    fleet: Local, cases: list[Case], pool: str, rank: int, number: signal.Signals
) -> None:
    fleet.wait_ready()
    victim = f"lost-{pool}-0"
    before, endpoint = fleet.pods(), fleet.status()["endpoint"]
    restarts = before[victim]["restarts"]
    main = before[victim]["pid"]
    tree = below(main)
    lost = named(tree, f"xpyd-rank-{rank}")
    result = asyncio.run(
        load(
            endpoint,
            cases,
            seconds=LOAD_S,
            clients=CLIENTS,
            at_half=lambda: os.kill(lost, number),
        )
    )
    assert not result.wrong
    assert not result.errors
    assert result.agreed > CLIENTS
    # Only streams on the D that is gone may break, and say so.
    assert len(result.broken_streams) <= (CLIENTS if pool == "decode" else 0)

    wait_for(f"{victim} ends", lambda: not any(map(is_alive, (main, *tree))))
    wait_for(f"{victim} starts again", lambda: fleet.pods()[victim]["restarts"] > restarts)
    wait_for("all of it ready", lambda: fleet.status()["ready"], START_S)
    after = fleet.pods()
    assert after[victim]["restarts"] == restarts + 1
    others = [name for name in before if name != victim]
    assert [after[name]["pid"] for name in others] == [before[name]["pid"] for name in others]
    assert f"rank {rank} (" in fleet.xpyd("logs", "lost", "--since", "10m")
    engines = [pod for pod in after.values() if pod["role"] in ("Prefill", "Decode")]
    for pod in engines:
        wait_for(f"{pod['name']} holds nothing", lambda pod=pod: holds_nothing(pod), 60)

"""The sizes of buffer and host pool are an instance's: what `xpyd up` plans, what the engine books
and what its ranks take is the same."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from tests.kv.rank_pods import Side, engine_of, layout_of
from xpyd_core.pod_env import PodEnv
from xpyd_operator.document.load import parse_fleet
from xpyd_operator.plan.template import engine_template
from xpyd_operator.up.memory import EngineMemory, Machine, plan_memory
from xpyd_worker.command import configure, read_config
from xpyd_worker.config import WorkerConfig
from xpyd_worker.kv.engine import settings_of
from xpyd_worker.kv.transports import transports_for_host
from xpyd_worker.load.ready_model import ranks_memory_table
from xpyd_worker.ranks.start.messages import RankReady

GIB = 1 << 30
BLOCKS = 500
LAYOUTS = {
    "TP2xPP1": engine_of(2, [[0, 1, 2]]),
    "TP1xPP3, of unlike stages": engine_of(1, [[0, 1], [2], [3, 4]]),
    "TP4xPP2, two replicas of each head": engine_of(4, [[0, 1], [2]]),
}


def planned(tensor: int, pipeline: int, kv: dict[str, Any]) -> tuple[EngineMemory, WorkerConfig]:
    """What `xpyd up` plans for a Decode engine, and the configuration that it starts it with."""
    parallelism = {"tensor": tensor, "pipeline": pipeline}
    pools = [
        {"name": name, "role": role, "resources": {"gpus": 0}, "parallelism": parallelism}
        for name, role in (("p", "Prefill"), ("d", "Decode"))
    ]
    document = {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "f"},
        "spec": {"model": {"uri": "hf://a/b"}, "pools": pools, "kvTransfer": kv},
    }
    fleet = parse_fleet(json.dumps(document).encode(), source="f")
    plan = plan_memory(fleet, (1, 1), Machine(64 * GIB, 8), weights_bytes=0).of("d")
    flags = engine_template(fleet, fleet.spec.pools[1], model="hf://a/b").args
    parser = argparse.ArgumentParser()
    configure(parser)
    given = ["--kv-insecure", "--device=cpu", *flags, *plan.args]
    return plan, read_config(parser.parse_args([*given, "--model=hf://a/b"]), PodEnv(role="Decode"))


@pytest.mark.parametrize(
    "kv", [{}, {"bufferSize": "64Mi", "hostPoolSize": "1Gi"}, {"bufferSize": "25%"}]
)
def test_an_engine_takes_what_was_planned_for_all_of_its_ranks(kv: dict[str, Any]) -> None:
    plan, config = planned(2, 3, kv)
    assert config.sizes.replica == plan.ranks == 6
    assert config.kv_cache_bytes == plan.cache_bytes
    caches = 6 * plan.cache_bytes
    assert config.buffer_bytes(caches) == plan.buffer_bytes
    assert config.kv_host_pool_bytes == plan.host_pool_bytes
    none, _ = planned(2, 3, {"bufferSize": 0, "hostPoolSize": 0})
    beside = [one.total_bytes - 6 * one.cache_bytes for one in (plan, none)]
    assert beside[0] - beside[1] == plan.buffer_bytes + plan.host_pool_bytes


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("buffer", ["100003", "10%"])
def test_the_memory_of_the_ranks_adds_up_to_the_instances(name: str, buffer: str) -> None:
    engine = LAYOUTS[name]
    parser = argparse.ArgumentParser()
    configure(parser)
    flags = ["--model=m", "--role=Decode", "--kv-insecure", "--kv-host-pool-size=200001"]
    config = read_config(parser.parse_args([*flags, f"--kv-buffer-size={buffer}"]), PodEnv())
    ranks = range(engine.num_ranks)
    caches = [BLOCKS * layout_of(engine, rank).bytes_per_block for rank in ranks]
    wanted = {"buffer": config.buffer_bytes(sum(caches)), "pool": 200_001}
    assert wanted["buffer"] == (sum(caches) // 10 if buffer == "10%" else 100_003)
    transports = transports_for_host(config, None, (), shared=None, landings=lambda: ())  # pyright: ignore[reportArgumentType]  # NIXL's
    side = Side(
        "D", engine, settings=settings_of(config, transports, wanted["buffer"]), blocks=BLOCKS
    )
    try:
        taken = [[len(region) for region in part.space.regions] for part in side.parts]
        assert side.kv.store is not None
        metrics = side.kv.store.metrics()
    finally:
        side.close()
    booked = {"buffer": metrics.buffer_bytes, "pool": metrics.pool_bytes}
    assert booked == dict(zip(wanted, map(sum, zip(*taken, strict=True)), strict=True))
    # But for what is left over of a whole block.
    for where, size in booked.items():
        assert wanted[where] - engine.held_bytes_per_block < size <= wanted[where]
    # Each has what its part of the model needs.
    blocks = [
        pool // layout_of(engine, rank).bytes_per_block for rank, (_, pool) in enumerate(taken)
    ]
    assert len(set(blocks)) == 1


def test_the_table_of_memory_shows_what_ranks_share_once() -> None:
    config = WorkerConfig("m", role="Decode", kv_host_pool_bytes=7, tensor_parallel_size=2)
    ready = RankReady(1, 10, 100, None, "float32", 1, on_gpu=False)
    rows = [(row.name, row.size_bytes) for row in ranks_memory_table(config, [ready, ready])]
    assert rows[-2:] == [("KV buffer", 20), ("KV host pool", 7)]
    alone = WorkerConfig("m", tensor_parallel_size=2)
    assert [row.name for row in ranks_memory_table(alone, [ready])] == [
        "rank 0: weights",
        "rank 0: KV cache",
    ]

"""`engine.args` of a fleet document are flags of `xpyd worker`: from the document to its config."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.operator.fleets import cpu_pool, parsed
from xpyd_core.errors import UserError
from xpyd_core.pod_env import PodEnv
from xpyd_operator.plan.template import fleet_want
from xpyd_worker.command import configure, read_config
from xpyd_worker.config import WorkerConfig
from xpyd_worker.flags import GROUPS

ARGS = [
    *("--max-num-seqs=8", "--max-num-batched-tokens=64", "--max-model-len", "1000"),
    *("--long-prefill-token-threshold", "16", "--block-size=32", "--no-enable-prefix-caching"),
    *("--dtype=float32", "--seed=5", "--served-model-name", "a", "b"),
    *("--scheduling-policy=priority", "--device=cuda:1", "--gpu-memory-utilization=0.5"),
    *("--enforce-eager", "--kv-cache-memory=8Gi", "--disable-custom-all-reduce"),
]


def configs(args: list[str]) -> dict[str, WorkerConfig]:
    """By pool: what its engines run with."""
    model = {"uri": "hf://org/name", "servedNames": ["named"]}
    pools = [cpu_pool("p", "Prefill", replicas=1), cpu_pool("d", "Decode", replicas=1)]
    fleet = parsed(model=model, engine={"args": args}, pools=pools)
    parser = argparse.ArgumentParser(exit_on_error=False)
    configure(parser)
    env = PodEnv(kv_key_file=Path("key"))
    pools = {pool.name: pool for pool in fleet_want(fleet, model="/m").pools}
    return {
        name: read_config(parser.parse_args(list(pools[name].template.args)), env) for name in "pd"
    }


@pytest.mark.parametrize("pool", ["p", "d"])
def test_the_schedulers_flags_reach_every_engine_of_a_fleet(pool: str) -> None:
    found = configs(ARGS)[pool]
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.max_model_len) == (8, 64, 1000)
    assert (found.long_prefill_token_threshold, found.block_size) == (16, 32)
    assert (found.prefix_caching, found.dtype, found.seed) == (False, "float32", 5)
    assert (found.served_model_names, found.scheduling_policy) == (("a", "b"), "priority")
    assert (found.device, found.gpu_memory_utilization, found.enforce_eager) == (
        "cuda:1",
        0.5,
        True,
    )
    assert (found.kv_cache_bytes, found.custom_all_reduce) == (8 << 30, False)


@pytest.mark.parametrize("pool", ["p", "d"])
def test_without_them_the_engines_have_their_defaults(pool: str) -> None:
    found = configs(["--enable-prefix-caching"])[pool]
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (256, None)
    assert (found.device, found.gpu_memory_utilization, found.enforce_eager) == ("cpu", 0.9, False)
    assert (found.kv_cache_bytes, found.custom_all_reduce) == (None, True)
    assert (found.prefix_caching, found.seed) == (True, None)
    assert (found.served_model_names, found.scheduling_policy) == (("named",), "fcfs")


def test_each_name_of_a_flag_that_pools_set_is_refused() -> None:
    """`parallelism` of a pool sets them; the engine's own table of flags has their names."""
    flags = [flag for group in GROUPS.values() for flag in group]
    of_pools = [flag for flag in flags if flag.argument.endswith("_parallel_size")]
    assert {flag.argument for flag in of_pools} == {
        "tensor_parallel_size",
        "pipeline_parallel_size",
    }
    for name in [name for flag in of_pools for name in flag.names]:
        with pytest.raises(UserError, match="parallelism"):
            configs([f"{name}=2"])

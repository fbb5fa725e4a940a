"""`engine.args` of a fleet document are flags of `xpyd worker`: from the document to its config."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.operator.fleets import cpu_pool, document, parsed
from xpyd_core.errors import UserError
from xpyd_core.pod_env import PodEnv
from xpyd_operator.controller.decision.state import read
from xpyd_operator.manifests.engine_flags import FLAGS
from xpyd_operator.manifests.names import Settings
from xpyd_operator.manifests.refusals import engine_args_problems
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.up.checks import check_local
from xpyd_worker.command import configure, read_config
from xpyd_worker.config import WorkerConfig
from xpyd_worker.flags import GROUPS

SETTINGS = Settings("xpyd-worker:1", "xpyd-router:1")
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


BAD = {
    "--max-nun-seqs=8": "'--max-nun-seqs=8' is no flag of the engine; did you mean --max-num-seqs?",
    "chat": "'chat' is no flag of the engine; docs/engine.md has all flags",
    "": "'' is no flag of the engine; docs/engine.md has all flags",
    "--max-num-seqs=many": "--max-num-seqs: expected a whole number, got 'many'",
    "--max-num-batched-tokens=some": (
        "--max-num-batched-tokens: expected a number of tokens or auto, got 'some'"
    ),
    "--max-num-seqs": "--max-num-seqs needs a value",
    "--gpu-memory-utilization=x": "--gpu-memory-utilization: expected a number, got 'x'",
    "--dtype=int4": "--dtype: expected auto, float32, bfloat16, float16, got 'int4'",
    "--block-size=7": "--block-size: expected 8, 16, 32, 64, got '7'",
    "--enforce-eager=1": "--enforce-eager takes no value",
    "--override-generation-config=[]": (
        "--override-generation-config: expected a JSON object, got '[]'"
    ),
    "--kv-cache-memory=lots": (
        "--kv-cache-memory: 'lots' is not a size; "
        "write bytes like 1073741824, 8e9, 4Gi or 500M, 10%"
    ),
    "--port=1": "--port is set by xpyd; leave it out",
    "--role=Decode": "--role is set by xpyd; use spec.pools[].role",
}


@pytest.mark.parametrize(("arg", "line"), BAD.items())
def test_a_bad_flag_is_refused_by_the_operator_and_locally(arg: str, line: str) -> None:
    """Before anything starts: an engine would end at its start, again and again."""
    bad = document(engine={"args": ["--seed=3", arg]})
    fleet = parsed(engine={"args": ["--seed=3", arg]})
    assert engine_args_problems(fleet) == (f"spec.engine.args[1]: {line}",)
    bad["metadata"] |= {"uid": "u", "namespace": "ns"}
    assert read(bad, SETTINGS).mistakes == engine_args_problems(fleet)
    with pytest.raises(UserError, match=r"1 mistake\n  spec\.engine\.args\[1\]: "):
        check_local(fleet, source="fleet.yaml")


def test_flags_of_an_image_of_the_documents_own_are_the_engines_to_refuse() -> None:
    newer = document(engine={"args": ["--flag-of-tomorrow"], "image": "worker:2"})
    assert read(newer, SETTINGS).mistakes == ()


def test_what_the_engine_takes_is_not_refused() -> None:
    assert engine_args_problems(parsed(engine={"args": ARGS})) == ()
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    configure(parser)
    known = {name for action in parser._actions for name in action.option_strings}
    assert set(FLAGS) == {name for name in known if name.startswith("--")} - {"--help"}

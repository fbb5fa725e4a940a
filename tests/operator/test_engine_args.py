"""`engine.args` of a fleet document are flags of `xpyd worker`: from the document to its config."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.operator import test_controller_turn as turns
from tests.operator.fleets import cpu_pool, document, parsed
from xpyd_core import __version__
from xpyd_core.errors import UserError
from xpyd_core.pod_env import PodEnv
from xpyd_operator.controller.decision.decide import decide
from xpyd_operator.controller.decision.kinds import (
    ALWAYS,
    DEPLOYMENT,
    POOL,
    SERVICE,
    Obj,
    kind_of,
)
from xpyd_operator.controller.decision.report import report
from xpyd_operator.controller.decision.state import FleetState, read
from xpyd_operator.controller.decision.writes import Apply, Scale, Write
from xpyd_operator.manifests.engine_flags import BOUNDS, FLAGS
from xpyd_operator.manifests.names import Settings
from xpyd_operator.manifests.refusals import engine_args_problems
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.up.checks import check_local
from xpyd_worker.command import configure, read_config
from xpyd_worker.config import WorkerConfig
from xpyd_worker.flags import GROUPS

SETTINGS = Settings(f"registry.example:5000/xpyd-worker:{__version__}", "xpyd-router:1")
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
    # Replicas are no field yet; their flag is refused with those that xpyd sets.
    of_pools = [
        flag
        for flag in flags
        if flag.argument.endswith("_parallel_size") and flag.argument != "data_parallel_size"
    ]
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
    "--max-num-seqs=0": "--max-num-seqs: expected at least 1, got 0",
    "--seed=-1": "--seed: expected 0 to 2**64 - 1, got -1",
    "--gpu-memory-utilization=0": (
        "--gpu-memory-utilization: expected above 0 and at most 1, e.g. 0.9, got 0.0"
    ),
    "--gpu-memory-utilization=nan": (
        "--gpu-memory-utilization: expected above 0 and at most 1, e.g. 0.9, got nan"
    ),
    "--kv-wait-seconds=601": "--kv-wait-seconds: expected 0 to 600, got 601.0",
    "--device=gpu": "--device: expected auto, cpu, cuda or cuda:N, got 'gpu'",
    "--otlp-traces-endpoint=collector:4317": (
        "--otlp-traces-endpoint: expected an OTLP/HTTP URL, e.g. "
        "http://collector:4318/v1/traces (not gRPC), got 'collector:4317'"
    ),
    "--dtype=int4": "--dtype: expected auto, float32, bfloat16, float16, got 'int4'",
    "--block-size=7": "--block-size: expected 8, 16, 32, 64, got '7'",
    "--enforce-eager=1": "--enforce-eager takes no value",
    "--override-generation-config=[]": (
        "--override-generation-config: expected a JSON object, got '[]'"
    ),
    "--kv-cache-memory=lots": (
        "--kv-cache-memory: 'lots' is not a size; write bytes like 1073741824, 8e9, 4Gi or 500M"
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


SET_BY_XPYD = {"--port", "--kv-port", "--heartbeat-period-ms", "--data-parallel-rpc-port"}
BAD_ARGS = ["--flag-of-tomorrow"]


@pytest.mark.parametrize(
    ("parallelism", "args", "said"),
    [
        (
            {"data": 1, "maxData": 2},
            ["--enable-expert-parallel"],
            "maxData: not with --enable-expert-parallel in spec.engine.args, which is of all "
            "pools; set spec.pools[0].parallelism.expert",
        ),
        ({"maxData": 2, "expert": 2}, ["--enable-expert-parallel"], ""),
        ({"data": 1, "maxData": 2}, ["--enable-eplb"], "maxData: not with --enable-eplb"),
        ({"maxData": 2, "expert": 2}, ["--enable-eplb"], "maxData: not with --enable-eplb"),
        (
            {"data": 2, "expert": 2, "onRankLoss": "Continue"},
            ["--enable-eplb"],
            "onRankLoss: not with --enable-eplb",
        ),
        ({"data": 2, "expert": 2}, ["--enable-eplb"], ""),
    ],
)
def test_flags_that_engines_would_end_at_are_named_with_the_pool(
    parallelism: Obj, args: list[str], said: str
) -> None:
    pool: Obj = {"name": "all", "role": "Aggregated", "resources": {"gpus": 0}}
    problems = engine_args_problems(
        parsed(engine={"args": args}, pools=[pool | {"parallelism": parallelism}])
    )
    assert len(problems) == bool(said)
    assert all(one.startswith(f"spec.pools[0].parallelism.{said}") for one in problems)


@pytest.mark.parametrize(
    "arg", ["--on-rank-loss=continue", "--data-parallel-size-file=/x", "--enable-elastic-ep"]
)
def test_how_many_replicas_stay_is_said_in_the_document_alone(arg: str) -> None:
    (problem,) = engine_args_problems(parsed(engine={"args": [arg]}))
    assert "is set by xpyd; use spec.pools[].parallelism." in problem


def in_cluster(**spec: Any) -> Obj:
    found = document(**spec)
    found["metadata"] |= {"uid": "u", "namespace": "ns"}
    return found


@pytest.mark.parametrize(
    "worker_image",
    [
        "xpyd-worker:99.0",
        "xpyd-worker:latest",
        "xpyd-worker",
        f"xpyd-worker:{__version__}1",
        "xpyd-worker@sha256:12",
        f"registry.example:{__version__}/worker",
    ],
)
def test_flags_of_an_operators_image_of_another_version_are_the_engines_to_refuse(
    worker_image: str,
) -> None:
    settings = replace(SETTINGS, worker_image=worker_image)
    assert read(in_cluster(engine={"args": BAD_ARGS}), settings).mistakes == ()


@pytest.mark.parametrize("tag", [f"{__version__}-cuda", f"v{__version__}@sha256:12"])
def test_a_variant_of_this_versions_image_has_this_versions_flags(tag: str) -> None:
    settings = replace(SETTINGS, worker_image=f"worker:{tag}")
    assert read(in_cluster(engine={"args": BAD_ARGS}), settings).mistakes


def test_flags_of_an_image_in_a_pools_template_are_the_engines_to_refuse() -> None:
    """An image of another container says nothing of the engine."""
    for container, is_refused in (("engine", False), ("sidecar", True)):
        template = {"spec": {"containers": [{"name": container, "image": "own:2"}]}}
        pools = [
            cpu_pool("p", "Prefill", replicas=1),
            cpu_pool("d", "Decode", replicas=1, template=template),
        ]
        found = read(in_cluster(engine={"args": BAD_ARGS}, pools=pools), SETTINGS)
        assert bool(found.mistakes) is is_refused


@pytest.mark.parametrize("flag", sorted(BOUNDS.keys() - SET_BY_XPYD))
def test_a_value_just_outside_of_its_bounds_is_refused(flag: str) -> None:
    least, most, expected = BOUNDS[flag]
    outside = [0 if least < 1e-9 < (most or 1) and least > 0 else least - 1]
    outside += [] if most is None else [most + 1]
    for value in outside:
        (problem,) = engine_args_problems(parsed(engine={"args": [f"{flag}={value:.0f}"]}))
        assert problem.startswith(f"spec.engine.args[0]: {flag}: ")
        assert "expected" in problem
        assert expected in problem


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (["--max-num-seqs=$(SEQS)"], 0),
        (["--max-num-seqs", "$(SEQS)"], 0),
        (["--dtype=$(DTYPE)", "--kv-cache-memory=$(GIB)Gi"], 0),
        (["--max-num-seqs=$SEQS"], 1),
        (["--$(FLAG)=1"], 1),
        (["--port=$(PORT)"], 1),
    ],
)
def test_a_value_with_a_variable_is_the_kubelets_to_fill(args: list[str], wrong: int) -> None:
    """Of a flag that is known and not set by xpyd."""
    assert len(engine_args_problems(parsed(engine={"args": args}))) == wrong


def state_of(found: Obj, children: turns.Children, *, settings: Settings = SETTINGS) -> FleetState:
    return FleetState(
        found, read(found, settings), children, settings, frozenset(ALWAYS), turns.NOW
    )


def running(found: Obj, *, settings: Settings = SETTINGS) -> turns.Children:
    """The objects of a fleet that an operator without the check has made; its status goes into the
    document."""
    state = state_of(found, {}, settings=settings)
    state = replace(state, parsed=replace(state.parsed, mistakes=()))
    children: turns.Children = {}
    for write in turns.writes(decide(state)):
        assert isinstance(write, Apply)
        obj = turns.stored(write.obj)
        children.setdefault(kind_of(obj), {})[obj["metadata"]["name"]] = obj
    found["status"] = report(replace(state, children=children), [], has_key=True).after
    return children


def fleet_with_bad_args() -> Obj:
    found = turns.document()
    found["spec"]["engine"] = {"args": BAD_ARGS}
    return found


def reasons(state: FleetState) -> dict[str, str]:
    found = report(state, decide(state).problems, has_key=True).after["conditions"]
    return {c["type"]: f"{c['status']} {c['reason']} {c['message']}" for c in found}


def written(state: FleetState) -> set[str]:
    def name(write: Write) -> str:
        if isinstance(write, Apply):
            return f"apply {write.obj['metadata']['name']}"
        assert isinstance(write, Scale)
        return f"scale {write.name} to {write.replicas}"

    return {name(write) for write in turns.writes(decide(state))}


def test_a_fleet_that_runs_goes_on_when_a_newer_check_refuses_its_args() -> None:
    """The pods have these args already: the condition names the mistake, and all else goes on."""
    found = fleet_with_bad_args()
    children = running(found)
    assert written(state_of(found, children)) == set()
    words = reasons(state_of(found, children))["Degraded"]
    assert words.startswith("True InvalidTemplate spec.engine.args[0]: '--flag-of-tomorrow'")
    children[POOL]["chat-decode"]["spec"]["replicas"] = 3
    del children[SERVICE]["chat-router"]
    prefill, decode = (
        next(n for n in children[DEPLOYMENT] if pool in n) for pool in ("prefill", "decode")
    )
    del children[DEPLOYMENT][prefill]
    # Of three instances a node drain may take one: the pool's budget is another.
    expected = {f"apply {name}" for name in ("chat-router", "chat-decode", prefill, decode)}
    assert written(state_of(found, children)) == expected


def test_an_upgrade_whose_engines_would_refuse_the_args_leaves_the_old_engines_scaled() -> None:
    """The operator's own image is newer, so pods would be replaced: the old ones stay."""
    before = replace(SETTINGS, worker_image="xpyd-worker:0.0.9")
    found = fleet_with_bad_args()
    children = running(found, settings=before)
    assert written(state_of(found, children)) == set()
    children[POOL]["chat-decode"]["spec"]["replicas"] = 3
    del children[SERVICE]["chat-router"]
    (decode,) = [n for n in children[DEPLOYMENT] if "decode" in n]
    state = state_of(found, children)
    assert written(state) == {"apply chat-router", f"scale {decode} to 3"}
    words = reasons(state)
    assert words["Ready"].startswith("False InvalidTemplate spec.engine.args[0]: ")
    status = report(state, (), has_key=True).after
    assert {row["name"]: row["replicas"] for row in status["pools"]}["decode"] == 3
    assert status["summary"]["decode"] == "0/3"


def test_a_changed_document_with_mistakes_changes_nothing_that_runs() -> None:
    """Its new pool does not begin, and the pool that it no longer has does not leave."""
    found = turns.document()
    children = running(found)
    edited = fleet_with_bad_args() | {"status": found["status"]}
    edited["spec"]["pools"][0]["replicas"] = 5
    edited["spec"]["pools"][1]["name"] = "decode-2"
    edited["spec"]["router"] = {"discoveryPort": 6000, "replicas": 3, "service": {"port": 81}}
    assert written(state_of(edited, children)) == set()
    children[POOL]["chat-decode"]["spec"]["replicas"] = 2
    (decode,) = [n for n in children[DEPLOYMENT] if "decode" in n]
    assert written(state_of(edited, children)) == {f"scale {decode} to 2"}


def test_a_mistake_in_one_template_holds_the_whole_document_back() -> None:
    """A pool that it does not concern keeps the size that it was scaled to, too."""
    found = turns.document()
    children = running(found)
    edited = turns.document(decode=4) | {"status": found["status"]}
    edited["spec"]["router"] = {"template": {"spec": {"restartPolicy": "Never"}}}
    assert written(state_of(edited, children)) == set()
    children[POOL]["chat-decode"]["spec"]["replicas"] = 2
    (decode,) = [n for n in children[DEPLOYMENT] if "decode" in n]
    assert written(state_of(edited, children)) == {f"apply {decode}"}


@pytest.mark.parametrize("bounds", [{"maxReplicas": 1}, {"minReplicas": 9}])
def test_bounds_of_a_document_that_is_held_back_move_no_size(bounds: dict[str, int]) -> None:
    found = turns.document(decode=4)
    children = running(found)
    edited = turns.document(decode=4) | {"status": found["status"]}
    edited["spec"]["router"] = {"template": {"spec": {"restartPolicy": "Never"}}}
    edited["spec"]["pools"][1]["scaling"] = bounds
    assert written(state_of(edited, children)) == set()


def test_a_pool_object_that_is_deleted_meanwhile_comes_back_with_its_size() -> None:
    found = turns.document(decode=4)
    children = running(found)
    edited = turns.document(decode=2) | {"status": found["status"]}
    edited["spec"]["router"] = {"template": {"spec": {"restartPolicy": "Never"}}}
    del children[POOL]["chat-decode"]
    (made,) = turns.writes(decide(state_of(edited, children)))
    assert isinstance(made, Apply)
    assert made.obj["kind"] == "InferenceFleetPool"
    assert (made.obj["metadata"]["name"], made.obj["spec"]["replicas"]) == ("chat-decode", 4)


def test_a_new_fleet_with_mistakes_begins_nothing() -> None:
    assert written(state_of(fleet_with_bad_args(), {})) == set()

"""From a document to templates and revisions, and from a template to a command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.operator.fleets import parsed, prefill_and_decode
from xpyd_operator.plan.template import fleet_want, layout_of
from xpyd_operator.plan.values import ROUTER
from xpyd_operator.up.memory import Machine, plan_memory
from xpyd_operator.up.programs import LocalSettings, Pod, pod_arguments, pod_environment


def fleet(**spec):
    return parsed(**{"pools": prefill_and_decode(decode=3)} | spec)


def want(**spec):
    return {pool.name: pool for pool in fleet_want(fleet(**spec), model="/m").pools}


def test_every_field_reaches_a_flag():
    found = want(
        model={"uri": "hf://org/name", "revision": "abc", "servedNames": ["a", "b"]},
        engine={"args": ["--dtype=float32"], "env": [{"name": "A", "value": "1"}]},
        kvTransfer={"port": 22001, "bufferSize": "5%", "hostPoolSize": 8, "leaseSeconds": 7,
                    "waitSeconds": 3, "onFailure": "Fail"},
        heartbeat={"intervalMilliseconds": 500, "missedBeats": 4},
        drain={"timeoutSeconds": 9},
    )  # fmt: skip
    assert found["decode"].template.args == (
        "--model=/m", "--revision=abc", "--served-model-name", "a", "b", "--role=Decode",
        "--device=cpu",
        "--kv-wait-seconds=3", "--kv-lease-seconds=7", "--kv-on-failure=fail",
        "--kv-buffer-size=5%", "--kv-host-pool-size=8", "--heartbeat-period-ms=500",
        "--drain-timeout=9", "--dtype=float32",
    )  # fmt: skip
    assert found["decode"].template.env == (("A", "1"), ("XPYD_KV_PORT", "22001"))
    assert found[ROUTER].template.args == ("--heartbeat-interval-ms=500", "--missed-beats=4")
    assert (found["decode"].replicas, found[ROUTER].replicas, found[ROUTER].surge_percent) == (
        3,
        1,
        0,
    )


def test_policies_reach_the_router_where_they_are_not_its_default():
    said = {"policy": "RoundRobin", "prefillPolicy": "PowerOfTwo", "decodePolicy": "LeastLoaded"}
    assert want(router=said)[ROUTER].template.args[2:] == (
        "--policy=RoundRobin",
        "--prefill-policy=PowerOfTwo",
        "--decode-policy=LeastLoaded",
    )
    assert want(router={"policy": "LeastLoaded"})[ROUTER].template == want()[ROUTER].template


def test_what_only_a_cluster_uses_is_in_the_revision_and_in_no_flag():
    plain = want()["decode"].template
    document = fleet(
        engine={
            "image": "worker:1",
            "env": [
                {"name": "A", "value": "1"},
                {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            ],
        },
        model={"uri": "hf://org/name", "secretRef": {"name": "token"}},
    )
    pools = {pool.name: pool for pool in fleet_want(document, model="/m", image="x:1").pools}
    found = pools["decode"].template
    assert found.args == plain.args
    assert found.env == (("A", "1"), *plain.env)
    assert found.image == "worker:1"
    assert json.loads(found.pod)["secretRef"] == {"name": "token"}
    assert json.loads(found.pod)["env"][1]["name"] == "B"
    assert plain.pod == '{"resources":{"gpus":0}}'
    assert pools[ROUTER].template.pod == want()[ROUTER].template.pod == ""


def test_ranks_of_an_instance_reach_the_engines_flags_by_the_names_that_vllm_has():
    pools = [
        {"name": "all", "role": "Aggregated", "parallelism": {"tensor": 2, "pipeline": 4},
         "resources": {"gpus": 8}},
    ]  # fmt: skip
    assert want(pools=pools)["all"].template.args[2:5] == (
        "--device=cuda",
        "--tensor-parallel-size=2",
        "--pipeline-parallel-size=4",
    )


def test_whole_experts_are_a_flag_of_the_pools_that_ask_for_them():
    """Left out at 1, so that revisions are those of documents without the field."""
    pools = [
        {"name": "prefill", "role": "Prefill", "parallelism": {"tensor": 2}},
        {"name": "decode", "role": "Decode", "parallelism": {"tensor": 2}},
    ]
    pools = [pool | {"resources": {"gpus": 0}} for pool in pools]
    before = want(pools=pools)
    divided = pools[0] | {"parallelism": {"tensor": 2, "expert": 1}}
    assert want(pools=[divided, pools[1]]) == before
    whole = pools[1] | {"parallelism": {"tensor": 2, "expert": 2}}
    after = want(pools=[pools[0], whole])
    assert {name for name in after if after[name] != before[name]} == {"decode"}
    args = after["decode"].template.args
    assert args[2:5] == ("--device=cpu", "--tensor-parallel-size=2", "--enable-expert-parallel")
    layouts = {name: layout_of(pool.template) for name, pool in after.items()}
    assert layouts == {ROUTER: "", "prefill": "TP2xPP1", "decode": "TP2xPP1xEP2"}
    marks = {after[name].template.fleet_revision for name in ("prefill", "decode")}
    assert marks == {before["decode"].template.fleet_revision}, "P and D may differ in it"


def test_replicas_of_an_engine_are_a_flag_of_the_pools_that_ask_for_them():
    """Left out at 1; another number is another revision, of that pool alone."""
    pools = [
        {"name": "all", "role": "Aggregated", "parallelism": {"tensor": 2}},
        {"name": "more", "role": "Aggregated"},
    ]
    pools = [pool | {"resources": {"gpus": 0}} for pool in pools]
    before = want(pools=pools)
    one = pools[0] | {"parallelism": {"tensor": 2, "data": 1}}
    assert want(pools=[one, pools[1]]) == before
    revisions = {before["all"].revision}
    for data, experts, layout in (
        (2, 1, "TP2xPP1xDP2"),
        (3, 1, "TP2xPP1xDP3"),
        (2, 4, "TP2xPP1xDP2xEP4"),
    ):
        parts = {"tensor": 2, "data": data, "expert": experts}
        after = want(pools=[pools[0] | {"parallelism": parts}, pools[1]])
        assert {name for name in after if after[name] != before[name]} == {"all"}
        args = after["all"].template.args
        assert args[3:5] == ("--tensor-parallel-size=2", f"--data-parallel-size={data}")
        assert ("--enable-expert-parallel" in args) == (experts > 1)
        assert layout_of(after["all"].template) == layout
        revisions.add(after["all"].revision)
    assert len(revisions) == 4


def test_replicas_go_on_without_another_where_the_document_says_so():
    pool = {"name": "all", "role": "Aggregated", "resources": {"gpus": 0}}
    parts = {"data": 2, "expert": 2}
    before = want(pools=[pool | {"parallelism": parts}])
    assert want(pools=[pool | {"parallelism": parts | {"onRankLoss": "Restart"}}]) == before
    after = want(pools=[pool | {"parallelism": parts | {"onRankLoss": "Continue"}}])
    assert "--on-rank-loss=continue" in after["all"].template.args
    assert after["all"].revision != before["all"].revision


def test_where_replicas_come_and_go_their_number_is_no_revision():
    pool = {"name": "all", "role": "Aggregated", "resources": {"gpus": 0}}

    def found(**parallelism: int):
        document = fleet(pools=[pool | {"parallelism": parallelism}])
        wanted = fleet_want(document, model="/m", in_cluster=True).pools
        return next(one for one in wanted if one.name == "all")

    before = found(data=1, maxData=3)
    assert before.template.args[3:5] == (
        "--enable-elastic-ep",
        "--data-parallel-size-file=/etc/xpyd/replicas/data",
    )
    assert found(data=3, maxData=3) == before
    others = {found(data=1, maxData=4).revision, found(data=3).revision, found().revision}
    assert len({before.revision, *others}) == 4
    # With experts that they share neither is how many ranks these lie on; whether they are shared
    # is one.
    shared = found(data=2, maxData=3, expert=2)
    assert shared.template.args[3:5] == ("--enable-expert-parallel", "--enable-elastic-ep")
    for data, expert in ((3, 3), (2, 3), (1, 3)):
        assert found(data=data, maxData=3, expert=expert) == shared
    assert found(data=1, maxData=3, expert=1) == before != shared


def test_a_local_engine_starts_with_the_replicas_that_the_document_says():
    pool = {"name": "all", "role": "Aggregated", "resources": {"gpus": 0}}
    for elastic, local in (
        ({"data": 2, "maxData": 3}, {"data": 2}),
        ({"data": 2, "maxData": 3, "expert": 3}, {"data": 2, "expert": 2}),
        ({"data": 2, "maxData": 3, "expert": 2}, {"data": 2, "expert": 2}),
        ({"tensor": 2, "maxData": 3, "expert": 6}, {"tensor": 2, "expert": 2}),
        # An engine refuses to go on without another replica where there is none.
        ({"data": 1, "maxData": 3, "expert": 3, "onRankLoss": "Continue"}, {}),
    ):
        found = want(pools=[pool | {"parallelism": elastic}])
        assert found == want(pools=[pool | {"parallelism": local}])


def test_replicas_of_an_aggregated_vllm_are_its_own_flag():
    pool = {"name": "all", "role": "Aggregated", "resources": {"gpus": 4}}
    pool["parallelism"] = {"tensor": 2, "data": 2, "expert": 4}
    found = want(pools=[pool], engine={"type": "VLLM", "image": "v"})["all"].template
    assert found.args[-3:] == (
        "--tensor-parallel-size=2",
        "--data-parallel-size=2",
        "--enable-expert-parallel",
    )
    assert layout_of(found) == "TP2xPP1xDP2xEP4"


def test_p_and_d_may_differ_in_replicas():
    pools = [{"name": "p", "role": "Prefill"}, {"name": "d", "role": "Decode"}]
    pools = [pool | {"resources": {"gpus": 0}} for pool in pools]
    pools[1]["parallelism"] = {"data": 2}
    found = want(pools=pools)
    assert found["p"].template.fleet_revision == found["d"].template.fleet_revision != ""
    assert layout_of(found["d"].template) == "TP1xPP1xDP2"


@pytest.mark.parametrize("flag", ["--enable-expert-parallel", "--enable_expert_parallel", "-ep"])
def test_the_flag_in_engine_args_deals_out_the_experts_of_all_pools(flag):
    """A document that had it before there was the field keeps its revisions."""
    pools = [
        {"name": "all", "role": "Aggregated", "parallelism": {"tensor": 4}},
        {"name": "one", "role": "Aggregated"},
    ]
    pools = [pool | {"resources": {"gpus": 0}} for pool in pools]
    found = want(pools=pools, engine={"args": [flag]})
    assert found["all"].template.args.count(flag) == 1
    layouts = [layout_of(found[name].template) for name in ("all", "one")]
    assert layouts == ["TP4xPP1xEP4", "TP1xPP1"]
    pools[1]["parallelism"] = {"data": 3}
    found = want(pools=pools, engine={"args": [flag]})
    assert layout_of(found["one"].template) == "TP1xPP1xDP3xEP3"


def test_routers_and_bounds_of_a_cluster_reach_the_wants():
    pools = [
        {"name": "all", "role": "Aggregated", "scaling": {"minReplicas": 2, "maxReplicas": 5}},
        {"name": "more", "role": "Aggregated"},
    ]
    pools[1]["rollout"] = {"maxSurgePercent": 0, "maxUnavailablePercent": 50}
    spec = {"router": {"replicas": 3}, "rollout": {"maxSurgePercent": 75}}
    found = fleet_want(fleet(pools=pools, **spec), model="/m", in_cluster=True).pools
    bounds = [(p.surge_percent, p.unavailable_percent, p.least, p.most) for p in found]
    assert bounds == [(75, 0, 0, 1024), (75, 0, 2, 5), (0, 50, 0, 1024)]
    assert [p.replicas for p in found] == [3, None, None]


@pytest.mark.parametrize(
    ("own", "bounds"),
    [
        (None, (60, 30)),
        ({}, (60, 30)),
        ({"maxSurgePercent": 0}, (0, 30)),
        ({"maxUnavailablePercent": 0}, (60, 0)),
        ({"maxSurgePercent": 10, "maxUnavailablePercent": 5}, (10, 5)),
    ],
)
def test_a_pools_rollout_takes_what_it_leaves_out_from_the_fleets(own, bounds):
    pools = [{"name": "all", "role": "Aggregated"} | ({} if own is None else {"rollout": own})]
    rollout = {"maxSurgePercent": 60, "maxUnavailablePercent": 30}
    found = fleet_want(fleet(pools=pools, rollout=rollout), model="/m", in_cluster=True).pools
    assert [(p.surge_percent, p.unavailable_percent) for p in found] == [(60, 30), bounds]


def test_a_revision_is_of_what_defines_the_pods_and_of_nothing_else():
    base = {name: pool.revision for name, pool in want().items()}
    assert all(len(revision) == 8 for revision in base.values())
    other_size = want(pools=[
        {"name": "prefill", "role": "Prefill", "replicas": 4, "resources": {"gpus": 0}},
        {"name": "decode", "role": "Decode", "resources": {"gpus": 0}},
    ])  # fmt: skip
    assert {name: pool.revision for name, pool in other_size.items()} == base
    beats = want(heartbeat={"missedBeats": 5})
    assert {name for name, pool in beats.items() if pool.revision != base[name]} == {ROUTER}
    args = want(engine={"args": ["--x"]})
    assert {n for n, p in args.items() if p.revision != base[n]} == {"prefill", "decode"}
    host_pool = want(kvTransfer={"hostPoolSize": "1Gi"})
    assert {n for n, p in host_pool.items() if p.revision != base[n]} == {"decode"}


def settings(document):
    memory = plan_memory(document, (1, 3), Machine(64 << 30, 8), weights_bytes=0)
    return LocalSettings("f", 7, 10005, 10006, Path("/k"), Path("/s"), memory, "info", "json")


def test_the_documents_flags_come_after_the_machines():
    document = fleet(engine={"args": ["--threads=5"]})
    template = {p.name: p for p in fleet_want(document, model="/m").pools}["decode"].template
    argv = pod_arguments(Pod("f-decode-0", "decode", "r", 3, template), settings(document))
    assert argv[:3] == ["--log-level=info", "--log-format=json", "--threads=2"]
    assert argv[-1] == "--threads=5"
    assert any(arg.startswith("--kv-cache-memory=") for arg in argv)


def test_the_router_listens_for_clients_on_127_0_0_1_and_for_beats_on_its_own_address():
    document = fleet()
    template = {p.name: p for p in fleet_want(document, model="/m").pools}[ROUTER].template
    pod = Pod("f-router-0", ROUTER, "r", 1, template)
    argv = pod_arguments(pod, settings(document))
    for flag in ("--host=127.0.0.1", "--port=10005", "--admin-port=10006",
                 "--discovery-host=127.1.7.1", "--discovery-port=30001",
                 "--drain-seconds=0"):  # fmt: skip
        assert flag in argv
    environ = pod_environment(pod, settings(document), {})
    assert "XPYD_ROLE" not in environ
    assert environ["XPYD_POD_IP"] == "127.1.7.1"


def test_the_router_gets_the_file_of_client_keys_that_up_was_given():
    document = fleet(router={"auth": {"secretRef": {"name": "clients"}}})
    template = {p.name: p for p in fleet_want(document, model="/m").pools}[ROUTER].template
    pod = Pod("f-router-0", ROUTER, "r", 1, template)
    assert not [arg for arg in pod_arguments(pod, settings(document)) if "key" in arg]
    place = replace(settings(document), api_key_file="/c/keys.txt")
    assert "--api-key-file=/c/keys.txt" in pod_arguments(pod, place)


def test_unsigned_beats_are_the_routers_flag_and_its_only_change():
    plain, told = want()[ROUTER].template, want(heartbeat={"acceptUnsigned": True})[ROUTER].template
    assert set(told.args) - set(plain.args) == {"--accept-unsigned-beats"}
    assert told.pod == plain.pod


def test_transport_and_insecure_reach_the_flags_of_those_whom_they_concern():
    on_cpu = {"gpus": 0}  # where all transports are allowed
    pools = [
        {"name": role.lower(), "role": role, "resources": on_cpu}
        for role in ("Prefill", "Decode", "Aggregated")
    ]

    def flags(**kv):
        plain = {name: set(pool.template.args) for name, pool in want(pools=pools).items()}
        found = want(pools=pools, kvTransfer=kv)
        return {n: set(p.template.args) - plain[n] for n, p in found.items()}

    names = {"TCP": "tcp", "UDS": "uds", "SharedMemory": "shm"}
    for transport, name in names.items():
        flag = {f"--kv-transport={name}"}
        assert flags(transport=transport, sameHostPath="/x") == {
            ROUTER: set(), "prefill": flag, "decode": flag, "aggregated": set()
        }  # fmt: skip
    assert set(map(str, flags(insecure=True).values())) == {"{'--kv-insecure'}"}
    assert not any(flags(transport="Auto", insecure=False, sameHostPath="/x").values())


def test_a_mode_reaches_p_which_in_get_has_buffer_and_pool_as_d_has():
    plain = {name: set(pool.template.args) for name, pool in want().items()}
    sizes = {"bufferSize": "5%", "hostPoolSize": 8}
    for mode, more in (
        ("PutAsync", set()),
        ("Put", {"--kv-mode=put"}),
        ("Get", {"--kv-mode=get", "--kv-buffer-size=5%", "--kv-host-pool-size=8"}),
    ):
        found = want(kvTransfer={"mode": mode, **sizes})
        assert set(found["prefill"].template.args) - plain["prefill"] == more
        assert not [arg for arg in found["decode"].template.args if arg.startswith("--kv-mode")]
        assert "--kv-host-pool-size=8" in found["decode"].template.args


def test_in_local_mode_engines_that_move_kv_find_each_other_in_the_state_folder():
    pools = [{"name": role.lower(), "role": role, "resources": {"gpus": 0}}
             for role in ("Prefill", "Decode", "Aggregated")]  # fmt: skip
    document = fleet(pools=pools)
    memory = plan_memory(document, (1, 1, 1), Machine(64 << 30, 8), weights_bytes=0)
    place = LocalSettings("f", 7, 10005, 10006, Path("/k"), Path("/s"), memory, "info", "json")
    found = {
        pool.name: "--kv-socket-dir=/s" in pod_arguments(Pod("x", pool.name, "r", 2, pool.template),
                                                         place)
        for pool in fleet_want(document, model="/m").pools
    }  # fmt: skip
    assert found == {ROUTER: False, "prefill": True, "decode": True, "aggregated": False}


def test_a_pod_without_key_gets_none():
    document = fleet(kvTransfer={"insecure": True})
    for pool in fleet_want(document, model="/m").pools:
        pod = Pod("x", pool.name, "r", 2, pool.template)
        environ = pod_environment(pod, settings(document), {})
        assert "XPYD_KV_KEY_FILE" not in environ


def test_the_callers_own_xpyd_variables_do_not_leak_into_pods():
    document = fleet(engine={"env": [{"name": "OMP_NUM_THREADS", "value": "3"}]})
    template = {p.name: p for p in fleet_want(document, model="/m").pools}["prefill"].template
    pod = Pod("f-prefill-0", "prefill", "r", 2, template)
    inherited = {"XPYD_KV_KEY_FILE": "/other", "XPYD_STRAY": "1", "PATH": "/bin"}
    environ = pod_environment(pod, settings(document), inherited)
    assert (environ["XPYD_KV_KEY_FILE"], environ["PATH"]) == ("/k", "/bin")
    assert "XPYD_STRAY" not in environ
    assert environ["OMP_NUM_THREADS"] == "3"
    assert environ["XPYD_ROLE"] == "Prefill"

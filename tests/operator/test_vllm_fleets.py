"""Fleets of type VLLM: their command lines, revisions and pods; what their connector reads."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kv import vllm_standin
from tests.operator.fleets import parsed, prefill_and_decode
from tests.operator.object_samples import objects_of
from xpyd_core.errors import UserError
from xpyd_operator.document.engine import Engine
from xpyd_operator.manifests.refusals import engine_args_problems, template_problems
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.template import fleet_want, layout_of
from xpyd_operator.plan.values import ROUTER, Template

vllm_standin.install()
options = importlib.import_module("xpyd_kv.vllm.options")
"""The connector's own reading of its options: it imports vLLM, or the stand-in."""
gpu = importlib.import_module("xpyd_kv.vllm.gpu")
"""What it says of transports."""
ENGINE = {"type": "VLLM", "connector": "Xpyd", "image": "vllm:1"}
MODEL = {"uri": "file:///models/chat"}


def templates(**spec: Any) -> dict[str, Template]:
    document = {"pools": prefill_and_decode(), "model": MODEL, "engine": ENGINE} | spec
    fleet = parsed(**document)
    want = fleet_want(fleet, model=model_in_pod(fleet), image="worker:1")
    return {pool.name: pool.template for pool in want.pools}


def revisions(**spec: Any) -> dict[str, str]:
    fleet = parsed(**{"pools": prefill_and_decode(), "model": MODEL, "engine": ENGINE} | spec)
    want = fleet_want(fleet, model=model_in_pod(fleet), image="worker:1")
    return {pool.name: pool.revision for pool in want.pools if pool.name != ROUTER}


def transfer_of(template: Template, **variables: str) -> dict[str, Any]:
    flag = "--kv-transfer-config="
    (text,) = (arg.removeprefix(flag) for arg in template.args if arg.startswith(flag))
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    return json.loads(text)


def options_of(template: Template, key: Path, sockets: str = "") -> Any:
    """As the connector reads them, with what Kubernetes puts in."""
    known = {"XPYD_POD_IP": "10.0.0.5", "XPYD_KV_KEY_FILE": str(key)}
    given = transfer_of(template, **known, XPYD_KV_SOCKET_DIR=sockets)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(**given))
    assert options.role_of(config) == template.role[0]
    return options.read_options(config)


def test_every_field_reaches_vllm(tmp_path: Path) -> None:
    found = templates(
        model=MODEL | {"servedNames": ["a", "b"]},
        engine=ENGINE | {"args": ["--dtype=float32"], "env": [{"name": "A", "value": "1"}]},
        pools=prefill_and_decode(parallelism={"tensor": 2, "pipeline": 3, "expert": 2}),
        kvTransfer={"port": 22001, "bufferSize": "1Gi", "hostPoolSize": 8, "leaseSeconds": 7,
                    "waitSeconds": 3, "onFailure": "Fail", "mode": "Get"},
        heartbeat={"intervalMilliseconds": 500},
        drain={"timeoutSeconds": 9},
    )  # fmt: skip
    decode = found["decode"]
    assert [arg for arg in decode.args if not arg.startswith("--kv-transfer-config")] == [
        "/models/chat", "--served-model-name", "a", "b", "--host=$(XPYD_POD_IP)", "--port=20001",
        "--shutdown-timeout=9", "--tensor-parallel-size=2", "--pipeline-parallel-size=3",
        "--enable-expert-parallel", "--dtype=float32",
    ]  # fmt: skip
    assert decode.env == (("A", "1"), ("XPYD_KV_PORT", "22001"), ("VLLM_PLUGINS", "xpyd"))
    assert decode.beats == (), "the plugin beats"
    assert (decode.image, layout_of(decode)) == ("vllm:1", "TP2xPP3xEP2")
    assert transfer_of(decode)["kv_port"] == 22001
    assert transfer_of(decode)["kv_load_failure_policy"] == "fail"
    key = tmp_path / "key"
    of_both = {"host": "10.0.0.5", "key_file": str(key), "wait_s": 3, "lease_s": 7,
               "fail_without_kv": True, "pool_bytes": 8, "buffer_bytes": 1 << 30,
               "heartbeat_period_s": 0.5}  # fmt: skip
    assert options_of(decode, key) == options.Options(**of_both)
    assert options_of(found["prefill"], key) == options.Options(**of_both, mode="get")


def test_the_least_document_says_what_the_connector_needs(tmp_path: Path) -> None:
    found = templates()
    key = tmp_path / "key"
    common = {"host": "10.0.0.5", "key_file": str(key), "wait_s": 10, "lease_s": 30}
    assert options_of(found["prefill"], key) == options.Options(**common)
    assert options_of(found["decode"], key) == options.Options(**common, pool_bytes=4 << 30)
    assert found["decode"].args[:3] == ("/models/chat", "--served-model-name", "chat")
    insecure = templates(kvTransfer={"insecure": True})["decode"]
    assert options_of(insecure, key).insecure


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(
    ("transfer", "on_cpu", "on_gpu"),
    [
        ({}, ["tcp"], ["cuda_ipc", "tcp"]),
        ({"sameHostPath": "/run/x"}, ["uds", "tcp"], ["cuda_ipc", "uds", "tcp"]),
        ({"transport": "TCP"}, ["tcp"], ["tcp"]),
        ({"transport": "TCP", "sameHostPath": "/run/x"}, ["tcp"], ["tcp"]),
        ({"transport": "UDS", "sameHostPath": "/run/x"}, ["uds"], ["uds"]),
    ],
)
def test_the_connector_gets_the_transports_that_it_takes_on_that_device(
    tmp_path: Path, transfer: dict[str, Any], on_cpu: list[str], on_gpu: list[str], gpus: int
) -> None:
    pools = prefill_and_decode(resources={"gpus": gpus})
    found = templates(pools=pools, kvTransfer=transfer)
    pods = pods_of(pools=pools, kvTransfer=transfer)
    for pool in ("prefill", "decode"):
        variables = variables_of(pods[pool]["engine"])
        read = options_of(found[pool], tmp_path / "key", variables.get("XPYD_KV_SOCKET_DIR", ""))
        assert list(read.transports) == (on_gpu if gpus else on_cpu)
        gpu.check_transports(read.transports, on_gpu=gpus > 0, socket_dir=read.socket_dir)
        mounted = {one["mountPath"] for one in pods[pool]["engine"]["volumeMounts"]}
        assert ("uds" in read.transports) == bool(read.socket_dir) == (read.socket_dir in mounted)


def test_a_pod_on_gpus_has_them_and_kv_that_comes_early_has_room_on_the_device(
    tmp_path: Path,
) -> None:
    pools = prefill_and_decode(resources={"gpus": 2}, parallelism={"tensor": 2})
    spec = {"pools": pools, "kvTransfer": {"bufferSize": "2Gi"}}
    for pool, pod in pods_of(**spec).items():
        assert pod.keys() == {"engine"}, "the plugin beats, in vLLM's own process"
        assert pod["engine"]["resources"]["limits"]["nvidia.com/gpu"] == "2"
        ports = [port["containerPort"] for port in pod["engine"]["ports"]]
        assert ports == [20001, 21001, 21002, 21003], "one for each rank"
        read = options_of(templates(**spec)[pool], tmp_path / "key")
        sizes = (read.buffer_bytes, read.pool_bytes)
        assert sizes == ((2 << 30, 4 << 30) if pool == "decode" else (0, 0))
        assert not read.portable, "P and D on GPUs have the same bytes"


def test_an_aggregated_vllm_moves_no_kv_and_may_take_its_model_from_the_hub() -> None:
    pools = [{"name": "all", "role": "Aggregated", "resources": {"gpus": 2},
              "parallelism": {"tensor": 2}}]  # fmt: skip
    found = templates(
        pools=pools, model={"uri": "hf://org/name"}, engine={"type": "VLLM", "image": "v"}
    )["all"]
    assert found.args == (
        "org/name", "--served-model-name", "org/name", "--host=$(XPYD_POD_IP)", "--port=20001",
        "--shutdown-timeout=300", "--tensor-parallel-size=2",
    )  # fmt: skip
    assert found.beats == ("--heartbeat-period-ms=3000", "--drain-timeout=300")
    assert "VLLM_PLUGINS" not in dict(found.env), "the plugin refuses a vLLM without connector"


NIXL = {"type": "VLLM", "connector": "Nixl", "image": "vllm:1"}


@pytest.mark.parametrize("gpus", [0, 4])
def test_an_unchanged_vllm_gets_nixl_by_its_flags_and_its_environment(gpus: int) -> None:
    pools = prefill_and_decode(
        parallelism={"tensor": 2, "pipeline": 2}, resources={"gpus": gpus, "sharedMemory": "1Gi"}
    )
    found = templates(
        engine=NIXL,
        model={"uri": "hf://org/name"},
        pools=pools,
        kvTransfer={"port": 22001, "leaseSeconds": 60, "onFailure": "Fail", "insecure": True},
    )
    for pool in ("prefill", "decode"):
        template = found[pool]
        buffer = {} if gpus else {"kv_buffer_device": "cpu"}
        assert transfer_of(template) == {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            **buffer,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": 60},
        }
        assert template.args[0] == "org/name"
        assert dict(template.env)["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "22001"
        assert "VLLM_PLUGINS" not in dict(template.env)
        assert "--dialect=nixl" in template.beats
        assert template.beats[-1] == "--kv-insecure"
        assert layout_of(template) == "TP2xPP2"


@pytest.mark.parametrize(
    ("args", "takes_ids"),
    [
        (["--seed=3", "--max-model-len", "2048", "--", "x"], True),
        (["--override-gen={}"], False),
        (["--override-generation-config={}"], False),
        (["--override_generation_config.max_new_tokens=8"], False),
        (["--generation-config", "/models/other"], False),
        (["--logits-processors=a:B"], False),
        (["--watermark-config", "{}"], False),
    ],
    ids=str,
)
def test_the_beats_of_a_vllm_with_nixl_say_by_its_flags_whether_it_counts_its_output(
    args: list[str], takes_ids: bool
) -> None:
    for engine, speaks in ((NIXL, True), (ENGINE, False)):
        found = templates(engine=engine | {"args": args})
        for pool in ("prefill", "decode"):
            is_told = "--no-prompt-ids" in found[pool].beats
            assert is_told == (speaks and not takes_ids), "our plugin knows it itself"


def compat_of(**spec: Any) -> str:
    """What its beats say that P and D have in common; both must say the same."""
    given = {"engine": NIXL, "model": {"uri": "hf://org/name"}} | spec
    flags = {
        next(flag for flag in template.beats if flag.startswith("--compat="))
        for name, template in templates(**given).items()
        if name != ROUTER
    }
    (flag,) = flags
    return flag.removeprefix("--compat=")


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"uri": "hf://org/other"}},
        {"model": {"uri": "hf://org/name", "revision": "abc"}},
        {"engine": NIXL | {"image": "vllm:2"}},
        {"engine": NIXL | {"args": ["--chat-template=/x"]}},
        {"engine": NIXL | {"args": ["--hf-overrides={}"]}},
        {"engine": NIXL | {"env": [{"name": "A", "value": "1"}]}},
        {"engine": NIXL | {"env": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ]}},
    ],
    ids=str,
)  # fmt: skip
def test_p_and_d_of_nixl_do_not_pair_across_a_change_of_what_their_kv_means(
    change: dict[str, Any],
) -> None:
    assert compat_of() != compat_of(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"drain": {"timeoutSeconds": 1}},
        {"heartbeat": {"intervalMilliseconds": 500}},
        {"kvTransfer": {"leaseSeconds": 7}},
        {"pools": prefill_and_decode(prefill=3, parallelism={"tensor": 2})},
        {"pools": [
            prefill_and_decode()[0] | {"parallelism": {"tensor": 2}}, prefill_and_decode()[1],
        ]},
    ],
    ids=str,
)  # fmt: skip
def test_p_and_d_of_nixl_pair_across_a_change_that_leaves_kv_as_it_is(
    change: dict[str, Any],
) -> None:
    assert compat_of() == compat_of(**change)


def pods_of(**spec: Any) -> dict[str, Any]:
    """The engines' pods by pool, their containers by name."""
    fleet = parsed(**{"pools": prefill_and_decode(), "model": MODEL, "engine": ENGINE} | spec)
    return {
        obj["metadata"]["labels"]["xpyd.dev/pool"]: {
            one["name"]: one for one in obj["spec"]["template"]["spec"]["containers"]
        }
        for obj in objects_of(fleet)
        if obj["kind"] == "Deployment" and "router" not in obj["metadata"]["name"]
    }


def variables_of(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def test_a_pod_of_nixl_has_its_side_channel_at_its_address_and_its_gpus() -> None:
    gpus = prefill_and_decode(resources={"gpus": 2}, parallelism={"tensor": 2})
    for pod in pods_of(engine=NIXL, pools=gpus).values():
        engine = pod["engine"]
        assert engine["image"] == "vllm:1"
        given = variables_of(engine)
        own_address = {"fieldRef": {"fieldPath": "status.podIP"}}
        assert given["VLLM_NIXL_SIDE_CHANNEL_HOST"] == own_address
        assert given["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "21001"
        assert [port["containerPort"] for port in engine["ports"]] == [20001, 21001]
        assert engine["resources"]["limits"]["nvidia.com/gpu"] == "2"
        assert pod["xpyd-beats"]["image"] == "xpyd-worker:1"
        assert "--dialect=nixl" in pod["xpyd-beats"]["args"]


@pytest.mark.parametrize(("given", "gets"), [((), "xpyd"), (("",), "xpyd"), (("a,b",), "a,b,xpyd")])
def test_the_documents_plugins_are_kept_beside_ours(given: tuple[str, ...], gets: str) -> None:
    env = [{"name": "VLLM_PLUGINS", "value": value} for value in given]
    pools = [*prefill_and_decode(), {"name": "all", "role": "Aggregated", "resources": {"gpus": 0}}]
    pods = pods_of(engine=ENGINE | {"env": env}, pools=pools)
    for pool in ("prefill", "decode"):
        assert pods[pool].keys() == {"engine"}, "nothing beats twice"
        assert variables_of(pods[pool]["engine"])["VLLM_PLUGINS"] == gets
    alone = pods["all"]
    assert alone.keys() == {"engine", "xpyd-beats"}
    assert variables_of(alone["engine"]).get("VLLM_PLUGINS") == (given[0] if given else None)


@pytest.mark.parametrize("engine", [ENGINE, NIXL])
def test_a_vllm_over_tls_has_its_flags_and_its_beats_say_so(engine: dict[str, Any]) -> None:
    for pod in pods_of(engine=engine | {"tls": {"secretName": "e"}}).values():
        model, *words = pod["engine"]["args"]
        assert [word.partition("=")[0] for word in words[:2]] == ["--ssl-certfile", "--ssl-keyfile"]
        assert not model.startswith("-"), "it is vLLM's first word"
        assert pod["engine"]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
        for beats in (one for name, one in pod.items() if name == "xpyd-beats"):
            assert beats["args"][:2] == ["vllm-beats", "--tls"]
    assert "xpyd-beats" in pods_of(engine=NIXL)["prefill"]


@pytest.mark.parametrize("name", ["VLLM_PLUGINS", "VLLM_NIXL_SIDE_CHANNEL_HOST"])
def test_a_template_cannot_replace_the_variables_that_the_fleet_sets(name: str) -> None:
    engine = {"name": "engine", "env": [{"name": name, "value": "x"}]}
    pools = prefill_and_decode(template={"spec": {"containers": [engine]}})
    lines = template_problems(parsed(pools=pools, model=MODEL, engine=ENGINE))
    assert [line.partition(": ")[0] for line in lines] == [
        f"spec.pools[{index}].template.spec.containers[0].env[0].name" for index in (0, 1)
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"engine": ENGINE | {"args": ["--seed=3"]}},
        {"engine": ENGINE | {"image": "vllm:2"}},
        {"heartbeat": {"intervalMilliseconds": 500}},
        {"drain": {"timeoutSeconds": 1}},
        {"kvTransfer": {"waitSeconds": 3}},
    ],
)
def test_a_change_of_what_vllm_gets_is_another_revision(change: dict[str, Any]) -> None:
    before, after = revisions(), revisions(**change)
    assert before.keys() == after.keys()
    assert not before.items() & after.items()


def test_what_only_vllm_knows_is_left_to_vllm() -> None:
    args = ["--no-such-flag", "--kv-cache-dtype", "fp8", "--kv-cache", "--model-impl=auto"]
    fleet = parsed(pools=prefill_and_decode(), model=MODEL, engine=ENGINE | {"args": args})
    assert engine_args_problems(fleet) == ()


def takes(arg: str, **engine: str) -> bool:
    pools = [{"name": "all", "role": "Aggregated"}]
    given = {"type": "VLLM", "image": "v", "args": [arg, "1"]} | engine
    try:
        parsed(pools=pools, model=MODEL, engine=given)
    except UserError as error:
        return "spec.engine.args" not in str(error)
    return True


@pytest.mark.parametrize(
    "arg",
    [
        "--port", "--port=9", "--por", "--po=9", "--port.x=9", "--kv_transfer_config", "--kv-tr",
        "--kv-transfer.kv_role", "--kv_transfer_config.kv_role=kv_both", "--tensor_parallel_size",
        "--tensor=2", "-tp", "-tp=2", "-t", "-pp=2", "-dp", "-dpn=0", "-dpl.x", "-n2", "-n", "-r0",
        "--data-parallel-rank", "--data_par=2", "--nnod=2", "--conf=/f", "--mod=x", "--headl",
        "--api-key", "--api_key=x", "--api-k",
    ],
)  # fmt: skip
def test_every_spelling_in_which_vllm_takes_a_flag_of_the_fleets_is_refused(arg: str) -> None:
    assert not takes(arg)


@pytest.mark.parametrize(
    "arg",
    [
        "-dc", "-dc={}", "--config-format=hf", "--model-impl=auto", "--host-x", "--ports", "-O3",
        "-", "--kv-cache-dtype", "--kv_cache=fp8", "--no-enable-sleep-mode", "-1", "", "a--port",
        "-q=x", "--specialize-active-lora", "--hf-overrides.port=1", "--hf-overrides={\"port\": 1}",
        "-ep", "--generation-config=vllm", "--override-generation-config.temperature=0",
    ],
)  # fmt: skip
def test_a_flag_of_its_own_and_a_value_that_only_look_like_one_are_taken(arg: str) -> None:
    for connector in ("Xpyd", "Nixl"):
        assert takes(arg, connector=connector)


@pytest.mark.parametrize(
    "arg",
    ["--speculative-config", "-sc", "--spec-model", "--enable-sleep-mode", "-asc", "-dcp=2",
     "--root-path=/v", "--enable-dbo", "--hf-config-path=/c"],
)  # fmt: skip
def test_what_only_xpyds_connector_refuses_is_taken_with_another_one(arg: str) -> None:
    assert takes(arg)
    assert takes(arg, connector="Nixl")
    assert not takes(arg, connector="Xpyd")


@pytest.mark.parametrize(
    "variable",
    [
        {"value": "x"},
        {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ],
    ids=["value", "secret"],
)
def test_a_key_that_neither_heartbeats_nor_routers_have_is_refused(
    variable: dict[str, Any],
) -> None:
    env = [{"name": "VLLM_API_KEY", **variable}]
    for engine in (ENGINE, NIXL):
        with pytest.raises(UserError, match=r"spec\.engine\.env: .*ask without a key"):
            parsed(pools=prefill_and_decode(), model=MODEL, engine=engine | {"env": env})


def test_the_page_has_every_flag_that_a_document_refuses() -> None:
    page = (Path(__file__).parents[2] / "docs/vllm.md").read_text()
    section = page.partition("### Flags that a document refuses")[2].partition("\n###")[0]
    rows = re.findall(r"^\| .+ \| (`--.+) \|$", section, re.M)
    named = [name for row in rows for name in re.findall(r"`(--[^`]+)`", row)]
    lists = [re.match(r"leave out (-[^:]+): ", rule.message) for rule in Engine.rules]
    refused = [name for found in lists if found for name in found[1].split(", ")]
    assert sorted(named) == sorted(name for name in refused if name.startswith("--"))


def test_a_cache_beside_the_gpu_is_refused_where_it_would_replace_the_connector() -> None:
    assert takes("--kv-offloading-size=4")
    assert not takes("--kv_offloading_si=4", connector="Nixl")


def test_the_beats_container_can_get_memory_and_no_other_command() -> None:
    def problems(**container: Any) -> tuple[str, ...]:
        template = {"spec": {"containers": [{"name": "xpyd-beats", **container}]}}
        pools = prefill_and_decode(template=template)
        return template_problems(parsed(pools=pools, model=MODEL, engine=ENGINE))

    assert problems(resources={"limits": {"memory": "1Gi"}}) == ()
    assert [line.partition(":")[0] for line in problems(command=["sh"])] == [
        f"spec.pools[{index}].template.spec.containers[0].command" for index in (0, 1)
    ]


@pytest.mark.parametrize("engine", [ENGINE, NIXL])
def test_a_vllm_pod_answers_probes_with_what_vllm_has(engine: dict[str, Any]) -> None:
    for pod in pods_of(engine=engine).values():
        served = pod.pop("engine")
        probes = [served[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
        assert {probe["httpGet"]["path"] for probe in probes} == {"/health"}
        assert served["command"] == ["vllm", "serve"]
        for beats in pod.values():
            assert not any(key.endswith("Probe") for key in beats)
            assert beats["args"][0] == "vllm-beats"
            assert not any(entry["name"].startswith("VLLM") for entry in beats["env"])


@pytest.mark.parametrize("engine", [ENGINE, NIXL])
@pytest.mark.parametrize("timeout_s", [0, 120])
def test_a_vllm_pod_has_time_for_its_own_drain(engine: dict[str, Any], timeout_s: int) -> None:
    fleet = parsed(
        pools=prefill_and_decode(), model=MODEL, engine=engine, drain={"timeoutSeconds": timeout_s}
    )
    specs = [
        obj["spec"]["template"]["spec"]
        for obj in objects_of(fleet)
        if obj["kind"] == "Deployment" and "router" not in obj["metadata"]["name"]
    ]
    assert len(specs) == 2
    for spec in specs:
        assert f"--shutdown-timeout={timeout_s}" in spec["containers"][0]["args"]
        assert spec["terminationGracePeriodSeconds"] == timeout_s + 30


def test_vllms_only_rank_has_a_port_that_others_may_reach() -> None:
    fleet = parsed(pools=prefill_and_decode(), model=MODEL, engine=ENGINE)
    (policy,) = (
        obj
        for obj in objects_of(fleet)
        if obj["kind"] == "NetworkPolicy" and "router" not in obj["metadata"]["name"]
    )
    assert policy["spec"]["ingress"][0]["ports"] == [
        {"protocol": "TCP", "port": 21001, "endPort": 21002}
    ]


def test_engines_of_nixl_reach_each_other_on_the_ports_that_ucx_chooses() -> None:
    fleet = parsed(pools=prefill_and_decode(), model=MODEL, engine=NIXL)
    (policy,) = (
        obj
        for obj in objects_of(fleet)
        if obj["kind"] == "NetworkPolicy" and "router" not in obj["metadata"]["name"]
    )
    first, http = policy["spec"]["ingress"]
    assert first.keys() == {"from"}
    (selector,) = first["from"]
    assert selector["podSelector"]["matchLabels"]["xpyd.dev/fleet"] == fleet.name
    assert http["ports"] == [{"protocol": "TCP", "port": 20001}]

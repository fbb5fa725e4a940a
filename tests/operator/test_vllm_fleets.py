"""Fleets of type VLLM: their command lines, revisions and pods; what their connector reads."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kv import vllm_standin
from tests.operator.fleets import parsed, prefill_and_decode
from tests.operator.object_samples import objects_of, sample_fleet
from xpyd_operator.manifests.refusals import engine_args_problems, template_problems
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.template import fleet_want, layout_of
from xpyd_operator.plan.values import ROUTER, Template

vllm_standin.install()
options = importlib.import_module("xpyd_kv.vllm.options")
"""The connector's own reading of its options: it imports vLLM, or the stand-in."""
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


def options_of(template: Template, key: Path) -> Any:
    """As the connector reads them, with what Kubernetes puts in."""
    given = transfer_of(template, XPYD_POD_IP="10.0.0.5", XPYD_KV_KEY_FILE=str(key))
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(**given))
    assert options.role_of(config) == template.role[0]
    return options.read_options(config)


def test_every_field_reaches_vllm(tmp_path: Path) -> None:
    found = templates(
        model=MODEL | {"servedNames": ["a", "b"]},
        engine=ENGINE | {"args": ["--dtype=float32"], "env": [{"name": "A", "value": "1"}]},
        pools=prefill_and_decode(parallelism={"tensor": 2, "pipeline": 3}),
        kvTransfer={"port": 22001, "bufferSize": "1Gi", "hostPoolSize": 8, "leaseSeconds": 7,
                    "waitSeconds": 3, "onFailure": "Fail", "mode": "Get"},
        heartbeat={"intervalMilliseconds": 500},
        drain={"timeoutSeconds": 9},
    )  # fmt: skip
    decode = found["decode"]
    assert [arg for arg in decode.args if not arg.startswith("--kv-transfer-config")] == [
        "/models/chat", "--served-model-name", "a", "b", "--host=$(XPYD_POD_IP)", "--port=20001",
        "--shutdown-timeout=9", "--tensor-parallel-size=2", "--pipeline-parallel-size=3",
        "--dtype=float32",
    ]  # fmt: skip
    assert decode.env == (("A", "1"), ("XPYD_KV_PORT", "22001"))
    assert decode.beats == ("--heartbeat-period-ms=500", "--drain-timeout=9")
    assert (decode.image, layout_of(decode)) == ("vllm:1", "TP2xPP3")
    assert transfer_of(decode)["kv_port"] == 22001
    assert transfer_of(decode)["kv_load_failure_policy"] == "fail"
    key = tmp_path / "key"
    of_both = {"host": "10.0.0.5", "key_file": str(key), "wait_s": 3, "lease_s": 7,
               "fail_without_kv": True, "pool_bytes": 8, "buffer_bytes": 1 << 30}  # fmt: skip
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
    assert insecure.beats[-1] == "--kv-insecure"


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
    args = ["--no-such-flag", "--kv-cache-dtype", "fp8", "--kv-transfer", "--model-impl=auto"]
    fleet = parsed(pools=prefill_and_decode(), model=MODEL, engine=ENGINE | {"args": args})
    assert engine_args_problems(fleet) == ()


def test_the_beats_container_can_get_memory_and_no_other_command() -> None:
    def problems(**container: Any) -> tuple[str, ...]:
        template = {"spec": {"containers": [{"name": "xpyd-beats", **container}]}}
        pools = prefill_and_decode(template=template)
        return template_problems(parsed(pools=pools, model=MODEL, engine=ENGINE))

    assert problems(resources={"limits": {"memory": "1Gi"}}) == ()
    assert [line.partition(":")[0] for line in problems(command=["sh"])] == [
        f"spec.pools[{index}].template.spec.containers[0].command" for index in (0, 1)
    ]


def test_a_vllm_pod_answers_probes_with_what_vllm_has() -> None:
    pods = [
        obj["spec"]["template"]["spec"]["containers"]
        for obj in objects_of(sample_fleet("vllm"))
        if obj["kind"] == "Deployment" and "router" not in obj["metadata"]["name"]
    ]
    assert len(pods) == 2
    for engine, beats in pods:
        probes = [engine[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
        assert {probe["httpGet"]["path"] for probe in probes} == {"/health"}
        assert engine["command"] == ["vllm", "serve"]
        assert not any(key.endswith("Probe") for key in beats)
        assert beats["args"][0] == "vllm-beats"
        assert not any(entry["name"].startswith("VLLM") for entry in beats["env"])


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

"""Whole fleets as Kubernetes objects: the golden files, and what holds for every one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.operator.object_samples import (
    NAMES,
    SETTINGS,
    UID,
    golden_file,
    golden_text,
    objects_of,
    placement_of,
    sample_fleet,
    workloads_of,
)
from xpyd_operator.manifests.names import KEY_SLOTS, KV_KEY, LABEL_FLEET, Placement
from xpyd_operator.manifests.objects import kv_secret, workload_objects

EVERY = pytest.mark.parametrize("name", NAMES)
SAFE_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip


def pods_of(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every pod template in the objects."""
    for obj in objects:
        if obj["kind"] in ("Deployment", "Job"):
            yield obj["spec"]["template"]
        if obj["kind"] == "LeaderWorkerSet":
            yield obj["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
            yield obj["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def violations(spec: dict[str, Any]) -> list[str]:
    """What the pod security standard "restricted" finds wrong with a pod's spec."""
    pod = spec.get("securityContext", {})
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    for volume in spec.get("volumes", []):
        kinds = set(volume) - {"name"}
        found += [f"volume {volume['name']}: {kind}" for kind in kinds - SAFE_VOLUMES]
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own, name = container.get("securityContext", {}), container["name"]
        both = {**pod, **own}
        checks = {
            "privilege escalation": own.get("allowPrivilegeEscalation") is False,
            "privileged": not own.get("privileged"),
            "runAsNonRoot": both.get("runAsNonRoot") is True,
            "runAsUser": both.get("runAsUser") != 0,
            "seccomp": both.get("seccompProfile", {}).get("type")
            in ("RuntimeDefault", "Localhost"),
            "drop ALL": own.get("capabilities", {}).get("drop") == ["ALL"],
            "add": set(own.get("capabilities", {}).get("add", [])) <= {"NET_BIND_SERVICE"},
            "hostPort": not any("hostPort" in port for port in container.get("ports", [])),
        }
        found += [f"{name}: {check}" for check, holds in checks.items() if not holds]
    return found


@EVERY
def test_a_fleet_becomes_the_objects_that_are_written_down(name):
    """After a wanted change: python -m tests.operator.object_samples, then read the diff."""
    assert golden_text(name) == golden_file(name).read_text()


@EVERY
def test_pods_pass_pod_security_restricted_unless_they_mount_the_nodes_folders(name):
    init = "xpyd-sockets"
    allowed = {
        "dra": {"volume xpyd-models: hostPath"},
        "sockets": {
            "volume xpyd-sockets: hostPath",
            *(f"{init}: {check}" for check in ("runAsNonRoot", "runAsUser", "add")),
        },
    }
    found = {
        line for pod in pods_of(objects_of(sample_fleet(name))) for line in violations(pod["spec"])
    }
    assert found == allowed.get(name, set())


@EVERY
def test_pods_get_no_token_and_may_not_write_to_their_image(name):
    for pod in pods_of(objects_of(sample_fleet(name))):
        assert pod["spec"]["automountServiceAccountToken"] is False
        ours = pod["spec"]["containers"][0]
        assert ours["name"] in ("engine", "router", "xpyd-model")
        assert ours["securityContext"]["readOnlyRootFilesystem"] is True


@EVERY
def test_every_object_is_the_fleets_own_and_can_be_found_by_its_label(name):
    fleet = sample_fleet(name)
    secret = kv_secret(fleet, placement_of(fleet), "00" * 32, KEY_SLOTS[1])
    for obj in [*objects_of(fleet), secret]:
        meta = obj["metadata"]
        assert meta["namespace"] == fleet.namespace
        assert len(meta["name"]) <= 63
        assert meta["labels"][LABEL_FLEET] == fleet.name
        assert [owner["uid"] for owner in meta["ownerReferences"]] == [UID]
        assert meta["ownerReferences"][0]["controller"] is True


@EVERY
def test_an_objects_kind_and_name_occur_once(name):
    found = [(o["kind"], o["metadata"]["name"]) for o in objects_of(sample_fleet(name))]
    assert len(set(found)) == len(found)


@EVERY
def test_selectors_find_the_pods_they_are_for(name):
    objects = objects_of(sample_fleet(name))
    labels = [pod["metadata"]["labels"] for pod in pods_of(objects)]

    def matched(selector: dict[str, str]) -> int:
        return sum(selector.items() <= found.items() for found in labels)

    for obj in objects:
        match obj["kind"]:
            case "Service":
                assert matched(obj["spec"]["selector"]) == 1
            case "Deployment":
                assert matched(obj["spec"]["selector"]["matchLabels"]) == 1
            case "PodDisruptionBudget":
                assert matched(obj["spec"]["selector"]["matchLabels"]) >= 1
            case "NetworkPolicy":
                assert matched(obj["spec"]["podSelector"]["matchLabels"]) >= 1
                peers = [p for rule in obj["spec"]["ingress"] for p in rule.get("from", [])]
                for peer in peers:
                    selector = peer.get("podSelector", {}).get("matchLabels", {LABEL_FLEET: "?"})
                    is_wider = "namespaceSelector" in peer or peer == {"podSelector": {}}
                    assert matched(selector) >= 1 or is_wider
            case _:
                pass


@EVERY
def test_ports_and_volumes_that_are_named_exist(name):
    objects = objects_of(sample_fleet(name))
    for pod in pods_of(objects):
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        assert len(set(volumes)) == len(volumes)
        for container in pod["spec"]["containers"]:
            mounts = container.get("volumeMounts", [])
            assert {mount["name"] for mount in mounts} <= set(volumes)
            for key, items in (("mountPath", mounts), ("name", container.get("env", []))):
                values = [item[key] for item in items]
                assert len(set(values)) == len(values)
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in container:
                    assert container[probe]["httpGet"]["port"] in ports
    router = next(p for p in pods_of(objects) if p["spec"]["containers"][0]["name"] == "router")
    names = {port["name"] for port in router["spec"]["containers"][0]["ports"]}
    for service in (o for o in objects if o["kind"] == "Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_objects_are_made_fresh_and_share_nothing_with_each_other():
    fleet = sample_fleet("full")
    before = json.dumps(objects_of(fleet))
    for obj in objects_of(fleet):
        destroy(obj)
    assert json.dumps(objects_of(fleet)) == before


def destroy(part: Any) -> None:
    """Empty every map and list below `part`."""
    for below in list(part.values() if isinstance(part, dict) else part):
        if isinstance(below, dict | list):
            destroy(below)
    part.clear()


def test_the_kv_key_is_in_its_secret_alone():
    fleet = sample_fleet("minimal")
    key = "5e" * 32
    secret = kv_secret(fleet, placement_of(fleet), key, KV_KEY)
    assert secret["data"] == {"key": "NWU1ZTVl" + secret["data"]["key"][8:]}
    assert key not in json.dumps([secret, *objects_of(fleet)])


@EVERY
def test_the_place_is_in_the_objects_and_in_no_revision(name):
    fleet = sample_fleet(name)
    there = Placement("elsewhere", "other-uid", SETTINGS)
    for workload in workloads_of(fleet):
        for obj in workload_objects(fleet, workload, there):
            assert obj["metadata"]["namespace"] == "elsewhere"
            assert obj["metadata"]["labels"].get("xpyd.dev/revision") == workload.revision
            assert fleet.namespace not in json.dumps(obj) or fleet.namespace == "default"

"""From fields of the document to objects: names, folders, devices, network rules, revisions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from tests.operator import fleets
from tests.operator.object_samples import (
    CANARY_EDITS,
    FOLDER,
    INGRESS_EDITS,
    ROUTE_EDITS,
    SERVICE_EDITS,
    SETTINGS,
    VLLM,
    VLLM_EDITS,
    objects_of,
    placement_of,
    pod_templates,
    workloads_of,
)
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import parse_fleet
from xpyd_operator.manifests import names
from xpyd_operator.manifests.names import KEY_SLOTS, KV_KEY
from xpyd_operator.manifests.objects import kv_secret, pool_object, workload_objects
from xpyd_operator.manifests.pods import pods_per_instance
from xpyd_operator.manifests.refusals import template_problems
from xpyd_operator.manifests.volumes import model_in_pod, uses_host_path
from xpyd_operator.plan.template import fleet_want

DOCUMENT = yaml.safe_load((FOLDER / "full.fleet.yaml").read_text())


def changed(*changes: tuple[str, Any], base: Any = None) -> InferenceFleet:
    """A sample, the full one unless said, with values put at dotted paths."""
    made = fleets.changed(DOCUMENT if base is None else base, dict(changes))
    return parse_fleet(json.dumps(made).encode(), source="f")


def of_kind(fleet: InferenceFleet, kind: str) -> list[dict[str, Any]]:
    return [obj for obj in objects_of(fleet) if obj["kind"] == kind]


EDITS = [
    ("model.uri", "hf://other/model"), ("model.uri", "file:///models/x"),
    ("model", {"uri": "s3://bucket/m", "endpointUrl": "https://s3.example"}),
    ("model", {"uri": "pvc://claim/m"}), ("model.uri", "s3://bucket/m"), ("model.revision", "v"),
    ("model.servedNames", ["a"]), ("model.secretRef", {"name": "other"}),
    ("model.secretRef", {"name": "hf-token", "key": "other"}), ("model.cache", {"type": "None"}),
    ("model.cache.claimName", "other"), ("model.cache.readOnly", True),
    ("model.cache", {"type": "HostPath", "path": "/a"}),
    ("router.tls", {"secretName": "certificate"}),
    ("router.tls", {"secretName": "certificate", "clientCaSecretName": "clients"}),
    ("engine.tls", {"secretName": "engines"}),
    ("engine.tls", {"secretName": "engines", "serverName": "engines.example"}),
    ("engine.tls", {"secretName": "engines", "routerSecretName": "routers"}),
    ("engine.image", "other:1"), ("engine.args", []), ("engine.env", []),
    ("engine.env.0.valueFrom", {"fieldRef": {"fieldPath": "spec.hostIP"}}),
    ("engine.env", [{"name": "A", "value": "1"}]),
    ("engine.env", list(reversed(DOCUMENT["spec"]["engine"]["env"]))),
    ("pools.0.parallelism", {"pipeline": 2}), ("pools.0.parallelism.pipeline", 2),
    ("pools.1.parallelism", {"tensor": 2, "pipeline": 4}), ("pools.1.resources.gpus", 8),
    ("pools.0.resources.gpuResourceName", "amd.com/gpu"),
    ("pools.0.resources", {"gpus": 2, "deviceClassName": "gpu.example"}),
    ("pools.0.resources.sharedMemory", "1Gi"), ("pools.0.template", {"spec": {"hostPID": True}}),
    ("pools.1.parallelism.pipeline", 4), ("pools.1.parallelism.pipeline", 1),
    ("pools.0.parallelism.expert", 2), ("pools.1.parallelism.expert", 4),
    ("pools.1.parallelism", {"data": 4}), ("pools.1.parallelism", {"maxData": 4}),
    ("kvTransfer.port", 22001), ("kvTransfer.bufferSize", "1Gi"),
    ("kvTransfer.hostPoolSize", "1Gi"), ("kvTransfer.leaseSeconds", 60),
    ("kvTransfer.waitSeconds", 60), ("kvTransfer.onFailure", "Fail"),
    ("kvTransfer.keySecretRef", {"name": "other"}), ("kvTransfer.keySecretRef.key", "next"),
    ("kvTransfer.transport", "Auto"), ("kvTransfer.sameHostPath", "/unused/by/tcp"),
    ("kvTransfer", {"transport": "UDS", "sameHostPath": "/a"}), ("kvTransfer", {"insecure": True}),
    ("kvTransfer", {"sameHostPath": "/a"}), ("kvTransfer.encryption", "TLS"),
    ("router.discoveryPort", 30002), ("router.template", {"spec": {"hostPID": True}}),
    ("heartbeat.intervalMilliseconds", 1000), ("heartbeat.missedBeats", 5),
    ("drain.timeoutSeconds", 60), ("rollout.progressDeadlineSeconds", 60),
    ("rollout.pairing", "Compatible"),
    ("rollout", {"maxSurgePercent": 0, "maxUnavailablePercent": 1}),
    ("pools.0.rollout", {"maxSurgePercent": 0, "maxUnavailablePercent": 1}),
    ("rollout", {"paused": True}), ("rollout", {"historyLimit": 0}),
    *(("rollout", {"canary": one}) for one in CANARY_EDITS),
    ("rollout", {"restartedAt": "2026-01-31T12:00:00Z"}),
    ("pools.0.replicas", 3), ("pools.0.scaling", {"maxReplicas": 3}), ("router.replicas", 1),
    ("router.auth", {"secretRef": {"name": "clients"}}),
    ("router.auth", {"secretRef": {"name": "clients", "key": "b"}}),
    *(("router.service", {"type": "LoadBalancer", **one}) for one in SERVICE_EDITS),
    *(("router.ingress", {"host": "a.b", **one}) for one in INGRESS_EDITS),
    *(("router.httpRoute", {"parentRefs": [{"name": "web"}], **one}) for one in ROUTE_EDITS),
    ("router.args", ["--drain-seconds=9"]), ("router.adminKeySecretRef", {"name": "keys"}),
    ("router.adminKeySecretRef", {"name": "keys", "key": "k"}),
    ("networkPolicy", {"enabled": False}),
    ("router.policy", "Random"), ("router.prefillPolicy", "Random"),
    ("router.decodePolicy", "Random"), ("router.processes", 2), ("router.localPrefillTokens", 64),
    ("router.onNoPrefill", "Reject"), ("router.onNoDecode", "DecodeOnPrefill"),
    ("router.limits", {"requests": 9}),
    ("router.limits", {"tokens": 9000}), ("router.queue", {"size": 9}),
    ("router.queue", {"memory": "1Mi"}), ("router.queue", {"timeoutSeconds": 9}),
    ("router.slo", {"ttftMilliseconds": 500}), ("router.slo", {"itlMilliseconds": 50}),
    ("heartbeat.acceptUnsigned", True), ("kvTransfer.mode", "Get"), ("kvTransfer.verify", "Strict"),
    ("pools.0.scaling", {"minReplicas": 2}),
    *(
        ("engine.env.0.valueFrom", {kind: {"name": "n", "key": "k", "optional": True}})
        for kind in ("configMapKeyRef", "secretKeyRef")
    ),
    ("engine.env.0.valueFrom", {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.hostIP"}}),
]  # fmt: skip


def fields_of(kind: Any, path: str) -> Iterator[str]:
    """The dotted paths of a model's fields, without the numbers of lists."""
    parts = [part for part in get_args(kind) if part not in (..., type(None))]
    if parts:
        yield from {field for part in parts for field in fields_of(part, path)}
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield from fields_of(field.annotation, f"{path}.{field.alias or name}")
    else:
        yield path


def edited(path: str, value: Any) -> Iterator[str]:
    """The paths of the fields that an edit puts values at."""
    path = ".".join(part for part in path.split(".") if not part.isdigit())
    if isinstance(value, dict):
        for key, below in value.items():
            yield from edited(f"{path}.{key}", below)
    for item in value if isinstance(value, list) else []:
        yield from edited(path, item)
    yield path


def test_every_field_of_the_document_has_an_edit():
    """Without one, a field that reaches pods and not the plan's template would go unnoticed."""
    fields = set(fields_of(InferenceFleet.model_fields["spec"].annotation, "spec"))
    with_edits = {
        field for path, value in [*EDITS, *VLLM_EDITS] for field in edited(f"spec.{path}", value)
    }
    # Another name is another pool, whose workloads are new; of the sample's two pools each has the
    # role that the fleet needs. `onRankLoss` needs an Aggregated pool (test_templates.py).
    rest = {"spec.pools.name", "spec.pools.role", "spec.pools.parallelism.onRankLoss"}
    assert fields - with_edits == rest


EACH_EDIT = pytest.mark.parametrize(
    ("base", "path", "value"),
    [
        *(pytest.param(DOCUMENT, p, v, id=f"{p}={v}"[:60]) for p, v in EDITS),
        *(pytest.param(VLLM, p, v, id=f"VLLM {p}={v}"[:60]) for p, v in VLLM_EDITS),
    ],
)


@EACH_EDIT
def test_a_pool_has_a_new_revision_just_when_its_pods_are_others(base, path, value):
    """Otherwise pods would change in place, pool by pool as it comes, or for nothing."""
    before, after = changed(base=base), changed((f"spec.{path}", value), base=base)
    pods, new_pods = pod_templates(before), pod_templates(after)
    revisions = {w.pool: w.revision for w in workloads_of(before)}
    new_revisions = {w.pool: w.revision for w in workloads_of(after)}
    others = {pool for pool in pods if pods[pool] != new_pods[pool]}
    assert others == {pool for pool in revisions if revisions[pool] != new_revisions[pool]}


def marks_of(fleet):
    """The fleet revisions of its Prefill and Decode pools, and the pools' own."""
    pools = [w for w in workloads_of(fleet) if w.template.role in ("Prefill", "Decode")]
    return {w.template.fleet_revision for w in pools}, {w.pool: w.revision for w in pools}


@EACH_EDIT
def test_pools_have_one_fleet_revision_which_changes_only_where_all_pools_do(base, path, value):
    """Else a pool that stays as it is would find no partner."""
    (marks, own), (new_marks, new_own) = (
        marks_of(changed(*edit, base=base)) for edit in ((), [(f"spec.{path}", value)])
    )
    assert len(marks) == len(new_marks) == 1
    moved = {pool for pool in own if own[pool] != new_own[pool]}
    if marks != new_marks:
        assert moved == set(own)
    else:
        assert moved != set(own) or (base is VLLM and path.startswith("kvTransfer"))


def test_what_a_document_says_by_default_makes_no_other_revision():
    defaults = changed(
        ("spec.model.secretRef.key", "token"),
        ("spec.router.discoveryPort", 30001),
        ("spec.pools.0.parallelism.pipeline", 1),
        ("spec.pools.0.parallelism.expert", 1),
        ("spec.pools.0.parallelism.data", 1),
        ("spec.pools.0.parallelism.onRankLoss", "Restart"),
        ("spec.pools.0.resources.sharedMemory", "8Gi"),
        ("spec.kvTransfer.insecure", False),
    )
    assert workloads_of(defaults) == workloads_of(changed())
    auto = changed(("spec.kvTransfer", {"transport": "Auto", "mode": "PutAsync"}))
    assert workloads_of(auto) == workloads_of(changed(("spec.kvTransfer", {})))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"sameHostPath": "/a"}, {"sameHostPath": "/b"}),
        ({"sameHostPath": "/a"}, {"sameHostPath": "/a", "transport": "UDS"}),
        ({"sameHostPath": "/a", "transport": "UDS"}, {"sameHostPath": "/a"}),
        ({"sameHostPath": "/a"}, {"sameHostPath": "/a", "transport": "TCP"}),
        ({}, {"transport": "TCP"}),
        ({}, {"onFailure": "Fail"}),
    ],
)  # fmt: skip
def test_engines_get_a_new_revision_with_another_transport_and_routers_keep_theirs(before, after):
    revisions = [
        {w.pool: w.revision for w in workloads_of(changed(("spec.kvTransfer", kv)))}
        for kv in (before, after)
    ]
    others = {pool for pool in revisions[0] if revisions[0][pool] != revisions[1][pool]}
    assert others == {"prefill", "decode"}


@pytest.mark.parametrize("mode", ["Put", "Get"])
def test_prefill_engines_alone_get_a_new_revision_with_another_mode(mode):
    """D does what each P says, so that a rollout may mix modes."""
    old, new = (
        {w.pool: w.revision for w in workloads_of(changed(("spec.kvTransfer", kv)))}
        for kv in ({}, {"mode": mode})
    )
    assert {pool for pool in old if old[pool] != new[pool]} == {"prefill"}


def test_giving_up_the_key_is_a_new_revision_of_routers_and_engines_and_leaves_no_trace_of_it():
    before, after = (changed(("spec.kvTransfer", kv)) for kv in ({}, {"insecure": True}))
    old, new = ({w.pool: w.revision for w in workloads_of(f)} for f in (before, after))
    assert {pool for pool in old if old[pool] != new[pool]} == {"router", "prefill", "decode"}
    pods = json.dumps(objects_of(after))
    assert "xpyd-kv" not in pods
    assert "XPYD_KV_KEY_FILE" not in pods
    assert pods.count('"--kv-insecure"') == pods.count('"name": "engine"') + 1
    assert "--kv-insecure" not in json.dumps(objects_of(before))


def folders(fleet: InferenceFleet, namespace: str = "ns") -> dict[str, tuple[Any, ...]]:
    """Container of the folder's owner, and what each pool mounts for sockets."""
    found: dict[str, tuple[Any, ...]] = {}
    for workload in workloads_of(fleet):
        placement = replace(placement_of(fleet), namespace=namespace)
        (obj,) = workload_objects(fleet, workload, placement)
        spec = obj["spec"]["template"]["spec"]
        volume = next((v["hostPath"] for v in spec["volumes"] if v["name"] == "xpyd-sockets"), None)
        found[workload.pool] = (
            volume,
            [container["command"] for container in spec.get("initContainers", [])],
            [arg for arg in spec["containers"][0]["args"] if "socket" in arg],
        )
    return found


def near(*changes: tuple[str, Any]) -> InferenceFleet:
    roles = {"p": "Prefill", "d": "Decode", "a": "Aggregated"}
    pools = [fleets.cpu_pool(*one, parallelism={}, template={}) for one in roles.items()]
    return changed(("spec.pools", pools), ("spec.kvTransfer", {"sameHostPath": "/x/"}), *changes)


def test_engines_that_move_kv_share_one_folder_of_their_fleet_on_each_node():
    found = folders(near())
    assert found["router"] == found["a"] == (None, [], [])
    volume, ((*command, folder),), (arg,) = found["d"]
    assert found["p"] == found["d"]
    assert volume == {"path": "/x/ns.llama70b", "type": "DirectoryOrCreate"}
    assert command == ["install", "-d", "-m", "0700", "-o", "10001", "-g", "10001"]
    assert arg == f"--kv-socket-dir={folder}"
    assert folders(near(), "other")["p"][0]["path"] == "/x/other.llama70b"


def test_a_fleet_that_uses_tcp_alone_mounts_no_folder_of_the_node():
    fleet = near(("spec.kvTransfer.transport", "TCP"))
    assert set(map(str, folders(fleet).values())) == {"(None, [], [])"}
    assert not uses_host_path(fleet)
    assert uses_host_path(near())


def test_the_folder_belongs_to_the_user_that_the_template_names():
    security = {"securityContext": {"runAsUser": 7}}
    container = {"containers": [{"name": "engine", **security}, {"name": "x"}]}
    for template in ({"spec": security}, {"spec": {**container, "securityContext": {}}}):
        fleet = near(("spec.pools.0.template", template), ("spec.pools.1.template", template))
        assert template_problems(fleet) == ()
        ((*_, user, _flag, group, _folder),) = folders(fleet)["p"][1]
        assert (user, group) == ("7", "7")


def test_pools_of_several_users_cannot_share_a_folder():
    template = {"spec": {"securityContext": {"runAsUser": 7}}}
    mixed = near(("spec.pools.0.template", template))
    (line,) = template_problems(mixed)
    assert line.startswith("spec.kvTransfer.sameHostPath: ")
    assert "p 7, d 10001" in line
    assert template_problems(near(("spec.pools.2.template", template))) == ()
    tcp = (("spec.pools.0.template", template), ("spec.kvTransfer.transport", "TCP"))
    assert template_problems(near(*tcp)) == ()


def test_another_default_image_is_a_new_revision_where_the_document_names_none():
    fleet = changed()

    def revisions(image: str, router_image: str) -> dict[str, str]:
        want = fleet_want(fleet, model="/m", image=image, router_image=router_image)
        return {pool.name: pool.revision for pool in want.pools}

    assert revisions("a", "b") == revisions("other", "b")
    old, new = revisions("a", "b"), revisions("a", "c")
    assert {pool for pool in old if old[pool] != new[pool]} == {"router"}


@pytest.mark.parametrize(
    ("uri", "folder"),
    [
        ("hf://org/name", "hf://org/name"),
        ("file:///models/a", "/models/a"),
        ("file:///a/../b", "/b"),
        ("file:////a", "/a"),
        ("file:///", "/"),
        ("file://./demo-model", "/models/demo-model"),
        ("file://demo-model", "/models/demo-model"),
        ("file://a/b/", "/models/a/b"),
        ("file://../../up/x", "/models/up/x"),
        ("file://../a/../b", "/models/b"),
        ("file://.", "/models"),
        ("file://..", "/models"),
        ("pvc://claim/a/b/", "/models/a/b"),
    ],
)
def test_a_models_uri_is_a_folder_of_the_pod(uri, folder):
    assert model_in_pod(changed(("spec.model", {"uri": uri}))) == folder


@pytest.mark.parametrize(
    ("tensor", "pipeline", "gpus", "pods"),
    [
        (1, 1, 1, 1),
        (1, 8, 2, 4),
        (2, 8, 8, 2),
        (2, 1, 2, 1),
        (4, 2, 4, 2),
        (4, 2, 8, 1),
        (8, 4, 8, 4),
        (2, 3, 0, 1),
    ],
)
def test_an_instance_has_as_many_pods_as_its_ranks_need(tensor, pipeline, gpus, pods):
    pool = changed(
        ("spec.pools.1.parallelism", {"tensor": tensor, "pipeline": pipeline}),
        ("spec.pools.1.resources", {"gpus": gpus}),
    ).spec.pools[1]
    assert pods_per_instance(pool) == pods


def test_an_instance_with_replicas_may_be_one_pod_with_the_devices_of_all():
    layout = {"tensor": 2, "pipeline": 2, "data": 2}
    for gpus in (0, 8):
        fleet = changed(
            ("spec.pools.0.parallelism", layout), ("spec.pools.0.resources", {"gpus": gpus})
        )
        assert pods_per_instance(fleet.spec.pools[0]) == 1
        (deployment,) = workload_objects(fleet, workloads_of(fleet)[1], placement_of(fleet))
        assert deployment["kind"] == "Deployment"
        engine = deployment["spec"]["template"]["spec"]["containers"][0]
        limits = engine["resources"].get("limits", {})
        assert limits.get("nvidia.com/gpu") == (str(gpus) if gpus else None)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert engine[probe]["httpGet"]["port"] == "http"


def test_instances_of_several_pods_that_claim_devices_have_both_objects():
    fleet = changed(("spec.pools.1.resources", {"gpus": 4, "deviceClassName": "gpu.example"}))
    claim, group = workload_objects(fleet, workloads_of(fleet)[2], placement_of(fleet))
    assert (claim["kind"], group["kind"]) == ("ResourceClaimTemplate", "LeaderWorkerSet")
    for part in ("leaderTemplate", "workerTemplate"):
        pod = group["spec"]["leaderWorkerTemplate"][part]["spec"]
        assert pod["resourceClaims"] == [
            {"name": "xpyd-gpus", "resourceClaimTemplateName": claim["metadata"]["name"]}
        ]
        assert pod["containers"][0]["resources"]["claims"] == [{"name": "xpyd-gpus"}]


def test_a_cpu_instance_asks_for_no_device():
    fleet = changed(("spec.pools.0.resources", {"gpus": 0}), ("spec.pools.0.parallelism", {}))
    (deployment,) = workload_objects(fleet, workloads_of(fleet)[1], placement_of(fleet))
    pod = deployment["spec"]["template"]["spec"]
    assert "resourceClaims" not in pod
    assert "limits" not in pod["containers"][0]["resources"]


def test_the_operators_settings_reach_the_pods():
    fleet = changed(("spec.engine.image", "own:1"))
    settings = replace(SETTINGS, image_pull_policy="Always", image_pull_secrets=())
    placement = replace(placement_of(fleet), settings=settings)
    for workload in workloads_of(fleet):
        text = json.dumps(workload_objects(fleet, workload, placement))
        assert '"imagePullPolicy": "Always"' in text
        assert "imagePullSecrets" not in text
        assert f'"image": "{"xpyd-router:1" if workload.pool == "router" else "own:1"}"' in text


LONG = ("f" * 30, "p" * 16, "0123abcd")


def test_the_longest_names_fit():
    fleet, pool, revision = LONG
    assert len(names.workload_name(*LONG)) == 56
    assert len(names.pool_object_name(fleet, pool)) <= 63
    group = names.group_workload_name(*LONG)
    # A StatefulSet of a group, and the hash that Kubernetes appends to its name in a label.
    assert len(f"{group}-1023-0123456789") <= 63
    assert group.endswith(f"-{revision}")


def test_a_short_name_of_a_group_is_not_cut_and_cut_ones_differ():
    assert names.group_workload_name("chat", "decode", "0123abcd") == "chat-decode-0123abcd"
    found = {names.group_workload_name("f" * 29 + c, "p" * 16, "0123abcd") for c in "abc"}
    assert len(found) == 3


def test_names_and_the_endpoint_are_what_the_pages_say():
    assert names.endpoint("chat", "ns", 10001) == "http://chat-router.ns.svc:10001"
    assert names.discovery_host("chat", "ns") == "chat-discovery.ns.svc"
    assert names.selector_text(names.pool_selector("chat", "decode")) == (
        "xpyd.dev/fleet=chat,xpyd.dev/pool=decode"
    )


def test_a_pool_object_says_its_bounds_and_what_was_declared():
    fleet = changed()
    prefill, decode = fleet.spec.pools
    spec = pool_object(fleet, prefill, 5, 2, placement_of(fleet))["spec"]
    assert spec == {
        "fleetName": "llama70b", "poolName": "prefill", "role": "Prefill", "replicas": 5,
        "minReplicas": 1, "maxReplicas": 12, "declaredReplicas": 2,
    }  # fmt: skip
    spec = pool_object(fleet, decode, 0, None, placement_of(fleet))["spec"]
    assert spec == {
        "fleetName": "llama70b", "poolName": "decode", "role": "Decode", "replicas": 0,
        "maxReplicas": 6,
    }  # fmt: skip
    assert pool_object(fleet, decode, 0, 0, placement_of(fleet))["spec"]["declaredReplicas"] == 0


def test_a_fleet_with_a_key_of_its_own_mounts_that_and_no_other():
    mounted = json.dumps(objects_of(changed()))
    assert "llama70b-kv" not in mounted
    assert '"secretName": "kv-key"' in mounted
    fleet = changed(("spec.kvTransfer", {}))
    text = json.dumps(objects_of(fleet))
    for slot in KEY_SLOTS:
        secret = kv_secret(fleet, placement_of(fleet), "k", slot)["metadata"]["name"]
        assert f'"secret": {{"name": "{secret}", "optional": true' in text


def test_each_fleet_of_a_name_has_a_key_of_its_own():
    """The Secret of a fleet that was deleted a moment ago is on its way."""
    fleet, placement = changed(("spec.kvTransfer", {})), placement_of(changed())
    later = replace(placement, uid="6f1c2a3b-0000-4000-8000-000000000000")
    found = [kv_secret(fleet, s, "k", KV_KEY)["metadata"]["name"] for s in (placement, later)]
    assert found[0] != found[1]
    assert found[1] == "llama70b-kv-6f1c2a3b"


def test_a_cache_on_the_node_is_noticed():
    cache = {"type": "HostPath", "path": "/mnt"}
    assert uses_host_path(changed(("spec.model.cache", cache)))
    assert not uses_host_path(changed())

"""pool.template and router.template: how they are merged, and what they may not say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.fleets import parsed
from tests.operator.object_samples import placement_of, workloads_of
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests.objects import workload_objects
from xpyd_operator.manifests.refusals import template_problems
from xpyd_operator.manifests.volumes import uses_host_path


def fleet_with(
    engine: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    **resources: Any,
) -> InferenceFleet:
    """A fleet whose one pool, and router, have these templates."""
    pool: dict[str, Any] = {"name": "all", "role": "Aggregated", "resources": resources}
    if engine is not None:
        pool["template"] = engine
    template = {} if router is None else {"template": router}
    return parsed(model={"uri": "file:///m"}, pools=[pool], router=template)


def pods(fleet: InferenceFleet) -> dict[str, dict[str, Any]]:
    """Pool -> its pod template. All have one revision, so that only the template shows."""
    assert template_problems(fleet) == ()
    found = [replace(w, revision="00000000") for w in workloads_of(fleet)]
    return {
        w.pool: workload_objects(fleet, w, placement_of(fleet))[-1]["spec"]["template"]
        for w in found
    }


def engine_pod(spec: dict[str, Any], **resources: Any) -> dict[str, Any]:
    return pods(fleet_with({"spec": spec}, **resources))["all"]["spec"]


def engine(**fields: Any) -> dict[str, Any]:
    found = engine_pod({"containers": [{"name": "engine", **fields}]})["containers"]
    assert len(found) == 1
    return found[0]


PLAIN = engine_pod({})
ENGINE = PLAIN["containers"][0]
MOUNTS = ENGINE["volumeMounts"]


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ({"nodeSelector": {"gpu": "h100"}}, {"gpu": "h100"}),
        ({"tolerations": [{"key": "a"}]}, [{"key": "a"}]),
        ({"priorityClassName": "high"}, "high"),
        ({"serviceAccountName": "mine"}, "mine"),
        ({"hostNetwork": True}, True),
        ({"imagePullSecrets": [{"name": "own"}]}, [{"name": "pull"}, {"name": "own"}]),
        ({"imagePullSecrets": [{"name": "pull"}]}, [{"name": "pull"}]),
        ({"securityContext": {"runAsUser": 7}}, {**PLAIN["securityContext"], "runAsUser": 7}),
        ({"securityContext": {"runAsUser": None}}, PLAIN["securityContext"]),
        (
            {"volumes": [{"name": "data", "emptyDir": {}}]},
            [*PLAIN["volumes"], {"name": "data", "emptyDir": {}}],
        ),
        ({"initContainers": [{"name": "i", "env": None}]}, [{"name": "i"}]),
        ({"dnsConfig": {"searches": ["a"]}}, {"searches": ["a"]}),
        ({"containers": [{"name": "side"}]}, [ENGINE, {"name": "side"}]),
        ({"containers": [{"name": "side"}, {"name": "engine"}]}, [ENGINE, {"name": "side"}]),
    ],
)
def test_a_pods_field_is_merged_and_the_others_stay(spec, value):
    ((field, _),) = spec.items()
    assert engine_pod(spec) == {**PLAIN, field: value}


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"image": "mine:1"}, "mine:1"),
        ({"env": [{"name": "A", "value": "1"}]}, [*ENGINE["env"], {"name": "A", "value": "1"}]),
        (
            {"env": [{"name": "HOME", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]},
            [
                {"name": "HOME", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}
                if item["name"] == "HOME"
                else item
                for item in ENGINE["env"]
            ],
        ),
        (
            {"volumeMounts": [{"name": "ram", "mountPath": "/tmp"}]},
            [{"name": "ram", "mountPath": "/tmp"}, *MOUNTS[1:]],
        ),
        (
            {"ports": [{"containerPort": 1}, {"name": "x", "containerPort": 2}]},
            [*ENGINE["ports"], {"containerPort": 1}, {"name": "x", "containerPort": 2}],
        ),
        (
            {"resources": {"requests": {"cpu": 1}}},
            {
                "limits": {k: v for k, v in ENGINE["resources"]["limits"].items() if k != "cpu"},
                "requests": {**ENGINE["resources"]["requests"], "cpu": 1},
            },
        ),
        (
            {"startupProbe": {"failureThreshold": 7200}},
            {**ENGINE["startupProbe"], "failureThreshold": 7200},
        ),
        (
            {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}},
            {
                **ENGINE["securityContext"],
                "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
            },
        ),
        (
            {"lifecycle": {"postStart": {"exec": {"command": ["true"]}}}},
            {"postStart": {"exec": {"command": ["true"]}}},
        ),
    ],
)
def test_a_field_of_the_engines_container_is_merged_and_the_others_stay(fields, value):
    ((field, _),) = fields.items()
    assert engine(**fields) == {**ENGINE, field: value}


def test_labels_and_annotations_of_pods_are_added_to_ours():
    metadata = {"labels": {"team": "a"}, "annotations": {"note": "b"}}
    plain = pods(fleet_with())["all"]["metadata"]
    assert pods(fleet_with({"metadata": metadata}))["all"]["metadata"] == {
        "labels": {**plain["labels"], "team": "a"},
        "annotations": {**plain["annotations"], "note": "b"},
    }


def test_a_router_with_its_own_spread_has_only_that():
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    found = pods(fleet_with(router={"spec": {"topologySpreadConstraints": [spread]}}))
    assert found["router"]["spec"]["topologySpreadConstraints"] == [spread]
    assert pods(fleet_with())["router"]["spec"]["topologySpreadConstraints"] != [spread]


def test_every_pod_of_a_group_gets_the_pools_template():
    document = fleet_with({"spec": {"nodeSelector": {"a": "b"}}})
    pool = document.spec.pools[0]
    two = pool.model_copy(
        update={"parallelism": pool.parallelism.model_copy(update={"pipeline": 2})}
    )
    fleet = document.model_copy(update={"spec": document.spec.model_copy(update={"pools": (two,)})})
    group = workload_objects(fleet, workloads_of(fleet)[1], placement_of(fleet))[-1]
    templates = group["spec"]["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        assert templates[part]["spec"]["nodeSelector"] == {"a": "b"}


ours = "set by xpyd; leave it out"
REFUSED = [
    ({"metadata": {"labels": {"xpyd.dev/pool": "x"}}}, "metadata.labels[xpyd.dev/pool]", ours),
    (
        {"metadata": {"labels": {"app.kubernetes.io/name": "x"}}},
        "metadata.labels[app.kubernetes.io/name]",
        ours,
    ),
    (
        {"metadata": {"annotations": {"xpyd.dev/applied": "x"}}},
        "metadata.annotations[xpyd.dev/applied]",
        ours,
    ),
    ({"spec": {"restartPolicy": "Never"}}, "spec.restartPolicy", ours),
    ({"spec": {"terminationGracePeriodSeconds": 1}}, "spec.terminationGracePeriodSeconds", ours),
    ({"spec": {"activeDeadlineSeconds": 1}}, "spec.activeDeadlineSeconds", ours),
    (
        {"spec": {"volumes": [{"name": "a"}, {"name": "xpyd-kv"}]}},
        "spec.volumes[1].name",
        "names that begin with xpyd- are xpyd's; take another",
    ),
    (
        {"spec": {"resourceClaims": [{"name": "xpyd-gpus"}]}},
        "spec.resourceClaims[0].name",
        "names that begin with xpyd- are xpyd's; take another",
    ),
    (
        {"spec": {"containers": [{"name": "engine", "resorces": {}}]}},
        "spec.containers[0].resorces",
        "not a field of Container; did you mean resources?",
    ),
    ({"spec": {"gadget": 1}}, "spec.gadget", "not a field of PodSpec; take it out"),
    *(
        (
            {"spec": {"containers": [{"name": "a", "resources": {"limits": {"cpu": value}}}]}},
            "spec.containers[0].resources.limits[cpu]",
            f"expected a quantity like 500m, 2 or 4Gi, got {value!r}",
        )
        for value in ("abc", "", "1 Gi", "4GB", True, [1], {"a": 1})
    ),
    ({"spec": {"hostNetwork": 1}}, "spec.hostNetwork", "expected boolean, got 1"),
    ({"spec": {"containers": [None]}}, "spec.containers[0]", "an item of a list may not be null"),
    ({"spec": {"containers": 3}}, "spec.containers", "expected a list"),
    ({"spec": {"tolerations": {}}}, "spec.tolerations", "expected a list"),
    ({"spec": {"volumes": [1]}}, "spec.volumes[0]", "expected a map"),
    (
        {"spec": {"containers": [{"image": "x"}]}},
        "spec.containers[0].name",
        "missing; a container is merged by its name",
    ),
]
REFUSED_IN_CONTAINER = [
    ({"command": ["sh"]}, "command", ours),
    ({"ports": [{"name": "http"}]}, "ports[0]", ours),
    ({"env": [{"name": "A"}, {"name": "XPYD_ROLE"}]}, "env[1].name",
     "XPYD_* is set by xpyd; leave it out"),
    ({"env": {}}, "env", "expected a list"),
    ({"readinessProbe": {"httpGet": {"path": "/"}}}, "readinessProbe.httpGet", ours),
    ({"livenessProbe": {"exec": {}}}, "livenessProbe.exec", ours),
    ({"startupProbe": {"tcpSocket": {"port": 1}}}, "startupProbe.tcpSocket", ours),
    ({"volumeMounts": [{"mountPath": "/run/xpyd/sockets"}]}, "volumeMounts[0].mountPath",
     "/run/xpyd/sockets holds the engines' sockets; take another"),
    ({"volumeMounts": [{"mountPath": "/run/xpyd/kv/"}]}, "volumeMounts[0].mountPath",
     "/run/xpyd/kv holds the fleet's key; take another"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "path", "why"), REFUSED)
def test_what_is_xpyds_is_refused_with_its_path(template, path, why):
    assert template_problems(fleet_with(template)) == (f"spec.pools[0].template.{path}: {why}",)
    router = template_problems(fleet_with(router=template))
    assert router == (f"spec.router.template.{path}: {why}",)


@pytest.mark.parametrize(("fields", "path", "why"), REFUSED_IN_CONTAINER)
def test_what_is_xpyds_in_its_containers_is_refused_with_its_path(fields, path, why):
    at = f"template.spec.containers[0].{path}: {why}"
    assert template_problems(container("engine", fields)) == (f"spec.pools[0].{at}",)
    assert template_problems(container("router", fields)) == (f"spec.router.{at}",)
    side = fleet_with({"spec": {"containers": [{"name": "side", **fields}]}})
    assert [line for line in template_problems(side) if "expected a list" not in line] == []


def container(name: str, fields: dict[str, Any]) -> InferenceFleet:
    template = {"spec": {"containers": [{"name": name, **fields}]}}
    return fleet_with(template) if name == "engine" else fleet_with(router=template)


@pytest.mark.parametrize(
    ("name", "fields", "resources", "line"),
    [
        ("engine", {"args": []}, {}, "args: set by xpyd; use spec.engine.args"),
        ("router", {"args": ["x"]}, {}, "args: set by xpyd; leave it out"),
        (
            "engine",
            {"ports": [{"containerPort": 21001}]},
            {},
            "ports[0]: set by xpyd; leave it out",
        ),
        (
            "router",
            {"ports": [{"containerPort": 30001}]},
            {},
            "ports[0]: set by xpyd; leave it out",
        ),
        (
            "engine",
            {"resources": {"limits": {"nvidia.com/gpu": 1}}},
            {},
            "resources.limits[nvidia.com/gpu]: set by xpyd; use resources.gpus",
        ),
        (
            "engine",
            {"resources": {"requests": {"amd.com/gpu": 1}}},
            {"gpuResourceName": "amd.com/gpu"},
            "resources.requests[amd.com/gpu]: set by xpyd; use resources.gpus",
        ),
        ("router", {"resources": {"limits": {"nvidia.com/gpu": 1}}}, {}, ""),
    ],
)
def test_what_is_xpyds_in_one_kind_of_pod_is_refused_there(name, fields, resources, line):
    template = {"spec": {"containers": [{"name": name, **fields}]}}
    engine_, router = (template, None) if name == "engine" else (None, template)
    where = "spec.pools[0]" if name == "engine" else "spec.router"
    expected = (f"{where}.template.spec.containers[0].{line}",) if line else ()
    assert template_problems(fleet_with(engine_, router, **resources)) == expected


def test_each_container_says_what_it_takes_and_the_template_wins() -> None:
    """A namespace with a compute quota refuses a container that does not."""

    def sizes(resources: dict[str, Any] | None = None, **pool: Any) -> dict[str, Any]:
        engine = {"name": "engine", **({"resources": resources} if resources else {})}
        return engine_pod({"containers": [engine]}, **pool)["containers"][0]["resources"]

    for found in (sizes(gpus=0), sizes(gpus=1), router_pod_of({})["containers"][0]["resources"]):
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= found[kind].keys()
    assert sizes(gpus=1)["limits"]["nvidia.com/gpu"] == "1"
    # 700 MiB for the process; an Aggregated engine has a cache alone.
    assert sizes(gpus=0)["requests"]["memory"] == "764Mi"
    theirs = sizes({"requests": {"memory": "900Gi"}}, gpus=0)
    assert theirs["requests"] == {"cpu": "100m", "memory": "900Gi"}
    assert theirs["limits"] == {"cpu": "64"}


def test_a_routers_limits_have_room_for_each_of_its_processes() -> None:
    """Each has a core and 2.75 GiB besides what waits; 1 GiB and a core are their parent's."""
    for processes, queue, cpu, memory in (
        (1, "256Mi", "8", 2816 + 256 + 1024),
        (4, "256Mi", "8", 4 * (2816 + 256) + 1024),
        (12, "1Gi", "13", 12 * (2816 + 1024) + 1024),
    ):
        fleet = parsed(router={"processes": processes, "queue": {"memory": queue}})
        found = pods(fleet)["router"]["spec"]["containers"][0]["resources"]
        assert found["limits"] == {"cpu": cpu, "memory": f"{memory}Mi"}
        assert found["requests"] == {"cpu": "50m", "memory": "256Mi"}


def router_pod_of(template: dict[str, Any]) -> dict[str, Any]:
    return pods(fleet_with({}, {"spec": template}))["router"]["spec"]


def test_the_container_that_gives_the_folder_to_the_engine_takes_resources_but_no_command():
    def problems(**fields: Any) -> tuple[str, ...]:
        spec = {"initContainers": [{"name": "xpyd-sockets", **fields}]}
        return template_problems(fleet_with({"spec": spec}))

    assert problems(resources={"limits": {"memory": "32Mi"}}) == ()
    at = "spec.pools[0].template.spec.initContainers[0]"
    assert problems(command=["sh"], args=["-c"]) == (
        f"{at}.command: set by xpyd; leave it out",
        f"{at}.args: set by xpyd; leave it out",
    )


def test_all_problems_of_all_templates_are_listed():
    bad = {"spec": {"restartPolicy": "Never", "containers": [{"name": "engine", "args": []}]}}
    assert len(template_problems(fleet_with(bad, {"spec": {"restartPolicy": "Never"}}))) == 3


@pytest.mark.parametrize(
    "junk", [None, 1, "x", [], [1], [[]], [{}], {"a": 1}, [{"name": 3}], [None]]
)
def test_junk_is_refused_or_harmless_but_never_an_exception(junk):
    keys = ("containers", "initContainers", "volumes", "tolerations", "securityContext", "affinity")
    inner = ("env", "ports", "volumeMounts", "resources", "readinessProbe")
    for key in keys:
        check(fleet_with({"spec": {key: junk}}, {"spec": {key: junk}}))
    for key in inner:
        check(container("engine", {key: junk}))


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [{"name": "engine", "ports": [{"name": ["x"]}]}]},
        {"volumes": [{"name": "v", "ports": [1, 2]}]},
        {"affinity": {"claims": [1, 2]}},
        {"affinity": {"claims": [1, {"name": "a"}]}},
        {"ephemeralContainers": [{"name": "e", "env": [1, 2]}]},
    ],
)
def test_a_merged_lists_name_in_an_odd_place_is_no_exception(spec):
    check(fleet_with({"spec": spec}))


_KEYS = st.sampled_from(
    ["name", "containers", "volumes", "env", "ports", "claims", "affinity", "tolerations"]
)
_JUNK = st.recursive(
    st.none() | st.integers(0, 9) | st.sampled_from(["engine", "http", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(_KEYS, _JUNK, max_size=3), st.dictionaries(_KEYS, _JUNK, max_size=3))
def test_any_template_is_answered_and_what_is_not_refused_can_be_rendered(spec, container_fields):
    containers = [{**container_fields, "name": "engine"}]
    check(fleet_with({"spec": spec}))
    check(fleet_with({"spec": {**spec, "containers": containers}}))


def check(fleet: InferenceFleet) -> None:
    if not template_problems(fleet):
        json.dumps(pods(fleet))
    uses_host_path(fleet)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (None, False),
        ({"spec": {"volumes": [{"name": "a", "emptyDir": {}}]}}, False),
        ({"spec": {"volumes": [{"name": "a", "hostPath": {"path": "/a"}}]}}, True),
    ],
)
def test_a_folder_of_the_node_is_noticed_in_every_template(template, found):
    assert uses_host_path(fleet_with(template)) is found
    assert uses_host_path(fleet_with(router=template)) is found

"""What the chart installs: pods that "restricted" admits, names, labels, images, arguments."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.chart.render import ROOT, Helm, Obj, of_kind, one, pods
from xpyd_core.cli import build_parser

EVERYTHING: dict[str, Any] = {
    "imagePullSecrets": ["registry-login"],
    "watchNamespaces": ["serving", "lab"],
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}],
    "priorityClassName": "system-cluster-critical",
    "podLabels": {"team": "serving"},
    "podAnnotations": {"note": "by test"},
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "grafana": {"dashboard": {"enabled": True}},
    "crds": {"keep": True},
    "test": {"fleet": "chat", "namespace": "serving", "port": 80},
}
VARIANTS = [{}, EVERYTHING]


def _operator(objects: list[Obj]) -> Obj:
    return one(objects, "Deployment", "xpyd-operator")["spec"]["template"]


def _container(spec: Obj) -> Obj:
    assert len(spec["containers"]) == 1
    return spec["containers"][0]


def _args(objects: list[Obj]) -> list[str]:
    return _container(_operator(objects)["spec"])["args"]


@pytest.mark.parametrize("values", VARIANTS)
def test_every_pod_passes_pod_security_restricted(helm: Helm, values: dict[str, Any]) -> None:
    found = list(pods(helm.render(values)))
    assert [name for name, _ in found] == [
        "Deployment/xpyd-operator",
        "Pod/xpyd-test",
        "Job/xpyd-uninstall",
    ]
    for name, spec in found:
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert pod["runAsUser"] == 10001, name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        container = _container(spec)["securityContext"]
        assert container["allowPrivilegeEscalation"] is False, name
        assert container["capabilities"] == {"drop": ["ALL"]}, name
        assert container["readOnlyRootFilesystem"] is True, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        volumes = [set(volume) - {"name"} for volume in spec.get("volumes", [])]
        assert all(kind <= {"emptyDir"} for kind in volumes), name
        assert _container(spec)["resources"]["limits"]["memory"], name
        assert spec["enableServiceLinks"] is False, name


@pytest.mark.parametrize("values", VARIANTS)
def test_every_object_has_a_name_a_namespace_and_the_release_as_label(
    helm: Helm, values: dict[str, Any]
) -> None:
    objects = helm.render(values)
    seen: set[tuple[str, str, str]] = set()
    for obj in objects:
        meta = obj["metadata"]
        is_global = obj["kind"].startswith(("Cluster", "CustomResource"))
        assert ("namespace" in meta) is not is_global, meta
        assert meta["labels"]["app.kubernetes.io/instance"] == "xpyd", meta
        assert meta["labels"]["app.kubernetes.io/managed-by"] == "Helm", meta
        seen.add((obj["kind"], meta.get("namespace", ""), meta["name"]))
    assert len(seen) == len(objects)


def test_a_new_operator_is_there_before_the_old_one_goes(helm: Helm) -> None:
    spec = one(helm.render(), "Deployment", "xpyd-operator")["spec"]
    assert spec["replicas"] == 1
    moves = {"maxSurge": 1, "maxUnavailable": 0}
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": moves}
    more = helm.render({"operator": {"replicas": 2}})
    assert one(more, "Deployment", "xpyd-operator")["spec"]["replicas"] == 2


def test_the_lease_by_which_one_operator_leads_is_named_after_the_release(helm: Helm) -> None:
    objects = helm.render({"fullnameOverride": "two", "operator": {"leaseSeconds": 20}})
    args = _container(one(objects, "Deployment", "two-operator")["spec"]["template"]["spec"])[
        "args"
    ]
    assert "--release=xpyd-system/two-operator" in args
    assert "--lease-seconds=20" in args


def test_the_operator_is_probed_where_it_answers(helm: Helm) -> None:
    container = _container(_operator(helm.render())["spec"])
    assert container["ports"] == [{"name": "http", "containerPort": 8080}]
    probes = {name: probe["httpGet"] for name, probe in container.items() if "Probe" in name}
    assert probes == {
        "startupProbe": {"path": "/healthz", "port": "http"},
        "livenessProbe": {"path": "/healthz", "port": "http"},
        "readinessProbe": {"path": "/readyz", "port": "http"},
    }


def test_no_service_leads_to_the_pods_of_hooks(helm: Helm) -> None:
    objects = helm.render(EVERYTHING)
    selector = one(objects, "Service", "xpyd-operator")["spec"]["selector"].items()
    deployment = one(objects, "Deployment", "xpyd-operator")["spec"]
    assert selector <= deployment["template"]["metadata"]["labels"].items()
    assert deployment["selector"]["matchLabels"].items() == selector
    others = [
        one(objects, "Job", "xpyd-uninstall")["spec"]["template"],
        one(objects, "Pod", "xpyd-test"),
    ]
    for pod in others:
        assert not selector <= pod["metadata"]["labels"].items()


def test_only_the_pods_that_ask_the_api_get_a_token(helm: Helm) -> None:
    objects = helm.render()
    assert all(spec["automountServiceAccountToken"] is True for _, spec in pods(objects))
    accounts = of_kind(objects, "ServiceAccount")
    assert accounts
    assert all(account["automountServiceAccountToken"] is False for account in accounts)


def test_the_operator_is_told_images_namespaces_and_settings(helm: Helm) -> None:
    values: dict[str, Any] = {
        "images": {
            "local": False,
            "registry": "registry.example.com/team",
            "worker": {"repository": "own-worker", "tag": "7-cuda"},
            "router": {"digest": "sha256:" + "0" * 64},
        },
        "imagePullPolicy": "Always",
        "imagePullSecrets": ["one", "two"],
        "watchNamespaces": ["serving", "lab"],
        "operator": {"workers": 3, "resyncSeconds": 60, "logLevel": "debug", "logFormat": "text"},
    }
    values["operator"]["upgradeFleets"] = 4
    objects = helm.render(values)
    assert _args(objects) == [
        "operator",
        "--namespace=serving",
        "--namespace=lab",
        "--worker-image=registry.example.com/team/own-worker:7-cuda",
        f"--router-image=registry.example.com/team/xpyd-router@sha256:{'0' * 64}",
        "--image-pull-policy=Always",
        "--image-pull-secret=one",
        "--image-pull-secret=two",
        "--admin-namespace=xpyd-system",
        "--release=xpyd-system/xpyd-operator",
        "--lease-seconds=15",
        "--upgrade-fleets=4",
        "--no-read-nodes",
        "--workers=3",
        "--resync-seconds=60",
        "--log-level=debug",
        "--log-format=text",
    ]
    for name, spec in pods(objects):
        container = _container(spec)
        assert container["image"] == "registry.example.com/team/xpyd-operator:0.1.0", name
        assert container["imagePullPolicy"] == "Always", name
        assert spec["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}], name


@pytest.mark.parametrize("values", VARIANTS)
def test_the_operator_takes_the_arguments_that_the_chart_gives(
    helm: Helm, values: dict[str, Any]
) -> None:
    args = build_parser().parse_args(_args(helm.render(values)))
    assert args.namespace == values.get("watchNamespaces", [])
    assert args.image_pull_secret == values.get("imagePullSecrets", [])
    assert (args.workers, args.resync_seconds) == (8, 600)


def test_local_images_go_by_their_plain_names(helm: Helm) -> None:
    args = _args(helm.render())
    assert "--worker-image=xpyd-worker:0.1.0" in args
    assert "--router-image=xpyd-router:0.1.0" in args


def test_scheduling_reaches_the_pods(helm: Helm) -> None:
    objects = helm.render(EVERYTHING)
    for name, spec in pods(objects):
        for key in ("nodeSelector", "tolerations", "affinity"):
            assert spec[key] == EVERYTHING[key], name
    operator = _operator(objects)
    assert operator["spec"]["priorityClassName"] == "system-cluster-critical"
    assert operator["spec"]["topologySpreadConstraints"] == EVERYTHING["topologySpreadConstraints"]
    assert operator["metadata"]["labels"]["team"] == "serving"
    assert operator["metadata"]["annotations"] == {"note": "by test"}


def test_a_label_of_the_user_cannot_replace_one_of_the_chart(helm: Helm) -> None:
    name = "app.kubernetes.io/component"
    objects = helm.render({"podLabels": {name: "other"}})
    assert _operator(objects)["metadata"]["labels"][name] == "operator"


def test_another_account_is_used_when_named(helm: Helm) -> None:
    objects = helm.render({"serviceAccount": {"create": False, "name": "made-elsewhere"}})
    names = [account["metadata"]["name"] for account in of_kind(objects, "ServiceAccount")]
    assert names == ["xpyd-uninstall"]
    assert _operator(objects)["spec"]["serviceAccountName"] == "made-elsewhere"
    binding = one(objects, "ClusterRoleBinding", "xpyd-operator")
    assert binding["subjects"][0]["name"] == "made-elsewhere"


def test_the_uninstall_hook_ends_before_helm_gives_up(helm: Helm) -> None:
    objects = helm.render({"watchNamespaces": ["serving"]})
    job = one(objects, "Job", "xpyd-uninstall")
    assert job["spec"]["activeDeadlineSeconds"] < 300  # helm's own --timeout
    assert job["spec"]["backoffLimit"] == 0
    container = _container(job["spec"]["template"]["spec"])
    assert container["command"] == ["python", "-m", "xpyd_operator.controller.uninstall"]
    assert container["args"] == [
        "--namespace=serving",
        "--crds-go",
        "--release=xpyd-system/xpyd-operator",
        "--timeout-seconds=270",
    ]
    for values in ({"crds": {"keep": True}}, {"watchNamespaces": ["a"], "crds": {"keep": True}}):
        job = one(helm.render(values), "Job", "xpyd-uninstall")
        assert "--crds-go" not in _container(job["spec"]["template"]["spec"])["args"]


def test_what_the_uninstall_hook_needs_comes_before_it_and_goes_after_it(helm: Helm) -> None:
    for values in ({}, {"watchNamespaces": ["serving", "lab"]}):
        hooks = [obj for obj in helm.render(values) if _hook(obj) == "pre-delete"]
        kinds = {obj["kind"] for obj in hooks}
        assert kinds >= {"ServiceAccount", "Job"}
        weight = {obj["kind"]: int(_annotations(obj)["helm.sh/hook-weight"]) for obj in hooks}
        assert all(weight["Job"] > weight[kind] for kind in kinds - {"Job"})
        policies = {_annotations(obj)["helm.sh/hook-delete-policy"] for obj in hooks}
        assert policies == {"before-hook-creation,hook-succeeded"}


def _annotations(obj: Obj) -> dict[str, str]:
    return obj["metadata"].get("annotations", {})


def _hook(obj: Obj) -> str:
    return _annotations(obj).get("helm.sh/hook", "")


def test_nothing_is_deleted_at_uninstall_when_fleets_shall_stay(helm: Helm) -> None:
    objects = helm.render({"uninstall": {"deleteFleets": False}, "crds": {"keep": True}})
    assert not [obj for obj in objects if _hook(obj) == "pre-delete"]


def test_helm_test_asks_the_operator_and_the_named_fleet(helm: Helm) -> None:
    for values, fleet in (
        ({}, []),
        ({"test": {"fleet": "chat"}}, ["--fleet=http://chat-router.xpyd-system.svc:10001"]),
        (
            {"test": {"fleet": "chat", "scheme": "https"}},
            ["--fleet=https://chat-router.xpyd-system.svc:10001"],
        ),
        (EVERYTHING, ["--fleet=http://chat-router.serving.svc:80"]),
    ):
        pod = one(helm.render(values), "Pod", "xpyd-test")
        assert _hook(pod) == "test"
        container = _container(pod["spec"])
        assert container["command"] == ["python", "-m", "xpyd_operator.controller.installed"]
        operator = "--operator=http://xpyd-operator.xpyd-system.svc:8080"
        assert container["args"] == [operator, *fleet, "--timeout-seconds=60"]


def test_monitors_find_the_operator_and_the_pods_of_fleets(helm: Helm) -> None:
    plain = helm.render()
    assert not of_kind(plain, "ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap")
    objects = helm.render(EVERYTHING)
    monitor = one(objects, "ServiceMonitor", "xpyd-operator")
    service = one(objects, "Service", "xpyd-operator")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    assert selected <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    pod_monitor = one(objects, "PodMonitor", "xpyd-fleets")
    assert pod_monitor["spec"]["namespaceSelector"] == {"matchNames": ["serving", "lab"]}
    # Of each pod one port is scraped.
    kept = {
        endpoint["port"]: endpoint["relabelings"][0]
        for endpoint in pod_monitor["spec"]["podMetricsEndpoints"]
    }
    pool = {"sourceLabels": ["__meta_kubernetes_pod_label_xpyd_dev_pool"], "regex": "router"}
    assert kept == {"admin": {**pool, "action": "keep"}, "http": {**pool, "action": "drop"}}
    # Engines say by an annotation that they speak TLS; routers' admin ports never do.
    scheme = {
        "sourceLabels": ["__meta_kubernetes_pod_annotation_xpyd_dev_scheme"],
        "regex": "(https)",
        "targetLabel": "__scheme__",
    }
    by_port = {one["port"]: one for one in pod_monitor["spec"]["podMetricsEndpoints"]}
    assert scheme in by_port["http"]["relabelings"]
    assert by_port["http"]["tlsConfig"] == {"insecureSkipVerify": True}
    assert scheme not in by_port["admin"]["relabelings"]
    assert "tlsConfig" not in by_port["admin"]
    everywhere = helm.render({"metrics": {"podMonitor": {"enabled": True}}})
    assert one(everywhere, "PodMonitor", "xpyd-fleets")["spec"]["namespaceSelector"] == {
        "any": True
    }


def test_the_releases_namespace_and_prometheus_may_reach_admin_ports(helm: Helm) -> None:
    objects = helm.render({"metrics": {"namespaces": ["monitoring", "lab"]}})
    operator = one(objects, "Deployment", "xpyd-operator")
    args = operator["spec"]["template"]["spec"]["containers"][0]["args"]
    found = [arg.removeprefix("--admin-namespace=") for arg in args if "admin-name" in arg]
    assert found == [operator["metadata"]["namespace"], "monitoring", "lab"]


@pytest.mark.parametrize(
    ("values", "release", "name"),
    [
        ({}, "xpyd", "xpyd-operator"),
        ({}, "prod", "prod-xpyd-operator"),
        ({"nameOverride": "fleets"}, "prod", "prod-fleets-operator"),
        ({"fullnameOverride": "own"}, "prod", "own-operator"),
        ({"fullnameOverride": "a" * 39 + "-b"}, "prod", "a" * 39 + "-operator"),
    ],
)
def test_names_carry_the_release(
    helm: Helm, values: dict[str, Any], release: str, name: str
) -> None:
    objects = helm.render(values, release=release)
    assert one(objects, "Deployment", name)
    assert all(len(obj["metadata"]["name"]) <= 63 for obj in objects)


def test_releases_for_single_namespaces_do_not_share_an_object(helm: Helm) -> None:
    shared = {"crds": {"install": False}}
    a = helm.render({"watchNamespaces": ["a"], **shared}, namespace="a")
    b = helm.render({"watchNamespaces": ["b"], **shared}, namespace="b")
    names = [
        {(o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]) for o in objects}
        for objects in (a, b)
    ]
    assert not names[0] & names[1]


def test_the_notes_name_the_next_command(helm: Helm) -> None:
    notes = helm.notes()
    assert "kubectl -n xpyd-system rollout status deployment/xpyd-operator" in notes
    assert "kubectl apply -f examples/fleet.yaml" in notes
    assert "kubectl wait --for=condition=Ready fleet/chat" in notes
    assert "deletes all fleets" in notes
    named = helm.notes({"watchNamespaces": ["serving", "lab"], "crds": {"keep": True}})
    assert "serves fleets in serving, lab." in named
    assert "kubectl -n serving apply -f examples/fleet.yaml" in named
    assert "the CRDs stay" in named
    kept = helm.notes({"uninstall": {"deleteFleets": False}, "crds": {"keep": True}})
    assert "leaves fleets as they are" in kept


def test_the_fleet_of_the_notes_exists(helm: Helm) -> None:
    fleet = yaml.safe_load((ROOT / "examples" / "fleet.yaml").read_text())
    assert f"fleet/{fleet['metadata']['name']} " in helm.notes()


def test_names_that_look_like_numbers_stay_text(helm: Helm) -> None:
    """YAML would make integers of them, which the API server refuses."""
    values = {
        "imagePullSecrets": ["123"],
        "watchNamespaces": ["456"],
        "priorityClassName": "7",
        "serviceAccount": {"create": False, "name": "8"},
    }
    objects = helm.render(values, release="123", namespace="9")
    assert {type(o["metadata"].get("namespace", "")) for o in objects} == {str}
    labels = [label for o in objects for label in o["metadata"].get("labels", {}).values()]
    assert {type(label) for label in labels} == {str}
    (spec,) = [spec for _, spec in pods(objects) if "terminationGracePeriodSeconds" in spec]
    assert spec["imagePullSecrets"] == [{"name": "123"}]
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("7", "8")
    bound = [s for o in objects for s in o.get("subjects", [])]
    assert bound
    assert {type(s["namespace"]) for s in bound} | {type(s["name"]) for s in bound} == {str}


def test_only_who_may_read_metrics_reaches_the_operator(helm: Helm) -> None:
    objects = helm.render({"metrics": {"namespaces": ["monitoring"]}})
    policy = one(objects, "NetworkPolicy", "xpyd")["spec"]
    for kind, name in (("Deployment", "xpyd-operator"), ("Job", "xpyd-uninstall")):
        labels = one(objects, kind, name)["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (rule,) = policy["ingress"]
    assert [port["port"] for port in rule["ports"]] == [8080]
    assert rule["from"] == [
        {"podSelector": {}},
        {"namespaceSelector": {"matchLabels": {"xpyd.dev/scrape": "true"}}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    ]
    assert not of_kind(helm.render({"networkPolicy": {"enabled": False}}), "NetworkPolicy")


def test_pods_tell_checkov_what_they_do_not_pass_and_why(helm: Helm) -> None:
    objects = helm.render({"checkov": {"skip": {"CKV_K8S_15": "pinned"}}})
    places = ("Deployment", "xpyd-operator"), ("Job", "xpyd-uninstall"), ("Pod", "xpyd-test")
    for kind, name in places:
        notes = one(objects, kind, name)["metadata"]["annotations"]
        assert notes["checkov.io/skip1"] == "CKV_K8S_15=pinned"
        excused = [note for key, note in notes.items() if key.startswith("checkov.io/")]
        assert all(reason for _, _, reason in (note.partition("=") for note in excused))
        assert ("CKV_K8S_8" in " ".join(excused)) == (kind == "Pod")

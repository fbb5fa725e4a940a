"""Who reaches a fleet's ports, and the Service and routes in front of its routers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.object_samples import placement_of, workloads_of
from tests.operator.test_manifests_documents import changed, near, of_kind
from xpyd_core.pod_env import rendezvous_port
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests import names
from xpyd_operator.manifests.entry import client_service, hosts_of, routes
from xpyd_operator.manifests.names import Placement, Settings
from xpyd_operator.manifests.objects import network_policies, workload_objects
from xpyd_operator.manifests.pods import engine_ports


def ingress(fleet: InferenceFleet, name: str) -> list[dict[str, Any]]:
    policies = {obj["metadata"]["name"]: obj for obj in of_kind(fleet, "NetworkPolicy")}
    return policies[f"{fleet.name}-{name}"]["spec"]["ingress"]


def admits(rules: list[dict[str, Any]], labels: dict[str, str], port: int) -> bool:
    """Whether a pod of the fleet's namespace with these labels may reach the port."""
    for rule in rules:
        ports = rule.get("ports", [{"port": 0, "endPort": 65535}])
        if not any(p["port"] <= port <= p.get("endPort", p["port"]) for p in ports):
            continue
        peers = rule.get("from")
        if peers is None:
            return True
        selectors = [p["podSelector"].get("matchLabels", {}) for p in peers if "podSelector" in p]
        if any(selector.items() <= labels.items() for selector in selectors):
            return True
    return False


@pytest.mark.parametrize(
    ("policy", "who", "port", "allowed"),
    [
        ("engines", "prefill", 21001, True),
        ("engines", "router", 21001, False),
        ("engines", "stranger", 21001, False),
        ("engines", "other fleet", 21001, False),
        ("engines", "router", 20001, True),
        ("engines", "prefill", 20001, False),
        ("engines", "stranger", 20001, False),
        ("engines", "decode", 29500, True),  # its instances have several pods
        ("engines", "prefill", 29500, False),
        ("router", "stranger", 10001, True),
        ("router", "stranger", 10002, True),  # of the fleet's namespace
        ("router", "prefill", 30001, True),
        ("router", "stranger", 30001, False),
        ("router", "other fleet", 30001, False),
    ],
)
def test_who_may_reach_a_port(policy, who, port, allowed):
    labels = {
        "stranger": {"app": "x"},
        "other fleet": names.pool_labels("other", "prefill", "Prefill"),
        "router": names.pool_labels("llama70b", "router", "router"),
    }.get(who, names.pool_labels("llama70b", who, "Prefill"))
    assert admits(ingress(changed(), policy), labels, port) is allowed


def test_the_admin_port_is_open_to_the_namespace_the_operators_and_those_that_scrape():
    placement = Placement("ns", "uid", Settings("w", "r", admin_namespaces=("ops", "mon")))
    objects = network_policies(changed(), placement)
    (router,) = [one for one in objects if one["metadata"]["name"].endswith("-router")]
    (rule,) = [r for r in router["spec"]["ingress"] if r["ports"][0]["port"] == 10002]
    own, *others = rule["from"]
    assert own == {"podSelector": {}}
    assert [one["namespaceSelector"]["matchLabels"] for one in others] == [
        {"xpyd.dev/scrape": "true"},
        {"kubernetes.io/metadata.name": "ops"},
        {"kubernetes.io/metadata.name": "mon"},
    ]


def test_every_ranks_kv_port_is_open_to_the_fleets_engines():
    engine = names.pool_labels("llama70b", "prefill", "Prefill")
    rules = ingress(changed(), "engines")
    assert [port for port in range(21000, 21012) if admits(rules, engine, port)] == list(
        range(21001, 21010)
    )
    rules = ingress(changed(("spec.kvTransfer.port", 65527)), "engines")
    assert admits(rules, engine, 65535)
    assert not admits(rules, engine, 65536)


def test_the_kv_ports_of_all_replicas_are_open():
    engine = names.pool_labels("llama70b", "prefill", "Prefill")
    four = {"gpus": 4}
    for layout, last in (
        ({"data": 4}, 21008),
        ({"tensor": 2, "data": 2}, 21006),
        ({"tensor": 2, "pipeline": 2}, 21005),
    ):
        rules = ingress(
            changed(
                *((f"spec.pools.{pool}.parallelism", layout) for pool in (0, 1)),
                *((f"spec.pools.{pool}.resources", four) for pool in (0, 1)),
            ),
            "engines",
        )
        open_ones = [port for port in range(21000, 21012) if admits(rules, engine, port)]
        assert open_ones == list(range(21001, last + 1))


def test_ranks_of_several_pods_meet_on_a_port_that_only_their_pool_reaches():
    rules = ingress(changed(), "engines")
    admitted = {
        pool: admits(rules, names.pool_labels("llama70b", pool, "Decode"), rendezvous_port(21001))
        for pool in ("prefill", "decode", "router")
    }
    assert admitted == {"prefill": False, "decode": True, "router": False}


def test_a_pods_ports_are_those_of_its_own_ranks():
    fleet = changed(("spec.kvTransfer.port", 22001))
    ports = {
        pool.name: {k: v for k, v in engine_ports(fleet, pool).items() if k != "http"}
        for pool in fleet.spec.pools
    }
    first = {"kv": 22001, "data-0": 22002, "data-1": 22003}
    assert ports["prefill"] == first
    assert ports["decode"] == {**first, "data-2": 22004, "data-3": 22005}  # of 8, in 2 pods
    halves = changed(("spec.pools.0.parallelism", {"data": 2}))
    assert list(engine_ports(halves, halves.spec.pools[0]).items())[1:] == [
        ("kv", 21001),
        ("data-0", 21002),
        ("kv-1", 21003),
        ("data-1", 21004),
    ]
    alone = near()
    assert engine_ports(alone, alone.spec.pools[0]) == {"http": 20001, "kv": 21001}


def test_scrapers_need_a_namespace_that_an_administrator_labelled():
    peers = [peer for rule in ingress(changed(), "engines") for peer in rule.get("from", [])]
    outside = [peer for peer in peers if "namespaceSelector" in peer]
    assert outside == [{"namespaceSelector": {"matchLabels": {"xpyd.dev/scrape": "true"}}}]


def test_policies_can_be_left_to_others():
    assert of_kind(changed(("spec.networkPolicy", {"enabled": False})), "NetworkPolicy") == []


NS = Placement("ns", "uid", Settings("w", "r"))


def test_a_service_says_what_the_document_says_and_leaves_the_rest_to_the_server():
    plain = client_service(near(), NS)
    assert set(plain["spec"]) == {"type", "selector", "ports"}
    assert "annotations" not in plain["metadata"]
    fleet = near(
        (
            "spec.router.service",
            {
                "type": "LoadBalancer",
                "port": 443,
                "labels": {"tier": "web"},
                "annotations": {"note": "x"},
                "loadBalancerClass": "service.k8s.aws/nlb",
                "sourceRanges": ["203.0.113.0/24", "2001:db8::/32"],
                "sessionAffinity": "ClientIP",
                "ipFamilyPolicy": "PreferDualStack",
                "externalTrafficPolicy": "Local",
            },
        )
    )
    made = client_service(fleet, NS)
    spec, metadata = made["spec"], made["metadata"]
    assert (spec["type"], [port["port"] for port in spec["ports"]]) == ("LoadBalancer", [443])
    assert {key: spec[key] for key in spec if key not in plain["spec"]} == {
        "loadBalancerClass": "service.k8s.aws/nlb",
        "loadBalancerSourceRanges": ["203.0.113.0/24", "2001:db8::/32"],
        "sessionAffinity": "ClientIP",
        "ipFamilyPolicy": "PreferDualStack",
        "externalTrafficPolicy": "Local",
    }
    assert metadata["annotations"] == {"note": "x"}
    assert metadata["labels"] == {**plain["metadata"]["labels"], "tier": "web"}


def route_of(fleet: InferenceFleet) -> dict[str, Any]:
    (made,) = routes(fleet, NS)
    return made


def test_an_ingress_leads_to_the_service_and_its_streams_are_not_held_up_by_nginx():
    asked = {"host": "chat.example.com", "className": "nginx", "tlsSecretName": "cert"}
    own = "nginx.ingress.kubernetes.io/proxy-body-size"
    made = route_of(near(("spec.router.ingress", {**asked, "annotations": {own: "64m"}})))
    service = client_service(near(), NS)["metadata"]["name"]
    backend = {"service": {"name": service, "port": {"name": "http"}}}
    path = {"path": "/", "pathType": "Prefix", "backend": backend}
    assert made["spec"] == {
        "ingressClassName": "nginx",
        "rules": [{"host": "chat.example.com", "http": {"paths": [path]}}],
        "tls": [{"hosts": ["chat.example.com"], "secretName": "cert"}],
    }
    assert made["metadata"]["annotations"] == {
        "nginx.ingress.kubernetes.io/proxy-read-timeout": "1800",
        "nginx.ingress.kubernetes.io/proxy-send-timeout": "1800",
        "nginx.ingress.kubernetes.io/proxy-buffering": "off",
        own: "64m",
    }


def test_an_ingress_of_another_class_has_only_what_the_document_says():
    made = route_of(near(("spec.router.ingress", {"host": "a.b", "path": "/v1"})))
    assert "annotations" not in made["metadata"]
    assert set(made["spec"]) == {"rules"}
    assert made["spec"]["rules"][0]["http"]["paths"][0]["path"] == "/v1"


@pytest.mark.parametrize(("seconds", "said"), [(None, "0s"), (600, "600s")])
def test_an_http_route_ends_no_stream_unless_the_document_says_when(seconds, said):
    asked: dict[str, Any] = {
        "parentRefs": [{"name": "web", "namespace": "gateways", "sectionName": "https"}],
        "hostnames": ["chat.example.com"],
    }
    if seconds is not None:
        asked["requestTimeoutSeconds"] = seconds
    fleet = near(("spec.router.httpRoute", asked), ("spec.router.service", {"port": 80}))
    made = route_of(fleet)
    service = client_service(fleet, NS)["metadata"]["name"]
    assert made["spec"] == {
        **{key: asked[key] for key in ("parentRefs", "hostnames")},
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                "backendRefs": [{"name": service, "port": 80}],
                "timeouts": {"request": said},
            }
        ],
    }
    assert hosts_of(fleet) == ["chat.example.com"]


def test_a_document_that_asks_for_no_route_has_none():
    assert routes(near(), NS) == ()
    assert hosts_of(near()) == []


def test_the_admin_apis_keys_reach_the_routers_by_a_file():
    fleet = near(("spec.router.adminKeySecretRef", {"name": "keys", "key": "ops"}))
    (router,) = [w for w in workloads_of(fleet) if w.pool == "router"]
    (deployment,) = workload_objects(fleet, router, NS)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "xpyd-admin"]
    assert volume["secret"]["secretName"] == "keys"
    (item,) = volume["secret"]["items"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "xpyd-admin"]
    assert item["key"] == "ops"
    assert f"--admin-key-file={mount['mountPath']}/{item['path']}" in container["args"]


def test_replicas_of_four_ranks_are_two_in_each_pod_of_eight_gpus():
    """ORACLES 60."""
    fleet = changed(
        ("spec.pools.0.parallelism", {"tensor": 4, "data": 4}),
        ("spec.pools.0.resources", {"gpus": 8}),
    )
    (group,) = workload_objects(fleet, workloads_of(fleet)[1], placement_of(fleet))
    assert group["kind"] == "LeaderWorkerSet"
    templates = group["spec"]["leaderWorkerTemplate"]
    assert templates["size"] == 2
    first, other = (
        templates[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate")
    )
    assert first["args"] == other["args"]
    assert {"--tensor-parallel-size=4", "--data-parallel-size=4"} <= {*first["args"]}
    ports = {port["name"]: port["containerPort"] for port in first["ports"]}
    # Each replica's control, which all are in the first pod, and the ranks of its own two.
    first_port = fleet.spec.kv_transfer.port
    controls = {f"kv-{n}" if n else "kv": first_port + 5 * n for n in range(4)}
    ranks = {f"data-{n}": first_port + 1 + n + n // 4 for n in range(8)}
    assert ports == {"http": 20001, **controls, **ranks}
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "ports"} & {*other}

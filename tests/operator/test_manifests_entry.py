"""Who reaches a fleet's ports, and the Service and routes in front of its routers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.test_manifests_documents import changed, near, of_kind
from xpyd_core.pod_env import rendezvous_port
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests import names
from xpyd_operator.manifests.names import Placement, Settings
from xpyd_operator.manifests.objects import network_policies
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
    alone = near()
    assert engine_ports(alone, alone.spec.pools[0]) == {"http": 20001, "kv": 21001}


def test_scrapers_need_a_namespace_that_an_administrator_labelled():
    peers = [peer for rule in ingress(changed(), "engines") for peer in rule.get("from", [])]
    outside = [peer for peer in peers if "namespaceSelector" in peer]
    assert outside == [{"namespaceSelector": {"matchLabels": {"xpyd.dev/scrape": "true"}}}]


def test_policies_can_be_left_to_others():
    assert of_kind(changed(("spec.networkPolicy", {"enabled": False})), "NetworkPolicy") == []

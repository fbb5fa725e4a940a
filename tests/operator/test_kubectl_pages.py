"""What `kubectl xpyd status` and `why` say of fleets, as golden text; run this file to write it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.operator import test_canary
from tests.operator.observed_cluster import Cluster, new_cluster, settled
from tests.operator.test_status_children import group_pod, group_set
from tests.operator.test_status_conditions import Obj, fleet_of
from xpyd_operator.cluster.page import WIDTH, page_json, page_text, pages_text
from xpyd_operator.cluster.why import Wait, waits_of, why_json, why_text
from xpyd_operator.controller.decision.kinds import DEPLOYMENT
from xpyd_operator.controller.decision.standby import Standby, words
from xpyd_operator.status.children import Children, key_of
from xpyd_operator.status.drains import InstanceLoad

GOLDEN = Path(__file__).parent / "testdata" / "kubectl" / "pages.txt"


def stored(cluster: Cluster) -> Obj:
    """The fleet as the API server has it."""
    spec = cluster.fleet.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    metadata: Obj = {
        "name": "chat",
        "namespace": "team",
        "uid": "f1",
        "generation": cluster.generation,
    }
    if cluster.stopping:
        metadata["deletionTimestamp"] = cluster.time
    return {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": metadata,
        "spec": spec,
        "status": cluster.status or {},
    }


def page(cluster: Cluster) -> str:
    return page_text(stored(cluster), list(cluster.pods.values()), cluster.time)


def why(cluster: Cluster, events: list[Obj] | None = None) -> str:
    return why_text(stored(cluster), events or [], cluster.children, cluster.time)


def event(reason: str, message: str, at: str, **fields: Any) -> Obj:
    about = {"kind": "InferenceFleet", "name": "chat", "uid": "f1"}
    found = {"involvedObject": about, "reason": reason, "message": message, "type": "Normal"}
    return {**found, "lastTimestamp": at, "metadata": {"name": reason}, **fields}


def with_image(spec: Obj) -> None:
    spec["engine"] = {**spec.get("engine", {}), "image": "engine:2"}


def starting(cluster: Cluster, pool: str) -> list[Obj]:
    return [pod for pod in cluster.living(pool) if "nodeName" not in pod["spec"]]


def stuck_on_image() -> Cluster:
    cluster = settled(fleet_of())
    cluster.edit(fleet_of(with_image))
    cluster.turn()
    cluster.wait(5)
    pods = starting(cluster, "decode")
    cluster.waiting(pods, "ImagePullBackOff", 'Back-off pulling image "engine:2"')
    cluster.turn()
    cluster.wait(90)
    return cluster


def without_room() -> Cluster:
    cluster = settled(fleet_of())
    cluster.edit(fleet_of(with_image))
    cluster.turn()
    for pool in ("prefill", "decode"):
        words = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
        cluster.unschedulable(starting(cluster, pool), words)
    cluster.wait(90)
    cluster.turn()
    return cluster


def draining() -> Cluster:
    cluster = settled(fleet_of())
    cluster.scale("decode", 1)
    cluster.turn()
    (leaving,) = [p for p in cluster.pods_of("decode") if "deletionTimestamp" in p["metadata"]]
    cluster.loads = {leaving["metadata"]["name"]: InstanceLoad(3, 2)}
    cluster.wait(40)
    cluster.turn()
    return cluster


def without_prefill() -> Cluster:
    cluster = settled(fleet_of())
    cluster.running(cluster.pods_of("prefill"), ready=False)
    cluster.turn()
    cluster.wait(7)
    return cluster


def deleted() -> Cluster:
    cluster = settled(fleet_of())
    cluster.stopping = True
    cluster.turn()
    return cluster


def stood_by() -> Cluster:
    cluster = settled(fleet_of())
    document, release = stored(cluster), "other/xpyd-operator"
    document["metadata"]["resourceVersion"] = "1"
    said = words("xpyd-system/xpyd-operator", release, "chat")
    patch = Standby().patch(document, release, said, 0.0, cluster.time)
    assert patch is not None
    cluster.status = {**document["status"], **patch["status"]}
    return cluster


SCENES: dict[str, Callable[[], Cluster]] = {
    "settled": lambda: settled(fleet_of()),
    "new": new_cluster,
    "an image that is not there": stuck_on_image,
    "no room for the surge": without_room,
    "scaled down": draining,
    "no prefill": without_prefill,
    "deleted": deleted,
    "another release stands by": stood_by,
}


def told() -> str:
    parts: list[str] = []
    for name, scene in SCENES.items():
        cluster = scene()
        parts += [f"=== {name}\n", page(cluster), "--- why\n", why(cluster)]
    return "".join(parts)


def test_pages_are_as_in_the_golden_text() -> None:
    assert told() == GOLDEN.read_text()


def test_no_line_is_wider_than_a_terminal() -> None:
    assert [line for line in told().splitlines() if len(line) > WIDTH] == []
    cluster = stuck_on_image()
    cluster.waiting(cluster.pods_of("decode"), "ImagePullBackOff", "x" * 5000)
    cluster.turn()
    fleet = stored(cluster)
    fleet["metadata"] |= {"name": "n" * 63, "namespace": "m" * 63}
    fleet["status"]["endpoint"] = "http://" + "e" * 505
    shown = page_text(fleet, [], cluster.time) + why_text(fleet, [], cluster.children, cluster.time)
    assert [line for line in shown.splitlines() if len(line) > WIDTH] == []


def test_no_fleet_and_one_that_the_operator_has_not_seen_are_said() -> None:
    assert pages_text([], [], "2026-01-01T00:00:00Z", where="in namespace llm") == (
        "no fleet in namespace llm\n"
    )
    new = {"metadata": {"name": "chat", "namespace": "llm", "generation": 1}, "spec": {}}
    shown = page_text(new, [], "2026-01-01T00:00:00Z")
    assert shown.startswith("fleet llm/chat  Ready=Unknown\n")
    assert "the operator has written no status yet" in shown
    assert "Progressing: the operator has not seen the document yet" in shown


@pytest.mark.parametrize("junk", [None, 1, "x", [], [1], {"a": 1}, [{"name": 1, "replicas": "x"}]])
def test_junk_in_a_status_breaks_no_page(junk: Any) -> None:
    cluster = settled(fleet_of())
    fleet = stored(cluster)
    for field in ("pools", "conditions", "endpoint", "summary"):
        broken = {**fleet, "status": {**fleet["status"], field: junk}}
        pods = list(cluster.pods.values())
        assert page_text(broken, pods, cluster.time).startswith("fleet team/chat")
        assert why_text(broken, [], cluster.children, cluster.time)
    assert page_json({**fleet, "status": junk}, [])["ready"] == "Unknown"


def test_the_page_for_machines_has_the_counts_of_a_drain_and_of_older_revisions() -> None:
    cluster = draining()
    found = page_json(stored(cluster), list(cluster.pods.values()))
    (decode,) = [pool for pool in found["pools"] if pool["name"] == "decode"]
    counts = (decode["draining"], decode["drainingRequests"], decode["drainingKvLeases"])
    assert counts == (1, 3, 2)
    stuck = stuck_on_image()
    found = page_json(stored(stuck), list(stuck.pods.values()))
    (decode,) = [pool for pool in found["pools"] if pool["name"] == "decode"]
    assert list(decode["older"].values()) == [2]
    assert "ImagePullBackOff" in [one["reason"] for one in found["concerns"]]
    json.dumps(found)


def test_decisions_are_in_the_order_of_time_with_the_newest_last() -> None:
    events = [
        event("Scaled", "pool decode: 1 -> 2 instances", "2026-11-21T10:00:03Z"),
        event("Created", "pool decode: 1 instance", "2026-11-21T09:00:00Z"),
        event("Ready", "of an earlier fleet", "2026-11-21T10:00:09Z")
        | {"involvedObject": {"name": "chat", "uid": "f0"}},
        event("RoleLost", "no Prefill", "2026-11-21T10:00:01Z", type="Warning", count=3),
        event("Draining", "d", "", eventTime="2026-11-21T10:00:02.000000Z"),
    ]
    cluster = settled(fleet_of())
    lines = why(cluster, events).splitlines()
    assert lines[1:5] == [
        "  2026-11-21T09:00:00Z  Created: pool decode: 1 instance",
        "! 2026-11-21T10:00:01Z  RoleLost: no Prefill (3 times)",
        "  2026-11-21T10:00:02Z  Draining: d",
        "  2026-11-21T10:00:03Z  Scaled: pool decode: 1 -> 2 instances",
    ]
    found = why_json(stored(cluster), events, cluster.children, cluster.time)
    assert [one["reason"] for one in found["decisions"]][-1] == "Scaled"


def test_a_stuck_rollout_is_said_with_the_pod_and_with_the_bound() -> None:
    cluster = without_room()
    waits = {w.pool: w for w in waits_of(stored(cluster), cluster.children, cluster.time)}
    decode = waits["decode"]
    assert decode.what.startswith("0 of 2 instances of revision ")
    by = "\n".join(decode.by)
    assert "Insufficient nvidia.com/gpu" in by
    assert "3 instances run and at most 3 may (rollout.maxSurgePercent 25); 2 are ready" in by
    assert "at least 2 must be (rollout.maxUnavailablePercent 0)" in by
    assert decode.next == "", "nothing is written before a pod becomes ready"
    mended = settled(fleet_of())
    assert waits_of(stored(mended), mended.children, mended.time) == ()


def test_what_the_plan_would_do_next_is_said_before_the_operator_did_it() -> None:
    cluster = settled(fleet_of())
    cluster.scale("decode", 4)
    (wait,) = waits_of(stored(cluster), cluster.children, cluster.time)
    assert (wait.pool, wait.next.rpartition(" to ")[2]) == ("decode", "4 instances")


def test_a_document_with_mistakes_is_what_a_fleet_waits_for() -> None:
    cluster = settled(fleet_of())
    fleet = stored(cluster)
    fleet["spec"]["pools"][0]["role"] = "Nonsense"
    (wait,) = waits_of(fleet, cluster.children, cluster.time)
    assert wait.what == "waits for a valid document"
    assert any("spec.pools[0].role" in line for line in wait.by)


def waits_in(cluster: test_canary.Cluster) -> dict[str, Wait]:
    """What pools of a fleet with a canary wait for."""
    found = waits_of(cluster.found, cluster.state().own, cluster.now)
    return {one.pool: one for one in found}


def revisions_in(cluster: test_canary.Cluster, pool: str) -> tuple[str, str]:
    """The pool's revision that stays, and the document's."""
    (new,) = [one.revision for one in cluster.state().want.pools if one.name == pool]
    keys = filter(None, map(key_of, cluster.children[DEPLOYMENT].values()))
    (old,) = {revision for name, revision in keys if name == pool} - {new}
    return old, new


def test_while_a_canary_is_held_nothing_is_next_and_what_stays_is_named() -> None:
    cluster = test_canary.begun()
    old, new = revisions_in(cluster, "decode")
    what = f"1 of 1 instances of revision {new} on trial ready; stay: {old} 2/2"
    waits = waits_in(cluster)
    assert waits["decode"] == Wait("decode", what)
    assert {pool: wait.next for pool, wait in waits.items()} == {"prefill": "", "decode": ""}


def test_a_canary_that_no_router_knows_has_no_next_instance() -> None:
    cluster = test_canary.Cluster(test_canary.fleet())
    cluster.settle()
    cluster.edit(test_canary.fleet("image:1"))
    cluster.settle()
    assert [wait.next for wait in waits_in(cluster).values() if wait.next] == []


def test_a_canary_whose_next_step_has_its_instances_takes_none_of_them_back() -> None:
    found = test_canary.fleet()
    for pool in found["spec"]["pools"]:
        pool["replicas"] = 4
    cluster = test_canary.Cluster(found)
    cluster.settle()
    found["spec"]["engine"] = {"image": "image:1"}
    cluster.edit({**found, "metadata": {**found["metadata"], "generation": 2}})
    cluster.settle()
    cluster.say()
    cluster.settle()
    cluster.say(served=100)
    cluster.turn()
    assert cluster.sizes() == test_canary.all_at(4, 2), "the second step wants a half"
    # As the operator writes it while they are not ready.
    cluster.found["status"]["canary"] |= {"step": 1, "weightPercent": 10}
    assert [wait.next for wait in waits_in(cluster).values() if wait.next] == []


def test_after_a_failed_canary_nothing_of_its_revision_is_next() -> None:
    cluster = test_canary.begun()
    cluster.say(served=90, failed=10)
    cluster.settle()
    assert cluster.progressing()[0] == "CanaryFailed"
    assert waits_in(cluster) == {}


def test_a_promoted_canary_is_waited_for_as_any_rollout() -> None:
    cluster = test_canary.begun()
    cluster.say(served=100)
    cluster.settle()
    cluster.say(served=100)
    cluster.settle()
    assert cluster.canary.phase == "Promoting"
    assert [wait.next for wait in waits_in(cluster).values() if wait.next] == []
    cluster.say(name="")
    cluster.settle()
    assert waits_in(cluster) == {}


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_template_with_mistakes_is_what_a_fleet_waits_for_and_nothing_is_next(
    is_seen: bool,
) -> None:
    cluster = test_canary.Cluster(test_canary.fleet())
    cluster.settle()
    found = test_canary.fleet()
    found["metadata"]["generation"] = 2
    found["spec"]["pools"][1] |= {"replicas": 5, "template": {"spec": {"nonsense": 1}}}
    cluster.edit(found)
    if is_seen:
        cluster.settle()
        assert cluster.progressing()[0] == "InvalidTemplate"
    waits = waits_in(cluster)
    assert list(waits) == [""]
    assert waits[""].what == "waits for a valid document"
    assert "spec.pools[1].template.spec.nonsense" in "".join(waits[""].by)


def test_a_pod_of_a_group_that_was_ready_all_the_time_is_not_late() -> None:
    cluster = settled(fleet_of())
    pod = group_pod(0, 1)
    pod["metadata"] |= {"uid": "u", "creationTimestamp": "2026-11-21T08:00:00Z"}
    ready: Obj = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-21T08:01:00Z"}
    pod["status"] = {"phase": "Running", "conditions": [ready]}
    children = Children(leader_worker_sets=(group_set(1),), pods=(pod,))

    def told() -> str:
        return str([wait.by for wait in waits_of(stored(cluster), children, cluster.time)])

    assert "no pod became ready within" not in told()
    ready |= {"status": "False", "lastTransitionTime": "2026-11-21T09:59:00Z"}
    assert "no pod became ready within" not in told(), "it was ready a minute ago"
    ready["lastTransitionTime"] = "2026-11-21T08:01:00Z"
    assert "no pod became ready within 3600 s" in told()


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(told())

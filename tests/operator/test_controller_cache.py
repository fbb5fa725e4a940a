"""What the operator keeps of the API's objects, and which fleets a change concerns."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xpyd_operator.controller.decision.cache import Cache, FleetKey
from xpyd_operator.controller.decision.kinds import (
    DEPLOYMENT,
    FLEET,
    POD,
    POOL,
    SERVICE,
    WATCHED,
    Address,
    Obj,
    address_of,
    kind_of,
    trim,
)
from xpyd_operator.controller.decision.writes import DeleteObject
from xpyd_operator.controller.executor import WriteExecutor

CHAT = FleetKey("ns", "chat")
CODE = FleetKey("ns", "code")


def pod(name: str = "p", *, version: int = 1, fleet: str = "chat", **more: Any) -> Obj:
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": more.pop("uid", f"uid-{name}"),
        "resourceVersion": str(version),
        "labels": {"xpyd.dev/fleet": fleet} if fleet else {},
        **more.pop("metadata", {}),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **more}


def document(name: str = "chat", *, version: int = 1) -> Obj:
    metadata = {"name": name, "namespace": "ns", "uid": f"f-{name}", "resourceVersion": version}
    metadata["resourceVersion"] = str(version)
    return {"apiVersion": FLEET.api_version, "kind": FLEET.name, "metadata": metadata, "spec": {}}


def test_an_object_belongs_to_the_fleet_of_its_label() -> None:
    cache = Cache()
    assert cache.put(POD, pod()) == {CHAT}
    assert cache.children(CHAT)[POD]["p"]["metadata"]["name"] == "p"
    assert cache.document(CHAT) is None
    assert cache.put(FLEET, document()) == {CHAT}
    assert list(cache.documents()) == [CHAT]


def test_what_a_watch_said_is_gone_does_not_come_back_from_an_older_list() -> None:
    cache = Cache()
    cache.put(POD, pod(version=5))
    assert cache.remove(POD, pod(version=9)) == {CHAT}
    leaving = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert cache.put(POD, pod(version=5)) == set()
    assert cache.put(POD, pod(version=6, metadata=leaving)) == set()
    assert not cache.children(CHAT).get(POD)
    assert cache.put(POD, pod(version=10, uid="another")) == {CHAT}
    # What lost its label and has it again is the same object.
    assert cache.remove(POD, pod(version=11, uid="another")) == {CHAT}
    assert cache.put(POD, pod(version=12, uid="another")) == {CHAT}


def test_an_older_version_does_not_undo_the_answer_of_an_own_write() -> None:
    cache = Cache()
    cache.put(POD, pod(version=7, status={"phase": "Running"}))
    assert cache.put(POD, pod(version=6, status={"phase": "Pending"})) == set()
    assert cache.children(CHAT)[POD]["p"]["status"]["phase"] == "Running"


def test_a_version_alone_wakes_nobody() -> None:
    cache = Cache()
    cache.put(POD, pod(version=1, status={"phase": "Running"}))
    assert cache.put(POD, pod(version=2, status={"phase": "Running"})) == set()
    assert cache.put(POD, pod(version=3, status={"phase": "Failed"})) == {CHAT}


def test_an_object_that_changes_hands_wakes_both_fleets() -> None:
    cache = Cache()
    cache.put(POD, pod(version=1))
    assert cache.put(POD, pod(version=2, fleet="code")) == {CHAT, CODE}
    assert POD not in cache.children(CHAT)
    assert cache.put(POD, pod(version=3, fleet="")) == {CODE}
    assert cache.count(POD) == 0


def test_an_object_made_anew_is_not_removed_by_the_end_of_the_one_before() -> None:
    cache = Cache()
    cache.put(POD, pod(version=5, uid="new"))
    assert cache.remove(POD, pod(version=4, uid="old")) == set()
    assert cache.remove(POD, pod(version=6, uid="new")) == {CHAT}
    assert cache.children(CHAT) == {}


def test_what_we_deleted_does_not_come_back_by_a_late_event() -> None:
    cache = Cache()
    cache.put(POD, pod(version=5))
    cache.removed_by_us(POD, "ns", "p", "uid-p")
    assert cache.find(POD, "ns", "p") is None
    assert cache.put(POD, pod(version=6, status={"phase": "Running"})) == set()
    leaving = pod(version=7, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    assert cache.put(POD, leaving) == {CHAT}
    assert cache.remove(POD, leaving) == {CHAT}


def test_a_list_drops_what_went_unheard_and_spares_what_is_younger() -> None:
    cache = Cache()
    cache.put(POD, pod("gone", version=3))
    cache.put(POD, pod("there", version=4))
    cache.put(POD, pod("young", version=11, fleet="code"))
    assert cache.keep_only(POD, None, frozenset({"uid-there"}), 10) == {CHAT}
    assert sorted(cache.children(CHAT)[POD]) == ["there"]
    assert sorted(cache.children(CODE)[POD]) == ["young"]


def test_a_list_of_one_namespace_says_nothing_of_others() -> None:
    cache = Cache()
    cache.put(POD, pod())
    assert cache.keep_only(POD, "elsewhere", frozenset(), sys.maxsize) == set()
    assert cache.keep_only(POD, "ns", frozenset(), sys.maxsize) == {CHAT}


def test_nothing_is_left_of_a_fleet_that_is_gone() -> None:
    cache = Cache()
    cache.put(FLEET, document(version=1))
    cache.put(POD, pod(version=2))
    cache.remove(FLEET, document(version=3))
    cache.remove(POD, pod(version=4))
    assert list(cache.documents()) == []
    assert cache.children(CHAT) == {}


@pytest.mark.parametrize("kind", WATCHED)
def test_paths_lead_back_to_their_kind(kind: Any) -> None:
    assert address_of(kind.path(None)) == Address(kind, None, "")
    assert address_of(kind.path("ns")) == Address(kind, "ns", "")
    assert address_of(kind.path("ns", "a", "status")) == Address(kind, "ns", "a")
    assert kind_of({"apiVersion": kind.api_version, "kind": kind.name}) == kind


@pytest.mark.parametrize(
    "path", ["/", "/api", "/apis/apps/v1", "/api/v1/namespaces", "/apis/x/v1/pods"]
)
def test_other_paths_lead_nowhere(path: str) -> None:
    assert address_of(path) is None


def _heavy_pod(*, ready: bool) -> Obj:
    return pod(
        metadata={"managedFields": [{"manager": "kubelet"}], "generateName": "x-"},
        spec={
            "nodeName": "node-1",
            "volumes": [{"name": "kv", "secret": {"secretName": "chat-kv"}}],
            "containers": [
                {
                    "name": "engine",
                    "image": "i",
                    "env": [{"name": "A"}],
                    "resources": {"limits": {"memory": "1Gi"}, "requests": {"cpu": 1}},
                }
            ],
            "schedulerName": "default-scheduler",
        },
        status={
            "phase": "Running",
            "podIPs": [{"ip": "10.0.0.1"}],
            "conditions": [{"type": "Ready", "status": str(ready), "lastProbeTime": None}],
            "containerStatuses": [
                {"name": "engine", "imageID": "sha256:1", "ready": ready, "state": {"running": {}}}
            ],
        },
    )


def test_of_a_pod_that_serves_only_that_is_kept() -> None:
    kept = trim(POD, _heavy_pod(ready=True))
    assert kept["spec"] == {"nodeName": "node-1"}
    assert kept["status"] == {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    assert sorted(kept["metadata"]) == ["labels", "name", "namespace", "resourceVersion", "uid"]


def test_of_a_pod_that_does_not_serve_what_it_waits_for_is_kept() -> None:
    kept = trim(POD, _heavy_pod(ready=False))
    assert kept["spec"]["volumes"] == [{"name": "kv", "secret": {"secretName": "chat-kv"}}]
    assert kept["spec"]["containers"] == [
        {"name": "engine", "image": "i", "resources": {"limits": {"memory": "1Gi"}}}
    ]
    assert kept["status"]["containerStatuses"] == [
        {"name": "engine", "ready": False, "state": {"running": {}}}
    ]


def test_equal_words_of_many_pods_are_one_string() -> None:
    first, second = (trim(POD, _heavy_pod(ready=True)) for _ in range(2))
    labels = first["metadata"]["labels"], second["metadata"]["labels"]
    assert labels[0]["xpyd.dev/fleet"] is labels[1]["xpyd.dev/fleet"]


def test_other_objects_are_kept_whole_but_for_who_wrote_what() -> None:
    service = {
        "metadata": {
            "name": "s",
            "managedFields": [{}],
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "a": "b"},
        },
        "spec": {"clusterIP": "None"},
    }
    assert trim(SERVICE, service) == {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s", "annotations": {"a": "b"}},
        "spec": {"clusterIP": "None"},
    }
    assert {DEPLOYMENT.base, POOL.base} == {"/apis/apps/v1", "/apis/xpyd.dev/v1alpha1"}


def test_what_the_executor_deletes_is_gone_before_the_watch_says_so() -> None:
    cache, deleted = Cache(), []
    cache.put(POD, pod())

    async def delete(*what: Any, **preconditions: Any) -> None:
        deleted.append((*what, preconditions))

    write = DeleteObject(POD, "p", "uid-p", "1")
    executor = WriteExecutor(cast("Any", SimpleNamespace(delete=delete)), cache)
    outcome = asyncio.run(executor.execute(CHAT, cast("Any", None), [(write,)]))
    assert outcome.done == [write]
    assert deleted == [(POD, "ns", "p", {"uid": "uid-p", "resource_version": "1"})]
    assert cache.find(POD, "ns", "p") is None

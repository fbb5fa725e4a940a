"""The pre-delete hook's command: every fleet goes, its pods are waited for, and time ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from xpyd_operator.kube.errors import Conflict, Forbidden, KubeError, NotFound, Unavailable
from xpyd_operator.kube.kinds import FLEET, FLEET_LABEL, Kind, Obj
from xpyd_operator.kube.uninstall import (
    Clock,
    FleetsElsewhere,
    Leftovers,
    delete_fleets,
    main,
    refuse_fleets_elsewhere,
)

Step = Callable[["Cluster"], None]


@dataclass
class Cluster:
    """Fleets and pods, and an operator that does `steps[t]` at t seconds."""

    fleets: dict[tuple[str, str], Obj] = field(default_factory=dict)
    pods: dict[tuple[str, str], Obj] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    error: KubeError | None = None
    deleted: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    time_s: float = 0.0

    def add(self, fleet: str, *pods: str) -> None:
        namespace, name = fleet.split("/")
        meta = {"namespace": namespace, "name": name, "uid": f"uid-{fleet}"}
        self.fleets[namespace, name] = {"metadata": meta}
        for pod in pods:
            self.pods[namespace, pod] = {"metadata": {"namespace": namespace, "name": pod}}

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> Obj:
        if self.error is not None:
            raise self.error
        assert selector == ("" if kind is FLEET else FLEET_LABEL)
        objects = self.fleets if kind is FLEET else self.pods
        return {"items": [o for (ns, _), o in objects.items() if namespace in (None, ns)]}

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        assert kind is FLEET
        if uid != f"uid-{namespace}/{name}":
            raise Conflict("another object by now", status=409)
        self.fleets[namespace, name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.deleted.append(f"{namespace}/{name}")

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        before, self.time_s = self.time_s, self.time_s + seconds
        for at in [at for at in sorted(self.steps) if before < at <= self.time_s]:
            self.steps[at](self)

    def uninstall(self, *namespaces: str, timeout_s: float = 60.0) -> None:
        clock = Clock(now=lambda: self.time_s, sleep=self.sleep)
        coroutine = delete_fleets(
            self, namespaces, timeout_s=timeout_s, say=self.said.append, clock=clock
        )
        asyncio.run(coroutine)


def _gone(*fleets: str) -> Step:
    def step(cluster: Cluster) -> None:
        for fleet in fleets:
            namespace, _, name = fleet.partition("/")
            del cluster.fleets[namespace, name]

    return step


def _no_pods(cluster: Cluster) -> None:
    cluster.pods.clear()


def test_without_fleets_there_is_nothing_to_wait_for() -> None:
    cluster = Cluster()
    cluster.uninstall()
    assert cluster.said == ["no fleet is left"]
    assert cluster.time_s == 0


def test_every_fleet_is_deleted_once_and_waited_for() -> None:
    cluster = Cluster(steps={7: _gone("a/chat", "b/code")})
    cluster.add("a/chat")
    cluster.add("b/code")
    cluster.uninstall()
    assert cluster.deleted == ["a/chat", "b/code"]
    assert cluster.time_s == 7
    assert cluster.said[-1] == "no fleet is left"


def test_pods_that_finish_their_requests_are_waited_for() -> None:
    cluster = Cluster(steps={3: _gone("a/chat"), 20: _no_pods})
    cluster.add("a/chat", "chat-decode-1")
    cluster.uninstall()
    assert cluster.time_s == 20
    assert "waiting: 1 pods (a/chat-decode-1)" in cluster.said


def test_only_the_served_namespaces_are_emptied() -> None:
    cluster = Cluster(steps={1: _gone("a/chat")})
    cluster.add("a/chat")
    cluster.add("b/code", "code-decode-1")
    cluster.uninstall("a")
    assert cluster.deleted == ["a/chat"]


def test_a_fleet_that_is_made_meanwhile_goes_as_well() -> None:
    steps: dict[int, Step] = {2: lambda c: c.add("a/late"), 5: _gone("a/chat", "a/late")}
    cluster = Cluster(steps=steps)
    cluster.add("a/chat")
    cluster.uninstall()
    assert cluster.deleted == ["a/chat", "a/late"]


def test_a_fleet_that_was_replaced_under_its_name_is_looked_at_again() -> None:
    def replace(cluster: Cluster) -> None:
        cluster.fleets["a", "chat"]["metadata"]["uid"] = "uid-a/chat"

    cluster = Cluster(steps={2: replace, 4: _gone("a/chat")})
    cluster.add("a/chat")
    cluster.fleets["a", "chat"]["metadata"]["uid"] = "an older one"
    cluster.uninstall()
    assert cluster.deleted == ["a/chat"]


def test_the_end_of_time_says_what_is_left_and_what_to_do() -> None:
    cluster = Cluster()
    cluster.add("a/chat", *(f"chat-decode-{n}" for n in range(7)))
    conditions = [
        {"type": "Progressing", "status": "True", "message": "2 of 3 decode pods drain"},
        {"type": "Ready", "status": "False", "message": "not this"},
    ]
    cluster.fleets["a", "chat"]["status"] = {"conditions": conditions}
    with pytest.raises(Leftovers) as left:
        cluster.uninstall(timeout_s=30)
    assert cluster.time_s == 30
    text = str(left.value)
    assert text.startswith("after 30 s there are still 1 fleets (a/chat); 7 pods (a/chat-decode-0,")
    assert "and 2 more" in text
    assert "fleet a/chat: 2 of 3 decode pods drain\n" in text
    assert "not this" not in text
    assert "run `helm uninstall` again" in text


def test_progress_is_told_without_a_line_for_each_look() -> None:
    cluster = Cluster(steps={59: _gone("a/chat")})
    cluster.add("a/chat")
    cluster.uninstall()
    assert len([line for line in cluster.said if line.startswith("waiting")]) == 4


def test_without_the_crd_there_is_no_fleet() -> None:
    cluster = Cluster(error=NotFound("the server could not find the requested resource"))
    cluster.uninstall()
    assert cluster.said == ["no fleet is left"]


def test_a_server_that_does_not_answer_is_asked_again() -> None:
    def answer(cluster: Cluster) -> None:
        cluster.error = None

    cluster = Cluster(error=Unavailable("no answer"), steps={5: answer, 9: _gone("a/chat")})
    cluster.add("a/chat")
    cluster.uninstall()
    assert cluster.deleted == ["a/chat"]


def test_a_server_that_never_answers_is_named() -> None:
    with pytest.raises(Leftovers, match=r"there are still no answer from the API server"):
        Cluster(error=Unavailable("no answer from the API server")).uninstall()


def test_what_no_retry_mends_ends_it_at_once() -> None:
    cluster = Cluster(error=Forbidden("cannot list inferencefleets", status=403))
    with pytest.raises(Forbidden):
        cluster.uninstall()
    assert cluster.time_s == 0


def test_crds_do_not_go_while_others_have_fleets() -> None:
    cluster = Cluster()
    cluster.add("a/chat")
    asyncio.run(refuse_fleets_elsewhere(cluster, ["a"]))
    cluster.add("b/code")
    with pytest.raises(FleetsElsewhere, match=r"^1 fleets \(b/code\) are not in"):
        asyncio.run(refuse_fleets_elsewhere(cluster, ["a"]))
    assert not cluster.deleted


def test_outside_a_cluster_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Sequence[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none")
    assert main([]) == 2
    assert "no access to Kubernetes" in capsys.readouterr().err

"""The pre-delete hook's command: every fleet goes, its pods are waited for, and time ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from xpyd_operator.controller.decision.errors import (
    Conflict,
    Forbidden,
    KubeError,
    NotFound,
    Unavailable,
)
from xpyd_operator.controller.decision.kinds import (
    FLEET,
    FLEET_LABEL,
    POD,
    SECRET,
    SERVICE,
    Kind,
    Obj,
)
from xpyd_operator.controller.uninstall import (
    OWNED,
    Clock,
    FleetsElsewhere,
    Leftovers,
    Uninstall,
    main,
)
from xpyd_operator.manifests.names import kv_secret_name

KEY = kv_secret_name("chat", "uid-a/chat")
Step = Callable[["Cluster"], None]


@dataclass
class Cluster:
    """Fleets and what they own, and an operator that does `steps[t]` at t seconds."""

    fleets: dict[tuple[str, str], Obj] = field(default_factory=dict)
    owned: dict[tuple[Kind, str, str], Obj] = field(default_factory=dict)
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
            self.own(fleet, POD, pod)

    def own(self, fleet: str, kind: Kind, name: str) -> None:
        namespace, owner = fleet.split("/")
        of_fleet = {"kind": FLEET.name, "apiVersion": FLEET.api_version, "name": owner}
        meta = {
            "namespace": namespace,
            "name": name,
            "labels": {FLEET_LABEL: owner},
            "ownerReferences": [{**of_fleet, "uid": f"uid-{fleet}"}] if kind != POD else [],
        }
        self.owned[kind, namespace, name] = {"metadata": meta}

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> Obj:
        if self.error is not None:
            raise self.error
        assert kind != SECRET
        assert selector == ("" if kind is FLEET else FLEET_LABEL)
        found = [(ns, o) for (ns, _), o in self.fleets.items()]
        if kind is not FLEET:
            found = [(ns, o) for (k, ns, _), o in self.owned.items() if k is kind]
        return {"items": [o for ns, o in found if namespace in (None, ns)]}

    async def create(self, obj: Obj, *, dry_run: bool = False) -> Obj:
        assert dry_run
        meta = obj["metadata"]
        if (SECRET, meta["namespace"], meta["name"]) in self.owned:
            raise Conflict("it exists", status=409)
        return obj

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

    def uninstall(self, *namespaces: str, timeout_s: float = 60.0, release: str = "") -> None:
        asyncio.run(self.command(*namespaces, release=release).run(timeout_s))

    def command(self, *namespaces: str, release: str = "") -> Uninstall:
        clock = Clock(now=lambda: self.time_s, sleep=self.sleep)
        return Uninstall(self, namespaces, say=self.said.append, clock=clock, release=release)

    def mark(self, fleet: str, release: str) -> None:
        namespace, name = fleet.split("/")
        metadata = self.fleets[namespace, name]["metadata"]
        metadata["annotations"] = {"xpyd.dev/operator": release}


def _gone(*fleets: str) -> Step:
    def step(cluster: Cluster) -> None:
        for fleet in fleets:
            namespace, _, name = fleet.partition("/")
            del cluster.fleets[namespace, name]

    return step


def _collect(*kinds: Kind) -> Step:
    """Kubernetes deletes what was owned."""

    def step(cluster: Cluster) -> None:
        for key in [key for key in cluster.owned if key[0] in kinds]:
            del cluster.owned[key]

    return step


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
    cluster = Cluster(steps={3: _gone("a/chat"), 20: _collect(POD)})
    cluster.add("a/chat", "chat-decode-1")
    cluster.uninstall()
    assert cluster.time_s == 20
    assert "waiting: 1 fleets (a/chat)" in cluster.said
    assert "waiting: 1 pods (a/chat-decode-1)" in cluster.said


@pytest.mark.parametrize("kind", [*OWNED, SECRET], ids=lambda kind: kind.plural)
def test_whatever_a_fleet_owned_is_waited_for(kind: Kind) -> None:
    cluster = Cluster(steps={3: _gone("a/chat"), 9: _collect(kind)})
    cluster.add("a/chat")
    cluster.own("a/chat", kind, KEY)
    cluster.uninstall()
    assert cluster.time_s == 9


def test_the_key_of_a_fleet_that_was_deleted_before_is_waited_for() -> None:
    cluster = Cluster(steps={4: _collect(SERVICE), 6: _collect(SECRET)})
    cluster.own("a/chat", SERVICE, "chat-router")
    cluster.own("a/chat", SECRET, KEY)
    cluster.uninstall()
    assert cluster.time_s == 6


def test_a_namespace_in_which_nothing_can_be_made_holds_no_key() -> None:
    class Terminating(Cluster):
        async def create(self, obj: Obj, *, dry_run: bool = False) -> Obj:
            raise Forbidden("the namespace is being terminated", status=403)

    cluster = Terminating(steps={2: _gone("a/chat")})
    cluster.add("a/chat")
    cluster.uninstall()
    assert cluster.said[-1] == "no fleet is left"


def test_only_the_served_namespaces_are_emptied() -> None:
    cluster = Cluster(steps={1: _gone("a/chat")})
    cluster.add("a/chat")
    cluster.add("b/code", "code-decode-1")
    cluster.uninstall("a")
    assert cluster.deleted == ["a/chat"]


def test_fleets_of_another_release_stay_with_what_they_own() -> None:
    cluster = Cluster(steps={1: _gone("a/chat", "a/new")})
    for name in ("a/chat", "a/new"):
        cluster.add(name)
    cluster.add("a/theirs", "theirs-decode-1")
    cluster.mark("a/chat", "ns/mine")
    cluster.mark("a/theirs", "ns/other")
    cluster.uninstall(release="ns/mine")
    assert sorted(cluster.deleted) == ["a/chat", "a/new"]
    assert cluster.said[-1] == "no fleet is left"


def test_crds_that_go_are_refused_while_another_release_has_fleets() -> None:
    cluster = Cluster()
    cluster.add("a/chat")
    cluster.mark("a/chat", "ns/other")
    with pytest.raises(FleetsElsewhere, match=r"1 fleets \(a/chat\).* another release's"):
        asyncio.run(cluster.command(release="ns/mine").refuse_fleets_elsewhere())
    cluster.mark("a/chat", "ns/mine")
    asyncio.run(cluster.command(release="ns/mine").refuse_fleets_elsewhere())


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
    cluster.add("a/chat")
    conditions = [
        {"type": "Progressing", "status": "True", "message": "2 of 3 decode pods drain"},
        {"type": "Ready", "status": "False", "message": "not this"},
    ]
    cluster.fleets["a", "chat"]["status"] = {"conditions": conditions}
    with pytest.raises(Leftovers) as left:
        cluster.uninstall(timeout_s=30)
    assert cluster.time_s == 30
    text = str(left.value)
    assert text.startswith("after 30 s there are still 1 fleets (a/chat)\n")
    assert "fleet a/chat: 2 of 3 decode pods drain\n" in text
    assert "not this" not in text
    assert "run `helm uninstall` again" in text


def test_the_end_of_time_names_what_was_owned_but_not_all_of_it() -> None:
    cluster = Cluster(steps={1: _gone("a/chat")})
    cluster.add("a/chat", *(f"chat-decode-{n}" for n in range(7)))
    cluster.own("a/chat", SERVICE, "chat-router")
    with pytest.raises(Leftovers) as left:
        cluster.uninstall(timeout_s=30)
    text = str(left.value)
    assert text.startswith("after 30 s there are still 7 pods (a/chat-decode-0, ")
    assert "a/chat-decode-4 and 2 more); 1 services (a/chat-router)\n" in text
    assert "the operator takes a fleet down" not in text


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
    asyncio.run(cluster.command("a").refuse_fleets_elsewhere())
    cluster.add("b/code")
    with pytest.raises(FleetsElsewhere, match=r"^1 fleets \(b/code\) are not in"):
        asyncio.run(cluster.command("a").refuse_fleets_elsewhere())
    assert not cluster.deleted


def test_outside_a_cluster_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Sequence[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none")
    assert main([]) == 2
    assert "no access to Kubernetes" in capsys.readouterr().err

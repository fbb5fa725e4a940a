"""`kubectl xpyd status|why|drain`, with a kubectl that answers from a list."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.operator.observed_cluster import Cluster, settled
from tests.operator.test_kubectl_pages import stored
from tests.operator.test_status_conditions import Obj, fleet_of
from xpyd_core import cli
from xpyd_operator.cluster import command as cluster_command
from xpyd_operator.cluster import drain as drain_command
from xpyd_operator.cluster.command import kubectl_main

_PROGRAM = f"""#!{sys.executable}
import json, re, sys
from pathlib import Path
here, words = Path(__file__).parent, " ".join(sys.argv[1:])
with (here / "said").open("a") as said:
    said.write(words + "\\n")
stdin = "" if sys.stdin.isatty() or " -f -" not in words else sys.stdin.read()
if stdin:
    (here / "stdin").write_text(stdin)
answers = json.loads((here / "answers").read_text())
for pattern, found in answers:
    if re.search(pattern, words):
        out, err, code = found[0]
        if len(found) > 1:
            del found[0]
            (here / "answers").write_text(json.dumps(answers))
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.exit(code)
sys.exit("no answer for " + words)
"""


class Kubectl:
    """What the fake kubectl answers, in order, and what it was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._answers: list[tuple[str, list[tuple[str, str, int]]]] = []
        program = folder / "kubectl"
        program.write_text(_PROGRAM)
        program.chmod(0o755)

    def answers(self, pattern: str, *found: Any, err: str = "") -> None:
        """For words that match; the last one stays. Those that are added last come first."""
        rows = [
            (one if isinstance(one, str) else json.dumps(one), err, int(bool(err))) for one in found
        ]
        self._answers.insert(0, (pattern, rows))
        (self.folder / "answers").write_text(json.dumps(self._answers))

    @property
    def said(self) -> list[str]:
        return (self.folder / "said").read_text().splitlines()

    def said_like(self, pattern: str) -> list[str]:
        return [line for line in self.said if re.search(pattern, line)]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(cluster_command, "LOOK_S", 0.01)
    monkeypatch.setattr(drain_command, "LOOK_S", 0.01)
    return Kubectl(tmp_path)


def xpyd(*words: str) -> int:
    """As `kubectl xpyd` has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["kubectl-xpyd", *words])
        return kubectl_main()


def listed(*items: Any) -> Obj:
    return {"kind": "List", "items": list(items)}


def has_fleet(kubectl: Kubectl, cluster: Cluster) -> None:
    kubectl.answers("get pods", listed(*cluster.pods.values()))
    kubectl.answers("get inferencefleet.xpyd.dev/chat", stored(cluster))
    kubectl.answers("get inferencefleet.xpyd.dev ", listed(stored(cluster)))


def test_status_shows_one_fleet_or_all_of_a_namespace(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    has_fleet(kubectl, settled(fleet_of()))
    assert xpyd("status", "chat", "-n", "team") == 0
    assert "fleet team/chat  Ready=True" in capsys.readouterr().out
    assert kubectl.said == [
        "--namespace=team get inferencefleet.xpyd.dev/chat --output=json",
        "--namespace=team get pods --selector=xpyd.dev/fleet=chat --output=json",
    ]
    assert xpyd("status", "-A", "-o", "json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["fleet"], found["ready"]) == ("chat", "True")
    assert kubectl.said[-1] == "get pods --selector=xpyd.dev/fleet --all-namespaces --output=json"
    kubectl.answers("get inferencefleet.xpyd.dev ", listed())
    assert xpyd("status") == 0
    assert capsys.readouterr().out == "no fleet in kubectl's namespace\n"


def test_watch_shows_a_page_again_when_it_changed_and_ends_with_the_clusters_answer(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = settled(fleet_of())
    has_fleet(kubectl, cluster)
    first, later = stored(cluster), stored(cluster)
    later["status"] = {**later["status"], "endpoint": "http://other"}
    kubectl.answers("get inferencefleet.xpyd.dev/chat", first, later, "{")
    assert xpyd("status", "chat", "--watch") == 2
    assert "http://other" in capsys.readouterr().out


def test_xpyd_status_is_the_clusters_where_a_namespace_is_named(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_fleet(kubectl, settled(fleet_of()))
    assert cli.main(["status", "chat", "--namespace", "team"]) == 0
    assert "fleet team/chat" in capsys.readouterr().out
    monkeypatch.setenv("XDG_STATE_HOME", str(kubectl.folder / "state"))
    before = len(kubectl.said)
    assert cli.main(["status", "no-such-fleet"]) == 2
    assert "no-such-fleet" in capsys.readouterr().err
    assert len(kubectl.said) == before, "kubectl was not asked"


def test_why_reads_events_and_objects_and_writes_nothing(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = settled(fleet_of())
    has_fleet(kubectl, cluster)
    kubectl.answers("get deployments", listed(*cluster.children.deployments))
    kubectl.answers("get inferencefleetpool", listed(*cluster.children.pools))
    about = {"name": "chat", "uid": "f1"}
    told = {"reason": "Ready", "message": "all is well", "involvedObject": about}
    kubectl.answers("get events", listed(told))
    no_kind = 'error: the server doesn\'t have a resource type "leaderworkersets"'
    kubectl.answers("get leaderworkersets", "", err=no_kind)
    assert xpyd("why", "chat", "-n", "team") == 0
    shown = capsys.readouterr().out
    assert "Ready: all is well" in shown
    assert "now  Complete: every pool is as wanted" in shown
    assert all(" get " in line for line in kubectl.said)
    kubectl.answers("get leaderworkersets", "", err="Error: forbidden")
    assert xpyd("why", "chat") == 2
    assert "forbidden" in capsys.readouterr().err


POD = "chat-decode-45d575f7-5d9c7b8f4d-decode1"


def instances(state: str, in_flight: int, leases: int) -> Obj:
    """What a router says."""
    load = {"running": in_flight, "kv_leases": leases}
    row = {"instance": POD, "state": state, "in_flight": in_flight, "load": load}
    other = {"instance": "another", "state": "Ready", "in_flight": 9}
    return {"instances": [row, other]}


GONE = ""


def has_instance(
    kubectl: Kubectl, *looks: Any, log: str = "", said: list[Any] | None = None
) -> Obj:
    """`looks`: at the pod while it leaves; `said`: by its two routers at each look."""
    cluster = settled(fleet_of())
    (pod,) = [one for one in cluster.pods_of("decode") if one["metadata"]["name"] == POD]
    routers = listed(*cluster.pods_of("router"))
    kubectl.answers("get pods .*role=router", routers)
    kubectl.answers("get inferencefleet.xpyd.dev/chat", stored(cluster))
    kubectl.answers(f"get pod/{POD}", pod, *(looks or (pod, GONE)))
    kubectl.answers("logs pod/", log)
    kubectl.answers("create --raw", {"status": "Success"})
    if said is None:
        kubectl.answers("proxy/instances", "", err="Error: forbidden")
    else:
        kubectl.answers("proxy/instances", *said)
    return pod


DRAINED = "2026-01-01T00:00:00.000+00:00 INFO    xpyd_worker.main: drained\n"
CUT = (
    "2026-01-01T00:00:00.000+00:00 WARNING xpyd_worker.main: --drain-timeout: 2 requests and KV of"
    " 1 prompts are cut\n"
)


def test_drain_evicts_the_pod_and_waits_until_its_log_proves_that_nothing_was_lost(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    ready, leaving = instances("Ready", 3, 2), instances("Draining", 1, 0)
    pod = has_instance(kubectl, log=DRAINED, said=[ready, leaving])
    assert xpyd("drain", POD, "-n", "team", "--wait") == 0
    shown = capsys.readouterr()
    assert f"{POD}: Drained: its log says so" in shown.out
    assert "pool decode has 2 of 2 instances ready" in shown.out
    assert "1 of 2 routers pick it no more; 4 requests, 2 KV leases left" in shown.err
    asked = json.loads((kubectl.folder / "stdin").read_text())
    assert asked["kind"] == "Eviction"
    assert asked["deleteOptions"]["preconditions"] == {"uid": pod["metadata"]["uid"]}
    assert kubectl.said_like(f"create --raw=/api/v1/namespaces/team/pods/{POD}/eviction")
    assert not kubectl.said_like("delete|scale|annotate")


ENDS: list[tuple[str, list[Any] | None, int, str]] = [
    (CUT + DRAINED, None, 1, "Cut: its drain timeout came: 2 requests and KV of 1 prompts are"),
    ("", None, 1, "Unproven: at the last look no router says what it has"),
    ("", [instances("Draining", 0, 0)], 0, "Drained: at the last look 2 of 2 routers pick it"),
    ("", [instances("Draining", 0, 1)], 1, "Unproven: at the last look 2 of 2 routers"),
    ("", [instances("Ready", 0, 0)], 1, "Unproven: at the last look 0 of 2 routers"),
    ("", [{"instances": []}], 1, "Unproven: at the last look none of 2 routers knows it"),
]


@pytest.mark.parametrize(("log", "said", "code", "words"), ENDS)
def test_the_exit_status_of_a_drain_says_whether_something_was_lost(
    kubectl: Kubectl,
    capsys: pytest.CaptureFixture[str],
    log: str,
    said: list[Any] | None,
    code: int,
    words: str,
) -> None:
    has_instance(kubectl, log=log, said=said)
    assert xpyd("drain", POD, "--wait") == code
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(("left", "code", "outcome"), [(0, 0, "Drained"), (20, 1, "Unproven")])
def test_an_instance_that_is_gone_has_what_routers_said_of_it_last(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], left: int, code: int, outcome: str
) -> None:
    """Routers forget one that is killed, too: that they do not know it is no proof."""
    known = instances("Draining", left, 0)
    pod = has_instance(kubectl, said=[known, known, {"instances": []}])
    kubectl.answers(f"get pod/{POD}", pod, pod, pod, GONE)
    assert xpyd("drain", POD, "--wait") == code
    said = f"{outcome}: at the last look 2 of 2 routers pick it no more; {2 * left} requests"
    assert said in capsys.readouterr().out


def test_a_drain_that_takes_longer_than_its_timeout_says_what_is_left(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = has_instance(kubectl, said=[instances("Draining", 1, 0)])
    kubectl.answers(f"get pod/{POD}", pod)
    assert xpyd("drain", POD, "--wait", "--timeout", "0", "-o", "json") == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["outcome"], found["requests"], found["acknowledged"]) == ("Draining", 2, 2)
    assert xpyd("drain", POD) == 0, "without --wait it is begun"
    assert "Begun: it drains" in capsys.readouterr().out


def test_a_budget_refuses_a_drain_until_it_allows_one_or_force_is_used(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    has_instance(kubectl, log=DRAINED)
    refused = (
        "Error from server (TooManyRequests): Cannot evict pod as it would violate the pod's"
        " disruption budget."
    )
    kubectl.answers("create --raw", "", err=refused)
    assert xpyd("drain", POD) == 4
    assert "Refused: a PodDisruptionBudget lets no more instance" in capsys.readouterr().out
    kubectl.answers("delete pod/", "")
    assert xpyd("drain", POD, "--force", "--wait") == 0
    assert kubectl.said_like(f"delete pod/{POD} --wait=false")
    kubectl.answers("create --raw", "", err="Error from server (Forbidden): no")
    assert xpyd("drain", POD) == 2


def test_without_a_replacement_the_pool_gets_smaller_by_that_instance(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = has_instance(kubectl, log=DRAINED)
    going = {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    kubectl.answers(f"get pod/{POD}", pod, pod, going, GONE)
    kubectl.answers("get inferencefleetpool.xpyd.dev/chat-decode", {"spec": {"replicas": 2}})
    kubectl.answers("annotate|scale", "")
    assert xpyd("drain", POD, "--no-replace", "--wait") == 0
    (cost,) = kubectl.said_like("annotate")
    assert f"pod/{POD} controller.kubernetes.io/pod-deletion-cost=-" in cost
    (scale,) = kubectl.said_like(" ?scale ")
    assert scale.startswith("scale inferencefleetpool.xpyd.dev/chat-decode")
    assert scale.endswith("--current-replicas=2 --replicas=1")
    assert "Drained" in capsys.readouterr().out
    cluster = settled(fleet_of())
    cluster.scale("decode", 5)
    cluster.turn()
    kubectl.answers("get inferencefleet.xpyd.dev/chat", stored(cluster))
    kubectl.answers(f"get pod/{POD}", pod)
    assert xpyd("drain", POD, "--no-replace") == 2
    assert "--no-replace: the fleet is Progressing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({}, "is of no fleet"),
        (
            {"xpyd.dev/fleet": "chat", "xpyd.dev/pool": "router", "xpyd.dev/role": "router"},
            "router",
        ),
        (
            {
                "xpyd.dev/fleet": "chat",
                "xpyd.dev/pool": "decode",
                "leaderworkerset.sigs.k8s.io/group-index": "0",
            },
            "one of an instance of several pods",
        ),
    ],
)
def test_a_pod_that_is_no_instance_by_itself_is_refused(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], labels: Obj, words: str
) -> None:
    kubectl.answers("get pod/p-0", {"metadata": {"name": "p-0", "labels": labels}})
    assert xpyd("drain", "p-0") == 2
    assert words in capsys.readouterr().err
    assert len(kubectl.said) == 1


def test_kubectl_xpyd_has_its_verbs_and_no_local_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        xpyd("up")
    assert "invalid choice: 'up'" in capsys.readouterr().err
    for verb in ("status", "why", "drain", "trace", "rollout"):
        with pytest.raises(SystemExit):
            xpyd(verb, "--help")
        assert "examples:" in capsys.readouterr().out

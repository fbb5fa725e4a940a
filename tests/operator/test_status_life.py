"""A fleet's life as people see it: conditions and Events, step by step, against a golden text.

`python -m tests.operator.test_status_life` writes the text as it is today; read its `git diff`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.operator.observed_cluster import Cluster
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import load_fleet, parse_fleet
from xpyd_operator.document.status import FleetStatus
from xpyd_operator.status.events import events
from xpyd_operator.status.problems import Problem

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "testdata" / "status" / "life.txt"
NO_GPU = (
    "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint "
    "{node-role.kubernetes.io/control-plane: }. preemption: 0/2 nodes are available: 1 No "
    "preemption victims found for incoming pod, 1 Preemption is not helpful for scheduling."
)
NOT_FOUND = (
    'Back-off pulling image "xpyd-worker:1": ErrImagePull: rpc error: code = NotFound desc = '
    'failed to pull and unpack image "docker.io/library/xpyd-worker:1": failed to resolve '
    'reference "docker.io/library/xpyd-worker:1": docker.io/library/xpyd-worker:1: not found'
)
LOG = """2026-11-21T10:05:00.001+00:00 INFO    xpyd_worker: loading /models/demo-model
xpyd worker: --max-model-len: 4096 is more than the model's 1024
"""


def example() -> InferenceFleet:
    return load_fleet(ROOT / "examples" / "fleet.yaml")


def edited(**changes: Any) -> InferenceFleet:
    """The example with other members of its spec."""
    document = example().model_dump(by_alias=True, exclude_unset=True)
    document["spec"] |= changes
    return parse_fleet(json.dumps(document).encode(), source="edited")


class Story:
    """Runs turns and writes down what changed in each."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lines: list[str] = []
        self._said: dict[str, str] = {}

    def tell(self, title: str) -> None:
        found = self.cluster.turn()
        status = self.cluster.status
        assert status is not None
        assert FleetStatus.model_validate(status, strict=False)
        assert not events(status, status), "a status that did not change is no event"
        self.lines.append(f"\n{self.cluster.now:%H:%M:%S} {title}: {_summary(status)}")
        for item in status["conditions"]:
            kind = item["type"]
            line = f"{item['status']:<5} {item['reason']}: {item['message']}"
            if self._said.get(kind) != line:
                self._said[kind] = line
                self.lines.append(f"  {kind:<17} {line}")
        self.lines += [f"  {e.type} event {e.reason}: {e.message}" for e in found]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).lstrip() + "\n"


def _summary(status: dict[str, Any]) -> str:
    summary = status["summary"]
    draining = sum(pool["drainingReplicas"] for pool in status["pools"])
    return f"P {summary['prefill']}, D {summary['decode']}, {draining} draining"


def _begin(cluster: Cluster, story: Story) -> None:
    story.tell("created")
    cluster.wait(1)
    cluster.bind(cluster.pods.values())
    cluster.bind(cluster.pods_of("decode"), sandbox=True)
    story.tell("scheduled")
    cluster.wait(40)
    cluster.waiting(cluster.pods_of("decode"), "ImagePullBackOff", NOT_FOUND)
    story.tell("no such image")
    cluster.wait(20)
    cluster.running(cluster.pods_of("decode"), ready=False)
    cluster.running(cluster.pods_of("prefill"), ready=False)
    cluster.running(cluster.pods_of("router"), ready=False)
    story.tell("the image came")
    cluster.wait(10)
    cluster.running(cluster.pods_of("prefill"), ready=True)
    cluster.running(cluster.pods_of("decode")[:1], ready=True)
    story.tell("one pair loaded")
    cluster.wait(1)
    cluster.running(cluster.pods_of("router"), ready=True)
    story.tell("routers see it")
    cluster.wait(1)
    cluster.running(cluster.pods_of("decode"), ready=True)
    story.tell("all loaded")


def _scale(cluster: Cluster, story: Story) -> None:
    cluster.wait(60)
    cluster.scale("decode", 4)
    story.tell("scaled up")
    cluster.wait(1)
    new = [p for p in cluster.pods_of("decode") if "nodeName" not in p["spec"]]
    cluster.running(new[:1], ready=False)
    cluster.unschedulable(new[1:], NO_GPU)
    story.tell("room for one")
    cluster.wait(30)
    cluster.running(new[:1], ready=True)
    story.tell("that one loaded")
    cluster.scale("decode", 1)
    story.tell("scaled down")
    cluster.wait(30)
    cluster.end_leaving()
    story.tell("drained")


def _trouble(cluster: Cluster, story: Story) -> None:
    cluster.wait(60)
    pod = cluster.living("decode")[0]
    cluster.delete(pod)
    story.tell("a pod was deleted")
    cluster.wait(2)
    cluster.end_leaving()
    new = cluster.living("decode")
    cluster.crashed(new, log=LOG, code=2)
    story.tell("its successor crashes")
    cluster.wait(40)
    cluster.running(new, ready=False)
    story.tell("it runs again")
    cluster.crashed(new, log="Killed", code=137, reason="OOMKilled", restarts=4)
    story.tell("out of memory")
    cluster.wait(60)
    cluster.running(new, ready=True)
    story.tell("it recovered")


def _roll(cluster: Cluster, story: Story) -> None:
    cluster.wait(60)
    cluster.edit(edited(engine={"args": ["--dtype=float32", "--max-model-len=512"]}))
    for step in range(1, 9):
        story.tell(f"new arguments, step {step}")
        if cluster.status and cluster.status["conditions"][2]["reason"] == "Settled":
            break
        cluster.wait(10)
        cluster.end_leaving()
        waiting = [p for p in cluster.pods.values() if "nodeName" not in p["spec"]]
        cluster.running(waiting, ready=True)


def _end(cluster: Cluster, story: Story) -> None:
    cluster.wait(60)
    cluster.others = (
        Problem("Degraded", "NameConflict", "", "Service chat-router belongs to somebody else"),
    )
    story.tell("a name is taken")
    cluster.others = ()
    story.tell("it is free")
    cluster.stopping = True
    story.tell("deleted")
    cluster.wait(20)
    cluster.end_leaving()
    story.tell("routers are gone")
    cluster.wait(6)
    cluster.end_leaving()
    story.tell("all is gone")


def story_text() -> str:
    cluster = Cluster(example())
    story = Story(cluster)
    for part in (_begin, _scale, _trouble, _roll, _end):
        part(cluster, story)
    return story.text


def test_a_fleets_life_is_told_as_in_the_golden_text() -> None:
    assert story_text() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(story_text())

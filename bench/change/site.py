"""The fleet that is changed, and what is around it: a chart's operator, images under two names.

2P2D of the demo model behind two routers, in a cluster with one real node. Each change toggles
something (`Site.toggle`), so that it can be made again and again.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.fleetkit import (
    IMAGE_VALUES,
    ROOT,
    SYSTEM,
    FleetClient,
    Obj,
    fleet_document,
    install_chart,
    load_images,
    start_client,
)
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.images.build import IMAGES

NAMESPACE = "change"
WANTED = {"prefill": 2, "decode": 2, "router": 2}
SETTLED_S = 240.0
_NEXT = "next"
_OPERATOR = "app.kubernetes.io/component=operator"


def base_document() -> Obj:
    """The fleet before any change."""
    document = fleet_document(prefill=WANTED["prefill"], decode=WANTED["decode"])
    document["spec"]["pools"][0]["scaling"] = {"maxReplicas": 8}
    document["spec"]["engine"]["image"] = IMAGES["worker"]
    document["spec"]["router"] = {"replicas": WANTED["router"]}
    return document


class Site:
    """A fleet that is ready, and the chart that serves it."""

    def __init__(self, fleet: FleetClient, folder: Path) -> None:
        self.fleet = fleet
        self.document = base_document()
        self.wanted = dict(WANTED)
        self._folder = folder
        self._toggled: set[str] = set()
        self._values = {
            f"images.{name}.tag": "test" for name in ("operator", "router", "worker")
        } | {"version": "0.1.0"}

    def toggle(self, what: str) -> bool:
        """Whether `what` is the other way now: True, False, True, ..."""
        self._toggled ^= {what}
        return what in self._toggled

    def other_image(self) -> str:
        """The same worker's image by the name that the fleet does not have now."""
        now = self.document["spec"]["engine"]["image"]
        return IMAGES["worker"] if now != IMAGES["worker"] else renamed(now)

    def apply(self, change: Callable[[Obj], None]) -> None:
        """Change the document for good, and apply it."""
        change(self.document["spec"])
        self.fleet.apply(self.document)

    def apply_once(self, change: Callable[[Obj], None]) -> None:
        """Apply a document that is not to stay."""
        document = copy.deepcopy(self.document)
        change(document["spec"])
        self.fleet.apply(document)

    def settle(self, what: str) -> None:
        """Wait until the fleet is as its document and pools say, and nothing leaves any more."""
        wait_for(self._is_settled, SETTLED_S, what, interval_s=0.3, explain=self.fleet.explain)

    def _is_settled(self) -> bool:
        document = self.fleet.document()
        generation, status = document["metadata"]["generation"], document["status"]
        ready = self.fleet.condition("Ready")
        if status.get("observedGeneration") != generation or ready.get("status") != "True":
            return False
        if ready.get("observedGeneration", generation) != generation:
            return False
        pods = self.fleet.find("pods", labels=f"xpyd.dev/fleet={self.fleet.name}")
        counts = dict.fromkeys(self.wanted, 0)
        for pod in pods:
            if "deletionTimestamp" in pod["metadata"] or not is_ready(pod):
                return False
            counts[pod["metadata"]["labels"]["xpyd.dev/pool"]] += 1
        return counts == self.wanted

    def upgrade(self, **values: str) -> None:
        """`helm upgrade` with the images' tags and the chart's version in `values` from now on."""
        for name, value in values.items():
            self._values["version" if name == "version" else f"images.{name}.tag"] = value
        sets = {name: value for name, _, value in (one.partition("=") for one in IMAGE_VALUES)}
        sets |= self._values
        chart = self._chart(sets.pop("version"))
        settings = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
        argv = ("upgrade", "xpyd", str(chart), "-n", SYSTEM, *settings, "--wait", "--timeout=2m")
        self.fleet.cluster.helm(*argv, timeout_s=150)

    def _chart(self, version: str) -> Path:
        """The tree's chart as of another version, whose CRDs differ a little."""
        chart = ROOT / "helm/xpyd"
        if version == "0.1.0":
            return chart
        other = self._folder / f"chart-{version}"
        if not other.exists():
            shutil.copytree(chart, other)
            text = (other / "Chart.yaml").read_text()
            (other / "Chart.yaml").write_text(text.replace("version: 0.1.0", f"version: {version}"))
            for file in (other / "files/crds").glob("*.yaml"):
                crd = yaml.safe_load(file.read_text())
                crd["spec"]["versions"][0]["additionalPrinterColumns"].pop()
                file.write_text(yaml.safe_dump(crd))
        return other

    def operator_pods(self) -> list[str]:
        """Names."""
        pods = self.fleet.cluster.get(
            f"/api/v1/namespaces/{SYSTEM}/pods?labelSelector={_OPERATOR.replace('=', '%3D')}"
        ) or {"items": []}
        return [
            pod["metadata"]["name"]
            for pod in pods["items"]
            if "deletionTimestamp" not in pod["metadata"]
        ]

    def kill_operator(self) -> None:
        """SIGKILL at once."""
        argv = ("-n", SYSTEM, "delete", "pod", "-l", _OPERATOR, "--grace-period=0", "--force")
        self.fleet.cluster.kubectl(*argv)

    def leader(self) -> str:
        """Who reconciles the fleet; empty: nobody."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases"
        leases = (self.fleet.cluster.get(path) or {"items": []})["items"]
        return next((one["spec"].get("holderIdentity") or "" for one in leases), "")

    def wait_leader(self, before: str) -> None:
        """Until another operator than `before` leads."""

        def is_other() -> bool:
            return self.leader() not in ("", before)

        wait_for(is_other, 90, "another operator leads", interval_s=0.3, explain=self.explain)

    def explain(self) -> str:
        """Of the operator's namespace and the fleet's."""
        return self.fleet.cluster.explain(SYSTEM) + self.fleet.explain()


def renamed(image: str) -> str:
    """The image's other name."""
    return f"{image.rpartition(':')[0]}:{_NEXT}"


def is_ready(pod: Obj) -> bool:
    """Whether the pod's condition says so."""
    conditions: list[dict[str, Any]] = pod.get("status", {}).get("conditions", [])
    return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)


@contextmanager
def site(cluster: Cluster, folder: Path) -> Generator[Site]:
    """The chart, the fleet and a client's pod; gone afterwards."""
    load_images(cluster)
    for name in ("operator", "router", "worker"):
        cluster.tag_image(IMAGES[name], renamed(IMAGES[name]))
    cluster.kubectl("create", "namespace", NAMESPACE)
    start_client(cluster, NAMESPACE)
    install_chart(cluster)
    try:
        made = Site(FleetClient(cluster, NAMESPACE), folder)
        made.fleet.apply(made.document)
        made.fleet.wait_ready()
        made.settle("the fleet is ready")
        made.fleet.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=30s")
        yield made
    finally:
        cluster.helm("uninstall", "xpyd", "-n", SYSTEM, "--wait", "--timeout=4m", timeout_s=250)
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")

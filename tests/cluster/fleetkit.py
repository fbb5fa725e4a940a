"""xpyd on a real node: the images loaded, the chart installed, fleets applied, clients asking.

What the tests of whole fleets share. A fleet's document is the one that people get, but for what
the test node needs: the pools' template that mounts the machine's Python libraries.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.harness import Cluster, wait_for
from tests.cluster.images.build import IMAGES, default_cache, ensure_images, worker_test_template
from tests.e2e.oracle import Case, make_cases

ROOT = Path(__file__).parents[2]
SYSTEM = "xpyd-system"
DEMO_MODEL = ROOT / "examples/demo-model"
_LOAD_CLIENT = Path(__file__).with_name("load_client.py").read_text()
IMAGE_VALUES = (
    "images.registry=localhost",
    "images.operator.tag=test",
    "images.router.tag=test",
    "images.worker.tag=test",
    "imagePullPolicy=Never",
)


@dataclass
class Timeline:
    """What took how long."""

    started: float = field(default_factory=time.monotonic)
    rows: list[tuple[str, float]] = field(default_factory=list)

    def mark(self, what: str) -> float:
        """Note that `what` is done now; seconds since the start."""
        at_s = time.monotonic() - self.started
        self.rows.append((what, at_s))
        return at_s

    def lines(self) -> list[str]:
        """For people: when, how long after the line above, what."""
        times = [0.0, *(at_s for _, at_s in self.rows)]
        return [
            f"{at_s:7.1f} s  (+{at_s - before:.1f})  {what}"
            for before, (what, at_s) in zip(times, self.rows, strict=False)
        ]


def values_text() -> str:
    """IMAGE_VALUES as a values file."""
    values: dict[str, Any] = {}
    for setting in IMAGE_VALUES:
        path, _, value = setting.partition("=")
        *above, last = path.split(".")
        place = values
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return yaml.safe_dump(values)


def load_images(cluster: Cluster) -> None:
    """Put the tests' images on the node."""
    for archive in sorted(set(ensure_images(default_cache()).values())):
        cluster.load_image(archive)


def install_chart(cluster: Cluster, *values: str) -> None:
    """`helm install xpyd helm/xpyd`, with the test images."""
    settings = [part for value in (*IMAGE_VALUES, *values) for part in ("--set", value)]
    chart = str(ROOT / "helm/xpyd")
    place = ("-n", SYSTEM, "--create-namespace")
    cluster.helm("install", "xpyd", chart, *place, *settings, "--wait", "--timeout=90s")


def apply_crds(cluster: Cluster) -> None:
    """The CRDs without the chart; served when this returns."""
    folder = str(ROOT / "crds")
    cluster.kubectl("apply", "-f", folder)

    def established() -> bool:
        # kubectl wait ends at once while a new CRD has no conditions at all.
        argv = ("wait", "--for=condition=Established", "-f", folder, "--timeout=20s")
        return cluster.kubectl(*argv, check=False).count("condition met") == 2

    wait_for(established, 40, "the CRDs are served")


def fleet_document(file: str = "examples/fleet.yaml", **changes: Any) -> dict[str, Any]:
    """The fleet in `file` with the test node's template; `changes`: replicas of pools by name."""
    document: dict[str, Any] = yaml.safe_load((ROOT / file).read_text())
    for pool in document["spec"]["pools"]:
        pool["template"] = worker_test_template()
        pool["replicas"] = changes.pop(pool["name"], pool.get("replicas", 1))
    assert not changes, f"no such pools: {changes}"
    return document


def start_client(cluster: Cluster, namespace: str) -> None:
    """A pod `client` from which load_client.py runs; returns at once."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "client"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "client",
                    "image": IMAGES["client"],
                    "imagePullPolicy": "Never",
                    "command": ["python3", "-c", "import time; time.sleep(1e6)"],
                }
            ],
        },
    }
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(pod))


@dataclass(frozen=True)
class FleetOnNode:
    """One fleet in one namespace."""

    cluster: Cluster
    namespace: str
    name: str

    def kubectl(self, *argv: str, **options: Any) -> str:
        """kubectl in the fleet's namespace."""
        return self.cluster.kubectl("-n", self.namespace, *argv, **options)

    def get(self, *argv: str) -> dict[str, Any]:
        """`kubectl get ... -o json`."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *argv, "-o", "json"))
        return found

    def apply(self, document: dict[str, Any]) -> None:
        """kubectl apply."""
        self.kubectl("apply", "-f", "-", input=json.dumps(document))

    def wait_ready(self, timeout_s: int = 120) -> None:
        """kubectl wait --for=condition=Ready, as the docs say; the fleet's own words if not."""
        target = f"fleet/{self.name}"
        argv = ("wait", "--for=condition=Ready", target, f"--timeout={timeout_s}s")
        said = self.kubectl(*argv, check=False, timeout_s=timeout_s + 10)
        assert "condition met" in said, f"{said}\n{self.cluster.explain(self.namespace)}"

    def scale(self, pool: str, replicas: int) -> None:
        """kubectl scale fleetpool/NAME-POOL."""
        self.kubectl("scale", f"fleetpool/{self.name}-{pool}", f"--replicas={replicas}")

    def pods(self, pool: str) -> list[dict[str, Any]]:
        """The pool's pods that nobody deletes."""
        labels = f"xpyd.dev/fleet={self.name},xpyd.dev/pool={pool}"
        pods: list[dict[str, Any]] = self.get("pods", "-l", labels)["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def wait_pool(self, pool: str, ready: int, timeout_s: float = 90) -> None:
        """Until the pool object says that exactly `ready` instances are ready and none leaves."""

        def settled() -> bool:
            status = self.get("fleetpool", f"{self.name}-{pool}").get("status", {})
            draining = status.get("drainingReplicas", 0)
            return (status.get("readyReplicas", 0), draining) == (ready, 0)

        what = f"pool {pool} has {ready} ready instances and none that leaves"
        wait_for(settled, timeout_s, what, interval_s=0.5, explain=self.explain)

    def explain(self) -> str:
        """What a person would look at."""
        return self.cluster.explain(self.namespace)

    def load(self, cases: Sequence[Case], *, requests: int, concurrency: int) -> dict[str, Any]:
        """Requests through the Service from the client pod; what load_client.py reports."""
        process = self.start_load(cases, requests=requests, concurrency=concurrency)
        return finish_load(process, timeout_s=300)

    def start_load(self, cases: Sequence[Case], *, requests: int, concurrency: int) -> Any:
        """As `load`, in the background; finish_load() takes the result."""
        url = f"http://{self.name}-router.{self.namespace}.svc:10001"
        from tests.cluster.harness.tools import kubectl_binary

        script = ["python3", "-c", _LOAD_CLIENT, url, str(requests), str(concurrency)]
        argv = [kubectl_binary(), "-n", self.namespace, "exec", "-i", "client", "--", *script]
        process = self.cluster.popen(argv, stdin=-1, stdout=-1, stderr=-1, text=True)
        process.stdin.write(json.dumps([{"prompt": c.prompt, "ids": c.ids} for c in cases]))
        process.stdin.close()
        process.stdin = None
        return process

    def prompt_tokens_computed(self, pool: str) -> dict[str, float]:
        """Prompt tokens that entered a forward pass, by pod of the pool."""
        return {
            pod["metadata"]["name"]: self.metric(pod, "xpyd_engine_prompt_tokens_computed_total")
            for pod in self.pods(pool)
        }

    def metric(self, pod: dict[str, Any], name: str) -> float:
        """A counter or gauge of an engine, read from the client pod."""
        url = f"http://{pod['status']['podIP']}:20001/metrics"
        code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=10).read().decode())"
        text = self.kubectl("exec", "client", "--", "python3", "-c", code)
        values = [line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")]
        assert values, f"{name} is not in {url}"
        return float(values[0])


def finish_load(process: Any, *, timeout_s: float) -> dict[str, Any]:
    """Wait for a load and take its report."""
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, f"{out}\n{err}"
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def small_cases(count: int = 12) -> list[Case]:
    """Prompts with the tokens that transformers answers."""
    return make_cases(DEMO_MODEL, count=count)

"""Fleets in a cluster: how tests install, apply, read and ask them.

A document for the real node is the one that people get, but for what the test node needs: the
pools' template that mounts the machine's Python libraries. Waits read the API by `find` and
FleetClient: an answer costs milliseconds, a start of kubectl a tenth of a second of CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from tests.cluster.harness import Cluster, ClusterError, wait_for
from tests.cluster.harness.kwok import NODE_SELECTOR, TOLERATIONS
from tests.cluster.harness.tools import kubectl_binary
from tests.cluster.images.build import IMAGES, default_cache, ensure_images, worker_test_template
from tests.cluster.operator_process import OperatorProcess, running_operator
from tests.e2e.oracle import Case, make_cases
from tests.operator.fleets import document, prefill_and_decode
from xpyd_operator.controller.decision.kinds import EVENT, FLEET, POOL, SECRET, WATCHED, Kind

ROOT = Path(__file__).parents[2]
CRDS = str(ROOT / "crds")
SYSTEM = "xpyd-system"
READY_S = 120
GONE_S = 90
FAKE_NODES = {"spec": {"nodeSelector": NODE_SELECTOR, "tolerations": TOLERATIONS}}
"""A pool's template, for pods that are ready at once and do nothing."""
_REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets")
_OF_A_FLEET = (
    "inferencefleetpools,deployments,services,serviceaccounts,secrets,configmaps,"
    "poddisruptionbudgets,networkpolicies,pods"
)
_KINDS = {kind.plural: kind for kind in (*WATCHED, SECRET, EVENT, _REPLICA_SET)}
Obj = dict[str, Any]
DEMO_MODEL = ROOT / "examples/demo-model"
LOAD_PER_S = 5.0
"""Requests that start each second, whatever becomes of them: half of what 1P1D serves on the
smallest machine, so that what waited while it could not serve is made up soon."""
_LOAD_CLIENT = Path(__file__).with_name("load_client.py").read_text()
_BEGIN_LOAD = """
cat > /tmp/load-cases
rm -f /tmp/load-end && mkfifo /tmp/load-end
{ { cat /tmp/load-cases /tmp/load-end; } | python3 -c "$0" "$@"; } > /tmp/load 2>&1 < /dev/null &
"""
"""Ends when somebody has opened and closed /tmp/load-end."""
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


@contextmanager
def installed_chart(cluster: Cluster) -> Iterator[None]:
    """The images on the node and the chart installed; uninstalled afterwards."""
    load_images(cluster)
    install_chart(cluster)
    yield
    cluster.helm("uninstall", "xpyd", "-n", SYSTEM, "--wait", "--timeout=4m", timeout_s=250)


@contextmanager
def charted_client(cluster: Cluster, namespace: str) -> Iterator[FleetClient]:
    """The chart, whose operator reaches the routers, and a client's pod in a new namespace, ready;
    its fleets and all else of it are deleted afterwards."""
    with installed_chart(cluster):
        cluster.kubectl("create", "namespace", namespace)
        start_client(cluster, namespace)
        found = FleetClient(cluster, namespace)
        found.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=30s")
        yield found
        delete_fleets(cluster, namespace)
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@contextmanager
def installed_crds(cluster: Cluster) -> Iterator[None]:
    """The CRDs without the chart, served when this begins; deleted afterwards."""
    cluster.kubectl("apply", "-f", CRDS)
    wait_for_crds(cluster)
    yield
    try:
        cluster.kubectl("delete", "-f", CRDS, "--timeout=60s", timeout_s=70)
    except ClusterError:
        # A fleet that a failed test left holds them; the next test makes its own.
        free_fleets(cluster)
        raise


def free_fleets(cluster: Cluster) -> None:
    """Delete what fleets there are, though no operator takes part."""
    listed = cluster.kubectl("get", "fleets", "-A", "-o", "json", check=False)
    for fleet in json.loads(listed)["items"] if listed.startswith("{") else []:
        place = ("-n", fleet["metadata"]["namespace"])
        name = f"fleet/{fleet['metadata']['name']}"
        free = json.dumps({"metadata": {"finalizers": None}})
        cluster.kubectl(*place, "patch", name, "--type=merge", "-p", free, check=False)
        cluster.kubectl(*place, "delete", name, "--ignore-not-found", check=False)


def wait_for_crds(cluster: Cluster) -> None:
    """Return when the API server serves fleets: about a second after it has taken the CRDs."""

    def served() -> bool:
        # Discovery has a new kind before or after its objects are served, which is 429 at first.
        try:
            known = cluster.get(f"/apis/{FLEET.api_version}") or {"resources": []}
            names = {resource["name"] for resource in known["resources"]}
            return all(k.plural in names and cluster.get(k.path(None)) for k in (FLEET, POOL))
        except OSError:
            return False

    wait_for(served, 40, "the CRDs are served")


@contextmanager
def operated(
    cluster: Cluster, namespace: str, *, worker: str = "", router: str = ""
) -> Iterator[OperatorProcess]:
    """An operator of the namespace alone; the fleets are deleted before it ends. `worker`,
    `router`: images that the node has."""
    images = [f"--worker-image={worker}", f"--router-image={router}", "--image-pull-policy=Never"]
    with running_operator(cluster, namespace, flags=images if worker else ()) as operator:
        yield operator
        delete_fleets(cluster, namespace)


@contextmanager
def fleet_of_images(cluster: Cluster, namespace: str) -> Iterator[FleetClient]:
    """A fleet `chat` to be applied, with the tests' images and a client's pod; no chart."""
    load_images(cluster)
    with installed_crds(cluster):
        cluster.kubectl("create", "namespace", namespace)
        start_client(cluster, namespace)
        with operated(cluster, namespace, worker=IMAGES["worker"], router=IMAGES["router"]):
            yield FleetClient(cluster, namespace)
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


def delete_fleets(cluster: Cluster, namespace: str) -> None:
    """`kubectl delete fleets --all`; they are gone when this returns."""
    argv = ("delete", "inferencefleets", "--all", f"--timeout={GONE_S}s")
    cluster.kubectl("-n", namespace, *argv, timeout_s=GONE_S + 10)


def find(
    cluster: Cluster, namespace: str, kinds: str, *, labels: str = "", fields: str = ""
) -> list[Obj]:
    """The namespace's objects of these kinds ("pods,services"), chosen by selectors."""
    query = urlencode({"labelSelector": labels, "fieldSelector": fields})
    found: list[Obj] = []
    for kind in (_KINDS[name] for name in kinds.split(",")):
        listed = cluster.get(f"{kind.path(namespace)}?{query}") or {"items": []}
        # Items of a list do not name their kind.
        named = {"apiVersion": kind.api_version, "kind": kind.name}
        found += [{**named, **item} for item in listed["items"]]
    return found


def fake_fleet(name: str = "chat", *, prefill: int = 1, decode: int = 1, **spec: Any) -> Obj:
    """P and D on fake nodes."""
    pools = prefill_and_decode(prefill=prefill, decode=decode, template=FAKE_NODES)
    pools[1]["scaling"] = {"maxReplicas": 8}
    base = {"model": {"uri": "file://./demo-model"}, "router": {"template": FAKE_NODES}}
    return document(name, **{**base, "pools": pools, **spec})


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
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(client_pod()))


def client_pod() -> Obj:
    """What start_client() makes."""
    return {
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


@dataclass(frozen=True)
class FleetClient:
    """One fleet in one namespace, as kubectl and readers of the API see it."""

    cluster: Cluster
    namespace: str
    name: str = "chat"
    url: str = ""
    """Where the client's pod reaches it; empty: the routers' Service, by HTTP."""
    key_file: str = ""
    """Where that pod has the client key; empty: it needs none."""

    def kubectl(self, *argv: str, **options: Any) -> str:
        """kubectl in the fleet's namespace."""
        return self.cluster.kubectl("-n", self.namespace, *argv, **options)

    def find(self, kinds: str, *, labels: str = "", fields: str = "") -> list[Obj]:
        """Objects of the namespace, see find()."""
        return find(self.cluster, self.namespace, kinds, labels=labels, fields=fields)

    def read(self, kind: str, name: str) -> Obj:
        """One object of the namespace; it must exist."""
        found = self.cluster.get(_KINDS[kind].path(self.namespace, name))
        assert found is not None, f"there is no {name} among the {kind} of {self.namespace}"
        return found

    def document(self) -> Obj:
        """The fleet's object as it is stored."""
        return self.read("inferencefleets", self.name)

    def condition(self, kind: str) -> Obj:
        """The fleet's condition of this type; empty before it has one."""
        conditions = self.document().get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == kind), {})

    def pool(self, name: str) -> Obj:
        """A pool's object."""
        return self.read("inferencefleetpools", f"{self.name}-{name}")

    def events(self) -> list[Obj]:
        """The Events about the fleet."""
        return self.find("events", fields=f"involvedObject.name={self.name}")

    def apply(self, document: Obj) -> None:
        """kubectl apply."""
        self.kubectl("apply", "-f", "-", input=json.dumps(document))

    def wait_ready(self, timeout_s: int = READY_S) -> None:
        """kubectl wait --for=condition=Ready, as the docs say; the fleet's own words if not."""
        target = f"fleet/{self.name}"
        argv = ("wait", "--for=condition=Ready", target, f"--timeout={timeout_s}s")
        said = self.kubectl(*argv, check=False, timeout_s=timeout_s + 10)
        assert "condition met" in said, f"{said}\n{self.cluster.explain(self.namespace)}"

    def scale(self, pool: str, replicas: int) -> None:
        """kubectl scale fleetpool/NAME-POOL."""
        self.kubectl("scale", f"fleetpool/{self.name}-{pool}", f"--replicas={replicas}")

    def rollout(self, *words: str, program: str = "xpyd", code: int = 0) -> str:
        """What `xpyd rollout` prints."""
        return self.xpyd("rollout", *words, program=program, code=code)

    def xpyd(self, *words: str, program: str = "kubectl-xpyd", code: int = 0) -> str:
        """What the command prints."""
        environment = self.cluster.client_environment()
        argv = [str(Path(sys.executable).with_name(program)), *words, "-n", self.namespace]
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == code, f"{done.stdout}{done.stderr}"
        return done.stdout

    def identities(self) -> dict[str, tuple[str, int]]:
        """Uid and generation of the fleet and all that it has."""
        found = self.find(_OF_A_FLEET, labels=f"xpyd.dev/fleet={self.name}")
        return {
            f"{one['kind']}/{one['metadata']['name']}": (
                one["metadata"]["uid"],
                one["metadata"].get("generation", 0),
            )
            for one in [*found, self.document()]
        }

    def pods(self, pool: str) -> list[Obj]:
        """The pool's pods that are not being deleted."""
        found = self.find("pods", labels=f"xpyd.dev/fleet={self.name},xpyd.dev/pool={pool}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    @contextmanager
    def copied_pod(self, pool: str, key: str) -> Iterator[str]:
        """A pod beside the pool's, as one of them, with a KV key of its own; its name. Pods of the
        fleet follow their key: so a ReplicaSet makes it that is named as theirs are."""
        pod = self.pods(pool)[0]
        labels, spec = pod["metadata"]["labels"], pod["spec"]
        del labels["pod-template-hash"], spec["nodeName"]
        (volume,) = [one for one in spec["volumes"] if one["name"] == "xpyd-kv"]
        volume.pop("projected")
        volume["secret"] = {"secretName": "other"}
        name = f"{pod['metadata']['name'].rsplit('-', 2)[0]}-copy"
        copy = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": {"copy": "1"}},
                "template": {"metadata": {"labels": labels | {"copy": "1"}}, "spec": spec},
            },
        }
        other = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "other"}}
        for made in (other | {"stringData": {"key": key}}, copy):
            self.kubectl("apply", "-f", "-", input=json.dumps(made))
        try:
            found = wait_for(lambda: self.find("pods", labels="copy=1"), 30, "there is a copy")
            yield found[0]["metadata"]["name"]
        finally:
            gone = ("--timeout=60s", f"replicaset/{name}", "secret/other")
            self.kubectl("delete", *gone, timeout_s=70)
            gone = ("--timeout=60s", "--for=delete", "pod", "-l", "copy=1")
            self.kubectl("wait", *gone, timeout_s=70)

    def wait_pool(self, pool: str, ready: int, timeout_s: float = 90) -> None:
        """Until the pool object says that exactly `ready` instances are ready and none leaves."""

        def settled() -> bool:
            status = self.pool(pool).get("status", {})
            draining = status.get("drainingReplicas", 0)
            return (status.get("readyReplicas", 0), draining) == (ready, 0)

        what = f"pool {pool} has {ready} ready instances and none that leaves"
        wait_for(settled, timeout_s, what, explain=self.explain)

    def explain(self) -> str:
        """What a person would look at."""
        return self.cluster.explain(self.namespace)

    def load(
        self, cases: Sequence[Case], *, requests: int, rate: float = LOAD_PER_S
    ) -> dict[str, Any]:
        """So many requests through the Service from the client pod, `rate` of them each second;
        what load_client.py reports."""
        return finish_load(self.start_load(cases, requests=requests, rate=rate))

    def start_load(
        self, cases: Sequence[Case], *, requests: int = 0, rate: float = LOAD_PER_S
    ) -> Any:
        """As `load`, in the background, from now on; requests 0: until finish_load(), which takes
        the result."""
        script = ["python3", "-c", _LOAD_CLIENT, *self._load_argv(rate, requests)]
        argv = [kubectl_binary(), "-n", self.namespace, "exec", "-i", "client", "--", *script]
        process = self.cluster.popen(argv, stdin=-1, stdout=-1, stderr=-1, text=True)
        process.stdin.write(f"{_asked(cases)}\n")
        process.stdin.flush()
        if process.stdout.readline() != "begun\n":
            raise AssertionError(f"the load does not begin: {process.communicate(timeout=30)}")
        return process

    @contextmanager
    def under_load(self, cases: Sequence[Case], *, rate: float) -> Iterator[Obj]:
        """As `start_load`, for minutes, which `kubectl exec` does not hold out on a busy machine:
        the load is the pod's own. The report is in what is yielded, from the end on."""
        shell = ("exec", "-i", "client", "--", "sh", "-c")
        argv = (*shell, _BEGIN_LOAD, _LOAD_CLIENT, *self._load_argv(rate, 0))
        self.kubectl(*argv, input=f"{_asked(cases)}\n")
        report: Obj = {}
        try:
            yield report
        finally:
            self.kubectl(*shell, ": > /tmp/load-end")

        def said() -> Obj | None:
            last = self.kubectl(*shell, "tail -n 1 /tmp/load").strip()
            return json.loads(last) if last.startswith("{") else None

        report |= wait_for(said, 300, "the load's report", interval_s=1.0, explain=self.explain)

    def requests_over(self) -> list[tuple[float, float, str]]:
        """Of the load of under_load(), up to now: when a request began and ended, by time.time(),
        and as what it is counted; empty: it was answered."""
        lines = self.kubectl("exec", "client", "--", "cat", "/tmp/load").splitlines()
        return [(one[0], one[1], one[2]) for one in map(json.loads, lines[1:]) if type(one) is list]

    def _load_argv(self, rate: float, requests: int) -> list[str]:
        url = self.url or f"http://{self.name}-router.{self.namespace}.svc:10001"
        return [url, str(rate), str(requests), *([self.key_file] if self.key_file else [])]

    def prompt_tokens_computed(self, pool: str) -> dict[str, float]:
        """Prompt tokens that entered a forward pass, by pod of the pool."""
        return {
            pod["metadata"]["name"]: self.metric(pod, "xpyd_engine_prompt_tokens_computed_total")
            for pod in self.pods(pool)
        }

    def metric(self, pod: dict[str, Any], name: str, *, absent: float | None = None) -> float:
        """A counter or gauge of an engine, the sum of its samples, read from the client pod.
        `absent`: what it is without one."""
        url = f"http://{pod['status']['podIP']}:20001/metrics"
        code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=10).read().decode())"
        text = self.kubectl("exec", "client", "--", "python3", "-c", code)
        samples = (f"{name} ", f"{name}{{")
        values = [line.split()[-1] for line in text.splitlines() if line.startswith(samples)]
        assert values or absent is not None, f"{name} is not in {url}"
        return sum(map(float, values)) if values else absent or 0.0


def _asked(cases: Sequence[Case]) -> str:
    """What load_client.py reads."""
    return json.dumps(
        [
            {"messages": [{"role": "user", "content": case.message}], "ids": case.ids}
            if case.message
            else {"prompt": case.prompt, "ids": case.ids}
            for case in cases
        ]
    )


def finish_load(process: Any, *, timeout_s: float = 300.0) -> dict[str, Any]:
    """End a load, wait for its last answers and take its report."""
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, f"{out}\n{err}"
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


@cache
def small_cases() -> list[Case]:
    """Prompts with the tokens that transformers answers; made once, which takes seconds."""
    return make_cases(DEMO_MODEL, count=12)

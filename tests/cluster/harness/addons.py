"""Software of others that some tests need besides: metrics-server and the LeaderWorkerSet manager.

Both run as programs of the cluster, not as pods, so they need no node and no image, and the API
server reaches them by the node's address.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.cluster.harness import build
from tests.cluster.harness.components import ClusterError
from tests.cluster.harness.inside import NODE_ADDRESS
from tests.cluster.harness.pki import Pair
from tests.cluster.harness.waiting import wait_for

if TYPE_CHECKING:
    from tests.cluster.harness.cluster import Cluster

_READY_DEADLINE_S = 90.0
_METRICS_PORT = 4443
_METRICS_API = "v1beta1.metrics.k8s.io"
_METRICS_OF_NODES = "/apis/metrics.k8s.io/v1beta1/nodes"
_WEBHOOK_PORT = 9443
_LWS_CRD = "leaderworkersets.leaderworkerset.x-k8s.io"


def install_metrics_server(cluster: Cluster) -> None:
    """Have the metrics API: `kubectl top`, and autoscaling by CPU and memory of real pods.

    Its first numbers of a new pod take 15 to 30 s.
    """
    if cluster.components.running("metrics-server"):
        return
    program = build.binary(build.METRICS_SERVER)
    pki = cluster.plane.pki
    kubeconfig = pki.kubeconfig(
        "metrics-server", "metrics-server", server=cluster.api_url, group="system:masters"
    )
    cluster.components.start(
        "metrics-server",
        [
            program,
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--kubelet-certificate-authority={pki.ca.certificate}",
            "--kubelet-preferred-address-types=InternalIP",
            "--kubelet-use-node-status-port",
            # Fake nodes have no kubelet to ask.
            "--node-selector=type!=kwok",
            f"--cert-dir={cluster.run_folder / 'metrics-server'}",
            f"--secure-port={_METRICS_PORT}",
            "--metric-resolution=10s",
            # It must be shorter than the resolution.
            "--kubelet-request-timeout=5s",
        ],
    )
    _apply(cluster, _metrics_service())
    try:
        cluster.components.wait(
            ["metrics-server"],
            lambda: '"cpu"' in cluster.kubectl("get", "--raw", _METRICS_OF_NODES, check=False),
            _READY_DEADLINE_S,
        )
    except ClusterError:
        # While a registered API does not answer, no namespace can be deleted.
        cluster.kubectl("delete", "apiservice", _METRICS_API, "--ignore-not-found")
        raise


def install_lws(cluster: Cluster) -> None:
    """Have LeaderWorkerSets: the API with its webhooks, and the manager."""
    if cluster.components.running("lws"):
        return
    program = build.binary(build.LWS)
    sources = build.module_folder(build.LWS, "sigs.k8s.io/lws")
    pki = cluster.plane.pki
    certificates = cluster.run_folder / "lws-certificates"
    certificates.mkdir(exist_ok=True)
    pair = pki.issue("lws", "lws", addresses=[f"IP:{NODE_ADDRESS}"])
    _publish(pair, certificates)
    config = cluster.run_folder / "lws.json"
    config.write_text(json.dumps(_lws_config(certificates)))
    kubeconfig = pki.kubeconfig("lws", "lws", server=cluster.api_url, group="system:masters")
    crd = sources / "config" / "crd" / "bases" / "leaderworkerset.x-k8s.io_leaderworkersets.yaml"
    cluster.kubectl("apply", "--server-side", "-f", str(crd))
    # kubectl's wait gives up at once on an object without conditions, as a new one is.
    established = ("wait", "--for=condition=Established", f"crd/{_LWS_CRD}", "--timeout=30s")
    wait_for(
        lambda: "condition met" in cluster.kubectl(*established, check=False),
        _READY_DEADLINE_S,
        "the API server has LeaderWorkerSets",
    )
    cluster.components.start("lws", [program, f"--kubeconfig={kubeconfig}", f"--config={config}"])
    _apply(cluster, *_lws_webhooks(sources, pki.ca.certificate))
    cluster.components.wait(
        ["lws"], lambda: "created" in _try_leader_worker_set(cluster), _READY_DEADLINE_S
    )


def uninstall_lws(cluster: Cluster) -> None:
    """Take LeaderWorkerSets away again, those that exist included."""
    cluster.kubectl("delete", "crd", _LWS_CRD, "--ignore-not-found", "--timeout=50s")
    for kind in ("mutating", "validating"):
        cluster.kubectl("delete", f"{kind}webhookconfiguration", "lws", "--ignore-not-found")
    if cluster.components.running("lws"):
        cluster.components.forget("lws")


def _metrics_service() -> dict[str, Any]:
    """The API's registration, and a Service that leads to the program."""
    ports = [{"name": "https", "port": 443, "protocol": "TCP", "targetPort": _METRICS_PORT}]
    metadata = {"name": "metrics-server", "namespace": "kube-system"}
    labels = {"kubernetes.io/service-name": "metrics-server"}
    items = [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": metadata | {"labels": labels},
            "addressType": "IPv4",
            "ports": [{"name": "https", "port": _METRICS_PORT, "protocol": "TCP"}],
            "endpoints": [{"addresses": [NODE_ADDRESS]}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": _METRICS_API},
            "spec": {
                "service": metadata,
                "group": "metrics.k8s.io",
                "version": "v1beta1",
                "insecureSkipTLSVerify": True,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        },
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _lws_config(certificates: Path) -> dict[str, Any]:
    return {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"port": _WEBHOOK_PORT, "certDir": str(certificates)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": "0"},
    }


def _lws_webhooks(sources: Path, ca: Path) -> list[dict[str, Any]]:
    """The module's webhooks, called by address; those for pods only for the manager's own pods."""
    bundle = base64.b64encode(ca.read_bytes()).decode()
    text = (sources / "config" / "webhook" / "manifests.yaml").read_text()
    documents: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    for document in documents:
        document["metadata"]["name"] = "lws"
        for webhook in document["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            webhook["clientConfig"] = {
                "url": f"https://{NODE_ADDRESS}:{_WEBHOOK_PORT}{path}",
                "caBundle": bundle,
            }
            if path.endswith("-pod"):
                key = "leaderworkerset.sigs.k8s.io/name"
                webhook["objectSelector"] = {
                    "matchExpressions": [{"key": key, "operator": "Exists"}]
                }
    return documents


def _try_leader_worker_set(cluster: Cluster) -> str:
    """What the API says to a LeaderWorkerSet that is not made."""
    pod = {"containers": [{"name": "main", "image": "none.invalid/none:1"}]}
    document = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "probe", "namespace": "default"},
        "spec": {"leaderWorkerTemplate": {"size": 2, "workerTemplate": {"spec": pod}}},
    }
    return cluster.kubectl(
        "create", "--dry-run=server", "-f", "-", input=json.dumps(document), check=False
    )


def _publish(pair: Pair, folder: Path) -> None:
    """The names that webhook servers look for."""
    (folder / "tls.crt").write_bytes(pair.certificate.read_bytes())
    (folder / "tls.key").write_bytes(pair.key.read_bytes())


def _apply(cluster: Cluster, *documents: dict[str, Any]) -> None:
    text = "\n---\n".join(json.dumps(document) for document in documents)
    cluster.kubectl("apply", "-f", "-", input=text)

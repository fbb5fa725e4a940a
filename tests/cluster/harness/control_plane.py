"""The control plane's programs: their flags, certificates and start, in order.

Everything listens inside the cluster's network namespace. The API server's port is the one that
`forward.py` listens on outside, so one kubeconfig works on both sides.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.cluster.harness import build
from tests.cluster.harness.api_reader import ApiReader
from tests.cluster.harness.components import Components
from tests.cluster.harness.inside import NODE_ADDRESS
from tests.cluster.harness.pki import Pki

SERVICE_NETWORK = "10.96.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"
DNS_ADDRESS = "10.96.0.10"
POD_NETWORK = "10.244.0.0/16"
ETCD_URL = "http://127.0.0.1:2379"

_READY_DEADLINE_S = 90.0
"""Three seconds are usual; two cores may be busy with a build."""
# The controllers' own clients must not be what a benchmark of the operator measures.
_CLIENT_LIMITS = ("--kube-api-qps=1000", "--kube-api-burst=2000")

_QUIET_USERS = [
    "system:apiserver",
    "system:kube-controller-manager",
    "system:kube-scheduler",
    "system:kube-proxy",
    "kwok",
]
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    # A call is one line, when its answer is complete: a watch counts when it ends.
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [
        {"level": "None", "users": _QUIET_USERS},
        {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
        {"level": "None", "nonResourceURLs": ["/readyz*", "/livez*", "/healthz*", "/openapi*"]},
        {"level": "Metadata"},
    ],
}


@dataclass(frozen=True)
class ControlPlane:
    """A control plane's files."""

    folder: Path
    pki: Pki
    api_port: int
    kubeconfig: Path
    """Of the administrator."""

    @property
    def api_url(self) -> str:
        """Where the API server answers, inside and outside of the cluster's network."""
        return f"https://127.0.0.1:{self.api_port}"

    def administrator(self) -> ssl.SSLContext:
        """TLS to the API server as the administrator."""
        folder = self.pki.folder
        context = ssl.create_default_context(cafile=str(self.pki.ca.certificate))
        # The authority is this harness's own openssl call, without what strict checks want.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.load_cert_chain(folder / "admin.crt", folder / "admin.key")
        return context

    def reader(self) -> ApiReader:
        """Reads the API as the administrator."""
        return ApiReader(self.api_port, self.administrator())

    @property
    def audit_log(self) -> Path:
        """One JSON object per call (see AUDIT_POLICY)."""
        return self.folder / "audit.log"


def prepare(folder: Path, api_port: int) -> ControlPlane:
    """Make the certificates and files."""
    pki = Pki.create(folder / "pki")
    server = f"https://127.0.0.1:{api_port}"
    admin = pki.kubeconfig("admin", "admin", server=server, group="system:masters")
    pki.kubeconfig("kube-controller-manager", "system:kube-controller-manager", server=server)
    pki.kubeconfig("kube-scheduler", "system:kube-scheduler", server=server)
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    names += ["kubernetes.default.svc.cluster.local", "localhost"]
    addresses = ["127.0.0.1", API_SERVICE_ADDRESS, NODE_ADDRESS]
    pki.issue(
        "apiserver",
        "kube-apiserver",
        addresses=[*(f"DNS:{name}" for name in names), *(f"IP:{a}" for a in addresses)],
    )
    pki.issue("kubelet-client", "kube-apiserver-kubelet-client", group="system:masters")
    pki.issue("front-proxy-client", "front-proxy-client", front_proxy=True)
    (folder / "audit-policy.json").write_text(json.dumps(AUDIT_POLICY))
    return ControlPlane(folder, pki, api_port, admin)


def start(plane: ControlPlane, components: Components, listening: socket.socket) -> None:
    """Start all of it and wait until pods could be made. Raises ClusterError."""
    kube = build.binary(build.KUBE)
    components.start("etcd", [kube, "etcd", f"--data-dir={plane.folder / 'etcd'}"])
    components.start("kube-apiserver", [kube, "kube-apiserver", *_apiserver_flags(plane)])
    forward = Path(__file__).with_name("forward.py")
    components.start(
        "forward",
        [sys.executable, "-I", forward, str(listening.fileno()), "127.0.0.1", str(plane.api_port)],
        pass_fds=(listening.fileno(),),
    )
    reader = plane.reader()
    ready = partial(reader.ok, "/readyz")
    components.wait(["etcd", "kube-apiserver"], ready, _READY_DEADLINE_S)
    components.start(
        "kube-controller-manager", [kube, "kube-controller-manager", *_manager_flags(plane)]
    )
    components.start("kube-scheduler", [kube, "kube-scheduler", *_scheduler_flags(plane)])
    # Pods are refused before their namespace has a service account.
    account = partial(reader.ok, "/api/v1/namespaces/default/serviceaccounts/default")
    components.wait(["kube-controller-manager", "kube-apiserver"], account, _READY_DEADLINE_S)


def _apiserver_flags(plane: ControlPlane) -> list[str]:
    pki = plane.pki.folder
    return [
        f"--etcd-servers={ETCD_URL}",
        f"--secure-port={plane.api_port}",
        "--bind-address=0.0.0.0",
        f"--advertise-address={NODE_ADDRESS}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={plane.pki.ca.certificate}",
        f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={plane.pki.service_accounts.certificate}",
        f"--service-account-signing-key-file={plane.pki.service_accounts.key}",
        f"--requestheader-client-ca-file={plane.pki.front_proxy_ca.certificate}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki / 'front-proxy-client.crt'}",
        f"--proxy-client-key-file={pki / 'front-proxy-client.key'}",
        "--enable-aggregator-routing",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--allow-privileged",
        f"--audit-policy-file={plane.folder / 'audit-policy.json'}",
        f"--audit-log-path={plane.audit_log}",
    ]


def _manager_flags(plane: ControlPlane) -> list[str]:
    pki = plane.pki.folder
    return [
        *_kubeconfig_flags(pki / "kube-controller-manager.kubeconfig"),
        *_CLIENT_LIMITS,
        "--use-service-account-credentials",
        f"--service-account-private-key-file={plane.pki.service_accounts.key}",
        f"--root-ca-file={plane.pki.ca.certificate}",
        f"--cluster-signing-cert-file={plane.pki.ca.certificate}",
        f"--cluster-signing-key-file={plane.pki.ca.key}",
        "--allocate-node-cidrs",
        f"--cluster-cidr={POD_NETWORK}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        # The defaults make an autoscaler wait for minutes before it acts.
        "--horizontal-pod-autoscaler-sync-period=2s",
        "--horizontal-pod-autoscaler-downscale-stabilization=5s",
        "--horizontal-pod-autoscaler-cpu-initialization-period=5s",
        "--horizontal-pod-autoscaler-initial-readiness-delay=1s",
    ]


def _scheduler_flags(plane: ControlPlane) -> list[str]:
    kubeconfig = plane.pki.folder / "kube-scheduler.kubeconfig"
    return [*_kubeconfig_flags(kubeconfig), *_CLIENT_LIMITS]


def _kubeconfig_flags(kubeconfig: Path) -> list[str]:
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
    ]

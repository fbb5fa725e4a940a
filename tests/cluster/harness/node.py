"""The real node: containerd, kubelet, kube-proxy and DNS, in the cluster's namespaces.

Pods are ordinary containers of this machine's kernel. What the node writes lies in the run
folder, its pods' cgroups below one of the cluster's own name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster.harness import build
from tests.cluster.harness.components import ClusterError
from tests.cluster.harness.control_plane import DNS_ADDRESS, POD_NETWORK
from tests.cluster.harness.images import write_image
from tests.cluster.harness.inside import NODE_ADDRESS
from tests.cluster.harness.packages import CNI_PLUGINS, find_program
from tests.cluster.harness.runs import cgroup_controllers
from tests.cluster.harness.waiting import wait_for

if TYPE_CHECKING:
    from tests.cluster.harness.cluster import Cluster

NODE_NAME = "node-1"
PAUSE_IMAGE = "localhost/pause:1"
TEST_IMAGE = "localhost/testpod:1"
"""Runs harness/testpod: a web server, a web client and other stand-ins."""
_READY_DEADLINE_S = 90.0
"""One second is usual; two cores may be busy with a build."""
_IMPORT_TIMEOUT_S = 300.0
_POD_SUBNET = "10.244.0.0/24"
_CPU_SHARES = 4096
"""Of all pods together. The usual 1024 is what one process beside them has: where other tests run,
engines would not get as far as their deadlines ask."""


def start(cluster: Cluster) -> None:
    """Start the node and wait until it takes pods. Raises ClusterError."""
    for controller in cgroup_controllers():
        folder = controller / cluster.cgroup
        folder.mkdir(exist_ok=True)
        shares = folder / "cpu.shares"  # of cgroup v1; v2 weighs only what it is told to
        if shares.exists():
            shares.write_text(str(_CPU_SHARES))
    _start_containerd(cluster)
    _load_own_images(cluster)
    _start_kubelet(cluster)
    _start_proxy(cluster)
    _start_dns(cluster)
    ready = partial(_ready, cluster)
    cluster.components.wait(["kubelet", "containerd", "coredns"], ready, _READY_DEADLINE_S)


def load_image(cluster: Cluster, archive: Path) -> None:
    """Put the images of a docker-archive or oci-archive on the node. Raises ClusterError."""
    done = _ctr(cluster, "images", "import", str(archive))
    if done.returncode != 0:
        raise ClusterError(f"{archive} could not be imported: {done.stderr.strip()}")

    _wait_until_known(cluster, archive.name)


def tag_image(cluster: Cluster, image: str, other: str) -> None:
    """Let the node have the image under another name besides. Raises ClusterError."""
    done = _ctr(cluster, "images", "tag", "--force", image, other)
    if done.returncode != 0:
        raise ClusterError(f"{image} could not be tagged: {done.stderr.strip()}")
    _wait_until_known(cluster, other)


def _wait_until_known(cluster: Cluster, what: str) -> None:
    def known_to_kubelet() -> bool:
        # The runtime's Kubernetes side learns of an import by an event and labels the image.
        lines = _ctr(cluster, "images", "list").stdout.splitlines()[1:]
        return all("io.cri-containerd.image=managed" in line for line in lines)

    wait_for(known_to_kubelet, 30, f"the images of {what} are known to kubelet")


def images(cluster: Cluster) -> list[str]:
    """The references of the images that the node has."""
    return _ctr(cluster, "images", "list", "--quiet").stdout.split()


def set_capacity(cluster: Cluster, capacity: dict[str, str | int | None]) -> None:
    """Let the node offer resources that the machine does not have (None takes one away).

    Only extended resources ("example.com/gpu") stay: kubelet writes its own.
    """
    values = {name: None if value is None else str(value) for name, value in capacity.items()}
    patch = {"status": {"capacity": values, "allocatable": values}}
    cluster.kubectl(
        "patch", "node", NODE_NAME, "--subresource=status", "--type=merge", "-p", json.dumps(patch)
    )


def _start_containerd(cluster: Cluster) -> None:
    folder = cluster.run_folder / "containerd"
    cni = folder / "cni"
    cni.mkdir(parents=True)
    (cni / "10-bridge.conflist").write_text(json.dumps(_network()))
    config = folder / "config.toml"
    config.write_text(_containerd_config(folder))
    cluster.components.start("containerd", [_program("containerd"), "--config", config])
    cluster.components.wait(
        ["containerd"],
        lambda: _ctr(cluster, "version").returncode == 0,
        _READY_DEADLINE_S,
    )


def _containerd_config(folder: Path) -> str:
    return f"""\
version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
  address = "{_socket(folder)}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  # Without CAP_SYS_RESOURCE, as in many test machines, a pod's score cannot be lowered.
  restrict_oom_score_adj = true
  sandbox_image = "{PAUSE_IMAGE}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{_program("runc")}"
        SystemdCgroup = false
"""


def _network() -> dict[str, Any]:
    """The pods' network: one bridge. It enforces no NetworkPolicy."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": _POD_SUBNET}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": "/run/cni-addresses",
        },
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, portmap]}


def _load_own_images(cluster: Cluster) -> None:
    program = build.binary(build.TESTPOD)
    archive = cluster.run_folder / "image.tar"
    for reference, entrypoint in (
        (PAUSE_IMAGE, ["/testpod", "pause"]),
        (TEST_IMAGE, ["/testpod"]),
    ):
        write_image(archive, reference, {"/testpod": program}, entrypoint=entrypoint)
        load_image(cluster, archive)
    archive.unlink()


def _start_kubelet(cluster: Cluster) -> None:
    pki = cluster.plane.pki
    addresses = [f"DNS:{NODE_NAME}", f"IP:{NODE_ADDRESS}", "IP:127.0.0.1"]
    server = pki.issue("kubelet-server", NODE_NAME, addresses=addresses)
    kubeconfig = pki.kubeconfig(
        "kubelet", f"system:node:{NODE_NAME}", server=cluster.api_url, group="system:nodes"
    )
    socket = _socket(cluster.run_folder / "containerd")
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki.ca.certificate)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(server.certificate),
        "tlsPrivateKeyFile": str(server.key),
        "containerRuntimeEndpoint": f"unix://{socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cluster.cgroup}",
        "enforceNodeAllocatable": ["none"],
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        # The machine's own name servers cannot be reached from the cluster's network.
        "resolvConf": "/etc/resolv.conf",
        "volumePluginDir": str(cluster.run_folder / "volume-plugins"),
        "maxPods": 200,
        "serializeImagePulls": False,
        "imageGCHighThresholdPercent": 100,
        # The machine's disk may be as full as it is.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        "nodeStatusUpdateFrequency": "5s",
        # How often a pod's mounted Secrets follow; a minute by default.
        "syncFrequency": "10s",
    }
    path = cluster.run_folder / "kubelet.json"
    path.write_text(json.dumps(config))
    cluster.components.start(
        "kubelet",
        [
            build.binary(build.KUBE),
            "kubelet",
            f"--config={path}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={cluster.run_folder / 'kubelet'}",
            f"--cert-dir={cluster.run_folder / 'kubelet-pki'}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={NODE_ADDRESS}",
        ],
    )


def _start_proxy(cluster: Cluster) -> None:
    pki = cluster.plane.pki
    kubeconfig = pki.kubeconfig("kube-proxy", "system:kube-proxy", server=cluster.api_url)
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "nftables": {"minSyncPeriod": "100ms"},
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "hostnameOverride": NODE_NAME,
        "clusterCIDR": POD_NETWORK,
        # The size of the table of connections belongs to the whole machine.
        "conntrack": {"maxPerCore": 0, "min": 0},
    }
    path = cluster.run_folder / "kube-proxy.json"
    path.write_text(json.dumps(config))
    cluster.components.start(
        "kube-proxy", [build.binary(build.KUBE), "kube-proxy", f"--config={path}"]
    )


def _start_dns(cluster: Cluster) -> None:
    """CoreDNS beside kubelet; the Service that pods ask leads to the node's address."""
    kubeconfig = cluster.plane.pki.kubeconfig(
        "coredns", "coredns", server=cluster.api_url, group="system:masters"
    )
    corefile = cluster.run_folder / "Corefile"
    corefile.write_text(
        f"""\
. {{
  bind {NODE_ADDRESS}
  ready 127.0.0.1:8181
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {kubeconfig} test
    ttl 1
  }}
  # There is no outside: other names do not exist, and that is known at once.
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""
    )
    cluster.components.start("coredns", [build.binary(build.COREDNS), "-conf", corefile])
    ports = [
        {"name": f"dns-{kind.lower()}", "port": 53, "protocol": kind} for kind in ("UDP", "TCP")
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {"clusterIP": DNS_ADDRESS, "ports": ports},
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns",
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": [{"addresses": [NODE_ADDRESS]}],
    }
    both = {"apiVersion": "v1", "kind": "List", "items": [service, endpoints]}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(both))


def _ready(cluster: Cluster) -> bool:
    node = cluster.get(f"/api/v1/nodes/{NODE_NAME}") or {}
    conditions = node.get("status", {}).get("conditions", [])
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and _dns_ready(cluster)


def _dns_ready(cluster: Cluster) -> bool:
    code = "import urllib.request as r; r.urlopen('http://127.0.0.1:8181/ready', timeout=2)"
    argv = [sys.executable, "-I", "-c", code]
    return cluster.run(argv, capture_output=True, timeout=20).returncode == 0


def _ctr(cluster: Cluster, *argv: str) -> subprocess.CompletedProcess[str]:
    """containerd's own client, as the runtime of the node."""
    address = _socket(cluster.run_folder / "containerd")
    return subprocess.run(
        cluster.components.inside_argv(
            [_program("ctr"), f"--address={address}", "--namespace=k8s.io", *argv]
        ),
        capture_output=True,
        text=True,
        timeout=_IMPORT_TIMEOUT_S,
        env={**os.environ, "LC_ALL": "C"},
    )


def _socket(folder: Path) -> Path:
    return folder / "c.sock"


def _program(name: str) -> str:
    found = find_program(name)
    if found is None:
        raise ClusterError(f"{name} is not installed")
    return found

"""What the machine must have for a cluster, and the Debian packages that bring it.

`missing` only looks; `install` asks apt for what is not there. A machine that cannot give
something (root, apt) is told what it lacks, and the tests skip with that text.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CNI_PLUGINS = Path("/usr/lib/cni")
_APT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Need:
    """A file that must exist, and the Debian package that has it."""

    package: str
    program: str
    """A program on the PATH (the sbin folders included), or an absolute path."""

    @property
    def met(self) -> bool:
        """Whether the machine has it."""
        if self.program.startswith("/"):
            return Path(self.program).exists()
        return find_program(self.program) is not None


NAMESPACES = (
    Need("util-linux", "unshare"),
    Need("util-linux", "nsenter"),
    Need("iproute2", "ip"),
    Need("mount", "mount"),
    Need("openssl", "openssl"),
)
"""For the control plane."""
NODE = (
    Need("containerd", "containerd"),
    Need("containerd", "ctr"),
    Need("runc", "runc"),
    Need("containernetworking-plugins", str(CNI_PLUGINS / "bridge")),
    Need("iptables", "iptables"),
    Need("nftables", "nft"),
    Need("conntrack", "conntrack"),
    Need("ethtool", "ethtool"),
    Need("socat", "socat"),
    Need("kmod", "modprobe"),
)
"""For the real node besides."""
IMAGES = (
    Need("mmdebstrap", "mmdebstrap"),
    Need("buildah", "buildah"),
    Need("skopeo", "skopeo"),
)
"""For building images; the cluster itself does without."""


def find_program(name: str) -> str | None:
    """Its path; a user's PATH often leaves out the folders of system programs."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin")


def missing(needs: tuple[Need, ...]) -> list[str]:
    """The packages that are not there, each once."""
    return list(dict.fromkeys(need.package for need in needs if not need.met))


def install(needs: tuple[Need, ...]) -> str | None:
    """Install what is missing; None, or why the machine still lacks something."""
    if os.geteuid() != 0:
        return "root is needed (namespaces, mounts, cgroups)"
    packages = missing(needs)
    if not packages:
        return None
    if shutil.which("apt-get") is None:
        return f"these programs are missing: {', '.join(packages)} (no apt-get to install them)"
    sys.stderr.write(f"cluster: installing {' '.join(packages)}\n")
    problem = _apt_get("update", "-qq") or _apt_get(
        "install", "-y", "-qq", "--no-install-recommends", *packages
    )
    return problem or (
        f"still missing after apt-get install: {', '.join(left)}"
        if (left := missing(needs))
        else None
    )


def _apt_get(*argv: str) -> str | None:
    try:
        done = subprocess.run(
            ["apt-get", *argv],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            capture_output=True,
            text=True,
            timeout=_APT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"apt-get {argv[0]} took over {_APT_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return None
    return f"apt-get {argv[0]} failed: {done.stderr.strip()[-500:]}"

"""The first process of a cluster's namespaces: sets them up, then reaps orphans until told to end.

It sees only its own processes, mounts and network. Everything that the node's components write
to fixed places of a machine goes to the run folder or to memory, and the settings of the kernel
that belong to the whole machine are shielded. When this process ends, the kernel ends all others
in the namespaces.

    python inside.py RUN_FOLDER KEEPER_PIDFD
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

NODE_ADDRESS = "172.31.255.2"
"""The node's address, in a network that exists only in the namespace."""
GATEWAY = "172.31.255.1"
"""Nobody has it: the default route is there because Kubernetes looks for its interface."""
HOST_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What kubelet sets, for the whole machine; here it finds files with the values it wants."""


def main(folder: Path, keeper: int) -> int:
    """Set up, say so, and wait for the keeper's end."""
    _mounts(folder)
    _network()
    (folder / "inside-ready").touch()
    _reap_until_gone(keeper)
    return 0


def _mounts(folder: Path) -> None:
    """Private places for what the components write at fixed paths."""
    private = folder / "private"
    private.mkdir()
    _call("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(private))
    # What is written there is this cluster's own; what was there before is seen.
    for name in ("etc", "opt", "var/lib"):
        _overlay(Path("/") / name, private / name.replace("/", "-"))
    # Sockets of containerd's shims, the pods' network namespaces, locks.
    _call("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    # The machine's name servers are out of reach; a name is unknown at once, not after a minute.
    names = Path("/etc/resolv.conf")
    names.unlink(missing_ok=True)
    names.write_text(f"nameserver {NODE_ADDRESS}\n")
    # Pods' logs, and kubelet's links to them.
    logs = folder / "var-log"
    logs.mkdir()
    _call("mount", "--bind", str(logs), "/var/log")
    shields = folder / "settings"
    shields.mkdir()
    for name, value in HOST_SETTINGS.items():
        target = Path("/proc/sys") / name
        if target.exists():
            shield = shields / name.replace("/", ".")
            shield.write_text(value)
            _call("mount", "--bind", str(shield), str(target))


def _overlay(target: Path, store: Path) -> None:
    upper, work = store / "upper", store / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    options = f"lowerdir={target},upperdir={upper},workdir={work}"
    _call("mount", "-t", "overlay", "-o", options, "overlay", str(target))


def _network() -> None:
    """The node's network: one bridge with its address, and forwarding between pods."""
    _call("ip", "link", "set", "lo", "up")
    _call("ip", "link", "add", "node0", "type", "bridge")
    _call("ip", "address", "add", f"{NODE_ADDRESS}/24", "dev", "node0")
    _call("ip", "link", "set", "node0", "up")
    _call("ip", "route", "add", "default", "via", GATEWAY)
    # These belong to the network namespace.
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    bridge = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if not bridge.exists():
        # Without it a pod's call to a Service whose pod is on the same bridge gets no answer.
        subprocess.run(["modprobe", "br_netfilter"], check=False, timeout=20)
    if bridge.exists():
        bridge.write_text("1")


def _reap_until_gone(keeper: int) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, _wake)
    while True:
        ready, _, _ = select.select([keeper, wake_read], [], [])
        if keeper in ready:
            return
        os.read(wake_read, 4096)
        _reap()


def _wake(number: int, frame: FrameType | None) -> None:
    """Nothing: that there is a handler makes the signal wake the wait above."""


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _call(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=20)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

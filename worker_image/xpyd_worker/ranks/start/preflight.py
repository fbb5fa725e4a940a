"""What a machine must give an instance of several ranks, looked at before they start.

What is missing would otherwise show as a start that hangs, as slow steps or as a bare error from
deep inside a library. The process that starts ranks looks at files, ranks on GPUs at the rest. It
must not know torch.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Mapping
from pathlib import Path

from xpyd_core.errors import UserError

_log = logging.getLogger(__name__)

ADVISED_FILES = 65_536
MANY_RANKS = 8
"""The number of ranks from which sockets, shared memory and weights may be more files than the
usual limits allow."""
_MOST_FILES = 1 << 20
"""The number of files that the kernel allows where fs.nr_open was not changed."""
INFINIBAND = Path("/sys/class/infiniband")
"""Where the kernel lists devices with RDMA: InfiniBand, RoCE, EFA."""


def prepare_files(ranks: int) -> None:
    """Raise this process' file limit, which its children inherit; a warning in the log where it
    stays low for the `ranks` of this pod."""
    _warn(file_warning(raise_file_limit(), ranks))


def look_at_network(
    nodes: int, environ: Mapping[str, str], *, infiniband: Path = INFINIBAND
) -> None:
    """A warning in the log where NCCL will use sockets between the `nodes` of an instance."""
    _warn(socket_warning(nodes, environ, has_rdma=_has_entries(infiniband)))


def look_at_waits(environ: Mapping[str, str]) -> None:
    """A warning in the log where every wait for NCCL will hold its host up."""
    if environ.get("TORCH_NCCL_BLOCKING_WAIT", "").lower() in ("1", "true", "t", "yes", "y"):
        _log.warning(
            "TORCH_NCCL_BLOCKING_WAIT is set: ranks wait on the host for what they enqueue, and "
            "CUDA graphs cannot be captured; unset it"
        )


def check_devices(found: int, ranks: int) -> None:
    """UserError where this pod sees fewer GPUs than it has ranks, each of which needs its own."""
    if found < ranks:
        raise UserError(
            "--tensor-parallel-size, --pipeline-parallel-size, --data-parallel-size: "
            f"{ranks} ranks here, {found} GPUs visible; each rank needs its own "
            "(CUDA_VISIBLE_DEVICES, in a fleet resources.gpus)"
        )


def raise_file_limit() -> int:
    """Let this process open as many files as it may, a million at most; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _MOST_FILES:
        return _MOST_FILES
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # the kernel's own bound is lower: what there is has to do
        return soft
    return wanted


def file_warning(limit: int, ranks: int) -> str | None:
    """Whether `limit` open files may be too few."""
    if ranks < MANY_RANKS or limit >= ADVISED_FILES:
        return None
    return (
        f"{ranks} ranks with at most {limit} open files each, which cannot be raised here; "
        f"{ADVISED_FILES} are advised (`ulimit -n`, in a cluster the container runtime's limit)"
    )


def socket_warning(nodes: int, environ: Mapping[str, str], *, has_rdma: bool) -> str | None:
    """Whether NCCL will move hidden states between nodes through TCP sockets."""
    if nodes < 2 or "NCCL_NET_PLUGIN" in environ:
        return None
    network = environ.get("NCCL_NET", "")
    if network.lower() == "socket":
        reason = "NCCL_NET=Socket"
    elif environ.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        reason = f"NCCL_IB_DISABLE={environ['NCCL_IB_DISABLE']}"
    elif not has_rdma and not network:
        reason = "there is no RDMA device here"
    else:
        return None
    return (
        f"{nodes} nodes, and NCCL will use TCP sockets between them: {reason}. With InfiniBand or "
        "RoCE give the pods its devices; NCCL_DEBUG=INFO shows which network is used"
    )


def _warn(warning: str | None) -> None:
    if warning is not None:
        _log.warning(warning)


def _has_entries(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False

"""`xpyd worker` in a network namespace of its own, which a test has made with `ip netns add`.

Run as `python -m tests.e2e.netns_worker NAMESPACE FLAGS`. The parent's fork is still one thread, so
that the namespace is that of all threads to come.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from xpyd_core.cli import main

_CLONE_NEWNET = 0x40000000


def enter(namespace: str) -> None:
    """Make `namespace` this process' network."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), namespace)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    enter(sys.argv[1])
    sys.exit(main(["worker", *sys.argv[2:]]))

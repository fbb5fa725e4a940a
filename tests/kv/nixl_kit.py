"""NIXL for tests, where it is installed: over loopback, as a CPU has it."""

from __future__ import annotations

import functools
import threading

import pytest

from xpyd_kv.transport.devices.nixl.library import Nixl, load, version

needs_nixl = pytest.mark.skipif(
    version() is None, reason="nixl is not installed: pip install 'xpyd[nixl]'"
)


@functools.cache
def library() -> Nixl | None:
    """The library, warm: what its first agent opens for the whole process is nobody's leak."""
    if version() is None:
        return None
    nixl = load()
    nixl.agent(has_progress_thread=True).close()
    return nixl


def end_openers(patience_s: float) -> None:
    """Wait for what makes agents: one whose connection is gone is ended when it has been made."""
    for thread in threading.enumerate():
        if thread.name == "xpyd-kv-nixl":
            thread.join(patience_s)

"""A process that waits, with torch imported, until an engine started warm needs a fork server.

An engine's process forks it while it has one thread, and becomes the engine. When the engine starts
its fork server (xpyd_worker.ranks.start.processes), the process that waits takes the arguments and
descriptors and becomes it: a child of the engine as ever, without the seconds of an interpreter's
and torch's start. tests/warm_start.py is the only user; all else starts fork servers cold.
"""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from xpyd_core.fork_server import run_module
from xpyd_worker.ranks.start.processes import COMMAND

MODULE = COMMAND[-1]
"""What the process becomes; its program is imported already."""
_MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 250
_ABOVE = 1000
"""Descriptors come under any number and then get the number that the arguments name."""


def may_need_ranks(arguments: Sequence[str]) -> bool:
    """Whether a program with these arguments may be an engine of several ranks."""
    flags = ("-t", "-p", "--tensor", "--pipeline")
    return "worker" in arguments[:1] and any(word.startswith(flags) for word in arguments)


def keep_waiting() -> None:
    """Fork the process that waits, and let the fork server's start be its turn."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        _wait(theirs)
    theirs.close()

    lock = threading.Lock()

    class Popen(subprocess.Popen[Any]):
        """The first start of a fork server is the process that waits; all else is as ever."""

        # The checks below are silenced: these methods are private to Popen, and it is replaced.
        def _execute_child(self, args: Any, *rest: Any) -> None:
            # Replicas start their fork servers at the same time.
            is_first = tuple(args[: len(COMMAND)]) == COMMAND and lock.acquire(blocking=False)
            if not is_first:
                super()._execute_child(args, *rest)  # pyright: ignore
                return
            descriptors = sorted(rest[3])
            request = {"argv": list(args), "numbers": descriptors, "environment": dict(os.environ)}
            socket.send_fds(ours, [json.dumps(request).encode()], descriptors)
            ours.close()
            self.pid = pid
            self._child_created = True
            self._close_pipe_fds(*rest[9:15])  # pyright: ignore

    subprocess.Popen = Popen  # pyright: ignore


def _wait(request: socket.socket) -> NoReturn:
    code = 1
    try:
        text, descriptors, _, _ = socket.recv_fds(request, _MOST_BYTES, _MOST_DESCRIPTORS)
        request.close()
        if not text:
            os._exit(0)  # an engine that needed none
        asked = json.loads(text)
        os.environ.clear()
        os.environ.update(asked["environment"])
        aside = [fcntl.fcntl(one, fcntl.F_DUPFD, _ABOVE) for one in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        for number, descriptor in zip(asked["numbers"], aside, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.orig_argv[:] = asked["argv"]
        sys.argv[:] = [MODULE, *asked["argv"][len(COMMAND) :]]
        code = run_module(MODULE)
    finally:
        os._exit(code)


if __name__ == "__main__":  # with a module and its arguments: that module, with such a process
    del sys.argv[0]
    keep_waiting()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

"""Child processes, each the leader of a session of its own: spawned, or forked by a fork server.

A forked child is a child of this process as a spawned one is: its pid, signals, end and exit status
are the kernel's, and it goes on where the fork server ends. What differs is that its pid comes
later: the fork server may still be importing. Where it cannot fork, the child is spawned. ADR 0045;
`fork_server` is the other side.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xpyd_core.fork_server import MOST_BYTES, PYTHON, ROOM
from xpyd_core.process import subreaper

CANNOT_START = 127
"""The exit status of a child that could not be started after all, as a shell has it."""
FIRST_ANSWER_S = 120.0
"""A fork server gives its first answer, which comes behind its imports, within this time."""
ANSWER_S = 10.0
"""A fork server that has forked before answers within this time: a fork takes milliseconds."""
_OWN_VARIABLES = "XPYD_"
"""Variables that programs read when they run, not when they are imported; all others must be equal
in a fork server and what it forks."""
_log = logging.getLogger(__name__)


class Start(NamedTuple):
    """How a child is started: its output goes to the descriptor `output`; `inherit` keep their
    numbers."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    output: int
    inherit: Sequence[int] = ()


class Child:
    """One child. Its owner must call `wait` when it `has_ended`."""

    def __init__(self) -> None:
        self.pid: int | None = None
        """None: the fork server has not answered yet."""
        self.returncode: int | None = None
        """As Popen's."""
        self._popen: subprocess.Popen[bytes] | None = None

    def spawn(self, start: Start) -> None:
        """Start it as a new program. OSError where the system does not let us."""
        self._popen = subprocess.Popen(
            start.argv,
            env=start.environ,
            stdin=subprocess.DEVNULL,
            stdout=start.output,
            stderr=start.output,
            start_new_session=True,
            pass_fds=start.inherit,
        )
        self.pid = self._popen.pid

    def has_ended(self) -> bool:
        """Whether it has; its pid is its own until `wait`."""
        if self.pid is None or self.returncode is not None:
            return self.returncode is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> int:
        """Wait until it has ended; the returncode."""
        if self._popen is not None:
            self.returncode = self._popen.wait()
        elif self.returncode is None:
            assert self.pid is not None, "its fork server has not answered"
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to it, or to its whole group. One that has no process yet gets none, and
        counts as ended by the signal."""
        if self.returncode is not None:
            return
        if self.pid is None:
            self.returncode = -number
            return
        # Not reaped yet, so the pid is still its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(self.pid, number)


class _Server(NamedTuple):
    """A fork server that runs, and what it was started with."""

    process: subprocess.Popen[bytes]
    requests: socket.socket
    environ: Mapping[str, str]


class ForkServer:
    """Starts children as forks of one process. One thread uses it; `take` when it is readable.

    The process starts with the first child and ends with `close` or with this process. Where it
    ends before, what it was asked for is spawned, and the next child starts it anew, except where
    it has never forked: then its children are spawned from there on. One that does not answer in
    time is killed, which is the same.
    """

    def __init__(
        self,
        prepare: Sequence[str],
        environ: Mapping[str, str] | None = None,
        *,
        first_answer_s: float = FIRST_ANSWER_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`prepare`: functions, MODULE:FUNCTION, that import what the children need. `environ`: the
        fork server's environment; None: its children's, and a child with another environment gets
        another fork server. `first_answer_s`, `answer_s`: the deadlines of answers."""
        self._prepare = prepare
        self._environ = environ
        self._first_answer_s, self._answer_s = first_answer_s, answer_s
        self._news = select.epoll()
        self._server: _Server | None = None
        self._is_asked = False
        self._asked = 0
        """Requests that were sent; an answer says of which it is."""
        self._asked_s = 0.0
        self._has_forked = False
        self._waiting: deque[tuple[Child, Start]] = deque()
        """Not answered yet; the first one is asked for."""
        self._unfit: Mapping[str, str] | None = None
        """The environment of the last server that never forked."""

    def fileno(self) -> int:
        """Readable when `take` has something to do; the same for ever."""
        return self._news.fileno()

    @property
    def pid(self) -> int | None:
        """The fork server's, where one runs."""
        return self._server.process.pid if self._server else None

    def start(self, start: Start) -> Child:
        """Start a child, forked where that is possible. OSError where the system does not let
        us."""
        child = Child()
        if self._is_fit(start):
            # The caller closes its own copy, maybe before the child is started.
            self._waiting.append((child, start._replace(output=os.dup(start.output))))
            if len(self._waiting) == 1:
                self._ask()
        else:
            child.spawn(start)
        return child

    def take(self) -> None:
        """Read the answers that have come, and ask for more. To be called every few seconds, too:
        a fork server that hangs is given up here."""
        while self._server is not None:
            try:
                text = self._server.requests.recv(MOST_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                limit_s = self._answer_s if self._has_forked else self._first_answer_s
                if self._is_asked and time.monotonic() - self._asked_s > limit_s:
                    _log.warning("the fork server did not answer in %g s", limit_s)
                    self._lose()
                return
            except OSError:
                text = b""
            if not text:
                self._lose()
                return
            answer = json.loads(text)
            if answer["of"] == self._asked and self._is_asked:
                self._settle(answer)
                self._ask()

    def close(self) -> None:
        """End the fork server; its children go on. What was not answered counts as killed."""
        for child, start in self._waiting:
            child.signal(signal.SIGKILL)
            os.close(start.output)
        self._end()
        self._waiting.clear()
        self._news.close()

    def _is_fit(self, start: Start) -> bool:
        """Whether a fork server runs that can fork this; one is started where none does."""
        if tuple(start.argv[: len(PYTHON)]) != PYTHON:
            return False
        environ = self._environ
        if environ is None:
            environ = {k: v for k, v in start.environ.items() if not k.startswith(_OWN_VARIABLES)}
        if environ == self._unfit:
            return False
        if self._server is not None and self._server.environ != environ:
            if self._waiting:
                return False
            self._end()
        if self._server is None:
            try:
                self._begin(environ)
            except OSError as error:
                _log.warning("cannot start a fork server: %s", error)
                return False
        return True

    def _begin(self, environ: Mapping[str, str]) -> None:
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            flags = [word for name in self._prepare for word in ("--prepare", name)]
            argv = [*PYTHON, "xpyd_core.fork_server", "--socket", str(theirs.fileno()), *flags]
            try:
                process = subprocess.Popen(
                    [*argv, ROOM],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                )
            except OSError:
                requests.close()
                raise
        self._server = _Server(process, requests, environ)
        self._has_forked = False
        self._news.register(requests, select.EPOLLIN)

    def _ask(self) -> None:
        """Ask for the next child, if one waits and none is asked for."""
        assert self._server is not None, "asked by the callers"
        while self._waiting and self._waiting[0][0].returncode is not None:
            os.close(self._waiting.popleft()[1].output)
        if not self._waiting:
            return
        _, start = self._waiting[0]
        self._asked += 1
        request = {
            "number": self._asked,
            "argv": list(start.argv),
            "environ": dict(start.environ),
            "descriptors": [1, 2, *start.inherit],
        }
        descriptors = [start.output, start.output, *start.inherit]
        subreaper.begin()
        self._is_asked, self._asked_s = True, time.monotonic()
        try:
            socket.send_fds(self._server.requests, [json.dumps(request).encode()], descriptors)
        except OSError:  # it has ended, or the request is too large for it
            self._lose()

    def _settle(self, answer: Mapping[str, object]) -> None:
        """The fork server has answered: the child that was asked for runs, or cannot."""
        self._has_forked = True
        self._adopt_no_more()
        child, start = self._waiting.popleft()
        os.close(start.output)
        pid = answer.get("pid")
        if not isinstance(pid, int):
            _log.error("cannot start %s: %s", start.argv[-1], answer.get("error"))
            child.returncode = child.returncode or CANNOT_START
        elif child.returncode is None:
            child.pid = pid
        else:  # it was ended before it began
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _lose(self) -> None:
        """The fork server has ended: spawn what it was asked for."""
        assert self._server is not None, "asked by the callers"
        if not self._has_forked:
            self._unfit = self._server.environ
            _log.warning("the fork server failed; processes are started without it")
        self._end()
        while self._waiting:
            child, start = self._waiting.popleft()
            try:
                if child.returncode is None:
                    child.spawn(start)
            except OSError as error:
                _log.error("cannot start %s: %s", start.argv[-1], error)
                child.returncode = CANNOT_START
            finally:
                os.close(start.output)

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        # It has no state, and its children do not need it.
        server.process.kill()
        server.process.wait()
        # A program that has not answered yet ends by this, for its answer fails. One whose answer
        # came, but was not read, is killed here.
        server.requests.shutdown(socket.SHUT_RD)
        # What the killed program leaves behind is not adopted.
        self._adopt_no_more()
        with contextlib.suppress(OSError):
            while text := server.requests.recv(MOST_BYTES, socket.MSG_DONTWAIT):
                if isinstance(pid := json.loads(text).get("pid"), int):
                    with contextlib.suppress(ProcessLookupError, ChildProcessError):
                        os.killpg(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
        server.requests.close()  # which takes it out of the news

    def _adopt_no_more(self) -> None:
        if self._is_asked:
            subreaper.end()
        self._is_asked = False

"""Tries a grammar in a process that may be ended, before the engine's own process compiles it.

A compilation of the library cannot be stopped, and some take for ever or all of the memory. So a
helper process reads the tokenizer once and has a child try each grammar (trial_process). Only what
came through is compiled where answers are made. See docs/adr/0087, docs/adr/0090 and docs/adr/0103.

    GrammarCompiler's threads -> Trials -> helper -> a child per grammar
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from xpyd_worker.grammar import trial_process
from xpyd_worker.grammar.spec import Part, with_places
from xpyd_worker.grammar.trial_process import COMPETING, HEADER, IDLE, WALL_S

_NEAR_S = 0.1
_START_S = 60.0
_LOOK_S = 0.1
"""How often a trial that runs when a core is free is looked at."""
_LEAST_SHARE = 0.4
"""Of a core. A trial that has less of it is begun again as one that competes."""


class NoTrial(Exception):
    """The trial had no result; the grammar may be as good as any."""


class TooSlow(NoTrial):
    """The trial did not end within WALL_S."""


@dataclass(frozen=True)
class Verdict:
    """`error`: why the grammar is refused, else empty. `document`: the grammar as the library reads
    it. `size`: bytes that it took, compiled. `schema`, `place`: which of the grammar's schemas
    (schema_places) is at fault, and where in it; None where that is not known."""

    error: str
    document: str = ""
    size: int = 0
    schema: int | None = None
    place: str = ""


class Trials:
    """The helper of one tokenizer, as its process' owner sees it. For threads."""

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        special: Mapping[str, int],
    ) -> None:
        """`special`: ids of special tokens, by text."""
        says = {
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "eos": list(eos_token_ids),
            "special": dict(special),
        }
        self._says = json.dumps(says).encode()
        self._lock = threading.Lock()
        self._helper: _Helper | None = None
        self._closed = False

    def begin(self) -> None:
        """Start the helper, and do not wait until it has read the tokenizer."""
        with self._lock:
            self._started()

    def await_ready(self) -> None:
        """Wait until the helper has read the tokenizer. NoTrial where it cannot."""
        with self._lock:
            try:
                self._started().await_ready()
            except (OSError, EOFError) as error:
                raise NoTrial(f"the process that tries grammars has ended: {error}") from error

    def run(self, root: Part) -> Verdict:
        """What becomes of this grammar. NoTrial where that cannot be said now."""
        asked = pickle.dumps(with_places(root, map("@{}".format, count())))
        for is_last in (False, True):
            with self._lock:
                helper = self._started()
            try:
                return self._run(helper, asked)
            except (OSError, EOFError) as error:
                # The helper has died: a new one may not. No trial kills it: its children try.
                helper.close()
                if is_last:
                    raise NoTrial(f"the process that tries grammars has ended: {error}") from error
        raise AssertionError("the last try returns or raises")

    def _run(self, helper: _Helper, asked: bytes) -> Verdict:
        with self._lock:
            helper.await_ready()
        begun = time.monotonic()
        try:
            answer = _answer_of(helper, asked, IDLE)
            if answer is None:
                begun = time.monotonic()
                answer = _answer_of(helper, asked, COMPETING)
        except TimeoutError as error:
            raise TooSlow from error
        if not answer:
            raise EOFError("no trial was begun")
        _, *verdicts = answer.splitlines()
        if verdicts:
            # The last line is what it knew when it ended.
            return Verdict(**json.loads(verdicts[-1]))
        if time.monotonic() - begun > WALL_S - _NEAR_S:
            raise TooSlow
        return Verdict("takes too long or too much memory to compile; make it smaller")

    def _started(self) -> _Helper:
        if self._closed:
            raise NoTrial("the engine ends")
        if self._helper is None or not self._helper.is_alive():
            if self._helper is not None:
                self._helper.close()
            self._helper = _Helper(self._says)
        return self._helper

    def close(self) -> None:
        """End the helper; trials that run have no result then."""
        with self._lock:
            self._closed = True
            if self._helper is not None:
                self._helper.close()


class _Helper:
    """One helper process and the socket to it."""

    def __init__(self, says: bytes) -> None:
        ours, theirs = socket.socketpair()
        ahead, its_ahead = socket.socketpair()
        with theirs, its_ahead:
            descriptors = theirs.fileno(), its_ahead.fileno()
            try:
                process = subprocess.Popen(
                    (sys.executable, "-m", trial_process.__name__, *map(str, descriptors)),
                    stdin=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            except OSError as error:
                ours.close()
                ahead.close()
                raise NoTrial(f"the process that tries grammars did not start: {error}") from error
        self._process = process
        self._control = ours
        self._ahead = ahead
        ahead.setblocking(False)
        self._waiting = 0
        """Children that have said that they wait, less those that were given a trial."""
        self._lock = threading.Lock()
        self._ready = False
        self.close = weakref.finalize(self, _end, process, ours, ahead)
        # The helper reads it before anything else: a thread, since it is long.
        threading.Thread(target=_send, args=(ours, says), daemon=True).start()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def await_ready(self) -> None:
        """Wait until it has read the tokenizer."""
        if self._ready:
            return
        self._control.settimeout(_START_S)
        if not self._control.recv(1):
            raise EOFError("it did not read the tokenizer")
        self._ready = True

    def begin_trial(self, how: bytes) -> tuple[socket.socket, bool]:
        """A line to a child, and whether it is one that has waited."""
        ours, theirs = socket.socketpair()
        try:
            is_ahead = how == IDLE and self._take_waiting()
            with theirs:
                way = self._ahead if is_ahead else self._control
                socket.send_fds(way, [how], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return ours, is_ahead

    def _take_waiting(self) -> bool:
        """Whether a child waits, which then is the caller's."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                self._waiting += len(self._ahead.recv(1 << 10))
            if not self._waiting:
                return False
            self._waiting -= 1
            return True


def _send(control: socket.socket, says: bytes) -> None:
    with contextlib.suppress(OSError):  # its end is seen where the helper's answer is read
        control.sendall(len(says).to_bytes(HEADER, "little") + says)


def _end(process: subprocess.Popen[bytes], *lines: socket.socket) -> None:
    for line in lines:
        line.close()
    process.kill()
    process.wait()


def _answer_of(helper: _Helper, asked: bytes, how: bytes) -> bytes | None:
    """What a child says: its process id, and a verdict in each further line. None where it gets
    too little of a core, because others want it."""
    begun = time.monotonic()
    line, is_ahead = helper.begin_trial(how)
    with line:
        # The child ends itself; this is for one that the machine forgets.
        line.settimeout(2 * WALL_S)
        line.sendall(asked)
        line.shutdown(socket.SHUT_WR)
        answer = b""
        while True:
            line.settimeout(_LOOK_S)
            try:
                part = line.recv(1 << 16)
            except TimeoutError:
                passed_s = time.monotonic() - begun
                if passed_s > 2 * WALL_S:
                    raise
                has_begun = b"\n" in answer
                if is_ahead and not has_begun:  # no core since then, or it has ended
                    return None
                is_starved = how == IDLE and has_begun
                if is_starved and _cpu_s(int(answer.splitlines()[0])) < _LEAST_SHARE * passed_s:
                    return None
                continue
            if not part:
                return answer
            answer += part


def _cpu_s(pid: int) -> float:
    """CPU time of a process, as clock_getcpuclockid(3) finds it; much, where it has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return float("inf")

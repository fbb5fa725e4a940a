"""Tries a grammar in a process that may be ended, before the engine's own process compiles it.

A compilation of the library cannot be stopped, and some take for ever or all of the memory. So a
helper process reads the tokenizer once and forks a child for each grammar. The child checks its
schemas, writes it as the library reads it, compiles it, takes its first tokens, and says what that
cost; a bound on its CPU time and its memory ends it. Only what came through is compiled where
answers are made. See docs/adr/0087 and docs/adr/0090.

    GrammarCompiler's threads -> Trials -> helper (this module as a program) -> a child per grammar
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from xpyd_core.errors import ApiError, UserError
from xpyd_worker.grammar.blame import place_of_error
from xpyd_worker.grammar.render import Document, render
from xpyd_worker.grammar.spec import Part, check_parts, checked, with_places

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# A mask is bounded by these: its lexer's work to some 7 ms. A state takes up to 1 KB. An object
# with 1,000 optional members has 3,999 items in a row.
_LIMITS: Mapping[str, Any] = MappingProxyType(
    {
        "verbose_errors": False,
        "max_lexer_states": 50_000,
        "max_items_in_row": 8_000,
        "step_lexer_fuel": 100_000,
    }
)
CPU_S = 0.8
"""Of one trial. The largest schemas that the bounds allow need a half: 0.2 to be checked."""
MEMORY_BYTES = 256 << 20
"""Of one trial, above what the helper has."""
WALL_S = 4.0
"""A machine that is so busy says nothing of the grammar: such an end is not kept."""
_NEAR_S = 0.1
_START_S = 60.0
_TOKENS = 24
_NICE = 10
_LOOK_S = 0.1
"""How often a trial that runs when a core is free is looked at."""
_LEAST_SHARE = 0.4
"""Of a core. A trial that has less of it is begun again as one that competes."""
_HEADER = 8
_IDLE, _COMPETING = b"i", b"c"
"""How a child is scheduled: when nobody else wants its core, or as the helper."""


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
            answer = _answer_of(helper, asked, _IDLE)
            if answer is None:
                begun = time.monotonic()
                answer = _answer_of(helper, asked, _COMPETING)
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
        with theirs:
            try:
                process = subprocess.Popen(
                    (sys.executable, "-m", __name__, str(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            except OSError as error:
                ours.close()
                raise NoTrial(f"the process that tries grammars did not start: {error}") from error
        self._process = process
        self._control = ours
        self._ready = False
        self.close = weakref.finalize(self, _end, process, ours)
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

    def begin_trial(self, how: bytes) -> socket.socket:
        """A line to a new child."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [how], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return ours


def _send(control: socket.socket, says: bytes) -> None:
    with contextlib.suppress(OSError):  # its end is seen where the helper's answer is read
        control.sendall(len(says).to_bytes(_HEADER, "little") + says)


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def _answer_of(helper: _Helper, asked: bytes, how: bytes) -> bytes | None:
    """What a child says: its process id, and a verdict in each further line. None where it gets
    too little of a core, because others want it."""
    begun = time.monotonic()
    with helper.begin_trial(how) as line:
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
                is_starved = how == _IDLE and b"\n" in answer
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


def _read_all(line: socket.socket) -> bytes:
    parts: list[bytes] = []
    while part := line.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


# --- in the helper


def _serve(control: socket.socket) -> None:
    """The helper's whole life: until its owner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a child ended
    os.nice(_NICE)
    size = int.from_bytes(_read(control, _HEADER), "little")
    says = json.loads(_read(control, size))
    from llguidance import LLTokenizer

    tokens = LLTokenizer(
        says["tokenizer"], n_vocab=says["vocab_size"], eos_token=says["eos"] or None
    )
    special = says["special"]
    del says
    control.sendall(b"r")
    while True:
        how, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not how:
            return
        with socket.socket(fileno=descriptors[0]) as line:
            if os.fork() == 0:
                control.close()
                _child(tokens, special, line, how)


def _read(control: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = control.recv(min(size - len(found), 1 << 20))
        if not part:
            sys.exit(0)
        found += part
    return bytes(found)


def _child(
    tokens: LLTokenizer, special: Mapping[str, int], line: socket.socket, how: bytes
) -> None:
    """One trial. Ends the process."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # the first to go where memory ends
            Path("/proc/self/oom_score_adj").write_text("1000")
        # What the library writes when it is out of memory is no news.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.setitimer(signal.ITIMER_REAL, WALL_S)
        asked = _read_all(line)
        line.sendall(b"%d\n" % os.getpid())
        if how == _IDLE:
            with contextlib.suppress(OSError):  # where a sandbox does not let it
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        pages, resident = _memory()
        limit = pages + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        for verdict in _verdicts(tokens, special, pickle.loads(asked), resident):
            line.sendall(json.dumps(verdict).encode() + b"\n")
        line.close()  # before its memory is given back, which takes longer than most trials
    finally:
        os._exit(0)


def _verdicts(
    tokens: LLTokenizer, special: Mapping[str, int], root: Part, resident: int
) -> Iterator[dict[str, Any]]:
    """What is known of the grammar, then with an error what else was found of it. `resident`:
    memory before."""
    try:
        whole = checked(root)
        check_parts(whole, "")
        document = render(whole, special)
    except ApiError as error:
        field = error.param or ""
        yield {"error": error.message.removeprefix(f"{field}: "), **_place(field)}
        return
    except UserError as error:
        yield {"error": str(error)}
        return
    error = _try(tokens, document.text)
    verdict = {"error": error, "size": max(0, _memory()[1] - resident)}
    yield verdict | ({} if error else {"document": document.text})
    if error:
        yield verdict | _blamed(tokens, document)


def _blamed(tokens: LLTokenizer, document: Document) -> dict[str, Any]:
    """Which schema of the grammar is at fault, and where."""

    def error_of(schema: object) -> str:
        alone = json.dumps({"grammars": [{"json_schema": schema}]})
        return new_matcher(tokens, alone).get_error()

    for place, schema in document.schemas:
        if error_of(schema):
            inner, error = place_of_error(cast("dict[str, Any]", schema), error_of)
            return {"error": error, **_place(place + inner)}
    return {}


def _place(marked: str) -> dict[str, Any]:
    """A place that begins with the mark of a schema, as a verdict says it."""
    found = re.match(r"@(\d+)", marked)
    return {"schema": int(found[1]), "place": marked[found.end() :]} if found else {}


def _memory() -> tuple[int, int]:
    """Bytes of address space, and in memory of those that are of no file."""
    pages, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    size = os.sysconf("SC_PAGE_SIZE")
    return pages * size, (resident - shared) * size


def _try(tokens: LLTokenizer, document: str) -> str:
    """Why the grammar cannot be used. Takes some tokens, always the same: what stops at once must
    not stop in an answer."""
    matcher = new_matcher(tokens, document)
    draw = random.Random(0)
    for _ in range(_TOKENS):
        if matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or not mask:
            break
        some = mask >> draw.randrange(mask.bit_length())
        skipped = mask.bit_length() - some.bit_length()
        matcher.consume_token(skipped + (some & -some).bit_length() - 1)
    return matcher.get_error() if matcher.is_error() else ""


def new_matcher(tokens: LLTokenizer, document: str) -> LLMatcher:
    """The library's matcher of a grammar, with a lexer of its own."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokens, document, log_level=0, limits=LLParserLimits(**_LIMITS))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _control:
        _serve(_control)

"""The program that tries grammars, for its owner (trial): one helper, and a child for each grammar.

The child checks the grammar's schemas, writes it as the library reads it, compiles it, takes its
first tokens, and says what that cost; a bound on its CPU time and its memory ends it. One child is
forked ahead, tries a small grammar of its own, and waits: so a new grammar waits neither for a fork
nor for what a first trial in a process costs. See docs/adr/0103.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from xpyd_core.errors import ApiError, UserError
from xpyd_worker.grammar.blame import place_of_error
from xpyd_worker.grammar.render import Document, render
from xpyd_worker.grammar.spec import (
    Concat,
    Part,
    Pattern,
    check_parts,
    checked,
    json_schema_part,
)

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
_TOKENS = 24
_NICE = 10
_LEAST_BYTES = 128 << 10
"""What a small grammar takes. It is not seen in a process that has tried one: the library finds
room that it had before."""
HEADER = 8
IDLE, COMPETING = b"i", b"c"
"""How a child is scheduled: when nobody else wants its core, or as the helper."""


def _read_all(line: socket.socket) -> bytes:
    parts: list[bytes] = []
    while part := line.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def _serve(control: socket.socket, ahead: socket.socket) -> None:
    """The helper's whole life: until its owner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a child ended
    os.nice(_NICE)
    size = int.from_bytes(_read(control, HEADER), "little")
    says = json.loads(_read(control, size))
    from llguidance import LLTokenizer

    tokens = LLTokenizer(
        says["tokenizer"], n_vocab=says["vocab_size"], eos_token=says["eos"] or None
    )
    child = _Child(tokens, says["special"])
    del says
    child.warm_up()
    control.sendall(b"r")
    waiting = _fork_waiting(child, control, ahead)
    with selectors.DefaultSelector() as events:
        events.register(control, selectors.EVENT_READ)
        events.register(waiting, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in events.select()]
            is_wanted = False
            if waiting in ready:
                # One that ended instead would end again: until the next trial there is none.
                is_wanted = bool(os.read(waiting, 1))
                events.unregister(waiting)
                os.close(waiting)
                waiting = -1
            if control in ready:
                how, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                if not how:
                    return
                with socket.socket(fileno=descriptors[0]) as line:
                    if os.fork() == 0:
                        control.close()
                        ahead.close()
                        child.run(line, how)
                is_wanted = waiting < 0
            if is_wanted:
                waiting = _fork_waiting(child, control, ahead)
                events.register(waiting, selectors.EVENT_READ)


def _fork_waiting(child: _Child, control: socket.socket, ahead: socket.socket) -> int:
    """A child for the next trial. From the descriptor a byte comes when it has one, and an end
    where it ends before."""
    taken, takes = os.pipe()
    if os.fork() == 0:
        control.close()
        child.wait(ahead, takes)
    os.close(takes)
    return taken


def _read(control: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = control.recv(min(size - len(found), 1 << 20))
        if not part:
            sys.exit(0)
        found += part
    return bytes(found)


class _Child:
    """What a process does that makes one trial. Its methods end the process, but `warm_up`."""

    def __init__(self, tokens: LLTokenizer, special: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._special = special

    def warm_up(self) -> None:
        """Try a grammar that needs what most need: the first one pays for imports, for what the
        library makes once, and for each page of memory that the process shared before."""
        for _ in _verdicts(self._tokens, self._special, _WARM, 0):
            pass

    def wait(self, ahead: socket.socket, takes: int) -> None:
        """Wait for a trial, then make it, when a core is free."""
        try:
            _prepare()
            _yield_all()
            self.warm_up()
            ahead.send(b"w")
            how, descriptors, _, _ = socket.recv_fds(ahead, 1, 1)
            if how:
                os.write(takes, b"t")
                ahead.close()
                self._try_what(socket.socket(fileno=descriptors[0]))
        finally:
            os._exit(0)

    def run(self, line: socket.socket, how: bytes) -> None:
        """Make a trial at once."""
        try:
            _prepare()
            self._try_what(line, how)
        finally:
            os._exit(0)

    def _try_what(self, line: socket.socket, how: bytes = COMPETING) -> None:
        """The trial that this line asks for."""
        signal.setitimer(signal.ITIMER_REAL, WALL_S)
        asked = _read_all(line)
        line.sendall(b"%d\n" % os.getpid())
        if how == IDLE:
            _yield_all()
        pages, resident = _memory()
        limit = pages + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        for verdict in _verdicts(self._tokens, self._special, pickle.loads(asked), resident):
            line.sendall(json.dumps(verdict).encode() + b"\n")
        line.close()  # before its memory is given back, which takes longer than most trials


def _prepare() -> None:
    """What a child is besides its trial."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # the first to go where memory ends
        Path("/proc/self/oom_score_adj").write_text("1000")
    # What the library writes when it is out of memory is no news.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _yield_all() -> None:
    """Have a core only when nobody else wants it."""
    with contextlib.suppress(OSError):  # where a sandbox does not let it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


_WARM = Concat(
    (
        json_schema_part(
            {
                "type": "object",
                "properties": {
                    "a": {"type": "string", "maxLength": 9},
                    "b": {"type": "array", "items": {"$ref": "#/$defs/c"}},
                    "d": {"enum": ["e", 1, None]},
                },
                "required": ["a"],
                "$defs": {"c": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "number"}]}},
            }
        ),
        Pattern("[a-z]*"),
    )
)
"""See `warm_up`."""


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
    verdict = {"error": error, "size": max(_LEAST_BYTES, _memory()[1] - resident)}
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
    with (
        socket.socket(fileno=int(sys.argv[1])) as _control,
        socket.socket(fileno=int(sys.argv[2])) as _ahead,
    ):
        _serve(_control, _ahead)

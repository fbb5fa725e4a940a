"""The tokenizing child: `python -m xpyd_router.tokens.child`, started by `process`.

One thread, one request after the other, answers in the order of the questions. It ends when its
stdin does, or with its parent. It has no secrets in its environment, no descriptors but the pipes,
bounded memory, and bounded CPU time for a template; what gets by that is killed by the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Generator
from types import FrameType
from typing import BinaryIO

import orjson

from xpyd_core.errors import ProtocolError, UserError
from xpyd_core.tokenizer_files import decode_tokenizer_files
from xpyd_router.tokens.checkpoint import Checkpoint, Limits
from xpyd_router.tokens.prompts import Refused
from xpyd_router.tokens.wire import (
    HEAD,
    Count,
    Counted,
    Forget,
    FromChild,
    Load,
    Loaded,
    ToChild,
    frame_head,
    to_child,
)

MAX_MEMORY_BYTES = 2 * 1024**3
"""Of private data: a vocabulary of 256 k entries takes some 300 MB."""
RENDER_CPU_S = 0.5
"""A conversation of a hundred messages takes about a millisecond."""
_PR_SET_PDEATHSIG = 1


class _OutOfTime(BaseException):
    """Not an Exception, so that what a template calls does not catch it."""


@contextlib.contextmanager
def cpu_limit(seconds: float = RENDER_CPU_S) -> Generator[None]:
    """Refused when what is inside takes more CPU time. Main thread only."""

    def over(_number: int, _frame: FrameType | None) -> None:
        raise _OutOfTime

    signal.signal(signal.SIGVTALRM, over)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _OutOfTime as error:
        raise Refused("the chat template takes too long") from error


class Child:
    """The checkpoints by key, and the answers to frames."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[str, Checkpoint] = {}

    def answer(self, head: bytes, body: bytes) -> tuple[FromChild, bytes] | None:
        """What is to be sent back for one frame, if anything."""
        message: ToChild = to_child.decode(head)
        match message:
            case Load(key):
                return self._load(key, body), b""
            case Forget(key):
                self._known.pop(key, None)
                return None
            case Count(key, is_chat):
                return self._count(key, body, is_chat)

    def _load(self, key: str, body: bytes) -> Loaded:
        self._known.pop(key, None)  # two at once may be too much
        try:
            files = decode_tokenizer_files(body)
            made = self._known[key] = Checkpoint(files, self._limits, cpu_limit)
        except (ProtocolError, UserError, MemoryError) as error:
            return Loaded(str(error) or type(error).__name__)
        return Loaded(block_tokens=made.block_tokens)

    def _count(self, key: str, body: bytes, is_chat: bool) -> tuple[Counted, bytes]:
        known = self._known.get(key)
        if known is None:
            return Counted(refused="not loaded"), b""
        try:
            tokens, hashes = known.count(orjson.loads(body), is_chat=is_chat)
        except (Refused, orjson.JSONDecodeError, MemoryError, RecursionError) as error:
            return Counted(refused=str(error) or type(error).__name__), b""
        return Counted(tokens), b"".join(hashes)


def _serve(child: Child, source: BinaryIO, sink: BinaryIO) -> None:
    while lengths := source.read(HEAD.size):
        head_bytes, body_bytes = HEAD.unpack(lengths)
        answer = child.answer(source.read(head_bytes), source.read(body_bytes))
        if answer is not None:
            message, body = answer
            sink.write(frame_head(message, len(body)) + body)
            sink.flush()


def main() -> None:
    """Serve until stdin ends."""
    # The router drains at these; the child goes with it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a library prints must not come between frames.
    answers = os.dup(1)
    os.dup2(2, 1)
    with open(answers, "wb") as sink, contextlib.suppress(BrokenPipeError):
        _serve(Child(Limits()), sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()

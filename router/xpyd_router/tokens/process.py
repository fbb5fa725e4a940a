"""The tokenizing child as its parent sees it: questions in, answers out, killed when it hangs.

The child works in order. Few questions are with it; the rest waits here, so that those whose askers
left or waited too long are never sent. Every wait is bounded: an asker's by `wait_s`, the child's
own for one question by `answer_s`, after which it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from xpyd_router.tokens.wire import (
    HASH_BYTES,
    HEAD,
    Count,
    Counted,
    Forget,
    FromChild,
    Load,
    Loaded,
    ToChild,
    frame_head,
    from_child,
)

COMMAND = (sys.executable, "-P", "-m", "xpyd_router.tokens.child")
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "TZ")
"""The child runs what others wrote: it gets none of the router's secrets."""
_PIECE_BYTES = 256 * 1024
_ENDING_S = 5.0


@dataclass(frozen=True)
class ChildLimits:
    """Bounds on work and waits."""

    wait_s: float = 1.0
    """How long an asker waits: the prompt is to be prefilled meanwhile."""
    answer_s: float = 10.0
    """For one count in the child. One that is longer than any honest one has it killed."""
    load_s: float = 60.0
    """For writing and reading tokenizer files of 64 MiB."""
    max_body_bytes: int = 1024 * 1024
    """Of one request. A megabyte is encoded in about half a second."""
    max_waiting: int = 256
    max_waiting_bytes: int = 8 * 1024 * 1024
    ahead: int = 4
    """Questions with the child: it never waits for the parent."""


class Uncounted(Exception):
    """There is no count. `reason` is a metric's label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ChildEnded(Exception):
    """The child ended before it answered."""


Answer = tuple[FromChild, bytes]


@dataclass(eq=False)
class _Question:
    message: Count | Load
    body: bytes
    answer: asyncio.Future[Answer]
    limit_s: float


class TokenChild:
    """One child process. Made by `start`, in the event loop that uses it."""

    def __init__(self, process: Process, limits: ChildLimits) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Question] = deque()
        self._waiting_bytes = 0
        self._sent: deque[_Question] = deque()
        self._is_loading = False
        self._alarm: asyncio.TimerHandle | None = None
        self.blamed: str | None = None
        """The key whose question it died of."""
        self._reading = self._loop.create_task(self._read())

    @classmethod
    async def start(cls, limits: ChildLimits, command: Sequence[str] = COMMAND) -> TokenChild:
        """Start one; OSError where it cannot be."""
        given = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # One text is encoded at a time: threads of the library's own would only cost.
            env={**given, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        return cls(process, limits)

    @property
    def has_ended(self) -> bool:
        """Whether it answers no more."""
        return self._reading.done()

    async def close(self) -> None:
        """End it, and wait until it is gone."""
        self.kill()
        await self._reading
        async with asyncio.timeout(_ENDING_S):
            await self._process.wait()

    def kill(self) -> None:
        """End it at once. What waits gets ChildEnded."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def load(self, key: str, body: bytes) -> str:
        """Have it read tokenizer files; an error's text, empty where it went well.

        One at a time. Raises ChildEnded, also at the deadline; cancelled, the child ends.
        """
        if self.has_ended:
            raise ChildEnded
        self._is_loading = True
        question = _Question(Load(key), body, self._loop.create_future(), self._limits.load_s)
        try:
            async with asyncio.timeout(self._limits.load_s):
                self._send(question, 0)
                for start in range(0, len(body), _PIECE_BYTES):
                    self._put(body[start : start + _PIECE_BYTES])
                    await self._stdin.drain()
                message, _ = await question.answer
        except (OSError, TimeoutError) as error:
            self.kill()
            raise ChildEnded from error
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            self._is_loading = False
        self._pump()
        return cast(Loaded, message).error

    def forget(self, key: str) -> None:
        """Have it free tokenizer files. Not while it loads."""
        if not self.has_ended:
            self._write(Forget(key), b"")

    async def count(self, key: str, raw: bytes, *, is_chat: bool) -> tuple[int, tuple[bytes, ...]]:
        """Tokens and block hashes of the request `raw`; Uncounted in bounded time."""
        limits = self._limits
        if len(raw) > limits.max_body_bytes:
            raise Uncounted("long")
        if self.has_ended:
            raise Uncounted("failed")
        too_many = len(self._waiting) >= limits.max_waiting
        if too_many or self._waiting_bytes + len(raw) > limits.max_waiting_bytes:
            raise Uncounted("busy")
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting.append(_Question(Count(key, is_chat), raw, answer, limits.answer_s))
        self._waiting_bytes += len(raw)
        self._pump()
        try:
            async with asyncio.timeout(limits.wait_s):
                message, hashes = await answer
        except TimeoutError as error:
            raise Uncounted("late") from error
        except ChildEnded as error:
            raise Uncounted("failed") from error
        counted = cast(Counted, message)
        if counted.refused:
            raise Uncounted("refused")
        starts = range(0, len(hashes), HASH_BYTES)
        return counted.tokens, tuple(hashes[at : at + HASH_BYTES] for at in starts)

    def _pump(self) -> None:
        """Send what waits, as far as the child may have it; not what nobody waits for any more."""
        while self._waiting and len(self._sent) < self._limits.ahead and not self._is_loading:
            question = self._waiting.popleft()
            self._waiting_bytes -= len(question.body)
            if not question.answer.done():
                self._send(question, len(question.body))

    def _send(self, question: _Question, written: int) -> None:
        self._sent.append(question)
        if len(self._sent) == 1:
            self._watch()
        self._write(question.message, question.body, written)

    def _write(self, message: ToChild, body: bytes, written: int | None = None) -> None:
        """The frame's head, and the first `written` bytes of its body; None: all."""
        self._put(frame_head(message, len(body)) + body[:written])

    def _put(self, data: bytes) -> None:
        # A pipe that broke is closed before the child's end is read, which is what counts.
        if not self._stdin.is_closing():
            self._stdin.write(data)

    def _watch(self) -> None:
        """Give the child its time for the question it is at."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None
        if self._sent:
            self._alarm = self._loop.call_later(self._sent[0].limit_s, self.kill)

    async def _read(self) -> None:
        """Take answers until the child ends."""
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    lengths = await self._stdout.readexactly(HEAD.size)
                    head_bytes, body_bytes = HEAD.unpack(lengths)
                    head = await self._stdout.readexactly(head_bytes)
                    body = await self._stdout.readexactly(body_bytes)
                    self._take(from_child.decode(head), body)
        finally:
            self._end()

    def _take(self, message: FromChild, body: bytes) -> None:
        question = self._sent.popleft()
        if not question.answer.done():
            question.answer.set_result((message, body))
        self._watch()
        self._pump()

    def _end(self) -> None:
        if self._sent:
            self.blamed = self._sent[0].message.key
        for question in (*self._sent, *self._waiting):
            if not question.answer.done():
                question.answer.set_exception(ChildEnded())
        self._sent.clear()
        self._waiting.clear()
        self._waiting_bytes = 0
        self._watch()
        self.kill()  # it may have closed its stdout and live
        self._stdin.close()

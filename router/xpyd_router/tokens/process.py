"""The tokenizing child as its parent sees it: questions in, answers out, killed when it hangs.

The child works in order. Few questions are with it; the rest waits here, so that those whose askers
left or waited too long are never sent. Every wait is bounded: an asker's by `wait_s`, the child's
own for one question by `answer_s`, after which it is killed.

A request waits for its count: none has a task or timer of its own, one timer looks after all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from xpyd_router.tokens.wire import (
    HASH_BYTES,
    HEAD,
    Count,
    Counted,
    ForgetTokenizer,
    FromChild,
    Loaded,
    LoadTokenizer,
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
    """Deadline for one count in the child, far above an honest one; the child is killed then."""
    load_s: float = 60.0
    """Deadline for writing and reading tokenizer files of 64 MiB."""
    max_body_bytes: int = 1024 * 1024
    """The bound on one request. A megabyte is encoded in about half a second."""
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


@dataclass(eq=False, slots=True)
class _Question:
    message: Count | LoadTokenizer
    body: bytes
    answer: asyncio.Future[Answer]
    asked_s: float
    limit_s: float
    """How long the child may work at the question."""


class TokenChild(asyncio.SubprocessProtocol):
    """One child process. Made by `start`, in the event loop that uses it."""

    def __init__(self, limits: ChildLimits) -> None:
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._process: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._waiting: deque[_Question] = deque()
        self._waiting_bytes = 0
        self._sent: deque[_Question] = deque()
        self._head_since_s = 0.0
        self._is_loading = False
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self.block_tokens: dict[str, int] = {}
        """Tokens of a block, by the key of what is loaded."""
        self.blamed: str | None = None
        """The key whose question the child died of."""

    @classmethod
    async def start(cls, limits: ChildLimits, command: Sequence[str] = COMMAND) -> TokenChild:
        """Start one; OSError where it cannot be."""
        given = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        child = cls(limits)
        await child._loop.subprocess_exec(
            lambda: child,
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            # One text is encoded at a time: threads of the library's own would only cost.
            env={**given, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        return child

    @property
    def has_ended(self) -> bool:
        """Whether it answers no more."""
        return self._ended.is_set()

    @property
    def pid(self) -> int | None:
        """The id of the child."""
        return self._process.get_pid() if self._process is not None else None

    async def close(self) -> None:
        """End the child, and wait until it is gone."""
        self.kill()
        async with asyncio.timeout(_ENDING_S):
            await self._ended.wait()
        if self._process is not None:
            self._process.close()

    def kill(self) -> None:
        """End it at once. What waits gets ChildEnded."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def load(self, key: str, body: bytes) -> str:
        """Have it read tokenizer files; an error's text, empty where it went well.

        One at a time. Raises ChildEnded, also at the deadline; cancelled, the child ends.
        """
        if self.has_ended:
            raise ChildEnded
        self._is_loading = True
        question = self._question(LoadTokenizer(key), body, self._limits.load_s)
        try:
            async with asyncio.timeout(self._limits.load_s):
                self._send(question, 0)
                for start in range(0, len(body), _PIECE_BYTES):
                    self._put(body[start : start + _PIECE_BYTES])
                    await self._may_write.wait()
                message, _ = await question.answer
        except TimeoutError as error:
            self.kill()
            raise ChildEnded from error
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            self._is_loading = False
        self._pump()
        loaded = cast(Loaded, message)
        self.block_tokens[key] = loaded.block_tokens
        return loaded.error

    def forget(self, key: str) -> None:
        """Have it free tokenizer files. Not while it loads."""
        self.block_tokens.pop(key, None)
        self._write(ForgetTokenizer(key), b"")

    async def count(self, key: str, raw: bytes, *, is_chat: bool) -> tuple[int, tuple[bytes, ...]]:
        """Tokens and block hashes of the request `raw`; Uncounted in bounded time."""
        limits = self._limits
        if len(raw) > limits.max_body_bytes:
            raise Uncounted("long")
        if self._ended.is_set():
            raise Uncounted("failed")
        too_many = len(self._waiting) >= limits.max_waiting
        if too_many or self._waiting_bytes + len(raw) > limits.max_waiting_bytes:
            raise Uncounted("busy")
        question = self._question(Count(key, is_chat), raw, limits.answer_s)
        self._waiting.append(question)
        self._waiting_bytes += len(raw)
        self._pump()
        try:
            message, hashes = await question.answer
        except TimeoutError as error:
            raise Uncounted("late") from error
        except ChildEnded as error:
            raise Uncounted("failed") from error
        counted = cast(Counted, message)
        if counted.refused:
            raise Uncounted("refused")
        starts = range(0, len(hashes), HASH_BYTES)
        return counted.tokens, tuple(hashes[at : at + HASH_BYTES] for at in starts)

    def _question(self, message: Count | LoadTokenizer, body: bytes, limit_s: float) -> _Question:
        now = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._look)
        return _Question(message, body, self._loop.create_future(), now, limit_s)

    def _pump(self) -> None:
        """Send what waits, as far as the child may have it; not what has no waiting caller any
        more.
        """
        while self._waiting and len(self._sent) < self._limits.ahead and not self._is_loading:
            question = self._waiting.popleft()
            self._waiting_bytes -= len(question.body)
            if not question.answer.done():
                self._send(question, len(question.body))

    def _send(self, question: _Question, written: int) -> None:
        if not self._sent:
            self._head_since_s = self._loop.time()
        self._sent.append(question)
        self._write(question.message, question.body, written)

    def _write(self, message: ToChild, body: bytes, written: int | None = None) -> None:
        """The frame's head, and the first `written` bytes of its body; None: all."""
        self._put(frame_head(message, len(body)) + body[:written])

    def _put(self, data: bytes) -> None:
        # A pipe that broke is closed before the child's end is known, which is what counts.
        if self._stdin is not None and not self._stdin.is_closing():
            self._stdin.write(data)

    # --- time

    @property
    def _tick_s(self) -> float:
        """The period of checks: a limit is noticed at most this much late."""
        return min(self._limits.wait_s, self._limits.answer_s, self._limits.load_s) / 4

    def _look(self) -> None:
        """End waits that are over, and a child that hangs. Runs while there are questions."""
        now = self._loop.time()
        if self._sent and now - self._head_since_s >= self._sent[0].limit_s:
            self.kill()
        for question in (*self._sent, *self._waiting):
            is_late = now - question.asked_s >= self._limits.wait_s
            if is_late and not question.answer.done() and isinstance(question.message, Count):
                question.answer.set_exception(TimeoutError())
        is_busy = bool(self._sent or self._waiting)
        self._timer = self._loop.call_later(self._tick_s, self._look) if is_busy else None

    # --- what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The process runs."""
        self._process = cast(asyncio.SubprocessTransport, transport)
        self._stdin = cast("asyncio.WriteTransport", self._process.get_pipe_transport(0))

    def pause_writing(self) -> None:
        """The pipe to the child is full."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """The pipe has room again."""
        self._may_write.set()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Answers, or parts of them."""
        received = self._received
        received += data
        at = 0
        while len(received) - at >= HEAD.size:
            head_bytes, body_bytes = HEAD.unpack_from(received, at)
            begin = at + HEAD.size
            middle, end = begin + head_bytes, begin + head_bytes + body_bytes
            if len(received) < end:
                break
            self._take(from_child.decode(received[begin:middle]), bytes(received[middle:end]))
            at = end
        del received[:at]
        self._pump()

    def _take(self, message: FromChild, body: bytes) -> None:
        question = self._sent.popleft()
        self._head_since_s = self._loop.time()
        if not question.answer.done():
            question.answer.set_result((message, body))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """The child closed a pipe, or a write failed: it needs both, so it is ended."""
        self._may_write.set()
        self.kill()

    def process_exited(self) -> None:
        """The child has exited."""
        if self._sent:
            self.blamed = self._sent[0].message.key
        for question in (*self._sent, *self._waiting):
            if not question.answer.done():
                question.answer.set_exception(ChildEnded())
        self._sent.clear()
        self._waiting.clear()
        self._waiting_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
        self._may_write.set()
        self._ended.set()

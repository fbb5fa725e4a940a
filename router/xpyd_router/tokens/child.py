"""The tokenizing child: `python -m xpyd_router.tokens.child`, started by `process`.

One thread answers one request after the other, in order. It ends when its stdin does, or with its
parent. It has no secrets in its environment, no descriptors but the pipes, bounded memory, and
bounded CPU time for a template; the parent kills what gets past that. `Checkpoint` is one
checkpoint's tokenizer, templates and block chain; it calls the library as the engine does
(xpyd_worker.runner.tokenizer), so that the ids are the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, BinaryIO, NamedTuple, cast

import orjson
import tokenizers

from xpyd_core.blocks import SCHEME, block_hashes
from xpyd_core.errors import ProtocolError, UserError
from xpyd_core.tokenizer_files import TokenizerFiles, decode_tokenizer_files
from xpyd_router.tokens.prompts import (
    Prompt,
    Refused,
    completion_prompts,
    conversation,
    flag,
    kept_tokens,
    salt,
)
from xpyd_router.tokens.template import ChatTemplates
from xpyd_router.tokens.wire import (
    HEAD,
    Count,
    Counted,
    ForgetTokenizer,
    FromChild,
    Loaded,
    LoadTokenizer,
    ToChild,
    frame_head,
    to_child,
)

_LONG_CHARACTERS = 4096
Guard = Callable[[], AbstractContextManager[None]]


class PromptLimits(NamedTuple):
    """Bounds on one request."""

    max_characters: int = 4 * 1024 * 1024
    """The bound on characters that a template puts out."""
    max_hashes: int = 2048
    """The bound on hashes of a chain: 32 Ki tokens in blocks of 16. Longer prefixes are not
    distinguished.
    """


class Counts(NamedTuple):
    """Tokens of all prompts, and the hashes of the first one's full blocks."""

    tokens: int
    hashes: list[bytes]


class Checkpoint:
    """Immutable after it was made. `guard` bounds the time of what runs in it."""

    def __init__(
        self, files: TokenizerFiles, limits: PromptLimits, guard: Guard = lambda: nullcontext()
    ) -> None:
        """Raises UserError for a tokenizer that cannot be read. Slow for a large vocabulary."""
        self._files = files
        self._limits = limits
        self._guard = guard
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(files.tokenizer)
        except Exception as error:  # the Rust library raises plain Exception
            raise UserError(f"tokenizer: {error}") from error
        self._templates = ChatTemplates(
            files.chat_templates, files.special_tokens, max_characters=limits.max_characters
        )

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self._files.block_size

    def count(self, fields: Mapping[str, Any], *, is_chat: bool) -> Counts:
        """What the engine will have of a request with these `fields`; Refused where it has none."""
        prompts = self._chat_ids(fields) if is_chat else self._completion_ids(fields)
        worst = max((max(ids) for ids in prompts if ids), default=0)
        if not all(prompts) or worst >= self._files.vocab_size:
            raise Refused("a prompt is empty or has an id that the model does not know")
        hashes: list[bytes] = []
        if self._files.prefix_caching and self._files.block_hash == SCHEME:
            size = self._files.block_size
            first = prompts[0][: size * self._limits.max_hashes]
            hashes = block_hashes(first, block_size=size, salt=salt(fields))
        return Counts(sum(map(len, prompts)), hashes)

    def _completion_ids(self, fields: Mapping[str, Any]) -> list[list[int]]:
        is_special = flag(fields, "add_special_tokens", default=True)
        kept = kept_tokens(fields, self._files.max_model_len)

        def ids(prompt: Prompt) -> list[int]:
            found = self._encode(prompt, is_special) if isinstance(prompt, str) else list(prompt)
            return found if kept is None else found[-kept:]

        return [ids(prompt) for prompt in completion_prompts(fields)]

    def _chat_ids(self, fields: Mapping[str, Any]) -> list[list[int]]:
        given = conversation(fields, knows_developer=self._files.knows_developer)
        is_special = flag(fields, "add_special_tokens", default=False)
        kept = kept_tokens(fields, self._files.max_model_len)
        with self._guard():
            text = self._templates.render(given)
        ids = self._encode(text, is_special)
        return [ids if kept is None else ids[-kept:]]

    def _encode(self, text: str, is_special: bool) -> list[int]:
        if len(text) <= _LONG_CHARACTERS:
            encoding = self._tokenizer.encode(text, add_special_tokens=is_special)
        else:
            # "fast": without the offsets, which are not read here.
            encode = self._tokenizer.encode_batch_fast
            encoding = encode([text], add_special_tokens=is_special)[0]
        return cast("list[int]", encoding.ids)


MAX_MEMORY_BYTES = 2 * 1024**3
"""Limit of private data: a vocabulary of 256 k entries takes some 300 MB."""
RENDER_CPU_S = 0.5
"""A conversation of a hundred messages takes about a millisecond."""
_PR_SET_PDEATHSIG = 1


class _OutOfTime(BaseException):
    """The child's time is over. No Exception, so that what a template calls does not catch it."""


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

    def __init__(self, limits: PromptLimits) -> None:
        self._limits = limits
        self._known: dict[str, Checkpoint] = {}

    def answer(self, head: bytes, body: bytes) -> tuple[FromChild, bytes] | None:
        """What is to be sent back for one frame, if anything."""
        message: ToChild = to_child.decode(head)
        match message:
            case LoadTokenizer(key):
                return self._load(key, body), b""
            case ForgetTokenizer(key):
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
        _serve(Child(PromptLimits()), sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()

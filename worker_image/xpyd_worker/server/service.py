"""What the HTTP handlers share: the served model, the instance's place in the fleet, text threads.

Main builds one Service when the model is loaded; after that it is read only. It must not know HTTP,
except for the two headers with which a router asks for the tokenizer's files.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from quart import Response

from xpyd_core.errors import ApiError
from xpyd_core.keys import Keys
from xpyd_core.kv_outcome import PeerCounts
from xpyd_core.request_id import Address
from xpyd_core.tokenizer_files import ServedFiles
from xpyd_worker.config import Role
from xpyd_worker.grammar.compiler import GrammarCompiler, Target
from xpyd_worker.model.generation import OPENAI_DEFAULTS, SamplingDefaults
from xpyd_worker.parsers.reasoning import Thinking
from xpyd_worker.parsers.registry import (
    FALLBACK,
    NO_PARSERS,
    PROMPT_END_TOKENS,
    ChatOptions,
    ChatParser,
    Parsers,
)
from xpyd_worker.runner.tokenizer import Tokenizer
from xpyd_worker.server.bridge import EngineBridge
from xpyd_worker.server.output_text import Detokenizer

if TYPE_CHECKING:
    from xpyd_worker.kv.engine import ProbePeer

T = TypeVar("T")
# More would take the cores from the engine. A megabyte takes about half a second.
_THREADS = 2
_MAX_JOBS = 64


class TextThreads:
    """A few threads and a bounded queue before them. Main closes it."""

    def __init__(self, *, threads: int = _THREADS, max_jobs: int = _MAX_JOBS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._slots = threading.BoundedSemaphore(max_jobs)

    async def run(
        self,
        work: Callable[[], T],
        *,
        is_short: bool = False,
        on_end: Callable[[], None] | None = None,
    ) -> T:
        """`work()` on a thread, or here where it `is_short`; ApiError 503 when too much waits
        already.

        Cancelled, work that waits is dropped; what runs ends by itself and keeps its slot so long.
        `on_end` is called in the loop when no thread has the work, or is to get it, any more.
        """
        if is_short:
            return work()
        if not self._slots.acquire(blocking=False):
            message = "too many long texts are being tokenized"
            raise ApiError(503, message, retry_after_s=1)
        future = self._pool.submit(work)
        future.add_done_callback(self._free)
        if on_end is not None:
            future.add_done_callback(partial(_say_end, asyncio.get_running_loop(), on_end))
        return await asyncio.wrap_future(future)

    async def finish(self, work: Callable[[], T]) -> T:
        """`work()` for the answer to a request that was computed: behind what waits, and never
        refused. The requests that were let in bound how many there are."""
        return await asyncio.wrap_future(self._pool.submit(work))

    def _free(self, _future: Future[T]) -> None:
        self._slots.release()

    def close(self) -> None:
        """Start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _say_end(
    loop: asyncio.AbstractEventLoop, on_end: Callable[[], None], _future: Future[Any]
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and what it counted gone
        loop.call_soon_threadsafe(on_end)


_PIECE_BYTES = 256 * 1024


def tokenizer_files_response(files: ServedFiles, if_none_match: str) -> Response:
    """The document; 304 where the caller has it."""
    if files.is_known(if_none_match):
        return Response(b"", 304, {"ETag": files.etag})
    headers = {"ETag": files.etag, "Content-Length": str(len(files.body))}
    return Response(_pieces(files.body), 200, headers, content_type="application/json")


async def _pieces(body: bytes) -> AsyncGenerator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


def seeds(base: int | None = None) -> Callable[[], int]:
    """Draws of 64 bits: unpredictable ones, or with a base the same at each start, in order."""
    return partial((random.SystemRandom() if base is None else random.Random(base)).getrandbits, 64)


@dataclass(frozen=True)
class ServedModel:
    """The loaded model as the API shows it.

    `names`: it answers to each; answers carry the first where the client named none.
    `vocab_size`: ids the model can embed. `max_model_len`: tokens of prompt and output together.
    `created`: Unix time of the load. `knows_developer`: the chat template has that role.
    `files`: what routers tokenize by; None where no router asks for it. `defaults`: of what a
    request does not say. `parsers`: how chats tell reasoning and tool calls from content.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    created: int
    knows_developer: bool = False
    files: ServedFiles | None = None
    defaults: SamplingDefaults = OPENAI_DEFAULTS
    parsers: Parsers = NO_PARSERS

    def name_for(self, asked: str | None) -> str:
        """The name that the answer carries; 404 for a model that is not served here."""
        if asked is None or asked in self.names:
            return asked or self.names[0]
        message = f"The model {asked[:100]!r} does not exist. Served: {', '.join(self.names)}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def detokenizer(
        self,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """A new one, for one choice behind `prompt`. `shown`: special tokens that are text even
        so."""
        tokenizer = self.tokenizer
        if skip_special_tokens and shown:
            return Detokenizer(
                partial(tokenizer.decode, skip_special_tokens=False),
                tokenizer.special_ids - shown,
                byte_ids=tokenizer.byte_ids,
                context=prompt,
            )
        joined: dict[int, str] = {}
        if not (skip_special_tokens or spaces_between_special_tokens):
            joined = {i: tokenizer.token_text(i) for i in tokenizer.special_ids}
        return Detokenizer(
            partial(tokenizer.decode, skip_special_tokens=skip_special_tokens),
            tokenizer.special_ids if skip_special_tokens else frozenset(),
            byte_ids=tokenizer.byte_ids,
            joined=joined,
            context=prompt,
        )

    def tokens_for(self, chat: ChatOptions | None) -> frozenset[int]:
        """Special tokens that the parsers of a chat must see."""
        if chat is None or not self._special:
            return frozenset()
        calls, thoughts = self._special
        return thoughts if chat.choice == "none" else calls | thoughts

    @cached_property
    def _special(self) -> tuple[frozenset[int], frozenset[int]]:
        """Special tokens with the texts that tool calls, and that reasoning, are known by."""
        tools, thinks = self.parsers.tools or FALLBACK, self.parsers.reasoning
        texts = {i: self.tokenizer.token_text(i) for i in self.tokenizer.special_ids}
        tags = () if thinks is None else (thinks.begin, thinks.end)
        return (
            frozenset(i for i, text in texts.items() if text in tools.special),
            frozenset(i for i, text in texts.items() if text in tags),
        )

    def prompt_end(self, prompt: Sequence[int]) -> str:
        """The text of a prompt's end, which may open the reasoning or close it."""
        end = prompt[-PROMPT_END_TOKENS:]
        return self.tokenizer.decode(end, skip_special_tokens=False)

    def parser_maker(
        self, chat: ChatOptions | None, prompt: Sequence[int]
    ) -> Callable[[], ChatParser | None]:
        """Makes the parser of each choice behind `prompt`; None where text is content only."""
        thinks = self.parsers.reasoning
        calls = chat is not None and chat.choice != "none"
        if chat is None or not (calls or thinks):
            return lambda: None
        start = "closed" if thinks is None else thinks.start_behind(self.prompt_end(prompt))
        family = self.parsers.tools or FALLBACK

        def make() -> ChatParser:
            thinking = None if thinks is None else Thinking(thinks.begin, thinks.end, start)
            return ChatParser(
                thinking,
                family.make(chat.tools) if calls else None,
                shows_reasoning=chat.include_reasoning,
                most_calls=chat.most_calls,
                must_call=chat.callable_names if chat.must_call else (),
            )

        return make

    @cached_property
    def grammar_target(self) -> Target:
        """What grammars are compiled for."""
        return Target(self.tokenizer, self.eos_token_ids, self.vocab_size)

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token: a text of b bytes has at least b / this many tokens."""
        token_bytes = self.tokenizer.token_bytes
        return max((len(token_bytes(i)) for i in range(self.tokenizer.vocab_size)), default=1) or 1


@dataclass(frozen=True)
class InstanceInfo:
    """This instance in its fleet. `incarnation` is random per process start; `keys` are the
    fleet's (none on an Aggregated instance without a key file); `kv_wait_s`: how long a request on
    D waits for its KV."""

    role: Role
    incarnation: str
    keys: Keys = ()
    kv_wait_s: float = 10.0


class KvPlace(NamedTuple):
    """Where the KV of a replica goes: its KV address, as pair ids name it, and the incarnation of
    its present start. `probe`: as in Service."""

    address: Address
    incarnation: str = ""
    probe: ProbePeer | None = None


@dataclass(frozen=True)
class Service:
    """All that a request needs. `max_requests`: prompts in the engine, over which 503 is given.
    `probe`: on P only; tests the way to a D and calls back, on another thread. `has_priorities`:
    the engine ranks by them. `draw_seed`: 64 bits for a request without a seed. `threads`: where
    long texts become tokens. `kv_peers`: on D, what became of the KV of requests, by P. `grammars`:
    where what an answer must look like is compiled. `malformed_calls`: tool calls that were not
    whole, by parser. `replicas`: how many the engine has. `kv_places`: theirs, by number, where KV
    moves; () of an engine that is one."""

    model: ServedModel
    instance: InstanceInfo
    bridge: EngineBridge
    max_requests: int = 1280
    probe: ProbePeer | None = None
    has_priorities: bool = False
    draw_seed: Callable[[], int] = field(default_factory=seeds)
    threads: TextThreads = field(default_factory=TextThreads)
    kv_peers: PeerCounts = field(default_factory=PeerCounts)
    malformed_calls: Counter[str] = field(default_factory=Counter[str])
    grammars: GrammarCompiler = field(default_factory=GrammarCompiler)
    replicas: int = 1
    kv_places: Callable[[], Sequence[KvPlace]] = tuple

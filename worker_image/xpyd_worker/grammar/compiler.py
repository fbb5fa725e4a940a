"""Compiles grammars on threads of its own, once for all that ask, and keeps the last ones.

The server's loop asks; the engine never does. A thread that compiles cannot be ended, so a grammar
is tried in a process of its own first (trial), which also bounds what it takes here. What is
refused is kept as well, so that a client that repeats a bad schema costs nothing. What was tried is
not tried again: when a Start is worn, or was dropped for its memory, it is only compiled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from xpyd_core.bodies import refuse
from xpyd_core.distribution import Distribution
from xpyd_core.errors import ApiError, UserError
from xpyd_worker.grammar.matcher import Matcher, Start
from xpyd_worker.grammar.spec import Grammar, Part, characters_of, check_parts, schema_places
from xpyd_worker.grammar.trial import NoTrial, TooSlow, Trials
from xpyd_worker.grammar.trial_process import new_matcher

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_log = logging.getLogger(__name__)
THREADS = 4
"""Most of their time they wait for a trial."""
MAX_WAITING = 64
_NICE = 5
MOST_ENTRIES = 256
MOST_BYTES = 256 << 20
"""Of the kept grammars: their documents, what a trial of each took, and what masks taught it."""
MOST_CHARACTERS = 64 << 20
"""Of the texts that they are known by, and their documents."""
DEADLINE_S = 10.0
COMPILE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_SHOWN_CHARACTERS = 300
_SHOWN_PLACE = 200


class Vocabulary(Protocol):
    """What the compiler reads of a tokenizer (runner.tokenizer.Tokenizer)."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def to_json(self) -> str: ...

    def token_piece(self, token_id: int) -> str: ...


@dataclass(frozen=True)
class Target:
    """What answers consist of: the model's tokens. `vocab_size`: of its logits."""

    tokenizer: Vocabulary
    eos_token_ids: frozenset[int]
    vocab_size: int


@dataclass
class GrammarMetrics:
    """Counters of one compiler, written on the loop. `hits`: requests whose grammar was kept or
    being compiled; `failures`: grammars that were refused; `kept_bytes`: what the kept ones take,
    as of the last one that came."""

    kept_bytes: int = 0
    compiled: int = 0
    hits: int = 0
    failures: int = 0
    seconds: Distribution = field(default_factory=lambda: Distribution(COMPILE_SECONDS))


@dataclass(frozen=True)
class _Tried:
    """A grammar that may be used, or why it may not. `size`: bytes that it took, compiled.
    `schema`, `place`: which of its schemas is at fault, and where in that."""

    document: str = ""
    error: str = ""
    size: int = 0
    schema: int | None = None
    place: str = ""

    def refusal(self, grammar: Grammar) -> ApiError:
        """The answer to a request that asks for it."""
        field = grammar.field
        if self.schema is not None:
            field = schema_places(grammar.root)[self.schema] or field
        return refuse(field + self.place, self.error)


@dataclass
class _Kept:
    """A grammar that was asked for, and its beginning unless that was dropped for its memory."""

    tried: _Tried
    start: Start | None
    asked_characters: int
    """Of what it is known by: a refusal has no more."""

    @property
    def characters(self) -> int:
        """Of its texts."""
        return self.asked_characters + len(self.tried.document)

    @property
    def size(self) -> int:
        start = self.start
        own = 0 if start is None else self.tried.size + start.learned_bytes
        return len(self.tried.document) + own


@dataclass(frozen=True)
class _Compiled:
    kept: _Kept
    seconds: float


class GrammarCompiler:
    """The compiled grammars of one model. Used on one loop."""

    def __init__(
        self,
        *,
        deadline_s: float = DEADLINE_S,
        most_entries: int = MOST_ENTRIES,
        most_bytes: int = MOST_BYTES,
        most_characters: int = MOST_CHARACTERS,
    ) -> None:
        self.metrics = GrammarMetrics()
        self._most_entries = most_entries
        self._most_bytes = most_bytes
        self._most_characters = most_characters
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(
            THREADS, thread_name_prefix="grammar", initializer=_yield_to_others
        )
        self._kept: OrderedDict[Part, _Kept] = OrderedDict()
        self._coming: dict[Part, asyncio.Future[_Compiled]] = {}
        self._tokens: _Tokens | None = None

    def prepare(self, target: Target) -> None:
        """Read the target's tokenizer, here and in the process for trials, both at once. It holds
        Python's lock, for a large vocabulary a second, so a server does it before it serves; where
        it was not done the first grammar does it."""
        self._tokens = _Tokens(target)
        try:
            trials = self._tokens.trials()
            trials.begin()
            self._tokens.get()
            trials.await_ready()
        except UserError as error:
            _log.warning("%s: requests for structured output get 400", error)
        except NoTrial as error:
            _log.warning("%s: the first request for structured output tries again", error)

    async def matchers(
        self, grammar: Grammar, target: Target, outputs: Sequence[Sequence[int]]
    ) -> tuple[Matcher, ...]:
        """A matcher for each choice, behind the ids that it has put out.

        ApiError 400 for a grammar that cannot be compiled, or that a choice's ids do not follow;
        503 where too many wait, or the machine has no time for it.
        """
        start = await self._start(grammar, target)
        work = partial(_matchers, start, [list(ids) for ids in outputs])
        if any(len(ids) for ids in outputs):
            found = await asyncio.wrap_future(self._threads.submit(work))
        else:
            found = work()
        if found is None:
            message = "these ids do not follow the grammar that the request asks for"
            raise refuse("kv_transfer_params.continue_from", message)
        return found

    async def _start(self, grammar: Grammar, target: Target) -> Start:
        root = grammar.root
        kept = self._kept.get(root)
        tried = None
        if kept is not None:
            self._kept.move_to_end(root)
            self.metrics.hits += 1
            if kept.tried.error:
                raise kept.tried.refusal(grammar)
            if kept.start is not None and not kept.start.is_worn:
                return kept.start
            tried = kept.tried
        coming = self._coming.get(root)
        if coming is not None:
            self.metrics.hits += kept is None
        else:
            check_parts(root, grammar.field)
            coming = self._begin(root, target, tried)
        try:
            # Shielded: a client that leaves does not take the grammar from others.
            compiled = await asyncio.wait_for(asyncio.shield(coming), self._deadline_s)
        except (TimeoutError, TooSlow):
            # What is too large ends by its CPU time: here others wanted the cores.
            message = f"{grammar.field}: the engine is too busy to compile it now; try again"
            raise ApiError(503, message, param=grammar.field, retry_after_s=1) from None
        except NoTrial as error:
            _log.warning("a grammar was not tried: %s", error)
            message = "grammars cannot be compiled at the moment"
            raise ApiError(503, message, retry_after_s=1) from None
        if compiled.kept.start is None:
            raise compiled.kept.tried.refusal(grammar)
        return compiled.kept.start

    def _begin(self, root: Part, target: Target, tried: _Tried | None) -> asyncio.Future[_Compiled]:
        if len(self._coming) >= MAX_WAITING:
            raise ApiError(503, "too many grammars are being compiled", retry_after_s=1)
        if self._tokens is None:
            self._tokens = _Tokens(target)
        work: Callable[[], _Compiled] = partial(_compile, self._tokens, root, tried)
        coming = asyncio.wrap_future(self._threads.submit(work))
        self._coming[root] = coming
        coming.add_done_callback(partial(self._keep, root, tried is None))
        return coming

    def _keep(self, root: Part, is_new: bool, coming: asyncio.Future[_Compiled]) -> None:
        del self._coming[root]
        if coming.cancelled() or coming.exception() is not None:
            return
        compiled = coming.result()
        if is_new:
            self.metrics.compiled += 1
            self.metrics.failures += compiled.kept.start is None
            self.metrics.seconds.observe(compiled.seconds)
        self._kept[root] = compiled.kept
        self._kept.move_to_end(root)
        while len(self._kept) > self._most_entries:
            self._kept.popitem(last=False)
        # From the newest: what does not fit beside it is compiled again when it is asked for.
        size = characters = 0
        for other, kept in reversed([*self._kept.items()]):
            if size + kept.size > self._most_bytes and other != root:
                kept.start = None
            characters += kept.characters
            if characters > self._most_characters and other != root:
                del self._kept[other]
            else:
                size += kept.size
        self.metrics.kept_bytes = size

    def close(self) -> None:
        """Start nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._tokens is not None:
            self._tokens.close()


class _Tokens:
    """The target's tokens as the library wants them: made by the first compilation."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._made: LLTokenizer | None = None
        self._trials: Trials | None = None
        self._lock = threading.Lock()

    def get(self) -> LLTokenizer:
        """Two threads may both make one: the later is as good. UserError where the library has no
        such tokenizers."""
        if self._made is None:
            from llguidance import LLTokenizer

            target = self._target
            try:
                self._made = LLTokenizer(
                    target.tokenizer.to_json(),
                    n_vocab=target.vocab_size,
                    eos_token=sorted(target.eos_token_ids) or None,
                )
            except (
                Exception
            ) as error:  # the library raises plain exceptions for what it cannot read
                message = f"the tokenizer of this model can follow no grammar: {error}"
                raise UserError(message) from error
        return self._made

    def trials(self) -> Trials:
        """The process that tries grammars of these tokens."""
        with self._lock:
            if self._trials is None:
                target = self._target
                eos = sorted(target.eos_token_ids)
                tokenizer = target.tokenizer
                special = {tokenizer.token_piece(i): i for i in sorted(tokenizer.special_ids)}
                self._trials = Trials(tokenizer.to_json(), target.vocab_size, eos, special)
            return self._trials

    def close(self) -> None:
        """End that process."""
        with self._lock:
            if self._trials is not None:
                self._trials.close()


def _yield_to_others() -> None:
    """This thread comes behind those that make answers. It holds Python's lock for microseconds."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _compile(tokens: _Tokens, root: Part, tried: _Tried | None) -> _Compiled:
    begun = time.monotonic()
    start = None
    try:
        if tried is None:
            tried = _tried(tokens, root)
        if not tried.error:
            start = Start(partial(new_matcher, tokens.get(), tried.document))
            if error := start.error:
                start, tried = None, _Tried(error=_shown(error))
    except UserError as error:
        tried = _Tried(error=_shown(str(error)))
    kept = _Kept(tried, start, characters_of(root))
    return _Compiled(kept, time.monotonic() - begun)


def _tried(tokens: _Tokens, root: Part) -> _Tried:
    tokens.get()  # what the library cannot read the trial cannot, either
    verdict = tokens.trials().run(root)
    if verdict.error:
        error = _shown(verdict.error)
        return _Tried(error=error, schema=verdict.schema, place=_short(verdict.place))
    return _Tried(verdict.document, size=verdict.size)


def _shown(error: str) -> str:
    found = " ".join(error.replace("<non-verbose/>", "").split())
    if found.startswith("NoExtension"):
        return "no text fits it, or a part of it"
    if "coerce_one_of" in found:
        return "a value may fit several of the schemas in oneOf; anyOf lets it"
    found, _, _ = found.partition(" 1 | start: ")  # an excerpt of what was rendered
    return found[:_SHOWN_CHARACTERS]


def _short(place: str) -> str:
    """The place, also where names in it are long."""
    return place if len(place) <= _SHOWN_PLACE else f"...{place[-_SHOWN_PLACE:]}"


def _matchers(start: Start, outputs: Sequence[Sequence[int]]) -> tuple[Matcher, ...] | None:
    found = tuple(start.matcher() for _ in outputs)
    follow = [one.accept(ids) for one, ids in zip(found, outputs, strict=True)]
    return found if all(follow) else None

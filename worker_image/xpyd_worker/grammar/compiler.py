"""Compiles grammars on threads of its own, once for all that ask, and keeps the last ones.

The server's loop asks; the engine never does. How long a compilation may take is bounded by the
sizes of a grammar (schema, spec) and the library's limits: a thread that runs cannot be ended. What
is refused is kept as well, so that a client that repeats a bad schema costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from xpyd_core.bodies import refuse
from xpyd_core.distribution import Distribution
from xpyd_core.errors import ApiError, UserError
from xpyd_worker.grammar.matcher import Matcher
from xpyd_worker.grammar.render import render
from xpyd_worker.grammar.spec import Grammar, Part, check_parts

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_log = logging.getLogger(__name__)
THREADS = 2
MAX_WAITING = 64
MOST_ENTRIES = 256
MOST_BYTES = 16 << 20
"""Of the kept grammars' documents. Compiled, one takes a few times as much."""
DEADLINE_S = 5.0
COMPILE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
# A state of a lexer takes 1 to 2 KB, and each choice has its own: patterns that need more are made
# to explode. The other limits are the library's.
_LIMITS: Mapping[str, Any] = {
    "verbose_errors": False,
    "max_lexer_states": 50_000,
    # An object of 1,000 members that may be left out has four for each.
    "max_items_in_row": 5000,
}
_SHOWN_CHARACTERS = 300
_NO_FOLLOWER = "doesn't satisfy the grammar"
"""In the library's error for a token that the grammar has no place for."""


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
    being compiled; `failures`: grammars that were refused."""

    compiled: int = 0
    hits: int = 0
    failures: int = 0
    seconds: Distribution = field(default_factory=lambda: Distribution(COMPILE_SECONDS))


@dataclass(frozen=True)
class _Compiled:
    """A grammar at its beginning, or why there is none; `size` in bytes."""

    start: Matcher | None
    error: str
    size: int
    seconds: float


class GrammarCompiler:
    """The compiled grammars of one model. Used on one loop."""

    def __init__(self, *, deadline_s: float = DEADLINE_S) -> None:
        self.metrics = GrammarMetrics()
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._kept: OrderedDict[Part, _Compiled] = OrderedDict()
        self._size = 0
        self._coming: dict[Part, asyncio.Future[_Compiled]] = {}
        self._tokens: _Tokens | None = None

    def prepare(self, target: Target) -> None:
        """Read the target's tokenizer. It holds Python's lock, for a large vocabulary a second, so
        a server does it before it serves; where it was not done the first grammar does it."""
        self._tokens = _Tokens(target)
        try:
            self._tokens.get()
        except UserError as error:
            _log.warning("%s: requests for structured output get 400", error)

    async def matchers(
        self, grammar: Grammar, target: Target, outputs: Sequence[Sequence[int]]
    ) -> tuple[Matcher, ...]:
        """A matcher for each choice, behind the ids that it has put out.

        ApiError 400 for a grammar that cannot be compiled, or that a choice's ids do not follow;
        503 where too many wait.
        """
        compiled = await self._compiled(grammar, target)
        if compiled.start is None:
            for field, part in grammar.places:
                alone = await self._compiled(Grammar(part, field), target)
                if alone.start is None:
                    raise refuse(field, alone.error)
            raise refuse(grammar.field, compiled.error)
        work = partial(_matchers, compiled.start, [list(ids) for ids in outputs])
        if any(len(ids) for ids in outputs):
            found = await asyncio.wrap_future(self._threads.submit(work))
        else:
            found = work()
        if isinstance(found, tuple):
            return found
        if _NO_FOLLOWER in found:
            message = "these ids do not follow the grammar that the request asks for"
            raise refuse("kv_transfer_params.continue_from", message)
        # What is copied shares the library's limits: others have used them up.
        raise refuse(grammar.field, f"{found}; make it smaller")

    async def _compiled(self, grammar: Grammar, target: Target) -> _Compiled:
        root = grammar.root
        kept = self._kept.get(root)
        if kept is not None:
            self._kept.move_to_end(root)
            self.metrics.hits += 1
            return kept
        coming = self._coming.get(root)
        if coming is None:
            check_parts(root, grammar.field)
            coming = self._begin(root, target)
        else:
            self.metrics.hits += 1
        try:
            # Shielded: a client that leaves does not take the grammar from others.
            return await asyncio.wait_for(asyncio.shield(coming), self._deadline_s)
        except TimeoutError:
            message = f"not compiled within {self._deadline_s:g} s; make it smaller"
            raise refuse(grammar.field, message) from None

    def _begin(self, root: Part, target: Target) -> asyncio.Future[_Compiled]:
        if len(self._coming) >= MAX_WAITING:
            raise ApiError(503, "too many grammars are being compiled", retry_after_s=1)
        if self._tokens is None:
            self._tokens = _Tokens(target)
        work: Callable[[], _Compiled] = partial(_compile, self._tokens, root)
        coming = asyncio.wrap_future(self._threads.submit(work))
        self._coming[root] = coming
        coming.add_done_callback(partial(self._keep, root))
        return coming

    def _keep(self, root: Part, coming: asyncio.Future[_Compiled]) -> None:
        del self._coming[root]
        if coming.cancelled() or coming.exception() is not None:
            return
        compiled = coming.result()
        self.metrics.compiled += 1
        self.metrics.failures += compiled.start is None
        self.metrics.seconds.observe(compiled.seconds)
        self._kept[root] = compiled
        self._size += compiled.size
        while len(self._kept) > MOST_ENTRIES or self._size > MOST_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._size -= oldest.size

    def close(self) -> None:
        """Start nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Tokens:
    """The target's tokens as the library wants them: made by the first compilation."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._made: LLTokenizer | None = None

    def special(self) -> dict[str, int]:
        tokenizer = self._target.tokenizer
        return {tokenizer.token_piece(i): i for i in sorted(tokenizer.special_ids)}

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


def _compile(tokens: _Tokens, root: Part) -> _Compiled:
    from llguidance import LLMatcher, LLParserLimits

    begun = time.monotonic()
    try:
        document = render(root, tokens.special())
        made = tokens.get()
    except UserError as error:
        return _Compiled(None, str(error)[:_SHOWN_CHARACTERS], 0, time.monotonic() - begun)
    start = LLMatcher(made, document, log_level=0, limits=LLParserLimits(**_LIMITS))
    error = " ".join(start.get_error().split())[:_SHOWN_CHARACTERS]
    seconds = time.monotonic() - begun
    found = None if start.is_error() else Matcher(start)
    return _Compiled(found, error, len(document), seconds)


def _matchers(start: Matcher, outputs: Sequence[Sequence[int]]) -> tuple[Matcher, ...] | str:
    """The matchers, or why one of them cannot be where its output ends."""
    found = tuple(start.copy() for _ in outputs)
    for one, ids in zip(found, outputs, strict=True):
        if not one.accept(ids):
            return one.error
    return found

"""A choice's place in its grammar: takes its tokens, says which may come next.

The server makes it, advanced over what the choice put out elsewhere; from `submit` on the engine's
thread owns it. Masks that take long are filled on threads of a MaskFiller while the step's forward
runs. It must not know requests, schemas or tensors. See docs/adr/0066, docs/adr/0074 and
docs/adr/0087.

Copies of one library's matcher share its lexer: what one of them learns the others need not, but
its states fill up for all of them, and its errors are the errors of all. So a Start is copied for a
bounded number of choices and masks, and a matcher whose lexer is full makes one of its own, behind
the tokens that it has taken: a lexer learns little from tokens, and much from masks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

_FILL_DEADLINE_S = 60.0
"""A mask takes under a millisecond, at the limits of a grammar some ten. With a new lexer the
grammar's compilation and its tokens come on top (see trial_process.CPU_S)."""
_MOST_THREADS = 4
_QUICK_S = 50e-6
"""To hand a mask to a thread takes as long, and what the thread then takes from the forward."""
MASKS_OF_ONE = 2000
COPIES_OF_ONE = 32
_LEARNED_BYTES = 16 << 10
"""Of a lexer, by a mask: what the worst grammars seen need."""


class Start:
    """A grammar's beginning, to be copied until it `is_worn`: then a new one is to be made."""

    def __init__(self, make: Callable[[], LLMatcher]) -> None:
        """`make`: a new matcher of the library, with a lexer of its own. Takes what compiling the
        grammar takes."""
        self._make = make
        self._of = make()
        self._copies = 0
        self.masks = 0
        self.is_spoilt = False

    @property
    def error(self) -> str:
        """Why there is no such grammar, else empty."""
        return self._of.get_error() if self._of.is_error() else ""

    @property
    def is_worn(self) -> bool:
        """Whether its lexer has learned so much that new choices get another."""
        full = self.masks >= MASKS_OF_ONE or self._copies >= COPIES_OF_ONE
        return full or self.is_spoilt

    @property
    def learned_bytes(self) -> int:
        """Memory that its lexer may have taken since it was made."""
        return self.masks * _LEARNED_BYTES

    def matcher(self) -> Matcher:
        """One for a choice that has put out nothing."""
        self._copies += 1
        return Matcher(self, self._of.deep_copy())

    def renewed(self) -> LLMatcher:
        """One of the library's with a lexer that nobody else has."""
        return self._make()


class Matcher:
    """One choice in its grammar. Its own error ends it: it then takes no token any more."""

    def __init__(self, start: Start, of: LLMatcher) -> None:
        """`of`: the library's, this matcher's own."""
        self._start = start
        self._of = of
        self._taken: list[int] = []
        self._renewed_at = -1
        self._mask: PendingMask | None = None
        # The first one of a grammar has the most to find out.
        self._took_s = 1.0
        """The last mask."""

    def copy(self) -> Matcher:
        """Another one at the same place. Engines have no use for it: it is for tests that follow a
        choice beside its engine, which owns the choice's own."""
        found = Matcher(self._start, self._of.deep_copy())
        found._taken = list(self._taken)
        return found

    def accept(self, token_ids: Iterable[int]) -> bool:
        """The choice has put out these tokens, EOS among them where it did; whether they follow the
        grammar. False for good where they do not."""
        if self._mask is not None:
            # Nothing else may look at the matcher while it moves.
            self._mask.words()
            self._took_s = self._mask.took_s
            self._mask = None
        ids = list(token_ids)
        if self._of.consume_tokens(ids):
            self._taken += ids
            return True
        # A token that is not of the grammar is told from a lexer that is full by a new one.
        self._taken += ids
        return self._renew()

    def _renew(self) -> bool:
        """Take a new lexer, behind the same tokens; not twice behind the same ones."""
        if self._renewed_at == len(self._taken):
            return False
        self._renewed_at = len(self._taken)
        self._start.is_spoilt = True
        self._of = self._start.renewed()
        return self._of.consume_tokens(self._taken)

    @property
    def error(self) -> str:
        """Why nothing can follow, though the grammar is not complete; empty where there is none."""
        return self._of.get_error().partition("\n")[0]

    @property
    def is_finished(self) -> bool:
        """Whether the grammar is complete and nothing but EOS can follow."""
        return self._of.is_stopped() and not self._of.is_error()

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self._of.is_accepting()

    def mask(self, draft: Sequence[int] = ()) -> PendingMask:
        """Which tokens may come next, and behind each token of `draft`, one mask behind the other;
        not computed yet. To be asked for once between two tokens."""
        self._start.masks += 1 + len(draft)
        compute = partial(self._words, tuple(draft))
        self._mask = PendingMask(compute, is_quick=self._took_s < _QUICK_S)
        return self._mask

    def _words(self, draft: tuple[int, ...]) -> bytes:
        words = self._of.compute_bitmask()
        if self._of.is_error() and self._renew():
            words = self._of.compute_bitmask()
        if not draft or self._of.is_error():
            return words * (1 + len(draft))
        return words + self._words_behind(draft, words)

    def _words_behind(self, draft: tuple[int, ...], words: bytes) -> bytes:
        """The masks behind each token of `draft`, `words` before the first. Behind one that may not
        come any mask will do: it is not drawn, and so nothing behind it counts."""
        masks: list[bytes] = []
        for token in draft:
            if self._of.is_stopped() or not self._of.try_consume_tokens([token]):
                break
            masks.append(self._of.compute_bitmask())
        if self._of.is_error():
            self._renew()
        else:
            self._of.rollback(len(masks))
        masks += [words] * (len(draft) - len(masks))
        return b"".join(masks)


class PendingMask:
    """A mask that a thread fills; or its reader, where no thread was given it. See TokenMask."""

    def __init__(self, compute: Callable[[], bytes], *, is_quick: bool = False) -> None:
        """`is_quick`: the one before it was; its reader fills it."""
        self._compute = compute
        self._is_quick = is_quick
        self._words: bytes | None = None
        self._filling: Future[bytes] | None = None
        self.took_s = 0.0
        """To compute it."""

    def fill(self, threads: ThreadPoolExecutor) -> None:
        """Begin to compute it, unless that would take longer than it takes."""
        if not self._is_quick:
            self._filling = threads.submit(self._timed)

    def words(self) -> bytes:
        """See TokenMask. With an error in the matcher EOS alone."""
        if self._words is None:
            filling = self._filling
            self._words = self._timed() if filling is None else filling.result(_FILL_DEADLINE_S)
        return self._words

    def _timed(self) -> bytes:
        begun_s = time.perf_counter()
        words = self._compute()
        self.took_s = time.perf_counter() - begun_s
        return words


class MaskFiller:
    """The threads that fill masks, of one engine. Started by the first mask."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, masks: Iterable[object]) -> None:
        """Fill those of these that are masks of a grammar; whoever needs one waits for it."""
        for mask in masks:
            if not isinstance(mask, PendingMask):
                continue
            if self._threads is None:
                count = min(_MOST_THREADS, os.cpu_count() or 1)
                self._threads = ThreadPoolExecutor(count, thread_name_prefix="masks")
            mask.fill(self._threads)

    def close(self) -> None:
        """Start nothing more."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

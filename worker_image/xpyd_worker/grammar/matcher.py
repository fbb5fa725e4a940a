"""A choice's place in its grammar: takes its tokens, says which may come next.

The server makes it, advanced over what the choice put out elsewhere; from `submit` on the engine's
thread owns it. Masks that take long are filled on threads of a MaskFiller while the step's forward
runs. It must not know requests, schemas or tensors. See docs/adr/0066 and docs/adr/0074.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

_FILL_DEADLINE_S = 60.0
"""A mask takes under a millisecond, at the limits of a grammar some ten."""
_MOST_THREADS = 4
_QUICK_S = 50e-6
"""To hand a mask to a thread takes as long, and what the thread then takes from the forward."""


class Matcher:
    """One choice in its grammar. Its own error ends it: it then takes no token any more."""

    def __init__(self, of: LLMatcher) -> None:
        """`of`: the compiler's, this matcher's own."""
        self._of = of
        self._mask: PendingMask | None = None
        # The first one of a grammar has the most to find out.
        self._took_s = 1.0
        """The last mask."""

    def copy(self) -> Matcher:
        """Another one at the same place."""
        return Matcher(self._of.deep_copy())

    def accept(self, token_ids: Iterable[int]) -> bool:
        """The choice has put out these tokens, EOS among them where it did; whether they follow the
        grammar. False for good where they do not."""
        if self._mask is not None:
            # Nothing else may look at the matcher while it moves.
            self._mask.words()
            self._took_s = self._mask.took_s
            self._mask = None
        return self._of.consume_tokens(list(token_ids))

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

    def mask(self) -> PendingMask:
        """Which tokens may come next, not computed yet. To be asked for once between two tokens."""
        self._mask = PendingMask(self._of, is_quick=self._took_s < _QUICK_S)
        return self._mask


class PendingMask:
    """A mask that a thread fills; or its reader, where no thread was given it. See TokenMask."""

    def __init__(self, of: LLMatcher, *, is_quick: bool = False) -> None:
        """`is_quick`: the one before it was; its reader fills it."""
        self._of = of
        self._is_quick = is_quick
        self._words: bytes | None = None
        self._filling: Future[bytes] | None = None
        self.took_s = 0.0
        """To compute it."""

    def fill(self, threads: ThreadPoolExecutor) -> None:
        """Begin to compute it, unless that would take longer than it takes."""
        if not self._is_quick:
            self._filling = threads.submit(self._compute)

    def words(self) -> bytes:
        """See TokenMask. With an error in the matcher EOS alone."""
        if self._words is None:
            filling = self._filling
            self._words = self._compute() if filling is None else filling.result(_FILL_DEADLINE_S)
        return self._words

    def _compute(self) -> bytes:
        begun_s = time.perf_counter()
        words = self._of.compute_bitmask()
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

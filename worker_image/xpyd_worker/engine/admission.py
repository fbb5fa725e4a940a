"""Whether a queued sequence may run now, and with which blocks: cached, fresh, or landed. Pure.

The scheduler asks in the order of the queue and decides what a refusal means for those behind.
"""

from __future__ import annotations

from enum import Enum, auto

from xpyd_kv.connector.api import Consumer
from xpyd_kv.values import Landed, Wait
from xpyd_worker.engine.book import RequestBook
from xpyd_worker.engine.sending import Sending
from xpyd_worker.engine.sequence import RequestState, Sequence
from xpyd_worker.engine.tables import BlockTables


class Verdict(Enum):
    """Whether a queued sequence may run: it holds its blocks (GO), waits for its KV or for others
    (WAIT), waits for blocks that its KV could be pulled into (CROWDED), is the first that waits for
    blocks (BLOCKED), or its request has failed (OVER)."""

    GO = auto()
    WAIT = auto()
    CROWDED = auto()
    BLOCKED = auto()
    OVER = auto()


class Admission:
    """Gives queued sequences their blocks. `consumer` None: no KV comes from elsewhere."""

    def __init__(
        self,
        *,
        tables: BlockTables,
        book: RequestBook,
        sending: Sending,
        consumer: Consumer | None,
        recompute_without_kv: bool,
    ) -> None:
        self._tables = tables
        self._book = book
        self._sending = sending
        self._consumer = consumer
        self._recompute_without_kv = recompute_without_kv

    def admit(self, sequence: Sequence, *, blocked: bool, seats: int, now: float) -> Verdict:
        """Give a queued sequence its blocks, if there are any for it now. Where others are
        `blocked` only landed KV lets it run. `seats`: see Consumer.admit."""
        state = sequence.state
        if state.expects_kv and self._consumer is not None and state.receive is not None:
            answer = self._consumer.admit(
                state.receive.key, tuple(sequence.tokens), seats=seats, now=now
            )
            if isinstance(answer, Wait):
                return Verdict.CROWDED if answer.for_blocks else Verdict.WAIT
            state.expects_kv = False
            if isinstance(answer, Landed):
                self._adopt(sequence, answer)
                return Verdict.GO
            if not self.goes_on_without_kv(state, answer.reason):
                return Verdict.OVER
        if blocked or not self._sending.may_start(state):
            return Verdict.WAIT
        if not self._tables.start(sequence):
            return Verdict.BLOCKED
        asked = len(sequence.tokens) if self._tables.may_hit(sequence) else 0
        self._book.count_start(state, asked=asked, cached=sequence.num_computed)
        self._sending.started(sequence, now)
        return Verdict.GO

    def goes_on_without_kv(self, state: RequestState, reason: str) -> bool:
        """The request's KV does not come: it is computed here, or False, and the request failed."""
        if self._recompute_without_kv:
            self._book.recomputes(state, reason)
        else:
            self._book.fail(state, "kv_failed", f"the prompt's KV did not come: {reason}")
        return self._recompute_without_kv

    def _adopt(self, sequence: Sequence, landed: Landed) -> None:
        state = sequence.state
        self._tables.adopt(sequence, landed.block_ids, landed.tokens)
        state.adopted = True
        self._book.count_start(state, asked=len(sequence.tokens), cached=landed.skipped_tokens)
        self._book.count_received(state, landed.tokens)

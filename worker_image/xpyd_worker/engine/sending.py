"""P's side of a request: when its KV is offered, staged, cancelled and reported. Pure.

Between the scheduler and the transfer library's KvProducer. One trunk or lead sequence per request
carries the offer; what it computes after the offered tokens is not sent.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.producer import KvProducer
from xpyd_worker.engine.request import TransferReport, TransferState
from xpyd_worker.engine.sequences import RequestState, Sequence

logger = logging.getLogger(__name__)

# Requests that ended by length, whose choices the server may still end at a stop string.
_MAX_ENDED = 4096
_STATES: dict[str, TransferState] = {"pending": "pending", "granted": "granted"}


class Sending:
    """Every call of the KvProducer that concerns a request. `producer` None: nothing is sent."""

    def __init__(self, producer: KvProducer | None) -> None:
        self._producer = producer
        self._ended: OrderedDict[str, tuple[TransferKey, set[int]]] = OrderedDict()

    def may_start(self, state: RequestState) -> bool:
        """False while writes of an earlier, cancelled offer may still be under way."""
        if self._producer is None or state.send is None or not state.unsettled:
            return True
        state.unsettled = not self._producer.is_settled(state.send.key)
        return not state.unsettled

    def started(self, sequence: Sequence, now: float) -> None:
        """The first chunk is scheduled; the blocks of its table were in the prefix cache."""
        state, producer = sequence.state, self._producer
        if producer is None or state.send is None or state.offer_complete:
            return
        if not producer.is_settled(state.send.key):
            # Another request has the same id: the key belongs to the first one's transfer.
            logger.warning(
                "not sent: a transfer of this id is under way",
                extra={"request": state.request.log_id},
            )
            return
        producer.offer(
            state.send.key,
            state.send.peer,
            tuple(sequence.tokens),
            prompt_tokens=state.send.prompt_tokens,
            salt=state.request.cache_salt,
            now=now,
        )
        state.offered_tokens = len(sequence.tokens)
        if sequence.num_computed:
            producer.cached(state.send.key, tuple(sequence.blocks), sequence.num_computed)
        state.computed(sequence.num_computed)

    def stage(self, sequence: Sequence, tokens: int) -> None:
        """Announce a forward before it runs, after which the sequence's table holds its first
        `tokens` tokens."""
        state = sequence.state
        if self._producer is None or state.send is None or not state.is_offered:
            return
        if sequence.reached >= state.offered_tokens:
            # All of them are in steps under way.
            return
        tokens = min(tokens, state.offered_tokens)
        self._producer.stage(state.send.key, tuple(sequence.blocks), tokens)

    def step_chunks(self) -> bytes:
        """What ranks that send have to know of the step that was staged."""
        return self._producer.step_chunks() if self._producer else b""

    def preempted(self, state: RequestState) -> None:
        """Its blocks are taken away. An offer that is not complete must be made again."""
        if self._producer is not None and state.send is not None and state.is_offered:
            self._producer.cancel(state.send.key, "preempted")
            state.offered_tokens = 0
            state.unsettled = True

    def aborted(self, state: RequestState, reason: str) -> None:
        """The request is over without its own end: D has no use for its KV."""
        if self._producer is not None and state.send is not None and state.offered_tokens:
            self._producer.cancel(state.send.key, reason)

    def ended(self, state: RequestState) -> None:
        """Record that all choices have ended. If none goes on at D the transfer is cancelled, where
        that is P's to decide; what ended by length goes on, unless its text held a stop string."""
        send = state.send
        if self._producer is None or send is None or not state.offered_tokens:
            return
        if not state.offer_complete:
            self.aborted(state, "aborted")
            return
        if not send.cancel_when_done:
            return
        going_on = {c for c, reason in state.reasons.items() if reason == "length"}
        if not going_on:
            self._producer.cancel(send.key, "stopped")
            return
        self._ended[state.request.request_id] = (send.key, going_on)
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def abort_ended(self, request_id: str, choices: tuple[int, ...] | None) -> None:
        """The server ended choices of a request that is over here (a stop string in their last
        token, or the client has gone): cancel its transfer when none goes on."""
        entry = self._ended.get(request_id)
        if entry is None or self._producer is None:
            return
        key, going_on = entry
        going_on.difference_update(going_on.copy() if choices is None else choices)
        if not going_on:
            del self._ended[request_id]
            self._producer.cancel(key, "stopped" if choices is not None else "aborted")

    def report(self, state: RequestState) -> TransferReport | None:
        """The state of the transfer, for the last output; None without a transfer."""
        if state.send is None:
            return None
        if self._producer is None or not state.offered_tokens:
            return TransferReport("none", reason="not_sent")
        status = self._producer.status(state.send.key)
        found = _STATES.get(status.state, "none")
        return TransferReport(found, status.decode_incarnation, status.reason)

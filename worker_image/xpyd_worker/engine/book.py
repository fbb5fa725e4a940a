"""Every unfinished request of an engine, what it puts out, and how it ends. Pure.

The scheduler decides who runs; this keeps the requests by id, makes their outputs, counts, and
lets go of everything when one is over: its blocks, its expected KV, its transfer.
"""

from __future__ import annotations

import logging

from xpyd_kv.connector.api import Consumer
from xpyd_worker.engine.executor import StepOutput
from xpyd_worker.engine.request import (
    ChoiceOutput,
    EngineStats,
    ErrorKind,
    FinishReason,
    RequestOutput,
)
from xpyd_worker.engine.sending import Sending
from xpyd_worker.engine.sequence import RequestState, Sequence
from xpyd_worker.engine.tables import BlockTables

logger = logging.getLogger(__name__)


class RequestBook:
    """The requests by id, their outputs since the last `take_outputs`, and the counters."""

    def __init__(
        self,
        stats: EngineStats,
        *,
        tables: BlockTables,
        sending: Sending,
        consumer: Consumer | None,
    ) -> None:
        self.states: dict[str, RequestState] = {}
        self._stats = stats
        self._tables = tables
        self._sending = sending
        self._consumer = consumer
        self._outputs: list[RequestOutput] = []

    def take_outputs(self) -> list[RequestOutput]:
        """What requests gained since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_prompt_logprobs(self, sequence: Sequence, count: int, result: StepOutput) -> None:
        """Keep the scores of the prompt tokens that the sequence just computed."""
        state = sequence.state
        if state.prompt_logprobs is None or not state.scores_prompt:
            return
        # The prompt's first token has no entry. A recomputed position is not taken twice.
        position = max(1, sequence.num_computed - count)
        for entry in result.prompt_logprobs.get(sequence.seq_id, ()):
            if position == len(state.prompt_logprobs):
                state.prompt_logprobs.append(entry)
            position += 1

    def is_open(self, state: RequestState) -> bool:
        """Whether the request is unfinished."""
        return self.states.get(state.request.request_id) is state

    def emit(self, state: RequestState) -> None:
        """Hand out what a request gained; its last output when nothing is left of it."""
        finished = not state.open
        choices = (*state.held, *state.gained)
        state.held.clear()
        state.gained.clear()
        scored = None
        if state.prompt_logprobs is not None and not state.scores_prompt:
            scored, state.prompt_logprobs = tuple(state.prompt_logprobs), None
        report = None
        if finished:
            self._sending.ended(state)
            report = self._sending.report(state)
            self.close(state, "length" if "length" in state.reasons.values() else "stop")
        self._outputs.append(
            RequestOutput(
                state.request.request_id,
                choices,
                finished=finished,
                prompt_logprobs=scored,
                cached_tokens=state.cached_tokens,
                received_tokens=state.received_tokens,
                transfer=report,
                started_s=state.started_s,
            )
        )

    def fail(
        self, state: RequestState, kind: ErrorKind, message: str, reason: FinishReason = "error"
    ) -> None:
        """End a request from inside; its last output says why."""
        self._sending.aborted(state, "failed")
        unfinished = (ChoiceOutput(choice, (), reason) for choice in state.open)
        output = RequestOutput(
            state.request.request_id,
            (*state.held, *unfinished),
            finished=True,
            transfer=self._sending.report(state),
            started_s=state.started_s,
            error=message,
            error_kind=kind,
        )
        self.close(state, reason)
        self._outputs.append(output)

    def close(self, state: RequestState, reason: FinishReason) -> None:
        """Nothing of the request is left here."""
        for sequence in list(state.sequences):
            self._tables.drop(sequence)
        self.forget_kv(state)
        del self.states[state.request.request_id]
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1

    def forget_kv(self, state: RequestState) -> None:
        """Its KV, if it is still to come, is not wanted any more."""
        if state.expects_kv and self._consumer is not None and state.receive is not None:
            state.expects_kv = False
            self._consumer.forget(state.receive.key)

    def count_start(self, state: RequestState, *, asked: int, cached: int) -> None:
        """The request starts for the first time: `cached` of `asked` tokens, those looked up in
        the prefix cache, were found there."""
        if not state.started:
            state.started = True
            state.cached_tokens = min(cached, state.prompt_tokens)
            self._stats.prefix_query_tokens += asked
            self._stats.prefix_hit_tokens += cached

    def count_received(self, state: RequestState, landed_tokens: int) -> None:
        """KV of the sequence's first `landed_tokens` came from P, but for what was cached here."""
        received = min(landed_tokens, state.prompt_tokens) - state.cached_tokens
        state.received_tokens = max(0, received)
        self._stats.received_tokens += state.received_tokens

    def count_computed(self, sequence: Sequence, count: int) -> None:
        """The next `count` tokens of the sequence have gone through the forward."""
        prompt = sequence.state.prompt_tokens - sequence.num_computed
        in_prompt = min(count, max(0, prompt))
        self._stats.prompt_tokens_computed += in_prompt
        reason = sequence.state.recomputed
        if reason and in_prompt:
            tokens = self._stats.kv_recomputed_tokens
            tokens[reason] = tokens.get(reason, 0) + in_prompt
        self._stats.output_tokens_computed += count - in_prompt

    def recomputes(self, state: RequestState, reason: str) -> None:
        """A prompt is computed here although its KV was to come: see recompute_log."""
        state.recomputed = reason
        logger.info(
            "computing a prompt whose KV was to come: %s",
            reason,
            extra={"request": state.request.log_id},
        )
        self._stats.kv_recomputed[reason] = self._stats.kv_recomputed.get(reason, 0) + 1

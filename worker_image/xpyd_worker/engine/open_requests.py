"""The requests of an engine that are not finished: admitted, given their tokens, and ended.

    SequenceAdmission (blocks) -> TokenCommit (drawn tokens) -> OpenRequests (outputs)

The scheduler decides which sequence runs, and calls these classes. Pure: no clock, no I/O. Stop
strings belong to the server: it sees text, the engine sees token ids.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from xpyd_core.kv_outcome import header_of
from xpyd_kv.connector.consumer import KvConsumer
from xpyd_kv.connector.contact import UNVERIFIED
from xpyd_kv.values import Landed, Wait
from xpyd_worker.engine.executor import StepOutput
from xpyd_worker.engine.request import (
    ChoiceOutput,
    EngineOutput,
    EngineRequest,
    EngineStats,
    ErrorKind,
    FinishReason,
    SampledToken,
    SamplingParams,
    SchedulerConfig,
)
from xpyd_worker.engine.sending import Sending
from xpyd_worker.engine.sequences import BlockTables, RequestState, Sequence
from xpyd_worker.engine.speculation import Speculation

if TYPE_CHECKING:
    from xpyd_worker.grammar.matcher import Matcher

logger = logging.getLogger(__name__)


class OpenRequests:
    """The requests by id, their outputs since the last `take_outputs`, and the counters."""

    def __init__(
        self,
        stats: EngineStats,
        *,
        tables: BlockTables,
        sending: Sending,
        consumer: KvConsumer | None,
    ) -> None:
        self.states: dict[str, RequestState] = {}
        self._stats = stats
        self._tables = tables
        self._sending = sending
        self._consumer = consumer
        self._outputs: list[EngineOutput] = []

    def take_outputs(self) -> list[EngineOutput]:
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
            EngineOutput(
                state.request.request_id,
                choices,
                finished=finished,
                prompt_logprobs=scored,
                cached_tokens=state.cached_tokens,
                received_tokens=state.received_tokens,
                transfer=report,
                kv=state.kv,
                started_s=state.started_s,
            )
        )

    def fail(
        self,
        state: RequestState,
        kind: ErrorKind,
        message: str,
        reason: FinishReason = "error",
        *,
        kv: str = "",
    ) -> None:
        """End a request from inside; its last output says why. `kv`: see EngineOutput."""
        self._sending.aborted(state, "failed")
        unfinished = (ChoiceOutput(choice, (), reason) for choice in state.open)
        output = EngineOutput(
            state.request.request_id,
            (*state.held, *unfinished),
            finished=True,
            transfer=self._sending.report(state),
            kv=kv,
            started_s=state.started_s,
            error=message,
            error_kind=kind,
        )
        self.close(state, reason)
        self._outputs.append(output)

    def close(self, state: RequestState, reason: FinishReason) -> None:
        """Release everything that the request holds, and forget it."""
        for sequence in list(state.sequences):
            self._tables.drop(sequence)
        self.forget_kv(state)
        del self.states[state.request.request_id]
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1

    def forget_kv(self, state: RequestState) -> None:
        """Stop expecting the request's KV, if it has not arrived."""
        if state.expects_kv and self._consumer is not None and state.receive is not None:
            state.expects_kv = False
            self._consumer.forget(state.receive.key)

    def compare_kv(self, sequence: Sequence) -> None:
        """D: tokens of the sequence are computed; P's KV of its prompt may wait to be compared."""
        state, consumer = sequence.state, self._consumer
        if state.recomputed != UNVERIFIED or consumer is None or state.receive is None:
            return
        if consumer.is_compared(state.receive.key, sequence.num_computed):
            consumer.computed(state.receive.key, sequence.blocks, self._tables.keep(sequence))

    def count_start(self, state: RequestState, *, asked: int, cached: int) -> None:
        """The request starts for the first time: `cached` of `asked` tokens, those looked up in
        the prefix cache, were found there."""
        if not state.started:
            state.started = True
            state.cached_tokens = min(cached, state.prompt_tokens)
            self._stats.prefix_query_tokens += asked
            self._stats.prefix_hit_tokens += cached

    def count_received(self, state: RequestState, landed_tokens: int) -> None:
        """Count the KV of the first `landed_tokens` as received from P, except what was cached
        here."""
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
        """Compute a prompt here although P was to send its KV: see core.RecomputeLog."""
        state.recomputed = reason
        logger.info(
            "computing a prompt whose KV was to come: %s",
            reason,
            extra={"request": state.request.log_id},
        )
        self._stats.kv_recomputed[reason] = self._stats.kv_recomputed.get(reason, 0) + 1


@dataclass(frozen=True)
class End:
    """Why a choice ends; `stop_token_id` is the EOS or stop id that did it."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True)
class StopRules:
    """What ends every choice of an engine: the model's EOS ids and its length in tokens."""

    eos_token_ids: tuple[int, ...]
    max_model_len: int

    def end_at(
        self, token_id: int, *, position: int, prompt_tokens: int, sampling: SamplingParams
    ) -> End | None:
        """Whether `token_id`, put out as output token number `position` (from 0), is the last.

        EOS and stop ids count only from position min_tokens on; before it they are masked when
        drawn.
        """
        if position >= sampling.min_tokens:
            if token_id in self.eos_token_ids and not sampling.ignore_eos:
                return End("stop", token_id)
            if token_id in sampling.stop_token_ids:
                return End("stop", token_id)
        if self.is_last(position, prompt_tokens=prompt_tokens, sampling=sampling):
            return End("length")
        return None

    def is_last(self, position: int, *, prompt_tokens: int, sampling: SamplingParams) -> bool:
        """Whether no output token can follow the one at `position`, whatever that is."""
        if position + 1 >= sampling.max_tokens:
            return True
        return prompt_tokens + position + 1 >= self.max_model_len

    def end_within(
        self, token_ids: Iterable[int], *, prompt_tokens: int, sampling: SamplingParams
    ) -> End | None:
        """Whether a choice that has put out `token_ids` ended in them."""
        if sampling.max_tokens == 0:
            return End("length")
        for position, token_id in enumerate(token_ids):
            end = self.end_at(
                token_id, position=position, prompt_tokens=prompt_tokens, sampling=sampling
            )
            if end is not None:
                return end
        return None


@dataclass(frozen=True)
class Forked:
    """Children of a trunk: those that share its computed blocks, and those without room, which
    begin again from the queue."""

    running: tuple[Sequence, ...] = ()
    parked: tuple[Sequence, ...] = ()


class TokenCommit:
    """Makes sequences, gives them their tokens, and ends choices by the stop rules."""

    def __init__(
        self, tables: BlockTables, rules: StopRules, speculation: Speculation | None
    ) -> None:
        self._tables = tables
        self._rules = rules
        self._speculation = speculation
        self._ids = itertools.count()

    def begin(self, request: EngineRequest) -> RequestState:
        """A request's state and first sequence. Choices that end in their `continue_from` ids are
        ended in it; it has no sequence when there is nothing to compute."""
        state = RequestState(request, open=[])
        for choice in range(request.n):
            end = self._rules.end_within(
                state.known_output(choice),
                prompt_tokens=state.prompt_tokens,
                sampling=request.sampling,
            )
            end = _unless_complete(end, state.matcher(choice))
            if end is None:
                state.open.append(choice)
            else:
                state.reasons[choice] = end.reason
                state.held.append(ChoiceOutput(choice, (), end.reason, end.stop_token_id))
        if request.sampling.prompt_logprobs is not None:
            state.prompt_logprobs = [None]
        if state.open or state.scores_prompt:
            choice = state.open[0] if len(state.open) == 1 else None
            self._sequence(state, choice)
        return state

    def commit(self, sequence: Sequence, samples: Mapping[int, SampledToken], room: int) -> Forked:
        """All known tokens of `sequence` are computed: give its choices what was drawn.

        Outputs are put into the state's `gained`. At most `room` children may run.
        """
        state = sequence.state
        drawn: dict[int, int] = {}
        for choice, sample in samples.items():
            end = self._end_behind(sequence, choice, sample)
            if end is None:
                drawn[choice] = sample.token_id
                state.gained.append(ChoiceOutput(choice, (sample,)))
            else:
                output = ChoiceOutput(choice, (sample,), end.reason, end.stop_token_id)
                state.end_choice(choice, end.reason)
                state.gained.append(output)
        if sequence.is_trunk:
            return self.fork(sequence, drawn, room)
        if drawn:
            sequence.tokens.extend(drawn.values())
        else:
            self._tables.drop(sequence)
        return Forked()

    def commit_run(self, sequence: Sequence, samples: Iterable[SampledToken]) -> str:
        """As `commit`, where a draft gave the sequence's choice these tokens: each but the last was
        drafted, so that its KV is computed. What comes behind the choice's end is dropped. Why the
        grammar cannot go on, empty where it can."""
        state, choice = sequence.state, sequence.choice
        assert choice is not None, "a trunk has no draft"
        taken: list[SampledToken] = []
        end: End | None = None
        for sample in samples:
            if taken:
                sequence.num_computed += 1
                self._tables.register_computed(sequence)
            if broken := state.follow({choice: sample}):
                return broken
            end = self._end_behind(sequence, choice, sample)
            taken.append(sample)
            if end is not None:
                break
            sequence.tokens.append(sample.token_id)
        output = ChoiceOutput(choice, tuple(taken))
        if end is not None:
            output = ChoiceOutput(choice, tuple(taken), end.reason, end.stop_token_id)
            state.end_choice(choice, end.reason)
            self._tables.drop(sequence)
        state.gained.append(output)
        return ""

    def _end_behind(self, sequence: Sequence, choice: int, sample: SampledToken) -> End | None:
        """Whether the choice ends by what was drawn behind the sequence's tokens."""
        state = sequence.state
        end = self._rules.end_at(
            sample.token_id,
            position=len(sequence.tokens) - state.prompt_tokens,
            prompt_tokens=state.prompt_tokens,
            sampling=state.request.sampling,
        )
        return _unless_complete(end, state.matcher(choice))

    def fork(self, trunk: Sequence, drawn: dict[int, int], room: int) -> Forked:
        """The prompt is computed: one sequence for each open choice, the trunk becomes the first.

        Each continues with its choice's `continue_from` ids, or with the token drawn for it.
        """
        state = trunk.state
        running: list[Sequence] = []
        parked: list[Sequence] = []
        for choice in state.open[1:]:
            child = self._sequence(state, choice)
            child.tokens.extend(() if choice not in drawn else (drawn[choice],))
            shared = len(running) < room and self._tables.fork(trunk, child)
            (running if shared else parked).append(child)
        if state.open:
            trunk.choice = state.open[0]
            trunk.tokens.extend(state.known_output(trunk.choice) or (drawn[trunk.choice],))
        else:
            self._tables.drop(trunk)
        return Forked(tuple(running), tuple(parked))

    def _sequence(self, state: RequestState, choice: int | None) -> Sequence:
        known = () if choice is None else state.known_output(choice)
        tokens = [*state.request.prompt, *known]
        draft = None if self._speculation is None else self._speculation.begin()
        sequence = Sequence(next(self._ids), state, choice, tokens, draft=draft)
        state.sequences.append(sequence)
        return sequence


def _unless_complete(end: End | None, matcher: Matcher | None) -> End | None:
    """`end`; of a choice whose grammar is complete `stop`, also where its last token fits exactly:
    nothing but EOS could follow, so that is not computed."""
    if matcher is None or not matcher.is_finished:
        return end
    return end if end is not None and end.reason == "stop" else End("stop")


class Verdict(Enum):
    """Whether a queued sequence may run: it holds its blocks (GO), waits for its KV or for other
    sequences (WAIT), waits for blocks to pull its KV into (CROWDED), is the first that waits for
    blocks (BLOCKED), or its request has failed (OVER)."""

    GO = auto()
    WAIT = auto()
    CROWDED = auto()
    BLOCKED = auto()
    OVER = auto()


class SequenceAdmission:
    """Refuses requests that cannot be queued, and gives queued sequences their blocks. `consumer`
    None: this engine receives no KV."""

    def __init__(
        self,
        *,
        tables: BlockTables,
        requests: OpenRequests,
        sending: Sending,
        consumer: KvConsumer | None,
        config: SchedulerConfig,
        rules: StopRules,
    ) -> None:
        self._tables = tables
        self._requests = requests
        self._sending = sending
        self._consumer = consumer
        self._max_waiting = config.max_waiting
        self._recompute_without_kv = config.recompute_without_kv
        self._max_model_len = rules.max_model_len

    def refusal(self, state: RequestState, *, waiting: int) -> tuple[ErrorKind, str] | None:
        """Why a new request cannot be queued behind `waiting` sequences: it can never fit, or the
        queue is full. None where it can."""
        if not state.sequences:
            return None
        max_tokens = state.request.sampling.max_tokens
        longest = self._max_model_len
        if state.prompt_tokens + min(max_tokens, 1) > longest:
            return "too_long", f"the prompt leaves no room within the model's {longest} tokens"
        tokens = min(state.prompt_tokens + max_tokens, longest)
        have = self._tables.capacity
        if tokens > have:
            return "too_long", f"prompt and max_tokens need {tokens} tokens of KV cache of {have}"
        receive = state.receive
        if waiting < self._max_waiting:
            return None
        if receive and self._consumer and self._consumer.offered(receive.key) is not None:
            return None
        return "busy", f"{waiting} requests are waiting already"

    def admit(self, sequence: Sequence, *, blocked: bool, seats: int, now: float) -> Verdict:
        """Give a queued sequence its blocks, if there are any for it now. Where others are
        `blocked` only landed KV lets it run. `seats`: see KvConsumer.admit."""
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
        self._requests.count_start(state, asked=asked, cached=sequence.num_computed)
        self._sending.started(sequence, now)
        return Verdict.GO

    def goes_on_without_kv(self, state: RequestState, reason: str) -> bool:
        """The request's KV will not arrive: compute the prompt here, or fail the request
        (False)."""
        computes = self._recompute_without_kv or reason == UNVERIFIED
        if computes:
            self._requests.recomputes(state, reason)
        else:
            message, kv = f"the prompt's KV did not come: {reason}", header_of(reason, fails=True)
            self._requests.fail(state, "kv_failed", message, kv=kv)
        return computes

    def _adopt(self, sequence: Sequence, landed: Landed) -> None:
        state = sequence.state
        shared = landed.skipped_tokens
        self._tables.adopt(sequence, landed.block_ids, landed.tokens, shared=shared)
        state.adopted = True
        self._requests.count_start(state, asked=len(sequence.tokens), cached=landed.skipped_tokens)
        self._requests.count_received(state, landed.tokens)

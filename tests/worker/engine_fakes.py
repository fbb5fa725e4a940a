"""A fake at the engine's seam to its model, whose KV can be checked.

The KV of a token is a number made from its whole prefix, kept in the slot that the block table
names. Each step reads it from there, so that a wrong table, an unmade copy, a shared block written
twice or lost landed KV changes the tokens, which are compared with the request run alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

from tests.worker.grammar_kit import allowed_ids
from xpyd_worker.engine.executor import (
    DRAWN_BEFORE,
    Finished,
    Running,
    ScheduledSequence,
    StepInput,
    StepOutput,
)
from xpyd_worker.engine.request import (
    EngineRequest,
    SampledToken,
    SamplingParams,
    SchedulerConfig,
    TokenLogprob,
)
from xpyd_worker.grammar.matcher import Matcher

BLOCK = 4
EOS = 0
_ROOT = 12345
_MASK = (1 << 61) - 1


def chain(previous: int, token: int) -> int:
    """The KV of `token` behind a prefix whose last KV is `previous`."""
    return (previous * 1000003 + token * 7919 + 17) & _MASK


def kv_of(token_ids: Iterable[int]) -> list[int]:
    """The KV of every token."""
    values: list[int] = []
    for token in token_ids:
        values.append(chain(values[-1] if values else _ROOT, token))
    return values


def next_token(kv: int, choice_index: int, position: int, sampling: SamplingParams) -> int:
    """The draw: one in about forty is EOS, masked like the sampler does. With top_k 1 a choice
    repeats itself, but for one token in eight: then what follows can be drafted."""
    if sampling.top_k == 1 and chain(kv, sampling.seed) % 8:
        return position % 4 + 1
    drawn = (chain(kv, choice_index * 31 + sampling.seed) * 2654435761 >> 13) % 40
    return drawn if drawn != EOS or position >= sampling.min_tokens else 1


def within(mask: bytes | None, drawn: int, position: int, sampling: SamplingParams) -> int:
    """What becomes of a draw under a grammar's mask: EOS before min_tokens only where nothing else
    may come."""
    if mask is None:
        return drawn
    ids = allowed_ids(mask)
    if position < sampling.min_tokens:
        ids = [i for i in ids if i != EOS] or ids
    return drawn if drawn in ids else ids[drawn % len(ids)]


def drawn_for(sequence: ScheduledSequence, kvs: Sequence[int]) -> tuple[SampledToken, ...]:
    """What the fake model draws behind a sequence's KV, the last ones of which are of drafts."""
    words = None if sequence.mask is None else sequence.mask.words()
    each = len(words or b"") // (1 + sequence.drafts)
    last = len(sequence.token_ids) - sequence.drafts
    found: list[SampledToken] = []
    for one in sequence.samples:
        for behind, kv in enumerate(kvs[len(kvs) - 1 - sequence.drafts :]):
            position = one.position + behind
            token = next_token(kv, one.choice_index, position, sequence.sampling)
            mask = None if words is None else words[behind * each : (behind + 1) * each]
            token = within(mask, token, position, sequence.sampling)
            found.append(SampledToken(token))
            if (token,) != sequence.token_ids[last + behind : last + behind + 1]:
                break
    return tuple(found)


def guessed(sequence: ScheduledSequence, kv: int, drawn: int) -> tuple[int, ...]:
    """What the fake draft model drafts behind `drawn` draws, the last of which has this KV: now and
    then less than was asked for, and often what is not drawn then. It knows no masks."""
    (one,) = sequence.samples
    found: list[int] = []
    for place in range(sequence.propose - (chain(kv, 5) % 4 == 0)):
        token = next_token(kv, one.choice_index, one.position + drawn + place, sequence.sampling)
        token = (token + 1) % 40 if chain(kv, 3) % 4 == 0 else token
        found.append(token)
        kv = chain(kv, token)
    return tuple(found)


def alone(
    request: EngineRequest, max_model_len: int, matchers: Sequence[Matcher] = ()
) -> list[tuple[list[int], str]]:
    """Each choice's new tokens and end, when the request runs alone. `matchers`: as they were when
    it was submitted."""
    results: list[tuple[list[int], str]] = []
    params = request.sampling
    for choice in range(request.n):
        known = list(request.continue_from[choice]) if request.continue_from else []
        output: list[int] = []
        kv = reduce(chain, request.prompt, _ROOT)
        matcher = matchers[choice].copy() if matchers else None
        reason = ""
        if params.max_tokens == 0:
            reason = "length"
        while not reason:
            if len(output) < len(known):
                token = known[len(output)]
            else:
                token = next_token(kv, request.first_choice + choice, len(output), params)
                if matcher is not None:
                    token = within(matcher.mask().words(), token, len(output), params)
                    assert matcher.accept([token])
            output.append(token)
            kv = chain(kv, token)
            may_stop = len(output) > params.min_tokens
            stops = params.stop_token_ids if params.ignore_eos else (EOS, *params.stop_token_ids)
            full = len(request.prompt) + len(output) >= max_model_len
            is_complete = matcher is not None and matcher.is_finished
            if (may_stop and token in stops) or (is_complete and len(output) >= len(known)):
                reason = "stop"
            elif full or len(output) >= params.max_tokens:
                reason = "length"
        if matcher is not None and matcher.is_finished:
            reason = "stop"  # complete, also where there is room for no more
        results.append((output[len(known) :], reason))
    return results


@dataclass(frozen=True)
class _Later:
    """A step that runs when it is waited for."""

    run: Callable[[], StepOutput]

    def wait(self) -> StepOutput:
        return self.run()


class FakeExecutor:
    """Keeps KV by slot, checks each step against the Executor's contract, and draws tokens.

    With a depth over 1 nothing of a step happens before it is waited for: the latest that a device
    may be, or a pipeline.
    """

    def __init__(
        self, num_blocks: int, limits: SchedulerConfig, depth: int = 1, draws_ahead: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.memory: list[list[int | None]] = [[None] * BLOCK for _ in range(num_blocks)]
        self.steps: list[StepInput] = []
        self.fail_with: Exception | None = None
        self.during: Callable[[StepInput], None] = lambda step: None
        # Whether the oldest step is over before anything else happens.
        self.oldest_is_first: Callable[[], bool] = lambda: True
        self.depth = depth
        self.draws_ahead = draws_ahead
        self.refuse_with: Exception | None = None
        # Requests that nothing can be drawn for.
        self.unlucky: set[str] = set()
        # Launched and not run; what the last step that ran drew, by sequence.
        self.launched: deque[StepInput] = deque()
        self._drawn: dict[int, int] = {}
        # Sequences of steps that failed: in steps launched by then it does not matter what comes
        # behind.
        self._spoilt: set[int] = set()
        self._limits = limits

    def await_oldest(self, awake: int) -> bool:
        return self.oldest_is_first()

    def slot(self, table: Sequence[int], position: int) -> int | None:
        return self.memory[table[position // BLOCK]][position % BLOCK]

    def write(self, table: Sequence[int], position: int, value: int) -> None:
        self.memory[table[position // BLOCK]][position % BLOCK] = value

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Running:
        if self.refuse_with is not None:
            self.during(step)
            error, self.refuse_with = self.refuse_with, None
            raise error
        self.steps.append(step)
        self._check(step)
        if self.depth == 1:
            return Finished(self._run(step, layer_done))
        self.launched.append(step)
        assert len(self.launched) <= self.depth
        return _Later(partial(self._run_launched, step, layer_done))

    def _run_launched(self, step: StepInput, layer_done: Callable[[int], None]) -> StepOutput:
        assert self.launched.popleft() is step, "steps are waited for in order"
        drawn, self._drawn = self._drawn, {}
        # What a step that failed did not draw is any token: the engine ends those sequences.
        known = tuple(
            replace(s, token_ids=(drawn.get(s.seq_id, 0),)) if s.token_ids == (DRAWN_BEFORE,) else s
            for s in step.sequences
        )
        output = self._run(replace(step, sequences=known), layer_done)
        self._drawn = {i: some[0].token_id for i, some in output.samples.items() if len(some) == 1}
        return output

    def _run(self, step: StepInput, layer_done: Callable[[int], None]) -> StepOutput:
        # Steps launched later have none of them.
        self._spoilt &= {s.seq_id for one in (step, *self.launched) for s in one.sequences}
        for source, destination in step.block_copies:
            self.memory[destination][:] = self.memory[source]
        before = [self._kv_before(sequence) for sequence in step.sequences]
        self.during(step)
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            for sequence in step.sequences:
                for offset in range(len(sequence.token_ids)):
                    self.write(sequence.block_ids, sequence.start + offset, -1)
            self._spoilt |= {sequence.seq_id for sequence in step.sequences}
            raise error
        samples: dict[int, tuple[SampledToken, ...]] = {}
        scores: dict[int, tuple[TokenLogprob, ...]] = {}
        failed: dict[int, str] = {}
        proposals: dict[int, tuple[int, ...]] = {}
        for sequence, previous in zip(step.sequences, before, strict=True):
            kvs = [previous]
            for offset, token in enumerate(sequence.token_ids):
                kvs.append(chain(kvs[-1], token))
                self.write(sequence.block_ids, sequence.start + offset, kvs[-1])
            if sequence.seq_id not in self._spoilt:
                self._check_known(sequence, kvs[-1 - sequence.drafts])
            if sequence.log_id in self.unlucky:
                failed[sequence.seq_id] = "no token"
            elif sequence.samples:
                samples[sequence.seq_id] = drawn = drawn_for(sequence, kvs)
                if sequence.propose:
                    behind = kvs[len(kvs) - 1 - sequence.drafts + len(drawn) - 1]
                    last = chain(behind, drawn[-1].token_id)
                    proposals[sequence.seq_id] = guessed(sequence, last, len(drawn))
            if sequence.sampling.prompt_logprobs is not None:
                scores[sequence.seq_id] = self._score(sequence)
        layer_done(0)
        layer_done(1)
        return StepOutput(samples, scores, failed, proposals)

    def _check(self, step: StepInput) -> None:
        assert 0 < step.tokens <= self._limits.max_num_batched_tokens
        assert len(step.sequences) <= self._limits.max_num_seqs
        assert len({s.seq_id for s in step.sequences}) == len(step.sequences)
        written: set[int] = set()
        read: set[int] = set()
        for sequence in step.sequences:
            self._check_under_way(sequence)
            end = sequence.start + len(sequence.token_ids)
            assert sequence.token_ids
            is_ahead = sequence.token_ids == (DRAWN_BEFORE,)
            assert is_ahead or DRAWN_BEFORE not in sequence.token_ids
            assert not is_ahead or (self.draws_ahead and self._is_drawn(sequence))
            threshold = self._limits.long_prefill_token_threshold
            count = len(sequence.token_ids) - sequence.drafts
            assert not threshold or count <= threshold
            assert not sequence.drafts or (count == len(sequence.samples) == 1 and not is_ahead)
            assert not sequence.propose or (len(sequence.samples) == 1 and not is_ahead)
            assert len(set(sequence.block_ids)) == len(sequence.block_ids)
            assert len(sequence.block_ids) * BLOCK >= end
            mine = _written(sequence)
            assert not mine & written, "two sequences write into one block"
            written |= mine
            read |= set(sequence.block_ids) - mine
        assert not written & read, "a block is written while another sequence reads it"
        for source, destination in step.block_copies:
            assert destination in written
            assert source != destination

    def _check_under_way(self, sequence: ScheduledSequence) -> None:
        """Whatever the steps under way still do, they and this sequence leave each other alone."""
        mine, used = _written(sequence), set(sequence.block_ids)
        for other in (one for step in self.launched for one in step.sequences):
            if other.seq_id != sequence.seq_id:
                assert not mine & set(other.block_ids), "writes what a step under way uses"
                assert not used & _written(other), "uses what a step under way writes"
            else:
                assert self.draws_ahead or not other.samples, "its token is being drawn"
                assert not other.drafts, "its drafts are being verified"

    def _is_drawn(self, sequence: ScheduledSequence) -> bool:
        """Whether the step before, still under way, draws its one token for the place before."""
        before = [s for s in self.launched[-1].sequences if s.seq_id == sequence.seq_id]
        return (
            len(before) == 1
            and len(before[0].samples) == 1
            and before[0].start + len(before[0].token_ids) == sequence.start
        )

    @staticmethod
    def _check_known(sequence: ScheduledSequence, kv: int) -> None:
        """A draw that reads earlier tokens gets all of them, and so does what drafts behind it; no
        other gets any."""
        known = sequence.known
        reads = sequence.sampling.reads_tokens or sequence.propose
        if not (sequence.samples and reads):
            assert known is None
            return
        assert known is not None
        assert reduce(chain, (*known.prompt, *known.output), _ROOT) == kv
        assert len(known.prompt) == sequence.prompt_tokens
        assert {spec.position for spec in sequence.samples} == {len(known.output)}

    def _kv_before(self, sequence: ScheduledSequence) -> int:
        if sequence.start == 0:
            return _ROOT
        # Every position before it must be there, not only the last.
        full, rest = divmod(sequence.start, BLOCK)
        blocks = [self.memory[block] for block in sequence.block_ids[:full]]
        if rest:
            blocks.append(self.memory[sequence.block_ids[full]][:rest])
        assert not any(None in block for block in blocks), "reads a slot that nobody wrote"
        last = blocks[-1][-1]
        assert isinstance(last, int)
        return last

    @staticmethod
    def _score(sequence: ScheduledSequence) -> tuple[TokenLogprob, ...]:
        return tuple(
            TokenLogprob(token, -float(sequence.start + offset))
            for offset, token in enumerate(sequence.token_ids)
            if 0 < sequence.start + offset < sequence.prompt_tokens
        )


def _written(sequence: ScheduledSequence) -> set[int]:
    """Blocks that it writes to."""
    end = sequence.start + len(sequence.token_ids)
    return set(sequence.block_ids[sequence.start // BLOCK : -(-end // BLOCK)])

"""Fakes at the engine's seams: a model whose KV can be checked, and both ends of a transfer.

The KV of a token is a number made from its whole prefix, kept in the slot that the block table
names. Each step reads it from there, so that a wrong table, an unmade copy, a shared block written
twice or lost landed KV changes the tokens, which are compared with the request run alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.connector.api import Admission, Landed, NoKv, OfferedPrompt, SendStatus, Wait
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.executor import (
    DRAWN_BEFORE,
    Finished,
    Running,
    ScheduledSequence,
    StepInput,
    StepOutput,
)
from xpyd_worker.engine.limits import Limits
from xpyd_worker.engine.request import (
    EngineRequest,
    SampledToken,
    SamplingParams,
    TokenLogprob,
)

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
    """The draw: one in about forty is EOS, masked like the sampler does."""
    drawn = (chain(kv, choice_index * 31 + sampling.seed) * 2654435761 >> 13) % 40
    return drawn if drawn != EOS or position >= sampling.min_tokens else 1


def alone(request: EngineRequest, max_model_len: int) -> list[tuple[list[int], str]]:
    """Each choice's new tokens and end, when the request runs alone."""
    results: list[tuple[list[int], str]] = []
    params = request.sampling
    for choice in range(request.n):
        known = list(request.continue_from[choice]) if request.continue_from else []
        output: list[int] = []
        reason = ""
        if params.max_tokens == 0:
            reason = "length"
        while not reason:
            if len(output) < len(known):
                token = known[len(output)]
            else:
                kv = kv_of([*request.prompt, *output])[-1]
                token = next_token(kv, request.first_choice + choice, len(output), params)
            output.append(token)
            may_stop = len(output) > params.min_tokens
            stops = params.stop_token_ids if params.ignore_eos else (EOS, *params.stop_token_ids)
            full = len(request.prompt) + len(output) >= max_model_len
            if may_stop and token in stops:
                reason = "stop"
            elif full or len(output) >= params.max_tokens:
                reason = "length"
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

    With depth 2 nothing of a step happens before it is waited for: the latest that a device may be.
    """

    def __init__(self, num_blocks: int, limits: Limits, depth: int = 1) -> None:
        self.num_blocks = num_blocks
        self.memory: list[list[int | None]] = [[None] * BLOCK for _ in range(num_blocks)]
        self.steps: list[StepInput] = []
        self.fail_with: Exception | None = None
        self.during: Callable[[StepInput], None] = lambda step: None
        self.depth = depth
        self.refuse_with: Exception | None = None
        # Requests that nothing can be drawn for.
        self.unlucky: set[str] = set()
        # Launched and not run; what the last step that ran drew, by sequence.
        self.launched: deque[StepInput] = deque()
        self._drawn: dict[int, int] = {}
        # Of the last step that ran, if it failed: what comes behind it in them does not matter.
        self._spoilt: set[int] = set()
        self._limits = limits

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
        for source, destination in step.block_copies:
            self.memory[destination] = list(self.memory[source])
        before = [self._kv_before(sequence) for sequence in step.sequences]
        spoilt, self._spoilt = self._spoilt, set()
        self.during(step)
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            for sequence in step.sequences:
                for offset in range(len(sequence.token_ids)):
                    self.write(sequence.block_ids, sequence.start + offset, -1)
            self._spoilt = {sequence.seq_id for sequence in step.sequences}
            raise error
        samples: dict[int, tuple[SampledToken, ...]] = {}
        scores: dict[int, tuple[TokenLogprob, ...]] = {}
        failed: dict[int, str] = {}
        for sequence, previous in zip(step.sequences, before, strict=True):
            kv = previous
            for offset, token in enumerate(sequence.token_ids):
                kv = chain(kv, token)
                self.write(sequence.block_ids, sequence.start + offset, kv)
            if sequence.seq_id not in spoilt:
                self._check_known(sequence, kv)
            if sequence.log_id in self.unlucky:
                failed[sequence.seq_id] = "no token"
            elif sequence.samples:
                samples[sequence.seq_id] = tuple(
                    SampledToken(next_token(kv, s.choice_index, s.position, sequence.sampling))
                    for s in sequence.samples
                )
            if sequence.sampling.prompt_logprobs is not None:
                scores[sequence.seq_id] = self._score(sequence)
        layer_done(0)
        layer_done(1)
        return StepOutput(samples, scores, failed)

    def _check(self, step: StepInput) -> None:
        assert 0 < step.tokens <= self._limits.max_num_batched_tokens
        assert len(step.sequences) <= self._limits.max_num_seqs
        assert len({s.seq_id for s in step.sequences}) == len(step.sequences)
        written: set[int] = set()
        read: set[int] = set()
        for sequence in step.sequences:
            end = sequence.start + len(sequence.token_ids)
            assert sequence.token_ids
            is_ahead = sequence.token_ids == (DRAWN_BEFORE,)
            assert is_ahead or DRAWN_BEFORE not in sequence.token_ids
            assert not is_ahead or self._is_drawn(sequence)
            threshold = self._limits.long_prefill_token_threshold
            assert not threshold or len(sequence.token_ids) <= threshold
            assert len(set(sequence.block_ids)) == len(sequence.block_ids)
            assert len(sequence.block_ids) * BLOCK >= end
            first, last = sequence.start // BLOCK, -(-end // BLOCK)
            mine = set(sequence.block_ids[first:last])
            assert not mine & written, "two sequences write into one block"
            written |= mine
            read |= set(sequence.block_ids[:first])
        assert not written & read, "a block is written while another sequence reads it"
        for source, destination in step.block_copies:
            assert destination in written
            assert source != destination

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
        """A draw that reads earlier tokens gets all of them, no other gets any."""
        known = sequence.known
        if not (sequence.samples and sequence.sampling.reads_tokens):
            assert known is None
            return
        assert known is not None
        assert kv_of([*known.prompt, *known.output])[-1] == kv
        assert len(known.prompt) == sequence.prompt_tokens
        assert {spec.position for spec in sequence.samples} == {len(known.output)}

    def _kv_before(self, sequence: ScheduledSequence) -> int:
        if sequence.start == 0:
            return _ROOT
        # Every position before it must be there, not only the last.
        values = [self.slot(sequence.block_ids, p) for p in range(sequence.start)]
        assert None not in values, "reads a slot that nobody wrote"
        assert isinstance(values[-1], int)
        return values[-1]

    @staticmethod
    def _score(sequence: ScheduledSequence) -> tuple[TokenLogprob, ...]:
        return tuple(
            TokenLogprob(token, -float(sequence.start + offset))
            for offset, token in enumerate(sequence.token_ids)
            if 0 < sequence.start + offset < sequence.prompt_tokens
        )


@dataclass
class Offer:
    """One transfer as the fake producer sees it."""

    token_ids: tuple[int, ...]
    staged: int = 0
    done: int = 0
    blocks: list[int] = field(default_factory=list[int])
    state: str = "granted"
    polls_left: int = 0


class FakeProducer:
    """Holds blocks as the real one does, and checks that what it sends is right when it may."""

    def __init__(self, pool: BlockManager, executor: FakeExecutor, linger: int = 2) -> None:
        self.offers: dict[TransferKey, Offer] = {}
        self.calls: list[tuple[object, ...]] = []
        self.layers: list[int] = []
        self.hold: Callable[[float], float | None] = lambda now: None
        self._pool, self._executor, self._linger = pool, executor, linger
        self._staged: set[TransferKey] = set()

    def offer(
        self,
        key: TransferKey,
        peer: Address,
        token_ids: Sequence[int],
        *,
        prompt_tokens: int,
        salt: bytes,
        now: float,
    ) -> None:
        assert self.is_settled(key), "offered again before it settled"
        self.calls.append(("offer", key, len(token_ids), prompt_tokens))
        self.offers[key] = Offer(tuple(token_ids))

    def cached(self, key: TransferKey, block_ids: Sequence[int], tokens: int) -> None:
        self.calls.append(("cached", key, tokens))
        assert tokens % BLOCK == 0
        self._hold(key, block_ids, tokens)
        self._check(self.offers[key], tokens)

    def stage(self, key: TransferKey, block_ids: Sequence[int], tokens: int) -> None:
        self.calls.append(("stage", key, tokens))
        self._hold(key, block_ids, tokens)
        self._staged.add(key)

    def layer_done(self, layer: int) -> None:
        self.layers.append(layer)

    def step_done(self, *, failed: bool = False) -> None:
        for key in self._staged:
            offer = self.offers[key]
            if failed:
                self.cancel(key, "failed")
                continue
            self._check(offer, offer.staged)
            if offer.done == len(offer.token_ids):
                offer.polls_left = self._linger
        self._staged.clear()

    def held_until(self, now: float) -> float | None:
        assert not self._staged, "asked in the middle of a step"
        return self.hold(now)

    def status(self, key: TransferKey) -> SendStatus:
        assert key not in self._staged, "asked in the middle of a step"
        return SendStatus(self.offers[key].state, "d-1")

    def cancel(self, key: TransferKey, reason: str) -> None:
        self.calls.append(("cancel", key, reason))
        self.offers[key].state = "none"
        self.offers[key].polls_left = self._linger

    def is_settled(self, key: TransferKey) -> bool:
        offer = self.offers.get(key)
        return offer is None or (offer.state == "none" and not offer.blocks)

    def poll(self, now: float) -> None:
        for offer in self.offers.values():
            over = offer.state == "none" or offer.done == len(offer.token_ids)
            if over and offer.blocks:
                offer.polls_left -= 1
                if offer.polls_left <= 0:
                    self._pool.release(offer.blocks)
                    offer.blocks = []

    def has_work(self) -> bool:
        return any(offer.blocks for offer in self.offers.values())

    def _hold(self, key: TransferKey, block_ids: Sequence[int], tokens: int) -> None:
        offer = self.offers[key]
        assert offer.state != "none"
        assert offer.staged < tokens <= len(offer.token_ids)
        assert list(block_ids[: len(offer.blocks)]) == offer.blocks
        more = list(block_ids[len(offer.blocks) : -(-tokens // BLOCK)])
        self._pool.retain(more)
        offer.blocks.extend(more)
        offer.staged = tokens

    def _check(self, offer: Offer, tokens: int) -> None:
        want = kv_of(offer.token_ids[:tokens])
        assert [self._executor.slot(offer.blocks, p) for p in range(tokens)] == want
        offer.done = tokens


@dataclass
class Arrival:
    """One transfer as the fake consumer sees it: where it lands, and whether it has."""

    token_ids: tuple[int, ...]
    where: str
    blocks: list[int] = field(default_factory=list[int])
    skipped: int = 0
    landed: bool = False
    failed: str = ""


class FakeConsumer:
    """Landing of KV: in blocks taken at OFFER (direct) or at admission (buffer, deferred)."""

    def __init__(self, pool: BlockManager, executor: FakeExecutor) -> None:
        self.arrivals: dict[TransferKey, Arrival] = {}
        self.expected: dict[TransferKey, float] = {}
        self.calls: list[tuple[object, ...]] = []
        self._pool, self._executor = pool, executor
        self._dead: list[Arrival] = []

    # --- what P would do

    def arrive(self, key: TransferKey, token_ids: Sequence[int], where: str) -> None:
        """An OFFER comes; the prefix that is cached here is pinned."""
        arrival = Arrival(tuple(token_ids), where)
        self.arrivals[key] = arrival
        if where != "deferred":
            self._reserve(arrival)

    def land(self, key: TransferKey) -> None:
        """All DATA of the key has come."""
        arrival = self.arrivals.get(key)
        if arrival is None or arrival.failed or arrival.landed or arrival.where == "deferred":
            return
        arrival.landed = True
        if arrival.where == "direct":
            self._write(arrival)

    def fail(self, key: TransferKey, reason: str) -> None:
        """P died or cancelled."""
        arrival = self.arrivals.get(key)
        if arrival is not None and not arrival.landed:
            arrival.failed = reason
            self._drop(arrival)

    def drop_orphans(self) -> None:
        """The leases of KV that nobody expects end."""
        for key in [k for k in self.arrivals if k not in self.expected]:
            self._drop(self.arrivals.pop(key))

    # --- the seam

    def poll(self, now: float) -> None:
        for arrival in self._dead:
            self._drop(arrival)
        self._dead.clear()

    def offered(self, key: TransferKey) -> OfferedPrompt | None:
        arrival = self.arrivals.get(key)
        return OfferedPrompt(arrival.token_ids, len(arrival.token_ids)) if arrival else None

    def expect(self, key: TransferKey, *, wait_s: float, now: float) -> None:
        assert key not in self.expected
        self.calls.append(("expect", key))
        self.expected[key] = now + wait_s

    def admit(self, key: TransferKey, token_ids: Sequence[int], now: float) -> Admission:
        assert key in self.expected, "asked again after its answer"
        arrival = self.arrivals.get(key)
        if arrival is not None and arrival.failed:
            return self._no_kv(key, arrival.failed)
        if arrival is not None and tuple(token_ids[: len(arrival.token_ids)]) != arrival.token_ids:
            return self._no_kv(key, "other_prompt")
        if arrival is not None and arrival.where == "deferred" and self._reserve(arrival):
            arrival.where = "direct"
        if arrival is None or not arrival.landed:
            return self._no_kv(key, "late") if now >= self.expected[key] else Wait()
        if arrival.where == "buffer" and not self._take_rest(arrival):
            return Wait()
        if arrival.where == "buffer":
            self._write(arrival)
        del self.expected[key], self.arrivals[key]
        return Landed(tuple(arrival.blocks), len(arrival.token_ids), arrival.skipped)

    def forget(self, key: TransferKey) -> None:
        self.calls.append(("forget", key))
        del self.expected[key]
        self._end(self.arrivals.pop(key, None))

    def release(self, uuid: str, now: float) -> None:
        for key, arrival in self.arrivals.items():
            if key.uuid == uuid:
                arrival.failed = "released"
                self._drop(arrival)

    def next_deadline(self) -> float | None:
        return min(self.expected.values(), default=None)

    def has_work(self) -> bool:
        return bool(self.arrivals)

    def _reserve(self, arrival: Arrival) -> bool:
        limit = len(arrival.token_ids) - 1
        arrival.blocks = self._pool.match_prefix(arrival.token_ids, salt=b"", max_tokens=limit)
        arrival.skipped = len(arrival.blocks) * BLOCK
        if arrival.where == "buffer" or self._take_rest(arrival):
            return True
        self._drop(arrival)
        arrival.where = "deferred"
        return False

    def _take_rest(self, arrival: Arrival) -> bool:
        need = -(-len(arrival.token_ids) // BLOCK) - len(arrival.blocks)
        taken = self._pool.take(need)
        if taken is not None:
            arrival.blocks.extend(taken)
        return taken is not None

    def _write(self, arrival: Arrival) -> None:
        for position, value in enumerate(kv_of(arrival.token_ids)):
            if position >= arrival.skipped:
                self._executor.write(arrival.blocks, position, value)

    def _drop(self, arrival: Arrival) -> None:
        self._pool.release(arrival.blocks)
        arrival.blocks = []

    def _no_kv(self, key: TransferKey, reason: str) -> NoKv:
        del self.expected[key]
        self._end(self.arrivals.pop(key, None))
        return NoKv(reason)

    def _end(self, arrival: Arrival | None) -> None:
        if arrival is not None and arrival.landed:
            self._drop(arrival)
        elif arrival is not None:
            # A write may land until the next poll.
            self._dead.append(arrival)

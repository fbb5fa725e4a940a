"""Drafting with a model that has a KV cache of its own: what it has seen, and what it takes in.

Each sequence is followed by itself: rows that are in the drafter's blocks, and rows that are known
and not fed yet. It must not know schedulers, other ranks or checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from xpyd_core.blocks import block_hashes, blocks_for, extend_block_hashes
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.executor import KnownTokens, ScheduledSequence
from xpyd_worker.engine.request import SampledToken
from xpyd_worker.kernels.api import Kernels, Plan, Span
from xpyd_worker.runner.drafter import Computed, asks, is_asked, standing
from xpyd_worker.runner.kv_cache import KvCache
from xpyd_worker.runner.tensors import put_ints, to_ints

_MOST_ROWS = 512
"""Rows that drafters take in behind one step, of all sequences, besides those that the step itself
has: its requests wait for them. A sequence with more has no draft before all are taken in. Also
those of one forward, which needs memory that nobody measured."""
_MOST_PENDING = 512
"""Hidden states that are kept of a sequence while nothing is drafted for it; the older half goes
then."""
_MOST_NOTED = 32
"""Steps in which nothing is to be drafted whose states are taken together, where they have fewer
than _MOST_ROWS rows: they are kept, for a draft that may come, while the model that is drafted for
should hardly be slower."""
_MOST_HELD = 16_384
"""Hidden states that are kept of all sequences: 128 MiB where one has 8 KiB."""


class DraftModel(Protocol):
    """A model with a KV cache of its own that guesses next tokens, whole on one rank."""

    @property
    def reads_features(self) -> bool:
        """Whether row p has, of the model that is drafted for, the token behind position p and
        features of its hidden state at p; otherwise it has the token at p alone."""
        ...

    def project(self, features: Tensor) -> Tensor:
        """[rows, n] as the model gave them -> [rows, hidden], as `run` takes them."""
        ...

    def run(
        self,
        token_ids: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        caches: Sequence[Tensor],
        plan: Plan,
    ) -> Tensor:
        """Hidden states [rows, hidden]; of the row before a drafted token they are its `hidden`."""
        ...

    def best(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] that `run` gave -> int64 [rows]: the most probable next token, one of the
        model's that is drafted for."""
        ...


def _together(steps: Sequence[Computed]) -> Tensor:
    """The features of all rows of these steps, one step's behind the other's."""
    if len(steps) == 1:
        return torch.cat(steps[0].features, dim=1)
    layers = zip(*(step.features for step in steps), strict=True)
    return torch.cat([torch.cat(layer) for layer in layers], dim=1)


def _shares(states: Tensor, of: Collection[Sequence[range]]) -> Sequence[Tensor]:
    """The rows of each, of `states` [rows, n]."""
    if all(len(ranges) == 1 for ranges in of):
        return [states[rows.start : rows.stop] for (rows,) in of]
    rows = [[*chain(*ranges)] for ranges in of]
    (chosen,) = put_ints([[*chain(*rows)]], states.device)
    return torch.split(states.index_select(0, chosen), [len(some) for some in rows])


def _owned(rows: Tensor) -> Tensor:
    """These rows, without those that they are a part of: a step's are as many as all its sequences
    have."""
    return rows if rows.untyped_storage().nbytes() == rows.nbytes else rows.clone()


@dataclass(eq=False)
class _Followed:
    """A sequence as the drafter knows it. Rows [first, fed) are in its blocks, of which the first
    row is the first; `tokens` are those of its rows from `first` on, `pending` the hidden states of
    `waiting` rows that are not fed yet, [rows, hidden] each."""

    first: int = 0
    fed: int = 0
    tokens: list[int] = field(default_factory=list[int])
    pending: list[Tensor] = field(default_factory=list[Tensor])
    waiting: int = 0
    blocks: list[int] = field(default_factory=list[int])
    hashes: list[bytes] = field(default_factory=list[bytes])
    salt: bytes = b""

    @property
    def seen(self) -> int:
        """Behind the last row whose hidden state is known."""
        return self.fed + self.waiting

    @property
    def rows(self) -> int:
        """Rows whose token is known and that are not fed."""
        return self.first + len(self.tokens) - self.fed

    def own(self) -> None:
        """Have a copy of what is kept of a step."""
        if self.pending:
            self.pending[-1] = _owned(self.pending[-1])

    def take(self, rows: int) -> list[Tensor]:
        """The states of the first rows that are kept, which are forgotten here."""
        self.waiting -= rows
        found: list[Tensor] = []
        while rows:
            first = self.pending[0]
            found.append(first[:rows])
            if len(first) > rows:
                self.pending[0] = _owned(first[rows:])
                break
            del self.pending[0]
            rows -= len(first)
        return found


@dataclass(frozen=True)
class _Turn:
    """What one sequence has of one turn: it feeds `rows` rows; `propose` tokens are drafted behind
    the last of them."""

    seq_id: int
    of: _Followed
    rows: int
    propose: int


class ModelDrafter:
    """Drafts with a model: takes in the rows that it has not seen, then goes on from the best next
    token to the next, all sequences in one batch."""

    def __init__(
        self,
        model: DraftModel,
        kernels: Kernels,
        kv_cache: KvCache,
        *,
        weight_bytes: int,
        most_sequences: int,
    ) -> None:
        """`model` is of `kernels`, on the device of `kv_cache`, which is the drafter's own.
        `most_sequences`: that it follows at once; the longest unused is forgotten."""
        self._model, self._kernels, self._cache = model, kernels, kv_cache
        self._pool = BlockManager(
            kv_cache.num_blocks,
            block_size=kv_cache.shape.block_size,
            # What a row's token is says nothing of the hidden state that was fed with it.
            enable_prefix_caching=not model.reads_features,
        )
        self._most = most_sequences
        self._followed: OrderedDict[int, _Followed] = OrderedDict()
        # Those whose hidden states are not taken yet, and their rows.
        self._noted: list[Computed] = []
        self._noted_rows = 0
        self.weight_bytes, self.cache_bytes = weight_bytes, kv_cache.size_bytes

    def note(self, step: Computed) -> bool:
        """See Drafter."""
        if not self._model.reads_features:
            return asks(step)
        self._noted.append(step)
        self._noted_rows += len(step.hidden)
        # Also where many wait, and behind a part of a prompt, which may have many rows.
        is_full = len(self._noted) >= _MOST_NOTED or self._noted_rows >= _MOST_ROWS
        return is_full or asks(step) or any(len(r.sequence.token_ids) > 1 for r in step.rows)

    def propose(self, step: Computed) -> dict[int, tuple[int, ...]]:
        """See Drafter."""
        seen = self._see() if self._noted else ()
        for rows in step.rows:
            self._follow(rows.sequence.seq_id)
        # Those of the step are the newest.
        while len(self._followed) > max(self._most, len(step.rows)):
            self._forget(next(iter(self._followed)))
        found: dict[int, tuple[int, ...]] = {}
        for batch in _batches(self._turns(step)):
            # As the plan of a step likes them: single rows first.
            batch.sort(key=lambda turn: (turn.rows > 1, turn.of.fed))
            found |= self._run(batch)
        for one in seen:
            one.own()
        self._bound()
        return found

    def _turns(self, step: Computed) -> list[_Turn]:
        """What is done behind a step: for those that ask, and, where the model reads features, of
        prompts that go on."""
        due: list[tuple[ScheduledSequence, bool]] = []
        reads = self._model.reads_features
        for rows in step.rows:
            sequence = rows.sequence
            asked = is_asked(sequence, step)
            if asked and not reads:
                self._read(sequence, step.samples[sequence.seq_id])
            if asked or (reads and len(sequence.token_ids) - sequence.drafts > 1):
                due.append((sequence, asked))
        # One with many rows holds up none with few.
        due.sort(key=lambda one: self._followed[one[0].seq_id].rows)
        in_step = {rows.sequence.seq_id for rows in step.rows}
        budget = _MOST_ROWS + (len(step.hidden) if reads else 0)
        turns: list[_Turn] = []
        for sequence, asked in due:
            one = self._followed[sequence.seq_id]
            rows = min(one.rows, budget)
            propose = sequence.propose if asked and rows == one.rows else 0
            turn = _Turn(sequence.seq_id, one, rows, propose)
            if rows and self._has_room(turn, in_step):
                budget -= rows
                turns.append(turn)
        return turns

    # --- what is known of sequences

    def _follow(self, seq_id: int) -> _Followed:
        one = self._followed.get(seq_id)
        if one is None:
            one = self._followed[seq_id] = _Followed()
        else:
            self._followed.move_to_end(seq_id)
        return one

    def _forget(self, seq_id: int) -> None:
        self._pool.release(self._followed.pop(seq_id).blocks)

    def _bound(self) -> None:
        """Forget hidden states where there are too many: the oldest of a sequence, which then
        begins behind them, and sequences, those with the most first."""
        held = 0
        for one in self._followed.values():
            if one.waiting > _MOST_PENDING:
                gone = one.waiting - _MOST_PENDING // 2
                one.take(gone)
                self._pool.release(one.blocks)
                one.blocks = []
                first = one.fed + gone
                del one.tokens[: first - one.first]
                one.first = one.fed = first
            held += one.waiting
        if held > _MOST_HELD:
            for seq_id, one in sorted(self._followed.items(), key=lambda item: -item[1].waiting):
                if held <= _MOST_HELD:
                    break
                held -= one.waiting
                self._forget(seq_id)

    def _read(self, sequence: ScheduledSequence, samples: Sequence[SampledToken]) -> None:
        """All tokens of a sequence, the drawn one as the last; what the cache has of a new one's
        prefix need not be fed."""
        one, known = self._followed[sequence.seq_id], sequence.known
        assert known is not None, "what drafts reads all tokens"
        is_new = not one.tokens
        _extend(one.tokens, known)
        # A step that is made again has drawn before.
        del one.tokens[len(known.prompt) + len(known.output) :]
        one.tokens += [sample.token_id for sample in samples]
        one.fed = min(one.fed, len(one.tokens) - 1)
        if is_new:
            size = self._pool.block_size
            one.salt = known.salt
            hashes = block_hashes(one.tokens[:-1], block_size=size, salt=one.salt)
            one.blocks = self._pool.lookup(hashes)
            self._pool.retain(one.blocks)
            one.fed = len(one.blocks) * size
            one.hashes = hashes[: len(one.blocks)]

    def _see(self) -> list[_Followed]:
        """Keep the hidden states of all rows of the steps that wait for it, and the token behind
        each; give the sequences that have some. One that was not followed to where a step begins is
        followed from there on."""
        steps, self._noted, self._noted_rows = self._noted, [], 0
        hidden = self._model.project(_together(steps))
        kept: dict[int, list[range]] = {}
        first_row = 0
        for step in steps:
            for rows in step.rows:
                sequence = rows.sequence
                seq_id, start = sequence.seq_id, sequence.start
                samples = step.samples.get(seq_id, ())
                if sequence.samples and not samples:
                    continue  # it failed
                tokens = standing(sequence, samples)
                count = len(tokens) - (len(sequence.samples) == 1)
                one = self._follow(seq_id)
                if start > one.seen or not one.seen:
                    self._forget(seq_id)
                    kept.pop(seq_id, None)
                    one = self._follow(seq_id)
                    one.first = one.fed = start
                # A preempted sequence's rows come again.
                again = one.seen - start
                if again >= count:
                    continue
                if one.seen > one.first + len(one.tokens):
                    # Of the last row the token behind it was not known: a prompt went on.
                    one.tokens.append(tokens[again])
                one.tokens += tokens[again + 1 :]
                one.waiting += count - again
                at = first_row + rows.first_row
                first, ranges = at + again, kept.setdefault(seq_id, [])
                if ranges and ranges[-1].stop == first:
                    first = ranges.pop().start
                ranges.append(range(first, at + count))
            first_row += len(step.hidden)
        found = [self._followed[seq_id] for seq_id in kept]
        for one, states in zip(found, _shares(hidden, kept.values()), strict=True):
            one.pending.append(states)
        return found

    # --- rows

    def _has_room(self, turn: _Turn, in_step: set[int]) -> bool:
        """Take the blocks that a turn needs, from sequences that are not in the step where they
        lack."""
        one = turn.of
        rows = one.fed - one.first + turn.rows + max(0, turn.propose - 1)
        need = blocks_for(rows, self._pool.block_size) - len(one.blocks)
        for seq_id in list(self._followed):
            if need <= self._pool.num_free:
                break
            if seq_id not in in_step:
                self._forget(seq_id)
        taken = self._pool.allocate(max(0, need))
        if taken is None:
            return False
        one.blocks += taken
        return True

    def _run(self, turns: Sequence[_Turn]) -> dict[int, tuple[int, ...]]:
        """Feed the rows of all turns, then draft, a token of each sequence at a time."""
        device = self._cache.layers[0].device
        token_ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        last: list[int] = []
        hidden: list[Tensor] = []
        for turn in turns:
            one, at = turn.of, turn.of.fed - turn.of.first
            token_ids += one.tokens[at : at + turn.rows]
            positions += range(one.fed, one.fed + turn.rows)
            spans.append(Span(at, turn.rows, one.blocks))
            last.append(len(token_ids) - 1)
            if self._model.reads_features:
                hidden += one.take(turn.rows)
        made = self._forward(token_ids, torch.cat(hidden) if hidden else None, positions, spans)
        drafting = [(turn, row) for turn, row in zip(turns, last, strict=True) if turn.propose]
        drafts: list[tuple[list[_Turn], Tensor]] = []
        if drafting:
            (chosen,) = put_ints([[row for _, row in drafting]], device)
            made = made.index_select(0, chosen)
            drafts = self._draft([turn for turn, _ in drafting], made)
        for turn in turns:
            self._fed(turn)
        found: dict[int, tuple[int, ...]] = {}
        for drafted, ids in drafts:
            for turn, token in zip(drafted, to_ints(ids.cpu()), strict=True):
                found[turn.seq_id] = (*found.get(turn.seq_id, ()), token)
        return found

    def _draft(self, turns: list[_Turn], made: Tensor) -> list[tuple[list[_Turn], Tensor]]:
        """`made` [turns, hidden] of the last row of each -> the sequences and the tokens of each
        place of the drafts."""
        ids = self._model.best(made)
        drafts = [(turns, ids)]
        for place in range(1, max(turn.propose for turn in turns)):
            on = [n for n, turn in enumerate(turns) if turn.propose > place]
            if len(on) < len(turns):
                (chosen,) = put_ints([on], ids.device)
                turns = [turns[n] for n in on]
                ids, made = ids.index_select(0, chosen), made.index_select(0, chosen)
            ends = [turn.of.fed + turn.rows + place - 1 for turn in turns]
            spans = [
                Span(end - turn.of.first, 1, turn.of.blocks)
                for turn, end in zip(turns, ends, strict=True)
            ]
            reads = self._model.reads_features
            made = self._forward(ids, made if reads else None, ends, spans)
            ids = self._model.best(made)
            drafts.append((turns, ids))
        return drafts

    def _forward(
        self,
        token_ids: list[int] | Tensor,
        hidden: Tensor | None,
        positions: list[int],
        spans: list[Span],
    ) -> Tensor:
        device = self._cache.layers[0].device
        plan = self._kernels.plan(spans, self._cache.shape)
        if isinstance(token_ids, Tensor):
            (at,) = put_ints([positions], device)
        else:
            token_ids, at = put_ints([token_ids, positions], device)
        return self._model.run(token_ids, hidden, at, self._cache.layers, plan)

    def _fed(self, turn: _Turn) -> None:
        """The rows of a turn are in the cache; full blocks of them can be found by what they
        hold."""
        one = turn.of
        one.fed += turn.rows
        if self._model.reads_features:
            return
        before, size = len(one.hashes), self._pool.block_size
        extend_block_hashes(one.hashes, one.tokens[: one.fed], block_size=size, salt=one.salt)
        for n in range(before, len(one.hashes)):
            self._pool.register(one.blocks[n], one.hashes[n])


def _batches(turns: Sequence[_Turn]) -> Iterator[list[_Turn]]:
    """Turns of one forward each, in order; one with more rows than a forward has parts, the last of
    which drafts."""
    batch: list[_Turn] = []
    left = _MOST_ROWS
    for turn in turns:
        rows = turn.rows
        while rows:
            if not left:
                yield batch
                batch, left = [], _MOST_ROWS
            part = min(rows, left)
            rows, left = rows - part, left - part
            batch.append(replace(turn, rows=part, propose=0 if rows else turn.propose))
    if batch:
        yield batch


def _extend(tokens: list[int], known: KnownTokens) -> None:
    """Append those of `known` that are behind the last one."""
    have, prompt = len(tokens), len(known.prompt)
    if have < prompt:
        tokens += known.prompt[have:]
        have = prompt
    tokens += known.output[have - prompt :]

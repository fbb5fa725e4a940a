"""What a model that drafts takes in, keeps and forgets, behind steps that are made by hand.

The model is a fake that checks its rows: token p of sequence s is 1,000 s + p, its hidden state has
s and p, and it drafts the tokens that follow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.runner_driver import with_params
from xpyd_worker.engine.executor import KnownTokens, SampleSpec, ScheduledSequence
from xpyd_worker.engine.request import SampledToken
from xpyd_worker.kernels.api import KvShape, Plan, Span
from xpyd_worker.kernels.plain import PlainKernels
from xpyd_worker.runner import model_drafter as module
from xpyd_worker.runner.batch import BatchRows
from xpyd_worker.runner.drafter import Computed
from xpyd_worker.runner.kv_cache import KvCache
from xpyd_worker.runner.model_drafter import ModelDrafter

SHAPE = KvShape(1, 8, 4, torch.float32)
PARAMS = with_params(max_tokens=1000)


def token(seq_id: int, place: int) -> int:
    return 1000 * seq_id + place


class Plans(PlainKernels):
    """Keeps the spans of the last plan."""

    spans: Sequence[Span] = ()

    def plan(self, spans: Sequence[Span], shape: KvShape) -> Any:
        self.spans = list(spans)
        held = [block for span in spans for block in span.block_ids]
        assert len(held) == len(set(held)), "a block has one sequence"
        for span in spans:
            assert span.count > 0
            assert span.start + span.count <= len(span.block_ids) * shape.block_size
        return super().plan(spans, shape)


@dataclass
class Following:
    """A model that drafts the tokens that follow."""

    reads_features: bool
    rows: list[int]
    """Of each run."""

    def project(self, features: Tensor) -> Tensor:
        return features

    def run(
        self,
        token_ids: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        caches: Sequence[Tensor],
        plan: Plan,
    ) -> Tensor:
        self.rows.append(len(token_ids))
        # Row p has the token behind position p where there is a hidden state of p.
        behind = positions + int(self.reads_features)
        assert (token_ids % 1000).tolist() == behind.tolist()
        if hidden is not None:
            assert hidden[:, 0].tolist() == (token_ids // 1000).tolist()
            assert hidden[:, 1].tolist() == positions.tolist()
        assert (hidden is not None) == self.reads_features
        return torch.stack([token_ids // 1000, positions + 1, token_ids], dim=1).float()

    def best(self, hidden: Tensor) -> Tensor:
        return hidden[:, 2].long() + 1


class Kit:
    """A drafter, and the steps of sequences that it sees."""

    def __init__(self, *, reads_features: bool, blocks: int = 400, most: int = 32) -> None:
        self.model = Following(reads_features, [])
        self.drafter = ModelDrafter(
            self.model,
            Plans(),
            KvCache(SHAPE, num_layers=1, num_blocks=blocks),
            weight_bytes=0,
            most_sequences=most,
        )
        self.computed: dict[int, int] = {}
        self.last: Computed | None = None

    def step(self, *parts: Part) -> dict[int, tuple[int, ...]]:
        """One step; what was drafted behind it, which is right."""
        rows: list[BatchRows] = []
        hidden: list[tuple[int, int, int]] = []
        samples: dict[int, tuple[SampledToken, ...]] = {}
        for part in parts:
            start, seq_id = self.computed.get(part.seq_id, 0), part.seq_id
            end = start + part.count
            self.computed[seq_id] = end
            known = KnownTokens(tuple(token(seq_id, p) for p in range(end)), (), b"")
            sequence = ScheduledSequence(
                seq_id,
                tuple(token(seq_id, p) for p in range(start, end)),
                start,
                (),
                PARAMS,
                end,
                samples=(SampleSpec(0, 0),) if part.draws else (),
                known=known if part.propose else None,
                propose=part.propose,
            )
            rows.append(BatchRows(sequence, len(hidden)))
            hidden += [(seq_id, p, 0) for p in range(start, end)]
            if part.draws:
                samples[seq_id] = (SampledToken(token(seq_id, end)),)
        states = torch.tensor(hidden).float()
        self.last = Computed(tuple(rows), states, (states,), samples)
        found = self.drafter.propose(self.last) if self.drafter.note(self.last) else {}
        for seq_id, ids in found.items():
            first = self.computed[seq_id] + 1
            assert ids == tuple(token(seq_id, first + n) for n in range(len(ids)))
        return found

    def pending(self) -> Iterator[tuple[int, list[Tensor]]]:
        for one in self.drafter._followed.values():
            assert one.waiting == sum(len(states) for states in one.pending)
            yield one.waiting, one.pending


@dataclass(frozen=True)
class Part:
    """`count` tokens of a sequence; `propose` are to be drafted."""

    seq_id: int
    count: int = 1
    propose: int = 0
    draws: bool = True


def test_one_with_a_long_prompt_holds_up_none_with_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST_ROWS", 16)
    kit = Kit(reads_features=False)
    assert kit.step(Part(1, 40, 2), Part(2, 5, 2)).keys() == {2}
    assert kit.model.rows == [16, 1]
    steps = [kit.step(Part(1, 1, 2), Part(2, 1, 2)).keys() for _ in range(4)]
    # 10 of 41 rows are taken in at first, then 15 behind each step, one of which brings one more.
    assert steps == [{2}, {2}, {1, 2}, {1, 2}]


def test_the_states_of_a_prompt_are_taken_in_with_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that its first draft comes behind its first token, however long it is."""
    monkeypatch.setattr(module, "_MOST_ROWS", 16)
    kit = Kit(reads_features=True)
    for _ in range(3):
        kit.step(Part(1, 40, draws=False))
        assert max(waiting for waiting, _ in kit.pending()) <= 1
    assert len(kit.step(Part(1, 40, 3))[1]) == 3
    # In forwards of 16 rows at most, as the memory of larger ones was not measured.
    assert kit.model.rows == [16, 16, 7, *[16, 16, 8] * 2, 16, 16, 9, 1, 1]


def test_a_forward_that_is_just_full_leaves_no_empty_share_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST_ROWS", 16)
    kit = Kit(reads_features=True)
    found = kit.step(*(Part(seq_id, 8, 2) for seq_id in (1, 2, 3)))
    assert found.keys() == {1, 2, 3}
    assert kit.model.rows == [16, 2, 8, 1]


@pytest.mark.parametrize("beside", [0, 60])
def test_so_they_are_where_its_last_part_draws_and_nothing_is_asked_for(
    beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as in a step that shows what one without drafts takes; also beside one that goes on
    behind a rest."""
    monkeypatch.setattr(module, "_MOST_ROWS", 64)
    monkeypatch.setattr(module, "_MOST_PENDING", 64)
    kit = Kit(reads_features=True)
    for _ in range(beside):
        kit.step(Part(2))
    kit.step(Part(1, 80, draws=False), *([Part(2, 1, 2)] if beside else []))
    kit.step(Part(1, 80))
    assert kit.drafter._followed[1].first == 0
    kit.model.rows.clear()
    assert len(kit.step(Part(1, 1, 2))[1]) == 2
    assert kit.model.rows == [1, 1]


@pytest.mark.parametrize("reads_features", [False, True])
def test_while_nothing_is_asked_for_nothing_is_computed_and_little_kept(
    reads_features: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_PENDING", 16)
    kit = Kit(reads_features=reads_features)
    assert len(kit.step(Part(1, 10, 3))[1]) == 3
    kit.model.rows.clear()
    for _ in range(50):
        # Beside a prompt that is much larger than what is kept.
        assert kit.step(Part(1), Part(2, 200)) == {}
        for waiting, states in kit.pending():
            assert waiting <= 16
            assert sum(one.untyped_storage().nbytes() for one in states) <= 24 * 16
        assert (2 in kit.drafter._followed) == reads_features
        if reads_features:
            kit.drafter._forget(2)
        kit.computed[2] = 0
    # But for the prompts, where it needs their states.
    assert kit.model.rows == ([200] * 50 if reads_features else [])
    if reads_features:
        # It begins behind what it has in its blocks: they are free.
        assert kit.drafter._pool.num_free == kit.drafter._pool.num_blocks
    assert len(kit.step(Part(1, 1, 3))[1]) == 3
    # Those that were kept, or all tokens.
    first = next(rows for rows in kit.model.rows if rows != 200)
    assert first <= (16 if reads_features else 61)
    assert len(kit.step(Part(1, 1, 3))[1]) == 3
    assert kit.model.rows[-3:] == [1, 1, 1]
    drafter = kit.drafter
    for seq_id in list(drafter._followed):
        drafter._forget(seq_id)
    assert drafter._pool.num_free == drafter._pool.num_blocks


@pytest.mark.parametrize("seed", range(3))
def test_steps_that_are_only_noted_are_known_behind_the_next_draft(seed: int) -> None:
    """Also of sequences that come, go, are preempted, are in some of the steps only, or have rows
    that it never saw: such one begins anew."""
    chance = random.Random(seed)
    kit = Kit(reads_features=True)
    most_noted, firsts = 0, dict.fromkeys(range(1, 7), 0)
    for _ in range(300):
        kit.model.rows.clear()
        ids = chance.sample(range(1, 7), chance.randint(1, 6))
        counts = {one: chance.choice((2, 9)) if chance.random() < 0.03 else 1 for one in ids}
        if chance.random() < 0.1 and (before := kit.computed.get(ids[0], 0)):
            kit.computed[ids[0]] = chance.randrange(before)
            counts[ids[0]] += before - kit.computed[ids[0]]
        elif chance.random() < 0.02:
            firsts[ids[0]] = kit.computed[ids[0]] = kit.computed.get(ids[0], 0) + 3
        asked = set(ids[:2]) if chance.random() < 0.05 else set[int]()
        parts = [Part(one, count, 3 * (one in asked)) for one, count in counts.items()]
        assert kit.step(*parts).keys() == asked
        noted = len(kit.drafter._noted)
        if noted:
            assert kit.model.rows == []
        most_noted = max(most_noted, noted)
        assert noted < module._MOST_NOTED
        if not noted:
            followed = kit.drafter._followed.items()
            assert all(one.first == firsts[seq_id] for seq_id, one in followed)
        for _, states in kit.pending():
            assert all(state.untyped_storage().nbytes() == state.nbytes for state in states)
    assert most_noted > 8


def test_few_steps_of_many_sequences_are_noted() -> None:
    """Rows are what takes memory."""
    kit = Kit(reads_features=True, most=300)
    most = 0
    for _ in range(5):
        kit.step(*(Part(seq_id) for seq_id in range(1, 201)))
        noted = sum(len(step.hidden) for step in kit.drafter._noted)
        assert noted < module._MOST_ROWS
        assert bool(noted) == bool(kit.drafter._noted)
        most = max(most, noted)
    assert most == 400


def test_states_of_all_sequences_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PENDING", 16)
    monkeypatch.setattr(module, "_MOST_HELD", 40)
    monkeypatch.setattr(module, "_MOST_NOTED", 2)
    kit = Kit(reads_features=True)
    most = 0
    for _ in range(30):
        kit.step(*(Part(seq_id) for seq_id in range(1, 9)))
        held = sum(waiting for waiting, _ in kit.pending())
        assert held <= 40
        most = max(most, held)
    assert most > 30
    found = kit.step(*(Part(seq_id, 1, 2) for seq_id in range(1, 9)))
    assert found.keys() == set(range(1, 9))


@pytest.mark.parametrize("reads_features", [False, True])
def test_a_step_that_is_made_again_is_drafted_behind_as_the_first_time(
    reads_features: bool,
) -> None:
    kit = Kit(reads_features=reads_features)
    found = kit.step(Part(1, 9, 2), Part(2, 3, 2))
    assert kit.last is not None
    assert kit.drafter.note(kit.last)
    again = kit.drafter.propose(kit.last)
    # What reads states has none for it: a sequence may have no draft.
    assert again == ({} if reads_features else found)
    assert kit.step(Part(1, 1, 2), Part(2, 1, 2)).keys() == {1, 2}


def test_where_no_block_is_free_there_is_no_draft_and_states_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST_PENDING", 16)
    kit = Kit(reads_features=True, blocks=5)
    assert kit.step(Part(1, 10, 2), Part(2, 60, 2)).keys() == {1}
    drafted: list[int] = []
    for _ in range(60):
        drafted.append(len(kit.step(Part(1, 1, 2), Part(2, 1, 2))))
        assert all(waiting <= 16 for waiting, _ in kit.pending())
    # One goes on again when what it had is forgotten.
    assert 0 in drafted[:20]
    assert sum(drafted[20:]) > 10

"""The engine's executor with its real messages, over real rings, to a rank in the same process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import pytest

from tests.ranks.kit.coded_executor import MOST_TOKENS
from tests.ranks.test_step_messages import GOING, SOME
from xpyd_worker.engine.eplb import EplbConfig, ExpertTurn
from xpyd_worker.engine.executor import (
    Resize,
    SampleSpec,
    ScheduledSequence,
    StepInput,
    StepOutput,
    no_layer_done,
)
from xpyd_worker.engine.request import SampledToken
from xpyd_worker.ranks.compute.request_states import RequestStates
from xpyd_worker.ranks.compute.work import sampled_rows
from xpyd_worker.ranks.executor import RankedExecutor
from xpyd_worker.ranks.instance import Instance
from xpyd_worker.ranks.link.responses import RESPONSE_RING_BYTES, Answers, Responses
from xpyd_worker.ranks.link.ring import make_ring
from xpyd_worker.ranks.loss import Loss, RankLostError
from xpyd_worker.ranks.step.decoder import StepDecoder
from xpyd_worker.ranks.step.encoder import StepEncoder
from xpyd_worker.ranks.step.messages import (
    Full,
    Going,
    MessageError,
    Row,
    decode_output,
    decode_step,
    encode_output,
)

DRAWN = 20


class Stuck(Exception):
    """No answer has come in time."""


class OneRank:
    """What the executor uses of an Instance; the rank answers at once where it is not silent."""

    def __init__(self) -> None:
        self._fds = make_ring(1, RESPONSE_RING_BYTES)
        self._answers = Answers(self._fds)
        self.responses = [Responses(self._fds.of_reader(0))]
        self.lost_fd = os.eventfd(0)
        self._states = RequestStates(4, MOST_TOKENS)
        self._decoder = StepDecoder(4, self._states)
        self.rows: list[tuple[Row, ...]] = []
        self.seen: list[StepInput] = []
        self.is_silent = False
        self.loss: Loss | None = None
        self._held: list[bytes] = []

    def publish(self, message: bytes) -> None:
        told = decode_step(message)
        step = self._decoder.read(told)
        self.rows.append(told.rows)
        self.seen.append(step)
        output = StepOutput({s.seq_id: (SampledToken(DRAWN),) for s in step.sequences}, {})
        self._states.post_update(
            [row.slot for row in told.rows],
            [len(s.token_ids) for s in step.sequences],
            sampled_rows(step, output),
        )
        self._held.append(encode_output(output))
        if not self.is_silent:
            self.speak()

    def speak(self) -> None:
        for one in self._held:
            self._answers.done(one)
        self._held.clear()

    def breaks(self, meeting: int) -> None:
        """It says so of a step of that meeting."""
        self._answers.broke(meeting)

    def stuck(self, deadline_s: float) -> Exception:
        return Stuck(deadline_s)

    def error(self) -> Exception:
        return RankLostError("a rank was ended by SIGKILL")

    def close(self) -> None:
        self.responses[0].close()
        self._fds.close()
        os.close(self.lost_fd)


@contextmanager
def one_rank(
    deadline_s: float = 60.0,
    eplb: EplbConfig | None = None,
    await_repair: Callable[[], Resize] | None = None,
) -> Iterator[tuple[OneRank, RankedExecutor]]:
    rank = OneRank()
    try:
        yield (
            rank,
            RankedExecutor(
                # It has all that is used of one.
                cast(Instance, rank),
                num_blocks=8,
                depth=2,
                draws_ahead=False,
                encoder=StepEncoder(4),
                decode=decode_output,
                step_deadline_s=deadline_s,
                eplb=eplb,
                await_repair=await_repair,
            ),
        )
    finally:
        rank.close()


@contextmanager
def event() -> Iterator[int]:
    """A descriptor that is readable."""
    descriptor = os.eventfd(1)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def at(seq_id: int, drawn: int) -> ScheduledSequence:
    """The sequence's step in which its token number `drawn` is drawn."""
    if drawn == 0:
        return replace(SOME, seq_id=seq_id)
    return replace(GOING, seq_id=seq_id, start=2 + drawn, samples=(SampleSpec(0, drawn),))


def test_what_was_drawn_is_not_told_to_the_ranks_that_drew_it():
    """Two sequences take turns, as in a pipeline: each step is launched before the one before it
    is taken."""
    with one_rank() as (rank, executor):
        steps = [StepInput(n + 1, (at(seq_id=n % 2, drawn=n // 2),)) for n in range(6)]
        before = executor.launch(steps[0], lambda _: None)
        for step in steps[1:]:
            running = executor.launch(step, lambda _: None)
            assert before.wait().samples.keys() == {(step.step - 2) % 2}
            before = running
        before.wait()
        assert rank.seen == steps
        assert [type(row) for (row,) in rank.rows] == [Full, Full, Going, Going, Going, Going]


def test_the_wait_for_a_step_ends_when_something_else_has_come():
    with one_rank() as (rank, executor), event() as awake:
        step = StepInput(1, (at(seq_id=0, drawn=0),))
        rank.is_silent = True
        running = executor.launch(step, lambda _: None)
        assert not executor.await_oldest(awake)
        os.eventfd_read(awake)
        rank.speak()
        assert executor.await_oldest(awake)
        assert running.wait().samples.keys() == {0}


def test_waits_that_are_ended_do_not_give_a_step_more_time():
    with one_rank(deadline_s=0.2) as (rank, executor), event() as awake:
        rank.is_silent = True
        executor.launch(StepInput(1, (at(seq_id=0, drawn=0),)), lambda _: None)
        with pytest.raises(Stuck):
            all(executor.await_oldest(awake) is False for _ in range(1_000_000))


def test_an_answer_that_is_there_counts_however_late_it_is_looked_for():
    """Mode put holds the engine up for as long as --kv-wait-seconds, with a step under way."""
    with one_rank(deadline_s=0.0) as (_, executor):
        running = executor.launch(StepInput(1, (at(seq_id=0, drawn=0),)), lambda _: None)
        assert running.wait().samples.keys() == {0}


def test_a_step_without_an_answer_is_stuck_when_its_time_is_over():
    with one_rank(deadline_s=0.0) as (rank, executor):
        rank.is_silent = True
        running = executor.launch(StepInput(1, (at(seq_id=0, drawn=0),)), lambda _: None)
        with pytest.raises(Stuck):
            running.wait()


def test_a_step_that_breaks_with_a_rank_of_its_own_replica_is_not_made_again():
    """Another of its ranks lives, and says it behind the loss."""
    asked: list[str] = []

    def await_repair() -> Resize:
        asked.append("")
        return Resize(1, (0, 2), is_repair=True)

    with one_rank(await_repair=await_repair) as (rank, executor):
        rank.is_silent = True
        running = executor.launch(StepInput(1, (at(seq_id=0, drawn=0),)), lambda _: None)
        rank.loss = Loss("a rank was ended by SIGKILL", 12)
        rank.breaks(0)
        with pytest.raises(RankLostError, match="SIGKILL"):
            running.wait()
    assert not asked


def test_ranks_are_told_in_the_step_when_to_count_and_when_to_place_experts():
    with one_rank(eplb=EplbConfig(window_size=2, step_interval=5)) as (rank, executor):
        for number in range(10):
            executor.launch(StepInput(number + 1, (at(1, number),)), no_layer_done).wait()
    turns = [step.experts for step in rank.seen]
    count, place = ExpertTurn.COUNT, ExpertTurn.PLACE
    assert [number for number, turn in enumerate(turns, 1) if turn == count] == [3, 8]
    assert [number for number, turn in enumerate(turns, 1) if turn == place] == [5, 10]


def test_a_step_that_was_not_sent_is_no_step_of_the_ranks(monkeypatch: pytest.MonkeyPatch):
    with one_rank(eplb=EplbConfig(window_size=2, step_interval=2)) as (rank, executor):
        executor.launch(StepInput(1, (at(1, 0),)), no_layer_done).wait()
        with monkeypatch.context() as patch:
            patch.setattr("xpyd_worker.ranks.step.messages.MAX_STEP_BYTES", 1)
            with pytest.raises(MessageError):
                executor.launch(StepInput(2, (at(1, 1),)), no_layer_done)
        executor.launch(StepInput(2, (at(1, 1),)), no_layer_done).wait()
    assert [step.experts for step in rank.seen] == [ExpertTurn.NONE, ExpertTurn.PLACE]


def test_experts_stay_where_they_are_without_the_flag():
    with one_rank() as (rank, executor):
        for number in range(6):
            executor.launch(StepInput(number + 1, (at(1, number),)), no_layer_done).wait()
    assert {step.experts for step in rank.seen} == {ExpertTurn.NONE}

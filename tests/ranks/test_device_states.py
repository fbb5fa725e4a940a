"""A last stage with a GPU: its host launches a step while the one before is under way."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch

from tests.gpu.fake_gpu import FakeGpu
from tests.ranks.kit.pipeline import (
    FakeFeedback,
    FakeParallel,
    FakeStage,
    LateDevice,
    make_late_states,
)
from tests.worker.runner_driver import GREEDY
from tests.worker.test_gpu_runner_waits import NoWaitsInSteps
from xpyd_worker.engine.executor import (
    DRAWN_BEFORE,
    SampleSpec,
    ScheduledSequence,
    StepInput,
)
from xpyd_worker.kernels.api import NOT_FINITE
from xpyd_worker.parallel.api import Part
from xpyd_worker.ranks.compute.request_states import DeviceStates, Row
from xpyd_worker.ranks.compute.work import RankStep, RankWork
from xpyd_worker.ranks.step.encoder import StepEncoder
from xpyd_worker.ranks.step.messages import decode_output
from xpyd_worker.runner.runner import DeviceDraw

SOME = ScheduledSequence(
    seq_id=1,
    token_ids=(5, 6, 7),
    start=0,
    block_ids=(0, 1),
    sampling=GREEDY,
    prompt_tokens=3,
    samples=(SampleSpec(0, 0),),
)


class BusyDevice(LateDevice):
    """Has done nothing yet, whoever looks; a host that waits for it does so in vain."""

    def look(self, place: int) -> bool:
        self.looks += 1
        assert self.looks <= 4, "the host waits"
        return self.done >= place


class Rank:
    """A last stage with such a device; `steps` are launched, not finished."""

    def __init__(self, stages: int = 1) -> None:
        self.device = BusyDevice(0)
        self.states = make_late_states(4, self.device)
        stage = FakeStage(8, before=deque(), after=deque())
        stage.is_first = stage.is_last = True
        stage.device = self.device
        self.stage = stage
        self.told = FakeFeedback(lambda: None)
        feedback = FakeFeedback(lambda: None, others=[self.told])
        part = Part(layers=range(1), stage=stages - 1, stages=stages)
        self.work = RankWork(stage, self.states, parallel=FakeParallel(part, feedback))
        self.encoder = StepEncoder(4)
        self.steps: list[StepInput] = []

    def launch(self, *sequences: ScheduledSequence) -> RankStep:
        step = StepInput(len(self.steps) + 1, sequences)
        self.steps.append(step)
        return self.work.launch(self.encoder.encode(step))

    def finish(self, launched: RankStep) -> dict[int, int]:
        """Tokens by sequence."""
        self.device.run_to(self.device.enqueued)
        answer = launched.finish()
        assert answer is not None
        output = decode_output(answer)
        self.encoder.drawn(len(self.steps), output)
        return {seq_id: some[0].token_id for seq_id, some in output.samples.items()}


def going(start: int, token: int) -> ScheduledSequence:
    samples = (SampleSpec(0, start - 2),)
    return replace(SOME, token_ids=(token,), start=start, samples=samples)


def test_a_launch_waits_for_no_step_under_way():
    rank = Rank()
    first = rank.launch(SOME)
    second = rank.launch(going(3, DRAWN_BEFORE))
    assert rank.device.done == 0
    assert rank.states.fields.total_len[0] == 3, "as it was before both"
    assert rank.stage.steps == rank.steps
    (token,) = rank.finish(first).values()
    (other,) = rank.finish(second).values()
    fields = rank.states.fields
    assert fields.all_token_ids[0, :5].tolist() == [5, 6, 7, token, other]
    assert (fields.total_len[0], fields.num_computed[0]) == (5, 4)
    # What comes next is read from the states.
    rank.finish(rank.launch(going(4, other)))
    assert rank.stage.steps == rank.steps


def test_the_next_part_of_a_prompt_is_launched_behind_the_one_under_way():
    rank = Rank()
    begun = rank.launch(replace(SOME, token_ids=(5, 6), samples=()))
    ended = rank.launch(replace(SOME, token_ids=(7,), start=2))
    assert rank.device.done == 0
    assert rank.stage.steps == rank.steps
    rank.finish(begun)
    rank.finish(ended)
    assert rank.states.fields.computed_prefill[0] == 3
    assert rank.states.fields.total_len[0] == 4


def test_the_other_stages_are_told_once_the_host_knows():
    rank = Rank(stages=2)
    launched = rank.launch(SOME)
    assert not rank.told.told
    tokens = rank.finish(launched)
    (sampled,) = rank.told.told
    assert sampled.tokens.tolist() == [[tokens[1]]]
    assert sampled.num_sampled.tolist() == [1]


def test_they_are_told_before_a_step_is_launched_where_the_host_could_know():
    rank = Rank(stages=2)
    rank.launch(SOME)
    rank.device.run_to(rank.device.enqueued)
    rank.launch(replace(SOME, seq_id=2, block_ids=(2,)))
    assert len(rank.told.told) == 1


def test_a_row_without_a_finite_logit_draws_no_token():
    device = LateDevice(0)
    states = make_late_states(4, device)
    rows = [Row(slot=2, num_tokens=3, place=1), Row(slot=0, num_tokens=2, place=0)]
    update = states.enqueue(rows, [0, 0], DeviceDraw(torch.tensor([9, NOT_FINITE]), {}))
    device.run_to(device.enqueued)
    states.settle(update)
    assert states.fields.total_len.tolist() == [1, 0, 0, 0]
    assert states.fields.last_sampled.tolist() == [9, 0, 0, 0]
    assert states.fields.num_computed.tolist() == [2, 0, 3, 0]


def test_an_update_is_enqueued_without_a_look_at_the_device():
    """Tensors without values, under a mode that refuses what makes a host wait."""
    seen: list[torch.device] = []

    def update(fields: Any, slots: Any, query_lens: Any, sampled: Any) -> None:
        seen.extend(one.device for one in (slots, query_lens, *sampled))

    meta = torch.device("meta")
    states = DeviceStates(4, 8, device=FakeGpu(torch_device=meta), update=update)
    tokens = torch.empty(2, dtype=torch.int64, device=meta)
    with NoWaitsInSteps():
        states.enqueue([Row(0, 1, 1), Row(3, 4, None)], [5, 0], DeviceDraw(tokens, {}))
    assert seen == [meta] * 5

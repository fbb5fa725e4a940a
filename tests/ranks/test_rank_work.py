"""RankWork on every stage of a pipeline: whoever is late, each request has its own tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, cast

import pytest

from tests.ranks.kit.coded_executor import MOST_TOKENS
from tests.ranks.kit.pipeline import FakeFeedback, FakeParallel, FakePipeline, FakeStage
from tests.ranks.test_device_states import SOME, going
from tests.worker.engine_driver import DRAFTS, EngineDriver, make_request, prompt_of, seeds
from tests.worker.test_engine_walks import Walk
from xpyd_worker.engine.executor import Resize, ScheduledSequence, StepInput
from xpyd_worker.kernels.post_update import Sampled
from xpyd_worker.parallel.api import GroupError, Part
from xpyd_worker.ranks.compute.request_states import RequestStates
from xpyd_worker.ranks.compute.work import RankStep, RankWork
from xpyd_worker.ranks.step.encoder import StepEncoder
from xpyd_worker.ranks.step.messages import StepMessage, decode_output, encode_step


class Forgetful(RequestStates):
    """Leaves out the update that a step ends with."""

    def post_update(self, slots: object, query_lens: object, sampled: Sampled | None) -> None:
        pass


def pipeline(stages: int, *states: type[RequestStates]) -> type[FakePipeline]:
    class Pipeline(FakePipeline):
        pass

    Pipeline.stages, Pipeline.states_of = stages, states
    return Pipeline


def bench_of(*states: type[RequestStates]) -> EngineDriver:
    driver = EngineDriver(make_executor=pipeline(len(states), *states))
    driver.submit(make_request("r", prompt_of(7), ignore_eos=True, min_tokens=8))
    driver.run()
    return driver


def test_a_pipeline_gives_a_request_its_tokens():
    bench_of(RequestStates, RequestStates, RequestStates).assert_as_alone("r")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_without_the_update_spoils_the_text_from_the_second_token_on(stage: int):
    """Article fact 43."""
    states: list[type[RequestStates]] = [RequestStates] * 3
    right = bench_of(*states).tokens("r")
    states[stage] = Forgetful
    wrong = bench_of(*states).tokens("r")
    assert wrong[0] == right[0]
    assert wrong[1] != right[1]


@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", seeds(1, 6))
def test_walks_over_a_pipeline_give_every_request_its_own_tokens(
    seed: int, stages: int, is_filled: bool
):
    sizes = {"blocks": 14, "seqs": 5, "budget": 9, "model_len": 48}
    depth = stages if is_filled else 1
    walk = Walk(seed, make_executor=pipeline(stages), depth=depth, draws_ahead=False, **sizes)
    walk.run(300)
    executor = walk.driver.executor
    assert isinstance(executor, FakePipeline)
    assert executor.most_launched == depth
    assert walk.driver.core.stats().preemptions > 0


@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("seed", seeds(1, 6))
def test_so_do_walks_with_drafts(seed: int, stages: int, is_filled: bool):
    sizes: dict[str, Any] = {"blocks": 14, "seqs": 5, "budget": 16, "model_len": 48}
    depth = stages if is_filled else 1
    way = {"depth": depth, "draws_ahead": False, "speculative": DRAFTS}
    run_with_drafts(Walk(seed, make_executor=pipeline(stages), **way, **sizes))


def run_with_drafts(walk: Walk) -> None:
    """Until some were accepted; not all are."""
    for _ in range(8):
        walk.run(300)
        stats = walk.driver.core.stats()
        assert stats.spec_accepted_tokens < stats.spec_draft_tokens
        if stats.spec_accepted_tokens:
            return
    raise AssertionError("no draft was accepted")


def on_device(stages: int) -> type[FakePipeline]:
    made = pipeline(stages)
    made.is_last_on_device = True
    return made


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_so_do_walks_whose_last_stage_has_a_gpu(seed: int, stages: int):
    """Alone it runs a step ahead; of several it tells the others when it knows."""
    sizes = {"blocks": 14, "seqs": 5, "budget": 9, "model_len": 48}
    depth = max(2, stages)
    walk = Walk(
        seed, make_executor=on_device(stages), depth=depth, draws_ahead=stages == 1, **sizes
    )
    walk.run(300)
    executor = walk.driver.executor
    assert isinstance(executor, FakePipeline)
    assert executor.most_launched == depth
    device = executor.parts[-1].device
    assert device is not None
    assert device.done > 100


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("seed", seeds(1, 6))
def test_so_do_walks_with_drafts_whose_last_stage_has_a_gpu(seed: int, stages: int):
    """How many drafts stand is known to the host first; the device goes on from there."""
    sizes: dict[str, Any] = {"blocks": 14, "seqs": 5, "budget": 16, "model_len": 48}
    way = {"depth": 2, "draws_ahead": stages == 1, "speculative": DRAFTS}
    run_with_drafts(Walk(seed, make_executor=on_device(stages), **way, **sizes))


@dataclass(frozen=True)
class Closable(FakeParallel):
    """Its groups end when a step breaks."""

    def close(self) -> None:
        pass


class Breaking(FakeStage):
    """Its step breaks, once, where it is told so."""

    breaks = False

    def launch(self, *args: Any) -> Any:
        if self.breaks:
            self.breaks = False
            raise GroupError("rank 1 is gone")
        return super().launch(*args)


class Outliving:
    """The rank of a replica that outlives another."""

    def __init__(self) -> None:
        self.stage = Breaking(8, before=deque(), after=deque())
        self.stage.is_first = self.stage.is_last = True
        part = Part(layers=range(1), stage=0, stages=1)
        self.work = RankWork(
            cast("Any", self.stage),
            RequestStates(4, MOST_TOKENS),
            parallel=cast("Any", Closable(part, FakeFeedback(lambda: None))),
            resize=lambda _: True,
            outlives=True,
        )
        self.encoder = StepEncoder(4)
        self.steps = 0

    def launch(self, *sequences: ScheduledSequence, breaks: bool = False) -> RankStep:
        self.steps += 1
        self.stage.breaks = breaks
        return self.work.launch(self.encoder.encode(StepInput(self.steps, sequences)))

    def again(self) -> RankStep:
        resize = Resize(1, (0, 2), is_repair=True, is_again=True)
        return self.work.launch(encode_step(StepMessage(self.steps, (), resize=resize)))


def test_a_step_that_broke_is_answered_when_it_is_made_again():
    rank = Outliving()
    assert rank.launch(SOME, breaks=True).broke == "rank 1 is gone"
    assert rank.again().finish() is not None


def test_a_step_that_was_answered_and_is_made_again_is_not_answered_twice():
    """It broke on another rank of the replica."""
    rank = Outliving()
    answer = rank.launch(SOME).finish()
    assert answer is not None
    assert rank.stage.drafted == 1
    assert rank.again().finish() is None
    assert rank.stage.drafted == 1, "what follows was drafted"
    output = decode_output(answer)
    rank.encoder.drawn(1, output)
    token = output.samples[SOME.seq_id][0].token_id
    assert rank.launch(going(3, token)).finish() is not None


def test_a_step_behind_a_dummy_that_broke_breaks_too():
    rank = Outliving()
    assert rank.launch(breaks=True).broke
    assert rank.launch(SOME).broke == "rank 1 is gone", "its groups are closed"
    assert rank.again().finish() is not None


def test_a_step_behind_one_that_broke_ends_the_rank():
    """Another rank has answered that one, so it is not made again: this one lacks its tokens."""
    rank = Outliving()
    assert rank.launch(SOME, breaks=True).broke
    with pytest.raises(GroupError, match="step 2 came behind one that broke: rank 1 is gone"):
        rank.launch(going(3, 9))

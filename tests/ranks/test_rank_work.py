"""RankWork on every stage of a pipeline: whoever is late, each request has its own tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.kit.pipeline import FakePipeline
from tests.worker.engine_driver import DRAFTS, EngineDriver, make_request, prompt_of, seeds
from tests.worker.test_engine_walks import Walk
from xpyd_worker.kernels.post_update import Sampled
from xpyd_worker.ranks.compute.request_states import RequestStates


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
    walk = Walk(seed, make_executor=pipeline(stages), **way, **sizes)
    walk.run(300)
    stats = walk.driver.core.stats()
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens


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
    walk = Walk(seed, make_executor=on_device(stages), **way, **sizes)
    walk.run(300)
    stats = walk.driver.core.stats()
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens
